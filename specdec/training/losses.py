"""What a drafter is trained for: four distances of its distribution q from the target's p, position by position.

All are functions of logarithms of probabilities over the draft vocabulary, [..., V_d] -> [...], in float32 or float64.
With a smaller draft vocabulary p is renormalised over it, and positions whose most likely token is outside are left
out (`DraftVocabulary`): no draft could be accepted there by greedy decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

TINY = 1e-12  # keeps the logarithm of an acceptance of 0 finite, and its gradient 0


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum_x p log(p / q): q must cover all that p does."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum_x q log(q / p): q keeps to where p is large."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """1 - sum_x min(p, q): the share of drafts that is rejected."""
    return 1 - overlap(log_p, log_q)


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """-log sum_x min(p, q): the gradient of TV, larger where little is accepted."""
    return -overlap(log_p, log_q).clamp(min=TINY).log()


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum_x min(p, q): the probability that a sampled draft token is accepted."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "tv": total_variation,
    "acceptance": acceptance,
}


class TargetDistribution:
    """The target's logits [B, S, V] as losses and figures need them, made once for all steps of a batch.

    ids: target ids of the draft ids [V_d]; None = the vocabularies are the same
    temperature: of the text that is drafted for; it is used by `expected_acceptance` alone
    """

    def __init__(self, logits: Tensor, ids: Tensor | None, temperature: float):
        self.logits, self.temperature = logits, temperature
        self.best = logits.argmax(-1)
        every = torch.arange(logits.shape[-1], device=logits.device)
        self.is_whole, self.ids = ids is None, every if ids is None else ids
        self.log_p = self._kept(1.0).log_softmax(-1)
        member = torch.zeros_like(every, dtype=torch.bool).index_fill(0, self.ids, True)
        self.inside = member[self.best]  # [B, S]; without isin, which makes the host wait

    def _kept(self, heat: float) -> Tensor:
        """Logits of the draft vocabulary over a temperature, float32 [B, S, V_d]."""
        return (self.logits if self.is_whole else self.logits[..., self.ids]).float() / heat

    @cached_property
    def log_whole(self) -> Tensor:
        """Of the whole p at the temperature, not renormalised, [B, S, V_d]."""
        heat = self.temperature or 1.0
        return self._kept(heat) - (self.logits.float() / heat).logsumexp(-1, keepdim=True)

    def losses(self, name: str, logits: Tensor, first: int) -> Tensor:
        """The loss of draft logits [B, N, V_d], the first of which are for position `first`; [B, N]."""
        return LOSSES[name](self.log_p[:, first : first + logits.shape[1]], logits.float().log_softmax(-1))

    def expected_acceptance(self, logits: Tensor, first: int) -> Tensor:
        """The probability that a draft token is accepted: sum_x min(p, q) at the temperature, with p whole; greedy:
        whether both have the same most likely token. [B, N]"""
        last = first + logits.shape[1]
        if not self.temperature:
            return (self.ids[logits.argmax(-1)] == self.best[:, first:last]).float()
        log_q = (logits.float() / self.temperature).log_softmax(-1)
        return overlap(self.log_whole[:, first:last], log_q)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean where the mask is true; 0 where it is nowhere. What is masked may be anything, also NaN."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)
