"""AdamW, with the learning rate of every step."""

from __future__ import annotations

import math

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from specdec.training.config import Optimiser, TrainingConfig


def factor(optimiser: Optimiser, steps: int, step: int) -> float:
    """What the learning rate is multiplied by in `step`, from 0: it rises to 1 in `warm_up` steps, and falls along a
    cosine to `final` at the last one."""
    if step < optimiser.warm_up:
        return (step + 1) / optimiser.warm_up
    done = min(1.0, (step + 1 - optimiser.warm_up) / max(1, steps - optimiser.warm_up))
    return optimiser.final + (1 - optimiser.final) * 0.5 * (1 + math.cos(math.pi * done))


def make_optimiser(module: nn.Module, config: TrainingConfig) -> tuple[AdamW, LambdaLR]:
    """Weights decay in matrices only."""
    chosen = config.optimiser
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": chosen.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    made = AdamW([g for g in groups if g["params"]], lr=chosen.lr, betas=chosen.betas)
    return made, LambdaLR(made, lambda step: factor(chosen, config.steps, step))
