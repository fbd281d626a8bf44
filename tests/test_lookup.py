"""ngram-cache and lookup caches against a literal, slow reading of llama.cpp's rules; files against hostile bytes."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec import DraftRequest, LookupCache, NgramCache, SpecdecError, SpeculativeDecoder
from specdec.acceptance import RULES
from specdec.drafters import lookup_cache, ngram_cache
from specdec.drafters.base import DraftContext
from specdec.drafters.chain import build_chain
from specdec.drafters.lookup_cache import Part, iteration_order
from specdec.research.lookup import lookup_stats
from tests.helpers import lookup_oracle as oracle
from tests.helpers.broken import BROKEN_RULES
from tests.helpers.playing import check_counts, looping, quoting_ids, random_ids
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_greedy

TEXT = st.lists(st.integers(0, 3), min_size=2, max_size=80)
# Congruent modulo the first bucket counts, so that buckets hold several ids and ties depend on them.
CLASHING = st.lists(st.sampled_from([0, 13, 26, 29, 58, 377, 1, 14, 2]), min_size=2, max_size=60)


def filled(text: list[int]) -> tuple[LookupCache, oracle.Cache]:
    """The same counts here and in the oracle."""
    mine, theirs = LookupCache(), {}
    mine.update(text)
    oracle.update(theirs, text, len(text))
    return mine, theirs


def contents(cache: LookupCache | oracle.Cache) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """Parts in the order in which the original walks them, n-grams in order of insertion."""
    if isinstance(cache, LookupCache):
        return {key: cache.successors(key) for key in cache.parts}
    return {key: part.items() for key, part in cache.items()}


def ask(drafter: Any, tokens: list[int], last: int, n_max: int = 0, row: int = 0) -> list[int]:
    [draft] = drafter.draft([DraftRequest(row, np.asarray(tokens, dtype=np.int64), last, n_max, len(tokens))])
    assert draft.q is None
    return [int(token) for token in draft.tokens]


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


# -- drafting ----------------------------------------------------------------------------------------------------------


@st.composite
def sessions(draw: Any) -> tuple[list[int], list[list[int]], list[int], int]:
    """A text, the texts behind a dynamic and a static cache, how much of the text each round brings, n_draft."""
    source = draw(st.sampled_from([TEXT, CLASHING]))
    steps = draw(st.lists(st.integers(0, 8), min_size=1, max_size=12))
    return draw(source), [draw(source), draw(source)], steps, draw(st.integers(1, 9))


def differences(session: Any, make: Any = NgramCache) -> int:
    """How many drafts of a session differ from the oracle's; also asserts what holds of every draft."""
    text, files, steps, n_draft = session
    (dynamic, their_dynamic), (static, their_static) = map(filled, files)
    drafter, theirs = make(static, dynamic, n_draft), oracle.Drafter(n_draft, their_dynamic, their_static)
    size, wrong = min(2, len(text) - 1), 0
    drafter.begin(0, text[:size])
    for accepted in steps:
        got = ask(drafter, text[:size], text[size])
        wrong += got != theirs.draft(text[:size], text[size])
        assert len(got) <= n_draft
        assert set(got) <= {*text, *files[0], *files[1]}
        drafter.accept(0, min(accepted, len(got)), False)
        size = min(size + accepted + 1, len(text) - 1)
    return wrong


@settings(max_examples=300)
@given(sessions())
def test_drafts_follow_upstreams_rules_also_in_ties(session: Any) -> None:
    assert differences(session) == 0


def many_sessions() -> list[Any]:
    """Fixed sessions, on which a wrong rule must show."""
    alphabet = [0, 13, 26, 29, 58, 377, 1, 14, 2]
    made = []
    for seed in range(40):
        texts = [[alphabet[i] for i in random_ids(60, 3 * seed + k, 3 + seed % 7)] for k in range(3)]
        made.append((texts[0], texts[1:], [1 + i % 5 for i in random_ids(12, seed)], 1 + seed % 8))
    return made


def _first_inserted(part: Part, evidence: Any, percent: int) -> int:
    worth = {token: count * 100 * evidence.get(token, 0) or count for token, count in part.counts.items()}
    return max(worth, key=worth.__getitem__)


def test_no_rule_is_wrong_where_wrong_rules_show() -> None:
    assert sum(map(differences, many_sessions())) == 0


@pytest.mark.parametrize(
    "fault", ["ties-by-insertion", "static-does-not-weigh", "strict-context", "lax-dynamic", "straddling"]
)
def test_a_wrong_rule_is_found_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make: Any = NgramCache
    if fault == "ties-by-insertion":
        monkeypatch.setattr(ngram_cache, "_favourite", _first_inserted)
    elif fault == "static-does-not-weigh":
        monkeypatch.setattr(ngram_cache, "_counts", lambda part: {})
    elif fault == "strict-context":
        monkeypatch.setattr(ngram_cache, "LAX", ngram_cache.STRICT)
    elif fault == "lax-dynamic":
        monkeypatch.setattr(ngram_cache, "STRICT", ngram_cache.LAX)
    else:
        make = lambda *parameters: NgramCache(*parameters, fix_boundaries=True)  # noqa: E731
    assert sum(differences(session, make) for session in many_sessions()) > 0


@given(
    st.lists(st.tuples(st.integers(0, 1), TEXT, st.integers(-1, 5), st.integers(0, 9)), max_size=12), st.booleans(),
    st.integers(1, 6),
)  # fmt: skip
def test_no_sequence_of_texts_and_accepts_makes_a_draft_too_long_or_unseen(
    rounds: list[tuple[int, list[int], int, int]], parity: bool, n_draft: int
) -> None:
    """Rows that jump from text to text, shrink, and are told of more accepted tokens than were drafted."""
    drafter, seen = NgramCache(n_draft=n_draft, parity=parity), {0: set(), 1: set()}
    for row, text, n_max, accepted in rounds:
        if accepted % 2:
            drafter.begin(row, text[:-1])
        seen[row] |= set(text)
        got = ask(drafter, text[:-1], text[-1], n_max, row)
        assert set(got) <= seen[row]
        assert len(got) <= (min(n_draft, n_max) if n_max > 0 else n_draft)
        drafter.accept(row, accepted, bool(accepted % 3))


def test_fix_boundaries_counts_ngrams_that_straddle_rounds() -> None:
    text = random_ids(40, 3, 6)
    for parity, whole in ((True, False), (False, True)):
        drafter = NgramCache(parity=parity)
        for size in range(3, 39):
            ask(drafter, text[:size], text[size])
        counted = LookupCache()
        counted.update(text[:39])
        assert (contents(drafter._rows[0].cache) == contents(counted)) is whole
    only = NgramCache(fix_boundaries=True)
    assert only.parameters()["fix_boundaries"] is True
    assert only.parameters()["fix_begin"] is False


def test_fix_begin_starts_afresh_for_a_text_that_does_not_go_on() -> None:
    first, other = quoting_ids(40, 1), quoting_ids(30, 2)
    kept, mended = NgramCache(), NgramCache(fix_begin=True)
    for drafter in (kept, mended):
        drafter.begin(0, first[:-1])
        ask(drafter, first[:-1], first[-1])
        drafter.begin(0, [*first, 5, 6])  # goes on
        assert ask(drafter, [*first, 5], 6) == ask(drafter, [*first, 5], 6)
        assert (3 in drafter._rows[0].cache.parts) is False
        assert tuple(first[:4]) in drafter._rows[0].cache.parts
        drafter.begin(0, other[:-1])
    assert ask(kept, other[:-1], other[-1]) == []  # shorter than what was counted: not counted itself
    assert ask(mended, other[:-1], other[-1]) == quoting_ids(38, 2)[30:]
    assert tuple(first[:4]) not in mended._rows[0].cache.parts


def test_a_call_starts_afresh_and_keep_state_goes_on() -> None:
    configured = NgramCache(n_draft=3)
    text = quoting_ids(30, 1)

    def chain(previous: Any = None, strategy: Any = configured) -> Any:
        before = {} if previous is None else dict(zip(previous.labels, previous.drafters, strict=True))
        return build_chain([strategy], DraftContext(1, 100, 128, previous=before))

    first = chain()
    assert ask(first.drafters[0], text[:-1], text[-1]) != []
    assert configured._rows == {}
    assert ask(chain().drafters[0], [], 3) == []
    assert chain(first).drafters[0]._rows is first.drafters[0]._rows
    assert chain(first, NgramCache(n_draft=4)).drafters[0]._rows == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_draft": 0}, "n_draft must be a whole number"),
        ({"fix_begin": "yes"}, "fix_begin must be true or false"),
        ({"parity": None}, "parity must be true or false"),
        ({"static": 3}, "static must be a file or a LookupCache"),
        ({"static": "/nowhere/static.bin"}, "lookup cache not found: /nowhere/static.bin"),
    ],
)
def test_bad_parameters_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecdecError, match=message):
        NgramCache(**options)


def test_a_file_of_another_vocabulary_is_refused_before_decoding(tmp_path: Path) -> None:
    LookupCache(parts={(1, 2): 5 << 32 | 900}).save(tmp_path / "other.bin")
    pair = SpeculativeDecoder(tiny_model("llama"), check=False)
    with pytest.raises(SpecdecError, match=r"static cache .*other.bin holds id 900, the target has 128"):
        pair.generate([1, 2, 3], 4, strategies=[NgramCache(tmp_path / "other.bin")])


@pytest.mark.parametrize("parity", [True, False])
def test_text_with_ngram_cache_is_the_text_without(parity: bool, tmp_path: Path) -> None:
    model = looping(tiny_model("llama"))
    prompts = [quoting_ids(40, 1), random_ids(9, 2), quoting_ids(20, 3)]
    texts = [oracle_greedy(model, prompt, 30) for prompt in prompts]
    static, once = LookupCache(), LookupCache()
    once.update(texts[1], None, 2, 2)
    for _ in range(2):  # a 2-gram seen once proposes nothing
        static.merge(once)
    static.save(tmp_path / "static.bin")
    pair = SpeculativeDecoder(model, check=False)
    strategy = [{"name": "ngram-cache", "static": str(tmp_path / "static.bin"), "parity": parity}]
    out = pair.generate(prompts, 30, strategies=strategy, batch_size=2)
    assert out.token_ids == texts
    stats = out.stats.to_dict()
    assert 20 < stats["accepted_tokens"] < stats["draft_tokens"]
    check_counts(out)
    sampled = {"temperature": 0.7, "acceptance": "match", "seed": 5}
    plain = pair.generate(prompts, 30, strategies=[], **sampled).token_ids
    assert pair.generate(prompts, 30, strategies=strategy, **sampled).token_ids == plain


def test_a_rule_that_accepts_every_draft_of_ngram_cache_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = looping(tiny_model("llama")), quoting_ids(40, 1)
    monkeypatch.setitem(RULES, "accept-all", BROKEN_RULES["accept-all"])
    pair = SpeculativeDecoder(model, check=False)
    out = pair.generate(prompt, 30, strategies=["ngram-cache"], acceptance="accept-all")
    assert out.token_ids != [oracle_greedy(model, prompt, 30)]


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


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


# -- statistics without a model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_draft", [1, 3, 8])
def test_lookup_stats_counts_what_a_literal_walk_counts(n_draft: int) -> None:
    text, n_ctx = quoting_ids(41, 1, 9) + random_ids(60, 2, 3) + quoting_ids(30, 1, 9), 25
    static, their_static = filled(quoting_ids(30, 1, 9))
    drafted = accepted = rounds = 0
    dynamic: oracle.Cache = {}
    for start in range(0, len(text) - n_ctx, n_ctx):
        truth, context = text[start : start + n_ctx], {}
        seen = truth[:1]
        while len(seen) < n_ctx:
            draft = oracle.draft(seen, n_draft, context, dynamic, their_static)
            drafted, rounds = drafted + len(draft), rounds + 1
            for token in [*draft, None]:
                if len(seen) == n_ctx:
                    break
                right = token == truth[len(seen)]
                accepted += right
                seen.append(truth[len(seen)])
                oracle.update(context, seen, 1)
                if not right:
                    break
        oracle.merge(dynamic, context)
    got = lookup_stats(text, n_ctx, n_draft, static)
    assert [got[k] for k in ("draft_tokens", "accepted_tokens", "rounds")] == [drafted, accepted, rounds]
    assert got["chunks"] == 5
    assert accepted > 10


def test_lookup_stats_refuses_a_text_that_it_would_skip_and_keeps_the_dynamic_cache() -> None:
    with pytest.raises(SpecdecError, match="25 tokens are no more than one chunk of 25"):
        lookup_stats(random_ids(25), 25)
    dynamic, _ = filled(random_ids(30, 1, 4))
    before = contents(dynamic)
    lookup_stats(random_ids(60, 1, 4), 20, dynamic=dynamic)
    assert contents(dynamic) == before
