"""Lookup caches: counts of the tokens that followed an n-gram, in memory and in llama.cpp's file format.

A cache maps n-grams of 1..4 ids to *parts* (next id -> count). Source: llama.cpp `ngram-cache`, with its semantics of
update, merge, load and save. Drafts break ties by the order in which the original walks a part, a hash table of GNU
libstdc++; that order is a function of the order of insertion alone (`iteration_order`), which Python's dicts keep, so
the table is simulated only for a tie or a file.

Most n-grams of a text have one successor. Such a part is a plain integer, count * 2^32 + id; a `Part` exists only from
the second successor on. A long text that an empty cache counts is sorted and stays sorted: its n-grams become parts
when they are asked for (`_SortedText`). Both make indexing a prompt cheap in time and memory.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from specdec.drafters.base import Tokens, as_array
from specdec.drafters.ngram.hashing import Occurrences, stable_order
from specdec.errors import SpecdecError
from specdec.files.texts import as_path, reading, write_atomically

LONGEST = 4  # most ids of an n-gram
ID_BITS = (1 << 32) - 1
MAX_INT32 = (1 << 31) - 1
_WORTH_SORTING = 256  # ids from which on sorting a text beats counting it one by one
_HEAD = struct.Struct("<5i")
_PRIMES = (
    13, 29, 59, 127, 257, 541, 1109, 2357, 5087, 10273, 20753, 42043, 85229, 172933, 351061, 712697, 1447153,
)  # fmt: skip
Key = tuple[int, ...]


def iteration_order(hashes: Sequence[int]) -> list[int]:
    """Return the order in which GNU libstdc++'s unordered_map yields elements inserted with these hashes, indices [n].

    A bucket's newest element comes first in it, a bucket's place is that of its first element, newest buckets first;
    growing to the next prime inserts everything again in the order so far. Maps past the last prime keep its order,
    which differs from the original's but costs no more.
    """
    order: list[int] = []
    count = len(hashes)
    for size in _PRIMES:
        full = count if size == _PRIMES[-1] else min(size, count)
        buckets: dict[int, list[int]] = {}
        for i in chain(order, range(len(order), full)):
            buckets.setdefault(hashes[i] % size, []).append(i)
        order = [i for bucket in reversed(buckets.values()) for i in reversed(bucket)]
        if full == count:
            break
    return order


def key_hash(key: Sequence[int]) -> int:
    """Compute llama.cpp's 64-bit hash of an n-gram padded with -1 to four ids; it orders the records of a file."""
    value = 0
    for token in (*key, *[-1] * (LONGEST - len(key))):
        value ^= token * 11400714819323198485 % (1 << 64)
    return value


@dataclass(slots=True)
class Part:
    """What followed one n-gram.

    counts: by id, in order of insertion
    total: their sum
    best: an id with the highest count; if several have it and it matters, `ordered` decides
    most: that count
    """

    counts: dict[int, int]
    total: int
    best: int
    most: int

    @staticmethod
    def of(counts: dict[int, int]) -> Part:
        """Make a part of these counts, which it owns from now on."""
        best = max(counts, key=counts.__getitem__)
        return Part(counts, sum(counts.values()), best, counts[best])

    def add(self, token: int, count: int = 1) -> None:
        """Count `token` `count` more times."""
        self.total += count
        self.counts[token] = count = self.counts.get(token, 0) + count
        if count > self.most:
            self.best, self.most = token, count

    def ordered(self) -> list[tuple[int, int]]:
        """List (id, count) in the order of the original's hash table."""
        tokens = list(self.counts)
        return [(tokens[i], self.counts[tokens[i]]) for i in iteration_order(tokens)]


class LookupCache:
    """Counts of the ids that followed each n-gram of 1..4 ids. source: the file it was loaded from, or None."""

    def __init__(self, parts: dict[Key, int | Part] | None = None, source: str | None = None):
        self.source = source
        self._parts = {} if parts is None else parts
        self._sorted: _SortedText | None = None  # the first text; what was asked for or added since is in _parts

    @property
    def parts(self) -> dict[Key, int | Part]:
        """All parts in order of insertion, single successors packed (see the module)."""
        if self._sorted is not None:
            self._parts = dict(self._sorted.items()) | self._parts
            self._sorted = None
        return self._parts

    def get(self, key: Key) -> int | Part | None:
        """Return what followed this n-gram, packed as in `parts`; None if it was never seen."""
        part = self._parts.get(key)
        if part is None and self._sorted is not None:
            part = self._sorted.get(key)
            if part is not None:
                self._parts[key] = part
        return part

    def __len__(self) -> int:
        return len(self.parts)

    def successors(self, key: Sequence[int]) -> list[tuple[int, int]]:
        """List (id, count) after this n-gram, in the order of the original's hash table; empty if never seen."""
        found = self.get(tuple(key))
        if found is None:
            return []
        return found.ordered() if isinstance(found, Part) else [(found & ID_BITS, found >> 32)]

    def items(self) -> Iterator[tuple[Key, list[tuple[int, int]]]]:
        """Yield (n-gram, successors), both in the order of the original's hash tables, as in a saved file."""
        keys = list(self.parts)
        for i in iteration_order([key_hash(key) for key in keys]):
            yield keys[i], self.successors(keys[i])

    def max_id(self) -> int:
        """Return the largest id in the cache; -1 for an empty one."""
        parts = self.parts.values()
        successors = (max(part.counts) if isinstance(part, Part) else part & ID_BITS for part in parts)
        return max(chain(map(max, self.parts), successors), default=-1)

    def add(self, key: Key, token: int, count: int = 1) -> None:
        """Count that `token` followed the n-gram `key`, 1..4 ids, `count` more times. Ids are in [0, 2^31)."""
        old = self.get(key)
        if old is None:
            self._parts[key] = count << 32 | token
        elif isinstance(old, Part):
            old.add(token, count)
        elif old & ID_BITS == token:
            self._parts[key] = old + (count << 32)
        else:
            self._parts[key] = Part.of({old & ID_BITS: old >> 32, token: count})

    def update(self, ids: Tokens, n_new: int | None = None, shortest: int = 1, longest: int = LONGEST) -> None:
        """Count the n-grams of `shortest`..`longest` ids before each of the last `n_new` ids (None: before all).

        N-grams reach back before the new ids. Raises SpecdecError for ids outside [0, 2^31).
        """
        known = 0 if n_new is None else max(0, len(ids) - n_new)
        old = min(known, longest)
        listed = as_array(ids[known - old :]).tolist()
        if listed and not 0 <= min(listed) <= max(listed) <= MAX_INT32:
            raise SpecdecError(f"lookup cache: ids are in [0, {MAX_INT32}], got {min(listed)}..{max(listed)}")
        if old == 0 and len(listed) >= _WORTH_SORTING and not self._parts and self._sorted is None:
            self._sorted = _SortedText(as_array(listed), shortest, longest)
            return
        for size in range(shortest, longest + 1):
            first = max(old, size)
            starts = range(first - size, first)
            for key, token in zip(zip(*(listed[i:] for i in starts), strict=False), listed[first:], strict=False):
                self.add(key, token)

    def merge(self, other: LookupCache) -> None:
        """Add the counts of `other`, which does not change. New n-grams are copied, with their order of insertion."""
        for key, successors in other.items():
            if key in self.parts:
                for token, count in successors:
                    self.add(key, token, count)
            else:
                new = other.parts[key]
                self.parts[key] = replace(new, counts=dict(new.counts)) if isinstance(new, Part) else new

    # -- files -------------------------------------------------------------------------------------------------------

    @staticmethod
    def load(path: str | Path) -> LookupCache:
        """Read a file in llama.cpp's format: records of 4 ids (padded with -1), K, and K times (id, count), int32.

        As upstream, the first of several records of an n-gram counts, and the first of several counts of an id; a
        rest of less than 16 bytes is ignored. Raises SpecdecError for a file that cannot be read or is none of these.
        """
        cache = LookupCache(source=str(path))
        with reading(path, "lookup cache") as name, name.open("rb") as file:
            for key, pairs in _records(file, os.fstat(file.fileno()).st_size, str(path)):
                counts: dict[int, int] = {}
                for token, count in zip(pairs[::2], pairs[1::2], strict=True):
                    counts.setdefault(token, count)
                cache.parts.setdefault(key, _packed(counts))
        return cache

    def save(self, path: str | Path) -> None:
        """Write the file, which replaces an old one when it is complete.

        Counts above int32, for which the format has no room, are written as its largest. Raises SpecdecError.
        """
        path = as_path(path, "lookup cache")
        try:
            if path.exists() and not path.is_file():
                kind = "a folder" if path.is_dir() else "no regular file"
                raise SpecdecError(f"cannot write lookup cache {path}: it is {kind}")
            write_atomically(path, b"".join(self._packed_records()))
        except OSError as error:
            raise SpecdecError(f"cannot write lookup cache {path}: {error.strerror}") from error

    def _packed_records(self) -> Iterator[bytes]:
        for key, successors in self.items():
            pairs = [min(value, MAX_INT32) for pair in successors for value in pair]
            padded = (*key, *[-1] * (LONGEST - len(key)))
            yield struct.pack(f"<{5 + len(pairs)}i", *padded, len(successors), *pairs)


class _SortedText:
    """The counts of one text, int64 [L], as `sorted_pairs` finds them."""

    def __init__(self, ids: np.ndarray, shortest: int, longest: int):
        self.ids = ids
        self.pairs = dict(sorted_pairs(ids, shortest, longest))
        self.runs: dict[int, np.ndarray] = {}  # by size, where the pairs of each n-gram begin, and the end
        self.places: dict[bytes, int] = {}  # an n-gram's ids as int64 -> its run
        for size, (_, home, _) in self.pairs.items():
            starts = np.flatnonzero(np.diff(home, prepend=-1))
            self.runs[size] = np.append(starts, len(home))
            ngrams = np.ndarray((len(ids) - size + 1,), f"V{8 * size}", ids, strides=(8,))
            self.places.update(zip(ngrams[home[starts]].tolist(), range(len(starts)), strict=True))

    def get(self, key: Key) -> int | Part | None:
        place = self.places.get(struct.pack(f"{len(key)}q", *key))
        if place is None:
            return None
        size, (first, _, counts) = len(key), self.pairs[len(key)]
        run = slice(*self.runs[size][place : place + 2].tolist())
        return _packed(dict(zip(self.ids[first[run] + size].tolist(), counts[run].tolist(), strict=True)))

    def items(self) -> Iterator[tuple[Key, int | Part]]:
        """Yield all parts in order of insertion."""
        return chain.from_iterable(_grouped(self.ids, size, *pairs) for size, pairs in self.pairs.items())


def sorted_pairs(ids: np.ndarray, shortest: int, longest: int) -> Iterator[tuple[int, tuple[np.ndarray, ...]]]:
    """Find all distinct (n-gram, next id) pairs of a text, by sorting, for each size in `shortest`..`longest`.

    Yields (size, (first, home, counts)), arrays over the pairs: the start of the pair's first occurrence and of its
    n-gram's, and how often the pair occurs. Ordered by `home`, then `first`, as `LookupCache.add` along the text would
    insert them.
    """
    before = Occurrences(ids)
    width, small = len(ids), before.rank
    for size in range(1, min(longest, len(ids) - 1) + 1):
        ngrams = before.rank[: len(ids) - size]
        pairs = Occurrences(ngrams * width + small[size:])
        if size >= shortest:
            home = before.first[ngrams[pairs.first]]
            order = stable_order(home * width + pairs.first)
            yield size, (pairs.first[order], home[order], pairs.counts[order])
        before = pairs


def _grouped(
    ids: np.ndarray, size: int, first: np.ndarray, home: np.ndarray, counts: np.ndarray
) -> Iterator[tuple[Key, int | Part]]:
    """Group pairs of `sorted_pairs` into (n-gram, part)."""
    tokens = ids[first + size]
    starts = np.flatnonzero(np.diff(home, prepend=-1))
    lengths = np.diff(starts, append=len(home))
    values: list[int | Part] = (counts[starts] << 32 | tokens[starts]).tolist()
    several = np.flatnonzero(lengths > 1)
    inside = np.repeat(lengths > 1, lengths)
    successors = zip(tokens[inside].tolist(), counts[inside].tolist(), strict=True)
    for i, length in zip(several.tolist(), lengths[several].tolist(), strict=True):
        values[i] = Part.of(dict(islice(successors, length)))
    columns = [ids[home[starts] + k].tolist() for k in range(size)]
    return zip(zip(*columns, strict=True), values, strict=True)


def _packed(counts: dict[int, int]) -> int | Part:
    [(token, count), *more] = counts.items()
    return Part.of(counts) if more else count << 32 | token


def _records(file: BinaryIO, left: int, path: str) -> Iterator[tuple[Key, tuple[int, ...]]]:
    """Yield (n-gram, (id, count, id, count, ...)) of a file of `left` bytes.

    The length in a record is compared with the size of the file before it is read. Raises SpecdecError for a record
    that cannot be one.
    """
    size = left
    while left >= 4 * LONGEST:
        where = f"lookup cache {path}: the record at byte {size - left}"
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise SpecdecError(f"{where} is cut")
        *padded, count = _HEAD.unpack(head)
        key = tuple(padded[: padded.index(-1)] if -1 in padded else padded)
        if not key or min(key) < 0 or any(token != -1 for token in padded[len(key) :]):
            raise SpecdecError(f"{where} has no n-gram of 1 to 4 ids: {padded}")
        left -= _HEAD.size
        if not 0 < count <= left // 8:
            raise SpecdecError(f"{where} claims {count} successors, {left} bytes are left")
        body = file.read(8 * count)
        if len(body) < 8 * count:
            raise SpecdecError(f"{where} is cut")
        pairs = struct.unpack(f"<{2 * count}i", body)
        if min(pairs[::2]) < 0 or min(pairs[1::2]) <= 0:
            raise SpecdecError(f"{where} has a negative id, or a count below 1")
        left -= len(body)
        yield key, pairs
