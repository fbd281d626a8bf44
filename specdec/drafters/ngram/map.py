"""ngram-map-k and ngram-map-k4v: a hash map from n-grams of the row to where they occurred, with acceptance history.

Source: llama.cpp `ngram-map-k` and `ngram-map-k4v`, draft for draft.

A draft is what followed an earlier occurrence of the last n tokens. Every n-gram that was ever matched is a *key* and
remembers how much of its drafts was accepted. k4v compares what followed the occurrences of a key, keeps up to four
such *values* with counts, and drafts only if one of them dominates (at least twice as often as the others together).

Upstream's oddities are kept, and each has a switch (see drafters/ngram/parity.py):
- `fix_ratchet`: upstream limits a key's next draft to what was accepted of the last one, so that one rejection of a
  whole draft ends its drafts for ever. Fixed: the limit doubles after a whole draft was accepted, and is at least 1.
- `fix_blind_spot`: upstream never searches nor indexes the n + m + 1 positions before each prompt's end. Fixed: they
  are indexed as soon as m tokens follow.
- `fix_begin`: upstream forgets a row only if its next text is shorter, and only after that text's end; another text in
  the same slot is not indexed until it is longer than the old one was. Fixed: a text that does not continue the old one
  starts afresh. In a decoder's call only with `shared` (see drafters/ngram/parity.py): there a row starts afresh.
- `fix_min_hits` (map-k): upstream ignores `min_hits`. Fixed: a key drafts from its min_hits-th match on.

Cost: an index of one int32 slot per position (1 MiB per row), which grows with the row; per round one dot product and a
look-up. k4v also lists the positions of every n-gram (about 150 bytes per token).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

import numpy as np

from specdec.drafters.base import DraftRequest, Tokens, as_array
from specdec.drafters.ngram import hashing
from specdec.drafters.ngram.parity import MOST, ParityDrafter
from specdec.drafters.options import switch, whole

MOST_HITS = 16380
MOST_VALUES = 4


@dataclass
class Value:
    """A continuation of a key.

    start: where it begins in the row
    limit: most tokens to draft from it
    count: how often it was seen
    """

    start: int
    limit: int
    count: int = 0


@dataclass
class Key:
    """An n-gram that was matched.

    start: where it begins in the row
    counted: the occurrence up to which its values were counted
    hits: how often it was looked up
    values: its continuations
    """

    start: int
    counted: int = 0
    hits: int = 0
    values: list[Value] = field(default_factory=list)


class RowMap:
    """One row's positions by n-gram hash.

    Invariants: `table[slot]` is the first position that was indexed under the slot, 0 = none; positions up to
    `indexed` have been offered to it. Contents are compared before a position is used, so a stale slot costs a match,
    never a wrong draft.
    """

    def __init__(self, n: int, m: int, slots: int, weights: np.ndarray, no_gap: bool):
        self.n, self.m, self.slots, self.weights, self.no_gap = n, m, slots, weights, no_gap
        self.table = np.zeros(slots, dtype=np.int32)
        self.indexed = 0
        self.prompt_size = 0  # at the last begin
        self.size = 0  # at the last begin or draft
        self.text = _NONE  # what the last draft continued
        self.keys: list[Key] = []
        self.open: tuple[Value, int] | None = None  # the value that was drafted from, and how many tokens
        self.by_text: dict[bytes, Key] | None = None  # first key of each n-gram; None = to be built from the text
        self.places: dict[int, list[int]] = {}  # hash -> ascending positions, the whole row
        self.placed = 0

    def begin(self, size: int, drops_values: bool) -> None:
        """Begin with a prompt of `size` tokens: forget what a shorter prompt no longer holds, by upstream's rules."""
        gap = self.n + self.m
        keep = self.prompt_size if self.prompt_size <= size else max(0, size - gap)
        if size < self.size:
            self.table[self.table >= keep] = 0
            self.indexed = max(0, keep - 1) if self.slots else 0
            self.keys = [key for key in self.keys if key.start < keep]
            if drops_values:
                for key in self.keys:
                    key.values = [v for v in key.values if v.start < keep]
                self.keys = [key for key in self.keys if key.values]
        self.size = self.prompt_size = size
        self.by_text, self.places, self.placed = None, {}, 0

    def find(self, tokens: np.ndarray, key: np.ndarray) -> int:
        """Find where the key occurred before, 0 = nowhere; then index the positions that are new."""
        wanted = int(key.astype(np.uint64) @ self.weights) & hashing.MAP_MASK
        found = 0
        last = len(tokens) - self.n - self.m - 1
        if self.slots:
            at = int(self.table[wanted % self.slots])
            if 0 < at < last and self._is(tokens, at, key):
                found = at
        order, hashes = self._new_positions(tokens, last)
        if not found:
            same = order[hashes == wanted]
            found = next((int(at) for at in same if self._is(tokens, int(at), key)), 0)
        if self.slots:
            self._index(order, hashes)
            self.indexed = max(self.indexed, last)
        return found

    def _is(self, tokens: np.ndarray, at: int, key: np.ndarray) -> bool:
        return bool((tokens[at : at + self.n] == key).all())

    def _new_positions(self, tokens: np.ndarray, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Return positions not yet offered to the table, in upstream's order of search, and their 32-bit hashes."""
        start = self.indexed + 1
        if self.no_gap or self.prompt_size < start:
            spans = [(start, last)]
        else:
            spans = [(start, self.prompt_size - self.n - self.m - 1), (max(start, self.prompt_size + 1), last)]
        orders, hashes = [_NONE], [_NO_HASH]
        for low, high in spans:
            if low <= high:
                orders.append(np.arange(high, low - 1, -1))
                hashes.append(
                    hashing.hash_windows(tokens[low : high + self.n], self.weights)[::-1] & np.uint64(hashing.MAP_MASK)
                )
        return np.concatenate(orders), np.concatenate(hashes)

    def _index(self, order: np.ndarray, hashes: np.ndarray) -> None:
        """Give each slot that is still empty the first position in `order` with that slot."""
        slots = (hashes % np.uint64(self.slots)).astype(np.int64)
        empty = self.table[slots] == 0
        # For repeated indices the last assignment counts, hence the reversal.
        self.table[slots[empty][::-1]] = order[empty][::-1]

    def key(self, tokens: np.ndarray, ngram: np.ndarray, at: int) -> Key:
        """Return the first key record of this n-gram; make it if there is none."""
        if self.by_text is None:
            self.by_text = {}
            for known in self.keys:
                self.by_text.setdefault(tokens[known.start : known.start + self.n].tobytes(), known)
        text = ngram.tobytes()
        if text not in self.by_text:
            self.by_text[text] = Key(at)
            self.keys.append(self.by_text[text])
        return self.by_text[text]

    def occurrences(self, tokens: np.ndarray, ngram: np.ndarray, first: int, last: int) -> list[int]:
        """List all positions in first..last where the n-gram occurs, ascending; position 0 counts."""
        end = len(tokens) - self.n
        if self.placed <= end:
            for at, h in enumerate(hashing.hash_windows(tokens[self.placed :], self.weights).tolist(), self.placed):
                self.places.setdefault(h, []).append(at)
            self.placed = end + 1
        places = self.places.get(int(ngram.astype(np.uint64) @ self.weights), [])
        between = places[bisect_left(places, first) : bisect_right(places, last)]
        return [at for at in between if self._is(tokens, at, ngram)]


def _continues(prompt: Tokens, text: np.ndarray) -> bool:
    """True if a prompt begins with an earlier text."""
    return np.array_equal(as_array(prompt[: len(text)]), text)


_NONE = np.empty(0, dtype=np.int64)
_NO_HASH = np.empty(0, dtype=np.uint64)


@dataclass
class NgramMapK(ParityDrafter):
    """One value per key.

    size_n: tokens to match
    size_m: most tokens to propose
    min_hits: matches after which a key drafts (k4v, or with fix_min_hits)
    hash_size: slots; 0 = no hash, every search is a scan of the row
    parity, fix_...: llama.cpp's oddities
    shared: a row continues from its slot's earlier rows, as upstream
    Raises SpecdecError for parameters out of range.
    """

    size_n: int = whole(12, most=MOST)
    size_m: int = whole(48, most=MOST)
    min_hits: int = whole(1)
    hash_size: int = whole(262_144, least=0)
    parity: bool = switch(True)
    fix_ratchet: bool | None = switch(None)
    fix_blind_spot: bool | None = switch(None)
    fix_begin: bool | None = switch(None)
    fix_min_hits: bool | None = switch(None)
    shared: bool = switch(False)
    name: str = field(init=False, default="ngram-map-k")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._weights = hashing.powers(hashing.MAP_MULTIPLIER, self.size_n)

    def n_keys(self, row: int) -> int:
        """Count a row's keys."""
        return len(self._rows[row].keys) if row in self._rows else 0

    def begin(self, row: int, prompt: Tokens) -> None:
        state = self._rows.get(row)
        if state is not None and (self._separate or (self.fix_begin and not _continues(prompt, state.text))):
            del self._rows[row]
        if row not in self._rows:
            self._rows[row] = RowMap(self.size_n, self.size_m, self.hash_size, self._weights, bool(self.fix_blind_spot))
        self._rows[row].begin(len(prompt), self._drops_values)

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        state = self._rows.get(row)
        if is_other or state is None or state.open is None:
            return
        value, drafted = state.open
        if not self.fix_ratchet:
            value.limit = n_accepted
        else:
            value.limit = min(self.size_m, 2 * drafted) if n_accepted >= drafted else max(1, n_accepted)

    def _propose(self, request: DraftRequest) -> list[int]:
        tokens, n, m = as_array(request.tokens), self.size_n, self.size_m
        if request.row not in self._rows or len(tokens) < self._rows[request.row].size:
            self.begin(request.row, tokens)  # upstream aborts on a text that shrank unannounced
        state = self._rows[request.row]
        state.open = None
        if len(tokens) < 2 * n + m:
            return []
        state.size, state.text = len(tokens), tokens
        ngram = hashing.newest_ngram(request, tokens, n)
        at = state.find(tokens, ngram)
        if at == 0:
            return []
        key = state.key(tokens, ngram, at)
        key.hits = min(key.hits + 1, MOST_HITS)
        value = self._choose(state, tokens, ngram, key, at)
        if value is None:
            return []
        count = min(m, value.limit)
        # Tokens that the chain cuts off are not tested.
        state.open = (value, request.limit(count))
        drafted: list[int] = tokens[at + n : at + n + count].tolist()
        return drafted

    _drops_values = False

    def _choose(self, state: RowMap, tokens: np.ndarray, ngram: np.ndarray, key: Key, at: int) -> Value | None:
        """Return the value that limits this draft, or None for no draft."""
        if self.fix_min_hits and key.hits < self.min_hits:
            return None
        if not key.values:
            key.values.append(Value(at + self.size_n, self.size_m))
        return key.values[0]


@dataclass
class NgramMapK4V(NgramMapK):
    """Up to four values per key; drafts the match's own continuation if one value dominates. `min_hits` counts here."""

    fix_min_hits: bool | None = field(init=False, repr=False, default=True)
    name: str = field(init=False, default="ngram-map-k4v")

    _drops_values = True

    def _choose(self, state: RowMap, tokens: np.ndarray, ngram: np.ndarray, key: Key, at: int) -> Value | None:
        if key.hits < self.min_hits:
            return None
        for place in state.occurrences(tokens, ngram, key.counted, at):
            self._count(tokens, key, place + self.size_n)
        key.counted = at
        # An occurrence always brings its own value, unless four others came first.
        best = max(key.values, key=lambda v: v.count, default=None)
        if best is None:
            return None
        rest = sum(v.count for v in key.values) - best.count
        return None if rest > 0 and best.count < 2 * rest else best

    def _count(self, tokens: np.ndarray, key: Key, start: int) -> None:
        """Count one occurrence, whose continuation begins at `start`."""
        m = self.size_m
        for value in key.values:
            if np.array_equal(tokens[start : start + m], tokens[value.start : value.start + m]):
                value.count = min(value.count + 1, MOST_HITS)
                return
        if len(key.values) < MOST_VALUES:
            key.values.append(Value(start, m, 1))
