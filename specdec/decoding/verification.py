"""Steps 2 and 3 of a round, on the device: the target's pass over [newest token, draft ...], and acceptance.

Data flow: a `PassPlan` holds the shape of the pass; the drafts of all rows, lists or tensors, become one table of ids
(`VerifyInputs`), and what the host knows of the rows travels in the same transfer. `verify` computes from these all
that the host will read: the pass, the scores, the acceptance rule, and what records ask for. It uses tensors alone, so
where the runner replays passes it is recorded as a whole (device/graphs.py), under a `VerifyKey` that names all that is
fixed in it. Then there is one host read: `PendingResult.read() -> VerifyResult`.

Processors that read the text are part of it, as far as they have a vectorised form (sampling/processors.py): the known
texts are among the inputs. A user's own processors are called on the host, and a user's rule may do anything: there the
function is not recorded, only the pass inside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.decoding.acceptance import UNSOUND, AcceptanceRule, Block, Verdict, judge
from specdec.decoding.probe import Probe
from specdec.decoding.row import Row, RowVerdict
from specdec.device.buffers import Buffers
from specdec.device.host_read import Arriving, HostReader, Packed
from specdec.device.transfer import array_on, moved
from specdec.drafters.base import COUPLED, Draft
from specdec.errors import SpecdecError
from specdec.models.kv_cache import RaggedCache
from specdec.models.passes import PassInputs, PassKey
from specdec.models.runner import PassOutput, Runner, Shapes
from specdec.models.trees import MISSING, Tree, TreePass, chain_parents, depths_of, most_children, path_to
from specdec.sampling.prefixes import History, Prefixes, chain_paths
from specdec.sampling.processors import Texts
from specdec.sampling.sampling import Sampling
from specdec.sampling.texts import Known, KnownTexts

# Columns of `VerifyInputs.table`; S drafted ids follow, and with trees S parents.
STARTS, COUNTS, LAST, KEYS, POSITIONS, DONE, ROUNDS, TOTALS, HAS_Q, LIMITS, DRAFT = range(11)
NO_RECORD = (False, 0, None)  # `VerifyKey.recorded` of a call that records nothing


# -- what comes back ---------------------------------------------------------------------------------------------------


@dataclass
class VerifyResult:
    """What the one host read of a pass brings back; lists have one entry per slot.

    accepted, token, failed, unsound: as in `Verdict`
    totals: tokens of the whole draft
    draft: drafted ids, `MISSING` for a node of a tree that does not exist
    path, parents: the accepted nodes and the trees' parents; None without trees
    logprobs: log-probability of each emitted token, if asked for
    top_ids, top_logprobs: of the most likely tokens at the same places, if asked for
    distances: of the emitted tokens, under a lossy rule (`AcceptanceRule.distance`)
    p, q, details: at each drafted token, in a recorded run
    limit: most tokens that the pass tests per row
    """

    accepted: list[int]
    token: list[int]
    failed: list[int]
    totals: list[int]
    draft: list[list[int]]
    unsound: list[int]
    path: list[list[int]] | None = None
    parents: list[list[int]] | None = None
    logprobs: list[list[float]] | None = None
    top_ids: list[list[list[int]]] | None = None
    top_logprobs: list[list[list[float]]] | None = None
    distances: list[list[float]] | None = None
    p: list[list[float]] | None = None
    q: list[list[float]] | None = None
    details: list[Any] = field(default_factory=list)
    limit: int = 0

    def parents_of(self, slot: int, draft: Draft) -> list[int] | None:
        """Return the parents of the row's tree, as far as it was verified; None for a chain."""
        if draft.parents is None or self.parents is None:
            return None
        return self.parents[slot][: min(len(draft), self.limit)]

    def note_tokens(self, slot: int, row: Row, count: int) -> None:
        """Give a row what was asked for of the first `count` tokens that the pass emitted; impossible tokens are not
        among the most likely."""
        if self.distances is not None:
            row.distances += self.distances[slot][:count]
        if self.logprobs is not None:
            row.logprobs += self.logprobs[slot][:count]
        if self.top_ids is not None and self.top_logprobs is not None:
            pairs = map(zip, self.top_ids[slot][:count], self.top_logprobs[slot])
            row.top_logprobs += [[(i, p) for i, p in place if p > -math.inf] for place in pairs]

    def verdict(self, slot: int, strategy: str) -> RowVerdict:
        """Return what was decided about a slot's row. Raises SpecdecError for a draft that breaks the protocol."""
        if self.unsound[slot]:
            raise SpecdecError(f"strategy {strategy!r} {UNSOUND[self.unsound[slot]]}")
        accepted, tested = self.accepted[slot], min(self.totals[slot], self.limit)
        path = list(range(accepted)) if self.path is None else self.path[slot][:accepted]
        tokens = [self.draft[slot][n] for n in path]
        if self.failed[slot]:
            return RowVerdict(path, tokens, "failed", self.totals[slot], tested)
        if accepted == tested == self.limit:
            return RowVerdict(path, tokens, "continues", self.totals[slot], tested)
        return RowVerdict(path, [*tokens, self.token[slot]], "closed", self.totals[slot], tested)


@dataclass
class PendingResult:
    """A verify pass that was launched.

    on_device: what the host will read, still on the device
    arriving: the same, on its way to the host
    reader: how it is read
    limit: most tokens that the pass tests per row
    output: what drafters that observe the target see; None: there are none
    """

    on_device: Packed
    arriving: Arriving
    reader: HostReader
    limit: int
    output: PassOutput | None = None

    def read(self) -> VerifyResult:
        """Wait for the one host read of the pass."""
        values = self.reader.fetch_named(self.arriving)
        details = [values.pop(name) for name in list(values) if name.startswith("details")]
        return VerifyResult(**values, details=details, limit=self.limit)


# -- what goes in ------------------------------------------------------------------------------------------------------


class VerifyKey(NamedTuple):
    """What is fixed in a recorded verify pass.

    given: the pass itself
    limit: most tokens tested per row
    vocab_size: the target's
    rule: the acceptance rule
    sampling: signature of the scores' pipeline
    all_have_q: all drafts have a q
    levels, siblings: bounds of the trees; 0 = chains only
    recorded: `Verifier`'s record, top and logprobs
    """

    given: PassKey
    limit: int
    vocab_size: int
    rule: AcceptanceRule
    sampling: Any
    all_have_q: bool
    levels: int
    siblings: int
    recorded: tuple[bool, int, int | None]

    @property
    def is_prefill(self) -> bool:
        return False


@dataclass(frozen=True)
class VerifyInputs(Buffers):
    """What a verify pass is given.

    table [B, DRAFT + S], with trees [B, DRAFT + 2 S]: STARTS ... LIMITS, the drafted ids, the trees' parents
    q [B, S, V]: column s is the distribution that drafted token s was sampled from; None: no draft has q
    states [B, S, H]: what the layers that the pass leaves out made of the fed tokens; None: it runs all layers
    known: the rows' texts, for processors that read them
    """

    table: Tensor
    q: Tensor | None = None
    states: Tensor | None = None
    known: Known | None = None


@dataclass(frozen=True)
class Verified(Buffers):
    """What `verify` returns.

    packed: what the host will read
    fed, logits, hidden, where: for drafters that observe the target; None: there are none
    """

    packed: Packed
    fed: Tensor | None = None
    logits: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None
    where: TreePass | None = None


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
    """The verify passes of one call; `passes` counts them, and `resumed` those without so many first layers.

    record: also read p and q at drafted tokens
    top: with `record`, read details with the `top` most likely tokens per position; 0 = off
    logprobs: read the log-probability of each emitted token, and of so many most likely ones; None = off
    observed: layers whose hidden states drafters observe; None: nobody observes
    """

    runner: Runner
    cache: RaggedCache
    shapes: Shapes
    rule: AcceptanceRule
    sampling: Sampling
    batch: int
    vocab_size: int
    reader: HostReader
    record: bool = False
    top: int = 0
    logprobs: int | None = None
    observed: tuple[int, ...] | None = None
    passes: int = 0
    resumed: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.texts: KnownTexts | None = None
        if self.sampling.row_processors is not None:
            self.texts = KnownTexts(self.batch, self.cache.capacity, self.vocab_size, self.runner.device)

    def launch(self, active: Sequence[tuple[int, Row]]) -> PendingResult:
        """Verify what the active rows have pending, without waiting for the result."""
        plan = self.plan(active)
        runner, states = self._resumed(plan)
        key = self._key(runner, plan)
        known = None if self.texts is None else self.texts.known(key.given.kv_len, runner.device)
        verified = self._run(runner, plan, key, VerifyInputs(self._table(plan), self._q(plan), states, known))
        self.passes += 1
        pending = PendingResult(
            verified.packed, self.reader.start(verified.packed), self.reader, self.shapes.verify_width
        )  # fmt: skip
        if verified.logits is not None and verified.fed is not None:
            pending.output = PassOutput(
                verified.logits, verified.fed, plan.starts, plan.counts, 0, verified.hidden, verified.where,
                self.observed or (),
            )  # fmt: skip
        return pending

    def plan(self, active: Sequence[tuple[int, Row]]) -> PassPlan:
        """Plan the pass that verifies what the rows have pending."""
        limit = self.shapes.verify_width
        drafts = {b: row.pending for b, row in active if row.pending is not None}
        counts = [1 + min(len(drafts[b]), limit - 1) if b in drafts else 0 for b in range(self.batch)]
        starts = [0] * self.batch
        for b, row in active:
            starts[b] = row.size - 1
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

    def _resumed(self, plan: PassPlan) -> tuple[Runner, Tensor | None]:
        """Return the target, or, where all drafts know the states after its first layers, the target without these and
        the states [B, S, H]. In exact mode all layers must see passes of one shape; observers want to see all layers,
        and compiled passes are faster than what is saved."""
        drafts, runner = plan.drafts, self.runner
        layers = {0 if d.states is None else d.layers for d in drafts.values()}
        barred = self.shapes.exact or self.observed is not None or runner.compiled is not None
        if barred or len(layers) != 1 or layers == {0}:
            return runner, None
        known = {b: d.states[: plan.width] for b, d in drafts.items() if d.states is not None}
        some = next(iter(known.values()))
        states = torch.zeros((self.batch, plan.width, some.shape[-1]), dtype=some.dtype, device=some.device)
        put_rows(states, known)
        (first,) = layers
        self.resumed[first] = self.resumed.get(first, 0) + 1
        return runner.without_layers(tuple(range(first))), states

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
            recorded=(self.record, self.top, self.logprobs),
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
        width, limit = plan.width, self.shapes.verify_width
        host = np.zeros((self.batch, DRAFT + width), dtype=np.int64)
        parents = np.full((self.batch, width if plan.has_trees else 0), -1, dtype=np.int64)
        host[:, STARTS], host[:, COUNTS], host[:, LIMITS] = plan.starts, plan.counts, limit
        for b, row in plan.rows:
            host[b, LAST:TOTALS] = row.last, row.key, row.size, row.accepted, row.round_key
        late: dict[int, dict[int, Tensor]] = {DRAFT: {}, TOTALS: {}, DRAFT + width: {}}  # by column: on the device
        for b, draft in plan.drafts.items():
            host[b, TOTALS : HAS_Q + 1] = len(draft), b in plan.q
            if isinstance(draft.tokens, Tensor):
                late[DRAFT][b] = draft.tokens if len(draft) <= width else draft.tokens[:width]
            else:
                listed = self._checked(draft)[:width]
                host[b, DRAFT : DRAFT + len(listed)] = listed
            if draft.length is not None:
                late[TOTALS][b] = draft.length[None]
            if isinstance(draft.parents, Tensor):
                late[DRAFT + width][b] = draft.parents[:width]
                host[b, LIMITS] = draft.levels
            elif plan.has_trees:
                listed = list(chain_parents(len(draft)) if draft.parents is None else draft.parents)[:width]
                parents[b, : len(listed)] = listed
        table = array_on(np.concatenate([host, parents], axis=1), self.runner.device)
        for column, rows in late.items():
            put_rows(table, rows, column)
        return self.reader.ranks.first(table)

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
        return {} if self.rule.proposal in COUPLED and not self.record else found

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


# -- on the device -----------------------------------------------------------------------------------------------------


def verify(
    runner: Runner, cache: RaggedCache, sampling: Sampling, key: VerifyKey, inputs: VerifyInputs,
    texts: KnownTexts | None = None, history: History | None = None,
) -> Verified:  # fmt: skip
    """Run the pass and accept, from tensors alone.

    texts: for processors that read them, as far as `inputs` does not have them
    history: for processors that are called on the host; the fed ids are added here
    """
    fed, draft, outside = runner.part(_fed)(inputs.table, key.vocab_size, key.given.width)
    tree, where = _trees(key, inputs.table)
    out = runner.forward(cache, key.given, PassInputs(fed, inputs.table[:, :LAST].T, where, inputs.states))
    read = None
    if texts is not None and inputs.known is not None:
        width = key.given.width
        on_path = chain_paths(len(fed), width, width, fed.device) if tree is None else tree.lineage
        prefixes = Prefixes(inputs.known.ids, inputs.table[:, STARTS], fed, on_path)
        read = texts.texts(inputs.known, prefixes, None if history is None else replace(history, fed=fed))
    # Compiled only where it computes nothing with the scores but to compare them: sums would round differently.
    lossless = key.rule.recordable and not key.rule.lossy
    compares = sampling.greedy and lossless and key.recorded == NO_RECORD and tree is None
    decide = runner.part(_decide) if compares and read is None else _decide
    flat, names, forms = decide(out.logits, inputs, draft, outside, tree, key, sampling, read)
    seen = (fed, out.logits, out.hidden, where) if key.given.observed is not None else ()
    return Verified(Packed(flat, names, forms), *seen)


def _fed(table: Tensor, vocab_size: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ids of the pass [B, width], the drafted ids [B, S], 0 where the target lacks one, and True there."""
    draft = table[:, DRAFT : DRAFT + width]
    outside = (draft < 0) | (draft >= vocab_size)
    draft = draft.masked_fill(outside, 0)
    return torch.cat([table[:, LAST, None], draft[:, : width - 1]], dim=1), draft, outside


def _trees(key: VerifyKey, table: Tensor) -> tuple[Tree | None, TreePass | None]:
    """Return the rows' trees, and where the pass puts their tokens."""
    if not key.levels:
        return None, None
    parents = table[:, DRAFT + key.given.width :]
    tree = Tree.of(parents, key.levels, key.siblings, table[:, LIMITS])
    return tree, TreePass.of(tree, table[:, STARTS], table[:, COUNTS])


def _decide(
    logits: Tensor, inputs: VerifyInputs, draft: Tensor, outside: Tensor, tree: Tree | None, key: VerifyKey,
    sampling: Sampling, texts: Texts | None,
) -> tuple[Tensor, tuple[str, ...], tuple[Any, ...]]:  # fmt: skip
    """Compute what the host will read from the pass's logits: the fields of `Packed`."""
    q, numbers = inputs.q, inputs.table[:, :DRAFT].T
    totals, missing = numbers[TOTALS], None
    if tree is not None:
        missing = inputs.table[:, DRAFT : DRAFT + key.given.width] == MISSING
        outside = outside & ~missing
    block = Block(
        scores=sampling.scores(logits[..., : key.vocab_size], texts),
        draft=draft,
        lengths=totals.clamp(max=key.limit),
        final=totals < key.limit,
        totals=totals,
        keys=numbers[KEYS],
        positions=numbers[POSITIONS],
        sampling=sampling,
        q=q,
        has_q=None if q is None else numbers[HAS_Q] > 0,
        all_have_q=key.all_have_q,
        tree=tree,
        done=numbers[DONE],
        round_keys=numbers[ROUNDS],
        outside=outside,
        missing=missing,
    )
    packed = Packed.of(_wanted(block, judge(block, key.rule), key))
    return packed.flat, packed.names, packed.forms


def _wanted(block: Block, verdict: Verdict, key: VerifyKey) -> dict[str, Tensor]:
    """Compute the fields of `VerifyResult`; slots come first in every tensor."""
    record, top, logprobs = key.recorded
    assert verdict.unsound is not None
    wanted = {
        "accepted": verdict.accepted, "token": verdict.token, "failed": verdict.failed, "totals": block.totals,
        "draft": block.draft if block.missing is None else block.draft.masked_fill(block.missing, MISSING),
        "unsound": verdict.unsound,
    }  # fmt: skip
    rows = torch.arange(len(block.draft), device=block.draft.device)[:, None]
    if verdict.path is not None and block.tree is not None:
        wanted |= {"path": verdict.path, "parents": block.tree.parents}
    if logprobs is not None:
        emitted, columns = verdict.emitted(block.draft)
        logarithms = torch.log_softmax(block.scores, dim=-1)  # [B, S, V]
        wanted["logprobs"] = logarithms[rows, columns, emitted]
        if logprobs:
            likely = logarithms.topk(min(logprobs, logarithms.shape[-1]))
            wanted |= {"top_ids": likely.indices[rows, columns], "top_logprobs": likely.values[rows, columns]}
    if key.rule.lossy and key.rule.distance is not None:
        wanted["distances"] = key.rule.distance(block, verdict)
    if record:
        tested_at = block.columns.expand_as(block.draft) if block.tree is None else block.tree.tested_at
        wanted["p"] = block.p[rows, tested_at, block.draft]
        wanted["q"] = (block.p if block.q is None else block.q).gather(-1, block.draft[..., None])[..., 0]
    if record and top:
        found = Probe(block, verdict, key.rule, top).tensors()
        wanted |= {f"details.{i}": tensor for i, tensor in enumerate(found)}
    return wanted


FEW = 4  # up to so many rows are copied one by one faster than by one indexed write


def put_rows(table: Tensor, rows: Mapping[int, Tensor], column: int = 0) -> None:
    """Set table[b, column : column + len(rows[b])] = rows[b] for every b.

    table [B, S, ...]: contiguous
    rows [n, ...]: on any device
    """
    lengths = {b: row.shape[0] for b, row in rows.items()}
    if len(rows) <= FEW:
        for b, row in rows.items():
            table[b, column : column + lengths[b]].copy_(row, non_blocking=table.is_cuda)
    elif list(rows) == list(range(len(table))) and len(set(lengths.values())) == 1:
        together = moved(torch.stack(list(rows.values())), table.device)
        table[:, column : column + lengths[0]].copy_(together)
    else:
        flat = torch.cat([moved(row, table.device).to(table.dtype) for row in rows.values()])
        places = np.concatenate([b * table.shape[1] + column + np.arange(n) for b, n in lengths.items()])
        table.view(-1, *table.shape[2:]).index_copy_(0, array_on(places, table.device), flat)
