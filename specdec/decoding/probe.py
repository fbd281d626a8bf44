"""Ranks, distances and entropies of a pass's distributions, for the host read of a recorded run.

All is computed on the device and comes back in the pass's one read; a run that does not ask for it pays nothing.
*Column* s is the distribution of the token after the s-th fed token; each drafted token is tested by one column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specdec.decoding.acceptance import AcceptanceRule, Block, Verdict
from specdec.drafters.base import COUPLED
from specdec.theory import coupled_joint


@dataclass(frozen=True)
class RoundDetails:
    """One round of one row: n drafted tokens, c columns, e emitted tokens, the k most likely tokens.

    p is the processed distribution; in a greedy run, the softmax of the scores whose argmax is taken.

    rank [n]: place of the drafted token among those of p, 1 = the most probable
    tv [n]: TV(p, q); None if q is unknown
    expected [n]: probability that a token proposed there is accepted if tested, given the tokens before it; for a token
        without q, that this token is accepted; None: unknown
    entropy [c]: of p, in nats
    top_ids, top [c, k]: the most likely tokens of p, and their probabilities
    draft_top_ids, draft_top [n, k]: the same of q; None if q is unknown
    emitted_p, emitted_rank [e]: probability and rank under p of each emitted token
    emitted_column [e]: the column that each emitted token came from
    """

    rank: list[int]
    tv: list[float] | None
    expected: list[float | None]
    entropy: list[float]
    top_ids: list[list[int]]
    top: list[list[float]]
    draft_top_ids: list[list[int]] | None
    draft_top: list[list[float]] | None
    emitted_p: list[float]
    emitted_rank: list[int]
    emitted_column: list[int]


@dataclass(frozen=True)
class Probe:
    """Computes the details of one pass. top: how many of the most likely tokens to keep."""

    block: Block
    verdict: Verdict
    rule: AcceptanceRule
    top: int

    @cached_property
    def tested_at(self) -> Tensor:
        """The column that tests each drafted token, [B, S]."""
        block = self.block
        return block.columns.expand_as(block.draft) if block.tree is None else block.tree.tested_at

    def tensors(self) -> list[Tensor]:
        """Compute what the host read must bring back; slots come first in every tensor."""
        block, p = self.block, self.block.p
        rows = torch.arange(len(p), device=p.device)[:, None]
        tested = p[rows, self.tested_at]  # [B, S, V]
        drafted = tested.gather(-1, block.draft[..., None])
        emitted, columns = self.verdict.emitted(block.draft)
        emitted_from = p[rows, columns]  # [B, E, V]
        chosen = emitted_from.gather(-1, emitted[..., None])
        best = p.topk(min(self.top, p.shape[-1]), dim=-1)
        wanted = [
            (tested > drafted).sum(-1) + 1, self._expected(tested), torch.special.entr(p).sum(-1), best.indices,
            best.values, chosen[..., 0], (emitted_from > chosen).sum(-1) + 1, columns,
        ]  # fmt: skip
        if block.q is not None:
            proposed = block.q.topk(min(self.top, p.shape[-1]), dim=-1)
            wanted += [(tested - block.q).abs().sum(-1) / 2, proposed.indices, proposed.values]
        return wanted

    def _expected(self, tested: Tensor) -> Tensor:
        """Compute `RoundDetails.expected`, [B, S]; NaN where it has no simple form: under `coupled`, siblings after the
        first; under `gumbel-list`, all nodes of trees."""
        block = self.block
        if block.sampling.greedy:
            own = block.scores.argmax(dim=-1).gather(1, self.tested_at)
            return (own == block.draft).to(tested.dtype)
        has_q = torch.zeros_like(block.draft, dtype=torch.bool)
        if block.q is not None and self.rule.proposal != "argmax":
            has_q = block.q.sum(dim=-1) > 0.5  # rows without q, and columns past a draft's end, hold zeros
        if block.tree is None:
            return self._acceptance(tested, has_q, slice(None))
        # A sibling is tested after those before it were rejected: against what these have left of p.
        left, rows = block.p.clone(), torch.arange(len(tested), device=tested.device)
        expected = torch.zeros_like(tested[..., 0])
        seen = torch.zeros_like(has_q)
        for node in range(tested.shape[1]):
            at, one = self.tested_at[:, node], slice(node, node + 1)
            p = left[rows, at]
            found = self._acceptance(p[:, None], has_q[:, one], one)[:, 0]
            if self.rule.proposal in COUPLED:
                is_listed = self.rule.proposal != "coupled"
                found = torch.where((seen[rows, at] | is_listed) & has_q[:, node], torch.nan, found)
            expected[:, node] = found
            seen[rows, at] = True
            left[rows, at] = self._residual(p, has_q[:, node], node)
        return expected

    def _acceptance(self, p: Tensor, has_q: Tensor, nodes: slice) -> Tensor:
        """Compute P(accepted) of the nodes' tokens [B, N] against p [B, N, V]; without q it must be the target's."""
        drafted = p.gather(-1, self.block.draft[:, nodes, None])[..., 0]
        if self.block.q is None or self.rule.proposal == "argmax":
            return drafted
        q = self.block.q[:, nodes]
        if self.rule.proposal in COUPLED:
            joint = coupled_joint(p.double(), torch.where(has_q[..., None], q, p).double())
            return torch.where(has_q, joint.sum(-1).to(p.dtype), drafted)
        return torch.where(has_q, torch.minimum(p, q).sum(-1), drafted)

    def _residual(self, p: Tensor, has_q: Tensor, node: int) -> Tensor:
        """Return what the node's rejection leaves of p, [B, V]."""
        without = p.scatter(-1, self.block.draft[:, node : node + 1], 0.0)
        if self.block.q is not None:
            without = torch.where(has_q[:, None], (p - self.block.q[:, node]).clamp(min=0), without)
        mass = without.sum(dim=-1, keepdim=True)
        return torch.where(mass > 0, without / mass, p)


def details_of(
    values: list[Any], slot: int, nodes: Sequence[int], columns: Sequence[int], emitted: int, has_q: bool
) -> RoundDetails | None:
    """Pick one row's details from `values`, the tensors of `Probe.tensors` as lists; None if there are none.

    nodes, columns: the round's drafted tokens and columns in the pass
    emitted: how many tokens the round emitted
    """
    if not values:
        return None
    rank, expected, entropy, top_ids, top, emitted_p, emitted_rank, emitted_column, *of_q = (v[slot] for v in values)
    known = has_q and bool(of_q)
    place = {column: i for i, column in enumerate(columns)}
    return RoundDetails(
        rank=[rank[n] for n in nodes],
        tv=[of_q[0][n] for n in nodes] if known else None,
        expected=[None if math.isnan(expected[n]) else expected[n] for n in nodes],
        entropy=[entropy[c] for c in columns],
        top_ids=[top_ids[c] for c in columns],
        top=[top[c] for c in columns],
        draft_top_ids=[of_q[1][n] for n in nodes] if known else None,
        draft_top=[of_q[2][n] for n in nodes] if known else None,
        emitted_p=emitted_p[:emitted],
        emitted_rank=emitted_rank[:emitted],
        emitted_column=[place[c] for c in emitted_column[:emitted]],
    )
