"""The tests' own tools: tiny models must be what other tests take them for."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.tiny import SLIDING_WINDOW, TINY_KINDS, tiny_model
from tests.oracle import oracle_greedy, oracle_logits

PROMPT = [5, 6, 7, 8, 9]


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_the_oracle_equals_transformers_generate(kind: str) -> None:
    model = tiny_model(kind, pad_token_id=0)
    generated = model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, 5), max_new_tokens=24, do_sample=False
    )
    assert oracle_greedy(model, PROMPT, 24) == generated[0, 5:].tolist()


@pytest.mark.fast(3)
@pytest.mark.parametrize("kind", TINY_KINDS)
def test_tiny_models_are_reproducible_and_not_degenerate(kind: str) -> None:
    before = torch.random.get_rng_state()
    model = tiny_model(kind, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not model.training
    text = oracle_greedy(model, PROMPT, 32)
    assert text == oracle_greedy(tiny_model(kind, seed=1), PROMPT, 32)
    assert text != oracle_greedy(tiny_model(kind, seed=2), PROMPT, 32)
    assert len(set(text)) >= 4
    top = oracle_logits(model, PROMPT + text).topk(2).values
    assert float((top[:, 0] - top[:, 1]).min()) > 1e-4  # float32 passes of other shapes differ by about 1e-6


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3"])
def test_windowed_models_really_have_a_window(kind: str) -> None:
    assert tiny_model(kind).config.sliding_window == SLIDING_WINDOW
    one_layer = (
        {"num_hidden_layers": 1}
        if kind == "mistral"
        else {"layer_types": ["sliding_attention"], "num_hidden_layers": 1}
    )
    model = tiny_model(kind, **one_layer)
    tail = list(range(20, 20 + SLIDING_WINDOW))
    near, far = oracle_logits(model, [9, *tail]), oracle_logits(model, [10, *tail])
    torch.testing.assert_close(near[-1], far[-1], rtol=1e-5, atol=1e-5)  # token 0 has left the window of the last query
    assert float((near[-2] - far[-2]).abs().max()) > 1e-2


def test_the_oracle_stops_at_eos_and_keeps_it() -> None:
    model = tiny_model("llama")
    text = oracle_greedy(model, PROMPT, 10)
    eos = text[4]
    assert oracle_greedy(model, PROMPT, 10, eos=[eos]) == text[: text.index(eos) + 1]
    assert oracle_greedy(model, PROMPT, 0) == []


def test_special_tokens_are_none_unless_given() -> None:
    assert tiny_model("phi3").generation_config.eos_token_id is None
    assert tiny_model("gemma2").config.pad_token_id is None
    assert tiny_model("llama", eos_token_id=[3, 4]).generation_config.eos_token_id == [3, 4]
