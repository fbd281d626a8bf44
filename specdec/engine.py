"""The loop: draft, verify, accept, trim. One loop, for one row and for many.

Data flow of a pass, for the B slots of the batch:

    admit   free slots take the next prompts: prefill all but the last token, tell the drafters
    draft   rows without an open draft ask the chain; every row now has a draft, perhaps an empty one
    verify  the target sees [newest token, draft ...] of every row in one pass
    accept  on the device: how many drafted tokens stand, and the token that follows
    read    one host read
    commit  rows take their tokens, stop where a stop falls; trimming = the row's size, nothing is copied, but for
            accepted paths of trees, whose slots move to where a chain would have them

A draft longer than a pass is verified in chunks: a chunk whose tokens all stand leaves the rest of the draft pending,
and the row goes on in the next pass, beside rows that start new rounds. A tree is verified in one pass (trees.py),
beside rows with chains; nodes that do not fit into it are dropped before.

Invariants: the K/V of a row's ids without the newest are in its slots before every pass; nothing is emitted that the
acceptance rule has not passed; generated = accepted + rounds; a row never sees its neighbours.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.acceptance import UNSOUND, AcceptanceRule, Block, Verdict, judge
from specdec.details import Probe, details_of
from specdec.drafters.base import Draft, DraftRequest, RowNoise, RowSampling
from specdec.drafters.chain import Chain
from specdec.errors import SpecdecError
from specdec.kv_cache import KeptRows, RaggedCache
from specdec.result import Round
from specdec.rows import Row
from specdec.runner import HostReader, Runner, Shapes, to_device
from specdec.sampling import History, Sampling, fold_int
from specdec.stats import Stats, Times
from specdec.trees import Parents, Shape, TreeLayout, array_on, chain_parents, moves, shape_of, tree_pass


@dataclass
class Facts:
    """What the one host read of a pass brings back, as lists over the slots."""

    accepted: list[int]
    token: list[int]
    failed: list[int]
    totals: list[int]  # proposed tokens of the whole draft
    draft: list[list[int]]
    unsound: list[int]
    path: list[list[int]] | None = None  # of a pass with trees: the nodes that stand
    logprobs: list[list[float]] | None = None
    p: list[list[float]] | None = None
    q: list[list[float]] | None = None
    details: list[Any] = field(default_factory=list)  # of details.Probe


@dataclass
class Engine:
    """One call in flight. `rows` is the queue; `batch` slots serve it."""

    runner: Runner
    cache: RaggedCache
    shapes: Shapes
    chain: Chain
    rule: AcceptanceRule
    sampling: Sampling
    rows: Sequence[Row]
    batch: int
    vocab_size: int
    reader: HostReader
    kept: KeptRows | None = None
    record: bool = False  # yield Round objects, with p and q at drafted tokens
    top: int = 0  # > 0: and with details, of so many best tokens a position
    logprobs: bool = False
    verify_passes: int = 0
    times: Times = field(default_factory=Times)

    def __post_init__(self) -> None:
        self.queue = deque(row for row in self.rows if row.finish_reason is None)
        self.slots: list[Row | None] = [None] * self.batch
        self.clock = Clock(self.runner.device)

    def run(self) -> Iterator[list[Round]]:
        """Run to the end; one list of rounds a pass (empty unless `record`)."""
        while self.admit():
            started = self.clock.mark()
            self.draft()
            drafted = self.clock.mark()
            block = self.verify()
            verdict = judge(block, self.rule)
            verified = self.clock.mark()
            facts = self.read(block, verdict)
            spans = {"draft": self.clock.span(started, drafted), "verify": self.clock.span(drafted, verified)}
            self.times.draft += spans["draft"]
            self.times.verify += spans["verify"]
            yield self.commit(facts, spans)

    # -- admit ---------------------------------------------------------------------------------------------------

    def active(self) -> list[tuple[int, Row]]:
        """Slots with a row that is not finished."""
        return [(b, row) for b, row in enumerate(self.slots) if row is not None and row.finish_reason is None]

    def admit(self) -> bool:
        """Fill free slots from the queue; False when nothing is left to do."""
        for b, row in enumerate(self.slots):
            if self.queue and (row is None or row.finish_reason is not None):
                self._start(b, self.queue.popleft())
        return bool(self.active())

    def _start(self, slot: int, row: Row) -> None:
        started = time.perf_counter()
        self.slots[slot] = None  # from here on the slot's cache is not the old row's, also after an interrupt
        known = self.kept.restore(self.cache, slot, row.tokens) if self.kept else 0
        self.cache.wipe(slot, known)
        seen = self.chain.observe if self.chain.observers else None
        self.runner.prefill(self.cache, self.shapes, slot, row.tokens[known:].tolist(), known, seen)
        if self.sampling.row_processors is not None:
            row.processors = self.sampling.row_processors(row.index, row.prompt, row.stops.max_new_tokens)
            row.known = to_device(row.prompt, self.runner.device)
        self.slots[slot] = row
        self.times.prefill += time.perf_counter() - started
        self.chain.begin(slot, row.tokens)

    # -- draft ---------------------------------------------------------------------------------------------------

    def draft(self) -> None:
        """Give every row a draft: what is left of its last one, or a new one from the chain, perhaps empty."""
        new = [(b, row) for b, row in self.active() if row.pending is None]
        # A round emits one token more than it accepts, so a row with room for one token has no use for a draft.
        requests = [self._request(b, row) for b, row in new if row.room > 1 and self.chain.drafters]
        drafts = {r.row: d for r, d in zip(requests, self.chain.draft(requests), strict=True)} if requests else {}
        for b, row in new:
            draft = drafts.get(b, Draft())
            # A tree is verified in one pass; the first nodes of a tree are a tree.
            row.open_round(draft if draft.parents is None else draft.first(self.shapes.verify_width - 1))

    def _request(self, slot: int, row: Row) -> DraftRequest:
        return DraftRequest(
            row=slot,
            tokens=row.tokens,
            last=row.last,
            n_max=row.room - 1,
            position=row.size - 1,
            sampling=RowSampling(self.sampling, self.rule.proposal, row.processors),
            noise=RowNoise(row.key, fold_int(row.key, row.rounds)),
        )

    # -- verify --------------------------------------------------------------------------------------------------

    def verify(self) -> Block:
        """One target pass over [newest, draft ...] of every row; the block that acceptance judges."""
        limit, device = self.shapes.verify_width, self.runner.device
        active = self.active()
        drafts = {b: row.pending for b, row in active if row.pending is not None}
        counts = [1 + min(len(drafts[b]), limit - 1) if b in drafts else 0 for b in range(self.batch)]
        width = self.shapes.width(max(counts))
        draft, totals = self._draft_matrix(drafts, width)
        outside = (draft < 0) | (draft >= self.vocab_size)
        draft = draft.masked_fill(outside, 0)
        layout = [[0, 0, 0, 0]] * self.batch
        for b, row in active:
            layout[b] = [row.last, row.key, row.size, row.accepted]
        last, keys, positions, done = to_device(layout, device).unbind(dim=1)
        fed = torch.cat([last[:, None], draft[:, : width - 1]], dim=1)
        starts = [0] * self.batch
        for b, row in active:
            starts[b] = row.size - 1
        watched = bool(self.chain.observers)
        trees = self._trees(drafts)
        where = None
        if trees is not None:
            where = tree_pass(trees, [range(count) for count in counts], width, starts, device)
        out = self.runner.step(self.cache, self.shapes, fed, starts, counts, hidden=watched, tree=where)
        if watched:
            self.chain.observe(out)
        self.verify_passes += 1
        history = self._history(fed, counts, trees) if self.sampling.row_processors is not None else None
        scores = self.sampling.scores(out.logits[..., : self.vocab_size], history)
        q, has_q, all_claim = self._proposal_laws(drafts, scores)
        return Block(
            scores=scores, draft=draft, lengths=totals.clamp(max=limit), final=totals < limit, keys=keys,
            positions=positions, sampling=self.sampling, q=q, has_q=has_q, all_claim=all_claim, totals=totals,
            tree=TreeLayout.of(trees, width, device) if trees is not None else None, done=done,
            outside=outside,
        )  # fmt: skip

    def _trees(self, drafts: dict[int, Draft]) -> list[Shape] | None:
        """The shape of every row's draft, chains as trees; None when no row has a tree."""
        if all(draft.parents is None for draft in drafts.values()):
            return None
        limit = self.shapes.verify_width
        parents: list[Parents] = [()] * self.batch
        for b, draft in drafts.items():
            chain = chain_parents(min(len(draft), limit))
            parents[b] = chain if draft.parents is None else tuple(draft.parents)
        return [shape_of(p) for p in parents]

    def _draft_matrix(self, drafts: dict[int, Draft], width: int) -> tuple[Tensor, Tensor]:
        """Drafted ids [B, S], column s tested by the s-th law, and the drafts' whole lengths [B], on the device."""
        device = self.runner.device
        ids = [[0] * width for _ in range(self.batch)]
        lengths = [0] * self.batch
        on_device: dict[int, Tensor] = {}
        unread: dict[int, Tensor] = {}
        for b, draft in drafts.items():
            lengths[b] = len(draft)
            if isinstance(draft.tokens, Tensor):
                on_device[b] = draft.tokens[:width]
            else:
                listed = self._checked(draft)[:width]
                ids[b][: len(listed)] = listed
            if draft.length is not None:
                unread[b] = draft.length[None]
        matrix, totals = to_device(ids, device), to_device(lengths, device)
        put_rows(matrix, on_device)
        put_rows(totals[:, None], unread)
        return matrix, totals

    def _checked(self, draft: Draft) -> list[int]:
        ids = [int(t) for t in draft.tokens]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise SpecdecError(f"strategy {draft.drafter!r} proposed an id outside the target's vocabulary: {ids}")
        return ids

    def _proposal_laws(self, drafts: dict[int, Draft], scores: Tensor) -> tuple[Tensor | None, Tensor | None, bool]:
        """q [B, S, V] aligned with the scores, which rows claim one [B], and whether all drafted rows do."""
        claims = {b: d.q for b, d in drafts.items() if d.q is not None and len(d) > 0}
        for b, law in claims.items():
            if law.shape[-1] != scores.shape[-1]:
                wide, name = law.shape[-1], drafts[b].drafter
                raise SpecdecError(f"strategy {name!r} gave a q over {wide} ids, the target has {scores.shape[-1]}")
        # Under coupled q is for the records alone: acceptance compares tokens.
        if not claims or (self.rule.proposal == "coupled" and not self.record):
            return None, None, False
        q = torch.zeros_like(scores)
        put_rows(q, {b: law[: scores.shape[1]] for b, law in claims.items()})
        has_q = to_device([b in claims for b in range(self.batch)], scores.device, torch.bool)
        return q, has_q, len(claims) == sum(len(d) > 0 for d in drafts.values())

    def _history(self, fed: Tensor, counts: Sequence[int], trees: Sequence[Shape] | None) -> History:
        known: list[Tensor | None] = [None] * self.batch
        processors: list[Any] = [None] * self.batch
        for b, row in self.active():
            assert row.known is not None
            known[b], processors[b] = row.known[:-1], row.processors
        paths = None
        if trees is not None:
            paths = [[shape.path(s) for s in range(count)] for shape, count in zip(trees, counts, strict=True)]
        return History(known, fed, processors, counts, paths)

    # -- read and commit -----------------------------------------------------------------------------------------

    def read(self, block: Block, verdict: Verdict) -> Facts:
        """The one host read of a pass."""
        assert verdict.unsound is not None
        wanted = [verdict.accepted, verdict.token, verdict.failed, block.totals, block.draft, verdict.unsound]
        if verdict.path is not None:
            wanted.append(verdict.path)
        if self.logprobs:
            emitted, columns = verdict.emitted(block.draft)
            rows = torch.arange(self.batch, device=emitted.device)[:, None]
            wanted.append(torch.log_softmax(block.scores, dim=-1)[rows, columns, emitted])
        if self.record:
            tested_at = block.columns.expand_as(block.draft) if block.tree is None else block.tree.tested_at
            rows = torch.arange(self.batch, device=tested_at.device)[:, None]
            wanted.append(block.p[rows, tested_at, block.draft])
            wanted.append((block.p if block.q is None else block.q).gather(-1, block.draft[..., None])[..., 0])
        if self.record and self.top:
            wanted += Probe(block, verdict, self.rule, self.top).tensors()
        values = self.reader.read(*wanted)
        optional = iter(values[6:])
        facts = Facts(*values[:6])
        if verdict.path is not None:
            facts.path = next(optional)
        if self.logprobs:
            facts.logprobs = next(optional)
        if self.record:
            facts.p, facts.q = next(optional), next(optional)
        facts.details = list(optional)
        return facts

    def commit(self, facts: Facts, spans: dict[str, float]) -> list[Round]:
        """Rows take what was accepted; finished rounds are counted and the drafters told."""
        rounds, moved = [], []
        for b, row in self.active():
            draft, position = row.pending, row.size - 1
            assert draft is not None
            if facts.unsound[b]:
                raise SpecdecError(f"strategy {draft.drafter!r} {UNSOUND[facts.unsound[b]]}")
            tested = min(facts.totals[b], self.shapes.verify_width)
            accepted, failed = facts.accepted[b], bool(facts.failed[b])
            goes_on = not failed and accepted == tested == self.shapes.verify_width
            path = list(range(accepted)) if facts.path is None else facts.path[b][:accepted]
            tokens = [facts.draft[b][n] for n in path] + ([] if goes_on or failed else [facts.token[b]])
            origins: list[str | None] = [row.strategy] * accepted + [None] * (len(tokens) - accepted)
            self._count(b, row, facts.totals[b], accepted)
            taken = row.take(tokens, facts.logprobs[b] if facts.logprobs else None, origins)
            self._advance(row, tokens[:taken])
            if failed and row.finish_reason is None:
                row.fail("error", f"row {row.index}: logits of NaN, +inf or nothing but -inf at position {row.size}")
            if goes_on and row.finish_reason is None:
                row.pending = draft.rest(accepted, facts.totals[b])
            else:
                row.close_round(had_token=not goes_on and not failed, path=path)
                tree = draft.parents is not None
                moved += moves(b, [n + 1 for n in path], position) if tree else []
                self.chain.accept(b, row.accepted, path if tree else None)
            if self.record:
                bonus = tokens[accepted] if len(tokens) > accepted else None
                rounds.append(self._round(row, b, facts, draft, position, path, bonus, tokens[:taken], spans))
        self.cache.compact(moved)
        return rounds

    def _count(self, slot: int, row: Row, total: int, accepted: int) -> None:
        if row.drafted == 0 and total > 0:
            row.drafted = total
            self.chain.settle(slot, total)
        row.accepted += accepted

    def _advance(self, row: Row, tokens: list[int]) -> None:
        if row.known is not None and tokens:
            row.known = torch.cat([row.known, to_device(tokens, self.runner.device)])
            row.processors.commit(tokens)

    def _round(
        self, row: Row, slot: int, facts: Facts, draft: Draft, position: int, path: list[int], bonus: int | None,
        tokens: list[int], spans: dict[str, float],
    ) -> Round:  # fmt: skip
        n = min(facts.totals[slot], self.shapes.verify_width)
        assert facts.p is not None and facts.q is not None
        tokenizer = row.stops.tokenizer
        columns = min(n + 1, self.shapes.verify_width)
        details = details_of(facts.details, slot, n, columns, len(tokens), draft.q is not None) if self.top else None
        return Round(
            row=row.index,
            position=position,
            strategy=draft.drafter or None if n else None,
            draft=facts.draft[slot][:n],
            p=facts.p[slot][:n],
            q=facts.q[slot][:n] if draft.q is not None else None,
            accepted=len(path),
            bonus=bonus,
            tokens=tokens,
            text=tokenizer.decode(tokens, clean_up_tokenization_spaces=False) if tokenizer is not None else None,
            times=spans,
            finish_reason=row.finish_reason,
            parents=None if draft.parents is None else list(draft.parents),
            path=None if draft.parents is None else path,
            details=details,
        )

    def stats(self, total_seconds: float, reads_before: int) -> Stats:
        """The statistics of the call so far."""
        self.times.total = total_seconds
        return Stats(
            rows=[row.records for row in self.rows],
            emitted=[row.size - len(row.prompt) for row in self.rows],
            counters=self.chain.counters,
            verify_passes=self.verify_passes,
            host_reads=self.reader.count - reads_before,
            times=self.times,
        )


def put_rows(table: Tensor, rows: Mapping[int, Tensor]) -> None:
    """table[b, : len(rows[b])] = rows[b] for every b, in one write; table [B, S, ...], rows [n, ...] on any device."""
    if not rows:
        return
    flat = torch.cat([row.to(table.device, table.dtype, non_blocking=True) for row in rows.values()])
    places = np.concatenate([b * table.shape[1] + np.arange(len(row)) for b, row in rows.items()])
    table.view(-1, *table.shape[2:]).index_copy_(0, array_on(places, table.device), flat)


class Clock:
    """Marks in time that do not make the host wait: CUDA events on a GPU, the host's clock elsewhere."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def span(self, start: Any, end: Any) -> float:
        """Seconds between two marks; on a GPU only after a host read that follows both."""
        return float(start.elapsed_time(end)) / 1000 if self.cuda else float(end - start)
