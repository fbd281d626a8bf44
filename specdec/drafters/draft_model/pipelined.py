"""Drafts that start before the host knows what the last ones came to.

While the target verifies, the host has nothing to do but to wait for its verdict, and once it has read that, the
device waits for the host to launch the next draft. A draft model needs no more of the verdict than two numbers a row,
and these are on the device: so the program of the next draft is launched behind the verify pass, and takes them from
there. When the host has read them too it finds the draft made, or, where another row has taken a slot, lets it go.

Only where nothing else has a say: one strategy, a fixed length, chains, room for a whole draft whatever is accepted,
programs that are recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.device.buffers import Buffers
from specdec.device.transfer import array_on
from specdec.drafters.base import DraftRequest
from specdec.drafters.draft_model.core import DraftCore, Proposal, StepInputs, StepsKey, Stops, recordable, stream_of

# Columns of `AheadInputs.table`: ids of a row with a draft to be judged, the key of its draws, tokens of that draft.
SIZE, STREAM, DRAFTED = range(3)


class AheadKey(NamedTuple):
    """What is fixed in such a program: the draft that it makes."""

    steps: StepsKey

    @property
    def passes(self) -> int:
        return self.steps.passes

    @property
    def is_prefill(self) -> bool:
        return False


@dataclass(frozen=True)
class AheadInputs(Buffers):
    """table [B, 3]: SIZE ... DRAFTED (0: a row without a draft); draft [B, k]: the tokens that the target judges; of
    its verdict, accepted [B] and token [B], the one that follows."""

    table: Tensor
    draft: Tensor
    accepted: Tensor
    token: Tensor


@dataclass(frozen=True)
class Ahead:
    """A proposal that was made ahead; sizes: row -> ids it had then, its newest one included."""

    proposal: Proposal
    sizes: dict[int, int]

    @property
    def steps(self) -> int:
        """Tokens of a draft."""
        return self.proposal.tokens.shape[1]


def possible(core: DraftCore, requests: Sequence[DraftRequest], k: int) -> bool:
    """Whether drafts of k tokens can follow those that the rows of `requests` have with the target, whatever stands."""
    drafted = [core.outstanding.get(r.row, 0) for r in requests]
    room = all(d and core.room(r, k + d + 1) == k + d + 1 for r, d in zip(requests, drafted, strict=True))
    texts = any(r.sampling is not None and r.sampling.processors is not None for r in requests)
    return room and not texts and recordable(requests[0].sampling)


def go_ahead(
    core: DraftCore, requests: Sequence[DraftRequest], k: int, stops: Stops, vocab_size: int, judged: Tensor,
    accepted: Tensor, token: Tensor,
) -> Ahead:  # fmt: skip
    """Draft k tokens after what the target will have accepted of `judged` [B, k'], which the rows of `requests` have
    with it, by its verdict alone: accepted [B], token [B]."""
    sampling, host = requests[0].sampling, np.zeros((core.batch, 3), dtype=np.int64)
    for r in requests:
        host[r.row] = len(r.tokens) + 1, stream_of(r), core.outstanding[r.row]
    inputs = AheadInputs(array_on(host, core.runner.device), judged, accepted, token)
    reach = int((host[:, SIZE] + host[:, DRAFTED]).max()) + k
    steps = core.key_of(sampling, core.shapes.width(2), reach, k, stops, vocab_size)

    def program(given: AheadInputs) -> Proposal:
        table = core.runner.part(_caught_up)(given.table, given.draft, given.accepted, given.token, steps.first.width)
        return core.steps(steps, sampling, StepInputs(table), None, requests)

    proposal = core.runner.run(core.cache, AheadKey(steps), inputs, program)
    core.passes += k
    return Ahead(proposal, {r.row: len(r.tokens) + 1 for r in requests})


def take(core: DraftCore, ahead: Ahead, requests: Sequence[DraftRequest]) -> bool:
    """Count what was fed ahead as fed, if it is what `requests` ask for. Where it is not, nothing has happened: the
    slots that were written lie behind every row's length."""
    for r in requests:
        size, accepted = ahead.sizes.get(r.row), core.accepted.get(r.row)
        if size is None or accepted is None or len(r.tokens) != size + accepted:
            return False
        if core.room(r, ahead.steps) < ahead.steps:
            return False
    for r in requests:
        core.length[r.row] = core.write(r)
        core.outstanding[r.row] = ahead.steps
    return True


def _caught_up(table: Tensor, draft: Tensor, accepted: Tensor, token: Tensor, width: int) -> Tensor:
    """`StepInputs.table` from the fields of `AheadInputs`. A row's cache has all of its draft but the last token, so
    that one is fed where it stands, and then the token that follows."""
    size, drafted = table[:, SIZE], table[:, DRAFTED]
    active, whole = drafted > 0, accepted >= drafted
    last = draft.gather(1, (drafted - 1).clamp(min=0)[:, None])[:, 0]
    start = torch.where(active, size + torch.minimum(accepted, drafted - 1), 0)
    count = torch.where(active, 1 + whole.long(), 0)
    fed = torch.stack([torch.where(whole, last, token), torch.where(whole, token, 0)], dim=1)
    numbers = torch.stack([start, count, table[:, STREAM], size + accepted + 1], dim=1)
    return torch.cat([numbers, F.pad(fed, (0, width - 2))], dim=1)
