"""Advice: what a race reads, that it resumes and is shared, and what it says of tables, images, times and numbers."""

from __future__ import annotations

import json
import tomllib
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

import fedloom as fl
from fedloom.errors import ConfigError, RunDirError
from fedloom.lab.advise import Advice, Advisor, Choice, Verdict, advisor, read_portfolio
from fedloom.lab.advise.laps import cut_validation
from fedloom.lab.advise.settings import spread_settings
from fedloom.lab.experiment import parse
from fedloom.lab.experiment.tuning import Range
from fedloom.lab.tune.search import read_default_spaces
from fedloom.rundir import WORK_FOLDER
from fedloom.values import get_kind
from tests.commands import call, end, fork, in_a_fork

FEW = ("fedslr",)
SMALL_BUDGET = 11.0
SMALL: dict[str, Any] = {
    "rounds": 3,
    "data": {"source": "digits"},
    "partition": {"kind": "dirichlet", "clients": 4, "alpha": 0.3, "max_train_per_client": 30, "validation": 0.3},
    "engine": {"workers": 1},
    "method": [{"algorithm": "fedavg"}],
}


def advise(out: Path, document: dict[str, Any] = SMALL, **more: Any) -> Advice:
    join = more.pop("join", False)
    options = {"budget": SMALL_BUDGET, "methods": FEW, **more}
    return Advisor(document, "small", out, **options).run(join=join)


def contents(out: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(out)): path for path in sorted(out.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name != ".lock"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("small") / "race"
    advise(out)
    return contents(out)


def test_a_larger_budget_continues_to_the_answer_of_a_race_that_had_it_from_the_start(
    small: dict[str, bytes], tmp_path: Path
) -> None:
    begun, fresh, budget = tmp_path / "begun", tmp_path / "fresh", 14.0
    for name, content in small.items():
        (begun / name).parent.mkdir(parents=True, exist_ok=True)
        (begun / name).write_bytes(content)
    laps = {path.name: path.stat().st_mtime_ns for path in (begun / "laps").iterdir()}
    advise(begun, budget=budget)
    advise(fresh, budget=budget)
    for name in ("advice.json", "advised.toml", "clients.csv", "race.toml"):
        assert (begun / name).read_bytes() == (fresh / name).read_bytes() != small.get(name)
    assert {name: (begun / "laps" / name).stat().st_mtime_ns for name in laps} == laps  # not trained again


@pytest.mark.parametrize("in_memory", [False, True])
def test_an_executor_gives_the_bytes_of_one_process(in_memory: bool, small: dict[str, bytes], tmp_path: Path) -> None:
    class Spawned:
        """An executor without memory of earlier calls, whose units travel as text and bytes."""

        def submit(self, function: Any, /, *arguments: Any) -> Future[Any]:
            assert all(isinstance(one, str | bytes) for one in arguments)
            call = Future[Any]()
            call.set_result(function(*arguments))
            return call

    if not in_memory:
        Advisor(SMALL, "small", tmp_path / "race", budget=SMALL_BUDGET, methods=FEW).run(executor=Spawned())
        assert contents(tmp_path / "race") == small
        return
    here, there = (
        fl.advise(_clients(240), rounds=2, budget=20, progress_bar=False, executor=one) for one in (None, Spawned())
    )
    assert here.record() == there.record()


def test_the_race_with_its_plans_keeps_to_the_budget(small: dict[str, bytes]) -> None:
    """Also with few rounds, of which a ninth is none, and clients with more validation than training data."""
    advice = json.loads(small["advice.json"])
    assert advice["budget"] * 0.7 <= advice["spent"] <= advice["budget"]


def test_settings_whose_rounds_cost_more_get_fewer_rounds(tmp_path: Path) -> None:
    document = {**SMALL, "rounds": 9, "tune": {"space": {"fedavg": {"local.epochs": [1, 3]}}}}
    advice = advise(tmp_path / "race", document, methods=(), budget=16.0)
    laps = [json.loads(path.read_text()) for path in (tmp_path / "race" / "laps").glob("*/lap.json")]
    whole = [lap["samples"] for lap in laps if lap["samples"] > 0.5 * advice.budget / 16]
    assert max(whole) <= 1.2 * advice.budget / 16


@pytest.mark.parametrize("missing", [False, True])
def test_test_data_are_not_read(missing: bool, tmp_path: Path) -> None:
    """Test rows of which every cell is missing, or far from all others with the other label, change nothing."""
    x, y = _table(200)
    rng, rows = np.random.default_rng(1), ["site,fold,a,b,c,d,e,sick"]
    files = {"plain": list(rows), "poisoned": list(rows)}
    for k in range(len(x)):
        test = k > 0 and rng.random() < 0.25
        cells = ",".join("" if k == 0 else f"{value:.4f}" for value in x[k])  # a missing cell is known in both
        other = ",,,," if missing else "1e30,-1e30,1e30,1e30,-1e30"
        for name, lines in files.items():
            bad = test and name == "poisoned"
            lines.append(
                f"s{k % 4},{'test' if test else 'train'},{other if bad else cells},{1 - y[k] if bad else y[k]}"
            )
    answers = list[bytes]()
    for name, lines in files.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
        data = {
            "source": str(tmp_path / f"{name}.csv"),
            "target": "sick",
            "client_column": "site",
            "test_column": "fold",
        }
        document = {**SMALL, "data": {**data, "impute": True}, "partition": {"kind": "natural", "validation": 0.3}}
        advise(tmp_path / name, document)
        answers.append((tmp_path / name / "advice.json").read_bytes())
    assert answers[0] == answers[1]


def test_gains_come_from_data_that_the_race_did_not_use() -> None:
    """Other features of the kept rows change the gains, and nothing that the race decides."""
    fed, other = _clients(240), _clients(240)
    kept = cut_validation(other)[0].parts["test"].index
    other.data.x[kept] = other.data.x[kept.flip(0)]
    first, second = (fl.advise(one, rounds=2, budget=20, progress_bar=False) for one in (fed, other))
    assert [(first.method, first.racing, first.arms)] == [(second.method, second.racing, second.arms)]
    assert [one.gain for one in first.clients] == [one.gain for one in second.clients]
    assert first.gains != second.gains


def _clients(rows: int) -> fl.Federation:
    return fl.partitions.iid(clients=4, validation=0.3)(fl.Dataset.create(_table(rows)), seed=0)


def _table(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (rows, 5)).astype(np.float32)
    return x, (x[:, 0] + 0.3 * rng.normal(0, 1, rows) > 0).astype(np.int64)


@pytest.mark.parametrize("crash_at", [3, 40, 90, 150])
def test_a_killed_race_resumes_to_the_same_bytes(crash_at: int, small: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "race"
    assert in_a_fork(lambda: advise(out), crash_at) == 137
    advise(out)
    assert contents(out) == small
    assert not (out / WORK_FOLDER).exists()


def test_processes_that_join_give_the_bytes_of_one(small: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "race"
    other = fork(lambda: advise(out, join=True))
    advise(out, join=True)
    assert end(other) == 0
    assert contents(out) == small


def test_a_process_joins_while_another_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, make_folder, joined = tmp_path / "race", advisor.make_folder, list[Advisor]()

    def join_then(folder: Path) -> None:
        make_folder(folder)
        joined.append(Advisor(SMALL, "small", out, budget=SMALL_BUDGET, methods=FEW))

    monkeypatch.setattr(advisor, "make_folder", join_then)
    out.mkdir()
    Advisor(SMALL, "small", out, budget=SMALL_BUDGET, methods=FEW)._begin()
    assert joined


def test_two_workers_give_the_bytes_of_one(small: dict[str, bytes], tmp_path: Path) -> None:
    advise(tmp_path / "race", {**SMALL, "engine": {"workers": 2}})
    both = contents(tmp_path / "race")
    assert both.keys() == small.keys()
    assert {k: v for k, v in both.items() if not k.endswith(".toml")} == {
        k: v for k, v in small.items() if not k.endswith(".toml")
    }


def test_a_directory_of_another_race_is_refused(small: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "race"
    for name, content in small.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)
    with pytest.raises(RunDirError, match=r"a budget of 11 runs, got 10.5. Use a budget of 11 or more"):
        advise(out, budget=10.5)
    with pytest.raises(RunDirError, match="a different experiment or version"):
        advise(out, {**SMALL, "rounds": 4})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(RunDirError, match="contains no race"):
        advise(tmp_path / "full")


def _subjects(cut: fl.Federation, part: str) -> set[int]:
    rows = cut.parts[part].index
    return set(rows.tolist() if cut.data.design is None else cut.data.design.units[rows].tolist())


@pytest.mark.parametrize("subjects", [0, 40, 120])
def test_seeds_validate_on_other_subjects_and_none_reads_those_of_the_answer(subjects: int) -> None:
    rng, rows = np.random.default_rng(0), 300
    x, y = _table(rows)
    more = {"subject": rng.integers(0, subjects, rows)} if subjects else {}
    fed = fl.partitions.iid(clients=3, validation=0.2)(fl.Dataset.create({"x": x, "y": y, **more}), seed=0)
    cuts = cut_validation(fed, 5)
    read = _subjects(fed, "train") | _subjects(fed, "validation")
    kept = _subjects(cuts[0], "test")
    assert kept < _subjects(fed, "validation")
    for cut in cuts:
        train, validation = _subjects(cut, "train"), _subjects(cut, "validation")
        assert _subjects(cut, "test") == kept
        assert not train & validation
        assert train | validation | kept == read
        assert len(cut.test) == 0
        assert min(cut.sizes("validation").tolist()) > 0
        assert abs(len(train) - len(_subjects(fed, "train"))) <= 3
    assert _subjects(cuts[0], "train") == _subjects(fed, "train")
    folds = [_subjects(cut, "validation") for cut in cuts]
    assert len(set.union(*folds)) >= 0.9 * sum(map(len, folds)) or subjects == 40
    again = cut_validation(fed, 5)
    assert all(
        torch.equal(a.parts[p].index, b.parts[p].index) for a, b in zip(cuts, again, strict=True) for p in a.parts
    )


def test_no_seed_trains_on_more_samples_if_training_parts_are_cut() -> None:
    part = fl.partitions.iid(clients=3, validation=0.3, max_train_per_client=10)
    sizes = [cut.sizes("train").tolist() for cut in cut_validation(part(fl.Dataset.create(_table(300)), seed=0), 5)]
    assert sizes == [[10, 10, 10]] * 5


def test_classes_keep_their_shares() -> None:
    fed = fl.partitions.iid(clients=3, validation=0.3)(fl.Dataset.create(_table(600)), seed=0)
    for cut in cut_validation(fed, 3):
        shares = [cut.data.y[cut.parts[part].index].double().mean() for part in ("validation", "test", "train")]
        assert max(shares) - min(shares) < 0.08


def test_later_rows_are_never_trained_on_before_earlier_ones() -> None:
    x, y = _table(200)
    data = fl.Dataset.create({"x": x, "y": y, "order": np.arange(200)})
    fed = fl.partitions.iid(clients=2, validation=0.2)(data, seed=0)
    for cut in cut_validation(fed, 3):
        for client in range(cut.n):
            assert cut.indices("train", client).max() < cut.indices("validation", client).min()


def test_a_client_with_one_validation_row_gives_it_to_the_race() -> None:
    fed = fl.partitions.iid(clients=10, validation=0.1)(fl.Dataset.create(_table(60)), seed=0)
    for cut in cut_validation(fed, 5):
        assert fed.sizes("validation").tolist() == cut.sizes("validation").tolist() == [1] * 10


def test_the_answer_is_an_experiment_that_runs_and_names_its_cost(small: dict[str, bytes], tmp_path: Path) -> None:
    advice = json.loads(small["advice.json"])
    experiment = parse(tomllib.loads(small["advised.toml"].decode()))
    assert experiment.methods[0].label == advice["method"]
    assert {"local", "fedavg"} <= {method.label for method in experiment.methods}
    assert len(experiment.head.seeds) == 5
    assert experiment.methods[0].setting.rounds == advice["cost"]["rounds"]
    assert len(advice["clients"]) == 4
    assert {one["choice"] for one in advice["clients"]} <= {str(choice) for choice in Choice}
    file = tmp_path / "advised.toml"
    file.write_bytes(small["advised.toml"])
    call("run", file, "--out", tmp_path / "run", "--set", "seeds=[0]")


def test_the_command_prints_ten_lines_and_json(tmp_path: Path) -> None:
    file, out = tmp_path / "small.toml", tmp_path / "race"
    file.write_text(tomli_w.dumps({**SMALL, "rounds": 1}))
    said = call("advise", file, "--out", out, "--budget", 20)
    assert said.count("answer: ") == 1
    assert len(said.splitlines()) <= 14
    again = call("advise", file, "--out", out, "--budget", 20, "--json")
    assert json.loads(again[again.index("{") : again.rindex("}") + 1]) == json.loads((out / "advice.json").read_text())
    assert "seeds. Use a budget of at least 19" in call(
        "advise", file, "--out", tmp_path / "other", "--budget", 3, code=2
    )


def test_without_validation_data_nothing_is_raced(tmp_path: Path) -> None:
    document = {**SMALL, "partition": {**SMALL["partition"], "validation": 0.0}}
    with pytest.raises(ConfigError, match=r"have no validation data. Set \[partition\] validation"):
        advise(tmp_path / "race", document)
    assert not (tmp_path / "race").exists()


def test_a_method_that_cannot_work_is_left_out_by_name(tmp_path: Path) -> None:
    document = {**SMALL, "sampler": {"kind": "uniform", "clients": 2}}
    advice = advise(tmp_path / "race", {**document, "rounds": 1}, methods=("scaffold", "cfl", "no-such"), budget=20.0)
    assert "no-such" in advice.left_out
    assert all(label not in advice.racing for label in advice.left_out)


def test_a_rule_for_uploads_applies_to_all_methods_but_local_training(tmp_path: Path) -> None:
    """Local training uploads nothing and was refused, so no race could have a robust rule."""
    document = {**SMALL, "aggregator": {"kind": "median"}, "upload_transform": {"kind": "sign"}}
    advice = advise(tmp_path / "race", {**document, "rounds": 1}, budget=20.0)
    assert {"local", "fedavg"} <= {*advice.racing}
    methods = parse(tomllib.loads((tmp_path / "race" / "advised.toml").read_text())).methods
    rules = {method.label: method.setting.aggregator for method in methods}
    assert rules.pop("local") is None
    assert rules
    assert all(get_kind(rule) == "median" for rule in rules.values())


def test_a_setting_that_diverges_ends_no_race(tmp_path: Path) -> None:
    spaces = {"all": {"local.lr": [1e30, 0.1]}}
    advice = advise(tmp_path / "race", {**SMALL, "tune": {"space": spaces}}, methods=("fedopt",), budget=12.0)
    assert advice.params["local.lr"] == 0.1
    lost = advise(tmp_path / "lost", {**SMALL, "tune": {"space": {"fedslr": {"local.lr": [1e30]}}}})
    assert "fedslr" in lost.departures
    assert lost.departures["fedslr"][3]


def test_settings_are_spread_over_the_space_and_begin_with_the_files_own() -> None:
    space = {"local.lr": Range(low=0.01, high=1.0, log=True), "mu": (0.1, 1.0)}
    tried = spread_settings(space, {"local.lr": 0.1, "mu": 1.0}, 9, "fedprox", 0)
    assert tried[0] == {"local.lr": 0.1, "mu": 1.0}
    assert len(tried) == 9
    eighths = [int(8 * np.log10(one["local.lr"] / 0.01) / 2 + 1e-3) for one in tried[1:]]
    assert sorted(min(7, k) for k in eighths) == list(range(8))
    assert tried == spread_settings(space, {"local.lr": 0.1, "mu": 1.0}, 9, "fedprox", 0)
    assert tried != spread_settings(space, {"local.lr": 0.1, "mu": 1.0}, 9, "ditto", 0)


def test_the_frozen_portfolio_has_four_to_six_methods_with_spaces() -> None:
    methods, spaces = read_portfolio()
    assert 4 <= len(methods) <= 6
    assert methods[:2] == ("local", "fedavg")
    assert spaces.keys() == {name for name in methods if name in read_default_spaces()[0]}


@pytest.mark.parametrize("kind", ["regression", "survival", "image"])
def test_other_data_are_raced_too(kind: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(0, 1, (150, 4)).astype(np.float32)
    more: dict[str, Any] = {}
    if kind == "regression":
        data = fl.Dataset.create((x, x[:, 0] + rng.normal(0, 0.1, 150)), task="regression")
    elif kind == "survival":
        times = rng.exponential(np.exp(-x[:, 0]))
        data = fl.Dataset.create((x, np.column_stack([times, rng.random(150) < 0.7])), task="survival")
    else:
        data = fl.Dataset.create((rng.integers(0, 255, (150, 1, 8, 8)).astype(np.uint8), rng.integers(0, 3, 150)))
        more = {"model": {"kind": "cnn", "channels": [4], "hidden": [8]}}
    cut = fl.partitions.iid(clients=3, validation=0.3)
    advice = fl.advise(data, partition=cut, rounds=1, budget=20, progress_bar=False, **more)
    assert {"regression": "r2", "survival": "c_index", "image": "accuracy"}[kind] == advice.metric
    assert advice.verdict in list(Verdict)
    assert len(advice.lines()) <= 14
