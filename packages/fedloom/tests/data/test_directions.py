"""Names with characters that change the direction of text are refused in one sentence, wherever names enter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedloom.data import Dataset
from fedloom.data.survey.agreement import Agreement
from fedloom.errors import ConfigError, DataError
from fedloom.lab.experiment import parse

MARKS = [chr(code) for code in (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))]
SENTENCE = "which changes the direction of text, so the name looks like a different name. Remove this character"


def frame(mark: str, **changes: Any) -> pd.DataFrame:
    return pd.DataFrame({"age": [1.0, 2, 3, 4], "sex": list("fmfm"), "y": ["no", "yes", "no", "yes"]} | changes)


def csv(folder: Path, table: pd.DataFrame, **options: Any) -> None:
    table.to_csv(folder / "t.csv", index=False)
    data = {"source": "csv", "path": str(folder / "t.csv"), "target": "y", "categorical": ["sex"]} | options
    experiment = {"name": "x", "rounds": 1, "seeds": [0], "data": data, "partition": {"kind": "iid", "clients": 2},
                  "method": [{"algorithm": "fedavg"}]}  # fmt: skip
    parse(experiment).source.load()


COLUMNS: list[dict[str, Any]] = [{"name": "age"}, {"name": "sex", "type": "level", "levels": ["f", "m"]}]


def agreement(**changes: Any) -> Agreement:
    return Agreement.model_validate({"target": "y", "classes": ["no", "yes"], "column": COLUMNS} | changes)


ENTRANCES: dict[str, Callable[[Path, str], object]] = {
    "a class in memory": lambda _, m: Dataset.create(np.eye(4), ["a" + m, "b", "b", "b"]),
    "a class of a data set": lambda _, m: Dataset("d", torch.eye(2), torch.tensor([0, 1]), classes=("a", m + "b")),
    "a user of a data set": lambda _, m: Dataset(
        "d", torch.eye(2), torch.tensor([0, 1]), classes=("a", "b"), users=torch.tensor([0, 1]), user_names=("a", m)
    ),
    "a column of a frame": lambda _, m: Dataset.create(frame(m, sex=0, **{"b" + m: [1.0, 2, 3, 4]}), "y"),
    "a label of a file": lambda f, m: csv(f, frame(m, y=["no", "y" + m + "es"] * 2)),
    "a level of a file": lambda f, m: csv(f, frame(m, sex=["f", "m" + m] * 2)),
    "a column of a file": lambda f, m: csv(f, frame(m, **{m + "b": [1.0, 2, 3, 4]})),
    "a user of a file": lambda f, m: csv(f, frame(m, site=["A", "B" + m] * 2), client_column="site"),
    "a column that is agreed on": lambda _, m: agreement(column=[{"name": "ag" + m + "e"}]),
    "a level that is agreed on": lambda _, m: agreement(
        column=[{"name": "sex", "type": "level", "levels": ["f", "m" + m]}]
    ),
    "a class that is agreed on": lambda _, m: agreement(classes=["no", m + "yes"]),
    "a target that is agreed on": lambda _, m: agreement(target="y" + m),
    "the label of a method": lambda _, m: parse(
        {"name": "x", "rounds": 1, "seeds": [0], "data": {"source": "digits"},
         "method": [{"algorithm": "fedavg", "label": "Fed" + m + "Avg"}]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_name_that_changes_the_direction_of_text_is_refused(entrance: str, tmp_path: Path) -> None:
    for mark in MARKS:
        with pytest.raises((DataError, ConfigError, ValueError)) as error:
            ENTRANCES[entrance](tmp_path, mark)
        assert f"contains U+{ord(mark):04X}, {SENTENCE}" in str(error.value)
        assert mark not in str(error.value).split(" [type=")[0]


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_names_of_any_script_are_names(entrance: str, tmp_path: Path) -> None:
    """Of scripts from right to left too, which need no such characters."""
    for text in ("גיל", "العمر", "ålder", "年齢"):
        ENTRANCES[entrance](tmp_path, text)
