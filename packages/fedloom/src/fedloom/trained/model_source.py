"""Source: where the models of a run come from: a run in memory, or the files of its directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from fedloom.trained.adapt import ServerSide
from fedloom.trained.model import ModelRecipe

KINDS = ("global", "personal", "hybrid")
"""The models that a method may have; the hybrid is, for every client, the better of the other two."""


class ModelSource(Protocol):
    """Where the models of a run come from."""

    @property
    def recipe(self) -> ModelRecipe:
        """How they are built."""
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
        """``[n, p, .]`` what the columns of a table were fitted to at every client; None where there is no table."""
        ...

    def kinds(self) -> list[str]:
        """Which of "global", "personal" and "hybrid" there are."""
        ...

    def shared(self) -> tuple[Tensor, Tensor]:
        """The global model ``[d]`` and its running statistics ``[b]``."""
        ...

    def personal(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Personal models ``[m, d]`` and their running statistics ``[m, b]``."""
        ...

    def calibration(self, kind: str) -> Tensor | None:
        """Slope and intercept ``[n, 2]`` that recalibrate the "global" or "personal" model at every client.

        None: the run did not ask for it; nan where a client's validation part has one class only.
        """
        ...

    def takes_global(self) -> Tensor:
        """Whose hybrid model is the global one, bool ``[n]``."""
        ...

    def server(self) -> ServerSide:
        """What new clients need."""
        ...
