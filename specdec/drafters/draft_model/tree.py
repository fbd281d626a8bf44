"""Trees of the draft model: several continuations of a row in one round, a level of nodes in one draft pass.

Two ways to choose the shape. A *plan* is fixed: `tree=[3, 2, 1]` gives the newest token three children, each of those
two, and each of those one; a list in place of a number gives one count for each node of the level above, in order
(`[2, [3, 1]]`). *Branching* is llama.cpp's (`examples/speculative`): a node gets a child for its best token and one for
each further token whose probability is above `p_split`, until `branches` paths exist; `p_min` ends a path.

Which children: the best tokens of q under argmax proposals; under `leviathan` tokens drawn from q without replacement;
under `coupled` the first tokens of the race that the target runs with the same numbers, so that the first child is the
coupled draw and the others are where the target goes next most easily. The last two are one thing with other numbers:
the order in which a race ends is a draw without replacement (Kool, van Hoof & Welling 2019), and the law of each
place given the places before it is q without the earlier tokens, renormalised.

How many children a node has is settled before any is drawn, by the plan or from the probabilities at the node, and no
drawn node is dropped or moved afterwards: anything else would change the output's law. Nodes are numbered level by
level, and a tree that is too large for a verify pass ends at its last place, whatever was drawn there.

A node where fewer tokens are possible than it was to have children has fewer: a low temperature, a cut, a grammar or a
small vocabulary leave no more. That, too, depends on q and on earlier siblings alone. Branching counts them before it
reads; the places of a plan stay, because only the device knows, and hold `MISSING` with whatever is below them.

Cost: one draft pass a level, over all nodes of the level that go on. A plan needs no host read; branching reads one
count a node and level, because the host lays out the next level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.config import check_whole
from specdec.device.transfer import to_device
from specdec.drafters.base import Draft, DraftRequest, pad_vocabulary, proposal_law
from specdec.errors import SpecdecError
from specdec.models.trees import MISSING, Parents, depths_of, path_to
from specdec.sampling.sampling import History, Purpose, exponential, fold, streams

if TYPE_CHECKING:
    from specdec.drafters.draft_model.strategy import DraftModel

Plan = tuple[int | tuple[int, ...], ...]

LEAST = 1e-36  # what is less likely is not proposed: the times of its race would overflow


def parse_plan(value: Any) -> Plan:
    """`[3, 2, 1]`, `[2, [3, 1]]` or "3x2x1" as a plan. Raises SpecdecError for anything else."""
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
    """The tree of a plan, node by node and level by level."""
    parents: list[int] = []
    above = [-1]
    for level in plan:
        counts = [level] * len(above) if isinstance(level, int) else list(level)
        new = [node for node, count in zip(above, counts, strict=True) for _ in range(count)]
        above = list(range(len(parents), len(parents) + len(new)))
        parents += new
    return tuple(parents)


def draw_siblings(q: Tensor, stream: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draw `count` tokens without replacement: q [..., V], streams [...] -> tokens [..., C] and laws [..., C, V].

    The first is `race(q, stream)`. The law of each is that given the tokens before it; all zero where nothing was left
    to draw from, and the token is then any."""
    left = torch.where(q < LEAST, 0.0, q)
    tokens = (exponential(stream, q.shape[-1]) / left).topk(min(count, q.shape[-1]), largest=False).indices
    laws = []
    for i in range(tokens.shape[-1]):
        mass = left.sum(dim=-1, keepdim=True)
        laws.append(torch.where(mass > 0, left / mass, 0.0))
        left = left.scatter(-1, tokens[..., i : i + 1], 0.0)
    lacking = count - len(laws)
    return F.pad(tokens, (0, lacking)), F.pad(torch.stack(laws, dim=-2), (0, 0, 0, lacking))


def best_siblings(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best tokens of scores [..., V], best first, and whether each is possible, both [..., C]."""
    values, tokens = scores.topk(min(count, scores.shape[-1]))
    lacking = count - tokens.shape[-1]
    return F.pad(tokens, (0, lacking)), F.pad(values > float("-inf"), (0, lacking))


class Growth:
    """One round's trees of all rows. Frontier: the nodes of the newest level that may get children, -1 = the root."""

    def __init__(self, model: DraftModel, requests: Sequence[DraftRequest], limits: Sequence[int]):
        self.model, self.core, self.requests = model, model._core, requests
        self.vocab, self.nodes = model._context.vocab_size, model._context.nodes
        self.sampling = requests[0].sampling
        self.drawn = self.sampling is not None and self.sampling.drawn
        self.limits = {r.row: n for r, n in zip(requests, limits, strict=True)}
        self.parents: dict[int, list[int]] = {r.row: [] for r in requests}
        self.frontier: dict[int, list[int]] = {r.row: [-1] for r in requests}
        self.paths: dict[int, int] = {r.row: 1 for r in requests}  # branching: paths begun so far
        self.tokens: dict[int, list[Tensor]] = {r.row: [] for r in requests}  # a level each
        self.q: dict[int, list[Tensor]] = {r.row: [] for r in requests}
        self.children: dict[int, int] = {}  # of the plan
        for parent in plan_parents(model.tree)[: self.nodes] if model.tree else ():
            self.children[parent] = self.children.get(parent, 0) + 1
        keys, positions = [0] * self.core.batch, [0] * self.core.batch
        for r in requests:
            positions[r.row] = len(r.tokens) + 1
            if self.drawn:
                assert r.noise is not None and r.sampling is not None
                keys[r.row], self.purpose = r.sampling.streams(r.noise)
        self.keys, self.positions = to_device([keys, positions], self.core.runner.device)
        self.missing = torch.zeros((self.core.batch, 1), dtype=torch.bool, device=self.keys.device)  # of the frontier

    def grow(self) -> dict[int, Draft]:
        """The trees, by row."""
        logits = self.core.catch_up(self.requests)[:, None]  # [B, F, V_draft]
        for level in range(max(self.limits.values())):
            logits = pad_vocabulary(logits, self.vocab, self.core.runner.excluded)
            scores = logits.float() if self.sampling is None else self._scores(logits)
            q = proposal_law(scores) if self.drawn else None
            counts = self._counts(logits, scores if q is None else q, level)
            most = max((c for row in counts.values() for c in row), default=0)
            if most == 0:
                break
            self._draw(scores, q, level, counts, most)
            self._thin(level + 1)
            if not any(self.frontier.values()):
                break
            logits = self._evaluate(level + 1)
        return {r.row: self._draft(r.row) for r in self.requests}

    def _draft(self, row: int) -> Draft:
        parents = self.parents[row]
        too_short = not self.drawn and len(parents) and max(depths_of(parents)) < (self.model.n_min or 0)
        if not parents or too_short:
            return Draft()
        q = torch.cat(self.q[row]) if self.drawn else None
        return Draft(torch.cat(self.tokens[row]), tuple(parents), q, self.model.name)

    # -- how many children ---------------------------------------------------------------------------------------

    def _counts(self, logits: Tensor, proposal: Tensor, level: int) -> dict[int, list[int]]:
        """Children of each node of the frontier, row by row, settled before any is drawn. proposal [B, F, V]: q, or the
        scores whose best tokens are proposed."""
        if self.model.tree:
            wanted = {row: [self.children.get(n, 0) for n in nodes] for row, nodes in self.frontier.items()}
        else:
            least = LEAST if self.drawn else torch.finfo(proposal.dtype).min
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
        """possible [B, F]: tokens that can be proposed."""
        model, reader = self.model, self.model._context.reader
        assert model.p_min is not None and model.p_split is not None and reader is not None
        best = logits.float().topk(min(max(model.branches, model.top_n or 1), logits.shape[-1])).values
        whole = logits.float() if model.top_n is None else best[..., : model.top_n]
        likely = (best - torch.logsumexp(whole, dim=-1, keepdim=True)).exp()
        more = (likely[..., 1 : model.branches] > model.p_split).sum(dim=-1)
        ends = likely[..., 0] < model.p_min
        if self.drawn and level < (model.n_min or 0):
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

    def _draw(
        self, scores: Tensor, q: Tensor | None, level: int, counts: dict[int, list[int]], most: int
    ) -> None:  # fmt: skip
        """Children of the frontier, which they replace."""
        laws = None
        if q is not None:
            tokens, laws = draw_siblings(q, self._streams(level, q.shape[1]), most)  # [B, F, C], [B, F, C, V]
            laws = laws.masked_fill(self.missing[..., None, None], 0.0)
            exist = laws.amax(dim=-1) > 0
        else:
            tokens, exist = best_siblings(scores, most)
            exist[..., 0] = True  # also of a broken draft: it will be rejected
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
                if laws is not None:
                    self.q[row].append(laws[row].flatten(0, 1)[index])

    def _streams(self, level: int, width: int) -> Tensor:
        """Streams [B, F] of the frontier's races: the target's own under coupled, one for each node otherwise."""
        shared = streams(self.keys, self.positions + level, self.purpose)[:, None]
        if self.purpose == Purpose.SAMPLE:
            return shared.expand(-1, width)
        nodes = [[n + 1 for n in self.frontier.get(b, [])] for b in range(self.core.batch)]
        padded = [row + [0] * (width - len(row)) for row in nodes]
        return fold(shared, to_device(padded, shared.device))

    def _scores(self, logits: Tensor) -> Tensor:
        """Processed scores [B, F, V]; processors see each node's own path."""
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

    def _thin(self, level: int) -> None:
        """Leave out of the frontier what will have no children whatever its law is: it need not be evaluated."""
        for row, nodes in self.frontier.items():
            ends = level >= self.limits[row] or len(self.parents[row]) >= self.nodes
            if ends or self.model.tree:
                self.frontier[row] = [] if ends else [n for n in nodes if n in self.children]

    def _evaluate(self, level: int) -> Tensor:
        """Feed the frontier; logits [B, F, V_draft]."""
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
