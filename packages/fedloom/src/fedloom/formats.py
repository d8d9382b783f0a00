"""Number formatting: the numbers in tables, pages, charts and messages are converted to text only in this module.

The module also converts tables to DataFrames.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedloom.errors import ConfigError, write_singular

if TYPE_CHECKING:
    import pyarrow as pa
import re
from collections.abc import Iterable, Mapping, Sequence

UNKNOWN_DASH = "\N{EN DASH}"
"""Text that is shown in place of an unknown number."""
MIN_EXPONENT_VALUE = 1e6
"""Smallest mean that is written in exponent notation. For totals, this threshold is a thousand times larger."""
ZERO_TOLERANCE = 1e-12
"""Largest absolute mean that is considered the rounding error of a sum that is exactly 0."""
PERCENT_DECIMALS, PLAIN_DECIMALS = (1, 2), (0, 6)
"""Smallest and largest number of decimals, for percentages and for other numbers."""
_THIN_SPACE = "\u202f"


def format_significant(value: float, digits: int = 4) -> str:
    """Return a number with the given number of significant digits, in exponent notation if needed.

    >>> format_significant(123456789.0, 3), format_significant(0.5), format_significant(0.123456)
    ('1.23e8', '0.5', '0.1235')
    """
    return f"{value:.{digits}g}".replace("e+0", "e").replace("e+", "e")


def round_significant(value: float, digits: int = 5) -> float | None:
    """Return a number rounded to significant digits, or None if it is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def finite_or_none(value: float) -> float | None:
    """Return a number as it is written to a file, or None if it is not finite."""
    return value if math.isfinite(value) else None


def format_fixed(value: float, decimals: int, *, signed: bool = False) -> str:
    r"""Return a number with a fixed number of decimals and thin spaces between thousands.

    ``signed`` adds a plus sign if the number is above 0.

    >>> format_fixed(12345.678, 1), format_fixed(0.5, 2, signed=True), format_fixed(-0.5, 2, signed=True)
    ('12\u202f345.7', '+0.50', '-0.50')
    """
    text = f"{value:,.{decimals}f}".replace(",", _THIN_SPACE)
    return f"+{text}" if signed and value > 0 else text


def format_percent(share: float, decimals: int = 0, *, signed: bool = False) -> str:
    """Return a fraction as a percentage.

    >>> format_percent(0.3), format_percent(0.1234, 1)
    ('30 %', '12.3 %')
    """
    return f"{format_fixed(100 * share, decimals, signed=signed)} %"


def write_total(value: float) -> str:
    r"""Return a total: three significant digits below 100, and otherwise an integer with thin spaces between thousands.

    >>> write_total(99.94), write_total(1234567), write_total(2.5e9)
    ('99.9', '1\u202f234\u202f567', '2.5e9')
    """
    if abs(value) >= 1000 * MIN_EXPONENT_VALUE or abs(value) < 100:
        return format_significant(value, 3)
    return format_fixed(value, 0)


def format_interval(
    mean: float, half: float, decimals: tuple[int, int] = PLAIN_DECIMALS, *, signed: bool = False
) -> tuple[str, str]:
    """Return a mean and the half-width of its interval, both rounded to two significant digits of the half-width.

    If there is no interval, the mean has four significant digits and the second text is empty. If there is no mean,
    both texts are empty.

    Args:
        mean: the estimate.
        half: half-width of the interval. nan if there is no interval.
        decimals: smallest and largest number of decimals to show.
        signed: True to put a plus sign before a mean above 0.

    >>> format_interval(3.1695, 13.9), format_interval(0.123456, float("nan")), format_interval(7.8569379e15, 9e16)
    (('3', '14'), ('0.1235', ''), ('7.86e15', '9e16'))
    >>> format_interval(-1e-17, 2e-16, (1, 1), signed=True)
    ('0.0', '0.0')
    """
    if not math.isfinite(mean):
        return "", ""
    mean = 0.0 if abs(mean) < ZERO_TOLERANCE else mean
    plus = "+" if signed and mean > 0 else ""
    if max(abs(mean), abs(half) if math.isfinite(half) else 0.0) >= MIN_EXPONENT_VALUE:
        return plus + format_significant(mean, 3), format_significant(half, 3) if math.isfinite(half) else ""
    measured = math.isfinite(half) and half > 0
    places = min(max(_count_decimals(half, 2) if measured else _count_decimals(mean, 4), decimals[0]), decimals[1])
    return plus + format_fixed(mean, places), format_fixed(half, places) if math.isfinite(half) else ""


def format_pair(mean: str, half: str) -> str:
    """Return a mean and its half-width as a single text.

    >>> format_pair("91.2", "0.4"), format_pair("91.2", "")
    ('91.2 ± 0.4', '91.2')
    """
    return f"{mean} ± {half}" if half else mean


def format_factor(log: float, half: float) -> str:
    """Return a ratio with its interval as text, given the ratio's logarithm and the half-width of the log's interval.

    >>> import math
    >>> format_factor(math.log(0.5), math.log(1.25)), format_factor(math.log(2), math.nan), format_factor(-math.inf, 0)
    ('0.5 (0.4 to 0.625) times', '2 times', '0 times')

    The interval is omitted if both of its ends round to the same value.

    >>> format_factor(math.log(3.19), 1e-5)
    '3.19 times'
    """
    if math.isnan(log):
        return ""
    low, high = _factor_text(log - half), _factor_text(log + half)
    ends = f" ({low} to {high})" if math.isfinite(log) and math.isfinite(half) and low != high else ""
    return f"{_factor_text(log)}{ends} times"


def _factor_text(log: float) -> str:
    return format_significant(math.exp(log) if log < 700 else math.inf, 3)


def format_p_value(p: float) -> str:
    """Return a p value in the format that journals use.

    >>> format_p_value(0.0213), format_p_value(0.00004), format_p_value(float("nan"))
    ('0.021', '< 0.001', '–')
    """
    if not math.isfinite(p):
        return UNKNOWN_DASH
    return "< 0.001" if p < 0.001 else format_fixed(p, 3)


def shorten_list(names: Sequence[str], most: int) -> str:
    """Return the first few names, followed by the number of omitted names.

    >>> shorten_list(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def fold_repeated_notes(notes: Iterable[str]) -> list[str]:
    """Return each note once, in the order of first occurrence.

    Notes that differ only in a round number are merged.

    >>> fold_repeated_notes(["round 1: 2 late", "slow", "round 2: 2 late", "round 4: 2 late", "slow"])
    ['round 1: 2 late (and in 2 more rounds, the last of them 4)', 'slow (2 times)']
    """
    rounds = dict[tuple[bool, str], list[str]]()
    for note in notes:
        start = re.match(r"round (\d+)\b", note)
        key = (True, note[start.end() :]) if start else (False, note)
        rounds.setdefault(key, []).append(start[1] if start else "")
    return [write_singular(_fold_note(text, of_rounds, counted)) for (of_rounds, text), counted in rounds.items()]


def _fold_note(text: str, of_rounds: bool, rounds: Sequence[str]) -> str:
    more = len(rounds) - 1
    if not of_rounds:
        return f"{text} ({more + 1} times)" if more else text
    first = f"round {rounds[0]}{text}"
    if not more:
        return first
    return f"{first} (and in {more} more round{'s, the last of them' if more > 1 else ','} {rounds[-1]})"


def format_duration(minutes: float) -> str:
    """Return a duration as text in seconds, minutes, hours or days.

    >>> format_duration(3.2), format_duration(0.2), format_duration(200), format_duration(5000)
    ('3 min', '12 s', '3 h', '3 days')
    """
    for unit, size in (("days", 60 * 24), ("h", 60), ("min", 1)):
        if minutes >= (2 * size if size > 1 else 1):
            return f"{format_fixed(minutes / size, 0)} {unit}"
    return f"{format_fixed(minutes * 60, 0)} s"


def format_option(value: object, digits: int = 4) -> str:
    """Return the value of an option as text. Numbers are rounded to a limited number of significant digits.

    >>> format_option(0.1), format_option("auto"), format_option(1 / 3)
    ('0.1', 'auto', '0.3333')
    """
    return format_significant(value, digits) if isinstance(value, float) else str(value)


def format_options(values: Mapping[str, object], digits: int = 4) -> str:
    """Return options as text on one line.

    >>> format_options({"lr": 0.1, "steps": 3})
    'lr = 0.1, steps = 3'
    """
    return ", ".join(f"{name} = {format_option(value, digits)}" for name, value in values.items())


def _count_decimals(value: float, digits: int) -> int:
    """Return the number of decimals that are needed to show a value with this number of significant digits."""
    return digits if value == 0 else max(0, digits - 1 - math.floor(math.log10(abs(value))))


def as_pandas(table: pa.Table) -> Any:
    """Return the table as a pandas DataFrame.

    Raises:
        ConfigError: pandas is not installed.
    """
    if find_spec("pandas") is None:
        raise ConfigError("to_pandas needs pandas. Run pip install pandas, or use table()")
    return table.to_pandas()
