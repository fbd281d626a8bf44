"""Other implementations as contenders of a benchmark: `kind: "other_libraries:Economize"` in a file beside this one.

economize (https://github.com/Thiggel/economize, Apache-2.0), written against its version 0.3.2: its techniques attach
to the pair's target for a run's preparation and leave its weights as they are; its draft model is loaded by economize
itself, from a folder. flashspec (https://github.com/Mattral/FlashSpec, Apache-2.0), written against its version 0.3.1.
Both are skipped where they are not installed (`pip install specdec[bench]`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.errors import SpecdecError
from specdec.research.bench.contenders.base import Contender, Output

TECHNIQUES = ("plain", "draft-model", "lookup", "hybrid")


def installed(package: str) -> str | None:
    """The version of an installed package; None: not there."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True)
class EconomizeOptions:
    """technique: plain, draft-model, lookup, or hybrid = lookup with the draft model as fallback. The others are
    economize's, by its names: cycle_length = drafted tokens + 1; min_confidence ends a draft; max_ngram, min_ngram,
    match of the lookup; max_drafts of the fallback; cuda_graphs; sync_interval of plain decoding."""

    technique: str = "plain"
    cycle_length: int = 5
    min_confidence: float | None = None
    cuda_graphs: bool = True
    sync_interval: int = 8
    max_ngram: int = 3
    min_ngram: int = 1
    match: str = "earliest"
    max_drafts: int | None = None


class Economize(Contender):
    """One configuration of economize on the target."""

    kind = "economize"
    options_class = EconomizeOptions

    def __init__(self, name: str, options: Mapping[str, Any]):
        super().__init__(name, options)
        if self.options.technique not in TECHNIQUES:
            raise SpecdecError(f"contender {name}: technique must be one of {', '.join(TECHNIQUES)}")
        self.model: Any = None

    def version(self) -> str | None:
        return installed("economize")

    def refuses(self, batch: int) -> str | None:
        return None if self.version() else "economize is not installed: install specdec[bench]"

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, ignore_eos: bool) -> Output:
        if self.model is None:
            self.model = self._attach()
        rows = [torch.tensor(list(p), device=self.pair.device) for p in prompts]
        results = self.model.decode_batch(rows, max_new_tokens, stop=None if ignore_eos else self.pair.eos or None)
        cycles = [cycle for result in results for cycle in result.acceptance]
        made, accepted = sum(len(result.tokens) for result in results), sum(accepted for _, accepted in cycles)
        figures = {
            "drafted_rounds": sum(drafted > 0 for drafted, _ in cycles),
            "draft_tokens": sum(drafted for drafted, _ in cycles),
            "accepted_tokens": accepted,
            "rounds": made - accepted,  # its log has no entry for a cycle without a draft
            "generated_tokens": made,
        }
        return Output([result.tokens.tolist() for result in results], figures)

    def _attach(self) -> Any:
        import economize

        o = self.options
        decoding = economize.DecodeConfig(
            cycle_length=1 if o.technique == "plain" else o.cycle_length,
            min_confidence=o.min_confidence,
            cuda_graphs=o.cuda_graphs,
            sync_interval=o.sync_interval,
        )
        return economize.apply(self.pair.target, *self._techniques(), decoding=decoding)

    def _techniques(self) -> list[Any]:
        from economize.techniques.draft_model import DraftModelConfig
        from economize.techniques.hybrid import HybridConfig
        from economize.techniques.lookup import LookupConfig

        o = self.options
        ngrams: dict[str, Any] = {"max_ngram": o.max_ngram, "min_ngram": o.min_ngram, "match": o.match}
        if o.technique == "lookup":
            return [LookupConfig(**ngrams)]
        if o.technique == "plain":
            return []
        self.folder = tempfile.TemporaryDirectory(prefix="specdec-bench-")  # removed with the contender
        for part in (self.pair.draft, self.pair.tokenizer):
            part.save_pretrained(self.folder.name)
        draft = DraftModelConfig(model=self.folder.name)
        return [draft] if o.technique == "draft-model" else [HybridConfig(draft, max_drafts=o.max_drafts, **ngrams)]


@dataclass(frozen=True)
class FlashspecOptions:
    """flashspec's own, by its names. strategy: auto, bandit (= the draft model alone), composite-g4 or composite-g6-f2
    (lookup first); gamma: tokens the draft model proposes; compile: "auto", True or False."""

    strategy: str = "auto"
    gamma: int = 4
    compile: Any = "auto"


class Flashspec(Contender):
    """flashspec's engine around the pair's models, greedy."""

    kind = "flashspec"
    options_class = FlashspecOptions

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
