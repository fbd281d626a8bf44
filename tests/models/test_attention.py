"""The registered attention function and its masks, against a literal implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from specdec.errors import SpecdecError
from specdec.models.attention import (
    MATMUL,
    RAGGED,
    AttentionSwitch,
    MaskBuilder,
    check_attention,
    matmul_attention,
    ragged_attention,
)
from tests.helpers.tiny import tiny_model


def naive(q, k, v, allowed, scale, softcap=None, sinks=None):  # type: ignore[no-untyped-def]
    """One query, one head at a time; allowed [B, S, L] bool."""
    batch, heads, length, _ = q.shape
    out = torch.zeros(batch, length, heads, v.shape[-1])
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // k.shape[1])
            for s in range(length):
                w = (k[b, kv] @ q[b, h, s]) * scale
                w = torch.tanh(w / softcap) * softcap if softcap else w
                w = w.masked_fill(~allowed[b, s], float("-inf"))
                if sinks is not None:
                    w = torch.cat([w, sinks[h : h + 1]])
                p = torch.softmax(w, -1)[: k.shape[2]]
                out[b, s, h] = p @ v[b, kv]
    return out


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("form", ["folded", "bool", "additive"])
@pytest.mark.parametrize("attention", [ragged_attention, matmul_attention])
def test_folded_attention_equals_the_literal_one(
    attention: Any, softcap: float | None, with_sinks: bool, form: str
) -> None:
    torch.manual_seed(0)
    batch, heads, kv_heads, length, slots, width, v_width = 2, 6, 2, 3, 7, 8, 5
    q, k = torch.randn(batch, heads, length, width), torch.randn(batch, kv_heads, slots, width)
    v = torch.randn(batch, kv_heads, slots, v_width)
    allowed = torch.rand(batch, length, slots) < 0.5
    allowed[..., 0] = True
    sinks = torch.randn(heads) if with_sinks else None
    mask = allowed[:, None]
    if form != "bool":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    if form == "folded":
        mask = mask.repeat(1, 1, heads // kv_heads, 1)
    out, weights = attention(nn.Module(), q, k, v, mask, scaling=0.3, softcap=softcap, s_aux=sinks)
    assert weights is None
    assert out.shape == (batch, length, heads, v_width)
    torch.testing.assert_close(out, naive(q, k, v, allowed, 0.3, softcap, sinks), atol=2e-6, rtol=1e-5)


def visible(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask == 0


@pytest.mark.parametrize("implementation", [RAGGED, MATMUL, "sdpa", "eager"])
def test_masks_show_the_past_and_padding_sees_slot_zero(implementation: str) -> None:
    model = tiny_model("llama")
    builder = MaskBuilder(model.config, implementation, torch.float32)
    mask = builder(torch.tensor([[3, 4, 0]]), 6)  # the last column is padding
    assert isinstance(mask, torch.Tensor)
    assert (mask.dtype == torch.bool) == (implementation == "sdpa")
    rows = visible(mask)[0, 0]
    expected = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]]).bool()
    assert torch.equal(rows, expected.repeat(builder.groups, 1))


def test_sliding_layers_get_their_window_and_full_layers_do_not() -> None:
    config = tiny_model("gemma3").config
    masks = MaskBuilder(config, "sdpa", torch.float32)(torch.tensor([[20]]), 24)
    assert isinstance(masks, dict)
    assert masks["full_attention"].sum() == 21
    assert masks["sliding_attention"].sum() == config.sliding_window
    assert masks["sliding_attention"][0, 0, 0, 20]
    assert not masks["sliding_attention"][0, 0, 0, 20 - config.sliding_window]


def test_a_model_with_only_a_window_gets_one_windowed_tensor() -> None:
    config = tiny_model("mistral").config
    mask = MaskBuilder(config, "sdpa", torch.float32)(torch.tensor([[20]]), 24)
    assert isinstance(mask, torch.Tensor)
    assert mask.sum() == config.sliding_window


def test_kernels_that_take_no_mask_are_refused_by_name() -> None:
    assert check_attention(None) == RAGGED
    with pytest.raises(SpecdecError, match="flash_attention_2"):
        check_attention("flash_attention_2")


def test_the_switch_restores_the_model_also_after_an_exception() -> None:
    model = tiny_model("llama").train()
    before = model.config._attn_implementation
    switch = AttentionSwitch(model, RAGGED)

    def fail() -> None:
        with switch.on():
            assert model.config._attn_implementation == RAGGED
            assert not any(m.training for m in model.modules())
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert model.config._attn_implementation == before
    assert all(m.training for m in model.modules())
