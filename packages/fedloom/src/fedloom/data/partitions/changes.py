"""Changes that partitions make to samples: noise, permuted labels, rotated images, and per-client scaling."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedloom.data.dataset import Dataset
from fedloom.data.partitions.deal import Dealt, Floats, Ints, find_owners
from fedloom.data.tables import FittedTable, Table
from fedloom.errors import Refused
from fedloom.seeds import generator


def add_noise(data: Dataset, dealt: Dealt, std: Floats, seed: int, later: Tensor) -> tuple[Dataset, Tensor | None]:
    """Add Gaussian noise to each client's features. The noise is drawn once for each sample.

    Samples in ``later`` remain unchanged.

    Bytes are first converted to float32 in [0, 1]. The mean and standard deviation of the data set are applied after
    the noise.

    Args:
        data: the data set.
        dealt: samples of each client, which must not overlap.
        std: standard deviation for each client, for all features [n, 1] or per channel [n, c].
        seed: seed of the partition. The noise of client i is drawn with (seed, 0, i, "noise").
        later: positions [k] of samples whose noise is drawn again in every step instead.

    Returns:
        The data set, and the standard deviation [N, c] of the noise that will be drawn later. The latter is None if
        ``later`` is empty.
    """
    if data.vocabulary:
        raise Refused(f"{data.name}: noise needs numeric samples, but these are tokens. Use a different partition")
    x, original = data.x.float(), data.original_dtype
    if data.x.dtype == torch.uint8:
        x, original = x.div_(255), "uint8"
    elif x is data.x:
        x = x.clone()
    flat, index = x.view(len(x), -1), torch.from_numpy(dealt.index)
    kept = flat[later]
    room = torch.empty(int(np.diff(dealt.offsets).max()), flat.shape[1], dtype=torch.float32)
    for i, level in enumerate(torch.from_numpy(std).float()):
        client_samples = index[dealt.offsets[i] : dealt.offsets[i + 1]]
        noise = room[: len(client_samples)].normal_(generator=generator(seed, 0, i, "noise"))
        noise.view(len(client_samples), len(level), -1).mul_(level[:, None])
        flat.index_add_(0, client_samples, noise)
    if not len(later):
        return replace(data, x=x, original_dtype=original), None
    flat[later] = kept
    levels = torch.zeros(len(x), std.shape[1], dtype=torch.float32)
    levels[index] = torch.from_numpy(std[find_owners(dealt)]).float()
    left = torch.zeros_like(levels)
    left[later] = levels[later]
    return replace(data, x=x, original_dtype=original), left


def relabel_clients(data: Dataset, dealt: Dealt, relabel: Ints) -> Dataset:
    """Replace the classes of each client as specified by the client's row in `relabel` [n, C]."""
    y = data.y.clone()
    index = torch.from_numpy(dealt.index)
    y[index] = torch.from_numpy(relabel[find_owners(dealt), data.y.numpy()[dealt.index]])
    return replace(data, y=y)


def rotate_and_invert_images(data: Dataset, dealt: Dealt, views: Ints) -> Dataset:
    """Rotate and invert the images of each client as specified by the client's row in `views` [n, 2].

    Inverted values stay within the range of the data set.
    """
    x, index, of_sample = data.x.clone(), torch.from_numpy(dealt.index), torch.from_numpy(views[find_owners(dealt)])
    darkest, brightest = data.x.min(), data.x.max()
    for turns, inverted in torch.unique(of_sample, dim=0).tolist():
        chosen = index[(of_sample == torch.tensor([turns, inverted])).all(1)]
        images = torch.rot90(data.x[chosen], turns, (-2, -1))
        x[chosen] = brightest - (images - darkest) if inverted else images
    return replace(data, x=x)


def fit_preparation(data: Dataset, dealt: Dealt, train: Dealt, common: Ints | None = None) -> Dataset:
    """Apply a data set's preparation, fitted to each client's training set.

    Samples that belong to no client become NaN and are marked as False in `Dataset.ready`, and no part of a federation
    may contain them. In a common test set, samples that belong to no client are scaled in the same way as for a new
    client (see `Table.typical`).

    Args:
        data: data set with a preparation.
        dealt: samples of each client.
        train: samples in each client's training set.
        common: positions of the samples in a common test set. None if there is no common test set.

    Raises:
        ConfigError: the common test set must be scaled, but the preparation is not a `Table`.
    """
    assert data.prepare is not None
    owner = np.full(len(data), -1, np.int64)
    owner[dealt.index] = find_owners(dealt)
    in_train = np.zeros(len(data), bool)
    in_train[train.index] = True
    who, fit_on = torch.from_numpy(owner), torch.from_numpy(in_train)
    new = who < 0
    outside = torch.from_numpy(np.zeros(0, np.int64) if common is None else common[owner[common] < 0])
    new[outside] = False
    ready = ~new if bool(new.any()) else None
    if isinstance(data.prepare, Table):
        fitted = FittedTable(data.prepare, data.prepare.fit(data.x, who, fit_on), data.x)
        x = fitted.table.encode(data.x, who, fitted.values)
        if len(outside):
            x[outside] = fitted.table.encoder(fitted.table.typical(fitted.values))(data.x[outside])
        return replace(data, x=x, prepare=None, fitted=fitted, ready=ready)
    if len(outside):
        raise Refused(
            f"{data.name}: the scaling is fitted on each client's training set, so a common test set "
            "cannot be scaled. Set pool = true"
        )
    x = data.prepare(data.x, who, fit_on)
    if ready is not None:
        x = x.masked_fill(~ready.view(-1, *[1] * (x.ndim - 1)), torch.nan)
    return replace(data, x=x, prepare=None, ready=ready)
