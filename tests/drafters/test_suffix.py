"""The suffix strategy and its index, against brute force."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import DraftRequest, SpecdecError, SpeculativeDecoder, Suffix, SuffixStore
from specdec.drafters import suffix_index
from specdec.drafters.base import DraftContext
from specdec.drafters.suffix_index import SEPARATOR, SuffixIndex
from tests.helpers.tiny import tiny_model

PIECES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=8)


@pytest.fixture(autouse=True)
def _short_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small texts then have several segments, and merge them."""
    monkeypatch.setattr(suffix_index, "TAIL", 5)


def built(pieces: list[list[int]], depth: int) -> SuffixIndex:
    index = SuffixIndex(depth)
    for piece in pieces:
        index.extend(np.array(piece))
        index.file()
    return index


def agreement(text: list[int], position: int, query: list[int], depth: int) -> int:
    n = 0
    while n < min(depth, len(query)) and position - n >= 0 and text[position - n] == query[n]:
        n += 1
    return n


@given(PIECES, st.integers(1, 9), st.integers(1, 6), st.booleans(), st.integers(0, 2))
def test_the_nearest_positions_are_those_of_brute_force(
    pieces: list[list[int]], depth: int, most: int, frozen: bool, skipped: int
) -> None:
    index, text = built(pieces, depth), [t for piece in pieces for t in piece]
    if frozen:
        index.freeze()
    query = index.newest()[skipped:]
    positions = index.nearest([(query, most)])[0] if len(query) else np.empty(0, dtype=np.int64)
    agreed = index.agreement(positions, query).tolist() if len(positions) else []
    wanted = [agreement(text, j, text[::-1][skipped:], depth - skipped) for j in range(len(text) - 1)]
    assert [wanted[j] for j in positions] == agreed
    best = sorted((n for n in wanted if n > 0), reverse=True)[:most]
    assert sorted(agreed, reverse=True)[: len(best)] == best
    assert len(set(positions.tolist())) == len(positions)
    following = index.successors(positions, 4)
    padded = [*text, -1, -1, -1, -1]
    assert following.tolist() == [padded[j + 1 : j + 5] for j in positions]


@given(PIECES, st.integers(1, 9))
def test_every_position_is_filed_once_and_in_order(pieces: list[list[int]], depth: int) -> None:
    index, text = built(pieces, depth), [t for piece in pieces for t in piece]
    assert index.tokens().tolist() == text
    assert sorted(j for segment in index.segments for j in segment) == list(range(index.filed))
    assert len(text) - 1 - index.filed <= suffix_index.TAIL
    for segment in index.segments:
        keys = [[*text[: j + 1][::-1], *[SEPARATOR] * depth][:depth] for j in segment]
        assert keys == sorted(keys)
    assert index.begins(np.array([*text, 1, 2]))
    assert not index.begins(np.array(text[:-1]))
    assert not index.begins(np.array([*text[:-1], text[-1] + 1, 0]))


def test_segments_stay_few_while_a_text_grows_token_by_token() -> None:
    rng = np.random.default_rng(0)
    index = SuffixIndex(8)
    for token in rng.integers(0, 50, 3000):
        index.extend(np.array([token]))
        index.file()
    assert len(index.segments) <= 12


def one(drafter: Suffix, text: list[int], n_max: int = 0) -> list[int]:
    [draft] = drafter.draft([DraftRequest(0, np.array(text[:-1]), text[-1], n_max, len(text) - 1)])
    assert draft.q is None
    return [int(t) for t in draft.tokens]


def test_the_longest_context_decides_and_the_majority_among_equals() -> None:
    text = [1, 2, 3, 7, 9, 2, 3, 8, 5, 2, 3, 8, 1, 2, 3]
    assert one(Suffix(half_age=1e9), text)[0] == 7  # "1 2 3" came once, "2 3" was mostly followed by 8
    assert one(Suffix(half_age=1e9, order_weight=1.0), text)[0] == 8
    assert one(Suffix(half_age=1.0, order_weight=1.0), [4, 1, 5, 5, 5, 5, 5, 4, 2, 9, 4])[0] == 2  # the latest
    assert one(Suffix(), [1, 2, 3]) == []


def test_a_loop_is_drafted_as_long_as_allowed() -> None:
    assert one(Suffix(n_max=20), [6, 1, 2, 3, 1, 2, 3, 1]) == [2, 3, 1] * 6 + [2, 3]
    assert one(Suffix(n_max=20), [5, 5], n_max=7) == [5] * 7


def test_a_copy_goes_on_after_a_changed_token() -> None:
    source = [*range(10, 30)]
    text = [*source, *source[:9], 77]  # 77 stands for 19
    assert one(Suffix(n_max=4), text) == [20, 21, 22, 23]
    assert one(Suffix(n_max=4, gap_cost=None), text) == []


def test_certainty_only_shortens_a_draft() -> None:
    rng = np.random.default_rng(1)
    text = rng.integers(0, 4, 200).tolist()
    for end in range(20, 200, 7):
        drafts = [one(Suffix(p_min=p), text[:end]) for p in (0.0, 0.05, 0.3, 1.0)]
        assert all(short == long[: len(short)] for long, short in pairwise(drafts))
        assert drafts[3] == []
    assert len(one(Suffix(p_min=0.4), [*range(60), *range(40)])) == 8  # forty agreeing tokens are certain enough
    assert one(Suffix(p_min=0.5), [*range(60), 5]) == []


def test_a_store_is_drawn_on_and_its_texts_do_not_run_into_each_other() -> None:
    store = SuffixStore([[1, 2, 3], [4, 5, 6, 7]])
    assert one(Suffix(store=store), [9, 4, 5]) == [6, 7]
    assert one(Suffix(store=store), [9, 2, 3]) == []
    store.freeze()
    store.add([8, 4, 5, 9, 9])
    assert one(Suffix(store=store), [8, 4, 5]) == [9, 9]
    with pytest.raises(SpecdecError, match="store must be a SuffixStore"):
        Suffix(store=[1, 2])  # type: ignore[arg-type]


def test_remembered_rows_help_a_later_call_and_forgotten_ones_do_not() -> None:
    context = DraftContext(1, 100, 100)
    for remember in (True, False):
        configured = Suffix(remember=remember)
        first = configured.fresh(context)
        first.begin(0, [1, 2, 3, 4, 5, 6, 7])
        first.draft([DraftRequest(0, [1, 2, 3, 4, 5, 6, 7], 8, 4, 7)])
        first.close()
        assert one(configured.fresh(context), [3, 4, 5], 4) == ([6, 7, 8] if remember else [])


def test_kept_rows_move_to_the_next_call() -> None:
    configured = Suffix()
    first = configured.fresh(DraftContext(1, 100, 100))
    first.begin(0, [1, 2, 3])
    index = first._rows[0]
    second = configured.fresh(DraftContext(1, 100, 100, previous={"suffix": first}))
    second.begin(0, [1, 2, 3, 4, 1, 2])
    first.close()
    assert second._rows[0] is index  # extended, not built anew
    assert one(second, [1, 2, 3, 4, 1, 2, 3], 1) == [4]
    second.begin(0, [5, 6])
    assert second._rows[0] is not index
    assert Suffix(depth=4).fresh(DraftContext(1, 100, 100, previous={"suffix": second}))._rows == {}


def test_memory_is_within_its_promise() -> None:
    tokens = np.random.default_rng(2).integers(0, 5000, 20_000)
    drafter = Suffix()
    drafter.begin(0, tokens)
    assert drafter.row_bytes(0) <= 20 * len(tokens)
    store = SuffixStore([tokens])
    store.freeze()
    assert store.nbytes <= 8 * len(tokens) + 256


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_max": 0}, "n_max"),
        ({"p_min": 1.5}, "p_min"),
        ({"depth": 0}, "depth"),
        ({"voters": "4"}, "voters"),
        ({"min_match": 17}, "min_match=17 is above"),
        ({"max_spec_factor": -1}, "max_spec_factor"),
        ({"min_token_prob": 2}, "min_token_prob"),
    ],
)
def test_bad_parameters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecdecError, match=f"suffix: {message}"):
        Suffix(**options)


def test_the_decoders_text_is_plains(tmp_path: Any) -> None:
    decoder = SpeculativeDecoder(tiny_model("llama"), strategies=[], check=False)
    prompts = [[5, 6, 7, 5, 6, 7, 5], [1, 2, 3]]
    plain = decoder.generate(prompts, max_new_tokens=40)
    out = decoder.generate(prompts, max_new_tokens=40, strategies="suffix:p_min=0.05,ngram-mod:n_match=16")
    assert out.token_ids == plain.token_ids
    assert out.stats.accepted_tokens > 0


# -- SuffixDecoding's options ------------------------------------------------------------------------------------------


def by_definition(text: list[int], n_max: int, depth: int, factor: float, least: float) -> list[int]:
    """SuffixDecoding's draft from the row's own text: every length of agreement, all its occurrences counted alike; of
    equally frequent tokens that of the occurrence that weighs most in `suffix`."""
    agreed = {j: agreement(text, j - 1, text[::-1], depth) for j in range(1, len(text))}
    weight = {j: 4.0**n / (1 + (len(text) - j) / 100) for j, n in agreed.items()}
    chosen: list[int] = []
    expected = 0.0
    for n in range(depth, 0, -1):
        alive = sorted((j for j in agreed if agreed[j] >= n), key=lambda j: -weight[j])
        drafted: list[int] = []
        share, total = 1.0, 0.0
        while alive and len(drafted) < min(n_max, int(factor * n)):
            following = [(text + drafted)[j + len(drafted)] for j in alive]
            best = max(following, key=following.count)
            share *= following.count(best) / len(following)
            if share < least:
                break
            drafted.append(best)
            total += share
            alive = [j for j, token in zip(alive, following, strict=True) if token == best]
        if total > expected:
            chosen, expected = drafted, total
    return chosen


def suffix_decodings_differences(seed: int = 4) -> int:
    rng, wrong = np.random.default_rng(seed), 0
    for _ in range(60):
        text = rng.integers(0, 3, int(rng.integers(3, 40))).tolist()
        for factor, least in ((1.0, 0.1), (2.0, 0.5), (0.5, 0.0)):
            drafter = Suffix(voters=500, depth=6, n_max=5, max_spec_factor=factor, min_token_prob=least)
            wrong += one(drafter, text) != by_definition(text, 5, 6, factor, least)
    return wrong


def test_suffix_decodings_choice_is_that_of_its_definition() -> None:
    assert suffix_decodings_differences() == 0


@pytest.mark.parametrize("fault", ["factor", "least"])
def test_a_wrong_choice_is_found_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "factor":
        monkeypatch.setattr(Suffix, "_allowed", lambda self, match, limit: limit)
    else:
        monkeypatch.setattr("specdec.drafters.suffix.Counter.most_common", lambda self, n: list(self.items())[:n])
    assert suffix_decodings_differences() > 0


def test_a_short_match_leaves_the_row_to_the_next_strategy() -> None:
    text = [1, 2, 3, 4, 9, 2, 3]
    assert one(Suffix(min_match=2, gap_cost=None), text)[0] == 4
    assert one(Suffix(min_match=3, gap_cost=None), text) == []
    assert one(Suffix(min_match=3, min_token_prob=0.0), text) == []
    assert len(one(Suffix(max_spec_factor=1.5, gap_cost=None), text)) == 3
    decoder, prompt = SpeculativeDecoder(tiny_model("llama"), tiny_model("llama"), check=False), [5, 6, 7, 8, 5, 6, 7]
    chain = ["suffix:min_match=3", "draft-model:n_max=2"]
    rounds = list(decoder.rounds(prompt, 12, strategies=chain))
    text = [*prompt, *(t for r in rounds for t in r.tokens)]
    assert text[len(prompt) :] == decoder.generate(prompt, 12, strategies=[]).token_ids[0]
    assert {"suffix", "draft-model"} <= {r.strategy for r in rounds}
    for r in rounds:
        known = text[: r.position + 1]
        matched = max((agreement(known, j, known[::-1], 16) for j in range(len(known) - 1)), default=0)
        assert r.strategy is None or (r.strategy == "suffix") == (matched >= 3)
