"""Loops that are compiled for the processor: gathering of samples, pooling, and linear layers of many clients.

All arrays must be C-contiguous. The order of each sum depends only on the layer and the batch, so that the result of a
client does not depend on the other clients in its chunk.
"""

from fedloom.kernels.draws import shuffle
from fedloom.kernels.linear import add_gradient, apply, backward, forward
from fedloom.kernels.machine import compile_loop
from fedloom.kernels.network import BLOCK_SAMPLES, add_gradients, descend
from fedloom.kernels.samples import gather, pool, unpool

__all__ = [
    "BLOCK_SAMPLES", "add_gradient", "add_gradients", "apply", "backward", "compile_loop", "descend", "forward",
    "gather", "pool", "shuffle", "unpool",
]  # fmt: skip
