"""MPT's bias by distance (ALiBi), from positions.

transformers' MPT counts distances in the order of the cache. Here a slot's index is not always its position: nodes of a
tree take slots next to one another. So the bias becomes part of specdec's mask, which knows the positions, and MPT's
attention is computed with that mask instead of the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from specdec.models.attention import matmul_attention


class Alibi:
    """The attention modules of an MPT model, and the slopes [H] of its heads."""

    def __init__(self, model: Any, build: Callable[..., Tensor]):
        self.modules = [m for m in model.modules() if hasattr(m, "Wqkv") and hasattr(m, "softmax_scale")]
        last_two = build(model.config.n_heads, 2, device=model.device)  # [H, 1, 2], of keys one apart
        self.slopes = (last_two[:, 0, 1] - last_two[:, 0, 0]).float()

    @staticmethod
    def of(model: Any) -> Alibi | None:
        """Return the bias of a model of transformers' own MPT class; None for any other."""
        build = getattr(model.base_model, "build_mpt_alibi_tensor", None)
        return None if build is None else Alibi(model, build)

    @contextmanager
    def on(self, mask: Tensor) -> Iterator[None]:
        """Have attention take `mask` [B, H, S, L], bias included."""
        for module in self.modules:
            vars(module)["forward"] = partial(_attention, module, mask)
        try:
            yield
        finally:
            for module in self.modules:
                vars(module).pop("forward", None)


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
