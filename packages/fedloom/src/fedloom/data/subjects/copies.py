"""Near-duplicates, as augmentation creates them: rows and images that are much closer than all others are."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.subjects.design import Design, Ints

NEIGHBOR_COUNT = 10
"""Number of neighbors of a row that are compared to distinguish a near-duplicate from a dense region."""
OUTER_LOG_MEAN = float(
    np.mean(
        [sum(1 / i for i in range(j, NEIGHBOR_COUNT)) for j in range(2 + (NEIGHBOR_COUNT - 2) // 2, NEIGHBOR_COUNT)]
    )
)
"""Expected log of the ratio between the distance of the last neighbor and a distance in the outer half of the others,
times the dimension of the points."""
CLOSENESS_LEVEL = 1e-3
"""Probability that a row's nearest neighbor would be this close if all rows came from the same distribution. A note
needs 50 times as many such rows."""
CLOSE_SHARE = 0.05
MOST_NEAR_ROWS = 20_000
"""Largest number of rows that are searched for near-duplicates. A tree with more rows takes seconds."""
MOST_NEAR_IMAGES = 10_000
"""Largest number of images that are searched for near-duplicates. The distances between more images take seconds."""
MOST_TREE_AXES = 8
"""Largest number of axes for which finding neighbors with a tree is faster than computing all distances."""
MOST_COMPARED_BYTES = 1 << 29
"""Largest number of bytes that are compared. Comparing more bytes would take seconds, and the samples may be on
disk."""
THUMB_PIXELS = 32
"""Height and width to which larger images are averaged before they are compared."""
LEAST_PIXELS = 8
"""Smallest height and width at which images can be told apart."""
FREQUENCY_COUNT = 5
SEEN_AXES = 12
"""Number of principal axes of spectra and thumbnails along which images are compared."""


def near_copies(points: NDArray[np.float64], units: Ints | None = None, *, ties: bool = False) -> int:
    """Return the number of rows with a neighbor that is much closer than the next ones, or 0 if chance explains them.

    Args:
        points: points ``[N, p]`` whose distances are meaningful.
        units: subject ``[N]`` of each row. Rows of the same subject are not counted. None: all rows are independent.
        ties: True if equal points are copies. False ignores points that equal several other points, because such data
            are coarse.
    """
    if not 5 * NEIGHBOR_COUNT <= len(points) <= MOST_NEAR_ROWS:
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
    outer = inner[:, len(inner[0]) // 2 :]  # the nearer ones may be further copies
    logs = np.log(last[apart, None] / outer[apart])
    dimension = min(points.shape[1], OUTER_LOG_MEAN / max(float(np.median(logs.mean(1))), 1e-9))
    ratio = (first[sound] / last[sound]) ** dimension
    close = 1 - (1 - ratio) ** (NEIGHBOR_COUNT - 1) < CLOSENESS_LEVEL
    if units is not None:
        itself = nearest[:, 0] == np.arange(len(points))  # among equal points, it may come second
        other = np.where(itself, nearest[:, 1], nearest[:, 0])
        close &= (units[other] != units)[sound]
    return int(close.sum()) if close.mean() >= CLOSE_SHARE else 0


def _neighbours(points: NDArray[np.float64]) -> tuple[NDArray[np.float64], Ints]:
    """Return distances ``[N, k]`` from each point to its nearest points, including itself, and their positions."""
    if points.shape[1] <= MOST_TREE_AXES:
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


def image_copies(images: torch.Tensor, design: Design | None) -> int:
    """Return the number of images that look like slightly changed copies of other images, or 0 if chance explains them.

    Mirroring, quarter turns, shifts and contrast do not change the spectrum. Noise does not change the thumbnail.
    Rotations by other angles and crops of a small part change both.

    Args:
        images: images ``[N, C, H, W]``.
        design: design of the data set. Images of the same subject are not counted.
    """
    if len(images) > MOST_NEAR_IMAGES or images.nbytes > MOST_COMPARED_BYTES or min(images.shape[2:]) < LEAST_PIXELS:
        return 0
    units = None if design is None or design.subject is None else design.units
    some = max(1, 2**22 // max(1, images[0].numel()))
    grey = torch.cat([_thumbs(part.float().mean(1, keepdim=True), THUMB_PIXELS) for part in images.split(some)])
    if not bool(grey.isfinite().all()):
        return 0
    views = (_spectra(grey), _unit_thumbs(grey))
    return max(near_copies(_rotate_axes(view, SEEN_AXES), units, ties=True) for view in views)


def _thumbs(grey: torch.Tensor, most: int) -> torch.Tensor:
    """Average images down to at most this height and width, ``[N, 1, H, W]``."""
    return torch.nn.functional.adaptive_avg_pool2d(grey, (min(grey.shape[2], most), min(grey.shape[3], most)))


def _spectra(grey: torch.Tensor) -> torch.Tensor:
    """Return low frequencies of the absolute Fourier transform, averaged over turned and mirrored images, ``[N, p]``.

    They are divided by their mean, which depends on the contrast.
    """
    absolute = torch.fft.fft2(grey[:, 0] - grey.mean((1, 2, 3))[:, None, None]).abs()
    k = min(FREQUENCY_COUNT, *(side // 2 for side in absolute.shape[1:]))
    low = (absolute + absolute.flip(2).roll(1, 2))[:, :k, :k]
    low = (low + low.transpose(1, 2)).flatten(1)[:, 1:]
    return torch.log1p(low / low.mean(1, keepdim=True).clamp(min=1e-12))


def _unit_thumbs(grey: torch.Tensor) -> torch.Tensor:
    """Return thumbnails of 8 x 8 pixels, centered and scaled to length 1: ``[N, 64]``."""
    thumbs = _thumbs(grey, LEAST_PIXELS).flatten(1)
    thumbs = thumbs - thumbs.mean(1, keepdim=True)
    unit: torch.Tensor = thumbs / thumbs.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return unit


def _rotate_axes(points: torch.Tensor, count: int) -> NDArray[np.float64]:
    """Return the coordinates of points ``[N, p]`` along their first principal axes."""
    points = points.double() - points.double().mean(0)
    axes = torch.linalg.svd(points, full_matrices=False)[2][:count]
    return np.asarray((points @ axes.T).numpy())
