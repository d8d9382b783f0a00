"""Encoding of a method's downloads and uploads, for counting bytes in simulations and communicating with real sites."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import Algorithm, exact_fields, upload_fields
from fedloom.algorithms._messages import Sent, encodings
from fedloom.local import Ctx, Work
from fedloom.local.oracles import Network
from fedloom.local.rows import Fields, rebuild_rows, to_device
from fedloom.rows.channels import Channel
from fedloom.rows.fields import Field
from fedloom.rows.layout import Layout
from fedloom.rows.wire import Codec

UPDATE_FIELD = "update"
"""Name of the only field, which contains all values sent through the channel."""


class CodecMessage(NamedTuple):
    """A message and its codec.

    Attributes:
        codec: codec that encodes the message.
        values: fields of shape ``[m, .]``, or ``[.]`` if all clients receive the same values.
        ranks: ranks of low-rank matrices. None if they are unknown.
    """

    codec: Codec
    values: Mapping[str, Tensor]
    ranks: Mapping[str, Any] = {}

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Return the number of bytes per client (``[m]`` or ``[1]``), and this number by the papers' convention.

        Both numbers are 0 if there is nothing to send.
        """
        if not self.values:
            return torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
        return self.codec.length(self.values, self.ranks), self.codec.paper_bytes(self.values, self.ranks)

    def encode(self) -> bytes:
        """Encode the message of one client."""
        return self.codec.encode({name: value.reshape(-1) for name, value in self.values.items()}, self.ranks)

    def decode(self, message: bytes) -> dict[str, Tensor]:
        """Decode one client's message into tensors with the shapes of `values`.

        Raises:
            WireError: the bytes do not encode a message of this type.
        """
        fields = self.codec.decode(message)
        return {name: fields[name].view(like.shape) for name, like in self.values.items()}


class Messages:
    """Encodings of all messages of a method.

    Args:
        algorithm: the method.
        layout: layout of the method's models.
        device: device that computes the uploads.
        channel: channel that transforms the uploads, or None.
        mixed: True if a mixer sends a different model to every client, so that the method's own encoding does not
            apply.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        layout: Layout,
        device: torch.device,
        channel: Channel | None,
        *,
        mixed: bool = False,
    ) -> None:
        self._algorithm, self._layout, self._device, self._channel = algorithm, layout, device, channel
        self._kinds, self._through = upload_fields(type(algorithm)), channel_fields(type(algorithm), channel)
        self._sent = {"down": encodings(algorithm, "down"), "up": encodings(algorithm, "up")}
        if mixed:
            first = next(iter(self._sent["down"]))
            self._sent["down"][first] = Sent(part=self._sent["down"][first].part)
        self._codecs: dict[Any, Codec] = {}

    @cached_property
    def masks(self) -> Mapping[str, Tensor]:
        """Masks of the sent coordinates for upload fields that are sent only in part."""
        return self._masks({name: kind.part for name, kind in self._kinds.items()})

    @cached_property
    def _down_masks(self) -> Mapping[str, Tensor]:
        return self._masks({name: sent.part for name, sent in self._sent["down"].items()})

    def _masks(self, parts: Mapping[str, str | None]) -> dict[str, Tensor]:
        return {n: self._algorithm.part(part, self._layout).to(self._device) for n, part in parts.items() if part}

    def down(self, message: Fields, server: Fields | None) -> CodecMessage:
        """Return a download with its codec.

        ``server`` contains the ranks of the download's low-rank matrices. If ``server`` is None, the ranks are computed
        from the matrices.
        """
        ranks = {
            name: dict(zip(self._layout.matrix_shapes, getattr(server, sent.ranks).tolist(), strict=True))
            for name, sent in self._sent["down"].items()
            if sent.ranks is not None and sent.encoding == "lowrank" and server is not None
        }
        return self._letter("down", message._asdict(), ranks)

    def up(self, message: Fields, answers: Mapping[str, Tensor] | None = None) -> CodecMessage:
        """Return an upload with the channel's output as a single field, its answers ``[m, k]``, and the codec."""
        values = message._asdict()
        if self._channel is not None and message:
            values = {n: v for n, v in values.items() if n not in self._through} | {UPDATE_FIELD: self.update(message)}
        return self._letter("up", values | dict(answers or {}), {})

    def vector(self, name: str, value: Tensor) -> CodecMessage:
        """Return a message with a single field. It is used for messages other than downloads and uploads."""
        return CodecMessage(Codec(self._layout, {name: Field((value.shape[-1],), value.dtype)}), {name: value})

    def is_exact(self, field: str) -> bool:
        """Return True if a download's field is sent completely and without loss."""
        sent = self._sent["down"].get(field, Sent())
        return sent.part is None and sent.encoding == "dense"

    @cached_property
    def changed(self) -> str:
        """Name of the absolute model field from which the channel first subtracts the received model, or "".

        The channel then always clips, compresses or adds noise to a change, even if the method uploads models.
        """
        absolute = (name for name, kind in self._kinds.items() if kind.primary and kind.base == "zero")
        return "" if self._channel is None else next(absolute, "")

    @property
    def sends_change(self) -> bool:
        """True if the message contains a change instead of the absolute field because the channel is a compressor."""
        return bool(self.changed) and self._channel is not None and self._channel.remembers

    @property
    def tracks(self) -> bool:
        """True if the channel compresses the change since the client's last upload, which client and server both store.

        The next change then contains what compression omitted (EF21: Richtarik, Sokolov and Fatkhullin, NeurIPS 2021,
        arXiv:2106.05203, Algorithm 1), so nothing is lost once the uploads converge.
        """
        return self.sends_change and self._kinds[self.changed].keeps

    def change(self, up: Fields, base: Tensor) -> Fields:
        """Replace the absolute model in an upload by its difference from ``base``, of shape ``[d]`` or ``[m, d]``."""
        return up._replace(**{self.changed: getattr(up, self.changed) - base}) if self.changed else up

    def absolute(self, up: Fields, base: Tensor) -> Fields:
        """Return the upload from before `change` subtracted ``base``."""
        return up._replace(**{self.changed: getattr(up, self.changed) + base}) if self.changed else up

    def update(self, up: Fields) -> Tensor:
        """Return the channel's input ``[m, D]``, the concatenation of the sent coordinates of all its fields."""
        pieces = {name: getattr(up, name) for name in self._through}
        return torch.cat([p[:, self.masks[n]] if n in self.masks else p for n, p in pieces.items()], 1)

    def replace_update(self, up: Fields, update: Tensor) -> Fields:
        """Replace the values in an upload that `update` returned."""
        fields = {name: getattr(up, name) for name in self._through}
        widths = [int(self.masks[n].sum()) if n in self.masks else f.shape[1] for n, f in fields.items()]
        for (name, old), new in zip(fields.items(), update.split(widths, 1), strict=True):
            fields[name] = torch.zeros_like(old).masked_scatter(self.masks[name], new) if name in self.masks else new
        return up._replace(**fields)

    def _letter(
        self, direction: Literal["down", "up"], values: Mapping[str, Tensor], ranks: Mapping[str, Any]
    ) -> CodecMessage:
        key = (direction, *((name, value.shape[-1], value.dtype) for name, value in values.items()))
        if key not in self._codecs:
            fields = {name: self._field(direction, name, value) for name, value in values.items()}
            self._codecs[key] = Codec(self._layout, fields)
        return CodecMessage(self._codecs[key], values, ranks)

    def _field(self, direction: Literal["down", "up"], name: str, value: Tensor) -> Field:
        width, dtype = value.shape[-1], value.dtype
        if direction == "up" and self._channel is not None:
            return self._channel.field(width, dtype) if name == UPDATE_FIELD else Field((width,), dtype)
        encoding = self._sent[direction].get(name, Sent()).encoding
        mask = (self._down_masks if direction == "down" else self.masks).get(name)
        return Field((width,), dtype, encoding, mask=mask, layout=self._layout if encoding == "lowrank" else None)


def channel_fields(algorithm: type[Algorithm], channel: Channel | None) -> list[str]:
    """Return the upload fields that pass through a channel: all fields except those that must stay exact.

    A compressor processes only the model and the fields that are differences.
    """
    if channel is None:
        return []
    exact, fields = exact_fields(algorithm), upload_fields(algorithm)
    return [n for n, k in fields.items() if n not in exact and (not channel.remembers or k.primary or k.base != "zero")]


def idle_upload(method: Algorithm, start: tuple[Fields, Fields, Fields | None], oracle: Network, ctx: Ctx) -> Fields:
    """Return the upload of a client that takes no training step, with all fields at full width."""
    weight = ctx.weight[:1].to(oracle.device)
    return first_upload(method, start, ctx, Work(oracle, ctx.ids[:1], weight, ctx.local).idle())


def first_upload(method: Algorithm, start: tuple[Fields, Fields, Fields | None], ctx: Ctx, work: Work) -> Fields:
    """Return the upload that the first client would send in a first round. Store nothing."""
    return first_step(method, start, ctx, work)[2]


def first_step(
    method: Algorithm, start: tuple[Fields, Fields, Fields | None], ctx: Ctx, work: Work
) -> tuple[Fields, Fields, Fields]:
    """Return the first client's download, new state and upload in a first round. Store nothing."""
    server, template, kept = start
    one = ctx._replace(m=1, ids=ctx.ids[:1])
    place, count = work.oracle.device, ctx.n if method.mixes_all else 1
    rows = rebuild_rows(template, [t[None].to(place) for t in template])
    down = method.down(server, kept and rebuild_rows(kept, [t.repeat(count, *[1] * t.dim()) for t in kept]), one)
    received = to_device(down, place)
    upload, rows = method.client(received, rows, work)
    return received, rows, upload
