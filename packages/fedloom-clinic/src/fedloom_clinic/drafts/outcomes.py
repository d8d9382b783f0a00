"""Outcome of a table: its target and, if the target is a time, its event.

The outcome is chosen if the evidence is clear. Otherwise, the draft asks the user to choose.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from sklearn.metrics import roc_auc_score

from fedloom.data.sources.table.levels import TRUTH_WORDS
from fedloom.data.survey.facts import MAX_FEW_LEVELS, MIN_ROWS_PER_LEVEL, ColumnProfile
from fedloom.data.survey.people import names_person, plain_name, split_name, words
from fedloom.errors import ConfigError
from fedloom.formats import shorten_list
from fedloom_clinic.drafts.columns import TableSurvey

TIME_PATTERN = re.compile(
    r"follow.?up|surviv|time.?to|(^|[_\W])(time|days|weeks?|months|hours|duration|tte|futime|ptime|rfstime|t?stop)"
    r"([_\W]|\d?$)|^t\d?$|^tt[a-z]$|^(pfs|efs|dfs|rfs|os)([_\W]|$)|.+time$|^life(time|span)?$|"
    r"suivi|seguimiento|nachbeobacht|[uü]e?berleb|survie|superviv|sopravviv|(^|[_\W])(beobachtungs)?(zeit|dauer)([_\W]|$)|"
    r"(^|[_\W])(dur[eé]e|d[eé]lai|tiempo|duraci[oó]n|durata|tage|wochen|monate|jours|semaines|mois|d[ií]as|semanas|meses)"
    r"([_\W]|$)",
    re.IGNORECASE,
)
"""Pattern of names for the time to an event."""
OTHER_TIME_PATTERN = re.compile(
    r"(^|[_\W])(age|los|stay|gestation|education|icu|uci|its|liegedauer|verweildauer|aufenthalt\w*|estancia|estadia|"
    r"s[eé]jour|hospitalisation|hospitalizaci[oó]n)([_\W]|$)|study_?time",
    re.IGNORECASE,
)
"""Pattern of names of times that have already passed when a row is recorded, so that they are never times to an
event."""
FOLLOW_UP_PATTERN = re.compile(
    r"follow.?up|suivi|seguimiento|nachbeobacht|[uü]e?berleb|survie|superviv|sopravviv|(^|[_\W])fu|surviv|last.?(observ|contact|seen|visit|follow)|to.?(death|event)|^(time|t|tte|duration)$|^([opedr]?fs|os)([_\W]|$)",
    re.IGNORECASE,
)
"""Pattern of names for the observation time, as opposed to other times such as the time from diagnosis to treatment."""
WHOLE_NAME_PATTERN = re.compile(r"^(days|weeks|months|t?stop)$", re.IGNORECASE)
"""Pattern of names for the time under observation if no other column contains a time."""
BARE_TIME_PATTERN = re.compile(r"^(time|t|tte|duration|futime|ptime|rfstime|survtime|[op]?fs|os)$", re.IGNORECASE)
"""Pattern of names of times that occur only in survival tables. If a table contains only other times, a column of
deaths may be a class to predict."""
EVENT_PATTERN = re.compile(
    r"event|status|died|dead|death|deceased|relapse|recur|arrest|fail|progress|observed|uncens|^[ed]$|^delta$|stat$|"
    r"d[eé]c[eè]s|verstorben|gestorben|ereignis|[eé]v[eé]nement|rezidiv|rechute|reca[ií]da|muerte|fallec|deced|exitus|"
    r"(^|[_\W])(tod|mort|morto)([_\W]|$)",
    re.IGNORECASE,
)
"""Pattern of names of columns that are 1 for an event. A column with `cens` in its name may mark either censored rows
or events, so the user must state the meaning."""
CENSORED_PATTERN = re.compile(r"cens", re.IGNORECASE)
INDICATOR_PATTERN = re.compile(r"(^|[_\W])cens(or|ors)?$", re.IGNORECASE)
"""Pattern of names of columns that, by convention in survival data, use 1 for an event and 0 for a censored row. The
name ``censored`` may have the opposite meaning."""
LONGER_TIME_PROBABILITY = 0.75
"""Minimum probability that confirms the convention. This is the probability that a censored time is
longer than the time of an event.

In 5 of 14 public tables with an event and with roles that were recorded in advance, the probability is at least this
high. In none of these tables is it so low that 0 and 1 would be confused (the lowest value is 0.31).
"""
ENTRY_PATTERN = re.compile(r"entry|(^|[_\W])t?(start|begin)([_\W]|$)|^time0$|truncat", re.IGNORECASE)
"""Pattern of names for the start of observation."""
MIN_ENTRY_SHARE = 0.99
"""Minimum fraction of rows whose start precedes the end and whose times are not negative.

The fraction is below 1, because real tables contain typing errors.
"""
COUNT_PATTERN = re.compile(
    r"(^|_)(n|num|number|count|counts|no)_|_(n|count|counts)$|visits|admissions|admits|episodes|falls|seizures|attacks|claims",
    re.IGNORECASE,
)
"""Pattern of names for a count."""
MAX_EVENT_CODES = 4
"""Maximum number of distinct values in a column of events whose codes are not only 0 and 1."""

CALENDAR_PATTERN = re.compile(
    r"(^|[_\W])(years?|yr|jahr|annee|month|monat|day|date|datum|hour|week|quarter|timestamp)$", re.IGNORECASE
)
"""Pattern of names for a date of recording, which is rarely a target."""
TARGET_WORDS = words(
    "target targets label labels outcome outcomes y response dependent endog groundtruth "
    "ziel zielvariable zielgrosse cible objetivo rul remainingusefullife"
)
"""Words that identify a target and have no other meaning if the column is at the usual position."""
OTHER_MEANING_WORDS = words("target targets label labels y")
"""Words in `TARGET_WORDS` that mean something else if the column is inside a table: an aim, a caption, an income."""
TRUTH_LEVELS = frozenset(TRUTH_WORDS) | words(
    "absent present negative positive healthy sick control case alive dead "
    "ja nein oui non si sim nao ano ne tak nie да нет"
)
"""Levels of a text column with yes-or-no values, in lower case."""
EVENT_WORDS = words(
    "died dead death deceased mortality survived readmitted readmission churn churned exited attrition defaulted "
    "relapse relapsed recurrence fraud isfraud verstorben tod deces gestorben fallecido hospitalexpireflag "
    "hospitaldeath inhospitaldeath inhospitalmortality failure machinefailure schadenfall betrug gekundigt gekuendigt "
    "abwanderung impago moroso fraude resiliation reingreso rehospitalisation wiederaufnahme mortalite mortalidad "
    "mortalita muerte exitus fallecimiento rezidiv rechute recaida decede deceduto"
)
"""Names of events in a person's life, which are usually the target."""
RESULT_WORDS = words(
    "los lengthofstay class classes result results diagnosis category classification disease disorder severity quality "
    "choice output ill sick expire expired default price sales outcome target label death died mortality ergebnis "
    "diagnose resultado resultat risultato esito diagnostico diagnostic diagnosi"
)
"""Words that occur in the names of outcomes, but also in the names of features."""

(
    TARGET_NAME_POINTS,
    EVENT_NAME_POINTS,
    FILE_NAME_POINTS,
    RESULT_NAME_POINTS,
    WORD_POINTS,
    LAST_PLACE_POINTS,
    ONLY_CANDIDATE_POINTS,
) = 4, 3, 3, 2, 1, 1, 4
"""Points for evidence that a column is the target, in this order: a name in `TARGET_WORDS`, a name in `EVENT_WORDS`,
the name of the file, a name in `RESULT_WORDS` or equal to the end of the file's name, a word of either, the last
position, and being the only candidate. A time that occurs with a single event gets as many points as a name in
`TARGET_WORDS`."""
MIN_SURE_POINTS = 3
"""Minimum number of points of the chosen candidate, which must also lead the second by at least `MIN_LEAD_POINTS`."""
MIN_LEAD_POINTS = 2
"""Minimum lead of the first candidate over the second, in points.

With both limits, 21 of 31 public tables with roles that were recorded in advance are drafted correctly, 10 lead to a
question, and no draft is wrong. Of 23 additional tables with columns in four languages, 13 are drafted correctly and 10
lead to a question.
"""
MAX_SHOWN_CANDIDATES = 6
"""Maximum number of candidates that a question lists."""


class TableOutcome(NamedTuple):
    """Outcome of the drafted experiment.

    Attributes:
        target: column to be predicted. If None, the draft asks the user for the target.
        event: column that is 1 if the time in the target column ended with an event, and 0 if it is censored. None if
            the target is not a time.
        question: question that the user must answer before the draft can be run, or "" if the evidence is clear.
        note: sentence about a different possible choice, or "" if there is none.
        alternatives: names of other columns that could be the target.
    """

    target: ColumnProfile | None
    event: ColumnProfile | None = None
    question: str = ""
    note: str = ""
    alternatives: tuple[str, ...] = ()


def is_event(column: ColumnProfile) -> bool:
    """Return True if a column contains both 0 and 1, and no other values."""
    return set(column.numbers.tolist()) == {0.0, 1.0}


def is_coded(column: ColumnProfile) -> bool:
    """Return True if a column may contain events with codes other than 0 and 1, such as 1 and 2 or competing causes."""
    values = set(column.numbers.tolist())
    return column.is_integer and 2 <= len(values) <= MAX_EVENT_CODES and not is_event(column) and min(values) in (0, 1)


def is_time(column: ColumnProfile) -> bool:
    """Return True if a column's name suggests a time and it contains more than two numbers, nearly all at least 0."""
    numbers = column.numbers
    named = TIME_PATTERN.search(column.name) and not OTHER_TIME_PATTERN.search(column.name)
    return bool(named) and len(set(numbers.tolist())) > 2 and bool((numbers >= 0).mean() >= MIN_ENTRY_SHARE)


def is_count(column: ColumnProfile) -> bool:
    """Return True if a column's name suggests a count and it has more than two distinct integers with minimum 0."""
    numbers = column.numbers
    return (
        column.is_integer
        and bool(COUNT_PATTERN.search(column.name))
        and len(set(numbers.tolist())) > 2
        and numbers.min() == 0
    )


def choose_outcome(survey: TableSurvey, target: str | None, event: str | None) -> TableOutcome:
    """Return the outcome of the drafted experiment: the requested outcome if given, otherwise the most obvious one.

    Args:
        survey: survey of the table.
        target: target column requested by the user, or None.
        event: event column requested by the user. If None, the column is detected. If empty, there is no event column.

    Raises:
        ConfigError: the requested event column contains values other than 0 and 1, or no column contains times.
    """
    times = [c for c in survey.columns.values() if is_time(c)]
    if event:  # an empty text means that there is no event column
        chosen = survey.column(event, "--event")
        if not is_event(chosen):
            held = ", ".join(map(repr, [*chosen.levels][:4]))
            raise ConfigError(
                f"{survey.path}: --event {event} contains {held}. The column must contain 1 for an "
                "event and 0 for no event"
            )
        if target is None and not times:
            raise ConfigError(
                f"{survey.path}: no column looks like the time of --event {event}. Name the column with --target"
            )
        under = [c for c in times if FOLLOW_UP_PATTERN.search(c.name)]
        times = under if len(under) == 1 else times
        if target is None and len(times) > 1:
            names = [c.name for c in times]
            return TableOutcome(
                None,
                question=_question_text(survey, f"which column is the time of {event!r}", names, f"--event {event}"),
            )
        time = times[0] if target is None else survey.column(target, "--target")
        return TableOutcome(time, chosen, note=_note_late_entry(survey, time, chosen))
    events = [c for c in survey.columns.values() if EVENT_PATTERN.search(c.name) and is_event(c) and c.name != target]
    if target is not None:
        chosen = survey.column(target, "--target")
        if event is None and chosen in times and len(events) == 1:
            entry = _note_late_entry(survey, chosen, events[0])
            note = f"{_outcome_flags(chosen.name, '')} drafts it without the event{f'; {entry}' if entry else ''}"
            return TableOutcome(chosen, events[0], note=note)
        if event is None and chosen in times and events:
            names = [f"{_outcome_flags(target, c.name)}" for c in events]
            what = f"which event ends {target!r}? {shorten_list([repr(c.name) for c in events], MAX_SHOWN_CANDIDATES)}"
            return TableOutcome(None, question=f"{what}; {_answer_hint(survey, [*names, _outcome_flags(target, '')])}")
        if event is None and is_event(chosen) and EVENT_PATTERN.search(target) and times:
            flags = _outcome_flags(times[0].name, target)
            return TableOutcome(chosen, note=f"{times[0].name!r} with the event {target!r} is a time to event: {flags}")
        return TableOutcome(
            chosen, note="" if event == "" or chosen not in times else _note_possible_event(survey, chosen, target)
        )
    return _clearest_outcome(survey, times if event is None else [], events if event is None else [])


def labels(survey: TableSurvey, names: Sequence[str], event: str | None) -> tuple[ColumnProfile, ...]:
    """Return the columns that the user requested for a multilabel task.

    Raises:
        ConfigError: a column does not exist, is named twice, or contains values other than 0 and 1, or an event is
            given.
    """
    if event:
        raise ConfigError(f"{survey.path}: --event belongs to a single time. Name one column with --target")
    columns = tuple(survey.column(name, "--target") for name in names)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{survey.path}: --target {quote_for_shell(twice)} is given twice. Name each label once")
    for column in columns:
        if not is_event(column) or column.odd:
            held = ", ".join(map(repr, [*column.levels][:4]))
            raise ConfigError(
                f"{survey.path}: --target {quote_for_shell(column.name)} contains {held}. "
                "Each of several targets is a label: 1 if it is present, 0 if it is absent, and empty if it is unknown"
            )
    return columns


def _clearest_outcome(survey: TableSurvey, times: list[ColumnProfile], events: list[ColumnProfile]) -> TableOutcome:
    """Return the outcome with the clearest evidence."""
    doubts = [c for c in survey.columns.values() if _may_be_event(c)] if times else []
    points, unsure = _target_points(survey)
    under = [c for c in times if FOLLOW_UP_PATTERN.search(c.name)]
    times = under if len(under) == 1 else times
    if len(times) == len(doubts) == 1 and not events and _is_confirmed(times[0], doubts[0]):
        events, doubts = doubts, []
    pairs = bool(times and (events or doubts))
    if pairs:
        for column in (*times, *events, *doubts):
            points[column.name] = min(points.get(column.name, 0), EVENT_NAME_POINTS)
    ranked = sorted(points, key=lambda name: -points[name])
    if not ranked:
        ask = f"columns: {', '.join(survey.names[:30])}{', ...' if len(survey.names) > 30 else ''}"
        raise ConfigError(f"{survey.path}: no column looks like the target. Name the column with --target; {ask}")
    if pairs:
        pair = {c.name for c in (*times, *events, *doubts)}
        rival = next((points[name] for name in ranked if name not in pair), 0)
        bare = bool(times and BARE_TIME_PATTERN.search(times[0].name))
        entry = _note_late_entry(survey, times[0], events[0]) if len(events) == 1 else ""
        # otherwise, the event may be a class to predict, and the time may end before the event is known
        clear = bare or (
            not any(plain_name(c.name) in EVENT_WORDS for c in events)
            and (
                len(under) == 1
                or bool(entry)
                or bool(WHOLE_NAME_PATTERN.search(times[0].name))
                or (len(events) == 1 and _lasts_longer(times[0], events[0]))
            )
        )
        if (
            len(times) == 1
            and len(events) == 1
            and not doubts
            and clear
            and rival <= TARGET_NAME_POINTS - MIN_LEAD_POINTS
        ):
            if not entry:
                drop = f"{_outcome_flags(times[0].name, '')} drafts it without the event"
                if CENSORED_PATTERN.search(events[0].name):
                    drop += (
                        f". The value 1 in {events[0].name!r} probably means an event, because rows with "
                        "0 have longer times"
                    )
                return TableOutcome(
                    times[0], events[0], note=drop, alternatives=tuple(n for n in ranked if points[n] and n not in pair)
                )
            what = f"is {times[0].name!r} with the event {events[0].name!r} the outcome? {entry}"
            return TableOutcome(
                None,
                question=f"{what}; "
                f"{_answer_hint(survey, [_outcome_flags(times[0].name, events[0].name), *_target_flags(ranked)])}",
            )
        flags = [_outcome_flags(t.name, e.name) for t in times for e in events]
        what = "what is the outcome: a time to an event, or one column?"
        if doubt := _note_possible_event(survey, times[0], None):
            what += f" {doubt};"
        named = _target_flags([name for name in ranked if points[name]] or ranked)
        return TableOutcome(
            None, question=f"{what} {_answer_hint(survey, [*flags, *named])}", alternatives=tuple(ranked)
        )
    best, rest = ranked[0], ranked[1:]
    entered = any(ENTRY_PATTERN.search(c.name) for c in survey.columns.values())
    if entered and plain_name(best) in EVENT_WORDS:  # the time of the event may have another name
        unsure.add(best)
    if (
        best not in unsure
        and points[best] >= MIN_SURE_POINTS
        and (not rest or points[best] - points[rest[0]] >= MIN_LEAD_POINTS)
    ):
        return TableOutcome(survey.columns[best], alternatives=tuple(name for name in rest if points[name]))
    names = [*points]
    ranked = sorted(names, key=lambda name: (-points[name], -names.index(name)))  # targets are more often later columns
    return TableOutcome(
        None, question=_question_text(survey, "which column is predicted", ranked), alternatives=tuple(ranked)
    )


def _may_be_event(column: ColumnProfile) -> bool:
    """Return True if a column in a table with a time may be its event, whose meaning only the user can know."""
    if CENSORED_PATTERN.search(column.name) and not re.search("uncens", column.name, re.IGNORECASE):
        return is_event(column) or is_coded(column)
    return bool(EVENT_PATTERN.search(column.name)) and is_coded(column)


def _is_confirmed(time: ColumnProfile, column: ColumnProfile) -> bool:
    """Return True if a 0/1 column marks events according to the convention, and its numbers confirm this.

    The numbers confirm the convention if the rows with 0 have longer times.
    """
    return bool(INDICATOR_PATTERN.search(column.name)) and is_event(column) and _lasts_longer(time, column)


def _lasts_longer(time: ColumnProfile, column: ColumnProfile) -> bool:
    """Return True if rows with 0 in a 0/1 column have longer times than the others, as censored rows do."""
    here = ~np.isnan(time.values) & ~np.isnan(column.values)
    if len(set(column.values[here])) < 2:
        return False
    return bool(roc_auc_score(1 - column.values[here], time.values[here]) >= LONGER_TIME_PROBABILITY)


def _target_points(survey: TableSurvey) -> tuple[dict[str, int], set[str]]:
    """Return the points of possible targets in header order, and the names of columns that the user must clarify.

    A name that has other meanings inside a table, or that is common for features, is regarded as evidence only at the
    usual position.
    """
    most = max(MAX_FEW_LEVELS, survey.rows // (5 * MIN_ROWS_PER_LEVEL))
    stem = plain_name(survey.path.stem)
    fit = [
        c for c in survey.columns.values() if c.kind in ("number", "text") and not c.constant and not c.identifies
        and (c.kind == "number" or len(c.levels) <= most) and not c.personal
        and (not _is_known(c) or plain_name(c.name) == stem)
    ]  # fmt: skip
    coordinates = any(plain_name(name) == "x" for name in survey.names)
    letters = sum(len(plain_name(name)) == 1 for name in survey.names) > 1
    skipped = [c.name for c in survey.columns.values() if c.name != survey.names[-1] and (_is_known(c) or c.identifies)]
    ends = {next((name for name in survey.names if name not in skipped), ""), survey.names[-1]}
    points, doubtful = dict[str, int](), set[str]()
    for c in fit:
        plain, parts = plain_name(c.name), {*split_name(c.name)}
        few = len(c.levels) <= MAX_FEW_LEVELS
        last = c.name == survey.names[-1]
        score = 0
        measured = plain == "y" and not is_event(c)  # a column y may be a coordinate or an income
        if plain in TARGET_WORDS and not (measured and (coordinates or (letters and not last))):
            score = TARGET_NAME_POINTS
            if plain in OTHER_MEANING_WORDS and c.name not in ends and not (plain == "y" and is_event(c)):
                doubtful.add(c.name)
        elif plain in EVENT_WORDS and few:
            score = EVENT_NAME_POINTS
        elif plain in RESULT_WORDS:
            score = RESULT_NAME_POINTS
        elif parts & (TARGET_WORDS | EVENT_WORDS | RESULT_WORDS) and few:
            score = WORD_POINTS
        if len(plain) >= 3 and stem in {f"{plain}{end}" for end in ("", "s", "n", "en", "es")}:
            score += FILE_NAME_POINTS
            if score == FILE_NAME_POINTS and (
                c.name not in ends or (len(c.levels) <= MAX_FEW_LEVELS and not _has_truth_levels(c))
            ):
                doubtful.add(c.name)
        elif len(plain) >= 5 and stem.endswith(plain):
            score += RESULT_NAME_POINTS
        if last and score == RESULT_NAME_POINTS and not _has_truth_levels(c):
            doubtful.add(c.name)
        points[c.name] = score + LAST_PLACE_POINTS * last
    rest = [c for c in survey.columns.values() if fit and c is not fit[0]]
    if len(fit) == 1 and all(c.constant or c.identifies or _is_known(c) for c in rest) and not is_time(fit[0]):
        points[fit[0].name] += ONLY_CANDIDATE_POINTS
    return points, doubtful


def _has_truth_levels(column: ColumnProfile) -> bool:
    """Return True if a column contains yes-or-no values, as outcomes often do.

    Other texts and small sets of numbers are just as often groups as outcomes.
    """
    return {level.lower() for level in column.levels} <= TRUTH_LEVELS


def _is_known(column: ColumnProfile) -> bool:
    """Return True if a column identifies the date or the person of a row, which is never the target."""
    return bool(CALENDAR_PATTERN.search(column.name)) or (
        column.is_integer and names_person(column.name) and len(column.levels) > MAX_FEW_LEVELS
    )


def _outcome_flags(target: str, event: str) -> str:
    return f"--target {quote_for_shell(target)} --event {quote_for_shell(event)}"


def _target_flags(names: Sequence[str]) -> list[str]:
    return [f"--target {quote_for_shell(name)}" for name in names if name]


def quote_for_shell(name: str) -> str:
    """Return a name, in quotes if a shell needs them."""
    return name if re.fullmatch(r"[\w.\-/]+", name) else "'" + name.replace("'", "'\\''") + "'"


def start_answer(survey: TableSurvey) -> str:
    """Return the beginning of the sentence that explains how to answer a question, up to the list of options."""
    return f"answer it by: fedloom init {quote_for_shell(str(survey.path))} --force, with"


def _answer_hint(survey: TableSurvey, flags: Sequence[str]) -> str:
    """Return the sentence that explains how to answer a question."""
    return f"{start_answer(survey)} {' or '.join(flags[:MAX_SHOWN_CANDIDATES])}"


def _question_text(survey: TableSurvey, what: str, names: Sequence[str], more: str = "") -> str:
    """Return the text of a question that lists its candidates."""
    shown = shorten_list([*map(repr, names)], MAX_SHOWN_CANDIDATES)
    shown += " (to choose the column without a name, write a name for it in the header)" if "" in names else ""
    hint = _answer_hint(survey, [f"{flag} {more}".strip() for flag in _target_flags(names)])
    return f"{what}? It may be {shown}; {hint}"


def _note_possible_event(survey: TableSurvey, time: ColumnProfile, target: str | None) -> str:
    """Return a sentence about a column that may contain the events for a column of times.

    Such a column marks censored rows or contains codes other than 0 and 1.
    """
    for column in survey.columns.values():
        if column.name == target or not _may_be_event(column):
            continue
        levels, ended = {*column.numbers.tolist()}, int((column.numbers == 1).sum())
        what = f"{time.name!r} together with {column.name!r} may be a time to event"
        flags = _outcome_flags(time.name, column.name)
        if levels == {0.0, 1.0}:
            return (
                f"{what}: {flags} if 1 is an event ({ended} of {len(column.numbers)} rows), but not if 1 means censored"
            )
        if levels == {1.0, 2.0}:
            return f"{what}, but is coded 1 and 2: write 1 for an event and 0 for none, then {flags}"
        codes = ", ".join(f"{level:g}" for level in sorted(levels))
        return f"{what}, but is coded {codes}: write 1 for the event that is predicted and 0 for others, then {flags}"
    return ""


def _note_late_entry(survey: TableSurvey, time: ColumnProfile, event: ColumnProfile) -> str:
    """Return a sentence about a column that may contain the start of observation, or "" if there is no such column."""
    for column in survey.columns.values():
        if column.kind == "number" and ENTRY_PATTERN.search(column.name) and column not in (time, event):
            here = ~np.isnan(column.values) & ~np.isnan(time.values)
            if here.any() and (column.values[here] <= time.values[here]).mean() >= MIN_ENTRY_SHARE:
                return (
                    f"{column.name!r} looks like a late entry, but rows count as at risk from time 0 on. Leave it out"
                )
    return ""
