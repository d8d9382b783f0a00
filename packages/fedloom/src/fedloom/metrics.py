"""Metrics: names, titles, scales, directions and bounds, the metrics used for decisions, and summaries over clients.

Every module that shows a metric, compares metrics or selects by a metric uses this table. A metric therefore has the
same meaning in a run, a search, a deployment and a report. The ``values`` arguments are float64 ``[n]``, one per
client, with nan for clients that have no samples in the evaluated split. These clients are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

MEGABYTE_BYTES = 1e6
"""Number of bytes in a megabyte."""


class Metric(NamedTuple):
    """Properties of a metric: its title, format and direction.

    Attributes:
        title: title that is shown to people.
        unit: unit of the displayed value.
        scale: factor of the displayed value.
        higher_is_better: True if larger values are better than smaller ones.
        bounds: smallest and largest value that the metric can have.
        rated: True if either higher or lower values are better.
    """

    title: str
    unit: str = ""
    scale: float = 1.0
    higher_is_better: bool = True
    bounds: tuple[float, float] = (-math.inf, math.inf)
    rated: bool = True


SHARE_BOUNDS, POSITIVE_BOUNDS = (0.0, 1.0), (0.0, math.inf)

METRICS = {
    "accuracy": Metric("Accuracy", "%", 100.0, bounds=SHARE_BOUNDS),
    "balanced_accuracy": Metric("Balanced accuracy", "%", 100.0, bounds=SHARE_BOUNDS),
    "macro_f1": Metric("Macro F1", bounds=SHARE_BOUNDS),
    "micro_f1": Metric("Micro F1", bounds=SHARE_BOUNDS),
    "macro_precision": Metric("Macro precision", bounds=SHARE_BOUNDS),
    "attack_success": Metric("Attack success", "%", 100.0, higher_is_better=False, bounds=SHARE_BOUNDS),
    "recall": Metric("Recall", bounds=SHARE_BOUNDS),
    "precision": Metric("Precision", bounds=SHARE_BOUNDS),
    "dice": Metric("Dice", bounds=SHARE_BOUNDS),
    "iou": Metric("IoU", bounds=SHARE_BOUNDS),
    "mean_iou": Metric("Mean IoU", bounds=SHARE_BOUNDS),
    "auroc": Metric("AUROC", bounds=SHARE_BOUNDS),
    "auprc": Metric("AUPRC", bounds=SHARE_BOUNDS),
    "auroc_ovr": Metric("AUROC, one against the rest", bounds=SHARE_BOUNDS),
    "auprc_ovr": Metric("AUPRC, one against the rest", bounds=SHARE_BOUNDS),
    "macro_auroc": Metric("AUROC, mean over labels", bounds=SHARE_BOUNDS),
    "macro_auprc": Metric("AUPRC, mean over labels", bounds=SHARE_BOUNDS),
    "label_auroc": Metric("AUROC", bounds=SHARE_BOUNDS),
    "label_auprc": Metric("AUPRC", bounds=SHARE_BOUNDS),
    "label_f1": Metric("F1", bounds=SHARE_BOUNDS),
    "exact_match": Metric("All labels right", "%", 100.0, bounds=SHARE_BOUNDS),
    "f1": Metric("F1", bounds=SHARE_BOUNDS),
    "c_index": Metric("C-index", bounds=SHARE_BOUNDS),
    "r2": Metric("R²", bounds=(-math.inf, 1.0)),
    "calibration_error": Metric("Calibration error", higher_is_better=False, bounds=SHARE_BOUNDS),
    "calibration_slope": Metric("Calibration slope", rated=False),
    "calibration_intercept": Metric("Calibration intercept", rated=False),
    "observed_expected": Metric("Observed / expected events", bounds=POSITIVE_BOUNDS, rated=False),
    "brier": Metric("Brier score", higher_is_better=False, bounds=(0.0, 2.0)),
    "perplexity": Metric("Perplexity", higher_is_better=False, bounds=(1.0, math.inf)),
    "deviance": Metric("Poisson deviance", higher_is_better=False, bounds=POSITIVE_BOUNDS),
    "rmse": Metric("RMSE", higher_is_better=False, bounds=POSITIVE_BOUNDS),
    "mae": Metric("MAE", higher_is_better=False, bounds=POSITIVE_BOUNDS),
    "loss": Metric("Loss", higher_is_better=False),
}
"""Metrics computed on the samples of one client (`fedloom.tasks`). Recall and precision are recorded per class. AUROC,
AUPRC and F1 are recorded per label (`class_metric_name`)."""

FEDERATION_FIGURES = {
    "cd": Metric("Client disagreement", higher_is_better=False),
    "nmi": Metric("Cluster recovery (NMI)"),
    "nnz": Metric("Non-zero parameters", higher_is_better=False),
    "nonzeros": Metric("Non-zero parameters", higher_is_better=False),
    "personal_nonzeros": Metric("Non-zero parameters of a personal component, mean", higher_is_better=False),
    "factorised": Metric("Parameters as thin factors", higher_is_better=False),
    "rank": Metric("Rank", higher_is_better=False),
    "kkt": Metric("KKT residual", higher_is_better=False),
    "consensus_gap": Metric("Consensus gap", higher_is_better=False),
    "lagrangian": Metric("Augmented Lagrangian", higher_is_better=False),
    "primal_residual": Metric("Primal residual", higher_is_better=False),
    "dual_residual": Metric("Dual residual", higher_is_better=False),
    "lyapunov": Metric("Lyapunov function", higher_is_better=False),
    "local_iterations": Metric("Local iterations", higher_is_better=False),
    "criterion_met": Metric("Local criterion met"),
    "epsilon": Metric("Privacy spent (epsilon)", higher_is_better=False),
    "idle_share": Metric("Idle fraction of the devices' time", higher_is_better=False),
    "unheard": Metric("Uploads that were late or lost", higher_is_better=False),
}
"""Named metrics that describe the federation as a whole."""

COST_FIGURES = {
    "steps": Metric("Local steps", higher_is_better=False),
    "samples_backward": Metric("Sample gradients", higher_is_better=False),
    "bytes_up": Metric("MB up", "", 1 / MEGABYTE_BYTES, higher_is_better=False),
    "bytes_down": Metric("MB down", "", 1 / MEGABYTE_BYTES, higher_is_better=False),
    "seconds": Metric("Seconds", higher_is_better=False),
    "simulated_seconds": Metric("Simulated hours", "", 1 / 3600, higher_is_better=False),
}
"""Cost metrics for comparing methods at equal work."""


USER_METRICS: dict[str, Metric] = {}
"""Metrics declared by users in this process (`declare`). Runs and their files record whether larger or smaller values
of these metrics are better."""


class Roles(NamedTuple):
    """Metrics that decisions for a task use.

    Attributes:
        page: metric shown first in tables and reports.
        settings: metric that `fedloom tune` uses to compare settings. The metric is averaged over the clients with a
            defined value. AUROC is defined only if both classes occur.
        client: metric that decides, for each client, which of the two models is the hybrid model. For
            classification, this is the accuracy, as in FLAME's model selection. If some classes may be rare, the loss
            is used as the metric, because accuracies are then often tied.
    """

    page: str
    settings: str
    client: str


TASK_ROLES = {
    "binary": Roles("auroc", "auroc", "loss"),
    "imbalanced": Roles("balanced_accuracy", "balanced_accuracy", "loss"),
    "classification": Roles("accuracy", "accuracy", "accuracy"),
    "multilabel": Roles("macro_auroc", "macro_auroc", "loss"),
    "survival": Roles("c_index", "c_index", "loss"),
    "count": Roles("deviance", "deviance", "deviance"),
    "regression": Roles("rmse", "r2", "r2"),
}
"""Metrics used for decisions, keyed by task ("imbalanced": several classes, evaluated by balanced accuracy).

If the metric of a decision was not measured, the loss is used instead.
"""

SELECTION_METRICS = frozenset(name for roles in TASK_ROLES.values() for name in (roles.settings, roles.client)) - {
    "loss"
}
"""Metrics that can be used for a decision, in addition to the loss. The spread of these metrics over clients is
recorded."""

SUMMARY_METRICS = tuple(
    name for name in METRICS if name == "loss" or any(name in roles for roles in TASK_ROLES.values())
)
"""Metrics that are shown where space is limited."""


def leading(names: Collection[str], role: Literal["page", "settings", "client"] = "page") -> str:
    """Return the metric used for decisions, chosen from those that were measured.

    >>> leading({"loss", "accuracy", "auroc"}), leading({"loss", "accuracy", "auroc"}, "client"), leading({"mae"})
    ('auroc', 'loss', 'loss')
    """
    measured = (roles for roles in TASK_ROLES.values() if roles.page in names)
    return next((leader for roles in measured if (leader := getattr(roles, role)) in names), "loss")


def class_metric_name(name: str, label: str) -> str:
    """Return the recorded name of a metric for an individual class.

    >>> class_metric_name("recall", "ill"), metric("recall[ill]").title
    ('recall[ill]', 'Recall of ill')
    """
    return f"{name}[{label}]"


def metric(name: str) -> Metric:
    """Return the properties of a metric that is computed for clients or for the federation.

    If a metric was not declared, its name is used as its title, and the metric is not rated.
    """
    whole, _, label = name.partition("[")
    if label and whole in METRICS:
        return METRICS[whole]._replace(title=f"{METRICS[whole].title} of {label.removesuffix(']')}")
    return (
        METRICS.get(name)
        or FEDERATION_FIGURES.get(name)
        or USER_METRICS.get(name)
        or Metric(name.replace("_", " "), rated=False)
    )


def declare(directions: Mapping[str, bool]) -> None:
    """Register a user's metrics by name. The value is True if larger values of the metric are better."""
    USER_METRICS.update(
        {name: Metric(name.replace("_", " "), higher_is_better=higher) for name, higher in directions.items()}
    )


def titled(shown: Metric) -> str:
    """Return the title of a metric, including its unit."""
    return f"{shown.title} ({shown.unit})" if shown.unit else shown.title


def over_clients(name: str, values: Values, sizes: Values, centre: float | None = None) -> dict[str, float]:
    """Return the metrics of the federation, computed from the values of its clients and keyed by their recorded names.

    Args:
        name: the metric.
        values: ``[n]``, one value per client. Clients whose value is nan are ignored.
        sizes: number of samples of each client ``[n]``.
        centre: value of the global model on the common test set.
    """
    low = metric(name).higher_is_better
    figures = {"mean": client_mean(values), "weighted": weighted_mean(values, sizes), "worst10": worst(values, low=low)}
    if name == "loss":
        return {f"loss/{k}": v for k, v in (figures | {"variance": variance(values)}).items()} | {
            "cd": disagreement(values)
        }
    if name in SELECTION_METRICS:
        figures |= {"variance": variance(values), "jain": jain(values)}
        figures |= {} if centre is None else {"sigma": spread(values, centre)}
        figures |= {f"decile{k}": float(decile) for k, decile in enumerate(deciles(values), 1)}
    return {f"{name}/{statistic}": value for statistic, value in figures.items()}


def client_mean(values: Values) -> float:
    """Return the mean over clients."""
    finite = _finite(values)
    return float(finite.mean()) if len(finite) else math.nan


def weighted_mean(values: Values, sizes: Values) -> float:
    """Return the mean over clients, weighted by their numbers of samples."""
    import numpy as np

    counted = np.isfinite(values) & (sizes > 0)
    return float(np.average(values[counted], weights=sizes[counted])) if counted.any() else math.nan


def worst(values: Values, *, low: bool) -> float:
    """Return the mean over the worst tenth of the clients, which is at least one client.

    ``low``: True if small values are bad, so that the worst clients are those with the smallest values.
    """
    finite = _finite(values)
    finite.sort()
    count = max(1, round(len(finite) / 10))
    return float((finite[:count] if low else finite[-count:]).mean()) if len(finite) else math.nan


def deciles(values: Values) -> Values:
    """Return the nine deciles of the values over clients."""
    import numpy as np

    finite = _finite(values)
    return np.quantile(finite, np.arange(1, 10) / 10) if len(finite) else np.full(9, math.nan)


def spread(values: Values, centre: float) -> float:
    """Return sigma_Acc, the root mean square distance of client accuracies from the global one (Equitable-FL, Sec.

    5).
    """
    finite = _finite(values)
    return math.sqrt(((finite - centre) ** 2).mean()) if len(finite) else math.nan


def variance(values: Values) -> float:
    """Return the sample variance over clients, with the divisor n - 1 (FLAME's fairness of test losses)."""
    finite = _finite(values)
    return float(finite.var(ddof=1)) if len(finite) > 1 else math.nan


def jain(values: Values) -> float:
    """Return Jain's fairness index (sum x)^2 / (n sum x^2), in [1/n, 1]."""
    finite = _finite(values)
    total = float((finite**2).sum())
    return float(finite.sum() ** 2 / (len(finite) * total)) if total > 0 else math.nan


def disagreement(values: Values) -> float:
    """Return the client disagreement CD (Equitable-FL, Eq. 9): the sum of |l_i - l_j| over ordered pairs / binom(r, 2).

    CD is equal to twice the mean absolute difference between two clients. The paper sums over the r participants of a
    round. The recorded value is the sum over all clients, including clients that did not participate in the round, so
    that rounds and methods are comparable.
    """
    import numpy as np

    finite = _finite(values)
    finite.sort()
    r = len(finite)
    if r < 2:
        return math.nan
    pairs = float(((2 * np.arange(r) - r + 1) * finite).sum())
    return 2 * pairs / (r * (r - 1) / 2)


def mutual_information(planted: NDArray[np.int64], recovered: NDArray[np.int64]) -> float:
    """Return the normalized mutual information of two labelings, in [0, 1] (Equitable-FL, Fig.

    2). The result is 1 if the labelings are equal up to renaming.
    """
    from sklearn.metrics import normalized_mutual_info_score

    return float(normalized_mutual_info_score(planted, recovered))


def _finite(values: Values) -> Values:
    """Return a copy that contains only the finite values."""
    import numpy as np

    return values[np.isfinite(values)]
