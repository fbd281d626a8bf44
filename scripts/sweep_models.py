"""Try every causal language model that transformers knows, tiny and with random weights, against its own `generate`.

    python scripts/sweep_models.py --out results/models.json   # a few minutes on two cores
    python scripts/sweep_models.py llama mpt                   # some types only, to the screen

Each type ends as "equal", as "refused" with specdec's reason, or as "wrong". Equal: plain decoding, chains, trees and
drafts that are right in part give the greedy text of `model.generate` for rows of different lengths, past every window,
with shared and kept beginnings; and as a draft the type proposes what it says by itself. Types of which transformers
itself cannot build a tiny model that generates are listed as "not built", with its reason. `VARIANTS` are types in
another form than their default.

Configurations are shrunk by the names of their fields (`SIZES`), so that a type which a later transformers adds is
tried without a change here, as long as it names its sizes as others do.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec.decoder import SpeculativeDecoder
from specdec.decoding.provenance import versions
from specdec.drafters.base import Draft, Drafter, DraftRequest
from specdec.drafters.draft_model.strategy import DraftModel
from specdec.errors import SpecdecError
from specdec.files.compact_json import write_json
from specdec.files.texts import failure
from specdec.models.loading import check_model_kind

VOCAB, LAYERS, CONTEXT = 96, 4, 128
EQUAL, REFUSED, WRONG, NOT_BUILT = "equal", "refused", "wrong", "not built"
NEW_TOKENS = 12

_BY_SIZE: list[tuple[int, str]] = [
    (VOCAB, "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size"),
    (CONTEXT, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length"),
    (
        LAYERS,
        """
        num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks
        num_decoder_layers num_encoder_layers
        """,
    ),
    (
        64,
        """
        hidden_size d_model n_embd dim emb_dim embedding_dim embedding_size word_embed_proj_dim
        intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim dff dim_ff ffn_hidden_size d_inner
        n_inner feed_forward_size attention_hidden_size lru_width intermediate_size_mlp
        dense_intermediate_size input_embedding_size output_embedding_size moe_intermediate_size
        shared_expert_intermediate_size shared_intermediate_size shared_experts_intermediate_size
        expert_ffn_hidden_size moe_shared_expert_intermediate_size mamba_d_ssm backbone_hidden_size
        router_hidden_size query_pre_attn_scalar dim_model_base
        """,
    ),
    (
        16,
        """
        head_dim kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim dim_head d_head
        attention_head_size linear_key_head_dim linear_value_head_dim linear_head_dim swa_head_dim
        swa_v_head_dim index_head_dim kv_channels attention_head_dim o_lora_rank mamba_d_head
        mamba_head_dim mamba_headdim hidden_size_per_layer_input laurel_rank rotary_dim num_buckets
        chunk_size mamba_chunk_size mamba_d_state ssm_state_size state_size time_step_rank mamba_dt_rank
        block_size lsh_attn_chunk_length local_attn_chunk_length pronunciation_embed_dim shape_embed_dim
        ple_embed_dim loop_gate_rank adapter_rank hc_lowrank
        """,
    ),
    (32, "qk_head_dim position_bias_num_buckets prompt_types"),
    (
        4,
        """
        num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
        attention_heads num_decoder_attention_heads num_encoder_attention_heads num_experts
        num_local_experts n_routed_experts moe_num_experts swa_num_attention_heads index_n_heads
        mamba_n_heads mamba_num_heads n_mamba_heads linear_num_value_heads linear_num_key_heads
        linear_num_heads o_groups
        """,
    ),
    (
        2,
        """
        num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok
        num_experts_per_token moe_topk moe_k num_kv_shared_layers topk_group n_group n_groups
        num_expert_group zero_expert_num num_query_groups mamba_n_groups global_attn_every_n_layers
        sliding_window_pattern _sliding_window_pattern attn_layer_period expert_layer_period
        no_rope_layer_interval layer_group_size num_layers_per_stack n_input_layers n_recurrent_layers
        n_output_layers
        """,
    ),
    (1, "first_k_dense_replace attn_layer_offset expert_layer_offset num_dense_layers n_shared_experts"),
    (
        8,
        """
        sliding_window sliding_window_size window_size local_attention attention_window_size index_topk
        attention_chunk_size keep_window_size
        """,
    ),
]
SIZES = {name: size for size, names in _BY_SIZE for name in names.split()}

_PER_TYPE = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
# What some classes check, or leave to the checkpoint.
NEEDED: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_d_head": 32, "attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {"rope_parameters": _PER_TYPE},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "dots3_note": {"image_token_id": 0},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 32},
    "gemma4_text": {"num_kv_shared_layers": 2},
    "gemma4_unified_text": {"num_kv_shared_layers": 2},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "granitemoehybrid": {"mamba_d_head": 32, "layer_types": ["linear_attention", "full_attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 32},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "qwen4_exp_text": {
        "num_key_value_heads": 2,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        "n_mamba_heads": 8,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 48), "axial_pos_shape": (8, 16)},
}


_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 28, "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 8.0, 8.0],
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon:alibi": ("falcon", {"alibi": True, "new_decoder_architecture": False}),
    "gpt_neox:sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "llama:dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "nemotron_h:no-limit": ("nemotron_h", {"time_step_min": 1e-9}),
    "phi3:longrope": ("phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 28}),
    "qwen2:windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "zamba2:no-limit": ("zamba2", {"time_step_min": 1e-9}),
}


# What papers and their readers use, by what is special about it.
_FAMILIES = {
    "dense": "llama mistral qwen2 qwen3 gemma phi3 olmo2 olmo3 granite smollm3 cohere cohere2 starcoder2 stablelm",
    "older": "gpt2 gpt_neo gptj gpt_neox gpt_neox:sequential opt bloom falcon falcon:alibi mpt gpt_bigcode codegen phi",
    "mixture of experts": "mixtral qwen2_moe qwen3_moe gpt_oss olmoe phimoe deepseek_v2 deepseek_v3",
    "mixed windows, soft caps": "gemma2 gemma3_text qwen2:windows",
    "shared keys and values": "gemma3n_text gemma4_text",
    "hybrid and recurrent": """
        mamba mamba2 falcon_mamba jamba bamba zamba zamba2 zamba2:no-limit falcon_h1 granitemoehybrid nemotron_h
        nemotron_h:no-limit lfm2 lfm2_moe qwen3_next qwen3_5_text olmo_hybrid kimi_linear rwkv recurrent_gemma xlstm
        minimax
    """,
    "rope that depends on the pass": "phi3:longrope llama:dynamic",
}
FAMILIES = {family: names.split() for family, names in _FAMILIES.items()}


@dataclass(frozen=True)
class Found:
    """What became of one model type: `outcome` is EQUAL, REFUSED, WRONG or NOT_BUILT; `reason` is empty if equal."""

    model_type: str
    outcome: str
    reason: str = ""


def model_types() -> list[str]:
    """Every model type for which `AutoModelForCausalLM` has a class, and `VARIANTS`."""
    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def shrunk(config: Any) -> dict[str, Any]:
    """Arguments that make a tiny configuration of the class of `config`."""
    layers = [getattr(config, name) for name in ("num_hidden_layers", "n_layer") if hasattr(config, name)]
    made: dict[str, Any] = {}
    for name, value in {**config.to_dict(), **vars(config)}.items():
        if hasattr(value, "to_dict"):
            made[name] = {**shrunk(value), "model_type": value.model_type}
        elif name.endswith("token_id") and isinstance(value, int | list):
            made[name] = value if isinstance(value, int) and value < VOCAB else 0
        elif isinstance(value, list) and len(value) in layers:
            made[name] = _some_layers(value, SIZES.get(name))
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            made[name] = min(value, SIZES[name])
    given = config.to_dict()
    if given.get("kv_lora_rank") and given.get("num_key_value_heads") == given.get("num_attention_heads"):
        made["num_key_value_heads"] = made["num_attention_heads"]
    return made


def _some_layers(values: list[Any], size: int | None) -> list[Any]:
    """LAYERS entries with every kind that `values` has, in order of appearance."""
    if size is not None:
        return [size] * LAYERS
    kinds = list(dict.fromkeys(values))
    return [kinds[i % len(kinds)] for i in range(LAYERS)]


def tiny_config(model_type: str) -> Any:
    """A tiny configuration with every kind of layer that the type has by default."""
    model_type, changed = VARIANTS.get(model_type, (model_type, {}))
    made, needed = CONFIG_MAPPING[model_type], {**NEEDED.get(model_type, {}), **changed}
    try:
        default = made()
    except ValueError:  # some types have no defaults that go together
        default = made(**needed)
    return made(**{**shrunk(default), **needed})


def tiny_model(config: Any, seed: int = 0) -> Any:
    """A random model with weights so large that no argmax is a matter of rounding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0, 0.3)
            table = model.get_input_embeddings()
            if hasattr(table, "embed_scale"):  # else the tied head says the last token again, whatever is attended to
                table.weight.mul_(0.05)
    config.eos_token_id = None
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    return model


def sweep(types: Iterable[str], quick: bool = False) -> Iterator[Found]:
    """Try the types one after another; quick: one way of decoding each."""
    for model_type in types:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield try_type(model_type, quick)


def try_type(model_type: str, quick: bool = False) -> Found:
    """Build a tiny model of a type and compare."""
    config = model = None
    try:
        config = tiny_config(model_type)
        model = tiny_model(config)
        decoder = SpeculativeDecoder(model, disturbed(model))
    except SpecdecError as error:
        return Found(model_type, REFUSED, str(error))
    except Exception as error:
        if model is None:  # whatever transformers trips over
            with suppress(Exception):
                return Found(model_type, REFUSED, _refusal(config or CONFIG_MAPPING[model_type]()))
            return Found(model_type, NOT_BUILT, failure(error))
        return Found(model_type, WRONG, failure(error))
    try:
        wanted = [generated(model, prompt) for prompt in prompts()]
    except Exception as error:
        return Found(model_type, NOT_BUILT, failure(error))
    try:
        wrong = list(differing(decoder, wanted, quick))
    except Exception as error:
        return Found(model_type, WRONG, failure(error))
    return Found(model_type, WRONG, f"other text: {', '.join(wrong)}") if wrong else Found(model_type, EQUAL)


def _refusal(config: Any) -> str:
    """Why a configuration is refused before a weight is made. Raises TypeError if it is not."""
    try:
        check_model_kind(config, "target")
    except SpecdecError as error:
        return str(error)
    raise TypeError("not refused")


def prompts() -> list[list[int]]:
    """Three prompts of different lengths, two with a common beginning that is worth sharing."""
    ids = torch.randint(3, VOCAB, (37,), generator=torch.Generator().manual_seed(1)).tolist()
    return [ids[:24], ids[:20] + ids[24:], ids[7:16]]


def generated(model: Any, prompt: list[int]) -> list[int]:
    """The greedy text of transformers; without a cache for a model whose own cache fails."""
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS}
    with torch.no_grad():
        try:
            out = model.generate(ids, **options)
        except IndexError:
            out = model.generate(ids, **options, use_cache=False)
    return out[0, len(prompt) :].tolist()


def disturbed(model: Any) -> Any:
    """A copy with noise in its weights, as a draft model."""
    draft, generator = copy.deepcopy(model), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return draft


@dataclass
class PartlyRight(Drafter):
    """Proposes what the target will say, with a wrong token now and then: every number of accepted tokens comes up.

    texts: prompts with what follows them
    """

    texts: list[list[int]]
    name = "partly-right"

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(self._after([*r.tokens, r.last])[: min(5, r.n_max)]) for r in requests]

    def _after(self, start: list[int]) -> list[int]:
        text = next((text for text in self.texts if text[: len(start)] == start), start)
        return [3 if (n + text[1]) % 5 == 0 else text[n] for n in range(len(start), len(text))]


class Watched(DraftModel):
    """A draft model that notes its drafts: (text, draft) each."""

    def __init__(self, n_max: int):
        super().__init__(n_max=n_max)
        self.seen: list[tuple[list[int], list[int]]] = []

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = super().draft(requests)
        for request, draft in zip(requests, drafts, strict=True):
            self.seen.append(([*request.tokens, request.last], torch.as_tensor(draft.tokens).tolist()))
        return drafts

    def is_right(self, model: Any) -> bool:
        """True if every draft is what the model says by itself, without any cache."""
        for text, drafted in self.seen:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([text + drafted]), use_cache=False).logits[0]
            if logits[len(text) - 1 : -1].argmax(-1).tolist() != drafted:
                return False
        return bool(self.seen)


def differing(decoder: SpeculativeDecoder, wanted: list[list[int]], quick: bool) -> Iterator[str]:
    """In what specdec's texts are not `wanted`: names of the ways of decoding.

    Three prompts take turns in two slots.
    """
    assert decoder.draft is not None
    chain, tree, given = Watched(4), DraftModel(tree=[2, 2, 1]), prompts()
    right = PartlyRight([prompt + text for prompt, text in zip(given, wanted, strict=True)])
    if decoder.target.tree_fault is not None and decoder.target.recurrence is None:
        yield "no trees"
    ways: dict[str, list[Any]] = {"chain": [chain]}
    if decoder.target.tree_fault is None:
        ways["tree"] = [tree]
    if not quick:
        ways |= {"plain": [], "partly right": [right]}
    for name, strategies in ways.items():
        if decoder.generate(given, NEW_TOKENS, strategies=strategies, batch_size=2).token_ids != wanted:
            yield name
    if not chain.is_right(decoder.draft.model):
        yield "as a draft"
    for n in () if quick else (1, 0):  # the second call finds what the first has kept
        kept = decoder.generate(given[n], NEW_TOKENS, strategies=[chain], keep_state=True)
        if kept.token_ids != [wanted[n]]:
            yield "keep_state"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all of them if none is given")
    parser.add_argument("--out", type=Path, help="JSON document to write")
    options = parser.parse_args()
    rows = []
    for row in sweep(options.types or model_types()):
        rows.append(row)
        print(f"{row.model_type:28} {row.outcome:10} {row.reason}", flush=True)
    counts = Counter(row.outcome for row in rows)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if options.out is not None:
        made = {"date": date.today().isoformat(), "versions": versions()}
        write_json(options.out, {**made, "families": FAMILIES, "rows": [asdict(row) for row in rows]})
    sys.exit(1 if counts["wrong"] else 0)


if __name__ == "__main__":
    main()
