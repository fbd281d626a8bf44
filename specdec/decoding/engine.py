"""The loop: draft, verify, accept, trim. One loop, for one row and for many.

Data flow of a pass, for the B slots of the batch:

    admit   free slots take the next prompts: prefill all but the last token, several rows in one pass where that pays,
            tell the drafters; what another slot's prompt has in common with one's own is copied
    draft   rows without an open draft ask the chain; every row now has a draft, perhaps an empty one
    verify  the target sees [newest token, draft ...] of every row in one pass, and the acceptance rule says on the
            device how many drafted tokens stand, and which token follows (decoding/verification.py); where a strategy
            needs no more than that, it starts the next drafts behind the pass (drafters/draft_model/pipelined.py); one
            host read
    commit  rows take their tokens, stop where a stop falls; trimming = the row's size, nothing is copied, but for
            accepted paths of trees, whose slots move to where a chain would have them

A draft longer than a pass is verified in chunks: a chunk whose tokens all stand leaves the rest of the draft pending,
and the row goes on in the next pass, beside rows that start new rounds. A tree is verified in one pass
(models/trees.py), beside rows with chains; nodes that do not fit into it are dropped before.

Invariants: the K/V of a row's ids without the newest are in its slots before every pass; nothing is emitted that the
acceptance rule has not passed; figures end where the text ends (stats.py); a row never sees its neighbours.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from specdec.decoding.acceptance import UNSOUND
from specdec.decoding.probe import details_of
from specdec.decoding.result import Round
from specdec.decoding.row import Row
from specdec.decoding.verification import Facts, Verified, Verifier
from specdec.device.transfer import to_device
from specdec.drafters.base import NO_DRAFT, Draft, DraftRequest, RowNoise, RowSampling
from specdec.drafters.chain import Chain
from specdec.errors import SpecdecError
from specdec.models.kv_cache import SHORT, KeptRows, shared_first
from specdec.models.trees import MISSING, moves, shape_of
from specdec.sampling.sampling import fold_int
from specdec.stats import Stats, Times

NOTHING = np.zeros(0, dtype=np.int64)  # the text of a slot that holds no row worth keeping


@dataclass
class Engine:
    """One call in flight. `rows` is the queue; `batch` slots serve it."""

    verifier: Verifier
    chain: Chain
    rows: Sequence[Row]
    kept: KeptRows | None = None
    times: Times = field(default_factory=Times)

    def __post_init__(self) -> None:
        self.runner, self.cache, self.shapes = self.verifier.runner, self.verifier.cache, self.verifier.shapes
        self.sampling, self.rule, self.batch = self.verifier.sampling, self.verifier.rule, self.verifier.batch
        self.record = self.verifier.record  # yield Round objects, with p and q at drafted tokens
        self.queue = deque(row for row in self.rows if row.finish_reason is None)
        self.slots: list[Row | None] = [None] * self.batch
        self.clock = Clock(self.runner.device)
        self.prefills: list[tuple[Any, Any]] = []  # marks around those of this pass
        self.ahead: list[tuple[str, Any, Any]] = []  # the span of drafts that were started before this pass

    def run(self) -> Iterator[list[Round]]:
        """Run to the end; one list of rounds a pass (empty unless `record`)."""
        while active := self.admit():
            started = self.clock.mark()
            self.draft(active)
            drafted = self.clock.mark()
            launched = self.verifier.launch(active)
            if launched.output is not None:
                self.chain.observe(launched.output)
            judged = self.clock.mark()
            ahead = self.look_ahead(active, launched.verified)
            self.clock.settle(self.times)  # the passes before; the device is busy with this one meanwhile
            facts = self.verifier.read(launched)
            spans = [("draft", started, drafted), ("verify", drafted, judged), *self.ahead]
            self.clock.noted += spans + [("prefill", *marks) for marks in self.prefills]
            self.prefills, self.ahead = [], ahead
            took = dict.fromkeys(("draft", "verify"), 0.0)
            for phase, *marks in spans if self.record else ():
                took[phase] += self.clock.span(*marks)
            yield self.commit(active, facts, took)

    # -- admit ---------------------------------------------------------------------------------------------------

    def active(self) -> list[tuple[int, Row]]:
        """Slots with a row that is not finished."""
        return [(b, row) for b, row in enumerate(self.slots) if row is not None and row.finish_reason is None]

    def admit(self) -> list[tuple[int, Row]]:
        """Fill free slots from the queue; returns the active ones, none when nothing is left to do."""
        free = [b for b, row in enumerate(self.slots) if row is None or row.finish_reason is not None]
        starting = {b: self.queue.popleft() for b in free[: len(self.queue)]}
        for group in self._groups(starting):
            self._start({b: starting[b] for b in group})
        self._switch()
        return self.active()

    def _groups(self, starting: Mapping[int, Row]) -> list[list[int]]:
        """Which slots are prefilled together, and in what order: what their prompts have in common is computed once."""
        alone = [[b] for b in starting]
        # When slots fall free depends on the drafts. So in exact mode only the first prompts of a call go together.
        if not self.shapes.together or (self.shapes.exact and self.verifier.passes):
            return alone
        groups = shared_first({b: row.tokens for b, row in starting.items()}, SHORT, self._shared_step)
        return alone if self.shapes.exact and len(groups) > 1 else groups

    @property
    def _shared_step(self) -> int:
        """In exact mode only whole chunks are shared: only what was computed in the same chunks has the same bits."""
        return self.shapes.widths[-1] if self.shapes.exact else 1

    def _start(self, rows: Mapping[int, Row]) -> None:
        """Rows take their slots, all at once."""
        started = self.clock.mark()
        known = {slot: self._restore(slot, row) for slot, row in rows.items()}
        seen = self.chain.observe if self.chain.observers else None
        missing = {slot: row.tokens[known[slot] :].tolist() for slot, row in rows.items()}
        self.runner.prefill(self.cache, self.shapes, missing, known, seen)
        for slot, row in rows.items():
            row.alone = len(rows) == 1
            if self.sampling.row_processors is not None:
                row.processors = self.sampling.row_processors(row.index, row.prompt, row.stops.max_new_tokens)
                row.known = to_device(row.prompt, self.runner.device)
            row.sampling = RowSampling(self.sampling, self.rule.proposal, row.processors)
            self.slots[slot] = row
        self.prefills.append((started, self.clock.mark()))
        for slot, row in rows.items():
            self.chain.begin(slot, row.tokens)

    def _switch(self) -> None:
        """Compute rows anew whose factors of rotation have changed with their length (models/rope.py)."""
        for slot, row in self.active():
            if self.runner.follow(self.cache, slot, row.size - 1):
                started = self.clock.mark()
                seen = self.chain.observe if self.chain.observers else None
                self.runner.prefill(self.cache, self.shapes, {slot: row.tokens.tolist()}, {slot: 0}, seen)
                row.alone = True
                self.prefills.append((started, self.clock.mark()))

    def _restore(self, slot: int, row: Row) -> int:
        """Copy into the slot what is there of the row's prompt, and wipe the rest; returns how many tokens it has."""
        held = self._held()
        self.slots[slot] = None  # from here on the slot's cache is not the old row's, also after an interrupt
        self.runner.follow(self.cache, slot, row.size - 1)
        known = self.kept.restore(self.cache, slot, row.tokens) if self.kept else 0
        # Observers see what is fed, and nothing else.
        if not self.chain.observers and len(row.tokens) >= SHORT:
            if known > 0:  # the slot holds what an earlier call kept, no more its last row
                held.texts[slot] = NOTHING
            known = held.restore(self.cache, slot, row.tokens, self._shared_step, known)
        self.cache.wipe(slot, known)
        return known

    def _held(self) -> KeptRows:
        """The prompts that the slots hold, for what others have in common with them: a system prompt, a few-shot
        header, the same prompt again."""

        def sound(other: Row) -> bool:
            return other.error is None and (other.alone or not self.shapes.exact)

        prompts = [row.ids[: len(row.prompt) - 1] if row and sound(row) else NOTHING for row in self.slots]
        return KeptRows(self.cache, prompts)

    # -- draft ---------------------------------------------------------------------------------------------------

    def draft(self, active: Sequence[tuple[int, Row]]) -> None:
        """Give every row a draft: what is left of its last one, or a new one from the chain, perhaps empty."""
        new = [(b, row) for b, row in active if row.pending is None]
        # A round emits one token more than it accepts, so a row with room for one token has no use for a draft.
        requests = [self._request(b, row) for b, row in new if self._room(row) > 0 and self.chain.drafters]
        drafts: dict[int, Draft] = {}
        if requests:
            made = self.chain.draft(requests, len(self.queue))
            drafts = {r.row: draft for r, draft in zip(requests, made, strict=True)}
        for b, row in new:
            draft = drafts.get(b, NO_DRAFT)
            # A tree is verified in one pass; the first nodes of a tree are a tree.
            row.open_round(draft if draft.parents is None else draft.first(self.shapes.verify_width - 1))

    def _room(self, row: Row) -> int:
        """Most tokens that the row's next draft may have. It depends on the row's length alone."""
        return min(row.room - 1, self.runner.before_switch(row.size - 1))

    def _request(self, slot: int, row: Row) -> DraftRequest:
        return DraftRequest(
            row=slot,
            tokens=row.tokens,
            last=row.last,
            n_max=self._room(row),
            position=row.size - 1,
            sampling=row.sampling,
            noise=RowNoise(row.key, fold_int(row.key, row.rounds)),
        )

    def look_ahead(self, active: Sequence[tuple[int, Row]], verified: Verified) -> list[tuple[str, Any, Any]]:
        """Start the drafts after those that are being verified, where that needs no look at what becomes of them.
        Returns their span in time."""
        drafts = [row.pending for _, row in active if row.pending is not None]
        chunked = any(not 0 < len(draft) < self.shapes.verify_width for draft in drafts)
        if chunked or not self.chain.looks_ahead:
            return []
        started = self.clock.mark()
        requests = [self._request(b, row) for b, row in active]
        went = self.chain.look_ahead(requests, verified.on_device("accepted"), verified.on_device("token"))
        return [("draft", started, self.clock.mark())] if went else []

    # -- commit --------------------------------------------------------------------------------------------------

    def commit(
        self, active: Sequence[tuple[int, Row]], facts: Facts, spans: dict[str, float]
    ) -> list[Round]:  # fmt: skip
        """Rows take what was accepted; finished rounds are counted and the drafters told."""
        rounds, moved = [], []
        for b, row in active:
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
            row.missing = {n for n in range(tested) if facts.draft[b][n] == MISSING}
            self._count(b, row, facts.totals[b] - len(row.missing), path)
            taken = row.take(tokens, facts.logprobs[b] if facts.logprobs else None, origins)
            self._advance(row, tokens[:taken])
            bonus = tokens[-1] if taken > accepted else None
            path = path[:taken]
            if failed and row.finish_reason is None:
                row.fail("error", f"row {row.index}: logits of NaN, +inf or nothing but -inf at position {row.size}")
            if goes_on and row.finish_reason is None:
                row.pending = draft.rest(accepted, facts.totals[b])
            else:
                row.close_round()
                tree = draft.parents is not None
                moved += moves(b, [n + 1 for n in path], position) if tree else []
                self.chain.accept(b, row.accepted, path if tree else None, row.drafted)
                row.drafted = row.accepted = 0
            if self.record:
                rounds.append(self._round(row, b, facts, draft, position, path, bonus, tokens[:taken], spans))
        self.cache.compact(moved)
        return rounds

    def _count(self, slot: int, row: Row, total: int, path: Sequence[int]) -> None:
        if row.drafted == 0 and total > 0:
            row.drafted = total
            self.chain.settle(slot, total)
        row.accepted += len(path)
        row.path = path

    def abandon(self) -> None:
        """End every row's open round where the call was interrupted."""
        for b, row in enumerate(self.slots):
            if row is not None:
                row.abandon_round()
                self.chain.count(b, row.accepted, row.drafted)

    def _advance(self, row: Row, tokens: list[int]) -> None:
        if row.known is not None and tokens:
            row.known = torch.cat([row.known, to_device(tokens, self.runner.device)])
            row.processors.commit(tokens)

    def _round(
        self, row: Row, slot: int, facts: Facts, draft: Draft, position: int, path: list[int], bonus: int | None,
        tokens: list[int], spans: dict[str, float],
    ) -> Round:  # fmt: skip
        tested = min(facts.totals[slot], self.shapes.verify_width)
        goes_on = bonus is None and row.finish_reason is None
        nodes = list(range(tested if bonus is not None or goes_on else len(path)))
        parents = None
        if draft.parents is not None:
            shape = shape_of(tuple(draft.parents))
            nodes = [n for n in (nodes if bonus is not None else shape.nodes(len(path))) if n not in row.missing]
            place = {-1: -1} | {node: i for i, node in enumerate(nodes)}
            parents, path = [place[draft.parents[n]] for n in nodes], [place[n] for n in path]
        assert facts.p is not None and facts.q is not None
        tokenizer = row.stops.tokenizer
        details = None
        if self.verifier.top:
            columns = [0, *(n + 1 for n in nodes)][: self.shapes.verify_width]
            details = details_of(facts.details, slot, nodes, columns, len(tokens), draft.q is not None)
        return Round(
            row=row.index,
            position=position,
            strategy=draft.drafter or None if nodes else None,
            draft=[facts.draft[slot][n] for n in nodes],
            p=[facts.p[slot][n] for n in nodes],
            q=[facts.q[slot][n] for n in nodes] if draft.q is not None else None,
            accepted=len(path),
            bonus=bonus,
            tokens=tokens,
            text=tokenizer.decode(tokens, clean_up_tokenization_spaces=False) if tokenizer is not None else None,
            times=spans,
            finish_reason=row.finish_reason,
            parents=parents,
            path=None if draft.parents is None else path,
            details=details,
        )

    def stats(self, total_seconds: float, reads_before: int) -> Stats:
        """The statistics of the call so far."""
        self.clock.settle(self.times)
        self.times.total = total_seconds
        return Stats(
            rows=[row.records for row in self.rows],
            emitted=[row.size - len(row.prompt) for row in self.rows],
            counters=self.chain.counters,
            verify_passes=self.verifier.passes,
            host_reads=self.verifier.reader.count - reads_before,
            times=self.times,
        )


class Clock:
    """Marks in time that do not make the host wait: CUDA events on a GPU, the host's clock elsewhere.

    noted: spans by their phase (a field of `Times`), to be added up when the host has nothing better to do.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.noted: list[tuple[str, Any, Any]] = []
        self.spare: list[torch.cuda.Event] = []  # to make an event takes longer than to record one

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = self.spare.pop() if self.spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def span(self, start: Any, end: Any) -> float:
        """Seconds between two marks; on a GPU only after a host read that follows both."""
        return float(start.elapsed_time(end)) / 1000 if self.cuda else float(end - start)

    def settle(self, times: Times) -> None:
        """Add what is noted to `times`; on a GPU only after a host read that follows all of it."""
        for phase, start, end in self.noted:
            setattr(times, phase, getattr(times, phase) + self.span(start, end))
        if self.cuda:
            self.spare += {id(mark): mark for _, *marks in self.noted for mark in marks}.values()
        self.noted = []
