"""The table of metrics against what tasks compute, and the page that shows it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.errors import ConfigError
from fedloom.metrics import (
    METRICS,
    SELECTION_METRICS,
    SUMMARY_METRICS,
    TASK_ROLES,
    leading,
    metric,
    over_clients,
    worst,
)
from fedloom.tasks import Binary, Classification, Regression, Task

TASKS: dict[str, Task] = {
    "binary": Binary(),
    "classification": Classification(classes=4),
    "regression": Regression(outputs=2),
}


def scored(task: Task, noise: float, n: int = 5) -> dict[str, torch.Tensor]:
    """Metrics of a model that is right but for noise."""
    g = torch.Generator().manual_seed(0)
    owner = torch.arange(n).repeat_interleave(60)
    if isinstance(task, Regression):
        y = torch.randn(len(owner), task.outputs, generator=g, dtype=torch.float64)
        return task.metrics(y + noise * torch.randn(y.shape, generator=g), y, owner, n)
    y = torch.arange(len(owner)) % max(task.outputs, 2)
    right = (2.0 * y - 1)[:, None] if isinstance(task, Binary) else torch.eye(task.outputs)[y]
    return task.metrics(8 * (right + noise * torch.randn(right.shape, generator=g)), y, owner, n)


@pytest.mark.parametrize("name", TASKS)
def test_directions_and_bounds_are_those_of_the_metrics(name: str) -> None:
    good, bad = scored(TASKS[name], 0.01), scored(TASKS[name], 3.0)
    assert set(good) <= set(METRICS)
    for key in good:
        low, high = METRICS[key].bounds
        sign = 1 if METRICS[key].higher_is_better else -1
        assert bool((sign * good[key] > sign * bad[key]).all()), key
        assert bool(((low <= bad[key]) & (bad[key] <= high)).all()), key
    assert set(TASK_ROLES[name]) <= set(good)


@pytest.mark.parametrize("name", TASKS)
def test_what_leads_follows_from_what_was_measured(name: str) -> None:
    names = set(scored(TASKS[name], 1.0))
    roles = TASK_ROLES[name]
    found = (leading(names), leading(names, "settings"), leading(names, "client"))
    assert found == (roles.page, roles.settings, roles.client)
    assert leading({"loss", "mae"}) == leading({}) == "loss"
    assert {roles.page, roles.settings, roles.client, "loss"} <= set(SUMMARY_METRICS)


def test_the_page_shows_the_table() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reproducibility.md").read_text()
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \| `(\w+)` \| `(\w+)` \|$", text, re.MULTILINE)
    assert {task: tuple(roles) for task, *roles in rows} == {task: tuple(roles) for task, roles in TASK_ROLES.items()}


def test_the_worst_tenth_is_the_bad_end_of_those_that_are_known() -> None:
    values = np.array([0.5, np.nan, *np.linspace(0, 1, 20)])
    assert worst(values, low=True) == pytest.approx(values[2:4].mean())
    assert worst(values, low=False) == pytest.approx(values[-2:].mean())
    assert worst(np.array([0.3]), low=True) == 0.3
    assert np.isnan(worst(np.array([np.nan]), low=True))
    for name in ("accuracy", "calibration_error"):
        found = over_clients(name, values, np.ones(22))
        assert found[f"{name}/worst10"] == worst(values, low=metric(name).higher_is_better)
        assert (f"{name}/jain" in found) == (name in SELECTION_METRICS)


def test_nobody_rates_what_is_not_known() -> None:
    assert not metric("my_own_gap").rated
    with pytest.raises(ConfigError, match="did you mean 'macro_f1'"):
        fl.callbacks.EarlyStop(metric="macro-f1")
