"""economize (https://github.com/Thiggel/economize, Apache-2.0), written against its version 0.3.2.

Its techniques attach to the pair's target for a run's preparation and leave its weights as they are; its draft model is
loaded by economize itself, from a folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.errors import SpecdecError
from specdec.research.bench.contenders.base import Contender, Output, installed

TECHNIQUES = ("plain", "draft-model", "lookup", "hybrid")


@dataclass(frozen=True)
class Options:
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
    options_class = Options

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
        draft = DraftModelConfig(model=self.pair.draft_folder)
        return [draft] if o.technique == "draft-model" else [HybridConfig(draft, max_drafts=o.max_drafts, **ngrams)]
