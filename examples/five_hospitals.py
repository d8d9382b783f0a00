"""Five hospitals whose tables differ as real ones do: sizes, markers of gaps, units, levels, separators, one leak.

    python examples/five_hospitals.py hospitals

writes ``all.csv``, the rows of all five as a registry has them, and of each hospital a file as its own system writes
it, with another one of new patients.
"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

SITES = {"Amsel": (1200, 44), "Birke": (600, 26), "Celle": (400, 25), "Dorn": (150, 6), "Esche": (20, 1)}
"""Patients and deaths of every hospital: 102 deaths of 2,370."""
UNITS = {"glucose": 1 / 18.0, "creatinine": 88.4}
"""Factors from mg/dL to mmol/L and to µmol/L."""
SI = ("Celle", "Dorn")
"""Hospitals that measure in SI units."""
WARDS = {"Dorn": ("GEN", "ICU", "NEURO")}
"""The wards of a hospital that lacks one; the others have all four."""
ALL_WARDS = ("CARD", "GEN", "ICU", "NEURO")
LEAK = "hours_to_death"
COLUMNS = (
    "patient_id", "hospital", "age", "sex", "ward", "systolic", "glucose", "creatinine", "troponin_hs", LEAK, "died",
)  # fmt: skip
OUTCOMES = ("followup_days", "readmissions")
"""Further outcomes: days until death or the last visit, and how often a patient came back."""

Row = dict[str, Any]


def patients(site: str, seed: int = 0, si: bool | None = None) -> list[Row]:
    """The rows of a hospital as values, None where a cell is empty; deaths are as many as `SITES` has.

    Args:
        site: name of the hospital.
        seed: of the draw.
        si: whether glucose and creatinine are in SI units; None: as `SI` has it.
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
    if site == "Esche":  # this hospital has no gap at all in systolic, and its one in age
        rows = [{**row, "systolic": 130.0 if row["systolic"] == -9.0 else row["systolic"]} for row in rows]
        rows[3]["age"] = None
    return rows


def cell(value: Any, comma: bool = False) -> str:
    """A value as a file has it: an empty one as NA, numbers with a decimal comma where asked for."""
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
    """A CSV file of the named columns, without those in `drop`."""
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
    """One file with the rows of several hospitals."""
    return write(path, [row for site in sites for row in patients(site, seed)], drop=drop, names=names)


def own_table(path: Path, site: str, rows: list[Row]) -> Path:
    """A hospital's table as its own system writes it: Birke with semicolons and commas, Celle in another order."""
    drop = ("hospital",) if site == "Amsel" else ("hospital", "troponin_hs")
    names = (*COLUMNS, *OUTCOMES)[:: -1 if site == "Celle" else 1]
    return write(path, rows, ";" if site == "Birke" else ",", site == "Birke", drop, names)


def main(folder: Path) -> None:
    """All tables, in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    everyone(folder / "all.csv", names=(*COLUMNS, *OUTCOMES))
    for site in SITES:
        own_table(folder / f"{site.lower()}.csv", site, patients(site))
        own_table(folder / f"{site.lower()}-new.csv", site, patients(site, seed=1))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "hospitals"))
