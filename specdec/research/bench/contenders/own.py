"""specdec: plain decoding and every chain of strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import specdec
from specdec.config import as_list, check_exact, check_switch
from specdec.decoding.acceptance import find_rule
from specdec.decoding.engine import Clock
from specdec.decoding.validation import check_chain, check_generation
from specdec.device.graphs import check_compile
from specdec.drafters import make_drafters
from specdec.errors import SpecdecError
from specdec.models.runner import Runner
from specdec.research.bench.contenders.base import Contender, Output
from specdec.research.bench.pair import sampled
from specdec.version import __version__

DRAFTING = {"acceptance", "draft_length", "costs"}  # options that change no token of a comparable run
SCENARIOS = {"max_new_tokens", "ignore_eos", "batch_size"}  # options that a scenario sets for all contenders


@dataclass(frozen=True)
class Options:
    """strategies: a chain, () = plain decoding; compile, exact, fuse: as `SpeculativeDecoder` takes them;
    draft_compile: compile for the draft's passes, None = as the target's; generate: options of `generate`."""

    strategies: tuple[Any, ...] = ()
    compile: str = "off"
    draft_compile: str | None = None
    exact: Any = "auto"
    fuse: bool = False
    generate: Mapping[str, Any] = field(default_factory=dict)


class Own(Contender):
    """A chain of strategies. `decoder` is there after the first run, and shared with contenders of equal settings."""

    kind = "specdec"
    options_class = Options

    def __init__(self, name: str, options: Mapping[str, Any]):
        super().__init__(name, options)
        check_exact(self.options.exact)
        for mode in (self.options.compile, self.options.draft_compile or "off"):
            check_compile(mode)
        check_switch(f"contender {name}: fuse", self.options.fuse)
        self.strategies = make_drafters(self.options.strategies, True)
        for option in SCENARIOS & set(self.options.generate):
            raise SpecdecError(f"contender {name}: generate: {option} is the scenario's to say")
        self.generation = check_generation(self.options.generate)
        self.measured: dict[str, Any] | None = None  # a cost table's plain data, or its error (then nothing runs)
        check_chain(self.strategies, True, self.generation)

    def version(self) -> str | None:
        return __version__

    def refuses(self, batch: int) -> str | None:
        error = None if self.measured is None else self.measured.get("error")
        return None if error is None else f"its costs could not be measured: {error}"

    @property
    def passes(self) -> tuple[Any, ...]:
        """What decides about passes."""
        o = self.options
        return o.compile, o.draft_compile, o.exact, o.fuse

    @property
    def generate_options(self) -> dict[str, Any]:
        """Options of `generate`, with the measured table."""
        costs = {} if self.measured is None else {"costs": self.measured}
        return {**self.options.generate, **costs}

    def settings(self) -> dict[str, Any]:
        return {**asdict(self.options), "strategies": [str(s) for s in as_list(self.options.strategies)]}

    @property
    def decoder(self) -> specdec.SpeculativeDecoder:
        return self.pair.decoder(*self.passes)

    @property
    def plain(self) -> bool:
        return not self.strategies

    def comparable_with(self, other: Own) -> bool:
        """Whether the other's ids must be these, token for token: the same passes, and greedy or a rule that emits the
        target's own draws."""
        mine, theirs = self.options, other.options
        passes = (mine.compile, mine.exact, mine.fuse) == (theirs.compile, theirs.exact, theirs.fuse)
        drawn = {k: v for k, v in mine.generate.items() if k not in DRAFTING}
        same = drawn == {k: v for k, v in theirs.generate.items() if k not in DRAFTING}
        rule, greedy = find_rule(self.generation.acceptance), not sampled(mine.generate)
        return passes and same and (self.plain or rule.keeps_text(greedy))

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, ignore_eos: bool) -> Output:
        decoder = self.decoder
        with DraftPasses(decoder.draft) as watched:
            out = decoder.generate(
                [list(p) for p in prompts], max_new_tokens, strategies=self.strategies, batch_size=len(prompts),
                ignore_eos=ignore_eos, **self.generate_options,
            )  # fmt: skip
        if "interrupted" in out.finish_reasons:
            raise KeyboardInterrupt
        return Output(out.token_ids, {**_figures(out, watched), "compile": out.provenance["compile"]})


class DraftPasses:
    """Watches the draft's runner while it is entered: how many passes rounds took, and how long its prefill of prompts,
    which theory has no term for, took within them."""

    def __init__(self, runner: Runner | None):
        self.runner = runner
        self.count = 0
        self.clock = Clock(runner.device if runner is not None else torch.device("cpu"))
        self.prefills: list[tuple[Any, Any]] = []

    def __enter__(self) -> DraftPasses:
        if self.runner is not None:
            watched: Any = self.runner
            watched.run, watched.prefill = self._counting(self.runner.run), self._timing(self.runner.prefill)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.runner is not None:
            del self.runner.__dict__["run"], self.runner.__dict__["prefill"]

    @property
    def prefill_seconds(self) -> float:
        """After a host read that follows the last of them."""
        return sum(self.clock.span(*marks) for marks in self.prefills)

    def _counting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(cache: Any, key: Any, *more: Any) -> Any:
            graphs = self.runner.graphs if self.runner is not None else None
            if key.rare or (graphs is not None and graphs.busy):  # prefill, or a pass within a program
                return run(cache, key, *more)
            before = self.count
            result = run(cache, key, *more)
            # A program that was not replayed has run its passes one by one, and they have counted themselves.
            if self.count == before:
                self.count += key.passes
            return result

        return counted

    def _timing(self, prefill: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*arguments: Any, **options: Any) -> Any:
            started = self.clock.mark()
            prefill(*arguments, **options)
            self.prefills.append((started, self.clock.mark()))

        return marked


def _figures(out: Any, watched: DraftPasses) -> dict[str, Any]:
    """Counts and seconds of a call, which can be summed over calls; lists by position."""
    stats = out.stats
    total, records = stats.total, [r for row in stats.rows for r in row]
    counts = ("rounds", "drafted_rounds", "draft_tokens", "accepted_tokens", "generated_tokens")
    longest = max((r.depth for r in records), default=0)
    return {
        **{name: getattr(total, name) for name in counts},
        "emitted_tokens": stats.emitted_tokens,
        "verify_passes": stats.verify_passes,
        "host_reads": stats.host_reads,
        "draft_passes": watched.count,
        "model_drafted": sum(r.drafted for r in records if r.strategy == "draft-model"),
        "tested": [sum(r.tested(i) for r in records) for i in range(longest)],
        "accepted": [sum(r.accepted > i for r in records) for i in range(longest)],
        "drafted": [sum(r.depth > i for r in records) for i in range(longest)],
        "time": {**stats.times.to_dict(), "draft_prefill": watched.prefill_seconds},
        "exact": out.provenance["exact"],
    }
