"""AdamW, or Muon for the inner matrices and AdamW for the rest, with the learning rate of every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR

from specdec.training.config import Optimiser, TrainingConfig


def factor(optimiser: Optimiser, steps: int, step: int, spent: float = 0.0) -> float:
    """What the learning rate is multiplied by in `step`, from 0: it rises to 1 in `warm_up` steps, and falls along a
    cosine to `final` at the last one, or when all of the time is `spent`, a share from 0 to 1."""
    if step < optimiser.warm_up:
        return (step + 1) / optimiser.warm_up
    done = min(1.0, max(spent, (step + 1 - optimiser.warm_up) / max(1, steps - optimiser.warm_up)))
    return optimiser.final + (1 - optimiser.final) * 0.5 * (1 + math.cos(math.pi * done))


class Together:
    """Optimisers, or their schedules, that take every step together."""

    def __init__(self, parts: Sequence[Any]):
        self.parts = parts

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {str(i): part.state_dict() for i, part in enumerate(self.parts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, part in enumerate(self.parts):
            part.load_state_dict(state[str(i)])


def make_optimisers(
    module: nn.Module, config: TrainingConfig, spent: Callable[[], float] = float
) -> tuple[list[Any], Together]:
    """The optimisers of a module, AdamW first, and their schedules. Weights decay in matrices only. spent: the share of
    the time limit that is gone."""
    chosen = config.optimiser
    tables = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    inner = [p for name, p in trained if p.ndim == 2 and id(p) not in tables and "lm_head" not in name]
    if not chosen.muon:
        inner = []
    rest = [p for _, p in trained if not any(p is other for other in inner)]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": chosen.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    made: list[Any] = [AdamW([g for g in groups if g["params"]], lr=chosen.lr, betas=chosen.betas)]
    if inner:
        decay = chosen.weight_decay
        made.append(Muon(inner, lr=chosen.muon, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    return made, Together([LambdaLR(o, lambda step: factor(chosen, config.steps, step, spent())) for o in made])
