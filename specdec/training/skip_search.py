"""Which layers a target can do without while it drafts for itself: a search that trains nothing.

Every set is judged on texts that the target wrote, teacher-forced: sum_x min(p, q) at each of their tokens, where q is
what the target says without these layers in one pass over the text. (In use, layers after a gap read what the whole
model wrote for the text before the draft, so this is an estimate; for first layers alone it is exact.) The search is
greedy: from one size to the next it leaves out the layer that costs the least acceptance.

Source: Draft & Verify (Zhang et al. 2023), which searches by decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from specdec import theory
from specdec.models.layer_subset import layers_of, leave_out
from specdec.models.view import ModelView
from specdec.training.answers import Answer
from specdec.training.features import Batch, Live
from specdec.training.losses import TargetDistribution


@dataclass(frozen=True)
class SkipSet:
    """Layers that are left out.

    acceptance: of a drafted token, teacher-forced
    cost: share of the target's weights that a draft pass reads
    n_max, speedup: the draft length that this predicts to be the fastest, and the speed-up of it (`theory.speedup`)
    """

    skip: tuple[int, ...]
    acceptance: float
    cost: float
    n_max: int
    speedup: float

    @property
    def strategy(self) -> str:
        """As `--strategies` takes it."""
        runs = [[n for _, n in run] for _, run in groupby(enumerate(self.skip), lambda pair: pair[1] - pair[0])]
        listed = "+".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        return f"early-exit:skip={listed}:n_max={self.n_max}"


def search_skip_sets(
    target: Any,
    answers: Sequence[Answer],
    temperature: float = 1.0,
    batch: int = 8,
    advance: Callable[[str], None] = lambda words: None,
) -> list[SkipSet]:
    """The best set of every size that the search went through, the fastest first.

    answers: texts to judge by; temperature: of the drafts, 0 = greedy; advance: told of every size that is done
    """
    live = Live(target, (), answers)
    batches = [live(range(n, min(n + batch, len(answers)))) for n in range(0, len(answers), batch)]
    count = target.config.get_text_config().num_hidden_layers
    model = ModelView(target, target.config._attn_implementation).model
    layers = layers_of(model, count)
    whole = list(layers)

    def rate(skip: tuple[int, ...]) -> float:
        leave_out(model, count, skip)
        accepted, counted = map(sum, zip(*(_accepted(model, b, temperature) for b in batches), strict=True))
        for i in skip:
            layers[i] = whole[i]
        return min(1.0, accepted / max(counted, 1))

    found: list[SkipSet] = []
    chosen: tuple[int, ...] = ()
    for size in range(1, count):
        larger = [tuple(sorted((*chosen, i))) for i in range(count) if i not in chosen]
        rates = {skip: rate(skip) for skip in larger}
        chosen = max(rates, key=rates.__getitem__)
        found.append(_judged(target, whole, chosen, rates[chosen]))
        advance(f"{size} of {count - 1} layers left out")
    return sorted(found, key=lambda one: -one.speedup)


@torch.no_grad()
def _accepted(model: Any, batch: Batch, temperature: float) -> tuple[float, int]:
    """(expected acceptance summed over the answers' tokens, how many these are)."""
    target = TargetDistribution(batch.logits[:, :-1], None, temperature)
    logits = model(input_ids=batch.ids, use_cache=False).logits[:, 1:-1]
    scored = batch.scored(0)
    return target.expected_acceptance(logits, 1)[scored].sum().item(), int(scored.sum())


def _judged(target: Any, layers: Sequence[Any], skip: tuple[int, ...], acceptance: float) -> SkipSet:
    total = sum(p.nbytes for p in target.parameters())
    cost = 1 - sum(p.nbytes for i in skip for p in layers[i].parameters()) / total
    best = theory.best_k(acceptance, cost) or 1
    return SkipSet(skip, acceptance, cost, best, float(theory.speedup(acceptance, best, cost)))
