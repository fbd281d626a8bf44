"""Says why a model has failed the self-test: what it has that specdec cannot do."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specdec.device.transfer import to_device
from specdec.models.attention import AttentionSwitch
from specdec.models.kinds import KEYLESS, RECURRENT, cache_layers, field_of
from specdec.models.recurrent_state import Recurrence
from specdec.models.runner import Runner

PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
KNOWN_ATTENTION = {"full_attention", "sliding_attention", "global", "local"} | RECURRENT | KEYLESS
UNKNOWN = "its attention or its positions do not follow the masks and position_ids that it is given"


def plain_cause(runner: Runner) -> str:
    """Say why a plain forward, without any cache, fails."""
    config, dtypes = runner.config, sorted({str(p.dtype).removeprefix("torch.") for p in runner.model.parameters()})
    heads, kv_heads = (field_of(config, f"num_{kind}_heads") for kind in ("attention", "key_value"))
    if field_of(config, "kv_lora_rank") and heads != kv_heads:
        return (
            f"it has latent attention with num_key_value_heads={kv_heads} and num_attention_heads={heads}, which must "
            "be equal, and its own forward fails"
        )
    if len(dtypes) > 1:
        return f"it has weights of several dtypes ({', '.join(dtypes)}), with which its own forward fails"
    return "its own forward fails without a cache, before specdec does anything with it"


def cause(runner: Runner, ids: Sequence[int], expected: Tensor, looks_ahead: bool) -> str:
    """Say why passes over the cache fail or differ from a plain forward.

    ids: a text
    expected [n, V]: its logits by a plain forward
    looks_ahead: a token's logits depend on what follows it
    """
    config, accepted = runner.config, _accepted(runner.model)
    extra = sorted({type(layer).__name__ for layer in cache_layers(config) if type(layer) not in PLAIN_LAYERS})
    named = (getattr(config, name, None) or () for name in ("layer_types", "attention_layers"))
    kinds = {kind for kinds in named for kind in kinds if isinstance(kind, str)} - KNOWN_ATTENTION
    if not accepted & {"cache", "past_key_values"}:
        return "it keeps no keys and values between passes, since its forward takes no cache"
    if runner.recurrence is not None:
        return _cause_in_states(runner.recurrence)
    if extra:
        return f"its cache keeps more than keys and values ({', '.join(extra)})"
    if kinds:
        return f"it has layers of another kind than full and sliding attention ({', '.join(sorted(kinds))})"
    if looks_ahead:
        return (
            "what follows a token changes its logits, as in an encoder (a model that can be both needs "
            "is_decoder=True in its configuration)"
        )
    if hasattr(runner.model.base_model, "build_alibi_tensor") or field_of(config, "alibi"):
        return "it builds its bias by distance (ALiBi) from an attention mask with one length for all rows"
    if "position_ids" not in accepted:
        return "it takes a token's position from how full its cache is, since its forward takes no position_ids"
    with suppress(Exception):
        if not _is_same(_numbered(runner, ids), expected):
            return "it counts positions in another way than 0, 1, 2, ..."
    return UNKNOWN


def _cause_in_states(recurrence: Recurrence) -> str:
    """Say why the passes of a model with recurrent modules are wrong."""
    limits: list[Any] = [getattr(module, "time_step_limit", None) for module in recurrence.modules]
    least = max((limit[0] for limit in limits if limit), default=0)
    if least > 0:
        return (
            f"its recurrent layers keep to a least time step of {least:g} where they read several tokens and not where "
            "they read one, so its logits depend on how a text is fed, also in transformers; with next to no limit "
            "(time_step_min=1e-9 in its configuration) it works"
        )
    names = ", ".join(sorted({type(module).__name__ for module in recurrence.modules}))
    return f"its recurrent layers ({names}) ask for more than hidden states and what they have kept themselves"


def _accepted(model: Any) -> set[str]:
    """Return the argument names of a model's forward, and of the model inside it."""
    inside = (model, model.base_model, getattr(model.base_model, "model", model))
    return {name for module in inside for name in inspect.signature(module.forward).parameters}


def _is_same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-2, atol=1e-2 * float(b.abs().max()))


def _numbered(runner: Runner, ids: Sequence[int]) -> Tensor:
    """Compute the logits [n, V] of a plain forward that is told the positions."""
    given = {"input_ids": to_device([list(ids)], runner.device)}
    given["position_ids"] = to_device([list(range(len(ids)))], runner.device)
    with torch.no_grad(), AttentionSwitch(runner.model, "eager").on():
        logits: Tensor = runner.model(**given, use_cache=False).logits[0].float()
    return logits
