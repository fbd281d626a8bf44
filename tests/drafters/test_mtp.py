"""mtp: drafts against transformers' own MtpModel, called from scratch; plain decoding's text."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig

from specdec import SpecdecError, SpeculativeDecoder
from specdec.drafters.mtp import Mtp, MtpHead
from specdec.models.runner import Runner
from specdec.stats import DraftWarning
from tests.helpers.playing import check_counts
from tests.helpers.recording import Rerun
from tests.helpers.tiny import tiny_model

try:
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel
except ImportError:
    pytest.skip("this version of transformers has no MtpModel", allow_module_level=True)

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 256,
    "initializer_range": 0.3, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "glm4_moe": (Glm4MoeConfig, {}),
    "deepseek_v3": (DeepseekV3Config, {**LATENT, "num_key_value_heads": 2}),
}


@cache
def pair(kind: str, vocab: int = 6, layers: int = 1) -> tuple[Any, MtpModel]:
    """A random target and its layers for MTP."""
    config, more = KINDS[kind]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        made = config(**{**SIZES, **more}, vocab_size=vocab, num_mtp_layers=layers)
        target = AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()
        mtp = MtpModel(target, layers).eval()
        for p in mtp.layers.parameters():
            p.copy_(0.3 * torch.randn(p.shape) + (p.dim() == 1))
    return target, mtp


@torch.no_grad()
def literally(target: Any, mtp: MtpModel, text: list[int], n: int) -> list[int]:
    """n drafted tokens, each by a pass of transformers' layer over the whole text, the later ones on its own output."""
    states = target(torch.tensor([text[:-1]]), output_hidden_states=True, use_cache=False).hidden_states[-1]
    ids, made = text[1:], []
    for _ in range(n):
        positions = torch.arange(1, len(ids) + 1)[None]
        out = mtp.forward_layer(0, states, positions, MtpCache(config=mtp.config), input_ids=torch.tensor([ids]))
        made.append(int(mtp._project_to_logits(out)[0, -1].argmax()))
        states, ids = torch.cat([states, out[:, -1:]], 1), [*ids, made[-1]]
    return made


@pytest.mark.parametrize("mode", ["eager", "recorded"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_transformers_own_layer(kind: str, mode: str) -> None:
    target, mtp = pair(kind)
    before, dec, accepted = mtp.config._attn_implementation, SpeculativeDecoder(target, check=False), 0
    if mode == "recorded":
        dec.target = Runner(target, recorder=Rerun())
    chains = [Mtp(mtp)], ["prompt-lookup:ngram_min=3", Mtp(mtp, n_max=3)]
    for chain, text in product(chains, ([1, 2, 3, 1, 2], [5], [0, 4, 4])):
        for r in dec.rounds(text, 14, strategies=chain, temperature=2.0, acceptance="match"):
            if r.strategy == "mtp":
                assert r.draft == literally(target, mtp, text, chain[-1].n_max)[: len(r.draft)]
                accepted += r.accepted
            text = [*text, *r.tokens]
    assert accepted > 0
    assert mtp.config._attn_implementation == before  # the caller's layer is left alone


def test_one_drafted_token_is_that_of_transformers_generator() -> None:
    """`MtpModel.forward`, as `generate(use_mtp=True)` calls it after prefill."""
    target, mtp = pair("glm4_moe")
    text = [1, 2, 3, 1, 2]
    states = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1]
    positions = torch.arange(1, len(text))[None]
    ids, _, _ = mtp(torch.tensor([text[1:]]), states, None, positions, MtpCache(config=mtp.config))
    assert ids[0].tolist() == literally(target, mtp, text, 1)


def test_text_is_plain_decodings() -> None:
    target, mtp = pair("glm4_moe")
    dec, prompts = SpeculativeDecoder(target, check=False), [[1, 2, 3, 1, 2], [4], [0, 5]]
    for options in ({}, {"temperature": 0.8, "acceptance": "coupled", "seed": 4, "repetition_penalty": 1.2}):
        plain = dec.generate(prompts, 10, strategies=[], **options)
        out = dec.generate(prompts, 10, strategies=[Mtp(mtp, n_max=2)], batch_size=2, **options)
        assert out.token_ids == plain.token_ids
        check_counts(out)


def test_targets_and_heads_that_do_not_fit_are_refused() -> None:
    for target, message in ((tiny_model("llama"), "has no num_mtp_layers"), (pair("glm4_moe")[0], "cannot be read")):
        with pytest.raises(SpecdecError, match=f"mtp: .*{message}"):
            SpeculativeDecoder(target, check=False).generate([[1, 2]], 4, strategies=["mtp"])
    with pytest.raises(SpecdecError, match="has 2 layers for MTP"):
        MtpHead(pair("glm4_moe", layers=2)[1])
    with pytest.raises(SpecdecError, match="MtpModel, got str"):
        Mtp("folder")


def test_a_layer_that_is_never_right_is_named_with_its_causes() -> None:
    target, mtp = pair("glm4_moe", vocab=400)
    prompts = [[i, i + 1, i + 2] for i in range(1, 9)]
    with pytest.warns(DraftWarning, match="'mtp' contributes nothing.*Look at the target"):
        SpeculativeDecoder(target, check=False).generate(prompts, 40, strategies=[Mtp(mtp)])
