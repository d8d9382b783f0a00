"""Write tables of five synthetic hospitals that differ like real tables: in size, units, levels and missing values.

    python examples/five_hospitals.py hospitals

The file ``all.csv`` contains the rows of all five hospitals, as in a registry. Each hospital also has a file in the
format of its own system, and a file with new patients. One column, `LEAK`, reveals the outcome.
"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

SITES = {"Amsel": (1200, 44), "Birke": (600, 26), "Celle": (400, 25), "Dorn": (150, 6), "Esche": (20, 1)}
"""Number of patients and number of deaths at each hospital, in total 102 deaths among 2,370 patients."""
UNITS = {"glucose": 1 / 18.0, "creatinine": 88.4}
"""Factors that convert mg/dL to mmol/L and to µmol/L."""
SI = ("Celle", "Dorn")
"""Hospitals that use SI units."""
WARDS = {"Dorn": ("GEN", "ICU", "NEURO")}
"""Wards of a hospital that does not have all four wards."""
ALL_WARDS = ("CARD", "GEN", "ICU", "NEURO")
LEAK = "hours_to_death"
COLUMNS = (
    "patient_id", "hospital", "age", "sex", "ward", "systolic", "glucose", "creatinine", "troponin_hs", LEAK, "died",
)  # fmt: skip
OUTCOMES = ("followup_days", "readmissions")
"""Additional outcomes: days until death or the last visit, and number of readmissions."""

Row = dict[str, Any]


def patients(site: str, seed: int = 0, si: bool | None = None) -> list[Row]:
    """Return the rows of a hospital as values, in which None represents an empty cell.

    Args:
        site: name of the hospital.
        seed: seed of the random draw.
        si: True if glucose and creatinine are given in SI units. If None, `SI` determines the units.
    """
    count, deaths = SITES[site]
    rng = np.random.default_rng([seed, [*SITES].index(site)])
    age = rng.normal(64, 12, count).clip(20, 98).round()
    systolic = rng.normal(132, 18, count).round()
    glucose = np.exp(rng.normal(math.log(118), 0.25, count))
    creatinine = np.exp(rng.normal(math.log(1.0), 0.3, count))
    ward = rng.choice(WARDS.get(site, ALL_WARDS), count)
    sex = rng.choice(("f", "m"), count)
    risk = 0.06 * (age - 64) + 1.5 * (ward == "ICU") + 1.2 * np.log(creatinine) - 0.02 * (systolic - 132)
    order = np.argsort(-(risk + rng.gumbel(0, 1, count)))
    died = np.zeros(count, int)
    died[order[:deaths]] = 1
    hours = np.where(died == 1, rng.integers(2, 700, count), -1)
    gap, empty = rng.random(count) < 0.08, rng.random(count) < 0.05
    wide = site in SI if si is None else si
    later = np.random.default_rng([seed, [*SITES].index(site), 1])
    followup, returns = later.integers(30, 731, count), later.poisson(np.exp(0.03 * (age - 64) - 0.5))
    rows = []
    for k in range(count):
        row: Row = {
            "patient_id": f"{site[0]}{k:05d}",
            "hospital": site,
            "age": int(age[k]),
            "sex": str(sex[k]),
            "ward": str(ward[k]),
            "systolic": -9.0 if gap[k] else float(systolic[k]),
            "glucose": round(float(glucose[k] * (UNITS["glucose"] if wide else 1)), 2),
            "creatinine": round(float(creatinine[k] * (UNITS["creatinine"] if wide else 1)), 2),
            "troponin_hs": round(float(np.exp(rng.normal(2, 1))), 1) if site == "Amsel" else None,
            LEAK: int(hours[k]),
            "died": int(died[k]),
            "followup_days": math.ceil(hours[k] / 24) if died[k] else int(followup[k]),
            "readmissions": int(returns[k]),
        }
        if site != "Esche" and empty[k]:
            row["glucose"] = None
        rows.append(row)
    if site == "Esche":  # its only missing value is in the column age
        rows = [{**row, "systolic": 130.0 if row["systolic"] == -9.0 else row["systolic"]} for row in rows]
        rows[3]["age"] = None
    return rows


def cell(value: Any, comma: bool = False) -> str:
    """Format a value for a file: NA for a missing value, and a decimal comma if ``comma`` is true."""
    text = "NA" if value is None else str(value)
    return text.replace(".", ",") if comma and isinstance(value, float) else text


def write(
    path: Path,
    rows: list[Row],
    separator: str = ",",
    comma: bool = False,
    drop: tuple[str, ...] = (),
    names: tuple[str, ...] = COLUMNS,
) -> Path:
    """Write the named columns, except the columns in ``drop``, to a CSV file and return its path."""
    names = tuple(name for name in names if name not in drop)
    with path.open("w", newline="") as file:
        table = csv.writer(file, delimiter=separator)
        table.writerow(names)
        table.writerows([cell(row[name], comma) for name in names] for row in rows)
    return path


def everyone(
    path: Path,
    seed: int = 0,
    sites: tuple[str, ...] = tuple(SITES),
    drop: tuple[str, ...] = (),
    names: tuple[str, ...] = COLUMNS,
) -> Path:
    """Write the rows of several hospitals to one file and return its path."""
    return write(path, [row for site in sites for row in patients(site, seed)], drop=drop, names=names)


def own_table(path: Path, site: str, rows: list[Row]) -> Path:
    """Write a hospital's table in the format of its own system, and return its path.

    Birke uses semicolons and decimal commas, and Celle has a different order of columns.
    """
    drop = ("hospital",) if site == "Amsel" else ("hospital", "troponin_hs")
    names = (*COLUMNS, *OUTCOMES)[:: -1 if site == "Celle" else 1]
    return write(path, rows, ";" if site == "Birke" else ",", site == "Birke", drop, names)


def main(folder: Path) -> None:
    """Write all tables to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    everyone(folder / "all.csv", names=(*COLUMNS, *OUTCOMES))
    for site in SITES:
        own_table(folder / f"{site.lower()}.csv", site, patients(site))
        own_table(folder / f"{site.lower()}-new.csv", site, patients(site, seed=1))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "hospitals"))
