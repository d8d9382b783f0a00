"""Callbacks and what a notebook shows: runs end early and stay ended, histories grow, tables and curves are drawn."""

from __future__ import annotations

import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch

import fedloom as fl
from fedloom.algorithms import Ditto, FedAvg
from fedloom.data.federation import Federation
from fedloom.engine.records import Record, Records
from fedloom.engine.setting import Engine, Evaluate
from fedloom.engine.state import State
from fedloom.errors import ConfigError, Refused, Stop
from fedloom.lab.report.notebook import notebook_page
from fedloom.local import LocalSGD


@pytest.fixture(scope="module")
def fed() -> Federation:
    return fl.partitions.iid(clients=4)(fl.load("digits"), seed=0)


def state(
    values: list[float], *, metric: str = "loss", model: str = "global", every: int = 2, at: int | None = None
) -> Any:
    """A state whose records have these means on the validation parts."""
    records = Records()
    for k, value in enumerate(values):
        validation = Record.make_federation_record(k * every, model, "validation", f"{metric}/mean", value)
        records = records.plus(
            [validation, Record.make_federation_record(k * every, model, "test", f"{metric}/mean", -k)]
        )
    return SimpleNamespace(records=records, round=2 * (len(values) - 1) if at is None else at)


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ([3.0, 2.0, 1.0, 0.9], False),
        ([3.0, 1.0, 2.0, 2.0], True),
        ([3.0, 1.0, 2.0, 0.9], False),
        ([1.0, 2.0, 2.0], True),
        ([1.0, 2.0], False),
    ],
)
def test_a_run_ends_when_the_best_is_as_old_as_the_patience(values: list[float], ends: bool) -> None:
    stop = fl.callbacks.EarlyStop(patience=2)
    assert (stop(state(values)) is not None) == ends
    rising = fl.callbacks.EarlyStop(patience=2, metric="macro_f1")
    assert (rising(state([-v for v in values], metric="macro_f1")) is not None) == ends


def test_only_evaluated_rounds_decide_and_small_steps_do_not_count() -> None:
    stop = fl.callbacks.EarlyStop(patience=1, min_delta=0.5)
    assert stop(state([1.0, 0.8])) == "global validation loss has not improved on 1 since round 0"
    assert stop(state([1.0, 0.8], at=3)) is None
    assert stop(state([1.0, 0.4])) is None
    assert fl.callbacks.EarlyStop(patience=1)(state([1.0, 2.0], model="personal")) is not None
    assert fl.callbacks.EarlyStop(patience=1, model="global")(state([1.0, 2.0], model="personal")) is None


def test_the_test_part_cannot_end_a_run() -> None:
    with pytest.raises(ConfigError):
        fl.callbacks.EarlyStop(part="test")  # type: ignore[arg-type]


def run(fed: Federation, progress: list[Any], **more: Any) -> Any:
    settings = {"rounds": 30, "local": LocalSGD(lr=1.0, batch_size="full"), "evaluate": Evaluate(every=3), **more}
    return fl.simulate(FedAvg(), fed, "softmax", callbacks=progress, **settings)


def test_an_ended_run_is_evaluated_and_stays_ended(fed: Federation, tmp_path: Path) -> None:
    rounds = list[int]()

    def enough(state: State) -> str | None:
        rounds.append(state.round)
        return "that is enough" if state.round == 5 else None

    result = run(fed, [enough], folder=tmp_path)
    assert (result.stop, result.detail, result.rounds) == (Stop.STOPPED, "that is enough", 5)
    assert rounds == [1, 2, 3, 4, 5]
    assert result.table()["round"].to_pylist()[-1] == 5
    again = run(fed, [], folder=tmp_path)
    assert (again.stop, again.rounds) == (Stop.STOPPED, 5)
    assert again.table().equals(result.table())


def test_a_callback_that_should_keep_the_best_round_is_refused(fed: Federation) -> None:
    with pytest.raises(ConfigError, match="cannot keep the best round"):
        run(fed, [fl.callbacks.EarlyStop(result="best")])


def test_early_stopping_is_the_same_across_a_restart(fed: Federation, tmp_path: Path) -> None:
    stop = fl.callbacks.EarlyStop(metric="accuracy", patience=2, min_delta=0.02)
    whole = run(fed, [stop])
    assert whole.stop is Stop.STOPPED
    assert 3 < whole.rounds < 30

    class Crash(BaseException):
        pass

    def crash(state: State) -> None:
        if state.round == whole.rounds - 2:
            raise Crash

    often = Engine(checkpoint_every=1e-9)
    with pytest.raises(Crash):
        run(fed, [stop, crash], folder=tmp_path, engine=often)
    resumed = run(fed, [stop], folder=tmp_path, engine=often)
    assert (resumed.stop, resumed.detail, resumed.rounds) == (whole.stop, whole.detail, whole.rounds)
    assert resumed.table().equals(whole.table())


def test_a_history_grows_and_is_whole_after_a_restart(fed: Federation, tmp_path: Path) -> None:
    seen: list[int] = []
    history = fl.callbacks.History(show=lambda h: seen.append(max(h.table()["round"].to_pylist())))
    result = run(fed, [history], rounds=7)
    assert seen == [3, 6, 7]
    assert history.table().equals(result.table())
    assert "round 7" in history._repr_html_()
    short = fl.callbacks.History()
    assert short.table().num_rows == 0


def test_a_result_shows_itself_in_a_notebook(fed: Federation) -> None:
    result = fl.simulate(Ditto(), fed, "softmax", rounds=4, evaluate=Evaluate(every=2), local=LocalSGD(lr=0.5))
    shown = result._repr_html_()
    assert "Ditto, 4 rounds" in shown
    svg = ET.fromstring(shown[shown.index("<svg") :])
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}path"))) > 3
    with pytest.raises(ConfigError, match="no scores were recorded for cluster models. Models of this method:"):
        result.final("cluster")
    assert repr(result.models).endswith(f": Softmax, {fed.n} clients)")
    one = repr(result.models.model("personal", 1))
    assert one == "Model(method Ditto, kind personal, client 1, seed 0: Softmax, 650 parameters)"
    accuracy = float(np.nanmean(result.final("personal").numpy())) * 100
    assert f"<td>{accuracy:.4g}</td>" in shown
    assert "http" not in shown.replace("http://www.w3.org", "")
    (points,) = result.chart("loss", "validation").to_dict()["datasets"].values()
    assert {p["model"] for p in points} == {"global", "personal", "hybrid"}
    assert {p["round"] for p in points} == {0, 2, 4}
    with pytest.raises(ConfigError, match="'auroc' was not measured on the part 'test'"):
        result.chart("auroc")
    table = result.table()
    masked = table.filter(pc.match_substring(table["metric"], "/weighted"))  # as a run under secure sums has
    shown = notebook_page(masked, "masked")
    assert "<svg" in shown
    assert shown.count("<td>personal</td>") == 1


def test_a_result_of_one_evaluation_has_no_curve(fed: Federation) -> None:
    result = fl.simulate(FedAvg(), fed, "softmax", rounds=1, evaluate=Evaluate(parts=("train",)))
    assert "<svg" not in result._repr_html_()
    assert result.table().schema.names == ["round", "client", "model", "part", "metric", "value"]


def diverging(fed: Federation, method: str = "fedavg", **choices: Any) -> Any:
    local = {"lr": 0.5, "momentum": 0.9}
    return fl.simulate(method, fed, "mlp", **{"rounds": 30, "local": local, "evaluate": {"every": 1}, **choices})


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_the_best_round_is_that_of_a_run_which_ends_there(method: str, tmp_path: Path) -> None:
    fed = fl.partitions.dirichlet(clients=6, alpha=0.5, min_size=20, validation=0.2)(fl.load("digits"), seed=0)
    rule = {"patience": 3}
    last = diverging(fed, method, early_stop=rule)
    best = diverging(fed, method, early_stop={**rule, "result": "best"}, folder=tmp_path)
    assert best.rounds == last.rounds - 3
    ended = diverging(fed, method, callbacks=[lambda state: "here" if state.round == best.rounds else None])
    for kind in best.models:
        assert torch.equal(best.models.rows(kind), ended.models.rows(kind))
    assert best.table().equals(ended.table())
    kind = "personal" if method == "ditto" else "global"
    about = kind, "validation", "loss/mean"
    curve = [float(r.values[0]) for r in last.state.records.items if (r.model, r.part, r.metric) == about]
    assert min(curve[1:]) == curve[best.rounds]
    again = diverging(fed, method, early_stop={**rule, "result": "best"}, folder=tmp_path)
    assert (again.rounds, again.detail) == (best.rounds, best.detail)
    assert again.table().equals(best.table())


def test_early_stopping_needs_scores_of_its_part(fed: Federation) -> None:
    with pytest.raises(Refused, match="evaluate.parts does not contain it"):
        diverging(fed, early_stop={}, evaluate={"parts": ["test"]})
    bare = fl.partitions.iid(clients=3, validation=0.0)(fl.load("digits"), seed=0)
    with pytest.raises(Refused, match="no client has samples in it. Set early_stop="):
        diverging(bare, early_stop={})
    assert diverging(bare, early_stop={"part": "train", "patience": 1}).rounds <= 30


def test_a_comparison_stops_early_hears_of_every_round_and_is_tracked(fed: Federation, tmp_path: Path) -> None:
    events = list[Any]()
    options: Any = {
        "rounds": 30, "local": {"lr": 0.5, "momentum": 0.9}, "evaluate": {"every": 1}, "seeds": [0],
        "early_stop": {"patience": 2}, "folder": tmp_path / "run", "progress_bar": False,
    }  # fmt: skip
    got = fl.compare(["fedavg"], fed, "mlp", callbacks=[events.append], track="tensorboard", **options)
    assert [event.round for event in events if not event.status] == list(range(1, got["fedavg", 0].rounds + 1))
    assert events[-1].status
    assert any((tmp_path / "run" / "tracking").iterdir())
    assert tomllib.loads((tmp_path / "run" / "experiment.toml").read_text())["early_stop"]["patience"] == 2
    for wrong, words in (
        ({"callbacks": [1]}, "list of functions"),
        ({"track": "tensorbord"}, "did you mean"),
        ({"track": "tensorboard", "folder": None}, "Name a folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            fl.compare(["fedavg"], fed, "mlp", **{**options, **wrong})
