"""Random orders of samples for many clients, identical to the orders that PyTorch draws."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.kernels.machine import compile_loop


@compile_loop
def shuffle(words: Any, sizes: Any, steps: Any, order: Any, out: Any) -> None:
    """Draw the batches of all clients. In each epoch, the order of samples is the order that `torch.randperm` draws.

    The state of a Mersenne Twister consists of words, which can be renewed one at a time. Here, a word is renewed only
    when a random number is drawn from it, so that few draws need only a few words.

    Args:
        words: first words of the state of each client's generator ``[m, s]``, as returned by `fedloom.seeds.states` for
            the number of draws. They are changed.
        sizes: number of samples of each client ``[m]``, at least 1.
        steps: number of batches of each client ``[m]``.
        order: memory for an order of samples, with at least as many entries as the largest size.
        out: array ``[k, m, b]`` into which the positions of the samples are written. Entries without a sample remain
            unchanged.
    """
    width = out.shape[2]
    for c in range(len(sizes)):
        n, at, first = sizes[c], 0, 0
        while first < steps[c]:
            for p in range(n):
                order[p] = p
            step, column = first, 0
            for p in range(n):
                if p < n - 1:
                    drawn = _draw_word(words[c], at)
                    at = at + 1 if at < 623 else 0
                    q = p + drawn % (n - p)
                    order[p], order[q] = order[q], order[p]
                out[step, c, column] = order[p]
                column += 1
                if column == width:
                    step, column = step + 1, 0
                    if step == steps[c]:
                        break
            first = step + 1 if column else step


@compile_loop
def _draw_word(words: Any, at: int) -> Any:
    """Renew the word at position ``at`` of a Mersenne Twister, and return the 32 random bits that it yields."""
    after = np.int64(words[at + 1 if at < 623 else 0])
    both = (np.int64(words[at]) & 0x80000000) | (after & 0x7FFFFFFF)
    word = np.int64(words[at + 397 if at < 227 else at - 227]) ^ (both >> 1) ^ (0x9908B0DF if after & 1 else 0)
    words[at] = word
    word ^= word >> 11
    word ^= (word << 7) & 0x9D2C5680
    word ^= (word << 15) & 0xEFC60000
    return word ^ (word >> 18)
