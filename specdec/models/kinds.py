"""Reading transformers' configurations, also those whose layers differ in their sizes (Gemma 4)."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from transformers.cache_utils import DynamicCache

RECURRENT = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "ssm", "hybrid", "hybrid_sliding"}
KEYLESS = RECURRENT - {"hybrid", "hybrid_sliding"} | {"mlp", "moe"}  # kinds of layers without keys and values
# Types whose recurrent states are kept elsewhere than in transformers' cache.
OWN_STATES = {"rwkv", "xlstm", "recurrent_gemma", "minimax"}


def layer_configs(config: Any) -> list[Any]:
    """Return the configuration of each layer of a text config: the config itself, with the layer's own values."""
    own = getattr(config, "per_layer_config", None)
    return [config] * config.num_hidden_layers if own is None else list(own)


def field_of(config: Any, name: str, default: Any = None) -> Any:
    """Return a field of a text config; `default` if there is none, or if layers differ in it."""
    try:
        return getattr(config, name, default)
    except RuntimeError:  # transformers: "a per-layer attribute"
        return default


def layer_kinds(config: Any) -> list[str]:
    """Return the kind of each layer of a text config, in transformers' words; none if it says none."""
    return list(getattr(config, "layer_types", None) or ())


def attention_heads(layer: Any) -> tuple[int, int]:
    """Return (query heads, key-value heads) of a layer's configuration; (1, 1) for a model without attention."""
    heads = getattr(layer, "num_attention_heads", None) or 1
    return heads, getattr(layer, "num_key_value_heads", None) or heads


def cache_layers(config: Any) -> list[Any]:
    """Return the layers of the cache that transformers would make for a model; none if it cannot tell."""
    with suppress(Exception):  # whatever configurations of remote code lack
        return list(DynamicCache(config=config).layers)
    return []


def is_recurrent(config: Any) -> bool:
    """True if a model has states of a recurrence or a convolution."""
    bases = {base.__name__ for layer in cache_layers(config) for base in type(layer).__mro__}
    named = any("LinearAttention" in name or "Mamba" in name for name in bases)
    return named or not RECURRENT.isdisjoint(layer_kinds(config)) or config.model_type in OWN_STATES
