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
    positions = index.candidates(query, most)
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
    [({"n_max": 0}, "n_max"), ({"p_min": 1.5}, "p_min"), ({"depth": 0}, "depth"), ({"voters": "4"}, "voters")],
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
