"""Reading transformers' configurations, also those whose layers differ in their sizes (Gemma 4)."""

from __future__ import annotations

from typing import Any


def layer_configs(config: Any) -> list[Any]:
    """The configuration of each layer of a text config: the config itself, but for fields that the layer has its own
    values of."""
    own = getattr(config, "per_layer_config", None)
    return [config] * config.num_hidden_layers if own is None else list(own)


def field_of(config: Any, name: str, default: Any = None) -> Any:
    """A field of a text config; `default` where there is none, or where layers differ in it."""
    try:
        return getattr(config, name, default)
    except RuntimeError:  # transformers: "a per-layer attribute"
        return default


def attention_heads(layer: Any) -> tuple[int, int]:
    """(query heads, key-value heads) of a layer's configuration."""
    heads = layer.num_attention_heads
    return heads, getattr(layer, "num_key_value_heads", None) or heads
