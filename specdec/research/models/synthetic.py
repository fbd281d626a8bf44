"""Synthetic acceptance: drafts are accepted by coin flips of given rates, to exercise speed without a good draft.

    rule = synthetic(k=5, length=3.5)                          # 3.5 tokens a round on average
    rule = synthetic(k=3, rates=[0.9, 0.7, 0.4])               # P(the first i + 1 drafts are all accepted)
    out = decoder.generate(prompts, acceptance=rule, draft_length="given")   # out.lossy is True: the text means nothing

Only the times and counts of such a run mean something. Source: llama.cpp's `--spec-synth-len` and `--spec-synth-rates`,
whose formulas these are. Drafts longer than k are rejected at position k + 1; trees are refused: no rule walks them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.config import check_number, check_whole
from specdec.decoding.acceptance import AcceptanceRule, Block, own_token
from specdec.errors import SpecdecError
from specdec.sampling.sampling import Purpose, uniform

BISECTIONS = 32


def rates_of_length(k: int, length: float) -> list[float]:
    """Unconditional rates p, p^2, ..., p^k whose sum is length - 1; `length` in [1, k + 1] counts the bonus token."""
    check_whole("synthetic: k", k, 1)
    check_number("synthetic: length", length, 1.0, float(k + 1))
    if length == k + 1:
        return [1.0] * k
    if length == 1:
        return [0.0] * k
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, k + 1)) < length - 1:
            low = middle
        else:
            high = middle
    p = (low + high) / 2
    return [p**i for i in range(1, k + 1)]


def conditional_rates(rates: Sequence[float]) -> list[float]:
    """P(draft i is accepted | all before it are) from P(the first i + 1 all are); 0 after a rate of 0."""
    return [r / before if before > 0 else 0.0 for r, before in zip(rates, [1.0, *rates[:-1]], strict=True)]


def synthetic(k: int, length: float | None = None, rates: Sequence[float] | None = None) -> AcceptanceRule:
    """An acceptance rule that flips coins. k: the longest draft, tokens; give either the mean `length` of a round in
    tokens, in [1, k + 1], or k unconditional `rates`, which do not rise.

    Raises SpecdecError for rates out of range, both, or neither.
    """
    check_whole("synthetic: k", k, 1)
    if (length is None) == (rates is None):
        raise SpecdecError("synthetic: give length or rates, and not both")
    chosen = rates_of_length(k, length) if length is not None else [float(r) for r in rates or ()]
    if len(chosen) != k:
        raise SpecdecError(f"synthetic: got {len(chosen)} rates for k={k}")
    if not all(math.isfinite(r) and 0 <= r <= 1 for r in chosen) or chosen != sorted(chosen, reverse=True):
        raise SpecdecError(f"synthetic: rates must be in [0, 1] and must not rise, got {chosen}")
    conditional = [*conditional_rates(chosen), 0.0]

    def accepts(block: Block) -> Tensor:
        table = torch.tensor(conditional, device=block.scores.device)
        done = torch.zeros_like(block.lengths) if block.done is None else block.done
        place = (done[:, None] + block.columns).clamp(max=k)
        return uniform(block.streams(Purpose.ACCEPT)) < table[place]

    return AcceptanceRule("synthetic", "argmax", accepts, own_token, lossy=True)
