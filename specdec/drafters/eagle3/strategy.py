"""eagle3: a head that reads the target's own states proposes chains or dynamic trees, for all rows in one batch.

Source: EAGLE-3 (Li et al. 2025), and EAGLE-1/2 for heads of theirs. Parameters: `head`, a folder as other tools publish
it (formats.py) or an `EagleHead`; `n_max`, tokens of a chain; `nodes` > 0 makes trees of so many nodes instead, with
`top_k` and `depth` as EAGLE-2 has them (dynamic_tree.py), "auto" of as many nodes and levels as pay (auto_tree.py);
`tree` makes trees of a fixed shape, as draft-model's (drafters/planned_tree.py); `config`, fields of `HeadConfig` that
are to have other values than the folder says.

Chains and trees of a fixed shape are sampled where the acceptance rule wants it: q is the head's distribution over the
target's vocabulary, after the same processors as the target's; tokens without a draft id have q = 0. Dynamic trees are
the head's best guesses, given the text, at any temperature: they have no q, and every rule samples the target at their
nodes.

Cost: one pass of the head a token of a chain, or a level of a tree, and no host read: all stays on the device. Where
the target's passes are recorded, a round's drafts are recorded as one function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from specdec.config import check_whole
from specdec.device.buffers import Buffers
from specdec.device.graphs import R
from specdec.drafters.base import (
    Draft,
    DraftContext,
    Drafter,
    DraftRequest,
    RowSampling,
    Tokens,
    empty_like,
    proposal_distribution,
)
from specdec.drafters.best_tree import Tree, TreeSize, grow
from specdec.drafters.draft_model.steps import Proposal, recordable
from specdec.drafters.eagle3.auto_tree import MOST, AutoTrees
from specdec.drafters.eagle3.dynamic_tree import TreePasses
from specdec.drafters.eagle3.formats import check_fit, load_head
from specdec.drafters.eagle3.head import EagleHead
from specdec.drafters.eagle3.rows import HeadInputs, HeadRows
from specdec.drafters.options import check_effects
from specdec.drafters.planned_tree import PlanInputs, Planned, PlannedTrees, PlanShape, TreeKey
from specdec.drafters.tree_plan import parse_opt, parse_plan, plan_parents, upper_levels
from specdec.errors import SpecdecError
from specdec.models.kv_cache import CachePool
from specdec.models.passes import ALL_LAYERS
from specdec.models.runner import KV_STEP, PassOutput
from specdec.sampling.sampling import Purpose, best, race, streams

Given = TypeVar("Given", bound=Buffers)


class ChainKey(NamedTuple):
    """What is fixed in the recorded draft of a chain."""

    width: int
    kv_len: int
    steps: int
    sampled: bool
    purpose: Purpose
    scores: Any
    vocab_size: int


@dataclass
class Eagle3(Drafter):
    """Drafts from an EAGLE head. Raises SpecdecError for bad parameters, and for a head that cannot be read."""

    head: Any = None
    n_max: int = 5
    nodes: int | str = 0
    top_k: int = 10
    depth: int = 7
    tree: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    name: str = field(init=False, default="eagle3")
    likely_causes = (
        "Look at the head: was it trained for this target and chat template, does it observe the layers that it was "
        "trained on (layer_ids has two conventions), are norm_output, fc_norm and rope_theta read as its trainer meant "
        "them (the call's provenance says how, under notes; `config` overrides it)? docs/eagle.md names the traps."
    )

    rows_type: ClassVar[type[HeadRows]] = HeadRows

    _head: EagleHead = field(init=False, repr=False, compare=False)
    _notes: tuple[str, ...] = field(init=False, repr=False, compare=False, default=())
    _context: DraftContext = field(init=False, repr=False, compare=False)
    _layers: tuple[int, ...] = field(init=False, repr=False, compare=False, default=())
    _spent: tuple[int, float] = field(init=False, repr=False, compare=False, default=(0, 0.0))
    _rows: HeadRows | None = field(init=False, repr=False, compare=False, default=None)
    _auto: AutoTrees | None = field(init=False, repr=False, compare=False, default=None)
    _before: HeadRows | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.head is None:
            raise SpecdecError(
                "eagle3: no head was given; pass head=FOLDER (config.json and weights), or demo-head for demo-target, "
                "or an EagleHead"
            )
        check_whole("eagle3: n_max", self.n_max, 1)
        if self.nodes != "auto":
            check_whole('eagle3: nodes (or "auto")', self.nodes, 0)
        check_whole("eagle3: top_k", self.top_k, 1)
        check_whole("eagle3: depth", self.depth, 0)
        check_effects(self, strict=False)
        if isinstance(self.head, EagleHead):
            if self.config:
                raise SpecdecError("eagle3: config goes with a folder; an EagleHead has its own")
            self._head = self.head
        else:
            loaded = load_head(self.head, self.config)
            self._head, self._notes = loaded.head, loaded.notes
        if best := parse_opt(self.tree):
            if self.nodes:
                raise SpecdecError(f"eagle3: tree={self.tree!r} says how many nodes; nodes does not go with it")
            self.nodes, self.tree = best, None
        if self.nodes:
            self._size.check(self._head.config.draft_vocab_size)
        if self.tree is not None:
            self.tree = parse_plan(self.tree, "eagle3")
            if self.nodes:
                raise SpecdecError("eagle3: tree fixes the shape and nodes chooses it by confidence; give one of them")
        self._pools: dict[Any, CachePool] = {}  # shared by the copies of all calls

    @classmethod
    def without_effect(cls, options: Mapping[str, Any]) -> Mapping[str, str]:
        nodes, tree = options.get("nodes"), options.get("tree")
        if tree is not None and not parse_opt(tree):
            return dict.fromkeys(("n_max", "top_k", "depth"), f"tree={tree} fixes the shape")
        if nodes or tree is not None:
            return {"n_max": "trees are as deep as `depth` says"}
        return dict.fromkeys(("top_k", "depth"), "they are of trees, which `nodes` makes")

    def parameters(self) -> dict[str, Any]:
        """As configured, and what was said when the head was read."""
        head = type(self.head).__name__ if isinstance(self.head, EagleHead) else str(self.head)
        return super().parameters() | {"head": head, "config": dict(self.config), "notes": list(self._notes)}

    @property
    def makes_trees(self) -> bool:
        return self.nodes != 0 or self.tree is not None

    @property
    def sizes_trees(self) -> bool:
        return self.nodes == "auto"

    @property
    def tree_nodes(self) -> int:
        return len(plan_parents(self.tree)) if self.tree is not None else self._size.nodes if self.nodes else 0

    @property
    def _drafted_slots(self) -> int:
        """Slots of the cache that a round's own entries take."""
        return self.tree_nodes if self.tree else self._size.slots if self.nodes else self.n_max

    @property
    def _size(self) -> TreeSize:
        nodes = MOST if self.nodes == "auto" else int(self.nodes)
        size = TreeSize(self.top_k, min(self.depth, max(0, nodes - 1)), nodes)  # no more levels than nodes
        return replace(size, nodes=min(nodes, size.candidates)) if self.nodes == "auto" else size

    @property
    def observed_layers(self) -> tuple[int, ...]:
        """Hidden states of the target that it must see; () = all, before the target is known."""
        return self._layers or ALL_LAYERS

    def fresh(self, context: DraftContext) -> Eagle3:
        made = copy.copy(self)
        made._context, made._rows, made._layers, made._spent = context, None, (), (0, 0.0)
        before = context.previous.get(self.name)
        made._before = before._rows if isinstance(before, Eagle3) and before._head is self._head else None
        target = context.target
        embedding = lm_head = None
        if target is not None:
            check_fit(self._head.config, target.config, self.name)
            made._layers = self._observed(target.config.num_hidden_layers)
            embedding, lm_head = context.embedding, context.head
        self._head.borrow(embedding, lm_head)
        if self.sizes_trees:
            # A pass of the head is its layers and `fc`; a plain pass is the target's layers.
            layer = self.step_share if target is None else 1 / target.config.num_hidden_layers
            share = (1 + self._head.config.num_hidden_layers) * layer
            made._auto = AutoTrees(self._size, context, share)
        return made

    def _observed(self, blocks: int) -> tuple[int, ...]:
        """The layers to observe in a target of so many blocks. Raises SpecdecError for what it does not show."""
        layers = self._head.config.observed_layers(blocks)
        if self._head.config.version == 3 and layers[-1] == blocks:
            raise SpecdecError(
                f"{self.name}: the head observes the output of the last block ({blocks}) before the final norm, which "
                "transformers does not return; use a head that observes earlier layers"
            )
        return layers

    def close(self) -> None:
        if self._rows is not None and self._rows.cache.pool is not None:
            self._rows.cache.pool.give_back(self._rows.cache)
        self._spent = self.cost()
        self._rows = self._before = None

    def cost(self) -> tuple[int, float]:
        return self._rows.cost() if self._rows is not None else self._spent

    # -- the target's states -----------------------------------------------------------------------------------------

    def observe(self, output: PassOutput) -> None:
        """Take over the observed states of a target pass."""
        assert output.hidden is not None
        config = self._head.config
        if not self._layers:
            self._layers = self._observed(len(output.hidden) - 1)
        states = output.states(self._layers)
        if states.shape[-1] != config.observed_size:
            raise SpecdecError(
                f"{self.name}: the target shows {states.shape[-1]} numbers a token in the layers {list(self._layers)}, "
                f"and the head takes {config.observed_size}; use a head that was trained for this target"
            )
        if self._rows is None:
            self._make_rows(states.device, states.dtype)
        assert self._rows is not None
        with torch.no_grad():
            self._rows.observe(output, states)

    def begin(self, row: int, prompt: Tokens) -> None:
        if self._auto is not None:
            self._auto.begin(row)
        if self._rows is None and self._before is not None:
            self._make_rows(self._before.device, self._before.dtype)
        if self._rows is not None:
            self._rows.begin(row, prompt, self._before)

    def accept_path(self, row: int, nodes: Sequence[int]) -> None:
        if self._rows is not None:
            self._rows.accept_path(row, nodes)

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        if self._auto is not None and not is_other:
            self._auto.accept(row, n_accepted)

    def _make_rows(self, device: torch.device, dtype: torch.dtype) -> None:
        """Rows on the target's device. A head that was read from a folder takes the target's dtype as well."""
        self._head.to(device, dtype if self._head is not self.head else None)
        context, target = self._context, self._context.target
        recorded = target is not None and target.graphs is not None
        tables = (self._head.fc, self._head.borrowed["embedding"], self._head.borrowed["lm_head"])
        # Recorded functions know where the weights are.
        place = device, *(getattr(table, "weight", torch.empty(0)).data_ptr() for table in tables)
        step = KV_STEP if recorded or device.type == "cuda" else 1
        pool = self._pools.setdefault(place, CachePool(self._head.config.num_hidden_layers, step))
        cache = pool.lease(context.batch, context.capacity + self._drafted_slots)
        cache.graphs = (cache.graphs or {}) if recorded else None
        self._rows = self.rows_type(self._head, cache, context.capacity, context.nodes, device)

    # -- drafts ------------------------------------------------------------------------------------------------------

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        rows = self._rows
        work = [r for r in requests if rows is not None and rows.entries(r)]
        if rows is None or not work:
            return empty_like(requests)
        with torch.no_grad():
            make = self._planned if self.tree else self._trees if self.nodes else self._chains
            drafts = make(rows, work)
        return [drafts.get(r.row, Draft()) for r in requests]

    def _run(self, rows: HeadRows, key: Any, inputs: Given, function: Callable[[Given], R]) -> R:
        """Run a function of a round's inputs, replayed where the target's passes are."""
        target = self._context.target
        return function(inputs) if target is None else target.run(rows.cache, key, inputs, function)

    def _inputs(self, rows: HeadRows, requests: Sequence[DraftRequest], drafted: int) -> HeadInputs:
        """What the head and processors read; drafted: tokens that come to the known ones."""
        inputs, sampling = rows.plan(requests), requests[0].sampling
        if sampling is None:
            return inputs
        longest = rows.shapes.kv_len(max(r.known for r in requests) + drafted, rows.cache.capacity)
        return replace(inputs, known=sampling.known(longest, rows.device))

    def _chains(self, rows: HeadRows, requests: Sequence[DraftRequest]) -> dict[int, Draft]:
        """Chains by row; the rows without a request ride along as padding."""
        sampling = requests[0].sampling
        steps = self.n_max if rows.cache.graphs is not None else max(r.limit(self.n_max) for r in requests)
        inputs, kv_len = self._inputs(rows, requests, steps), rows.kv_len(requests, steps)
        sampled = sampling is not None and sampling.sampled
        key = ChainKey(
            width=inputs.tokens.shape[1],
            kv_len=kv_len,
            steps=steps,
            sampled=sampled,
            purpose=sampling.purpose if sampled and sampling is not None else Purpose.DRAFT,
            scores=None if sampling is None else sampling.signature,
            vocab_size=self._context.vocab_size,
        )
        rows.passes += rows.passes_of(steps)

        def function(given: HeadInputs) -> Proposal:
            return self._chain(rows, key, sampling, given, requests)

        proposal = self._run(rows, key, inputs, function) if recordable(sampling) else function(inputs)
        return {r.row: proposal.draft(r.row, r.limit(self.n_max), self.name) for r in requests}

    def _chain(
        self, rows: HeadRows, key: ChainKey, sampling: RowSampling | None, inputs: HeadInputs,
        requests: Sequence[DraftRequest],
    ) -> Proposal:  # fmt: skip
        """Draft `key.steps` tokens; requests are looked at only where nothing is recorded."""
        logits, features, held = rows.first(inputs, key.kv_len)
        texts = None if sampling is None else sampling.drafted(inputs.known, inputs.positions, requests)
        tokens: list[Tensor] = []
        qs: list[Tensor] = []
        for i in range(key.steps):
            wide = self._head.over_target(logits, key.vocab_size, float("-inf"))
            if sampling is None or (sampling.sampling.greedy and not texts):
                token = best(wide)[0]
            else:
                scores = sampling.sampling.scores(wide[:, None], None if texts is None else texts.read())[:, 0]
                token = scores.argmax(-1)
                if key.sampled:
                    qs.append(proposal_distribution(scores))
                    token = race(qs[-1], streams(inputs.keys, inputs.positions + i, key.purpose))
            tokens.append(token)
            texts = None if texts is None else texts.after(token)
            if i + 1 < key.steps:
                slots = torch.where(held > 0, held + i, rows.cache.capacity)
                logits, features = rows.step(token, features, slots, key.kv_len)
        return Proposal(torch.stack(tokens, dim=1), None, torch.stack(qs, dim=1) if qs else None)

    def _trees(self, rows: HeadRows, requests: Sequence[DraftRequest]) -> dict[int, Draft]:
        """Dynamic trees by row, of as many nodes as a verify pass takes, or as pay."""
        if self._auto is None:
            size = replace(self._size, nodes=min(self._size.nodes, self._context.nodes))
            tree = self._grown(rows, requests, size)
            return {r.row: self._tree(tree, r.row, size.nodes, size.depth + 1) for r in requests}
        chosen = self._auto.choose(requests)
        levels = max(levels for _, levels in chosen.values())
        if not levels:
            return {}
        tree = self._grown(rows, requests, self._auto.grown(levels), tuple(self._auto.sizes))
        assert tree.curve is not None
        self._auto.keep(tree.curve)
        return {row: self._tree(tree, row, *size) for row, size in chosen.items() if size[0]}

    def _grown(
        self, rows: HeadRows, requests: Sequence[DraftRequest], size: TreeSize, sizes: tuple[int, ...] = ()
    ) -> Tree:
        """The trees of all rows. sizes: with nodes in the order of their scores, and a curve for these sizes."""
        inputs, kv_len = rows.plan(requests), rows.kv_len(requests, size.slots)
        key = TreeKey(inputs.tokens.shape[1], kv_len, (size, sizes))

        def grown(given: HeadInputs) -> Tree:
            logits, features, held = rows.first(given, kv_len)
            passes = TreePasses(self._head, rows.masks, rows.cache, size.widths, kv_len)
            passes.start(features, held)
            tree = grow(logits.float().log_softmax(dim=-1), size, passes, sizes)
            return replace(tree, tokens=self._head.to_target(tree.tokens))

        rows.passes += 1 + size.depth
        return self._run(rows, key, inputs, grown)

    def _planned(self, rows: HeadRows, requests: Sequence[DraftRequest]) -> dict[int, Draft]:
        """Trees of a fixed shape by row, as far as a verify pass takes it."""
        sampling, parents = requests[0].sampling, plan_parents(self.tree)[: self._context.nodes]
        if rows.cache.graphs is None:
            parents = upper_levels(parents, max(r.limit(len(parents)) for r in requests))
        shape = PlanShape.of(parents)
        inputs, kv_len = self._inputs(rows, requests, 0), rows.kv_len(requests, sum(shape.widths))
        key = TreeKey(
            width=inputs.tokens.shape[1],
            kv_len=kv_len,
            shape=shape.parents,
            proposal=sampling.proposal if sampling is not None and sampling.sampled else None,
            scores=None if sampling is None else sampling.signature,
            vocab_size=self._context.vocab_size,
        )

        def grown(given: PlanInputs) -> PlannedTrees:
            logits, features, held = rows.first(given.rows, kv_len)
            passes = TreePasses(self._head, rows.masks, rows.cache, shape.widths, kv_len)
            passes.start(features, held)
            texts = None if sampling is None else sampling.drafted(given.rows.known, given.rows.positions, requests)
            return Planned(shape, key, sampling, texts).grow(given, logits, passes)

        rows.passes += len(shape.levels)
        on_path = None if inputs.known is None else shape.on_path(rows.device)
        given = PlanInputs(inputs, shape.table(rows.device), on_path)
        trees = self._run(rows, key, given, grown) if recordable(sampling) else grown(given)
        drafts = {}
        for r in requests:
            q = None if trees.q is None else trees.q[r.row]
            drafts[r.row] = Draft(trees.tokens[r.row], shape.parents, q, self.name)
        return drafts

    def _tree(self, tree: Tree, row: int, nodes: int, levels: int) -> Draft:
        tokens, parents = tree.tokens[row, :nodes], tree.parents[row, :nodes]
        return Draft(tokens, parents, None, self.name, levels=levels, siblings=self.top_k)
