"""Training runs: their settings, rounds, evaluation and results.

Every name of this package is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.lazy import make_getattr

if TYPE_CHECKING:
    from fedloom.engine.setting import Setting as Setting

__all__ = ["Setting"]

__getattr__ = make_getattr(__name__)
