"""What a head's forward pass depends on, in one convention, whatever file it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from specdec.errors import SpecdecError

TAKEN = (  # from a transformers config
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "num_hidden_layers", "rms_norm_eps", "hidden_act", "max_position_embeddings",
)  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class HeadConfig:
    """Describe a head. Fields that transformers' configurations have as well keep their names.

    version: 3, or 1 for heads of EAGLE-1 and EAGLE-2, which differ only in their trees
    head_dim: width of one attention head
    vocab_size: tokens of the target's vocabulary
    draft_vocab_size: tokens that the head can propose
    target_hidden_size: width of one state of the target
    observed: states of the target per token that `fc` takes, concatenated
    layer_ids: where they are taken, as "before block i" = `hidden_states[i]` of transformers, ascending; None = the
        published default for the target's number of blocks
    rope: rope_type, rope_theta and the type's own parameters, as in `rope_parameters` of transformers
    norm_before_residual: the residual of the first layer is the normed feature
    norm_before_fc: one norm over all observed states together
    fc_norm: one norm for each observed state
    norm_output: the normed output is fed back (EAGLE-3.1), else the output before the norm
    final_norm: there is a norm before the language-model head
    qk_norm: queries and keys are normed per head (Qwen3)
    biases: the linear maps that have a bias, by their last name: "fc", "q_proj", ...
    tied: without a language-model head of its own, logits come from the embedding
    own_embedding, own_lm_head: the head has its own tables; else it uses the target's
    """

    version: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    num_hidden_layers: int = 1
    observed: int = 3
    layer_ids: tuple[int, ...] | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rope: Mapping[str, Any] = field(default_factory=lambda: dict(ROPE))
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    final_norm: bool = True
    qk_norm: bool = False
    biases: tuple[str, ...] = ()
    tied: bool = False
    own_embedding: bool = True
    own_lm_head: bool = True
    strategy: ClassVar[str] = "eagle3"  # whose head it is, for messages

    @classmethod
    def of(cls, config: Any, **own: Any) -> Self:
        """Describe a head of the target's vocabulary, width and tables by its own transformers config; own: other
        fields."""
        taken = {name: value for name in TAKEN if (value := getattr(config, name, None)) is not None}
        taken.setdefault("head_dim", config.hidden_size // config.num_attention_heads)
        taken |= {"draft_vocab_size": config.vocab_size, "target_hidden_size": config.hidden_size}
        return cls(**{**taken, "own_embedding": False, "own_lm_head": False, **own})

    @property
    def observed_size(self) -> int:
        """Width of the observed states of one token, concatenated."""
        return self.observed * self.target_hidden_size

    def observed_layers(self, blocks: int) -> tuple[int, ...]:
        """The indices into `hidden_states` of a target of so many blocks. Raises SpecdecError if it is too small.

        EAGLE-1 and EAGLE-2 observe the last of them, which transformers returns after the final norm.
        """
        if self.version != 3:
            return (blocks,)
        ids = default_layer_ids(blocks) if self.layer_ids is None else self.layer_ids
        if not 0 <= min(ids) <= max(ids) <= blocks or list(ids) != sorted(set(ids)):
            given = "the default layers" if self.layer_ids is None else "the layers"
            raise SpecdecError(
                f"{self.strategy}: {given} {list(ids)} cannot be observed in a target of {blocks} blocks; the head may "
                f"belong to another target; if it is this one's, give layer_ids that ascend from 0 to at most "
                f"{blocks - 1}"
            )
        return ids


def default_layer_ids(blocks: int) -> tuple[int, int, int]:
    """The layers that published heads observe where nothing is said."""
    return 2, blocks // 2, blocks - 3
