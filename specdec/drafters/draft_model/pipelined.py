"""Pipelined drafting: the next drafts start before the host has read the verdict on the last ones.

Otherwise the host waits for the verdict while the target verifies, and then the device waits for the host to launch the
next draft. A draft model only needs two numbers of the verdict per row, and these are on the device: so the next draft
is launched right after the verify pass, and takes them from there. When the host has read them too, the draft is there;
if another row has taken a slot meanwhile, it is dropped.

Used only if one strategy drafts, recorded, with room for a whole draft whatever is accepted (trees: tree.py). An
automatic length is then chosen before the verdict too (`LengthController.plan`).

A draft model on a GPU of its own *overlaps*: it does not wait for the verdict, but drafts on while the target verifies,
as if all were accepted. Its next token is a guess at the target's own; a row whose guess was right has its next draft
already, the others draft anew. Random numbers belong to a position and a round, so the drafts are the same either way;
whether one was there earlier depends on the guess, and on no token of the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.device.buffers import Buffers
from specdec.device.transfer import array_on
from specdec.drafters.base import DraftRequest
from specdec.drafters.draft_model import steps as at
from specdec.drafters.draft_model.core import DraftCore
from specdec.drafters.draft_model.steps import Proposal, StepInputs, StepsKey, Stops, recordable, stream_of
from specdec.sampling.texts import Known

# Columns of `AheadInputs.table`: ids of a row whose draft is being verified, the key of its random numbers, tokens of
# that draft.
SIZE, STREAM, DRAFTED = range(3)
COLUMNS = 16  # shorter drafts are padded, so that all lengths share one compilation


class AheadKey(NamedTuple):
    """What is fixed in a recorded pipelined draft: its steps."""

    steps: StepsKey


@dataclass(frozen=True)
class AheadInputs(Buffers):
    """What a pipelined draft is given.

    table [B, 3]: SIZE ... DRAFTED; DRAFTED 0: a row without a draft
    draft [B, k]: the tokens that are being verified
    accepted [B], token [B]: the verdict: how many of them are accepted, and the token after them
    known: the rows' texts after the verdict, for processors that read them
    """

    table: Tensor
    draft: Tensor
    accepted: Tensor
    token: Tensor
    known: Known | None = None


@dataclass(frozen=True)
class Ahead:
    """A pipelined proposal; sizes: row -> ids it had before the verdict, the newest included."""

    proposal: Proposal
    sizes: dict[int, int]

    @property
    def steps(self) -> int:
        """Tokens of a draft."""
        return self.proposal.tokens.shape[1]


@dataclass(frozen=True)
class Overlapped:
    """A proposal that takes a draft for accepted before it is verified.

    proposal: [B, 1 + k] tokens, of which the first is the guess
    sizes: row -> ids that it has if all is accepted, without the guess
    """

    proposal: Proposal
    sizes: dict[int, int]

    @property
    def guess(self) -> Tensor:
        """The guessed token of every row, [B]."""
        return self.proposal.tokens[:, 0]

    @property
    def rest(self) -> Proposal:
        """The proposal after the guess."""
        q = None if self.proposal.q is None else self.proposal.q[:, 1:]
        return Proposal(self.proposal.tokens[:, 1:], None, q)


def possible(core: DraftCore, requests: Sequence[DraftRequest], k: int) -> bool:
    """True if drafts of k tokens can follow those that are being verified, whatever is accepted."""
    drafted = [core.outstanding.get(r.row, 0) for r in requests]
    room = all(d and core.room(r, k + d + 1) == k + d + 1 for r, d in zip(requests, drafted, strict=True))
    return room and recordable(requests[0].sampling)


def go_ahead(
    core: DraftCore,
    requests: Sequence[DraftRequest],
    k: int,
    stops: Stops,
    vocab_size: int,
    judged: Tensor,
    accepted: Tensor,
    token: Tensor,
) -> Ahead:
    """Draft k tokens from the verdict on the device.

    judged [B, k']: the drafts that are being verified
    accepted [B], token [B]: the verdict
    """
    sampling, host = requests[0].sampling, np.zeros((core.batch, 3), dtype=np.int64)
    for r in requests:
        host[r.row] = len(r.tokens) + 1, stream_of(r), core.outstanding[r.row]
    reach = int((host[:, SIZE] + host[:, DRAFTED]).max()) + k
    steps = core.key_of(sampling, core.shapes.width(2), reach, k, stops, vocab_size)
    known = None if sampling is None else sampling.known(steps.first.kv_len, core.runner.device)
    inputs = AheadInputs(array_on(host, core.runner.device), judged, accepted, token, known)

    def function(given: AheadInputs) -> Proposal:
        draft = F.pad(given.draft, (0, max(0, COLUMNS - given.draft.shape[1])))
        table = core.runner.part(_caught_up)(given.table, draft, given.accepted, given.token, steps.first.width)
        return core.steps(steps, sampling, StepInputs(table, given.known), requests)

    proposal = core.runner.run(core.cache, AheadKey(steps), inputs, function)
    core.passes += k
    return Ahead(proposal, {r.row: len(r.tokens) + 1 for r in requests})


def can_overlap(core: DraftCore, requests: Sequence[DraftRequest], k: int, stops: Stops) -> bool:
    """True if k tokens after a guess can be drafted: what ends drafts early would look at the guess too."""
    sampling = requests[0].sampling
    reads_texts = sampling is not None and sampling.texts is not None
    return not (stops.p_min or stops.rule or reads_texts) and possible(core, requests, k)


def overlap(
    core: DraftCore, requests: Sequence[DraftRequest], k: int, stops: Stops, vocab_size: int, judged: Tensor
) -> Overlapped:
    """Draft a guess and k tokens after it, as if all of `judged` [B, k'] were accepted."""
    sampling, width = requests[0].sampling, core.shapes.width(1)
    host, sizes = np.zeros((core.batch, at.TOKENS), dtype=np.int64), {}
    drafted = [max(1, core.outstanding.get(b, 0)) for b in range(core.batch)]
    for r in requests:
        sizes[r.row] = size = len(r.tokens) + 1 + drafted[r.row]
        host[r.row, at.STARTS : at.POSITIONS + 1] = size - 1, 1, stream_of(r), size
    reach = int(host[:, at.STARTS].max()) + k + 1
    steps = core.key_of(sampling, width, reach, k + 1, stops, vocab_size)
    last = judged.gather(1, array_on(np.array(drafted)[:, None] - 1, judged.device))
    table = torch.cat([array_on(host, judged.device), F.pad(last, (0, width - 1))], dim=1)
    proposal = core.runner.run(
        core.cache, steps, StepInputs(table), lambda given: core.steps(steps, sampling, given, requests)
    )
    core.passes += k + 1
    return Overlapped(proposal, sizes)


def take_rows(core: DraftCore, made: Overlapped, requests: Sequence[DraftRequest], guesses: Sequence[int]) -> set[int]:
    """Count the drafts of rows whose guess was right as fed; returns these rows. guesses: of every row."""
    k, right = made.proposal.tokens.shape[1] - 1, set()
    for r in requests:
        size, room = made.sizes.get(r.row), core.room(r, k)
        # A row that has begun anew has no verdict.
        if r.row in core.accepted and len(r.tokens) == size and r.last == guesses[r.row] and room == k:
            core.length[r.row] = core.write(r)
            core.outstanding[r.row] = k
            right.add(r.row)
    return right


def take(core: DraftCore, ahead: Any, requests: Sequence[DraftRequest], longest: int) -> bool:
    """Count a pipelined draft as fed, if it is what `requests` ask for, up to `longest` tokens; returns True if it is.

    ahead: `Ahead`, or trees with the same fields `sizes` and `steps`
    If not, nothing has happened: the slots that were written lie after every row's length.
    """
    for r in requests:
        size, accepted = ahead.sizes.get(r.row), core.accepted.get(r.row)
        if size is None or accepted is None or len(r.tokens) != size + accepted:
            return False
        if ahead.steps < longest or core.room(r.up_to(0), ahead.steps) < ahead.steps:
            return False
    for r in requests:
        core.length[r.row] = core.write(r)
        core.outstanding[r.row] = ahead.steps
    return True


def _caught_up(table: Tensor, draft: Tensor, accepted: Tensor, token: Tensor, width: int) -> Tensor:
    """Build `StepInputs.table` from the fields of `AheadInputs`.

    The cache lacks only the last drafted token; if all were accepted feed it and the bonus token (2), else the
    correction alone (1).
    """
    size, drafted = table[:, SIZE], table[:, DRAFTED]
    active, whole = drafted > 0, accepted >= drafted
    last = draft.gather(1, (drafted - 1).clamp(min=0)[:, None])[:, 0]
    start = torch.where(active, size + torch.minimum(accepted, drafted - 1), 0)
    count = torch.where(active, 1 + whole.long(), 0)
    fed = torch.stack([torch.where(whole, last, token), torch.where(whole, token, 0)], dim=1)
    numbers = torch.stack([start, count, table[:, STREAM], size + accepted + 1, torch.zeros_like(size)], dim=1)
    return torch.cat([numbers, F.pad(fed, (0, width - 2))], dim=1)
