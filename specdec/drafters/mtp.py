"""mtp: the target's own layer for multi-token prediction, which transformers loads for `generate(use_mtp=True)`.

Source: DeepSeek-V3 (2024), section 2.2; transformers' `MtpModel`. The layer's entry j takes the target's last state of
token j and the embedding of token j + 1, at position j + 1, and predicts token j + 2: the same entries as an EAGLE
head's, so rows, cache, sampling and q are EAGLE's (eagle3/). transformers drafts one token a layer. Here `n_max` > 1
runs the one layer again on its own output, as serving engines do. Targets with more layers than one are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.config import check_whole
from specdec.drafters.base import DraftContext
from specdec.drafters.eagle3.config import HeadConfig
from specdec.drafters.eagle3.strategy import Eagle3
from specdec.errors import SpecdecError
from specdec.files.texts import first_line
from specdec.models.attention import RAGGED
from specdec.models.kv_cache import RaggedCache
from specdec.models.view import ModelView

if TYPE_CHECKING:
    from transformers.modeling_layers import MtpModel


class MtpConfig(HeadConfig):
    """The shape of a layer for MTP."""

    strategy = "mtp"


class MtpHead:
    """A layer of transformers' with the parts of an EAGLE head that rows and strategy use. Tables are the target's."""

    def __init__(self, model: MtpModel):
        config: Any = model.config
        if len(model.layers) != 1:
            raise SpecdecError(f"mtp: the target has {len(model.layers)} layers for MTP; only one is supported")
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise SpecdecError("mtp: the target's layer for MTP has a sliding window, which is not supported")
        self.model = ModelView(model, RAGGED).model
        self.fc = self.model.layers[0].eh_proj
        # transformers renamed it after 5.17.
        named = inspect.signature(type(self.model.layers[0]).forward).parameters
        self.cache_name = "cache" if "cache" in named else "past_key_values"
        self.borrowed: dict[str, Any] = {}
        self.config = MtpConfig(
            version=1, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocab_size=config.vocab_size, draft_vocab_size=config.vocab_size, target_hidden_size=config.hidden_size,
            observed=1, own_embedding=False, own_lm_head=False,
        )  # fmt: skip

    def to(self, device: Any, dtype: Any = None) -> MtpHead:
        """Stay where the layer was loaded: beside the target, whose tables it shares."""
        return self

    def borrow(self, embedding: Any, lm_head: Any) -> MtpHead:
        """Note the target's tables, whose addresses recorded functions know."""
        self.borrowed = {"embedding": embedding, "lm_head": lm_head}
        return self

    def project(self, states: Tensor) -> Tensor:
        return states

    def embed(self, ids: Tensor) -> Tensor:
        out: Tensor = self.model.embed_tokens(ids)
        return out

    def over_target(self, values: Tensor, vocab_size: int, fill: float = 0.0) -> Tensor:
        """Fit values [..., V'] to the target's vocabulary [..., vocab_size]."""
        missing = vocab_size - values.shape[-1]
        return values[..., :vocab_size] if missing <= 0 else torch.nn.functional.pad(values, (0, missing), value=fill)

    def __call__(
        self, embeddings: Tensor, states: Tensor, positions: Tensor, mask: Tensor, cache: RaggedCache,
        observed: bool | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return logits [B, S, V] and features [B, S, H], as `EagleHead` does."""
        model, at = self.model, positions + 1
        rotary = model.rotary_emb
        rotation = None if rotary is None else rotary(embeddings, position_ids=at)
        out = model.layers[0](
            embeddings, states, position_embeddings=rotation, attention_mask=mask, position_ids=at,
            **{self.cache_name: cache},
        )  # fmt: skip
        out = model.shared_post_norm(out) if model.use_shared_post_norm else out
        return model._project_to_logits(out), out


@dataclass
class Mtp(Eagle3):
    """Drafts with the target's layer for MTP. Raises SpecdecError for targets without one.

    head: transformers' `MtpModel` of the target; None = read from the folder or hub id that the target was loaded from
    n_max: most tokens to propose
    """

    n_max: int = 1
    nodes: int = field(init=False, default=0)
    top_k: int = field(init=False, default=1)
    depth: int = field(init=False, default=0)
    tree: Any = field(init=False, default=None)
    config: Mapping[str, Any] = field(init=False, default_factory=dict)
    name: str = field(init=False, default="mtp")
    likely_causes = "Look at the target: was it loaded from the checkpoint that its layer for MTP was trained in?"

    def __post_init__(self) -> None:
        check_whole("mtp: n_max", self.n_max, 1)
        if self.head is not None and not isinstance(self.head, mtp_model()):
            raise SpecdecError(f"mtp: head must be transformers' MtpModel, got {type(self.head).__name__}")
        self._pools = {}
        self._read_for: Any = None  # the target that the head belongs to

    def fresh(self, context: DraftContext) -> Mtp:
        if context.target is None:
            raise SpecdecError("mtp drafts with a layer of a decoder's target: use it in a SpeculativeDecoder")
        target = context.target.model
        if self._read_for is not target:
            self._head = MtpHead(self.head or read_layer(target))  # type: ignore[assignment]
            self._read_for = target
        made = super().fresh(context)
        assert isinstance(made, Mtp)
        return made


def mtp_model() -> type[MtpModel]:
    """Return transformers' class. Raises SpecdecError for versions that have none."""
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        raise SpecdecError("mtp needs a transformers with MtpModel (5.24 has it): update transformers") from None
    return MtpModel


def read_layer(target: Any) -> MtpModel:
    """Read the layer from where the target was loaded. Raises SpecdecError for targets without one."""
    if not getattr(target.config.get_text_config(), "num_mtp_layers", None):
        raise SpecdecError(f"mtp: {type(target).__name__} has no layer for MTP: its config has no num_mtp_layers")
    made = mtp_model()
    try:
        return made.from_pretrained(target, device_map={"": next(target.parameters()).device})
    except Exception as error:  # whatever transformers, a hub or a damaged file makes of it
        where = target.config.name_or_path
        raise SpecdecError(f"mtp: the layer cannot be read from {where!r}: {first_line(error)}") from None
