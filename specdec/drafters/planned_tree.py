"""Trees of a fixed shape from a draft model or a head: the best tokens, or samples of its q.

EAGLE-2's dynamic tree keeps the nodes that the head is most confident of, so its siblings cannot be samples: a sample
that is kept or dropped for what it is has another distribution than q. Here the shape is fixed before anything is
sampled (drafters/tree_plan.py), each node's children are sampled from q after the processors of its own path, and q is
handed over, so that `leviathan` tests siblings by recursive rejection.

A level of nodes is one pass. The shape travels as a tensor, and all else is computed on the device without
a look at any value, so a round's trees are recorded as one function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.device.buffers import Buffers
from specdec.device.transfer import array_on, to_device
from specdec.drafters.base import RowSampling, proposal_distribution
from specdec.drafters.siblings import best_children, best_siblings, node_streams, sampled_children
from specdec.drafters.tree_plan import plan_levels
from specdec.models.trees import MISSING, Parents, path_to
from specdec.sampling.processors import Texts
from specdec.sampling.texts import Drafted


class LevelPasses(Protocol):
    """Passes over the levels of growing trees."""

    def over_target(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Map logits [..., V_draft] to the target's ids, [..., vocab_size]; -inf where the draft has no token."""
        ...

    def feed(self, level: int, tokens: Tensor, origin: Tensor) -> Tensor:
        """Feed nodes of a level, 1 = children of the newest token; returns logits [B, K, V_draft].

        tokens [B, K]: the target's ids
        origin [B, K]: the place of each one's parent among the nodes of the level before that were fed
        """
        ...


class TreeKey(NamedTuple):
    """What is fixed in the recorded growth of trees.

    width, kv_len: of the pass that catches up
    shape: a plan's parents, or what the growth goes by
    proposal: of the rule; None = nothing is sampled
    scores: signature of the pipeline to scores
    vocab_size: the target's
    """

    width: int
    kv_len: int
    shape: Any
    proposal: str | None = None
    scores: Any = None
    vocab_size: int = 0


@dataclass(frozen=True)
class PlanShape:
    """A shape, and how it is laid out for the device: of each level the nodes that get children, these nodes' places
    among the nodes fed before, and the places of the new nodes among all children that were proposed."""

    parents: Parents

    @staticmethod
    @lru_cache(256)
    def of(parents: Parents) -> PlanShape:
        """Return the shape of a plan's nodes, laid out once."""
        return PlanShape(parents)

    @cached_property
    def levels(self) -> list[tuple[list[int], list[int], list[int], list[int], int]]:
        """Of each level: nodes, their places in the level before, places of their parents among the fed nodes, picks,
        and the most children of a node."""
        found, first, before = [], 0, 0
        for level in plan_levels(self.parents):
            most = max(level.counts)
            picks = [i * most + j for i, count in enumerate(level.counts) for j in range(count)]
            found.append((list(level.fed), [node - before for node in level.fed], list(level.origin), picks, most))
            before, first = first, first + len(picks)
        return found

    @property
    def widths(self) -> list[int]:
        """How many nodes each pass of the head feeds: those with children, without the newest token."""
        return [len(nodes) for nodes, *_ in self.levels[1:]]

    def table(self, device: torch.device) -> Tensor:
        """All lists of all levels in one row."""
        return to_device([n for *lists, _ in self.levels for numbers in lists for n in numbers], device)

    def split(self, table: Tensor) -> list[tuple[Tensor, ...]]:
        """Take the lists of each level from `table`."""
        sizes = [len(numbers) for *lists, _ in self.levels for numbers in lists]
        ends = list(accumulate(sizes))
        parts = [table[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        return [tuple(parts[i : i + 4]) for i in range(0, len(parts), 4)]

    def paths(self, level: int) -> list[list[int]]:
        """The nodes on the way to each node of a level that gets children, itself included."""
        return [path_to(self.parents, node) for node in self.levels[level][0]]

    def on_path(self, device: torch.device) -> Tensor:
        """True where a node is on the way to another, itself included, or to the newest token: bool [1 + N, N]."""
        found = np.zeros((1 + len(self.parents), len(self.parents)), dtype=bool)
        for node in range(len(self.parents)):
            found[1 + node, path_to(self.parents, node)] = True
        return array_on(found, device)


@dataclass(frozen=True)
class PlanInputs(Buffers):
    """What a round's recorded function reads.

    rows: what is known of the rows: `keys` [B] of their random numbers, `positions` [B] of the first drafted token, and
        `tokens` [B, W] that they are caught up with
    table: the shape's; on_path: its paths, for processors that read texts
    """

    rows: Any
    table: Tensor | None = None
    on_path: Tensor | None = None


@dataclass(frozen=True)
class PlannedTrees(Buffers):
    """Trees of all rows: tokens [B, N], and the q that they were sampled from [B, N, V] or None."""

    tokens: Tensor
    q: Tensor | None


class Planned:
    """Grows the trees of a round.

    texts: for processors that read them; None: there are none
    """

    def __init__(self, shape: PlanShape, key: TreeKey, sampling: RowSampling | None, texts: Drafted | None):
        self.shape, self.key, self.sampling, self.texts = shape, key, sampling, texts

    def grow(self, given: PlanInputs, logits: Tensor, passes: LevelPasses) -> PlannedTrees:
        """Grow trees. logits: after the newest token, [B, V_d]; passes: that were started there."""
        assert given.table is not None
        batch = len(logits)
        logits, missing = logits[:, None], logits.new_zeros((batch, 1), dtype=torch.bool)
        tokens: list[Tensor] = []
        q: list[Tensor] = []
        for level, (nodes, places, origin, picks) in enumerate(self.shape.split(given.table)):
            if level:
                fed = tokens[-1][:, places]
                missing = fed == MISSING
                logits = passes.feed(level, fed.clamp(min=0), origin.expand(batch, -1))
            wide = passes.over_target(logits, self.key.vocab_size)
            read = self._read(given, nodes, tokens, level)
            scores = wide.float() if self.sampling is None else self.sampling.sampling.scores(wide, read)
            most = self.shape.levels[level][-1]
            if self.key.proposal is None:
                tokens.append(best_children(*best_siblings(scores, most), missing).flatten(1)[:, picks])
                continue
            assert self.sampling is not None
            positions = given.rows.positions + level
            stream = node_streams(given.rows.keys, positions, self.sampling.purpose, nodes.expand(batch, -1))
            new, new_q = sampled_children(
                proposal_distribution(scores), stream, most, missing, self.sampling.independent
            )
            tokens.append(new.flatten(1)[:, picks])
            q.append(new_q.flatten(1, 2)[:, picks])
        return PlannedTrees(torch.cat(tokens, dim=1), torch.cat(q, dim=1) if q else None)

    def _read(self, given: PlanInputs, nodes: Tensor, tokens: Sequence[Tensor], level: int) -> Texts | None:
        """Return what processors read at the nodes of a level: each its own path."""
        if self.texts is None or given.on_path is None:
            return None
        drafted = torch.cat([given.rows.tokens[:, :0], *tokens], dim=1)
        on_path = given.on_path[nodes + 1, : drafted.shape[1]].expand(len(drafted), -1, -1)
        paths = dict.fromkeys(range(len(drafted)), self.shape.paths(level)) if self.texts.texts.on_host else {}
        return self.texts.read_tree(drafted, paths, on_path)
