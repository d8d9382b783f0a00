"""JobFacts: settings, data and local problems of a run, without any state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fedloom.algorithms import Algorithm, Kind, primary_field, upload_fields, upload_type
from fedloom.choose.shares import period_of
from fedloom.data.federation import Federation
from fedloom.engine.clients.messages import Messages
from fedloom.engine.replay import Replay
from fedloom.engine.setting import Setting
from fedloom.local import Ctx, Work
from fedloom.local.optimizer import OptimizerStates
from fedloom.local.oracles import Network
from fedloom.local.rows import Fields
from fedloom.rows.attacks import Forgery
from fedloom.schedule import Fleet
from fedloom.seeds import generator


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """Settings, data and local problems of a run, without any state.

    Attributes:
        setting: the user's settings, with presets resolved.
        oracle: the clients' local problems.
        fed: the clients' training data.
        eval_fed: federation with the evaluation data, which is `fed` unless the
            clients were pooled.
        attackers: ids of the attackers ``[b]``.
        alpha: clients' weights ``[n, 1]`` in the objective, before round 1 or after `Job.replace_shares`.
        chunk: maximum number of clients per chunk.
        memory: layout of the clients' stored optimizer states. None if optimizers start every round from scratch.
        notes: notes from before the first round.
        replay: values that replace the run's own random draws.
        spent: work and traffic before round 1 ``[7]`` (see `CLIENT_COUNTS`), or None.
    """

    setting: Setting
    oracle: Network
    fed: Federation
    eval_fed: Federation
    attackers: Tensor
    alpha: Tensor
    chunk: int
    memory: OptimizerStates | None = None
    notes: tuple[str, ...] = ()
    replay: Replay = field(default_factory=Replay)
    spent: Tensor | None = None

    @property
    def algorithm(self) -> Algorithm:
        """Method that the run uses."""
        return self.setting.method

    @property
    def n(self) -> int:
        """Number of clients in the federation."""
        return self.fed.n

    @cached_property
    def fields(self) -> Mapping[str, Kind]:
        """The method's upload fields and their kinds."""
        return upload_fields(type(self.algorithm))

    @cached_property
    def masses(self) -> Tensor:
        """Clients' weights in stored or accumulated sums, float64 ``[n, 1]`` (see `Ctx.masses`).

        All weights are 1 if the aggregator ignores weights, or if the uploads of the method already contain the client
        weights.
        """
        aggregator = self.setting.aggregator
        weighed = any(kind.weight for kind in self.fields.values())
        alike = self.algorithm.uses_shares or weighed or (aggregator is not None and not aggregator.weighted)
        return torch.ones(self.n, 1, dtype=torch.float64) if alike else self.ctx(0).masses

    def weights(self, up: Fields) -> list[Tensor]:
        """Return the upload fields ``[m, 1]`` that weight other fields in means that the server stores."""
        named = {kind.weight for kind in self.fields.values() if kind.keeps and kind.weight is not None}
        return [getattr(up, name) for name in sorted(named)]

    @cached_property
    def primary(self) -> str:
        """Name of the upload field that contains the model."""
        return primary_field(type(self.algorithm))

    @cached_property
    def upload(self) -> type[Fields]:
        """Type of the method's upload."""
        upload: type[Fields] = upload_type(type(self.algorithm))
        return upload

    @property
    def gathers_rows(self) -> bool:
        """True if all uploads' rows are gathered instead of summed chunk by chunk."""
        return self.setting.aggregation_weights.probes or self.robust

    @property
    def robust(self) -> bool:
        """True if the aggregator is not just a weighted mean."""
        return self.setting.aggregator is not None and not self.setting.aggregator.linear

    @property
    def forges(self) -> bool:
        """True if attackers forge uploads. This requires a method with uploads."""
        return isinstance(self.setting.attack, Forgery) and bool(self.fields)

    @property
    def sees_honest(self) -> bool:
        """True if attackers can read the models of honest clients."""
        return self.forges and isinstance(self.setting.attack, Forgery) and self.setting.attack.sees_honest

    @property
    def asks(self) -> bool:
        """True if clients answer queries about the models that they trained."""
        return self.setting.aggregation_weights.probes or self.setting.sampler.learns

    @cached_property
    def model_field(self) -> str:
        """Name of the upload field that the weigher or sampler reads as a model.

        It is empty if neither reads a model.
        """
        return primary_field(type(self.algorithm)) if self.asks else ""

    @cached_property
    def malicious(self) -> Tensor:
        """Mask ``[n]`` of the attackers."""
        return torch.isin(torch.arange(self.eval_fed.n), self.attackers)

    @cached_property
    def scored_ids(self) -> Tensor:
        """Ids of the evaluated clients ``[s]``, ascending: all clients, or clients drawn with the run's seed."""
        n, most = self.eval_fed.n, self.setting.evaluate.clients
        if most is None or most >= n:
            return torch.arange(n)
        return torch.randperm(n, generator=generator(self.setting.seed, purpose="judged"))[:most].sort().values

    def places_by_honesty(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of honest clients and of forging clients within a cohort."""
        if not self.forges:
            return torch.arange(len(ids)), torch.zeros(0, dtype=torch.long)
        forges = self.malicious[ids]
        return (~forges).nonzero()[:, 0], forges.nonzero()[:, 0]

    @property
    def kept_fields(self) -> list[str]:
        """Names of the upload fields whose last row the server stores for each client."""
        return [name for name, kind in self.fields.items() if kind.keeps]

    @property
    def reclusters(self) -> bool:
        """True if clients are clustered again during the run, which changes the client weights."""
        period = period_of(self.setting.client_weights)
        return period is not None and period < self.setting.rounds

    @cached_property
    def summed_fields(self) -> list[str]:
        """Names of accumulated fields whose sums are also stored per client.

        A robust rule needs these sums to account for changes in the clients' rows. If client weights change, weighted
        sums are recomputed from them.
        """
        fields = self.fields.items() if self.robust or self.reclusters else ()
        whole = self.reclusters and not self.robust
        return [name for name, kind in fields if kind.accumulates and (whole or kind.base.startswith("rows."))]

    @property
    def has_personal(self) -> bool:
        """True if each client has its own model: the method's personal model, or a mixture that a mixer sends."""
        return (
            self.setting.personalized_aggregation is not None or type(self.algorithm).personal is not Algorithm.personal
        )

    def model_kinds(self, server: Fields) -> list[str]:
        """Return the kinds of models that the run evaluates: global, personal and hybrid models.

        Args:
            server: state of the server before round 1.
        """
        kinds = ["global"] if self.algorithm.global_model(server) is not None else []
        kinds += ["personal"] if self.has_personal else []
        return [*kinds, "hybrid"] if len(kinds) == 2 else kinds

    def personal(self, down: Fields, rows: Fields, work: Work) -> Tensor | None:
        """Return personal models ``[m, d]``, or the received models if the method does not train personal models."""
        if type(self.algorithm).personal is Algorithm.personal:
            received: Tensor = down[0]
            return received.expand(work.m, -1)
        return self.algorithm.personal(down, rows, work)

    @property
    def mixes(self) -> bool:
        """True if downloads are mixtures of the rows that the server stores for the clients."""
        return self.setting.personalized_aggregation is not None or self.algorithm.mixes

    @cached_property
    def train_sizes(self) -> Tensor:
        """Number of training samples of each client ``[n, 1]``."""
        return self.fed.sizes("train").cpu()[:, None]

    @cached_property
    def everyone(self) -> Tensor:
        """Ids ``[n]`` of all clients. This tensor must not be modified."""
        return torch.arange(self.n)

    def ctx(self, round: int, ids: Tensor | None = None) -> Ctx:
        """Return the server's context for a round with the cohort ``ids``.

        If ``ids`` is None, all clients are included.
        """
        ids = self.everyone if ids is None else ids
        layout, sizes, groups = self.oracle.layout, self.train_sizes, self.fed.groups
        local, seed, rounds = self.setting.local, self.setting.seed, self.setting.rounds
        projection = self.replay.projection
        return Ctx(round, self.n, len(ids), ids, layout, self.alpha, sizes, groups, local, seed, rounds, projection)

    def mixed(self, ids: Tensor) -> Tensor:
        """Return the clients whose stored rows are mixed into the downloads of the clients ``ids``."""
        mixer = self.setting.personalized_aggregation
        return self.everyone if self.algorithm.mixes_all or (mixer is not None and mixer.mixes_all) else ids

    @cached_property
    def fleet(self) -> Fleet | None:
        """Devices of the clients, or None if the run has no devices."""
        devices = self.setting.devices
        return None if devices is None else devices.fleet(self.n, self.setting.seed, self.fed.rarity())

    @cached_property
    def messages(self) -> Messages:
        """Encodings of downloads and uploads."""
        oracle, mixed = self.oracle, self.setting.personalized_aggregation is not None
        return Messages(self.algorithm, oracle.layout, oracle.device, self.setting.upload_transform, mixed=mixed)
