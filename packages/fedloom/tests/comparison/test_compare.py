"""fl.compare: what a file gives, in one call, with whatever Python holds."""

from __future__ import annotations

import gc
import math
import os
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from scipy import stats
from statsmodels.stats.multitest import multipletests
from torch import nn

import fedloom as fl
from fedloom.algorithms import Algorithm, Delta, Ditto, FedProx, Model
from fedloom.errors import ConfigError, RunDirError, RunStopped
from fedloom.lab.experiment import Plan, parse
from fedloom.lab.printing import print_results
from fedloom.lab.report.comparison.plots import critical_difference
from fedloom.lab.report.comparison.recorded import RecordedComparison
from fedloom.lab.tune import Tuning
from fedloom.local import Ctx, Nothing, Work, descend
from tests.commands import in_a_fork

CUT = fl.partitions.dirichlet(clients=6, alpha=0.3, min_size=20)
PAIR = (np.ones((9, 2)), np.arange(9) % 2)
SHORT: dict[str, Any] = {"rounds": 3, "local": {"lr": 0.1}, "progress_bar": False}
FILE = """
name = "comparison"
rounds = 3
seeds = [0, 1, 2, 3, 4]
[data]
source = "digits"
[partition]
kind = "dirichlet"
clients = 6
alpha = 0.3
min_size = 20
[local]
lr = 0.1
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "local"
[[method]]
algorithm = "ditto"
lam = 0.5
[[method]]
algorithm = "fedavg"
label = "wide"
model = { kind = "mlp", hidden = [16] }
rounds = 2
"""
METHODS: dict[str, Any] = {
    "fedavg": "fedavg",
    "local": fl.algorithms.REGISTRY["local"](),
    "ditto": Ditto(lam=0.5),
    "wide": {"algorithm": "fedavg", "model": {"kind": "mlp", "hidden": [16]}, "rounds": 2},
}


class Half(Algorithm):
    """Half of FedAvg's step."""

    factor: float = 0.5

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        return Delta(self.factor * (descend(down.x, work) - down.x)), rows

    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        return Model(server.x + up.dw)


class Net(nn.Module):
    """A network of a user."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body, self.top = nn.Linear(64, 12), nn.Linear(12, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(torch.relu(self.body(x.flatten(1))))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fl.compare(METHODS, "digits", partition=CUT, folder=tmp_path_factory.mktemp("compare") / "run", **SHORT)


def test_a_file_and_python_give_the_same_numbers(whole: Any, tmp_path: Path) -> None:
    Plan(parse(tomllib.loads(FILE)), tmp_path / "run").run(page=False)
    by_file, by_python = (pq.read_table(folder / "metrics.parquet") for folder in (tmp_path / "run", whole.folder))
    assert by_file.equals(by_python)
    settings = [tomllib.loads((folder / "experiment.toml").read_text()) for folder in (tmp_path / "run", whole.folder)]
    assert settings[0] == settings[1]
    assert RecordedComparison(tmp_path / "run", "local").significance().equals(whole.significance("local"))


def test_significance_is_that_of_scipy_and_statsmodels(whole: Any) -> None:
    means = {
        m: np.array([float(whole[m, s].final().nanmean()) for s in range(5)])
        for m in ("fedavg", "local", "ditto", "wide")
    }
    rows = {row["method"]: row for row in whole.significance().to_pylist()}
    assert whole.baseline == "local"
    assert rows.keys() == {"fedavg", "ditto", "wide", "local or fedavg"}
    split = pq.read_table(whole.folder / "partition.parquet").to_pandas()
    wider = math.sqrt(1 + 5 * split["tested"].sum() / split["size"].sum())  # Nadeau and Bengio, Equation 7 for k = 5
    gaps = {m: means[m] - means["local"] for m in rows if m in means}
    p = [
        2 * stats.t.sf(abs(gaps[m].mean()) / stats.sem(gaps[m]) / wider, 4) if m in gaps else rows[m]["p"] for m in rows
    ]
    holm = multipletests(p, method="holm")[1]
    for (method, row), raw, corrected in zip(rows.items(), p, holm, strict=True):
        assert (row["p"], row["p_holm"]) == (pytest.approx(raw), pytest.approx(corrected))
        assert (row["verdict"] != "inconclusive") == (abs(row["difference"]) > row["half_width"]) == (corrected <= 0.05)
        if method in means:
            assert row["difference"] == pytest.approx((means[method] - means["local"]).mean())


def test_methods_within_a_stated_margin_are_equivalent_and_without_one_none_is(whole: Any) -> None:
    assert "equivalent" not in {row["verdict"] for row in whole.significance().to_pylist()}
    wide = whole.significance(margin=10.0).to_pylist()
    open_ones = [row for row in whole.significance().to_pylist() if row["verdict"] == "inconclusive"]
    assert open_ones
    assert {row["method"] for row in wide if row["verdict"] == "equivalent"} == {row["method"] for row in open_ones}
    for row in open_ones:
        ends = abs(row["difference"]) + row["half_width"]
        for margin, verdict in ((1.001 * ends, "equivalent"), (0.999 * ends, "inconclusive")):
            found = {r["method"]: r["verdict"] for r in whole.significance(margin=margin).to_pylist()}
            assert found[row["method"]] == verdict
    for wrong in (0, -0.1, math.nan, math.inf, True, "0.1"):
        with pytest.raises(ConfigError, match="margin must be a number greater than 0"):
            whole.significance(margin=wrong)


def test_a_verdict_says_what_it_is_about_and_a_directory_of_an_earlier_version_opens(
    whole: Any, tmp_path: Path
) -> None:
    place = tmp_path / "earlier"
    shutil.copytree(whole.folder, place)
    table = pq.read_table(place / "partition.parquet")
    pq.write_table(table.drop_columns(["tested", "tests"]), place / "partition.parquet")
    earlier = RecordedComparison(place)
    pairs = {row["method"]: row["half_width"] for row in earlier.significance().to_pylist()}
    wider = {row["method"]: row["half_width"] for row in whole.significance().to_pylist()}
    assert all(wider[method] > half for method, half in pairs.items())
    assert "Verdicts apply to these samples" in earlier.significance_latex()
    assert "Verdicts apply to new samples from the same source" in whole.significance_latex()
    fed = CUT(fl.load("digits"), seed=7)  # whose test parts are those of every seed
    fixed = fl.compare(["local", "fedavg"], fed, seeds=range(5), **SHORT)
    assert "Verdicts apply to these samples" in fixed.significance_latex()


def test_what_it_gives(whole: Any, tmp_path: Path) -> None:
    table = whole.table().to_pylist()
    assert [row["method"] for row in table] == ["fedavg", "local", "ditto", "wide", "local or fedavg"]
    assert table[2]["model"] == "hybrid"
    assert table[0]["accuracy"] == pytest.approx(
        np.mean([float(whole["fedavg", s].final().nanmean()) for s in range(5)])
    )
    assert whole.to_pandas().shape[0] == 5
    assert whole.latex().count("\\\\\n") == 6
    assert "\\mathbf" in whole.latex(["accuracy"])
    assert "every method compared with local" in whole.significance_latex()
    page = whole.report(tmp_path / "page.html")
    assert "Every method compared with local" in page.read_text()
    assert (tmp_path / "page" / "pairs.csv").exists()
    drawn = whole.plot().to_dict()
    assert {len(rows) for rows in drawn["datasets"].values()} == {5, 25}
    shown = whole._repr_html_()
    assert "<table>" in shown
    assert "<svg" in shown
    bundle = whole.plot().properties(width=200)._repr_mimebundle_()
    assert next(iter(bundle)).startswith("application/vnd.vegalite.v")
    assert "<svg" in bundle["image/svg+xml"]
    assert "text/html" not in bundle  # Altair's page fetches its scripts
    lines = repr(whole).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:6]] == [row["method"] for row in table]
    assert [line.split(":")[0] for line in lines[6:]] == ["  Answer", "  Compared models", "  Cost per run"]
    assert len(fl.open_run(whole.folder)) == 20


def test_what_it_has_not_is_named(whole: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"no result for 'fedavg'. Use a label and a seed from .*, as in comparison\['fedavg', 0\]"
    ):
        whole["fedavg"]
    for ask in (whole.plot, lambda name: whole.significance(figure=name)):
        with pytest.raises(ConfigError, match="unknown figure 'acuracy'; did you mean 'accuracy'"):
            ask("acuracy")


def test_a_note_on_the_data_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    x = np.random.default_rng(0).normal(size=(400, 3)).astype(np.float32)
    fl.compare(["fedavg", "local"], (x, 1 + (x[:, 0] > 0)), partition=CUT, seeds=[0], rounds=1)
    assert capsys.readouterr().err.count("data: the data contain no sample of 1 of their 3 classes ('0')") == 1


def unread() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("opened", [lambda: None, unread])
def test_standard_error_that_takes_nothing_ends_no_comparison(
    opened: Callable[[], TextIO | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, stream = np.random.default_rng(0).normal(size=(400, 3)), opened()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", stream)
        blind = fl.compare(["fedavg"], (x, 1 + (x[:, 0] > 0)), partition=CUT, seeds=[0], rounds=1)
    assert blind["fedavg", 0].final().shape == (6,)
    if stream is not None:
        with pytest.raises(BrokenPipeError):
            stream.close()


def test_the_same_call_goes_on_and_another_is_refused(tmp_path: Path) -> None:
    small: dict[str, Any] = {"data": "digits", "partition": CUT, "seeds": range(2), "folder": tmp_path / "run", **SHORT}
    first = fl.compare({"fedavg": "fedavg"}, **small)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "checkpoints").rglob("*.safetensors")}
    more = fl.compare({"fedavg": "fedavg", "half": Half()}, **small)
    assert before
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert torch.equal(first["fedavg", 1].final(), more["fedavg", 1].final())
    assert not torch.equal(more["half", 1].final(), more["fedavg", 1].final())
    with pytest.raises(
        RunDirError, match=r"contains a different experiment: .*lr was 0.1, now it is 0.2. Choose another folder"
    ):
        fl.compare({"fedavg": "fedavg"}, **{**small, "local": {"lr": 0.2}})
    with pytest.raises(RunDirError):
        fl.compare({"half": Half(factor=0.25)}, **small)


def test_own_module_method_and_arrays_of_this_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Mine(Half):
        """A class that no import path leads to."""

    data = fl.load("digits")
    x, y = np.asarray(data.x).astype(np.float32).reshape(len(data), -1), np.asarray(data.y)
    found = fl.compare(
        {"mine": Mine(), "plain": Mine(factor=1.0), "fedavg": "fedavg"}, (x, y), Net, partition=CUT, seeds=[3, 4],
        folder=tmp_path / "run", **{**SHORT, "progress_bar": True},
    )  # fmt: skip
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "fedavg, seed 4: round" in printed.err
    loss = {m: found[m, 3].final(metric="loss") for m in ("mine", "plain", "fedavg")}
    assert torch.equal(loss["plain"], loss["fedavg"])
    assert not torch.equal(loss["mine"], loss["fedavg"])
    verdicts = {row["method"]: row["verdict"] for row in found.significance("fedavg").to_pylist()}
    assert verdicts == {"plain": "not tested", "mine": "not tested"}
    reasons = {row["method"]: row["reason"] for row in found.significance("fedavg").to_pylist()}
    assert reasons == {"plain": "same models", "mine": "fewer than five seeds"}
    assert isinstance(found["mine", 3].models["global"], nn.Module)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "checkpoints").rglob("*.safetensors")}
    fl.compare({"mine": Mine()}, (x, y), Net, partition=CUT, seeds=[3, 4], folder=tmp_path / "run", **SHORT)
    assert all(path.stat().st_mtime_ns == time for path, time in before.items() if path.exists())


def test_a_federation_is_the_same_with_every_seed() -> None:
    fed = CUT(fl.load("digits"), seed=7)
    found = fl.compare([FedProx(mu=0.0), "fedavg"], fed, seeds=[0, 1], **SHORT)
    assert found.results.keys() == {(m, s) for m in ("fedprox", "fedavg") for s in (0, 1)}
    for seed in (0, 1):
        alone = fl.simulate("fedavg", fed, seed=seed, rounds=3, local={"lr": 0.1})
        assert torch.equal(found["fedavg", seed].final(), alone.final())
    folder = found.folder
    assert folder.exists()
    del found
    gc.collect()
    assert not folder.exists()


def test_clients_may_come_as_a_list_of_pairs(tmp_path: Path) -> None:
    data = fl.load("digits")
    x, y = np.asarray(data.x).astype(np.float32).reshape(len(data), -1), np.asarray(data.y)
    cuts = [slice(k, k + 90) for k in range(0, 450, 90)]
    clients = [((x[c][:60], y[c][:60]), (x[c][60:], y[c][60:])) for c in cuts]
    found = fl.compare(["fedavg", "local"], clients, seeds=[0, 1], folder=tmp_path / "run", **SHORT)
    alone = fl.simulate("local", clients, seed=1, rounds=3, local={"lr": 0.1})
    assert torch.equal(found["local", 1].final(), alone.final())
    by_name = dict(zip("abcde", clients, strict=True))
    named = fl.compare(["local"], by_name, seeds=[1], **SHORT)
    assert torch.equal(named["local", 1].final(), alone.final())
    with pytest.raises(RunDirError, match="a different experiment"):
        fl.compare(["fedavg"], clients[:4], seeds=[0, 1], folder=tmp_path / "run", **SHORT)


def test_a_search_is_that_of_a_file(tmp_path: Path) -> None:
    tuned = FILE.replace("seeds = [0, 1, 2, 3, 4]", "seeds = [0, 1]") + "[tune]\ntrials = 3\n"
    found = Tuning(tomllib.loads(tuned), "file", tmp_path / "file").run()
    there = fl.compare(METHODS, "digits", partition=CUT, seeds=[0, 1], tune=3, folder=tmp_path / "run", **SHORT)
    assert there.chosen == {f.study.method.label: f.best.params for f in found if f.best}
    document = tomllib.loads((tmp_path / "file" / "tuned.toml").read_text())
    rounds = {m.label: m.setting.rounds for m in parse(document).methods}
    assert {label: there[label, 0].rounds for label in rounds} == rounds
    assert (tmp_path / "run-tune" / "trials.csv").read_text() == (tmp_path / "file" / "trials.csv").read_text()


def test_a_method_of_an_experiment_has_its_own_model_and_task() -> None:
    own = FILE.replace("rounds = 2\n", 'rounds = 2\ntask = { metrics = ["balanced_accuracy"] }\n')
    plan = parse(tomllib.loads(own))
    assert [type(m.setting.model).__name__ for m in plan.methods] == [
        "Softmax", "Softmax", "Softmax", "MLP"]  # fmt: skip
    assert plan.methods[3].setting.task.metrics == ("balanced_accuracy",)
    assert plan.methods[0].setting.task.metrics == ()
    assert parse(plan.settings()).settings() == plan.settings()
    assert ["model" in table for table in plan.settings()["method"]] == [False, False, False, True]
    with pytest.raises(ConfigError, match=r"\[\[method\]\] 4: model: unknown key 'hiden'"):
        parse(tomllib.loads(FILE.replace("hidden", "hiden")))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"partition": None}, "the data are not split"),
        ({"partition": "dirichlt"}, "did you mean 'dirichlet'"),
        ({"methods": {}}, "methods must be a dict that maps labels to methods"),
        ({"methods": "fedavg"}, "methods must be a dict that maps labels to methods"),
        ({"methods": ["fedavg", "fedavg"]}, "two methods have the label 'fedavg'"),
        ({"methods": {3: "fedavg"}}, "a label must be printable text, got 3"),
        ({"methods": {"a": 3}}, "a: must be a method such as"),
        ({"methods": {"a": {"lam": 1}}}, "a: algorithm is missing"),
        ({"methods": {"a": {"algorithm": "ditto", "lambda": 1}}}, "a: unknown key 'lambda'"),
        ({"methods": {"a": {"algorithm": Ditto(), "local": {"lrr": 1}}}}, "a: local: unknown key 'lrr'"),
        ({"methods": {"a": {"algorithm": "ditto", "lr": 0.1}}}, "a: unknown key 'lr'; it belongs in local="),
        ({"methods": {"a": {"algorithm": Ditto(), "epochs": 2}}}, r"a: unknown key 'epochs'; it belongs in local="),
        ({"methods": {"a": {"algorithm": "fedavg", "rounds": "x"}}}, "a: rounds: input should be a valid integer"),
        ({"methods": {"a": Ditto()}, "lam": 3.0}, "unknown key 'lam'; it is an option of a. Set it there"),
        ({"lr": 0.1}, r"unknown key 'lr'; it belongs in local="),
        ({"methods": ["fedavgg"]}, "did you mean 'fedavg'"),
        ({"baseline": "ditto"}, "baseline: unknown method to compare with 'ditto'"),
        ({"compare_model": "best"}, "compare_model: unknown choice 'best'"),
        ({"seeds": [0, 0]}, "every seed may occur only once"),
        ({"seeds": 5}, "seeds must be a sequence of whole numbers"),
        ({"seeds": []}, r"seeds must be a sequence of whole numbers, such as range\(5\), got \[\]"),
        ({"data": [(*PAIR, *PAIR)] * 2, "partition": None}, r"client 0: features without targets. Pass {'train':"),
        ({"tune": {"trial": 3}}, "tune: unknown key 'trial'"),
        ({"tune": "yes"}, "tune must be a number of trials"),
        ({"round": 3}, "unknown key 'round'"),
        ({"compare_modle": "all"}, r"compare: unknown key 'compare_modle'; did you mean 'compare_model'\?$"),
        ({"algorithm": "ditto"}, "compare: unknown key 'algorithm'"),
        ({"seed": 1}, r"`seed` sets the seed of a single run. Pass seeds=\[1\]"),
        ({"methods": {"a": {"algorithm": "ditto", "seeds": [1]}}}, r"methods share it. Pass compare\(..., seeds="),
        ({"methods": {"a": {"algorithm": "ditto", "local": {"mu": 1}}}}, "a: local: unknown key 'mu'; it is an option"),
        ({"data": None}, "data is missing"),
        ({"folder": 3}, "folder must be a path, got 3"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_a_sentence_before_any_work(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    call: dict[str, Any] = {"methods": ["fedavg"], "data": "digits", "partition": CUT, "folder": tmp_path / "run"}
    with pytest.raises(ConfigError, match=sentence):
        fl.compare(**{**call, **SHORT, **change})
    assert not (tmp_path / "run").exists()


class Breaks(Half):
    """A method whose second round fails."""

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        if work.round == 2:
            raise ValueError("broken by design")
        return Delta(descend(down.x, work) - down.x), rows


def test_a_method_that_fails_is_named_and_the_others_go_on() -> None:
    found = fl.compare({"breaks": Breaks(), "fedavg": "fedavg"}, "digits", partition=CUT, seeds=[0, 1], **SHORT)
    assert found.results.keys() == {("fedavg", 0), ("fedavg", 1)}
    assert "broken by design" in found.failures["breaks", 1]
    assert "breaks, seed 0: client step failed" in repr(found)
    with pytest.raises(RunStopped, match=r"no run has a result; breaks, seed 0: .*broken by design"):
        fl.compare({"breaks": Breaks()}, "digits", partition=CUT, seeds=[0, 1], **SHORT)


def test_one_method_is_compared_with_nothing_and_the_same_models_have_no_difference() -> None:
    one = fl.compare(["fedavg"], "digits", partition=CUT, seeds=[0, 1], **SHORT)
    for ask in (one.significance, one.significance_latex):
        with pytest.raises(ConfigError, match="fedavg is the only method"):
            ask()
    twice = fl.compare({"one": "fedavg", "other": "fedavg"}, "digits", partition=CUT, seeds=[0, 1], **SHORT)
    assert re.search(r"other: [\d.]+ ± [\d.]+, not tested \(same models\)$", repr(twice), re.MULTILINE)


def test_a_preset_that_was_made_keeps_its_name() -> None:
    made = fl.algorithms.REGISTRY["centralized"]()
    found = fl.compare([made, "local"], "digits", partition=CUT, seeds=[0], **SHORT)
    rows = {row["method"]: row["algorithm"] for row in found.table().to_pylist()}
    assert rows == {"centralized": "centralized", "local": "local"}


def test_of_numbers_the_metric_that_leads_is_the_final_one() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 4)).astype(np.float32)
    y = (x.sum(1) + rng.normal(size=200)).astype(np.float32)
    found = fl.compare(["fedavg", "local"], (x, y), partition=fl.partitions.iid(clients=4), seeds=[0, 1], **SHORT)
    result = found["fedavg", 0]
    assert torch.equal(result.final(), result.final("global", "rmse"))
    assert torch.equal(fl.open_run(found.folder)["fedavg", 0].final(), result.final())


@pytest.mark.parametrize("crash_at", [3, 20, 45])
def test_killed_at_any_change_of_the_disk_the_same_call_gives_the_same(crash_at: int, tmp_path: Path) -> None:
    call: dict[str, Any] = {"partition": CUT, "seeds": [0, 1], "engine": {"checkpoint_every": 1e-6}, **SHORT}
    methods = ["fedavg", "ditto"]
    assert in_a_fork(lambda: fl.compare(methods, "digits", folder=tmp_path / "run", **call), crash_at) == 137
    found, whole = (fl.compare(methods, "digits", folder=tmp_path / name, **call) for name in ("run", "whole"))
    tables = [pq.read_table(one.folder / "metrics.parquet") for one in (found, whole)]
    assert tables[0].equals(tables[1])


def test_a_federation_needs_no_partition() -> None:
    with pytest.raises(ConfigError, match="the data are already split"):
        fl.compare(["fedavg"], CUT(fl.load("digits"), seed=0), partition=CUT)


def test_the_model_that_a_client_would_use_is_what_final_gives(whole: Any) -> None:
    assert torch.equal(whole["ditto", 0].final(), whole["ditto", 0].final("hybrid"))
    assert torch.equal(whole["local", 0].final(), whole["local", 0].final("personal"))
    assert torch.equal(whole["fedavg", 0].final(), whole["fedavg", 0].final("global"))
    recorded = fl.open_run(whole.folder)["ditto", 0]
    assert torch.equal(recorded.final(), whole["ditto", 0].final())
    accuracy = float(whole["fedavg", 0].final().nanmean())
    assert f"test accuracy {accuracy:.4g} (global)" in repr(whole["fedavg", 0])


def test_a_comparison_without_test_samples_says_why_it_decides_nothing(tmp_path: Path) -> None:
    cut = fl.partitions.iid(clients=3, test=0.0)
    found = fl.compare(["fedavg", "local"], fl.load("digits"), partition=cut, seeds=[0, 1], folder=tmp_path, **SHORT)
    for line in repr(found).splitlines()[1:]:
        assert "trained, but not evaluated because there is no test row" in line
    assert "trained, but not evaluated because there is no test row" in found._repr_html_()
    assert set(found.to_pandas().status) == {"trained, but not evaluated because there is no test row"}
    assert "trained, but not evaluated because there is no test row" in found.report().read_text()


def test_a_comparison_with_few_seeds_says_how_many_a_test_needs() -> None:
    cut = fl.partitions.iid(clients=3)
    found = fl.compare(["fedavg", "local"], fl.load("digits"), partition=cut, seeds=[0, 1], **SHORT)
    assert "not tested (fewer than five seeds)" in repr(found)
    assert set(found.to_pandas().status) == {"done"}


def test_clean_and_attacked_runs_are_compared_on_the_clients_that_never_attack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backdoor = {"kind": "backdoor", "size": 2, "target": "7"}
    methods = {
        "clean": {"algorithm": "fedavg", "attack": {**backdoor, "fraction": 0.0}},
        "attacked": {"algorithm": "fedavg", "attack": {**backdoor, "fraction": 0.34}},
        "apart": {"algorithm": "fedavg", "attack": {"kind": "none"}},
    }
    common = {"kind": "sign-flip", "fraction": 0.5}
    options: Any = {"partition": fl.partitions.iid(clients=6), "rounds": 2, "seeds": range(1), "progress_bar": False}
    got = fl.compare(methods, "digits", folder=tmp_path / "run", attack=common, **options)
    attackers = set(got["attacked", 0].job.attackers.tolist())
    benign = [i for i in range(6) if i not in attackers]
    assert len(benign) == 4
    rows = {row["method"]: row for row in got.table().to_pylist()}
    for label in methods:
        values = got[label, 0].final("global", "accuracy")[benign]
        sizes = got[label, 0].job.eval_fed.sizes("test")[benign]
        assert rows[label]["accuracy"] == pytest.approx(float(values.nanmean()))
        assert rows[label]["accuracy_weighted"] == pytest.approx(float((values * sizes).sum() / sizes.sum()))
    print_results(got.table())
    assert "attack success" in capsys.readouterr().out
    assert got["apart", 0].job.setting.attack is None
    again = fl.compare(methods, "digits", folder=tmp_path / "run", attack=common, **options)
    assert again.table().equals(got.table())
    settings = tomllib.loads((tmp_path / "run" / "experiment.toml").read_text())
    assert settings["attack"]["kind"] == "sign-flip"
    assert [method["attack"]["kind"] for method in settings["method"]] == ["backdoor", "backdoor", "none"]
    assert "2 of 6 clients attack (sign-flip, backdoor" in got.report().read_text()


def test_figures_of_a_comparison_have_the_results_in_the_size_and_names_that_were_asked_for(
    whole: Any, tmp_path: Path
) -> None:
    rows = {row["method"]: row for row in whole.table().to_pylist()}
    names = {label: label.upper() for label in [*rows][::-1] if (label, 0) in whole.results}
    chart = whole.curves(width=123, height=77, labels=names).to_dict()
    assert (chart["width"], chart["height"]) == (123, 77)
    points = chart["datasets"]["rows"]
    assert list(dict.fromkeys(point["method"] for point in points)) == [*names.values()]
    for label, name in names.items():
        last = max((point for point in points if point["method"] == name), key=lambda point: point["round"])
        assert last["value"] == pytest.approx(100 * rows[label]["accuracy"], abs=0.01)
    dots = whole.clients(labels=names).to_dict()["datasets"]["rows"]
    federation = whole["fedavg", 0].job.eval_fed
    for k, client in enumerate(federation.names):
        values = [whole["fedavg", seed].final("global", "accuracy")[k] for seed in range(5)]
        dot = next(d for d in dots if (d["client"], d["method"]) == (client, "FEDAVG"))
        assert dot["value"] == pytest.approx(100 * float(torch.stack(values).nanmean()), abs=0.01)
    whole.curves().save(tmp_path / "curves.pdf")
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")
    for wrong in (
        lambda: whole.curves("foo"), lambda: whole.curves(x="foo"), lambda: whole.curves(labels={"foo": "bar"}),
        lambda: whole.clients("foo"), lambda: whole.critical_difference(over="foo"),
        lambda: whole.critical_difference(labels={"fedavg": "F"}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="foo|needs at least 3 methods"):
            wrong()


@pytest.mark.parametrize(("methods", "blocks"), [(3, 5), (4, 12), (7, 30)])
def test_the_critical_difference_separates_what_nemenyis_test_separates(methods: int, blocks: int) -> None:
    from scikit_posthocs import posthoc_nemenyi_friedman

    scores = np.random.default_rng(methods).normal(np.linspace(0, 2, methods), 1, (blocks, methods))
    ranks = stats.rankdata(scores, axis=1).mean(0)
    p = posthoc_nemenyi_friedman(scores).to_numpy()
    limit = critical_difference(methods, blocks)
    for i in range(methods):
        for j in range(i):
            assert (abs(ranks[i] - ranks[j]) >= limit) == (p[i, j] <= 0.05)
