"""GPT-Neo's attention, whose modules keep a mask of their own for the order of the cache.

Every other layer sees a window of the last tokens. transformers cuts both masks out of a table by the number of keys,
which here is that of a buffer with rows of many lengths; so attention is computed with specdec's masks instead.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from specdec.models.attention import MaskBuilder, matmul_attention
from specdec.models.replaced import replaced

KINDS = {"global": "full_attention", "local": "sliding_attention"}


class LocalAttention:
    """The attention modules of a GPT-Neo model, and their window in tokens."""

    def __init__(self, modules: list[Any], window: int):
        self.modules, self.window = modules, window

    @staticmethod
    def of(model: Any) -> LocalAttention | None:
        """Return the modules of a model of transformers' own GPT-Neo class; None for any other."""
        found = [m for m in model.modules() if hasattr(m, "_attn") and getattr(m, "attention_type", None) in KINDS]
        return LocalAttention(found, model.config.window_size) if found else None

    def prepare(self, masks: MaskBuilder) -> None:
        """Have a builder make masks of both kinds."""
        masks.window, masks.per_type, masks.sliding_only = self.window, True, False

    def on(self, masks: dict[str, Tensor]) -> AbstractContextManager[None]:
        """Have attention take `masks` [B, 1, S, L] by kind."""
        return replaced((m, "_attn", partial(_attention, m, masks[KINDS[m.attention_type]])) for m in self.modules)


def _attention(module: Any, mask: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
    """Compute transformers' `GPTNeoSelfAttention._attn`, [B, H, S, D], with another mask: unscaled and in float32."""
    out, _weights = matmul_attention(module, query.float(), key.float(), value, mask, scaling=1.0)
    return out.transpose(1, 2), None
