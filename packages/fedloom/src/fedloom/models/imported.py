"""A user's own `nn.Module`, specified by its import path or as an object in this process."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fedloom.errors import ConfigError
from fedloom.imports import IMPORT_PATH_PATTERN, find_maker, importable, text_of
from fedloom.models.parts import BATCH_STATISTICS
from fedloom.models.spec import ModelSpec

OwnModel = nn.Module | Callable[..., nn.Module]
"""A user's module, or a class or function that returns one."""
ABSENT_VALUE = object()
"""Marker for an attribute that does not exist."""
PLAIN_TYPES = (int, float, str, type(None))
CONTAINER_TYPES = (list, dict, set, deque)
CHANGEABLE_TYPES = (Tensor, tuple, *PLAIN_TYPES, *CONTAINER_TYPES)
"""Types of attributes that a forward pass may change."""
OF_TORCH = {*vars(nn.Module())}
"""Attributes that every module has."""


class Import(ModelSpec):
    """A user's class or function that returns an `nn.Module`.

    It is called with ``options``, and with ``shape`` and ``outputs`` if it accepts parameters with these names. For
    sequences, it is also called with ``vocabulary`` (its size) and ``each`` (True if each position has a label). The
    module must accept ``[b, *shape]`` and return outputs with the shape described in `ModelSpec`. It may define the
    attributes ``head`` and ``penultimate`` described in `fedloom.models.parts`. fedloom runs the code of the named
    module.
    """

    path: str = Field(pattern=IMPORT_PATH_PATTERN, description="'package.module:Name' of a class or function")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the call")

    def module(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return self._build(shape, outputs, None)

    def sequence(self, length: int, outputs: int, vocabulary: int, each: bool) -> nn.Module:
        return self._build((length,), outputs, (vocabulary, each))

    def labelled(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return self._build(shape, outputs, (0, True))

    def _build(self, shape: tuple[int, ...], outputs: int, tokens: tuple[int, bool] | None) -> nn.Module:
        make = find_maker(self.path, "model", nn.Module)
        if not callable(make):
            raise ConfigError(f"model {self.path!r} must be a class or a function, got {type(make).__name__}")
        return _build(make, self.options, self.path, shape, outputs, tokens)


class Held(ModelSpec):
    """A module, class or function in this process with no import path, such as one defined in a notebook cell.

    A module is copied with its weights, which are the initial values for every seed. A class or function is called as
    `Import` calls it. Checkpoints identify the object by ``digest``. To resume in another process, define the same
    object there.
    """

    kind: ClassVar[str] = "held"

    name: str = Field(description="name of the model in messages")
    digest: str = Field(description="digest of the model's source code, or of its structure and weights")
    held: Any = Field(exclude=True, repr=False, description="module, class or function of the model")

    def module(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return self._build(shape, outputs, None)

    def sequence(self, length: int, outputs: int, vocabulary: int, each: bool) -> nn.Module:
        return self._build((length,), outputs, (vocabulary, each))

    def labelled(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return self._build(shape, outputs, (0, True))

    def _build(self, shape: tuple[int, ...], outputs: int, tokens: tuple[int, bool] | None) -> nn.Module:
        if not isinstance(self.held, nn.Module):
            return _build(self.held, {}, self.name, shape, outputs, tokens)
        try:
            module = deepcopy(self.held).cpu()
        except RuntimeError as error:
            raise ConfigError(
                f"model {self.name!r} cannot be copied ({error}). After pruning, call "
                "torch.nn.utils.prune.remove. Instead of torch.nn.utils.weight_norm, use "
                "torch.nn.utils.parametrizations.weight_norm"
            ) from error
        return _build(lambda: module, {}, self.name, shape, outputs, tokens)


def describe_model(model: object) -> ModelSpec | None:
    """Return the specification of an object that describes a model in Python, or None for any other object.

    Args:
        model: an `nn.Module` (its weights are the initial values), a module class, or a function that returns a module.
            An object with an import path becomes an `Import`, and any other object becomes a `Held`.
    """
    if isinstance(model, nn.Module):
        lazy = [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]
        if lazy:
            raise ConfigError(
                f"model {type(model).__name__!r} has lazy parameters ({', '.join(lazy)}). Call the "
                "model on a sample first"
            )
        if any(value.is_meta for value in model.state_dict().values()):
            raise ConfigError(
                f"model {type(model).__name__!r} has no weights (device meta). Initialize the weights first"
            )
        kinds = {type(module): None for module in model.modules() if not type(module).__module__.startswith("torch")}
        text = "".join(map(text_of, {type(model): None, **kinds}))
        digest = hashlib.blake2b(f"{model!r} {text}".encode(), digest_size=8)
        for name, value in model.state_dict().items():
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return Held(name=type(model).__name__, digest=digest.hexdigest(), held=model)
    if isinstance(model, type) and issubclass(model, ModelSpec):
        return model()
    if not callable(model) or isinstance(model, ModelSpec):
        return None
    path, name = importable(model), getattr(model, "__qualname__", type(model).__qualname__)
    if path is not None:
        return Import(path=path)
    return Held(name=name, digest=hashlib.blake2b(text_of(model).encode(), digest_size=8).hexdigest(), held=model)


def wrap_model(model: object) -> ModelSpec:
    """Return the specification of an object that `describe_model` accepts.

    Raises:
        ConfigError: the object is not a model.
    """
    spec = describe_model(model)
    if spec is None:
        raise ConfigError(
            "model must be a name, an nn.Module, a class or function that returns an nn.Module, or a "
            f"model specification of fl.models, got {model!r}"
        )
    return spec


def _build(
    make: Callable[..., Any],
    options: Mapping[str, object],
    name: str,
    shape: tuple[int, ...],
    outputs: int,
    tokens: tuple[int, bool] | None,
) -> nn.Module:
    """Build the module that a class or function returns for these data, and check it."""
    facts: dict[str, Any] = {"shape": shape, "outputs": outputs}
    facts |= {} if tokens is None else {"vocabulary": tokens[0], "each": tokens[1]}
    offered = {key: value for key, value in facts.items() if key in inspect.signature(make).parameters}
    try:
        module = make(**{**offered, **options})
    except Exception as error:
        raise ConfigError(
            f"model {name!r} could not be created with options {dict(options)}: {error}. fedloom "
            f"passes {' and '.join(facts)} if the class or function has parameters with these names"
        ) from error
    if not isinstance(module, nn.Module) or not any(True for _ in module.parameters()):
        raise ConfigError(f"model {name!r} must return an nn.Module with parameters, got {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            f"model {name!r} is TorchScript, which fedloom cannot train. Pass the nn.Module from which it was made"
        )
    odd = [n for n, p in module.named_parameters() if not isinstance(p, UninitializedParameter) and p.is_complex()]
    if odd:
        raise ConfigError(
            f"model {name!r} has complex parameters ({', '.join(odd)}). Use real and imaginary parts as "
            "separate parameters"
        )
    if tokens == (0, True) and len(shape) > 2:
        module.register_forward_hook(_flatten_pixels)
    lazy = any(isinstance(p, UninitializedParameter) for p in module.parameters())
    with nullcontext() if lazy else unchanged(module):  # a pass gives lazy modules their attributes
        try_out(module.float(), shape, outputs, name, tokens)
    return module


def _flatten_pixels(module: nn.Module, inputs: object, output: object) -> Any:
    """Return the outputs for an image ``[b, k, height, width]`` pixel by pixel, ``[b, height width, k]``."""
    return output.flatten(2).mT if isinstance(output, Tensor) and output.ndim > 3 else output


def batch_norm_layers(module: nn.Module) -> list[str]:
    """Return the names of the layers that normalize a sample using the other samples of a prediction."""
    layers = ((name, m) for name, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return [name for name, m in layers if m.running_mean is None]


def _shape_cure(module: nn.Module, shape: tuple[int, ...]) -> str:
    """Return advice for a module that fails on samples of a given shape."""
    layers = [m for m in module.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Flatten)]
    width = math.prod(shape)
    recurrent = any(isinstance(m, nn.RNNBase | nn.TransformerEncoderLayer) for m in module.modules())
    if recurrent and len(shape) == 3 and shape[0] == 1:
        return "use layout = 'sequence' for the data, if a sample is [time, features]"
    if len(shape) > 1 and layers and isinstance(layers[0], nn.Linear):
        return f"begin with torch.nn.Flatten() and a layer of {width} inputs"
    return "use a model for such samples"


def try_out(
    module: nn.Module, shape: tuple[int, ...], outputs: int, path: str, tokens: tuple[int, bool] | None
) -> None:
    """Run two samples through the module and check the output's shape.

    The samples are zeros. If the module fails on zeros, the samples are ones (for a mask that would exclude every
    position) or token 1. If layers normalize using the other samples of a prediction, the module is also tried with one
    sample.

    Raises:
        ConfigError: the module fails, the shape of its output differs from `ModelSpec`, or no parameter affects the
            output.
    """
    training = module.training
    if tokens and tokens[0]:
        tries = [torch.ones(2, *shape, dtype=torch.int64)]
    else:
        tries = [make(2, *shape, dtype=torch.float32) for make in (torch.zeros, torch.ones)]
    wanted: tuple[int | str, ...] = (*shape, outputs) if tokens and tokens[1] else (outputs,)
    output, errors = None, list[Exception]()
    for samples in tries:
        try:
            with torch.enable_grad():
                output = module.eval()(samples)
            break
        except Exception as error:
            errors.append(error)
        finally:
            module.train(training)
    if len(errors) == len(tries):
        raise ConfigError(
            f"model {path!r} fails on samples of shape {shape}: {errors[0]}",
            rule="model-fails",
            fix=_shape_cure(module, shape),
        ) from errors[0]
    if names := batch_norm_layers(module):
        try:
            with torch.no_grad():
                module.eval()(samples[:1])
        except ValueError as error:
            raise ConfigError(
                f"model {path!r} fails on a single sample: layers without running statistics "
                f"({', '.join(names)}), {error}. Create these layers with track_running_stats=True, "
                "or use GroupNorm or LayerNorm"
            ) from error
        finally:
            module.train(training)
    got = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if tokens and not tokens[0]:
        pixels = math.prod(shape[1:]) if len(shape) > 2 else None
        wanted = (pixels or (got[1] if isinstance(got, list) and len(got) == 3 else "length"), outputs)
    if got != [2, *wanted]:
        must, cure = ", ".join(map(str, ("b", *wanted))), ""
        if isinstance(got, str):
            cure = ". Return only the tensor of the outputs"
        elif wanted[-1] == 1 and got == [2, *wanted[:-1]]:
            cure = ". Use a last dimension of 1"
        elif outputs == 2 and got == [2, *wanted[:-1], 1]:
            cure = ". Give two outputs, or use task = 'binary' for the data"
        raise ConfigError(f"model {path!r} must return [{must}] for this data, got {got} for b = 2{cure}")
    graded = isinstance(output, Tensor) and output.requires_grad
    trains = any(parameter.requires_grad for parameter in module.parameters())
    if trains and not (graded or torch.is_inference_mode_enabled() or _trains(module, samples)):
        raise ConfigError(
            f"model {path!r} returns outputs without a gradient in any parameter, for example after "
            "detach(), no_grad() or round(). Compute the outputs from the parameters with "
            "differentiable functions"
        )


def _trains(module: nn.Module, samples: Tensor) -> bool:
    """Return True if outputs have a gradient in training mode.

    Some modules turn gradients off in other modes. Or fail there.
    """
    try:
        with torch.enable_grad():
            return bool(deepcopy(module).train()(samples).requires_grad)
    except Exception:
        return True


def values_of(module: nn.Module) -> dict[str, object]:
    """Return buffers, except batch statistics, and attributes of `CHANGEABLE_TYPES`, by name."""
    values: dict[str, object] = {}
    for owner, m in module.named_modules():
        plain = {k: v for k, v in vars(m).items() if isinstance(v, CHANGEABLE_TYPES) and k not in OF_TORCH}
        buffers = {} if isinstance(m, BATCH_STATISTICS) else m._buffers
        values |= {f"{owner}.{name}" if owner else name: value for name, value in {**plain, **buffers}.items()}
    return values


def put(owner: nn.Module, name: str, value: object) -> None:
    """Set a buffer (on its device and in its type) or an attribute to a copy of a value (see `ABSENT_VALUE`)."""
    before = owner._buffers.get(name)
    if value is ABSENT_VALUE:
        vars(owner).pop(name, None)
    else:
        setattr(owner, name, copy_of(value if before is None or not isinstance(value, Tensor) else value.to(before)))


def copy_of(value: object) -> Any:
    """Copy a value and the tensors that its containers hold. Parameters are not copied."""
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else value.detach().clone()
    if not isinstance(value, CONTAINER_TYPES):
        return value
    same: Any = copy(value)  # which keeps the length of a deque and the default of a dictionary
    same.clear()
    if isinstance(value, dict):
        same.update({key: copy_of(part) for key, part in value.items()})
    elif isinstance(value, set):
        same.update(value)
    else:
        same.extend(map(copy_of, value))
    return same


class Mark(NamedTuple):
    """State of a value at some moment: the value itself, a tensor's version, and the marks of a container's items."""

    value: object
    version: int
    parts: tuple[Mark, ...]

    @classmethod
    def record(cls, value: object) -> Mark:
        """Mark the current state of a value."""
        version = value._version if isinstance(value, Tensor) else 0
        return cls(value, version, tuple(map(cls.record, _parts(value))))

    def is_same(self, now: object) -> bool:
        """Return True if a value is still the same."""
        if isinstance(now, (*CONTAINER_TYPES, tuple)):
            parts = _parts(now)
            alike = type(now) is type(self.value) and len(parts) == len(self.parts)
            return alike and all(mark.is_same(part) for mark, part in zip(self.parts, parts, strict=True))
        if now is self.value:
            return not isinstance(now, Tensor) or now._version == self.version
        if not isinstance(now, PLAIN_TYPES) or not isinstance(self.value, PLAIN_TYPES):
            return False
        return now == self.value or (now != now and self.value != self.value)


def _parts(value: object) -> list[object]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return [*value] if isinstance(value, (*CONTAINER_TYPES, tuple)) else []


class Values:
    """State of a module's values at one moment (see `values_of`)."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {name: Mark.record(value) for name, value in values_of(module).items()}

    def changed(self) -> list[str]:
        """Return the names of values that were replaced or changed in place."""
        now = values_of(self._module)
        same = {name for name, mark in self._before.items() if mark.is_same(now.get(name, ABSENT_VALUE))}
        return [name for name in {**self._before, **now} if name not in same]


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restore the values of a module after the block, whatever a forward pass does to them."""
    values = Values(module)
    copies = {name: copy_of(value) for name, value in values_of(module).items()}
    try:
        yield
    finally:
        for place in values.changed():
            owner, _, name = place.rpartition(".")
            put(module.get_submodule(owner), name, copies.get(place, ABSENT_VALUE))
