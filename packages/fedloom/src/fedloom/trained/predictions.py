"""Predictions for unlabeled rows. If a row's client is known, the client's model predicts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.data.dataset import Dataset, default_to_cpu
from fedloom.data.input_spec import InputSpec
from fedloom.data.new_rows import NewRows
from fedloom.errors import ConfigError, write_singular
from fedloom.trained.model import Model, score_outputs
from fedloom.trained.models import KIND_PREFERENCE, Models
from fedloom.trained.raw import check_threshold, decide_labels

OWN_SCALE, TYPICAL_SCALE, NEW_SCALE = "as its client's", "as the clients' on average", "on these rows"


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions for N rows.

    Attributes:
        facts: facts about the models' training data.
        scores: float64 class probabilities ``[N, C]`` (``[N, L, C]`` if there is a label per position), or predicted
            values ``[N, k]`` of a regression.
        models: for each row, the client whose model predicts it, or ``"global"``.
        notes: sentences about imputed values and about the choice of models.
        not_padding: mask ``[N, L]`` of the positions that are not padding, if there is a prediction per position.
        files: source file of each row, if rows come from separate files.
        copied_columns: columns copied unchanged from the input.
        threshold: minimum probability for predicting the second class of a binary task. If None, 1/2.
        far: columns whose median is far outside the training data, for example because of a different unit.
        set_threshold: threshold from a conformal analysis, which determines sets of classes or intervals of numbers. If
            None, there are no sets or intervals.
    """

    facts: InputSpec
    scores: NDArray[np.float64]
    models: Sequence[str]
    notes: tuple[str, ...] = ()
    not_padding: NDArray[np.bool_] | None = None
    files: Sequence[str] | None = None
    copied_columns: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    threshold: float | None = None
    far: tuple[str, ...] = ()
    set_threshold: float | None = None

    def __repr__(self) -> str:
        return f"Predictions({len(self.scores):,} rows, {self.facts.task}: {'; '.join(self.notes)})"

    @property
    def labels(self) -> NDArray[Any]:
        """Names of the most probable classes ``[N]``, or predicted values ``[N]`` (``[N, k]`` for several targets)."""
        return decide_labels(self.facts, self.scores, self.threshold)

    @property
    def sets(self) -> list[list[str]]:
        """Names of the classes in each row's set: the classes with a probability of at least 1 - `set_threshold`."""
        assert self.set_threshold is not None
        names = list(map(str, self.facts.classes))
        inside = (1 - self.scores <= self.set_threshold).tolist()
        return [[name for name, one in zip(names, row, strict=True) if one] for row in inside]

    def apply_threshold(self, threshold: float | None, set_threshold: float | None = None) -> Predictions:
        """Return the predictions with a different threshold, and with sets or intervals from a conformal threshold.

        Raises:
            ConfigError: `check_threshold` rejects the threshold, or there is not exactly one class or one number per
                row.
        """
        check_threshold(self.facts, threshold)
        single = self.facts.classed or (self.facts.task == "regression" and self.scores.shape[1:] == (1,))
        if set_threshold is not None and (not single or self.not_padding is not None):
            raise ConfigError(
                "a conformal threshold requires one class or one number per row, but the models predict "
                + (f"a {self.facts.task}" if self.not_padding is None else "one class per position")
            )
        if set_threshold is not None and not set_threshold > 0:
            raise ConfigError(
                f"the threshold of the sets must be greater than 0, got {set_threshold:g}. The table "
                "of the analysis conformal contains the threshold"
            )
        return replace(self, threshold=threshold, set_threshold=set_threshold)

    def table(self) -> pa.Table:
        """Return the predictions as a table with one row per sample.

        The columns are ``row`` (counted from 1), ``file`` for images, the columns copied from the input, ``model``,
        ``prediction [<k>]`` (``prediction of <label>`` if there are several labels) and ``probability of <c>``. If
        there is a conformal threshold, the columns ``set`` or, for a number, ``prediction from`` and ``prediction to``
        are added. If there is a label per position, there is one row for each position that is not padding, and
        ``position`` is counted from 1.
        """
        scores = self.scores
        rows, owners = np.arange(1, len(scores) + 1), np.array(self.models, object)
        files = {} if self.files is None else {"file": list(self.files)}
        kept = {name: cells for name, cells in self.copied_columns.items() if name not in ("row", "model")}
        columns: dict[str, Any] = {"row": rows, **files, **kept, "model": owners.tolist()}
        if self.not_padding is not None:
            row, position = np.nonzero(self.not_padding)
            scores = scores[row, position]
            columns = {"row": rows[row], "position": position + 1, "model": owners[row].tolist()}
        if self.facts.task == "multilabel":
            each = {f"probability of {c}": p for c, p in zip(self.facts.classes, scores.T, strict=True)}
            decided = {f"prediction of {c}": y for c, y in zip(self.facts.classes, self.labels.T, strict=True)}
            return pa.table({**columns, **decided, **each})
        if not self.facts.classed:
            names = ["prediction"] if scores.shape[1] == 1 else [f"prediction {k}" for k in range(scores.shape[1])]
            columns |= dict(zip(names, scores.T, strict=True))
            if self.set_threshold is not None:
                columns["prediction from"] = scores[:, 0] - self.set_threshold
                columns["prediction to"] = scores[:, 0] + self.set_threshold
            return pa.table(columns)
        each = {f"probability of {c}": p for c, p in zip(self.facts.classes, scores.T, strict=True)}
        labels = self.labels if self.not_padding is None else self.labels[row, position]
        sets = {} if self.set_threshold is None else {"set": [" | ".join(row) for row in self.sets]}
        return pa.table({**columns, "prediction": labels.tolist(), **sets, **each})


class ModelAssignment(NamedTuple):
    """Assignment of rows to the models that predict them.

    Attributes:
        groups: groups of row indices ``[k]``, each with the model that predicts these rows.
        owners: for each row, the client whose model predicts it, or ``"global"``.
        notes: sentences about how the models were chosen.
    """

    groups: Sequence[tuple[Tensor, Model]]
    owners: Sequence[str]
    notes: tuple[str, ...] = ()

    def outputs(self, x: Tensor) -> Tensor:
        """Compute the outputs for raw samples ``[N, ...]``, each with its own model, in the order of the rows."""
        parts = [model.outputs(x[places]) for places, model in self.groups]
        return torch.cat(parts)[torch.argsort(torch.cat([places for places, _ in self.groups]))]

    def note_uncalibrated(self) -> list[str]:
        """Return a note about rows whose model could not be recalibrated, or [] if there are none."""
        places = [
            rows for rows, model in self.groups if model.calibration is not None and model.calibration.isnan().any()
        ]
        owners = sorted({self.owners[int(rows[0])] for rows in places})
        what = "not recalibrated, because the validation set contains only one class"
        return [f"{what}: {sum(map(len, places))} rows of {', '.join(owners)}"] if places else []

    def note_outliers(self, x: Tensor) -> list[str]:
        """Return notes about columns with values far from the training data of the model that predicts them."""
        return list(dict.fromkeys(note for places, model in self.groups for note in model.note_outliers(x[places])))

    def find_far(self, x: Tensor) -> tuple[str, ...]:
        """Return the columns whose values are far outside the training data of the model that predicts them."""
        return tuple(dict.fromkeys(name for places, model in self.groups for name in model.find_far(x[places])))


@default_to_cpu()
def predict_with_one(model: Model, rows: NewRows) -> ModelAssignment:
    """Assign all rows to a single model."""
    who = str(model.about.get("client", "global"))
    return ModelAssignment([(torch.arange(len(rows.x)), model)], [who] * len(rows.x))


@default_to_cpu()
def assign_models(
    models: Models, rows: NewRows, kind: str | None = None, client: int | str | None = None
) -> ModelAssignment:
    """Choose the run's model that predicts each row.

    Args:
        models: models of a run.
        rows: result of `new_rows`.
        kind: "global", "personal" or "hybrid". If None, a client's best model, or the global model if there is no
            client.
        client: client whose model makes all predictions. If None and a column identifies the clients, each row's client
            predicts it.

    Raises:
        ConfigError: the model or the client does not exist, or a site is not a client of the run and there is no global
            model.
    """
    facts, names = models.recipe.facts, set(models.names)
    if client is not None or rows.sites is None:
        one = predict_with_one(models.ready(kind, client), rows)
        what = f"the {one.groups[0][1].about['kind']} model" + (f" of {one.owners[0]}" if client is not None else "")
        if client is None and facts.table is not None:
            what += (
                ", with columns scaled by the medians over the clients, because neither a client nor a client column "
                "is given"
            )
        return one._replace(notes=(what,))
    kind_of_sites = kind or next(k for k in KIND_PREFERENCE if k in models.kinds())
    models.ready(kind_of_sites, models.names[0])  # raises an error if this kind does not exist
    places: dict[str, list[int]] = {}
    strange: dict[str, int] = {}
    for k, site in enumerate(rows.sites):
        is_client = site in names
        places.setdefault(site if is_client else "", []).append(k)
        if not is_client:
            strange[site] = strange.get(site, 0) + 1
    unknown_sites = ", ".join(f"{site!r} ({count} rows)" for site, count in list(strange.items())[:8])
    if strange and "global" not in models.kinds():
        raise ConfigError(
            f"unknown clients: {unknown_sites}. {models.about['method']} has no global model, so choose one of the "
            f"run's clients"
        )
    groups = [
        (torch.tensor(some), models.ready(kind_of_sites if site else "global", site or None))
        for site, some in places.items()
    ]
    owners = [site if site in names else "global" for site in rows.sites]
    notes = [
        f"each row is predicted by the {kind_of_sites} model of its site"
        if kind_of_sites != "global"
        else "the global model, with columns scaled as at each site"
    ]
    notes += [f"not a client of the run, so the global model predicts: {unknown_sites}"] if strange else []
    return ModelAssignment(groups, owners, tuple(map(write_singular, notes)))


@default_to_cpu()
def predict_assigned_rows(rows: NewRows, choice: ModelAssignment) -> Predictions:
    """Predict rows with their assigned models."""
    model = choice.groups[0][1]
    facts = model.recipe.facts
    present = (rows.x != 0).numpy() if facts.each and facts.vocabulary else None
    scores = model.raw().convert_outputs(choice.outputs(rows.x)).numpy()
    notes = (
        *rows.notes,
        *survival_prediction_note(model),
        *choice.notes,
        *choice.note_uncalibrated(),
        *choice.note_outliers(rows.x),
    )
    far = choice.find_far(rows.x)
    return Predictions(facts, scores, choice.owners, notes, present, rows.files, rows.copied_columns, far=far)


def survival_prediction_note(model: Model) -> list[str]:
    """Return a sentence that explains the predictions of a survival task, or [] for other tasks."""
    if model.recipe.facts.task != "survival":
        return []
    horizon = model.recipe.objective.horizon
    if horizon is None:
        return ["predictions are log hazards, which only rank rows. Set [task] horizon for probabilities of the event"]
    return [f"predictions are probabilities of the event by time {horizon:g}"]


@dataclass(frozen=True, eq=False)
class ModelEvaluation:
    """Evaluation of models on new labeled data.

    Attributes:
        about: facts about the run.
        kind: kind of model to evaluate.
        scaling: scaling of a table's columns: `OWN_SCALE`, `TYPICAL_SCALE` or `NEW_SCALE`.
        choice: assignment of rows to models.
        rows: rows in the form that the models accept.
        data: the same samples, as their source provides them.
    """

    about: Mapping[str, Any]
    kind: str
    scaling: str
    choice: ModelAssignment
    rows: NewRows
    data: Dataset

    @default_to_cpu()
    def metrics(self) -> dict[str, float]:
        """Compute the task's metrics from the outputs of `predict_assigned_rows`.

        Raises:
            DataError: the data contain classes or targets that are unknown to the models.
        """
        return score_outputs(self.choice.groups[0][1].recipe, self.choice.outputs(self.rows.x), self.data)

    def row(self) -> dict[str, Any]:
        """Return a table row with method, seed, model, client, scaling, number of samples, and metrics."""
        owners = dict.fromkeys(self.choice.owners)
        client = "" if owners.keys() == {"global"} else next(iter(owners)) if len(owners) == 1 else "each row's"
        who = {"method": self.about["method"], "seed": self.about["seed"], "model": self.kind, "client": client}
        table = self.choice.groups[0][1].recipe.facts.table is not None
        return {
            **who,
            **({"columns scaled": self.scaling} if table else {}),
            "samples": len(self.rows.x),
        } | self.metrics()


def evaluate_models(
    runs: Sequence[Models], data: Dataset, rows: NewRows, client: int | str | None = None, kind: str | None = None
) -> Iterator[ModelEvaluation]:
    """Evaluate the models of runs on new labeled data. Models are chosen as in `predict_assigned_rows`.

    A model for tables that scales its inputs by the average over clients is evaluated a second time with inputs scaled
    by the new rows, as for a client with these rows.

    Args:
        runs: models of each run.
        data: data, as their source provides them.
        rows: the same samples in the form that the models accept.
        client: client whose models make all predictions. If None, each row is predicted by the model of its own client.
        kind: kind of model to evaluate. If None, all kinds are evaluated if each row belongs to a client of the run.
            Otherwise, only the global model is evaluated.

    Raises:
        ConfigError: the model or the client does not exist.
    """
    kinds = [models.kinds_for(rows.sites, client) if kind is None else [kind] for models in runs]
    if not any(kinds):
        names = ", ".join(str(models.about["method"]) for models in runs)
        raise ConfigError(f"{names} has no global model. Add --client to use a personal model")
    for models, one in ((models, one) for models, some in zip(runs, kinds, strict=True) for one in some):
        choice = assign_models(models, rows, one, client)
        new = models.fitted is not None and set(choice.owners) == {"global"}
        yield ModelEvaluation(models.about, one, TYPICAL_SCALE if new else OWN_SCALE, choice, rows, data)
        if new:
            fresh = predict_with_one(choice.groups[0][1].rescale(data), rows)
            yield ModelEvaluation(models.about, one, NEW_SCALE, fresh, rows, data)
