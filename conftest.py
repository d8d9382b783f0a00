"""One thread per process, as in simulation; the same hypothesis examples on every CI run; no waiting for disks."""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import os
import random  # noqa: TID251 (the library must not use it, and tests that do get a seed)
import re
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import typer.testing
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, Phase, register_random, settings

import tests  # noqa: F401 (the namespace of all packages; pytest alone would make one of the first folder)

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # fresh interpreters of the tests find compiled modules
sys.dont_write_bytecode = False
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

_MEMORY = Path("/dev/shm")
if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))  # a rename or cut costs a disk milliseconds

if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers share that of their controller
    _CACHE = tempfile.TemporaryDirectory(prefix="fedloom-cache-")
    os.environ["FEDLOOM_CACHE"] = _CACHE.name

settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, database=None)
settings.register_profile(
    "mutants",
    settings.get_profile("ci"),
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


gc.disable()


class OnlyExamples:
    """Files without an example are not imported and looked through for doctests."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
        found = yield
        if b">>>" in file_path.read_bytes():
            return found
        return [one for one in found if not isinstance(one, DoctestModule)]


class OfTorch:
    """The global CPU generator of torch, which is imported only if a test imports it (then it begins at a constant)."""

    def seed(self, seed: int) -> None:
        if "torch" in sys.modules:  # torch.manual_seed would also write down the call stack for GPUs that start later
            sys.modules["torch"].default_generator.manual_seed(seed)

    def getstate(self) -> object:
        return sys.modules["torch"].default_generator.get_state() if "torch" in sys.modules else None

    def setstate(self, state: object) -> None:
        if state is not None:
            sys.modules["torch"].default_generator.set_state(state)


class Seeded:
    """Global generators of torch, numpy and Python, seeded with the name of each test, module and shared fixture.

    A model that a test makes without a seed is the same in every run, whatever other tests the process ran before.
    """

    def __init__(self) -> None:
        self.torch = OfTorch()
        register_random(self.torch)  # as Hypothesis does with the other two, for every example

    def seed(self, name: str) -> None:
        number = zlib.crc32(name.encode())
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002
        self.torch.seed(number)

    @pytest.hookimpl(tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> None:
        self.seed(collector.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.seed(item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before = random.getstate(), np.random.get_state(), self.torch.getstate()  # noqa: NPY002
        self.seed(f"{request.node.nodeid} {fixturedef.argname}")
        try:
            return (yield)
        finally:  # the first test that asks for the fixture draws what the others draw
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002
            self.torch.setstate(before[2])


class Attacks:
    """Prints a table of what the tests marked `attack` tried, where they were asked for (``pytest -m attack``).

    A test counts as one try, or as many as its property ``tries``. A row that has fewer than it must have is ``short``.
    """

    WANTED: ClassVar[dict[str, int]] = {
        "forged replies": 29,
        "uploads within bounds": 20,
        "bad sites under secure aggregation": 14,
        "a dishonest server": 5,
        "a server that combines sums": 15,
        "a rehearsal": 22,
        "messages beyond memory": 13,
        "hostile files": 55,
        "hostile directories": 890,
        "flipped bits": 200,
        "two runs on one directory": 9,
        "protections taken out": 138,
    }
    """Rows, with the number of tries that each must have at least, slow tests included."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            item.user_properties += [("attack", mark.args[0]) for mark in item.iter_markers("attack")]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        if "attack" not in config.option.markexpr:
            return
        tried, fell = Counter[str](), Counter[str]()
        for outcome in ("passed", "failed", "error"):
            for report in terminalreporter.stats.get(outcome, ()):
                properties = dict(report.user_properties)
                if row := properties.get("attack"):
                    tried[row] += int(properties.get("tries", 1))
                    fell[row] += outcome != "passed"
        terminalreporter.section("attacks")
        for row, wanted in self.WANTED.items():
            held = f"{tried[row] - fell[row]}/{tried[row]} held" if tried[row] else "not tried"
            terminalreporter.line(f"{row:<36} {held:>16}   wanted {wanted}{' (short)' * (tried[row] < wanted)}")
        assert {*tried} <= {*self.WANTED}


PACKAGES = {
    "fedloom_clinic": {"cox", "glm", "init", "left-out", "references"},
    "fedloom_sites": {"deploy"},
    "fedloom_studies": {"appendices", "map", "reproduce"},
}
"""Packages beside the library, with the commands and analyses that cases of tests name."""


class Hidden:
    """Packages that a run of tests does not find, and their entry points (``pytest --alone fedloom``)."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        real = importlib.metadata.entry_points
        importlib.metadata.entry_points = lambda **choice: (
            importlib.metadata.EntryPoints(
                entry for entry in real(**choice) if entry.module.partition(".")[0] not in names
            )
            if choice
            else real()
        )
        sys.modules |= dict.fromkeys(names)  # type: ignore[arg-type]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            needed = {name for mark in item.iter_markers("needs") for name in mark.args}
            words = {*re.findall(r"[\w-]+", repr(getattr(item, "callspec", item).__dict__.get("params", "")))}
            words -= {"init"} if "deploy" in words else set()
            needed |= {name for name, commands in PACKAGES.items() if commands & words}
            if hidden := needed & {*self.names}:
                item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(sorted(hidden))}"))


def pytest_addoption(parser: pytest.Parser) -> None:
    own = ["fedloom", *PACKAGES]
    parser.addoption("--alone", choices=own, help="hide every package but the library and this one")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.alone:
        hidden = Hidden([name for name in PACKAGES if name != config.option.alone])
        config.pluginmanager.register(hidden)
    config.pluginmanager.register(OnlyExamples())  # for src too, where a conftest of tests is not asked
    config.pluginmanager.register(Attacks())
    config.pluginmanager.register(Seeded())


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the garbage collector need not visit it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _no_repeated_work() -> Iterator[None]:
    """Files are not forced to the disk, commands are built once, and statsmodels collects no garbage.

    No test cuts the power, and the order of what is written is watched above `os.fsync`. Typer's runner builds all
    commands at every call. `multipletests` collects garbage at every call, which takes seconds late in a long run.
    """
    collect = gc.collect

    def collect_for_others(generation: int = 2) -> int:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return 0 if caller.startswith("statsmodels.") else collect(generation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _fd: None)
        patch.setattr(gc, "collect", collect_for_others)
        patch.setattr(typer.testing, "_get_command", cache(typer.testing._get_command))
        yield


@pytest.fixture(params=["inference_mode", "no_grad", "float64", "threads", "device", "autocast", "products"])
def set_in_torch(request: pytest.FixtureRequest) -> Callable[[], AbstractContextManager[None]]:
    """What a caller has set in PyTorch, for a while; at its end it must be as the caller left it."""
    import torch

    chosen = request.param

    @contextmanager
    def setting() -> Iterator[None]:
        dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
        products = torch.get_float32_matmul_precision()
        choices = {
            "inference_mode": torch.inference_mode, "no_grad": torch.no_grad, "device": lambda: torch.device("meta"),
            "autocast": lambda: torch.autocast("cpu"),
        }  # fmt: skip
        try:
            with choices.get(chosen, nullcontext)():
                torch.set_default_dtype(torch.float64 if chosen == "float64" else dtype)
                torch.set_num_threads(2 if chosen == "threads" else threads)
                torch.set_float32_matmul_precision("medium" if chosen == "products" else products)
                before = _of_torch()
                yield
                assert _of_torch() == before
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(products)

    return setting


def _of_torch() -> tuple[object, ...]:
    import torch

    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    return (
        *modes,
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_default_device(),
    )


@pytest.fixture(autouse=True)
def _log_levels_last_one_test() -> Iterator[None]:
    """Set the levels of loggers again that a test changed: a program ends where it silences a log, pytest does not."""
    before = _log_levels()
    yield
    for log, level in _log_levels().items():
        if level != before.get(log, level):
            log.setLevel(before[log])


def _log_levels() -> dict[logging.Logger, int]:
    logs = (logging.root, *logging.root.manager.loggerDict.values())
    return {log: log.level for log in logs if isinstance(log, logging.Logger)}


SEEN_PACKAGES = dict[str, object]()
"""Packages of fedloom-sites by name, and the number of all modules, when they were last looked through."""


@pytest.fixture(autouse=True)
def _packages_know_their_modules() -> None:
    """Set modules of fedloom-sites as attributes of their packages again, for patches by dotted name.

    Flower's programs drop the packages of an app from `sys.modules`, so a package can be imported anew without them.
    The modules are looked through only after a change: there are thousands.
    """
    if {"": len(sys.modules)} | {name: sys.modules.get(name) for name in SEEN_PACKAGES if name} == SEEN_PACKAGES:
        return
    SEEN_PACKAGES.clear()
    for name in [name for name in sys.modules if name.startswith("fedloom_sites.")]:
        package, _, module = name.rpartition(".")
        if package in sys.modules and module not in vars(sys.modules[package]):
            setattr(sys.modules[package], module, sys.modules[name])
        SEEN_PACKAGES[package] = sys.modules.get(package)
    SEEN_PACKAGES[""] = len(sys.modules)
