"""A user's own `nn.Module`, named by its import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from pydantic import Field
from torch import nn

from fedloom.errors import ConfigError
from fedloom.imports import PATTERN, find
from fedloom.models.spec import ModelSpec


class Import(ModelSpec):
    """A class or function of user code that returns an `nn.Module`.

    It is called with ``options``, and with ``shape`` and ``outputs`` where it has parameters of these names. The module
    takes ``[b, *shape]`` and returns ``[b, outputs]``. It may carry the attributes ``head`` and ``penultimate`` of
    `fedloom.models.parts`. Code of the named module is executed.
    """

    path: str = Field(pattern=PATTERN, description="'package.module:Name' of a class or function")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the call")

    def module(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        make = self._find()
        known = {"shape": shape, "outputs": outputs}
        offered = {name: value for name, value in known.items() if name in inspect.signature(make).parameters}
        try:
            made = make(**{**offered, **self.options})
        except Exception as error:
            raise ConfigError(f"model {self.path!r} could not be made with options {self.options}: {error}") from error
        if not isinstance(made, nn.Module) or not any(True for _ in made.parameters()):
            raise ConfigError(f"model {self.path!r} must give an nn.Module with parameters, got {type(made).__name__}")
        _try(made, shape, outputs, self.path)
        return made

    def _find(self) -> Callable[..., Any]:
        found = find(self.path, "model")
        if not callable(found):
            raise ConfigError(f"model {self.path!r} must be a class or a function, got {type(found).__name__}")
        return found  # type: ignore[no-any-return]


def _try(module: nn.Module, shape: tuple[int, ...], outputs: int, path: str) -> None:
    """Runs two samples of zeros through the module and looks at the shape that comes out."""
    training = module.training
    try:
        with torch.no_grad():
            got = tuple(module.eval()(torch.zeros(2, *shape)).shape)
    except Exception as error:
        raise ConfigError(f"model {path!r} fails on samples of shape {shape}: {error}") from error
    finally:
        module.train(training)
    if got != (2, outputs):
        raise ConfigError(f"model {path!r} must return [b, {outputs}] for this data, got {list(got)} for b = 2")
