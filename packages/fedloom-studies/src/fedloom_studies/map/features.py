"""Features of photos, computed with statistics of other photos.

These features are used instead of the features of a pretrained network.

The method follows Coates and Ng 2011, The importance of encoding versus training with sparse coding and vector
quantization: patches are normalized, whitened, and compared with random patches by a soft threshold. The patches, the
whitening and the scale of the features come from CIFAR-100. The clients have no photos from CIFAR-100.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, relu, unfold

from fedloom.data import Dataset, Source, load
from fedloom.errors import DataError

PATCH_PIXELS, PATCH_STRIDE_PIXELS = 6, 2
"""Side length of a patch and distance between neighboring patches, in pixels."""
PATCH_COUNT = 64
RESPONSE_THRESHOLD = 0.25
CONTRAST_VARIANCE, WHITENING_VARIANCE = 10 / 255**2, 0.1
"""Constants that are added to the variance of a patch before normalization, and to the variances before whitening."""
FITTED_IMAGES = 2000
BLOCK_IMAGES = 200


class Cifar10Features(Source):
    """The 10,000 official test images of CIFAR-10, each represented by 512 features.

    The data set CIFAR-100 must also be available.
    """

    def load(self, data_dir: str | Path | None = None) -> Dataset:
        """Return the features ``[10000, 512]`` and the classes.

        Each feature is scaled to have mean 0 and standard deviation 1 on images of CIFAR-100.

        Raises:
            DataError: one of the data sets or the test images are missing.
        """
        return _patch_features(data_dir)


@cache
def _patch_features(data_dir: str | Path | None) -> Dataset:
    photographs, elsewhere = load("cifar-10", data_dir), load("cifar-100", data_dir)
    if photographs.test is None:
        raise DataError(
            "cifar-10: the test images are missing, but the features are computed from the test "
            "images. Put test_batch.bin next to the other files"
        )
    generator = torch.Generator().manual_seed(0)
    fitted, scaled = elsewhere.x[torch.randperm(len(elsewhere.x), generator=generator)[: 2 * FITTED_IMAGES]].chunk(2)
    encoder = PatchEncoder(fitted, generator)
    scale = encoder(scaled)
    x = (encoder(photographs.x[photographs.test]) - scale.mean(0)) / scale.std(0)
    return Dataset("cifar-10-features", x, photographs.y[photographs.test], "classification", photographs.classes)


class PatchEncoder:
    """Encoder, fitted to a set of images, that computes features of other images.

    Args:
        images: images to fit, ``[N, 3, height, width]``, as bytes.
        generator: random generator that selects the patches.
    """

    def __init__(self, images: Tensor, generator: torch.Generator) -> None:
        patches = torch.cat([normalized_patches(block) for block in images.split(BLOCK_IMAGES)]).flatten(0, 1)
        self.mean = patches.mean(0)
        variances, directions = torch.linalg.eigh(torch.cov(patches.T))
        whitening = directions / (variances + WHITENING_VARIANCE).sqrt() @ directions.T
        drawn = (patches[torch.randperm(len(patches), generator=generator)[:PATCH_COUNT]] - self.mean) @ whitening
        self.weights = whitening @ (drawn / drawn.norm(dim=1, keepdim=True)).T

    def __call__(self, images: Tensor) -> Tensor:
        """Return the features of images, ``[N, 8 * PATCH_COUNT]``.

        Each feature measures how much patches exceed the threshold in one direction, averaged over a quarter of the
        image.
        """
        return torch.cat([self._block(block) for block in images.split(BLOCK_IMAGES)])

    def _block(self, images: Tensor) -> Tensor:
        likeness = ((normalized_patches(images) - self.mean) @ self.weights).transpose(1, 2)
        maps = torch.cat([relu(likeness - RESPONSE_THRESHOLD), relu(-likeness - RESPONSE_THRESHOLD)], 1)
        rows = (images.shape[2] - PATCH_PIXELS) // PATCH_STRIDE_PIXELS + 1
        return adaptive_avg_pool2d(maps.unflatten(2, (rows, -1)), 2).flatten(1)


def normalized_patches(images: Tensor) -> Tensor:
    """Return all patches of images after normalization, as ``[N, positions, 3 * PATCH_PIXELS**2]``.

    Each patch has a mean of 0, and a variance close to 1 unless its contrast is low.
    """
    patches = unfold(images.float() / 255, PATCH_PIXELS, stride=PATCH_STRIDE_PIXELS).transpose(1, 2)
    patches = patches - patches.mean(-1, keepdim=True)
    return patches / (patches.square().mean(-1, keepdim=True) + CONTRAST_VARIANCE).sqrt()
