"""Runs that diverge with finite figures, settings that train nothing, and what first rounds cost."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import fedloom as fl
from fedloom.data.federation import Federation
from fedloom.engine import setup
from fedloom.engine.records import DIVERGENCE_FACTOR, DIVERGING_EVALUATIONS, Divergence, Record, Records
from fedloom.engine.result import Result
from fedloom.engine.round import run_round
from fedloom.engine.scoring import score_round
from fedloom.engine.setup import make_job
from fedloom.engine.simulate import clients_of
from fedloom.engine.state import State, Times, initial_state
from fedloom.errors import ConfigError, Stop
from fedloom.formats import format_pair
from fedloom.lab.cli import app
from fedloom.lab.experiment import Plan, parse
from fedloom.lab.experiment.events import Event
from fedloom.lab.progress import count_progress
from fedloom.lab.report import result_table
from fedloom.lab.report.tables import render_measured

WILD = {"model": "softmax", "rounds": 6, "local": {"lr": 1e4}, "evaluate": {"every": 1}}


@pytest.fixture(scope="module")
def fed() -> Federation:
    return fl.partitions.dirichlet(clients=4, alpha=0.3)(fl.load("digits"), seed=0)


def records(*losses: float, model: str = "global", part: str = "train") -> Records:
    items = (Record.make_federation_record(5 * k, model, part, "loss/mean", loss) for k, loss in enumerate(losses))
    return Records(items)


@pytest.mark.parametrize(
    ("losses", "by"),
    [
        ((2.0, 30.0, 30.0, 30.0), 15),
        ((2.0, 1.0, 30.0, 30.0, 21.0, 1.0), 20),
        ((2.0, 30.0, 30.0, 1.0, 30.0, 30.0, 1.0), None),
        ((2.0, 1.0, 1.0, 1.0, 30.0), 20),
        ((2.0, 20.0, 20.0, 20.0), None),
        ((0.01, 9.0, 9.0, 9.0), None),
        ((2.0, 30.0, 30.0, math.inf), None),
    ],
)
def test_a_loss_beyond_its_start_for_some_evaluations_diverges(losses: tuple[float, ...], by: int | None) -> None:
    assert (DIVERGENCE_FACTOR, DIVERGING_EVALUATIONS) == (10, 3)
    found = Divergence()
    found.read(records(*losses), ended=True)
    assert found.round == by
    assert found.sentence.startswith(f"round {by}: the training loss of the global model is" if by else "")
    assert bool(found.sentence) == bool(by)
    for part in ("validation", "test"):  # a loss of other samples also grows in a run that overfits
        assert not Divergence().read(records(*losses, part=part), ended=True)
    worse = Divergence()
    worse.read(records(*(loss if loss < 20 else 1000 * loss for loss in losses), part="validation"), ended=True)
    if by is not None:
        assert worse.sentence.startswith(f"round {worse.round}: the validation loss of the global model is")


def test_it_is_told_once_at_the_evaluation_that_shows_it() -> None:
    watch, losses = Divergence(), (2.0, 30.0, 40.0, 50.0, 60.0)
    told = [watch.read(records(*losses[: k + 1])) for k in range(len(losses))]
    assert [bool(sentence) for sentence in told] == [False, False, False, True, False]
    assert "round 15" in told[3]
    assert "is 50, and it has exceeded 10 times its initial value of 2 since round 5" in told[3]


def test_a_run_may_still_recover_until_it_ends() -> None:
    assert Divergence().read(records(2.0, 30.0), ended=True)
    assert not Divergence().read(records(2.0, 30.0))
    assert not Divergence().read(records(2.0), ended=True)


def test_the_start_is_that_of_the_worst_model() -> None:
    both = records(0.1, 15.0, 15.0, 15.0, model="personal")
    assert not Divergence().read(Records((*records(2.0).items, *both.items)), ended=True)


def steep(parts: tuple[str, ...], *, outlier: bool = False) -> Result:
    """FedAvg-FT on two clients, of which the second tunes its model, or has one test sample, beyond all numbers."""
    y, zero = [0, 1, 2, 0, 1, 2], torch.zeros(6, 3)
    large, far = (zero + 1e3, y), torch.cat([zero[:5], torch.full((1, 3), 3e38)])
    second = ((zero + 1, [0, 0, 0, 0, 0, 1]), (far, y)) if outlier else (large, large)
    fed = fl.Federation.create([((zero, y), (zero, y)), second], validation=0.3)
    method = fl.algorithms.FedAvgFT(lr=10.0 if outlier else 1e38, steps=2)
    return fl.simulate(method, fed, rounds=2, evaluate={"every": 1, "parts": parts, "select_on": "test"})


@pytest.mark.parametrize("parts", [("train",), ("validation",), ("test",), ("train", "test"), ("validation", "test")])
def test_a_client_whose_model_has_no_finite_output_ends_a_run_whatever_parts_are_scored(parts: tuple[str, ...]) -> None:
    result = steep(parts)
    part = "training" if parts[0] == "train" else parts[0]
    assert result.status == "diverged"
    assert result.detail == f"round 0: the {part} loss of the personal model is not finite"


@pytest.mark.parametrize("parts", [("train", "test"), ("validation",), ("test",), ("validation", "test")])
def test_a_run_whose_loss_explodes_has_diverged_whatever_parts_are_scored(
    fed: Federation, parts: tuple[str, ...]
) -> None:
    scored = {"every": 1, "parts": parts, "select_on": "test"}
    assert fl.simulate("fedavg", fed, rounds=4, local={"lr": 1e7}, evaluate=scored).status == "diverged"
    assert fl.simulate("fedavg", fed, rounds=4, local={"lr": 0.1}, evaluate=scored).status == "done"


def test_a_client_that_is_lost_on_its_test_part_alone_is_named_and_takes_the_better_model() -> None:
    result = steep(("train", "test"), outlier=True)
    assert result.status == "done"
    (note,) = [note for note in result.notes if "not finite" in note and "personal" in note]
    assert note.startswith("the test loss of the personal model is not finite for 1 client")
    assert note.endswith("[1]")
    assert result.final("personal").isnan().tolist() == [False, True]
    assert torch.equal(result.final("hybrid")[1], result.final("global")[1])


def test_a_diverged_run_goes_on_and_stays_diverged_when_resumed(fed: Federation, tmp_path: Path) -> None:
    whole = fl.simulate("fedavg", fed, folder=tmp_path / "whole", **WILD)
    assert (whole.stop, whole.status, whole.rounds, whole.diverged) == (Stop.DIVERGED, "diverged", 6, 3)
    assert whole.detail.startswith("round 3: the training loss of the global model is")
    assert math.isfinite(float(whole.final("global").mean()))

    def interrupt(state: State) -> None:
        if state.round == 4:
            raise KeyboardInterrupt

    cut = {**WILD, "folder": tmp_path / "cut", "engine": {"checkpoint_every": 1e-9}}
    with pytest.raises(KeyboardInterrupt):
        fl.simulate("fedavg", fed, callbacks=[interrupt], **cut)
    parted = fl.simulate("fedavg", fed, **cut)
    again = fl.simulate("fedavg", fed, **cut)
    for result in (parted, again):
        assert (result.stop, result.detail, result.diverged) == (whole.stop, whole.detail, 3)
        assert result.table().equals(whole.table())


@pytest.mark.parametrize("method", ["lpgd", "fedslr"])
def test_factors_of_models_that_are_not_finite_end_no_run_with_a_traceback(fed: Federation, method: str) -> None:
    found = fl.simulate(method, fed, model="mlp", rounds=3, local={"lr": 1e30})
    assert found.status == "diverged", found.detail


@pytest.mark.parametrize("kind", ["alie", "ipm", "min-max", "mimic"])
@pytest.mark.parametrize("rest", [{"local": {"lr": 1e30}}, {"sampler": {"kind": "uniform", "clients": 1}}])
def test_attackers_without_an_honest_client_in_the_round_use_their_own_models(
    fed: Federation, kind: str, rest: dict[str, object]
) -> None:
    attack = {"kind": kind, "fraction": 0.5}
    found = fl.simulate("fedavg", fed, model="softmax", rounds=6, attack=attack, **rest)
    assert found.status == ("diverged" if "local" in rest else "done"), found.detail


@pytest.mark.parametrize("kind", ["sign-flip", "mimic"])
def test_local_under_attack_is_local_without_its_attackers(fed: Federation, kind: str) -> None:
    plain = fl.simulate("local", fed, model="softmax", rounds=2)
    attacked = fl.simulate("local", fed, model="softmax", rounds=2, attack={"kind": kind, "fraction": 0.5})
    assert f"attack '{kind}' has no effect with Local" in " ".join(attacked.job.notes)
    each = plain.final("personal")
    assert (attacked.final("personal") == each).all()
    honest = each[~attacked.job.malicious]
    assert len(honest) == 2
    (mean,) = (
        r.values[0]
        for r in attacked.state.records.items
        if (r.round, r.model, r.part, r.metric) == (2, "personal", "test", "accuracy/mean")
    )
    assert mean == pytest.approx(float(honest.mean()))


def test_a_callback_that_ends_a_diverged_run_is_named_too(fed: Federation) -> None:
    found = fl.simulate("fedavg", fed, callbacks=[lambda s: "enough" if s.round == 4 else None], **WILD)
    assert (found.status, found.rounds, found.diverged) == ("diverged", 4, 3)
    assert found.detail.endswith("; enough")


def test_the_figures_of_a_diverged_run_stay_in_the_tables(tmp_path: Path) -> None:
    file, out = tmp_path / "wild.toml", tmp_path / "out"
    file.write_text(
        'rounds = 6\n[data]\nsource = "digits"\n[partition]\nkind = "iid"\nclients = 3\n[evaluate]\nevery = 1\n'
        '[[method]]\nalgorithm = "fedavg"\n[[method]]\nalgorithm = "fedavg"\nlabel = "wild"\nlocal = { lr = 1e9 }\n'
    )
    ran = CliRunner().invoke(app, ["run", str(file), "--out", str(out)])
    assert ran.exit_code == 1
    assert re.search(r"wild, seed 0: diverged: .*\(round 3: the training loss of the global model", ran.stderr)
    assert "wild, seed 0: round 3: the training loss of the global model is" in ran.stderr
    assert "diverged by round 3" in ran.stdout
    assert not re.search(r"\d{10}", ran.stdout + ran.stderr)
    summary = json.loads((out / "summary.json").read_text())
    assert [(r["status"], r["rounds"], r.get("diverged")) for r in summary["runs"]] == [
        ("done", 6, None),
        ("diverged", 6, 3),
    ]
    assert "round 3" in summary["runs"][1]["reason"]
    rows = {row["method"]: row for row in result_table(out).to_pylist()}
    assert rows["wild"]["status"] == "diverged by round 3 (seed 0)"
    assert 0 <= rows["wild"]["accuracy"] <= 1
    assert rows["wild"]["loss_variance"] > 1e6
    assert (out / "models" / "wild-0" / "global.safetensors").exists()
    again = CliRunner().invoke(app, ["run", str(file), "--out", str(out)])
    assert (again.exit_code, json.loads((out / "summary.json").read_text())) == (1, summary)


@pytest.mark.parametrize("value", [7856937935508588.0, 5.75e8, 123456.5, 99831862007989824.0, 1e300, 0.25])
def test_no_figure_has_many_digits(value: float) -> None:
    for name, mean, half in (("rmse", value, value / 3), ("rmse", 0.5, value), ("accuracy", value, math.nan)):
        assert not re.search(r"\d{10}", format_pair(*render_measured(name, mean, half)))
    assert float(render_measured("rmse", value, math.nan)[0].replace("\u202f", "")) == pytest.approx(value, rel=0.005)


@pytest.mark.parametrize("given", [{"epochs": 0}, {"steps": 0}, {"lr": 1e-60}])
def test_local_training_without_a_step_is_refused(given: dict[str, float], fed: Federation) -> None:
    with pytest.raises(ConfigError, match=rf"local\.{next(iter(given))} = .* nothing would be trained\. Set"):
        fl.simulate("fedavg", fed, local=given)


@pytest.mark.parametrize(("name", "option"), [("ditto", "personal_epochs"), ("fedrep", "head_epochs")])
def test_a_part_that_is_not_trained_is_told(name: str, option: str, fed: Federation) -> None:
    entry = fl.algorithms.REGISTRY[name]
    found = [
        [note for note in fl.simulate(entry(**given), fed, rounds=1).notes if f"{option} = 0 never trains" in note]
        for given in ({option: 0}, {option: 1}, {})
    ]
    assert [len(notes) for notes in found] == [1, 0, 0]


def test_a_first_round_without_a_gradient_is_told(fed: Federation) -> None:
    class Idle(fl.algorithms.FedAvg):
        def client(self, down, rows, work):  # type: ignore[no-untyped-def]
            up, rows = super().client(down, rows, work)
            work.counts.backward.zero_()
            return up, rows

    told = "no client computed a gradient in round 1, so nothing is trained"
    assert told in fl.simulate(Idle(), fed, rounds=2).notes
    assert told not in fl.simulate("fedavg", fed, rounds=2).notes


def test_an_end_has_one_status_and_only_an_interrupted_run_is_resumed() -> None:
    assert {stop for stop in Stop if stop.is_resumable} == {stop for stop in Stop if stop.status == "interrupted"}
    assert {stop.status for stop in Stop} == {"done", "diverged", "interrupted", "failed"}


def test_a_round_that_ends_the_run_changes_nothing_and_says_whom_it_dropped(fed: Federation, tmp_path: Path) -> None:
    bounded = {"model": "softmax", "rounds": 3, "engine": {"norm_bound": 1e-9}, "folder": tmp_path}
    whole = fl.simulate("fedavg", fed, **bounded)
    assert (whole.stop, whole.rounds) == (Stop.DIVERGED, 0)
    assert "round 1: dropped 4 unusable uploads from clients" in whole.notes[-1]
    again = fl.simulate("fedavg", fed, **bounded)
    assert (again.stop, again.notes, again.detail) == (whole.stop, whole.notes, whole.detail)
    assert again.table().equals(whole.table())


def test_too_few_usable_uploads_end_a_simulation_for_good(fed: Federation, tmp_path: Path) -> None:
    largest, cohorts = torch.zeros(4), list[list[int]]()

    class Watched(fl.algorithms.FedAvg):
        def client(self, down, rows, work):  # type: ignore[no-untyped-def]
            cohorts.append(work.ids.tolist())
            up, rows = super().client(down, rows, work)
            largest[work.ids] = up.dw.norm(dim=1).float()
            return up, rows

    fl.simulate(Watched(), fed, model="softmax", rounds=1)
    engine = {"norm_bound": float(largest.median()), "quorum": 1.0}
    trained = list[int]()
    for _ in range(2):
        result = fl.simulate(Watched(), fed, model="softmax", rounds=2, engine=engine, folder=tmp_path)
        assert (result.stop, result.status, result.rounds) == (Stop.UNUSABLE, "failed", 0)
        trained.append(len(cohorts))
    assert trained[0] == trained[1]


def test_a_round_modifies_no_state(fed: Federation) -> None:
    setting = fl.Setting.create("flame", model="softmax", rounds=2)
    job, server = make_job(setting, fed)
    with clients_of(job) as clients:
        begin = initial_state(job, server)
        copies = {name: tensor.clone() for name, tensor in begin.tensors().items()}
        state, events = run_round(job, clients, begin)
        scored, _ = score_round(job, clients, state)
    assert (state.round, state.trained, events) == (1, 1, ())
    assert begin.round == 0 == len(begin.records.items) == len(state.records.items)
    assert not state.is_scored
    assert scored.is_scored
    assert begin.tensors().keys() == copies.keys()
    assert all(torch.equal(copies[name], tensor) for name, tensor in begin.tensors().items())


@pytest.mark.parametrize("kind", ["sign-flip", "gaussian", "alie"])
def test_attackers_keep_no_state_of_an_optimiser_whose_steps_they_do_not_report(fed: Federation, kind: str) -> None:
    """What an attacker trains to forge from is of that round only; its state is that of a client that takes no step."""
    local = {"lr": 0.01, "optimizer": "adam", "optimizer_state": "persistent"}
    found = fl.simulate("ditto", fed, model="softmax", rounds=3, local=local, attack={"kind": kind, "fraction": 0.5})
    assert found.status == "done", found.detail
    kept = found.job.optimizer.read(torch.arange(4))[0]
    assert not bool(kept[found.job.malicious].any())
    assert bool(kept[~found.job.malicious].any(1).all())


def test_a_check_has_the_notes_of_the_job_and_makes_no_room_for_clients(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = fl.Setting.create(
        "scaffold", model="softmax", aggregation_weights={"kind": "uniform"}, attack={"kind": "gaussian"}
    )
    job, _ = make_job(setting, fed)
    monkeypatch.setattr(setup, "Store", None)
    assert setup.check(setting, fed) == job.notes
    assert job.notes
    with pytest.raises(ConfigError, match="momentum"):
        setup.check(setting.with_(local=fl.LocalSGD(momentum=0.9)), fed)


# --- times


def test_what_first_rounds_cost_is_apart_in_every_process() -> None:
    times = Times.resumed([40.0, 1.0, 2.0, 3.0], [0]).add_round(30.0).add_round(5.0)
    assert times.steady_seconds() == [2.0, 1.0, 2.0, 3.0, 5.0, 5.0]
    assert times.startup() == [38.0, 0.0, 0.0, 0.0, 25.0, 0.0]
    assert [a + b for a, b in zip(times.steady_seconds(), times.startup(), strict=True)] == [*times.rounds]
    again = Times.resumed(times.rounds, times.process_starts)
    assert again.steady_seconds() == times.steady_seconds()
    again = again.add_round(9.0)  # the only round of its process: the others tell
    assert again.steady_seconds()[-1] == median([1.0, 2.0, 3.0, 5.0])
    assert Times((1.0, 4.0)).steady_seconds() == [1.0, 4.0]
    alone = Times().add_round(7.0)
    assert (alone.steady_seconds(), alone.startup()) == ([7.0], [0.0])


def test_the_pace_is_silent_before_the_third_round_and_counts_evaluation() -> None:
    times = Times.resumed([9.0] * 50, [0])
    paces = []
    for seconds in (40.0, 1.0, 1.0, 1.2):
        times = times.add_round(seconds)
        paces.append(times.pace(5))
    assert paces == [None, None, 1.0, 1.0]
    times = times.add_evaluation(30.0)
    assert times.pace(5) is None  # its one-off costs would weigh
    times = times.add_evaluation(10.0)
    assert times.pace(5) == 3.0


def test_seconds_leave_out_compilation(fed: Federation, tmp_path: Path) -> None:
    class Slow(fl.algorithms.FedAvg):
        def server(self, server, up, ctx):  # type: ignore[no-untyped-def]
            if ctx.round == 1:
                time.sleep(1.0)
            return super().server(server, up, ctx)

    found: Result = fl.simulate(Slow(), fed, rounds=6, folder=tmp_path)
    assert found.startup[0] > 10 * found.seconds[0]
    assert found.seconds[0] == median(found.seconds[1:])
    read = fl.simulate(Slow(), fed, rounds=6, folder=tmp_path)
    assert (read.seconds, read.startup) == (found.seconds, found.startup)


def test_timings_have_the_startup_in_a_column_of_its_own(tmp_path: Path) -> None:
    document = {"rounds": 3, "data": {"source": "digits"}, "method": [{"algorithm": "fedavg"}]}
    start = time.perf_counter()
    (outcome,) = Plan(parse(document), tmp_path / "out").run(page=False)
    table = pq.read_table(tmp_path / "out" / "timings.parquet")
    assert outcome.result is not None
    times = outcome.result.state.times
    assert 0 < sum(times.rounds) + sum(times.evaluations) < time.perf_counter() - start
    assert table["seconds"].to_pylist() == outcome.result.seconds
    assert table["startup"].to_pylist() == outcome.result.startup
    assert result_table(tmp_path / "out")["seconds"].to_pylist() == [pytest.approx(sum(outcome.result.seconds))]


# --- what lines say


def lines(capsys: pytest.CaptureFixture[str], *events: Event, rounds: dict[str, int]) -> list[str]:
    with count_progress(rounds) as hear:
        for event in events:
            hear(event)
    printed = capsys.readouterr()
    assert not printed.out
    return printed.err.splitlines()


FIGURES = {5: {"global/validation/loss/mean": 0.5, "global/validation/accuracy/mean": 0.81}}


@pytest.mark.parametrize("mean", ["mean", "weighted"])
def test_figures_of_an_earlier_evaluation_carry_their_round(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mean: str
) -> None:
    """A run under secure sums has means over samples only."""
    monkeypatch.setattr("fedloom.lab.progress.SECONDS_PER_LINE", 0.0)
    run = Event("a", 0, 20, 5, {5: {name.replace("mean", mean): value for name, value in FIGURES[5].items()}})
    said = lines(capsys, run, run._replace(round=7, figures={}), rounds={"a": 20})
    assert said == [
        "a, seed 0: round 5/20, global validation loss 0.5, accuracy 0.81",
        "a, seed 0: round 7/20, global validation loss 0.5, accuracy 0.81 (round 5)",
    ]


def test_a_notebook_has_one_line_that_changes_and_ends_as_a_sum(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells: list[Any] = []

    class Cell:
        """The place of an output."""

        def __init__(self, line: Any, display_id: bool = False) -> None:
            cells.append(line)
            self.place = len(cells) - 1

        def update(self, line: Any) -> None:
            cells[self.place] = line

    monkeypatch.setattr("fedloom.lab.progress.notebook_display", lambda: Cell)
    monkeypatch.setattr("fedloom.lab.progress.NOTEBOOK_INTERVAL_SECONDS", 0.0)
    with count_progress({"a<b": 20, "b": 10}) as hear:
        hear(Event("a<b", 0, 20, 5, FIGURES))
        assert len(cells) == 1
        assert repr(cells[0]) == "5/30 rounds: a<b, seed 0, round 5/20, global validation loss 0.5, accuracy 0.81"
        assert '<progress value="5" max="30">' in cells[0]._repr_html_()
        assert "a&lt;b, seed 0" in cells[0]._repr_html_()
        hear(Event("a<b", 0, 20, 20))
        hear(Event("b", 0, 10, 7, diverged="round 7: the training loss"))
    assert [repr(cell).partition(" in ")[0] for cell in cells] == ["2 runs", "b, seed 0: round 7: the training loss"]
    with count_progress({"a": 20, "b": 10}) as hear:
        hear(Event("a", 0, 20, 20, status="done"))
        hear(Event("b", 0, 10, 7, status="interrupted"))
    assert repr(cells[-1]).partition(" in ")[0] == "interrupted: 1 of 2 runs"
    assert capsys.readouterr() == ("", "")


def test_what_follows_the_last_round_is_shown_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lines, in a notebook's line, and behind the bar of a terminal; not while a run goes on."""
    events = [Event("a", 0, 2, 2), Event("b", 0, 1, 1), Event("a", 0, 2, 2, status="done"), Event("b", 0, 1, 1)]

    def during(count: int) -> None:
        with count_progress({"a": 2, "b": 1}, "saving models") as hear:
            for event in events[:count]:
                hear(event)

    for count in (1, 4):
        during(count)
        assert capsys.readouterr().err.splitlines().count("saving models") == count // 4
    cells: list[Any] = []
    monkeypatch.setattr("fedloom.lab.progress._NotebookLine._show", lambda _self, line: cells.append(repr(line)))
    with monkeypatch.context() as patch:
        patch.setattr("fedloom.lab.progress.notebook_display", lambda: print)
        for count in (1, 4):
            during(count)
            assert ("saving models" in cells) == (count == 4)
    monkeypatch.setenv("FORCE_COLOR", "1")
    for count in (1, 4):
        during(count)
        assert ("saving models" in capsys.readouterr().err) == (count == 4)


def test_time_left_counts_every_run_at_its_own_pace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.lab.progress.SECONDS_PER_LINE", 0.0)
    said = lines(
        capsys,
        Event("a", 0, 20, 2),
        Event("a", 0, 20, 5, pace=1.0),
        Event("a", 0, 20, 20, pace=1.0),
        Event("b", 0, 10, 5, pace=4.0),
        Event("a", 1, 20, 10, pace=1.0),
        Event("b", 0, 10, 7, status="diverged"),
        rounds={"a": 40, "b": 10},
    )
    assert "left" not in said[0]
    assert said[1].endswith("about 15 s left of this run")  # of b nothing is known yet
    assert "left" not in said[2]
    ends = lines(capsys, Event("a", 0, 9, 5, pace=1.0), Event("a", 0, 9, 9, pace=1.0), rounds={"a": 9})
    assert [line.endswith("about 4 s left") for line in ends] == [True, False]
    assert "left" not in ends[1]
    assert said[3].endswith("about 40 s left")  # 20 rounds of a, 5 of b
    assert said[4].endswith("about 20 s left")  # side by side: no less than what b needs
    assert said[5] == "b, seed 0: round 7/10, diverged, about 10 s left"


def test_a_divergence_is_a_line_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    said = lines(capsys, Event("a", 0, 20, 9, diverged="round 9: too much"), rounds={"a": 20})
    assert said == ["a, seed 0: round 9: too much"]
