"""DFlash: drafts against a forward pass written from the layout's description, without a cache; files."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from specdec import SpecdecError, SpeculativeDecoder
from specdec.drafters.dflash.files import default_layers, describe, load_block_head
from specdec.drafters.dflash.head import BlockHead
from specdec.drafters.dflash.strategy import DFlash
from specdec.errors import SettingWarning
from specdec.models.runner import Runner
from tests.helpers.playing import check_counts, quoting_ids
from tests.helpers.recording import Rerun
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_greedy

PROMPTS = [quoting_ids(20, 1), [9, 8], [7, 7, 3, 5]]
BLOCK = 4


def head_config(target: Any, layers: list[int], **changes: Any) -> dict[str, Any]:
    text = target.config
    return {
        "model_type": "qwen3", "architectures": ["DFlashDraftModel"], "hidden_size": text.hidden_size,
        "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "vocab_size": text.vocab_size, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
        "block_size": BLOCK, "num_target_layers": text.num_hidden_layers,
        "dflash_config": {"target_layer_ids": layers, "mask_token_id": text.vocab_size - 1}, **changes,
    }  # fmt: skip


def saved(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A folder with random weights under the published names, made from the names alone."""
    hidden, inner, heads, kv, d = (
        config[n]
        for n in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    observed = len(config["dflash_config"]["target_layer_ids"])
    shapes = {"fc.weight": (hidden, observed * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (heads * d, hidden), "self_attn.k_proj": (kv * d, hidden),
            "self_attn.v_proj": (kv * d, hidden), "self_attn.o_proj": (hidden, heads * d), "self_attn.q_norm": (d,),
            "self_attn.k_norm": (d,), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(seed)
    state = {n: torch.randn(s, generator=generator) * (0.5 if len(s) == 2 else 0.1) for n, s in shapes.items()}
    state = {n: t + 1.0 if t.dim() == 1 else t for n, t in state.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors")
    return folder


@torch.no_grad()
def block_logits(target: Any, folder: Path, text: list[int]) -> Tensor:
    """The logits [BLOCK - 1, V] of a text's block, from scratch: every key and value of every token anew."""
    from safetensors.torch import load_file

    given, state = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config = Qwen3Config(**{k: v for k, v in given.items() if k not in ("dflash_config", "model_type")})
    layers, mask = given["dflash_config"]["target_layer_ids"], given["dflash_config"]["mask_token_id"]
    hidden = target(input_ids=torch.tensor([text[:-1]]), output_hidden_states=True, use_cache=False).hidden_states

    def norm(x: Tensor, name: str) -> Tensor:
        module = Qwen3RMSNorm(x.shape[-1], eps=config.rms_norm_eps)
        module.weight.copy_(state[f"{name}.weight"])
        return module(x)

    context = norm(torch.cat([hidden[i + 1] for i in layers], -1) @ state["fc.weight"].T, "hidden_norm")
    x = target.get_input_embeddings()(torch.tensor([[text[-1], *[mask] * (given["block_size"] - 1)]]))
    positions = torch.arange(context.shape[1] + x.shape[1])[None]
    cos, sin = Qwen3RotaryEmbedding(config)(x, positions)
    for i in range(config.num_hidden_layers):
        name = f"layers.{i}"
        inner, w = norm(x, f"{name}.input_layernorm"), {k: state[f"{name}.self_attn.{k}_proj.weight"] for k in "qkvo"}
        both = torch.cat([context, inner], 1)

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, config.head_dim))

        q = norm(heads(inner @ w["q"].T), f"{name}.self_attn.q_norm").transpose(1, 2)
        k = norm(heads(both @ w["k"].T), f"{name}.self_attn.k_norm").transpose(1, 2)
        v = heads(both @ w["v"].T).transpose(1, 2)
        q = apply_rotary_pos_emb(q, q, cos[:, -x.shape[1] :], sin[:, -x.shape[1] :])[0]
        k = apply_rotary_pos_emb(k, k, cos, sin)[0]
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = ((q @ k.transpose(-1, -2)) * config.head_dim**-0.5).softmax(-1) @ v
        x = x + out.transpose(1, 2).flatten(2) @ w["o"].T
        mlp = Qwen3MLP(config)
        mlp.load_state_dict({k.removeprefix(f"{name}.mlp."): t for k, t in state.items() if f"{name}.mlp." in k})
        x = x + mlp(norm(x, f"{name}.post_attention_layernorm"))
    return target.get_output_embeddings()(norm(x, "norm"))[0, 1:]


@pytest.mark.parametrize("mode", ["eager", "recorded"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_drafts_are_those_of_the_layouts_own_forward_pass(kind: str, mode: str, tmp_path: Path) -> None:
    """A vocabulary so small that drafts are accepted by chance, and a second strategy between them: the cache is cut
    and caught up with in every way."""
    target = tiny_model(kind, vocab=6, num_hidden_layers=4)
    folder = saved(tmp_path / "head", head_config(target, [1, 2]))
    dec, drafted, accepted = SpeculativeDecoder(target, check=False), 0, 0
    if mode == "recorded":
        dec.target = Runner(target, recorder=Rerun())
    lookup = "prompt-lookup:ngram_min=3"
    for chain, prompt in product(([DFlash(folder)], [lookup, DFlash(folder, n_max=2)]), ([5, 5, 3, 5, 5, 3], [1])):
        text = list(prompt)
        options: dict[str, Any] = {"temperature": 2.0, "acceptance": "match", "seed": 1}
        for r in dec.rounds(prompt, 24, strategies=chain, **options):
            if r.strategy == "dflash":
                expected = block_logits(target, folder, text).argmax(-1).tolist()[: chain[-1].n_max]
                assert r.draft == expected[: len(r.draft)]
                drafted, accepted = drafted + len(r.draft), accepted + r.accepted
            text += r.tokens
    assert drafted > 20
    assert accepted > 0


@pytest.mark.parametrize("batch", [1, 3])
def test_text_is_plain_decodings(batch: int, tmp_path: Path) -> None:
    target = tiny_model("llama", num_hidden_layers=4)
    folder = saved(tmp_path / "head", head_config(target, [0, 2]))
    dec = SpeculativeDecoder(target, check=False)
    out = dec.generate(PROMPTS, 14, strategies=[f"dflash:head={folder}"], batch_size=batch)
    assert out.token_ids == [oracle_greedy(target, p, 14) for p in PROMPTS]
    check_counts(out)
    assert out.stats.draft_passes < out.stats.draft_tokens
    options: dict[str, Any] = {"temperature": 0.8, "acceptance": "coupled", "seed": 4, "repetition_penalty": 1.2}
    plain = dec.generate(PROMPTS, 10, strategies=[], **options)
    assert (
        dec.generate(PROMPTS, 10, strategies=[DFlash(folder)], batch_size=batch, **options).token_ids == plain.token_ids
    )


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_head_is_read_from_its_folder(tmp_path: Path) -> None:
    target = tiny_model("llama", num_hidden_layers=4)
    head = load_block_head(saved(tmp_path, head_config(target, [1, 2])))
    assert isinstance(head, BlockHead)
    assert (head.config.block_size, head.config.mask, head.config.layer_ids) == (
        BLOCK,
        target.config.vocab_size - 1,
        (2, 3),
    )
    assert default_layers(36, 5) == [1, 9, 17, 25, 33]  # Qwen3-8B
    assert default_layers(36, 1) == [18]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "give the id of the mask token"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding window"),
        ({"num_hidden_layers": 3}, "dflash: the checkpoint lacks layers.2"),
        ({"num_hidden_layers": 1}, "dflash: the checkpoint has layers.1"),
        ({"head_dim": 4}, "has the shape"),
    ],
)
def test_folders_that_are_no_heads_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = head_config(tiny_model("llama", num_hidden_layers=4), [1])
    saved(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(SpecdecError, match=message):
        DFlash(tmp_path)
    assert describe(config, mask=3).mask == 3


@pytest.mark.parametrize(("options", "message"), [({}, "no head"), ({"n_max": 4}, "at most 3 tokens")])
def test_bad_parameters_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    head = saved(tmp_path, head_config(tiny_model("llama", num_hidden_layers=4), [1])) if options else None
    with pytest.raises(SpecdecError, match=message):
        DFlash(head, **options)


def test_a_head_in_memory_has_its_own_mask(tmp_path: Path) -> None:
    loaded = DFlash(saved(tmp_path, head_config(tiny_model("llama", num_hidden_layers=4), [1])))._head
    with pytest.warns(SettingWarning, match="dflash: mask_token_id=3 has no effect: a BlockHead has its own"):
        DFlash(loaded, mask_token_id=3)
    assert replace(DFlash(loaded), n_max=2).n_max == 2


def test_a_head_for_another_target_is_refused_by_name(tmp_path: Path) -> None:
    head = saved(tmp_path, head_config(tiny_model("llama", num_hidden_layers=4), [1]))
    with pytest.raises(SpecdecError, match="dflash: the head is for a vocabulary"):
        SpeculativeDecoder(tiny_model("llama", vocab=30), check=False).generate([[1]], 4, strategies=[DFlash(head)])


def test_what_is_said_of_a_head_names_dflash(tmp_path: Path) -> None:
    target = tiny_model("llama", num_hidden_layers=4)
    with pytest.raises(SpecdecError, match=r"^dflash: there is no folder"):
        DFlash(tmp_path / "none")
    far = DFlash(saved(tmp_path / "far", head_config(target, [9])))
    with pytest.raises(SpecdecError, match=r"^dflash: the layers .* cannot be observed"):
        SpeculativeDecoder(target, check=False).generate([[1]], 4, strategies=[far])
    rope = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    with pytest.raises(SpecdecError, match=r"^dflash: heads with rope_type"):
        DFlash(saved(tmp_path / "rope", head_config(target, [1], **rope)))
