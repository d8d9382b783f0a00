"""Models as people have them in Python: an instance, a class, a function, and what no import path names."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.prune import l1_unstructured, remove

import fedloom as fl
from fedloom.data.federation import Federation
from fedloom.engine.setting import Setting
from fedloom.errors import ConfigError, RunDirError
from fedloom.models import Import
from fedloom.models.imported import InProcessModel, describe_model
from tests.commands import end, fork

SHORT: dict[str, Any] = {"rounds": 2, "local": {"lr": 0.1}}


class Net(nn.Module):
    """A class of this module, which an import path names."""

    def __init__(self, shape: tuple[int, ...], outputs: int, width: int = 8) -> None:
        super().__init__()
        inner = int(torch.tensor(shape).prod())
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(inner, width), nn.ReLU(), nn.Linear(width, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def make(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return Net(shape, outputs)


@pytest.fixture(scope="module")
def fed() -> Federation:
    return fl.partitions.iid(clients=3)(fl.load("digits"), seed=0)


def test_a_class_and_a_function_are_named_by_their_path(fed: Federation) -> None:
    results = [fl.simulate("fedavg", fed, model, **SHORT) for model in (Net, make, Import(path=f"{__name__}:Net"))]
    assert [type(r.job.setting.model) for r in results] == [Import] * 3
    assert results[0].table().equals(results[1].table())
    assert results[0].table().equals(results[2].table())


def test_what_no_path_names_is_held_and_gives_the_same(fed: Federation) -> None:
    class Inner(Net):
        pass

    want = fl.simulate("fedavg", fed, Net, **SHORT).table()
    for model in (Inner, lambda shape, outputs: Net(shape, outputs)):
        found = fl.simulate("fedavg", fed, model, **SHORT)
        assert isinstance(found.job.setting.model, InProcessModel)
        assert found.table().equals(want)


def test_an_instance_starts_from_its_weights_and_stays_as_it_is(fed: Federation) -> None:
    mine = Net((1, 8, 8), 10)
    before = [p.clone() for p in mine.parameters()]
    found = fl.simulate("fedavg", fed, mine, **SHORT)
    assert all(torch.equal(p, q) for p, q in zip(mine.parameters(), before, strict=True))
    start = found.job.setting.model.build((1, 8, 8), 10, 0)
    assert all(torch.equal(p, q) for p, q in zip(start.parameters(), before, strict=True))
    assert all(a is not b for a, b in zip(start.parameters(), mine.parameters(), strict=True))
    assert found.models.kinds() == ["global"]
    other = fl.simulate("fedavg", fed, Net((1, 8, 8), 10), **SHORT)
    assert not other.table().equals(found.table())


@pytest.mark.parametrize("how", ["instance", "class", "function"])
def test_a_model_in_double_precision_is_trained_in_single(how: str, fed: Federation) -> None:
    class Double(Net):
        def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
            super().__init__(shape, outputs)
            self.load_state_dict(start)
            self.double()

    start = Net((1, 8, 8), 10).state_dict()
    single, double = Net((1, 8, 8), 10), Double((1, 8, 8), 10)
    single.load_state_dict(start)
    given: Any = {"instance": double, "class": Double, "function": lambda shape, outputs: Double(shape, outputs)}[how]
    want = fl.simulate("fedavg", fed, single, **SHORT).table()
    assert fl.simulate("fedavg", fed, given, **SHORT).table().equals(want)
    torch.set_default_dtype(torch.float64)
    try:
        assert fl.simulate("fedavg", fed, given, **SHORT).table().equals(want)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_model_that_cannot_be_copied_is_refused(fed: Federation) -> None:
    pruned = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    l1_unstructured(pruned[1], "weight", 0.5)
    with pytest.raises(ConfigError, match=r"cannot be copied .* call torch.nn.utils.prune.remove"):
        fl.simulate("fedavg", fed, pruned, **SHORT)
    remove(pruned[1], "weight")
    assert fl.simulate("fedavg", fed, pruned, **SHORT).rounds == 2


def test_workers_that_fork_train_what_is_held(fed: Federation) -> None:
    model = lambda: Net((1, 8, 8), 10)  # noqa: E731
    one, two = (fl.simulate("ditto", fed, model, engine={"workers": k}, **SHORT) for k in (1, 2))
    assert one.table().equals(two.table())


def test_a_folder_knows_the_weights_and_the_source(fed: Federation, tmp_path: Path) -> None:
    mine = Net((1, 8, 8), 10)
    first = fl.simulate("fedavg", fed, mine, folder=tmp_path, **SHORT)
    again = fl.simulate("fedavg", fed, mine, folder=tmp_path, **SHORT)
    assert again.table().equals(first.table())
    with pytest.raises(RunDirError, match=r"model\.digest was"):
        fl.simulate("fedavg", fed, Net((1, 8, 8), 10), folder=tmp_path, **SHORT)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A comparison of clients in hand, by a module and a method that no path names, with its folder."""

    class Mine(fl.algorithms.FedAvg):
        pass

    g = torch.Generator().manual_seed(0)
    clients = [(torch.rand(30, 6, generator=g), torch.arange(30) % 3) for _ in range(3)]
    folder = tmp_path_factory.mktemp("compared") / "run"
    methods = ["ditto", Mine()]
    return fl.compare(
        methods, clients, mixed(), seeds=[0], folder=folder, progress_bar=False, compare_model="all", **SHORT
    )


def mixed() -> nn.Module:
    """A network with a buffer that no seed gives."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
            self.register_buffer("directions", torch.randn(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x @ self.directions)  # type: ignore[no-any-return]

    return Mixed()


@pytest.mark.parametrize("client", [None, 1])
def test_a_folder_of_a_module_in_hand_opens_with_another_of_its_kind(compared: Any, client: int | None) -> None:
    x, want = torch.rand(20, 6), compared["ditto", 0].models
    found = fl.open_run(compared.folder, mixed())["ditto", 0].models
    assert np.array_equal(found.predict_proba(x, client), want.predict_proba(x, client))
    assert np.array_equal(
        fl.open_run(compared.folder, mixed).predict(x, "ditto", client=client).scores, want.predict_proba(x, client)
    )


def test_a_run_of_a_folder_is_known_by_method_and_seed(compared: Any) -> None:
    opened = fl.open_run(compared.folder, mixed)
    for key in ("ditto", 0, ("ditto",)):
        with pytest.raises(ConfigError, match=r"a run is identified by its method and seed, as in \['ditto', 0\], got"):
            opened[key]  # type: ignore[index]
    x, y = torch.rand(20, 6), [0, 1, 2, 0] * 5
    (line, *_) = opened.evaluate((x, y), "ditto", kind="global")
    assert line.metrics() == opened["ditto", 0].models.model("global").score((x, y))


def test_a_folder_of_what_only_python_held_says_how_to_open_it(compared: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"the model 'Mixed' was passed as a Python object.* fl.open_run\(FOLDER, MODEL\)"
    ):
        fl.open_run(compared.folder)["ditto", 0].models.kinds()
    with pytest.raises(
        ConfigError,
        match=r"the method of 'Mine' \(.*Mine\) has no name or import path.* fl.compare with this folder",
    ):
        fl.open_run(compared.folder, mixed)["Mine", 0].models.kinds()
    with pytest.raises(ConfigError, match="model must be an nn.Module or a function that returns one, got 'mlp'"):
        fl.open_run(compared.folder, "mlp")  # type: ignore[arg-type]
    named = fl.compare(
        ["fedavg"],
        fl.load("digits"),
        Net,
        partition=fl.partitions.iid(clients=3),
        seeds=[0],
        folder=tmp_path / "run",
        progress_bar=False,
        task={"loss": lambda outputs, y: nn.functional.cross_entropy(outputs, y)},
        **SHORT,
    )
    with pytest.raises(ConfigError, match="specifies the models of its runs. Omit `model`"):
        fl.open_run(named.folder, mixed)
    with pytest.raises(ConfigError, match="path. In"):
        fl.open_run(named.folder)["fedavg", 0].models.kinds()


SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn.utils.prune import l1_unstructured, remove
import fedloom as fl

class Mine(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.last = nn.Linear(64, outputs)
    def forward(self, x):
        return self.last(x.flatten(1))

fed = fl.partitions.iid(clients=3)(fl.load("digits"), seed=0)
result = fl.simulate("fedavg", fed, Mine, rounds=2, folder=sys.argv[1])
print(result.status, len(result.seconds))
"""
CHANGED = """
class Mine(Mine):
    def forward(self, x):
        return self.last(x.flatten(1)) * 2

fl.simulate("fedavg", fed, Mine, rounds=2, folder=sys.argv[1])
"""


def in_a_fork(how: str, script: Path, text: str) -> tuple[int, str]:
    """Exit code of a script, or of a text that no file has, as the program of a fork, and what it says."""

    def program() -> None:
        sys.argv = [str(script), str(script.with_name("run"))]
        if how == "file":
            runpy.run_path(str(script), run_name="__main__")
        else:
            sys.modules["__main__"] = ModuleType("__main__")
            exec(text, sys.modules["__main__"].__dict__)

    said = script.with_name("said.txt")
    return end(fork(program, said)), said.read_text()


def in_a_fresh_interpreter(how: str, script: Path, text: str) -> tuple[int, str, str]:
    first = ["-c", text] if how == "text" else [str(script)]
    done = subprocess.run([sys.executable, *first, str(script.with_name("run"))], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("how", ["file", "text"])
def test_a_class_of_main_goes_on_in_another_process(how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert in_a_fork(how, script, SCRIPT) == (0, "done 2\n")
    script.write_text(SCRIPT + CHANGED)
    code, out, error = in_a_fresh_interpreter(how, script, SCRIPT + CHANGED)
    assert (code, out) == (1, "done 2\n"), error
    assert "model.digest was" in error


@pytest.mark.parametrize("given", [3, [Net], object(), b"mlp"])
def test_what_is_no_model_is_refused_with_a_sentence(given: Any, fed: Federation) -> None:
    with pytest.raises(
        ConfigError, match="must be a name, an nn.Module, a class or function that returns an nn.Module"
    ):
        fl.simulate("fedavg", fed, given, **SHORT)


def test_a_model_that_does_not_fit_is_refused_with_its_name(fed: Federation) -> None:
    with pytest.raises(ConfigError, match=r"model 'Net' must return \[b, 10\] for this data, got \[2, 7\]"):
        fl.simulate("fedavg", fed, Net((1, 8, 8), 7), **SHORT)
    with pytest.raises(ConfigError, match="model 'Net' fails on samples of shape"):
        fl.simulate("fedavg", fed, Net((5,), 10), **SHORT)
    with pytest.raises(ConfigError, match="passes shape and outputs if the class or function has parameters"):
        fl.simulate("fedavg", fed, lambda depth: Net((1, 8, 8), 10), **SHORT)
    with pytest.raises(ConfigError, match="must return an nn.Module with parameters, got int"):
        fl.simulate("fedavg", fed, lambda: 3, **SHORT)


class Doubles(Net):
    """A network that computes in float64, whatever the type of its layers is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double()).float()


class FollowsItsLayer(Net):
    """`Doubles` after the fix that its error names."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.body[1].weight.dtype))


def test_a_model_of_another_type_is_refused_with_a_fix_that_works(fed: Federation) -> None:
    with pytest.raises(ConfigError, match=r"as in x.to\(self.layer.weight.dtype\)"):
        fl.simulate("fedavg", fed, Doubles((1, 8, 8), 10).double(), **SHORT)
    fl.simulate("fedavg", fed, FollowsItsLayer((1, 8, 8), 10).double(), **SHORT)


def test_layers_that_normalise_by_the_batch_alone_are_refused_or_noted(fed: Federation) -> None:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), norm, nn.Linear(4, 10))
    with pytest.raises(
        ConfigError, match=r"'Sequential' fails on a single sample: layers without running statistics \(2\)"
    ):
        fl.simulate("fedavg", fed, flat, **SHORT)
    norms = nn.BatchNorm2d(2, track_running_stats=False), nn.BatchNorm1d(8)
    images = nn.Sequential(nn.Conv2d(1, 2, 7), norms[0], nn.Flatten(), norms[1], nn.Linear(8, 10))
    notes = [note for note in fl.simulate("fedavg", fed, images, **SHORT).notes if "statistics" in note]
    assert [re.split(":|, so ", note)[0] for note in notes] == [
        "some layers have no running statistics (1)",
        "statistics of normalization layers are not sent. To score a global model, clients compute the statistics on "
        "training samples with this model",
    ]


def test_a_class_of_specifications_is_its_default() -> None:
    assert Setting.create("fedavg", model=fl.models.MLP).model == fl.models.MLP()
    assert describe_model(fl.models.MLP()) is None


@pytest.mark.parametrize("raw", [np.zeros((4, 2)), (np.zeros((4, 2)), np.zeros(4)), fl.load("digits")])
def test_raw_data_are_to_be_partitioned(raw: Any) -> None:
    with pytest.raises(ConfigError, match=r"fed must be a Federation, got .*fl\.partitions\.iid\(clients=10\)"):
        fl.simulate("fedavg", raw)


def test_results_as_pandas_and_as_a_plot(fed: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fl.simulate("fedavg", fed, **SHORT)
    assert found.plot("accuracy").to_dict() == found.chart("accuracy").to_dict()
    with pytest.raises(
        ConfigError, match=r"'accuracyy' was not measured on the part 'test'; did you mean 'accuracy'\?"
    ):
        found.plot("accuracyy")
    with pytest.raises(ConfigError, match="unknown part 'testing'; did you mean 'test'"):
        found.plot("accuracy", "testing")
    if importlib.util.find_spec("pandas"):
        frame = found.to_pandas()
        assert list(frame.columns) == found.table().column_names
        assert len(frame) == found.table().num_rows
    monkeypatch.setattr("fedloom.formats.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="needs pandas. Run pip install pandas"):
        found.to_pandas()


def test_lazy_parameters_are_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"lazy parameters \(0.weight, 0.bias\). Call the model on a sample first"):
        describe_model(nn.Sequential(nn.LazyLinear(2)))


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(64, 10, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.flatten(1).to(self.w.dtype) @ self.w).real


class Cut(nn.Linear):
    """Outputs without a gradient, or only when it is not trained."""

    def __init__(self, cuts: str) -> None:
        super().__init__(64, 10)
        self.cuts = cuts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x.flatten(1))
        if self.cuts == "round":
            return found.round().long()
        return found.detach() if self.cuts == "always" or not self.training else found


class Pair(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.flatten(1)), 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")  # is deprecated
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Turned, r"has complex parameters \(w\). Use real and imaginary parts"),
        (Turned(), r"has complex parameters \(w\)"),
        (Cut("always"), "model 'Cut' returns outputs without a gradient in any parameter, for example after detach"),
        (lambda: Cut("round"), "returns outputs without a gradient in any parameter"),
        (nn.Linear(64, 10, device="meta"), r"model 'Linear' has no weights \(device meta\)"),
        (
            Pair(64, 10),
            r"model 'Pair' must return \[b, 10\] for this data, got tuple for b = 2. "
            "Return only the tensor of the outputs",
        ),
        (lambda: torch.jit.trace(nn.Linear(64, 10), torch.zeros(2, 64)), "is TorchScript, which fedloom cannot train"),
    ],
)
def test_parameters_and_outputs_of_other_kinds_are_a_sentence(given: Any, said: str, fed: Federation) -> None:
    with pytest.raises(ConfigError, match=said):
        fl.simulate("fedavg", fed, given, rounds=1)


def test_a_model_may_leave_out_gradients_where_it_is_not_trained(fed: Federation) -> None:
    assert fl.simulate("fedavg", fed, Cut("in evaluation"), **SHORT).status == "done"
    with torch.inference_mode():
        assert Import(path=f"{__name__}:Net").build((1, 8, 8), 10)
