"""Draft of an experiment file, based on a table's content, with an explanation in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedloom.data import Dataset, by_site
from fedloom.data.dataset import CLASS_TASKS
from fedloom.data.sources.table.designs import parse_seconds
from fedloom.data.sources.table.levels import similar_levels_text
from fedloom.data.sources.table.targets import similar_levels_message
from fedloom.data.survey.agreement import Agreement
from fedloom.data.survey.facts import (
    BIRTH_NAME_PATTERN,
    LATER_NAME_PATTERN,
    MAX_FEW_LEVELS,
    MIN_ROWS_PER_LEVEL,
    POSSIBLE_LEVEL_TOKENS,
    ColumnProfile,
    find_answer_codes,
    infer_time_unit,
    is_repeated_unit,
)
from fedloom.data.survey.leaks import LEAK_SHARE
from fedloom.data.survey.people import names_person
from fedloom.data.tables import Table, is_number, level_name
from fedloom.errors import ConfigError, DataError
from fedloom.formats import shorten_list
from fedloom_clinic.drafts import outcomes
from fedloom_clinic.drafts.columns import TableSurvey
from fedloom_clinic.drafts.document import MAX_SHOWN_NAMES, MIN_SITE_ROWS, ColumnRoles, experiment_file_text

MIN_FEDERATION_ROWS = 10
"""Minimum number of rows in a federation, and in a class that is not considered rare."""
SUSPICIOUS_SCORE = 0.95
"""Minimum AUROC or R2 of a single column that makes the report mention the column.

If the column's name matches `LATER_NAME_PATTERN`, the limit is `LATER_COLUMN_SCORE` instead.
"""
LATER_COLUMN_SCORE = 0.75


class ExperimentDraft:
    """Draft of an experiment file, including the roles of a table's columns.

    Args:
        survey: survey of the table.
        by: column that names the site of each row. If None, the column is detected. If empty, no column names the site.
        target: column to predict, or the 0/1 columns of several labels. If None, the column is detected.
        event: column that is 1 for an event, if the target is the time to an event. If None, the column is detected. If
            empty, there is no event column.
        subject: column that names the subject of each row, if a subject may have several rows. If None, the column is
            detected. If empty, no column names the subject.

    Attributes:
        report: sentences about the findings.

    Raises:
        ConfigError: a column does not exist, the target cannot be learned, or no feature remains.
        DataError: the table has too few rows.
    """

    def __init__(
        self, survey: TableSurvey, by: str | None, target: str | Sequence[str] | None, event: str | None = None,
        subject: str | None = None,
    ) -> None:  # fmt: skip
        targets = [target] if isinstance(target, str) else [*(target or ())]
        self._survey, self._drop = survey, dict[str, str]()
        self._rows: dict[str, NDArray[np.bool_]] = {}
        how = "".join(f", {k} {v!r}" for k, v in survey.options.items() if (k, v) != ("separator", ","))
        self.report = [f"{survey.path}: {survey.rows} rows, {len(survey.names)} columns{how}"]
        if first := [name for name in survey.names if is_number(name)]:
            self.report.append(f"header: {_quote(first)}: is this a row of data? Then put a row of names above it")
        self._columns_hint = f"columns: {', '.join(survey.names[:30])}{', ...' if len(survey.names) > 30 else ''}"
        if by is not None and by in targets:
            raise ConfigError(
                f"{survey.path}: {by!r} cannot be both the target and the site. Name two different columns"
            )
        if survey.rows < MIN_FEDERATION_ROWS:
            rows = f"{survey.rows} row{'s'[: survey.rows != 1]}"
            raise DataError(f"{survey.path}: {rows}. A federation needs at least {MIN_FEDERATION_ROWS}")
        self.questions = list[str]()
        several = outcomes.labels(survey, targets, event) if len(targets) > 1 else ()
        first_target = targets[0] if targets else None
        outcome = outcomes.TableOutcome(several[0]) if several else outcomes.choose_outcome(survey, first_target, event)
        self._target, self._event, self._task = outcome.target, outcome.event, ""
        self._labels = several
        if several:
            self._report_labels()
        elif outcome.target is not None:
            self._take_target(outcome.target, first_target is not None, outcome.alternatives)
        else:
            self.questions.append(outcome.question)
            self.report.append(f"target: not clear: {outcome.question}")
        if outcome.note:
            self.report.append(f"  {outcome.note}")
        self._choose_subject(subject, by)
        self._take_site(by)
        self._take_features(outcome.alternatives)

    @property
    def chosen(self) -> tuple[str | None, str | None, str | None]:
        """Names of the target, the event and the site. A name is None if it is unknown."""
        target, event, site = (None if c is None else c.name for c in (self._target, self._event, self._site))
        return target, event, site

    @property
    def asks(self) -> bool:
        """True if the target is unknown, so the draft cannot be used to read a data set."""
        return self._target is None

    @property
    def _classes(self) -> ColumnProfile | None:
        """Column whose classes must occur at every site: the target, or the event that belongs to a time.

        None if the target is a measurement.
        """
        if self._event is not None:
            return self._event
        return self._target if self._task in CLASS_TASKS else None

    def _say(self, column: ColumnProfile, sentence: str) -> None:
        self.report.append(f"  column {column.name!r}: {sentence}")

    def _take_target(self, target: ColumnProfile, is_given: bool, alternatives: Sequence[str]) -> None:
        survey = self._survey
        wrong = {"empty": "is empty", "date": "holds dates"}.get(target.kind)
        wrong = wrong or ("is the same in every row" if target.constant else None)
        if wrong or (target.kind == "text" and target.identifies):
            what = wrong or "differs in every row"
            raise ConfigError(
                f"{survey.path}: the target {target.name!r} {what}, so a model cannot learn it; {self._columns_hint}"
            )
        rows = survey.rows - target.missing
        if rows < MIN_FEDERATION_ROWS:
            raise DataError(
                f"{survey.path}: {rows} rows with a target. A federation needs at least {MIN_FEDERATION_ROWS}"
            )
        missing = target.odd if target.kind == "number" else []
        classes = {name: count for name, count in survey_levels(target).items() if name not in missing}
        count = target.kind == "number" and outcomes.is_count(target)
        measured = (
            count
            or self._event is not None
            or (target.kind == "number" and (not target.is_integer or len(classes) > MAX_FEW_LEVELS))
        )
        self._task = "regression" if measured else "binary" if len(classes) == 2 else "classification"
        self._task = "survival" if self._event is not None else "count" if count else self._task
        if not measured and (same := similar_levels_text(classes)):
            raise DataError(f"{survey.path}: {similar_levels_message(target.name, same)}")
        spread = shorten_list([f"{name} {count}" for name, count in classes.items()], MAX_SHOWN_NAMES)
        if measured:
            spread = f"{target.numbers.min():g} to {target.numbers.max():g}, mean {target.numbers.mean():g}"
        self.report.append(f"target: {self._describe_choice(target, is_given, alternatives)}, {self._task}: {spread}")
        if self._event is not None:
            ended = int(np.nansum(self._event.values))
            self._say(self._event, f"1 for an event: {ended} of {survey.rows} rows, the others are censored")
        if target.missing:
            self._say(target, f"without a target, and therefore left out: {target.missing} rows")
        if not measured and (rare := {name: count for name, count in classes.items() if count < MIN_FEDERATION_ROWS}):
            names = ", ".join(f"{name!r} ({count})" for name, count in list(rare.items())[:MAX_SHOWN_NAMES])
            self._say(
                target, f"classes of fewer than {MIN_FEDERATION_ROWS} rows: {names}. Merge them, or leave them out"
            )
        if not measured:
            self._report_gaps(target)
            self._ask_about_classes(target, classes)
        if self._event is not None and (unit := infer_time_unit(target.name, np.unique(target.numbers))):
            self.questions.append(
                f"the time {target.name!r} may hold dates as {unit}: is it a time since the start of observation? Name "
                "another column by --target, or delete this question"
            )

    def _report_labels(self) -> None:
        """Report the labels of a multilabel task."""
        self._task = "multilabel"
        self.report.append(f"target: {_quote(column.name for column in self._labels)}, multilabel")
        for label in self._labels:
            self._say(label, f"1 if the label is present: {int(np.nansum(label.values))} of {len(label.present)} rows")
            if label.missing:
                self._say(
                    label, f"unknown in {label.missing} of {self._survey.rows} rows, which train the other labels"
                )

    def _ask_about_classes(self, target: ColumnProfile, classes: Mapping[str, int]) -> None:
        """Add a question about classes that may represent missing cells or a row of totals."""
        if target.kind != "number" or len(classes) < 3:
            return
        numbers = dict(sorted((float(name), name) for name in classes))
        counts = np.array([classes[name] for name in numbers.values()])
        if far := find_answer_codes(np.array([*numbers]), counts):
            cells = _quote([numbers[code] for code in far])
            self.questions.append(
                f"the target {target.name!r}: does the class {cells} mean missing? If so, add missing = [{cells}] and "
                "unlabelled = 'drop' to [data]. Else delete this question"
            )
        elif single := [name for name, count in classes.items() if count == 1]:
            self.questions.append(
                f"the target {target.name!r}: the class {_quote(single)} has one row: is it a row of totals, or "
                "an error? Delete the row, or this question"
            )

    @staticmethod
    def _describe_choice(chosen: ColumnProfile, is_given: bool, alternatives: Sequence[str]) -> str:
        if is_given:
            return repr(chosen.name)
        shown = [repr(name) for name in alternatives if name != chosen.name][:4]
        return f"{chosen.name!r} (not given{'; it may also be ' + ', '.join(shown) if shown else ''})"

    @property
    def _outcome(self) -> list[ColumnProfile]:
        """The target or labels, and the event, if known. Missing columns are omitted."""
        return [column for column in (*(self._labels or (self._target,)), self._event) if column is not None]

    def _choose_subject(self, option: str | None, by: str | None) -> None:
        """Choose the column that identifies the subject of a row. A column that names sites is never chosen."""
        survey = self._survey
        roles = [column.name for column in self._outcome]
        sites = survey.sites(roles)[0] if by is None else [by]
        sure, doubtful = survey.subjects([*roles, *sites])
        if option and option in (*roles, by):
            raise ConfigError(
                f"{survey.path}: {option!r} cannot be both --subject and the target or site. Name two different columns"
            )
        self._subject = survey.column(option, "--subject") if option else None
        if option is None and sure:
            self._subject = survey.columns[sure[0]]
        if (subject := self._subject) is not None:
            counts = np.unique(subject.present.astype(str), return_counts=True)[1]
            self.report.append(
                f"subject: {self._describe_choice(subject, option is not None, doubtful)}, {len(counts)} subjects of "
                f"{counts.min()} to {counts.max()} rows, which stay in one part of every split"
            )
            if lost := survey.rows - len(subject.present):
                self._say(subject, f"{lost} rows have no subject and are left out")
        elif option is None and doubtful:
            self.report.append(
                f"subject: no column certainly names the subject of a row. {_quote(doubtful)} may (add "
                "--subject, or '' for none)"
            )
        dates = [c for c in survey.columns.values() if c.kind == "date" and c.name not in roles]
        came = [
            c
            for c in dates
            if not BIRTH_NAME_PATTERN.search(c.name) and all(parse_seconds(level) is not None for level in c.levels)
        ]
        self._order = came[0] if came else None
        if self._order is not None:
            self._say(self._order, "dates. To test on later rows, set it as order (see the comment in the draft)")

    def _take_site(self, option: str | None) -> None:
        survey, target = self._survey, self._target
        sure, doubtful = survey.sites([column.name for column in self._outcome])
        has_target = np.ones(survey.rows, bool)
        if target is not None:
            present = [
                (column.cells != "") & ~np.isin(column.cells.astype(str), column.odd) for column in self._outcome
            ]
            has_target = np.any(present, 0) if self._labels else present[0]

        subject = self._subject
        if subject is not None:
            has_target &= subject.cells != ""

        def sizes(site: ColumnProfile) -> tuple[NDArray[np.str_], NDArray[np.int64]]:
            """Return the levels of a column, with the number of rows, or of subjects, that have each level."""
            here = has_target & (site.cells != "")
            if subject is None:
                return np.unique(site.cells[here].astype(str), return_counts=True)
            pairs = {*zip(site.cells[here].tolist(), subject.cells[here].tolist(), strict=True)}
            return np.unique(np.array([level for level, _ in sorted(pairs)], str), return_counts=True)

        def split(names: Sequence[str]) -> list[str]:
            return [name for name in names if (sizes(survey.columns[name])[1] >= MIN_SITE_ROWS).sum() >= 2]

        self._site = survey.column(option, "--client-column") if option else None
        if self._site is not None and any(self._site is column for column in self._labels or (target,)):
            raise ConfigError(f"{survey.path}: {option!r} would be the target. Name a different column with --target")
        if option is None and len(sure := split(sure)) > 1:
            question = f"which column names the site of a row? It may be {_quote(sure)}"
            flags = " or ".join(
                [*(f"--client-column {outcomes.quote_for_shell(name)}" for name in sure), "--client-column ''"]
            )
            self.questions.append(f"{question}; {outcomes.start_answer(survey)} {flags}")
            self.report.append(f"site: not clear: {self.questions[-1]}")
        elif option is None:
            self._site = survey.columns[sure[0]] if sure else None
        self._clients = max(2, min(10, int(has_target.sum()) // 50))
        if (site := self._site) is None:
            may = f"; {_quote(doubtful)} may" if option is None and (doubtful := split(doubtful)) else ""
            if len(sure) < 2 or option is not None:
                dealt = f"The rows are assigned to {self._clients} clients"
                self.report.append(f"site: no column names a site (--client-column does{may}). {dealt}")
            return
        names, counts = sizes(site)
        what = "rows" if subject is None else "subjects"
        keep, kept = counts >= MIN_SITE_ROWS, counts[counts >= MIN_SITE_ROWS]
        if len(kept) < 2:
            raise ConfigError(
                f"{survey.path}: only {len(kept)} of the {len(names)} sites of --client-column {site.name} have at "
                f"least {MIN_SITE_ROWS} {what}, but a federation needs two sites; {self._columns_hint}"
            )
        self.report.append(
            f"site: {self._describe_choice(site, option is not None, doubtful)}, {len(kept)} sites of {kept.min()} to "
            f"{kept.max()} {what}"
        )
        if without_site := survey.rows - len(site.present):
            self._say(site, f"{without_site} rows have no site and are left out")
        if not keep.all():
            self._say(site, f"sites with fewer than {MIN_SITE_ROWS} {what}, left out: {_quote(names[~keep].tolist())}")
        if (small := keep & (counts < MAX_FEW_LEVELS)).any():
            few = ", ".join(f"{n!r} ({c})" for n, c in zip(names[small].tolist(), counts[small], strict=True))
            self._say(site, f"sites with fewer than {MAX_FEW_LEVELS} {what}: {few}. Their results are uncertain")
        self._rows = {name: has_target & (site.cells == name) for name in names[keep].tolist()}
        classes = [*self._labels] or [column for column in (self._classes,) if column is not None]
        for column in classes:
            if lone := [n for n, here in self._rows.items() if len({*column.cells[here]} - {""}) == 1]:
                where = f" of {column.name!r}" if self._labels else ""
                self._say(site, f"sites with only one class{where}: {_quote(lone)}")
        for column in classes:
            self._ask_about_events(column)
        self._report_gaps(site)

    def _ask_about_events(self, target: ColumnProfile) -> None:
        """Add a question about the rarest class, with its rows at each site and the sites that have few of them."""
        counts = by_site.count_classes_by_site(target, self._rows)
        totals = {name: sum(count[name] for count in counts.values()) for name in next(iter(counts.values()))}
        rare = min(totals, key=lambda name: totals[name])
        if self._event is not None:
            rare = next(name for name in totals if float(name) == 1)
        shown = ", ".join(
            f"{site!r} {count[rare]} of {sum(count.values())}" for site, count in list(counts.items())[:MAX_SHOWN_NAMES]
        )
        more = f" and {len(counts) - MAX_SHOWN_NAMES} sites more" if len(counts) > MAX_SHOWN_NAMES else ""
        self._say(target, f"{rare!r} by site: {shown}{more}")
        if few := [site for site, count in counts.items() if count[rare] < MIN_FEDERATION_ROWS]:
            self._say(
                target,
                f"fewer than {MIN_FEDERATION_ROWS} rows of {rare!r} at {_quote(few)}: too few to score a model there",
            )

    def _take_features(self, alternatives: Sequence[str]) -> None:
        survey = self._survey
        roles = (*self._outcome, self._site, self._subject)
        candidates = [c for c in survey.columns.values() if not any(c is role for role in roles)]
        twins = dict(survey.find_duplicates([c.name for c in candidates if c.kind != "empty"]))
        self._shifts = dict[str, dict[str, by_site.Shift]]()
        self._categorical, self._impute, self._width = list[str](), False, 0
        self._odd = list(self._target.odd) if self._target is not None and self._target.kind == "number" else []
        may_be = {*alternatives} if self._target is None else set[str]()
        clashes = self._clashing_numbers([c for c in candidates if c.kind == "number"])
        for c in candidates:
            if c.name not in may_be and (reason := self._reason_to_drop(c, twins)):
                self._drop[c.name] = reason
                self._say(c, f"{reason}; left out")
                continue
            if c.kind == "text":
                self._categorical.append(c.name)
                self._say(c, f"text of {len(c.levels)} levels, a feature for each: {_quote(c.levels)}")
                self._report_gaps(c)
            elif c.odd:
                self._odd += [odd for odd in c.odd if odd not in self._odd]
                self._say(c, f"numbers, except for {_quote(c.odd)}, which are treated as missing")
            if c.doubts:
                self.questions.append(
                    f"column {c.name!r}: do the cells {_quote(c.doubts)} mean missing, as in the "
                    "draft? Repair them in the table, or delete this question"
                )
            if c.extremes:
                self._odd += [odd for odd in map(level_name, c.extremes) if odd not in self._odd]
                shown = ", ".join(f"{level_name(odd)} in {count}" for odd, count in c.extremes.items())
                span = f"{c.numbers.min():g} to {c.numbers.max():g}"
                self._say(c, f"{shown} cells, far from the rest ({span}): treated as missing")
            for odd, clash in clashes.items():
                if odd in c.extremes and clash:
                    self.questions.append(
                        f"column {c.name!r}: does {odd} mean missing? It is an ordinary number in "
                        f"{_quote(clash)}, but the draft treats it as missing there too. Empty the "
                        "cells of the table, or delete this question"
                    )
            for sentence in by_site.note_site_differences(c, self._rows):
                self._say(c, sentence)
            if shifted := by_site.find_site_shifts(c, self._rows):
                self._shifts[c.name] = shifted
            if c.missing:
                self._impute = True
                what = (
                    "most of the column, so consider leaving it out"
                    if c.missing > survey.rows / 2
                    else "filled per client"
                )
                self._say(c, f"{c.missing} of {survey.rows} cells are missing ({c.missing / survey.rows:.0%}), {what}")
            self._width += (len(c.levels) if c.kind == "text" else 1) + bool(c.missing)
        if not self._width:
            raise ConfigError(f"{survey.path}: no column is left as a feature:\n" + "\n".join(self.report[1:]))

    @staticmethod
    def _clashing_numbers(numbers: list[ColumnProfile]) -> dict[str, list[str]]:
        """Return numbers that mark missing cells in some columns, and the columns where they are ordinary values."""
        marks = {level for c in numbers for level in c.extremes}
        return {
            mark: [c.name for c in numbers if mark not in c.extremes and float(mark) in c.numbers] for mark in marks
        }

    def _reason_to_drop(self, c: ColumnProfile, twins: dict[str, str]) -> str:
        """Return the reason why a column is not used as a feature, or "" if it is a feature."""
        if c.kind == "empty":
            return "empty"
        if c.constant:
            return f"the same in every row, {next(level for level in c.levels if level not in c.odd)!r}"
        if c.name in twins:
            return f"the same as {twins[c.name]!r}"
        if what := c.personal:
            return f"{what}, which identify patients"
        if is_repeated_unit(c.name, c.levels, len(c.present)) and (
            c.is_integer or (c.kind == "text" and names_person(c.name))
        ):
            return "identifies patients or similar, and its values repeat"
        if what := c.quantity:
            return f"numbers with {what}. Plain numbers would be a feature"
        if c.identifies:
            return "identifies rows"
        if c.kind == "date":
            return "dates. days_since converts them to a feature: days since another column, or since a date"
        if (
            c.kind == "text"
            and len(c.levels) > MAX_FEW_LEVELS
            and self._survey.rows < MIN_ROWS_PER_LEVEL * len(c.levels)
        ):
            return f"text of {len(c.levels)} levels in {self._survey.rows} rows. Group them to use it"
        if lone := by_site.single_site_with_values(c, self._rows):
            return f"has values only at {lone!r}, so it identifies that site"
        shares = [by_site.score_column(c, one, self._kind_of(one)) for one in self._outcome]
        share = max(shares, key=lambda one: one.value, default=by_site.SingleColumnScore(0.0, ""))
        if share.value >= LEAK_SHARE:
            return f"alone predicts the target almost perfectly ({share.text}), so it may be recorded afterwards"
        later = bool(LATER_NAME_PATTERN.search(c.name))
        if share.value >= SUSPICIOUS_SCORE or (later and share.value >= LATER_COLUMN_SCORE):
            self._say(
                c, f"predicts the target almost perfectly ({share.text}). Leave it out unless it is known beforehand"
            )
        elif later:
            self._say(c, "is known only later, judging by its name. Leave it out unless it is known beforehand")
        return ""

    def _kind_of(self, column: ColumnProfile) -> str:
        """Return "classification" if the column contains the classes of the outcome, otherwise "regression"."""
        return "classification" if self._labels or column is self._classes else "regression"

    def _report_gaps(self, c: ColumnProfile) -> None:
        """Report the levels of a column that may represent a missing value."""
        if missing := [level for level in c.levels if level.strip().lower() in POSSIBLE_LEVEL_TOKENS]:
            self._say(c, f"{_quote(missing)} may mean missing. Add such cells to missing and set impute = true")

    def agreement(self, data: Dataset) -> Agreement:
        """Return the agreement that sites would sign, based on the drafted data.

        The agreement leaves units unspecified and takes ranges from the table.

        Args:
            data: data that were read according to the draft.
        """
        assert isinstance(data.prepare, Table)
        ranges = []
        for k, column in enumerate(data.prepare.columns):
            values = data.x[:, k]
            values = values[~values.isnan()]
            spread = None if column.levels or not len(values) else (float(values.min()), float(values.max()))
            ranges.append(None if spread is None or spread[0] == spread[1] else spread)
        columns = tuple(c.with_(range=r) for c, r in zip(data.prepare.columns, ranges, strict=True))
        table = data.prepare.with_(columns=columns, missing=tuple(self._odd), impute=True)
        event = None if self._event is None else self._event.name
        target = None if self._target is None or self._labels else self._target.name
        subject = self._subject
        agreed = Agreement.create(table, data.task, data.classes, target, data.centre, data.unit, event)
        agreed = agreed if subject is None else agreed.with_(subject=subject.name)
        return agreed.drop_rare_levels({c.name: survey_levels(self._survey.columns[c.name], subject) for c in columns})

    def text(self, place: Path, agreement: Path | None = None) -> str:
        """Return the text of the experiment file (see `experiment_file_text`)."""
        roles = ColumnRoles(
            self._survey, self._task, self._target, self._event, self._site, self._categorical, self._drop, self._odd,
            self._impute, self._shifts, self._clients, self._width, self.questions, self._subject, self._order,
            self._labels,
        )  # fmt: skip
        return experiment_file_text(roles, place, agreement)


def unnamed_level_notes(data: Dataset, agreement: Agreement) -> list[str]:
    """Return a sentence for each column with levels that an agreement does not name.

    Args:
        data: data that contain all levels.
        agreement: agreement of the data.
    """
    assert isinstance(data.prepare, Table)
    named = {column.name: column.levels for column in agreement.column}
    sentences, few = [], f"with fewer than {agreement.level_rows} rows (level_rows)"
    for column in data.prepare.columns:
        if column.name not in named:
            sentences.append(f"agreement: column {column.name!r} is left out, because most of its levels are {few}")
        elif lost := len(column.names) - len(named[column.name]):
            sentences.append(f"agreement: column {column.name!r}: {lost} levels {few} are not named, but filled")
    return sentences


def survey_levels(column: ColumnProfile, subject: ColumnProfile | None = None) -> dict[str, int]:
    """Return the number of rows, or of subjects, for each level of a column.

    Levels are named as they are in data sets.
    """
    counts = Counter[str]()
    if subject is not None:
        pairs = {*zip(column.cells.tolist(), subject.cells.tolist(), strict=True)}
        return dict(Counter(level_name(name) for name, _ in pairs if name != ""))
    for name, rows in column.levels.items():
        counts[level_name(name)] += rows
    return counts


def _quote(names: Iterable[object]) -> str:
    return shorten_list([*map(repr, names)], MAX_SHOWN_NAMES)
