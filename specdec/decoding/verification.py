"""The target's pass over [newest token, draft ...] of every row, with the acceptance behind it: one program.

Data flow: the drafts of all rows, host lists or tensors, become one matrix of ids; what the host knows of the rows
travels in one transfer. The *program* takes these to everything the host will read, packed: the pass, the scores, the
acceptance rule, and what records ask for. It computes from tensors alone, so it is recorded and replayed as a whole
where the runner replays passes (device/graphs.py). Then there is one host read.

Processors that read the text are called on the host and a user's rule may do anything: there the program just runs,
and only the pass in it is replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.decoding.acceptance import AcceptanceRule, Block, Verdict, judge
from specdec.decoding.probe import Probe
from specdec.decoding.row import Row
from specdec.device.buffers import Buffers
from specdec.device.host_read import Arriving, Form, HostReader, Packed
from specdec.device.transfer import array_on, moved
from specdec.drafters.base import Draft
from specdec.errors import SpecdecError
from specdec.models.kv_cache import RaggedCache
from specdec.models.passes import PassInputs, PassKey
from specdec.models.runner import PassOutput, Runner, Shapes
from specdec.models.trees import (
    MISSING,
    Parents,
    Shape,
    TreeLayout,
    TreePass,
    chain_parents,
    shape_of,
    siblings,
    tree_pass,
)
from specdec.sampling.sampling import History, Sampling

# Columns of `VerifyInputs.table`; the drafts follow.
STARTS, COUNTS, LAST, KEYS, POSITIONS, DONE, TOTALS, CLAIMS, DRAFT = range(9)
NOTHING = (False, 0, False)  # `VerifyKey.recorded` of a call that records nothing


@dataclass
class Facts:
    """What the one host read of a pass brings back, as lists over the slots."""

    accepted: list[int]
    token: list[int]
    failed: list[int]
    totals: list[int]  # proposed tokens of the whole draft
    draft: list[list[int]]  # MISSING: a node of a tree that does not exist
    unsound: list[int]
    path: list[list[int]] | None = None  # of a pass with trees: the nodes that stand
    logprobs: list[list[float]] | None = None
    p: list[list[float]] | None = None
    q: list[list[float]] | None = None
    details: list[Any] = field(default_factory=list)  # of details.Probe


class VerifyKey(NamedTuple):
    """What is fixed in a program: the pass, the rule and the scores' pipeline, whether all drafts claim a q, and what
    is recorded."""

    given: PassKey
    limit: int
    vocab_size: int
    rule: AcceptanceRule
    sampling: Any
    all_claim: bool
    recorded: tuple[bool, int, bool]

    @property
    def passes(self) -> int:
        return 1

    @property
    def rare(self) -> bool:
        return False


@dataclass(frozen=True)
class VerifyInputs(Buffers):
    """table [B, 8 + S]: STARTS ... CLAIMS, and drafted ids as proposed, column s tested by the s-th law; q [B, S, V];
    the trees of the pass, and as acceptance sees them."""

    table: Tensor
    q: Tensor | None = None
    tree: TreePass | None = None
    layout: TreeLayout | None = None


@dataclass(frozen=True)
class Verified(Buffers):
    """What a program returns. names: what is in `packed`; fed, logits and hidden, for drafters that learn from the
    target, are None if there are none."""

    packed: Packed
    names: tuple[str, ...]
    fed: Tensor | None = None
    logits: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None

    def on_device(self, name: str) -> Tensor:
        """A field of `Facts`, before the host has read it."""
        return self.packed.part(self.names.index(name))


@dataclass
class Launched:
    """A verify pass on its way: what it leaves on the device, what the host will read of it, and, for drafters that
    watch the target, what these see."""

    verified: Verified
    arriving: Arriving
    output: PassOutput | None = None


@dataclass
class Verifier:
    """The verify passes of one call; `passes` counts them. record: also p and q at drafted tokens; top > 0: and with
    details, of so many best tokens a position; watched: logits and hidden states are wanted."""

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
    logprobs: bool = False
    watched: bool = False
    passes: int = 0

    def launch(self, active: Sequence[tuple[int, Row]]) -> Launched:
        """Verify what the rows of `active` have pending, without waiting for it."""
        limit, device = self.shapes.verify_width, self.runner.device
        drafts = {b: row.pending for b, row in active if row.pending is not None}
        counts = [1 + min(len(drafts[b]), limit - 1) if b in drafts else 0 for b in range(self.batch)]
        starts = [0] * self.batch
        for b, row in active:
            starts[b] = row.size - 1
        width = self.shapes.width(max(counts))
        trees, tree, layout = self._trees(drafts), None, None
        if trees is not None:
            tree = tree_pass(trees, [range(count) for count in counts], width, starts, device)
            layout = TreeLayout.of(trees, width, device, self._rounded(siblings(trees)))
        claims = self._claims(drafts)
        table = self._table(active, drafts, starts, counts, claims, width)
        reach = max(s + (c if tree is None else tree.region) for s, c in zip(starts, counts, strict=True))
        given, tree = self.runner.key(self.cache, self.shapes, width, reach, tree, hidden=self.watched)
        q = self._laws(claims, width)
        all_claim = q is not None and len(claims) == sum(len(d) > 0 for d in drafts.values())
        key = VerifyKey(
            given, limit, self.vocab_size, self.rule, self.sampling.signature, all_claim,
            (self.record, self.top, self.logprobs),
        )  # fmt: skip
        inputs = VerifyInputs(table, q, tree, layout)
        self.passes += 1
        verified = self._run(key, inputs, active, counts, trees)
        launched = Launched(verified, Arriving.of(verified.packed))
        if verified.logits is not None and verified.fed is not None:
            launched.output = PassOutput(verified.logits, verified.fed, starts, counts, 0, verified.hidden, tree)
        return launched

    def read(self, launched: Launched) -> Facts:
        """The one host read of a pass."""
        names = launched.verified.names
        values = dict(zip(names, self.reader.fetch(launched.arriving), strict=True))
        details = [values.pop(name) for name in names if name.startswith("details")]
        return Facts(**values, details=details)

    def _run(
        self, key: VerifyKey, inputs: VerifyInputs, active: Sequence[tuple[int, Row]], counts: Sequence[int],
        trees: Sequence[Shape] | None,
    ) -> Verified:  # fmt: skip
        runner, cache, sampling = self.runner, self.cache, self.sampling

        def program(inputs: VerifyInputs) -> Verified:
            return verify(runner, cache, sampling, key, inputs)

        if sampling.row_processors is not None:
            return verify(runner, cache, sampling, key, inputs, self._texts(active, counts, trees))
        if not self.rule.recordable or sampling.signature is None:
            return program(inputs)
        return runner.run(cache, key, inputs, program)

    # -- what goes in ----------------------------------------------------------------------------------------------

    def _trees(self, drafts: Mapping[int, Draft]) -> list[Shape] | None:
        """The shape of every row's draft, chains as trees; None when no row has a tree."""
        if all(draft.parents is None for draft in drafts.values()):
            return None
        limit = self.shapes.verify_width
        parents: list[Parents] = [()] * self.batch
        for b, draft in drafts.items():
            chain = chain_parents(min(len(draft), limit))
            parents[b] = chain if draft.parents is None else tuple(draft.parents)
        return [shape_of(p) for p in parents]

    def _rounded(self, size: int) -> int:
        """A size of the pass's trees; where passes are recorded one of a short list, so that few are."""
        return size if self.cache.graphs is None else self.shapes.width(size)

    def _table(
        self, active: Sequence[tuple[int, Row]], drafts: Mapping[int, Draft], starts: Sequence[int],
        counts: Sequence[int], claims: Mapping[int, Tensor], width: int,
    ) -> Tensor:  # fmt: skip
        """`VerifyInputs.table`: what the host knows in one transfer, then what only the device knows."""
        host = np.zeros((self.batch, DRAFT + width), dtype=np.int64)
        host[:, STARTS], host[:, COUNTS] = starts, counts
        for b, row in active:
            host[b, LAST:TOTALS] = row.last, row.key, row.size, row.accepted
        on_device: dict[int, Tensor] = {}
        unread: dict[int, Tensor] = {}
        for b, draft in drafts.items():
            host[b, TOTALS:DRAFT] = len(draft), b in claims
            if isinstance(draft.tokens, Tensor):
                on_device[b] = draft.tokens if len(draft) <= width else draft.tokens[:width]
            else:
                listed = self._checked(draft)[:width]
                host[b, DRAFT : DRAFT + len(listed)] = listed
            if draft.length is not None:
                unread[b] = draft.length[None]
        table = array_on(host, self.runner.device)
        put_rows(table, on_device, DRAFT)
        put_rows(table, unread, TOTALS)
        return table

    def _checked(self, draft: Draft) -> list[int]:
        ids = [int(t) for t in draft.tokens]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise SpecdecError(f"strategy {draft.drafter!r} proposed an id outside the target's vocabulary: {ids}")
        return ids

    def _claims(self, drafts: Mapping[int, Draft]) -> dict[int, Tensor]:
        """The laws of the drafts that claim one, row by row."""
        claims = {b: d.q for b, d in drafts.items() if d.q is not None and len(d) > 0}
        for b, law in claims.items():
            if law.shape[-1] != self.vocab_size:
                wide, name = law.shape[-1], drafts[b].drafter
                raise SpecdecError(f"strategy {name!r} gave a q over {wide} ids, the target has {self.vocab_size}")
        # Under coupled q is for the records alone: acceptance compares tokens.
        return {} if self.rule.proposal == "coupled" and not self.record else claims

    def _laws(self, claims: Mapping[int, Tensor], width: int) -> Tensor | None:
        """q [B, S, V] aligned with the scores; None where no row claims any."""
        if not claims:
            return None
        q = torch.zeros((self.batch, width, self.vocab_size), dtype=torch.float32, device=self.runner.device)
        put_rows(q, {b: law[:width] for b, law in claims.items()})
        return q

    def _texts(
        self, active: Sequence[tuple[int, Row]], counts: Sequence[int], trees: Sequence[Shape] | None
    ) -> History:
        """What text-reading processors see, but for the ids that the pass feeds."""
        known: list[Tensor | None] = [None] * self.batch
        processors: list[Any] = [None] * self.batch
        for b, row in active:
            assert row.known is not None
            known[b], processors[b] = row.known[:-1], row.processors
        paths = None
        if trees is not None:
            paths = [[shape.path(s) for s in range(count)] for shape, count in zip(trees, counts, strict=True)]
        return History(known, torch.zeros(0), processors, counts, paths)


def verify(
    runner: Runner, cache: RaggedCache, sampling: Sampling, key: VerifyKey, inputs: VerifyInputs,
    texts: History | None = None,
) -> Verified:  # fmt: skip
    """The program: from tensors alone, unless `texts` (completed here by the fed ids) names processors to call."""
    fed, draft, outside = runner.part(_fed)(inputs.table, key.vocab_size, key.given.width)
    out = runner.forward(cache, key.given, PassInputs(fed, inputs.table[:, :LAST].T, inputs.tree))
    if texts is not None:
        texts.fed = fed
    # Compiled only where it computes nothing with the scores but to compare them: sums would round differently.
    lossless = key.rule.recordable and not key.rule.lossy
    compares = sampling.greedy and lossless and key.recorded == NOTHING and inputs.layout is None
    judged = runner.part(_judged) if compares and texts is None else _judged
    flat, names, forms = judged(
        out.logits, inputs.table, draft, outside, inputs.q, inputs.layout, key, sampling, texts
    )  # fmt: skip
    seen = (fed, out.logits, out.hidden) if key.given.hidden else ()
    return Verified(Packed(flat, forms), names, *seen)


def _fed(table: Tensor, vocab_size: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ids of the pass [B, width], the drafted ids [B, S], 0 where the target lacks one, and where it does."""
    draft = table[:, DRAFT:]
    outside = (draft < 0) | (draft >= vocab_size)
    draft = draft.masked_fill(outside, 0)
    return torch.cat([table[:, LAST, None], draft[:, : width - 1]], dim=1), draft, outside


def _judged(
    logits: Tensor, table: Tensor, draft: Tensor, outside: Tensor, q: Tensor | None, layout: TreeLayout | None,
    key: VerifyKey, sampling: Sampling, texts: History | None,
) -> tuple[Tensor, tuple[str, ...], tuple[Form, ...]]:  # fmt: skip
    """From the pass's logits to what the host will read: `Packed`, in parts, and the names of what is in it."""
    numbers = table[:, :DRAFT].T
    totals = numbers[TOTALS]
    missing = None if layout is None else table[:, DRAFT:] == MISSING
    block = Block(
        scores=sampling.scores(logits[..., : key.vocab_size], texts), draft=draft,
        lengths=totals.clamp(max=key.limit), final=totals < key.limit, keys=numbers[KEYS],
        positions=numbers[POSITIONS], sampling=sampling, q=q, has_q=None if q is None else numbers[CLAIMS] > 0,
        all_claim=key.all_claim, totals=totals, tree=layout, done=numbers[DONE],
        outside=outside if missing is None else outside & ~missing, missing=missing,
    )  # fmt: skip
    wanted = _wanted(block, judge(block, key.rule), key)
    packed = Packed.of(list(wanted.values()))
    return packed.flat, tuple(wanted), packed.forms


def _wanted(block: Block, verdict: Verdict, key: VerifyKey) -> dict[str, Tensor]:
    """The fields of `Facts`, each with the slots first."""
    record, top, logprobs = key.recorded
    assert verdict.unsound is not None
    wanted = {
        "accepted": verdict.accepted, "token": verdict.token, "failed": verdict.failed, "totals": block.totals,
        "draft": block.draft if block.missing is None else block.draft.masked_fill(block.missing, MISSING),
        "unsound": verdict.unsound,
    }  # fmt: skip
    rows = torch.arange(len(block.draft), device=block.draft.device)[:, None]
    if verdict.path is not None:
        wanted["path"] = verdict.path
    if logprobs:
        emitted, columns = verdict.emitted(block.draft)
        wanted["logprobs"] = torch.log_softmax(block.scores, dim=-1)[rows, columns, emitted]
    if record:
        tested_at = block.columns.expand_as(block.draft) if block.tree is None else block.tree.tested_at
        wanted["p"] = block.p[rows, tested_at, block.draft]
        wanted["q"] = (block.p if block.q is None else block.q).gather(-1, block.draft[..., None])[..., 0]
    if record and top:
        found = Probe(block, verdict, key.rule, top).tensors()
        wanted |= {f"details.{i}": tensor for i, tensor in enumerate(found)}
    return wanted


FEW = 4  # rows that are copied one by one faster than by one write, which must be told where they go


def put_rows(table: Tensor, rows: Mapping[int, Tensor], column: int = 0) -> None:
    """table[b, column : column + len(rows[b])] = rows[b] for every b; table [B, S, ...], contiguous, rows [n, ...] on
    any device."""
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
