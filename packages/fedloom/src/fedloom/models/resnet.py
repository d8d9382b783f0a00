"""ResNet-18 with group normalization (He et al., CVPR 2016), as in the experiments of FedSLR."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn import functional

from fedloom.errors import ConfigError
from fedloom.models.spec import ModelSpec, image_shape

RESNET_WIDTHS = (64, 128, 256, 512)


class ResNet18(ModelSpec):
    """ResNet-18 for images. It uses group normalization instead of batch normalization.

    With the 3x3 stem, three input channels and a head for ten classes without bias, it has 11,173,952 parameters
    (FedSLR: 11.17 M).
    """

    stem: Literal["auto", "3x3", "7x7"] = Field(
        "auto",
        description=(
            "first layer: 3x3 with stride 1 (CIFAR), or 7x7 with stride 2 and 3x3 max pooling "
            "(Tiny-ImageNet). auto: 7x7 for images of at least 64 pixels"
        ),
    )
    groups: PositiveInt = Field(
        2, description="number of groups in every normalization layer (FedSLR's code: 2). Must divide 64"
    )
    head_bias: bool = Field(False, description="add a bias to the last linear layer (FedSLR: no)")

    @model_validator(mode="after")
    def _groups_divide_the_widths(self) -> ResNet18:
        if RESNET_WIDTHS[0] % self.groups:
            raise ValueError(f"groups must divide {RESNET_WIDTHS[0]}, got {self.groups}")
        return self

    def module(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        channels, high, wide = image_shape(shape, "resnet18")
        if min(high, wide) < 8:
            raise ConfigError(
                f"model resnet18: samples must be at least 8x8 pixels, got {high}x{wide}. Use 'cnn' or 'mlp'"
            )
        large = self.stem == "7x7" or (self.stem == "auto" and min(high, wide) >= 64)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["conv"] = nn.Conv2d(
            channels, RESNET_WIDTHS[0], 7 if large else 3, 2 if large else 1, 3 if large else 1, bias=False
        )
        layers["norm"] = nn.GroupNorm(self.groups, RESNET_WIDTHS[0])
        layers["act"] = nn.ReLU()
        if large:
            layers["pool"] = nn.MaxPool2d(3, stride=2, padding=1)
        before = RESNET_WIDTHS[0]
        for i, width in enumerate(RESNET_WIDTHS, start=1):
            layers[f"block{2 * i - 1}"] = _Block(before, width, 1 if i == 1 else 2, self.groups)
            layers[f"block{2 * i}"] = _Block(width, width, 1, self.groups)
            before = width
        layers["average"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        layers["head"] = nn.Linear(before, outputs, bias=self.head_bias)
        return nn.Sequential(layers)


class _Block(nn.Module):
    """Two 3x3 convolutions with a shortcut (He et al., Fig. 2)."""

    def __init__(self, before: int, width: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(groups, width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(groups, width)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.GroupNorm(groups, width))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))
