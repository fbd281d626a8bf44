"""The children of a tree's nodes: the best tokens of q, or samples of it.

Under argmax proposals they are the best tokens. Under `leviathan` they are sampled from q without replacement; under
`coupled` they are the first tokens of the race that the target runs with the same random numbers: the first child is
the coupled sample, and the others are the target's next most likely choices. These two differ in their random numbers
only: the order in which a race ends is a sample without replacement (Kool, van Hoof & Welling 2019), and each place,
given the places before it, has the distribution q without the earlier tokens, renormalised. Some rules want independent
samples of q instead, each from a race of its own.

How many children a node has is settled before any is sampled, and no sampled node is dropped or moved later: anything
else would change the distribution of the output.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.models.trees import MISSING
from specdec.sampling.sampling import Purpose, exponential, fold, largest, race, sibling_stream, streams

LEAST = 1e-36  # less likely tokens are not proposed: the times of their race would overflow


def node_streams(keys: Tensor, positions: Tensor, purpose: Purpose, nodes: Tensor) -> Tensor:
    """Return the streams [B, F] that the children of nodes [B, F] are sampled with, -1 = the newest token.

    keys, positions [B]: of the children. The target's own numbers are those of a position; others are a node's.
    """
    shared = streams(keys, positions, purpose)[:, None]
    return shared.expand(-1, nodes.shape[1]) if purpose == Purpose.SAMPLE else fold(shared, nodes + 1)


def sample_siblings(q: Tensor, stream: Tensor, count: int, independent: bool = False) -> tuple[Tensor, Tensor]:
    """Sample `count` tokens: q [..., V], stream [...] -> (tokens [..., C], their q [..., C, V]).

    The first token is `race(q, stream)`. Without replacement, each token's q is given the tokens before it; where
    nothing was left to sample from it is all zero, and the token arbitrary.
    """
    if independent:
        races = [race(q, sibling_stream(stream, i)) for i in range(count)]
        return torch.stack(races, dim=-1), q[..., None, :].expand(*q.shape[:-1], count, -1)
    left = torch.where(q < LEAST, 0.0, q)
    tokens = (exponential(stream, q.shape[-1]) / left).topk(min(count, q.shape[-1]), largest=False).indices
    found = []
    for i in range(tokens.shape[-1]):
        mass = left.sum(dim=-1, keepdim=True)
        found.append(torch.where(mass > 0, left / mass, 0.0))
        left = left.scatter(-1, tokens[..., i : i + 1], 0.0)
    lacking = count - len(found)
    return F.pad(tokens, (0, lacking)), F.pad(torch.stack(found, dim=-2), (0, 0, 0, lacking))


def best_siblings(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` best tokens of scores [..., V], best first, and their scores, -inf where there is none, both
    [..., C]."""
    values, tokens = largest(scores, count)
    if (lacking := count - tokens.shape[-1]) > 0:
        values, tokens = F.pad(values, (0, lacking), value=float("-inf")), F.pad(tokens, (0, lacking))
    return tokens, values


def best_children(tokens: Tensor, values: Tensor, missing: Tensor) -> Tensor:
    """Propose `best_siblings` [B, F, C]; `MISSING` where there is none, or no node [B, F]."""
    later = torch.arange(tokens.shape[-1], device=tokens.device) > 0  # a broken draft's first token will be rejected
    return tokens.masked_fill(((values == float("-inf")) & later) | missing[..., None], MISSING)


def sampled_children(
    q: Tensor, stream: Tensor, count: int, missing: Tensor, independent: bool
) -> tuple[Tensor, Tensor]:
    """Sample children of q [B, F, V]: tokens [B, F, C], their q [B, F, C, V]; `MISSING` with a q of zeros where there
    is none, or no node [B, F]."""
    tokens, found = sample_siblings(q, stream, count, independent)
    found = found.masked_fill(missing[..., None, None], 0.0)
    return tokens.masked_fill(found.amax(dim=-1) == 0, MISSING), found
