"""Names of metrics and other values as they appear in the report.

The metrics themselves are defined in `fedloom.metrics`.
"""

from __future__ import annotations

from fedloom.metrics import COST_FIGURES, FEDERATION_FIGURES, MEGABYTE_BYTES, METRICS, Metric, metric, titled

__all__ = [
    "COST_FIGURES", "FEDERATION_FIGURES", "FIGURE_SECTIONS", "MEGABYTE_BYTES", "METRICS", "STATISTIC_TITLES", "Metric",
    "describe_figure", "is_ratio", "metric", "titled",
]  # fmt: skip

FIGURE_SECTIONS = {
    "nmi": "clusters",
    "epsilon": "privacy",
    **dict.fromkeys(("nnz", "nonzeros", "personal_nonzeros", "rank", "factorised"), "structure"),
    **dict.fromkeys(
        (
            "kkt",
            "consensus_gap",
            "lyapunov",
            "local_iterations",
            "criterion_met",
            "lagrangian",
            "primal_residual",
            "dual_residual",
        ),
        "convergence",
    ),
}
"""Sections of the page that show federation-wide metrics, keyed by metric. All other federation-wide metrics are shown
in the section "others"."""


def describe_figure(name: str) -> Metric:
    """Return the display of a value named ``metric``, ``metric/statistic`` or ``metric@place``, or of a total of costs.

    >>> describe_figure("accuracy/worst10").title, describe_figure("accuracy/jain").unit
    ('Worst 10 %', '')
    >>> describe_figure("loss/variance").higher_is_better
    False
    """
    if name in COST_FIGURES:
        return COST_FIGURES[name]
    base, _, statistic = name.replace("@", "/").partition("/")
    shown = metric(base)
    match statistic:
        case "":
            return shown
        case "variance":
            return Metric("Loss variance" if base == "loss" else f"Variance of {shown.title}", higher_is_better=False)
        case "sigma":
            return shown._replace(title="Spread around the global", higher_is_better=False)
        case "jain":
            return Metric("Jain index")
        case _:
            return shown._replace(title=STATISTIC_TITLES.get(statistic, f"{shown.title} {statistic}"))


STATISTIC_TITLES = {
    "worst10": "Worst 10 %",
    "weighted": "Weighted by samples",
    "validation": "At the best validation round",
    "common": "Common test set",
}
"""Titles of statistics over clients, and titles of the other data of a metric."""


def is_ratio(name: str) -> bool:
    """Return True if a metric is compared by ratios on a logarithmic scale, as costs and variances over clients are.

    >>> is_ratio("bytes"), is_ratio("loss/variance"), is_ratio("accuracy/worst10")
    (True, True, False)
    """
    return name in COST_FIGURES or name.startswith(("bytes", "samples_")) or name.endswith("/variance")


PROPER_NAMES = ("Brier", "Jain", "Lyapunov", "Poisson")
"""First words of titles, if these words are proper names."""


def lowercase_title(title: str) -> str:
    """Return a title as written inside a sentence: in lower case, except names, symbols and abbreviations.

    >>> [lowercase_title(title) for title in ("Macro F1", "AUROC", "C-index", "Brier score")]
    ['macro F1', 'AUROC', 'C-index', 'Brier score']
    """
    first = title.partition(" ")[0]
    is_word = first[1:].isalpha() and first[1:].islower() and first not in PROPER_NAMES
    return title[:1].lower() + title[1:] if is_word else title
