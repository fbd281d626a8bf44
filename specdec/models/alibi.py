"""The bias by distance (ALiBi) of MPT and BLOOM, from positions.

transformers counts distances in the order of the cache, or in an attention mask with one length for all rows. Here rows
have lengths of their own, and a slot's index is not always its position: nodes of a tree take slots next to one
another. So the bias becomes part of specdec's mask, which knows the positions. BLOOM adds that mask to a bias of its
own, which is 0 then; MPT's attention is computed with it instead of the model's own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.models.attention import matmul_attention
from specdec.models.replaced import replaced

BUILD = "build_alibi_tensor"  # BLOOM's method


class Alibi:
    """The attention modules of an MPT model, or the stack of a BLOOM model, and the slopes [H] of its heads."""

    def __init__(self, model: Any):
        stack, device = model.base_model, model.device
        self.modules = [m for m in model.modules() if hasattr(m, "Wqkv") and hasattr(m, "softmax_scale")]
        if self.modules:
            last_two = stack.build_mpt_alibi_tensor(model.config.n_heads, 2, device=device)  # [H, 1, 2]: keys one apart
        else:
            last_two = stack.build_alibi_tensor(torch.ones(1, 2, device=device), model.config.n_head, torch.float32)
        self.stack = None if self.modules else stack
        self.slopes = (last_two[:, 0, 1] - last_two[:, 0, 0]).float()

    @staticmethod
    def of(model: Any) -> Alibi | None:
        """Return the bias of a model of transformers' own MPT or BLOOM class; None for any other."""
        stack = model.base_model
        return Alibi(model) if hasattr(stack, "build_mpt_alibi_tensor") or hasattr(stack, BUILD) else None

    def on(self, mask: Tensor) -> AbstractContextManager[None]:
        """Have attention take `mask` [B, H, S, L], bias included."""
        made = [(module, "forward", partial(_attention, module, mask)) for module in self.modules]
        return replaced(made if self.stack is None else [*made, (self.stack, BUILD, _no_bias)])


def _no_bias(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros((1, 1, 1), dtype=dtype, device=mask.device)


def _attention(
    module: Any, mask: Tensor, hidden_states: Tensor, *_: Any, cache: Any = None, **__: Any
) -> tuple[Tensor, None]:
    """Compute transformers' `MptAttention.forward` over hidden states [B, S, H * D] with another mask."""
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (part.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=-1))
    key, value = cache.update(key, value, module.layer_idx)
    # The bias is float32, as in transformers: only the products keep the dtype of what they are added to.
    out, _weights = matmul_attention(module, query, key, value, mask, scaling=module.softmax_scale)
    return module.out_proj(out.flatten(2)), None
