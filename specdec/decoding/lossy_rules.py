"""Acceptance rules that give up the target's distribution for longer accepted drafts, as papers compare with.

Each is made by a function with parameters, so that a name says all of it: "typical:eps=0.09:delta=0.3". Results made
with them are marked (`lossy`), their texts are not plain decoding's, and `Generation.distances` says how far the
distribution of each token was from the target's.

`typical`, `top` and `near` accept a drafted token that is likely enough, wherever it came from; after a rejection the
target's own token follows, as plain decoding would have it. They judge chains and trees, need no q, and look at the
processed distribution p at each position. In greedy decoding p is the softmax, at temperature 1, of the scores whose
argmax is taken.

`cascade` trusts the draft at some positions: there the token comes from q, elsewhere `leviathan` keeps it p's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.decoding.acceptance import (
    AcceptanceRule,
    Block,
    Verdict,
    is_own,
    own_token,
    passes_ratio,
    pick,
    register_rule,
    residual_token,
)
from specdec.errors import SpecdecError

Likely = Callable[[Block, Tensor, Tensor], Tensor]  # (block, p [..., V], tokens [...]) -> bool [...]


def lossy_rule(name: str, likely: Likely) -> AcceptanceRule:
    """Make a rule that accepts every drafted token that is likely enough: likely(block, p [..., V], tokens [...])."""

    def accepts(block: Block) -> Tensor:
        return likely(block, block.p, block.draft) | (block.own == block.draft)

    def pick_child(block: Block, column: Tensor) -> Tensor:
        """Pick the likeliest child that is likely enough or the target's own token, as a column [B]; 0 = none."""
        assert block.tree is not None
        is_child = (block.tree.tested_at == column[:, None]) & block.tested  # [B, S]
        p = pick(block.p, column)  # [B, V]
        good = likely(block, p[:, None].expand(-1, block.draft.shape[1], -1), block.draft)
        good = is_child & (good | (block.draft == pick(block.own, column)[:, None]))
        best = torch.where(good, p.gather(1, block.draft), -1.0).argmax(dim=-1)
        return torch.where(good.any(dim=-1), best + 1, 0)

    def distance(block: Block, verdict: Verdict) -> Tensor:
        """Return 1 - p(x) where an accepted token x was certain to be emitted, and 0 where the token is p's."""
        tokens, columns = verdict.emitted(block.draft)
        p = block.p[torch.arange(len(tokens), device=tokens.device)[:, None], columns]  # [B, E, V]
        drafted = torch.arange(tokens.shape[1], device=tokens.device) < verdict.accepted[:, None]
        greedy = (tokens != block.own.gather(1, columns)).float()
        certain = greedy if block.sampling.greedy else 1 - _probability(p, tokens)
        return torch.where(drafted & likely(block, p, tokens), certain, 0.0)

    return AcceptanceRule(
        name, "argmax", accepts, own_token, lossy=True, pick_child=pick_child, recordable=True, distance=distance
    )


def _probability(p: Tensor, tokens: Tensor) -> Tensor:
    return p.gather(-1, tokens[..., None])[..., 0]


@register_rule
def typical(eps: float = 0.09, delta: float = 0.3) -> AcceptanceRule:
    """Accept typical tokens (Cai et al. 2024, Medusa): p(x) > min(eps, delta * exp(-entropy of p))."""
    _check("typical", eps=eps, delta=delta)

    def likely(block: Block, p: Tensor, tokens: Tensor) -> Tensor:
        threshold = (delta * torch.exp(-torch.special.entr(p).sum(dim=-1))).clamp(max=eps)
        return _probability(p, tokens) > threshold

    return lossy_rule("typical", likely)


@register_rule
def top(k: int = 3) -> AcceptanceRule:
    """Accept a drafted token that is one of the target's k most likely."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise SpecdecError(f"acceptance rule 'top' needs a whole number k >= 1, got {k!r}")

    def likely(block: Block, p: Tensor, tokens: Tensor) -> Tensor:
        return (p > _probability(p, tokens)[..., None]).sum(dim=-1) < k

    return lossy_rule("top", likely)


@register_rule
def near(delta: float = 0.1) -> AcceptanceRule:
    """Accept a drafted token whose probability is at most delta below the most likely one's."""
    _check("near", delta=delta)

    def likely(block: Block, p: Tensor, tokens: Tensor) -> Tensor:
        return _probability(p, tokens) >= p.amax(dim=-1) - delta

    return lossy_rule("near", likely)


@register_rule
def cascade(alpha: float = 0.5) -> AcceptanceRule:
    """Take q's token where max q >= max p - alpha * TV(p, q), elsewhere p's (speculative cascades, Narasimhan et al.
    2025, rule OPT). A larger alpha trusts the draft more. For chains with a q; greedy decoding stays the target's."""
    _check("cascade", alpha=alpha)

    def trusts(block: Block) -> Tensor:
        """Tell at which positions [B, S] the drafted token is taken unchanged."""
        assert block.q is not None
        assert block.has_q is not None
        apart = (block.p - block.q).clamp(min=0).sum(dim=-1)
        trusted = block.q.amax(dim=-1) >= block.p.amax(dim=-1) - alpha * apart
        return trusted & block.tested & block.has_q[:, None]

    def accepts(block: Block) -> Tensor:
        if block.q is None or block.sampling.greedy:
            return is_own(block)
        return trusts(block) | passes_ratio(block)

    def distance(block: Block, verdict: Verdict) -> Tensor:
        columns = verdict.emitted(block.draft)[1]
        if block.q is None or block.sampling.greedy:
            return torch.zeros_like(columns, dtype=block.scores.dtype)
        return torch.where(trusts(block), (block.p - block.q).clamp(min=0).sum(dim=-1), 0.0).gather(1, columns)

    return AcceptanceRule("cascade", "sample", accepts, residual_token, lossy=True, recordable=True, distance=distance)


def _check(rule: str, **values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise SpecdecError(f"acceptance rule {rule!r} needs {name} between 0 and 1, got {value!r}")
