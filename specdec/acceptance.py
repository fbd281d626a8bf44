"""Acceptance: which drafted tokens stand, and which token follows them. Batched, on device, chains.

Given the target's scores after each fed token, a rule says for every drafted token whether it *stands*, and what to
emit at the first position where none does. p is the target's law (softmax of the scores), q the law the draft was
really drawn from.

- `match` (llama.cpp): sample the target at every position; a drafted token stands iff it equals the sample. Lossless
  for any proposal, because every emitted token is the target's own draw, with the same random numbers as plain
  decoding.
- `leviathan` (Leviathan et al. 2023; Chen et al. 2023): x ~ q stands with probability min(1, p(x) / q(x)); on a
  rejection the residual norm(max(0, p - q)) is sampled, and p itself where the residual is empty. Rows whose draft
  makes no claim about q are judged by `match`, which has the same law for deterministic proposals.
- `coupled` (Daliri, Musco & Suresh 2024; Gumbel coupling): judged as `match` is, but model drafters draw from q with
  the random numbers that the target draws from p with. Equal numbers make equal tokens likely: the acceptance is
  sum_x 1 / sum_y max(p_y / p_x, q_y / q_x) (theory.expected_acceptance), and the text is still plain decoding's.

Greedy is the T -> 0 case of all: a drafted token stands iff it is the argmax.

Rules are an open seam: `register_rule` adds one. A rule that changes the output's law must say `lossy=True`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.sampling import Purpose, Sampling, race, streams, uniform


@dataclass
class Block:
    """One target pass, as acceptance sees it. Column s holds the law of the token after the s-th fed token.

    scores [B, S, V] float32, processed; draft [B, S]: the drafted token tested at column s; lengths [B]: how many are
    tested; final [B]: whether the draft ends here, so that a token follows when all stand (False: the next chunk goes
    on); q [B, S, V] float32 and has_q [B], or None; all_claim: whether the host knows that every row has a q, so that
    the target need not be sampled at every position; totals [B]: lengths of the whole drafts, chunks to come
    included (acceptance does not look at them); keys [B]: row keys; positions [B]: sequence position of the
    token that column 0 predicts.
    """

    scores: Tensor
    draft: Tensor
    lengths: Tensor
    final: Tensor
    totals: Tensor
    keys: Tensor
    positions: Tensor
    sampling: Sampling
    q: Tensor | None = None
    has_q: Tensor | None = None
    all_claim: bool = False

    @cached_property
    def p(self) -> Tensor:
        return torch.softmax(self.scores, dim=-1)

    @cached_property
    def columns(self) -> Tensor:
        return torch.arange(self.scores.shape[1], device=self.scores.device)

    def streams(self, purpose: Purpose) -> Tensor:
        """Random streams [B, S], one per position."""
        return streams(self.keys[:, None], self.positions[:, None] + self.columns, purpose)

    @cached_property
    def own(self) -> Tensor:
        """The target's own choice at every position [B, S]: what plain decoding would emit there."""
        if self.sampling.greedy:
            return self.scores.argmax(dim=-1)
        return race(self.p, self.streams(Purpose.SAMPLE))


@dataclass
class Verdict:
    """accepted [B]: drafted tokens that stand; token [B]: the token after them; failed [B]: the law at that position
    is not a law (NaN or all -inf scores), so nothing may be emitted there."""

    accepted: Tensor
    token: Tensor
    failed: Tensor


@dataclass(frozen=True)
class AcceptanceRule:
    """stands(block) -> bool [B, S]; follow(block, accepted [B]) -> ids [B], for a law of at least one token.

    proposal: how model drafters must propose under this rule: their argmax, a sample of q, or ("coupled") the sample of
    q that the target's own random numbers give.
    """

    name: str
    proposal: Literal["argmax", "sample", "coupled"]
    stands: Callable[[Block], Tensor]
    follow: Callable[[Block, Tensor], Tensor]
    lossy: bool = False


def judge(block: Block, rule: AcceptanceRule) -> Verdict:
    """Apply a rule to one pass. No host read."""
    sound = block.scores.amax(dim=-1).isfinite()  # [B, S]; amax hands NaN on, and +inf is no law either
    tested = block.columns < block.lengths[:, None]
    stands = rule.stands(block) & tested & sound
    accepted = stands.long().cumprod(dim=-1).sum(dim=-1)  # [B]
    at = accepted.clamp(max=block.scores.shape[1] - 1)
    ongoing = (accepted == block.lengths) & ~block.final
    failed = ~sound.gather(1, at[:, None])[:, 0] & ~ongoing
    return Verdict(accepted, rule.follow(block, at), failed)


def _pick(values: Tensor, column: Tensor) -> Tensor:
    """values [B, S, ...] at one column per row -> [B, ...]."""
    return values[torch.arange(values.shape[0], device=values.device), column]


def _match_stands(block: Block) -> Tensor:
    return block.own == block.draft


def _match_follow(block: Block, accepted: Tensor) -> Tensor:
    return _pick(block.own, accepted)


def _leviathan_stands(block: Block) -> Tensor:
    if block.q is None or block.sampling.greedy:
        return _match_stands(block)
    assert block.has_q is not None
    index = block.draft[..., None]
    p, q = block.p.gather(-1, index)[..., 0], block.q.gather(-1, index)[..., 0]  # [B, S]
    by_ratio = uniform(block.streams(Purpose.ACCEPT)) * q < p  # never a division, so never 0 / 0
    if block.all_claim:
        return by_ratio
    return torch.where(block.has_q[:, None], by_ratio, _match_stands(block))


def _leviathan_follow(block: Block, accepted: Tensor) -> Tensor:
    if block.q is None or block.sampling.greedy:
        return _match_follow(block, accepted)
    assert block.has_q is not None
    rejected = accepted < block.lengths
    p, q = _pick(block.p, accepted), _pick(block.q, accepted)  # [B, V]
    residual = (p - q).clamp(min=0)
    mass = residual.sum(dim=-1, keepdim=True)
    use = (rejected & block.has_q)[:, None] & (mass > 0)
    position = block.positions + accepted
    drawn = torch.where(
        rejected & block.has_q,
        streams(block.keys, position, Purpose.RESIDUAL),
        streams(block.keys, position, Purpose.SAMPLE),
    )
    # Rows without q land here as well: their draw from p with the SAMPLE stream is the sample `match` compared with.
    # Normalised, because weights below float32's smallest normal number would lose their race to tokens without any.
    return race(torch.where(use, residual / mass, p), drawn)


RULES: dict[str, AcceptanceRule] = {}


def register_rule(rule: AcceptanceRule) -> AcceptanceRule:
    """Make a rule available by its name; a rule that changes the law of the output must set `lossy=True`."""
    RULES[rule.name] = rule
    return rule


MATCH = register_rule(AcceptanceRule("match", "argmax", _match_stands, _match_follow))
LEVIATHAN = register_rule(AcceptanceRule("leviathan", "sample", _leviathan_stands, _leviathan_follow))
COUPLED = register_rule(AcceptanceRule("coupled", "coupled", _match_stands, _match_follow))


def find_rule(rule: Any) -> AcceptanceRule:
    """A rule by name, or a rule as it is. Raises SpecdecError for an unknown name."""
    if isinstance(rule, AcceptanceRule):
        return rule
    if not isinstance(rule, str) or rule not in RULES:
        raise SpecdecError(f"unknown acceptance rule {rule!r}; known: {', '.join(sorted(RULES))}")
    return RULES[rule]
