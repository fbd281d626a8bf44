"""Longrope: a row is rotated as its own length asks, whatever stands beside it and however far a draft reaches."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MiniCPM3Config, Phi3Config, PhimoeConfig, Qwen3Config

from specdec import DraftModel, SpeculativeDecoder
from specdec.errors import SpecdecError
from specdec.models.loading import check_model_kind
from specdec.models.runner import Runner
from tests.helpers.playing import Scripted, random_ids, right_until, weaker
from tests.helpers.recording import Rerun
from tests.oracle import oracle_greedy, oracle_logits

SWITCH = 16
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "phi3": (Phi3Config, {}),
    "phimoe": (PhimoeConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "minicpm3": (
        MiniCPM3Config,
        {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    ),
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
}


@cache
def model(kind: str, switch: int = SWITCH) -> Any:
    made, own = KINDS[kind]
    if made is Phi3Config:
        own = {"original_max_position_embeddings": switch}  # Phi-3's configuration has it in two places
    rope = {
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0], "rope_theta": 1e4,
        "original_max_position_embeddings": switch, "short_mscale": 1.1, "long_mscale": 1.3,
    }  # fmt: skip
    config = made(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=96, initializer_range=0.3, bos_token_id=None,
        eos_token_id=None, pad_token_id=None, rope_parameters=rope, **own,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def decoder(kind: str, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(model(kind), weaker(model(kind), 0.02), check=False, **options)


PROMPTS = [random_ids(n, n, 64) for n in (9, 15, 16, 17, 24)]  # below, at and beyond the switch
CHAINS: dict[str, list[Any]] = {
    "plain": [],
    "chain": [DraftModel(n_max=5)],
    "tree": [DraftModel(tree=[2, 2, 1])],
    "lookup": ["prompt-lookup", DraftModel(n_max=3)],
}


@pytest.mark.fast(3)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_across_the_switch_are_those_of_plain_forwards(kind: str) -> None:
    wanted, pair = [oracle_greedy(model(kind), prompt, 12) for prompt in PROMPTS], decoder(kind)
    for name, strategies in CHAINS.items():
        assert pair.generate(PROMPTS, 12, strategies=strategies, batch_size=2).token_ids == wanted, name


def test_the_two_kinds_of_factors_give_two_texts() -> None:
    """Else the tests here could not fail."""
    prompt = PROMPTS[0]
    text = prompt + oracle_greedy(model("phi3"), prompt, 30)
    short = oracle_logits(model("phi3"), text[:SWITCH])
    long = oracle_logits(model("phi3"), text)[:SWITCH]
    assert (short.argmax(-1) != long.argmax(-1)).any()


def test_drafts_that_are_right_end_where_the_factors_change() -> None:
    """Also long ones, which are verified in chunks, and one that would start at the last short position."""
    kind, switch = "phi3", 48
    target = model(kind, switch)
    prompts = [random_ids(n, n, 64) for n in (8, 46, 47, 48)]
    wanted = [oracle_greedy(target, prompt, 48) for prompt in prompts]
    right = Scripted(right_until([p + w for p, w in zip(prompts, wanted, strict=True)], 45))
    pair = SpeculativeDecoder(target, check=False)
    for exact in (False, True):
        out = pair.generate(prompts, 48, strategies=[right], exact=exact, batch_size=2)
        assert out.token_ids == wanted
    rounds = list(pair.rounds(prompts[0], 48, strategies=[right]))
    assert all(r.accepted == len(r.draft) for r in rounds)
    assert all(r.position >= switch or r.position + len(r.draft) < switch for r in rounds)


@pytest.mark.parametrize("exact", ["auto", True])
def test_exact_mode_and_recorded_passes_follow_the_switch(exact: Any) -> None:
    wanted = [oracle_greedy(model("phi3"), prompt, 10) for prompt in PROMPTS]
    recorded = decoder("phi3", exact=exact)
    recorded.target = Runner(model("phi3"), recorder=Rerun())
    recorded.draft = Runner(weaker(model("phi3"), 0.02), recorder=Rerun())
    for _ in range(2):
        assert recorded.generate(PROMPTS, 10, batch_size=2).token_ids == wanted
    assert recorded.target.recorded[0] > 0


def test_drafts_do_not_depend_on_the_rows_beside_them() -> None:
    """The draft model has a switch of its own, at another position than the target's."""
    pair = SpeculativeDecoder(model("phi3"), model("phi3", 20), check=False)
    options = {"seed": 1, "temperature": 1.0, "acceptance": "leviathan", "strategies": [DraftModel(n_max=4)]}
    together, alone = (pair.generate(PROMPTS, 12, batch_size=batch, **options) for batch in (5, 1))
    assert together.token_ids == alone.token_ids
    accepted = [[row["accepted_tokens"] for row in out.stats.to_dict()["rows"]] for out in (together, alone)]
    assert accepted[0] == accepted[1]


@pytest.mark.parametrize("acceptance", ["match", "coupled"])
def test_sampled_texts_are_those_of_plain_decoding(acceptance: str) -> None:
    pair, options = decoder("phi3"), {"temperature": 1.0, "seed": 3, "acceptance": acceptance}
    plain = pair.generate(PROMPTS, 12, strategies=[], **options).token_ids
    assert pair.generate(PROMPTS, 12, batch_size=2, **options).token_ids == plain


def test_kept_and_shared_beginnings_are_used_by_rows_of_their_own_kind_only() -> None:
    pair = SpeculativeDecoder(model("phi3", 24), weaker(model("phi3", 24), 0.02), check=False)
    header = random_ids(20, 9, 64)
    prompts = [header + random_ids(n, n, 64) for n in (2, 3, 9, 4)]  # short and long ones share the header
    wanted = [oracle_greedy(model("phi3", 24), prompt, 6) for prompt in prompts]
    for batch in (1, 2, 4):
        assert pair.generate(prompts, 6, batch_size=batch).token_ids == wanted
    text = prompts[0]
    for _ in range(3):  # a text that grows across the switch
        text = text + pair.generate([text], 2, keep_state=True).token_ids[0]
    assert text == prompts[0] + wanted[0]


def test_the_model_is_left_as_it_was() -> None:
    own = copy.deepcopy(model("phi3"))
    before = {name: buffer.clone() for name, buffer in own.named_buffers()}
    SpeculativeDecoder(own, check=False).generate([PROMPTS[0], PROMPTS[-1]], 10)
    assert all(torch.equal(buffer, before[name]) for name, buffer in own.named_buffers())
    assert not any("forward" in vars(module) for module in own.modules())


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {"type": "dynamic", "factor": 2.0},
        {"full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "dynamic_ntk", "factor": 2.0}},
    ],
)
@pytest.mark.filterwarnings("ignore:.*rope_scaling")
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_dynamic_rope_is_refused_wherever_it_stands(name: str, parameters: dict[str, Any]) -> None:
    config = copy.deepcopy(model("llama").config)
    config.rope_parameters = None
    setattr(config, name, parameters)
    with pytest.raises(SpecdecError, match="dynamic"):
        check_model_kind(config, "target")


def test_layers_that_switch_at_different_positions_are_refused() -> None:
    config = copy.deepcopy(model("llama").config)
    config.rope_parameters = {
        kind: {"rope_type": "longrope", "original_max_position_embeddings": n} for kind, n in (("a", 24), ("b", 32))
    }
    with pytest.raises(SpecdecError, match="24, 32"):
        check_model_kind(config, "target")


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["graph", "inductor"])
@pytest.mark.parametrize("kind", ["phi3", "phimoe"])
def test_recorded_passes_on_a_gpu_follow_the_switch(kind: str, compile: str) -> None:
    target = copy.deepcopy(model(kind)).cuda()
    pair = SpeculativeDecoder(target, weaker(model(kind), 0.02).cuda(), compile=compile)
    wanted = [oracle_greedy(target, prompt, 12) for prompt in PROMPTS]
    for strategies in CHAINS.values():
        assert pair.generate(PROMPTS, 12, strategies=strategies, batch_size=2).token_ids == wanted
