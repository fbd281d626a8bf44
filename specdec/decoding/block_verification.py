"""Block verification (Sun et al. 2025): decides on a chain as a whole, where `leviathan` decides token by token.

With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), accept the longest prefix whose coin falls below its acceptance
probability; then sample norm(max(0, w p - q)). Lossless, and on average never fewer accepted tokens than `leviathan`.
Chains only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.decoding.acceptance import AcceptanceRule, Block, is_own, own_token, pick, register_rule, sample_residual
from specdec.sampling.sampling import Purpose, uniform


def prefix_weights(block: Block) -> Tensor:
    """Compute the weight of each prefix of the draft, [B, S + 1]: w_0 = 1, w_i = min(1, w_{i-1} p / q)."""
    assert block.q is not None
    index = block.draft[..., None]
    ratio = block.p.gather(-1, index)[..., 0] / block.q.gather(-1, index)[..., 0]  # [B, S]
    weights = [torch.ones_like(ratio[:, 0])]
    for s in range(ratio.shape[1]):
        weights.append((weights[-1] * ratio[:, s].nan_to_num(nan=0.0)).clamp(max=1.0))
    return torch.stack(weights, dim=1)


def block_acceptance(block: Block) -> Tensor:
    """Compute P(the first s + 1 drafted tokens are accepted | no longer prefix is), [B, S]."""
    assert block.q is not None
    weights = prefix_weights(block)
    after = block.columns + 1  # where the token after the prefix is predicted
    at = after.clamp(max=block.scores.shape[1] - 1)
    rest = (weights[:, 1:, None] * block.p[:, at] - block.q[:, at]).clamp(min=0).sum(dim=-1)  # [B, S]
    shorter = (rest / (rest + 1 - weights[:, 1:])).nan_to_num(nan=0.0)  # 0 / 0: p = q there, a longer prefix decides
    return torch.where(after < block.lengths[:, None], shorter, weights[:, 1:])


def in_accepted_block(block: Block) -> Tensor:
    """Accept the longest prefix whose last token's coin allows it, [B, S]. A chunk of a long draft is a block."""
    if block.q is None or block.sampling.greedy:
        return is_own(block)
    assert block.has_q is not None
    allowed = block.tested & (uniform(block.streams(Purpose.ACCEPT, fresh=True)) < block_acceptance(block))
    length = ((block.columns + 1) * allowed).amax(dim=-1, keepdim=True)
    return torch.where(block.has_q[:, None], block.columns < length, is_own(block))


def block_residual_token(block: Block, column: Tensor) -> Tensor:
    """Return a sample of norm(max(0, w p - q)) where the draft goes on after the accepted prefix, else of p, [B]."""
    if block.q is None or block.sampling.greedy:
        return own_token(block, column)
    return sample_residual(block, column, pick(prefix_weights(block), column))


BLOCK = register_rule(AcceptanceRule("block", "sample", in_accepted_block, block_residual_token, recordable=True))
