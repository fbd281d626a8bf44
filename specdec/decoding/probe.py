"""What a pass knows beyond its tokens: ranks, distances and entropies of the laws, for the host read of a recorded run.

Everything is computed on the device where the laws are and comes back in the pass's one read; a run that does not ask
pays nothing. *Column* s is the law of the token after the s-th fed token; a drafted token is tested by one column.
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
from specdec.theory import coupled_joint


@dataclass(frozen=True)
class RoundDetails:
    """One round of one row; n drafted tokens, c columns, e emitted tokens, lists of k best tokens.

    rank [n]: tokens more probable under p than the drafted one; tv [n]: TV(p, q), None where q is unknown; expected
    [n]: probability, given the tokens before it, that a token proposed there stands if it is tested (a token without a
    q: that this one does; None: unknown); draft_top_ids, draft_top [n, k]: best of q, None where q is unknown; entropy
    [c]: of p in nats; top_ids, top [c, k]: best of p; emitted_p, emitted_rank, emitted_column [e]: of each emitted
    token under p, and the column that it came from.

    p is the processed law; of a greedy run, the softmax of the scores that the argmax is taken of.
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
    """Computes the details of one pass. top: how many best tokens to keep."""

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
        """What the host read must bring back, each with the slots first."""
        block, p = self.block, self.block.p
        rows = torch.arange(len(p), device=p.device)[:, None]
        tested = p[rows, self.tested_at]  # [B, S, V]
        drafted = tested.gather(-1, block.draft[..., None])
        emitted, columns = self.verdict.emitted(block.draft)
        law = p[rows, columns]
        chosen = law.gather(-1, emitted[..., None])
        best = p.topk(min(self.top, p.shape[-1]), dim=-1)
        wanted = [
            (tested > drafted).sum(-1), self._expected(tested), torch.special.entr(p).sum(-1), best.indices,
            best.values, chosen[..., 0], (law > chosen).sum(-1), columns,
        ]  # fmt: skip
        if block.q is not None:
            proposed = block.q.topk(min(self.top, p.shape[-1]), dim=-1)
            wanted += [(tested - block.q).abs().sum(-1) / 2, proposed.indices, proposed.values]
        return wanted

    def _expected(self, tested: Tensor) -> Tensor:
        """[B, S]; NaN where it has no simple form: under `coupled`, siblings after the first."""
        block = self.block
        if block.sampling.greedy:
            own = block.scores.argmax(dim=-1).gather(1, self.tested_at)
            return (own == block.draft).to(tested.dtype)
        claims = torch.zeros_like(block.draft, dtype=torch.bool)
        if block.q is not None and self.rule.proposal != "argmax":
            claims = block.q.sum(dim=-1) > 0.5  # rows without a law, and columns past a draft's end, hold zeros
        if block.tree is None:
            return self._tested(tested, claims, slice(None))
        # A sibling is tested after the ones before it fell: by what these have left of p.
        left, rows = block.p.clone(), torch.arange(len(tested), device=tested.device)
        expected = torch.zeros_like(tested[..., 0])
        seen = torch.zeros_like(claims)
        for node in range(tested.shape[1]):
            at, one = self.tested_at[:, node], slice(node, node + 1)
            law = left[rows, at]
            found = self._tested(law[:, None], claims[:, one], one)[:, 0]
            if self.rule.proposal == "coupled":
                found = torch.where(seen[rows, at] & claims[:, node], torch.nan, found)
            expected[:, node] = found
            seen[rows, at] = True
            left[rows, at] = self._residual(law, claims[:, node], node)
        return expected

    def _tested(self, law: Tensor, claims: Tensor, nodes: slice) -> Tensor:
        """P(the drafted token stands) against law [B, N, V]. One that claims no q must be the target's own draw."""
        drafted = law.gather(-1, self.block.draft[:, nodes, None])[..., 0]
        if self.block.q is None or self.rule.proposal == "argmax":
            return drafted
        q = self.block.q[:, nodes]
        if self.rule.proposal == "coupled":
            joint = coupled_joint(law.double(), torch.where(claims[..., None], q, law).double())
            return torch.where(claims, joint.sum(-1).to(law.dtype), drafted)
        return torch.where(claims, torch.minimum(law, q).sum(-1), drafted)

    def _residual(self, law: Tensor, claims: Tensor, node: int) -> Tensor:
        """What is left of law [B, V] when the node's token has fallen."""
        without = law.scatter(-1, self.block.draft[:, node : node + 1], 0.0)
        if self.block.q is not None:
            without = torch.where(claims[:, None], (law - self.block.q[:, node]).clamp(min=0), without)
        mass = without.sum(dim=-1, keepdim=True)
        return torch.where(mass > 0, without / mass, law)


def details_of(
    values: list[Any], slot: int, nodes: Sequence[int], columns: Sequence[int], emitted: int, has_q: bool
) -> RoundDetails:
    """One row's details from what came back for `Probe.tensors`: of these drafted tokens and columns of the pass, and
    of so many emitted tokens."""
    rank, expected, entropy, top_ids, top, emitted_p, emitted_rank, emitted_column, *law = (v[slot] for v in values)
    known = has_q and bool(law)
    place = {column: i for i, column in enumerate(columns)}
    return RoundDetails(
        rank=[rank[n] for n in nodes],
        tv=[law[0][n] for n in nodes] if known else None,
        expected=[None if math.isnan(expected[n]) else expected[n] for n in nodes],
        entropy=[entropy[c] for c in columns],
        top_ids=[top_ids[c] for c in columns],
        top=[top[c] for c in columns],
        draft_top_ids=[law[1][n] for n in nodes] if known else None,
        draft_top=[law[2][n] for n in nodes] if known else None,
        emitted_p=emitted_p[:emitted],
        emitted_rank=emitted_rank[:emitted],
        emitted_column=[place[c] for c in emitted_column[:emitted]],
    )
