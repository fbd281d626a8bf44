"""Trees by branching, as llama.cpp's `examples/speculative` grows them, without a look at any value.

A node gets a child for its best token and one for each further token whose probability is above `p_split`, until
`branches` paths exist; `p_min` ends a path. How many children a node has follows from the probabilities there and from
how many paths the nodes before it have begun, and is settled before any child is sampled.

At most `branches` nodes of a level can have children, so a level is a pass of so many nodes. All is done in tensors of
fixed shapes, so a round's trees can be recorded as one function: places that no node takes hold `MISSING`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.device.buffers import Buffers
from specdec.device.host_read import HostReader
from specdec.drafters.base import RowSampling, proposal_distribution
from specdec.drafters.planned_tree import LevelPasses, TreeRows
from specdec.drafters.siblings import LEAST, best_children, node_streams, sampled_children
from specdec.models.trees import MISSING, path_to
from specdec.sampling.processors import Texts
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


@dataclass(frozen=True)
class Frontier:
    """The nodes of a level that may get children, [B, F] each.

    nodes: their numbers, -1 = the newest token
    missing: True where there is none
    on_path [B, F, N]: True for the nodes on the way to each, itself included
    """

    nodes: Tensor
    missing: Tensor
    on_path: Tensor


class Branches:
    """Grows the trees of a round.

    sampling: how the rows sample; None: the best tokens
    texts: for processors that read them; None: there are none
    reader: reads the shape for processors that are called on the host
    looks: stop as soon as no path goes on; only where a look costs nothing
    """

    def __init__(
        self,
        shape: Branching,
        sampling: RowSampling | None,
        texts: Drafted | None,
        vocab_size: int,
        reader: HostReader | None = None,
        looks: bool = False,
    ):
        self.shape, self.sampling, self.texts, self.vocab_size = shape, sampling, texts, vocab_size
        self.reader, self.looks = reader, looks
        self.sampled = sampling is not None and sampling.sampled

    def grow(self, rows: TreeRows, logits: Tensor, levels: Tensor, passes: LevelPasses) -> BranchedTrees:
        """Grow trees.

        logits [B, V_draft]: after the newest token
        levels [B]: most levels of each row's tree, 0 = none
        """
        batch, size, device = len(logits), self.shape.nodes, logits.device
        # One place more than there are nodes, for children that are not wanted.
        self.tokens = torch.full((batch, size + 1), MISSING, dtype=torch.int64, device=device)
        self.parents = torch.full_like(self.tokens, -1)
        self.q = logits.new_zeros((batch, size + 1, self.vocab_size), dtype=torch.float32) if self.sampled else None
        self.total, self.paths, reached = torch.zeros_like(levels), torch.ones_like(levels), torch.zeros_like(levels)
        newest = self.parents[:, :1]
        frontier = Frontier(newest, (levels <= 0)[:, None], (newest[..., None] >= 0).expand(-1, -1, size))
        logits = logits[:, None]
        for level in range(self.shape.depth):
            wide = passes.over_target(logits, self.vocab_size)
            scores = self._scores(wide, frontier)
            q = proposal_distribution(scores) if self.sampled else None
            wanted = self._wanted(wide, scores if q is None else q, level)
            counts = self._allowed(torch.where(frontier.missing | (levels <= level)[:, None], 0, wanted))
            reached = reached + (counts.sum(dim=1) > 0)
            origin, frontier = self._add(rows, scores, q, level, counts, frontier)
            ends = (levels <= level + 1) | (self.total >= size)
            frontier = Frontier(frontier.nodes, frontier.missing | ends[:, None], frontier.on_path)
            if level + 1 == self.shape.depth or (self.looks and bool(frontier.missing.all())):
                break
            fed = self.tokens.gather(1, frontier.nodes.clamp(max=size))
            logits = passes.feed(level + 1, fed.clamp(min=0), origin)
        short = torch.zeros_like(reached, dtype=torch.bool) if self.sampled else reached < self.shape.n_min
        tokens = torch.where(short[:, None], MISSING, self.tokens)[:, :size]
        counts = torch.where(short, 0, self.total)
        return BranchedTrees(tokens, self.parents[:, :size], counts, None if self.q is None else self.q[:, :size])

    def _scores(self, wide: Tensor, frontier: Frontier) -> Tensor:
        """Compute processed scores [B, F, V]; processors see each node's own path."""
        if self.sampling is None:
            return wide.float()
        return self.sampling.sampling.scores(wide, self._read(frontier))

    def _read(self, frontier: Frontier) -> Texts | None:
        if self.texts is None:
            return None
        nodes, paths = self.tokens[:, :-1], dict[int, Sequence[Sequence[int]]]()
        if self.texts.texts.on_host:
            assert self.reader is not None
            parents, wanted, missing = self.reader.read(self.parents, frontier.nodes, frontier.missing.long())
            for b, row in enumerate(wanted):
                paths[b] = [path_to(parents[b], n) for n, gone in zip(row, missing[b], strict=True) if not gone]
        return self.texts.read_tree(nodes, paths, frontier.nodes.shape[1], frontier.on_path)

    # -- how many children -------------------------------------------------------------------------------------------

    def _wanted(self, wide: Tensor, proposal: Tensor, level: int) -> Tensor:
        """Count the children that the probabilities ask for, [B, F].

        proposal [B, F, V]: q, or the scores whose best tokens are proposed
        """
        shape, wide = self.shape, wide.float()
        best = wide.topk(min(max(shape.branches, shape.top_n or 1), wide.shape[-1])).values
        whole = wide if shape.top_n is None else best[..., : shape.top_n]
        likely = (best - torch.logsumexp(whole, dim=-1, keepdim=True)).exp()
        more = (likely[..., 1 : shape.branches] > shape.p_split).sum(dim=-1)
        least = LEAST if self.sampled else torch.finfo(proposal.dtype).min
        possible = (proposal >= least).sum(dim=-1).clamp(min=1)
        found = torch.minimum(1 + more, possible)
        if self.sampled and level < shape.n_min:
            return found
        return torch.where(likely[..., 0] < shape.p_min, 0, found)

    def _allowed(self, wanted: Tensor) -> Tensor:
        """Cut the counts [B, F] where all paths have begun, or the tree is full, node after node."""
        begun = (self.paths[:, None] + (wanted - 1).clamp(min=0).cumsum(1)).clamp(max=self.shape.branches)
        before = torch.cat([self.paths[:, None], begun[:, :-1]], dim=1)
        self.paths = begun[:, -1]
        counts = torch.where(wanted > 0, 1 + begun - before, 0)
        filled = torch.minimum(counts.cumsum(1), (self.shape.nodes - self.total)[:, None])
        return filled.diff(dim=1, prepend=torch.zeros_like(filled[:, :1]))

    # -- which children ----------------------------------------------------------------------------------------------

    def _add(
        self, rows: TreeRows, scores: Tensor, q: Tensor | None, level: int, counts: Tensor, frontier: Frontier
    ) -> tuple[Tensor, Frontier]:
        """Add children to the frontier's nodes; returns the next frontier, and where its parents are in this one."""
        most, size, batch = self.shape.branches, self.shape.nodes, len(scores)
        found_q = None
        if q is None:
            tokens = best_children(scores, most, frontier.missing)  # [B, F, C]
        else:
            assert self.sampling is not None
            stream = node_streams(rows.keys, rows.positions + level, self.sampling.purpose, frontier.nodes)
            tokens, found_q = sampled_children(q, stream, most, frontier.missing, self.sampling.independent)
        child = torch.arange(most, device=tokens.device)
        number = (self.total[:, None] + counts.cumsum(1) - counts)[..., None] + child
        place = torch.where(child < counts[..., None], number, size).flatten(1)  # [B, F * C]
        parents = frontier.nodes[..., None].expand(-1, -1, most).flatten(1)
        self.tokens = self.tokens.scatter(1, place, tokens.flatten(1))
        self.parents = self.parents.scatter(1, place, parents)
        self.tokens[:, size], self.parents[:, size] = MISSING, -1
        if self.q is not None and found_q is not None:
            wide = place[..., None].expand(-1, -1, self.vocab_size)
            self.q = self.q.scatter(1, wide, found_q.flatten(1, 2))
        nodes = self.total[:, None] + torch.arange(most, device=place.device)
        self.total = self.total + counts.sum(dim=1)
        missing = nodes >= self.total[:, None]
        nodes = torch.where(missing, size, nodes)
        # The frontier's nodes are numbered in a row, so a parent's place is how far its number is from the first.
        above = self.parents.gather(1, nodes) - frontier.nodes[:, :1]
        origin = torch.where(missing, 0, above).clamp(0, frontier.nodes.shape[1] - 1)
        seen = frontier.on_path.gather(1, origin[..., None].expand(batch, most, size))
        own = F.one_hot(nodes, size + 1)[..., :size].bool()
        return origin, Frontier(nodes, missing, seen | own)
