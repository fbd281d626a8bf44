"""Rotary embeddings whose factors depend on the length of the text ("longrope": Phi-3, Phi-4-mini, PhiMoE, ...).

Below `original_max_position_embeddings` tokens such a model rotates with short factors, from there on with long ones:
keys and queries of all positions alike, so keys cached with one kind are useless with the other. transformers chooses
by the largest position of a pass, for all of its rows; a row would then depend on its neighbours and on how far a draft
reaches. Here each row has its own kind (`RaggedCache.set_long`): the logits at position i come from a forward in which
every position has short factors if i < `switch`, and long ones otherwise, as in a plain forward over the text. No pass
of a row may straddle the switch (`Runner.before_switch`), and a row that reaches it is recomputed (`Runner.follow`).
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.errors import SpecdecError
from specdec.models.replaced import replaced

LONG = "longrope"


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """List the sets of rope parameters in a text config: one per layer type; old configs call it `rope_scaling`."""
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        value = vars(config).get(name)  # as an attribute the old name may be an alias that warns
        for settings in (value, *value.values()) if isinstance(value, dict) else ():
            if isinstance(settings, dict) and ("rope_type" in settings or "type" in settings):
                found.append(settings)
    return found


def rope_type(settings: dict[str, Any]) -> str:
    """Return the kind of rope that a set of parameters describes."""
    return str(settings.get("rope_type") or settings.get("type"))


def switch_position(config: Any, role: str = "model") -> int | None:
    """Return the first position with long factors; None if the factors never change.

    Raises SpecdecError for layers that change them at different positions.
    """
    long = [settings for settings in rope_settings(config) if rope_type(settings) == LONG]
    fallback = getattr(config, "original_max_position_embeddings", None)
    found = {settings.get("original_max_position_embeddings") or fallback for settings in long}
    if len(found) > 1:
        raise SpecdecError(
            f"{role} ({config.model_type}) has layers whose longrope changes its factors at different positions "
            f"({', '.join(map(str, found))}): not supported"
        )
    return found.pop() if found else None


class RowRope:
    """The rotary modules of a model, computed with both kinds of factors; each row of a pass takes its own."""

    def __init__(self, model: nn.Module, switch: int):
        self.switch = switch
        self.modules = {m: _Both(m, switch) for m in model.modules() if _is_long(getattr(m, "rope_type", None))}

    def on(self, long: Tensor) -> AbstractContextManager[None]:
        """Rotate the rows of a pass with long factors where `long` [B] is True."""
        for both in self.modules.values():
            both.long = long
        return replaced((module, "forward", both) for module, both in self.modules.items())


def _is_long(kinds: Any) -> bool:
    return LONG in (kinds.values() if isinstance(kinds, dict) else [kinds])


class _Both:
    """A rotary module's forward for rows of both kinds. It runs on copies of the module, because transformers' forward
    leaves the factors of its last pass in the module's buffers."""

    def __init__(self, module: nn.Module, switch: int):
        self.short, self.far = copy.deepcopy(module), copy.deepcopy(module)
        self.switch = switch
        self.long: Tensor | None = None

    def __call__(self, x: Tensor, position_ids: Tensor, *given: Any, **named: Any) -> Any:
        assert self.long is not None
        # The modules look at the largest position: here none is past the switch, then one is added that is.
        near = self.short(x, position_ids.clamp(max=self.switch - 1), *given, **named)
        further = F.pad(position_ids, (0, 1), value=self.switch)
        far = self.far(x, further, *given, **named)
        if isinstance(near, Tensor):
            return _pick(self.long, far, near)
        return tuple(_pick(self.long, a, b) for a, b in zip(far, near, strict=True))


def _pick(long: Tensor, far: Tensor, near: Tensor) -> Tensor:
    """Take far [B, S + 1, D] where a row is long [B], else near [B, S, D]."""
    return torch.where(long.view(-1, *(1,) * (near.ndim - 1)), far[:, :-1], near)
