"""The loop of a call: draft, verify, accept, one more token, commit and trim. One loop for 1 and N rows.

It is `specdec/reference.py`, batched, cached and fast. A pass over the B slots of the batch:

    admit      free slots take the next prompts: prefill all but the last token, several rows in one pass where that
               pays, and tell the drafters (decoding/admission.py)
    1 draft    rows without an open draft ask the chain of strategies; every row then has a draft, perhaps an empty one
    2 verify   the target sees [newest token, draft ...] of every row in one pass,
    3 accept   and the acceptance rule decides on the device how many drafted tokens are accepted,
    4 token    and which token follows them (decoding/verify_pass.py); pipelined drafting starts the next drafts from
               that alone
    ahead      where no row drafts the next pass starts from that verdict as well, before the host has read it
    read       the decisions come to the host in one transfer
    5 commit   rows take their tokens and end at a stop; the cache is trimmed to what was accepted: a row's size is set

A draft longer than a pass is verified in chunks: if a whole chunk is accepted, the rest of the draft stays pending and
the row goes on in the next pass, while other rows start new rounds. A tree is verified in one pass; nodes that do not
fit into it are dropped before.

Invariants: the K/V of a row's ids without the newest are in its slots before every pass; nothing is emitted that the
acceptance rule has not passed; figures end where the text ends (stats.py); a row never sees its neighbours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from specdec.decoding.admission import Admission
from specdec.decoding.record import record_round
from specdec.decoding.result import Round
from specdec.decoding.row import Row, RowVerdict
from specdec.decoding.verification import Verifier
from specdec.decoding.verify_result import PendingResult, VerifyResult
from specdec.device.clock import Clock
from specdec.drafters.base import NO_DRAFT, Draft, DraftRequest, RowNoise
from specdec.drafters.chain import Chain
from specdec.models.kv_cache import KeptRows
from specdec.sampling.sampling import fold_int
from specdec.stats import Stats, Times

ActiveRows = Sequence[tuple[int, Row]]  # (slot, row) of unfinished rows


@dataclass
class Engine:
    """One call in flight. `rows` is the queue; the verifier's slots serve it."""

    verifier: Verifier
    chain: Chain
    rows: Sequence[Row]
    kept: KeptRows | None = None

    def __post_init__(self) -> None:
        self.runner, self.cache, self.shapes = self.verifier.runner, self.verifier.cache, self.verifier.shapes
        self.clock = Clock(self.runner.device)
        self.queue = deque(row for row in self.rows if row.finish_reason is None)
        self.slots: list[Row | None] = [None] * self.verifier.batch
        self.ahead: tuple[ActiveRows, PendingResult] | None = None  # a pass that runs already
        self.admission = Admission(self.verifier, self.chain, self.clock, self.slots, self.kept)

    def run(self) -> Iterator[list[Round]]:
        """Run to the end; one list of rounds a pass (empty unless the verifier records)."""
        while active := self.admit():
            active, pending = self.take_ahead(active)
            if pending is None:
                with self.clock.phase("draft"):
                    self.draft(active)  # 1
                with self.clock.phase("verify"):
                    pending = self.verifier.launch(active)  # 2, 3 and 4
                    self.chain.observe(pending.output)
            self.start_next_drafts(active, pending)
            self.start_next_pass(active, pending)
            self.clock.settle()  # the device is busy with this pass meanwhile
            result = pending.read()
            spans = self.clock.end_pass()
            took = self.clock.seconds(spans, "draft", "verify") if self.verifier.wanted.p_and_q else {}
            yield self.commit(active, result, took)  # 5

    def admit(self) -> ActiveRows:
        """Fill free slots from the queue; returns the active rows, none if nothing is left to do."""
        free = [b for b, row in enumerate(self.slots) if row is None or row.finish_reason is not None]
        self.admission.start({b: self.queue.popleft() for b in free[: len(self.queue)]})
        active = [(b, row) for b, row in enumerate(self.slots) if row is not None and row.finish_reason is None]
        self.admission.rotate_anew(active)
        return active

    # -- 1 draft ---------------------------------------------------------------------------------------------------

    def draft(self, active: ActiveRows) -> None:
        """Give every row a draft: what is left of its last one, or a new one from the chain, perhaps empty."""
        new = [(b, row) for b, row in active if row.pending is None]
        # A round emits one token more than it accepts, so a row with room for one token has no use for a draft.
        asked = new if self.chain.drafters else []
        requests = [self._request(b, row) for b, row in asked if self._room(row) > 0]
        drafts: dict[int, Draft] = {}
        if requests:
            made = self.chain.draft(requests, len(self.queue))
            drafts = {r.row: draft for r, draft in zip(requests, made, strict=True)}
        for b, row in new:
            draft = drafts.get(b, NO_DRAFT)
            # A tree is verified in one pass; the first nodes of a tree are a tree.
            row.open_round(draft if draft.parents is None else draft.first(self.shapes.verify_width - 1))
        self.cache.begin_draft([b for b, row in active if row.pending])

    def _room(self, row: Row) -> int:
        """Return the most tokens that the row's next draft may have. It depends on the row's length alone."""
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

    def start_next_drafts(self, active: ActiveRows, pending: PendingResult) -> None:
        """Start the next drafts from the verdict on the device, before the host has read it, if a strategy can."""
        if not self.chain.can_pipeline:
            return
        drafts = [row.pending for _, row in active if row.pending is not None]
        chunked = any(not 0 < len(draft) < self.shapes.verify_width for draft in drafts)
        requests = [self._request(b, row) for b, row in active]
        with self.clock.phase("draft", early=True):
            self.chain.plan(requests)
            if not chunked:
                verdict = pending.on_device
                self.chain.pipeline(requests, verdict["accepted"], verdict["token"], lambda: pending.emitted)

    # -- a pass ahead ----------------------------------------------------------------------------------------------

    def start_next_pass(self, active: ActiveRows, pending: PendingResult) -> None:
        """Launch the next pass from the verdict on the device, if neither this round nor the next one has a draft:
        while the host reads, commits and launches, the device would wait.

        Not if a row without a place in that pass takes a slot now or has just taken one.
        """
        going = [(b, row) for b, row in active if row.room > 1]
        running = sum(row is not None and row.finish_reason is None for row in self.slots)
        joins = running > len(active) or (len(self.queue) > 0 and len(going) < len(self.slots))
        if not going or joins or any(row.pending for _, row in active) or not self.verifier.can_go_ahead:
            return
        asking = [self._request(b, row) for b, row in going if row.room > 2] if self.chain.drafters else []
        if self.chain.rests([replace(r, position=r.position + 1, n_max=r.n_max - 1) for r in asking]):
            with self.clock.phase("verify", early=True):
                self.ahead = going, self.verifier.launch(going, pending)

    def take_ahead(self, active: ActiveRows) -> tuple[ActiveRows, PendingResult | None]:
        """Open the rounds of the pass that was launched ahead, and return it with its rows, less those that a stop has
        ended meanwhile; without one, return the active rows."""
        if self.ahead is not None:
            (rows, pending), self.ahead = self.ahead, None
            left = [(b, row) for b, row in rows if row.finish_reason is None]
            for _, row in left:
                row.open_round(NO_DRAFT)
            self.chain.rest([b for b, row in left if self._room(row) > 0])
            if left:
                return left, pending
        return active, None

    # -- 5 commit and trim -----------------------------------------------------------------------------------------

    def commit(self, active: ActiveRows, result: VerifyResult, took: dict[str, float]) -> list[Round]:
        """Commit what was accepted, count rounds that ended, tell the drafters, trim the cache.

        took: seconds of the pass's draft and verify.
        """
        rounds = []
        for slot, row in active:
            draft, start = row.pending, row.size - 1
            assert draft is not None
            verdict = result.verdict(slot, draft.drafter)
            if row.note(verdict, result.parents_of(slot, draft), result.draft[slot]):
                self.chain.settle(slot, row.drafted)
            try:
                emitted = self._take(row, verdict)
            finally:  # a stopping criterion may be interrupted among the tokens
                result.note_tokens(slot, row, row.size - 1 - start)
            if verdict.status == "continues" and row.finish_reason is None:
                row.pending = draft.rest(len(verdict.path), verdict.total)
            else:
                path = verdict.path[: len(emitted)]
                self._close(slot, row, path if draft.parents is not None else None)
            if self.verifier.wanted.p_and_q:
                rounds.append(record_round(row, slot, draft, start, verdict, emitted, result, took))
        self.cache.rewind({slot: row.size - 1 for slot, row in active})
        return rounds

    def _take(self, row: Row, verdict: RowVerdict) -> list[int]:
        """Append tokens to the row until a stop; returns those it took."""
        own = len(verdict.tokens) - len(verdict.path)
        origins = [row.strategy] * len(verdict.path) + [None] * own
        emitted = verdict.tokens[: row.take(verdict.tokens, origins)]
        if row.processors is not None:
            row.processors.commit(emitted)
        if verdict.status == "failed" and row.finish_reason is None:
            row.fail("error", f"row {row.index}: logits of NaN, +inf or nothing but -inf at position {row.size}")
        return emitted

    def _close(self, slot: int, row: Row, path: Sequence[int] | None) -> None:
        """End the row's round, and tell the drafters."""
        row.close_round()
        self.chain.accept(slot, row.accepted, path, row.drafted)
        row.drafted = row.accepted = 0

    def cancel(self, row: Row) -> None:
        """End a row between two passes, with reason `interrupted`: its slot is free for the next one."""
        row.fail("interrupted")
        self.queue = deque(other for other in self.queue if other is not row)
        for slot, other in enumerate(self.slots):
            if other is row and row.pending is not None:  # all of its draft that was verified was accepted
                self._close(slot, row, None)

    def abandon(self) -> None:
        """End every row's open round, because the call was interrupted."""
        for slot, row in enumerate(self.slots):
            if row is not None:
                row.abandon_round()
                self.chain.count(slot, row.accepted, row.drafted)

    def stats(self, total_seconds: float, reads_before: int) -> Stats:
        """Return the statistics of the call so far."""
        self.clock.settle(wait=True)
        cost = [drafter.cost() for drafter in self.chain.drafters]
        draft_prefill = sum(seconds for _, seconds in cost)
        return Stats(
            rows=[row.records for row in self.rows],
            emitted=[row.size - len(row.prompt) for row in self.rows],
            counters=self.chain.counters,
            verify_passes=self.verifier.passes,
            host_reads=self.verifier.reader.count - reads_before,
            times=Times(**self.clock.totals, draft_prefill=draft_prefill, total=total_seconds),
            draft_passes=sum(passes for passes, _ in cost),
        )
