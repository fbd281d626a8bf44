"""Hashes of n-grams, as llama.cpp computes them, and parity switches of the n-gram strategies.

A hash of n tokens is the polynomial h = (h * multiplier + token) over them, modulo 2^64; llama.cpp's `ngram-map` keeps
the lower 32 bits. A text's windows are hashed in one matrix product, one window in one dot product.

*Parity switches*: a strategy does what llama.cpp does, oddities included, unless a field `fix_...` is true. A field
left None follows `parity`: `parity=False` turns on all fixes that are not named.

*State between rows*: llama.cpp's strategies continue with what an earlier text left in their slot. In a decoder's call
what they know ends with each row, because a row's drafts, and under `leviathan` its text, must not depend on its
neighbours. `shared` asks for upstream's behaviour; a chain without a decoder (`DraftContext.separate` False) has it
always.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specdec.config import check_switch, check_whole
from specdec.drafters.base import DraftContext, DraftRequest
from specdec.errors import SpecdecError

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


def resolve_switches(drafter: Any) -> None:
    """Check the switches; `fix_...` fields that are None become True iff `parity` is False. Raises SpecdecError."""
    check_switch(f"{drafter.name}: shared", drafter.shared)
    switches = [name for name in drafter.__dataclass_fields__ if name.startswith("fix_")]
    for name in ("parity", *switches):
        if getattr(drafter, name) not in (True, False, None) or drafter.parity is None:
            raise SpecdecError(f"{drafter.name}: {name} must be true or false, got {getattr(drafter, name)!r}")
    for name in switches:
        if getattr(drafter, name) is None:
            setattr(drafter, name, not drafter.parity)


def own_state(drafter: Any, made: Any, context: DraftContext) -> None:
    """Give `made`, this drafter for one call, its state by slot: none, or if shared that of the previous call."""
    made._separate = context.separate and not drafter.shared
    before = None if made._separate else drafter.inherited(context)
    made._rows = before._rows if before is not None else {}


def check_sizes(drafter: Any, **least: int) -> None:
    """Check whole-number parameters, name -> least value; sizes of n-grams and drafts go up to 1024, as upstream."""
    for name, lowest in least.items():
        value = getattr(drafter, name)
        check_whole(f"{drafter.name}: {name}", value, lowest)
        if value > 1024 and name not in ("min_hits", "hash_size", "table_size"):
            raise SpecdecError(f"{drafter.name}: {name}={value} is above the limit of 1024")
