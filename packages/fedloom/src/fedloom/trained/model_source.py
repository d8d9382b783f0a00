"""Source of a run's models: a run in memory or the files in its directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from fedloom.trained.adapt import ServerSide
from fedloom.trained.model import ModelRecipe

MODEL_CHOICES = ("global", "personal", "hybrid")
"""Kinds of models that a method can provide. A client's hybrid model is the better one of its personal model and the
global model."""


class ModelSource(Protocol):
    """Interface for reading a run's models."""

    @property
    def recipe(self) -> ModelRecipe:
        """Recipe for building the models."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """Names of all n clients."""
        ...

    @property
    def about(self) -> Mapping[str, Any]:
        """Facts about the run: method, algorithm, seed and number of rounds."""
        ...

    @property
    def fitted(self) -> Tensor | None:
        """Values fitted at each client to prepare a table's columns ``[n, p, .]``, or None if there is no table."""
        ...

    def kinds(self) -> list[str]:
        """Return the kinds of models that the run provides: "global", "personal", "hybrid"."""
        ...

    def shared(self) -> tuple[Tensor, Tensor]:
        """Return the global model ``[d]`` and its running statistics ``[b]``."""
        ...

    def personal(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return personal models ``[m, d]`` and their running statistics ``[m, b]``."""
        ...

    def calibration(self, kind: str) -> Tensor | None:
        """Return the slope and intercept ``[n, 2]`` that recalibrate the "global" or "personal" model at each client.

        Return None if the run did not recalibrate its models. Values are NaN for clients whose validation set has only
        one class.
        """
        ...

    def takes_global(self) -> Tensor:
        """Return a bool mask ``[n]`` of the clients whose hybrid model is the global model."""
        ...

    def server(self) -> ServerSide:
        """Return the state for training new clients' models."""
        ...
