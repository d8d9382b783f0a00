"""Analyses that cannot work have one rule and one fix at every entrance, before any sum, and the fix works."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import tomli_w
from typer.testing import CliRunner

import fedloom as fl
from fedloom.analyses.run import resolve_analysis
from fedloom.data.survey.agreement import Agreement
from fedloom.errors import ConfigError, FedloomError
from fedloom.lab.cli import app
from fedloom.lab.experiment import Plan, parse
from fedloom.rundir import analysis_file
from fedloom_sites.deploy.ops.plan import plan_deployment
from fedloom_sites.flower.analyses import agreed_analysis

SITES = 3
Entrance = Literal["fl.analyze", "command", "compare", "file", "deploy", "deploy analyze", "Flower"]
ENTRANCES: tuple[Entrance, ...] = ("fl.analyze", "command", "compare", "file", "deploy", "deploy analyze", "Flower")
AT_SITES = ("deploy", "deploy analyze", "Flower")
TARGETS: dict[str, dict[str, Any]] = {
    "binary": {"target": "ill"}, "regression": {"target": "stay", "task": "regression"},
    "count": {"target": "visits", "task": "count"},
    "survival": {"target": "days", "event": "died"}, "classification": {"target": "ward"},
}  # fmt: skip
AGREED = {
    "column": [{"name": "age", "range": [0.0, 120.0]}, {"name": "dose", "range": [-9.0, 9.0]}], "missing": ["-9"],
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """An analysis that cannot work.

    Attributes:
        kind: its name.
        rule: id of the check that refuses it.
        task: task of the data.
        options: of the analysis.
        agreed: changes of the agreement. None: there is no agreement.
        at: entrances that can express it.
    """

    kind: str
    rule: str
    task: str = "binary"
    options: Mapping[str, Any] = field(default_factory=dict)
    agreed: Mapping[str, Any] | None = field(default_factory=dict)
    at: tuple[Entrance, ...] = ENTRANCES


BINS = {"width": 10.0, "until": 200.0}
NO_RUN: tuple[Entrance, ...] = ("fl.analyze", "command", "Flower")
ROWS = (
    *(Row("cox", "analysis-task", task, BINS) for task in ("binary", "regression", "count", "classification")),
    *(Row("kaplan-meier", "analysis-task", task, BINS) for task in ("binary", "regression", "count")),
    *(Row("glm", "analysis-task", task) for task in ("survival", "classification")),
    *(Row("ridge", "analysis-task", task) for task in ("survival", "count")),
    Row("table-1", "groups-column", options={"group": "wrd"}, at=("fl.analyze", "Flower")),
    Row("kaplan-meier", "groups-column", "survival", {**BINS, "group": "wrd"}, at=("fl.analyze", "Flower")),
    Row("groups", "groups-column", options={"by": ["wrd"]}, at=("compare",)),
    *(Row(kind, "analysis-needs-a-run", at=NO_RUN) for kind in ("predictions", "importance", "confusion")),
    Row("groups", "analysis-needs-a-run", options={"by": ["age>=60"]}, at=NO_RUN),
    Row("conformal", "analysis-needs-a-run", at=NO_RUN),
    *(Row(kind, "analysis-range", agreed={"column": [{"name": "age"}, {"name": "dose"}]}, at=AT_SITES)
      for kind in ("glm", "ridge", "table-1")),
    *(Row(kind, "analysis-target-range", "regression", agreed={"target_range": None}, at=AT_SITES)
      for kind in ("glm", "ridge")),
    Row("cox", "analysis-time-bins", "survival", at=AT_SITES),
    *(Row(kind, "analysis-rule-of-one", options={"rules": {name: 1}}, at=AT_SITES)
      for kind in ("glm", "table-1") for name in ("min_subjects", "min_clients")),
    *(Row(kind, "analysis-model", options={"model_kind": "personal"}, at=("compare", "file", "deploy"))
      for kind in ("calibration", "conformal", "pooled-importance")),
)  # fmt: skip


def frame(task: str) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"site": np.arange(90) % SITES, "age": rng.normal(60, 9, 90), "dose": rng.normal(0, 1, 90)})
    targets = {
        "ill": rng.integers(0, 2, 90), "stay": rng.normal(10, 2, 90), "visits": rng.poisson(2, 90),
        "days": rng.integers(1, 200, 90), "died": rng.integers(0, 2, 90), "ward": rng.choice(["a", "b", "c"], 90),
    }  # fmt: skip
    names = [name for key, name in TARGETS[task].items() if key in ("target", "event")]
    return table.assign(**{name: targets[name] for name in names})


def agreement(row: Row) -> dict[str, Any]:
    more = {"binary": {"classes": ["0", "1"]}, "classification": {"classes": ["a", "b", "c"]}}.get(row.task, {})
    ranged = {} if more or row.task == "count" else {"target_range": [-50.0, 300.0]}
    names = {k: v for k, v in TARGETS[row.task].items() if k != "task"}
    made = {**AGREED, "task": row.task, **more, **ranged, **names, **(row.agreed or {})}
    return {key: value for key, value in made.items() if value is not None}


def entry(row: Row) -> dict[str, Any]:
    return {"kind": row.kind, **row.options}


def document(row: Row, folder: Path, *, at_sites: bool, analyses: bool = True) -> dict[str, Any]:
    """An experiment file with the analysis, if it is to contain it."""
    frame(row.task).to_csv(folder / "rows.csv", index=False)
    data: dict[str, Any] = {"source": str(folder / "rows.csv"), "client_column": "site", **TARGETS[row.task]}
    if at_sites:
        (folder / "rows.agreement.toml").write_text(tomli_w.dumps(agreement(row)))
        data = {"source": data["source"], "client_column": "site", "agreement": str(folder / "rows.agreement.toml")}
    return {
        "rounds": 1, "seeds": [0], "data": data, "partition": {"kind": "natural", "test": 0.3, "validation": 0.2},
        "method": [{"algorithm": "fedavg"}], **({"analysis": [entry(row)]} if analyses else {}),
    }  # fmt: skip


def by_command(words: list[str]) -> None:
    """Call a command, and raise its error."""
    raised = list[BaseException]()
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    raised.append(ConfigError(result.output.removeprefix("error: ").strip()))
    raise raised[0]


def enter(row: Row, entrance: Entrance, folder: Path) -> object:
    """Give the analysis to an entrance."""
    file = folder / "mine.toml"
    if entrance == "Flower":
        return agreed_analysis(resolve_analysis(entry(row), {}), Agreement(**agreement(row)), SITES)
    if entrance == "fl.analyze":
        return fl.analyze(row.kind, fl.Dataset.create(frame(row.task), client_column="site", **TARGETS[row.task]),
                          **row.options)  # fmt: skip
    if entrance == "compare":
        data = fl.Dataset.create(frame(row.task), client_column="site", **TARGETS[row.task])
        return fl.compare(["fedavg"], data, partition=fl.partitions.natural(test=0.3, validation=0.2), seeds=[0],
                          rounds=1, analyses=[entry(row)], progress_bar=False)  # fmt: skip
    if entrance == "file":
        return Plan(parse(document(row, folder, at_sites=False)), folder / "run")
    if entrance == "deploy":
        return plan_deployment(parse(document(row, folder, at_sites=True)), sites=SITES, own_data=True)
    options = [f"--set={key}={_toml(value)}" for key, value in row.options.items() if key != "rules"]
    options += [f"--rule={key}={value}" for key, value in row.options.get("rules", {}).items()]
    file.write_text(tomli_w.dumps(document(row, folder, at_sites=entrance != "command", analyses=False)))
    if entrance == "command":
        return by_command(["analyze", row.kind, str(file), *options])
    return by_command(
        ["deploy", "analyze", row.kind, str(file), "--out", str(folder / "d"), "--own-data", "--sites", "3", *options]
    )


def _toml(value: object) -> str:
    return tomli_w.dumps({"v": value}).partition("=")[2].strip()


CASES = {f"{row.kind}: {row.rule}, {row.task}, {place}": (row, place) for row in ROWS for place in row.at}


@pytest.mark.parametrize("case", CASES)
def test_an_analysis_that_cannot_work_has_one_rule_and_one_fix(case: str, tmp_path: Path) -> None:
    row, entrance = CASES[case]
    with pytest.raises(ConfigError) as known:
        enter(row, row.at[0] if row.at[0] != "deploy" else "Flower", tmp_path)
    assert (known.value.rule, bool(known.value.fix)) == (row.rule, True), str(known.value)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        enter(row, entrance, tmp_path)
    if entrance in ("command", "deploy analyze"):
        assert _plain(known.value.fix) in _plain(str(caught.value)), str(caught.value)
    else:
        assert caught.value.rule == row.rule, str(caught.value)
        if row.rule != "groups-column":  # other columns are there
            assert caught.value.fix == known.value.fix, str(caught.value)
    assert not {path.name for path in {*tmp_path.rglob("*")} - {*before}} & {"d", "run"}


def _plain(text: str) -> str:
    return re.sub(r"[{}\s]", "", text).lower()


def test_the_table_covers_every_refusal_of_an_analysis_of_rows() -> None:
    assert len(ROWS) >= 25
    assert {row.kind for row in ROWS} >= {"cox", "glm", "kaplan-meier", "ridge", "table-1", "conformal"}


@pytest.mark.parametrize("row", [row for row in ROWS if row.rule == "analysis-task"], ids=str)
def test_the_analysis_that_the_fix_names_works(row: Row) -> None:
    data = fl.Dataset.create(frame(row.task), client_column="site", **TARGETS[row.task])
    with pytest.raises(ConfigError) as caught:
        fl.analyze(row.kind, data, **row.options)
    names = re.findall(r"[a-z0-9-]+", caught.value.fix.partition("use ")[2].replace(" or ", " "))
    assert names, caught.value.fix
    for name in names:
        options = {"width": 50.0, "until": 200.0} if name in ("cox", "kaplan-meier") else {}
        assert fl.analyze(name, data, **options).table.num_rows, name


def test_two_classes_read_as_classes_are_read_as_binary_after_the_fix() -> None:
    x, y = np.random.default_rng(0).normal(size=(90, 2)), np.arange(90) % 2
    table = pd.DataFrame(x, columns=["a", "b"]).assign(site=np.arange(90) % 3, ill=y)
    given: dict[str, Any] = {"target": "ill", "client_column": "site"}
    with pytest.raises(ConfigError, match="task.*binary"):
        fl.analyze("glm", fl.Dataset.create(table, task="classification", **given))
    assert fl.analyze("glm", fl.Dataset.create(table, task="binary", **given)).table.num_rows


@pytest.mark.parametrize("analysis", [{"kind": "groups", "by": ["ward"]}, {"kind": "groups", "by": ["age>=60"]},
                                      {"kind": "table-1", "group": "ward"}], ids=str)  # fmt: skip
def test_groups_of_a_frame_need_no_file(analysis: dict[str, Any], tmp_path: Path) -> None:
    table = frame("binary").assign(ward=np.where(np.arange(90) % 4 > 1, "icu", "general"))
    table.to_csv(tmp_path / "rows.csv", index=False)
    options: dict[str, Any] = {"target": "ill", "drop": ["site"], "categorical": ["ward"]}
    partition, shown = fl.partitions.iid(clients=2), list[Any]()
    data = fl.Dataset.create(table, **options)
    for given in (data, {"source": str(tmp_path / "rows.csv"), **options}, partition(data, seed=0)):
        if isinstance(given, dict):
            out = tmp_path / "run"
            split = {"kind": "iid", "clients": 2}
            document = {"rounds": 1, "seeds": [0], "data": given, "partition": split, "analysis": [analysis]}
            Plan(parse({**document, "method": [{"algorithm": "fedavg"}]}), out).run()
        else:
            out = tmp_path / f"of {len(shown)}"
            split = None if isinstance(given, fl.Federation) else partition
            fl.compare(["fedavg"], given, partition=split, seeds=[0], rounds=1, analyses=[analysis],
                       folder=out, progress_bar=False)  # fmt: skip
        shown.append(pq.read_table(out / analysis_file(analysis["kind"])).to_pydict())
    assert shown[0] == shown[1] == shown[2]
    assert len(shown[0]) > 1


def test_rules_that_are_no_table_are_refused() -> None:
    for rules in (5, "five", [1]):
        with pytest.raises(ConfigError, match="rules must be a table"):
            fl.analyze("ridge", frame("binary"), rules=rules)  # type: ignore[arg-type]
    with pytest.raises(FedloomError, match="unknown key 'least'"):
        fl.analyze("ridge", frame("binary"), rules={"least": 3})
