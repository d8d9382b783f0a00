"""Analyses of individual test samples after the last round: predictions, and scores of groups at each client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import pyarrow as pa
import torch
from pydantic import Field
from torch import Tensor

from fedloom.analyses.form import Analysis
from fedloom.analyses.tables import INTEGER_TYPE, NUMBER_TYPE, TEXT_TYPE, make_table
from fedloom.data.federation import Federation
from fedloom.data.groups import get_subjects, has_enough_rows, make_group_masks, row_kind_counts
from fedloom.engine.clients.scores import final_outputs
from fedloom.engine.result import Result
from fedloom.engine.setting import Setting
from fedloom.errors import Refused
from fedloom.rundir import FEDERATION_CLIENT, SAMPLES_FIGURE

GroupScore = tuple[int, str, str, str, float]
"""Client (-1 for all clients together), model, group, metric and value."""
MAX_OUTPUTS = 64
"""Maximum number of outputs per sample for stored predictions."""


class KeptPredictions(Analysis):
    """Predictions for every test sample after the last round. Calibration and net benefit are computed from them."""

    kind: ClassVar[str] = "predictions"

    def check_run(self, fed: Federation, setting: Setting | None = None) -> None:
        """Raise an error if a federation's models have too many outputs.

        Raises:
            ConfigError: samples have a label per position or more than `MAX_OUTPUTS` outputs.
        """
        if fed.data.each or fed.data.outputs > MAX_OUTPUTS:
            raise Refused(
                f"predictions stores at most {MAX_OUTPUTS} outputs per sample, but {fed.data.name} has more outputs",
                rule="predictions-too-many-outputs",
                fix="omit this analysis",
            )

    def measure(self, result: Result) -> tuple[pa.Table, Sequence[str]]:
        return predictions(result), ()


class Groups(Analysis):
    """Scores of groups of rows in each client's test set after the last round."""

    kind: ClassVar[str] = "groups"
    by: tuple[str, ...] = Field(
        min_length=1,
        description="columns or thresholds such as 'age>=75' that define groups. Each group's test rows are scored "
        "separately",
    )
    min_rows: int = Field(
        10, ge=2, description="minimum number of rows of a scored group, and of each of its classes or its events"
    )

    @property
    def kept_columns(self) -> Sequence[str]:
        return self.by

    def check_run(self, fed: Federation, setting: Setting | None = None) -> None:
        make_group_masks(fed.data, self.by)

    def measure(self, result: Result) -> tuple[pa.Table, Sequence[str]]:
        return group_scores(result, self.by, self.min_rows), ()


def _final_outputs(result: Result) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Yield each kind of model together with its outputs on the test samples, the samples' indices and their clients.

    The outputs have the shape ``[N, k]``, and the indices and the clients have the shape ``[N]``.
    """
    job, kinds = result.job, result.models.kinds()
    outputs_of = {kind: final_outputs(job, result.state, kind) for kind in ("global", "personal") if kind in kinds}
    for kind, (outputs, index, sizes) in outputs_of.items():
        yield kind, outputs.cpu(), index.cpu(), job.scored_ids.repeat_interleave(sizes.cpu())
    if "hybrid" in kinds:
        shared, index, sizes = outputs_of["global"]
        owner = job.scored_ids.repeat_interleave(sizes.cpu())
        takes = result.models.takes_global()
        chosen = torch.zeros(job.n, dtype=torch.bool).index_copy(0, job.scored_ids, takes[: len(job.scored_ids)])
        outputs = torch.where(chosen[owner][:, None], shared.cpu(), outputs_of["personal"][0].cpu())
        yield "hybrid", outputs, index.cpu(), owner


def predictions(result: Result) -> pa.Table:
    """Return a table with the columns client, model, row (index in the data), target [, event, subject], predictions.

    For a multilabel task, there is a column "target <k>" for every label. Its value is NaN if the label is unknown.
    Predictions are probabilities of classes or labels (of the second class in a binary task), values in the target's
    unit, or means of counts. For a survival task, predictions are risks by the horizon, or log hazards if there is no
    horizon.
    """
    data, task, parts = result.job.eval_fed.data, result.job.oracle.task, []
    for kind, outputs, index, owner in _final_outputs(result):
        y, z = data.y.cpu()[index], outputs.double()
        if data.task == "multilabel":
            targets = {
                f"target {k}": torch.where(values < 0, torch.nan, values.double())
                for k, values in enumerate(y.unbind(1))
            }
        else:
            targets = {"target": y.double() if y.ndim == 1 else y[:, 0].double() * data.unit + data.centre}
        if (subjects := get_subjects(data)) is not None:
            targets["subject"] = subjects[index]
        if data.task == "survival":
            targets["event"] = y[:, 1].double()
            z = z if result.job.setting.task.horizon is None else -torch.expm1(-z.exp())
        elif data.task == "multilabel" or data.task == "binary":
            z = z.sigmoid()
        elif data.task == "classification":
            z = z.softmax(-1)
        else:
            z = task.predict(z) * data.unit + data.centre
        names = ["prediction"] if z.shape[1] == 1 else [f"prediction {k}" for k in range(z.shape[1])]
        columns = {"client": owner, "row": index, **targets, **dict(zip(names, z.unbind(1), strict=True))}
        table = pa.table({name: values.numpy() for name, values in columns.items()})
        parts.append(table.add_column(1, "model", pa.array([kind] * len(table), pa.string())))
    return pa.concat_tables(parts)


def group_scores(result: Result, by: Sequence[str], least: int) -> pa.Table:
    """Return a table with the columns client (-1 for all clients together), model, subgroup, metric and value.

    The first metric of a group is its number of samples.

    It is the only metric if the group has fewer than `least` samples (or subjects, if known) in total, in one of the
    classes or among the events.

    Args:
        result: result of a run.
        by: columns, or thresholds on columns, that define the groups.
        least: minimum number of rows, or of subjects, that a group needs in total, in each class and among the events.
    """
    job = result.job
    data, ids = job.eval_fed.data, job.scored_ids.tolist()
    groups, subjects = make_group_masks(data, by), get_subjects(data)
    rows: list[GroupScore] = []
    for kind, outputs, index, owner in _final_outputs(result):
        y = job.eval_fed.targets(index.to(job.eval_fed.device)).cpu()
        for name, members in groups.items():
            inside = members.cpu()[index]
            for client in (FEDERATION_CLIENT, *ids):
                some = inside if client == FEDERATION_CLIENT else inside & (owner == client)
                count = int(some.sum())
                rows.append((client, kind, name, SAMPLES_FIGURE, float(count)))
                units = None if subjects is None else subjects[index[some]]
                counts = row_kind_counts(data.task, y[some], job.oracle.task.outputs, units).sum(0)
                if has_enough_rows(counts, least):
                    scores = job.oracle.task.metrics(outputs[some], y[some], torch.zeros(count, dtype=torch.long), 1)
                    rows += [(client, kind, name, metric, float(value)) for metric, value in scores.items()]
    return group_table(rows)


def group_table(rows: Sequence[GroupScore]) -> pa.Table:
    """Return scores of groups as a table."""
    return make_table(
        rows, client=INTEGER_TYPE, model=TEXT_TYPE, subgroup=TEXT_TYPE, metric=TEXT_TYPE, value=NUMBER_TYPE
    )
