"""State of a run between rounds: all that a checkpoint needs beside the clients' rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedloom.algorithms._base import Kept, kept_term
from fedloom.engine.job import Job
from fedloom.engine.records import Records
from fedloom.processes.chunks import COUNTS


@dataclass(frozen=True)
class State:
    """A run after a round.

    Attributes:
        round: rounds done.
        server: the method's server state.
        sampler: state of the sampler.
        weigher: state of the weigher.
        aggregator: state of the aggregator.
        sums: float64 sums over all clients of the rows that the server keeps, by field.
        totals: ``[8]`` `COUNTS` and dropped uploads, over all rounds.
        uploads: ``[n]`` rounds in which every client sent something.
        cohort: ``[m]`` clients of the last round.
        records: what was measured.
        notes: sentences on dropped clients and such.
    """

    round: int
    server: Any
    sampler: Any
    weigher: Any
    aggregator: dict[str, Tensor]
    sums: dict[str, Tensor]
    totals: Tensor
    uploads: Tensor
    cohort: Tensor
    records: Records = field(default_factory=Records)
    notes: list[str] = field(default_factory=list)

    def with_(self, **changes: Any) -> State:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def tensors(self) -> dict[str, Tensor]:
        """Everything by name, for a checkpoint."""
        named: dict[str, Tensor] = {"totals": self.totals, "uploads": self.uploads, "cohort": self.cohort}
        for group, value in (("server", self.server), ("sampler", self.sampler), ("weigher", self.weigher)):
            named |= {f"{group}.{name}": t for name, t in zip(value._fields, value, strict=True)}
        named |= {f"aggregator.{name}": t for name, t in self.aggregator.items()}
        named |= {f"sums.{name}": t for name, t in self.sums.items()}
        return named | {f"records.{name}": t for name, t in self.records.tensors().items()}

    def restored(self, round: int, tensors: dict[str, Tensor], notes: list[str]) -> State:
        """This run's state after another round, from `tensors`; ``self`` gives the types."""

        def group(name: str) -> dict[str, Tensor]:
            return {k.partition(".")[2]: t for k, t in tensors.items() if k.partition(".")[0] == name}

        def like(value: Any, name: str) -> Any:
            found = group(name)
            return type(value)(*[found[f].to(t.device) for f, t in zip(value._fields, value, strict=True)])

        return State(
            round,
            like(self.server, "server"),
            like(self.sampler, "sampler"),
            like(self.weigher, "weigher"),
            group("aggregator"),
            group("sums"),
            tensors["totals"],
            tensors["uploads"],
            tensors["cohort"],
            Records.from_tensors(group("records")),
            notes,
        )


def initial_state(job: Job, server: Any) -> State:
    """The state before the first round."""
    ctx = job.ctx(0)
    kept = job.kept.template
    fields = {name: kind for name, kind in job.fields.items() if isinstance(kind, Kept)}
    sums = {name: job.n * kept_term(kind, name, kept).double() for name, kind in fields.items()}
    totals = torch.zeros(len(COUNTS) + 1, dtype=torch.long)
    aggregator = {} if job.aggregator is None else job.aggregator.init(ctx)
    uploads = torch.zeros(job.n, dtype=torch.long)
    return State(
        0,
        server,
        job.sampler.init(ctx),
        job.weigher.init(ctx),
        aggregator,
        sums,
        totals,
        uploads,
        ctx.ids,
        notes=list(job.notes),
    )
