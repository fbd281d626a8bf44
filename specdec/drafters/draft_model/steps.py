"""The draft steps of a round as data: what is fixed in them, what they are given, what they propose, when they stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.device.buffers import Buffers
from specdec.device.transfer import array_on
from specdec.drafters.base import Draft, DraftRequest, RowSampling
from specdec.errors import SpecdecError
from specdec.models.passes import PassKey
from specdec.sampling.sampling import Purpose
from specdec.sampling.texts import Known

# Columns of `StepInputs.table`; the tokens to catch up with follow.
STARTS, COUNTS, KEYS, POSITIONS, LEVELS, TOKENS = range(6)
LEVEL_UNIT = 1e6  # thresholds are whole numbers of its inverse


class StopRule(Protocol):
    """When a length policy ends a draft: where `score` falls below the row's threshold (`DraftCore.levels`). Hashable.

    product: the product of all scores so far is compared
    after: the token at which the score falls is still proposed; such a rule may look at it
    """

    product: bool
    after: bool

    def score(self, q: Tensor, token: Tensor | None) -> Tensor:
        """Score a position, [B].

        q [B, V]: the draft's distribution at T = 1, before processors
        token [B]: the sampled token, shown to a rule with `after` only
        """
        ...


class Stops(NamedTuple):
    """When a draft ends before its k tokens: parameters of `DraftModel`, and the rule of a length policy."""

    p_min: float
    n_min: int
    top_n: int | None
    rule: StopRule | None = None


def check_steps(drafter: Any) -> None:
    """Raise SpecdecError if a strategy's n_min is above its n_max."""
    if drafter.n_min > drafter.n_max:
        got = f"got n_min={drafter.n_min}, n_max={drafter.n_max}"
        raise SpecdecError(f"{drafter.name} needs n_min <= n_max, {got}")


class StepsKey(NamedTuple):
    """What is fixed in a recorded function of draft steps.

    first: the pass that catches up
    steps: tokens to draft
    sampled: tokens are sampled from q, with streams of `purpose`; else they are its argmax
    scores: signature of the pipeline to scores
    p_min, n_min, top_n, rule: as in `Stops`
    vocab_size: the target's
    feeds_last: the last drafted token is fed as well
    """

    first: PassKey
    steps: int
    sampled: bool
    purpose: Purpose
    scores: Any
    p_min: float
    n_min: int
    top_n: int | None
    rule: StopRule | None
    vocab_size: int
    feeds_last: bool = False


@dataclass(frozen=True)
class StepInputs(Buffers):
    """What draft steps are given.

    table [B, 5 + W]: STARTS ... POSITIONS (of the first drafted token), LEVELS (thresholds of a chain, most levels of a
        tree), and tokens to catch up with
    known: the rows' texts, for processors that read them
    """

    table: Tensor
    known: Known | None = None

    @property
    def numbers(self) -> Tensor:
        """STARTS ... LEVELS, [5, B]."""
        return self.table[:, :TOKENS].T

    @property
    def keys(self) -> Tensor:
        """Keys of the rows' random numbers, [B]."""
        return self.table[:, KEYS]

    @property
    def positions(self) -> Tensor:
        """Sequence positions of the first drafted tokens, [B]."""
        return self.table[:, POSITIONS]

    @property
    def tokens(self) -> Tensor:
        """Tokens to catch up with, [B, W]."""
        return self.table[:, TOKENS:]


@dataclass(frozen=True)
class Proposal(Buffers):
    """Drafts of all rows, on the device.

    tokens [B, k]: drafted ids
    lengths [B]: tokens of each draft; None: all have k
    q [B, k, V]: the distributions that the tokens were sampled from; None: they are argmaxes
    states [B, k + 1, H]: as in `Draft`
    """

    tokens: Tensor
    lengths: Tensor | None
    q: Tensor | None
    states: Tensor | None = None

    def with_rows(self, other: Proposal, rows: Sequence[int]) -> Proposal:
        """Return this proposal with some rows of another, which may have fewer tokens: its rows end there."""
        taken = np.zeros(len(self.tokens), dtype=bool)
        taken[list(rows)] = True
        mask = array_on(taken, self.tokens.device)[:, None]
        short = self.tokens.shape[1] - other.tokens.shape[1]
        q = None
        if self.q is not None and other.q is not None:
            q = torch.where(mask[..., None], F.pad(other.q, (0, 0, 0, short)), self.q)
        return Proposal(torch.where(mask, F.pad(other.tokens, (0, short)), self.tokens), None, q)

    def draft(self, row: int, limit: int, name: str) -> Draft:
        """Return the draft of one row, at most `limit` tokens."""
        q = None if self.q is None else self.q[row]
        length = None if self.lengths is None else self.lengths[row]
        return Draft(self.tokens[row], None, q, name, length).truncated(limit)


def recordable(sampling: RowSampling | None) -> bool:
    """True if draft steps can be named by what they compute."""
    return sampling is None or sampling.signature is not None


def stream_of(request: DraftRequest) -> int:
    """Return the key of a row's random numbers; 0 if nothing is sampled."""
    if request.sampling is None or not request.sampling.sampled:
        return 0
    assert request.noise is not None
    return request.sampling.streams(request.noise)[0]


def may_propose(key: StepsKey, logits: Tensor, i: int) -> Tensor | bool:
    """Tell where p_min lets position i be proposed, [B]: by q_i alone, never by the sampled token."""
    if key.sampled and i < key.n_min:
        return True
    if not key.p_min:
        return True
    best = logits.float() if key.top_n is None else logits.float().topk(min(key.top_n, logits.shape[-1])).values
    return torch.softmax(best, dim=-1).amax(dim=-1) >= key.p_min


def score_of(rule: StopRule, logits: Tensor, token: Tensor, likely: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a stop rule compares with its threshold, [B], and the product so far, [B].

    Only a rule that stops after a sampled token is shown it: otherwise the draft's length would depend on what it ends
    with, and the text would not be the target's under leviathan.
    """
    q = torch.softmax(logits.float(), dim=-1)
    score = rule.score(q, token if rule.after else None)
    return (likely * score if rule.product else score), likely * score


def next_inputs(token: Tensor, slots: Tensor, counts: Tensor, end: int, width: int) -> tuple[Tensor, Tensor]:
    """Return (tokens [B, width], layout [2, B]) of the pass that feeds one drafted token [B] per row at `slots` [B].

    Rows that have reached `end`, and those outside the round (counts [B] = 0), take no part.
    """
    fits = (counts > 0) & (slots < end)
    layout = torch.stack([torch.where(fits, slots, 0), fits.long()])
    return F.pad(token[:, None], (0, width - 1)), layout
