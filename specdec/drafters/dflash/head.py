"""The DFlash head: its forward pass over the library's cache, and its files as z-lab publishes them.

A *feature* of a token is made of the target's states there, `hidden_norm(fc(states))`. It is the same for all layers:
each projects its own keys and values from it. The *block* is the embedding of the newest token and of `block_size` - 1
mask tokens, at the positions that follow the text; its tokens see all features and one another, in both directions, and
the i-th mask predicts the token at its own position. Embedding and language-model head are the target's.

Files: `config.json` of Qwen3's fields with `block_size`, `num_target_layers` and `dflash_config` (`target_layer_ids`:
outputs of blocks, counted from 0; `mask_token_id`), and tensors `fc`, `hidden_norm`, `norm` and `layers.N` as in Qwen3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from specdec.drafters.eagle3.config import HeadConfig
from specdec.drafters.eagle3.head import EagleHead, HeadAttention, HeadMLP, RMSNorm, Rotation, rotated
from specdec.drafters.eagle3.weights import read_folder
from specdec.errors import SpecdecError
from specdec.files.forms import INTEGER, check, whole
from specdec.models.attention import ragged_attention
from specdec.models.kv_cache import RaggedCache


class BlockConfig(HeadConfig):
    """What a DFlash head's forward pass depends on."""

    strategy = "dflash"


class BlockAttention(HeadAttention):
    """Attends from the block to features and block, over the aimed slots of a cache: features first, then the block."""

    def forward(  # type: ignore[override]
        self, x: Tensor | None, features: Tensor, rotation: Rotation, mask: Tensor | None, cache: RaggedCache
    ) -> Tensor | None:
        """x [B, S, H], features [B, C, H] -> [B, S, H]; x None: features only enter the cache."""

        def heads(y: Tensor, norm: nn.Module | None = None) -> Tensor:
            y = y.unflatten(-1, (-1, self.head_dim))
            return (y if norm is None else norm(y)).transpose(1, 2)  # [B, heads, S, D]

        source = features if x is None else torch.cat([features, x], dim=1)
        key = rotated(heads(self.k_proj(source), self.k_norm), rotation)
        key, value = cache.update(key, heads(self.v_proj(source)), self.index)
        if x is None:
            return None
        of_block = rotation[0][:, :, -x.shape[1] :], rotation[1][:, :, -x.shape[1] :]
        query = rotated(heads(self.q_proj(x), self.q_norm), of_block)
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
    """A DFlash head, with EAGLE's tables, rotation and projection of states.

    block_size: tokens of a block, the newest included
    mask: the id whose embedding stands for a token to predict
    """

    def __init__(self, config: HeadConfig, block_size: int, mask: int):
        super().__init__(config)
        self.block_size, self.mask = block_size, mask
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
            ids = torch.full((len(newest), self.block_size), self.mask, device=newest.device)
            ids[:, 0] = newest
            x = self.embed(ids).to(features.dtype)
        rotation = self.rotation(positions, features.dtype)
        for layer in self.layers:
            x = layer(x, features, rotation, mask, cache)
        assert self.norm is not None
        return None if x is None else self.logits(self.norm(x[:, 1:]))


@dataclass(frozen=True)
class Described:
    """What config.json says of a head."""

    config: HeadConfig
    block_size: int
    mask: int


def describe(given: Mapping[str, Any], mask: int | None = None) -> Described:
    """Read config.json. Raises SpecdecError for what is missing, and for sliding windows."""
    own = given.get("dflash_config") or {}
    check(own, {}, "dflash: config.json: dflash_config")
    check(given, {"block_size": whole(2), "num_target_layers": whole(1)}, "dflash: config.json")
    qwen = Qwen3Config(**{k: v for k, v in given.items() if k not in ("dflash_config", "model_type", "auto_map")})
    if "sliding_attention" in (qwen.layer_types or ()):
        raise SpecdecError("dflash: the head has layers with a sliding window, which are not supported")
    layers = own.get("target_layer_ids") or default_layers(given["num_target_layers"], qwen.num_hidden_layers)
    check({"target_layer_ids": layers}, {"target_layer_ids": [INTEGER]}, "dflash: config.json: dflash_config")
    mask = own.get("mask_token_id") if mask is None else mask
    if not isinstance(mask, int) or not 0 <= mask < qwen.vocab_size:
        raise SpecdecError(
            f"dflash: config.json has the mask_token_id {mask!r}; give the id of the mask token as mask_token_id=ID"
        )
    config = BlockConfig(
        version=3, hidden_size=qwen.hidden_size, intermediate_size=qwen.intermediate_size,
        num_attention_heads=qwen.num_attention_heads, num_key_value_heads=qwen.num_key_value_heads,
        head_dim=qwen.head_dim, vocab_size=qwen.vocab_size, draft_vocab_size=qwen.vocab_size,
        target_hidden_size=qwen.hidden_size, num_hidden_layers=qwen.num_hidden_layers, observed=len(layers),
        layer_ids=tuple(i + 1 for i in layers), rms_norm_eps=qwen.rms_norm_eps, hidden_act=qwen.hidden_act,
        max_position_embeddings=qwen.max_position_embeddings, rope=dict(qwen.rope_parameters), qk_norm=True,
        biases=("q_proj", "k_proj", "v_proj", "o_proj") if qwen.attention_bias else (),
        own_embedding=False, own_lm_head=False,
    )  # fmt: skip
    return Described(config, given["block_size"], mask)


def default_layers(target: int, draft: int) -> list[int]:
    """The observed blocks where the file names none: spread evenly from block 1 to the third from the end."""
    if draft == 1:
        return [target // 2]
    return [round(1 + i * (target - 4) / (draft - 1)) for i in range(draft)]


def load_block_head(source: Any, mask: int | None = None) -> BlockHead:
    """Read a folder. Raises SpecdecError for a head that is damaged or of another kind."""
    given, state = read_folder(source, "dflash")
    described = describe(given, mask)
    state = {name.removeprefix("model."): tensor for name, tensor in state.items() if "rotary_emb" not in name}
    with torch.device("meta"):
        head = BlockHead(described.config, described.block_size, described.mask)
    wanted = {name: list(tensor.shape) for name, tensor in head.state_dict().items()}
    wrong = {n for n in wanted.keys() | state.keys() if n not in state or wanted.get(n) != list(state[n].shape)}
    if wrong:
        raise SpecdecError(
            f"dflash: {source}: {', '.join(sorted(wrong)[:4])} are missing, unknown or of the wrong shape; give "
            "a folder that z-lab's DFlash was saved to"
        )
    head.load_state_dict(state, assign=True)
    return head.eval().requires_grad_(False)
