"""Factorized models: a linear or convolutional layer is replaced by two thinner layers if that saves parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedloom.errors import ConfigError


class Factorized(NamedTuple):
    """Model with factorized layers.

    Attributes:
        module: factorized copy of the original module, in evaluation mode. The original module is not changed.
        parameters: number of parameters of the factorized copy.
        original_parameters: number of parameters of the original module.
        ranks: rank of each replaced layer, keyed by the name of the layer.
    """

    module: nn.Module
    parameters: int
    original_parameters: int
    ranks: dict[str, int]


def factorize(module: nn.Module, rank: int | None = None, tolerance: float = 1e-6) -> Factorized:
    """Replace each `nn.Linear` and `nn.Conv2d` by two thinner layers if they have fewer parameters (FedSLR, Table 9).

    A convolution ``[o, i, k, l]`` is treated as the matrix ``[o*k, i*l]`` (FedSLR, section 3). It is replaced by a
    convolution with a ``1 x l`` kernel and ``r`` output channels, followed by one with a ``k x 1`` kernel. A
    convolution is not replaced if it has groups, a padding mode other than zeros, or a padding given as text, such as
    "same".

    Args:
        module: model to be factorized. If no singular value is dropped, the predictions remain the same up to rounding.
        rank: maximum number of singular values that are kept in each layer. If None, all singular values above the
            tolerance are kept.
        tolerance: fraction in [0, 1) of a layer's largest singular value. Smaller singular values are dropped.

    Returns:
        Factorized copy of the module, with the rank of each replaced layer.

    Raises:
        ConfigError: the rank or the tolerance is out of range.
    """
    if rank is not None and rank < 1:
        raise ConfigError(f"factorise: rank must be at least 1, got {rank}")
    if not 0 <= tolerance < 1:
        raise ConfigError(f"factorise: tolerance must be in [0, 1), got {tolerance}")
    thin = copy.deepcopy(module).eval()
    ranks: dict[str, int] = {}
    for name, layer in list(thin.named_modules()):
        matrix = _layer_matrix(layer)
        if matrix is None or not name:
            continue
        u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
        r = max(1, int((s > tolerance * s[0]).sum()))
        r = r if rank is None else min(r, rank)
        if r * sum(matrix.shape) >= matrix.numel():
            continue
        root = s[:r].sqrt()
        ranks[name] = r
        thin.set_submodule(name, _factor_layers(layer, u[:, :r] * root, root[:, None] * vh[:r]))
    return Factorized(thin, _count_parameters(thin), _count_parameters(module), ranks)


def make_thin_copy(module: nn.Module, ranks: Mapping[str, int]) -> nn.Module:
    """Return a copy of a module with factorized layers, which can load a state dict of the result of `factorize`.

    Args:
        module: model before it is factorized.
        ranks: rank of each replaced layer, keyed by name, as in `Factorised.ranks`.

    Raises:
        ConfigError: a name is not the name of a replaceable layer.
    """
    thinned = copy.deepcopy(module).eval()
    layers = dict(thinned.named_modules())
    for name, rank in ranks.items():
        matrix = _layer_matrix(layers[name]) if name in layers else None
        if matrix is None:
            raise ConfigError(f"thin: {name!r} is not a linear or convolutional layer of {type(module).__name__}")
        rows, columns = matrix.shape
        thinned.set_submodule(
            name, _factor_layers(layers[name], matrix.new_zeros(rows, rank), matrix.new_zeros(rank, columns))
        )
    return thinned


def _layer_matrix(layer: nn.Module) -> Tensor | None:
    """Return the matrix ``[rows, columns]`` of a layer, or None if the layer cannot be replaced."""
    if type(layer) is nn.Linear:
        return layer.weight.detach()
    if type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros":
        if isinstance(layer.padding, str):
            return None
        o, i, k, w = layer.weight.shape
        return layer.weight.detach().transpose(1, 2).reshape(o * k, i * w)
    return None


def _factor_layers(layer: nn.Module, left: Tensor, right: Tensor) -> nn.Sequential:
    """Return two layers that replace ``layer``, whose product is ``left [rows, r] right [r, columns]``."""
    r = left.shape[1]
    first: nn.Linear | nn.Conv2d
    second: nn.Linear | nn.Conv2d
    if isinstance(layer, nn.Linear):
        first = nn.utils.skip_init(nn.Linear, layer.in_features, r, bias=False)
        second = nn.utils.skip_init(nn.Linear, r, layer.out_features, bias=layer.bias is not None)
    else:
        assert isinstance(layer, nn.Conv2d)
        assert not isinstance(layer.padding, str)
        o, i, k, w = layer.weight.shape
        (sy, sx), (py, px), (dy, dx) = layer.stride, layer.padding, layer.dilation
        first = nn.utils.skip_init(
            nn.Conv2d, i, r, (1, w), stride=(1, sx), padding=(0, px), dilation=(1, dx), bias=False
        )
        second = nn.utils.skip_init(
            nn.Conv2d, r, o, (k, 1), stride=(sy, 1), padding=(py, 0), dilation=(dy, 1), bias=layer.bias is not None
        )
        left, right = left.reshape(o, k, r).transpose(1, 2)[..., None], right.reshape(r, i, 1, w)
    bias = layer.bias
    with torch.no_grad():
        first.weight = nn.Parameter(right.to(layer.weight).contiguous())
        second.weight = nn.Parameter(left.to(layer.weight).contiguous())
        if bias is not None:
            second.bias = nn.Parameter(bias.detach().clone())
    return nn.Sequential(first, second).eval()


def _count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
