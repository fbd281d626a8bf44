"""Lookup caches against a literal, slow reading of llama.cpp's rules; files against hostile bytes."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec import LookupCache, SpecdecError
from specdec.drafters.ngram import lookup_cache
from specdec.drafters.ngram.lookup_cache import Part, iteration_order
from tests.helpers import lookup_oracle as oracle
from tests.helpers.lookup_oracle import contents, filled
from tests.helpers.playing import random_ids

TEXT = st.lists(st.integers(0, 3), min_size=2, max_size=80)
# Congruent modulo the first bucket counts, so that buckets hold several ids and ties depend on them.
CLASHING = st.lists(st.sampled_from([0, 13, 26, 29, 58, 377, 1, 14, 2]), min_size=2, max_size=60)


# -- the order of the original's hash table ----------------------------------------------------------------------------


def test_the_order_of_a_part_by_example() -> None:
    assert [[3, 16, 29, 5, 42][i] for i in iteration_order([3, 16, 29, 5, 42])] == [5, 42, 29, 16, 3]


@given(st.lists(st.integers(0, 400), max_size=150))
def test_the_order_of_a_part_is_that_of_a_linked_list_hash_table(tokens: list[int]) -> None:
    table = oracle.Table()
    for token in tokens:
        table.add(token, 1)
    distinct = list(dict.fromkeys(tokens))
    assert [distinct[i] for i in iteration_order(distinct)] == [token for token, _ in table.items()]


# -- counting ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(CLASHING, st.integers(0, 60)), max_size=4))
def test_counting_equals_counting_one_by_one(updates: list[tuple[list[int], int]]) -> None:
    mine, theirs = LookupCache(), {}
    for text, n_new in updates:
        mine.update(text, n_new)
        oracle.update(theirs, text, n_new)
    assert list(contents(mine).items()) == list(contents(theirs).items())


@given(st.one_of(CLASHING, TEXT), st.integers(1, 4), st.integers(0, 3))
def test_sorting_a_text_counts_as_walking_along_it(text: list[int], shortest: int, more: int) -> None:
    sizes = shortest, min(4, shortest + more)
    walked, array, found = LookupCache(), np.asarray(text), LookupCache()
    walked.update(text, None, *sizes)
    for size, pairs in lookup_cache.sorted_pairs(array, *sizes):
        found.parts.update(lookup_cache._grouped(array, size, *pairs))
    assert list(found.parts) == list(walked.parts)
    for key, part in found.parts.items():
        other = walked.parts[key]
        assert type(part) is type(other)
        if isinstance(part, Part):
            assert list(part.counts.items()) == list(other.counts.items())
            assert (part.total, part.most, part.counts[part.best]) == (other.total, other.most, other.most)
        else:
            assert part == other


def test_a_long_text_is_counted_as_a_short_one() -> None:
    text = [*random_ids(400, 1, 5), *random_ids(400, 2, 90)]
    mine, theirs = filled(text)
    assert list(contents(mine).items()) == list(contents(theirs).items())


@settings(max_examples=40)
@given(st.integers(0, 1000), st.sampled_from([2, 9, 60, 5000]), st.lists(st.integers(1, 9), max_size=30))
def test_a_sorted_text_is_asked_and_grows_as_one_that_was_counted_one_by_one(
    seed: int, alphabet: int, pieces: list[int]
) -> None:
    text = random_ids(300, seed, alphabet)
    mine, theirs = filled(text)
    for i, size in enumerate(pieces):
        new = random_ids(size, seed + i, alphabet)
        for key in (tuple(text[i : i + 1 + i % 4]), tuple(new[:2])):
            assert mine.successors(key) == (theirs[key].items() if key in theirs else [])
        mine.update([*text, *new], size)
        oracle.update(theirs, [*text, *new], size)
        text += new
    assert mine._sorted is not None  # nothing so far has needed all of it
    assert list(contents(mine).items()) == list(contents(theirs).items())


@given(st.lists(CLASHING, min_size=1, max_size=4))
def test_merging_adds_counts_and_keeps_the_order_of_copies(texts: list[list[int]]) -> None:
    mine, theirs = LookupCache(), {}
    for text in texts:
        a, b = filled(text)
        before = contents(a)
        mine.merge(a)
        # n-grams are walked in the order of the outer table, which decides nothing but their order of insertion
        oracle.merge(theirs, {key: b[key] for key, _ in a.items()})
        mine.update(text[:7])  # a copy goes on growing as the original would
        oracle.update(theirs, text[:7], 7)
        assert contents(a) == before
    assert list(contents(mine).items()) == list(contents(theirs).items())


def test_ids_that_are_none_are_refused() -> None:
    for ids in ([1, -1, 2], [1, 2**31, 2]):
        with pytest.raises(SpecdecError, match="ids are in"):
            LookupCache().update(ids)


# -- files -------------------------------------------------------------------------------------------------------------


def record(key: list[int], *pairs: tuple[int, int], count: int | None = None) -> bytes:
    flat = [value for pair in pairs for value in pair]
    return struct.pack(f"<{5 + len(flat)}i", *key, len(pairs) if count is None else count, *flat)


GOOD = record([1, 2, -1, -1], (5, 3), (6, 1))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(CLASHING, min_size=1, max_size=3))
def test_a_saved_cache_comes_back(texts: list[list[int]], tmp_path: Path) -> None:
    cache = LookupCache()
    for text in texts:
        cache.update(text)
    cache.save(tmp_path / "a.bin")
    again = LookupCache.load(tmp_path / "a.bin")
    assert {k: sorted(v) for k, v in contents(again).items()} == {k: sorted(v) for k, v in contents(cache).items()}
    assert list(again.parts) == [key for key, _ in cache.items()]
    assert again.source == str(tmp_path / "a.bin")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (GOOD[:-1], "claims 2 successors, 15 bytes are left"),
        (GOOD[:18], "is cut"),
        (record([1, 2, 3, 4], count=2**31 - 1), "claims 2147483647 successors, 0 bytes are left"),
        (record([1, 2, 3, 4], (5, 1), count=-1), "claims -1 successors"),
        (record([1, 2, 3, 4], count=0), "claims 0 successors"),
        (record([1, 2, 3, 4], (5, 0)), "a count below 1"),
        (record([1, 2, 3, 4], (5, -7)), "a count below 1"),
        (record([1, 2, 3, 4], (-5, 7)), "a negative id"),
        (record([-1, -1, -1, -1], (5, 7)), "no n-gram of 1 to 4 ids"),
        (record([1, -1, 2, -1], (5, 7)), "no n-gram of 1 to 4 ids"),
        (record([1, 2, -3, -1], (5, 7)), "no n-gram of 1 to 4 ids"),
    ],
)
def test_a_broken_record_is_named_by_file_and_byte(bad: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.bin"
    for before in (b"", GOOD):
        path.write_bytes(before + bad)
        with pytest.raises(SpecdecError, match=rf"{path}: the record at byte {len(before)} .*{message}"):
            LookupCache.load(path)


def test_what_upstream_forgives_is_forgiven(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    twice = record([1, 2, -1, -1], (9, 9)) + record([7, -1, -1, -1], (4, 2), (4, 8), (3, 1))
    path.write_bytes(GOOD + twice + b"\x01" * 15)  # an n-gram twice, an id twice, a rest shorter than 16 bytes
    assert contents(LookupCache.load(path)) == {(1, 2): [(6, 1), (5, 3)], (7,): [(3, 1), (4, 2)]}
    path.write_bytes(b"")
    assert len(LookupCache.load(path)) == 0


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=CLASHING,
    edits=st.lists(st.tuples(st.integers(0, 300), st.one_of(st.integers(-2, 9), st.integers(-(2**31), 2**31 - 1)))),
    cut=st.integers(0, 40),
)
def test_any_bytes_load_or_are_refused_in_one_line(
    text: list[int], edits: list[tuple[int, int]], cut: int, tmp_path: Path
) -> None:
    """Files that are right but for a few numbers and their end."""
    path = tmp_path / "any.bin"
    cache = LookupCache()
    cache.update(text)
    cache.save(path)
    data = bytearray(path.read_bytes())
    for place, value in edits:
        struct.pack_into("<i", data, 4 * (place % (len(data) // 4)), value)
    path.write_bytes(data[: len(data) - cut])
    try:
        loaded = LookupCache.load(path)
    except SpecdecError:  # anything else fails the test
        return
    assert all(count > 0 and 0 <= token < 2**31 for _, pairs in loaded.items() for token, count in pairs)
    assert all(1 <= len(key) <= 4 and min(key) >= 0 for key in loaded.parts)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", Path("/dev/zero")):
        with pytest.raises(SpecdecError, match="not found"):
            LookupCache.load(path)


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(GOOD)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SpecdecError, match=r"cannot write lookup cache .*a.bin: No space left"):
        LookupCache(parts={(1,): 1 << 32}).save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]
    assert path.read_bytes() == GOOD
    with pytest.raises(SpecdecError, match="cannot write"):
        LookupCache().save(path / "inside.bin")
    with pytest.raises(SpecdecError, match="it is a folder"):
        LookupCache().save(tmp_path)


def test_counts_beyond_the_formats_range_are_written_as_its_largest(tmp_path: Path) -> None:
    LookupCache(parts={(1,): 2**40 << 32 | 3}).save(tmp_path / "a.bin")
    assert LookupCache.load(tmp_path / "a.bin").successors([1]) == [(3, 2**31 - 1)]
