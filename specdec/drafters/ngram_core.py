"""What the n-gram strategies share: hashes of n-grams, as llama.cpp computes them, and parity switches.

A hash of n tokens is the polynomial h = (h * multiplier + token) over them, modulo 2^64; llama.cpp's `ngram-map` keeps
the lower 32 bits. A text's windows are hashed in one matrix product, one window in one dot product.

*Parity switches*: a strategy does what llama.cpp does, oddities included, unless a field `fix_...` is true. A field
left None follows `parity`: `parity=False` turns on all fixes that are not named.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specdec.config import check_whole
from specdec.drafters.base import DraftRequest
from specdec.errors import SpecdecError

MAP_MULTIPLIER = 2654435761
MOD_MULTIPLIER = 6364136223846793005
MAP_MASK = (1 << 32) - 1


def powers(multiplier: int, n: int) -> np.ndarray:
    """uint64 [n]: the weight of each token of an n-gram in its hash, the oldest token's first."""
    return np.array([pow(multiplier, n - 1 - i, 1 << 64) for i in range(n)], dtype=np.uint64)


def hash_windows(tokens: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Hashes modulo 2^64 of all windows of len(weights) tokens: int64 [L] -> uint64 [L - n + 1] (empty if L < n)."""
    n = len(weights)
    if len(tokens) < n:
        return np.empty(0, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), n)
    hashes: np.ndarray = windows @ weights  # unsigned products wrap around, which is the modulus
    return hashes


def newest_ngram(request: DraftRequest, tokens: np.ndarray, n: int) -> np.ndarray:
    """The row's last n ids, the newest included: int64 [n]. Needs n - 1 ids before the newest."""
    key = np.empty(n, dtype=np.int64)
    key[: n - 1] = tokens[len(tokens) - n + 1 :]
    key[n - 1] = request.last
    return key


def resolve_switches(drafter: Any) -> None:
    """Give every `fix_...` field that was left None its value: on iff `parity` is off. Raises SpecdecError."""
    switches = [name for name in drafter.__dataclass_fields__ if name.startswith("fix_")]
    for name in ("parity", *switches):
        if getattr(drafter, name) not in (True, False, None) or drafter.parity is None:
            raise SpecdecError(f"{drafter.name}: {name} must be true or false, got {getattr(drafter, name)!r}")
    for name in switches:
        if getattr(drafter, name) is None:
            setattr(drafter, name, not drafter.parity)


def check_sizes(drafter: Any, **least: int) -> None:
    """Check whole-number parameters: name -> least value; sizes of n-grams and drafts go up to 1024, as upstream."""
    for name, lowest in least.items():
        value = getattr(drafter, name)
        check_whole(f"{drafter.name}: {name}", value, lowest)
        if value > 1024 and name not in ("min_hits", "hash_size", "table_size"):
            raise SpecdecError(f"{drafter.name}: {name}={value} is above the limit of 1024")

