"""Answers of a site without secure aggregation, where the server reads its uploads and scores individually."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.engine.job import Job
from fedloom.errors import WireError
from fedloom.processes.clients import Scores
from fedloom_sites.deploy.protocol.envelope import Envelope, Kind
from fedloom_sites.deploy.protocol.public import publish_reasons
from fedloom_sites.deploy.secure.terms import check_models, check_terms, read_terms
from fedloom_sites.deploy.site.analyses import SiteAnalyses
from fedloom_sites.deploy.site.groups import SiteGroups
from fedloom_sites.deploy.site.local_data import part_sizes
from fedloom_sites.deploy.site.state import StateGeneration
from fedloom_sites.deploy.site.trainer import TrainedRound, Trainer

Answer = tuple[dict[str, Any], list[bytes], dict[str, float] | None]
"""Additional fields in a reply's head, its arrays, and its metrics."""


class PlainAnswers:
    """Answers of a site that does not use secure aggregation.

    Args:
        trainer: object that trains and scores models at the site.
        folder: folder with the site's state in this experiment.

    Attributes:
        kinds: kinds of messages that the site answers.
    """

    kinds: tuple[Kind, ...] = ("ask", "train", "score", "analysis", "result")

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._trainer, self._groups, self._analyses = trainer, SiteGroups(trainer), SiteAnalyses(trainer, folder)

    @cached_property
    def figures(self) -> str:
        """Cells of analyses with enough subjects at the site, as a bit field in hexadecimal digits."""
        return f"{bits:x}" if (bits := self._analyses.bits) else ""

    def answer(self, envelope: Envelope) -> Answer:
        """Return the answer to a message in a round.

        Raises:
            FedloomError: the site has no answer. The message states the reason.
        """
        head, arrays, trainer = envelope.head, envelope.arrays, self._trainer
        if head["kind"] == "analysis":
            return {}, [self._answer_analysis(arrays, head["accepted"])], None
        samples = {"samples": part_sizes(trainer.fed, int(trainer.ids))[0]}
        if head["kind"] == "result":
            self._analyses.keep(single_array(arrays))
            return samples, [], None
        if head["kind"] == "ask":
            answer, work = trainer.node.answer(trainer.job, arrays[0], head["round"])
            return samples | {"work": work}, [answer], None
        job, state = trainer.attach_local_data(head["accepted"], trainer.weighed(head["weight"]))
        if head["kind"] == "train":
            scores = trainer.scores(job, arrays[1:], head["scored"], common=head["global"])
            new = trainer.train(job, state, head["round"], arrays[0], self._send)
            work = [0, 0, 0] if trainer.private else list(new.reply["work"])
            return samples | {"work": work}, [bytes(new.tensors["reply"].numpy())], message_metrics(scores) or None
        t, common = head["round"], head["global"]
        scores = trainer.scores(job, arrays, t, common=common)
        cells = self._groups.cells(job, arrays, t, scores, common=common) or {}
        return samples, [], message_metrics(scores) | self._groups.sums.as_metrics(cells)

    def count_parameters(self, kind: str, arrays: Sequence[bytes]) -> int:
        """Return the number of values in an answer's arrays that come from models or samples (an upload or sums).

        Args:
            kind: kind of the message.
            arrays: arrays of the answer.
        """
        if kind == "train":
            return sum(field.numel() for field in self._trainer.forms.idle) if arrays else 0
        return sum(map(len, arrays)) // 8 if kind in ("ask", "analysis") else 0

    def _answer_analysis(self, arrays: Sequence[bytes], accepted: int) -> bytes:
        """Return the answer to a step of an analysis: the vector, followed by the site's counters."""
        site, sizes, figures = self._trainer.site, part_sizes(self._trainer.fed, int(self._trainer.ids)), self.figures
        with publish_reasons():
            if not arrays:
                raise WireError("the request for a step of an analysis must contain terms")
            terms, models = read_terms(arrays[0]), arrays[1:]
            if terms.question is None:
                raise WireError("these terms do not ask for an analysis")
            check_terms(terms, site.client, sizes, figures, site.clients, accepted)
            check_models(terms, None, models)
        vector, counters = self._analyses.answer(terms, models)
        return np.concatenate([vector, np.array(counters, dtype=np.uint64)]).astype("<u8", copy=False).tobytes()

    def _send(self, job: Job, state: StateGeneration | None, trained: TrainedRound, down: object) -> dict[str, Tensor]:
        return {"reply": torch.frombuffer(bytearray(self._trainer.forms.write_up(trained.output)), dtype=torch.uint8)}


def single_array(arrays: list[bytes]) -> bytes:
    """Return the only array in a message.

    Raises:
        WireError: the message does not contain exactly one array.
    """
    if len(arrays) != 1:
        raise WireError(f"expected 1 array, got {len(arrays)}")
    return arrays[0]


def message_metrics(scores: Scores) -> dict[str, float]:
    """Convert scores to the metrics of a message."""
    values = {f"{m}/{p}/{name}": float(v[0]) for (m, p), row in scores.items() for name, v in row.items()}
    return {key: score for key, score in values.items() if score == score}
