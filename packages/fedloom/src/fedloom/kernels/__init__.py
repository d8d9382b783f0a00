"""Loops compiled for the processor at hand: gathering samples, pooling, linear layers of many clients.

Arrays are C-contiguous. Every sum is taken in an order that depends on the layer and the batch alone: what a client
gets does not depend on who shares its chunk.
"""

from fedloom.kernels.draws import shuffle
from fedloom.kernels.linear import add_gradient, apply, backward, forward
from fedloom.kernels.machine import compiled
from fedloom.kernels.network import BLOCK_SAMPLES, add_gradients, descend
from fedloom.kernels.samples import gather, pool, unpool

__all__ = [
    "BLOCK_SAMPLES",
    "add_gradient",
    "add_gradients",
    "apply",
    "backward",
    "compiled",
    "descend",
    "forward",
    "gather",
    "pool",
    "shuffle",
    "unpool",
]
