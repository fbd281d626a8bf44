"""Trees of the draft model: several continuations of a row in one round, a level of nodes in one draft pass.

There are two ways to choose the shape. A *plan* is fixed: `tree=[3, 2, 1]` gives the newest token three children, each
of those two, and each of those one; a list in place of a number gives one count for each node of the level above, in
order (`[2, [3, 1]]`). *Branching* is llama.cpp's (`examples/speculative`): a node gets a child for its best token and
one for each further token whose probability is above `p_split`, until `branches` paths exist; `p_min` ends a path.

The children are the best tokens of q under argmax proposals; under `leviathan` tokens sampled from q without
replacement; under `coupled` the first tokens of the race that the target runs with the same random numbers: the first
child is the coupled sample, and the others are the target's next most likely choices. The last two differ in their
random numbers only: the order in which a race ends is a sample without replacement (Kool, van Hoof & Welling 2019), and
each place, given the places before it, has the distribution q without the earlier tokens, renormalised.

How many children a node has is settled before any is sampled, by the plan or from the probabilities at the node, and no
sampled node is dropped or moved later: anything else would change the distribution of the output. Nodes are numbered
level by level, and a tree that is too large for a verify pass ends at its last place, whatever was sampled there.

If fewer tokens are possible at a node than it was to have children, it has fewer: a low temperature, a cut, a grammar
or a small vocabulary leave no more. That, too, depends on q and on earlier siblings alone. Branching counts them before
it reads; the places of a plan stay, because only the device knows, and hold `MISSING`, as do all places below them.

Cost: one draft pass per level, over all nodes of the level that have children. A plan needs no host read; branching
reads one count per node and level, because the host lays out the next level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.config import check_whole
from specdec.device.transfer import to_device
from specdec.drafters.base import Draft, DraftRequest, pad_vocabulary, proposal_distribution
from specdec.errors import SpecdecError
from specdec.models.trees import MISSING, Parents, depths_of, path_to
from specdec.sampling.sampling import History, Purpose, exponential, fold, streams

if TYPE_CHECKING:
    from specdec.drafters.draft_model.strategy import DraftModel

Plan = tuple[int | tuple[int, ...], ...]

LEAST = 1e-36  # less likely tokens are not proposed: the times of their race would overflow


def parse_plan(value: Any) -> Plan:
    """Parse `[3, 2, 1]`, `[2, [3, 1]]` or "3x2x1" as a plan. Raises SpecdecError for anything else."""
    if isinstance(value, str):
        parts = value.split("x")
        value = [int(part) for part in parts] if all(part.isdigit() for part in parts) else None
    elif isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, Sequence) or len(value) == 0:
        raise SpecdecError("draft-model: tree must list children a level, such as [3, 2, 1] or '3x2x1'")
    plan: list[int | tuple[int, ...]] = []
    above = 1
    for level in value:
        counts: list[Any] = [level] * above if isinstance(level, int) else [None]
        if isinstance(level, Sequence):
            counts = list(level)
        for count in counts:
            check_whole("draft-model: tree: number of children", count, 1 if isinstance(level, int) else 0)
        if len(counts) != above or sum(counts) == 0:
            raise SpecdecError(f"draft-model: tree: {level!r} does not fit a level of {above} nodes above it")
        plan.append(level if isinstance(level, int) else tuple(counts))
        above = sum(counts)
    return tuple(plan)


def plan_parents(plan: Plan) -> Parents:
    """Return the parents of a plan's nodes, level by level."""
    parents: list[int] = []
    above = [-1]
    for level in plan:
        counts = [level] * len(above) if isinstance(level, int) else list(level)
        new = [node for node, count in zip(above, counts, strict=True) for _ in range(count)]
        above = list(range(len(parents), len(parents) + len(new)))
        parents += new
    return tuple(parents)


def sample_siblings(q: Tensor, stream: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sample `count` tokens without replacement: q [..., V], stream [...] -> (tokens [..., C], their q [..., C, V]).

    The first token is `race(q, stream)`. Each token's q is given the tokens before it; where nothing was left to sample
    from it is all zero, and the token arbitrary.
    """
    left = torch.where(q < LEAST, 0.0, q)
    tokens = (exponential(stream, q.shape[-1]) / left).topk(min(count, q.shape[-1]), largest=False).indices
    found = []
    for i in range(tokens.shape[-1]):
        mass = left.sum(dim=-1, keepdim=True)
        found.append(torch.where(mass > 0, left / mass, 0.0))
        left = left.scatter(-1, tokens[..., i : i + 1], 0.0)
    lacking = count - len(found)
    return F.pad(tokens, (0, lacking)), F.pad(torch.stack(found, dim=-2), (0, 0, 0, lacking))


def best_siblings(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` best tokens of scores [..., V], best first, and True where one is possible, both [..., C]."""
    values, tokens = scores.topk(min(count, scores.shape[-1]))
    lacking = count - tokens.shape[-1]
    return F.pad(tokens, (0, lacking)), F.pad(values > float("-inf"), (0, lacking))


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
    ) -> None:  # fmt: skip
        """Add children to the frontier's nodes; they become the frontier."""
        siblings_q = None
        if q is not None:
            tokens, siblings_q = sample_siblings(q, self._streams(level, q.shape[1]), most)  # [B, F, C], [B, F, C, V]
            siblings_q = siblings_q.masked_fill(self.missing[..., None, None], 0.0)
            exist = siblings_q.amax(dim=-1) > 0
        else:
            tokens, exist = best_siblings(scores, most)
            exist[..., 0] = True  # also for a broken draft: it will be rejected
            exist = exist & ~self.missing[..., None]
        tokens = tokens.masked_fill(~exist, MISSING)
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
        """Return the streams [B, F] of the frontier's races: the target's own under coupled, else one per node."""
        shared = streams(self.keys, self.positions + level, self.purpose)[:, None]
        if self.purpose == Purpose.SAMPLE:
            return shared.expand(-1, width)
        nodes = [[n + 1 for n in self.frontier.get(b, [])] for b in range(self.core.batch)]
        padded = [row + [0] * (width - len(row)) for row in nodes]
        return fold(shared, to_device(padded, shared.device))

    def _scores(self, logits: Tensor) -> Tensor:
        """Compute processed scores [B, F, V]; processors see each node's own path."""
        assert self.sampling is not None
        batch, width = logits.shape[:2]
        known: list[Tensor | None] = [None] * (batch * width)
        processors: list[Any] = [None] * (batch * width)
        for r in self.requests:
            if r.sampling is None or r.sampling.processors is None:
                continue
            text = to_device([*map(int, r.tokens), r.last], logits.device)
            nodes = torch.cat([text[:0], *self.tokens[r.row]]).clamp(min=0)
            for i, node in enumerate(self.frontier[r.row]):
                path = to_device(path_to(self.parents[r.row], node), logits.device)
                known[r.row * width + i] = torch.cat([text, nodes[path]])
                processors[r.row * width + i] = r.sampling.processors
        flat, history = logits.flatten(0, 1)[:, None], None
        if any(p is not None for p in processors):
            nothing = torch.zeros((len(flat), 0), dtype=torch.int64, device=flat.device)
            history = History(known, nothing, processors, [1] * len(flat))
        return self.sampling.sampling.scores(flat, history).reshape(batch, width, -1)

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
