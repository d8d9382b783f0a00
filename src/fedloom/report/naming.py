"""How metrics and figures are called and shown."""

from __future__ import annotations

from typing import NamedTuple

MB = 1e6
"""Bytes of a megabyte."""


class Metric(NamedTuple):
    """How a metric is called and shown: values are multiplied by ``scale``."""

    title: str
    unit: str = ""
    scale: float = 1.0
    higher: bool = True


METRICS = {
    "accuracy": Metric("Accuracy", "%", 100.0),
    "macro_f1": Metric("Macro F1"),
    "auroc": Metric("AUROC"),
    "auprc": Metric("AUPRC"),
    "f1": Metric("F1"),
    "r2": Metric("R²"),
    "calibration_error": Metric("Calibration error", higher=False),
    "rmse": Metric("RMSE", higher=False),
    "mae": Metric("MAE", higher=False),
    "loss": Metric("Loss", higher=False),
}
LEADING = ("auroc", "accuracy", "rmse", "loss")
"""The first of these that was recorded leads the report."""


OTHERS = {
    "cd": Metric("Client disagreement", higher=False),
    "nmi": Metric("Cluster recovery (NMI)"),
    "nnz": Metric("Non-zero parameters", higher=False),
    "nonzeros": Metric("Non-zero parameters", higher=False),
    "personal_nonzeros": Metric("Non-zero parameters of a personal component, mean", higher=False),
    "factorised": Metric("Parameters as thin factors", higher=False),
    "rank": Metric("Rank", higher=False),
    "kkt": Metric("KKT residual", higher=False),
    "consensus_gap": Metric("Consensus gap", higher=False),
    "lyapunov": Metric("Lyapunov function", higher=False),
    "local_iterations": Metric("Local iterations", higher=False),
    "epsilon": Metric("Privacy spent (epsilon)", higher=False),
}
"""Figures of the whole federation that have a proper name."""
GROUPS = {
    "nmi": "clusters",
    **dict.fromkeys(("nnz", "nonzeros", "personal_nonzeros", "rank", "factorised"), "structure"),
    **dict.fromkeys(("kkt", "consensus_gap", "lyapunov", "local_iterations"), "convergence"),
}
"""Sections of the page for figures of the whole federation; the rest are among the others."""


def metric(name: str) -> Metric:
    """How to show a metric; unknown ones (a user's own) keep their name and count as higher is better."""
    return METRICS.get(name) or OTHERS.get(name) or Metric(name.replace("_", " "))


def titled(shown: Metric) -> str:
    """Title with its unit."""
    return f"{shown.title} ({shown.unit})" if shown.unit else shown.title


def figure(name: str) -> Metric:
    """How to show a figure of the result table: ``metric``, ``metric/statistic``, ``metric@place``, or a total.

    >>> figure("accuracy/worst10").title, figure("accuracy/jain").unit, figure("loss/variance").higher
    ('Worst 10 %', '', False)
    """
    if name in COSTS:
        return COSTS[name]
    base, _, statistic = name.replace("@", "/").partition("/")
    shown = metric(base)
    match statistic:
        case "":
            return shown
        case "variance":
            return Metric("Variance of losses" if base == "loss" else f"Variance of {shown.title}", higher=False)
        case "sigma":
            return shown._replace(title="Spread around the global", higher=False)
        case "jain":
            return Metric("Jain index")
        case _:
            return shown._replace(title=STATISTICS.get(statistic, f"{shown.title} {statistic}"))


STATISTICS = {
    "worst10": "Worst 10 %",
    "weighted": "Weighted by samples",
    "validation": "At best validation round",
    "common": "Common test set",
}
"""Titles of statistics over clients, and of other places to measure."""
COSTS = {
    "steps": Metric("Local steps", higher=False),
    "samples_backward": Metric("Samples backward", higher=False),
    "bytes_up": Metric("MB up", "", 1 / MB, higher=False),
    "bytes_down": Metric("MB down", "", 1 / MB, higher=False),
    "seconds": Metric("Seconds", higher=False),
}
"""The equal-work columns."""
