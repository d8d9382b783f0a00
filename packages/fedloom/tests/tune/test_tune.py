"""Tuning: equal trials and work for every method, on validation only, and the same after a stop."""

from __future__ import annotations

import csv
import errno
import os
import shutil
import signal
import sys
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from searches import contents, kept, tuning
from typer.testing import CliRunner

import fedloom as fl
from fedloom.algorithms import REGISTRY
from fedloom.errors import CheckpointError, ConfigError, RunDirError, RunStopped
from fedloom.lab.cli import app
from fedloom.lab.experiment import parse
from fedloom.lab.experiment.tuning import Tune
from fedloom.lab.tune import Trial
from fedloom.lab.tune.search import (
    Search,
    build_search_space,
    check_values,
    file_setting_values,
    read_default_spaces,
    replace_params,
)
from fedloom.storage import disk
from fedloom.values import fields_of
from tests.commands import call, end, fork, in_a_fork

RUNNER = CliRunner()
SMALL = """
name = "small"
rounds = 4
seeds = [0, 1]
[data]
source = "digits"
[partition]
kind = "mixed"
clients = 6
labels_per_client = 2
alpha = 0.5
[local]
lr = 0.05
[tune]
trials = 4
startup = 2
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "fedprox"
[[method]]
algorithm = "ditto"
[[method]]
algorithm = "flame"
"""
TWO = SMALL.replace('[[method]]\nalgorithm = "ditto"\n', "").replace('[[method]]\nalgorithm = "flame"\n', "")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    (folder / "small.toml").write_text(SMALL)
    result = RUNNER.invoke(app, ["tune", str(folder / "small.toml"), "--out", str(folder / "out")])
    assert result.exit_code == 0, result.output
    assert "fedavg, trial 0: local.lr = 0.05: complete" in result.output
    return folder / "out"


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def test_processes_that_join_find_the_same_though_one_is_killed(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_trial: object) -> None:
        """Kill the process that ends the first trial of all."""
        with suppress(FileExistsError):
            (tmp_path / "killed").mkdir()
            os.kill(os.getpid(), signal.SIGKILL)

    def search() -> None:
        monkeypatch.setattr("fedloom.lab.tune.tuning.write_report", lambda *_, **__: None)  # a fork cannot draw
        tuning(SMALL, tmp_path / "out").run(die, join=True)

    processes = [fork(search) for _ in range(3)]
    assert sorted(end(process) for process in processes) == [-signal.SIGKILL, 0, 0]
    tried = list[str]()
    tuning(SMALL, tmp_path / "out").run(lambda label, _trial: tried.append(label), join=True)
    assert tried == []
    assert contents(tmp_path / "out") == contents(finished)


def test_an_executor_finds_the_same_and_resumes(finished: Path, tmp_path: Path) -> None:
    class Failing(ThreadPoolExecutor):
        """One of its workers has died, and another one has no data of this process."""

        calls = 0

        def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
            """Make a call; the first one is lost."""
            self.calls += 1
            return super().submit(function if self.calls > 1 else sys.exit, *arguments)

    tried = list[str]()
    with Failing(2) as executor:
        tuning(SMALL, tmp_path / "out").run(lambda label, _trial: tried.append(label), executor=executor)
        assert contents(tmp_path / "out") == contents(finished)
        assert {label: tried.count(label) for label in tried} == dict.fromkeys(
            ("fedavg", "fedprox", "ditto", "flame"), 4
        )
        calls = executor.calls
        tuning(SMALL, tmp_path / "out").run(executor=executor)
        assert executor.calls == calls == 5
        with pytest.raises(ConfigError, match="already distributes the work. Omit"):
            tuning(SMALL, tmp_path / "out").run(join=True, executor=executor)
    with pytest.raises(ConfigError, match="executor must have a method submit"):
        tuning(SMALL, tmp_path / "out").run(executor=3)  # type: ignore[arg-type]


def test_data_of_memory_are_searched_elsewhere(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(0, 1, (120, 4)).astype(np.float32), np.arange(120) % 3
    cut = fl.partitions.iid(clients=3, validation=0.2)
    given = {"partition": cut, "seeds": [0], "rounds": 2, "tune": 2, "progress_bar": False}
    here = fl.compare(["fedavg", "ditto"], (x, y), **given)
    with ThreadPoolExecutor(1) as executor:
        there = fl.compare(["fedavg", "ditto"], (x, y), executor=executor, **given)
    assert there.chosen == here.chosen
    assert there.table()["accuracy"] == here.table()["accuracy"]


def test_a_search_alone_goes_on_with_the_trials_of_one_that_joined(finished: Path, tmp_path: Path) -> None:
    def stop(label: str, trial: Trial) -> None:
        if (label, trial.number) == ("fedprox", 2):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(RunStopped, match="other processes that joined are still running"):
        tuning(SMALL, tmp_path / "out").run(stop, join=True)
    tried = list[tuple[str, int]]()
    tuning(SMALL, tmp_path / "out").run(lambda label, trial: tried.append((label, trial.number)))
    assert tried[0] == ("fedprox", 3)
    assert contents(tmp_path / "out") == contents(finished)


def test_every_method_has_the_same_trials_and_the_same_work(finished: Path) -> None:
    found = rows(finished)
    for label in ("fedavg", "fedprox", "ditto", "flame"):
        assert [int(r["trial"]) for r in found if r["method"] == label] == [0, 1, 2, 3]
    complete = [r for r in found if r["state"] == "complete"]
    assert len({r["samples_backward"] for r in complete}) == 1
    rounds = {r["method"]: int(r["rounds"]) for r in complete}
    assert rounds == {"fedavg": 4, "fedprox": 4, "ditto": 2, "flame": 4}  # Ditto trains two models per round


def test_a_stopped_trial_has_done_less_and_was_below_the_median(finished: Path, tmp_path: Path) -> None:
    text = TWO.replace("trials = 4", "trials = 10").replace("rounds = 4", "rounds = 10")
    found = tuning(text, tmp_path / "out").run()[0]
    pruned = [t for t in found.trials if t.state == "pruned"]
    assert pruned
    for trial in pruned:
        point = max(trial.marks)
        before = [t.marks[point] for t in found.trials[: trial.number] if t.state == "complete"]
        assert max(trial.marks.values()) < np.median(before)
        assert trial.samples_backward < found.trials[0].samples_backward
        assert trial.value is None
    assert all(t.state == "complete" for t in found.trials[:2])


def test_a_trial_ends_after_so_many_simulated_seconds(tmp_path: Path) -> None:
    text = TWO.replace("trials = 4", "trials = 1\nsimulated_seconds = 6.0").replace("rounds = 4", "rounds = 50")
    text = text.replace("seeds = [0, 1]", "seeds = [0]")
    with pytest.raises(ConfigError, match=r"\[tune\] simulated_seconds needs simulated times. Add \[devices\]"):
        tuning(text, tmp_path / "none")
    text = text.replace("[local]", '[devices]\nkind = "lognormal"\nspeed = 300\n[local]')
    text += 'schedule = {kind = "buffered", buffer = 2}\n'
    search = tuning(text, tmp_path / "out")
    for result, method in zip(search.run(), search.experiment.methods, strict=True):
        (trial,) = result.trials
        clock = fl.simulate(method.setting.with_(rounds=trial.rounds), search.federations[0]).state.clock
        assert clock is not None
        newest = clock.history()[:, 2] == trial.rounds
        assert trial.state == "complete"
        assert trial.rounds < 50
        assert clock.now >= 6.0 > clock.history()[~newest, 4].max(initial=0.0)


def test_the_tuned_file_is_complete_and_gives_the_score_that_was_found(finished: Path) -> None:
    document = tomllib.loads((finished / "tuned.toml").read_text())
    experiment = parse(document, "tuned.toml")
    assert experiment.head == parse(tomllib.loads(SMALL)).head
    best = {r["method"]: r for r in rows(finished) if r["chosen"] == "1"}
    fed = experiment.partition(experiment.source.load(), 0)
    for method in experiment.methods:
        row = best[method.label]
        assert method.setting.local.lr == pytest.approx(float(row["local.lr"]), rel=1e-11)  # 12 digits
        assert all(r["value"] <= row["value"] for r in rows(finished) if r["method"] == method.label and r["value"])
        result = fl.simulate(method.setting.with_(seed=0), fed)
        model = "personal" if result.job.has_personal else "global"
        score = result.final(model, "accuracy", "validation").nanmean()
        assert float(score) == pytest.approx(float(row["value"]), abs=1e-12)


def test_equal_work_of_the_tuned_file(finished: Path) -> None:
    experiment = parse(tomllib.loads((finished / "tuned.toml").read_text()), "tuned.toml")
    fed = experiment.partition(experiment.source.load(), 1)
    work = set()
    for method in experiment.methods:
        result = fl.simulate(method.setting.with_(seed=1), fed)
        counted = result.state.records.last("", "", "samples_backward")
        assert counted is not None
        work.add(counted[0])
    assert len(work) == 1


UNEVEN = """
from fedloom.algorithms import Algorithm, Delta, Model
from fedloom.local import Ctx, Nothing, Work, descend


class Uneven(Algorithm):
    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        epochs = EPOCHS(work.round)
        return Delta(descend(down.x, work, steps=work.epochs(epochs)) - down.x), rows

    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        return Model(server.x + up.dw)
"""
ONE = SMALL.partition("[[method]]")[0].replace("rounds = 4", "rounds = 24").replace("trials = 4", "trials = 1")


@pytest.fixture
def tune_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[str, dict[str, str]]]]:
    """Tune one method from the command line: what was printed, and its row of the trials."""
    monkeypatch.chdir(tmp_path)

    def run(method: str, before: str = ONE, epochs: str = "") -> tuple[str, dict[str, str]]:
        Path("uneven.py").write_text(UNEVEN.replace("EPOCHS", f"(lambda round: {epochs or 1})"))
        Path("one.toml").write_text(f"{before}\n[[method]]\n{method}\n")
        result = RUNNER.invoke(app, ["tune", "one.toml", "--out", "out"])
        assert result.exit_code == 0, result.output
        (row,) = rows(Path("out"))
        return result.output, row

    yield run
    sys.modules.pop("uneven", None)


PLAIN = 24 * sum(
    fl.partitions.mixed(clients=6, labels_per_client=2, alpha=0.5)(fl.load("digits"), seed=0).sizes("train")
)


@pytest.mark.parametrize(
    "epochs",
    ["1 if round == 1 else 3", "20 if round == 2 else 1.5", "1 if round < 6 else 4", "5 if round < 4 else 1",
     "max(1, 6 - round // 3)", "1 + round % 2"],
)  # fmt: skip
def test_work_is_equal_where_the_cost_of_a_round_changes(epochs: str, tune_alone: Any) -> None:
    output, row = tune_alone('algorithm = "uneven:Uneven"', epochs=epochs)
    assert 0.85 <= int(row["samples_backward"]) / int(PLAIN) <= 1.1
    assert "warning" not in output
    tuned = tomllib.loads(Path("out/tuned.toml").read_text())
    result = fl.simulate(parse(tuned).methods[0].setting, parse(tuned).partition(fl.load("digits"), 0))
    assert result.state.records.last("", "", "samples_backward")[0] == int(row["samples_backward"])


def test_the_gradients_of_personal_models_are_part_of_the_budget(tune_alone: Any) -> None:
    _, row = tune_alone('algorithm = "fedavg-ft"\nsteps = 40\n[tune.space.fedavg-ft]\nsteps = []')
    assert 0.9 <= int(row["samples_backward"]) / int(PLAIN) <= 1.1
    assert int(row["rounds"]) < 24


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedrep"])
def test_work_is_equal_where_few_clients_take_part(method: str, tune_alone: Any) -> None:
    few = ONE.replace("rounds = 24", "rounds = 16").replace("[local]", "[sampler]\nfraction = 0.34\n[local]")
    _, plain = tune_alone('algorithm = "fedavg"', few)
    shutil.rmtree("out")
    _, row = tune_alone(f'algorithm = "{method}"', few)
    samples, wanted = int(row["samples_backward"]), int(plain["samples_backward"])
    assert abs(samples - wanted) <= max(0.1 * wanted, 0.6 * samples / int(row["rounds"]))  # whole rounds only


def test_work_beyond_the_budget_is_named_everywhere(tune_alone: Any) -> None:
    two = ONE.replace("rounds = 24", "rounds = 2")
    output, row = tune_alone('algorithm = "uneven:Uneven"', two, "3")
    assert "may diverge" not in output
    sentence = (
        "Uneven did a different amount of work: in its 1 round, it computed 150 % of the gradients of 2 plain rounds."
    )
    assert int(row["rounds"]) == 1
    assert f"warning: {sentence}" in output
    assert f"# {sentence}" in Path("out/tuned.toml").read_text()
    assert f"**{sentence}**" in Path("out/tuning.md").read_text()


def test_trials_under_a_delta_are_counted_everywhere(tune_alone: Any) -> None:
    sentence = "settings were chosen by 1 trial on the same data. A run's epsilon does not include"
    text = ONE.replace("rounds = 24", "rounds = 2")
    noise = 'algorithm = "fedavg"\nupload_transform = {kind = "gaussian-noise", sigma = 1.0, clip = 1.0, delta = 1e-5}'
    output, _ = tune_alone(noise, text, "3")
    for place in (output, Path("out/tuned.toml").read_text(), Path("out/tuning.md").read_text()):
        assert sentence in place


def test_a_longer_final_run_has_equal_work_too(tune_alone: Any) -> None:
    longer = ONE.replace("[tune]", "[tune]\nrounds = 6")
    output, _ = tune_alone('algorithm = "ditto"', longer)
    sentence = "Trials did the work of 6 rounds, but the runs do the work of 24, and a chosen setting may diverge in "
    sentence += "longer runs."
    for place in (output, Path("out/tuned.toml").read_text(), Path("out/tuning.md").read_text()):
        assert f"{sentence} Set [tune] rounds = 24 to search with the same number of rounds." in place
    tuned = tomllib.loads(Path("out/tuned.toml").read_text())
    result = fl.simulate(parse(tuned).methods[0].setting, parse(tuned).partition(fl.load("digits"), 0))
    assert 0.9 <= result.state.records.last("", "", "samples_backward")[0] / int(PLAIN) <= 1.1


def test_the_tuned_file_runs(finished: Path, tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["run", str(finished / "tuned.toml"), "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output


def test_no_test_data_are_read(tmp_path: Path) -> None:
    data = fl.load("digits")
    x, y = data.x.reshape(len(data), -1).numpy().astype(np.float32), data.y.numpy()
    np.savez(tmp_path / "clean.npz", x=x, y=y)
    clean = TWO.replace('"digits"', f'"{tmp_path}/clean.npz"')
    experiment = parse(tomllib.loads(clean))
    federation = experiment.partition(experiment.source.load(), 0)
    poisoned = x.copy()
    poisoned[federation.parts["test"].index.numpy()] = 1e6
    np.savez(tmp_path / "poisoned.npz", x=poisoned, y=y)
    bad = TWO.replace('"digits"', f'"{tmp_path}/poisoned.npz"')
    spoilt = parse(tomllib.loads(bad))
    result = fl.simulate(spoilt.methods[0].setting, spoilt.partition(spoilt.source.load(), 0))
    assert float(result.final("global", "loss").mean()) > 1e3  # a run that reads them shows it
    values = []
    for name, text in (("clean", clean), ("poisoned", bad)):
        search = tuning(text, tmp_path / name)
        assert all(not len(fed.parts["test"].index) for fed in search.federations.values())
        search.run()
        values.append((tmp_path / name / "trials.csv").read_bytes())
    assert values[0] == values[1]


class Killed(Exception):
    pass


def test_stopped_between_trials_and_run_again(finished: Path, tmp_path: Path) -> None:
    count = 0

    def tell(*_: Any) -> None:
        nonlocal count
        count += 1
        if count in (2, 6, 7):
            raise Killed

    for _ in range(3):
        with pytest.raises(Killed):
            tuning(SMALL, tmp_path / "out").run(tell)
    tuning(SMALL, tmp_path / "out").run()
    assert contents(tmp_path / "out") == contents(finished)


@pytest.mark.parametrize("crash_at", [60, 200])
def test_killed_within_a_trial_and_run_again(crash_at: int, finished: Path, tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(SMALL + "[engine]\ncheckpoint_every = 1e-9\n")
    command = ["tune", file, "--out", tmp_path / "out"]
    assert in_a_fork(lambda: call(*command), crash_at) == 137
    assert not (tmp_path / "out" / "tuned.toml").exists()
    call(*command)
    found, whole = contents(tmp_path / "out"), contents(finished)
    assert found.pop("tuned.toml") != whole.pop("tuned.toml")  # it has [engine]
    assert found == whole


def test_ctrl_c_leaves_a_search_that_goes_on(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="Run the same command again"):
        tuning(SMALL, tmp_path / "out").run(lambda *_: signal.raise_signal(signal.SIGINT))
    assert not (tmp_path / "out" / "tuned.toml").exists()
    tuning(SMALL, tmp_path / "out").run()
    assert contents(tmp_path / "out") == contents(finished)


def test_methods_side_by_side_give_the_same(finished: Path, tmp_path: Path) -> None:
    tuning(SMALL + "[engine]\nworkers = 2\n", tmp_path / "out").run()
    for name in ("trials.csv", "tuning.md"):
        assert (tmp_path / "out" / name).read_bytes() == (finished / name).read_bytes()


def test_more_trials_and_another_method_keep_what_was_tried(finished: Path, tmp_path: Path) -> None:
    tuning(TWO.replace("trials = 4", "trials = 2"), tmp_path / "out").run()
    tuning(SMALL, tmp_path / "out").run()
    assert contents(tmp_path / "out") == contents(finished)


def test_every_method_can_be_gone_on_with(tmp_path: Path) -> None:
    methods = "".join(f'[[method]]\nalgorithm = "{name}"\n' for name in REGISTRY if name != "fedbn")
    text = SMALL.partition("[[method]]")[0] + methods
    tuning(text, tmp_path / "out")
    assert tuning(text, tmp_path / "out").goal.rounds == 4


def test_seeds_and_metric(tmp_path: Path) -> None:
    text = TWO.replace("trials = 4", 'trials = 2\nseeds = [0, 1]\nmetric = "loss"\nmodel = "global"')
    both = tuning(text, tmp_path / "both").run()[0]
    single = [
        tuning(text.replace("seeds = [0, 1]\nm", f"seeds = [{s}]\nm"), tmp_path / str(s)).run()[0] for s in (0, 1)
    ]
    first = [f.trials[0].value for f in single]
    assert both.trials[0].value == pytest.approx(np.mean(np.array(first, float)), abs=1e-12)
    assert both.best is not None
    assert both.best.value == min(t.value for t in both.trials if t.value is not None)
    assert both.trials[0].samples_backward == sum(f.trials[0].samples_backward for f in single)


def test_a_score_may_be_weighted_by_samples(tmp_path: Path) -> None:
    plain = TWO.replace("trials = 4", 'trials = 2\nmetric = "accuracy/weighted"\nmodel = "global"\nequal_work = false')
    search = tuning(plain, tmp_path / "out")
    found = search.run()
    for f in found:
        for trial in f.trials:
            made = parse(replace_params(tomllib.loads(plain), f.study.place, trial.params))
            run = made.methods[f.study.place].setting.with_(seed=search.goal.seeds[0], rounds=trial.rounds)
            result = fl.simulate(run, made.partition(made.source.load(), search.goal.seeds[0]))
            values = result.final("global", "accuracy", "validation").numpy()
            sizes = search.federations[search.goal.seeds[0]].sizes("validation").numpy()
            there = np.isfinite(values) & (sizes > 0)
            assert len(set(sizes[there])) > 1
            assert trial.value == pytest.approx(np.average(values[there], weights=sizes[there]), abs=1e-6)
    assert "weighted by their samples" in (tmp_path / "out" / "tuning.md").read_text()
    with pytest.raises(ConfigError, match="metric"):
        tuning(plain.replace("/weighted", "/best"), tmp_path / "none")


def test_a_space_of_the_file_is_kept_to(tmp_path: Path) -> None:
    space = '[tune.space.all]\n"local.lr" = [0.01, 0.1]\n[tune.space.fedprox]\nmu = {low = 2.0, high = 3.0}\n'
    found = tuning(TWO + space, tmp_path / "out").run()
    for f in found:
        for trial in f.trials:
            assert trial.params["local.lr"] in (0.01, 0.1)
            assert 2.0 <= trial.params.get("mu", 2.5) <= 3.0
    document = tomllib.loads((tmp_path / "out" / "tuned.toml").read_text())
    assert 2.0 <= document["method"][1]["mu"] <= 3.0
    assert "the experiment file" in (tmp_path / "out" / "tuning.md").read_text()


def test_diverged_trials_are_kept_as_failed(tmp_path: Path) -> None:
    text = TWO + '[tune.space.fedprox]\n"local.lr" = [1e25]\n'
    with pytest.raises(RunStopped, match="no trial of fedprox completed: diverged"):
        tuning(text, tmp_path / "out").run()
    assert not (tmp_path / "out" / "tuned.toml").exists()
    states = {r["method"]: r["state"] for r in rows(tmp_path / "out")}
    assert states["fedprox"] == "failed"


def test_values_that_a_method_refuses_on_these_clients_are_kept_as_failed(tmp_path: Path) -> None:
    """GIFAIR's lam has a bound of which one has to know the clients."""
    gifair = TWO.replace('"fedprox"', '"gifair-fl"') + '[tune.space.gifair-fl]\nlam = ["1x", "2x", "4x"]\n'
    _, found = tuning(gifair, tmp_path / "out").run()
    states = {trial.params["lam"]: trial.state for trial in found.trials}
    assert states == {"1x": "complete", "2x": "failed", "4x": "failed"}
    assert found.best is not None
    assert found.best.params["lam"] == "1x"
    assert all("must be below" in trial.reason for trial in found.trials if trial.state == "failed")


BAD = {
    "no validation": (("alpha = 0.5", "alpha = 0.5\nvalidation = 0.0"), "the clients have no validation data. Set"),
    "key": (("trials = 4", "trails = 4"), "did you mean 'trials'"),
    "trials": (("trials = 4", "trials = 0"), "greater than or equal to 1"),
    "method": (("startup = 2", "startup = 2\n[tune.space.fedpox]\nmu = [1.0]"), "did you mean 'fedprox'"),
    "setting": (("startup = 2", "startup = 2\n[tune.space.fedprox]\nnu = [1.0]"), "unknown setting 'nu'"),
    "value": (("startup = 2", "startup = 2\n[tune.space.fedprox]\nmu = [-1.0]"), "mu = -1.0 cannot be tried"),
    "range": (
        ("startup = 2", "startup = 2\n[tune.space.fedprox]\nmu = {low = 2, high = 1}"),
        "low must be less than high",
    ),
    "logarithm": (
        ("startup = 2", "startup = 2\n[tune.space.fedprox]\nmu = {low = 0, high = 1, log = true}"),
        "needs low > 0",
    ),
    "empty": (("startup = 2", 'startup = 2\n[tune.space.fedavg]\n"local.lr" = []'), "fedavg has no setting to search"),
    "metric": (("startup = 2", 'startup = 2\nmetric = "auroc"'), "it must be one of: accuracy, macro_f1, loss"),
    "model": (("startup = 2", 'startup = 2\nmodel = "personal"'), "fedavg has only these models: global"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_input_is_refused_before_any_work(case: str, tmp_path: Path) -> None:
    (old, new), sentence = BAD[case]
    file = tmp_path / "bad.toml"
    file.write_text(SMALL.replace(old, new))
    result = RUNNER.invoke(app, ["tune", str(file), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    assert result.output.startswith("error: ")
    assert sentence in result.output
    assert not (tmp_path / "out").exists()


def test_another_search_and_a_foreign_folder_are_refused(finished: Path, tmp_path: Path) -> None:
    before = contents(finished)
    with pytest.raises(RunDirError, match=r"a different search: method ditto: local.lr was 0.05, now it is 0.1"):
        tuning(SMALL.replace("lr = 0.05", "lr = 0.1"), finished)
    with pytest.raises(RunDirError, match=r"tune.rounds was 4, now it is 3"):
        tuning(SMALL.replace("startup = 2", "startup = 2\nrounds = 3"), finished)
    assert contents(finished) == before
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(RunDirError, match="contains no search"):
        tuning(SMALL, tmp_path, force=True)
    (finished.parent / "copy" / "trials").mkdir(parents=True)
    (finished.parent / "copy" / "search.toml").write_bytes((finished / "search.toml").read_bytes())
    whole = (finished / "trials" / "fedavg.log").read_bytes()
    for damaged in (b"[{}]\n", whole[:40] + b"\n" + whole[40:], whole.replace(b"rounds", b"sounds"), b"\x00\n" + whole):
        (finished.parent / "copy" / "trials" / "fedavg.log").write_bytes(damaged)
        with pytest.raises(RunDirError, match="is damaged"):
            tuning(SMALL, finished.parent / "copy").run()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"tune = 1\n", b"[[tune]]\n", b"rounds"])
def test_choices_of_a_search_that_cannot_be_read_are_damaged(content: bytes, finished: Path, tmp_path: Path) -> None:
    out = shutil.copytree(finished, tmp_path / "out")
    (out / "search.toml").write_bytes(content)
    with pytest.raises(RunDirError, match=r"search.toml is damaged: .*. Choose another --out, or start over with"):
        tuning(SMALL, out).run()
    assert (out / "search.toml").read_bytes() == content
    tuning(SMALL, out, force=True).run()
    assert contents(out) == contents(finished)


@pytest.mark.parametrize("left", [0.1, 0.5, 0.99])
def test_a_journal_that_a_crash_has_cut_short_is_gone_on_with(left: float, finished: Path, tmp_path: Path) -> None:
    out = shutil.copytree(finished, tmp_path / "out")
    for path in (out / "trials").iterdir():
        text = path.read_bytes()
        path.write_bytes(text[: int(left * len(text))])
    tuning(SMALL, out).run()
    assert contents(out) == contents(finished)


def test_a_full_disk_loses_no_finished_trial(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(op: str, path: Path) -> None:
        if op == "tear" and path.name == "fedprox.log" and path.stat().st_size > 2000:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "hook", full)
    with pytest.raises(CheckpointError, match=r"fedprox\.log could not be written: the disk is full"):
        tuning(SMALL, tmp_path / "out").run()
    assert len(kept(tmp_path / "out" / "trials" / "fedavg.log")) == 4
    assert 0 < len(kept(tmp_path / "out" / "trials" / "fedprox.log")) < 4
    monkeypatch.undo()
    tuning(SMALL, tmp_path / "out").run()
    assert contents(tmp_path / "out") == contents(finished)


def test_every_default_space_fits_its_method() -> None:
    spaces, sources = read_default_spaces()
    assert set(spaces) - {"all"} <= set(REGISTRY)
    assert all(sources.values())
    document = {"data": {"source": "digits"}, "method": [{"algorithm": name} for name in REGISTRY]}
    experiment = parse(document)
    for place, method in enumerate(experiment.methods):
        space = build_search_space(method, experiment.tune, "defaults")
        assert space
        check_values(document, place, space, "defaults")
        own = file_setting_values(method, space)
        fields = fields_of(method.entry)
        open_ = [name for name in space if name in fields and fields[name].default is None]
        derived = [name for name in open_ if "1x" not in space[name]]
        assert (own is None) == bool(derived), (method.algorithm, derived)
        for name in open_:  # a derived option is looked for around its rule; FairFed's belongs to its weigher
            assert method.algorithm == "fairfed" or {"0.5x", "1x", "2x"} <= set(space[name])
        if own is not None:
            assert (
                parse(replace_params(document, place, own)).methods[place].setting.algorithm == method.setting.algorithm
            )


def test_a_suggestion_depends_on_what_was_tried_only() -> None:
    experiment = parse({"data": {"source": "digits"}, "method": [{"algorithm": "fedprox"}]})
    space = build_search_space(experiment.methods[0], experiment.tune, "")
    search = Search(space, Tune(), "fedprox", True, None)
    trials: list[Trial] = []
    for number in range(15):
        params = search.ask(trials).params
        assert search.ask(trials).params == params
        value = -abs(np.log10(params["local.lr"]) + 1)
        trials.append(Trial(number=number, params=params, state="complete", value=value, rounds=1, samples_backward=1))
    other = Search(space, Tune(seed=1), "fedprox", True, None).ask([])
    assert other.params != trials[0].params
    best = search.best(trials)
    assert best is not None
    assert best.value == max(t.value for t in trials if t.value is not None)
