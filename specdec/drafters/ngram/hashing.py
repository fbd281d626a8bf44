"""Hashes of n-grams, as llama.cpp computes them, and the occurrences of equal ones.

A hash of n tokens is the polynomial h = (h * multiplier + token) over them, modulo 2^64; llama.cpp's `ngram-map` keeps
the lower 32 bits. A text's windows are hashed in one matrix product, one window in one dot product.
"""

from __future__ import annotations

import numpy as np

from specdec.drafters.base import DraftRequest

MAP_MULTIPLIER = 2654435761
MOD_MULTIPLIER = 6364136223846793005
MAP_MASK = (1 << 32) - 1


def powers(multiplier: int, n: int) -> np.ndarray:
    """Return the weight of each token of an n-gram in its hash, the oldest token's first, uint64 [n]."""
    return np.array([pow(multiplier, n - 1 - i, 1 << 64) for i in range(n)], dtype=np.uint64)


def hash_windows(tokens: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Hash all windows of n = len(weights) tokens, modulo 2^64: int64 [L] -> uint64 [L - n + 1] (empty if L < n)."""
    n = len(weights)
    if len(tokens) < n:
        return np.empty(0, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), n)
    hashes: np.ndarray = windows @ weights  # unsigned products wrap around, which is the modulus
    return hashes


def newest_ngram(request: DraftRequest, tokens: np.ndarray, n: int) -> np.ndarray:
    """Return the row's last n ids, the newest included: int64 [n]. Needs n - 1 ids before the newest."""
    key = np.empty(n, dtype=np.int64)
    key[: n - 1] = tokens[len(tokens) - n + 1 :]
    key[n - 1] = request.last
    return key


def stable_order(values: np.ndarray) -> np.ndarray:
    """Return indices that sort whole numbers >= 0, equal ones in their order: int64 [n] -> int64 [n]."""
    bits = len(values).bit_length()
    if int(values.max(initial=0)) >> (63 - bits):
        return np.argsort(values, kind="stable")
    # Sorting numbers is several times as fast as sorting indices, so each number brings its own.
    order: np.ndarray = np.sort(values << bits | np.arange(len(values))) & ((1 << bits) - 1)
    return order


class Occurrences:
    """The occurrences of each value in int64 [n], all >= 0.

    order int64 [n]: positions, sorted by value and position
    rank int64 [n]: how many distinct values are smaller
    first, counts int64 [distinct]: the first position and the number of each value, ascending
    """

    def __init__(self, values: np.ndarray):
        self.order = stable_order(values)
        new = np.diff(values[self.order], prepend=-1) > 0
        starts = np.flatnonzero(new)
        self.first = self.order[starts]
        self.counts = np.diff(starts, append=len(values))
        self.rank = np.empty_like(self.order)
        self.rank[self.order] = np.cumsum(new) - 1
