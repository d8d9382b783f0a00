"""Parts of user code in an experiment file: every kind by import path, written down so that it can be read again."""

from __future__ import annotations

import linecache
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import pytest
import tomli_w
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from fedloom import load, metrics, open_run, partitions
from fedloom.algorithms import Delta, FedAvg, Kept, Mean, Model
from fedloom.choose import Uniform, UniformWeigher
from fedloom.data import Source
from fedloom.data.partitions.deal import Dealt
from fedloom.data.partitions.pools import Draw
from fedloom.engine.result import Result
from fedloom.engine.simulate import simulate
from fedloom.errors import CodeError, ConfigError, FedloomError, RunDirError
from fedloom.lab.cli import app
from fedloom.lab.experiment import Experiment, Plan, json_schema, parse
from fedloom.lab.report import result_table
from fedloom.lab.tune import Tuning
from fedloom.local import descend
from fedloom.models import Import
from fedloom.rows.aggregators import Median
from fedloom.rows.attacks import SignFlip
from fedloom.rows.channels import Clip
from fedloom.testing import check_algorithm

MODULE = "own_parts_of_a_user"
EVERYTHING = f"""
name = "own"
rounds = 2
[data]
source = "digits"
[partition]
kind = "{MODULE}:Stripes"
clients = 6
offset = 1
[model]
kind = "{MODULE}:small"
width = 5
[sampler]
kind = "{MODULE}:First"
clients = 4
[aggregation_weights]
kind = "{MODULE}:Squares"
[attack]
kind = "{MODULE}:Zeros"
fraction = 0.2
[[method]]
algorithm = "{MODULE}:Pulled"
mu = 0.25
aggregator = {{ kind = "{MODULE}:Middle" }}
[[method]]
algorithm = "fedavg"
upload_transform = {{ kind = "{MODULE}:Halved", bound = 3.0 }}
[[method]]
algorithm = "fedmid"
regulariser = {{ kind = "{MODULE}:Scaled", c = 0.2 }}
"""


FEW = """
name = "few"
rounds = 1
seeds = [0]
[data]
source = "digits"
[partition]
kind = "iid"
clients = 3
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's module in the current directory, imported anew by every test."""
    place = tmp_path / f"{MODULE}.py"
    place.write_text(Path(__file__).with_name("own_parts.py").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return place


def document(text: str = EVERYTHING, **changes: Any) -> dict[str, Any]:
    return tomllib.loads(text) | changes


def run(experiment: Experiment, **more: Any) -> list[Result]:
    fed = experiment.partition(experiment.source.load())
    return [simulate(method.setting.with_(seed=0), fed, **more) for method in experiment.methods]


def test_every_kind_of_part_runs_by_its_import_path() -> None:
    experiment = parse(document())
    results = run(experiment)
    assert [m.label for m in experiment.methods] == ["Pulled", "fedavg", "fedmid"]
    assert [r.stop.name for r in results] == ["DONE"] * 3
    job: Any = results[0].job
    named = (
        job.algorithm,
        job.setting.sampler,
        job.setting.aggregation_weights,
        job.setting.aggregator,
        job.setting.attack,
    )
    assert [type(v).__name__ for v in named] == ["Pulled", "First", "Squares", "Middle", "Zeros"]
    assert job.algorithm.mu == 0.25
    assert job.fed.partition["kind"] == f"{MODULE}:Stripes"
    assert job.oracle.layout.shapes[0][0] == 5


def test_what_was_resolved_reads_as_the_same_experiment(tmp_path: Path) -> None:
    experiment = parse(document())
    written = tomllib.loads(tomli_w.dumps(experiment.settings()))
    assert parse(written).settings() == experiment.settings()
    assert written["method"][2]["regulariser"] == {"kind": f"{MODULE}:Scaled", "c": 0.2}
    shorter = parse(document(method=[written["method"][2]]))
    Plan(shorter, tmp_path / "out").run(page=False)
    assert [o.status for o in Plan(shorter, tmp_path / "out").run(page=False)] == ["done"]


def test_a_part_whose_code_has_changed_does_not_go_on_from_another(own_module: Path, tmp_path: Path) -> None:
    text = document(method=[{"algorithm": "fedavg"}])
    run(parse(text), folder=tmp_path / "out")
    run(parse(text), folder=tmp_path / "out")
    own_module.write_text(own_module.read_text().replace("** 2, state", "** 3, state"))
    del sys.modules[MODULE]
    linecache.clearcache()
    with pytest.raises(RunDirError):
        run(parse(text), folder=tmp_path / "out")


OWN_TASK = f"""
name = "own"
rounds = 2
[data]
source = "digits"
[partition]
kind = "iid"
clients = 4
max_train_per_client = 60
validation = 0.25
[task]
loss = "{MODULE}:squared"
metrics = ["{MODULE}:margin", "balanced_accuracy", "{MODULE}:wrong"]
class_weights = {{ 3 = 2.0 }}
[local]
lr = 0.01
optimizer = "{MODULE}:Signs"
optimizer_options = {{ beta = 0.5 }}
optimizer_state = "persistent"
[[method]]
algorithm = "ditto"
"""


def test_an_own_task_and_optimiser_are_trained_scored_written_and_opened(tmp_path: Path) -> None:
    experiment = parse(document(OWN_TASK))
    written = tomllib.loads(tomli_w.dumps(experiment.settings()))
    assert written["task"]["loss"] == f"{MODULE}:squared"
    assert parse(written).settings() == experiment.settings()
    Plan(experiment, tmp_path / "out").run(page=True)
    run = next(iter(open_run(tmp_path / "out")))
    data = experiment.source.load()
    fed = experiment.partition(data, 0)
    held = run.models.personal["0"]
    x, y = fed.fetch(fed.indices("test", 0)), fed.targets(fed.indices("test", 0))
    own: Any = sys.modules[MODULE]
    output = held(x).detach().double()
    for name in ("margin", "wrong"):
        assert run.final("personal", name)[0] == pytest.approx(getattr(own, name)(output, y), abs=1e-6)
    assert run.final("personal", "loss")[0] == pytest.approx(float(own.squared(output, y)), rel=1e-5)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Balanced accuracy" in page
    assert result_table(tmp_path / "out")["balanced_accuracy"]
    again = run.models.model("personal", "0").score(data)
    assert {"margin", "wrong", "balanced_accuracy"} <= set(again)


def test_a_report_rates_own_metrics_in_their_own_direction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Plan(parse(document(OWN_TASK)), tmp_path / "out").run(page=False)
    found = next(iter(open_run(tmp_path / "out")))
    monkeypatch.setattr(metrics, "USER_METRICS", {})  # as in another process
    assert not metrics.metric("wrong").rated
    table = result_table(tmp_path / "out")
    table = table.filter(pc.equal(table["model"], "personal"))
    assert table["wrong_worst10"][0].as_py() == pytest.approx(float(found.final("personal", "wrong").max()))
    assert table["margin_worst10"][0].as_py() == pytest.approx(float(found.final("personal", "margin").min()))
    for name, higher in (("wrong", False), ("margin", True)):
        assert (metrics.metric(name).higher_is_better, metrics.metric(name).rated) == (higher, True)


def test_code_of_an_own_task_that_has_changed_does_not_go_on(own_module: Path, tmp_path: Path) -> None:
    text = document(OWN_TASK)
    run(parse(text), folder=tmp_path / "out")
    run(parse(text), folder=tmp_path / "out")
    own_module.write_text(own_module.read_text().replace("target[:, None], -torch.inf", "target[:, None], -1e9"))
    del sys.modules[MODULE]
    linecache.clearcache()
    with pytest.raises(RunDirError):
        run(parse(text), folder=tmp_path / "out")


def test_settings_are_chosen_by_an_own_metric_in_its_own_direction(tmp_path: Path) -> None:
    text = document(OWN_TASK, tune={"trials": 2, "space": {"all": {"local.lr": [0.01, 0.02]}}})
    for metric, higher in (("wrong", False), ("margin", True)):
        text["tune"]["metric"] = metric
        tuning = Tuning(text, "own.toml", tmp_path / metric)
        assert [study.goal.higher_is_better for study in tuning.studies] == [higher]
    text["tune"]["metric"] = "f3"
    with pytest.raises(
        ConfigError, match="'f3', but for these data it must be one of: .*balanced_accuracy.*margin, wrong"
    ):
        Tuning(text, "own.toml", tmp_path / "none")


def test_a_user_s_method_obeys_the_laws_and_has_a_card() -> None:
    found = parse(document()).methods[0].setting.method
    check_algorithm(found)
    shown = CliRunner().invoke(app, ["describe", f"{MODULE}:Pulled"])
    assert shown.exit_code == 0, shown.output
    assert "mu = 0.5 (>= 0): weight of the pull" in shown.output


PLACES = {
    "algorithm": lambda path: {"method": [{"algorithm": path}]},
    "partition": lambda path: {"partition": {"kind": path}},
    "sampler": lambda path: {"sampler": {"kind": path}},
    "aggregation_weights": lambda path: {"aggregation_weights": {"kind": path}},
    "aggregator": lambda path: {"method": [{"algorithm": "fedavg", "aggregator": {"kind": path}}]},
    "upload_transform": lambda path: {"method": [{"algorithm": "fedavg", "upload_transform": {"kind": path}}]},
    "attack": lambda path: {"attack": {"kind": path}},
    "model": lambda path: {"model": {"kind": path}},
    "data set": lambda path: {"data": {"source": path}},
    "prox": lambda path: {"method": [{"algorithm": "fedmid", "regulariser": {"kind": path}}]},
}


@pytest.mark.parametrize("what", PLACES)
def test_errors_are_the_same_everywhere(what: str, tmp_path: Path) -> None:
    def refused(path: str) -> str:
        with pytest.raises(FedloomError) as caught:
            parse(document(**PLACES[what](path)), "own.toml")
        assert isinstance(caught.value, ConfigError)
        return str(caught.value)

    missing = refused("no_such_module_here:Thing")
    assert "cannot import 'no_such_module_here'" in missing
    assert "PYTHONPATH" in missing
    assert what in missing
    assert "own.toml" in missing
    (tmp_path / "broken_one.py").write_text("1 / 0\n")
    assert "ZeroDivisionError" in refused("broken_one:Thing")
    assert "did you mean 'Pulled'" in refused(f"{MODULE}:Puled")
    if what == "model":
        return
    wrong = refused("torch:Tensor")
    assert "must be a subclass of fedloom." in wrong
    assert "got the class Tensor" in wrong
    assert "got a function" in refused(f"{MODULE}:small")


def test_a_method_that_lacks_functions_is_refused_with_their_names() -> None:
    with pytest.raises(ConfigError, match="lacks client, server"):
        parse(document(method=[{"algorithm": f"{MODULE}:Lacking"}]))


def test_options_of_a_user_s_class_are_checked_like_any() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'mu'"):
        parse(document(method=[{"algorithm": f"{MODULE}:Pulled", "mus": 1}]))
    with pytest.raises(ConfigError, match=r"weight of the pull"):
        parse(document(method=[{"algorithm": f"{MODULE}:Pulled", "mu": -1.0}]))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ValueError('no')", r"\(ValueError: no \(broken_parts.py, line 1\)\)\. Correct the code"),
        ("f(:", r"SyntaxError: .*\(broken_parts.py, line 1\)\)\. Correct the code"),
        ("import no_such_package_here", r"line 1\)\)\. Install 'no_such_package_here'"),
        ("import sys\nsys.exit(0)", r"\(SystemExit: 0 \(broken_parts.py, line 2\)\)\. Correct the code"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_its_line(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_parts.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        parse(document(task={"metrics": ["broken_parts:gap"]}))


def test_code_is_not_touched_unless_it_is_named(own_module: Path) -> None:
    own_module.write_text("raise SystemExit('executed')")
    parse(document(EVERYTHING.split("[partition]")[0] + '[[method]]\nalgorithm = "fedavg"\n'))
    assert MODULE not in sys.modules


def test_an_editor_accepts_an_import_path() -> None:
    assert json_schema().count("import path of a class of user code") >= 8


class _Plain(NamedTuple):
    dw: Tensor


class _Twice(NamedTuple):
    dw: Annotated[Tensor, Mean(primary=True)]
    dv: Annotated[Tensor, Mean(primary=True)]


class _NoModel(NamedTuple):
    dw: Annotated[Tensor, Mean()]


class _Elsewhere(NamedTuple):
    dw: Annotated[Tensor, Mean(base="down.xs", primary=True)]


class _Base(NamedTuple):
    dw: Annotated[Tensor, Mean(base="server.x", primary=True)]


class _Weighted(NamedTuple):
    w: Annotated[Tensor, Kept(primary=True, weight="count")]


class _Unsaid(FedAvg):
    def client(self, down, rows, work):  # type: ignore[no-untyped-def]
        return super().client(down, rows, work)

    def down(self, server, kept, ctx):  # type: ignore[no-untyped-def]
        return super().down(server, kept, ctx)


@pytest.mark.parametrize(
    ("function", "said", "answer"),
    [
        ("client", "Any", r"client must be annotated .* got 'Any'"),
        ("client", "tuple[dict, dict]", "tuple\\[Up, Client\\]"),
        ("client", "tuple[Nowhere, Nothing]", "'Nowhere' is not defined"),
        ("down", "Tensor", r"down must be annotated"),
        (
            "client",
            "tuple[_Plain, None]",
            r"'dw' must declare exactly once how it is sent, as Annotated.* it has 0 such declarations",
        ),
        ("client", "tuple[_Twice, None]", "must carry the model.* got dw and dv"),
        ("client", "tuple[_NoModel, None]", "must carry the model.* got none"),
        ("client", "tuple[_Elsewhere, None]", "base of 'dw' is 'down.xs'; did you mean 'x'"),
        ("client", "tuple[_Base, None]", "must be 'zero', 'down.FIELD' or 'rows.FIELD', got 'server.x'"),
        ("client", "tuple[_Weighted, None]", "weight of 'w' is 'count'"),
    ],
)
def test_a_method_that_does_not_say_what_it_sends_is_refused(function: str, said: str, answer: str) -> None:
    def body(*_: Any) -> Any:
        raise AssertionError("called")

    body.__annotations__["return"] = said
    method = type("Own", (FedAvg,), {function: body, "__module__": __name__})()
    with pytest.raises(ConfigError, match=answer) as caught:
        simulate(method, partitions.iid(clients=3)(load("digits")), rounds=1)
    assert "Own" in str(caught.value)


def test_a_function_that_says_nothing_returns_what_the_one_it_replaces_does() -> None:
    fed = partitions.iid(clients=3)(load("digits"))
    own, plain = (simulate(a, fed, rounds=1).models.rows("global") for a in (_Unsaid(), FedAvg()))
    assert torch.equal(own, plain)


def _broken(base: Any, **functions: Any) -> Any:
    """A part of the user whose functions do something else."""
    return type("Broken", (base,), {**functions, "__module__": __name__})()


def _shorter(self, down, rows, work):  # type: ignore[no-untyped-def]
    up, new = FedAvg.client(self, down, rows, work)
    return up._replace(dw=up.dw[:, :5]), new


def _fails(*_):  # type: ignore[no-untyped-def]
    raise KeyError("oops")


FAULTS = {
    "sampler outside": (
        {"sampler": (Uniform, {"apply": lambda *_: (torch.tensor([0, 99]), None)})},
        "numbers from 0 to 2",
    ),
    "sampler of none": ({"sampler": (Uniform, {"apply": lambda *_: (torch.tensor([]), None)})}, "nonempty"),
    "sampler fails": ({"sampler": (Uniform, {"apply": _fails})}, r"KeyError: 'oops' \(test_user_code.py, line \d+\)"),
    "weights of a shape": (
        {"aggregation_weights": (UniformWeigher, {"apply": lambda *_: (torch.ones(3), None)})},
        r"\[3, 1\]",
    ),
    "negative weights": (
        {"aggregation_weights": (UniformWeigher, {"apply": lambda *_: (-torch.ones(3, 1), None)})},
        "minimum -1.0",
    ),
    "aggregate of rows": ({"aggregator": (Median, {"apply": lambda _s, state, rows, *_: (rows, state)})}, "one vector"),
    "aggregate of none": ({"aggregator": (Median, {"apply": lambda _s, state, *_: ({}, state)})}, r"got \{\}"),
    "attack of a shape": ({"attack": (SignFlip, {"forge": lambda *_: torch.zeros(3)})}, "`forge` must return models"),
    "channel fails": ({"upload_transform": (Clip, {"apply": _fails})}, "channel Broken failed in round 1: KeyError"),
    "upload of a shape": ({"algorithm": (FedAvg, {"client": _shorter})}, r"'dw' must be \[3, 650\], got \[3, 5\]"),
    "no upload": ({"algorithm": (FedAvg, {"client": lambda *_: 5})}, r"must return \(upload, rows\), got int"),
    "client fails": ({"algorithm": (FedAvg, {"client": _fails})}, "client step failed at clients .* in round 1"),
    "server fails": ({"algorithm": (FedAvg, {"server": _fails})}, "method Broken failed in round 1: KeyError"),
    "server of a type": ({"algorithm": (FedAvg, {"server": lambda *_: 5})}, "server must return a Model, got int"),
    "down fails": ({"algorithm": (FedAvg, {"down": _fails})}, "method Broken failed in round 1"),
    "no client state": (
        {"algorithm": (FedAvg, {"init": lambda _, x, __: (Model(x), None, None)})},
        "Broken.init: the client's state is None",
    ),
    "init fails": ({"algorithm": (FedAvg, {"init": lambda *_: 5})}, "Broken.init must return three values"),
    "init of two": ({"algorithm": (FedAvg, {"init": lambda *_: (1, 2)})}, "got tuple of 2"),
    "init of a number": (
        {"algorithm": (FedAvg, {"init": lambda s, x, c: (Model(x), Delta(torch.tensor(1.0)), None)})},
        r"the client's 'dw' must have shape \[k\]",
    ),
    "a pull that is no pair": (
        {"algorithm": (FedAvg, {"client": lambda s, d, r, w: (Delta(descend(d.x, w, pull=(0.1, d.x)) - d.x), r)})},
        "`pull` must contain pairs of a strength and a point",
    ),
    "global of a shape": ({"algorithm": (FedAvg, {"global_model": lambda *_: torch.ones(4)})}, r"\[d\] = \[650\]"),
    "personal of a shape": (
        {"algorithm": (FedAvg, {"personal": lambda *_: torch.ones(4)})},
        r"must return a tensor of shape \[3, 650\]",
    ),
}


class _Picky(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2:
            raise ValueError("too many")
        return super().forward(x.flatten(1))


def test_a_model_or_a_diagnosis_that_fails_is_blamed_too() -> None:
    fed = partitions.iid(clients=3)(load("digits"))
    with pytest.raises(
        CodeError, match=r"model _Picky failed in round 0: ValueError: too many \(test_user_code.py, line"
    ):
        simulate(FedAvg(), fed, Import(path=f"{__name__}:_Picky"), rounds=1)
    with pytest.raises(CodeError, match="method Broken failed in the diagnostics of round 0: KeyError"):
        simulate(_broken(FedAvg, diagnostics=_fails), fed, rounds=1)


def test_a_data_set_that_fails_is_blamed() -> None:
    with pytest.raises(CodeError, match="data set Broken failed in load: KeyError"):
        _broken(Source, load=_fails).read()
    with pytest.raises(CodeError, match="must return a fedloom.data.Dataset, got int"):
        _broken(Source, load=lambda *_: 5).read()


@pytest.mark.parametrize("what", FAULTS)
def test_code_that_fails_or_gives_what_it_must_not_is_blamed_in_a_sentence(what: str) -> None:
    parts, answer = FAULTS[what]
    given = {name: _broken(base, **functions) for name, (base, functions) in parts.items()}
    fed = partitions.iid(clients=3)(load("digits"))
    with pytest.raises(CodeError, match=answer):
        simulate(given.pop("algorithm", FedAvg()), fed, rounds=1, **given)


@pytest.mark.parametrize(
    ("index", "offsets", "answer"),
    [
        (range(30), [0, 10, 20], "must increase from 0 to the 30 entries"),
        (range(30), [0, 20, 10, 30], "must increase"),
        ([5000], [0, 1], "positions from 0 to 1796, got 5000"),
    ],
)
def test_a_partition_that_deals_what_is_not_there_is_blamed(index: Any, offsets: list[int], answer: str) -> None:
    dealt = Dealt(np.array([*index]), np.array(offsets))
    broken = _broken(type(partitions.iid()), draw=lambda *_: Draw(dealt))
    with pytest.raises(CodeError, match=answer):
        broken(load("digits"))


def test_a_run_whose_code_fails_takes_no_other_with_it(tmp_path: Path, own_module: Path) -> None:
    own_module.write_text(
        own_module.read_text() + "\n\nclass Fails(FedAvg):\n    def server(self, *_):\n        1 / 0\n"
    )
    plan = Plan(
        parse(document(FEW, method=[{"algorithm": f"{MODULE}:Fails"}, {"algorithm": "fedavg"}])), tmp_path / "o"
    )
    failed, done = plan.run(page=False)
    assert (failed.status, done.status) == ("failed", "done")
    assert "method Fails failed in round 1: ZeroDivisionError" in failed.reason
