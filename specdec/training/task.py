"""What one loop needs to know of the thing it trains, and the figures of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specdec.training.losses import TargetDistribution, masked_mean


@dataclass(frozen=True)
class Figures:
    """Of one batch, by step of the draft.

    loss: the weighted mean of the steps' losses, a number with a gradient
    accepted: summed expected acceptance, float32 [K]; zeros while training
    counted: positions that it is summed over, int64 [K]
    """

    loss: Tensor
    accepted: Tensor
    counted: Tensor

    @staticmethod
    def of(steps: Sequence[tuple[Tensor, Tensor, Tensor]], decay: float) -> Figures:
        """From each step's (mean loss, accepted, counted)."""
        losses, accepted, counted = (torch.stack(part) for part in zip(*steps, strict=True))
        weights = decay ** torch.arange(len(steps), device=losses.device)
        return Figures((losses * weights).sum() / weights.sum(), accepted, counted)


def summed(
    target: TargetDistribution, loss: str, logits: Tensor, first: int, scored: Tensor, measured: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One step's (mean loss, accepted, counted). logits: [B, N, V_d], the first at position `first`; scored: [B, N]."""
    inside = target.inside[:, first : first + logits.shape[1]]
    mean = masked_mean(target.losses(loss, logits, first), scored & inside)
    if not measured:
        return mean, torch.zeros((), device=mean.device), scored.sum()
    with torch.no_grad():
        rate = target.expected_acceptance(logits, first)
    return mean, torch.where(scored, rate, 0.0).sum(), scored.sum()


class Task(Protocol):
    """A drafter in training.

    module: the module with the loss; batch -> Figures
    layers: hidden states of the target that it must see
    steps: depth of its drafts in training
    """

    layers: tuple[int, ...]
    steps: int

    @property
    def module(self) -> nn.Module: ...

    def decoding(self, length: int) -> tuple[Any, list[Any]]:
        """(draft model or None, strategies) to decode with it as it is now, `length` tokens a draft."""

    def save(self, folder: Path) -> None:
        """Write it as other tools read it."""
