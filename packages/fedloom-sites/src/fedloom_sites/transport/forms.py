"""Formats of all messages in a run.

The server and the sites derive the formats only from the experiment, so that the formats are the same everywhere.

A format is a codec from `fedloom.rows.wire`: names, types, shapes and encodings are agreed on before a byte is read, so
a message is checked against its format before any memory is allocated for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.engine.clients.chunk import ClientOutput, ClientState
from fedloom.engine.clients.messages import UPDATE_FIELD, CodecMessage, Messages, idle_upload
from fedloom.engine.job import Job
from fedloom.local import Nothing
from fedloom.local.rows import rows_of
from fedloom.processes.clients import ScoreRequest, TrainRequest

HEADER_BYTES = 1 << 16
"""Maximum number of bytes in an encoded message apart from its numbers."""
WEIGHER_REPORT, SAMPLER_REPORT, MODEL_FIELD = "answer to the weigher", "answer to the sampler", "model"
"""Names of the message fields that are not fields of the method."""


class Forms:
    """Message formats of a run.

    Args:
        job: the run, either at the server or at a site.
        server: the server's state before the first round.
        client: number of an arbitrary client.
        dense: True to encode all numbers of an upload individually, regardless of the channel, because a node of a
            Flower app may change its upload after the channel.

    Attributes:
        idle: upload of a client that takes no training steps.
    """

    def __init__(self, job: Job, server: Any, client: int = 0, *, dense: bool = False) -> None:
        self._job, self._server, self._messages = job, server, job.messages
        if dense:
            mixed = job.setting.personalized_aggregation is not None
            self._messages = Messages(job.algorithm, job.oracle.layout, job.oracle.device, None, mixed=mixed)
        ids = torch.tensor([client])
        self._down = job.down(server, 1, ids)
        start = (server, job.clients.template, job.kept.template if job.kept_fields else None)
        self.idle = idle_upload(job.algorithm, start, job.oracle, job.ctx(0, ids))
        self._work = job.work(1, ids).idle()
        self._model = torch.zeros(job.oracle.layout.d, dtype=job.oracle.dtype)

    @cached_property
    def longest(self) -> int:
        """Maximum number of bytes in an upload or an answer.

        No encoding is longer than the dense one.
        """
        parts = [*self._upload.values.values()]
        if self._job.setting.sampler.probes:
            parts.append(self._answer)
        return HEADER_BYTES + sum(2 * part.numel() * part.element_size() for part in parts)

    # ------------------------------------------------------------------------------------------------- training

    def write_down(self, down: Any, server: Any = None) -> bytes:
        """Encode the download of one client (fields ``[1, .]`` or ``[.]``).

        ``server`` is the server's state, which contains the ranks of the matrices.
        """
        return self._messages.down(down, server).encode()

    def write_downs(self, request: TrainRequest, downloads: Mapping[int, Any]) -> Iterator[tuple[int, bytes]]:
        """Yield each client with its encoded download.

        A download that is the same for all clients is encoded only once.
        """
        common = self.write_down(request.down, request.server) if is_common(request.down) else None
        for client, down in downloads.items():
            yield client, common or self.write_down(down, request.server)

    def read_down(self, message: bytes) -> Any:
        """Decode the download of one client.

        Raises:
            WireError: the bytes are not a download.
        """
        return type(self._down)(**self._messages.down(self._down, self._server).decode(message))

    def write_up(self, output: ClientOutput) -> bytes:
        """Encode the upload of one client."""
        answers = _answer_tensors(output.weigher_answer, output.sampler_report)
        sent = output.sent if self._messages.sends_change and output.sent is not None else output.upload
        return self._messages.up(sent, answers).encode()

    def read_up(self, message: bytes, client: int = 0, down: Any = None) -> Upload:
        """Decode a client's upload, given its download. If there is no download, a compressed change stays compressed.

        Raises:
            WireError: the bytes are not an upload of this run.
        """
        fields = self._upload.decode(message)
        info, report, update = (fields.pop(name, None) for name in (WEIGHER_REPORT, SAMPLER_REPORT, UPDATE_FIELD))
        up = self.idle._replace(**fields)
        up = up if update is None else self._messages.replace_update(up, update)
        if self._messages.sends_change and down is not None:
            up = self._messages.absolute(up, self._job.changed_from(down, up, torch.tensor([client])))
        return Upload(up, info, report)

    # ------------------------------------------------------------------------------ questions before a round

    def write_model(self, model: Tensor) -> bytes:
        """Encode the global model."""
        return self._messages.vector(MODEL_FIELD, model).encode()

    def read_model(self, message: bytes) -> Tensor:
        """Decode the global model.

        Raises:
            WireError: the bytes are not a global model.
        """
        return self._messages.vector(MODEL_FIELD, self._model).decode(message)[MODEL_FIELD]

    def write_answer(self, answer: Tensor) -> bytes:
        """Encode a candidate's answer ``[1, k]`` to the sampler."""
        return self._messages.vector(SAMPLER_REPORT, answer).encode()

    def read_answer(self, message: bytes) -> Tensor:
        """Decode a candidate's answer ``[1, k]``.

        Raises:
            WireError: the bytes do not encode an answer.
        """
        return self._messages.vector(SAMPLER_REPORT, self._answer).decode(message)[SAMPLER_REPORT]

    # ----------------------------------------------------------------------------------------------- evaluation

    def write_models(self, down: Any, shared: Tensor | None) -> list[bytes]:
        """Encode the models that a client scores: the download, and the global model if it differs from the download.

        A method without personal models sends only the global model.
        """
        parts = [self.write_down(down)] if self._job.has_personal else []
        if shared is not None and not (parts and self._is_received(down, shared)):
            parts.append(self.write_model(shared))
        return parts

    def write_models_of(self, request: ScoreRequest, clients: Iterable[int]) -> Iterator[tuple[int, list[bytes]]]:
        """Yield each client with the encoded models that it scores.

        Models that are the same for all clients are encoded only once.
        """
        down, model = request.down, request.model
        common = self.write_models(down, model) if down is None or is_common(down) else []
        for c in clients:
            yield c, common if down is None or common else self.write_models(rows_of(down, slice(c, c + 1)), model)

    def read_models(self, parts: list[bytes], *, global_there: bool) -> tuple[Any, Tensor | None]:
        """Decode the download and the global model ``[d]``. Either of them may be None.

        Raises:
            WireError: the bytes are not these models.
        """
        rest = list(parts)
        down = self.read_down(rest.pop(0)) if self._job.has_personal and rest else None
        if not global_there:
            return down, None
        return down, self.read_model(rest[0]) if rest or down is None else down[0].reshape(-1)

    def _is_received(self, down: Any, shared: Tensor) -> bool:
        """Return True if a client that decodes the download then has the global model, bit for bit."""
        return self._messages.is_exact(self._down._fields[0]) and torch.equal(down[0].reshape(-1), shared)

    # ---------------------------------------------------------------------------------------------------- inside

    @cached_property
    def _answer(self) -> Tensor:
        """Format of an answer to the sampler."""
        model = self._job.algorithm.global_model(self._server)
        assert model is not None
        return self._job.setting.sampler.probe(model, self._work)

    @cached_property
    def _upload(self) -> CodecMessage:
        """Format of an upload."""
        job, model = self._job, self._model[None]
        info = (
            job.setting.aggregation_weights.probe(self._down, model, self._work)
            if job.setting.aggregation_weights.probes
            else None
        )
        report = job.setting.sampler.report(model, self._work) if job.setting.sampler.learns else None
        return self._messages.up(self.idle, _answer_tensors(info, report))


def _answer_tensors(info: Tensor | None, sampler_report: Tensor | None) -> dict[str, Tensor]:
    return {name: rows for name, rows in ((WEIGHER_REPORT, info), (SAMPLER_REPORT, sampler_report)) if rows is not None}


def score_names(job: Job) -> list[tuple[str, str, str]]:
    """Return the model, part and metric of every score that a site can have, in the same order everywhere."""
    task, index = job.oracle.task, torch.zeros(0, dtype=torch.long)
    blank = task.metrics(torch.zeros(0, task.outputs, dtype=job.oracle.dtype), job.fed.targets(index), index, 1)
    names = sorted({*blank, "nonzeros", "rank", "factorised"})
    parts = ("", *job.setting.evaluate.parts)
    return [(m, part, name) for m in ("global", "hybrid", "personal") for part in parts for name in names]


def is_common(down: Any) -> bool:
    """Return True if all clients receive the same message."""
    return all(field.dim() == 1 for field in down)


class Upload(NamedTuple):
    """Upload of one client, with rows ``[1, .]``."""

    up: Any
    info: Tensor | None
    sampler_report: Tensor | None


def make_output(sent: Upload, work: Tensor) -> ClientOutput:
    """Return a client's output as seen by the server. The client's state remains at the client."""
    return ClientOutput(sent.up, ClientState(Nothing()), work, sent.info, sent.sampler_report)
