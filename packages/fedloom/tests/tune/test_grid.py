"""Spaces of lists are gone through whole; trials of the method's own rounds; scores are those of plain runs."""

from __future__ import annotations

import signal
import tomllib
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from searches import contents, kept, tuning

import fedloom as fl
from fedloom.errors import ConfigError, RunDirError, RunStopped
from fedloom.lab.experiment import parse
from fedloom.lab.experiment.events import Event
from fedloom.lab.experiment.tuning import Range, Tune
from fedloom.lab.tune import Trial
from fedloom.lab.tune.search import Search, SearchResult, count_settings, replace_params
from tests.commands import call, in_a_fork

GRID = """
name = "grid"
rounds = 6
seeds = [0, 1]
[data]
source = "digits"
[partition]
kind = "shards"
clients = 4
labels_per_client = 3
max_train_per_client = 60
[local]
lr = 0.05
[tune]
trials = 9
rounds = 3
model = "mean"
prune = false
equal_work = false
default_spaces = false
[tune.space.all]
"local.lr" = [0.001, 0.01, 0.05]
[tune.space.ditto]
lam = [0.1, 1.0]
[[method]]
algorithm = "fedavg"
rounds = 2
[[method]]
algorithm = "ditto"
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[SearchResult]]:
    out = tmp_path_factory.mktemp("grid") / "out"
    return out, tuning(GRID, out).run()


def test_used_scores_the_model_that_a_client_would_use(tmp_path: Path) -> None:
    search = tuning(GRID.replace('model = "mean"', 'model = "best-on-validation"'), tmp_path / "out")
    assert [study.goal.models for study in search.studies] == [("global",), ("hybrid",)]


# --- what is suggested


LISTS = st.dictionaries(
    st.sampled_from(["a", "b", "local.lr"]), st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1
).map(lambda space: {key: tuple(values) for key, values in space.items()})


def search_of(space: Any, trials: int, seed: int = 0, label: str = "m", own: Any = None) -> Search:
    return Search(space, Tune(trials=trials, seed=seed), label, True, own)


def played(search: Search, trials: list[Trial], value: float = 0.5) -> list[Trial]:
    while not search.ended(trials):
        asked = search.ask(trials)
        assert search.ask(trials).params == asked.params
        trials.append(
            Trial(number=asked.number, params=asked.params, state="complete", value=value, rounds=1, samples_backward=1)
        )
    return trials


@given(LISTS, st.integers(0, 3), st.integers(0, 20), st.data())
def test_every_setting_comes_once_the_files_own_first(
    space: dict[str, tuple[int, ...]], seed: int, more: int, data: st.DataObject
) -> None:
    points = [dict(zip(space, values, strict=True)) for values in product(*(dict.fromkeys(v) for v in space.values()))]
    assert count_settings(space) == len(points)
    own = data.draw(st.sampled_from([None, *points]))
    search = search_of(space, len(points) + more, seed, own=own)
    assert search.is_exhaustive
    trials = played(search, [])
    assert len(trials) == len(points)
    assert all(any(t.params == point for t in trials) for point in points)
    assert own is None or trials[0].params == own
    cut = data.draw(st.integers(0, len(trials)))
    again = played(search_of(space, len(points) + more, seed, own=own), trials[:cut], value=0.1)
    assert [t.params for t in again] == [t.params for t in trials]


def test_the_order_is_seeded_by_the_search_and_the_method() -> None:
    space = {"a": tuple(range(12))}
    orders = [
        [t.params["a"] for t in played(search_of(space, 12, seed, label), [])]
        for seed, label in ((0, "m"), (0, "m"), (1, "m"), (0, "n"))
    ]
    assert orders[0] == orders[1]
    assert orders[0] not in (orders[2], orders[3], sorted(orders[0]))


def test_a_range_or_a_longer_list_is_not_gone_through_whole() -> None:
    for space in ({"a": Range(low=0.0, high=1.0)}, {"a": tuple(range(9))}):
        search = search_of(space, 8)
        assert not search.is_exhaustive
        assert len(played(search, [])) == 8


def test_trials_of_a_search_that_was_not_whole_are_not_repeated() -> None:
    space = {"a": tuple(range(6))}
    few = played(search_of(space, 3), [])
    trials = played(search_of(space, 8), list(few))
    assert trials[:3] == few
    assert {t.params["a"] for t in trials} == set(range(6))


# --- what is scored


def test_the_report_speaks_of_it(whole: tuple[Path, list[SearchResult]]) -> None:
    out, found = whole
    assert [len(f.trials) for f in found] == [3, 6]
    assert found[0].trials[0].params == {"local.lr": 0.05}
    text = (out / "tuning.md").read_text()
    assert "were searched exhaustively by Optuna's GridSampler: fedavg (3), ditto (6)" in text
    assert "trains for 3 rounds per seed, of fedavg 2 (seeds 0), whatever the cost" in text
    assert "| ditto | global and personal |" in text
    assert "of the budget" not in text


def test_a_score_is_the_mean_over_the_models_of_a_plain_run(whole: tuple[Path, list[SearchResult]]) -> None:
    document = {k: v for k, v in tomllib.loads(GRID).items() if k != "tune"}
    for f in whole[1]:
        for trial in f.trials:
            rounds = {"fedavg": 2, "ditto": 3}[f.study.method.label]
            experiment = parse(replace_params(document, f.study.place, trial.params, rounds=rounds))
            fed = experiment.partition(experiment.source.load(), 0)
            result = fl.simulate(experiment.methods[f.study.place].setting, fed)
            models = ["global", "personal"][: len(f.study.goal.models)]
            scores = [float(result.final(model, "accuracy", "validation").nanmean()) for model in models]
            assert trial.value == pytest.approx(sum(scores) / len(scores), abs=1e-12)
            assert trial.rounds == rounds
        assert f.best is not None
        assert f.best.value == max(t.value for t in f.trials if t.value is not None)


def test_the_tuned_file_keeps_the_rounds(whole: tuple[Path, list[SearchResult]]) -> None:
    tuned = parse(tomllib.loads((whole[0] / "tuned.toml").read_text()))
    assert [m.setting.rounds for m in tuned.methods] == [2, 6]


def test_whose_rounds_count_is_part_of_the_search(whole: tuple[Path, list[SearchResult]]) -> None:
    with pytest.raises(RunDirError, match=r"tune.equal_work was false, now it is true"):
        tuning(GRID.replace("equal_work = false", ""), whole[0])
    with pytest.raises(RunDirError, match=r"tune.rounds_of.fedavg was 2, now it is 4"):
        tuning(GRID.replace("rounds = 2", "rounds = 4"), whole[0])


def test_without_the_default_spaces_a_method_needs_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fedavg has no setting to search"):
        tuning(
            GRID.replace("[tune.space.all]", "[tune.space.ditto]", 1).replace("[tune.space.ditto]\nlam", "lam"),
            tmp_path,
        )


# --- stopped and run again


def stop_at(count: int) -> Any:
    def watch(*_: Any) -> None:
        nonlocal count
        count -= 1
        if count == 0:
            signal.raise_signal(signal.SIGINT)

    return watch


@pytest.mark.parametrize("at", [1, 7])
def test_ctrl_c_within_a_trial_stops_the_search_which_goes_on_there(
    at: int, whole: tuple[Path, list[SearchResult]], tmp_path: Path
) -> None:
    told: list[tuple[str, int]] = []

    def watch(event: Event) -> None:
        told.append((event.label, event.round))

    stop = stop_at(at)
    with pytest.raises(RunStopped, match="Run the same command again"):
        tuning(GRID, tmp_path / "out").run(lambda *_: None, watch, stop)
    assert len(told) == at
    tuning(GRID, tmp_path / "out").run(lambda *_: None, watch)
    assert len(told) == len(set(told)) == 3 * 2 + 6 * 3 == tuning(GRID, tmp_path / "other").rounds
    for (label, round), (after, later) in pairwise(told):
        assert later == (round + 1 if label == after else 1)
    assert contents(tmp_path / "out") == contents(whole[0])


def test_killed_within_a_trial_and_run_again(whole: tuple[Path, list[SearchResult]], tmp_path: Path) -> None:
    file, out = tmp_path / "grid.toml", tmp_path / "out"
    file.write_text(GRID + "[engine]\ncheckpoint_every = 1e-9\n")
    assert in_a_fork(lambda: call("tune", file, "--out", out), 120) == 137
    before = kept(out / "trials" / "fedavg.log")
    assert 0 < len(before) <= 3
    assert list((out / "checkpoints").glob("*/*"))
    tuning(file.read_text(), out).run()
    found, uninterrupted = contents(out), contents(whole[0])
    assert found.pop("tuned.toml") != uninterrupted.pop("tuned.toml")  # it has [engine]
    assert found == uninterrupted


def test_methods_side_by_side_tell_of_every_trial(whole: tuple[Path, list[SearchResult]], tmp_path: Path) -> None:
    ends: dict[str, int] = {}

    def watch(event: Event) -> None:
        ends[event.label] = event.rounds

    tuning(GRID + "[engine]\nworkers = 2\n", tmp_path / "out").run(lambda *_: None, watch)
    assert len(ends) == 3 + 6
    assert {rounds for label, rounds in ends.items() if label.startswith("fedavg")} == {2}
    assert (tmp_path / "out" / "trials.csv").read_bytes() == (whole[0] / "trials.csv").read_bytes()
