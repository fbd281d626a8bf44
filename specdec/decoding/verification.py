"""Launches verify passes: what the host knows of the rows and their drafts becomes the inputs of one pass.

A `PassPlan` holds the shape of the pass; the drafts of all rows, lists or tensors, become one table of ids, and what
the host knows travels in the same transfer (`VerifyInputs`). The device does the rest (verify_pass.py), and one host
read brings back the result: `PendingResult.read() -> VerifyResult` (verify_result.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.decoding import verify_pass as at  # the columns of a pass's table
from specdec.decoding.acceptance import AcceptanceRule
from specdec.decoding.row import Row
from specdec.decoding.verify_pass import NOTHING, Verified, VerifyInputs, VerifyKey, Wanted, verify
from specdec.decoding.verify_result import PendingResult
from specdec.device.host_read import HostReader, Packed
from specdec.device.transfer import array_on, put_rows
from specdec.drafters.base import COUPLED, Draft
from specdec.errors import SpecdecError
from specdec.models.kv_cache import RaggedCache
from specdec.models.runner import PassOutput, Runner, Shapes
from specdec.models.trees import Paths, chain_parents, depths_of, most_children, path_to
from specdec.sampling.prefixes import History
from specdec.sampling.sampling import Sampling
from specdec.sampling.texts import KnownTexts


class PathsKey(NamedTuple):
    """What is fixed in a recorded copy of accepted paths: the rows."""

    batch: int


@dataclass(frozen=True)
class PassPlan:
    """The shape of a verify pass, as far as the host knows it.

    rows: the active rows by slot
    drafts: their drafts by slot
    starts [B]: slot of each row's newest token
    counts [B]: tokens that the pass feeds, 0 for a row that takes no part
    width: columns of the pass
    levels, siblings: bounds of the trees; 0 = chains only
    q: the drafts that have one, by slot
    """

    rows: Sequence[tuple[int, Row]]
    drafts: Mapping[int, Draft]
    starts: list[int]
    counts: list[int]
    width: int
    levels: int
    siblings: int
    q: Mapping[int, Tensor]

    @property
    def has_trees(self) -> bool:
        return self.levels > 0

    @property
    def reach(self) -> int:
        """The first slot of the cache that no row needs."""
        return max(s + c for s, c in zip(self.starts, self.counts, strict=True))


@dataclass
class Verifier:
    """The verify passes of one call.

    wanted: what the host reads beside the tokens
    observed: layers whose hidden states drafters observe; None: no drafter observes
    passes: how many were launched
    resumed: first layers that a draft had run already -> passes that left them out
    """

    runner: Runner
    cache: RaggedCache
    shapes: Shapes
    rule: AcceptanceRule
    sampling: Sampling
    batch: int
    vocab_size: int
    reader: HostReader
    wanted: Wanted = NOTHING
    observed: tuple[int, ...] | None = None
    passes: int = 0
    resumed: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.texts: KnownTexts | None = None
        if self.sampling.row_processors is not None:
            self.texts = KnownTexts(self.batch, self.cache.capacity, self.vocab_size, self.runner.device)

    @property
    def can_go_ahead(self) -> bool:
        """True if the device alone can tell what follows a pass without drafts, and need not wait for the host."""
        for_host = self.texts is not None and (self.texts.on_host or self.texts.is_limited)
        return self.cache.graphs is not None and self.runner.rope is None and self.rule.recordable and not for_host

    def launch(self, active: Sequence[tuple[int, Row]], after: PendingResult | None = None) -> PendingResult:
        """Verify what the active rows have pending, without waiting for the result.

        after: the rows' last pass, of which the host has read nothing, and which had no drafts: the next one has none
        """
        plan = self.plan(active)
        if after is not None:
            plan = replace(plan, starts=[start + fed for start, fed in zip(plan.starts, plan.counts, strict=True)])
        known_layers = self._known_layers(plan)
        runner = self.runner.without_layers(tuple(range(known_layers))) if known_layers else self.runner
        states = self._states(plan) if known_layers else None
        key = self._key(runner, plan)
        known = None if self.texts is None else self.texts.known(key.given.kv_len, runner.device)
        table = self._table(plan) if after is None else self._table_after(plan, after)
        verified = self._run(runner, plan, key, VerifyInputs(table, self._q(plan), states, known))
        self.passes += 1
        if known_layers:
            self.resumed[known_layers] += 1
        output = None
        if verified.logits is not None and verified.fed is not None:
            seen = (verified.hidden, verified.where, self.observed or ())
            output = PassOutput(verified.logits, verified.fed, plan.starts, plan.counts, 0, *seen)
        arriving = self.reader.start(verified.packed)
        if plan.has_trees:
            self._keep_paths(table[:, at.STARTS], verified.packed)
        pending = PendingResult(verified.packed, arriving, self.reader, self.shapes.verify_width, output)
        if self.texts is not None:
            self.texts.grow(table[:, at.POSITIONS], pending.emitted)
        return pending

    def _keep_paths(self, starts: Tensor, packed: Packed) -> None:
        """Copy the accepted paths of trees to where a chain would have them, while their verdict is on its way to the
        host."""

        def function(paths: Paths) -> Paths:
            self.cache.compact(*paths.moves(self.cache.capacity))
            return paths

        paths = Paths(starts, packed["path"], packed["accepted"])
        none = replace(paths, accepted=torch.zeros_like(paths.accepted))
        self.runner.run(self.cache, PathsKey(self.batch), paths, function, idle=none)

    def plan(self, active: Sequence[tuple[int, Row]]) -> PassPlan:
        """Plan the pass that verifies what the rows have pending."""
        limit = self.shapes.verify_width
        drafts = {b: row.pending for b, row in active if row.pending is not None}
        starts, counts = [0] * self.batch, [0] * self.batch
        for b, row in active:
            starts[b] = row.size - 1
        for b, draft in drafts.items():
            counts[b] = 1 + min(len(draft), limit - 1)
        levels = siblings = 0
        if any(draft.parents is not None for draft in drafts.values()):
            bounds = [_bounds(draft, limit) for draft in drafts.values()]
            levels, siblings = (self._rounded(max(1, *found)) for found in zip(*bounds, (0, 0), strict=True))
        return PassPlan(
            active, drafts, starts, counts, self.shapes.width(max(counts)), levels, siblings, self._checked_q(drafts)
        )

    def _rounded(self, size: int) -> int:
        """Round up a size of the pass's trees where passes are recorded, so that few are."""
        return size if self.cache.graphs is None else self.shapes.width(size)

    def _known_layers(self, plan: PassPlan) -> int:
        """Count the target's first layers that all drafts have run already, so that the pass can leave them out.

        None in exact mode, where all layers must see passes of one shape; nor if drafters observe, as they may ask for
        any layer; nor if passes are compiled, which saves more.
        """
        if self.shapes.exact or self.observed is not None or self.runner.compiled is not None:
            return 0
        layers = {0 if d.states is None else d.layers for d in plan.drafts.values()}
        return layers.pop() if len(layers) == 1 else 0

    def _states(self, plan: PassPlan) -> Tensor:
        """Gather what the known layers made of the tokens, [B, S, H]."""
        known = {b: d.states[: plan.width] for b, d in plan.drafts.items() if d.states is not None}
        some = next(iter(known.values()))
        states = torch.zeros((self.batch, plan.width, some.shape[-1]), dtype=some.dtype, device=some.device)
        put_rows(states, known)
        return states

    def resumed_report(self) -> dict[str, int]:
        """Report passes that went on from a draft's layers, and the bytes of weights that they did not read."""
        saved = {n: self.runner.layer_bytes(range(n)) for n in self.resumed}
        return {
            "passes": sum(self.resumed.values()),
            "bytes_not_read": sum(passes * saved[n] for n, passes in self.resumed.items()),
        }

    def _key(self, runner: Runner, plan: PassPlan) -> VerifyKey:
        region = plan.width if plan.has_trees else 0
        given = runner.key(self.cache, self.shapes, plan.width, plan.reach, region)
        drafted = sum(len(draft) > 0 for draft in plan.drafts.values())
        return VerifyKey(
            given=given._replace(observed=self.observed),
            limit=self.shapes.verify_width,
            vocab_size=self.vocab_size,
            rule=self.rule,
            sampling=self.sampling.signature_with(self.texts),
            all_have_q=bool(plan.q) and len(plan.q) == drafted,
            levels=plan.levels,
            siblings=plan.siblings,
            wanted=self.wanted,
        )

    def _run(self, runner: Runner, plan: PassPlan, key: VerifyKey, inputs: VerifyInputs) -> Verified:
        cache, sampling, texts, history = self.cache, self.sampling, self.texts, None
        if texts is not None:
            texts.check({b: start + plan.counts[b] for b, start in enumerate(plan.starts)})
            history = self._history(plan, texts) if texts.on_host else None

        def function(inputs: VerifyInputs) -> Verified:
            return verify(runner, cache, sampling, key, inputs, texts, history)

        if not self.rule.recordable or key.sampling is None:
            return function(inputs)
        return runner.run(cache, key, inputs, function)

    def _table(self, plan: PassPlan) -> Tensor:
        """Build `VerifyInputs.table`: what the host knows in one transfer, then what only the device knows."""
        width = plan.width
        host = self._host_table(plan, lambda row: (row.last, row.key, row.size, row.accepted, row.round_key))
        parents = np.full((self.batch, width if plan.has_trees else 0), -1, dtype=np.int64)
        # By column: what only the device knows.
        late: dict[int, dict[int, Tensor]] = {at.DRAFT: {}, at.TOTALS: {}, at.DRAFT + width: {}}
        for b, draft in plan.drafts.items():
            if len(draft) == 0:
                continue
            host[b, at.TOTALS : at.HAS_Q + 1] = len(draft), b in plan.q
            if isinstance(draft.tokens, Tensor):
                late[at.DRAFT][b] = draft.tokens if len(draft) <= width else draft.tokens[:width]
            else:
                listed = self._checked(draft)[:width]
                host[b, at.DRAFT : at.DRAFT + len(listed)] = listed
            if draft.length is not None:
                late[at.TOTALS][b] = draft.length[None]
            if isinstance(draft.parents, Tensor):
                late[at.DRAFT + width][b] = draft.parents[:width]
                host[b, at.LIMITS] = draft.levels
            elif plan.has_trees:
                listed = list(chain_parents(len(draft)) if draft.parents is None else draft.parents)[:width]
                parents[b, : len(listed)] = listed
        table = array_on(np.concatenate([host, parents], axis=1), self.runner.device)
        for column, rows in late.items():
            put_rows(table, rows, column)
        return self.reader.ranks.first(table)

    def _table_after(self, plan: PassPlan, after: PendingResult) -> Tensor:
        """Build `VerifyInputs.table` of rows without drafts before the host knows their newest tokens."""
        host = self._host_table(plan, lambda row: (0, row.key, row.size + 1, 0, row.next_round_key))
        table = array_on(host, self.runner.device)
        # A row whose scores were no distribution may have any number for a token; it ends when the host reads that.
        table[:, at.LAST] = after.on_device["token"].clamp(0, self.vocab_size - 1)
        return table

    def _host_table(self, plan: PassPlan, numbers: Callable[[Row], tuple[int, ...]]) -> np.ndarray:
        """Make `VerifyInputs.table` without drafts and parents; numbers: LAST to ROUNDS of a row."""
        host = np.zeros((self.batch, at.DRAFT + plan.width), dtype=np.int64)
        host[:, at.STARTS], host[:, at.COUNTS], host[:, at.LIMITS] = plan.starts, plan.counts, self.shapes.verify_width
        # One write of all rows: of many, one write each would take most of a round.
        host[[b for b, _ in plan.rows], at.LAST : at.TOTALS] = [numbers(row) for _, row in plan.rows]
        return host

    def _checked(self, draft: Draft) -> list[int]:
        ids = [int(t) for t in draft.tokens]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise SpecdecError(f"strategy {draft.drafter!r} proposed an id outside the target's vocabulary: {ids}")
        return ids

    def _checked_q(self, drafts: Mapping[int, Draft]) -> dict[int, Tensor]:
        """Return q of the drafts that have one, by slot. Raises SpecdecError for a q over another vocabulary."""
        found = {b: d.q for b, d in drafts.items() if d.q is not None and len(d) > 0}
        for b, q in found.items():
            if q.shape[-1] != self.vocab_size:
                wide, name = q.shape[-1], drafts[b].drafter
                raise SpecdecError(f"strategy {name!r} gave a q over {wide} ids, the target has {self.vocab_size}")
        # Under coupled q is only recorded: acceptance compares tokens.
        return {} if self.rule.proposal in COUPLED and not self.wanted.p_and_q else found

    def _q(self, plan: PassPlan) -> Tensor | None:
        """Gather q [B, S, V], aligned with the scores; None if no row has one."""
        if not plan.q:
            return None
        shape = (self.batch, plan.width, self.vocab_size)
        q = torch.zeros(shape, dtype=torch.float32, device=self.runner.device)
        put_rows(q, {b: rows[: plan.width] for b, rows in plan.q.items()})
        return q

    def _history(self, plan: PassPlan, texts: KnownTexts) -> History:
        """Gather what processors that are called on the host see, without the ids that the pass feeds."""
        paths = [self._paths(plan, b) for b in range(self.batch)] if plan.has_trees else None
        lengths = {b: row.size - 1 for b, row in plan.rows}
        return texts.history(texts.ids, lengths, texts.ids[:, :0], plan.counts, paths)

    def _paths(self, plan: PassPlan, slot: int) -> list[list[int]]:
        """List for each column that a row feeds the columns from the newest token to it."""
        if slot not in plan.drafts:
            return [[0]][: plan.counts[slot]]
        draft = plan.drafts[slot]
        parents: Any = chain_parents(len(draft)) if draft.parents is None else draft.parents
        if isinstance(parents, Tensor):  # processors are called on the host, so it must know whose text they read
            parents = self.reader.read(parents)[0]
        nodes = range(plan.counts[slot] - 1)
        return [[0], *([0, *(n + 1 for n in path_to(parents, node))] for node in nodes)]


def _bounds(draft: Draft, limit: int) -> tuple[int, int]:
    """Bound what a pass verifies of a draft: (levels, most children of a node)."""
    if draft.parents is None:
        return min(len(draft), limit), 1
    if isinstance(draft.parents, Tensor):
        return draft.levels, draft.siblings or len(draft)
    return max(depths_of(draft.parents), default=0), most_children(draft.parents)
