"""Messages about missing columns in a table, and about targets that are unsuitable for their task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
from numpy.typing import NDArray

from fedloom.data.dataset import CLASS_TASKS, Task
from fedloom.data.sources.table.cells import MAX_SHOWN_LEVELS
from fedloom.data.sources.table.levels import natural_sort_key, similar_levels_text
from fedloom.data.survey.agreement import Agreement
from fedloom.errors import ConfigError
from fedloom.hints import suggest_nearest


def missing_columns_message(absent: list[str], names: list[str], *, agreed: bool) -> str:
    """Return the message about missing columns."""
    spaced = len(names) == 1 and {*absent} <= {*names[0].split()}
    if len(absent) == 1 and not spaced:
        cure = " (the agreement names it)" if agreed else ""
        return f"no column {absent[0]!r}{cure}; {suggest_nearest(absent[0], names)}"
    cure = " (the agreement names them)" if agreed else ""
    header = f"the header contains {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"
    doubts = "is it a row of data, is another line above it, or is the separator different?"
    doubts = "its words are separated by spaces, so set separator = ' '" if spaced else doubts
    several = "s" if len(absent) > 1 else ""
    return f"no column{several} {', '.join(map(repr, absent))}{cure}; {header}: {doubts}"


def similar_levels_message(label: str, levels: str) -> str:
    """Return the message about similar levels of a label, which are given as by `similar_levels_text`."""
    return (
        f"the label {label!r} has levels that are written differently but seem the same: {levels}. "
        "Write them in one way, or set task = 'classification' if each is a class"
    )


def check_event(where: str, task: str, event: str | None, label: str, *, scaled: bool) -> None:
    """Raise an error if an event has no time, a time has no event, or the target would be scaled.

    Raises:
        ConfigError: at least one of these problems occurs.
    """
    if task == "survival" and event is None:
        raise ConfigError(f"{where}: task = 'survival' needs `event`, the column with 1 for an event and 0 for none")
    if task != "survival" and event is not None:
        raise ConfigError(
            f"{where}: event = {event!r} makes the task survival, but task is {task!r}. Omit one of the two"
        )
    if event == label:
        raise ConfigError(f"{where}: {label!r} is both target and event. Set target to the column of times")
    if task in ("survival", "count", "multilabel") and scaled:
        raise ConfigError(
            f"{where}: `centre` and `unit` can be used only for a regression, but the task is {task}. "
            "Omit `centre` and `unit`"
        )


def agreed_classes(
    agreement: Agreement, label: str, codes: NDArray[np.float64], levels: tuple[str, ...]
) -> tuple[NDArray[np.float64], tuple[str, ...], list[str]]:
    """Return the codes with respect to the agreed classes, these classes, and problems with the label's levels."""
    if agreement.task not in CLASS_TASKS:
        return codes, (), []
    strange = [level for level in levels if level not in agreement.classes]
    if strange:
        more = " and more" if len(strange) > MAX_SHOWN_LEVELS else ""
        what = f"{', '.join(map(repr, strange[:MAX_SHOWN_LEVELS]))}{more}"
        rows = int(np.isin(codes, [levels.index(level) for level in strange]).sum())
        return (
            codes,
            levels,
            [
                f"the label {label!r} is {what}, but only {', '.join(agreement.classes)} are allowed ({rows} such "
                "rows). Correct them, or add a marker to missing, with unlabelled = 'drop'"
            ],
        )
    place = np.array([*(agreement.classes.index(level) for level in levels), np.nan])
    return place[np.nan_to_num(codes, nan=len(levels)).astype(int)], agreement.classes, []


def infer_task(task_wanted: str, label: str, counts: Mapping[str, int], doubtful: bool) -> tuple[Task, list[str]]:
    """Return the task that follows from the levels of a label, and the problems that were found in these levels.

    A single level is not considered a problem, because a trained model may be applied to such a table. However, it is
    reported if there are other problems (`doubtful`). Similar levels are accepted as different classes only if the task
    is explicitly set to classification.

    Args:
        task_wanted: task that the source specifies.
        label: name of the label column.
        counts: number of rows for each level.
        doubtful: True if the table has other problems as well.
    """
    wrong, levels = list[str](), tuple(counts)
    if doubtful and len(levels) == 1:
        wrong.append(
            f"the label {label!r} is {levels[0]!r} in every row that can be read, so a model cannot learn from it"
        )
    if task_wanted in ("multilabel", "regression", "survival", "count"):
        return cast("Task", task_wanted), wrong
    if task_wanted == "auto" and any(
        np.isfinite(v := natural_sort_key(level)[0]) and v != np.floor(v) for level in levels
    ):
        wrong.append("the label has fractions. Set task = 'regression', or 'classification' if they are names")
    if task_wanted != "classification" and (same := similar_levels_text(counts)):
        return "classification", [*wrong, similar_levels_message(label, same)]
    if task_wanted == "binary" and len(levels) != 2:
        wrong.append(f"task = 'binary', but the label has {len(levels)} values. Use classification")
    return "binary" if task_wanted != "classification" and len(levels) == 2 else "classification", wrong
