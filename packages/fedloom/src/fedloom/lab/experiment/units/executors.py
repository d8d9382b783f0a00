"""Executors: external systems that compute units of work, such as Dask, Slurm with submitit, or a process pool."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from fedloom.errors import ConfigError, FedloomError
from fedloom.hints import unknown_name_error
from fedloom.lab.experiment.units.travel import PackedExperiment, UnitReply, compute_unit

POLL_SECONDS = 0.05
"""Number of seconds between checks for finished calls."""
MAX_TRIES = 3
"""Maximum number of times that a unit is submitted if workers die while computing it."""


class Future(Protocol):
    """Object that represents a call submitted to an executor."""

    def done(self) -> bool:
        """Return True if the call has ended."""
        ...

    def result(self) -> Any:
        """Return the result of a finished call, or raise the error that the call raised."""
        ...


class Executor(Protocol):
    """Object that performs calls in other processes, such as an executor of `concurrent.futures`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future:
        """Submit a call and return an object that represents it."""
        ...


def _process_executor(count: str) -> Any:
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    pool = ProcessPoolExecutor(_parse_number(count, "processes"), mp_context=get_context("spawn"))
    atexit.register(pool.shutdown)  # the pool uses modules that the interpreter would otherwise unload first
    return pool


def _loky_executor(count: str) -> Any:
    return _import_executor_library("loky", "loky").get_reusable_executor(max_workers=_parse_number(count, "loky"))


def _dask_executor(address: str) -> Any:
    if not address:
        raise ConfigError("--executor dask needs the address of a scheduler, for example dask:tcp://10.0.0.1:8786")
    return _import_executor_library("distributed", "distributed").Client(address).get_executor()


def _slurm_executor(options: str) -> Any:
    executor = _import_executor_library("submitit", "submitit").AutoExecutor(folder="runs/slurm")
    executor.update_parameters(**_parse_options(options))
    return executor


EXECUTOR_KINDS: Mapping[str, Callable[[str], Any]] = {
    "processes": _process_executor,
    "loky": _loky_executor,
    "dask": _dask_executor,
    "slurm": _slurm_executor,
}
"""Functions that open an executor, keyed by the executor's name. Each function receives the text after the colon in
``--executor NAME:TEXT``."""


def open_executor(name: str) -> Executor:
    """Open and return the executor that a text describes.

    Args:
        name: ``processes:N``, ``loky:N``, ``dask:ADDRESS``, or ``slurm:KEY=VALUE,...`` with submitit's parameters.

    Raises:
        ConfigError: the name is unknown, or a required library is not installed.
    """
    kind, _, text = name.partition(":")
    if kind not in EXECUTOR_KINDS:
        raise unknown_name_error("executor", kind, EXECUTOR_KINDS, "--executor")
    return EXECUTOR_KINDS[kind](text)  # type: ignore[no-any-return]


def check_executor(executor: object) -> None:
    """Raise an error if an object has no ``submit`` method.

    Raises:
        ConfigError: the object has no ``submit`` method. The message explains what an executor is.
    """
    if not callable(getattr(executor, "submit", None)):
        raise ConfigError(
            "executor must have a method submit(function, *arguments), like the executors of "
            f"concurrent.futures, got {executor!r:.80}"
        )


def compute_units(
    executor: Executor,
    luggage: PackedExperiment,
    units: Sequence[str],
    interrupted: Callable[[], bool],
    compute: Callable[..., bytes] = compute_unit,
) -> Iterator[tuple[int, UnitReply]]:
    """Compute units of work on an executor, and yield the replies.

    Args:
        executor: executor that computes the units.
        luggage: the packed experiment.
        units: a text that identifies each unit.
        interrupted: function that is called repeatedly to check whether the user has stopped the work. After it has
            returned True, no more replies are collected.
        compute: function that the executor calls with (text of the experiment, unit[, data]). It returns the bytes of a
            `UnitReply` and must be public.

    Yields:
        The index and the reply of each unit as soon as the unit ends.

    Raises:
        FedloomError: a unit failed, or the executor lost a unit `MAX_TRIES` times.
    """
    calls, lost, wanting = dict[Any, tuple[int, bool]](), [0] * len(units), _WorkersWithoutData()
    for k in range(len(units)):
        calls[_submit_unit(executor, compute, luggage, units[k])] = k, False
    while calls and not interrupted():
        ended = [call for call in calls if call.done()]
        for call in ended:
            k, had_data = calls.pop(call)
            try:
                reply = UnitReply.decode(call.result())
            except FedloomError:
                raise
            except Exception as error:  # the executor raises its own type of error if a worker has died
                lost[k] += 1
                if lost[k] == MAX_TRIES:
                    raise _lost_unit_error(units[k], error) from error
                reply = UnitReply({}, interrupted=True)
            if had_data:
                wanting.record_reply(reply.worker)
            if not (reply.wants_data or reply.interrupted):
                yield k, reply
                continue
            sends = reply.wants_data and wanting.sends(reply.worker)
            data = [luggage.data] if sends and luggage.data is not None else []
            calls[_submit_unit(executor, compute, luggage, units[k], *data)] = k, sends
        if not ended:
            time.sleep(POLL_SECONDS)
    for call in calls:
        getattr(call, "cancel", lambda: None)()


class _WorkersWithoutData:
    """Record of the workers that do not have the data. One unit is sent with the data for each such worker."""

    def __init__(self) -> None:
        self._lacking, self._having, self._under_way = set[str](), set[str](), 0

    def sends(self, worker: str) -> bool:
        """Return True if the next unit must be sent together with the data, because its worker does not have them."""
        self._lacking.add(worker)
        self._lacking -= self._having
        sends = self._under_way < len(self._lacking)
        self._under_way += sends
        return sends

    def record_reply(self, worker: str) -> None:
        """Record that a unit sent with its data was returned by a worker or lost."""
        self._having.add(worker)
        self._lacking -= self._having
        self._under_way -= 1


def _submit_unit(
    executor: Executor, compute: Callable[..., bytes], luggage: PackedExperiment, unit: str, *data: bytes
) -> Future:
    try:
        return executor.submit(compute, luggage.text, unit, *data)
    except FedloomError:
        raise
    except Exception as error:
        raise _lost_unit_error(unit, error) from error


def _lost_unit_error(unit: str, error: Exception) -> FedloomError:
    what = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return FedloomError(
        f"the executor lost {unit:.120}: {what}. Finished runs are saved. Run the same command again to continue"
    )


def _import_executor_library(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise ConfigError(f"this executor needs {package}: pip install {package}") from None


def _parse_number(text: str, kind: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise ConfigError(f"--executor {kind} needs a number of workers, for example {kind}:4, got {text!r}")
    return int(text)


def _parse_options(text: str) -> dict[str, int | str]:
    """Parse options of the form ``key=value,key=value``, converting integers, and return a dictionary."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    if wrong := [key for key, sign, _ in pairs if not sign]:
        raise ConfigError(f"--executor slurm needs KEY=VALUE,..., for example slurm:timeout_min=60, got {wrong[0]!r}")
    return {key: int(value) if value.isdecimal() else value for key, _, value in pairs}
