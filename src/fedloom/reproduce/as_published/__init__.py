"""Methods as a paper's public code has them, where that differs from the paper and changes its tables.

They are no methods of the library: outside the registry and the laws, tested only to differ in the documented way.
"""

from __future__ import annotations

from fedloom.algorithms import Algorithm
from fedloom.reproduce.as_published.ditto import DittoAsPublished
from fedloom.reproduce.as_published.flame import FLAMEAsPublished

AS_PUBLISHED: dict[str, type[Algorithm]] = {"ditto": DittoAsPublished, "flame": FLAMEAsPublished}
"""The variants by the name of the method that they stand in for."""

__all__ = ["AS_PUBLISHED", "DittoAsPublished", "FLAMEAsPublished"]
