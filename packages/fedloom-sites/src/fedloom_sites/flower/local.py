"""A node's model, samples and loss (`Local`)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from fedloom.data import DATA_PARTS, Dataset, Federation, Split, Task
from fedloom.data.subjects.design import Design, create_design
from fedloom.data.subjects.equal import note_equal_rows
from fedloom.engine import Setting
from fedloom.engine.job import Job
from fedloom.errors import ConfigError, Refused
from fedloom.rows.channels import GaussianNoise
from fedloom.tasks import Objective
from fedloom_sites.deploy.protocol.lengths import clip_upload
from fedloom_sites.flower.analyses import Analyses
from fedloom_sites.flower.samples import NodeSamples, Signature, adapt_module, fit_inputs, read_samples

PROBE_SAMPLES = 2
"""Number of samples for testing a node's loss."""


@dataclass
class Local:
    """A node's model and samples.

    Args:
        model: the module, which must be the same as at the server. The server sends its parameters. The output is
            either a tensor with a row for each sample, or an object or dict whose ``logits`` are a tensor of this
            shape.
        trainset: training samples, as a torch ``Dataset`` or ``DataLoader``, or as tensors ``(x, y)``. A sample is a
            tuple whose last entry is the target, or a dict. The samples are read only once, so a data set that returns
            different samples when it is read again is rejected. Only the data set and ``collate_fn`` of a loader are
            used. The strategy's ``local`` settings determine how batches are drawn.
        loss: ``nn.CrossEntropyLoss()``, ``nn.BCEWithLogitsLoss()``, ``nn.MSELoss()``, or a function that receives a
            batch's outputs and targets, in the shapes of the model and the samples, and returns the mean over the
            batch. The default is the cross-entropy if targets are whole numbers, and otherwise the squared error. If
            there is a label for each position (``[n, L]``) and outputs are ``[n, L, C]``, the loss is called with the
            outputs and labels of the labelled positions, ``[k, C]`` and ``[k]``. The value -100, or the
            ``ignore_index`` of ``nn.CrossEntropyLoss``, marks a position without a label.
        testset: test samples, of any of these types.
        valset: validation samples, of any of these types.
        device: device of the node's computations.
        folder: folder for the node's model file, ``<node>.safetensors``, which is written at every evaluation, and for
            the node's state. If None, no files are written.
        keys: for samples that are dicts, the names of the model's inputs, followed by the name of the target. By
            default, the target is the entry ``label``, ``labels``, ``target``, ``targets`` or ``y``, and all other
            entries are inputs. Multiple inputs are passed to the model by name.
        subject: if samples are dicts, the name of the entry that contains the sample's subject, such as a patient
            number. The entry is not an input, and no subject may be in more than one of the sets.
        upload_transform: the node's noise, as ``fl.channels.GaussianNoise(clip=1.0, sigma=1.0)`` or a dict with its
            options. The server's document cannot weaken it: the document's noise is used only if its clip is not larger
            and its noise is not smaller. Otherwise, the node's noise replaces it. Scores are sent without any noise.
        norm_bound: maximum L2 norm, above 0, of the difference in every field that leaves the node. A difference whose
            norm is larger is scaled down, regardless of the server's document. If None, there is no limit.
        analyses: sum-based analyses that the node answers, with the agreement on their columns. If None, the node
            answers no analyses.
    """

    model: nn.Module
    trainset: Any
    loss: Any = None
    testset: Any = None
    valset: Any = None
    device: str | torch.device = "cpu"
    folder: Path | str | None = None
    keys: Sequence[str] = ()
    subject: str | None = None
    upload_transform: GaussianNoise | Mapping[str, Any] | None = None
    norm_bound: float | None = None
    analyses: Analyses | None = None

    def add_noise_floor(self, setting: Setting) -> Setting:
        """Return the setting in the server's document, with at least the node's own noise.

        Raises:
            ConfigError: the channel does not add noise.
            Refused: the document has a channel of a different kind, and two channels cannot be combined.
        """
        own_noise, channel = self._noise(), setting.upload_transform
        if own_noise is None:
            return setting
        if channel is not None and not isinstance(channel, GaussianNoise):
            raise Refused(
                "this node adds its own noise (Local(upload_transform=...)), and an upload can have only one "
                f"transform. Remove upload_transform {type(channel).__name__} from the strategy"
            )
        if (
            channel is not None
            and channel.clip <= own_noise.clip
            and channel.sigma * channel.clip >= own_noise.sigma * own_noise.clip
        ):
            return setting
        return setting.with_(upload_transform=own_noise)

    def clip_upload(self, job: Job, upload: object, down: object) -> Any:
        """Return a node's upload with fields ``[1, .]``, scaled down to the node's norm bound if necessary."""
        if self.norm_bound is None:
            return upload
        return clip_upload(job, upload, down, dict.fromkeys(job.fields, float(self.norm_bound)))[0]

    def _noise(self) -> GaussianNoise | None:
        if self.upload_transform is None or isinstance(self.upload_transform, GaussianNoise):
            return self.upload_transform
        given: Any = self.upload_transform
        options = {"kind": "gaussian-noise", **given} if isinstance(given, Mapping) else given
        try:
            return GaussianNoise.model_validate(options)
        except ValidationError as error:
            what = error.errors()[0]
            where = ".".join(map(str, ("upload_transform", *what["loc"])))
            raise ConfigError(
                f"Local: {where}: {what['msg']}, got {what['input']!r:.80}. Pass the node's noise as "
                "fl.channels.GaussianNoise(clip=1.0, sigma=1.0)"
            ) from None

    def _check_floor(self) -> None:
        """Raise an error if the noise or the bound is invalid.

        Raises:
            ConfigError: the noise or the bound is invalid.
        """
        self._noise()
        bound: Any = self.norm_bound
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float) or not bound > 0):
            raise ConfigError(
                f"Local: norm_bound must be a number greater than 0, got {bound!r:.80}. Omit "
                "`norm_bound` to set no bound"
            )

    def read(self) -> NodeProblem:
        """Read the samples, and return the local problem.

        Raises:
            ConfigError: the samples are invalid, or the model or the loss does not accept them.
            DataError: a subject is in two of the sets.
        """
        self._check_floor()
        if not isinstance(self.model, nn.Module):
            raise ConfigError(f"model must be a module, such as Net(), got {self.model!r:.80}")
        if self.loss is not None and (isinstance(self.loss, type) or not callable(self.loss)):
            raise ConfigError(f"loss must be a function or a module, such as nn.MSELoss(), got {self.loss!r:.80}")
        try:
            torch.zeros(1, device=self.device)
        except Exception as error:
            raise ConfigError(f"device: {str(self.device)!r} does not exist ({str(error)[:100]}). Use 'cpu'") from error
        sets = {"train": self.trainset, "validation": self.valset, "test": self.testset}
        parts = {
            part: read_samples(part, samples, self.keys, self.subject)
            for part, samples in sets.items()
            if samples is not None
        }
        if "train" not in parts:
            raise ConfigError("trainset is None. A node needs training samples")
        inputs = {
            name: _join_entries(name, [one.inputs[name] for one in parts.values()]) for name in parts["train"].inputs
        }
        y = _join_entries("target", [one.target for one in parts.values()])
        x, signature = fit_inputs(self.model, inputs)
        if _has_positions(y, signature.outputs):
            return self._sequences(x, y, signature._replace(has_positions=True), parts)
        task, default = _choose_task(self.loss, y, math.prod(signature.outputs))
        if task == "regression":
            samples = Dataset("node", x, y.reshape(len(y), -1).float(), task, design=_subject_design(parts))
        else:
            labels = y.reshape(len(y), -1).squeeze(1).long()
            if labels.dim() > 1:
                raise ConfigError(
                    f"targets of shape {[*y.shape[1:]]} do not fit outputs of {[*signature.outputs]}. "
                    "A model must return one number per class. With one label per position [L], it "
                    "must return one row per position, [L, C]"
                )
            classes = range(2) if task == "binary" else range(math.prod(signature.outputs))
            samples = Dataset("node", x, labels, task, tuple(map(str, classes)), design=_subject_design(parts))
        model, objective = adapt_module(self.model, signature), Objective()
        if not default:
            loss = _adapt_loss(self.loss, y[0], signature.outputs)
            if fault := _describe_loss_fault(loss, _first_outputs(model, x), samples.y[:PROBE_SAMPLES]):
                raise ConfigError(f"loss: {fault}")
            objective = Objective(loss=loss)
        return NodeProblem(model, signature, _join_parts(samples, parts), objective)

    def _sequences(self, x: Tensor, y: Tensor, signature: Signature, parts: Mapping[str, Any]) -> NodeProblem:
        """Return the local problem for samples with a label for each position, ``[n, L]``."""
        ignored, classes = getattr(self.loss, "ignore_index", -100), tuple(map(str, range(signature.outputs[-1])))
        labels = torch.where(y == ignored, -1, y.long())
        samples = Dataset("node", x, labels, "classification", classes, positions=True, design=_subject_design(parts))
        plain = self.loss is None or (
            type(self.loss) is nn.CrossEntropyLoss and _is_plain(self.loss, ("ignore_index",))
        )
        model, objective = adapt_module(self.model, signature), Objective()
        if not plain:
            outputs, targets = _first_outputs(model, x).flatten(0, 1), labels[:PROBE_SAMPLES].flatten()
            outputs, targets = outputs[targets >= 0], targets[targets >= 0]
            loss = _adapt_loss(self.loss, y[0, 0], signature.outputs[-1:])
            fault = _describe_loss_fault(loss, outputs, targets)
            if fault and bool((labels >= 0).all()):  # try the loss on whole sequences
                loss = _adapt_loss(self.loss, y[0], signature.outputs)
                fault = _describe_loss_fault(loss, outputs, targets)
            if fault:
                raise ConfigError(
                    f"loss: {fault}. With one label per position, the loss receives the labelled positions"
                )
            objective = Objective(loss=loss)
        return NodeProblem(model, signature, _join_parts(samples, parts), objective)


class NodeProblem(NamedTuple):
    """A node's model, samples and loss, ready for a run.

    Attributes:
        model: model that receives one row for each sample and returns ``[b, k]``.
        signature: call signature of the app's module.
        fed: samples, as a federation with one client.
        objective: the node's loss, or None to use the task's loss.
    """

    model: nn.Module
    signature: Signature
    fed: Federation
    objective: Objective


def _subject_design(parts: Mapping[str, NodeSamples]) -> Design | None:
    """Return the subject of each sample, part by part as in `DATA_PARTS`, or None if there are no subjects."""
    owners = [owner for part in DATA_PARTS if part in parts for owner in parts[part].subject or ()]
    return create_design({"subject": owners}, len(owners), "node") if owners else None


def _split_indices(parts: Mapping[str, Any]) -> dict[str, Split]:
    """Return the indices of the samples of all parts, one part after another."""
    splits, start = {}, 0
    for part in DATA_PARTS:
        count = len(parts[part].target) if part in parts else 0
        splits[part] = Split(torch.arange(start, start + count), torch.tensor([0, count]))
        start += count
    return splits


def _join_parts(samples: Dataset, parts: Mapping[str, Any]) -> Federation:
    """Return a federation with the node as its only client, with notes on subjects and equal samples."""
    splits = _split_indices(parts)
    copies = note_equal_rows(samples, {part: split.index.numpy() for part, split in splits.items()}, None)
    doubts = () if samples.design is None else samples.design.doubts
    return Federation(samples, splits, ("node",), notes=(*doubts, *copies))


def _has_positions(y: Tensor, outputs: tuple[int, ...]) -> bool:
    """Return True if targets ``[n, L]`` are labels of positions, each with a row of the output ``[L, C]``."""
    return not y.is_floating_point() and y.dim() == 2 and len(outputs) == 2 and y.shape[1] == outputs[0]


def _join_entries(name: str, parts: list[Tensor]) -> Tensor:
    """Join the tensors of one entry across all parts.

    Raises:
        ConfigError: the shapes of the parts differ, or some parts contain bytes and others contain floats.
    """
    kinds = {part.is_floating_point(): part.dtype for part in parts}
    if len(kinds) > 1 and torch.uint8 in kinds.values():
        raise ConfigError(
            f"{name}: some parts contain bytes (uint8), and others contain floats, so they may differ by a factor of "
            "255. Convert all parts in the same way, for example to floats by x / 255"
        )
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        first, second = sorted(shapes)[:2]
        raise ConfigError(
            f"{name}: samples have the shapes {[*first]} and {[*second]}. Pad all parts to the same length"
        )
    return torch.cat(parts)


def _choose_task(loss: object, y: Tensor, outputs: int) -> tuple[Task, bool]:
    """Return a node's task, and True if its loss is the task's default loss."""
    whole = not y.is_floating_point()
    if type(loss) is nn.BCEWithLogitsLoss and outputs == 1 and bool(((y == 0) | (y == 1)).all()):
        return "binary", _is_plain(loss)
    if type(loss) is nn.MSELoss:
        return "regression", _is_plain(loss)
    task: Task = "classification" if whole and outputs > 1 else "regression"
    default = nn.CrossEntropyLoss if task == "classification" else nn.MSELoss
    return task, loss is None or (type(loss) is default and _is_plain(loss))


def _is_plain(loss: nn.Module, free: Sequence[str] = ()) -> bool:
    """Return True if a torch loss has its default options, apart from those in ``free``."""
    plain = type(loss)()
    options = {"reduction", "label_smoothing", "ignore_index"}.difference(free)
    same = all(getattr(loss, name, None) == getattr(plain, name, None) for name in options)
    return same and getattr(loss, "weight", None) is None and getattr(loss, "pos_weight", None) is None


def _adapt_loss(loss: object, y: Tensor, outputs_shape: tuple[int, ...]) -> Any:
    """Return an app's loss, adapted to the shapes of the app's outputs and targets. ``y`` is a single target."""
    is_float = y.is_floating_point() or isinstance(loss, nn.BCEWithLogitsLoss | nn.BCELoss)
    shape, whole, moved = y.shape, None if is_float else y.dtype, dict[Any, Any]()

    def wrapped(outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss of the node's app."""
        place = outputs.device, outputs.dtype
        if place not in moved:
            moved[place] = copy.deepcopy(loss).to(*place) if isinstance(loss, nn.Module) else loss
        targets = targets.reshape(-1, *shape)
        targets = targets.to(outputs.dtype) if whole is None else targets.to(whole)
        value: Tensor = moved[place](outputs.reshape(-1, *outputs_shape), targets)
        return value

    wrapped.__name__ = wrapped.__qualname__ = getattr(loss, "__name__", type(loss).__name__)
    return wrapped


@torch.no_grad()
def _first_outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Return the outputs of a module in evaluation mode for the first samples."""
    training, first = model.training, next((p for p in model.parameters() if p.is_floating_point()), x)
    try:
        outputs: Tensor = model.eval()(x[:PROBE_SAMPLES].to(first))
    finally:
        model.train(training)
    return outputs


def _describe_loss_fault(loss: Any, outputs: Tensor, targets: Tensor) -> str:
    """Try a loss on some outputs and targets, and return a description of its error, or "" if it returns a scalar."""
    shapes = f"outputs {[*outputs.shape]} with targets {[*targets.shape]}"
    try:
        mean = loss(outputs, targets)
    except Exception as error:
        return f"{loss.__name__} fails on {shapes} ({type(error).__name__}: {str(error)[:150]})"
    if not isinstance(mean, Tensor) or mean.numel() != 1:
        got = [*mean.shape] if isinstance(mean, Tensor) else type(mean).__name__
        return f"{loss.__name__} must return one number for a batch, for example the mean, got {got} for {shapes}"
    return ""
