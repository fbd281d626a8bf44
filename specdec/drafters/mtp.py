"""mtp: the target's own layer for multi-token prediction, which transformers loads for `generate(use_mtp=True)`.

Source: DeepSeek-V3 (2024), section 2.2; transformers' `MtpModel`. The layer's entry j takes the target's last state of
token j and the embedding of token j + 1, at position j + 1, and predicts token j + 2: the same entries as an EAGLE
head's, so rows, cache, sampling and q are EAGLE's (eagle3/). transformers drafts one token a layer. Here `n_max` > 1
runs the one layer again on its own output, as serving engines do. Targets with more layers than one are refused.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from specdec.drafters.base import DraftContext
from specdec.drafters.eagle3.chain_head import ChainHead, TargetHead
from specdec.drafters.eagle3.config import HeadConfig
from specdec.drafters.eagle3.strategy import Eagle3
from specdec.drafters.options import whole
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


class MtpHead(TargetHead):
    """A layer of transformers' with the parts of an EAGLE head that rows and strategy use."""

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
        self.config = MtpConfig.of(config, version=1, num_hidden_layers=1, observed=1)

    def embed(self, ids: Tensor) -> Tensor:
        out: Tensor = self.model.embed_tokens(ids)
        return out

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
class Mtp(ChainHead):
    """Drafts with the target's layer for MTP. Raises SpecdecError for targets without one.

    head: transformers' `MtpModel` of the target; None = read from the folder or hub id that the target was loaded from
    n_max: most tokens to propose
    """

    n_max: int = whole(1)
    name: str = field(init=False, default="mtp")
    likely_causes = "Look at the target: was it loaded from the checkpoint that its layer for MTP was trained in?"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is not None and not isinstance(self.head, mtp_model()):
            raise SpecdecError(f"mtp: head must be transformers' MtpModel, got {type(self.head).__name__}")
        self._read_for: Any = None  # the target that the head belongs to

    def fresh(self, context: DraftContext) -> Eagle3:
        target = context.target_of("mtp").model
        if self._read_for is not target:
            self._head = MtpHead(self.head or read_layer(target))  # type: ignore[assignment]
            self._read_for = target
        return super().fresh(context)


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
