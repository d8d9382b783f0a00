"""Forms: how every message of a run is written; both ends make them from the experiment alone, so they are the same.

A form is a codec of `fedloom.rows.wire`: names, types, shapes and encodings are agreed on before a byte is read, so a
message is checked against its form before anything is allocated for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.engine.chunk import Made
from fedloom.engine.job import Job
from fedloom.engine.setup import idle_upload
from fedloom.local import Nothing, Work
from fedloom.local.rows import rows_of
from fedloom.rows.fields import Field
from fedloom.rows.wire import Codec

INFO, TOLD, MODEL = "answer to the weigher", "answer to the sampler", "model"
"""Names of what is no field of the method."""


class Forms:
    """The messages of a run.

    Args:
        job: the run, as either end has it.
        server: the server's state before the first round.
        client: the number of a client, any.
    """

    def __init__(self, job: Job, server: Any, client: int = 0) -> None:
        self._job, self._server = job, server
        ids = torch.tensor([client])
        self._down = job.down(server, 1, ids)
        start = (server, job.clients.template, job.kept.template if job.kept_fields else None)
        self._up = idle_upload(job.algorithm, start, job.oracle, job.ctx(0, ids))
        self._work = Work(job.oracle, ids, job.alpha[ids], job.local, seed=job.seed).idle()

    # ------------------------------------------------------------------------------------------------- training

    def write_down(self, down: Any, server: Any = None) -> bytes:
        """What one client receives (fields ``[1, .]`` or ``[.]``); ``server`` has the ranks of matrices."""
        letter = self._job.letter_down(down, server)
        return letter.codec.encode({n: v.reshape(-1) for n, v in letter.values.items()}, letter.ranks)

    def read_down(self, message: bytes) -> Any:
        """The download of one client.

        Raises:
            WireError: the bytes are not one.
        """
        found = self._job.letter_down(self._down, self._server).codec.decode(message)
        return type(self._down)(*[found[n].view(like.shape) for n, like in self._down._asdict().items()])

    def write_up(self, made: Made) -> bytes:
        """What one client sends."""
        values = {n: v[0] for n, v in self._job.letter_up(made.up).values.items()}
        values |= {n: v[0] for n, v in ((INFO, made.info), (TOLD, made.told)) if v is not None}
        return self._upload.encode(values)

    def read_up(self, message: bytes) -> Sent:
        """What one client sent.

        Raises:
            WireError: the bytes are not an upload of this run.
        """
        job = self._job
        found = {name: value[None] for name, value in self._upload.decode(message).items()}
        info, told = found.pop(INFO, None), found.pop(TOLD, None)
        if job.channel is None or not self._up:
            return Sent(type(self._up)(**found), info, told)
        update = found.pop("update")
        return Sent(job.with_update(self._up._replace(**found), update), info, told)

    # ------------------------------------------------------------------------------ questions before a round

    def write_model(self, model: Tensor) -> bytes:
        """The global model."""
        return self._model.encode({MODEL: model.cpu()})

    def read_model(self, message: bytes) -> Tensor:
        """The global model.

        Raises:
            WireError: the bytes are not one.
        """
        return self._model.decode(message)[MODEL]

    def write_answer(self, answer: Tensor) -> bytes:
        """A candidate's answer ``[1, k]`` to the sampler."""
        return self._answer.encode({TOLD: answer[0]})

    def read_answer(self, message: bytes) -> Tensor:
        """A candidate's answer ``[1, k]``.

        Raises:
            WireError: the bytes are not one.
        """
        return self._answer.decode(message)[TOLD][None]

    # ----------------------------------------------------------------------------------------------- evaluation

    def write_models(self, down: Any, shared: Tensor | None) -> list[bytes]:
        """What one client needs to make and score its models: the download, and the global model where it is another.

        A method without personal models sends the global model alone.
        """
        parts = [self.write_down(down)] if self._job.has_personal else []
        if shared is not None and not (parts and self._is_received(down, shared)):
            parts.append(self.write_model(shared))
        return parts

    def read_models(self, parts: list[bytes], *, global_there: bool) -> tuple[Any, Tensor | None]:
        """The download, and the global model ``[d]``; either may be None.

        Raises:
            WireError: the bytes are not that.
        """
        rest = list(parts)
        down = self.read_down(rest.pop(0)) if self._job.has_personal and rest else None
        if not global_there:
            return down, None
        return down, self.read_model(rest[0]) if rest or down is None else down[0].reshape(-1)

    def _is_received(self, down: Any, shared: Tensor) -> bool:
        """Whether a client that reads the download has the global model with it, bit for bit."""
        sent = next(iter(self._job.sent["down"].values()))
        whole = sent.part is None and sent.encoding == "dense"
        return whole and torch.equal(down[0].reshape(-1), shared)

    # ---------------------------------------------------------------------------------------------------- inside

    @cached_property
    def _model(self) -> Codec:
        layout = self._job.oracle.layout
        return Codec(layout, {MODEL: Field((layout.d,), self._job.oracle.dtype)})

    @cached_property
    def _answer(self) -> Codec:
        model = self._job.algorithm.global_model(self._server)
        assert model is not None
        return self._with({}, {TOLD: self._job.sampler.probe(model, self._work)})

    @cached_property
    def _upload(self) -> Codec:
        """The upload's form: the method's fields, or what the channel makes of them, and the answers."""
        job, oracle = self._job, self._job.oracle
        model = torch.zeros(1, oracle.layout.d, dtype=oracle.dtype)
        asked: dict[str, Tensor] = {}
        if job.weigher.probes:
            asked[INFO] = job.weigher.probe(self._down, model, self._work)
        if job.sampler.learns:
            told = job.sampler.report(model, self._work)
            asked |= {} if told is None else {TOLD: told}
        return self._with(job.letter_up(self._up).codec.fields, asked)

    def _with(self, fields: Mapping[str, Field], asked: Mapping[str, Tensor]) -> Codec:
        more = {name: Field((value.shape[1],), value.dtype) for name, value in asked.items()}
        return Codec(self._job.oracle.layout, {**fields, **more})


class Sent(NamedTuple):
    """What one client sent, rows ``[1, .]``."""

    up: Any
    info: Tensor | None
    told: Tensor | None


def is_common(down: Any) -> bool:
    """Whether all clients receive the same."""
    return all(field.dim() == 1 for field in down)


def for_client(down: Any, place: int) -> Any:
    """What the client at one place of a cohort receives."""
    return rows_of(down, slice(place, place + 1))


def made_of(sent: Sent, model: Tensor | None, work: Tensor) -> Made:
    """What the server's side knows of what a client made; its state stays at the client."""
    return Made(sent.up, sent.info, sent.told, model, Nothing(), None, work)
