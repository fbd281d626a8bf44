"""draft-model: a small language model proposes, token by token, for all rows in one batch.

Source: llama.cpp `draft-simple`; Leviathan et al. 2023. Cost: one draft pass per proposed token, and no host read:
tokens, q and lengths stay on the device (core.py).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from specdec.drafters.base import MOST_NODES, Draft, DraftContext, DraftRequest, empty_like
from specdec.drafters.best_tree import TreeSize
from specdec.drafters.branching import Branching
from specdec.drafters.draft_model import pipelined
from specdec.drafters.draft_model.core import CoreDrafter, DraftCore
from specdec.drafters.draft_model.intersection import IntersectingDrafter
from specdec.drafters.draft_model.steps import Proposal, StopRule, Stops, check_steps
from specdec.drafters.draft_model.translation import TranslatingDrafter
from specdec.drafters.draft_model.tree import TreeGrowth, TreesAhead
from specdec.drafters.options import number, state, switch, whole
from specdec.drafters.planned_tree import PlanShape
from specdec.drafters.tree_plan import parse_opt, parse_plan, plan_parents, upper_levels
from specdec.errors import SpecdecError

DEFAULTS: dict[str, Any] = {"n_max": 5, "n_min": 0, "p_min": 0.0, "p_split": 0.1, "top_n": None}
PRESETS: dict[str, dict[str, Any]] = {
    "llama-classic": {"n_max": 16, "n_min": 0, "p_min": 0.75, "p_split": 0.1, "top_n": 10},
    "llama-2026": {"n_max": 3, "n_min": 0, "p_min": 0.0, "p_split": 0.1, "top_n": 10},
}


@dataclass
class DraftModel(CoreDrafter):
    """The draft model as a strategy. Parameters that are None take the preset's value, or the default.

    n_max: most tokens to propose; None = automatic length (length.py), 5 if that is off
    p_min: stop where the draft's top probability is below it (softmax at T = 1, before processors)
    n_min: under argmax proposals a shorter draft is dropped, under sampled ones p_min cannot stop before it
    top_n: p_min and p_split look at a softmax over so many best tokens, as upstream; None = the whole vocabulary
    branches: > 1 makes trees of up to so many paths (tree.py)
    p_split: a path splits where further tokens have a probability above it
    tree: makes trees of a fixed shape (tree_plan.py), or "opt-16": of the 16 best nodes by cumulative q (best_tree.py)
    preset: upstream's values: "llama-classic" or "llama-2026"
    translate: what to do if the two vocabularies differ: True or "text" = draft through text (translation.py),
        "intersection" = draft tokens that both have, with a q (intersection.py)
    replacements: the target's text -> what the draft sees instead, with translate=True
    overlap: draft on while the target verifies (pipelined.py); None = if the draft has a GPU of its own
    Raises SpecdecError for bad parameters.
    """

    n_max: int | None = whole(None)
    n_min: int | None = whole(None, least=0)
    p_min: float | None = number(None, 0.0, 1.0)
    p_split: float | None = number(None, 0.0, 1.0)
    top_n: int | None = whole(None)
    branches: int = whole(1, most=MOST_NODES)
    tree: Any = None
    preset: str | None = None
    translate: bool | str = False
    replacements: Mapping[str, str] = field(default_factory=dict)
    overlap: bool | None = switch(None)
    name: str = field(init=False, default="draft-model")
    uses_draft_model = True

    _context: DraftContext = state()
    _most: int = state(MOST_NODES)  # nodes that a pass verifies
    _core: DraftCore = state()
    _proposal: Proposal | None = state()  # this round's
    _ahead: pipelined.Ahead | pipelined.Overlapped | TreesAhead | None = state()  # the next round's
    _guesses: dict[str, int] = state()
    _rule: StopRule | None = state()

    def __post_init__(self) -> None:
        if self.preset is not None and self.preset not in PRESETS:
            raise SpecdecError(f"unknown draft-model preset {self.preset!r}; known: {', '.join(PRESETS)}")
        super().__post_init__()
        self._automatic = self.n_max is None and self.n_min is None and self.preset is None and not self.translate
        for name, value in (DEFAULTS | PRESETS.get(self.preset or "", {})).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        check_steps(self)
        self._check_tree()
        texts = self.replacements.items() if isinstance(self.replacements, Mapping) else [(self.replacements, None)]
        if not all(isinstance(a, str) and a and isinstance(b, str) for a, b in texts):
            raise SpecdecError(f"draft-model: replacements must map non-empty text to text, got {self.replacements!r}")
        if self.translate not in (False, True, "text", "intersection"):
            raise SpecdecError(
                f'draft-model: translate must be True, False, "text" or "intersection", got {self.translate!r}'
            )
        if self.replacements and self.translate not in (True, "text"):
            raise SpecdecError("draft-model: replacements have no effect without translate=True")

    @classmethod
    def without_effect(cls, options: Mapping[str, Any]) -> Mapping[str, str]:
        tree, translate = options.get("tree"), options.get("translate")
        found: dict[str, str] = {}
        branches = isinstance(options.get("branches"), int) and options["branches"] > 1
        if translate in (True, "text"):
            found |= dict.fromkeys(("p_min", "n_min", "top_n"), f"translate={translate} drafts n_max tokens of text")
        if tree is not None:
            found |= dict.fromkeys(("p_split", "top_n"), f"tree={tree} does not ask how certain the draft is")
        elif not branches:
            found["p_split"] = "it is of trees, which `branches` makes"
        if tree is not None and not parse_opt(tree):
            found |= dict.fromkeys(("n_max", "preset"), f"tree={tree} fixes the shape")
        return found

    def _check_tree(self) -> None:
        self._best = parse_opt(self.tree)
        if self._best:
            self.best_size.check(self._best + 1, "draft-model")
        if self.tree is not None:
            self.tree = self.tree if self._best else parse_plan(self.tree)
            if self.branches > 1 or self.p_min or self.n_min:
                raise SpecdecError("draft-model: tree fixes the shape: branches, p_min and n_min do not go with it")
        if self.makes_trees and self.translate:
            raise SpecdecError("draft-model: translate drafts chains: tree and branches do not go with it")

    @property
    def automatic(self) -> bool:
        """True if n_max was not given: draft length is automatic."""
        return self._automatic and not self.makes_trees

    @property
    def makes_trees(self) -> bool:
        return self.tree is not None or self.branches > 1

    @property
    def tree_nodes(self) -> int:
        """Nodes of a tree whose size is known; 0 for branching, which keeps to what a verify pass usually takes."""
        return self._best or (len(plan_parents(self.tree)) if self.tree is not None else 0)

    @property
    def best_size(self) -> TreeSize:
        """Size of the trees of best nodes: as deep as chains are, with EAGLE's width of a level."""
        return TreeSize(min(self._best, TreeSize.top_k), min(self.n_max or 1, self._best) - 1, self._best)

    @property
    def depth(self) -> int:
        """Most tokens of a chain, or levels of a tree: no more than it has nodes."""
        depth = len(self.tree) if self.tree is not None and not self._best else self.n_max or 0
        return min(depth, self._best or depth, self._most) if self.makes_trees else depth

    def shape(self, nodes: int, depth: int) -> TreeSize | PlanShape | Branching:
        """Return what trees of at most so many nodes and levels grow by."""
        if self._best:
            top_k, depth = min(self.best_size.top_k, self._context.vocab_size), min(self.best_size.depth, depth - 1)
            return TreeSize(top_k, depth, min(self._best, nodes, top_k + depth * top_k**2))
        if self.tree is not None:
            return PlanShape.of(upper_levels(plan_parents(self.tree)[:nodes], depth))
        stops = self._stops
        nodes = min(nodes, self.branches * depth)
        return Branching(self.branches, depth, nodes, self.p_split or 0.0, stops.p_min, stops.n_min, stops.top_n)

    def fresh(self, context: DraftContext) -> Any:
        if context.draft_runner is None:
            raise SpecdecError("strategy 'draft-model' needs a draft model: pass draft=... when the decoder is built")
        if self.translate:
            return (IntersectingDrafter if self.translate == "intersection" else TranslatingDrafter)(self, context)
        made = copy.copy(self)
        made._context, made._most = context, context.nodes
        before = context.previous.get(self.name)
        kept = before._core.keep() if isinstance(before, DraftModel) else None
        spare = sum(made.shape(context.nodes, made.depth).widths) if self.makes_trees else 0
        made._core = DraftCore(context.draft_runner, context.batch, context.capacity, kept, spare)
        made._proposal = made._ahead = None
        made._guesses = {"guesses": 0, "right": 0}
        if made.overlap is None:
            own, target = context.draft_runner.device, None if context.target is None else context.target.device
            made.overlap = own.type == "cuda" and target is not None and own != target
        return made

    def stop_by(self, rule: Any, levels: Mapping[int, float]) -> None:
        if self.makes_trees:
            return super().stop_by(rule, levels)
        self._rule, self._core.levels = rule, levels

    def steps(self, k: int) -> int:
        return self._core.recorded_steps(k, self.n_max or k)

    @property
    def overlapped(self) -> dict[str, int]:
        return self._guesses if self.overlap else {}

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        limits = {r.row: self._core.room(r, self.depth) for r in requests}
        work = [r for r in requests if limits[r.row] > 0]
        if not work:
            return empty_like(requests)
        ahead, self._ahead = self._ahead, None
        fits, longest = len(work) == len(requests), max(limits.values())
        if self.makes_trees:
            growth = TreeGrowth(self, work, {r.row: limits[r.row] for r in work})
            trees = growth.take(ahead, longest) if fits and isinstance(ahead, TreesAhead) else growth.grow()
            return [trees.get(r.row, Draft()) for r in requests]
        if isinstance(ahead, pipelined.Overlapped):
            self._proposal = self._after_guess(ahead, work)
        elif fits and isinstance(ahead, pipelined.Ahead) and pipelined.take(self._core, ahead, work, longest):
            self._proposal = ahead.proposal
        else:
            self._proposal = self._propose(work)
        return self.drafts(requests, limits, self._proposal)

    def _propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        k = self._core.recorded_steps(max(self._core.room(r, self.depth) for r in requests), self.depth)
        return self._core.propose(requests, k, self._stops, self._context.vocab_size)

    def _after_guess(self, ahead: pipelined.Overlapped, requests: Sequence[DraftRequest]) -> Proposal:
        """Return the overlapped drafts of rows whose guess was right, and new ones of the others."""
        assert self._context.reader is not None
        right = pipelined.take_rows(self._core, ahead, requests, self._context.reader.read(ahead.guess)[0])
        self._guesses["guesses"] += len(requests)
        self._guesses["right"] += len(right)
        wrong = [r for r in requests if r.row not in right]
        return ahead.rest.with_rows(self._propose(wrong), [r.row for r in wrong]) if wrong else ahead.rest

    @property
    def can_pipeline(self) -> bool:
        """True for what is recorded, and chains that overlap; recurrent states cannot run ahead."""
        runner = self._core.runner
        overlaps = bool(self.overlap) and not self.makes_trees
        return runner.recurrence is None and (overlaps or runner.graphs is not None)

    def pipeline(
        self,
        requests: Sequence[DraftRequest],
        accepted: Tensor,
        token: Tensor,
        n: int | None = None,
        emitted: Tensor | None = None,
    ) -> bool:
        self._ahead = None
        if self.makes_trees and emitted is not None:
            growth = TreeGrowth(self, requests, dict.fromkeys((r.row for r in requests), self.depth))
            self._ahead = growth.ahead(accepted, emitted)
            return self._ahead is not None
        k = (self.n_max or 0) if n is None else self.steps(n)
        if self._proposal is None:
            return False
        core, judged = self._core, self._proposal.tokens
        how = self._stops, self._context.vocab_size, judged
        if self.overlap:
            if pipelined.can_overlap(core, requests, k, self._stops):
                self._ahead = pipelined.overlap(core, requests, k, *how)
        elif accepted.device == core.runner.device and pipelined.possible(core, requests, k):
            self._ahead = pipelined.go_ahead(core, requests, k, *how, accepted, token)
        return self._ahead is not None

    @property
    def _stops(self) -> Stops:
        return Stops(self.p_min or 0.0, self.n_min or 0, self.top_n, self._rule)
