"""Reference models from scikit-learn (a regression and a forest), which each site fits to its own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from fedloom.analyses import Analysis
from fedloom.analyses.tables import INTEGER_TYPE, NUMBER_TYPE, TEXT_TYPE, make_table
from fedloom.data import Federation
from fedloom.engine import Setting
from fedloom.engine.result import Result
from fedloom.errors import Refused

FOREST_TREES = 200
MIN_PROBABILITY = 1e-12
"""Probability that replaces 0 in logarithms."""


class References(Analysis):
    """Analysis that fits scikit-learn's regression and forest to each client's rows after the last round."""

    kind: ClassVar[str] = "references"
    per: ClassVar[str] = "seed"

    def check_run(self, fed: Federation, setting: Setting | None = None) -> None:
        check_references(fed)

    def measure(self, result: Result) -> tuple[pa.Table, Sequence[str]]:
        return references(result), ()


def check_references(fed: Federation) -> None:
    """Raise an error if the reference models cannot be fitted to the data.

    Raises:
        ConfigError: the samples are not rows of a table, or their targets are times or counts.
    """
    if fed.data.fitted is None or fed.data.task in ("survival", "count"):
        raise Refused(
            "the analysis references fits models to the classes or measurements in a table, but the "
            f"task of {fed.data.name} is {fed.data.task}",
            rule="references-need-a-table",
            fix="omit this analysis",
        )


def references(result: Result) -> pa.Table:
    """Return the reference models' metrics on each client's test set: client, model, metric and value.

    The models are fitted to the features of the client's training set in the representation that networks receive. If
    this set contains only one class, neither a logistic regression nor a forest is fitted.
    """
    fed, task, rows = result.job.eval_fed, result.job.oracle.task, list[tuple[int, str, str, float]]()
    for client in result.job.scored_ids.tolist():
        train, test = (fed.indices(part, client) for part in ("train", "test"))
        if not len(test) or (fed.data.classed and len(fed.targets(train).unique()) < 2):
            continue
        for name, model in _fit_reference_models(fed, result.job.setting.seed).items():
            model.fit(fed.fetch(train).double().cpu().numpy(), fed.targets(train).squeeze(-1).cpu().numpy())
            outputs = _network_outputs(fed, model, fed.fetch(test).double().cpu().numpy())
            owner = torch.zeros(len(test), dtype=torch.long)
            scores = task.metrics(outputs, fed.targets(test), owner, 1)
            rows += [(client, name, metric, float(value)) for metric, value in scores.items()]
    return make_table(rows, client=INTEGER_TYPE, model=TEXT_TYPE, metric=TEXT_TYPE, value=NUMBER_TYPE)


def _fit_reference_models(fed: Federation, seed: int) -> dict[str, Any]:
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor  # slow to import
    from sklearn.linear_model import LogisticRegression, Ridge

    forest = {"n_estimators": FOREST_TREES, "min_samples_leaf": 5, "random_state": seed}
    if fed.data.classed:
        return {"logistic regression": LogisticRegression(max_iter=1000), "forest": RandomForestClassifier(**forest)}
    return {"linear regression": Ridge(), "forest": RandomForestRegressor(**forest)}


def _network_outputs(fed: Federation, model: Any, x: np.ndarray[Any, Any]) -> Tensor:
    """Return the outputs in the form of a network for this task: class logits or values."""
    if not fed.data.classed:
        return torch.from_numpy(model.predict(x).reshape(len(x), -1))
    p = torch.full((len(x), len(fed.data.classes)), MIN_PROBABILITY, dtype=torch.float64)
    p[:, torch.from_numpy(model.classes_).long()] = torch.from_numpy(model.predict_proba(x)).clamp(min=MIN_PROBABILITY)
    return (p[:, 1:] / p[:, :1]).log() if fed.data.task == "binary" else p.log()
