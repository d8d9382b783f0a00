"""Local training loop, in which each client takes its own number of steps and then drops out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from fedloom.local.rows import concat_rows, map_rows

if TYPE_CHECKING:
    from fedloom.local.work import Work
    from fedloom.seeds import Purpose

R = TypeVar("R")


def iterate(
    step: Callable[..., R],
    rows: R,
    work: Work,
    steps: Tensor | int | None = None,
    batches: int = 1,
    stream: Purpose = "local",
    until: Callable[[R, Work], Tensor] | None = None,
) -> R:
    """Repeat ``rows <- step(rows, work, *batches)`` as many times as each client needs.

    Args:
        step: function of the rows and the work of the unfinished clients, and of ``batches`` batches.
        rows: tensor or NamedTuple of tensors ``[m, .]``. It must contain all per-client values that ``step`` reads.
        work: the clients' local problems. In ``step``, ``work.k`` is the step number, counted from 0.
        steps: number of steps, ``[m, 1]`` or a scalar. If None, ``work.steps`` or the number of given batches.
        batches: number of batches that each step uses.
        stream: name of the stream of batches. Calls with the same stream use the same batches. Different streams use
            different orders of the samples.
        until: function that is called after each step and returns bool ``[m, 1]``. True ends a client's training.

    Returns:
        The rows after each client's last step, in the original order.
    """
    count = work.counted_steps(steps, batches)
    order = torch.argsort(count, descending=True, stable=True)
    if bool((order[1:] > order[:-1]).all()):
        return _iterate_sorted(step, rows, work, count, batches, stream, until)
    back = torch.argsort(order)
    out = _iterate_sorted(
        step, map_rows(lambda r: r[order], rows), work.take(order), count[order], batches, stream, until
    )
    return map_rows(lambda r: r[back], out)


def _iterate_sorted(
    step: Callable[..., R],
    rows: R,
    work: Work,
    count: Tensor,
    batches: int,
    stream: Purpose,
    until: Callable[[R, Work], Tensor] | None,
) -> R:
    """Run `iterate` for clients that are sorted by decreasing number of steps."""
    plan = work.plan(stream, count * batches) if batches else None
    finished: list[tuple[list[int], R]] = []
    alive, limits = list(range(work.m)), count.tolist()

    def keep(clients: slice | Tensor) -> None:
        nonlocal rows, work, plan
        rows, work = map_rows(lambda r: r[clients], rows), work.take(clients)
        plan = plan.take(clients) if plan else None

    for k in range(max(limits, default=0) + 1):
        going = len(alive)
        while going and limits[alive[going - 1]] <= k:
            going -= 1
        if going < len(alive):
            finished.append((alive[going:], map_rows(lambda r, start=going: r[start:], rows)))  # type: ignore[misc]
            alive = alive[:going]
            keep(slice(going))
        if not alive:
            break
        drawn = [plan.batch(k * batches + j) for j in range(batches)] if plan else []
        now = work.move_to_step(k)
        if drawn:
            now.count_steps()
        rows = step(rows, now, *drawn)
        if until is not None:
            done = until(rows, now)[:, 0].cpu()
            if bool(done.any()):
                ended, goes_on = done.nonzero()[:, 0], (~done).nonzero()[:, 0]
                done_rows = map_rows(lambda r, s=ended: r[s], rows) if len(goes_on) else rows  # type: ignore[misc]
                finished.append(([alive[i] for i in ended.tolist()], done_rows))
                alive = [alive[i] for i in goes_on.tolist()]
                keep(goes_on)
    if len(finished) == 1:
        return finished[0][1]
    back = torch.argsort(torch.tensor([i for where, _ in finished for i in where]))
    return map_rows(lambda r: r[back], concat_rows([part for _, part in finished]))
