"""Groups of a site's test samples. The site publishes their scores after the last round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from fedloom.engine.clients.scores import Pass, choose_model, make_part_evaluator
from fedloom.engine.job import Job
from fedloom.processes.clients import Scores
from fedloom_sites.deploy.groups import Cells, GroupSums, agreed_groups, min_rows
from fedloom_sites.deploy.site.local_data import part_sizes
from fedloom_sites.deploy.site.trainer import Trainer


class SiteGroups:
    """Groups of samples at one site.

    Args:
        trainer: object that trains and scores models at the site.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @cached_property
    def sums(self) -> GroupSums:
        """Encoding of the sums over groups."""
        trainer = self._trainer
        agreed = agreed_groups(trainer.experiment, trainer.site.samples)
        return GroupSums(trainer.job, agreed, min_rows(trainer.experiment))

    @cached_property
    def members(self) -> Mapping[str, Tensor]:
        """Test samples that belong to each published group (see `GroupSums.members`)."""
        trainer, client = self._trainer, int(self._trainer.ids)
        is_scored = trainer.sends_groups and self.sums.groups and part_sizes(trainer.fed, client)[2]
        return self.sums.members(trainer.fed, client) if is_scored else {}

    def cells(self, job: Job, models: Sequence[bytes], t: int, scores: Scores, *, common: bool) -> Cells | None:
        """Compute sums and metrics for the groups after the last round.

        Return {} before the last round, and None after a failure.

        Args:
            job: run from `Trainer.attach_local_data`.
            models: messages from the server that contain models.
            t: round.
            scores: scores on the site's parts of the data. They determine whether the hybrid model is the global or the
                personal model.
            common: True if the global model is also scored.
        """
        if t != self._trainer.rounds or not self.members or not scores:
            return {}
        return self._trainer.attempt(f"groups of round {t}", lambda: self._cells(job, models, t, scores, common))

    def _cells(self, job: Job, models: Sequence[bytes], t: int, scores: Scores, common: bool) -> Cells:
        ids, passes = self._trainer.ids, dict[str, Pass]()
        received = self._trainer.node.read_models(job, models, t, common=common)
        if received.shared is not None:
            passes["global"] = make_part_evaluator(job, received.shared.to(job.oracle.device), ids, ids)("test")
        if received.kind == "personal" and received.row is not None:
            passes["personal"] = make_part_evaluator(job, received.row, ids, ids)("test")
        part = job.setting.evaluate.select_on
        if {("global", part), ("personal", part)} <= set(scores):
            passes["hybrid"] = passes["global" if choose_model(scores, part)[0] else "personal"]
        with torch.no_grad():
            return self.sums.site(passes, self.members, job.eval_fed)
