"""Targets that are no classes: times to an event, and counts, by what a table's columns hold and are called."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from fedloom.data.survey.columns import TARGETS, Survey
from fedloom.data.survey.facts import ColumnProfile
from fedloom.errors import ConfigError

TIME = re.compile(
    r"follow.?up|surviv|time.?to|(^|_)(time|days|weeks?|months|hours|duration|tte|futime|rfstime|stop)(_|$)",
    re.IGNORECASE,
)
"""Names of times to an event."""
EVENT = re.compile(r"event|status|died|dead|death|deceased|relapse|recur|arrest|fail|progress", re.IGNORECASE)
"""Names of columns with 1 for an event; one of `cens` may have either meaning, so people name it."""
CENSORED = re.compile(r"cens", re.IGNORECASE)
ENTRY = re.compile(r"entry|(^|_)t?start(_|$)|truncat", re.IGNORECASE)
"""Names of times at which observation begins."""
COUNT = re.compile(
    r"(^|_)(n|num|number|count|counts|no)_|_(n|count|counts)$|visits|admissions|admits|episodes|falls|seizures|attacks|claims",
    re.IGNORECASE,
)
"""Names of counts."""


class Timed(NamedTuple):
    """A time and the column that has 1 where it ended by an event, 0 where it is censored."""

    time: ColumnProfile
    event: ColumnProfile


def is_event(column: ColumnProfile) -> bool:
    """Whether a column holds 0 and 1 only, both of them."""
    return set(column.numbers.tolist()) == {0.0, 1.0}


def is_time(column: ColumnProfile) -> bool:
    """Whether a column holds times: numbers above 0, more than two, by that name."""
    numbers = column.numbers
    return bool(TIME.search(column.name)) and len(set(numbers.tolist())) > 2 and bool((numbers > 0).all())


def is_count(column: ColumnProfile) -> bool:
    """Whether a column holds counts: whole numbers from 0 on, more than two, by that name."""
    numbers = column.numbers
    return column.whole and bool(COUNT.search(column.name)) and len(set(numbers.tolist())) > 2 and numbers.min() == 0


def timed(survey: Survey, target: str | None, event: str | None) -> tuple[Timed | None, str]:
    """The time to an event that a table is drafted for, and the one that it could be drafted for.

    It is drafted where `event` or a time is asked for, and where a time stands beside a column that is called an event
    and nothing else; one called as a class is, such as ``died``, is only named.

    Args:
        survey: of the table.
        target: column that is asked for; None: none.
        event: column that is asked for; None: found out; empty: there is none.

    Returns:
        The draft's; None for another task. Then a sentence on the other choice, or "".

    Raises:
        ConfigError: the event that is asked for holds something else, or no column is a time.
    """
    if event == "":
        return None, ""
    times = [c for c in survey.columns.values() if is_time(c)]
    if event:
        chosen = survey.column(event, "--event")
        if not is_event(chosen):
            held = ", ".join(map(repr, [*chosen.levels][:4]))
            raise ConfigError(f"{survey.path}: --event {event} holds {held}; it must be 1 for an event, 0 for none")
        if target is None and not times:
            raise ConfigError(f"{survey.path}: no column looks like the time of --event {event}; name it by --target")
        outcome = Timed(times[0] if target is None else survey.column(target, "--target"), chosen)
        return outcome, _late_entry(survey, outcome)
    events = [c for c in survey.columns.values() if EVENT.search(c.name) and is_event(c) and c.name != target]
    if target is not None:
        times = [c for c in times if c.name == target]
    if times and not events:
        return None, _doubtful(survey, times[0], target)
    if not times or not events:
        return None, ""
    outcome = Timed(times[0], events[0])
    flag = f"--target {outcome.time.name} --event"
    entry = _late_entry(survey, outcome)
    if target is not None or events[0].name.lower() not in TARGETS:
        return outcome, f"{flag} '' drafts it without the event{f'; {entry}' if entry else ''}"
    return (
        None,
        f"{outcome.time.name!r} with the event {outcome.event.name!r} is a time to event: {flag} {outcome.event.name}",
    )


def _doubtful(survey: Survey, time: ColumnProfile, target: str | None) -> str:
    """The sentence on a column beside a time that may hold events: censored rows, or 1 and 2 in place of 0 and 1."""
    for column in survey.columns.values():
        if column.name == target or not (named := EVENT.search(column.name) or CENSORED.search(column.name)):
            continue
        levels, ended = set(column.numbers.tolist()), int((column.numbers == 1).sum())
        what = f"{time.name!r} beside {column.name!r} may be a time to event"
        flags = f"--target {time.name} --event {column.name}"
        if levels == {0.0, 1.0} and named.re is CENSORED:
            return (
                f"{what}: {flags} where 1 is an event ({ended} of {len(column.numbers)} rows), not where 1 is censored"
            )
        if levels == {1.0, 2.0}:
            return f"{what}, but is coded 1 and 2: write 1 for an event and 0 for none, then {flags}"
    return ""


def _late_entry(survey: Survey, outcome: Timed) -> str:
    """The sentence on a column that looks like the begin of observation, which no task uses; "" without one."""
    times = outcome.time.values
    for column in survey.columns.values():
        if column.kind == "number" and ENTRY.search(column.name) and column not in outcome:
            here = ~np.isnan(column.values) & ~np.isnan(times)
            if here.any() and bool((column.values[here] < times[here]).all()):
                return f"{column.name!r} looks like a late entry: rows count as at risk from time 0 on; leave it out"
    return ""
