"""Models from a user's own `nn.Module`, given as an import path or as a Python object."""

from __future__ import annotations

import hashlib
import inspect
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fedloom.errors import ConfigError, describe_cause
from fedloom.imports import IMPORT_PATH_PATTERN, find_import_path, find_maker, read_source_text
from fedloom.models.parts import BATCH_STATISTICS
from fedloom.models.spec import ModelSpec

OwnModel = nn.Module | Callable[..., nn.Module]
"""User-defined module, or a class or function that returns a module."""
ABSENT_VALUE = object()
"""Placeholder for an attribute that does not exist."""
PLAIN_TYPES = (int, float, str, type(None))
CONTAINER_TYPES = (list, dict, set, deque)
CHANGEABLE_TYPES = (Tensor, tuple, *PLAIN_TYPES, *CONTAINER_TYPES)
"""Types of the attributes that are compared before and after a forward pass to detect changes."""
MODULE_ATTRIBUTES = {*vars(nn.Module())}
"""Attributes that every module has."""


class _UserModel(ModelSpec):
    """A model that is built by the user's code."""

    def module(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return self._build(shape, outputs, None)

    def sequence(self, length: int, outputs: int, vocabulary: int, each: bool) -> nn.Module:
        return self._build((length,), outputs, (vocabulary, each))

    def labelled(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return self._build(shape, outputs, (0, True))

    @abstractmethod
    def _build(self, shape: tuple[int, ...], outputs: int, tokens: tuple[int, bool] | None) -> nn.Module:
        """Build the module for an input shape, a number of outputs, and a vocabulary with a flag for sequences."""


class Import(_UserModel):
    """User-defined class or function that returns an `nn.Module`.

    It is called with ``options`` as keyword arguments, and with ``shape`` and ``outputs`` if it has parameters with
    these names. For sequences, it is also called with ``vocabulary`` (the number of tokens) and ``each`` (True if each
    position has a label). The module must accept samples ``[b, *shape]`` and return outputs in the shape that
    `ModelSpec` describes. The module's attributes ``head`` and ``penultimate`` may name its parts (see
    `fedloom.models.parts`). The code at the path is executed.
    """

    path: str = Field(pattern=IMPORT_PATH_PATTERN, description="class or function, as 'package.module:Name'")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments for the class or function")

    def _build(self, shape: tuple[int, ...], outputs: int, tokens: tuple[int, bool] | None) -> nn.Module:
        make = find_maker(self.path, "model", nn.Module)
        if not callable(make):
            raise ConfigError(f"model {self.path!r} must be a class or a function, got {type(make).__name__}")
        return _build_module(make, self.options, self.path, shape, outputs, tokens)


class InProcessModel(_UserModel):
    """A module, class or function in this process without an import path, e.g., one defined in a notebook cell.

    A module is copied with its weights, which are the initial values for all seeds. A class or function is called as
    described in `Import`. In checkpoints, the object is identified by ``digest``. To resume a run in a different
    process, define the same object there.
    """

    kind: ClassVar[str] = "held"

    name: str = Field(description="name of the model that is used in messages")
    digest: str = Field(description="digest of the model's source code, or of its structure and weights")
    held: Any = Field(exclude=True, repr=False, description="module, class or function that defines the model")

    def _build(self, shape: tuple[int, ...], outputs: int, tokens: tuple[int, bool] | None) -> nn.Module:
        if not isinstance(self.held, nn.Module):
            return _build_module(self.held, {}, self.name, shape, outputs, tokens)
        try:
            module = deepcopy(self.held).cpu()
        except RuntimeError as error:
            raise ConfigError(
                f"model {self.name!r} cannot be copied ({error}). After pruning, call torch.nn.utils.prune.remove. "
                "Instead of torch.nn.utils.weight_norm, use torch.nn.utils.parametrizations.weight_norm"
            ) from error
        return _build_module(lambda: module, {}, self.name, shape, outputs, tokens)


def describe_model(model: object) -> ModelSpec | None:
    """Return the specification of a model object, or None if the object is not a model.

    Args:
        model: an `nn.Module` (whose weights are the initial values), a class of modules, or a function that returns a
            module. If the object has an import path, the specification is an `Import`. Otherwise, it is an
            `InProcessModel`.
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
        text = "".join(map(read_source_text, {type(model): None, **kinds}))
        digest = hashlib.blake2b(f"{model!r} {text}".encode(), digest_size=8)
        for name, value in model.state_dict().items():
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return InProcessModel(name=type(model).__name__, digest=digest.hexdigest(), held=model)
    if isinstance(model, type) and issubclass(model, ModelSpec):
        return model()
    if not callable(model) or isinstance(model, ModelSpec):
        return None
    path, name = find_import_path(model), getattr(model, "__qualname__", type(model).__qualname__)
    if path is not None:
        return Import(path=path)
    return InProcessModel(
        name=name, digest=hashlib.blake2b(read_source_text(model).encode(), digest_size=8).hexdigest(), held=model
    )


def wrap_model(model: object) -> ModelSpec:
    """Return the specification of an object that is accepted by `describe_model`.

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


def _build_module(
    make: Callable[..., Any],
    options: Mapping[str, object],
    name: str,
    shape: tuple[int, ...],
    outputs: int,
    tokens: tuple[int, bool] | None,
) -> nn.Module:
    """Build a module for the given data with a class or function, and check the module."""
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
        raise ConfigError(f"model {name!r} is TorchScript, which fedloom cannot train. Pass the original nn.Module")
    odd = [n for n, p in module.named_parameters() if not isinstance(p, UninitializedParameter) and p.is_complex()]
    if odd:
        raise ConfigError(
            f"model {name!r} has complex parameters ({', '.join(odd)}). Use real and imaginary parts as "
            "separate parameters"
        )
    if tokens == (0, True) and len(shape) > 2:
        module.register_forward_hook(_flatten_pixels)
    lazy = any(isinstance(p, UninitializedParameter) for p in module.parameters())
    with nullcontext() if lazy else restore_module_values(module):  # a forward pass initializes lazy modules
        try_out(module.float(), shape, outputs, name, tokens)
    return module


def _flatten_pixels(module: nn.Module, inputs: object, output: object) -> Any:
    """Return outputs ``[b, k, height, width]`` for images as ``[b, height width, k]``, with one row for each pixel."""
    return output.flatten(2).mT if isinstance(output, Tensor) and output.ndim > 3 else output


def batch_norm_layers(module: nn.Module) -> list[str]:
    """Return the names of layers that use batch statistics even in evaluation."""
    layers = ((name, m) for name, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return [name for name, m in layers if m.running_mean is None]


def _failure_advice(module: nn.Module, shape: tuple[int, ...], error: Exception) -> str:
    """Return advice for a module that fails on samples of the given shape with an error."""
    if "dtype" in str(error):
        return (
            "convert the samples to the type of the layer, as in x.to(self.layer.weight.dtype), because fedloom "
            "converts all parameters to [engine] dtype"
        )
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
    """Apply a module to two samples, and check the shape of the output.

    The values of the samples are 0. If the module fails on them, values of 1 are used, because a module may mask all
    positions with value 0. For tokens, the values are always 1. The module is also applied to a single sample, for
    which the output must have the same shape. If some layers use batch statistics, the module must not fail on a single
    sample.

    Raises:
        ConfigError: the module fails, the shape of its output differs from the description in `ModelSpec`, or the
            output does not depend on any parameter.
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
            f"model {path!r} fails on samples of shape {shape}: {describe_cause(errors[0])}",
            rule="model-fails",
            fix=_failure_advice(module, shape, errors[0]),
        ) from errors[0]
    if names := batch_norm_layers(module):
        try:
            with torch.no_grad():
                module.eval()(samples[:1])
        except ValueError as error:
            raise ConfigError(
                f"model {path!r} fails on a single sample: layers without running statistics ({', '.join(names)}), "
                f"{error}. Create these layers with track_running_stats=True, or use GroupNorm or LayerNorm"
            ) from error
        finally:
            module.train(training)
    got = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if tokens and not tokens[0]:
        pixels = math.prod(shape[1:]) if len(shape) > 2 else None
        wanted = (pixels or (got[1] if isinstance(got, list) and len(got) == 3 else "length"), outputs)
    if got != [2, *wanted]:
        must, cure = ", ".join(map(str, ("b", *wanted))), ""
        if len(shape) == 2 and tokens and not tokens[0] and got == [2, outputs, shape[0]]:
            must, cure = f"b, {shape[0]}, {outputs}", ". Move the classes to the last dimension"
        elif isinstance(got, str):
            cure = ". Return only the tensor of the outputs"
        elif wanted[-1] == 1 and got == [2, *wanted[:-1]]:
            cure = ". Use a last dimension of 1"
        elif outputs == 2 and got == [2, *wanted[:-1], 1]:
            cure = ". Give two outputs, or use task = 'binary' for the data"
        raise ConfigError(f"model {path!r} must return [{must}] for this data, got {got} for b = 2{cure}")
    try:
        with torch.no_grad():
            one = list(module.eval()(samples[:1]).shape)
    except Exception:  # a layer may need two samples; training reports this
        one = [1, *got[1:]]
    finally:
        module.train(training)
    if one != [1, *got[1:]]:
        raise ConfigError(
            f"model {path!r} must return {[1, *got[1:]]} for a single sample, got {one}, for example because squeeze() "
            "removes the axis of the samples. Name the axis to remove, such as squeeze(2)"
        )
    graded = isinstance(output, Tensor) and output.requires_grad
    trains = any(parameter.requires_grad for parameter in module.parameters())
    if trains and not (graded or torch.is_inference_mode_enabled() or _has_gradient(module, samples)):
        raise ConfigError(
            f"model {path!r} returns outputs without a gradient in any parameter, for example after detach(), "
            "no_grad() or round(). Compute the outputs from the parameters with differentiable functions"
        )


def _has_gradient(module: nn.Module, samples: Tensor) -> bool:
    """Return True if the outputs have a gradient in training mode.

    True is also returned if the module fails in training mode. Training mode is tested, because some modules do not
    compute gradients in evaluation mode.
    """
    try:
        with torch.enable_grad():
            return bool(deepcopy(module).train()(samples).requires_grad)
    except Exception:
        return True


def read_values(module: nn.Module) -> dict[str, object]:
    """Return the buffers of a module, except batch statistics, and its attributes of `CHANGEABLE_TYPES`, by name."""
    values: dict[str, object] = {}
    for owner, m in module.named_modules():
        plain = {k: v for k, v in vars(m).items() if isinstance(v, CHANGEABLE_TYPES) and k not in MODULE_ATTRIBUTES}
        buffers = {} if isinstance(m, BATCH_STATISTICS) else m._buffers
        values |= {f"{owner}.{name}" if owner else name: value for name, value in {**plain, **buffers}.items()}
    return values


def put_value(owner: nn.Module, name: str, value: object) -> None:
    """Set an attribute or buffer to a copy of a value. A buffer keeps its device and type."""
    before = owner._buffers.get(name)
    if value is ABSENT_VALUE:
        vars(owner).pop(name, None)
    else:
        setattr(owner, name, copy_value(value if before is None or not isinstance(value, Tensor) else value.to(before)))


def copy_value(value: object) -> Any:
    """Return a copy of a value. Tensors inside containers are also copied. Parameters are not copied."""
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else value.detach().clone()
    if not isinstance(value, CONTAINER_TYPES):
        return value
    same: Any = copy(value)  # keeps a deque's maxlen and a dictionary's default
    same.clear()
    if isinstance(value, dict):
        same.update({key: copy_value(part) for key, part in value.items()})
    elif isinstance(value, set):
        same.update(value)
    else:
        same.extend(map(copy_value, value))
    return same


class ValueRecord(NamedTuple):
    """Record of a value: the value itself, the version of a tensor, or the records of the items in a container."""

    value: object
    version: int
    parts: tuple[ValueRecord, ...]

    @classmethod
    def record(cls, value: object) -> ValueRecord:
        """Record the current state of a value."""
        version = value._version if isinstance(value, Tensor) else 0
        return cls(value, version, tuple(map(cls.record, _value_parts(value))))

    def is_same(self, now: object) -> bool:
        """Return True if a value has not changed since it was recorded."""
        if isinstance(now, (*CONTAINER_TYPES, tuple)):
            parts = _value_parts(now)
            alike = type(now) is type(self.value) and len(parts) == len(self.parts)
            return alike and all(mark.is_same(part) for mark, part in zip(self.parts, parts, strict=True))
        if now is self.value:
            return not isinstance(now, Tensor) or now._version == self.version
        if not isinstance(now, PLAIN_TYPES) or not isinstance(self.value, PLAIN_TYPES):
            return False
        return now == self.value or (now != now and self.value != self.value)


def _value_parts(value: object) -> list[object]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return [*value] if isinstance(value, (*CONTAINER_TYPES, tuple)) else []


class ModuleValues:
    """Record of the values of a module (see `read_values`), used to detect later changes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {name: ValueRecord.record(value) for name, value in read_values(module).items()}

    def changed(self) -> list[str]:
        """Return the names of the values that have been replaced or changed in place since they were recorded."""
        now = read_values(self._module)
        same = {name for name, mark in self._before.items() if mark.is_same(now.get(name, ABSENT_VALUE))}
        return [name for name in {**self._before, **now} if name not in same]


@contextmanager
def restore_module_values(module: nn.Module) -> Iterator[None]:
    """After the block, restore all of a module's values that a forward pass changed."""
    values = ModuleValues(module)
    copies = {name: copy_value(value) for name, value in read_values(module).items()}
    try:
        yield
    finally:
        for place in values.changed():
            owner, _, name = place.rpartition(".")
            put_value(module.get_submodule(owner), name, copies.get(place, ABSENT_VALUE))
