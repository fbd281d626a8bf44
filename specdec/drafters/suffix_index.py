"""An index of everything that has been written, sorted by what came before: the structure behind `suffix`.

A *suffix array over reversed contexts*, kept as a log of sorted segments. Position j of a text is filed under the
tokens that end with it, read backwards: t[j], t[j - 1], ... Positions with equal contexts lie side by side, and those
that agree with the newest context in most tokens are the neighbours of the place where it would be inserted: one
binary search, whatever the size of the text.

New positions are first kept unsorted (at most `TAIL` of them, looked through one by one), then sorted into a segment;
segments of similar size are merged, so there are O(log L) of them and a token is sorted O(log L) times in its life. A
prompt becomes one segment at once, by prefix doubling in numpy.

Contexts are compared over at most `depth` tokens. The ids are stored once, reversed and as big-endian 32-bit numbers,
so that comparing bytes compares tokens. Memory: 8 bytes a token, 4 for the id and 4 for its place in the order; the
buffer of a text that is still growing has up to as much again in reserve.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

import numpy as np

from specdec.config import check_whole
from specdec.drafters.base import Tokens, as_array

TAIL = 256
SEPARATOR = 0xFFFFFFFF  # between the documents of a store: no token
_BYTES = 4


class SuffixIndex:
    """Growing text with its positions in order. Position j is filed once its successor is known.

    Invariant: the segments and the tail together hold the positions 0..size - 2, each once; a segment is ascending in
    its contexts of `depth` tokens.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.size = 0
        # The text in the last `size` elements before `capacity`, reversed; separators before it and after it.
        self._allocate(0)
        self.segments: list[array[int]] = []
        self.filed = 0

    @property
    def nbytes(self) -> int:
        """Bytes of ids and order."""
        return int(self.buffer.nbytes) + sum(s.itemsize * len(s) for s in self.segments)

    @property
    def _reversed(self) -> np.ndarray:
        """The text, the newest token first; a view."""
        return self.buffer[self.capacity - self.size : self.capacity]

    def tokens(self) -> np.ndarray:
        """The text, int64 [size]."""
        return self._reversed[::-1].astype(np.int64)

    def begins(self, tokens: np.ndarray) -> bool:
        """Whether the text is a beginning of `tokens`."""
        return self.size <= len(tokens) and bool((self._reversed[::-1] == tokens[: self.size]).all())

    def newest(self) -> np.ndarray:
        """The last `depth` tokens, the newest first."""
        return self._reversed[: self.depth]

    def extend(self, tokens: np.ndarray) -> None:
        """Append ids; int64 [n]."""
        n = len(tokens)
        if self.size + n > self.capacity:
            self._grow(self.size + n)
        start = self.capacity - self.size - n
        self.buffer[start : start + n] = tokens[::-1]
        self.size += n

    def file(self) -> None:
        """Sort what has grown into the segments, except a tail that is cheaper to look through."""
        end = self.size - 1
        if end - self.filed <= TAIL:
            return
        start, self.filed = self.filed, end
        if not self.segments:
            self.segments.append(array("i", self._sorted_by_doubling(end)))
            return
        fresh = sorted(range(start, end), key=self.context)
        while self.segments and len(self.segments[-1]) <= 2 * len(fresh):
            # Two sorted runs: sorting their concatenation is a merge.
            fresh = sorted([*self.segments.pop(), *fresh], key=self.context)
        self.segments.append(array("i", fresh))

    def freeze(self) -> None:
        """Give back the reserve and sort everything into one segment: 8 bytes a token from here on."""
        self._grow(self.size)
        self.filed = max(0, self.size - 1)
        self.segments = [array("i", self._sorted_by_doubling(self.filed))] if self.filed else []

    def context(self, position: int) -> Any:
        """The sort key of a position: its last `depth` tokens as bytes, the newest first."""
        at = _BYTES * (self.capacity - 1 - position)
        return self.raw[at : at + _BYTES * self.depth]

    def candidates(self, query: np.ndarray, most: int) -> np.ndarray:
        """Positions int64 [n], in no order, with the `most` among them whose contexts agree longest with `query`.

        query: newest tokens as `newest` gives them, or without the newest few. Positions without any agreement may
        be among them.
        """
        if self.size < 2 or len(query) == 0:
            return np.empty(0, dtype=np.int64)
        wanted = query.tobytes()
        found: list[int] = []
        for segment in self.segments:
            at = bisect_left(segment, wanted, key=self.context)
            found += segment[max(0, at - most) : at + most]
        tail = self.buffer[self.capacity - self.size + 1 : self.capacity - self.filed]
        recent = np.flatnonzero(tail == query[0])
        return np.concatenate([np.array(found, dtype=np.int64), self.size - 2 - recent])

    def agreement(self, positions: np.ndarray, query: np.ndarray, skipped: np.ndarray | None = None) -> np.ndarray:
        """In how many tokens the contexts of positions agree with the query, int64 [n]; where `skipped` [n] is true,
        the newest token counts as agreeing."""
        same = self.windows[self.capacity - 1 - positions, : len(query)] == query
        if skipped is not None:
            same[skipped, 0] = True
        length = same.argmin(axis=1)
        length[same.all(axis=1)] = len(query)
        return length

    def successors(self, positions: np.ndarray, n: int) -> np.ndarray:
        """The n tokens that follow each position, int64 [len(positions), n]; -1 beyond the end of the text."""
        at = (self.capacity - 2 - positions)[:, None] - np.arange(n)
        found = self.buffer[np.maximum(at, 0)].astype(np.int64)
        found[(found == SEPARATOR) | (at < 0)] = -1
        return found

    def _grow(self, needed: int) -> None:
        capacity = needed if needed <= self.size else max(needed, 2 * self.capacity, 1024)
        text = self._reversed
        self._allocate(capacity)
        self.buffer[capacity - self.size : capacity] = text

    def _allocate(self, capacity: int) -> None:
        """Room for `capacity` tokens: the bytes, and two views of them."""
        self.capacity = capacity
        self.raw = bytearray(b"\xff") * (_BYTES * (capacity + self.depth))  # separators
        self.buffer = np.frombuffer(self.raw, dtype=">u4")
        self.windows = np.lib.stride_tricks.sliding_window_view(self.buffer, self.depth)

    def _sorted_by_doubling(self, end: int) -> np.ndarray:
        """Positions 0..end - 1 by context: ranks by 1, 2, 4, ... tokens until all differ or `depth` is reached.

        Source: Manber and Myers 1990, with numpy's sort.
        """
        text = self.tokens()[:end]
        rank = np.unique(text, return_inverse=True)[1] + 1
        seen = 1
        while seen < self.depth and rank.max(initial=0) < end:
            before = np.full_like(rank, end + 1)  # beyond the text's start lies the separator, the largest of all
            before[seen:] = rank[:-seen]
            rank = np.unique(rank * (end + 2) + before, return_inverse=True)[1] + 1
            seen *= 2
        return np.argsort(rank, kind="stable").astype(np.int32)


class SuffixStore:
    """Earlier texts that the `suffix` strategy may draw on, in one index; several drafters may share a store.

    texts: rows of ids to begin with; depth: most context tokens compared. `freeze` packs it to 8 bytes a token (more
    texts can be added all the same).
    """

    def __init__(self, texts: Iterable[Tokens] = (), depth: int = 32):
        check_whole("suffix store: depth", depth, 1)
        self.index = SuffixIndex(depth)
        for text in texts:
            self.add(text)

    def __repr__(self) -> str:
        return f"SuffixStore({self.size} tokens)"

    @property
    def size(self) -> int:
        """Tokens held, a separator after each text included."""
        return self.index.size

    @property
    def nbytes(self) -> int:
        return self.index.nbytes

    def add(self, text: Tokens) -> None:
        """Add a text; no context and no continuation reaches over its ends."""
        self.index.extend(np.append(as_array(text), SEPARATOR))
        self.index.file()

    def freeze(self) -> None:
        self.index.freeze()
