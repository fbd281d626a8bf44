"""flashspec (https://github.com/Mattral/FlashSpec, Apache-2.0), written against its version 0.3.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.research.bench.contenders.base import Contender, Output, installed


@dataclass(frozen=True)
class Options:
    """flashspec's own, by its names. strategy: auto, bandit (= the draft model alone), composite-g4 or composite-g6-f2
    (lookup first); gamma: tokens the draft model proposes; compile: "auto", True or False."""

    strategy: str = "auto"
    gamma: int = 4
    compile: Any = "auto"


class Flashspec(Contender):
    """flashspec's engine around the pair's models, greedy."""

    kind = "flashspec"
    options_class = Options

    def __init__(self, name: str, options: Mapping[str, Any]):
        super().__init__(name, options)
        self.engine: Any = None

    def version(self) -> str | None:
        return installed("flashspec")

    def refuses(self, batch: int) -> str | None:
        if self.version() is None:
            return "flashspec is not installed: install specdec[bench]"
        return "flashspec's graphs are for one row" if batch > 1 else None

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, ignore_eos: bool) -> Output:
        if self.engine is None:
            self.engine = self._build()
        ids = torch.tensor([list(p) for p in prompts], device=self.pair.device)
        eos = () if ignore_eos else tuple(self.pair.eos)
        result = self.engine.generate(ids, max_new_tokens=max_new_tokens, eos_token_ids=eos)
        rows = [[t for t in row if t >= 0] for row in result.output_ids.tolist()]
        steps = result.arm_steps
        figures = {
            "rounds": len(steps),
            "drafted_rounds": sum(s.proposed > 0 for s in steps),
            "draft_tokens": sum(s.proposed for s in steps),
            "accepted_tokens": sum(s.accepted for s in steps),
            "generated_tokens": sum(map(len, rows)),
        }
        return Output(rows, figures if steps else {})

    def _build(self) -> Any:
        from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
        from flashspec.engine import HuggingFaceDrafter, TargetModel

        pair, o = self.pair, self.options
        config = FlashSpecConfig(
            device=str(pair.target.device),
            dtype=str(pair.dtype).removeprefix("torch."),
            compile=o.compile,
            drafter_strategy=o.strategy,
            sampling=SamplingConfig(temperature=0.0, gamma=o.gamma),
            bandit=BanditConfig(n_arms=1),
        )
        drafter = HuggingFaceDrafter("draft", pair.device, pair.dtype, model=pair.draft)
        return SpeculativeEngine(config, [drafter], TargetModel("target", pair.device, pair.dtype, model=pair.target))
