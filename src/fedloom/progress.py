"""Show a running experiment on standard error, as bars or as lines, and print tables on standard output."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from fedloom.errors import printable
from fedloom.formats import DASH, duration, option, pair, significant
from fedloom.metrics import METRICS, leading
from fedloom.report.naming import figure
from fedloom.report.tables import column_of, headline, measured

if TYPE_CHECKING:
    from fedloom.experiment import Plan
    from fedloom.experiment.events import Event, Listener

SECONDS_PER_LINE = 5.0
"""Time between two plain lines of one run."""
COLUMN = 12
"""Characters that a folded column has at least."""
UNFOLDED = 100_000
"""Characters of a line that no table reaches."""


@contextmanager
def shown(plan: Plan) -> Iterator[Listener]:
    """Shows the progress of a plan, on rank 0; gives the listener for its events."""
    if plan.ranks.rank > 0:
        yield lambda _event: None
        return
    with counted(plan.rounds) as hear:
        yield hear


@contextmanager
def counted(rounds: int | Mapping[str, int]) -> Iterator[Listener]:
    """Shows the progress of runs; gives the listener for their events.

    Args:
        rounds: of all runs together, or of the runs of every label.
    """
    runs, console = _Runs(rounds), Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(runs)
        return
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[line]}", markup=False),
    ]
    with Progress(*columns, console=console) as bars:
        everything = bars.add_task("all runs", total=sum(runs.rounds.values()), line="")
        rows: dict[tuple[str, int], Any] = {}

        def hear(event: Event) -> None:
            if not runs.take(event):
                return
            key = event.label, event.seed
            if event.diverged:
                bars.print(f"{_name(event)}: {event.diverged}", markup=False)
            if event.status:
                bars.remove_task(rows.pop(key)) if key in rows else None
            else:
                if key not in rows:
                    rows[key] = bars.add_task(_name(event), total=event.rounds, line="")
                left = runs.left_of(event)
                words = [runs.figures.get(key, ""), "" if left is None else f"{duration(left / 60)} left"]
                bars.update(rows[key], completed=event.round, line=", ".join(filter(None, words)))
            left = runs.left()
            line_of_all = "" if left is None else f"about {duration(left / 60)} left"
            bars.update(everything, completed=sum(runs.done.values()), line=line_of_all)

        yield hear


class _Runs:
    """How far runs are, and how fast.

    Attributes:
        rounds: of the runs of every label; of all runs together under the empty one.
        done: rounds done, by label and seed; all of a run that has ended.
        figures: the newest figures of every run, as text.
    """

    def __init__(self, rounds: int | Mapping[str, int]) -> None:
        self.rounds: Mapping[str, int] = {"": rounds} if isinstance(rounds, int) else rounds
        self.done: dict[tuple[str, int], int] = {}
        self.figures: dict[tuple[str, int], str] = {}
        self._going: dict[tuple[str, int], Event] = {}
        self._measured: dict[tuple[str, int], tuple[int, str]] = {}
        self._pace: dict[str, float] = {}

    def take(self, event: Event) -> bool:
        """Note an event; False if it has nothing new."""
        key = event.label, event.seed
        if self.done.get(key) == event.rounds and not event.status:
            return False
        self.done[key] = event.rounds if event.status else event.round
        if event.figures:
            self._measured[key] = max(event.figures), _latest(event)
        if key in self._measured:
            round, text = self._measured[key]
            self.figures[key] = f"{text} (round {round})" if text and round < event.round else text
        if event.pace is not None:
            self._pace[self._owner(event.label)] = event.pace
        self._going[key] = event
        if event.status or event.round == event.rounds:
            del self._going[key]
        return True

    def left(self) -> float | None:
        """Seconds until all runs have ended, those that go on side by side; None while that is not known."""
        open_ = dict(self.rounds)
        for (label, _), done in self.done.items():
            open_[self._owner(label)] -= done
        needed = {label for label, rounds in open_.items() if rounds > 0}
        if not needed <= self._pace.keys():
            return None
        alone = [self.left_of(event) or 0.0 for event in self._going.values()]
        work = sum(open_[label] * self._pace[label] for label in needed)
        return max([work / max(1, len(alone)), *alone])

    def left_of(self, event: Event) -> float | None:
        """Seconds until a run has ended."""
        return None if event.pace is None else (event.rounds - event.round) * event.pace

    def _owner(self, label: str) -> str:
        return label if label in self.rounds else ""


class _Lines:
    """Plain lines: one for every run that ends, and one every few seconds of a long one."""

    def __init__(self, runs: _Runs) -> None:
        self._runs, self._last = runs, time.monotonic()
        self._ended: set[tuple[str, int]] = set()

    def __call__(self, event: Event) -> None:
        key, now = (event.label, event.seed), time.monotonic()
        if not self._runs.take(event):
            return
        if event.diverged:
            self._write(f"{_name(event)}: {event.diverged}")
        end = event.round == event.rounds
        if key in self._ended or event.status == "interrupted" or (not (end or event.status) and self._waits(now)):
            return
        self._ended |= {key} if end or event.status else set()
        self._last, left, left_of_run = now, self._runs.left(), self._runs.left_of(event)
        parts = [f"round {event.round}/{event.rounds}", self._runs.figures.get(key, "")]
        parts += [event.status] if event.status and not end else []
        if left is not None and left >= 0.5:
            parts.append(f"about {duration(left / 60)} left")
        elif left_of_run is not None and not end:
            parts.append(f"about {duration(left_of_run / 60)} left of this run")
        self._write(f"{_name(event)}: {', '.join(filter(None, parts))}")

    def _waits(self, now: float) -> bool:
        return now - self._last < SECONDS_PER_LINE

    def _write(self, line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def _name(event: Event) -> str:
    return f"{event.label}, seed {event.seed}"


def _latest(event: Event) -> str:
    """The newest validation figures of the personal model, of the global one where there is none."""
    figures = event.figures[max(event.figures)]
    for model in ("personal", "global"):
        by_metric = {name: figures.get(f"{model}/validation/{name}/mean") for name in METRICS}
        by_name = {name: value for name, value in by_metric.items() if value is not None}
        if by_name:
            texts = [
                f"{name} {significant(by_name[name])}"
                for name in dict.fromkeys(("loss", leading(by_name)))
                if name in by_name
            ]
            return f"{model} validation {', '.join(texts)}"
    return ""


def print_texts(
    titles: Sequence[str], rows: Iterable[Iterable[str]], *, right: Collection[str] = (), width: int = 160,
    names: bool = False,
) -> None:  # fmt: skip
    """Texts in columns. Numbers are never folded: what does not fit follows below, beside the first columns again.

    Args:
        titles: of the columns.
        rows: a text for each column.
        right: titles of the columns that are aligned to the right.
        width: characters of a line where the output is no terminal.
        names: the first column has names that people copy; they are never folded. Where they leave no room for the
            other columns, these stand below each name.
    """
    texts = [[printable(text) for text in row] for row in rows]
    console = Console()
    if not console.is_terminal:
        console.width = width
    whole = _columns(titles, texts, range(len(titles)), right, names)
    if _width(console, whole) <= console.width or not texts:
        console.print(whole)
    elif names:
        longest = max(len(row[0]) for row in texts)
        if console.width - longest >= COLUMN * (len(titles) - 1):
            console.print(whole)
            return
        for first, *cells in texts:
            line = "; ".join(f"{title}: {text}" for title, text in zip(titles[1:], cells, strict=True) if text)
            indented = wrap(line, console.width, initial_indent="  ", subsequent_indent="  ")
            console.print(Text("\n".join([first, *indented])), soft_wrap=True)
    else:
        lead = next((place for place, title in enumerate(titles) if title in right), 1) or 1
        places = list(range(lead))
        for place in range(lead, len(titles)):
            wider = _columns(titles, texts, [*places, place], right)
            if len(places) > lead and _width(console, wider) > console.width:
                console.print(_columns(titles, texts, places, right))
                places = list(range(lead))
            places.append(place)
        console.print(_columns(titles, texts, places, right))


def _columns(
    titles: Sequence[str], rows: Sequence[Sequence[str]], places: Sequence[int], right: Collection[str],
    names: bool = False,
) -> Table:  # fmt: skip
    """The table of some columns."""
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for place in places:
        kept, justify = names and place == 0, "right" if titles[place] in right else "left"
        longest = max((cell_len(row[place]) for row in rows), default=0) if kept else None
        shown.add_column(titles[place], justify=justify, overflow="fold", no_wrap=kept, min_width=longest)  # type: ignore[arg-type]
    for row in rows:
        shown.add_row(*(Text(row[place]) for place in places))
    return shown


def _width(console: Console, table: Table) -> int:
    """Characters of a table's line with nothing folded."""
    return Measurement.get(console, console.options.update(max_width=UNFOLDED), table).maximum


def print_results(table: pa.Table) -> None:
    """The result table of a run: mean over seeds with 95 % confidence interval, and the work it took."""
    lead = leading(table.column_names)
    figures = {name: figure(name).title for name in headline(lead) if column_of(name) in table.column_names}
    figures |= {lead: f"test {lead}"} if lead in figures else {}
    titles = ("method", "model", "seeds", *map(_lower_first, figures.values()), "status")
    rows = [
        (
            row["method"], row["model"], str(row["seeds"]),
            *(_figure(name, row[column_of(name)], row[f"{column_of(name)}_ci95"]) for name in figures), row["status"],
        )
        for row in table.to_pylist()
    ]  # fmt: skip
    print_texts(titles, rows, right=titles[2:-1])


def print_rows(rows: Sequence[Mapping[str, object]], first: Sequence[str] = (), *, width: int = 200) -> None:
    """Rows of any keys, numbers with four digits.

    Args:
        rows: the columns are the keys of all, in the order in which they come.
        first: columns that come before them.
        width: characters of a line where the output is no terminal.
    """
    columns = list(dict.fromkeys([*first, *(name for row in rows for name in row)]))
    numbers = [name for name in columns if any(isinstance(row.get(name), int | float) for row in rows)]
    cells = [[DASH if row.get(name) is None else option(row[name]) for name in columns] for row in rows]
    print_texts(columns, cells, right=numbers, width=width)


def _figure(name: str, mean: float | None, half: float | None) -> str:
    return pair(*measured(name, math.nan if mean is None else mean, math.nan if half is None else half))


def _lower_first(title: str) -> str:
    """A title within a line; units and abbreviations as they are."""
    return title if title[1:2].isupper() else title[:1].lower() + title[1:]
