"""What a drafter reaches on held-out texts, two ways side by side.

teacher_forced: expected acceptance of the draft's token k on the target's own texts, where all tokens before it are
the text's; sum_x min(p, q), greedy: agreement.
free_running: share of tested tokens that are accepted, by position in the draft, when held-out prompts are decoded by
the strategy as it will be used. They differ where drafts that go on are not like texts: a token is tested only after
all before it were accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specdec.decoder import SpeculativeDecoder
from specdec.training.answers import Answer
from specdec.training.config import TrainingConfig
from specdec.training.features import Source
from specdec.training.task import Task


@dataclass
class Evaluation:
    """held: texts kept from training; source: their features."""

    config: TrainingConfig
    task: Task
    target: nn.Module
    tokenizer: Any
    held: Sequence[Answer]
    source: Source

    def __call__(self) -> dict[str, Any]:
        made: dict[str, Any] = {"teacher_forced": self.teacher_forced()}
        if self.config.eval_tokens:
            made |= self.free_running()
        return made

    @torch.no_grad()
    def teacher_forced(self) -> list[float]:
        """Expected acceptance by step."""
        module, batch = self.task.module, self.config.batch
        module.eval()
        accepted, counted = torch.zeros(self.task.steps), torch.zeros(self.task.steps)
        for first in range(0, len(self.held), batch):
            with torch.autocast(self.source.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
                found = module(self.source(range(first, min(first + batch, len(self.held)))))
            accepted[: len(found.accepted)] += found.accepted.cpu()
            counted[: len(found.counted)] += found.counted.cpu()
        return [round(a / max(c, 1), 4) for a, c in zip(accepted.tolist(), counted.tolist(), strict=True)]

    def free_running(self) -> dict[str, Any]:
        """Decode the held-out prompts with the drafter as it is now."""
        draft, strategies = self.task.decoding(self.config.ttt_steps)
        decoder = SpeculativeDecoder(
            self.target, draft, self.tokenizer, strategies=strategies, check=False, compile="off"
        )
        prompts = [list(a.ids[: a.start or len(a.ids) // 2]) for a in self.held]
        data = self.config.data
        out = decoder.generate(
            prompts, self.config.eval_tokens, temperature=data.temperature, seed=data.seed, batch_size=len(prompts)
        )
        total = out.stats.to_dict()
        rates = total["conditional_acceptance_rate_per_position"][: self.config.ttt_steps]
        return {
            "free_running": [None if rate is None else round(rate, 4) for rate in rates],
            "acceptance_length": total["acceptance_length"],
        }
