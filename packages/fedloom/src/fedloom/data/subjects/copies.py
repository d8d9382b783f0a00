"""Near-duplicates, for example from augmentation: rows or images that are much closer to each other than usual."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.subjects.design import Design, Ints

NEIGHBOR_COUNT = 10
"""Number of nearest neighbors of a row that are compared to distinguish a near-duplicate from a dense region."""
OUTER_LOG_MEAN = float(
    np.mean(
        [sum(1 / i for i in range(j, NEIGHBOR_COUNT)) for j in range(2 + (NEIGHBOR_COUNT - 2) // 2, NEIGHBOR_COUNT)]
    )
)
"""Expected log of the ratio of the last neighbor's distance to an outer neighbor's distance, times the dimension."""
CLOSENESS_LEVEL = 1e-3
"""Probability that a row's nearest neighbor would be as close by chance if all rows came from the same distribution. A
note is added if such rows occur 50 times as often as expected."""
CLOSE_SHARE = 0.05
MAX_COMPARED_ROWS = 20_000
"""Maximum number of rows that are searched for near-duplicates. Searching a larger number of rows in a tree would take
seconds."""
MAX_COMPARED_IMAGES = 10_000
"""Maximum number of images that are searched for near-duplicates. Computing the distances between more images would
take seconds."""
MAX_TREE_AXES = 8
"""Up to this number of dimensions, a tree finds neighbors faster than a comparison of all rows."""
MAX_COMPARED_BYTES = 1 << 29
"""Maximum number of bytes of samples that are compared. Comparing more bytes would take seconds, and the samples may be
on disk."""
THUMBNAIL_PIXELS = 32
"""Maximum height and width of compared images, in pixels. Larger images are averaged down to this size."""
MIN_IMAGE_PIXELS = 8
"""Minimum height and width of images that can be distinguished, in pixels."""
FREQUENCY_COUNT = 5
COMPARED_COMPONENT_COUNT = 12
"""Number of principal components of spectra and thumbnails for comparing images."""


def count_near_copies(points: NDArray[np.float64], units: Ints | None = None, *, ties: bool = False) -> int:
    """Return the number of rows with a neighbor that is much closer than others, or 0 if this could be due to chance.

    Args:
        points: points ``[N, p]`` with meaningful distances.
        units: subject of each row ``[N]``. Near-duplicates within a subject are not counted. None if all rows are
            independent.
        ties: True if identical points are considered copies. False to ignore points that are identical to several other
            points, because their coordinates are coarse.
    """
    if not 5 * NEIGHBOR_COUNT <= len(points) <= MAX_COMPARED_ROWS:
        return 0
    distances, nearest = _neighbours(points)
    distances = distances[:, 1:]
    first, inner, last = distances[:, 0], distances[:, 1:-1], distances[:, -1]
    sound = (last > 0) if ties else (inner[:, 0] > 0) & (last > inner[:, 0])
    if sound.sum() < len(points) / 2:
        return 0
    apart = sound & (inner[:, 0] > 0)
    if not apart.any():
        return 0
    outer = inner[:, len(inner[0]) // 2 :]  # nearer neighbors may be copies too
    logs = np.log(last[apart, None] / outer[apart])
    dimension = min(points.shape[1], OUTER_LOG_MEAN / max(float(np.median(logs.mean(1))), 1e-9))
    ratio = (first[sound] / last[sound]) ** dimension
    close = 1 - (1 - ratio) ** (NEIGHBOR_COUNT - 1) < CLOSENESS_LEVEL
    if units is not None:
        itself = nearest[:, 0] == np.arange(len(points))  # an equal point may come first
        other = np.where(itself, nearest[:, 1], nearest[:, 0])
        close &= (units[other] != units)[sound]
    return int(close.sum()) if close.mean() >= CLOSE_SHARE else 0


def _neighbours(points: NDArray[np.float64]) -> tuple[NDArray[np.float64], Ints]:
    """Return the distances ``[N, k]`` from each point to its nearest points (including itself), and their indices."""
    if points.shape[1] <= MAX_TREE_AXES:
        from scipy.spatial import cKDTree  # slow to import

        distances, nearest = cKDTree(points).query(points, NEIGHBOR_COUNT + 1)
        return distances, nearest
    whole, nearest, squares = torch.from_numpy(points), list[torch.Tensor](), list[torch.Tensor]()
    lengths = whole.square().sum(1)
    for some, own_lengths in zip(whole.split(512), lengths.split(512), strict=True):
        apart = torch.addmm(lengths + own_lengths[:, None], some, whole.T, alpha=-2)
        values, places = apart.topk(NEIGHBOR_COUNT + 1, largest=False)
        squares.append(values)
        nearest.append(places)
    return torch.cat(squares).clamp(min=0).sqrt().numpy(), torch.cat(nearest).numpy()


def count_image_copies(images: torch.Tensor, design: Design | None) -> int:
    """Return the number of images that seem to be modified copies of other images, or 0 if this could be due to chance.

    Mirroring, quarter turns, shifts and changes of contrast are recognized because they do not change the spectrum.
    Noise is recognized because it does not change the thumbnail. Other rotations, and crops that keep only a small part
    of an image, are not recognized, because they change both.

    Args:
        images: images ``[N, C, H, W]``.
        design: design of the data set, or None. Copies within the same subject are not counted.
    """
    if (
        len(images) > MAX_COMPARED_IMAGES
        or images.nbytes > MAX_COMPARED_BYTES
        or min(images.shape[2:]) < MIN_IMAGE_PIXELS
    ):
        return 0
    units = None if design is None or design.subject is None else design.units
    some = max(1, 2**22 // max(1, images[0].numel()))
    grey = torch.cat(
        [_shrink_images(part.float().mean(1, keepdim=True), THUMBNAIL_PIXELS) for part in images.split(some)]
    )
    if not bool(grey.isfinite().all()):
        return 0
    views = (_invariant_spectra(grey), _normalized_thumbnails(grey))
    return max(count_near_copies(_rotate_axes(view, COMPARED_COMPONENT_COUNT), units, ties=True) for view in views)


def _shrink_images(grey: torch.Tensor, most: int) -> torch.Tensor:
    """Average images so that they have at most this height and width, and return them as ``[N, 1, H, W]``."""
    return torch.nn.functional.adaptive_avg_pool2d(grey, (min(grey.shape[2], most), min(grey.shape[3], most)))


def _invariant_spectra(grey: torch.Tensor) -> torch.Tensor:
    """Return low frequencies of the absolute Fourier transform ``[N, p]``, averaged over rotations and mirror images.

    They are divided by their mean, because the mean depends on the contrast.
    """
    absolute = torch.fft.fft2(grey[:, 0] - grey.mean((1, 2, 3))[:, None, None]).abs()
    k = min(FREQUENCY_COUNT, *(side // 2 for side in absolute.shape[1:]))
    low = (absolute + absolute.flip(2).roll(1, 2))[:, :k, :k]
    low = (low + low.transpose(1, 2)).flatten(1)[:, 1:]
    return torch.log1p(low / low.mean(1, keepdim=True).clamp(min=1e-12))


def _normalized_thumbnails(grey: torch.Tensor) -> torch.Tensor:
    """Return thumbnails of 8 x 8 pixels, centered and scaled to length 1, as ``[N, 64]``."""
    thumbs = _shrink_images(grey, MIN_IMAGE_PIXELS).flatten(1)
    thumbs = thumbs - thumbs.mean(1, keepdim=True)
    unit: torch.Tensor = thumbs / thumbs.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return unit


def _rotate_axes(points: torch.Tensor, count: int) -> NDArray[np.float64]:
    """Return the coordinates of points ``[N, p]`` along their first principal components."""
    points = points.double() - points.double().mean(0)
    axes = torch.linalg.svd(points, full_matrices=False)[2][:count]
    return np.asarray((points @ axes.T).numpy())
