"""Fused projections: the same numbers and parameters, and separate products again where the weights have moved."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import specdec
from specdec.models.fuse_projections import Fusion, fuse_projections
from tests.helpers.tiny import tiny_model

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3", "mixtral"])
def test_the_numbers_and_the_parameters_stay(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(kind)  # qwen2: with biases
    state = copy.deepcopy(model.state_dict())
    made: list[int] = []
    real = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: (made.append(a[1].shape[0]), real(*a))[1])
    before, products = logits(model), len(made)
    mlps = 0 if kind == "mixtral" else 3  # experts are no plain modules
    assert fuse_projections(model) == 3 + mlps
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-5)
    assert len(made) - products == products - 2 * 3 - mlps
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], value) for name, value in state.items())
    assert fuse_projections(model) == 0


def test_updates_in_place_are_seen_and_replaced_weights_are_not_ignored() -> None:
    model, other = tiny_model("llama"), tiny_model("llama")
    fuse_projections(model)
    for m in (model, other):
        with torch.no_grad():
            m.model.layers[1].self_attn.k_proj.weight.mul_(1.5)
    torch.testing.assert_close(logits(model), logits(other), atol=1e-5, rtol=1e-5)
    for m in (model, other):
        layer = m.model.layers[2].mlp.up_proj
        layer.weight = nn.Parameter(layer.weight.detach() * 2)
    torch.testing.assert_close(logits(model), logits(other), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits(model.double()), logits(other.double()), atol=1e-9, rtol=1e-9)


def test_gradients_reach_the_layers_own_parameters() -> None:
    model = tiny_model("llama")
    fuse_projections(model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(layer.self_attn.v_proj.weight.grad is not None for layer in model.model.layers)


def test_what_is_no_plain_linear_is_left_alone() -> None:
    class Adapter(nn.Linear):
        pass

    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.__class__ = Adapter
    assert fuse_projections(model) == 3


def test_fused_models_compile_whole() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    before = logits(model)
    fuse_projections(model)
    compiled = torch.compile(lambda ids: model(input_ids=ids, use_cache=False).logits, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS), before, atol=1e-5, rtol=1e-5)


def test_a_decoder_fuses_for_its_own_passes_when_asked() -> None:
    model, draft = tiny_model("llama"), tiny_model("llama", seed=1)
    expected = specdec.SpeculativeDecoder(model, draft).generate([[1, 2, 3]], 16).token_ids
    with pytest.warns(DeprecationWarning, match="fuse is deprecated") as told:
        dec = specdec.SpeculativeDecoder(model, draft, fuse=True)
    assert Path(told[0].filename) == Path(__file__)
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {nn.Linear}
    seen = []
    layer = model.model.layers[0].self_attn.q_proj
    layer.register_forward_hook(lambda m, *_: seen.append(m))
    out = dec.generate([[1, 2, 3]], 16)
    assert out.token_ids == expected
    assert out.provenance["fused"] == {"target": 6, "draft": 6}
    assert type(dec.target.view.model.model.layers[0].self_attn.q_proj) is not nn.Linear
    assert set(seen) == {layer}  # hooks know the caller's module
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {nn.Linear}


def test_fusing_again_takes_no_memory() -> None:
    model = tiny_model("qwen2")
    first, second = Fusion(model), Fusion(model)
    assert len(first) == len(second) == 6
    for a, b in zip(first.products, second.products, strict=True):
        assert a.weight.data_ptr() == b.weight.data_ptr()
        assert torch.equal(a.weight, b.weight)
        assert (a.bias is None) == (b.bias is None)
    before = logits(model)
    with first.on():
        torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-5)


def test_weights_that_lie_in_one_tensor_in_another_order_are_joined_anew() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    q, k, v = (getattr(model.model.layers[0].self_attn, f"{n}_proj") for n in "qkv")
    before = logits(model)
    shared = torch.cat([k.weight, v.weight, q.weight]).detach()
    sizes = [len(k.weight), len(v.weight), len(q.weight)]
    for layer, part in zip((k, v, q), shared.split(sizes), strict=True):
        layer.weight.data = part
    assert fuse_projections(model) == 2
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-5)
