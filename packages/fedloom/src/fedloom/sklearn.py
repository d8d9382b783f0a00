"""Federated learning with a scikit-learn interface: ``fit(X, y, groups=...)``, ``predict``, ``score`` and so on.

>>> import numpy as np
>>> X = np.arange(360.0).reshape(90, 4) % 7 - 3
>>> sites = np.repeat(["north", "south", "west"], 30)
>>> made = FederatedClassifier("ditto", rounds=5).fit(X, X[:, 0] > 0, groups=sites)
>>> made.predict(X[:2], groups=["north", "west"]).shape, made.predict_proba(X).shape
((2,), (90, 2))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import Tags, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from fedloom.algorithms import Algorithm, PresetMethod
from fedloom.data import partitions
from fedloom.data.dataset import Dataset, Task, default_to_cpu
from fedloom.data.sources.array_data import refuse_masked
from fedloom.data.subjects.design import create_design, is_absent
from fedloom.data.survey.findings import exclusion_reason, table_findings
from fedloom.data.survey.leaks import ReadColumn
from fedloom.data.tables import Table, level_name
from fedloom.engine.setting import GivenModel
from fedloom.engine.simulate import simulate
from fedloom.errors import ConfigError, DataError, adapt_wording, warn_user
from fedloom.lazy import make_dir
from fedloom.trained.model import Model
from fedloom.values import Value

__all__ = ["FederatedClassifier", "FederatedRegressor"]

AnyArray = NDArray[Any]


class _Federated(BaseEstimator):  # type: ignore[misc]
    """Common base class of the estimators. `FederatedClassifier` describes the arguments."""

    def __init__(
        self,
        method: str | Algorithm | PresetMethod = "fedavg",
        *,
        rounds: int = 20,
        lr: float = 0.1,
        epochs: int = 1,
        batch_size: int | None = 32,
        model: GivenModel = "softmax",
        clients: int = 1,
        random_state: int | np.random.RandomState = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.method, self.rounds, self.lr, self.epochs, self.batch_size = method, rounds, lr, epochs, batch_size
        self.model, self.clients, self.random_state, self.settings = model, clients, random_state, settings

    @default_to_cpu()
    @adapt_wording("estimator")
    def _fit(
        self,
        x: AnyArray,
        y: torch.Tensor,
        task: Task,
        groups: ArrayLike | None,
        subjects: ArrayLike | None,
        **more: Any,
    ) -> None:
        """Train on features [N, p] and on targets of a type that `Dataset` accepts."""
        state = self.random_state
        if self.settings is not None and not isinstance(self.settings, Mapping):
            raise ConfigError(
                f"settings must be a table by name, as {{'aggregator': 'median'}}, got {self.settings!r:.60}"
            )
        try:
            seed = state if isinstance(state, int) else int(check_random_state(state).randint(2**31))
        except ValueError:
            raise ConfigError(f"random_state must be a whole number or a numpy generator, got {state!r:.60}") from None
        if subjects is not None:
            more |= {
                "design": create_design({"subject": _row_labels("subjects", subjects, len(x))}, len(x), "subjects")
            }
        if groups is not None:
            labels = _row_labels("groups", groups, len(x))
            labels = np.array(list(map(level_name, labels.tolist()))) if labels.dtype.kind in "OUS" else labels
            names, users = np.unique(labels, return_inverse=True)
            more |= {"users": torch.from_numpy(users), "user_names": tuple(map(level_name, names.tolist()))}
        table = Table.numeric(x.shape[1])
        self.notes_ = self._survey(x, y, more)
        data = Dataset("X", torch.tensor(x, dtype=torch.float64), y, task, prepare=table, notes=self.notes_, **more)
        cut = {"test": 0.0, "validation": 0.0}
        split = partitions.iid(clients=self.clients, **cut) if groups is None else partitions.natural(**cut)
        rounds: Any = self.rounds  # may have any type, because scikit-learn does not check it
        tables: dict[str, dict[str, Any]] = {
            "local": {"lr": self.lr, "epochs": self.epochs, "batch_size": self.batch_size},
            "evaluate": {
                "parts": ("train",),
                "every": rounds if isinstance(rounds, int | np.integer) and rounds else 1,
            },
            "engine": {"dtype": "float64"},
        }
        choices: dict[str, Any] = {"rounds": self.rounds, "seed": seed, **tables}
        for key, value in (self.settings or {}).items():
            if key in tables and isinstance(value, Value):
                value = {field: getattr(value, field) for field in value.model_fields_set}
            if key in tables and isinstance(value, Mapping):
                value = {**tables[key], **value}
            elif key in choices or key == "model":
                parameter = "random_state" if key == "seed" else key
                cure = f"give its options, as {{{key!r}: {{...}}}}" if key in tables else f"give {parameter}=..."
                raise ConfigError(f"settings: {key!r} is already set by the estimator's parameters; {cure}")
            choices[key] = value
        result = simulate(self.method, split(data, seed=seed), self.model, **choices)
        if result.status != "done":
            warn_user(f"{result.stop.value}: {result.detail}", ConvergenceWarning)
        models = result.models
        kinds, sites = models.kinds(), models.names
        kind = "personal" if "personal" in kinds else "global"
        self.models_: dict[str | None, Model] = {name: models.ready(kind, name) for name in sites}
        if "global" in kinds:
            self.models_[None] = models.ready("global")
        elif len(sites) == 1:
            self.models_[None] = self.models_[sites[0]]

    def _survey(self, x: AnyArray, y: torch.Tensor, more: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the notes on possible problems in a table.

        No column is dropped, because an estimator uses all columns that it is given.
        """
        names = [str(name) for name in getattr(self, "feature_names_in_", range(x.shape[1]))]
        features = {name: ReadColumn(np.asarray(x[:, k], np.float64)) for k, name in enumerate(names)}
        classes, columns = more.get("classes", ()), y.double().numpy().reshape(len(x), -1).T
        several = len(columns) > 1
        kind = "classification" if classes else "regression"
        outcome = {
            f"label {k}" if several else "y": (ReadColumn(column, ("0", "1") if several else classes), kind)
            for k, column in enumerate(columns)
        }
        users = ReadColumn(more["users"].double().numpy(), more["user_names"]) if "users" in more else None
        numbered = [
            f"column {n!r} {why}. Leave it out" for n, c in features.items() if (why := exclusion_reason(n, c, len(x)))
        ]
        for note in numbered:
            warn_user(note)
        design = more.get("design")
        return (*numbered, *table_findings(features, outcome, users, units=None if design is None else design.units))

    @default_to_cpu()
    def _scores(self, x: object, groups: ArrayLike | None) -> AnyArray:
        """Return probabilities or predicted values [N, k]. Each row is predicted by the model of its group."""
        check_is_fitted(self)
        refuse_masked(x, "X")
        rows = torch.tensor(np.asarray(validate_data(self, x, reset=False), np.float64))
        owners = (
            [None] * len(rows) if groups is None else list(map(level_name, _group_codes(groups, len(rows)).tolist()))
        )
        places: dict[str | None, list[int]] = {}
        for k, owner in enumerate(owners):
            places.setdefault(owner if owner in self.models_ else None, []).append(k)
        if None in places and None not in self.models_:
            raise DataError(
                f"{self.method} has no global model. Pass groups with the group of each row; every "
                f"group must be a group of the fit: {', '.join(map(repr, list(self.models_)[:8]))}"
            )
        out = np.concatenate([self.models_[owner].scores(rows[torch.tensor(index)]) for owner, index in places.items()])
        return np.asarray(out[np.argsort(np.concatenate(list(places.values())))])


class FederatedClassifier(ClassifierMixin, _Federated):  # type: ignore[misc]
    """Classifier that is trained by federated learning. The groups are the clients.

    Args:
        method: name of a method listed by ``fedloom list``, or a value of `fedloom.algorithms`.
        rounds: number of communication rounds.
        lr: learning rate of local training.
        epochs: number of passes over a client's rows in each round.
        batch_size: number of rows in each step. If None, each step uses all rows of a client.
        model: name or value of `fedloom.models`, an `nn.Module`, or a function that returns a module.
        clients: number of clients, used to assign rows at random if no groups are given.
        random_state: an int, or a generator from which an int is drawn. This number determines all random choices.
        settings: other options of `fedloom.Setting`, such as ``{"sampler": ..., "local": {"momentum": 0.9}}``. A table
            or value for ``local``, ``evaluate`` or ``engine`` changes only those options that it sets.

    Attributes:
        models_: the model of each client, keyed by group name. If the method trains a global model, it is stored under
            None.
        classes_: names of the classes ``[C]``, or numbers of the labels ``[k]``.
        multilabel_: True if every row has several labels.
        notes_: notes about columns with possible problems, such as row numbers or copies of the target. `fit` also
            warns about row numbers and personal data, which every table leaves out.
    """

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def fit(self, X: Any, y: Any, groups: ArrayLike | None = None, subjects: ArrayLike | None = None) -> Self:
        """Train the models of the federation.

        Args:
            X: array of numbers ``[N, p]`` without missing values.
            y: classes ``[N]``, given as numbers or text, or several labels of each row ``[N, k]``, each of which is 1
                if it is present and 0 if it is absent.
            groups: group of each row ``[N]``. The groups are the clients of the federation. If None, rows
                are randomly assigned to `clients` groups.
            subjects: patient, or similar unit, of each row ``[N]``. All rows of a subject are assigned to
                the same client. For cross-validation, pass the subjects to the splitter: ``cross_val_score(...,
                groups=subjects, cv=GroupKFold())``.

        Raises:
            ValueError: scikit-learn or the method rejects the arguments.
        """
        refuse_masked((X, y), "X and y")
        shape = y.shape if issparse(y) else np.asarray(y).shape
        several = len(shape) == 2 and shape[1] > 1
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=several)
        check_classification_targets(y)
        self.multilabel_ = several
        if several:
            y = y.toarray() if issparse(y) else y
            if not np.isin(y, (0, 1)).all():
                raise DataError(f"y of shape {[*y.shape]} must contain only 0 and 1, with one column per label")
            self.classes_, self._label_type = np.arange(y.shape[1]), y.dtype
            names = tuple(map(str, self.classes_))
            self._fit(X, torch.tensor(y, dtype=torch.float32), "multilabel", groups, subjects, classes=names)
            return self
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(f"y contains only one class, {str(self.classes_[0])!r}. A classifier needs at least two")
        task: Task = "binary" if len(self.classes_) == 2 else "classification"
        names = tuple(map(str, self.classes_.tolist()))
        self._fit(X, torch.from_numpy(codes.astype(np.int64)), task, groups, subjects, classes=names)
        return self

    def predict(self, X: object, groups: ArrayLike | None = None) -> AnyArray:
        """Return the predicted classes ``[N]``, or 1 or 0 for each label ``[N, k]``.

        Args:
            X: array of numbers ``[N, p]``.
            groups: group of each row ``[N]``. If the method trains one model per group, the model of a
                row's group predicts the row. Rows of unknown groups, and all rows if no groups are given, are predicted
                by the global model.
        """
        scores = self._scores(X, groups)
        return (
            (scores >= 0.5).astype(self._label_type)
            if self.multilabel_
            else np.asarray(self.classes_[scores.argmax(1)])
        )

    def predict_proba(self, X: object, groups: ArrayLike | None = None) -> AnyArray:
        """Return predicted probabilities of classes ``[N, C]``, in the order of ``classes_``, or of labels ``[N, k]``.

        The arguments are the same as for `predict`.
        """
        return self._scores(X, groups)

    def score(self, X: Any, y: Any, sample_weight: ArrayLike | None = None, groups: ArrayLike | None = None) -> float:
        """Return the accuracy of the predictions. The groups are passed to `predict`.

        If there are several labels, this is the fraction of rows in which all labels are predicted correctly.
        """
        return float(accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight))


class FederatedRegressor(RegressorMixin, _Federated):  # type: ignore[misc]
    """Regressor that is trained by federated learning. The groups are the clients.

    The arguments are described in `FederatedClassifier`.

    The target is centered and scaled with the mean and standard deviation of all rows.
    """

    def fit(self, X: Any, y: Any, groups: ArrayLike | None = None, subjects: ArrayLike | None = None) -> Self:
        """Train on features ``[N, p]`` and a numeric target ``[N]`` (see `FederatedClassifier.fit`)."""
        refuse_masked((X, y), "X and y")
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        y = np.asarray(y, np.float64)
        centre, unit = float(y.mean()), float(y.std()) or 1.0
        target = torch.from_numpy((y - centre) / unit)[:, None]
        self._fit(X, target, "regression", groups, subjects, centre=centre, unit=unit)
        return self

    def predict(self, X: object, groups: ArrayLike | None = None) -> AnyArray:
        """Return predicted values ``[N]`` (see `FederatedClassifier.predict` for the groups)."""
        return self._scores(X, groups)[:, 0]

    def score(self, X: Any, y: Any, sample_weight: ArrayLike | None = None, groups: ArrayLike | None = None) -> float:
        """Return the R2 of the predictions. The groups are passed to `predict`."""
        return float(r2_score(y, self.predict(X, groups), sample_weight=sample_weight))


def _group_codes(groups: ArrayLike, rows: int, what: str = "groups") -> AnyArray:
    try:
        labels: AnyArray = column_or_1d(groups)
    except (ValueError, TypeError):  # scikit-learn's error names another argument
        shown = f"{type(groups).__name__} {np.shape(groups)}" if hasattr(groups, "shape") else repr(groups)
        raise DataError(f"{what} must be a list with an entry for each row, got {shown:.60}") from None
    if len(labels) != rows:
        raise DataError(f"{what} has {len(labels)} entries for {rows} rows. Pass one entry per row")
    return labels


def _row_labels(what: str, values: ArrayLike, rows: int) -> AnyArray:
    """Return one label per row.

    Raises:
        DataError: at least one row has no label.
    """
    labels = _group_codes(values, rows, what)
    if missing := [k for k, label in enumerate(labels.tolist()) if is_absent(label)]:
        raise DataError(f"{what}: row {missing[0]} has no value ({len(missing)} such rows). Pass a value for each row")
    return labels


__dir__ = make_dir(__name__)
