"""Softmax regression, multilayer perceptrons, and plain convolutional networks.

Each model is an `nn.Sequential` whose last linear layer is named ``head``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from math import prod
from typing import ClassVar, Literal, TypeVar

from pydantic import Field, PositiveInt, model_validator
from torch import nn

from fedloom.errors import ConfigError
from fedloom.models.dropout import Dropout
from fedloom.models.spec import ACTIVATIONS, ModelSpec, image_shape

T = TypeVar("T")
Activation = Literal["relu", "tanh", "sigmoid", "gelu", "silu", "elu"]


class Softmax(ModelSpec):
    """Multinomial logistic regression: a linear layer with bias (7,850 parameters for 28x28 images and 10 classes)."""

    def module(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(OrderedDict(flatten=nn.Flatten(), head=nn.Linear(prod(shape), outputs)))


class MLP(ModelSpec):
    """Fully connected layers, with an activation after each layer except the last."""

    hidden: tuple[PositiveInt, ...] = Field(
        (200, 200), description="widths of the hidden layers (Equitable-FL on MNIST: 200, 200; FLAME's code: 128, 64)"
    )
    activation: Activation = Field("relu", description="activation after every hidden layer")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate after every hidden layer (0: none)")

    needs: ClassVar[Mapping[str, str]] = {"activation": "hidden not ()", "dropout": "hidden not ()"}

    def module(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        _append_dense_layers(layers, prod(shape), self.hidden, outputs, self.activation, self.dropout)
        return nn.Sequential(layers)


class CNN(ModelSpec):
    """Convolutions (stride 1) with optional normalization, activation and 2x2 max pooling, then linear layers.

    Each setting of the convolutions is either a single value for all of them or a list with one value per convolution.
    """

    channels: tuple[PositiveInt, ...] = Field(
        (32, 64), min_length=1, description="number of output channels of each convolution"
    )
    kernel: PositiveInt | tuple[PositiveInt, ...] = Field(5, description="kernel side")
    padding: int | tuple[int, ...] = Field(0, description="number of zero pixels added on every side")
    pool: bool | tuple[bool, ...] = Field(True, description="apply 2x2 max pooling after each convolution")
    norm: Literal["none", "group", "batch", "layer"] = Field(
        "none", description="normalization after every convolution. 'layer' is group normalization with one group"
    )
    groups: PositiveInt = Field(
        2, description="number of groups for norm = 'group' (FedSLR's code: 2). Must divide the number of channels"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate applied to the flattened features")
    hidden: tuple[PositiveInt, ...] = Field(
        (512,), description="widths of the hidden linear layers, between the convolutions and the last layer"
    )
    dropout_hidden: float = Field(0.0, ge=0, lt=1, description="dropout rate after every hidden linear layer")
    activation: Activation = Field("relu", description="activation after every convolution and hidden layer")

    needs: ClassVar[Mapping[str, str]] = {"groups": "norm group", "dropout_hidden": "hidden not ()"}

    @model_validator(mode="after")
    def _one_setting_per_convolution(self) -> CNN:
        count = len(self.channels)
        for name in ("kernel", "padding", "pool"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != count:
                raise ValueError(
                    f"{name} needs one value, or {count} values (one per entry of channels), got {len(value)}"
                )
        if min(_repeat_setting(self.padding, count)) < 0:
            raise ValueError(f"padding must be >= 0, got {self.padding}")
        if self.norm == "group" and any(width % self.groups for width in self.channels):
            raise ValueError(f"groups must divide every entry of channels {self.channels}, got {self.groups}")
        return self

    def module(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        width, high, wide = image_shape(shape, "cnn")
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        count = len(self.channels)
        settings = zip(
            self.channels, *(_repeat_setting(v, count) for v in (self.kernel, self.padding, self.pool)), strict=True
        )
        for i, (channels, kernel, padding, pool) in enumerate(settings, start=1):
            layers[f"conv{i}"] = nn.Conv2d(width, channels, kernel, padding=padding)
            if self.norm != "none":
                layers[f"norm{i}"] = _norm_layer(self.norm, channels, self.groups)
            layers[f"act{i}"] = ACTIVATIONS[self.activation]()
            high, wide = high + 2 * padding - kernel + 1, wide + 2 * padding - kernel + 1
            if pool:
                layers[f"pool{i}"] = nn.MaxPool2d(2)
                high, wide = high // 2, wide // 2
            if min(high, wide) < 1:
                raise ConfigError(
                    f"model cnn: samples {shape} have no pixels left after convolution {i}. Use fewer "
                    "convolutions, a smaller kernel, more padding or less pooling"
                )
            width = channels
        layers["flatten"] = nn.Flatten()
        if self.dropout:
            layers["drop"] = Dropout(self.dropout)
        _append_dense_layers(layers, width * high * wide, self.hidden, outputs, self.activation, self.dropout_hidden)
        return nn.Sequential(layers)


def _repeat_setting(value: T | tuple[T, ...], count: int) -> tuple[T, ...]:
    return value if isinstance(value, tuple) else (value,) * count


def _norm_layer(kind: str, channels: int, groups: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(1 if kind == "layer" else groups, channels)


def _append_dense_layers(
    layers: OrderedDict[str, nn.Module], width: int, hidden: tuple[int, ...], outputs: int, activation: str, p: float
) -> None:
    """Append the hidden linear layers and the head."""
    for i, units in enumerate(hidden, start=1):
        layers[f"fc{i}"] = nn.Linear(width, units)
        layers[f"fc{i}_act"] = ACTIVATIONS[activation]()
        if p:
            layers[f"fc{i}_drop"] = Dropout(p)
        width = units
    layers["head"] = nn.Linear(width, outputs)
