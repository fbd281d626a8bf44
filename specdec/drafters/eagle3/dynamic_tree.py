"""The head's passes over the levels of a growing tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.drafters.best_tree import Frontier, Levels
from specdec.drafters.eagle3.head import EagleHead
from specdec.models.attention import MaskBuilder
from specdec.models.kv_cache import RaggedCache


class TreePasses:
    """The head's passes over the levels of growing trees: `evaluate` of `grow`.

    The fed nodes of a level lie in the slots after a row's entries, level by level, and at the position of the last
    entry + level.
    """

    def __init__(self, head: EagleHead, masks: MaskBuilder, cache: RaggedCache, widths: Sequence[int], kv_len: int):
        """widths: fed nodes of each level; kv_len: slots that passes read, entries + sum(widths) of the longest row, or
        more."""
        self.head, self.masks, self.cache, self.widths, self.kv_len = head, masks, cache, widths, kv_len

    def start(self, features: Tensor, entries: Tensor) -> None:
        """Begin after each row's last entry. features: the head's output there, [B, H]; entries: how many entries the
        cache holds of each row, int64 [B]; 0 = the row takes no part."""
        self.real, self.last = entries > 0, (entries - 1).clamp(min=0)
        self.features = features[:, None]
        self.levels = Levels(self.last, self.real, self.widths)

    def __call__(self, level: int, frontier: Frontier) -> Tensor:
        logits = self.feed(level, self.head.to_target(frontier.tokens), frontier.origin)
        return logits.float().log_softmax(dim=-1)

    def over_target(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Map logits [..., V_d] to the target's ids."""
        return self.head.over_target(logits, vocab_size, float("-inf"))

    def feed(self, level: int, tokens: Tensor, origin: Tensor) -> Tensor:
        """Feed nodes of a level, 1 = children of the newest token: the target's ids [B, K], and the place of each one's
        parent among the nodes that were fed before [B, K]. Returns logits [B, K, V_d]."""
        head = self.head
        tree = self.levels.feed(origin)
        features = self.features.gather(1, origin[..., None].expand(-1, -1, self.features.shape[-1]))
        slots = torch.where(self.real[:, None], self.last[:, None] + tree.offsets, self.cache.capacity)
        positions = torch.where(self.real, self.last + level, 0)[:, None].expand_as(slots)
        mask = self.masks(positions, self.kv_len, tree)
        assert isinstance(mask, Tensor)
        self.cache.aim(slots, slice(0, len(slots)), self.kv_len)
        logits, self.features = head(head.embed(tokens), features, positions, mask, self.cache, observed=False)
        return logits
