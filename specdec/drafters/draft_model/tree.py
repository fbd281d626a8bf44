"""Trees of the draft model: several continuations of a row in one round, a level of nodes in one draft pass.

There are three ways to choose the shape. A *plan* is fixed (drafters/tree_plan.py). `tree="opt-16"` keeps the 16 *best*
nodes by cumulative q, never samples (drafters/best_tree.py). *Branching* is llama.cpp's (`examples/speculative`): a
node gets a child for its best token and one for each further token whose probability is above `p_split`, until
`branches` paths exist; `p_min` ends a path.

Which tokens the children are is in drafters/siblings.py. How many a node has is settled before any is sampled, by the
plan or from the probabilities at the node. Nodes are numbered level by level, and a tree that is too large for a verify
pass ends at its last place, whatever was sampled there.

If fewer tokens are possible at a node than it was to have children, it has fewer: a low temperature, a cut, a grammar
or a small vocabulary leave no more. That, too, depends on q and on earlier siblings alone. Branching counts them before
it reads; the places of a plan stay, because only the device knows, and hold `MISSING`, as do all places below them.

Cost: one draft pass per level, over all nodes of the level that have children. A plan needs no host read; branching
reads one count per node and level, because the host lays out the next level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.device.transfer import to_device
from specdec.drafters.base import Draft, DraftRequest, pad_vocabulary, proposal_distribution
from specdec.drafters.best_tree import Frontier, Levels, TreeSize, grow
from specdec.drafters.siblings import LEAST, best_children, node_streams, sampled_children
from specdec.drafters.tree_plan import plan_parents
from specdec.models.trees import MISSING, depths_of, path_to

if TYPE_CHECKING:
    from specdec.drafters.draft_model.strategy import DraftModel


class Growth:
    """The trees of all rows in one round. frontier: the nodes of the newest level that may get children, -1 = root."""

    def __init__(self, model: DraftModel, requests: Sequence[DraftRequest], limits: Sequence[int]):
        self.model, self.core, self.requests = model, model._core, requests
        self.vocab, self.nodes = model._context.vocab_size, model._context.nodes
        self.sampling = requests[0].sampling
        self.sampled = self.sampling is not None and self.sampling.sampled
        self.limits = {r.row: n for r, n in zip(requests, limits, strict=True)}
        self.parents: dict[int, list[int]] = {r.row: [] for r in requests}
        self.frontier: dict[int, list[int]] = {r.row: [-1] for r in requests}
        self.paths: dict[int, int] = {r.row: 1 for r in requests}  # branching: paths begun so far
        self.tokens: dict[int, list[Tensor]] = {r.row: [] for r in requests}  # one tensor per level
        self.q: dict[int, list[Tensor]] = {r.row: [] for r in requests}
        self.children: dict[int, int] = {}  # in the plan, by node
        for parent in plan_parents(model.tree)[: self.nodes] if model.tree else ():
            self.children[parent] = self.children.get(parent, 0) + 1
        keys, positions = [0] * self.core.batch, [0] * self.core.batch
        for r in requests:
            positions[r.row] = len(r.tokens) + 1
            if self.sampled:
                assert r.noise is not None and r.sampling is not None
                keys[r.row], self.purpose = r.sampling.streams(r.noise)
        self.keys, self.positions = to_device([keys, positions], self.core.runner.device)
        self.missing = torch.zeros((self.core.batch, 1), dtype=torch.bool, device=self.keys.device)  # the frontier's
        self.texts = None
        if self.sampling is not None:
            known = self.sampling.known(max(r.known for r in requests), self.keys.device)
            self.texts = self.sampling.drafted(known, self.positions, requests)

    def grow(self) -> dict[int, Draft]:
        """Grow the trees; returns drafts by row."""
        logits = self.core.catch_up(self.requests)[:, None]  # [B, F, V_draft]
        for level in range(max(self.limits.values())):
            logits = pad_vocabulary(logits, self.vocab, self.core.runner.excluded)
            scores = logits.float() if self.sampling is None else self._scores(logits)
            q = proposal_distribution(scores) if self.sampled else None
            counts = self._counts(logits, scores if q is None else q, level)
            most = max((c for row in counts.values() for c in row), default=0)
            if most == 0:
                break
            self._add_children(scores, q, level, counts, most)
            self._drop_leaves(level + 1)
            if not any(self.frontier.values()):
                break
            logits = self._feed_frontier()
        return {r.row: self._draft(r.row) for r in self.requests}

    def _draft(self, row: int) -> Draft:
        parents = self.parents[row]
        too_short = not self.sampled and len(parents) and max(depths_of(parents)) < (self.model.n_min or 0)
        if not parents or too_short:
            return Draft()
        q = torch.cat(self.q[row]) if self.sampled else None
        return Draft(torch.cat(self.tokens[row]), tuple(parents), q, self.model.name)

    # -- how many children ---------------------------------------------------------------------------------------

    def _counts(self, logits: Tensor, proposal: Tensor, level: int) -> dict[int, list[int]]:
        """Count the children of each node of the frontier, by row, before any is sampled.

        proposal [B, F, V]: q, or the scores whose best tokens are proposed
        """
        if self.model.tree:
            wanted = {row: [self.children.get(n, 0) for n in nodes] for row, nodes in self.frontier.items()}
        else:
            least = LEAST if self.sampled else torch.finfo(proposal.dtype).min
            wanted = self._branching(logits, (proposal >= least).sum(dim=-1), level)
        counts: dict[int, list[int]] = {}
        for row, row_wanted in wanted.items():
            room = self.nodes - len(self.parents[row]) if level < self.limits[row] else 0
            counts[row] = []
            for count in row_wanted:
                counts[row].append(min(count, room))
                room -= counts[row][-1]
        return counts

    def _branching(self, logits: Tensor, possible: Tensor, level: int) -> dict[int, list[int]]:
        """Count children by their probabilities; possible [B, F]: tokens that can be proposed."""
        model, reader = self.model, self.model._context.reader
        assert model.p_min is not None and model.p_split is not None and reader is not None
        best = logits.float().topk(min(max(model.branches, model.top_n or 1), logits.shape[-1])).values
        whole = logits.float() if model.top_n is None else best[..., : model.top_n]
        likely = (best - torch.logsumexp(whole, dim=-1, keepdim=True)).exp()
        more = (likely[..., 1 : model.branches] > model.p_split).sum(dim=-1)
        ends = likely[..., 0] < model.p_min
        if self.sampled and level < (model.n_min or 0):
            ends = torch.zeros_like(ends)
        read = reader.read(torch.where(ends, 0, torch.minimum(1 + more, possible.clamp(min=1))))[0]
        wanted: dict[int, list[int]] = {}
        for row, nodes in self.frontier.items():
            wanted[row] = []
            for i in range(len(nodes)):
                count = min(read[row][i], 1 + model.branches - self.paths[row])
                self.paths[row] += max(0, count - 1)
                wanted[row].append(count)
        return wanted

    # -- which children ------------------------------------------------------------------------------------------

    def _add_children(
        self, scores: Tensor, q: Tensor | None, level: int, counts: dict[int, list[int]], most: int
    ) -> None:
        """Add children to the frontier's nodes; they become the frontier."""
        siblings_q = None
        if q is not None:
            assert self.sampling is not None
            stream = self._streams(level, q.shape[1])
            tokens, siblings_q = sampled_children(q, stream, most, self.missing, self.sampling.independent)
        else:
            tokens = best_children(scores, most, self.missing)
        for row, row_counts in counts.items():
            first, picks = len(self.parents[row]), []
            for i, (node, count) in enumerate(zip(self.frontier[row], row_counts, strict=True)):
                self.parents[row] += [node] * count
                picks += [i * most + j for j in range(count)]
            self.frontier[row] = list(range(first, len(self.parents[row])))
            if picks:
                index = to_device(picks, tokens.device)
                self.tokens[row].append(tokens[row].flatten()[index])
                if siblings_q is not None:
                    self.q[row].append(siblings_q[row].flatten(0, 1)[index])

    def _streams(self, level: int, width: int) -> Tensor:
        """Return the streams [B, F] of the frontier's races."""
        padded = [self.frontier.get(b, []) + [-1] * width for b in range(self.core.batch)]
        nodes = to_device([row[:width] for row in padded], self.keys.device)
        return node_streams(self.keys, self.positions + level, self.purpose, nodes)

    def _scores(self, logits: Tensor) -> Tensor:
        """Compute processed scores [B, F, V]; processors see each node's own path."""
        assert self.sampling is not None
        texts = None
        if self.texts is not None:
            levels = [torch.cat([self.keys[:0], *self.tokens.get(row, [])]) for row in range(self.core.batch)]
            paths = {row: [path_to(self.parents[row], n) for n in nodes] for row, nodes in self.frontier.items()}
            texts = self.texts.read_tree(pad_sequence(levels, batch_first=True), paths, logits.shape[1])
        return self.sampling.sampling.scores(logits, texts)

    # -- the next level ------------------------------------------------------------------------------------------

    def _drop_leaves(self, level: int) -> None:
        """Drop nodes from the frontier that have no children whatever their q is: they need not be fed."""
        for row, nodes in self.frontier.items():
            ends = level >= self.limits[row] or len(self.parents[row]) >= self.nodes
            if ends or self.model.tree:
                self.frontier[row] = [] if ends else [n for n in nodes if n in self.children]

    def _feed_frontier(self) -> Tensor:
        """Feed the frontier; returns logits [B, F, V_draft]."""
        batch = self.core.batch
        width = max(map(len, self.frontier.values()))
        fed = torch.zeros((batch, width), dtype=torch.int64, device=self.core.runner.device)
        columns: list[list[int]] = [[]] * batch
        parents: list[list[int]] = [[]] * batch
        for row, nodes in self.frontier.items():
            if nodes:
                first = len(self.parents[row]) - len(self.tokens[row][-1])
                index = to_device([n - first for n in nodes], fed.device)
                fed[row, : len(nodes)] = self.tokens[row][-1][index]
                columns[row], parents[row] = [n + 1 for n in nodes], self.parents[row]
        self.missing = fed == MISSING
        return self.core.tree_step(fed.clamp(min=0), parents, columns)


class BestGrowth:
    """Trees of the best nodes of all rows in one round (drafters/best_tree.py); rows end at their own depths."""

    def __init__(self, model: DraftModel, requests: Sequence[DraftRequest], limits: Sequence[int]):
        self.model, self.core, self.requests = model, model._core, requests
        self.sampling, device = requests[0].sampling, model._core.runner.device
        self.limits = {r.row: n for r, n in zip(requests, limits, strict=True)}
        self.depths = to_device([self.limits.get(row, 0) for row in range(self.core.batch)], device)
        depth = min(model.best_size.depth, max(limits) - 1)
        nodes = min(model.best_size.nodes, model._context.nodes)
        top_k = min(model.best_size.top_k, model._context.vocab_size)
        self.size = TreeSize(top_k, depth, min(nodes, top_k + depth * top_k**2))

    def grow(self) -> dict[int, Draft]:
        """Grow the trees; returns drafts by row."""
        first = self._log_probs(self.core.catch_up(self.requests)[:, None])[:, 0]
        held = to_device(self.core.length, first.device)
        self.levels = Levels((held - 1).clamp(min=0), self.depths > 0, self.size.widths)
        tree = grow(first, self.size, self._evaluate)
        drafts = {}
        for row, limit in self.limits.items():
            levels = min(self.size.depth + 1, limit)
            drafts[row] = Draft(
                tree.tokens[row], tree.parents[row], None, self.model.name, levels=levels, siblings=self.size.top_k
            )
        return drafts

    def _evaluate(self, level: int, frontier: Frontier) -> Tensor:
        # A row's last level is not fed: its draft's context may end there.
        alive = [self.limits.get(row, 0) > level for row in range(self.core.batch)]
        logits = self.core.level_step(frontier.tokens, self.levels.feed(frontier.origin), alive)
        return torch.where((self.depths > level)[:, None, None], self._log_probs(logits), float("-inf"))

    def _log_probs(self, logits: Tensor) -> Tensor:
        """Compute log-probabilities [B, F, V] over the target's vocabulary, processed as the target's are, except by
        processors that read the text."""
        logits = pad_vocabulary(logits, self.model._context.vocab_size, self.core.runner.excluded)
        scores = logits.float() if self.sampling is None else self.sampling.sampling.scores(logits)
        return scores.log_softmax(dim=-1)
