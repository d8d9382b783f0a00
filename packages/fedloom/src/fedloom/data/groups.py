"""Groups of rows within clients, defined by columns kept for evaluation."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedloom.data.dataset import MISSING_LEVEL, Dataset
from fedloom.data.sources import Source
from fedloom.data.sources.table.checks import coded_numbers
from fedloom.data.sources.table.reading import TableSource
from fedloom.data.tables import Table, is_number
from fedloom.errors import ConfigError
from fedloom.hints import unknown_name_error

BOUND_PATTERN = re.compile(r"(.+?)\s*(>=|<=|>|<)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)")
COMPARISON_FUNCTIONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
OPPOSITE_SIGNS = {">=": "<", "<=": ">", ">": "<=", "<": ">="}
ROUNDING_TOLERANCE = 1e-6
MAX_GROUP_LEVELS = 20
"""Maximum number of levels in a column whose levels all form groups."""


def get_group_column(group: str) -> str:
    """Return the column in the definition of a group.

    >>> get_group_column("sex"), get_group_column("age >= 75")
    ('sex', 'age')
    """
    bound = BOUND_PATTERN.fullmatch(group.strip())
    return bound[1] if bound else group.strip()


def make_group_masks(data: Dataset, choices: Sequence[str]) -> Mapping[str, Tensor]:
    """Return the rows of each group as a bool mask ``[N]``, keyed by the name of the group.

    Rows without a value belong to no group.

    Args:
        data: data set with the columns that were kept.
        choices: columns whose levels are groups, or thresholds such as ``age>=75``, which divide the rows into two
            groups.

    Raises:
        ConfigError: a column was not kept, has too many levels, or contains no numbers.
    """
    groups: dict[str, Tensor] = {}
    for choice in choices:
        name, bound = get_group_column(choice), BOUND_PATTERN.fullmatch(choice.strip())
        if name not in data.columns:
            raise unknown_name_error(
                "column", name, data.columns, "groups, which need the columns of a table", rule="groups-column"
            )
        codes, levels = data.columns[name], data.levels[name]
        if bound is None:
            if len(levels) > MAX_GROUP_LEVELS:
                raise ConfigError(
                    f"groups: {name!r} has {len(levels)} levels",
                    rule="groups-too-many",
                    fix=f"add a bound, such as '{name}>=50'",
                )
            groups |= {f"{name}={level}": codes == k for k, level in enumerate(levels) if level != MISSING_LEVEL}
            continue
        wrong = next((level for level in levels if level != MISSING_LEVEL and not is_number(level)), None)
        if wrong is not None:
            raise ConfigError(
                f"groups: {name!r} contains {wrong!r}, which is not a number",
                rule="groups-without-numbers",
                fix="omit the bound",
            )
        values = torch.tensor([float(level or "nan") for level in levels], dtype=torch.float64)[codes]
        for sign in (bound[2], OPPOSITE_SIGNS[bound[2]]):
            groups[f"{name}{sign}{bound[3]}"] = COMPARISON_FUNCTIONS[sign](values, float(bound[3]))
    return groups


def group_names(choices: Sequence[str], levels: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Return the choice and the name of each group, in an order that depends only on the levels in the agreement.

    Args:
        choices: columns or thresholds, as in `make_group_masks`.
        levels: levels in the agreement of each column that has levels.

    Raises:
        ConfigError: no levels were agreed on for a column without a threshold.
    """
    names = []
    for choice in choices:
        column, bound = get_group_column(choice), BOUND_PATTERN.fullmatch(choice.strip())
        if bound is None and column not in levels:
            raise ConfigError(
                f"groups: the sites have not agreed on the levels of {column!r}. Use a bound, such as '{column}>=50', "
                "or add the column with its levels to the agreement (scoring = true hides the column from the models)"
            )
        signs = levels[column] if bound is None else (bound[2], OPPOSITE_SIGNS[bound[2]])
        ends = "" if bound is None else bound[3]
        names += [(choice, f"{column}{'=' if bound is None else ''}{sign}{ends}") for sign in signs]
    return names


def publishable_groups(members: Tensor, choice: Sequence[int], counts: Tensor, least: int) -> list[bool]:
    """Return the groups for which a site may publish results without revealing a set of rows that is too small.

    A site publishes sums over all rows and over the rows of each published group. The sum over a set of rows can then
    be derived if the indicator of the set is a linear combination of the published indicators. This corresponds to the
    audit in cell suppression (L. H. Cox, "Suppression methodology and statistical disclosure control", JASA 1980). It
    must not be possible to derive statistics of any of the following sets if the set is too small: groups that are not
    published, rows outside all groups of a choice, rows in two groups, rows in one group but not in another, and rows
    that are in the same groups. Groups without rows may be published, because their sums are zero.

    Args:
        members: bool mask of the rows in each group, ``[G, N]``.
        choice: index of each group's choice. Groups that belong to the same choice must not share
            rows.
        counts: ``[N, q]``. The first column is 1 for every row. Each other column represents a kind that needs a
            minimum number of rows, such as a class, and is 1 for the rows of this kind.
        least: minimum number of rows of each kind in a set.
    """
    is_open = [not bool(group.any()) or has_enough_rows(counts[group].sum(0), least) for group in members]
    patterns, place = members.T.unique(dim=0, return_inverse=True)
    groups, alike = patterns.T.double(), torch.eye(len(patterns), dtype=torch.float64)
    weights = torch.zeros(len(patterns), counts.shape[1], dtype=torch.float64).index_add(0, place, counts.double())
    everything = torch.ones(1, len(patterns), dtype=torch.float64)
    while True:
        shown = [k for k, open_here in enumerate(is_open) if open_here and bool(groups[k].any())]
        sets = [*(groups[k] for k, open_here in enumerate(is_open) if not open_here), *alike]
        for part in {*choice}:
            sets.append(everything[0] - groups[[k for k in shown if choice[k] == part]].sum(0))
        for j in shown:
            sets += [overlap for k in shown for overlap in (groups[j] * groups[k], groups[j] * (1 - groups[k]))]
        basis = torch.cat([everything, groups[shown]])
        small = (rows for rows in sets if bool(rows.any()) and not has_enough_rows(rows @ weights, least))
        exposed = next((rows for rows in small if not bool(rows.all()) and _is_combination_of(rows, basis)), None)
        if exposed is None:
            return is_open
        by_size = sorted(shown, key=lambda k: float(groups[k] @ weights[:, 0]))
        rest = {k: torch.cat([everything, groups[[j for j in shown if j != k]]]) for k in by_size}
        is_open[next((k for k in by_size if not _is_combination_of(exposed, rest[k])), by_size[0])] = False


def get_subjects(data: Dataset) -> Tensor | None:
    """Return the subject number ``[N]`` of each row, counted from 0.

    Return None if the subjects are unknown.
    """
    design = data.design
    return None if design is None or design.subject is None else torch.from_numpy(design.units)


def describe_repeated_subjects(rows: int, subjects: int) -> list[str]:
    """Return a note on row statistics if a subject has several rows, and no note otherwise."""
    if subjects == rows:
        return []
    return [
        f"{rows} rows belong to {subjects} subjects, but standard errors, intervals and p-values treat all rows as "
        "independent, so they may be too small. For valid tests, use a table with one row per subject"
    ]


def row_kind_counts(task: str, y: Tensor, outputs: int, units: Tensor | None = None) -> Tensor:
    """Return 1 for each row, and 1 for each kind (class, event or label) of the row.

    Rows with a given label and rows without this label form two different kinds.

    If subjects are known, each row has the weight of its share among the subject's rows of that kind, so that a sum
    over rows is at most the number of subjects.

    The published results of a group contain the number of rows and the number of correct predictions, per class. A
    class without rows in the group is also a kind, because the results would show that no patient in the group belongs
    to it.

    Args:
        task: task of the data.
        y: targets, which are classes ``[N]``, numbers ``[N, k]``, or labels of sequences ``[N, L]`` with -1 for
            positions without a label.
        outputs: number of outputs of a model for these data. If there are several classes, this is one per class.
        units: subject number ``[N]`` of each row, counted from 0. None if each row is treated as a
            separate subject.

    Returns:
        Values from 0 to 1, float64 ``[N, q]``.
    """
    kinds = [torch.ones(len(y))]
    if task in ("binary", "classification"):
        classes = y.reshape(len(y), y[0].numel() if len(y) else 1)
        kinds += [(classes == k).any(1).float() for k in range(2 if task == "binary" else outputs)]
    if task == "survival":
        kinds.append((y[:, 1] > 0).float())
    if task == "multilabel":
        kinds += [(labels == value).float() for labels in y.T for value in (0, 1)]
    counts = torch.stack(kinds, 1).double()
    if units is None:
        return counts
    of_subject = torch.zeros(int(units.max()) + 1 if len(units) else 0, counts.shape[1], dtype=torch.float64)
    return counts / of_subject.index_add(0, units, counts)[units].clamp(min=1)


def has_enough_rows(counts: Tensor, least: int) -> bool:
    """Return True if there are enough rows of every kind.

    Rounding errors may cause the sum of a subject's fractions to differ from 1.
    """
    return bool((counts >= least - ROUNDING_TOLERANCE).all())


def _is_combination_of(rows: Tensor, basis: Tensor) -> bool:
    """Return True if the indicator of a set of rows is a linear combination of the indicators in a basis."""
    solution = torch.linalg.lstsq(basis.T, rows[:, None], driver="gelsd").solution
    return bool((basis.T @ solution - rows[:, None]).abs().max() < 1e-9)


def keep_group_columns(source: Source, groups: Sequence[str]) -> Source:
    """Return the source with an option that keeps the columns of these groups.

    Raises:
        ConfigError: the source is not a table.
    """
    columns = dict.fromkeys(map(get_group_column, groups))
    if not columns:
        return source
    if isinstance(source, TableSource):
        keeps: Source = source.with_(group_columns=tuple(dict.fromkeys((*source.group_columns, *columns))))
        return keeps
    if isinstance(held := getattr(source, "held", None), Dataset):  # a data set from Python
        keeps = source.with_(held=keep_columns(held, columns))
        return keeps
    raise ConfigError(
        "groups of rows need a table with named columns in [data]",
        rule="groups-need-a-table",
        fix="omit the groups, or use a table",
    )


def keep_columns(data: Dataset, columns: Iterable[str]) -> Dataset:
    """Return a data set that also keeps these columns for grouping, even if they are features.

    Raises:
        ConfigError: the data set has no such column.
    """
    table, raw = data.prepare, data.x
    if data.fitted is not None:
        table, raw = data.fitted.table, data.fitted.raw
    features = {c.name: (k, c) for k, c in enumerate(table.columns)} if isinstance(table, Table) else {}
    codes, levels = {**data.columns}, {**data.levels}
    for name in columns:
        if name in codes:
            continue
        if name not in features:
            raise unknown_name_error(
                "column", name, [*codes, *features], "groups, of the columns of a table", rule="groups-column"
            )
        place, column = features[name]
        values = raw[:, place].double().cpu().numpy()
        of, names = (values, tuple(map(str, column.names))) if column.levels else coded_numbers(values)
        codes[name] = torch.from_numpy(np.nan_to_num(of, nan=len(names))).long()
        levels[name] = (*names, MISSING_LEVEL)
    return replace(data, columns=codes, levels=levels)


def two_groups(data: Dataset, choice: str) -> tuple[Tensor, Tensor]:
    """Return the rows of the two groups of a choice, as bool masks ``[N]``.

    Raises:
        ConfigError: the column was not kept, or does not define exactly two groups.
    """
    groups = make_group_masks(data, [choice])
    if len(groups) != 2:
        raise ConfigError(
            f"{choice!r} defines {len(groups)} groups ({', '.join(groups)}), but the comparison needs "
            "two groups. Use a column with two levels, or a bound such as 'age>=75'"
        )
    first, second = groups.values()
    return first, second
