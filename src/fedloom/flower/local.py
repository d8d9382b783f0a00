"""Local: a node's own model, samples and loss."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedloom.data import PARTS, Dataset, Federation, Split
from fedloom.data.dataset import Task
from fedloom.errors import ConfigError
from fedloom.flower.samples import Signature, adapted, fit, read
from fedloom.tasks import Objective


@dataclass
class Local:
    """A node's model and samples.

    Args:
        model: the module, as at the server; its values are those that the server sends. It gives a tensor with a row
            per sample, or an object whose ``logits`` are one.
        trainset: training samples: a torch ``Dataset`` or ``DataLoader``, or tensors ``(x, y)``. A sample is a tuple
            whose last entry is the target, or a dict. Samples are read once, so random changes of them are drawn once;
            of a loader, its data set and ``collate_fn`` count, and batches are drawn by the strategy's ``local``.
        loss: ``nn.CrossEntropyLoss()``, ``nn.BCEWithLogitsLoss()``, ``nn.MSELoss()``, or a function of a batch's
            outputs and targets, in the shapes that the model and the samples have; by default the cross-entropy of
            whole-number targets, else the squared error.
        testset: test samples, in any of these forms.
        valset: validation samples, in any of these forms.
        device: where the node computes.
        folder: of the node's model file, ``<node>.safetensors``, written at every evaluation, and of its rows; None
            for no file.
        keys: of samples that are dicts, the names of the model's inputs and, last, of the target. By default the
            target is the entry ``label``, ``labels``, ``target``, ``targets`` or ``y``, and all others are inputs.
            Several inputs are given to the model by name.
    """

    model: nn.Module
    trainset: Any
    loss: Any = None
    testset: Any = None
    valset: Any = None
    device: str = "cpu"
    folder: Path | str | None = None
    keys: Sequence[str] = ()

    def read(self) -> NodeProblem:
        """Read the samples.

        Raises:
            ConfigError: they are no samples, or the model or the loss does not take them.
        """
        try:
            torch.zeros(1, device=self.device)
        except Exception as error:
            raise ConfigError(f"device: {self.device!r} is not there ({str(error)[:100]}); use 'cpu'") from error
        sets = {"train": self.trainset, "validation": self.valset, "test": self.testset}
        parts = {part: read(part, samples, self.keys) for part, samples in sets.items() if samples is not None}
        if "train" not in parts:
            raise ConfigError("trainset is None; a node needs training samples")
        inputs = {name: _joined(name, [values[name] for values, _ in parts.values()]) for name in parts["train"][0]}
        y = _joined("target", [targets for _, targets in parts.values()])
        x, signature = fit(self.model, inputs)
        task, default = _task(self.loss, y, math.prod(signature.outputs))
        splits, start = {}, 0
        for part in PARTS:
            count = len(parts[part][1]) if part in parts else 0
            splits[part] = Split(torch.arange(start, start + count), torch.tensor([0, count]))
            start += count
        if task == "regression":
            samples = Dataset("node", x, y.reshape(len(y), -1).float(), task)
        else:
            labels = y.reshape(len(y), -1).squeeze(1).long()
            classes = range(2) if task == "binary" else range(math.prod(signature.outputs))
            samples = Dataset("node", x, labels, task, tuple(map(str, classes)))
        objective = Objective() if default else Objective(loss=_own(self.loss, y, signature))
        return NodeProblem(adapted(self.model, signature), signature, Federation(samples, splits, ("node",)), objective)


class NodeProblem(NamedTuple):
    """A node's samples and loss.

    Attributes:
        model: takes a row per sample and gives ``[b, k]``.
        signature: how the app's module does it.
        fed: the samples as a federation of one client.
        objective: the node's own loss, if it has one.
    """

    model: nn.Module
    signature: Signature
    fed: Federation
    objective: Objective


def _joined(name: str, parts: list[Tensor]) -> Tensor:
    """An entry of all parts' samples.

    Raises:
        ConfigError: they are of different shapes.
    """
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        first, second = sorted(shapes)[:2]
        raise ConfigError(f"{name}: samples have the shapes {[*first]} and {[*second]}; pad all parts to one length")
    return torch.cat(parts)


def _task(loss: Any, y: Tensor, outputs: int) -> tuple[Task, bool]:
    """The task of a node, and whether its loss is the task's own."""
    whole = not y.is_floating_point()
    if type(loss) is nn.BCEWithLogitsLoss and outputs == 1 and bool(((y == 0) | (y == 1)).all()):
        return "binary", _is_plain(loss)
    if type(loss) is nn.MSELoss:
        return "regression", _is_plain(loss)
    task: Task = "classification" if whole and outputs > 1 else "regression"
    default = nn.CrossEntropyLoss if task == "classification" else nn.MSELoss
    return task, loss is None or (type(loss) is default and _is_plain(loss))


def _is_plain(loss: nn.Module) -> bool:
    """Whether no option of one of torch's losses is changed."""
    plain = type(loss)()
    options = ("reduction", "label_smoothing", "ignore_index")
    same = all(getattr(loss, name, None) == getattr(plain, name, None) for name in options)
    return same and getattr(loss, "weight", None) is None and getattr(loss, "pos_weight", None) is None


def _own(loss: Any, y: Tensor, signature: Signature) -> Any:
    """The loss of an app, which takes outputs and targets in the shapes that the app has them."""
    shape, whole, moved = y.shape[1:], None if y.is_floating_point() else y.dtype, dict[Any, Any]()

    def own(outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of the node's app."""
        place = outputs.device, outputs.dtype
        if place not in moved:
            moved[place] = copy.deepcopy(loss).to(*place) if isinstance(loss, nn.Module) else loss
        targets = targets.reshape(-1, *shape)
        targets = targets.to(outputs.dtype) if whole is None else targets.to(whole)
        value: Tensor = moved[place](outputs.reshape(-1, *signature.outputs), targets)
        return value

    return own
