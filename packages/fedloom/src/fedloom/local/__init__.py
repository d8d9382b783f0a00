"""Local training: settings, the training loop, and the oracles that compute gradients.

No other layer calls autograd.
"""

from fedloom.local.batches import Batch
from fedloom.local.context import Ctx, Nothing
from fedloom.local.descend import Pull, descend
from fedloom.local.iterate import iterate
from fedloom.local.settings import LocalSGD
from fedloom.local.split import split
from fedloom.local.step import decay_of, shrink_, step_, where_moved
from fedloom.local.svrg import SvrgResult, svrg
from fedloom.local.terms import Bound, Term
from fedloom.local.work import Counts, Work

__all__ = [
    "Batch", "Bound", "Counts", "Ctx", "LocalSGD", "Nothing", "Pull", "SvrgResult", "Term", "Work", "decay_of",
    "descend", "iterate", "shrink_", "split", "step_", "svrg", "where_moved",
]  # fmt: skip
