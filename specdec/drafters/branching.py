"""Trees by branching, as llama.cpp's `examples/speculative` grows them, without a look at any value.

A node gets a child for its best token and one for each further token whose probability is above `p_split`, until
`branches` paths exist; `p_min` ends a path. How many children a node has follows from the probabilities there and from
how many paths the nodes before it have begun, and is settled before any child is sampled.

At most `branches` nodes of a level can have children, so a level is a pass of so many nodes. All is done in tensors of
fixed shapes, so a round's trees can be recorded as one function: places that no node takes hold `MISSING`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.device.buffers import Buffers
from specdec.device.host_read import HostReader
from specdec.drafters.base import RowSampling, proposal_distribution
from specdec.drafters.planned_tree import LevelPasses
from specdec.drafters.siblings import LEAST, best_children, best_siblings, node_streams, sampled_children
from specdec.models.trees import MISSING, path_to
from specdec.sampling.processors import Texts
from specdec.sampling.sampling import largest
from specdec.sampling.texts import Drafted


@dataclass(frozen=True)
class Branching:
    """How trees branch.

    branches: most paths
    depth: most levels
    nodes: most nodes
    p_split: a further token begins a path if its probability is above it
    p_min: a path ends where the top probability is below it
    n_min: under argmax proposals a tree of fewer levels is dropped, under sampled ones p_min cannot stop before it
    top_n: probabilities are a softmax over so many best tokens; None = over all
    """

    branches: int
    depth: int
    nodes: int
    p_split: float
    p_min: float = 0.0
    n_min: int = 0
    top_n: int | None = None

    @property
    def widths(self) -> list[int]:
        """How many nodes each pass feeds."""
        return [self.branches] * (self.depth - 1)


@dataclass(frozen=True)
class BranchedTrees(Buffers):
    """The trees of all rows; places from `counts` on hold nothing.

    tokens [B, N]: the target's ids
    parents [B, N]: -1 = the newest token
    counts [B]: nodes
    q [B, N, V]: what the tokens were sampled from; None: they are best tokens
    """

    tokens: Tensor
    parents: Tensor
    counts: Tensor
    q: Tensor | None


class Growing(NamedTuple):
    """Trees as far as they have grown.

    tokens, parents [B, N]: as in `BranchedTrees`
    total, paths, reached [B]: nodes, paths that have begun, levels
    nodes [B, F]: nodes of the newest level, which may get children, by number; -1 = the newest token
    missing [B, F]: True where there is none
    on_path [B, F, N]: True for the nodes on the way to each, itself included
    """

    tokens: Tensor
    parents: Tensor
    total: Tensor
    paths: Tensor
    reached: Tensor
    nodes: Tensor
    missing: Tensor
    on_path: Tensor

    @staticmethod
    def start(levels: Tensor, size: int) -> Growing:
        """Begin trees of `size` nodes at most; levels [B]: of each row's tree, 0 = none."""
        tokens = levels.new_full((len(levels), size), MISSING)
        parents, none = torch.full_like(tokens, -1), torch.zeros_like(levels)
        newest = torch.full_like(levels, -1)[:, None]
        on_path = tokens.new_zeros((len(levels), 1, size), dtype=torch.bool)
        return Growing(tokens, parents, none, none + 1, none, newest, (levels <= 0)[:, None], on_path)


class Branches:
    """Grows the trees of a round.

    sampling: how the rows sample; None: the best tokens
    texts: for processors that read them; None: there are none
    part: compiles a function of tensors
    reader: reads the shape for processors that are called on the host
    looks: stop as soon as no path goes on; only where a look costs nothing
    """

    def __init__(
        self,
        shape: Branching,
        sampling: RowSampling | None,
        texts: Drafted | None,
        vocab_size: int,
        part: Callable[[Any], Any],
        reader: HostReader | None = None,
        looks: bool = False,
    ):
        self.shape, self.sampling, self.texts, self.vocab_size = shape, sampling, texts, vocab_size
        self.part, self.reader, self.looks = part, reader, looks
        self.sampled = sampling is not None and sampling.sampled
        self.q: Tensor | None = None  # [B, N, V]

    def grow(self, rows: Any, logits: Tensor, levels: Tensor, passes: LevelPasses) -> BranchedTrees:
        """Grow trees.

        rows: as in `PlanInputs`
        logits [B, V_draft]: after the newest token
        levels [B]: most levels of each row's tree, 0 = none
        """
        shape, size = self.shape, self.shape.nodes
        grown = Growing.start(levels, size)
        if self.sampled:
            self.q = logits.new_zeros((len(logits), size, self.vocab_size), dtype=torch.float32)
        greedy = self.sampling is None or self.sampling.sampling.greedy
        logits = logits[:, None]
        for level in range(shape.depth):
            wide, left = passes.over_target(logits, self.vocab_size), levels - level
            if greedy and self.texts is None:
                grown, fed, origin = self.part(add_best)(shape, grown, wide, left)
            else:
                grown, fed, origin = self._add(rows, grown, wide, left, level)
            if level + 1 == shape.depth or (self.looks and bool(grown.missing.all())):
                break
            logits = passes.feed(level + 1, fed, origin)
        short = torch.zeros_like(levels, dtype=torch.bool) if self.sampled else grown.reached < shape.n_min
        tokens = torch.where(short[:, None], MISSING, grown.tokens)
        return BranchedTrees(tokens, grown.parents, torch.where(short, 0, grown.total), self.q)

    def _add(self, rows: Any, grown: Growing, wide: Tensor, left: Tensor, level: int) -> tuple[Growing, Tensor, Tensor]:
        """Add a level of children that processors have a say in, or that are sampled, as `add_best` does."""
        shape, sampling = self.shape, self.sampling
        scores = wide.float() if sampling is None else sampling.sampling.scores(wide, self._read(grown))
        best = largest(wide.float(), max(shape.branches, shape.top_n or 1))[0]
        if not self.sampled or sampling is None:
            possible = (scores > float("-inf")).sum(dim=-1)
            tokens = best_children(*best_siblings(scores, shape.branches), grown.missing)  # [B, F, C]
            return add(shape, grown, tokens, _wanted(shape, wide, best, possible), left)[:3]
        q = proposal_distribution(scores)
        stream = node_streams(rows.keys, rows.positions + level, sampling.purpose, grown.nodes)
        tokens, found = sampled_children(q, stream, shape.branches, grown.missing, sampling.independent)
        wanted = _wanted(shape, wide, best, (q >= LEAST).sum(dim=-1), may_end=level >= shape.n_min)
        grown, fed, origin, place = add(shape, grown, tokens, wanted, left)
        assert self.q is not None
        index = place[..., None].expand(-1, -1, self.vocab_size)
        self.q = F.pad(self.q, (0, 0, 0, 1)).scatter(1, index, found.flatten(1, 2))[:, :-1]
        return grown, fed, origin

    def _read(self, grown: Growing) -> Texts | None:
        """Return what processors read: each node's own path."""
        if self.texts is None:
            return None
        paths = dict[int, Sequence[Sequence[int]]]()
        if self.texts.texts.on_host:
            assert self.reader is not None
            parents, wanted, missing = self.reader.read(grown.parents, grown.nodes, grown.missing.long())
            for b, row in enumerate(wanted):
                paths[b] = [path_to(parents[b], n) for n, gone in zip(row, missing[b], strict=True) if not gone]
        return self.texts.read_tree(grown.tokens, paths, grown.on_path)


def add_best(shape: Branching, grown: Growing, wide: Tensor, left: Tensor) -> tuple[Growing, Tensor, Tensor]:
    """Add a level of best tokens; returns the trees, and tokens and places of parents [B, C] of the level to feed.

    wide [B, F, V]: logits after the newest level, over the target's ids
    left [B]: levels that each row's tree may still get
    """
    wide = wide.float()
    tokens, best = best_siblings(wide, max(shape.branches, shape.top_n or 1))
    children = best_children(tokens[..., : shape.branches], best[..., : shape.branches], grown.missing)
    return add(shape, grown, children, _wanted(shape, wide, best), left)[:3]


def _wanted(
    shape: Branching, wide: Tensor, best: Tensor, possible: Tensor | None = None, may_end: bool = True
) -> Tensor:
    """Count the children that the probabilities ask for, [B, F].

    wide [B, F, V]: logits
    best [B, F, n]: the largest of them
    possible [B, F]: tokens that can be proposed; None: all that are likely
    may_end: p_min ends paths
    """
    whole = wide.float() if shape.top_n is None else best[..., : shape.top_n]
    likely = (best - torch.logsumexp(whole, dim=-1, keepdim=True)).exp()
    more = (likely[..., 1 : shape.branches] > shape.p_split).sum(dim=-1)
    found = 1 + more if possible is None else torch.minimum(1 + more, possible.clamp(min=1))
    return torch.where(likely[..., 0] < shape.p_min, 0, found) if may_end else found


def _allowed(shape: Branching, grown: Growing, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Cut the counts [B, F] where all paths have begun, or the tree is full, node after node; returns them and the
    paths that have begun then [B]."""
    begun = (grown.paths[:, None] + (wanted - 1).clamp(min=0).cumsum(1)).clamp(max=shape.branches)
    before = torch.cat([grown.paths[:, None], begun[:, :-1]], dim=1)
    counts = torch.where(wanted > 0, 1 + begun - before, 0)
    filled = torch.minimum(counts.cumsum(1), (shape.nodes - grown.total)[:, None])
    return filled.diff(dim=1, prepend=torch.zeros_like(filled[:, :1])), begun[:, -1]


def add(
    shape: Branching, grown: Growing, tokens: Tensor, wanted: Tensor, left: Tensor
) -> tuple[Growing, Tensor, Tensor, Tensor]:
    """Add the first `wanted` [B, F] of tokens [B, F, C] as children; also returns each token's number, [B, F * C].

    Numbers of children that are not wanted are the trees' size.
    """
    most, size = shape.branches, shape.nodes
    counts, paths = _allowed(shape, grown, torch.where(grown.missing | (left <= 0)[:, None], 0, wanted))
    child = torch.arange(most, device=tokens.device)
    number = (grown.total[:, None] + counts.cumsum(1) - counts)[..., None] + child
    place = torch.where(child < counts[..., None], number, size).flatten(1)  # [B, F * C]
    above = grown.nodes[..., None].expand(-1, -1, most).flatten(1)
    # One place more than there are nodes, for children that are not wanted.
    found, parents = (F.pad(t, (0, 1)) for t in (grown.tokens, grown.parents))
    found, parents = found.scatter(1, place, tokens.flatten(1)), parents.scatter(1, place, above)
    nodes, total = grown.total[:, None] + child, grown.total + counts.sum(dim=1)
    missing = nodes >= total[:, None]
    nodes = torch.where(missing, size, nodes)
    # The level's nodes are numbered in a row, so a parent's place is how far its number is from the first.
    origin = parents.gather(1, nodes) - grown.nodes[:, :1]
    origin = torch.where(missing, 0, origin).clamp(0, grown.nodes.shape[1] - 1)
    seen = grown.on_path.gather(1, origin[..., None].expand(-1, -1, size))
    own = nodes[..., None] == torch.arange(size, device=nodes.device)
    reached, ends = grown.reached + (counts.sum(dim=1) > 0), (left <= 1) | (total >= size)
    fed = torch.where(missing, 0, found.gather(1, nodes).clamp(min=0))
    missing = missing | ends[:, None]
    following = Growing(found[:, :size], parents[:, :size], total, paths, reached, nodes, missing, seen | own)
    return following, fed, origin, place
