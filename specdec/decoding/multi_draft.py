"""Rules for several drafts of one token: the siblings of a tree. All are lossless.

`leviathan` tests siblings that were sampled without replacement, one after the other (acceptance.py). Others:

- `specinfer` (Miao et al. 2023, SpecInfer): the same recursive rejection over independent samples of q, so a token may
  be proposed twice. With p_1 = p, accept sibling i with probability min(1, p_i(x) / q(x)), else
  p_{i+1} = norm(max(0, p_i - q)).
- `gumbel-list` (Rowan, Phan & Khisti 2025): one race a sibling. Sibling k is the winner argmin_x E_x^k / q(x) of its
  own race; the target's token is argmin_x min_k E_x^k / p(x), a sample of p, because the least of K exponentials is an
  exponential too. Accept the sibling that equals it. K is how many children the node has, whatever they are; one child
  is `coupled`. The text depends on how many children nodes have, and not on q.
- `eagle` (the code of EAGLE-2 and EAGLE-3, Li et al. 2024): siblings are the best tokens, no samples. Each is accepted
  with probability p_i(x), else it is taken out of p. That is recursive rejection with q all on x, since
  min(1, p(x) / 1) = p(x) and p without x is the residual norm(max(0, p - q)); so it is lossless for whatever tokens are
  proposed before the coins are known. It accepts with the probability of `match`, p of all siblings together, which no
  rule can exceed. `match` keeps plain decoding's text besides.

The first sibling of a node and a chain's token are tested alike under every rule. In greedy decoding all are `match`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specdec.decoding.acceptance import (
    LEVIATHAN,
    AcceptanceRule,
    Block,
    children_of,
    is_own,
    next_stream,
    own_token,
    pick,
    pick_own_child,
    register_rule,
    reject_siblings,
)
from specdec.sampling.sampling import Purpose, exponential, race, sibling_stream, streams, uniform

SPECINFER = register_rule(replace(LEVIATHAN, name="specinfer", proposal="independent"))


# -- gumbel-list -------------------------------------------------------------------------------------------------------


def list_token(block: Block, column: Tensor) -> Tensor:
    """Return the target's own token at one column per row, from the races of the column's children, [B]."""
    if block.tree is None or block.sampling.greedy:
        return own_token(block, column)
    stream = streams(block.keys, block.positions + pick(block.tree.depths, column), Purpose.SAMPLE)
    p = pick(block.p, column)
    times = exponential(stream, p.shape[-1])
    for i, (_, _, exists) in enumerate(children_of(block, column)):
        if i:
            others = exponential(sibling_stream(stream, i), p.shape[-1])
            times = torch.where(exists[:, None], torch.minimum(times, others), times)
    return (times / p).argmin(dim=-1)


def pick_listed_child(block: Block, column: Tensor) -> Tensor:
    """Pick the first child that equals the target's own token, as a column [B]; 0 = none."""
    own, found = list_token(block, column), torch.zeros_like(column)
    for child, node, exists in children_of(block, column):
        found = torch.where(exists & (found == 0) & (pick(block.draft, node) == own), child, found)
    return found


GUMBEL_LIST = register_rule(
    AcceptanceRule(
        "gumbel-list", "coupled-independent", is_own, list_token, pick_child=pick_listed_child, recordable=True
    )
)


# -- eagle -------------------------------------------------------------------------------------------------------------


def passes_coin(block: Block) -> Tensor:
    """Accept drafted tokens x whose coin is below p(x), [B, S]."""
    if block.sampling.greedy:
        return is_own(block)
    return uniform(block.streams(Purpose.ACCEPT)) < block.p.gather(-1, block.draft[..., None])[..., 0]


def token_without_rejected(block: Block, column: Tensor) -> Tensor:
    """Sample p without the tokens that were rejected at one column per row, [B]."""
    if block.sampling.greedy:
        return own_token(block, column)
    if block.tree is not None:
        left = reject_siblings(block, column, points=True)
        position = block.positions + pick(block.tree.depths, column)
        return race(left.residual, next_stream(block, position, left.rejected))
    p, rejected = pick(block.p, column), column < block.lengths
    without = p.scatter(1, pick(block.draft, column)[:, None], 0.0)
    # A token of probability 1 is always accepted: nothing is left of p then, and the result is not read.
    weights = torch.where(rejected[:, None] & (without.sum(dim=-1, keepdim=True) > 0), without, p)
    return race(weights, next_stream(block, block.positions + column, rejected))


def pick_by_coin(block: Block, column: Tensor) -> Tensor:
    """Pick the first child whose coin accepts it, as a column [B]; 0 = none."""
    return pick_own_child(block, column) if block.sampling.greedy else reject_siblings(block, column, True).child


EAGLE = register_rule(
    AcceptanceRule("eagle", "argmax", passes_coin, token_without_rejected, pick_child=pick_by_coin, recordable=True)
)
