"""ngram-cache against a literal, slow reading of llama.cpp's rules, with wrong rules as controls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import DraftRequest, LookupCache, NgramCache, SpecdecError, SpeculativeDecoder
from specdec.decoding.acceptance import RULES
from specdec.drafters.base import DraftContext
from specdec.drafters.chain import build_chain
from specdec.drafters.ngram import cache as ngram_cache
from specdec.drafters.ngram.lookup_cache import Part
from specdec.research.offline.lookup import lookup_stats
from tests.helpers import lookup_oracle as oracle
from tests.helpers.broken import BROKEN_RULES
from tests.helpers.lookup_oracle import contents, filled
from tests.helpers.playing import check_counts, looping, quoting_ids, random_ids
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_greedy

TEXT = st.lists(st.integers(0, 3), min_size=2, max_size=80)
# Congruent modulo the first bucket counts, so that buckets hold several ids and ties depend on them.
CLASHING = st.lists(st.sampled_from([0, 13, 26, 29, 58, 377, 1, 14, 2]), min_size=2, max_size=60)


def ask(drafter: Any, tokens: list[int], last: int, n_max: int = 0, row: int = 0) -> list[int]:
    [draft] = drafter.draft([DraftRequest(row, np.asarray(tokens, dtype=np.int64), last, n_max, len(tokens))])
    assert draft.q is None
    return [int(token) for token in draft.tokens]


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
        ({"fix_begin": "yes"}, "fix_begin must be True or False"),
        ({"parity": None}, "parity must be True or False"),
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


@pytest.mark.fast(1)
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
