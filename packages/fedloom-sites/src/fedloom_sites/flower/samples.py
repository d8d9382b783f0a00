"""Conversion of an app's data sets to tensors, and of its module to one that maps a row per sample to a row."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from torch.utils.data import default_collate as collate

from fedloom.data import Dataset as ReadDataset
from fedloom.data.sides import are_sample_sets, batches_error
from fedloom.data.sources.array_data import refuse_masked
from fedloom.data.sources.rereading import check_reread_samples, gives_random_samples
from fedloom.data.sources.table.frames import is_frame, is_hub
from fedloom.errors import ConfigError, DataError, WireError

TARGET_KEYS = ("label", "labels", "target", "targets", "y")
"""Names of the target in a sample that is a dict."""
AUGMENT_HINT = (
    "leave random transforms out of the data set and pass augment to the strategy, as augment={'flip': 0.5, 'crop': 4}"
)
COLLATION_CHECK_SAMPLES = 8
"""Number of samples passed to a loader's collate_fn, and number of calls with them, to detect random changes.

If tokens are masked with a probability of 0.15, the 64 values at a position differ with probability 1 - 1e-4."""
MAX_EXACT_INTEGER = 2**24
"""Bound below which float32 represents integers exactly."""
INPUT_DTYPES = {"float": None, "int64": torch.int64, "bool": torch.bool}
"""Types of a module's inputs. Inputs of a floating-point type are converted to the run's type."""


class ModuleInput(NamedTuple):
    """An input of a module.

    Attributes:
        name: keyword of the input. It is empty if inputs are passed by position.
        shape: shape of one sample.
        dtype: name in `INPUT_DTYPES`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


class Signature(NamedTuple):
    """Call signature of an app's module.

    Attributes:
        inputs: the module's inputs, which are stored next to each other in a row. The tuple is empty if the sample is
            the only input and is passed unchanged.
        outputs: shape of the output for one sample.
        has_fields: True if the output is a dict or an object. Only its ``logits`` are used.
        has_positions: True if a sample has a label for each position. Each position then has a row of ``outputs``.
    """

    inputs: tuple[ModuleInput, ...]
    outputs: tuple[int, ...]
    has_fields: bool
    has_positions: bool = False

    @property
    def widths(self) -> list[int]:
        """Number of values of each input in one row."""
        return [math.prod(part.shape) for part in self.inputs]

    def text(self) -> str:
        """Return the signature as JSON."""
        return json.dumps(self)

    @classmethod
    def read(cls, text: str) -> Signature:
        """Read a signature from the JSON written by `text`.

        Raises:
            WireError: the text is not a signature.
        """
        try:
            inputs, outputs, fields, positions = json.loads(text)
            parts = tuple(ModuleInput(str(name), tuple(map(int, shape)), str(dtype)) for name, shape, dtype in inputs)
            signature = cls(parts, tuple(map(int, outputs)), bool(fields), bool(positions))
        except (TypeError, ValueError) as error:
            raise WireError("the node's sample signature is invalid") from error
        sizes = [*signature.outputs, *(size for part in signature.inputs for size in part.shape)]
        if any(part.dtype not in INPUT_DTYPES for part in signature.inputs) or not all(
            0 < size < MAX_EXACT_INTEGER for size in sizes
        ):
            raise WireError("the node's sample signature is invalid")
        return signature


class UnpackHook:
    """Hook that is called before a module, and converts rows ``[b, p]`` to the module's inputs."""

    def __init__(self, signature: Signature) -> None:
        self.inputs, self._widths = signature.inputs, signature.widths

    def __call__(self, _module: nn.Module, args: tuple[Tensor], _kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rows = args[0].flatten(1).split(self._widths, 1)
        values = [
            row.reshape(-1, *part.shape).to(INPUT_DTYPES[part.dtype] or row.dtype)
            for row, part in zip(rows, self.inputs, strict=True)
        ]
        if self.inputs[0].name:
            return (), {part.name: value for part, value in zip(self.inputs, values, strict=True)}
        return tuple(values), {}


def flatten_outputs_hook(_module: nn.Module, _args: Any, outputs: Any) -> Tensor:
    """Flatten a module's outputs to ``[b, k]`` in a hook; if there are several fields, use only the logits."""
    outputs = _get_logits(outputs)
    rows: Tensor = outputs.reshape(len(outputs), -1)
    return rows


def use_logits_hook(_module: nn.Module, _args: object, outputs: object) -> Tensor:
    """Return the logits from a module's outputs in a hook. Outputs without logits remain unchanged."""
    rows: Tensor = _get_logits(outputs)
    return rows


def _get_logits(outputs: object) -> Any:
    """Return the field or entry ``logits`` of an output, or the output itself if it has none."""
    return outputs.get("logits", outputs) if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)


def adapt_module(module: nn.Module, signature: Signature) -> nn.Module:
    """Return a module that maps each sample's row to ``[b, k]``, or to ``[b, L, k]`` if every position has a label.

    The result is a copy, or the module itself if it already does this.
    """
    if signature.inputs or signature.has_fields or len(signature.outputs) != 1:
        module = copy.deepcopy(module)
    if signature.inputs:
        module.register_forward_pre_hook(UnpackHook(signature), with_kwargs=True)
    if signature.has_fields or len(signature.outputs) != 1:
        module.register_forward_hook(use_logits_hook if signature.has_positions else flatten_outputs_hook)
    return module


class NodeSamples(NamedTuple):
    """Samples that belong to one part of a node's data.

    Attributes:
        inputs: inputs ``[n, ...]``, keyed by name.
        target: ``[n, ...]``.
        subject: subject of each sample ``[n]``. None if no subjects are given.
    """

    inputs: dict[str, Tensor]
    target: Tensor
    subject: list[Any] | None = None


def read_samples(part: str, samples: object, keys: Sequence[str], subject: str | None = None) -> NodeSamples:
    """Read a data set, and return its inputs, keyed by name, and its targets.

    Args:
        part: name of the part for messages.
        samples: a ``Dataset``, a ``DataLoader``, or tensors ``(x, y)``.
        keys: for samples that are dicts, the names of the inputs, followed by the name of the target. Empty if the
            default names are used.
        subject: for samples that are dicts, the entry that contains the sample's subject, which is not an input. None
            if there are no subjects.

    Raises:
        ConfigError: the data set does not contain samples that include a target, or is a table.
        DataError: some values are masked.
    """
    refuse_masked(samples, f"{part}set")
    whole = samples if isinstance(samples, tuple) else (samples,)
    if any(isinstance(v, ReadDataset) or (is_frame(v) and not is_hub(v)) for v in whole):
        raise ConfigError(
            f"{part}set is a table or a fedloom Dataset, but the model of an app takes tensors. Pass the tensors "
            "(x, y), such as torch.tensor(frame[columns].to_numpy('float32')) for x, or (data.x, data.y)"
        )
    if odd := [v.dtype for v in whole if isinstance(v, np.ndarray) and v.dtype.kind not in "uifb"]:
        raise ConfigError(f"{part}set must contain real numbers, got an array of {odd[0]}. Pass floats")
    if isinstance(samples, tuple) and len(samples) == 2 and all(isinstance(v, Tensor | np.ndarray) for v in samples):
        native = (v if isinstance(v, Tensor) else np.asarray(v, v.dtype.newbyteorder("=")) for v in samples)
        batch: Any = tuple(map(torch.as_tensor, native))
    else:
        batch = _collate_samples(part, samples)
    owners = None
    if subject is not None:
        if not isinstance(batch, Mapping) or subject not in batch:
            have = f"they have {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else "they are not dicts"
            raise ConfigError(f"subject: the samples in {part}set have no entry {subject!r}; {have}")
        named = batch[subject]
        owners = named.tolist() if isinstance(named, Tensor) else list(named)
        batch = {name: value for name, value in batch.items() if name != subject}
    if isinstance(batch, Mapping):
        names = tuple(keys) or _input_and_target_keys(part, batch)
        absent = [name for name in names if name not in batch]
        if absent:
            entries = ", ".join(map(repr, batch))
            raise ConfigError(
                f"keys: the samples in {part}set do not contain {absent[0]!r}. Their entries are: {entries}"
            )
        *inputs, y = (batch[name] for name in names)
        names = names[:-1]
    else:
        *inputs, y = batch
        names = tuple(map(str, range(len(inputs))))
    values = dict(zip(names, inputs, strict=True))
    for name, value in {**values, "target": y}.items():
        if not isinstance(value, Tensor):
            cure = ", or name the relevant entries: Local(..., keys=('image', 'label'))" if type(batch) is dict else ""
            raise ConfigError(
                f"{part}set: {name!r} of the samples must be a tensor or a number, got "
                f"{type(value).__name__}. Omit {name!r}{cure}"
            )
        if value.is_complex():
            raise ConfigError(f"{part}set: {name!r} contains complex numbers. Pass real numbers, such as x.abs()")
    counts = {len(value) for value in (*inputs, y)}
    if counts == {0} or len(counts) > 1 or not inputs:
        raise ConfigError(
            f"{part}set needs one target for each sample, and at least one sample, got "
            f"{' and '.join(str(len(value)) for value in (*inputs, y))}"
        )
    return NodeSamples(values, y, owners)


def _collate_samples(part: str, samples: object) -> Any:
    """Return all samples as one batch, joined in the way that the loader joins them."""
    loader = samples if isinstance(samples, DataLoader) else None
    dataset: Any = samples if loader is None else loader.dataset
    join = collate if loader is None or loader.batch_sampler is None else loader.collate_fn
    stream = isinstance(dataset, IterableDataset)
    try:
        index = () if stream else range(len(dataset)) if loader is None else _loader_indices(part, loader)
        first = dataset if stream else (dataset[k] for k in index)
        again = None if stream else lambda places: (dataset[index[place]] for place in places)
        every = list(check_reread_samples(first, again, lambda: dataset, f"{part}set", AUGMENT_HINT))
        if not every:
            cure = "a node needs training samples" if part == "train" else "leave it out"
            raise ConfigError(f"{part}set is empty; {cure}")
        for k, sample in enumerate(every):
            parts = tuple(sample.values()) if isinstance(sample, Mapping) else sample
            refuse_masked(parts, f"{part}set: sample {k}")
        if join is collate and isinstance(every[0], list) and not are_sample_sets([every[0]]):
            raise ConfigError(
                f"{part}set: sample 0 is a list of {len(every[0])} entries. Use a tuple whose last entry is the target"
            )
        if join is not collate and gives_random_samples(
            lambda: join(every[:COLLATION_CHECK_SAMPLES]), COLLATION_CHECK_SAMPLES
        ):
            raise ConfigError(
                f"{part}set: the collate_fn of the DataLoader is random: it makes different batches "
                "from the same samples, for example with random masks. Samples are read only once, "
                "so every round would use the same random values. Remove the randomness"
            )
        batch = join(every)
        if not isinstance(batch, (Mapping, tuple, list)) or len(batch) < 2:
            raise TypeError(f"a sample has no target: {type(batch).__name__}")
    except (ConfigError, DataError):
        raise
    except Exception as error:
        if isinstance(samples, list) and are_sample_sets(samples):
            raise batches_error(f"{part}set", samples) from error
        raise ConfigError(
            f"{part}set must be a Dataset or DataLoader of pairs (sample, target) or of dicts, or tensors (x, y), got "
            f"{type(samples).__name__}: {error}"
        ) from error
    return batch


def _loader_indices(part: str, loader: DataLoader[Any]) -> Sequence[int]:
    """Return the indices of the samples that a loader visits, in the order of the data set."""
    dataset: Any = loader.dataset
    sampler, every = loader.sampler, range(len(dataset))
    usual = type(loader.batch_sampler) in (BatchSampler, type(None))
    if usual and isinstance(sampler, SubsetRandomSampler):
        return sorted(sampler.indices)
    if usual and isinstance(sampler, (SequentialSampler, RandomSampler)) and len(sampler) == len(every):
        return every
    name = type(sampler if usual else loader.batch_sampler).__name__
    raise ConfigError(
        f"{part}set: the DataLoader uses a {name}, but the strategy's local settings determine how "
        "batches are drawn. Pass the Dataset of the DataLoader"
    )


def _input_and_target_keys(part: str, batch: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the inputs, followed by the name of the target.

    Raises:
        ConfigError: no entry or more than one entry has a name in `TARGET_KEYS`.
    """
    targets = [name for name in batch if name in TARGET_KEYS]
    if len(targets) != 1 or len(batch) < 2:
        raise ConfigError(
            f"{part}set: the samples contain the entries {', '.join(map(repr, batch))}, and fedloom does not know "
            "which one is the target. Name the inputs, then the target: Local(..., keys=('image', 'character'))"
        )
    return (*(name for name in batch if name != targets[0]), targets[0])


def fit_inputs(module: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Signature]:
    """Convert inputs to a tensor that a module accepts, and determine its signature by calling it on two samples.

    Args:
        module: the app's module.
        inputs: inputs ``[n, ...]``, keyed by name.

    Returns:
        A row or array for each sample ``[n, ...]``, and the signature.

    Raises:
        ConfigError: the module accepts none of the possible representations of the inputs.
    """
    names, values = [*inputs], [*inputs.values()]
    if len(values) == 1:
        x = values[0] if values[0].is_floating_point() else values[0].float()
        try:
            signature = _call_module(module, x, ())
        except ConfigError:
            if values[0].is_floating_point():
                raise
        else:
            if values[0].dtype == torch.uint8:
                raise ConfigError(
                    "samples are bytes (uint8), and fedloom cannot know whether the model divides the bytes. Pass "
                    "floats, such as x / 255, or x.float() if the model itself divides by 255"
                )
            return x, signature
    for name, value in inputs.items():
        if not value.is_floating_point() and int(value.abs().max()) >= MAX_EXACT_INTEGER:
            raise ConfigError(
                f"input {name!r} contains whole numbers of at least {MAX_EXACT_INTEGER}. Number the values from 0"
            )
    kinds = ["float" if v.is_floating_point() else "bool" if v.dtype == torch.bool else "int64" for v in values]
    by_name = len(values) > 1 and not names[0].isdigit()
    parts = tuple(
        ModuleInput(name if by_name else "", tuple(value.shape[1:]), kind)
        for name, value, kind in zip(names, values, kinds, strict=True)
    )
    x = torch.cat([value.reshape(len(value), -1).float() for value in values], 1)
    return x, _call_module(module, x, parts)


@torch.no_grad()
def _call_module(module: nn.Module, x: Tensor, parts: tuple[ModuleInput, ...]) -> Signature:
    """Call a module with the given inputs, and return its signature.

    Raises:
        ConfigError: the module fails on the inputs, or does not return a tensor with a row for each sample.
    """
    training, two = module.training, x[:2]
    try:
        first = next((p for p in module.parameters() if p.is_floating_point()), two)
        args, keywords = (two.to(first),), dict[str, Any]()
        if parts:
            args, keywords = UnpackHook(Signature(parts, (), has_fields=False))(module, args, keywords)
        outputs = module.eval()(*args, **keywords)
    except Exception as error:
        inputs = ", ".join(f"{part.name} {[*part.shape]} {part.dtype}" for part in parts)
        raise ConfigError(
            f"the model does not accept a sample of {inputs or f'shape {[*x.shape[1:]]}'}: {str(error)[:200]}"
        ) from error
    finally:
        module.train(training)
    rows = _get_logits(outputs)
    if not isinstance(rows, Tensor) or rows.dim() < 1 or len(rows) != len(two):
        got = f"shape {[*rows.shape]}" if isinstance(rows, Tensor) else type(rows).__name__
        raise ConfigError(
            "the model must return a tensor with one row per sample, or a dict or object whose "
            f"'logits' are such a tensor, got {got} for {len(two)} samples"
        )
    return Signature(parts, tuple(rows.shape[1:]), rows is not outputs)
