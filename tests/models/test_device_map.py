"""A target whose layers are on several devices: transformers' device maps, and accelerate's hooks on every module."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model

import specdec
from specdec import SpecdecError
from specdec.models.kv_cache import RaggedCache
from tests.helpers.tiny import tiny_model
from tests.helpers.tokens import word_level
from tests.oracle import oracle_greedy

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]
PARTS = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", *(f"model.layers.{i}" for i in range(3)))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_model_with_hooks_on_every_module_gives_its_own_text(kind: str) -> None:
    """The hooks move arguments and results; the cache must pass them untouched, and the view must carry them."""
    plain = tiny_model(kind)
    spread = dispatch_model(copy.deepcopy(plain), dict.fromkeys(PARTS, "cpu"), main_device="cpu", force_hooks=True)
    assert sum(hasattr(m, "_hf_hook") for m in spread.modules()) > 10
    decoder = specdec.SpeculativeDecoder(spread, plain)
    for strategies in (["draft-model:n_max=3"], ["draft-model:tree=2x2"], ["prompt-lookup"], []):
        out = decoder.generate(PROMPTS, 12, strategies=strategies)
        assert out.token_ids == [oracle_greedy(plain, p, 12) for p in PROMPTS]


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}, dict.fromkeys(PARTS, "cpu")])
def test_a_map_is_transformers_own(tmp_path: Path, device_map: object) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    word_level([f"w{i}" for i in range(128)]).save_pretrained(tmp_path)
    if torch.cuda.is_available() and device_map == "auto":
        pytest.skip("auto is a GPU here: tests/device/test_gpu.py")
    decoder = specdec.SpeculativeDecoder.from_pretrained(tmp_path, device="cpu", device_map=device_map, strategies=[])
    assert decoder.generate(PROMPTS, 12).token_ids == [oracle_greedy(model, p, 12) for p in PROMPTS]


def test_layers_of_a_cache_are_where_their_keys_are() -> None:
    cache = RaggedCache(2, 1, 8)
    cache.aim(torch.tensor([[0, 1]]), slice(0, 1), 2)
    for index, device in enumerate(("cpu", "meta")):
        states = torch.ones(1, 2, 2, 4, device=device)
        keys, values = cache.update(states, states, index)
        assert keys.device.type == values.device.type == cache.layers[index].keys.device.type == device
    cache.compact(torch.tensor([[1]]), torch.tensor([[0]]))  # on each layer's device
    assert cache.layers[0].keys[0, :, 0].eq(1).all()


def test_what_is_offloaded_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "m")
    word_level([f"w{i}" for i in range(128)]).save_pretrained(tmp_path / "m")
    places = {**dict.fromkeys(PARTS, "cpu"), "model.layers.2": "disk"}
    with pytest.raises(
        SpecdecError, match=r"parameters without data .*offloaded.*load the whole model onto its devices"
    ):
        specdec.SpeculativeDecoder.from_pretrained(tmp_path / "m", device_map=places, device="cpu")
