"""Local: a node's own model, samples and loss."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fedloom.data import PARTS, Dataset, Federation, Split
from fedloom.errors import ConfigError
from fedloom.tasks import Objective

_OWN = {"classification": nn.CrossEntropyLoss, "binary": nn.BCEWithLogitsLoss, "regression": nn.MSELoss}


@dataclass
class Local:
    """A node's model and samples.

    Args:
        model: the module, as at the server; its values are those that the server sends.
        trainset: training samples: a torch ``Dataset`` or ``DataLoader``, or tensors ``(x, y)``. They are read once,
            so random changes of them are drawn once; batches are drawn by the strategy's ``local``.
        loss: ``nn.CrossEntropyLoss()``, ``nn.BCEWithLogitsLoss()``, ``nn.MSELoss()``, or a function of a batch's
            outputs and targets; by default the cross-entropy of whole-number targets, else the squared error.
        testset: test samples, in any of these forms.
        valset: validation samples, in any of these forms.
        device: where the node computes.
        folder: of the node's model file, ``<node>.safetensors``, written at every evaluation; None for no file.
    """

    model: nn.Module
    trainset: Any
    loss: Any = None
    testset: Any = None
    valset: Any = None
    device: str = "cpu"
    folder: Path | str | None = None

    def federation(self) -> Federation:
        """The node's samples as a federation of one client.

        Raises:
            ConfigError: they are no samples, or the model does not take them.
        """
        sets = {"train": self.trainset, "validation": self.valset, "test": self.testset}
        samples = {part: _tensors(part, value) for part, value in sets.items() if value is not None}
        x, y = (torch.cat([pair[k] for pair in samples.values()]) for k in (0, 1))
        task = next((t for t, loss in _OWN.items() if type(self.loss) is loss), None)
        task = task or ("regression" if y.is_floating_point() else "classification")
        parts, start = {}, 0
        for part in PARTS:
            count = len(samples[part][0]) if part in samples else 0
            parts[part] = Split(torch.arange(start, start + count), torch.tensor([0, count]))
            start += count
        outputs = _outputs(self.model, x)
        if task == "classification":
            classes = tuple(map(str, range(outputs)))
            data = Dataset("node", x, y.long(), "classification", classes)
        elif task == "binary":
            data = Dataset("node", x, y.flatten().long(), "binary", ("0", "1"))
        else:
            data = Dataset("node", x, y.reshape(len(y), -1).float(), "regression", ())
        return Federation(data, parts, ("node",))

    @property
    def objective(self) -> Objective:
        """The node's own loss, if it has one."""
        if self.loss is None or _is_default(self.loss):
            return Objective()
        loss = self.loss

        def own(outputs: Tensor, targets: Tensor) -> Tensor:
            """The loss of the node's app."""
            value: Tensor = loss(outputs, targets)
            return value

        return Objective(loss=own)


def _tensors(part: str, value: Any) -> tuple[Tensor, Tensor]:
    """Samples and targets."""
    value = value.dataset if isinstance(value, DataLoader) else value
    if not (isinstance(value, tuple) and len(value) == 2 and all(isinstance(v, Tensor) for v in value)):
        try:
            pairs = [value[k] for k in range(len(value))]
            pairs = [tuple(pair.values()) if isinstance(pair, dict) else pair for pair in pairs]
            value = tuple(torch.stack([torch.as_tensor(pair[k]) for pair in pairs]) for k in (0, 1))
        except Exception as error:
            raise ConfigError(
                f"{part}set must be a Dataset or DataLoader of pairs (sample, target), or tensors (x, y), got "
                f"{type(value).__name__}: {error}"
            ) from error
    x, y = value
    if not len(x) or len(x) != len(y):
        raise ConfigError(f"{part}set needs as many samples as targets, and one at least, got {len(x)} and {len(y)}")
    return x if x.is_floating_point() else x.float(), y


@torch.no_grad()
def _outputs(model: nn.Module, x: Tensor) -> int:
    """Outputs of a model for one sample."""
    training = model.training
    try:
        first = next((p for p in model.parameters()), x)
        outputs = model.eval()(x[:1].to(first))
    except Exception as error:
        raise ConfigError(f"the model does not take a sample of shape {[*x.shape[1:]]}: {error}") from error
    finally:
        model.train(training)
    return int(outputs.shape[-1])


def _is_default(loss: Any) -> bool:
    """Whether a loss is one of torch's that fedloom has built in, with no option changed."""
    kind = next((kind for kind in _OWN.values() if type(loss) is kind), None)
    if kind is None:
        return False
    options = ("reduction", "label_smoothing", "ignore_index")
    same = all(getattr(loss, name, None) == getattr(kind(), name, None) for name in options)
    return same and getattr(loss, "weight", None) is None and getattr(loss, "pos_weight", None) is None
