"""The EAGLE head: a small transformer on top of the target's states, over the library's own ragged cache.

Entry j of a text stands for (the target's states of token j, the embedding of token j + 1) and predicts token j + 2.
Its position, and its slot in the cache, is j. Drafted tokens go on from the head's own output instead of states.

Nothing here reads a value on the host: passes can be recorded. Where keys and values go is said with
`RaggedCache.aim` before the pass, as for any model; what an entry sees is its mask's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec.drafters.eagle3.config import HeadConfig
from specdec.errors import SpecdecError
from specdec.models.attention import ragged_attention
from specdec.models.kv_cache import RaggedCache

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [B, 1, S, D']


@runtime_checkable
class Attends(Protocol):
    """Keys and values that are no cache and attend by themselves: those of training (training/eagle3.py)."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, index: int) -> Tensor:
        """query [B, heads, S, D], key and value of the same entries -> [B, S, heads, D]."""


Cache = RaggedCache | Attends | None


class RMSNorm(nn.Module):
    """Scale by the root mean square, computed in float32, or in float64 for a head of that type."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


def rope_frequencies(config: HeadConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [D' / 2] and the factor of cosines and sines. Raises SpecdecError for types of rope whose
    frequencies depend on the length of the text."""
    kind = config.rope["rope_type"]
    if kind == "default":
        width = int(config.head_dim * config.rope.get("partial_rotary_factor", 1.0))
        return config.rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float32) / width), 1.0
    known = sorted({"default", *ROPE_INIT_FUNCTIONS} - {"dynamic", "longrope"})
    if kind not in known:
        raise SpecdecError(
            f"{config.strategy}: heads with rope_type {kind!r} are not supported: {', '.join(known)} are"
        )
    try:
        carrier = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope),
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](carrier, torch.device("cpu"))
    except (KeyError, TypeError, ValueError) as error:
        said = error.args[0] if error.args else repr(error)
        raise SpecdecError(
            f"{config.strategy}: rope_type {kind!r} cannot be set up: {said}; complete config.json"
        ) from None
    return frequencies, float(factor)


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first D' numbers of each head, halves against each other; x [B, heads, S, D]."""
    cosines, sines = rotation
    turned, rest = x.split([cosines.shape[-1], x.shape[-1] - cosines.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosines + torch.cat([-second, first], dim=-1) * sines
    return torch.cat([turned, rest], dim=-1)


class HeadAttention(nn.Module):
    """Grouped-query attention over the aimed slots of a cache, or over the pass itself."""

    def __init__(self, config: HeadConfig, index: int, width: int):
        super().__init__()
        self.index, self.head_dim = index, config.head_dim
        inner, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = _linear(config, "q_proj", width, inner)
        self.k_proj = _linear(config, "k_proj", width, kv)
        self.v_proj = _linear(config, "v_proj", width, kv)
        self.o_proj = _linear(config, "o_proj", inner, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def heads(self, y: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """Split y [B, S, heads * D] into [B, heads, S, D], normed where there is a norm."""
        y = y.unflatten(-1, (-1, self.head_dim))
        return (y if norm is None else norm(y)).transpose(1, 2)

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None, cache: Cache) -> Tensor:
        query = rotated(self.heads(self.q_proj(x), self.q_norm), rotation)
        key = rotated(self.heads(self.k_proj(x), self.k_norm), rotation)
        value = self.heads(self.v_proj(x))
        if isinstance(cache, Attends):
            return self.o_proj(cache.attend(query, key, value, self.index).flatten(2))
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        out, _ = ragged_attention(self, query, key, value, mask, self.head_dim**-0.5)
        return self.o_proj(out.flatten(2))


class HeadMLP(nn.Module):
    def __init__(self, config: HeadConfig):
        super().__init__()
        self.gate_proj = _linear(config, "gate_proj", config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config, "up_proj", config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(config, "down_proj", config.intermediate_size, config.hidden_size)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class HeadLayer(nn.Module):
    """A decoder layer. The first one of EAGLE-3 attends from embedding and feature side by side; the first one of
    EAGLE-1 and EAGLE-2 has no norm before its attention; all others are ordinary."""

    def __init__(self, config: HeadConfig, index: int):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.takes_embeddings = index == 0 and config.version == 3
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = HeadAttention(config, index, 2 * hidden if self.takes_embeddings else hidden)
        self.mlp = HeadMLP(config)
        self.input_layernorm = None if index == 0 and config.version != 3 else RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps) if self.takes_embeddings else None
        self.post_attention_layernorm = RMSNorm(hidden, eps)

    def forward(self, x: Tensor, embeddings: Tensor, rotation: Rotation, mask: Tensor | None, cache: Cache) -> Tensor:
        residual, inner = x, x
        if self.hidden_norm is not None:
            assert self.input_layernorm is not None
            normed = self.hidden_norm(x)
            residual = normed if self.norm_before_residual else x
            inner = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        elif self.input_layernorm is not None:
            inner = self.input_layernorm(x)
        x = residual + self.self_attn(inner, rotation, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """A head of EAGLE-1, EAGLE-2 or EAGLE-3. Parameters are named as speculators names them.

    d2t: target id minus draft id, int64 [V_d], or None where both vocabularies are the same.
    """

    d2t: Tensor | None
    frequencies: Tensor

    def __init__(self, config: HeadConfig, d2t: Tensor | None = None):
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        width = config.observed_size if config.version == 3 else hidden + config.target_hidden_size
        self.input_norm = RMSNorm(width, eps) if config.norm_before_fc else None
        self.fc_norm: nn.ModuleList | None = None
        if config.fc_norm:
            norms = [RMSNorm(config.target_hidden_size, eps) for _ in range(config.observed)]
            self.fc_norm = nn.ModuleList(norms)
        self.fc = _linear(config, "fc", width, hidden)
        self.layers = nn.ModuleList(HeadLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps) if config.final_norm else None
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if config.own_embedding else None
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False) if config.own_lm_head else None
        self.borrowed: dict[str, nn.Module | None] = {}  # a plain mapping, so that they are no submodules
        with torch.device("cpu"):  # also where the parameters are made on the meta device, to be filled later
            frequencies, self.rope_factor = rope_frequencies(config)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("d2t", d2t, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EagleHead:
        """As `nn.Module` has it, but frequencies stay in float32 when the head goes to half precision."""
        frequencies = self.frequencies
        super()._apply(fn, recurse)
        self.frequencies = frequencies.to(self.frequencies.device)
        return self

    def borrow(self, embedding: nn.Module | None, lm_head: nn.Module | None) -> EagleHead:
        """Use the target's tables where the head has none of its own. Raises SpecdecError where one is needed and not
        given."""
        self.borrowed = {"embedding": embedding, "lm_head": lm_head}
        if self.embed_tokens is None and embedding is None:
            raise SpecdecError(
                f"{self.config.strategy}: the head has no embed_tokens; give it the target's input embeddings"
            )
        tied_to_own = self.config.tied and self.embed_tokens is not None
        if self.lm_head is None and lm_head is None and not tied_to_own:
            raise SpecdecError(
                f"{self.config.strategy}: the head has no lm_head; give it the target's output embeddings"
            )
        return self

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., H] of target ids."""
        table = self.embed_tokens or self.borrowed.get("embedding")
        assert table is not None
        out: Tensor = table(ids)
        return out

    def project(self, states: Tensor) -> Tensor:
        """Features [B, S, H] from the observed states [B, S, 3 * H_t]; EAGLE-1 and EAGLE-2 take the state as it is."""
        states = states.to(self.fc.weight.dtype)
        if self.config.version != 3:
            return states
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(self.config.observed, dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        out: Tensor = self.fc(states)
        return out

    def forward(
        self,
        embeddings: Tensor,
        states: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: Cache = None,
        observed: bool | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draft logits [B, S, V_d], and the features [B, S, H] that the next draft step goes on from.

        embeddings: of each entry's token, [B, S, H]
        states: observed states [B, S, 3 * H_t], or features that this head returned [B, S, H]
        positions: int64 [B, S]
        mask: what each entry sees, [B, 1, S, L] (additive, or bool with True = attend), or as `MaskBuilder` folds it
        cache: aimed at the slots of these entries; None = entries see only one another; or what attends itself
        observed: which of the two `states` are; None = by their width. A target with 3 * H_t == H needs it.
        """
        if observed is None:
            observed = self._are_observed(states)
        x = self.project(states) if observed else states.to(self.fc.weight.dtype)
        embeddings = embeddings.to(x.dtype)
        if self.config.version != 3:
            x = self.fc(torch.cat([embeddings, x], dim=-1))
        rotation = self.rotation(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, embeddings, rotation, mask, cache)
        normed = x if self.norm is None else self.norm(x)
        return self.logits(normed), normed if self.config.norm_output else x

    def logits(self, normed: Tensor) -> Tensor:
        """Draft logits [..., V_d] of what the last norm returned."""
        if self.lm_head is not None:
            return self.lm_head(normed)
        if self.config.tied and self.embed_tokens is not None:
            return F.linear(normed, self.embed_tokens.weight)
        table = self.borrowed["lm_head"]
        assert table is not None
        weight = getattr(table, "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point():  # the target may have another dtype
            normed = normed.to(weight.dtype)
        out: Tensor = table(normed)
        return out

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Cosines and sines of positions [B, S]."""
        angles = positions[:, None, :, None].float() * self.frequencies.float()
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.rope_factor).to(dtype), (angles.sin() * self.rope_factor).to(dtype)

    def to_target(self, ids: Tensor) -> Tensor:
        """The target's ids of draft ids."""
        return ids if self.d2t is None else ids + self.d2t[ids]

    def over_target(self, values: Tensor, vocab_size: int, fill: float = 0.0) -> Tensor:
        """Spread values [..., V_d] over the target's vocabulary [..., vocab_size]; ids without a draft id get `fill`:
        0 for probabilities, -inf for logits. Ids from `vocab_size` on are left out: spread logits, not probabilities,
        where there are such ids."""
        wide = max(vocab_size, self.config.vocab_size)
        ids = self.to_target(torch.arange(values.shape[-1], device=values.device))
        out = values.new_full((*values.shape[:-1], wide), fill).index_copy(-1, ids, values)
        return out[..., :vocab_size]

    def _are_observed(self, states: Tensor) -> bool:
        """Whether states are the target's, judged by their width."""
        given, config = states.shape[-1], self.config
        known = {config.hidden_size} if config.version != 3 else {config.hidden_size, config.observed_size}
        if given not in known:
            raise SpecdecError(
                f"eagle3: states have the width {given}, and the head takes {' or '.join(map(str, sorted(known)))}; "
                "observe the layers that it was trained on, in its own target"
            )
        if config.version == 3 and len(known) == 1:
            raise SpecdecError("eagle3: observed states and features have one width here; say which `states` are")
        return given != config.hidden_size


def _linear(config: HeadConfig, name: str, inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=name in config.biases)
