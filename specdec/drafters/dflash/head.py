"""The DFlash head: its forward pass over the library's cache.

A *feature* of a token is made of the target's states there, `hidden_norm(fc(states))`. It is the same for all layers:
each projects its own keys and values from it. The *block* is the embedding of the newest token and of `block_size` - 1
mask tokens, at the positions that follow the text; its tokens see all features and one another, in both directions, and
the i-th mask predicts the token at its own position. Embedding and language-model head are the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.drafters.eagle3.config import HeadConfig
from specdec.drafters.eagle3.head import EagleHead, HeadAttention, HeadMLP, RMSNorm, Rotation, rotated
from specdec.models.attention import ragged_attention
from specdec.models.kv_cache import RaggedCache


@dataclass(frozen=True)
class BlockConfig(HeadConfig):
    """What a DFlash head's forward pass depends on.

    block_size: tokens of a block, the newest included
    mask: the id whose embedding stands for a token to predict
    """

    strategy = "dflash"
    block_size: int = 2
    mask: int = 0


class BlockAttention(HeadAttention):
    """Attends from the block to features and block, over the aimed slots of a cache: features first, then the block."""

    def forward(  # type: ignore[override]
        self, x: Tensor | None, features: Tensor, rotation: Rotation, mask: Tensor | None, cache: RaggedCache
    ) -> Tensor | None:
        """x [B, S, H], features [B, C, H] -> [B, S, H]; x None: features only enter the cache."""
        source = features if x is None else torch.cat([features, x], dim=1)
        key = rotated(self.heads(self.k_proj(source), self.k_norm), rotation)
        key, value = cache.update(key, self.heads(self.v_proj(source)), self.index)
        if x is None:
            return None
        of_block = rotation[0][:, :, -x.shape[1] :], rotation[1][:, :, -x.shape[1] :]
        query = rotated(self.heads(self.q_proj(x), self.q_norm), of_block)
        out, _ = ragged_attention(self, query, key, value, mask, self.head_dim**-0.5)
        return self.o_proj(out.flatten(2))


class BlockLayer(nn.Module):
    def __init__(self, config: HeadConfig, index: int):
        super().__init__()
        self.self_attn = BlockAttention(config, index, config.hidden_size)
        self.mlp = HeadMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor | None, features: Tensor, rotation: Rotation, mask: Tensor | None, cache: RaggedCache
    ) -> Tensor | None:
        inner = None if x is None else self.input_layernorm(x)
        out = self.self_attn(inner, features, rotation, mask, cache)
        if x is None:
            return None
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockHead(EagleHead):
    """A DFlash head, with EAGLE's tables, rotation and projection of states."""

    config: BlockConfig

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(BlockLayer(config, i) for i in range(config.num_hidden_layers))
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def project(self, states: Tensor) -> Tensor:
        out: Tensor = self.hidden_norm(super().project(states))
        return out

    def block(
        self, newest: Tensor | None, features: Tensor, positions: Tensor, mask: Tensor | None, cache: RaggedCache
    ) -> Tensor | None:
        """Return the logits [B, S - 1, V] after the newest tokens [B]; None: only put features into the cache.

        features [B, C, H]: new ones; positions [B, C + S]: theirs and the block's; mask [B, 1, S, L], True = attend
        """
        x = None
        if newest is not None:
            ids = torch.full((len(newest), self.config.block_size), self.config.mask, device=newest.device)
            ids[:, 0] = newest
            x = self.embed(ids).to(features.dtype)
        rotation = self.rotation(positions, features.dtype)
        for layer in self.layers:
            x = layer(x, features, rotation, mask, cache)
        assert self.norm is not None
        return None if x is None else self.logits(self.norm(x[:, 1:]))
