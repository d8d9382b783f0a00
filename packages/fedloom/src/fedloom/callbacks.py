"""Callbacks: functions that `fedloom.simulate` calls with the run's state after every round.

A callback is any function with the signature ``f(state)``. Callbacks must not modify the state. If a callback returns a
sentence, the run ends after this round. The round's models are still evaluated. The sentence is stored in
`Result.detail`. A callback that raises `fedloom.errors.RunStopped` ends the run immediately. Any other `Exception` that
a callback raises becomes a warning and a note in the result. The run continues and calls the callback again after the
next round.

If a callback's decisions depend only on ``state.records``, a restart does not affect them, because every checkpoint
contains the records of all rounds. Data that a callback stores in itself are lost at a restart. A run that a callback
ended is complete: running it again gives the same result.

    history = fl.callbacks.History()
    fl.simulate(method, fed, callbacks=[history, fl.callbacks.EarlyStop(patience=5)])
    history.table()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa
from pydantic import Field

from fedloom.engine.early_stop import EarlyStop as EarlyStop
from fedloom.engine.records import Records
from fedloom.engine.state import State
from fedloom.lazy import import_display, make_dir
from fedloom.values import Value

if TYPE_CHECKING:
    from altair import LayerChart


class VirtualTime(Value):
    """Callback that ends a run when the run's clock exceeds a limit in seconds."""

    seconds: float = Field(gt=0, description="maximum simulated time in seconds, for runs with devices")

    def __call__(self, state: State) -> str | None:
        """Return the sentence that ends the run, or None to continue."""
        if state.clock is None or state.clock.now < self.seconds:
            return None
        return f"{state.clock.now:.6g} simulated seconds have passed (limit: {self.seconds:.6g})"


class History:
    """Callback that collects a run's measurements during the run.

    Measurements from before a restart are included.

    Args:
        show: function that is called with this history after every evaluation. In a notebook, use ``handle =
            display(display_id=True). History(show=handle.update)`` plots a live curve.
    """

    def __init__(self, show: Callable[[History], object] | None = None) -> None:
        self._show, self._records, self.round = show, Records(), 0

    def __call__(self, state: State) -> None:
        """Record a round's measurements."""
        self._records, self.round = state.records, state.round
        if self._show is not None and state.records.items and state.records.items[-1].round == state.round:
            self._show(self)

    def table(self) -> pa.Table:
        """Return the measurements as a tidy table with the same columns as `fedloom.engine.result.Result.table`."""
        return self._records.table()

    def chart(self, metric: str | None = None, part: str = "test") -> LayerChart:
        """Return an Altair chart of one metric by round (see `fedloom.lazy.import_display`)."""
        chart: LayerChart = import_display().draw_curve(self.table(), metric, part)
        return chart

    def _repr_html_(self) -> str:
        page: str = import_display().notebook_page(self.table(), f"round {self.round}")
        return page


__dir__ = make_dir(__name__)
