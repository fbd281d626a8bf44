"""What the one host read of a verify pass brings back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from specdec.decoding.acceptance import UNSOUND, Verdict
from specdec.decoding.row import Row, RowVerdict
from specdec.device.host_read import Arriving, HostReader, Packed
from specdec.drafters.base import Draft
from specdec.errors import SpecdecError
from specdec.models.runner import PassOutput


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

    @cached_property
    def emitted(self) -> Tensor:
        """The emitted tokens, still on the device, [B, n]: those that are accepted, the one after them, and padding."""
        found = self.on_device
        path = found["path"] if "path" in found.names else None
        return Verdict(found["accepted"], found["token"], found["failed"], path).emitted(found["draft"])[0]

    def read(self) -> VerifyResult:
        """Wait for the one host read of the pass."""
        values = self.reader.fetch_named(self.arriving)
        details = [values.pop(name) for name in list(values) if name.startswith("details")]
        return VerifyResult(**values, details=details, limit=self.limit)
