"""Trees of the draft model: several continuations of a row in one round, a level of nodes in one draft pass.

There are three ways to choose the shape. A *plan* is fixed (drafters/tree_plan.py, planned_tree.py). `tree="opt-16"`
keeps the 16 *best* nodes by cumulative q, never samples (drafters/best_tree.py). *Branching* follows the probabilities
at each node (drafters/branching.py).

Which tokens the children are is in drafters/siblings.py. How many a node has is settled before any is sampled, by the
plan or from the probabilities at the node. Nodes are numbered level by level, and a tree that is too large for a verify
pass ends at its last place, whatever was sampled there.

If fewer tokens are possible at a node than it was to have children, it has fewer: a low temperature, a cut, a grammar
or a small vocabulary leave no more. That, too, depends on q and on earlier siblings alone. Branching counts them first;
the places of a plan stay, because only the device knows, and hold `MISSING`, as do all places below them.

Cost: one draft pass per level, over all nodes of the level that have children, and no host read where passes are
recorded, since a round's trees are one recorded function; elsewhere branching reads once, to cut the empty places off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.device.transfer import array_on
from specdec.drafters.base import Draft, DraftRequest, RowSampling, pad_vocabulary
from specdec.drafters.best_tree import Frontier, Levels, Tree, TreeSize, grow
from specdec.drafters.branching import BranchedTrees, Branches, Branching
from specdec.drafters.draft_model import steps as at
from specdec.drafters.draft_model.core import DraftCore
from specdec.drafters.draft_model.pipelined import take
from specdec.drafters.draft_model.steps import StepInputs, recordable, stream_of
from specdec.drafters.planned_tree import PlanInputs, Planned, PlannedTrees, PlanShape, TreeKey
from specdec.models.passes import PassInputs, PassKey

if TYPE_CHECKING:
    from specdec.drafters.draft_model.strategy import DraftModel


class DraftPasses:
    """The draft model's passes of a round: one that catches up, then one a level of the growing trees.

    The fed nodes of a level lie in the slots after a row's text, level by level, and are overwritten by the next round.
    """

    def __init__(self, core: DraftCore, key: PassKey, inputs: StepInputs, widths: Sequence[int]):
        """key: of the pass that catches up; widths: fed nodes of each level."""
        self.core, self.key, self.count, numbers = core, key, 1, inputs.numbers
        self.last = (numbers[at.STARTS] + numbers[at.COUNTS] - 1).clamp(min=0)
        self.depths = torch.where(numbers[at.COUNTS] > 0, numbers[at.LEVELS], 0)  # most levels of each row's tree
        self.levels = Levels(self.last, self.depths > 0, widths)
        logits = core.forward(key, PassInputs(inputs.tokens, numbers[: at.KEYS]))
        rows = torch.arange(core.batch, device=logits.device)
        self.first = logits[rows, (numbers[at.COUNTS] - 1).clamp(min=0)]  # [B, V_draft]

    def over_target(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Map logits [..., V_draft] to the target's ids."""
        return pad_vocabulary(logits, vocab_size, self.core.runner.excluded)

    def feed(self, level: int, tokens: Tensor, origin: Tensor) -> Tensor:
        """Feed the nodes of a level; returns logits [B, K, V_draft].

        A row's last level is not fed: its draft's context may end there.
        """
        where, alive, count = self.levels.feed(origin, self.core.runner.part), self.depths > level, tokens.shape[1]
        width = self.core.shapes.width(count)
        more = width - count
        if more:
            where = replace(where, offsets=F.pad(where.offsets, (0, more)), sees=F.pad(where.sees, (0, 0, 0, more)))
            tokens = F.pad(tokens, (0, more))
        layout = torch.stack([torch.where(alive, self.last, 0), torch.where(alive, count, 0)])
        key = self.key._replace(width=width, region=where.region, rare=False)
        self.count += 1
        return self.core.forward(key, PassInputs(tokens, layout, where))[:, :count]


@dataclass(frozen=True)
class TreesAhead:
    """Trees that were grown before the host has read the verdict on the last ones.

    sizes: row -> ids it had before the verdict, the newest included
    steps: levels
    """

    trees: Any
    sizes: dict[int, int]
    steps: int


class TreeGrowth:
    """The trees of all rows in one round; rows end at their own depths."""

    def __init__(self, model: DraftModel, requests: Sequence[DraftRequest], limits: Mapping[int, int]):
        """limits: row -> most levels."""
        self.model, self.core, self.requests = model, model._core, requests
        self.sampling: RowSampling | None = requests[0].sampling
        self.vocab, nodes = model._context.vocab_size, model._context.nodes
        self.limits = limits
        self.recorded = self.core.runner.graphs is not None
        # The best nodes depend on how deep the trees may be, so the rows of a batch must not settle that.
        whole = self.recorded or bool(model._best)
        depth = model.depth if whole else min(model.depth, max(limits.values()))
        self.shape: TreeSize | PlanShape | Branching = model.shape(nodes, depth)
        self.passes = 1 + len(self.shape.widths)  # fewer where all paths end early

    def grow(self) -> Mapping[int, Draft]:
        """Grow the trees; returns drafts by row."""
        host, reach = self.core.table(self.requests, self.limits)
        return self._drafts(self._trees(array_on(host, self.core.runner.device), reach))

    def ahead(self, accepted: Tensor, emitted: Tensor) -> TreesAhead | None:
        """Grow the next trees from the verdict on the device, if there is room whatever is accepted.

        accepted [B], emitted [B, n]: as in `Drafter.pipeline`
        """
        core, depth, device = self.core, self.model.depth, self.core.runner.device
        room = all(core.room(r, 2 * depth + 1) == 2 * depth + 1 for r in self.requests)
        if not room or accepted.device != device or not recordable(self.sampling):
            return None
        sizes = {r.row: len(r.tokens) + 1 for r in self.requests}
        host = np.zeros((core.batch, at.TOKENS), dtype=np.int64)
        for r in self.requests:
            host[r.row] = sizes[r.row], 1, stream_of(r), sizes[r.row] + 1, depth
        numbers, width = array_on(host, device), core.shapes.width(depth + 1)
        more = torch.where(numbers[:, at.COUNTS] > 0, accepted, 0)
        numbers[:, at.COUNTS] += more
        numbers[:, at.POSITIONS] += more
        tokens = F.pad(emitted.clamp(min=0), (0, max(0, width - emitted.shape[1])))[:, :width]
        trees = self._trees(torch.cat([numbers, tokens], dim=1), max(sizes.values()) + depth + 1)
        return TreesAhead(trees, sizes, depth)

    def take(self, ahead: TreesAhead, longest: int) -> Mapping[int, Draft]:
        """Return the drafts of trees that were grown ahead, or grow others if they are not what is asked for."""
        if not take(self.core, ahead, self.requests, longest):
            return self.grow()
        for r in self.requests:
            self.core.outstanding.pop(r.row)  # no node is kept
        return self._drafts(ahead.trees)

    def _trees(self, table: Tensor, reach: int) -> Any:
        """Grow the trees of rows, `StepInputs.table`; reach: first slot after all rows' texts."""
        core, sampling, width = self.core, self.sampling, table.shape[1] - at.TOKENS
        key = core.runner.key(core.cache, core.shapes, width, reach + sum(self.shape.widths))
        key = key._replace(rare=width != core.shapes.width(self.model.depth + 1))
        known = None if sampling is None or self.is_best else sampling.known(key.kv_len, core.runner.device)
        rows = StepInputs(table, known)
        given, fixed = PlanInputs(rows), TreeKey(key.width, key.kv_len, self.shape, vocab_size=self.vocab)
        if isinstance(self.shape, PlanShape):
            on_path = None if known is None else self.shape.on_path(core.runner.device)
            given = PlanInputs(rows, self.shape.table(core.runner.device), on_path)
        if sampling is not None:
            proposal = sampling.proposal if sampling.sampled else None
            fixed = fixed._replace(proposal=proposal, scores=sampling.signature)

        def function(given: PlanInputs) -> Any:
            passes = DraftPasses(core, key, given.rows, self.shape.widths)
            trees = self._grow(passes, fixed, given)
            self.passes = passes.count
            return trees

        trees = core.runner.run(core.cache, fixed, given, function) if recordable(sampling) else function(given)
        core.passes += self.passes
        return trees

    @property
    def is_best(self) -> bool:
        """True for trees of best nodes, which no processor that reads texts sees."""
        return isinstance(self.shape, TreeSize)

    def _grow(self, passes: DraftPasses, fixed: TreeKey, given: PlanInputs) -> Tree | PlannedTrees | BranchedTrees:
        """Grow all trees. self.requests: looked at only where nothing is recorded."""
        shape, sampling = self.shape, self.sampling
        if isinstance(shape, TreeSize):
            return grow(self._log_probs(passes, passes.first[:, None])[:, 0], shape, self._evaluate(passes))
        texts = None if sampling is None else sampling.drafted(given.rows.known, given.rows.positions, self.requests)
        if isinstance(shape, PlanShape):
            return Planned(shape, fixed, sampling, texts).grow(given, passes.first, passes)
        looks = not self.recorded and passes.first.device.type == "cpu"
        branches = Branches(
            shape, sampling, texts, self.vocab, self.core.runner.part, self.model._context.reader, looks
        )
        return branches.grow(given.rows, passes.first, passes.depths, passes)

    def _evaluate(self, passes: DraftPasses) -> Any:
        def evaluate(level: int, frontier: Frontier) -> Tensor:
            found = self._log_probs(passes, passes.feed(level, frontier.tokens, frontier.origin))
            return torch.where((passes.depths > level)[:, None, None], found, float("-inf"))

        return evaluate

    def _log_probs(self, passes: DraftPasses, logits: Tensor) -> Tensor:
        """The draft's log-probabilities over the target's vocabulary, as the target would be sampled but for processors
        that read the text."""
        logits = passes.over_target(logits, self.vocab)
        scores = logits.float() if self.sampling is None else self.sampling.sampling.scores(logits)
        return scores.log_softmax(dim=-1)

    # -- drafts ------------------------------------------------------------------------------------------------------

    def _drafts(self, trees: Tree | PlannedTrees | BranchedTrees) -> Mapping[int, Draft]:
        shape, name = self.shape, self.model.name
        q = {row: None if isinstance(trees, Tree) or trees.q is None else trees.q[row] for row in self.limits}
        if isinstance(shape, PlanShape):
            made = {row: Draft(trees.tokens[row], shape.parents, q[row], name) for row in self.limits}
            return {row: draft.truncated(self.limits[row]) for row, draft in made.items()}
        assert not isinstance(trees, PlannedTrees)
        if isinstance(trees, BranchedTrees) and not self.recorded:
            return self._cut(trees, q)
        levels, siblings = (
            (shape.depth + 1, shape.top_k) if isinstance(shape, TreeSize) else (shape.depth, shape.branches)
        )
        return {
            row: Draft(
                trees.tokens[row], trees.parents[row], q[row], name, levels=min(levels, limit), siblings=siblings
            )
            for row, limit in self.limits.items()
        }

    def _cut(self, trees: BranchedTrees, q: Mapping[int, Tensor | None]) -> Mapping[int, Draft]:
        """Read the shapes and cut the places off that no node takes, so that they are not verified."""
        reader = self.model._context.reader
        assert reader is not None
        counts, parents = reader.read(trees.counts, trees.parents)
        made = {row: Draft(trees.tokens[row], parents[row], q[row], self.model.name) for row in self.limits}
        return {row: draft.first(counts[row]) for row, draft in made.items()}
