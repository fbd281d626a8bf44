"""What holds of every n-gram strategy, and what each parity switch changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import (
    Draft,
    DraftRequest,
    NgramCache,
    NgramMapK,
    NgramMapK4V,
    NgramMod,
    NgramSimple,
    PromptLookup,
    SpecdecError,
    SpeculativeDecoder,
    Suffix,
)
from specdec.drafters.base import DraftContext
from specdec.research.offline.replay import model_free_chain, replay
from tests.helpers.playing import check_counts, looping, quoting_ids, random_ids
from tests.helpers.tiny import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:ngram-mod")  # short n-grams on purpose

SMALL: dict[str, Callable[[bool], Any]] = {
    "ngram-simple": lambda parity: NgramSimple(2, 4),
    "ngram-map-k": lambda parity: NgramMapK(2, 4, min_hits=2, parity=parity),
    "ngram-map-k, small table": lambda parity: NgramMapK(1, 3, hash_size=5, parity=parity),
    "ngram-map-k, no table": lambda parity: NgramMapK(2, 3, hash_size=0, parity=parity),
    "ngram-map-k4v": lambda parity: NgramMapK4V(2, 3, parity=parity),
    "ngram-mod": lambda parity: NgramMod(2, 1, 6, parity=parity),
    "ngram-mod, small table": lambda parity: NgramMod(2, 0, 6, table_size=16, parity=parity),
    "ngram-cache": lambda parity: NgramCache(parity=parity),
    "prompt-lookup": lambda parity: PromptLookup(),
    "suffix": lambda parity: Suffix(p_min=0.0 if parity else 0.1),
}
TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=90)
Step = tuple[int, int, int]


def ask(drafter: Any, text: list[int], n_max: int = 0, row: int = 0) -> list[int]:
    [draft] = drafter.draft([DraftRequest(row, np.array(text[:-1], dtype=np.int64), text[-1], n_max, len(text) - 1)])
    assert isinstance(draft, Draft)
    return [int(t) for t in draft.tokens]


@pytest.mark.fast(8, full=8)
@pytest.mark.parametrize("parity", [True, False])
@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=60)
@given(
    texts=st.lists(TEXT, min_size=1, max_size=4),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(-1, 9)), max_size=25),
)
def test_no_sequence_of_texts_and_accepts_breaks_a_strategy(
    name: str, parity: bool, texts: list[list[int]], steps: list[Step]
) -> None:
    """Rows jump between texts, shrink and grow; accepts come without a draft and beyond it."""
    drafter = SMALL[name](parity).fresh(DraftContext(3, 200, 10))
    sizes: dict[int, int] = {}
    for i, (row, accepted, n_max) in enumerate(steps):
        text = texts[(row + i // 7) % len(texts)]
        if row not in sizes or i % 7 == 0:
            sizes[row] = 1 + accepted % len(text)
            drafter.begin(row, text[: sizes[row] - 1])
        sizes[row] = min(len(text), max(sizes[row], 1))
        got = ask(drafter, text[: sizes[row]], n_max, row)
        assert set(got) <= {t for one in texts for t in one}
        if n_max > 0 and not name.startswith("ngram-m") and name != "ngram-simple":
            assert len(got) <= n_max  # the chain cuts upstream's, which count with what they made
        assert len(got) <= 8
        drafter.accept(row, accepted, i % 5 == 0)
        sizes[row] += accepted + 1
    drafter.close()


def test_an_unknown_row_is_no_error() -> None:
    for make in SMALL.values():
        drafter = make(True)
        drafter.accept(7, 3, False)
        assert ask(drafter, [1], row=7) == []


# -- switches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [NgramMapK, NgramMapK4V, NgramMod, NgramCache])
def test_switches_follow_parity_unless_they_are_set(kind: Any) -> None:
    fields = [name for name in kind.__dataclass_fields__ if name.startswith("fix_")]
    fields = [name for name in fields if kind.__dataclass_fields__[name].init]
    assert fields
    for name in fields:
        assert getattr(kind(), name) is False
        assert getattr(kind(parity=False), name) is True
        assert getattr(kind(**{name: True}), name) is True
        assert getattr(kind(parity=False, **{name: False}), name) is False
        with pytest.raises(SpecdecError, match=f"{name} must be True or False"):
            kind(**{name: 3})


LINE = [7, 8, 1, 2, 3, 4, 5, 6]
TALE = [9, 9, *LINE, 9, 9, 9, 9, *LINE, 9, 9, 9, 9, *LINE[:4]]


def test_fix_ratchet_lets_a_rejected_key_speak_again() -> None:
    for kind in (NgramMapK, NgramMapK4V):
        for fixed, expected in ((False, [4, 0, 0]), (True, [4, 1, 2])):
            drafter = kind(2, 4, fix_ratchet=fixed)
            drafter.begin(0, TALE[:2])
            lengths = [len(ask(drafter, TALE))]
            drafter.accept(0, 0, False)
            lengths.append(len(ask(drafter, TALE)))
            drafter.accept(0, 1, False)
            lengths.append(len(ask(drafter, TALE)))
            assert lengths[: 2 + fixed] == expected[: 2 + fixed], kind.__name__
    drafter = NgramMapK(2, 4, fix_ratchet=True)
    drafter.begin(0, TALE[:2])
    for accepted, expected in ((2, 4), (2, 2), (4, 4)):
        assert len(ask(drafter, TALE)) == expected
        drafter.accept(0, accepted, False)


def test_fix_blind_spot_finds_what_stands_before_the_prompts_end() -> None:
    prompt = [*range(20, 40), *LINE[:3]]
    text = [*prompt, *LINE[3:], *range(60, 75), *LINE[:2]]
    for fixed, expected in ((False, []), (True, LINE[2:6])):
        drafter = NgramMapK(2, 4, fix_blind_spot=fixed)
        drafter.begin(0, prompt[:-1])
        assert ask(drafter, text) == expected


@pytest.mark.parametrize("kind", [NgramMapK, NgramMapK4V])
def test_fix_begin_starts_afresh_for_a_text_that_does_not_go_on(kind: Any) -> None:
    """As in a slot that one prompt leaves to another: drafts are then those of a drafter that has seen nothing."""
    first, other = random_ids(200, 1) + TALE * 3, random_ids(40, 2) + TALE * 2
    switches = {"size_n": 2, "size_m": 4, "fix_blind_spot": True, "fix_ratchet": True}
    alone, kept, mended = kind(**switches), kind(**switches), kind(**switches, fix_begin=True)
    for drafter in (kept, mended):
        drafter.begin(0, first[:100])
        for end in range(100, len(first)):
            ask(drafter, first[:end])
    drafts = []
    for drafter in (alone, kept, mended):
        drafter.begin(0, other[:50])
        drafts.append([ask(drafter, other[:end]) for end in range(52, len(other))])
    assert drafts[0] == drafts[2] != drafts[1]
    goes_on = [*other, 5, 6, 7]
    for drafter in (alone, mended):
        drafter.begin(0, goes_on[:-1])
    assert ask(mended, [*goes_on, *TALE[:3]]) == ask(alone, [*goes_on, *TALE[:3]]) != []


def test_fix_min_hits_makes_map_k_wait() -> None:
    for fixed, expected in ((False, [4, 4, 4]), (True, [0, 0, 4])):
        drafter = NgramMapK(2, 4, min_hits=3, fix_min_hits=fixed)
        drafter.begin(0, TALE[:2])
        assert [len(ask(drafter, TALE)) for _ in range(3)] == expected


def test_fix_wipe_keeps_what_other_rows_wrote() -> None:
    mine, theirs = [*range(10, 30), *range(60, 90)], [*range(30, 50)]
    for fixed in (False, True):
        drafter = NgramMod(2, 0, 4, fix_wipe=fixed)
        drafter.begin(0, theirs)
        drafter.begin(1, mine)
        for _ in range(5):
            assert ask(drafter, [*mine, 11, 12], row=1) == [13, 14, 15, 16]
            drafter.accept(1, 0, False)
        assert ask(drafter, [*mine, 31, 32], row=1) == ([33, 34, 35, 36] if fixed else [])
        assert ask(drafter, [*mine, 11, 12], row=1) == [13, 14, 15, 16]  # its own text was entered again


def test_fix_occupancy_keeps_the_prompt_that_filled_the_pool() -> None:
    for fixed in (False, True):
        drafter = NgramMod(2, 0, 4, table_size=64, fix_occupancy=fixed)
        drafter.begin(0, [*range(100, 125)])
        assert drafter.used == (23 if fixed else 0)
        assert ask(drafter, [*range(100, 125), 101, 102]) == ([103, 104, 105, 106] if fixed else [])


def test_the_pool_is_one_for_all_rows_and_16_mib() -> None:
    drafter = NgramMod()
    assert drafter.nbytes == 16 * 2**20
    for row in range(4):
        drafter.begin(row, [*range(40 * row, 40 * row + 40)])
    assert drafter.nbytes == 16 * 2**20
    assert drafter.used == 4 * 16


def test_short_ngrams_of_the_shared_pool_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="n_match=8 is below 16"):
        NgramMod(n_match=8)


# -- state of calls ----------------------------------------------------------------------------------------------------


def test_calls_start_afresh_and_kept_state_goes_on() -> None:
    for make in SMALL.values():
        drafter = make(True)
        context = DraftContext(1, 200, 100)
        first = drafter.fresh(context)
        first.begin(0, TALE[:-1])
        ask(first, TALE)
        assert not drafter.fresh(context).__dict__.get("_rows")
        kept = drafter.fresh(DraftContext(1, 200, 100, previous={"a": first}))
        kept.begin(0, TALE[:-1])
        if "_rows" in drafter.__dict__:
            assert kept._rows
            other = make(True).fresh(DraftContext(1, 200, 100, previous={"a": PromptLookup()}))
            assert not other._rows


# -- in the decoder ----------------------------------------------------------------------------------------------------

CHAIN = [
    NgramSimple(3, 8), NgramMapK(3, 8), NgramMapK4V(2, 6, parity=False), NgramMod(16, 2, 12), NgramCache(), Suffix(),
]  # fmt: skip


@pytest.mark.fast(1)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_whole_family_in_a_chain_gives_plain_decodings_text(batch: int) -> None:
    model = looping(tiny_model("llama"))
    decoder = SpeculativeDecoder(model, strategies=[], check=False)
    prompts = [quoting_ids(60, i) for i in range(4)]
    plain = decoder.generate(prompts, max_new_tokens=60, batch_size=batch)
    for order in ("given", "upstream"):
        out = decoder.generate(prompts, strategies=CHAIN, max_new_tokens=60, batch_size=batch, order=order)
        assert out.token_ids == plain.token_ids
        check_counts(out)
    assert out.stats.accepted_tokens > 0


def test_a_replay_counts_what_a_greedy_run_counts() -> None:
    model = looping(tiny_model("llama"))
    decoder = SpeculativeDecoder(model, strategies=[], check=False)
    prompt = quoting_ids(60, 1)
    for strategies in (["suffix"], [NgramMapK(3, 8), PromptLookup(n_max=3)], [NgramMod(16, 2, 12), NgramCache()]):
        out = decoder.generate(prompt, strategies=strategies, max_new_tokens=70)
        chain = model_free_chain(strategies, 200)
        records = replay(chain, np.array(prompt), np.array(out.token_ids[0]))
        assert records == out.stats.rows[0]
        counted = {name: vars(c) for name, c in chain.counters.items()}
        for name, counters in out.stats.counters.items():
            assert {k: v for k, v in vars(counters).items() if k[:2] != "t_"} == {
                k: v for k, v in counted[name].items() if k[:2] != "t_"
            }
    with pytest.raises(SpecdecError, match="needs a model"):
        model_free_chain(["draft-model"], 10)
