"""Statistics that treat rows as independent say so if a subject has several rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedloom as fl
from tests.commands import call

NOTE = "120 rows belong to 40 subjects"


def visits(repeats: bool) -> pd.DataFrame:
    """Return three visits of each of 40 patients at two sites, or one visit of each of 120 patients."""
    rng = np.random.default_rng(0)
    patient = np.arange(120) // 3 if repeats else np.arange(120)
    return pd.DataFrame({
        "patient": [f"p{k}" for k in patient],
        "site": np.where(np.arange(120) < 60, "n", "s"),
        "age": rng.normal(60, 9, 120)[patient],
        "days": rng.integers(1, 60, 120),
        "died": rng.integers(0, 2, 120),
    })  # fmt: skip


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("kind", ["glm", "cox", "table-1", "kaplan-meier"])
def test_an_analysis_with_intervals_names_repeated_subjects(kind: str, repeats: bool) -> None:
    options = {"width": 10, "until": 60} if kind == "kaplan-meier" else {}
    frame, event = (visits(repeats), "died") if kind in ("cox", "kaplan-meier") else (visits(repeats), None)
    frame = frame if event else frame.drop(columns="died")
    task = {} if event else {"task": "regression"}
    data = fl.Dataset.create(frame, "days", event=event, client_column="site", subject="patient", **task)
    notes = fl.analyze(kind, data, **options).notes
    assert any(NOTE in note for note in notes) == repeats


def test_a_ridge_gives_no_intervals_and_says_nothing() -> None:
    data = fl.Dataset.create(
        visits(True).drop(columns="died"), "days", task="regression", client_column="site", subject="patient"
    )
    assert not any(NOTE in note for note in fl.analyze("ridge", data).notes)


@pytest.mark.parametrize("visited", [1, 2])
def test_visits_to_different_sites_are_of_one_subject(visited: int) -> None:
    """60 patients have a visit to each of one or two sites."""
    frame = visits(repeats=False).drop(columns="died")
    frame = frame.assign(patient=[f"p{k % 60}" for k in range(120)])[: 60 * visited]
    data = fl.Dataset.create(frame, "days", task="regression", client_column="site", subject="patient")
    notes = fl.analyze("table-1", data).notes
    assert any("120 rows belong to 60 subjects" in note for note in notes) == (visited == 2)


@pytest.mark.parametrize("command", ["glm", "cox"])
def test_the_command_names_repeated_subjects(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, repeats in (("many", True), ("one", False)):
        visits(repeats).to_csv(f"{name}.csv", index=False)
        task = 'event = "died"' if command == "cox" else 'task = "regression"'
        Path(f"{name}.toml").write_text(
            f'''name = "{name}"
rounds = 1
[data]
source = "{name}.csv"
target = "days"
client_column = "site"
subject = "patient"
{task}
[partition]
kind = "natural"
[[method]]
algorithm = "fedavg"
'''
        )
    assert NOTE in call(command, "many.toml")
    assert NOTE not in call(command, "one.toml")
