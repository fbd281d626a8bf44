"""A call whose prompts come while it runs: every row has the tokens that it has alone."""

from __future__ import annotations

from typing import Any

import pytest

from specdec import SpecdecError, SpeculativeDecoder
from specdec.decoding.row import Row
from specdec.stats import Tally
from tests.helpers.tiny import tiny_model

PROMPTS = [[1, 2, 3], list(range(10, 40)), [50], [60, 61] * 6]
CHAINS = (["draft-model:n_max=3"], ["prompt-lookup:ngram_min=1:n_max=4", "draft-model:n_max=2"], ["recycling"], [])


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    target, draft = tiny_model("llama"), tiny_model("llama", num_hidden_layers=2)
    return SpeculativeDecoder(target, draft, check=False)


def run_late(decoder: SpeculativeDecoder, strategies: Any, **options: Any) -> list[Row]:
    """One prompt more after each pass, in two slots; seeds and lengths are each row's own."""
    with decoder.live(2, 128, strategies=strategies, **options) as call:
        rows = []
        for i, prompt in enumerate(PROMPTS):
            rows.append(call.add(prompt, seed=i, max_new_tokens=6 + 2 * i))
            call.step()
        while call.rows:
            call.step()
        assert call.free == 2
        assert call.verify_passes > len(PROMPTS)
    return rows


@pytest.mark.fast(2, full=5)
@pytest.mark.parametrize("strategies", CHAINS, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.8, "acceptance": "coupled"}, {"temperature": 0.8}],
    ids=["greedy", "coupled", "leviathan"],
)
def test_a_row_has_the_tokens_and_rounds_of_a_call_of_its_own(
    decoder: SpeculativeDecoder, strategies: Any, options: Any
) -> None:  # fmt: skip
    for i, row in enumerate(run_late(decoder, strategies, **options)):
        alone = decoder.generate(PROMPTS[i], 6 + 2 * i, strategies, seed=i, **options)
        assert row.output == alone.token_ids[0]
        assert row.finish_reason == alone.finish_reasons[0]
        assert Tally.of(row.records) == alone[0].stats


def test_drafts_of_an_automatic_length_do_not_change_a_text(decoder: SpeculativeDecoder) -> None:
    """Lengths depend on the batch, texts do not."""
    for i, row in enumerate(run_late(decoder, ["draft-model"], temperature=0.8, acceptance="coupled")):
        alone = decoder.generate(PROMPTS[i], 6 + 2 * i, [], seed=i, temperature=0.8)
        assert row.output == alone.token_ids[0]


def test_seeds_and_places_of_rows_are_those_of_a_call(decoder: SpeculativeDecoder) -> None:
    options = {"temperature": 1.0, "acceptance": "match"}
    together = decoder.generate([1, 2, 3], 12, seed=5, num_return_sequences=3, **options)
    with decoder.live(2, 64, **options) as call:
        rows = [call.add([1, 2, 3], seed=5, index=i, max_new_tokens=12) for i in range(3)]
        while call.rows:
            call.step()
    assert [row.output for row in rows] == together.token_ids
    assert rows[0].output != rows[1].output


def test_a_cancelled_row_leaves_its_slot_and_its_neighbours_alone(decoder: SpeculativeDecoder) -> None:
    want = [decoder.generate(p, 12, seed=0).token_ids[0] for p in PROMPTS]
    with decoder.live(2, 64) as call:
        gone, stays, never, later = (call.add(p, seed=0, max_new_tokens=12) for p in PROMPTS)
        call.step()
        call.cancel(gone)
        call.cancel(never)  # which still waits
        while call.rows:
            call.step()
    assert (gone.finish_reason, never.finish_reason, never.output) == ("interrupted", "interrupted", [])
    assert (stays.output, later.output) == (want[1], want[3])
    assert gone.output == want[0][: len(gone.output)]


def test_a_draft_longer_than_a_pass_is_cancelled_between_its_chunks() -> None:
    """The round that was open is counted as far as it was accepted."""
    target = tiny_model("llama")
    decoder = SpeculativeDecoder(target, target, check=False)  # a draft that is always accepted
    with decoder.live(1, 128, ["draft-model:n_max=20"]) as call:
        gone = call.add([1, 2, 3], seed=0, max_new_tokens=24)
        call.step()
        assert gone.pending is not None
        call.cancel(gone)
        later = call.add([4, 5], seed=0, max_new_tokens=24)
        while call.rows:
            call.step()
    assert Tally.of(gone.records).generated_tokens == len(gone.output) > 0
    assert later.output == decoder.generate([4, 5], 24, ["draft-model:n_max=20"]).token_ids[0]


def test_a_step_without_rows_does_nothing_and_a_full_slot_ends_its_row(decoder: SpeculativeDecoder) -> None:
    with decoder.live(1, 8) as call:
        call.step()
        assert call.verify_passes == 0
        row = call.add([1, 2, 3], seed=0, max_new_tokens=60)
        while call.rows:
            call.step()
        assert (len(row.output), row.finish_reason) == (5, "context")
        with pytest.raises(SpecdecError, match="room for 1 to 8"):
            call.add(list(range(9)), seed=0)


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 3},
        {"batch_size": 2},
        {"keep_state": True},
        {"slots": 0},
        {"slots": True},
        {"capacity": 0},
        {"logits_processor": print},
    ],
    ids=str,
)
def test_what_belongs_to_rows_is_refused(decoder: SpeculativeDecoder, options: Any) -> None:
    with pytest.raises(SpecdecError, match=next(iter(options))):
        decoder.live(**options)


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": []}, {"prompt": [-1]}, {"prompt": [10**6]}, {"prompt": [1.5]}, {"prompt": "abc"}, {"prompt": [[1]]},
        {"seed": None}, {"seed": "x"}, {"seed": [1]}, {"index": "x"}, {"index": -1}, {"max_new_tokens": "x"},
        {"max_new_tokens": 1.5}, {"max_new_tokens": -1}, {"stop_strings": [3]}, {"stop_strings": [""]},
        {"stop_strings": "ab"}, {"ignore_eos": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_row_is_refused_and_leaves_its_neighbours_alone(decoder: SpeculativeDecoder, given: Any) -> None:
    with decoder.live(2, 64) as call:
        row = call.add(PROMPTS[0], seed=0, max_new_tokens=4)
        with pytest.raises(SpecdecError, match=next(iter(given))):
            call.add(**{"prompt": [1], "seed": 0, **given})
        while call.rows:
            call.step()
    assert row.output == decoder.generate(PROMPTS[0], 4).token_ids[0]


def test_a_call_that_is_closed_twice_gives_its_caches_back_once(decoder: SpeculativeDecoder) -> None:
    """Otherwise two later calls have one cache, and a text of theirs is wrong."""
    want = [decoder.generate(p, 12).token_ids[0] for p in PROMPTS[:2]]
    with decoder.live(1, 64) as closed:
        closed.close()
        calls = [decoder.live(1, 64)]
        closed.close()  # while another has what it gave back
    calls.append(decoder.live(1, 64))
    assert calls[0].call.engine.cache is not calls[1].call.engine.cache
    rows = [call.add(p, seed=0, max_new_tokens=12) for call, p in zip(calls, PROMPTS, strict=False)]
    while any(call.rows for call in calls):
        for call in calls:
            call.step()
    assert [row.output for row in rows] == want
    for use in (closed.step, lambda: closed.add([1], seed=0), lambda: closed.cancel(rows[0])):
        with pytest.raises(SpecdecError, match="the call is closed"):
            use()
    pool, cache = decoder.target.pool, calls[0].call.engine.cache
    for call in calls:
        call.close()
    pool.give_back(cache)
    pool.give_back(cache)
    leased = [pool.lease(cache.batch, cache.capacity) for _ in range(2)]
    assert leased[0] is not leased[1]
