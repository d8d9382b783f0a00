"""Text of a drafted experiment file, with a comment on each choice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w

from fedloom.data.by_site import Shift
from fedloom.data.dataset import CLASS_TASKS
from fedloom.data.survey.facts import ColumnProfile
from fedloom_clinic.drafts.columns import TableSurvey

MIN_SITE_ROWS = 5
"""Minimum number of rows that a site needs to take part. With fewer rows, columns cannot be scaled reliably."""
MAX_SHOWN_NAMES = 8
"""Maximum number of names listed in a sentence."""
QUESTIONS_NOTE = (
    "The draft does not run until these questions are answered. Use the commands, or edit the draft and delete the "
    "questions."
)
MAX_LIST_CHARACTERS = 120
"""Minimum number of characters before a list is split into several lines."""


class ColumnRoles(NamedTuple):
    """Roles of a table's columns in an experiment.

    Attributes:
        survey: survey of the table.
        task: task implied by the target.
        target: column to be predicted, or the first label. If None, the draft asks the user for the target.
        event: if the target is a time, the column that is 1 for an event.
        site: column that names the site of each row.
        categorical: names of the columns with text.
        drop: columns that are omitted, each with the reason.
        missing: cells treated as missing, in addition to the usual markers.
        impute: True if some cells of feature columns are missing.
        shifts: for each column, the sites whose numbers may be in a different unit.
        clients: number of clients, used if no column names a site.
        width: number of features.
        questions: questions that the user must answer before the draft can be run.
        subject: column that names the subject of each row.
        order: column of dates that may determine the order of the rows. The draft merely proposes this order.
        labels: the label columns of a multilabel task.
    """

    survey: TableSurvey
    task: str
    target: ColumnProfile | None
    event: ColumnProfile | None
    site: ColumnProfile | None
    categorical: list[str]
    drop: dict[str, str]
    missing: list[str]
    impute: bool
    shifts: dict[str, dict[str, Shift]]
    clients: int
    width: int
    questions: list[str]
    subject: ColumnProfile | None = None
    order: ColumnProfile | None = None
    labels: Sequence[ColumnProfile] = ()


def experiment_file_text(roles: ColumnRoles, place: Path, agreement: Path | None = None) -> str:
    """Return the text of a drafted experiment file.

    Args:
        roles: roles of the columns.
        place: path of the file.
        agreement: document that explains the meaning of the columns. If None, the meaning is inferred from the table.
    """
    if roles.site is not None:
        partition: dict[str, Any] = {"kind": "natural", "min_size": MIN_SITE_ROWS}
        why = f"a client per {_comment_text(roles.site.name)}, unless it has fewer rows"
    else:
        partition = {"kind": "iid" if roles.task not in CLASS_TASKS else "dirichlet", "clients": roles.clients}
        why = "no column names a site, so rows are assigned to clients at random" + (
            "" if partition["kind"] == "iid" else ", classes unevenly"
        )
    local: dict[str, Any] = {"lr": _small_step_size(roles), "batch_size": 32, "epochs": 1}
    notes, horizon = {"lr": "'fedloom tune' finds a better one"}, ""
    if roles.task == "survival":
        local |= {"batch_size": "full", "epochs": 5}
        notes["batch_size"] = "a batch compares patients at risk at the same time"
        assert roles.target is not None
        time = round_to_three_digits(float(np.nanmedian(roles.target.values)))
        horizon = "[task]\n" + _commented_lines({"horizon": time}, {"horizon": "the event is predicted by this time"})
    return "\n".join(
        [
            f"# Drafted by 'fedloom init' from {_comment_text(roles.survey.path.name)}. Change it as you like.",
            f"#   fedloom run {_comment_text(str(place))}",
            *(
                []
                if not roles.questions
                else [_commented_lines({"questions": roles.questions}, {"questions": QUESTIONS_NOTE})]
            ),
            _commented_lines(
                {"name": place.stem, "rounds": 30, "seeds": [0, 1, 2, 3, 4]},
                {"seeds": "repetitions (a test of a difference needs 5)"},
            ),
            "[data]",
            _commented_lines(_data_table(roles, agreement), _data_comments(roles)) + _proposal_comments(roles),
            f"[partition]  # {why}",
            _commented_lines(
                {**partition, "validation": 0.2}, {"validation": "fraction of a client's rows for validation"}
            ),
            '[model]\nkind = "softmax"  # linear; kind = "mlp" with hidden = [32] bends\n',
            "[local]",
            _commented_lines(local, notes) + horizon,
            '[[method]]\nalgorithm = "local"  # every client alone\n',
            '[[method]]\nalgorithm = "fedavg"  # one model for all\n',
            '[[method]]\nalgorithm = "ditto"  # a model for each, near the common one\n',
        ]
    )


def _small_step_size(roles: ColumnRoles) -> float:
    """Return a step size that is small enough for scaled features.

    The loss of a classification has a smaller curvature than the loss of a regression. The curvature of the loss of a
    survival task is proportional to the fraction of events.
    """
    events = 1.0 if roles.event is None else float(np.nanmean(roles.event.values))
    return (
        0.1
        if roles.task in (*CLASS_TASKS, "multilabel")
        else round_to_three_digits(min(0.05, 0.5 / (roles.width + 1)) / events)
    )


def _data_table(roles: ColumnRoles, agreement: Path | None) -> dict[str, Any]:
    """Return the ``[data]`` table of the experiment file."""
    survey = roles.survey
    data: dict[str, Any] = {"source": str(survey.path)}
    data |= {k: v for k, v in survey.options.items() if (k, v) != ("separator", ",")}
    if roles.target is not None:
        data |= {"target": [label.name for label in roles.labels] or roles.target.name}
        data |= {"task": roles.task} if roles.event is None else {"event": roles.event.name}
    data |= {"client_column": roles.site.name} if roles.site else {}
    data |= {"subject": roles.subject.name} if roles.subject else {}
    data |= {"categorical": roles.categorical} if roles.categorical else {}
    data |= {"drop": list(roles.drop)} if roles.drop else {}
    data |= {"missing": roles.missing} if roles.missing else {}
    data |= {"impute": True} if roles.impute else {}
    whole = [column for column in (roles.site, roles.subject) if column is not None]
    if (roles.target is not None and roles.target.missing) or any(len(c.present) < survey.rows for c in whole):
        data["unlabelled"] = "drop"
    if any(label.missing for label in roles.labels):
        data["unlabelled"] = "keep"
    if roles.task == "regression" and roles.target is not None:
        data |= {"centre": round_to_three_digits(float(np.nanmean(roles.target.values)))}
        data |= {"unit": round_to_three_digits(float(np.nanstd(roles.target.values))) or 1.0}
    if agreement is not None:
        agreed = ("subject", "task", "categorical", "drop", "missing", "impute", "centre", "unit")
        data = {k: v for k, v in data.items() if k not in agreed} | {"agreement": str(agreement)}
    return data


def _data_comments(roles: ColumnRoles) -> dict[str, str]:
    """Return the comments on the keys of the ``[data]`` table."""
    return {
        "source": "from the current folder",
        "target": "what is predicted",
        "event": "1 if the time ended with an event, 0 if it is censored",
        "agreement": "meaning of the columns at every site",
        "client_column": "which site's row it is",
        "subject": "patient of a row: all rows of a patient are in the same part of a split",
        "categorical": "text: a feature per level",
        "drop": "; ".join(
            f"{_comment_text(name)}: {_comment_text(why)}" for name, why in list(roles.drop.items())[:MAX_SHOWN_NAMES]
        ),
        "missing": "cells that mean missing, besides empty ones, NA and similar",
        "impute": "missing cells are filled per client from its training rows, and flagged",
        "unlabelled": "rows without target, site or subject are left out",
        "centre": "the model learns (target - centre) / unit, and errors are in this unit",
    }


def _proposal_comments(roles: ColumnRoles) -> str:
    """Return comments that propose an order of rows, and factors for sites that may use a different unit.

    The draft does not apply these proposals.
    """
    proposed = ""
    if roles.order is not None:
        head = "# Test on later rows? Delete the # in front of the next line: each client trains on its earlier rows.\n"
        proposed = f"{head}# {_commented_lines({'order': roles.order.name}, {})}"
    lines, table = list[str](), dict[str, dict[str, float]]()
    for name, shifts in roles.shifts.items():
        for site, shift in shifts.items():
            if shift.factor is not None:
                table.setdefault(name, {})[site] = float(f"{shift.factor:.6g}")
                medians = f"median {shift.median:.4g}, {shift.other_median:.4g} at the others"
                lines.append(f"#   {_comment_text(name)} at {_comment_text(site)}: {medians}; {shift.units}\n")
    if not table:
        return proposed
    head = (
        "# Another unit? Ask the site. If so, delete the # in front of the next line. Factors multiply its numbers.\n"
    )
    return f"{proposed}{head}# factors = {_inline_table(table)}\n{''.join(lines)}"


def _comment_text(text: str) -> str:
    """Return a text in which a space replaces every character that is not allowed in a comment."""
    return "".join(c if c.isprintable() else " " for c in text)


def round_to_three_digits(value: float) -> float:
    """Return a number rounded to three significant digits, without an exponent."""
    return float(f"{value:.3g}")


def _inline_table(table: dict[str, Any]) -> str:
    """Return a TOML table on a single line."""
    cells = (
        f"{tomli_w.dumps({key: 0})[: -len(' = 0') - 1]} = {_inline_table(cell) if isinstance(cell, dict) else cell}"
        for key, cell in table.items()
    )
    return f"{{ {', '.join(cells)} }}"


def _commented_lines(values: dict[str, Any], notes: dict[str, str]) -> str:
    """Return the keys of a TOML table on separate lines, each with its comment."""
    lines = []
    for key, value in values.items():
        text, note = tomli_w.dumps({key: value}).rstrip("\n"), notes.get(key)
        text = f"{key} = {_inline_table(value)}" if isinstance(value, dict) else text
        if isinstance(value, list) and len(text) < MAX_LIST_CHARACTERS:
            text = text.replace("[\n    ", "[").replace(",\n]", "]").replace("\n    ", " ")
        lines.append(text if note is None else f"# {note}\n{text}" if "\n" in text else f"{text}  # {note}")
    return "\n".join(lines) + "\n"
