"""draft-model: a small language model proposes, token by token, for all rows in one batch.

Source: llama.cpp `draft-simple`; Leviathan et al. 2023. Parameters: `n_max` tokens to propose, None = automatic length
(length.py; 5 where that is off); `p_min`: stop where
the draft's top probability falls below it (softmax at T = 1 over the whole vocabulary, before processors; with
`top_n` over the `top_n` best tokens only, as upstream); `n_min`: under argmax proposals a shorter draft is dropped,
under sampled ones p_min cannot stop before it; `branches` > 1 makes trees of up to so many paths, which split where
further tokens have a probability above `p_split`; `tree` makes trees of a fixed shape (both: draft_tree.py).
`preset="llama-classic" | "llama-2026"` takes upstream's values. `translate=True` drafts through text where the two
vocabularies differ (translation.py).

Cost: one draft pass per proposed token, and no host read: tokens, q and lengths stay on the device. The K/V cache is
the draft's own; it is caught up with the row's text at the start of each round and trimmed by moving a length.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.config import check_number, check_whole
from specdec.drafters.base import (
    BaseDrafter,
    Draft,
    DraftContext,
    DraftRequest,
    Tokens,
    as_array,
    empty_like,
    pad_vocabulary,
    proposal_law,
)
from specdec.drafters.draft_tree import Growth, parse_plan
from specdec.errors import SpecdecError
from specdec.kv_cache import KeptRows
from specdec.runner import Runner, Shapes, to_device
from specdec.sampling import History, race, streams
from specdec.trees import Columns, Shape, moves, tree_pass

DEFAULTS: dict[str, Any] = {"n_max": 5, "n_min": 0, "p_min": 0.0, "p_split": 0.1, "top_n": None}
PRESETS: dict[str, dict[str, Any]] = {
    "llama-classic": {"n_max": 16, "n_min": 0, "p_min": 0.75, "p_split": 0.1, "top_n": 10},
    "llama-2026": {"n_max": 3, "n_min": 0, "p_min": 0.0, "p_split": 0.1, "top_n": 10},
}
CATCH_UP = 16  # a longer gap is prefilled row by row; a shorter one rides in the first draft pass


@dataclass
class DraftModel(BaseDrafter):
    """Parameters that are None take the preset's value, or the default. Raises SpecdecError for bad ones."""

    n_max: int | None = None
    n_min: int | None = None
    p_min: float | None = None
    p_split: float | None = None
    top_n: int | None = None
    branches: int = 1
    tree: Any = None
    preset: str | None = None
    translate: bool = False
    replacements: Mapping[str, str] = field(default_factory=dict)
    name: str = field(init=False, default="draft-model")

    def __post_init__(self) -> None:
        if self.preset is not None and self.preset not in PRESETS:
            raise SpecdecError(f"unknown draft-model preset {self.preset!r}; known: {', '.join(PRESETS)}")
        self._automatic = self.n_max is None and self.n_min is None and self.preset is None and not self.translate
        for name, value in (DEFAULTS | PRESETS.get(self.preset or "", {})).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        check_whole("draft-model: n_max", self.n_max, 1)
        check_whole("draft-model: n_min", self.n_min, 0)
        check_number("draft-model: p_min", self.p_min, 0.0, 1.0)
        check_number("draft-model: p_split", self.p_split, 0.0, 1.0)
        if self.top_n is not None:
            check_whole("draft-model: top_n", self.top_n, 1)
        self._check_tree()
        texts = self.replacements.items() if isinstance(self.replacements, Mapping) else [(self.replacements, None)]
        if not all(isinstance(a, str) and a and isinstance(b, str) for a, b in texts):
            raise SpecdecError(f"draft-model: replacements must map non-empty text to text, got {self.replacements!r}")
        if self.replacements and not self.translate:
            raise SpecdecError("draft-model: replacements have no effect without translate=True")
        if (self.n_min or 0) > (self.n_max or 0):
            raise SpecdecError(f"draft-model needs n_min <= n_max, got n_min={self.n_min}, n_max={self.n_max}")

    def _check_tree(self) -> None:
        check_whole("draft-model: branches", self.branches, 1)
        if self.tree is not None:
            self.tree = parse_plan(self.tree)
            if self.branches > 1 or self.p_min or self.n_min:
                raise SpecdecError("draft-model: tree fixes the shape: branches, p_min and n_min do not go with it")
        if self.makes_trees and self.translate:
            raise SpecdecError("draft-model: translate=True drafts chains: tree and branches do not go with it")

    @property
    def automatic(self) -> bool:
        """Whether nobody gave a length, so that it is chosen."""
        return self._automatic and not self.makes_trees

    @property
    def makes_trees(self) -> bool:
        """Whether drafts are trees."""
        return self.tree is not None or self.branches > 1

    def fresh(self, context: DraftContext) -> Any:
        if context.draft_runner is None:
            raise SpecdecError("strategy 'draft-model' needs a draft model: pass draft=... when the decoder is built")
        if self.translate:
            from specdec.drafters.translation import TranslatingDrafter

            return TranslatingDrafter(self, context)
        made = copy.copy(self)
        made._context = context
        before = context.previous.get(self.name)
        kept = before._core.keep() if isinstance(before, DraftModel) else None
        spare = context.nodes if self.makes_trees else 0
        made._core = DraftCore(context.draft_runner, context.batch, context.capacity, kept, spare)
        return made

    _context: DraftContext = field(init=False, repr=False, compare=False)
    _core: DraftCore = field(init=False, repr=False, compare=False)

    def begin(self, row: int, prompt: Tokens) -> None:
        self._core.begin(row, prompt)

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        if not is_other:
            self._core.accept(row, n_accepted)

    def accept_path(self, row: int, nodes: Sequence[int]) -> None:
        self._core.accept_path(row, nodes)

    def close(self) -> None:
        self._core.close()

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        depth = len(self.tree) if self.tree else self.n_max or 0
        limits = [self._core.room(r, depth) for r in requests]
        work = [(r, n) for r, n in zip(requests, limits, strict=True) if n > 0]
        if not work:
            return empty_like(requests)
        if self.makes_trees:
            trees = Growth(self, [r for r, _ in work], [n for _, n in work]).grow()
            return [trees.get(r.row, Draft()) for r in requests]
        proposal = self._propose([r for r, _ in work], max(n for _, n in work))
        drafts = {r.row: proposal.draft(r.row, n, self.name) for r, n in work}
        return [drafts.get(r.row, Draft()) for r in requests]

    def _propose(self, requests: Sequence[DraftRequest], k: int) -> Proposal:
        """k draft steps for the rows of `requests`; the other rows ride along as padding."""
        core, vocab = self._core, self._context.vocab_size
        first = requests[0].sampling
        sampled = first is not None and first.drawn
        logits = core.catch_up(requests)  # [B, V_draft]
        steps = _Steps(core, requests, sampled)
        alive = torch.ones(core.batch, dtype=torch.bool, device=core.runner.device)
        for i in range(k):
            logits = pad_vocabulary(logits, vocab)
            alive = alive & self._goes_on(logits, i, sampled)
            alive = steps.choose(logits, alive)
            if i + 1 == k or (self.p_min and steps.nobody(alive)):
                break
            logits = core.step(requests, steps.tokens[-1], i)
        core.outstanding.update({r.row: len(steps.tokens) for r in requests})
        lengths = torch.stack(steps.alive).sum(dim=0)
        if not sampled and self.n_min:
            lengths = torch.where(lengths < self.n_min, 0, lengths)
        q = torch.stack(steps.q, dim=1) if sampled else None
        return Proposal(torch.stack(steps.tokens, dim=1), lengths, q, bool(self.p_min))

    def _goes_on(self, logits: Tensor, i: int, sampled: bool) -> Tensor | bool:
        """Whether position i is proposed: from q_i before anything is drawn, never from the drawn token."""
        if not self.p_min or (sampled and i < (self.n_min or 0)):
            return True
        best = logits.float() if self.top_n is None else logits.float().topk(min(self.top_n, logits.shape[-1])).values
        return torch.softmax(best, dim=-1).amax(dim=-1) >= self.p_min


@dataclass
class Proposal:
    """tokens [B, k], lengths [B], q [B, k, V] or None, all on the device; may_stop: lengths can be below k."""

    tokens: Tensor
    lengths: Tensor
    q: Tensor | None
    may_stop: bool

    def draft(self, row: int, limit: int, name: str) -> Draft:
        q = None if self.q is None else self.q[row]
        length = self.lengths[row] if self.may_stop else None
        return Draft(self.tokens[row], None, q, name, length).truncated(limit)


class _Steps:
    """Collects the draft steps of one round: tokens, q and liveness per step, each [B] or [B, V]."""

    def __init__(self, core: DraftCore, requests: Sequence[DraftRequest], sampled: bool):
        self.core, self.requests, self.sampled = core, requests, sampled
        self.sampling = requests[0].sampling
        self.tokens: list[Tensor] = []
        self.alive: list[Tensor] = []
        self.q: list[Tensor] = []
        device = core.runner.device
        if sampled:
            keys, positions = [0] * core.batch, [0] * core.batch
            for r in requests:
                assert r.noise is not None and r.sampling is not None
                keys[r.row], self.purpose = r.sampling.streams(r.noise)
                positions[r.row] = len(r.tokens) + 1
            self.keys, self.positions = to_device([keys, positions], device)
        self.known: list[Tensor | None] = [None] * core.batch
        self.processors: list[Any] = [None] * core.batch
        for r in requests:
            if r.sampling is not None and r.sampling.processors is not None:
                self.known[r.row] = to_device([*map(int, r.tokens), r.last], device)
                self.processors[r.row] = r.sampling.processors

    def choose(self, logits: Tensor, alive: Tensor) -> Tensor:
        """Propose one token a row from logits [B, V]; returns which rows are still alive."""
        scores = logits.float() if self.sampling is None else self._scores(logits)
        alive = alive & scores.amax(dim=-1).isfinite()  # a broken draft proposes nothing; the target is unharmed
        if self.sampled:
            q = proposal_law(scores)
            token = race(q, streams(self.keys, self.positions + len(self.tokens), self.purpose))
            self.q.append(q)
        else:
            token = scores.argmax(dim=-1)
        self.tokens.append(token)
        self.alive.append(alive)
        return alive

    def _scores(self, logits: Tensor) -> Tensor:
        assert self.sampling is not None
        history = None
        if any(p is not None for p in self.processors):
            fed = torch.stack(self.tokens, dim=1) if self.tokens else logits.new_empty((len(logits), 0)).long()
            known = [None if k is None else torch.cat([k, fed[b]]) for b, k in enumerate(self.known)]
            history = History(known, fed[:, :0], self.processors, [1] * len(known))
        return self.sampling.sampling.scores(logits[:, None], history)[:, 0]

    def nobody(self, alive: Tensor) -> bool:
        """Whether every row has stopped. Only asked on a CPU, where looking costs no transfer."""
        return alive.device.type == "cpu" and not any(alive[r.row] for r in self.requests)


class DraftCore:
    """A model with its own ragged cache, caught up with each row's text on demand.

    Invariant: the first `length[row]` slots of a row hold the K/V of the first `length[row]` ids of its text, once the
    moves that accepted paths of trees ask for are made (`settle`). `spare`: slots for nodes of trees.
    """

    def __init__(self, runner: Runner, batch: int, capacity: int, kept: KeptRows | None = None, spare: int = 0):
        self.runner, self.batch = runner, batch
        self.capacity = min(capacity, runner.context)
        self.cache = runner.lease(batch, self.capacity + spare)
        self.kept = kept
        self.shapes = Shapes.choose(runner.device, False, self.capacity)
        self.text = np.zeros((batch, self.capacity), dtype=np.int64)
        self.length = [0] * batch
        self.written = [0] * batch  # how much of `text` is known; accepted drafts are in the cache before that
        self.outstanding: dict[int, int] = {}  # row -> draft tokens of the open round
        self.fed: dict[int, set[int]] = {}  # row -> nodes of the open round's tree that are in the cache
        self.moves: list[tuple[int, int, int]] = []

    def close(self) -> None:
        self.runner.pool.give_back(self.cache)

    def keep(self) -> KeptRows:
        """The rows as they stand, for a later call."""
        self.settle()
        lengths = [min(a, b) for a, b in zip(self.length, self.written, strict=True)]
        return KeptRows(self.cache, [self.text[row, :n].copy() for row, n in enumerate(lengths)])

    def begin(self, row: int, prompt: Tokens) -> None:
        """Forget the row; take over what an earlier call kept of this prompt."""
        self.settle()
        self.outstanding.pop(row, None)
        self.fed.pop(row, None)
        ids = as_array(prompt)[: self.capacity]
        self.length[row] = self.kept.restore(self.cache, row, ids) if self.kept else 0
        self.written[row] = self.length[row]
        self.text[row, : self.length[row]] = ids[: self.length[row]]
        self.cache.wipe(row, self.length[row])

    def room(self, request: DraftRequest, n_max: int) -> int:
        """How many tokens fit: the draft's context may end before the target's."""
        return min(request.limit(n_max), self.capacity - len(request.tokens))

    def accept(self, row: int, n_accepted: int) -> None:
        """Accepted drafts are already in the cache, except the last one if all stood: it was never fed."""
        drafted = self.outstanding.pop(row, 0)
        if drafted:
            self.length[row] += min(n_accepted, drafted - 1)

    def accept_path(self, row: int, nodes: Sequence[int]) -> None:
        """The nodes of the row's tree that stood, from the top. A node that was never fed is the last of them."""
        fed = self.fed.pop(row, set())
        kept = [node + 1 for node in nodes if node in fed]
        self.moves += moves(row, kept, self.length[row] - 1)
        self.length[row] += len(kept)

    def settle(self) -> None:
        """Move accepted paths to where a chain would have them, all rows at once."""
        self.cache.compact(self.moves)
        self.moves = []

    def catch_up(self, requests: Sequence[DraftRequest]) -> Tensor:
        """Feed what each row's text has grown by; returns the logits after its newest token, [B, V_draft]."""
        self.settle()
        fed: dict[int, np.ndarray] = {}
        for r in requests:
            row, total = r.row, len(r.tokens) + 1
            self.text[row, : total - 1] = as_array(r.tokens)
            self.text[row, total - 1] = r.last
            self.written[row] = total
            self.fed.pop(row, None)
            if total - self.length[row] > CATCH_UP:
                start = self.length[row]
                self.runner.prefill(self.cache, self.shapes, row, self.text[row, start : total - 1].tolist(), start)
                self.length[row] = total - 1
            fed[row] = self.text[row, self.length[row] : total]
        width = self.shapes.width(max(len(ids) for ids in fed.values()))
        tokens = np.zeros((self.batch, width), dtype=np.int64)
        starts, counts = [0] * self.batch, [0] * self.batch
        for row, ids in fed.items():
            tokens[row, : len(ids)] = ids
            starts[row], counts[row] = self.length[row], len(ids)
            self.length[row] += len(ids)
        device = self.runner.device
        logits = self.runner.step(self.cache, self.shapes, to_device(tokens, device), starts, counts).logits
        newest = to_device([max(c - 1, 0) for c in counts], device)
        return logits[torch.arange(self.batch, device=device), newest]

    def step(self, requests: Sequence[DraftRequest], tokens: Tensor, i: int) -> Tensor:
        """Feed the i-th drafted token [B] of every row; returns logits [B, V_draft]. Rows without room sit out."""
        starts, counts = [0] * self.batch, [0] * self.batch
        for r in requests:
            if self.length[r.row] + i < self.capacity:
                starts[r.row], counts[r.row] = self.length[r.row] + i, 1
        width = self.shapes.width(1)
        padded = torch.nn.functional.pad(tokens[:, None], (0, width - 1))
        return self.runner.step(self.cache, self.shapes, padded, starts, counts).logits[:, 0]

    def tree_step(self, tokens: Tensor, shapes: Sequence[Shape], columns: Sequence[Columns]) -> Tensor:
        """Feed nodes of each row's tree: tokens [B, F], the columns they stand at; returns logits [B, F, V_draft]."""
        starts = [n - 1 if fed else 0 for n, fed in zip(self.length, columns, strict=True)]
        width = self.shapes.width(tokens.shape[1])
        where = tree_pass(shapes, columns, width, starts, self.runner.device)
        padded = torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]))
        for row, fed in enumerate(columns):
            self.fed.setdefault(row, set()).update(column - 1 for column in fed)
        counts = [len(fed) for fed in columns]
        logits = self.runner.step(self.cache, self.shapes, padded, starts, counts, tree=where).logits
        return logits[:, : tokens.shape[1]]
