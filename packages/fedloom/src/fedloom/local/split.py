"""Split of each client's training samples into two subsets for methods that hold out samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom.seeds import generator

if TYPE_CHECKING:
    from fedloom.local.work import Work


def split(work: Work, share: float) -> tuple[Work, Work]:
    """Hold out ``share`` of each client's training samples. Return the work on the rest and on the held-out samples.

    The split is drawn once for each client and remains the same in all rounds. Each subset has at least one sample. A
    client with only one sample uses it in both subsets. Steps, batches and `Work.loss` use only the subset. All other
    results use all of the client's samples.
    """
    rest, held = list[Tensor](), list[Tensor]()
    for i, size in zip(work.ids.tolist(), work.sizes[:, 0].tolist(), strict=True):
        order = torch.randperm(size, generator=generator(work.seed, client=i, purpose="split"))
        count = max(1, min(round(share * size), size - 1))
        rest.append(order[count:] if size > 1 else order)
        held.append(order[:count])
    return _restrict_work(work, rest), _restrict_work(work, held)


def _restrict_work(work: Work, parts: Sequence[Tensor]) -> Work:
    """Restrict the work to samples at the given positions in the training sets (one tensor per client)."""
    places, sizes = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True), [[len(p)] for p in parts]
    other = work.with_(places=places, sizes=torch.tensor(sizes).to(work.sizes))
    if work.local.steps is not None or work.fixed_batches is not None:
        return other
    return other.with_(steps=torch.minimum(work.steps, work.passes() * other.batches().to(work.steps)))
