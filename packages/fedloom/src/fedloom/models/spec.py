"""Specification of a model as a value.

A model is built deterministically, without changing the global random generators.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from pydantic import Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from fedloom.errors import ConfigError
from fedloom.models.adapters import Adapters, add_adapters
from fedloom.models.guided import GuidedOption
from fedloom.models.memory import MemoryOption
from fedloom.models.mixture import MixtureOption
from fedloom.models.parts import Construction
from fedloom.seeds import as_global, generator
from fedloom.storage.disk import check_regular_file
from fedloom.values import Value

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
}
"""Activation functions, keyed by name."""
DIGEST_MARK = "#sha256="
"""Separator between the name of a weight file and its required SHA-256 digest."""


class InitialValues(Value):
    """Options of all models that determine the initial values and which values are trained."""

    init_from: str | None = Field(
        None,
        description=(
            "safetensors file with the initial values, as written by `fedloom export`. A digest may follow after "
            "#sha256= (default: random values, drawn with the seed)"
        ),
    )
    adapters: Adapters | None = Field(
        None,
        description="low-rank adapters that are trained instead of the layers: a table with the keys rank, on, scale "
        "and head",
    )


CONSTRUCTIONS: tuple[type[Construction], ...] = (MixtureOption, GuidedOption, MemoryOption)
"""Options of all models that build a larger network from plain networks. At most one of these options may be set."""


class ModelSpec(MemoryOption, GuidedOption, MixtureOption, InitialValues, ABC):
    """Specification of the model in an experiment.

    Models accept normalized floats ``[b, *shape]`` and return ``[b, outputs]``: logits, or values for regression.
    Models for sequences accept tokens as int64 ``[b, length]``, with 0 for padding at the end. They return ``[b,
    outputs]``, or ``[b, length, outputs]`` if each position has a label.
    """

    @model_validator(mode="after")
    def _one_construction(self) -> Self:
        chosen = [one.option for one in self.constructions]
        if len(chosen) > 1:
            *names, last = (one.option for one in CONSTRUCTIONS)
            raise ValueError(
                f"a network needs exactly one of {', '.join(names)} and {last}, got {' and '.join(chosen)}"
            )
        return self

    @property
    def constructions(self) -> list[type[Construction]]:
        """Options in `CONSTRUCTIONS` that are set. At most one of them may be set."""
        return [one for one in CONSTRUCTIONS if getattr(self, one.option)]

    def build(
        self, shape: tuple[int, ...], outputs: int, seed: int = 0, tokens: tuple[int, bool] | None = None
    ) -> nn.Module:
        """Build a model with initial values, as float32 on the CPU.

        The initial values follow PyTorch's defaults, and are drawn with ``seed``. The global random generators remain
        unchanged.

        Args:
            shape: shape of a sample without the batch dimension, such as ``(3, 32, 32)``.
            outputs: number of outputs (see `fedloom.tasks.Task.outputs`).
            seed: seed of the initial values.
            tokens: for sequences, the number of tokens in the vocabulary (0 for numeric samples with a label for each
                position), and True if each position has a label.

        Raises:
            ConfigError: the model cannot process samples of this shape, does not fit in memory, or does not match its
                weight file or its adapters.
        """
        module = self._draw_model(shape, outputs, seed, tokens)
        if self.init_from is not None:
            load_weights(module, self.init_from)
        if self.adapters is None:
            return module
        with _seed_initial_draws(seed, "adapters"):
            return add_adapters(module, self.adapters)

    def _draw_model(
        self, shape: tuple[int, ...], outputs: int, seed: int, tokens: tuple[int, bool] | None
    ) -> nn.Module:
        if outputs < 1 or not shape or min(shape) < 1:
            raise ConfigError(f"a model needs a sample shape and at least one output, got {tuple(shape)} and {outputs}")
        with _seed_initial_draws(seed, "model"):
            try:
                for one in self.constructions:
                    value = getattr(self, one.option)
                    count = one.count_networks(value)
                    return one.wrap_networks([self._network(shape, outputs, tokens) for _ in range(count)], value)
                return self._network(shape, outputs, tokens)
            except (RuntimeError, TypeError) as error:  # TypeError: a size exceeds 64 bits
                if not any(cause in str(error) for cause in ("allocate memory", "Overflow", "overflowed")):
                    raise
                raise ConfigError(f"the model does not fit in memory. Use a smaller model: {self!r}") from None

    def _network(self, shape: tuple[int, ...], outputs: int, tokens: tuple[int, bool] | None) -> nn.Module:
        shape = tuple(shape)
        if tokens is None:
            return self.module(shape, outputs)
        if not tokens[0]:
            return self.labelled(shape, outputs)
        return self.sequence(shape[0], outputs, *tokens)

    @abstractmethod
    def module(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Build the network, with initial values from the current global random generator.

        `build` seeds this generator beforehand and restores it afterward.

        Raises:
            ConfigError: the model cannot process samples of this shape.
        """

    def sequence(self, length: int, outputs: int, vocabulary: int, each: bool) -> nn.Module:
        """Build the network for sequences of tokens, in the same way as `module`.

        Raises:
            ConfigError: the model accepts only numbers.
        """
        raise ConfigError(
            f"model {type(self).__name__} needs numbers, but these samples are tokens. Use lstm or transformer"
        )

    def labelled(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Build the network for numeric samples with a label for each position, whose outputs are ``[b, L, outputs]``.

        Raises:
            ConfigError: the model returns only one output for each sample.
        """
        raise ConfigError(
            f"model {type(self).__name__} returns one output per sample, but these samples have a "
            "label per position. Pass your own module"
        )


@contextmanager
def _seed_initial_draws(seed: int, purpose: str) -> Iterator[None]:
    """Within the block, seed the global random generator for a purpose, and create new parameters as float32."""
    with as_global(generator(seed, purpose=purpose), torch.device("cpu")):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def load_weights(module: nn.Module, file: str) -> None:
    """Load the values of a safetensors file into a module.

    Raises:
        ConfigError: the file does not exist, or its values do not match the architecture of the module.
    """
    content = weights_content(file)
    try:
        saved = load(content)
    except SafetensorError as error:
        raise ConfigError(
            f"model weights {file}: this is not a readable safetensors file ({error}). Use a different file"
        ) from None
    initial = module.state_dict()
    for name in [*initial, *saved]:
        saved_shape, initial_shape = ([*of[name].shape] if name in of else "missing" for of in (saved, initial))
        if saved_shape != initial_shape:
            raise ConfigError(
                f"model weights {file}: {name!r} is {saved_shape} in the file and {initial_shape} in "
                "the model. Use weights of the same architecture, vocabulary and classes"
            )
    module.load_state_dict(saved)


def weights_content(weights: str) -> bytes:
    """Return the content of a weight file, after checking the digest that may follow the name of the file.

    Raises:
        ConfigError: the file does not exist, or its digest differs.
    """
    file, _, wanted = weights.partition(DIGEST_MARK)
    try:
        content = check_regular_file(Path(file).expanduser()).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"model weights {file}: this is not a readable safetensors file ({error}). Use a different file"
        ) from None
    got = hashlib.sha256(content).hexdigest()
    if got != (wanted or got):
        raise ConfigError(
            f"model weights {file}: the SHA-256 is {got}, but {wanted} is required. Use the file with this digest"
        )
    return content


def image_shape(shape: tuple[int, ...], model: str) -> tuple[int, int, int]:
    """Return the shape of images as (channels, height, width).

    Raises:
        ConfigError: the samples are not images.
    """
    if len(shape) != 3:
        raise ConfigError(
            f"model {model}: samples must have shape (channels, height, width), got {shape}. "
            "Reshape the data or use model 'mlp'"
        )
    return shape[0], shape[1], shape[2]
