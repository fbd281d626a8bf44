"""Keys and values in 8 bits: the texts of transformers over a cache that rounds, with drafts and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from specdec import SpecdecError, SpeculativeDecoder
from specdec.models.kv_cache import KV_DTYPES, RaggedCache, kv_cache_bytes
from specdec.models.runner import Runner
from tests.helpers.tiny import tiny_model

PROMPTS = [[5, 9, 2, 7, 5, 9, 2], [11, 3], [4, 4, 8, 1, 6, 3, 9, 12, 30, 7, 2]]
TOKENS = 16
CHAINS: dict[str, Any] = {
    "plain": [],
    "prompt-lookup": "prompt-lookup",
    "draft-model": "draft-model:n_max=3",
    "tree": "draft-model:n_max=3:branches=3",
    "early-exit": "early-exit:layers=2",
}


def rounded(states: Tensor, kind: torch.dtype) -> Tensor:
    most = torch.finfo(kind).max
    return states.clamp(-most, most).to(kind).to(states.dtype)


def reference(model: Any, prompt: list[int], kind: torch.dtype) -> list[int]:
    """Greedy tokens of transformers' own forward over a cache of one row that rounds what it is given."""

    class Rounding(DynamicLayer):
        def update(self, key_states: Tensor, value_states: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
            return super().update(rounded(key_states, kind), rounded(value_states, kind), *rest, **more)

    cache = DynamicCache()
    cache.layers = [Rounding() for _ in range(model.config.num_hidden_layers)]
    new, fed = [], prompt
    with torch.no_grad():
        for _ in range(TOKENS):
            logits = model(torch.tensor([fed]), past_key_values=cache, use_cache=True).logits
            new.append(int(logits[0, -1].argmax()))
            fed = new[-1:]
    return new


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_texts_are_those_of_a_cache_that_rounds(kind: str, name: str) -> None:
    model = tiny_model(kind).double()  # in float32 another width of a pass may round another way
    expected = [reference(model, prompt, KV_DTYPES[name]) for prompt in PROMPTS]
    decoder = SpeculativeDecoder(model, tiny_model(kind).double(), kv_cache_dtype=name)
    plain = SpeculativeDecoder(model).generate(PROMPTS, TOKENS, strategies=[]).token_ids
    assert plain != expected  # else rounding would not be seen
    for chain in CHAINS.values():
        out = decoder.generate(PROMPTS, TOKENS, strategies=chain)
        assert out.token_ids == expected
        assert out.provenance["kv_cache_dtype"] == name
    alone = [decoder.generate([p], TOKENS, strategies="draft-model:n_max=3").token_ids[0] for p in PROMPTS]
    assert alone == expected  # one row is written in another way


def test_a_prefix_that_is_kept_has_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama").double()
    decoder, fed = SpeculativeDecoder(model, kv_cache_dtype="fp8"), []
    first = decoder.generate([PROMPTS[2] * 4], TOKENS, strategies=[], keep_state=True).token_ids[0]
    longer = PROMPTS[2] * 4 + first
    prefill = decoder.target.prefill
    monkeypatch.setattr(decoder.target, "prefill", lambda *given: fed.append(given[2]) or prefill(*given))
    again = decoder.generate([longer], TOKENS, strategies=[], keep_state=True)
    assert sum(len(ids) for tokens in fed for ids in tokens.values()) < TOKENS  # the prompt was not computed again
    fresh = SpeculativeDecoder(model, kv_cache_dtype="fp8").generate([longer], TOKENS, strategies=[])
    assert again.token_ids == fresh.token_ids


def test_a_byte_a_number_and_no_nan_of_what_is_too_large() -> None:
    model = tiny_model("llama")
    runner = Runner(model, kv_cache_dtype="fp8")
    cache = runner.pool.lease(2, 6)
    cache.aim(torch.tensor([[0, 1], [0, 6]]), slice(0, 2), 6)
    given = torch.full((2, 2, 2, 8), 1e6, dtype=torch.bfloat16)
    keys, values = cache.update(given, -given, 0)
    assert keys.dtype == torch.bfloat16
    assert keys[0, :, :2].eq(448).all()
    assert values[0, :, :2].eq(-448).all()
    assert not keys[0, :, 2:].any()
    assert cache.layers[0].keys.dtype == torch.uint8
    assert cache.nbytes * 3 == kv_cache_bytes(model.config, torch.float8_e4m3fn, 2, cache.capacity)
    other = RaggedCache(3, 1, 6, kept_in=torch.float8_e4m3fn)
    other.copy_row_from(cache, 0, 0, 2)
    assert torch.equal(other.layers[0].keys[0, :, :2], cache.layers[0].keys[0, :, :2])


def test_the_report_counts_them_and_other_names_are_refused() -> None:
    model = tiny_model("llama")
    whole, small = (SpeculativeDecoder(model, kv_cache_dtype=name).report.memory() for name in ("auto", "fp8"))
    assert whole["kv_cache"] == 4 * small["kv_cache"]
    with pytest.raises(SpecdecError, match="kv_cache_dtype must be auto, fp8"):
        SpeculativeDecoder(model, kv_cache_dtype="int4")
    with pytest.raises(SpecdecError, match="kv_cache_dtype"):
        SpeculativeDecoder.from_pretrained("demo-target", kv_cache_dtype=8)


def test_exact_mode_keeps_roundings_alike_in_float32() -> None:
    model = tiny_model("llama", num_hidden_layers=6)
    decoder = SpeculativeDecoder(model, tiny_model("llama", num_hidden_layers=6), kv_cache_dtype="fp8", exact=True)
    plain = decoder.generate(PROMPTS, 48, strategies=[])
    assert plain.provenance["exact"]
    for chain in ("draft-model:n_max=4", "prompt-lookup"):
        assert decoder.generate(PROMPTS, 48, strategies=chain).token_ids == plain.token_ids
