"""What the terminal shows of a running experiment: bars in a terminal, plain lines in a pipe; and the result table."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedloom.experiment import Plan
from fedloom.experiment.telling import Now, Tell
from fedloom.metrics import COSTS, METRICS, leading, metric

SECONDS_PER_LINE = 5.0
"""Time between two plain lines of one run."""


@contextmanager
def shown(plan: Plan) -> Iterator[Tell]:
    """Shows the progress of a plan, on rank 0; gives the function to be told of every round."""
    if plan.ranks.rank > 0:
        yield lambda *_: None
        return
    with counted(plan.rounds) as tell:
        yield tell


@contextmanager
def counted(total: int) -> Iterator[Tell]:
    """Shows the progress of runs that have ``total`` rounds together; gives the function to be told of every round."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(total)
        return
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, TextColumn("{task.fields[figures]}"), console=console) as bars:
        everything = bars.add_task("all runs", total=total, figures="")
        rows: dict[tuple[str, int], Any] = {}
        done: dict[tuple[str, int], int] = {}

        def tell(label: str, seed: int, rounds: int, now: Now | None) -> None:
            key, at = (label, seed), rounds if now is None else now.round
            if done.get(key) == rounds:
                return
            if key not in rows:
                rows[key] = bars.add_task(f"{label}, seed {seed}", total=rounds, figures="")
            done[key] = at
            bars.update(rows[key], completed=at)
            if now is not None and now.figures:
                bars.update(rows[key], figures=_latest(now))
            if at == rounds:
                bars.remove_task(rows[key])
            bars.update(everything, completed=sum(done.values()))

        yield tell


class _Lines:
    """Plain lines: one for every run that ends, and one every few seconds of a long one."""

    def __init__(self, total: int) -> None:
        self.start = self.last = time.monotonic()
        self.total = total
        self.done: dict[tuple[str, int], int] = {}
        self.figures: dict[tuple[str, int], str] = {}

    def __call__(self, label: str, seed: int, rounds: int, now: Now | None) -> None:
        key, at, time_now = (label, seed), rounds if now is None else now.round, time.monotonic()
        if self.done.get(key) == rounds:
            return
        self.done[key] = at
        if now is not None and now.figures:
            self.figures[key] = _latest(now)
        if at < rounds and time_now - self.last < SECONDS_PER_LINE:
            return
        self.last, finished = time_now, sum(self.done.values())
        left = (time_now - self.start) / finished * (self.total - finished)
        figures = self.figures.get(key, "")
        sys.stdout.write(f"{label}, seed {seed}: round {at}/{rounds}{figures}, about {left:.0f} s left\n")
        sys.stdout.flush()


def _latest(now: Now) -> str:
    """The newest validation figures of the personal model, of the global one where there is none."""
    figures = now.figures[max(now.figures)]
    for model in ("personal", "global"):
        found = {name: figures.get(f"{model}/validation/{name}/mean") for name in METRICS}
        there = {name: value for name, value in found.items() if value is not None}
        if there:
            texts = [f"{name} {there[name]:.4g}" for name in dict.fromkeys(("loss", leading(there))) if name in there]
            return f", {model} validation {', '.join(texts)}"
    return ""


def print_table(table: pa.Table) -> None:
    """The result table on standard output: mean over seeds with 95 % confidence interval, and the work it took."""
    lead = leading(table.column_names)
    scale = metric(lead).scale
    columns: dict[str, tuple[str, float]] = {
        f"test {lead}": (lead, scale),
        "worst 10 %": (f"{lead}_worst10", scale),
        "calibration error": ("calibration_error", 1),
        "variance of losses": ("loss_variance", 1),
        "steps": ("steps", 1),
        "samples": ("samples_backward", 1),
        "MB up": ("bytes_up", COSTS["bytes_up"].scale),
        "MB down": ("bytes_down", COSTS["bytes_down"].scale),
    }
    there = {title: c for title, c in columns.items() if c[0] in table.column_names}
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("method", "model", "seeds", *there, "status"):
        shown.add_column(title, justify="left" if title in ("method", "model", "status") else "right")
    for row in table.to_pylist():
        figures = [_figure(row[key], row[f"{key}_ci95"], scale) for key, scale in there.values()]
        shown.add_row(row["method"], row["model"], str(row["seeds"]), *figures, row["status"])
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(shown)


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows of a table on standard output; the columns are the keys of all rows, in the order in which they come."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        number = any(isinstance(row.get(name), int | float) for row in rows)
        shown.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(_cell(row.get(name)) for name in columns))
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(shown)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _figure(value: float | None, interval: float | None, scale: float) -> str:
    if value is None:
        return "-"
    value *= scale
    digits = 0 if value == int(value) or abs(value) >= 1000 else 2 if abs(value) >= 1 else 4
    around = "" if not interval or not math.isfinite(interval) else f" ± {interval * scale:.{digits}f}"
    return f"{value:.{digits}f}{around}"
