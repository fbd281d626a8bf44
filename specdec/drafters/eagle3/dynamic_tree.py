"""EAGLE-2's dynamic tree: expand by confidence, then keep the best nodes of all that were seen.

The first level is the `top_k` best tokens after the newest one. Then, `depth` times: the head evaluates the `top_k`
best nodes of the newest level, each gets its `top_k` best children as *candidates*, and the best of those are
evaluated next. A candidate's score is the sum of log-probabilities along its path. The tree is the best `nodes` of
all candidates, in the order in which they were found: parents come before children, and since a score never rises
along a path, a node's parent is among the best as well.

All is done in tensors of fixed shapes without a look at any value, for a batch of rows at once, so that a whole tree
can be recorded as one function. Of candidates with equal scores the earlier is kept: a child that is certain has its
parent's score, and must not be kept in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.device.buffers import Buffers
from specdec.drafters.eagle3.head import EagleHead
from specdec.errors import SpecdecError
from specdec.models.attention import MaskBuilder
from specdec.models.kv_cache import RaggedCache
from specdec.models.trees import TreePass


@dataclass(frozen=True)
class TreeSize:
    """Size of a dynamic tree; the defaults are the published ones.

    top_k: nodes evaluated a level, and children that each gets
    depth: passes of the head after the first level; the tree has at most depth + 1 levels
    nodes: nodes of the tree, without the newest token
    """

    top_k: int = 10
    depth: int = 7
    nodes: int = 59

    def check(self, draft_vocab_size: int) -> None:
        """Raise SpecdecError for a tree that cannot be grown."""
        if self.top_k < 1 or self.depth < 0 or self.nodes < 1:
            raise SpecdecError(f"eagle3: a tree needs top_k >= 1, depth >= 0 and nodes >= 1, got {self}")
        if self.top_k > draft_vocab_size:
            raise SpecdecError(
                f"eagle3: top_k={self.top_k} is more than the {draft_vocab_size} tokens of the draft vocabulary; "
                "lower top_k"
            )
        if self.nodes > self.candidates:
            raise SpecdecError(
                f"eagle3: top_k={self.top_k} and depth={self.depth} give {self.candidates} candidates, fewer than "
                f"nodes={self.nodes}; lower nodes, or raise top_k or depth"
            )

    @property
    def candidates(self) -> int:
        return self.top_k + self.depth * self.top_k**2

    @property
    def slots(self) -> int:
        """Cache slots that growing one tree takes after a row's entries."""
        return self.depth * self.top_k


@dataclass(frozen=True)
class Tree(Buffers):
    """The trees of all rows.

    tokens: draft ids as grown, int64 [B, N]
    parents: the node that each node follows, -1 = the newest token, int64 [B, N]
    scores: log-probability of each node's path, float32 [B, N]
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Frontier(Buffers):
    """The nodes that are evaluated next.

    tokens: draft ids, int64 [B, K]
    scores: float32 [B, K]
    index: their numbers among all candidates, int64 [B, K]
    origin: which node of the frontier before each one follows, int64 [B, K]; 0 on the first level
    """

    tokens: Tensor
    scores: Tensor
    index: Tensor
    origin: Tensor


class Candidates:
    """All nodes that were seen while a tree grows, a level after another."""

    def __init__(self, log_probs: Tensor, size: TreeSize):
        """log_probs: after the newest token, float32 [B, V_d]."""
        self.top_k = size.top_k
        scores, tokens = _finite(log_probs).topk(self.top_k)
        index = torch.arange(self.top_k, device=tokens.device).expand_as(tokens)
        self.tokens, self.scores = [tokens], [scores]
        self.parents = [torch.full_like(tokens, -1)]
        self.count = self.top_k
        self.frontier = Frontier(tokens, scores, index, torch.zeros_like(tokens))

    def extend(self, log_probs: Tensor) -> None:
        """Add the children of the frontier, whose log-probabilities are [B, K, V_d], and choose the next one."""
        steps, tokens = _finite(log_probs).topk(self.top_k)  # [B, K, K]
        scores = (self.frontier.scores[..., None] + steps).flatten(1)
        tokens = tokens.flatten(1)
        self.tokens.append(tokens)
        self.scores.append(scores)
        self.parents.append(self.frontier.index.repeat_interleave(self.top_k, dim=1))
        best, picked = scores.topk(self.top_k)
        origin = picked.div(self.top_k, rounding_mode="floor")
        self.frontier = Frontier(tokens.gather(1, picked), best, picked + self.count, origin)
        self.count += self.top_k**2

    def best(self, nodes: int) -> Tree:
        """The tree of the best `nodes` candidates."""
        scores = torch.cat(self.scores, dim=1)
        order = scores.sort(dim=1, descending=True, stable=True).indices
        chosen = order[:, :nodes].sort(dim=1).values
        parents = torch.cat(self.parents, dim=1).gather(1, chosen)
        numbered = torch.searchsorted(chosen, parents)
        return Tree(
            torch.cat(self.tokens, dim=1).gather(1, chosen),
            torch.where(parents < 0, -1, numbered),
            scores.gather(1, chosen),
        )


def _finite(log_probs: Tensor) -> Tensor:
    """Log-probabilities without NaN: a head that is broken proposes what will be rejected, in trees all the same."""
    return torch.where(log_probs.isnan(), float("-inf"), log_probs)


def grow(log_probs: Tensor, size: TreeSize, evaluate: Callable[[int, Frontier], Tensor]) -> Tree:
    """Grow trees. log_probs: after the newest token, [B, V_d]; `evaluate(level, frontier)` returns those after each
    node of the frontier, [B, K, V_d]; levels count from 1."""
    candidates = Candidates(log_probs, size)
    for level in range(1, size.depth + 1):
        candidates.extend(evaluate(level, candidates.frontier))
    return candidates.best(size.nodes)


class TreePasses:
    """The head's passes over the levels of growing trees: `evaluate` of `grow`.

    The nodes of level l lie in the slots after a row's entries, K a level, and at the position of the last entry + l.
    """

    def __init__(self, head: EagleHead, masks: MaskBuilder, cache: RaggedCache, size: TreeSize, kv_len: int):
        """kv_len: slots that passes read; entries + `size.slots` of the longest row, or more."""
        self.head, self.masks, self.cache, self.size, self.kv_len = head, masks, cache, size, kv_len
        self.region = 1 + size.slots

    def start(self, features: Tensor, entries: Tensor) -> None:
        """Begin after each row's last entry. features: the head's output there, [B, H]; entries: how many entries the
        cache holds of each row, int64 [B]; 0 = the row takes no part."""
        self.real, self.last = entries > 0, (entries - 1).clamp(min=0)
        self.features = features[:, None]
        self.sees = self.real[:, None, None].expand(-1, self.size.top_k, 1)
        levels = torch.arange(self.region, device=entries.device).add(self.size.top_k - 1)
        self.depths = levels.div(self.size.top_k, rounding_mode="floor").expand(len(entries), -1)

    def __call__(self, level: int, frontier: Frontier) -> Tensor:
        head, top_k = self.head, self.size.top_k
        if level > 1:
            self.sees = self.sees.gather(1, frontier.origin[..., None].expand(-1, -1, self.sees.shape[-1]))
        own = torch.eye(top_k, dtype=torch.bool, device=self.sees.device) & self.real[:, None, None]
        self.sees = torch.cat([self.sees, own], dim=-1)
        features = self.features.gather(1, frontier.origin[..., None].expand(-1, -1, self.features.shape[-1]))
        offsets = torch.arange(top_k, device=self.last.device) + 1 + (level - 1) * top_k
        slots = torch.where(self.real[:, None], self.last[:, None] + offsets, self.cache.capacity)
        positions = torch.where(self.real, self.last + level, 0)[:, None].expand(-1, top_k)
        seen = torch.nn.functional.pad(self.sees, (0, self.region - self.sees.shape[-1]))
        tree = TreePass(self.last, offsets.expand_as(slots), self.depths, seen)
        mask = self.masks(positions, self.kv_len, tree)
        assert isinstance(mask, Tensor)
        self.cache.aim(slots, slice(0, len(slots)), self.kv_len)
        embeddings = head.embed(head.to_target(frontier.tokens))
        logits, self.features = head(embeddings, features, positions, mask, self.cache, observed=False)
        return logits.float().log_softmax(dim=-1)
