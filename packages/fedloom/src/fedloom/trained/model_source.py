"""Source of a run's models: a run in memory, or the files of its directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from fedloom.trained.adapt import ServerSide
from fedloom.trained.model import ModelRecipe

MODEL_CHOICES = ("global", "personal", "hybrid")
"""Kinds of models that a method may provide. For each client, the hybrid model is the better of the other two
models."""


class ModelSource(Protocol):
    """Source of a run's models."""

    @property
    def recipe(self) -> ModelRecipe:
        """Recipe of the models."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """Names of the n clients."""
        ...

    @property
    def about(self) -> Mapping[str, Any]:
        """Method, algorithm, seed and rounds."""
        ...

    @property
    def fitted(self) -> Tensor | None:
        """Fit of a table's columns at each client ``[n, p, .]``, or None without a table."""
        ...

    def kinds(self) -> list[str]:
        """Kinds of models that the run provides: "global", "personal" and "hybrid"."""
        ...

    def shared(self) -> tuple[Tensor, Tensor]:
        """Return the global model ``[d]`` and its running statistics ``[b]``."""
        ...

    def personal(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Personal models ``[m, d]`` and their running statistics ``[m, b]``."""
        ...

    def calibration(self, kind: str) -> Tensor | None:
        """Slope and intercept ``[n, 2]`` that recalibrate the "global" or "personal" model at each client.

        None: the run did not recalibrate its models. NaN if a client's validation part contains only one class.
        """
        ...

    def takes_global(self) -> Tensor:
        """Mask of the clients whose hybrid model is the global model, bool ``[n]``."""
        ...

    def server(self) -> ServerSide:
        """Return the data that new clients need."""
        ...
