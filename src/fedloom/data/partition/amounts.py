"""Quantity skew."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from fedloom.data.partition._base import Draw, Pool, Sized
from fedloom.data.partition.deal import Dealt, choose_each, cut_by, offsets_of, redraw
from fedloom.seeds import numpy_generator


class Quantity(Sized):
    """Sizes by Dirichlet shares, labels alike (NIID-Bench, section 4.1, "q ~ Dir(beta)"; FLAME)."""

    kind: ClassVar[str] = "quantity"
    beta: float = Field(default=0.5, gt=0, description="concentration (FLAME, Table III: 0.5)")
    overlap: bool = Field(
        default=False,
        description="every client draws from all samples anew, so clients overlap (FLAME's code, with min_size 100)",
    )

    def draw(self, pool: Pool, seed: int) -> Draw:
        """A permutation, cut at Dirichlet shares."""
        self.fits(pool)
        rng, total = numpy_generator(seed, purpose="quantity"), np.array([len(pool)])
        order = pool.index[rng.permutation(len(pool))]
        sizes = redraw(
            lambda: cut_by(rng.dirichlet(np.full(self.clients, self.beta))[:, None], total),
            self.min_size,
            f"quantity: {len(pool)} samples of {pool.data.name}, {self.clients} clients, beta {self.beta}",
            "raise beta, or lower clients or min_size",
        )
        return Draw(choose_each([order], sizes, rng) if self.overlap else Dealt(order, offsets_of(sizes[:, 0])))
