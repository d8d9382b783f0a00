"""Random augmentation of training images, drawn from each client's own generator.

By default, images remain unchanged.

`Augment.draw` draws the random decisions for a batch of one client. `Augment.apply` applies these decisions to the
images of one or more clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedloom.values import Value


class Augment(Value):
    """Random horizontal flips, and random crops of padded images (FedSLR's code: 4 pixels, probability 0.5)."""

    flip: float = Field(0.0, ge=0, le=1, description="probability that an image is flipped left to right")
    crop: int = Field(
        0,
        ge=0,
        description="number of zero pixels added on each side of an image before it is cropped to its original "
        "size (0: none)",
    )
    crop_probability: float = Field(
        1.0, ge=0, le=1, description="probability that an image is cropped. Otherwise the image is unchanged"
    )

    needs: ClassVar[Mapping[str, str]] = {"crop_probability": "crop"}

    @property
    def changes(self) -> bool:
        """True if the augmentation may change images."""
        return self.flip > 0 or (self.crop > 0 and self.crop_probability > 0)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw decisions for images: int64 ``[count, 3]`` with flip (0 or 1) and the top left corner of the crop."""
        chance = torch.rand(count, 2, dtype=torch.float32, generator=generator)
        corner = torch.randint(0, 2 * self.crop + 1, (count, 2), generator=generator)
        flip = (chance[:, :1] < self.flip).long()
        return torch.cat([flip, torch.where(chance[:, 1:] < self.crop_probability, corner, self.crop)], 1)

    def apply(self, x: Tensor, drawn: Tensor) -> Tensor:
        """Return randomly augmented images.

        Args:
            x: images ``[..., c, h, w]`` with any number of leading dimensions.
            drawn: decisions ``[..., 3]`` for these images, as returned by `draw`.
        """
        high, wide = x.shape[-2:]
        flip, top, left = drawn.to(x.device).unbind(-1)
        rows = top[..., None] + torch.arange(high, device=x.device)
        columns = left[..., None] + torch.arange(wide, device=x.device)
        columns = torch.where(flip[..., None] > 0, columns.flip(-1), columns)
        padded = functional.pad(x, [self.crop] * 4)
        some_rows = padded.take_along_dim(rows[..., None, :, None], -2)
        return some_rows.take_along_dim(columns[..., None, None, :], -1)
