"""Groups of rows within clients, by columns that are kept for scoring."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedloom.data.dataset import MISSING, Dataset
from fedloom.data.tables import is_number
from fedloom.errors import ConfigError, unknown

BOUND = re.compile(r"(.+?)\s*(>=|<=|>|<)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)")
COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
OPPOSITE = {">=": "<", "<=": ">", ">": "<=", "<": ">="}
MOST_LEVELS = 20
"""Levels of a column that are groups of their own."""


def column_of(group: str) -> str:
    """The column that a choice of groups is about.

    >>> column_of("sex"), column_of("age >= 75")
    ('sex', 'age')
    """
    bound = BOUND.fullmatch(group.strip())
    return bound[1] if bound else group.strip()


def groups_of(data: Dataset, choices: Sequence[str]) -> Mapping[str, Tensor]:
    """Which rows are in every group, bool ``[N]`` by the group's name; a row without a level is in none.

    Args:
        data: whose columns were kept.
        choices: a column, whose levels are the groups, or a bound of one such as ``age>=75``, with the rest as another.

    Raises:
        ConfigError: the column was not kept, has too many levels, or none that is a number.
    """
    groups: dict[str, Tensor] = {}
    for choice in choices:
        name, bound = column_of(choice), BOUND.fullmatch(choice.strip())
        if name not in data.columns:
            raise unknown("column", name, data.columns, "evaluate.groups, of the columns of a table")
        codes, levels = data.columns[name], data.levels[name]
        if bound is None:
            if len(levels) > MOST_LEVELS:
                raise ConfigError(
                    f"evaluate.groups: {name!r} has {len(levels)} levels; give a bound, such as '{name}>=50'"
                )
            groups |= {f"{name}={level}": codes == k for k, level in enumerate(levels) if level != MISSING}
            continue
        wrong = next((level for level in levels if level != MISSING and not is_number(level)), None)
        if wrong is not None:
            raise ConfigError(f"evaluate.groups: {name!r} has {wrong!r}, which is no number; leave out the bound")
        values = torch.tensor([float(level or "nan") for level in levels], dtype=torch.float64)[codes]
        for sign in (bound[2], OPPOSITE[bound[2]]):
            groups[f"{name}{sign}{bound[3]}"] = COMPARE[sign](values, float(bound[3]))
    return groups


def two_groups(data: Dataset, choice: str) -> tuple[Tensor, Tensor]:
    """Which rows are in each of the two groups of a choice, bool ``[N]`` each.

    Raises:
        ConfigError: the column was not kept, or makes other than two groups.
    """
    groups = groups_of(data, [choice])
    if len(groups) != 2:
        raise ConfigError(
            f"{choice!r} makes {len(groups)} groups ({', '.join(groups)}), but two are compared; give a column of two "
            "levels, or a bound as 'age>=75'"
        )
    first, second = groups.values()
    return first, second
