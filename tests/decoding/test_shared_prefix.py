"""What prompts of one batch have in common is computed once, and the texts are what they would be alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdec import DraftModel, SpeculativeDecoder
from specdec.models.kv_cache import KeptRows, RaggedCache
from tests.helpers.playing import counting_passes, random_ids, weaker
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_greedy

HEADER = random_ids(40, 1)
PROMPTS = [HEADER + random_ids(n, 2 + n) for n in (5, 9, 3, 7)]
MODEL = tiny_model("llama")
TEXTS = [oracle_greedy(MODEL, p, 12) for p in PROMPTS]


def pair() -> SpeculativeDecoder:
    return SpeculativeDecoder(MODEL, weaker(MODEL, 0.05))


@pytest.mark.fast(4)
@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("strategies", [[], [DraftModel(n_max=3)], ["prompt-lookup", DraftModel(n_max=2)]])
def test_texts_are_those_of_each_prompt_alone(batch: int, strategies: list[Any]) -> None:
    """Batch 1 and 2: also rows that move into a slot while others go on, or after the slot's own row."""
    assert pair().generate(PROMPTS, 12, strategies=strategies, batch_size=batch).token_ids == TEXTS


def test_the_header_is_fed_once_to_target_and_draft() -> None:
    decoder = pair()
    for model, strategies in ((decoder.target.model, []), (decoder.draft.model, [DraftModel(n_max=1)])):
        with counting_passes(model) as passes:
            decoder.generate(PROMPTS, 1 if strategies == [] else 2, strategies=strategies)
        prefilled = [n for n in passes if n > len(PROMPTS) * 2]
        assert len(prefilled) == 1  # the other prompts' own parts are short
        assert sum(passes) < len(HEADER) + 4 * 24


def test_a_prompt_that_is_returned_several_times_is_fed_once() -> None:
    decoder = pair()
    with counting_passes(decoder.target.model) as passes:
        out = decoder.generate(PROMPTS[0], 4, strategies=[], num_return_sequences=3, temperature=0.9)
    assert len(passes) == 1 + out.stats.verify_passes
    alone = [
        decoder.generate(PROMPTS[0], 4, strategies=[], num_return_sequences=3, temperature=0.9, batch_size=1)
        for _ in range(2)
    ]
    assert out.token_ids == alone[0].token_ids == alone[1].token_ids


def test_a_prefix_is_not_taken_from_a_row_that_failed() -> None:
    """NaN in its keys would be copied, and masks do not stop NaN."""
    decoder = pair()
    broken = random_ids(30, 9)
    poison = MODEL.get_input_embeddings().weight
    before = poison[broken[20]].clone()
    others = [[t for t in p if t != broken[20]] for p in (HEADER, PROMPTS[1])]
    try:
        with torch.no_grad():
            poison[broken[20]] = float("nan")
        call = {"max_new_tokens": 6, "strategies": [], "batch_size": 1}
        prompts = [broken, broken[:15] + others[0], others[1]]
        out = decoder.generate(prompts, **call)
        assert out.finish_reasons[0] == "error"
        assert out.token_ids[1:] == [oracle_greedy(MODEL, p, 6) for p in prompts[1:]]
    finally:
        with torch.no_grad():
            poison[broken[20]] = before


def test_in_exact_mode_only_whole_chunks_are_shared() -> None:
    """Plain and speculative decoding refill slots in other orders: what is shared must have the same bits anyway."""
    model = tiny_model("llama", max_position_embeddings=1024).to(torch.bfloat16)
    header = [i % 120 for i in range(530)]
    prompts = [header + random_ids(n, n) for n in (30, 6, 60)]
    decoder = SpeculativeDecoder(model, weaker(tiny_model("llama", max_position_embeddings=1024), 0.05).to(model.dtype))
    alone = [decoder.generate([p], 8, strategies=[], exact=True, batch_size=1).token_ids[0] for p in prompts]
    with counting_passes(decoder.target.model) as passes:
        together = decoder.generate(prompts, 8, strategies=[DraftModel(n_max=3)], exact=True, batch_size=1)
    assert together.token_ids == alone
    rests = [len(p) - 1 - 512 for p in prompts]
    assert [n for n in passes if n > 8] == [512, *rests]  # the header's whole chunk once, then each prompt's rest
    with counting_passes(decoder.target.model) as passes:
        decoder.generate(prompts, 8, strategies=[], exact=True)
    assert passes[:4] == [512, *rests]


def test_restoring_never_takes_less_than_is_there() -> None:
    cache = RaggedCache(1, 2, 8)
    kv = torch.randn(2, 1, 4, 2)
    cache.aim(torch.arange(4).repeat(2, 1), slice(0, 2), 8)
    cache.layers[0].update(kv, kv)
    texts = [np.array([5, 6, 7]), np.zeros(0, dtype=np.int64)]
    kept = KeptRows(cache, texts)
    ids = np.array([5, 6, 9])
    assert kept.copy_into(cache, 1, ids, known=3) == 3
    assert torch.equal(cache.layers[0].keys[1, :, :4], kv[1])
    kept = KeptRows(cache, texts, step=2)
    assert kept.copy_into(cache, 1, ids) == 2
    assert kept.copy_into(cache, 1, ids[:1]) == 0
    assert torch.equal(cache.layers[0].keys[1, :, :2], kv[0, :, :2])
