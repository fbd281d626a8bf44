"""Drafters on their own, against literal and slow implementations of what they are documented to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import DraftModel, DraftRequest, NgramSimple, PromptLookup, SpecdecError, SpeculativeDecoder
from specdec.drafters import make_drafters
from specdec.drafters.base import pad_vocabulary, suffix_matches
from tests.helpers.playing import quoting_ids, random_ids, weaker
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_greedy, oracle_logits

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def one(drafter: Any, tokens: Any, last: int, n_max: int = 0) -> list[int]:
    [draft] = drafter.draft([DraftRequest(row=0, tokens=tokens, last=last, n_max=n_max, position=len(tokens))])
    assert draft.q is None
    assert draft.parents is None
    return [int(t) for t in draft.tokens]


# -- ngram-simple --------------------------------------------------------------------------------------------------


def literal_ngram_simple(t: list[int], last: int, n: int, m: int) -> list[int]:
    """llama.cpp's rules one by one."""
    length = len(t)
    if length <= n + m + 1:
        return []
    pattern = (t[length - (n - 1) :] if n > 1 else []) + [last]
    for j in range(length - n - 1, 0, -1):
        if t[j : j + n] == pattern:
            c = min(m, length - (j + n))
            return t[j + n : j + n + c] if c >= n else []
    return []


@given(TEXT, st.integers(0, 3), st.integers(1, 5), st.integers(1, 12))
def test_ngram_simple_follows_upstreams_rules(text: list[int], last: int, n: int, m: int) -> None:
    drafter = NgramSimple(size_n=n, size_m=m)
    assert one(drafter, text, last) == literal_ngram_simple(text, last, n, m)
    assert one(drafter, np.asarray(text), last) == literal_ngram_simple(text, last, n, m)


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 4), st.integers(0, 60))
def test_ngram_simple_on_repeating_text_follows_upstreams_rules(period: int, m: int, n: int, size: int) -> None:
    text = [i % period for i in range(size)]
    assert one(NgramSimple(size_n=n, size_m=m), text, size % period) == literal_ngram_simple(text, size % period, n, m)


def test_ngram_simple_oddities_by_example() -> None:
    text = [9, 1, 2, 3, 4, 5, 6, 7, 8, 1]  # "1 2" follows
    assert one(NgramSimple(size_n=2, size_m=3), text, 2) == [3, 4, 5]
    assert one(NgramSimple(size_n=2, size_m=6), text, 2) == [3, 4, 5, 6, 7, 8]
    assert one(NgramSimple(size_n=2, size_m=7), text, 2) == []  # L <= n + m + 1
    assert one(NgramSimple(size_n=2, size_m=1), text, 2) == []  # m < n never drafts
    assert one(NgramSimple(size_n=2, size_m=3), text[1:], 2) == []  # a match at position 0 is not found
    assert one(NgramSimple(size_n=1, size_m=2), [5] * 9, 5) == [5]  # the last position is not tried, so one is left
    assert one(NgramSimple(size_n=2, size_m=2), [5] * 9, 5) == []


# -- prompt-lookup -------------------------------------------------------------------------------------------------


def naive_lookup(t: list[int], last: int, n_max: int, longest: int, shortest: int, match: str) -> list[int]:
    ids = [*t, last]
    for n in range(longest, shortest - 1, -1):
        if n > len(ids):
            continue
        starts = [j for j in range(len(ids) - n) if ids[j : j + n] == ids[-n:]]
        if starts:
            j = starts[-1] if match == "latest" else starts[0]
            return ids[j + n : j + n + n_max]
    return []


@given(
    TEXT, st.integers(0, 3), st.integers(1, 12), st.integers(1, 4), st.integers(0, 3),
    st.sampled_from(["latest", "earliest"]), st.integers(-1, 6),
)  # fmt: skip
def test_prompt_lookup_equals_a_naive_search(
    text: list[int], last: int, n_max: int, shortest: int, more: int, match: str, limit: int
) -> None:
    drafter = PromptLookup(n_max=n_max, ngram_max=shortest + more, ngram_min=shortest, match=match)
    wanted = naive_lookup(text, last, n_max, shortest + more, shortest, match)
    assert one(drafter, text, last, limit) == (wanted[:limit] if limit > 0 else wanted)


@given(TEXT, st.integers(4, 5))
def test_a_lookup_proposes_nothing_for_an_unseen_token(text: list[int], last: int) -> None:
    assert one(PromptLookup(n_max=5), text, last) == []
    assert one(NgramSimple(size_n=1, size_m=2), text, last) == []


@given(TEXT, st.integers(0, 5), st.integers(1, 9))
def test_a_lookup_never_proposes_more_than_it_may_or_a_token_it_has_not_seen(
    text: list[int], last: int, n_max: int
) -> None:
    for drafter in (PromptLookup(n_max=n_max), NgramSimple(size_n=1, size_m=n_max)):
        for limit in (-1, 0, n_max + 1):
            drafted = one(drafter, text, last, limit)
            assert set(drafted) <= {*text, last}
            assert len(drafted) <= n_max


def test_a_lookup_in_an_empty_context_proposes_nothing() -> None:
    for drafter in (PromptLookup(), NgramSimple(size_n=1, size_m=1)):
        assert one(drafter, [], 3) == []
        assert one(drafter, np.empty(0, dtype=np.int64), 3) == []


@given(TEXT, st.lists(st.integers(0, 3), max_size=6))
def test_suffix_matches_are_all_and_longest(text: list[int], pattern: list[int]) -> None:
    ends, n = suffix_matches(np.asarray(text), np.asarray(pattern, dtype=np.int64))
    lengths = [
        k for k in range(len(pattern), 0, -1) if any(text[i : i + k] == pattern[-k:] for i in range(len(text) - k + 1))
    ]
    assert n == (lengths[0] if lengths else 0)
    if n:
        assert ends.tolist() == [i + n for i in range(len(text) - n + 1) if text[i : i + n] == pattern[-n:]]
    else:
        assert len(ends) == 0


# -- draft-model ---------------------------------------------------------------------------------------------------


def test_the_draft_models_drafts_are_its_own_greedy_text() -> None:
    """Also after rejections and accepted blocks of every length: the cache is caught up and trimmed rightly."""
    model = tiny_model("llama")
    draft = weaker(model, 0.02)
    pair = SpeculativeDecoder(model, draft)
    ids = random_ids(6, 1)
    accepted = []
    for r in pair.rounds(random_ids(6, 1), 40, strategies=[DraftModel(n_max=4)]):
        room = 6 + 40 - len(ids) - 1
        assert r.draft == oracle_greedy(draft, ids, min(4, room))
        ids += r.tokens
        accepted.append(r.accepted)
    assert len(set(accepted)) >= 3
    assert 4 in accepted


@pytest.mark.fast(2)
@pytest.mark.parametrize("top_n", [None, 3, 10])
def test_p_min_stops_before_the_first_position_that_is_not_sure(top_n: int | None) -> None:
    """Judged by the softmax at T = 1 over the whole vocabulary, or renormalised over the best `top_n`."""
    model = tiny_model("llama")
    draft = weaker(model, 0.1)
    ids, lengths = random_ids(6, 1), []
    strategy = DraftModel(n_max=6, p_min=0.3, top_n=top_n)
    for r in SpeculativeDecoder(model, draft).rounds(ids, 40, strategies=[strategy], repetition_penalty=1.1):
        text, wanted = list(ids), 0
        while wanted < min(6, 46 - len(ids) - 1):
            logits = oracle_logits(draft, text)[-1]
            best = logits if top_n is None else logits.topk(top_n).values
            if float(torch.softmax(best, dim=-1).max()) < 0.3 or wanted >= len(r.draft):
                assert wanted == len(r.draft)
                break
            text.append(r.draft[wanted])
            wanted += 1
        assert len(r.draft) == wanted
        lengths.append(wanted)
        ids += r.tokens
    assert len(set(lengths)) > 2


def test_n_min_drops_short_argmax_drafts_and_forces_sampled_ones() -> None:
    model = tiny_model("llama")
    pair = SpeculativeDecoder(model, weaker(model, 0.1))
    strategy = [DraftModel(n_max=6, n_min=3, p_min=0.2)]
    argmax = [len(r.draft) for r in pair.rounds(random_ids(6, 1), 60, strategies=strategy)][:-2]
    assert set(argmax) & {1, 2} == set()
    assert 0 in argmax
    assert max(argmax) >= 3
    sampled = [len(r.draft) for r in pair.rounds(random_ids(6, 1), 60, strategies=strategy, temperature=1.0)][:-4]
    assert min(sampled) == 3
    assert max(sampled) > 3


def test_presets_are_upstreams_values() -> None:
    def values(d: DraftModel) -> tuple[Any, ...]:
        return d.n_max, d.n_min, d.p_min, d.p_split

    assert values(DraftModel(preset="llama-classic")) == (16, 0, 0.75, 0.1)
    assert values(DraftModel(preset="llama-2026")) == (3, 0, 0.0, 0.1)
    assert values(DraftModel()) == (5, 0, 0.0, 0.1)
    assert values(DraftModel(preset="llama-classic", n_max=4)) == (4, 0, 0.75, 0.1)


def test_a_drafts_vocabulary_is_padded_with_impossible_ids_and_cut_to_the_targets() -> None:
    logits = torch.arange(6.0).reshape(1, 6)
    assert pad_vocabulary(logits, 4).tolist() == [[0.0, 1.0, 2.0, 3.0]]
    assert torch.softmax(pad_vocabulary(logits, 8), dim=-1)[0, 6:].tolist() == [0.0, 0.0]


# -- what users write ----------------------------------------------------------------------------------------------


def test_every_way_of_writing_a_chain_means_the_same() -> None:
    wanted = [PromptLookup(n_max=7), DraftModel(n_max=3, p_min=0.5)]
    assert make_drafters("prompt-lookup:n_max=7, draft-model:n_max=3:p_min=0.5", True) == wanted
    assert make_drafters(["prompt-lookup:n_max=7", {"name": "draft-model", "n_max": 3, "p_min": 0.5}], True) == wanted
    assert make_drafters(wanted, True) == wanted
    assert make_drafters(wanted[0], True) == wanted[:1]
    assert make_drafters([], True) == []
    assert [d.name for d in make_drafters(None, True)] == ["draft-model"]
    assert [d.name for d in make_drafters(None, False)] == ["prompt-lookup"]
    with pytest.raises(SpecdecError, match="key=value"):
        make_drafters("prompt-lookup:7", False)


def test_configured_objects_hold_no_state_of_any_call() -> None:
    model = tiny_model("llama")
    strategy = DraftModel(n_max=3)
    before = dict(vars(strategy))
    pairs = [SpeculativeDecoder(model, weaker(model, 0.1)), SpeculativeDecoder(model, model)]
    for pair in pairs:
        pair.generate(quoting_ids(9), 8, strategies=[strategy])
    assert vars(strategy) == before
