"""Job: what every process of a run knows, fixed before the first round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import Algorithm, Kept, primary_field, upload_fields, upload_type
from fedloom.algorithms._base import Sent, encodings
from fedloom.choose import Sampler, Weigher
from fedloom.data.federation import Federation
from fedloom.engine.settings import Engine, Evaluate
from fedloom.errors import blamed
from fedloom.local import Ctx, Local
from fedloom.local.oracles import Network
from fedloom.models import ModelSpec
from fedloom.processes.ranks import Ranks
from fedloom.processes.row_locations import Homes
from fedloom.rows.aggregate import Aggregator
from fedloom.rows.attacks import Attack, Forgery
from fedloom.rows.channel import Channel
from fedloom.rows.fields import Field
from fedloom.rows.wire import Codec
from fedloom.storage.store import Store


class Letter(NamedTuple):
    """A message and how it is written.

    Attributes:
        codec: writes it.
        values: the fields, ``[m, .]``, or ``[.]`` where all clients get the same.
        ranks: of matrices, where they are known.
    """

    codec: Codec
    values: Mapping[str, Tensor]
    ranks: Mapping[str, Any] = {}

    def bytes(self) -> tuple[Tensor, Tensor]:
        """Its length per client, ``[m]`` or ``[1]``, and as the papers count; nothing to send is no message."""
        if not self.values:
            return torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
        return self.codec.length(self.values, self.ranks), self.codec.paper_bytes(self.values, self.ranks)


@dataclass(frozen=True)
class Job:
    """A run, ready to be computed.

    Attributes:
        algorithm: the method.
        oracle: the local problems.
        fed: the data that clients train on.
        judge: the data that models are evaluated on; `fed`, unless the clients were pooled.
        local: settings of local training.
        sampler: who takes part.
        weigher: who counts how much.
        aggregator: how uploads become one; a weighted mean when None.
        attack: what the attackers do, if there are any.
        attackers: ``[b]`` ids of the attackers.
        channel: what uploads pass through, if anything.
        evaluate: when and on what models are scored.
        engine: how it is computed.
        spec: the model.
        seed: seed of the run.
        rounds: rounds in all.
        alpha: ``[n, 1]`` the clients' shares of the objective.
        workers: processes forked from this one.
        ranks: processes that go through the run together.
        chunk: most clients of a chunk.
        clients: state rows of the clients.
        kept: rows that the server keeps of every client.
        residue: what the channel has not sent yet, of every client.
        notes: what the method warns of.
    """

    algorithm: Algorithm
    oracle: Network
    fed: Federation
    judge: Federation
    local: Local
    sampler: Sampler
    weigher: Weigher
    aggregator: Aggregator | None
    attack: Attack | None
    attackers: Tensor
    channel: Channel | None
    evaluate: Evaluate
    engine: Engine
    spec: ModelSpec
    seed: int
    rounds: int
    alpha: Tensor
    workers: int
    ranks: Ranks
    chunk: int
    clients: Store[Any]
    kept: Store[Any]
    residue: Store[Any]
    notes: tuple[str, ...] = ()

    @property
    def stores(self) -> dict[str, Store[Any]]:
        """Everything that is kept by client."""
        return {"clients": self.clients, "kept": self.kept, "residue": self.residue}

    @cached_property
    def homes(self) -> Homes:
        """Where the latest row of every client is."""
        return Homes(self.ranks, self.stores)

    @property
    def n(self) -> int:
        """All clients."""
        return self.fed.n

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """Upload fields and their kinds."""
        return upload_fields(type(self.algorithm))

    def weights(self, up: Any) -> list[Tensor]:
        """The fields ``[m, 1]`` of an upload that weight others in the mean of what clients keep."""
        named = {kind.weight for kind in self.fields.values() if isinstance(kind, Kept) and kind.weight is not None}
        return [getattr(up, name) for name in sorted(named)]

    @cached_property
    def upload(self) -> Any:
        """Type of the upload."""
        return upload_type(type(self.algorithm))

    @property
    def gathers(self) -> bool:
        """Uploads are gathered as rows, not summed chunk by chunk."""
        return self.weigher.probes or self.robust

    @property
    def robust(self) -> bool:
        """The aggregator is more than a weighted mean."""
        return self.aggregator is not None and not self.aggregator.linear

    @cached_property
    def through_channel(self) -> list[str]:
        """Upload fields that pass the channel: all, but for a compressor, the differences only."""
        return channel_fields(type(self.algorithm), self.channel)

    @property
    def sees_honest(self) -> bool:
        """Attackers read the models of the honest clients."""
        return isinstance(self.attack, Forgery) and self.attack.sees_honest

    @property
    def asks(self) -> bool:
        """Clients answer questions about the model that they trained."""
        return self.weigher.probes or self.sampler.learns

    @cached_property
    def watched(self) -> str:
        """The upload field that the server's side looks at as a model; empty if it looks at none."""
        return primary_field(type(self.algorithm)) if self.asks or self.sees_honest else ""

    @cached_property
    def malicious(self) -> Tensor:
        """``[n]`` clients that attack."""
        return torch.isin(torch.arange(self.judge.n), self.attackers)

    @property
    def forgers(self) -> Tensor:
        """``[n]`` clients that forge their upload."""
        return self.malicious if isinstance(self.attack, Forgery) else torch.zeros(self.n, dtype=torch.bool)

    @property
    def kept_fields(self) -> list[str]:
        """Upload fields of which the server keeps every client's last row."""
        return [name for name, kind in self.fields.items() if isinstance(kind, Kept)]

    @property
    def has_personal(self) -> bool:
        """The method has personal models."""
        return type(self.algorithm).personal is not Algorithm.personal

    @cached_property
    def train_sizes(self) -> Tensor:
        """``[n, 1]`` training samples."""
        return self.fed.sizes("train").cpu()[:, None]

    def ctx(self, round: int, ids: Tensor | None = None) -> Ctx:
        """What the server's side knows in a round with the cohort ``ids``; all clients when None."""
        ids = torch.arange(self.n) if ids is None else ids
        layout, sizes, groups = self.oracle.layout, self.train_sizes, self.fed.groups
        return Ctx(round, self.n, len(ids), ids, layout, self.alpha, sizes, groups, self.local, self.seed)

    def down(self, server: Any, round: int, ids: Tensor | None = None) -> Any:
        """The download of a cohort; all clients when None."""
        ctx = self.ctx(round, ids)
        kept = self.kept.read(ctx.ids) if self.algorithm.mixes else None
        with blamed("method", self.algorithm, f"round {round}"):
            return self.algorithm.down(server, kept, ctx)

    @cached_property
    def masks(self) -> Mapping[str, Tensor]:
        """Coordinates that travel, of the upload fields that send only a part."""
        layout = self.oracle.layout
        parts = {name: kind.part for name, kind in self.fields.items() if kind.part}
        return {n: self.algorithm.part(part, layout).to(self.oracle.device) for n, part in parts.items()}

    def update(self, up: Any) -> Tensor:
        """What passes the channel of an upload ``[m, D]``: its fields side by side, of a part only what travels."""
        pieces = {name: getattr(up, name) for name in self.through_channel}
        return torch.cat([p[:, self.masks[n]] if n in self.masks else p for n, p in pieces.items()], 1)

    def with_update(self, up: Any, update: Tensor) -> Any:
        """The upload with other values in the place of those of `update`."""
        fields = {name: getattr(up, name) for name in self.through_channel}
        widths = [int(self.masks[n].sum()) if n in self.masks else f.shape[1] for n, f in fields.items()]
        for (name, old), new in zip(fields.items(), update.split(widths, 1), strict=True):
            fields[name] = torch.zeros_like(old).masked_scatter(self.masks[name], new) if name in self.masks else new
        return up._replace(**fields)

    @cached_property
    def sent(self) -> Mapping[str, Mapping[str, Sent]]:
        """How the fields of "down" and "up" are written."""
        return {message: encodings(self.algorithm, message) for message in ("down", "up")}

    @cached_property
    def down_masks(self) -> Mapping[str, Tensor]:
        """Coordinates that travel, of the download fields that send only a part."""
        parts = {name: s.part for name, s in self.sent["down"].items() if s.part is not None}
        return {name: self.algorithm.part(part, self.oracle.layout) for name, part in parts.items()}

    @cached_property
    def _codecs(self) -> dict[Any, Codec]:
        return {}

    def bytes_down(self, message: Any, server: Any) -> tuple[Tensor, Tensor]:
        """Bytes of a download per client, ``[m]`` or ``[1]``: as the codec writes it, and as the papers count."""
        return self.letter_down(message, server).bytes()

    def bytes_up(self, message: Any) -> tuple[Tensor, Tensor]:
        """Bytes of an upload per client, counted like a download."""
        return self.letter_up(message).bytes()

    def letter_down(self, message: Any, server: Any) -> Letter:
        """How a download is written; ``server`` has the ranks of its matrices, which are measured without it."""
        ranks = {
            name: dict(zip(self.oracle.layout.matrix_shapes, getattr(server, s.ranks).tolist(), strict=True))
            for name, s in self.sent["down"].items()
            if s.ranks is not None and s.encoding == "lowrank" and server is not None
        }
        values = message._asdict()
        return Letter(self._codec("down", values, self.down_masks), values, ranks)

    def letter_up(self, message: Any) -> Letter:
        """How an upload is written: what passes the channel as one field, if there is a channel."""
        if self.channel is None or not message:
            values = message._asdict()
            return Letter(self._codec("up", values, self.masks), values)
        update = self.update(message)
        values = {n: v for n, v in message._asdict().items() if n not in self.through_channel} | {"update": update}
        fields = {n: Field((v.shape[1],), v.dtype) for n, v in values.items()}
        fields["update"] = self.channel.field(update.shape[1], update.dtype)
        return Letter(Codec(self.oracle.layout, fields), values)

    def _codec(self, which: str, values: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Codec:
        key = (which, *((v.shape[-1], v.dtype) for v in values.values()))
        if key not in self._codecs:
            layout, sent = self.oracle.layout, self.sent[which]
            fields = {
                name: Field(
                    (value.shape[-1],),
                    value.dtype,
                    sent[name].encoding,
                    mask=masks.get(name),
                    layout=layout if sent[name].encoding == "lowrank" else None,
                )
                for name, value in values.items()
            }
            self._codecs[key] = Codec(layout, fields)
        return self._codecs[key]


def channel_fields(algorithm: type[Algorithm], channel: Channel | None) -> list[str]:
    """Upload fields that pass a channel: all, but for a compressor, the differences only."""
    fields = upload_fields(algorithm)
    return [n for n, k in fields.items() if channel is not None and (not channel.remembers or k.base != "zero")]
