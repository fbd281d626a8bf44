"""The demo: one config decoded plainly and with its strategies, in turns, and whether the two agree.

`DEMO` is what `specdec demo` runs; configs/demo.yaml is the same config as a file.
"""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdec.config import GenerationSettings, PairConfig, RunConfig
from specdec.decoder import SpeculativeDecoder
from specdec.decoding.acceptance import find_rule
from specdec.decoding.result import Generation
from specdec.errors import SpecdecError
from specdec.files.own_code import split_list
from specdec.models.kv_cache import kv_dtype
from specdec.research.loops import loop_share

DEMO = RunConfig(
    pair=PairConfig("demo-target", draft="demo-draft"),
    # Copies that are certain enough cost nothing to draft, so they are asked first; the model drafts the rest.
    strategies=("prompt-lookup:ngram_min=3:ngram_max=4:n_max=7", "draft-model"),
    generation={"max_new_tokens": 96, "batch_size": 1},
    prompts=(
        "class Node:\n    def __init__(self, value, next=None):\n        self.value = value\n        self.next = next\n"
        '\n\nclass LinkedList:\n    """A singly linked list."""\n\n    def __init__(self):\n        self.head = None\n'
        "\n    def append(self, value):",
        'def join(self, timeout=None):\n    """Wait until the thread has ended."""\n    with self._lock:\n'
        "        while self._alive:\n            if",
    ),
)
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class DemoResult:
    """Both ways of one config. plain and speculative hold one Generation a repeat; all texts of a kind are equal."""

    decoder: SpeculativeDecoder
    config: RunConfig
    plain: list[Generation]
    speculative: list[Generation]
    comparable: bool

    @property
    def shown(self) -> Generation:
        """The speculative run that is printed."""
        return self.speculative[-1]

    @property
    def identical(self) -> bool | None:
        """Whether every run gave the same token ids; None where the rule keeps the distribution and not the sample."""
        if not self.comparable:
            return None
        reference = self.plain[0].token_ids
        return all(run.token_ids == reference for run in (*self.plain, *self.speculative))

    @property
    def speedup(self) -> float:
        return tokens_per_second(self.speculative) / max(tokens_per_second(self.plain), 1e-12)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the figures of the printed run at the top level."""
        stats = self.shown.stats.to_dict()
        return {
            "identical_to_plain": self.identical,
            "tokens_per_round": stats["tokens_per_round"],
            "acceptance_length": stats["acceptance_length"],
            "plain_tokens_per_second": tokens_per_second(self.plain),
            "speculative_tokens_per_second": tokens_per_second(self.speculative),
            "speedup": self.speedup,
            "strategies": stats["strategies"],
            "acceptance_rate_per_position": stats["acceptance_rate_per_position"],
            "conditional_acceptance_rate_per_position": stats["conditional_acceptance_rate_per_position"],
            "time": stats["time"],
            "prompts": list(self.config.prompts),
            "texts": self.shown.texts,
            "token_ids": self.shown.token_ids,
            "finish_reasons": self.shown.finish_reasons,
            "loop_share": loop_share(self.shown.token_ids),
            "seconds": {
                "plain": [run.stats.times.total for run in self.plain],
                "speculative": [run.stats.times.total for run in self.speculative],
            },
            "stats": stats,
            "plain_stats": self.plain[-1].stats.to_dict(),
            "provenance": self.shown.provenance,
        }


def run_demo(config: RunConfig, repeats: int = 3, progress: Callable[[], None] = lambda: None) -> DemoResult:
    """Load the pair, warm up, and run plain and speculative decoding in turns, `repeats` times each.

    `progress` is called after loading and after every run, 2 + 2 * repeats times. Raises SpecdecError for bad input,
    and KeyboardInterrupt when a run was interrupted: half a comparison says nothing.
    """
    if not config.prompts:
        raise SpecdecError("the demo needs at least one prompt")
    options = dict(config.generation)
    must_agree = comparable(options)  # also refuses bad options, before anything is loaded
    if options.get("seed", 0) is None:
        options["seed"] = secrets.randbits(63)  # both ways must draw with the same keys
    decoder = load_decoder(config)
    progress()
    if kv_dtype(decoder.target.kv_cache_dtype) is not None:  # rounding enlarges near-ties, without exact mode
        must_agree = must_agree and decoder.resolve_exact(options.get("exact", "auto"), decoder.strategies)
    prompts = list(config.prompts)
    for strategies in ([], decoder.strategies):
        decoder.generate(prompts, strategies=strategies, **{**options, "max_new_tokens": WARM_UP_TOKENS})
    progress()
    plain: list[Generation] = []
    speculative: list[Generation] = []
    for _ in range(repeats):
        for runs, strategies in ((plain, []), (speculative, decoder.strategies)):
            runs.append(decoder.generate(prompts, strategies=strategies, **options))
            if "interrupted" in runs[-1].finish_reasons:
                raise KeyboardInterrupt
            progress()
    return DemoResult(decoder, config, plain, speculative, must_agree)


def load_decoder(config: RunConfig) -> SpeculativeDecoder:
    """The decoder of a config. Strategies are checked before anything is loaded."""
    strategies = None if config.strategies is None else list(config.strategies)
    return SpeculativeDecoder.from_pretrained(strategies=strategies, **vars(config.pair))


def with_demo_head(strategies: str | None) -> str | None:
    """A typed chain in which an eagle3 that names no head has the embedded target's."""
    if strategies is None:
        return None
    parts = split_list(strategies)
    headless = [part.split(":")[0] == "eagle3" and ":head=" not in part for part in parts]
    return ",".join(f"{part}:head=demo-head" if bare else part for part, bare in zip(parts, headless, strict=True))


def comparable(options: dict[str, Any]) -> bool:
    """Whether plain decoding must give the same tokens: greedy, or a rule that emits the target's own samples."""
    settings = GenerationSettings.parse(options)
    return find_rule(settings.acceptance).keeps_text(settings.temperature == 0)


def tokens_per_second(runs: list[Generation]) -> float:
    """Median over the runs, prefill included."""
    return statistics.median(run.stats.emitted_tokens / max(run.stats.times.total, 1e-9) for run in runs)
