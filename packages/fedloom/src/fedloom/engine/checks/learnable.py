"""Check that some training samples can change a model."""

from __future__ import annotations

import torch

from fedloom.data.federation import Federation
from fedloom.engine.setting import Setting
from fedloom.errors import Refused
from fedloom.tasks import ChosenTask, Survival, Task


def check_learnable(task: Task, fed: Federation) -> None:
    """Raise an error if the loss of every training sample is constant, so that no upload can change a model.

    A user-defined loss is not checked, because it may learn from times without events. If a single client has no such
    sample, the client takes part. Sites and nodes therefore do not call this function, because they know only their own
    samples.

    Args:
        task: task of the run.
        fed: all clients with their samples.

    Raises:
        ConfigError: no client has a sample from which a model can learn.
    """
    if isinstance(task, ChosenTask) and task.objective.loss is not None:
        return
    if learns_from_events(task):
        _check_events(fed)
    elif isinstance(task, ChosenTask) and fed.data.task != "multilabel":
        counts = fed.class_counts("train")
        weights = task.class_weights(counts)
        if weights is not None and not bool((weights.to(counts.device) * counts).any()):
            held = [name for name, count in zip(task.classes, counts.sum(0).tolist(), strict=True) if count]
            raise Refused(
                f"task.class_weights gives weight 0 to every class in the training data ({', '.join(held[:8])}), so "
                "no upload can change a model",
                rule="nothing-to-learn",
                fix="omit {task.class_weights}, or give one of these classes a weight above 0",
            )


def learns_from_events(task: Task) -> bool:
    """Return True if the loss is the partial likelihood, which is constant without events."""
    if isinstance(task, ChosenTask):
        return task.objective.loss is None and isinstance(task.base, Survival)
    return isinstance(task, Survival)


def _check_events(fed: Federation) -> None:
    """Raise an error if no client has an event at which another of its training rows is at risk.

    The partial likelihood would then be the same for every model.

    Raises:
        ConfigError: there is no such client.
    """
    time, event = fed.data.y[fed.parts["train"].index].T
    owner = fed.owner("train")
    latest = time.new_zeros(fed.n).scatter_reduce(0, owner, time, "amax", include_self=False)
    at_end = time == latest[owner]
    alone = at_end & (torch.bincount(owner[at_end], minlength=fed.n)[owner] == 1)
    if bool(((event > 0) & ~alone).any()):
        return
    if not bool(event.any()):
        why = f"no training row has an event ({len(time)} rows are censored)"
    else:
        why = "no client has an event at which another of its training rows is still at risk"
    folds = fed.partition.get("folds")
    where = f"in fold {fed.seed % folds + 1} of {folds} (seed {fed.seed}), " if folds else ""
    omit = f"omit seed {fed.seed}, set a smaller number of {{partition.folds}}, " if folds else ""
    raise Refused(
        f"{where}{why}, so the partial likelihood is constant and no upload can change a model",
        rule="nothing-to-learn",
        fix=f"{omit}use data in which a client with several rows has an event, or an analysis such as 'kaplan-meier'",
    )


def note_single_row_batches(setting: Setting, task: str) -> list[str]:
    """Return a note if batches of a survival task contain a single row, whose partial likelihood is constant."""
    if task != "survival" or setting.local.batch_size != 1 or setting.task.loss is not None:
        return []
    return [
        "the partial likelihood of a batch of one row is constant, so training steps have no effect. Set "
        "local.batch_size to 2 or more"
    ]
