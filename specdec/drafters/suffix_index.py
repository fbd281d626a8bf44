"""The index of `suffix`: positions of a text sorted by the tokens before them.

A *suffix array over reversed contexts*, kept as a log of sorted segments. Position j of a text is filed under the
tokens that end with it, read backwards: t[j], t[j - 1], ... Positions with equal contexts are adjacent, and those that
agree with the newest context in most tokens are the neighbours of the place where it would be inserted: one binary
search, for any size of text.

New positions are first kept unsorted (at most `TAIL` of them, looked through one by one), then sorted into a segment;
segments of similar size are merged, so there are O(log L) of them and a token is sorted O(log L) times. A prompt
becomes one segment at once, by prefix doubling in numpy.

Contexts are compared over at most `depth` tokens. The ids are stored once, reversed and as big-endian 32-bit numbers,
so that comparing bytes compares tokens: to numpy a context is a string of bytes, which it can sort and search. Memory:
4 bytes per token for the id and 8 for its place in the order, 4 once frozen; the buffer of a growing text has up to as
much again in reserve.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from specdec.config import check_whole
from specdec.drafters.base import Tokens, as_array
from specdec.drafters.ngram.hashing import Occurrences

TAIL = 256
SEPARATOR = 0xFFFFFFFF  # between the documents of a store: no token
_BYTES = 4
_NO_TOKEN = np.array([0xFFFFFFFE], dtype=">u4").view(np.uint32)  # ends a query: agrees with nothing that is stored


@dataclass
class _Segment:
    """Positions in the order of their contexts: `order`, int64 or int32 [n], counted from `start`."""

    start: int
    order: np.ndarray

    def of(self, contexts: np.ndarray) -> np.ndarray:
        """Return the contexts of these positions, unsorted; a view."""
        return contexts[self.start : self.start + len(self.order)]

    def places(self, contexts: np.ndarray, wanted: np.ndarray) -> list[int]:
        """Count the contexts before each of `wanted`, bytes [m]."""
        own = self.of(contexts)
        if self.order.dtype == np.intp:
            places: list[int] = own.searchsorted(wanted, sorter=self.order).tolist()
            return places
        # numpy would make the whole order wider first. Strings lose their zero bytes at the end, and compare alike.
        return [bisect_left(self.order, string, key=own.__getitem__) for string in wanted]


class SuffixIndex:
    """Growing text with its positions in order. Position j is filed once its successor is known.

    Invariant: the segments and the tail together hold the positions 0..size - 2, each once; a segment is ascending in
    its contexts of `depth` tokens.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.size = 0
        # The text in the last `size` elements before `capacity`, reversed; separators before it and after it.
        self._allocate(1)
        self._segments: list[_Segment] = []
        self.filed = 0

    @property
    def nbytes(self) -> int:
        """Bytes of ids and order."""
        return int(self.buffer.nbytes) + sum(s.order.nbytes for s in self._segments)

    @property
    def segments(self) -> list[np.ndarray]:
        """The positions of each segment in order."""
        return [segment.start + segment.order for segment in self._segments]

    @property
    def _reversed(self) -> np.ndarray:
        """The text, the newest token first; a view."""
        return self.buffer[self.capacity - self.size : self.capacity]

    def tokens(self) -> np.ndarray:
        """Return the text, int64 [size]."""
        return self._reversed[::-1].astype(np.int64)

    def begins(self, tokens: np.ndarray) -> bool:
        """True if the text is a prefix of `tokens`."""
        return self.size <= len(tokens) and bool((self._reversed[::-1] == tokens[: self.size]).all())

    def newest(self) -> np.ndarray:
        """Return the last `depth` tokens as they are stored, the newest first: a query."""
        start = self.capacity - self.size
        return self.words[start : min(start + self.depth, self.capacity)]

    def extend(self, tokens: Tokens) -> None:
        """Append ids."""
        n = len(tokens)
        if self.size + n >= self.capacity:
            self._grow(self.size + n)
        start = self.capacity - self.size - n
        self.buffer[start : start + n] = tokens[::-1]
        self.size += n

    def file(self) -> None:
        """Sort new positions into the segments, except a tail that is cheaper to look through."""
        end = self.size - 1
        if end - self.filed <= TAIL:
            return
        start, self.filed = self.filed, end
        if not self._segments:
            self._segments.append(_Segment(0, self._sorted_by_doubling(end)))
            return
        fresh = self.contexts[start:end].argsort(kind="stable")
        while self._segments and len(self._segments[-1].order) <= 2 * len(fresh):
            older = self._segments.pop()
            old, new = older.of(self.contexts)[older.order], self.contexts[start:end][fresh]
            fresh = np.insert(older.order, old.searchsorted(new, "right"), fresh + len(older.order))
            start = older.start
        self._segments.append(_Segment(start, fresh))

    def freeze(self) -> None:
        """Give back the reserve and sort everything into one segment: 8 bytes per token from here on."""
        self._grow(self.size)
        self.filed = max(0, self.size - 1)
        self._segments = [_Segment(0, self._sorted_by_doubling(self.filed).astype(np.int32))] if self.filed else []

    def nearest(self, queries: Sequence[tuple[np.ndarray, int]]) -> list[np.ndarray]:
        """Find for each (query, most) positions int64 [n], in no order, among them the `most` whose contexts agree
        longest with the query, and perhaps some without any agreement.

        query: newest tokens as `newest` returns them, or without the newest few, but not all
        """
        if self.size < 2:
            return [np.empty(0, dtype=np.int64)] * len(queries)
        width = _BYTES * self.depth
        strings = b"".join(query.tobytes()[:width].ljust(width, b"\0") for query, _ in queries)
        wanted = np.frombuffer(strings, self.contexts.dtype)
        found: list[list[np.ndarray]] = [[] for _ in queries]
        for segment in self._segments:
            for pieces, (_, most), at in zip(found, queries, segment.places(self.contexts, wanted), strict=True):
                piece = segment.order[max(0, at - most) : at + most]
                pieces.append(piece + segment.start if segment.start else piece)
        tail = self.words[self.capacity - self.size + 1 : self.capacity - self.filed]
        for pieces, (query, _) in zip(found, queries, strict=True):
            pieces.append(self.size - 2 - (tail == query[0]).nonzero()[0])
        return [np.concatenate(pieces) for pieces in found]

    def agreement(self, positions: np.ndarray, query: np.ndarray, gaps: int = 0) -> np.ndarray:
        """Count the tokens in which the contexts of positions agree with the query, int64 [n].

        In the last `gaps` of them the newest token counts as agreeing.
        """
        query = np.concatenate([query[: self.depth], _NO_TOKEN])
        windows = self.windows[positions].view(np.uint32).reshape(len(positions), self.depth + 1)
        same = windows[:, : len(query)] == query
        same[len(same) - gaps :, 0] = True
        length: np.ndarray = same.argmin(axis=1)
        return length

    def successors(self, positions: np.ndarray, n: int) -> np.ndarray:
        """Return the n tokens that follow each position, int32 [len(positions), n]; -1 past the end of the text."""
        at = (self.capacity - 2 - positions)[:, None] - np.arange(n)
        return self.buffer.view(">i4").take(at, mode="clip")  # the separator is -1, and the first entry is one

    def _grow(self, needed: int) -> None:
        capacity = needed + 1 if needed <= self.size else max(needed + 1, 2 * self.capacity, 1024)
        text = self._reversed
        self._allocate(capacity)
        self.buffer[capacity - self.size : capacity] = text

    def _allocate(self, capacity: int) -> None:
        """Make room for `capacity` - 1 tokens: the bytes, and views of them.

        words: tokens in the machine's own byte order, to compare
        contexts: those of all positions, as bytes
        windows: the same with one token more
        """
        self.capacity = capacity
        raw = bytearray(b"\xff") * (_BYTES * (capacity + self.depth + 1))  # separators
        self.buffer = np.frombuffer(raw, dtype=">u4")
        self.words = np.frombuffer(raw, dtype=np.uint32)
        start = _BYTES * (capacity - 1)
        self.windows = np.ndarray((capacity,), f"V{_BYTES * (self.depth + 1)}", raw, start, (-_BYTES,))
        self.contexts = np.ndarray((capacity,), f"S{_BYTES * self.depth}", raw, start, (-_BYTES,))

    def _sorted_by_doubling(self, end: int) -> np.ndarray:
        """Sort positions 0..end - 1 by context, int64: rank by 1, 2, 4, ... tokens until all differ or `depth` is met.

        Source: Manber and Myers 1990, with numpy's sort.
        """
        contexts = Occurrences(self.tokens()[:end])
        seen = 1
        while seen < self.depth and len(contexts.first) < end:
            before = np.full(end, end)  # before the text's start is the separator, the largest of all
            before[seen:] = contexts.rank[:-seen]
            contexts = Occurrences(contexts.rank * (end + 1) + before)
            seen *= 2
        return contexts.order


class SuffixStore:
    """Earlier texts for the `suffix` strategy, in one index; several drafters may share a store.

    texts: rows of ids to begin with
    depth: most context tokens that are compared
    """

    def __init__(self, texts: Iterable[Tokens] = (), depth: int = 32):
        check_whole("suffix store: depth", depth, 1)
        self.index = SuffixIndex(depth)
        self.highest = -1  # id held
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
        """Add a text; no context and no continuation crosses its ends."""
        ids = as_array(text)
        self.highest = max(self.highest, int(ids.max(initial=-1)))
        self.index.extend(np.append(ids, SEPARATOR))
        self.index.file()

    def freeze(self) -> None:
        """Pack to 8 bytes per token; texts can still be added."""
        self.index.freeze()
