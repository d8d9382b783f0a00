"""Features of photographs: what an encoder does not see, what it treats alike, and data made with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.errors import DataError
from fedloom_studies.map import features
from fedloom_studies.map.features import Cifar10Features, PatchEncoder, normalized_patches


def images(n: int, seed: int = 0) -> torch.Tensor:
    """Bytes below 200 ``[n, 3, 32, 32]``."""
    return torch.randint(0, 200, (n, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def encoder() -> PatchEncoder:
    return PatchEncoder(images(40, seed=1), torch.Generator().manual_seed(2))


def test_features_do_not_depend_on_brightness() -> None:
    torch.testing.assert_close(encoder()(images(3) + 50), encoder()(images(3)), atol=1e-5, rtol=1e-4)


def test_an_image_without_contrast_has_the_features_of_a_patch_of_zeros() -> None:
    fitted = encoder()
    flat = torch.full((1, 3, 32, 32), 90, dtype=torch.uint8)
    likeness = -fitted.mean @ fitted.weights
    expected = torch.cat([(likeness - 0.25).clamp(min=0), (-likeness - 0.25).clamp(min=0)])
    torch.testing.assert_close(fitted(flat)[0], expected.repeat_interleave(4), atol=1e-5, rtol=1e-4)


def test_an_image_has_the_same_features_in_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted, whole = encoder(), images(7)
    together = fitted(whole)
    monkeypatch.setattr(features, "BLOCK_IMAGES", 2)
    torch.testing.assert_close(fitted(whole), together, atol=1e-6, rtol=1e-5)


def test_quarters_that_look_alike_have_the_same_features() -> None:
    quarters = encoder()(images(2)[..., :14].repeat(1, 1, 1, 3)[..., :32]).unflatten(1, (-1, 2, 2))
    torch.testing.assert_close(quarters[..., 0], quarters[..., 1])
    assert not torch.allclose(quarters[..., 0, :], quarters[..., 1, :])


def test_patches_are_normalised_and_whitened_by_numpy_s_formulas() -> None:
    shown = images(1)
    rows = np.asarray(shown[0], np.float64) / 255
    corners = range(0, 32 - 6 + 1, 2)
    plain = np.array([rows[:, i : i + 6, j : j + 6].ravel() for i in corners for j in corners])
    plain -= plain.mean(1, keepdims=True)
    plain /= np.sqrt(plain.var(1, keepdims=True) + 10 / 255**2)
    np.testing.assert_allclose(normalized_patches(shown)[0], plain, atol=1e-5)


def test_the_data_have_the_official_test_images_and_their_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "FITTED_IMAGES", 8)
    random = np.random.default_rng(0)
    for folder, file, label_bytes, n in (
        ("cifar-10-batches-bin", "data_batch_1.bin", 1, 6),
        ("cifar-10-batches-bin", "test_batch.bin", 1, 9),
        ("cifar-100-binary", "train.bin", 2, 20),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        rows = random.integers(0, 256, (n, label_bytes + 3072), dtype=np.uint8)
        rows[:, :label_bytes] = np.arange(n)[:, None] % 10
        (tmp_path / folder / file).write_bytes(rows.tobytes())
    data = Cifar10Features().load(tmp_path)
    assert data.x.shape == (9, 8 * features.PATCH_COUNT)
    assert data.y.tolist() == list(range(9))
    assert data.x.isfinite().all()
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    features._patch_features.cache_clear()
    with pytest.raises(DataError, match="the test images are missing, but"):
        Cifar10Features().load(tmp_path)
