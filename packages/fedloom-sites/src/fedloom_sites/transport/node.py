"""Run at one client, where the client's samples are: a deployment's site or a node of a Flower app."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.engine.clients.chunk import ClientOutput, ask_chunk, run_clients
from fedloom.engine.clients.scores import hybrid_scores, personal_models, score_chunk
from fedloom.engine.job import Job
from fedloom.local.rows import Fields, for_everyone, rebuild_rows, select_group
from fedloom.processes.clients import AskTask, Scores, ScoreTask, TrainTask
from fedloom_sites.transport.forms import Forms


class Node:
    """A run at one client.

    Args:
        job: the run, with the client's samples.
        server: initial state of the run's server.
        client: the client's number.
        dense: see `Forms`.
    """

    def __init__(self, job: Job, server: Fields, client: int, *, dense: bool = False) -> None:
        self.job, self.server, self.ids, self._dense = job, server, torch.tensor([client]), dense

    @cached_property
    def forms(self) -> Forms:
        """Encoding of the client's messages."""
        return Forms(self.job, self.server, int(self.ids), dense=self._dense)

    def load_state(self, job: Job, tensors: Mapping[str, Tensor] | None) -> None:
        """Load a client's state into the stores of the run.

        Args:
            job: this run, possibly with different client weights in the objective.
            tensors: ``<store>.<field>`` ``[.]``. If None, the state is the state before the first round.
        """
        for name, store in job.state_stores.items():
            store.reset()
            if tensors is not None:
                fields = select_group(tensors, name)
                store.write(
                    self.ids, rebuild_rows(store.template, [fields[field][None] for field in store.template._fields])
                )

    def answer(self, job: Job, message: bytes, t: int) -> tuple[bytes, list[int]]:
        """Return the client's encoded answer to a sampler's request about the global model, and the work done.

        Raises:
            WireError: the message contains no global model.
        """
        answer, counts = ask_chunk(job, self.forms.read_model(message), AskTask(t, self.ids))
        return self.forms.write_answer(answer), counts[0, :3].tolist()

    def train(self, job: Job, down: Fields, t: int) -> ClientOutput:
        """Train for one round, starting from the loaded state."""
        return run_clients(job, down, TrainTask(t, torch.tensor([0]), self.ids, torch.ones(1, 1)))

    def receive(self, messages: Sequence[bytes], *, common: bool) -> tuple[Any, Tensor | None]:
        """Decode the download, expanded as if every client had received it, and the global model ``[d]``.

        Each is None if the messages do not contain it.

        Raises:
            WireError: the messages do not contain models of this run.
        """
        down, shared = self.forms.read_models([*messages], global_there=common)
        return None if down is None else for_everyone(down, self.job.n), shared

    def read_models(
        self, job: Job, messages: Sequence[bytes], t: int, *, common: bool, trained: bool = True
    ) -> NodeModels:
        """Return the models contained in the messages of an evaluation.

        Args:
            job: this run, after `load_state`.
            messages: messages from the server.
            t: round.
            common: True if the global model is also scored.
            trained: False if the client has no training samples, and therefore no personal model.
        """
        down, shared = self.receive(messages, common=common)
        row = personal_models(job, down, t, self.ids)[0] if down is not None and trained else None
        return NodeModels(down, shared, shared if row is None else row, "global" if row is None else "personal")

    def score(self, job: Job, models: NodeModels, t: int) -> Scores:
        """Compute the models' scores on the client's parts of the data."""
        return score_chunk(job, models.down, models.shared, ScoreTask(t, self.ids, self.ids, common=False))

    def score_hybrid(self, job: Job, scores: Scores) -> Scores:
        """Return the scores, including those of the hybrid model, which is the better model on the validation split."""
        return scores | hybrid_scores(scores, job.setting.evaluate.select_on)


class NodeModels(NamedTuple):
    """Models that a client scores when it evaluates.

    Attributes:
        down: the download, expanded as if every client had received it, or None.
        shared: global model ``[d]``, or None.
        row: the client's latest model ``[d]``, or None.
        kind: type of the model in ``row``, "personal" or "global".
    """

    down: Any
    shared: Tensor | None
    row: Tensor | None
    kind: str
