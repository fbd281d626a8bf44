"""What strategies share whose head drafts chains alone, over EAGLE's rows and cache (mtp, dflash)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from specdec.drafters.base import pad_vocabulary
from specdec.drafters.eagle3.strategy import Eagle3
from specdec.drafters.options import check_effects, check_options


class TargetHead:
    """A head that is a part of the target, beside which it stays; its tables are the target's."""

    borrowed: Mapping[str, Any]

    def to(self, device: Any, dtype: Any = None) -> Any:
        return self

    def borrow(self, embedding: Any, lm_head: Any) -> Any:
        """Note the target's tables, whose addresses recorded functions know."""
        self.borrowed = {"embedding": embedding, "lm_head": lm_head}
        return self

    def project(self, states: Tensor) -> Tensor:
        return states

    def over_target(self, logits: Tensor, vocab_size: int, fill: float = 0.0) -> Tensor:
        """Fit logits [..., V'] to the target's vocabulary [..., vocab_size]; `fill` is -inf, as for all logits."""
        return pad_vocabulary(logits, vocab_size)


@dataclass
class ChainHead(Eagle3):
    """EAGLE's strategy without its options for trees and for reading files."""

    nodes: int = field(init=False, default=0)
    top_k: int = field(init=False, default=1)
    depth: int = field(init=False, default=0)
    tree: Any = field(init=False, default=None)
    config: Mapping[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        check_options(self)
        check_effects(self, strict=False)
        self._pools = {}

    @classmethod
    def without_effect(cls, options: Mapping[str, Any]) -> Mapping[str, str]:
        return {}
