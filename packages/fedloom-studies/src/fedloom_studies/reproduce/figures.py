"""Values from finished runs, looked up by a reference, for each seed.

A reference has the form ``METHOD: MODEL[: FIGURE]``, e.g. ``flame: personal`` or ``fedprox: global: common accuracy``.
The model is global, personal, hybrid (as the run chose it), hybrid-validation (chosen on validation data in every run),
or empty for work and traffic. The figure has the form ``[PART ]METRIC[/STATISTIC][@WHEN]``. The part is test unless
train, validation or common is stated. The statistic ``client-K`` is the value of client number K alone. By default,
WHEN is the last round. WHEN may also be ``validation`` (the best round on validation data), ``mean`` (the mean over the
evaluated rounds, which measures speed), the number of a round, or ``to VALUE``. The last form, used for claims about
work, is the first evaluated round whose validation score reaches the value. If a model never reaches the value, the
work of the last round is used, which is a lower bound.

The function `get_unit` determines how a value is shown: accuracies in percent with differences in points, and bytes
as MB.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np

from fedloom.errors import ConfigError
from fedloom.formats import format_factor, format_fixed, format_significant, round_significant
from fedloom.lab.report import EMPTY_CURVE, Curve, Key, Run, benign_curve, find_seeds
from fedloom.metrics import TASK_ROLES, metric

FIGURE_PARTS = ("train", "validation", "test", "common")
MIN_WHOLE_FIGURE = 10_000
"""Smallest value without a unit (such as a number of parameters) that is shown without decimal places."""
CLIENT_STATISTIC_PREFIX = "client-"
"""Prefix of the statistic for a single client, which is followed by the client's number."""
UNSCALED_STATISTICS = ("variance", "jain")
"""Statistics over clients whose unit differs from the unit of the metric."""


class Reference(NamedTuple):
    """Reference that identifies a value by its variant ("" means every variant), method, model and figure."""

    variant: str
    method: str
    model: str
    figure: str

    @classmethod
    def create(cls, text: str, figure: str) -> Reference:
        """Parse a reference of the form ``[VARIANT |] METHOD: MODEL[: FIGURE]``.

        Raises:
            ConfigError: the text does not have this format.
        """
        variant, bar, rest = text.rpartition("|")
        parts = [part.strip() for part in rest.split(":")]
        if len(parts) not in (2, 3):
            raise ConfigError(f"a reference must have the form '[VARIANT |] METHOD: MODEL[: FIGURE]', got {text!r}")
        return cls(variant.strip() if bar else "", parts[0], parts[1], parts[2] if len(parts) == 3 else figure)

    def __str__(self) -> str:
        """Return the reference without its variant, as it is stored in a summary."""
        return f"{self.method}: {self.model}: {self.figure}"

    def chosen(self) -> Reference | None:
        """Return the same reference, at the round chosen on validation data, or None if no round can be chosen."""
        plain = "@" not in self.figure and self.model and not self.figure.startswith(("validation ", "nmi"))
        return self._replace(figure=f"{self.figure}@validation") if plain else None


class FigureUnit(NamedTuple):
    """FigureUnit of a kind of value. It determines how values and differences are shown.

    Attributes:
        name: unit printed after a value.
        gap: unit printed after a difference.
        scale: factor of a displayed value.
        words: words that follow a positive and a negative difference.
        compares_ratios: True if two values are compared by the logarithm of their ratio.
    """

    name: str = ""
    gap: str = ""
    scale: float = 1.0
    words: tuple[str, str] = ("above", "below")
    compares_ratios: bool = False

    def value(self, mean: float, spread: float | None = None) -> str:
        """Render a mean, with its standard deviation if this is known: ``94.98 ± 0.20 %``."""
        return self._resolve_name(self._format_value(mean, spread), self.name)

    def difference(self, mean: float, half: float | None = None) -> str:
        """Render a difference with its sign and, if known, the half-width of its interval: ``-38.1 ± 5.4 points``."""
        sign = "+" if mean > 0 else ""
        return self._resolve_name(sign + self._format_value(mean, half), self.gap)

    def lead(self, mean: float, half: float = math.nan) -> str:
        """Format a tested difference, or a ratio given its logarithm: ``1.16 (1.08 to 1.25) times``."""
        return (format_factor(mean, half) or "-") if self.compares_ratios else self.difference(mean, half)

    def write_words(self, mean: float, half: float = math.nan) -> str:
        """Render a tested difference in words: ``8.1 ± 5 points lower than`` or ``1.2 (1.1 to 1.3) times as many``."""
        if self.compares_ratios:
            return f"{format_factor(mean, half)} {self.words[0]}"
        return f"{self._format_value(abs(mean), half)} {self.words[mean < 0]}"

    def _resolve_name(self, text: str, name: str) -> str:
        return text if text == "-" or not name else f"{text} {name}"

    def _format_value(self, value: float, spread: float | None) -> str:
        if not math.isfinite(value):
            return "-"
        has_spread = spread is not None and math.isfinite(spread)
        beside = self.scale * spread if spread is not None and has_spread else math.nan
        if not self.name and abs(value) >= MIN_WHOLE_FIGURE:
            return format_fixed(value, 0) + (f" ± {format_fixed(beside, 0)}" if has_spread else "")
        return _number_text(self, self.scale * value, beside) + (
            f" ± {_number_text(self, beside, beside)}" if has_spread else ""
        )


POINTS_UNIT = FigureUnit("%", "points", 100.0, ("points higher than", "points lower than"))
GRADIENTS_UNIT = FigureUnit("gradients", "gradients", words=("as many gradients", ""), compares_ratios=True)
TRAFFIC_UNIT = FigureUnit("MB", "MB", 1e-6, ("as many bytes", ""), compares_ratios=True)
VARIANCE_UNIT = FigureUnit(words=("as large", ""), compares_ratios=True)
PLAIN_UNIT = FigureUnit()


def get_unit(figure: str) -> FigureUnit:
    """Return the unit of the figure with the given name."""
    name = figure.partition("@")[0]
    base, _, statistic = name.split(" ")[-1].partition("/")
    if metric(base).scale == POINTS_UNIT.scale and statistic not in UNSCALED_STATISTICS:
        return POINTS_UNIT
    if statistic == "variance":
        return VARIANCE_UNIT
    return GRADIENTS_UNIT if name.startswith("samples_") else TRAFFIC_UNIT if name.startswith("bytes_") else PLAIN_UNIT


def _number_text(of: FigureUnit, value: float, spread: float) -> str:
    """Render a number with two decimal places, or with one if the spread beside it is at least 1.

    Numbers without a unit have four decimal places if they are below 10, otherwise five significant digits.
    """
    if not of.name:
        return format_fixed(value, 4) if abs(value) < 10 else format_significant(value, 5)
    if of is GRADIENTS_UNIT:
        return format_fixed(round_significant(value, 3) or 0.0, 0)
    return format_fixed(value, 1 if abs(spread) >= 1 else 2)


def values_by_seed(run: Run, reference: Reference) -> dict[int, float]:
    """Return the value for each seed. The value is NaN if the run has not ended or did not record it."""
    name, _, when = reference.figure.partition("@")
    by_seed = {}
    for seed in find_seeds(run, reference.method):
        records = [record for record in run.summary.runs if (record.method, record.seed) == (reference.method, seed)]
        ended = bool(records) and all(record.status == "done" or record.diverged is not None for record in records)
        points = _mean_curve(run, Key(reference.method, seed, reference.model, "test", name))
        by_seed[seed] = _value_at(run, reference, seed, points, when) if ended else math.nan
    return by_seed


def _mean_curve(run: Run, key: Key) -> Curve:
    words = key.metric.split(" ", 1)
    if len(words) == 2 and words[0] in FIGURE_PARTS:
        key = key._replace(part=words[0], metric=words[1])
    if key.model == "hybrid-validation":
        return _validation_curve(run, key)
    base, _, statistic = key.metric.partition("/")
    if statistic.startswith(CLIENT_STATISTIC_PREFIX):
        of_clients = run.benign(key._replace(metric=base))
        if of_clients is None:
            return EMPTY_CURVE
        of_client = of_clients.select(of_clients.client == int(statistic.removeprefix(CLIENT_STATISTIC_PREFIX)))
        return Curve(of_client.round, of_client.value)
    if "/" not in key.metric:
        curve_points = benign_curve(run, key, "mean")
        if len(curve_points.round):
            return curve_points
    for place in (key, key._replace(part=""), key._replace(part="", model="")):
        points = run.totals.get(place)
        if points is not None:
            return Curve(points.round, points.value)
    return EMPTY_CURVE


def _validation_curve(run: Run, key: Key) -> Curve:
    """Return the mean over the benign clients in each round.

    For each client, the global model is used if it is better than the personal model on the client's validation split.
    """
    parts = {
        (model, part): run.benign(key._replace(model=model, part=part))
        for model in ("global", "personal")
        for part in ("validation", key.part)
    }
    p, g = parts["personal", key.part], parts["global", key.part]
    p_val, g_val = parts["personal", "validation"], parts["global", "validation"]
    if p is None or g is None or p_val is None or g_val is None:
        return EMPTY_CURVE
    sign = 1.0 if metric(key.metric).higher_is_better else -1.0
    chosen = np.where(sign * g_val.value > sign * p_val.value, g.value, p.value)
    rounds = np.unique(p.round)
    return Curve(rounds, np.array([np.nanmean(chosen[p.round == r]) for r in rounds]))


def _value_at(run: Run, reference: Reference, seed: int, points: Curve, when: str) -> float:
    match when:
        case "":
            return points.last
        case "mean":
            learned = points.value[points.round > 0]
            return float(learned.mean()) if len(learned) else math.nan
        case "validation":
            return points.read_round(_best_round(run, reference, seed))
        case _ if when.isdecimal():
            return points.read_round(int(when))
        case _ if re.fullmatch(r"to \d*\.?\d+", when):
            rounds, scores, sign = _validation_scores(run, reference, seed)
            reached = np.flatnonzero(scores >= sign * float(when.removeprefix("to ")))
            return points.read_round(int(rounds[reached[0]])) if len(reached) else points.last
    raise ConfigError(f"{reference.figure}: after @, use validation, mean, a round number or 'to VALUE', got {when!r}")


def _best_round(run: Run, reference: Reference, seed: int) -> int:
    """Return the round with a model's best validation score (the earliest if tied), or -1 if there are no scores."""
    rounds, scores, _ = _validation_scores(run, reference, seed)
    return int(rounds[np.argmax(scores)]) if len(rounds) else -1


def _validation_scores(run: Run, reference: Reference, seed: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the rounds, a model's validation scores with their sign set so that higher is better, and this sign.

    Both arrays are empty if there are no validation scores.
    """
    for name in (*(roles.page for roles in TASK_ROLES.values()), "loss"):
        points = _mean_curve(run, Key(reference.method, seed, reference.model, "validation", name))
        measured = np.isfinite(points.value)
        if measured.any():
            sign = 1.0 if metric(name).higher_is_better else -1.0
            return points.round, np.where(measured, sign * points.value, -np.inf), sign
    return np.empty(0), np.empty(0), 1.0
