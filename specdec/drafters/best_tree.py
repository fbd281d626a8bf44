"""Trees of the best nodes by cumulative confidence: EAGLE-2's dynamic tree, and OPT-Tree's greedy choice.

The first level is the `top_k` best tokens after the newest one. Then, `depth` times: the draft evaluates the `top_k`
best nodes of the newest level, each gets its `top_k` best children as *candidates*, and the best of those are
evaluated next. A candidate's score is the sum of log-probabilities along its path. The tree is the best `nodes` of
all candidates, in the order in which they were found: parents come before children, and since a score never rises
along a path, a node's parent is among the best as well. If q were p, the probabilities of the paths would add up to the
tokens that are accepted, so these are the nodes that maximise them (Wang et al. 2024, OPT-Tree; Li et al. 2024,
EAGLE-2). OPT-Tree also stops at a level that adds too little; that would take a host read a level, and is left out.

Such a tree depends on the text alone. Its nodes are best tokens and no samples, so it has no q: among sampled siblings
a choice by confidence would change the distribution of the output.

All is done in tensors of fixed shapes without a look at any value, for a batch of rows at once, so that a whole tree
can be recorded as one function. Among candidates with equal scores the earlier one is kept: a
child that is certain has its parent's score, and must not be kept in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.device.buffers import Buffers
from specdec.drafters.base import MOST_NODES
from specdec.errors import SpecdecError
from specdec.models.trees import TreePass


@dataclass(frozen=True)
class TreeSize:
    """Size of a tree of best nodes; the defaults are EAGLE's published ones.

    top_k: nodes evaluated a level, and children that each gets
    depth: passes after the first level; the tree has at most depth + 1 levels
    nodes: nodes of the tree, without the newest token
    """

    top_k: int = 10
    depth: int = 7
    nodes: int = 59

    def check(self, draft_vocab_size: int, strategy: str = "eagle3") -> None:
        """Raise SpecdecError for a tree that cannot be grown."""
        if self.top_k < 1 or self.depth < 0 or self.nodes < 1:
            raise SpecdecError(f"{strategy}: a tree needs top_k >= 1, depth >= 0 and nodes >= 1, got {self}")
        if self.nodes > MOST_NODES:
            raise SpecdecError(f"{strategy}: more than {MOST_NODES} nodes, which is what a pass verifies")
        if self.top_k > draft_vocab_size:
            raise SpecdecError(
                f"{strategy}: top_k={self.top_k} is more than the {draft_vocab_size} tokens of the draft vocabulary; "
                "lower top_k"
            )
        if self.nodes > self.candidates:
            raise SpecdecError(
                f"{strategy}: {self.depth + 1} levels of {self.top_k} tokens have {self.candidates} candidates, fewer "
                f"than the {self.nodes} nodes wanted; ask for fewer, or for deeper trees"
            )

    @property
    def candidates(self) -> int:
        return self.top_k + self.depth * self.top_k**2

    @property
    def widths(self) -> tuple[int, ...]:
        """How many nodes each pass feeds."""
        return (self.top_k,) * self.depth

    @property
    def slots(self) -> int:
        """Cache slots that growing one tree takes after a row's entries."""
        return sum(self.widths)


@dataclass(frozen=True)
class Tree(Buffers):
    """The trees of all rows.

    tokens: draft ids as grown, int64 [B, N]
    parents: the node that each node follows, -1 = the newest token, int64 [B, N]
    scores: log-probability of each node's path, float32 [B, N]
    curve: probabilities of all paths to a level within the best nodes, summed, float32 [B, levels, sizes]
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    curve: Tensor | None = None


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
        """Return the tree of the best `nodes` candidates."""
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

    def ranked(self, nodes: int, sizes: Sequence[int]) -> Tree:
        """The same tree with its nodes in the order of their scores, so that the best n are the first n; and its curve
        for these sizes."""
        scores, k = torch.cat(self.scores, dim=1), self.top_k
        order = scores.sort(dim=1, descending=True, stable=True).indices
        places = torch.arange(order.shape[1], device=order.device).expand_as(order)
        place = torch.empty_like(order).scatter(1, order, places)  # of each candidate in the order
        chosen = order[:, :nodes]
        parents, best = (torch.cat(self.parents, dim=1).gather(1, chosen), scores.gather(1, chosen))
        level = (chosen - k).div(k * k, rounding_mode="floor") + 1  # 0 for the first `top_k` candidates
        at = level[:, None] == torch.arange(len(self.scores), device=order.device)[:, None]  # [B, levels, nodes]
        sums = torch.where(at, best.exp()[:, None], 0.0).cumsum(-1)
        return Tree(
            torch.cat(self.tokens, dim=1).gather(1, chosen),
            torch.where(parents < 0, -1, place.gather(1, parents.clamp(min=0))),
            best,
            torch.stack([sums[..., min(n, nodes) - 1] for n in sizes], dim=-1),
        )


def _finite(log_probs: Tensor) -> Tensor:
    """Replace NaN by -inf: a broken draft proposes what will be rejected, also in trees."""
    return torch.where(log_probs.isnan(), float("-inf"), log_probs)


def grow(
    log_probs: Tensor, size: TreeSize, evaluate: Callable[[int, Frontier], Tensor], sizes: Sequence[int] = ()
) -> Tree:
    """Grow trees. log_probs: after the newest token, [B, V_d]; `evaluate(level, frontier)` returns those after each
    node of the frontier, [B, K, V_d]; levels count from 1. sizes: number nodes by their scores, with a curve for these
    sizes."""
    candidates = Candidates(log_probs, size)
    for level in range(1, size.depth + 1):
        candidates.extend(evaluate(level, candidates.frontier))
    return candidates.ranked(size.nodes, sizes) if sizes else candidates.best(size.nodes)


class Levels:
    """Where the nodes of a growing tree are, as they are fed level by level into the slots after a row's newest entry.

    last [B]: slot of that entry; real [B]: rows that take part; widths: fed nodes of each level
    """

    def __init__(self, last: Tensor, real: Tensor, widths: Sequence[int]):
        depths = [last.new_full((width,), depth) for depth, width in enumerate((1, *widths))]
        self.last, self.real, self.held = last, real, 1
        self.depths = torch.cat(depths).expand(len(last), -1)
        self.slots = torch.arange(self.depths.shape[1], device=last.device)
        self.sees = real[:, None, None] & (self.slots == 0)

    def feed(self, origin: Tensor, part: Callable[[Any], Any] = lambda function: function) -> TreePass:
        """Describe the pass over the next level.

        origin [B, K]: each node's parent among the nodes fed before
        part: compiles a function of tensors
        """
        offsets = self.slots[self.held : self.held + origin.shape[1]].clone()
        self.held += origin.shape[1]
        self.sees = part(_below)(self.sees, origin, offsets, self.real)
        return TreePass(self.last, offsets.expand(len(self.last), -1), self.depths, self.sees)


def _below(sees: Tensor, origin: Tensor, offsets: Tensor, real: Tensor) -> Tensor:
    """Return what the nodes of a level see, [B, K, R]: what their parents [B, K] do, and themselves at offsets [K]."""
    above = sees.gather(1, origin[..., None].expand(-1, -1, sees.shape[-1]))
    own = offsets[:, None] == torch.arange(sees.shape[-1], device=sees.device)
    return above | (own & real[:, None, None])
