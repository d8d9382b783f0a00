"""Known unit conversions. A draft proposes only these factors for columns that differ between sites."""

from __future__ import annotations

import re
from typing import NamedTuple


class Conversion(NamedTuple):
    """Conversion between two units.

    Attributes:
        factor: factor that converts numbers from the first unit to the second unit.
        units: names of both units, which are used in messages.
        names: pattern for names of columns that may have these units. If None, any column may have these units.
    """

    factor: float
    units: str
    names: re.Pattern[str] | None


def _name_pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(^|[_\W\d])({pattern})", re.IGNORECASE)


# Factors of substances are molar masses (IUPAC standard atomic weights): 1 mmol/L of a mass of M g/mol is M/10 mg/dL.
KNOWN_CONVERSIONS = (
    Conversion(
        18.016, "mmol/L to mg/dL of glucose (180.16 g/mol)", _name_pattern(r"gluc|glu($|[_\W])|blood.?sugar|bg|fbs")
    ),
    Conversion(88.42, "mg/dL to umol/L of creatinine (113.12 g/mol)", _name_pattern(r"crea|krea|scr($|[_\W])")),
    Conversion(38.67, "mmol/L to mg/dL of cholesterol (386.65 g/mol)", _name_pattern(r"chol|ldl|hdl")),
    Conversion(88.57, "mmol/L to mg/dL of triglycerides (885.7 g/mol, triolein)", _name_pattern(r"trig|tg($|[_\W])")),
    Conversion(17.10, "mg/dL to umol/L of bilirubin (584.66 g/mol)", _name_pattern(r"bili")),
    Conversion(6.006, "mmol/L to mg/dL of urea (60.06 g/mol)", _name_pattern(r"urea|harnstoff")),
    Conversion(2.801, "mmol/L of urea to mg/dL of urea nitrogen (28.01 g/mol)", _name_pattern(r"bun|urea")),
    Conversion(59.48, "mg/dL to umol/L of uric acid (168.11 g/mol)", _name_pattern(r"uric|urate|harns(ä|ae)ure")),
    Conversion(4.008, "mmol/L to mg/dL of calcium (40.08 g/mol)", _name_pattern(r"calcium|ca($|[_\W])")),
    Conversion(3.097, "mmol/L to mg/dL of phosphate as phosphorus (30.97 g/mol)", _name_pattern(r"phos")),
    Conversion(2.431, "mmol/L to mg/dL of magnesium (24.31 g/mol)", _name_pattern(r"magnes")),
    Conversion(5.585, "umol/L to ug/dL of iron (55.85 g/mol)", _name_pattern(r"iron|fe($|[_\W])|eisen")),
    Conversion(9.008, "mmol/L to mg/dL of lactate (90.08 g/mol)", _name_pattern(r"lact|lakt")),
    Conversion(1.611, "mmol/L to g/dL of haemoglobin (16,114 g/mol)", _name_pattern(r"h(a?e|ä)mogl|hb($|[_\W])|hgb")),
    Conversion(2.496, "ng/mL to nmol/L of vitamin D (400.64 g/mol)", _name_pattern(r"vit.*d|25.?oh")),
    # Exact by definition: the international yard and pound (1959) and the conventional millimetre of mercury.
    Conversion(1 / 0.45359237, "kg to lb", _name_pattern(r"weight|wt|mass|gewicht|poids|peso")),
    Conversion(2.54, "in to cm", _name_pattern(r"height|ht($|[_\W])|length|waist|gr(ö|oe)(ß|ss)e|taille|altura|width")),
    Conversion(1 / 0.3048, "m to ft", _name_pattern(r"height|length|dist|alt|depth")),
    Conversion(
        7.50062, "kPa to mmHg", _name_pattern(r"press|bp($|[_\W])|sys|dia|map($|[_\W])|po2|pco2|pa[oc]+2|druck")
    ),
    Conversion(4.184, "kcal to kJ", _name_pattern(r"energy|cal|kcal|kj")),
    Conversion(365.25, "years to days", _name_pattern(r"age|alter|time|dur|surviv|follow|day|year|stay|los")),
    Conversion(30.4375, "months to days", _name_pattern(r"age|alter|time|dur|surviv|follow|day|month|stay|los")),
    Conversion(12.0, "years to months", _name_pattern(r"age|alter|time|dur|surviv|follow|month|year")),
    Conversion(7.0, "weeks to days", _name_pattern(r"time|dur|surviv|follow|day|week|stay|los|gest")),
    Conversion(24.0, "days to hours", _name_pattern(r"time|dur|surviv|follow|day|hour|stay|los")),
    Conversion(60.0, "hours to minutes, or minutes to seconds", _name_pattern(r"time|dur|min|hour|sec|wait")),
    # Prefixes of the SI: g/dL to g/L, a share to per cent, g to mg, g to ug.
    Conversion(10.0, "a step of 10, as g/dL to g/L", None),
    Conversion(100.0, "a step of 100, as a share to per cent", None),
    Conversion(1000.0, "a step of 1000, as g to mg", None),
    Conversion(1e6, "a step of a million, as g to ug", None),
)  # fmt: skip
NAMED_TOLERANCE = 1.3
"""Maximum factor between a ratio of medians and a matching conversion factor of the column's units.

The patients at two sites also differ: in five generated hospitals, the ratio of medians of glucose and creatinine was
0.9 to 1.2 times the conversion factor. The next conversion factor for the same column is farther away than this.
"""
STEP_TOLERANCE = 1.15
"""Maximum factor between a ratio of medians in any column and a matching power of ten.

Together, the four powers match 8 % of the ratios from 2 to 2 million on a logarithmic scale, so differences that are
not due to different units rarely match.
"""
TEMPERATURE_PATTERN = re.compile(r"temp|fever|fieber|t(°|_)?[cf]$", re.IGNORECASE)


def find_conversion(name: str, ratio: float) -> tuple[float, str] | None:
    """Return a known conversion factor that is close to a ratio of medians, and its units.

    Return None if there is no such factor.

    Args:
        name: name of the column.
        ratio: ratio of the median at other sites to the median at one site, which must be positive.
    """
    for candidate in KNOWN_CONVERSIONS:
        if candidate.names is not None and not candidate.names.search(name):
            continue
        tolerance = STEP_TOLERANCE if candidate.names is None else NAMED_TOLERANCE
        for factor in (candidate.factor, 1 / candidate.factor):
            if 1 / tolerance <= ratio / factor <= tolerance:
                return factor, candidate.units if factor == candidate.factor else f"{candidate.units}, backwards"
    return None


def is_fahrenheit(name: str, high: float, low: float) -> bool:
    """Return True if two medians in Fahrenheit and Celsius are the same temperature (within 2 degrees Fahrenheit)."""
    return bool(TEMPERATURE_PATTERN.search(name)) and abs(1.8 * low + 32 - high) <= 2
