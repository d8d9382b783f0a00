"""Job: everything about a run that all processes know and that is fixed before the first round."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom.choose import Mixer
from fedloom.choose.mixers import Rule
from fedloom.engine.problem import JobFacts
from fedloom.errors import ConfigError, attribute_error
from fedloom.local import Ctx, Nothing, Work
from fedloom.local.rows import Fields
from fedloom.processes.ranks import Ranks
from fedloom.processes.row_locations import RowLocations
from fedloom.storage.store import Store


@dataclass(frozen=True, kw_only=True)
class Job(JobFacts):
    """Facts about a run, storage for client states, and the processes that train the clients.

    Attributes:
        workers: number of worker processes that this process forks.
        ranks: distributed processes that run the job together.
        clients: states of the clients.
        kept: rows that the server stores for each client.
        models: each client's last model, if a mixer needs it and `kept` does not contain it.
        summed: sum of each client's uploads, for fields that accumulate (see `JobFacts.summed_fields`).
        residue: part of each client's updates that the channel has not sent yet.
        optimizer: each client's optimizer state, if it is stored.
        locations: record of the machines that hold each client's latest row.
    """

    workers: int
    ranks: Ranks
    clients: Store[Fields]
    kept: Store[Fields]
    models: Store[Fields]
    summed: Store[Fields]
    residue: Store[Fields]
    optimizer: Store[Fields]
    locations: RowLocations

    @property
    def stores(self) -> dict[str, Store[Fields]]:
        """Stores of all per-client states."""
        return {
            "clients": self.clients,
            "kept": self.kept,
            "models": self.models,
            "summed": self.summed,
            "residue": self.residue,
            "optimizer": self.optimizer,
        }

    @property
    def state_stores(self) -> dict[str, Store[Fields]]:
        """Stores of the clients' own states, keyed by the names in `fedloom.engine.clients.chunk.ClientState`."""
        return {"rows": self.clients, "residue": self.residue, "optimizer": self.optimizer}

    def drop_states(self) -> Job:
        """Return the job of a server whose clients store their own states."""
        none: Store[Fields] = Store(self.n, Nothing())
        locations = RowLocations(self.ranks, {**self.stores, "clients": none, "residue": none, "optimizer": none})
        return replace(self, clients=none, residue=none, optimizer=none, locations=locations, memory=None)

    def replace_shares(self, alpha: Tensor | None) -> Job:
        """Return the job with different client weights ``alpha [n, 1]`` in the objective and the same stores.

        If ``alpha`` is None, return this job.
        """
        return self if alpha is None else replace(self, alpha=alpha)

    def work(self, round: int, ids: Tensor, trains: bool = False, steps: Tensor | None = None) -> Work:
        """Return the clients' local problems in a round, with the replayed batches if the clients train.

        If ``steps [m]`` is given, it sets the number of steps of each client. If optimizer states are stored, the
        optimizers continue from the previous round.
        """
        local, seed, alpha = self.setting.local, self.setting.seed, self.alpha[ids].to(self.oracle.device)
        fixed_batches, projection = self.replay.fixed_batches(round, ids) if trains else None, self.replay.projection
        memory = None
        if trains and self.memory is not None:
            memory = self.memory.replace_rows(self.optimizer.read(ids)[0].to(self.oracle.device, copy=True))
        return Work(
            self.oracle, ids, alpha, local, seed=seed, round=round, steps=steps, fixed_batches=fixed_batches,
            projection=projection, memory=memory,
        )  # fmt: skip

    def changed_from(self, down: Fields, up: Fields, ids: Tensor) -> Tensor:
        """Return the model relative to which the server measures an upload's change (see `Messages.tracks`)."""
        if not self.messages.tracks:
            return self.algorithm.received(down, up)
        row: Tensor = getattr(self.kept.read(ids), self.primary)
        return row.to(self.oracle.device)

    def down(self, server: Fields, round: int, ids: Tensor | None = None) -> Fields:
        """Return the download of the clients ``ids``. If ``ids`` is None, all clients are included."""
        ctx = self.ctx(round, ids)
        kept = self.kept.read(self.mixed(ctx.ids)) if self.algorithm.mixes else None
        with attribute_error("method", self.algorithm, f"round {round}"):
            down = self.algorithm.down(server, kept, ctx)
        mixer = self.setting.personalized_aggregation or (self.algorithm.mixer(round) if self.robust else None)
        return down if mixer is None else self._mix_download(mixer, down, ctx)

    def _mix_download(self, mixer: Mixer, down: Fields, ctx: Ctx) -> Fields:
        """Replace the model in a download by a separate mixture of models for each client.

        If only part of the model is sent, only these coordinates are replaced.
        """
        if not mixer.mixing_weight:
            return down
        models, name = (self.models, "w") if self.models.template else (self.kept, self.primary)
        rows, start = getattr(models.read(self.mixed(ctx.ids)), name), getattr(models.template, name)
        mask, shared = self.messages.masks.get(self.primary), down[0]
        if mask is not None:
            rows, start = rows[:, mask.cpu()], start[mask.cpu()]
        if not rows.shape[1]:  # no part of the model is shared
            return down
        with attribute_error("mixer", mixer, f"round {ctx.round}"):
            mixtures = mixer.mix(rows, start, ctx, self._robust_mixture(ctx.round) if self.robust else None)
            if mixtures.shape != (ctx.m, rows.shape[1]):
                raise ValueError(f"`mix` must return models of shape {[ctx.m, rows.shape[1]]}, got {[*mixtures.shape]}")
        mixtures = mixtures.to(shared)
        if mask is not None:
            mixtures = shared.repeat(ctx.m, 1).masked_scatter_(mask, mixtures)
        mixed = (
            mixtures
            if mixer.mixing_weight == 1
            else torch.lerp(shared.expand_as(mixtures), mixtures, mixer.mixing_weight)
        )
        return down._replace(**{down._fields[0]: mixed})

    def _robust_mixture(self, round: int) -> Rule:
        """Return the aggregator as a rule that a mixer can apply.

        If there are too few models for the aggregator, a client receives its own last model.
        """
        aggregator, name = self.setting.aggregator, self.primary
        assert aggregator is not None

        def rule(last_model: Tensor, models: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            ctx = self.ctx(round, ids)
            try:
                combined, _ = aggregator.apply(aggregator.init(ctx), {name: models}, weights.double(), name, ctx)
            except ConfigError:
                return last_model
            return combined[name].to(last_model)

        return rule
