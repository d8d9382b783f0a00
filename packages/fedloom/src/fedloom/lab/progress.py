"""Progress of a running experiment, shown as bars in a terminal, a line in a notebook, or plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from html import escape
from typing import TYPE_CHECKING, Any

from fedloom.formats import format_duration, format_significant
from fedloom.metrics import METRICS, leading

if TYPE_CHECKING:
    from fedloom.lab.experiment import Plan
    from fedloom.lab.experiment.events import Event, Listener

SECONDS_PER_LINE = 5.0
"""Minimum number of seconds between two plain lines about one run."""
NOTEBOOK_INTERVAL_SECONDS = 0.2
"""Minimum number of seconds between two updates of the line in a notebook."""


def print_remark(line: str) -> None:
    """Write a line to standard error. The line is dropped if the stream is closed or full, or if its reader is gone."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


@contextmanager
def show_progress(plan: Plan) -> Iterator[Listener]:
    """Show an experiment's progress (on rank 0 only), and yield a function that must be called with its events."""
    if plan.ranks.rank > 0:
        yield lambda _event: None
        return
    with count_progress(plan.rounds, "saving models and tables") as hear:
        yield hear


@contextmanager
def count_progress(rounds: int | Mapping[str, int], after: str = "") -> Iterator[Listener]:
    """Show the progress of several runs, and yield a function that must be called with their events.

    Args:
        rounds: total number of rounds of all runs, or number of rounds for each label.
        after: description of the work after the last round, which may take some time.
    """
    from rich.console import Console  # slow to import
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    runs, console = _RunsProgress(rounds, after), Console(stderr=True)
    if (display := notebook_display()) is not None:
        line = _NotebookLine(runs, display)
        yield line
        line.end()
        return
    if not console.is_terminal:
        yield _ProgressLines(runs)
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
            if not runs.update(event):
                return
            key = event.label, event.seed
            if event.diverged:
                bars.print(f"{_run_name(event)}: {event.diverged}", markup=False)
            if event.status:
                bars.remove_task(rows.pop(key)) if key in rows else None
            else:
                if key not in rows:
                    rows[key] = bars.add_task(_run_name(event), total=event.rounds, line="")
                left = runs.estimate_run_remaining(event)
                words = [runs.figures.get(key, ""), "" if left is None else f"{format_duration(left / 60)} left"]
                bars.update(rows[key], completed=event.round, line=", ".join(filter(None, words)))
            left = runs.estimate_remaining()
            line_of_all = runs.closing_text or ("" if left is None else f"about {format_duration(left / 60)} left")
            bars.update(everything, completed=sum(runs.done.values()), line=line_of_all)

        yield hear


def notebook_display() -> Any:
    """Return the function that displays a value in the current notebook, or None outside of notebooks."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return sys.modules["IPython"].display.display if hasattr(shell, "kernel") else None


class _RunsProgress:
    """Progress and speed of several runs.

    Attributes:
        rounds: number of rounds, keyed by label. The key "" represents all runs together.
        done: number of completed rounds, keyed by label and seed. For a run that has ended, this is its total number of
            rounds.
        figures: latest metrics of each run, formatted as text and keyed by label and seed.
    """

    def __init__(self, rounds: int | Mapping[str, int], after: str = "") -> None:
        self.rounds: Mapping[str, int] = {"": rounds} if isinstance(rounds, int) else rounds
        self._after = after
        self.done: dict[tuple[str, int], int] = {}
        self.figures: dict[tuple[str, int], str] = {}
        self._going: dict[tuple[str, int], Event] = {}
        self._measured: dict[tuple[str, int], tuple[int, str]] = {}
        self._pace: dict[str, float] = {}

    def update(self, event: Event) -> bool:
        """Update the progress from an event. Return False if the event contains nothing new."""
        key = event.label, event.seed
        if self.done.get(key) == event.rounds and not event.status:
            return False
        self.done[key] = event.rounds if event.status else event.round
        if event.figures:
            self._measured[key] = max(event.figures), _latest_metrics(event)
        if key in self._measured:
            round, text = self._measured[key]
            self.figures[key] = f"{text} (round {round})" if text and round < event.round else text
        if event.pace is not None:
            self._pace[self._owner(event.label)] = event.pace
        self._going[key] = event
        if event.status or event.round == event.rounds:
            del self._going[key]
        return True

    @property
    def closing_text(self) -> str:
        """Description of the work in progress after all runs have ended, or "" before that."""
        return self._after if sum(self.done.values()) == sum(self.rounds.values()) else ""

    def estimate_remaining(self) -> float | None:
        """Return the estimated time in seconds until all runs have ended.

        The number of simultaneous runs is assumed to stay the same. Return None while this time is unknown.
        """
        open_ = dict(self.rounds)
        for (label, _), done in self.done.items():
            open_[self._owner(label)] -= done
        needed = {label for label, rounds in open_.items() if rounds > 0}
        if not needed <= self._pace.keys():
            return None
        alone = [self.estimate_run_remaining(event) or 0.0 for event in self._going.values()]
        work = sum(open_[label] * self._pace[label] for label in needed)
        return max([work / max(1, len(alone)), *alone])

    def estimate_run_remaining(self, event: Event) -> float | None:
        """Return the estimated time in seconds until a run ends, or None while it is unknown."""
        return None if event.pace is None else (event.rounds - event.round) * event.pace

    def _owner(self, label: str) -> str:
        return label if label in self.rounds else ""


class _ProgressLines:
    """Progress as plain lines of text: one at the end of every run, and one every few seconds during long runs."""

    def __init__(self, runs: _RunsProgress) -> None:
        self._runs, self._last = runs, time.monotonic()
        self._ended: set[tuple[str, int]] = set()

    def __call__(self, event: Event) -> None:
        key, now = (event.label, event.seed), time.monotonic()
        if not self._runs.update(event):
            return
        if event.diverged:
            print_remark(f"{_run_name(event)}: {event.diverged}")
        end = event.round == event.rounds
        if key in self._ended or event.status == "interrupted" or (not (end or event.status) and self._must_wait(now)):
            return
        self._ended |= {key} if end or event.status else set()
        self._last, left, left_of_run = now, self._runs.estimate_remaining(), self._runs.estimate_run_remaining(event)
        parts = [f"round {event.round}/{event.rounds}", self._runs.figures.get(key, "")]
        parts += [event.status] if event.status and not end else []
        if left is not None and left >= 0.5:
            parts.append(f"about {format_duration(left / 60)} left")
        elif left_of_run is not None and not end:
            parts.append(f"about {format_duration(left_of_run / 60)} left of this run")
        print_remark(f"{_run_name(event)}: {', '.join(filter(None, parts))}")
        if self._runs.closing_text:
            print_remark(self._runs.closing_text)

    def _must_wait(self, now: float) -> bool:
        return now - self._last < SECONDS_PER_LINE


class NotebookOutput:
    """Notebook output as HTML, or as plain text if the front end does not support HTML."""

    def __init__(self, markup: str, text: str) -> None:
        self._markup, self._text = markup, text

    def _repr_html_(self) -> str:
        return self._markup

    def __repr__(self) -> str:
        return self._text


class _NotebookLine:
    """One line with a progress bar and a description of the current run, updated in place.

    At the end, the line states the number of runs and the elapsed time.
    """

    def __init__(self, runs: _RunsProgress, display: Callable[..., Any]) -> None:
        self._runs, self._display = runs, display
        self._began, self._last = time.monotonic(), -math.inf
        self._handle: Any = None
        self._cut: set[tuple[str, int]] = set()

    def __call__(self, event: Event) -> None:
        if event.status == "interrupted":
            self._cut.add((event.label, event.seed))
        if not self._runs.update(event):
            return
        if event.diverged:
            self._display(
                NotebookOutput(escape(f"{_run_name(event)}: {event.diverged}"), f"{_run_name(event)}: {event.diverged}")
            )
        now = time.monotonic()
        if self._runs.closing_text:
            self._show(NotebookOutput(escape(self._runs.closing_text), self._runs.closing_text))
        if now - self._last < NOTEBOOK_INTERVAL_SECONDS or self._runs.closing_text:
            return
        self._last, left = now, self._runs.estimate_remaining()
        done, total = sum(self._runs.done.values()), sum(self._runs.rounds.values())
        words = [
            f"{_run_name(event)}, round {event.round}/{event.rounds}",
            self._runs.figures.get((event.label, event.seed), ""),
        ]
        words += [] if left is None else [f"about {format_duration(left / 60)} left"]
        text = f"{done}/{total} rounds: {', '.join(filter(None, words))}"
        self._show(NotebookOutput(f'<progress value="{done}" max="{total}"></progress> {escape(text)}', text))

    def end(self) -> None:
        """Replace the progress bar with a summary."""
        count = len(self._runs.done)
        text = f"{count} run{'' if count == 1 else 's'} in {format_duration((time.monotonic() - self._began) / 60)}"
        text = f"interrupted: {count - len(self._cut)} of {text}" if self._cut else text
        self._show(NotebookOutput(escape(text), text))

    def _show(self, line: NotebookOutput) -> None:
        if self._handle is None:
            self._handle = self._display(line, display_id=True)
        else:
            self._handle.update(line)


def _run_name(event: Event) -> str:
    return f"{event.label}, seed {event.seed}"


def _latest_metrics(event: Event) -> str:
    """Return the latest validation metrics of the personal model, or else of the global model."""
    figures = event.figures[max(event.figures)]
    for model in ("personal", "global"):
        places = {name: f"{model}/validation/{name}" for name in METRICS}  # secure sums provide only weighted means
        by_metric = {name: figures.get(f"{at}/mean", figures.get(f"{at}/weighted")) for name, at in places.items()}
        by_name = {name: value for name, value in by_metric.items() if value is not None}
        if by_name:
            texts = [
                f"{name} {format_significant(by_name[name])}"
                for name in dict.fromkeys(("loss", leading(by_name)))
                if name in by_name
            ]
            return f"{model} validation {', '.join(texts)}"
    return ""
