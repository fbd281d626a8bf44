"""The attention function that specdec registers with transformers, and the masks that go with it.

transformers' stock SDPA path copies the whole static K/V buffer (`repeat_kv`) in every layer as soon as there is a
4D mask and more than one query. `ragged_attention` folds the group of query heads that share a K/V head into the
query axis instead: `q.reshape(B, H_kv, G * S, D)`. Same numbers, no copy.

A query at position t sees slots 0..t, or t - window + 1..t in sliding layers; a padding query sits at position 0 and
sees slot 0, because a softmax over nothing is NaN. Masks are built once a pass, in the form that the attention wants
without further work in every layer: additive and already folded for `ragged_attention` (measured on two CPU cores:
building the folded mask in each layer cost more than the attention itself), boolean for SDPA, additive for eager.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from specdec.errors import SpecdecError
from specdec.models.kinds import KEYLESS, attention_heads, field_of, layer_configs
from specdec.models.trees import TreePass

RAGGED = "specdec_ragged"
MATMUL = "specdec_matmul"  # the same fold, as two products with a softmax between them instead of one fused kernel
FOLDED = (RAGGED, MATMUL)
# Compiled code takes scores as sums instead of a matrix product up to so many folded queries, or so few scores of all
# rows and K/V heads together: a draft model's, but not a large target's (docs/speed.md).
SUMMED, SUMMED_SCORES = 8, 40_000
SUPPORTED = (*FOLDED, "sdpa", "eager")

Mask = Tensor | dict[str, Any]  # by kind of layer; None for layers that attend to nothing


def ragged_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, S, D]
    key: Tensor,  # [B, H_kv, L, D]
    value: Tensor,  # [B, H_kv, L, D_v]
    attention_mask: Tensor | None,  # [B, 1, G * S, L], or [B, 1, S, L]; additive or bool (True = attend)
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    fused: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Grouped-query attention without `repeat_kv`; returns `[B, S, H, D_v]` and no weights.

    softcap: Gemma 2's, by the keyword of transformers' models
    s_aux: attention sinks (GPT-OSS), likewise
    fused: use torch's fused kernel where possible
    Dropout is never applied: this function only serves inference.
    """
    batch, heads, length, width = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], groups * length, width)
    mask = attention_mask
    if mask is not None and mask.shape[2] != folded.shape[2]:  # a layer with other groups than most, or not folded
        mask = mask[:, :, :length].repeat(1, 1, groups, 1)
    few = folded.shape[2] <= SUMMED or folded[..., 0].numel() * key.shape[2] <= SUMMED_SCORES
    if softcap is None and s_aux is None and few and torch.compiler.is_compiling():
        out = _summed_attention(folded, key, value, mask, scaling or width**-0.5)
    elif fused and softcap is None and s_aux is None:
        if mask is not None and mask.dtype not in (torch.bool, query.dtype):  # a model of several dtypes
            mask = mask.to(query.dtype)
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    else:
        out = _plain_attention(folded, key, value, mask, scaling or width**-0.5, softcap, s_aux)
    return out.reshape(batch, heads, length, -1).transpose(1, 2).contiguous(), None


def _plain_attention(
    query: Tensor,  # [B, H_kv, G * S, D]
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,  # [B, 1, G * S, L]
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,  # [H]
) -> Tensor:
    weights = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        weights = torch.tanh(weights / softcap) * softcap
    if mask is not None:
        blocked = torch.finfo(weights.dtype).min
        weights = weights.masked_fill(~mask, blocked) if mask.dtype == torch.bool else weights + mask
    if sinks is not None:
        batch, kv_heads, rows, _ = weights.shape
        column = sinks.reshape(1, kv_heads, -1, 1).expand(batch, -1, -1, rows * kv_heads // sinks.numel())
        weights = torch.cat([weights, column.reshape(batch, kv_heads, rows, 1).to(weights.dtype)], dim=-1)
    weights = torch.softmax(weights, dim=-1, dtype=torch.float32)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(value.dtype) @ value


def _summed_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Compute attention with scores as sums of products, for compiled code and a few queries only.

    The compiler fuses such sums with what surrounds them, while a matrix product of a few rows is a kernel that is
    mostly idle. Eagerly the products would be huge. The values stay a matrix product: they are summed over an axis that
    is not contiguous, for which the compiler picks a kernel by a trial, at times one ten times slower than the best
    (docs/speed.md).
    """
    weights = (query[:, :, :, None].float() * key[:, :, None].float()).sum(dim=-1) * scaling  # [B, H_kv, G * S, L]
    if mask is not None:
        weights = weights + mask
    return torch.softmax(weights, dim=-1).to(value.dtype) @ value


matmul_attention = partial(ragged_attention, fused=False)

for _name, _attention in ((RAGGED, ragged_attention), (MATMUL, matmul_attention)):
    AttentionInterface.register(_name, _attention)
    # Without a mask function under the same name, transformers silently hands `mask=None` to the attention.
    AttentionMaskInterface.register(_name, sdpa_mask)


def check_attention(name: str | None) -> str:
    """Return the attention implementation to run with: None = specdec's own, else one of transformers' names.

    Raises SpecdecError for kernels that take no 4D mask (flash-attention 2 ignores or rejects it).
    """
    if name is None:
        return RAGGED
    if name not in SUPPORTED:
        raise SpecdecError(
            f"attn_implementation={name!r} is not supported: a ragged batch needs a 4D mask; use one of {SUPPORTED}"
        )
    return name


def fastest(device_type: str, queries: int, kv_len: int, compiled: bool = False) -> str:
    """Return the faster of specdec's own two. queries: folded queries per K/V head, all rows together.

    The fused kernel splits the queries among a GPU's processors, but not the keys: few queries on long texts leave most
    of them idle. With many queries the scores, which the products write and read again, are large. Compiled code fuses
    the softmax with what surrounds it, so that there products are faster on short texts too. Measured on an H100 and an
    H200 (docs/speed.md). A rule and not a trial, because in half precision another choice is another text.
    """
    return MATMUL if device_type == "cuda" and (compiled or kv_len >= 2048) and queries <= 128 else RAGGED


def _groups(config: Any) -> int:
    """Return how many query heads share a key and value in most layers: masks are folded for these."""
    found = []
    for layer in layer_configs(config):
        heads, kv_heads = attention_heads(layer)
        # With latent attention every head has its own key: nothing to fold.
        found.append(1 if getattr(layer, "kv_lora_rank", None) else heads // kv_heads)
    return max(set(found), key=found.count)


class MaskBuilder:
    """Builds the masks that a model wants: one tensor, or one per layer type for models that mix windows.

    A single tensor would silently un-window the sliding layers of a model with `layer_types`, so such models get the
    dictionary that they expect.
    """

    def __init__(self, config: Any, implementation: str, dtype: torch.dtype):
        self.additive = implementation != "sdpa"  # a boolean mask given to eager would be silently wrong
        self.dtype = dtype
        self.groups = _groups(config) if implementation in FOLDED else 1
        layer_types = set(getattr(config, "layer_types", None) or ())
        window = field_of(config, "sliding_window")
        if getattr(config, "use_sliding_window", True) is False:
            window = None
        self.window: int | None = window
        self.slopes: Tensor | None = None  # [H]: the bias by distance is a part of the mask (models/alibi.py)
        self.per_type = "sliding_attention" in layer_types
        self.sliding_only = not layer_types and window is not None
        self.maskless = dict.fromkeys(layer_types & KEYLESS)  # models that ask for a mask by kind ask for these too

    def __call__(self, positions: Tensor, kv_len: int, tree: TreePass | None = None) -> Mask:
        """Build masks [B, 1, G * S, kv_len], G = 1 unless folded.

        positions [B, S]: of the queries, 0 for padding
        tree: rows of the pass hold trees, whose nodes see their ancestors only
        """
        if tree is not None:
            age, full = (t[:, None] for t in tree.look(positions, kv_len, self.groups))  # [B, 1, G * S, kv_len]
        else:
            if self.groups > 1:
                positions = positions.repeat(1, self.groups)
            age = positions[:, None, :, None] - torch.arange(kv_len, device=positions.device)
            full = age >= 0
        if self.slopes is not None:
            bias = -self.slopes[:, None, None] * age.float()  # [B, H, S, kv_len]
            return bias.masked_fill(~full, torch.finfo(torch.float32).min)
        if not (self.per_type or self.sliding_only):
            return self._finish(full)
        assert self.window is not None
        sliding = full & (age < self.window)
        if self.sliding_only:
            return self._finish(sliding)
        return {"full_attention": self._finish(full), "sliding_attention": self._finish(sliding), **self.maskless}

    def _finish(self, mask: Tensor) -> Tensor:
        if not self.additive:
            return mask
        blocked = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device)
        return blocked.masked_fill(~mask, torch.finfo(self.dtype).min)


class AttentionSwitch:
    """Switches a model to inference for one pass and back: its attention choice and its training flags.

    The choice lives in the caller's config objects, so it changes for the pass only: a generator that is suspended
    between passes leaves the caller's model unchanged.
    """

    def __init__(self, model: nn.Module, implementation: str):
        self.model = model
        self.implementation = implementation
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        self.configs = [c for c in configs.values() if hasattr(c, "_attn_implementation_internal")]

    @contextmanager
    def on(self, implementation: str | None = None) -> Iterator[None]:
        """Switch, to `implementation` if one is named; it must take the same masks."""
        before = [config._attn_implementation_internal for config in self.configs]
        training = [m for m in self.model.modules() if m.training] if self.model.training else []
        for module in training:
            module.training = False
        # The private name: the public setter walks into sub-configs and would touch more than it restores.
        for config in self.configs:
            config._attn_implementation_internal = implementation or self.implementation
        try:
            yield
        finally:
            for config, value in zip(self.configs, before, strict=True):
                config._attn_implementation_internal = value
            for module in training:
                module.training = True
