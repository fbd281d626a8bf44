"""Tiny random models of several architectures: a fraction of a second to build, no download.

The weights are drawn with a large standard deviation, so that the logits spread over several units: the argmax is then
never decided by rounding, and the greedy text varies instead of repeating one token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

SLIDING_WINDOW = 8
_WINDOWED = ["sliding_attention", "full_attention", "sliding_attention"]

_KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "mistral": (MistralConfig, {"sliding_window": SLIDING_WINDOW, "head_dim": 8}),
    "gemma2": (
        Gemma2Config,
        {"sliding_window": SLIDING_WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8, "layer_types": _WINDOWED},
    ),
    "gemma3": (
        Gemma3TextConfig,
        {"sliding_window": SLIDING_WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8, "layer_types": _WINDOWED},
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "phi3": (Phi3Config, {}),
}
TINY_KINDS = tuple(_KINDS)


def tiny_model(kind: str, seed: int = 0, vocab: int = 128, **overrides: Any) -> Any:
    """A random `kind` model in float32 and eval mode: 3 layers, hidden size 32, 4 query and 2 key-value heads.

    `overrides` are fields of the model's config (`max_position_embeddings=64`, `eos_token_id=3`, ...). The
    special-token ids are None unless given, in the config and in the generation config alike. The same arguments give
    the same weights, and the global random state is left as it was.
    """
    config_class, specific = _KINDS[kind]
    settings: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **specific,
        **overrides,
    }
    layers = settings["num_hidden_layers"]
    if "layer_types" in settings and len(settings["layer_types"]) != layers:
        settings["layer_types"] = [_WINDOWED[i % 2] for i in range(layers)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config_class(**settings),
            dtype=torch.float32,
            # In transformers 5.17 Gemma 2 defaults to SDPA, which leaves out its cap on attention scores.
            attn_implementation="eager" if kind == "gemma2" else None,
        )
    special = {name: settings[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**special)
    return model.eval()
