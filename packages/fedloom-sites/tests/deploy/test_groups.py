"""Groups of patients at real sites: the figures of a simulation, plain and under masks, and no small group leaves."""

from __future__ import annotations

import csv
import io
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from fedloom.analyses.importance import importance
from fedloom.analyses.patients import group_scores
from fedloom.data.groups import keep_group_columns
from fedloom.engine.simulate import simulate
from fedloom.errors import ConfigError, Stop
from fedloom.lab.experiment import parse
from fedloom.lab.report.groups import group_tables, groups_csv
from fedloom.lab.report.numbers import leading_metric, method_rows
from fedloom.lab.report.reading import read_runs
from fedloom.rundir import FEDERATION_CLIENT
from fedloom_sites.deploy.groups import GroupSums
from fedloom_sites.deploy.ops.plan import plan_deployment
from fedloom_sites.deploy.server.run import serve_run
from fedloom_sites.deploy.setting_files import settings_text
from fedloom_sites.deploy.settings import SecureSettings
from fedloom_sites.deploy.site.groups import SiteGroups
from fedloom_sites.deploy.site.models import (
    column_importances,
    find_owned_models,
    load_raw_model,
    module_of,
    score_site_model,
)
from tests.commands import call
from tests.deploy.scene import Scene, scene
from tests.deploy.sessions import sum_honestly
from tests.deploy.test_dishonest import Rogue

GROUPS = ["sex", "age>=60"]
SITES = "ABCDE"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def table(path: Path, sizes: dict[str, int], task: str, few: str = "") -> Path:
    """Patients of the sites; of ``few``, four are of the one sex."""
    rng, rows = np.random.default_rng(1), []
    for site, size in sizes.items():
        for k in range(size):
            x, age, sex = rng.normal(), int(rng.integers(40, 80)), "fm"[rng.integers(2)]
            sex = "fm"[k < 8] if site == few else sex
            score = x + (age - 60) / 20 + rng.logistic()
            target = {"binary": int(score > 0), "regression": round(score, 3), "count": int(max(score, 0)),
                      "classification": int(score > -0.9) + int(score > 0.9)}[task]  # fmt: skip
            rows.append([site, age, sex, round(x, 4), target])
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["site", "age", "sex", "x", "y"], *rows])
    return path


def deployed(folder: Path, *, task: str = "binary", method: str = "ditto", masked: bool = False, few: str = "",
             scores: Any = "masked", **changes: Any) -> Scene:  # fmt: skip
    """Five sites whose test parts are scored by group."""
    folder.mkdir(exist_ok=True)
    file, least = table(folder / "all.csv", dict.fromkeys(SITES, 160), task, few), 3 if task == "classification" else 8
    data = {
        "source": "csv",
        "path": str(file),
        "target": "y",
        "client_column": "site",
        "categorical": ["sex"],
        "task": task,
    }
    here = scene(
        folder, method, data=data | changes.pop("data", {}), partition={"kind": "natural", "test": 0.5}, rounds=2,
        evaluate={"every": 2, **changes.pop("evaluate", {})},
        analysis=[{"kind": "groups", "by": list(GROUPS), "min_rows": changes.pop("least", least)}], **changes,
    )  # fmt: skip
    if not masked:
        return here
    agreed = SecureSettings(threshold=4, keys=tuple(m.signing_key for m in here.server.sites), scores=scores)
    return here._replace(
        server=here.server.with_(secure=agreed, quorum=4), sites=[s.with_(secure=agreed) for s in here.sites]
    )


def wanted(here: Scene) -> dict[tuple[Any, ...], float]:
    """The scores of the simulation."""
    experiment = here.experiment
    data = keep_group_columns(experiment.source, GROUPS).load()
    result = simulate(experiment.methods[0].setting, experiment.partition(data, 0))
    scores = group_scores(result, GROUPS, experiment.find("groups").min_rows)
    return {tuple(row.values())[:4]: row["value"] for row in scores.to_pylist()}


def recorded(here: Scene) -> dict[tuple[Any, ...], float]:
    rows = pq.read_table(here.server.results / "groups.parquet").to_pylist()
    return {(r["client"], r["model"], r["subgroup"], r["metric"]): r["value"] for r in rows}


RANKED = {"auroc", "auprc"}


@pytest.mark.parametrize("task", ["binary", "classification", "regression", "count"])
def test_groups_are_those_of_the_simulation(task: str, tmp_path: Path) -> None:
    """Every figure of every site, and of all together but for those that rank patients of several sites."""
    here = deployed(tmp_path, task=task)
    assert here.serve() is Stop.DONE
    scores, simulated = recorded(here), wanted(here)
    assert {key for key in set(simulated) - set(scores) if not math.isnan(simulated[key])} == {
        (client, *rest, metric)
        for client, *rest, metric in simulated
        if client == FEDERATION_CLIENT and metric in RANKED
    }
    for key, value in scores.items():
        assert value == pytest.approx(simulated[key], abs=1e-10), key


@pytest.mark.parametrize("task", ["binary", "classification", "regression"])
def test_masked_groups_are_those_of_all_sites_together(task: str, tmp_path: Path) -> None:
    here = deployed(tmp_path, task=task, masked=True)
    assert here.serve() is Stop.DONE
    scores, simulated = recorded(here), wanted(here)
    assert {client for client, *_ in scores} == {FEDERATION_CLIENT}
    together = {key for key in simulated if key[0] == FEDERATION_CLIENT and key[3] not in RANKED}
    assert {key for key in together if key[1] != "hybrid"} == set(scores)
    for key, value in scores.items():
        assert value == pytest.approx(simulated[key], abs=1e-9), key


def test_a_small_group_and_what_would_show_it_are_not_summed(tmp_path: Path) -> None:
    """One site has few women: it publishes neither sex, and no sum leaves its patients as the rest of all."""
    here = deployed(tmp_path / "plain", few="B")
    assert here.serve() is Stop.DONE
    at_b = {group for client, _, group, _ in recorded(here) if client == 1}
    assert at_b == {"age>=60", "age<60"}
    masked = deployed(tmp_path / "masked", few="B", masked=True)
    assert masked.serve() is Stop.DONE
    summed = {group for _, _, group, _ in recorded(masked)}
    assert summed >= {"age>=60", "age<60"}
    assert len(summed & {"sex=f", "sex=m"}) == 1  # of the other, every site may be a part


@pytest.mark.parametrize("few", [0, 1, 7])
@pytest.mark.parametrize("masked", [False, True])
def test_a_group_with_few_of_a_class_is_not_published(masked: bool, few: int, tmp_path: Path) -> None:
    """Eight of each of three classes must be there: of one, it would show whether this patient was predicted right."""
    here = deployed(tmp_path, task="classification", masked=masked, least=8)
    file = tmp_path / "all.csv"
    patients = pd.read_csv(file)
    place = np.arange(len(patients))
    patients["y"], patients["sex"], patients["age"] = place % 3, list("fffmmm" * 133 + "ff"), 55 + 10 * (place // 6 % 2)
    women = (patients["site"] == "B") & (patients["sex"] == "f")
    patients.loc[women & (patients["y"] == 2), "y"] = 1
    patients.loc[patients[women].index[: 2 * few], "y"] = 2  # about half of them are tested
    patients.to_csv(file, index=False)
    assert here.serve() is Stop.DONE
    for site in here.clients():
        trainer, members = site.trainer, SiteGroups(site.trainer).members
        targets = trainer.fed.targets(trainer.fed.indices("test", site.site.client))
        for name, inside in members.items():
            assert not inside.any() or min(torch.bincount(targets[inside], minlength=3)) >= 8, name
        assert ("sex=f" in members) is (site.site.client != 1)
    counts = {key[0]: value for key, value in recorded(here).items() if key[1:] == ("personal", "sex=f", "samples")}
    assert 1 not in counts
    assert (FEDERATION_CLIENT in counts) is not masked  # without one of the sites, its patients would be what is left


def test_of_any_sites_neither_a_sum_nor_its_rest_is_of_fewer_than_three() -> None:
    """By exhaustion, over what seven sites lack, and over which of them drop out."""
    sums = object.__new__(GroupSums)
    sums.groups, sums._part = ["f", "m"], [0, 0]
    for threshold in (4, 5, 7):
        for lacking in range(8):
            bits = [0b01 if k < lacking else 0b11 for k in range(7)]
            f, m = sums.summed(bits, threshold)
            for count in range(threshold, 8):
                for lost in range(max(0, count - 7 + lacking), min(lacking, count) + 1):
                    assert not m or count - lost >= 3
                    assert not (f and m) or lost == 0 or lost >= 3, (threshold, lacking, count)


@pytest.mark.parametrize(
    ("task", "factor", "opens"), [("binary", 1e6, True), ("binary", 1e12, False), ("count", 1e6, False)]
)
def test_a_crafted_model_makes_no_site_refuse_the_sums_of_its_groups(
    task: str, factor: float, opens: bool, tmp_path: Path
) -> None:
    """A refusal would answer a question about one patient. Neither a NaN nor a number beyond the range is summed."""
    rogue = Rogue(deployed(tmp_path, masked=True, task=task, method="fedavg"))
    model = rogue.model(factor)
    session = sum_honestly(rogue, 2, None, model)
    assert session.vectors.keys() == {*range(5)}
    assert session.is_open is opens
    if opens:
        groups = SiteGroups(rogue.trainer).sums
        total = session.total(rogue.terms(2, None, [model], scored=2, common=True))
        assert max(score[-1] for score in groups.decode(total[-groups.length :], 5)) > 1e5
        assert not rogue.refused
    assert all("could not answer" in reason or "answered from their samples" in reason for reason in rogue.refused)


@pytest.mark.parametrize("number", [1e20, -1e20, np.nan, np.inf])
def test_a_sum_over_a_group_is_never_clipped(number: float, tmp_path: Path) -> None:
    """If the sums of all sites but one were clipped, their total would show the sums of that site."""
    groups = SiteGroups(Rogue(deployed(tmp_path, masked=True)).trainer).sums
    row = torch.full((groups._width,), 2.0, dtype=torch.float64)
    summed, key = [True] * len(groups.groups), ("global", groups.groups[0])
    whole = groups.encode({key: (row, {})}, summed)
    assert whole is not None
    assert {score[-1] for score in groups.decode(whole, 1) if score[3] == "samples"} == {2.0}
    row[-1] = number
    assert groups.encode({key: (row, {})}, summed) is None


def test_nothing_of_groups_leaves_where_scores_do_not(tmp_path: Path) -> None:
    here = deployed(tmp_path, masked=True, scores="off")
    assert here.serve() is Stop.DONE
    assert not (here.server.results / "groups.parquet").exists()


def test_a_column_for_scoring_only_has_its_levels_from_the_agreement(tmp_path: Path) -> None:
    """No model receives the column, a site may lack a level, and the groups are those that were agreed on."""
    columns = [{"name": "x"}, {"name": "sex", "type": "level", "levels": ["d", "f", "m"], "scoring": True},
               {"name": "age", "scoring": True}]  # fmt: skip
    agreement = {"target": "y", "classes": ["0", "1"], "column": columns}
    drop = {"agreement": agreement, "categorical": [], "task": "auto"}
    here = deployed(tmp_path, data=drop)
    assert here.server.samples.shape == (1,)
    assert here.serve() is Stop.DONE
    scores, simulated = recorded(here), wanted(here)
    assert {group for _, _, group, _ in scores} == {"sex=f", "sex=m", "age>=60", "age<60"}
    for key, value in scores.items():
        assert value == pytest.approx(simulated[key], abs=1e-10), key


def test_groups_without_agreed_levels_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    here = deployed(tmp_path)
    with pytest.raises(ConfigError, match="have not agreed on the levels of 'ward'"):
        plan_deployment(parse({**here.experiment.settings(), "analysis": [{"kind": "groups", "by": ["ward"]}]}))
    file = table(tmp_path / "wide.csv", {"A": 300, "B": 300}, "regression")
    data = {
        **here.experiment.settings()["data"],
        "path": str(file),
        "task": "regression",
        "categorical": ["age", "sex"],
    }
    with pytest.raises(ConfigError, match="do not fit in a message"):
        plan_deployment(
            parse({**here.experiment.settings(), "data": data, "analysis": [{"kind": "groups", "by": ["age"] * 9}]})
        )


def normalised(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A model with running statistics, which no message and no file of a site's model has."""
    width = math.prod(shape)
    return nn.Sequential(nn.Linear(width, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, outputs))


NORMALISED = f"{__name__}:normalised"


@pytest.mark.parametrize(("model", "method"), [("softmax", "fedavg"), (NORMALISED, "fedavg"), (NORMALISED, "ditto")])
def test_figures_and_importance_at_a_site_are_those_of_the_simulation(model: str, method: str, tmp_path: Path) -> None:
    here = deployed(tmp_path, method=method, model={"kind": model}, evaluate={"batchnorm_stats": "own"})
    assert here.serve() is Stop.DONE
    run, site, kind = here.simulate(), here.sites[2], "global" if method == "fedavg" else "personal"
    (site.state / "site.toml").write_text(settings_text(site))
    simulated = [row for row in importance(run).to_pylist() if (row["client"], row["model"]) == (2, kind)]
    lines = column_importances(site.state)
    assert len(lines) == len(simulated) == 3
    for (column, metric, mean, spread), row in zip(lines, simulated, strict=True):
        assert (column, metric) == (row["column"], row["metric"])
        assert (mean, spread) == pytest.approx((row["value"], row["spread"]), abs=1e-10)
    (one,) = find_owned_models(site.state)
    scores = score_site_model(one)
    assert {"auroc", "loss"} <= scores.keys()
    assert scores == pytest.approx({name: float(run.final(kind, name)[2]) for name in scores}, abs=1e-10)
    assert load_raw_model(site.state).module().state_dict().keys() == module_of(one).state_dict().keys()
    for tensor, same in zip(load_raw_model(site.state).module().buffers(), module_of(one).buffers(), strict=True):
        assert torch.equal(tensor, same)
    file = tmp_path / "test.csv"
    with (tmp_path / "all.csv").open() as rows:
        file.write_text("".join(line for k, line in enumerate(rows) if not k or line.startswith("C")))
    for words, heads in (((file,), "samples"), (("--importance",), "loss by permutation")):
        printed = call("deploy", "evaluate", site.state, *words)
        assert heads in printed
        assert "statistics of this site" not in printed
    for words in ((), ("--importance", tmp_path / "all.csv")):
        assert "or use --importance" in call("deploy", "evaluate", site.state, *words, code=2)


def test_batch_statistics_of_a_site_are_named_where_a_simulation_has_others(tmp_path: Path) -> None:
    here, lines = deployed(tmp_path, method="fedavg", model={"kind": NORMALISED}), list[str]()
    assert serve_run(here.grid(), here.server, lines.append) is Stop.DONE
    (note,) = [line for line in lines if "normalization layers are not sent" in line]
    assert "the client's own" in note
    assert "averaged" not in note
    site = here.sites[2]
    (site.state / "site.toml").write_text(settings_text(site))
    assert "statistics of this site's own training part" in call("deploy", "evaluate", site.state, "--importance")
    (one,) = find_owned_models(site.state)
    (tmp_path / "all.csv").write_text("site,age,sex,x,y\n")
    with pytest.raises(ConfigError, match="site-2 has no samples, but the model's normalization layers need"):
        module_of(one)


@pytest.mark.parametrize("masked", [False, True])
def test_the_report_shows_them(masked: bool, tmp_path: Path) -> None:
    here = deployed(tmp_path, masked=masked)
    assert here.serve() is Stop.DONE
    runs = read_runs([here.server.results])
    shown = group_tables(runs, method_rows(runs), leading_metric(runs))
    for words in ("sex=f", "age&gt;=60", "Accuracy" if masked else "AUROC", "All sites"):
        assert words in shown, words
    with io.StringIO(groups_csv(runs)) as lines:
        assert {row["group"] for row in csv.DictReader(lines)} == {"sex=f", "sex=m", "age>=60", "age<60"}
