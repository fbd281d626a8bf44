"""specdec: plain decoding and every chain of strategies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import specdec
from specdec.config import as_list, check_exact
from specdec.decoding.acceptance import find_rule
from specdec.decoding.validation import check_chain, check_generation
from specdec.device.graphs import check_compile
from specdec.drafters import make_drafters
from specdec.drafters.chain import chain_labels
from specdec.errors import SpecdecError
from specdec.research.bench.contenders.base import Contender, Output
from specdec.research.bench.pair import sampled
from specdec.stats import Positions, Stats, contributes_nothing
from specdec.version import __version__

DRAFTING = {"acceptance", "draft_length", "length_policy", "costs"}  # options that change no token of a comparable run
OF_ROUNDS = ("rounds", "drafted_rounds", "draft_tokens", "accepted_tokens", "generated_tokens")
OF_CALLS = ("emitted_tokens", "verify_passes", "host_reads", "draft_passes")
SCENARIOS = {"max_new_tokens", "ignore_eos", "batch_size"}  # options that a scenario sets for all contenders


@dataclass(frozen=True)
class Options:
    """How specdec decodes.

    strategies: a chain; () = plain decoding.
    compile, exact: as `SpeculativeDecoder` takes them.
    generate: options of `generate`.
    """

    strategies: tuple[Any, ...] = ()
    compile: str = "auto"
    exact: Any = "auto"
    generate: Mapping[str, Any] = field(default_factory=dict)


class Own(Contender):
    """A chain of strategies. `decoder` is there after the first run, and shared with contenders of equal settings."""

    kind = "specdec"
    options_class = Options

    def __init__(self, name: str, options: Mapping[str, Any]):
        super().__init__(name, options)
        check_exact(self.options.exact)
        check_compile(self.options.compile)
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
        return self.options.compile, self.options.exact

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
        target's own samples."""
        mine, theirs = self.options.generate, other.options.generate
        wanted = {k: v for k, v in mine.items() if k not in DRAFTING}
        same = wanted == {k: v for k, v in theirs.items() if k not in DRAFTING}
        rule, greedy = find_rule(self.generation.acceptance), not sampled(mine)
        return self.passes == other.passes and same and (self.plain or rule.keeps_text(greedy))

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, ignore_eos: bool) -> Output:
        options: dict[str, Any] = {"strategies": self.strategies, "batch_size": len(prompts), "ignore_eos": ignore_eos}
        out = self.decoder.generate([list(p) for p in prompts], max_new_tokens, **options, **self.generate_options)
        if "interrupted" in out.finish_reasons:
            raise KeyboardInterrupt
        return Output(out.token_ids, {**_figures(out), "compile": out.provenance["compile"]}, out.stats)

    def warnings(self, outputs: Sequence[Output]) -> list[str]:
        """Name strategies that contribute nothing, by the rounds of all calls together (one is too short to tell), and
        passes that do not run as the options say."""
        drafters = dict(zip(chain_labels(self.strategies), self.strategies, strict=True))
        useless = Stats.pooled([o.stats for o in outputs if o.stats is not None]).hardly_accepted()
        found = [contributes_nothing(name, tally, drafters.get(name)) for name, tally in useless.items()]
        for role, report in (entry for o in outputs for entry in o.figures.get("compile", {}).items()):
            found += [line for line in _fallbacks(role, report, self.options.compile) if line not in found]
        return found


def _fallbacks(role: str, report: Mapping[str, Any], asked: str) -> Iterator[str]:
    """What a model's compile report has of modes and recordings that could not be had. `auto` asks for no mode."""
    if asked != "auto" and report["mode"] != asked:
        why = report.get("reason") or "the model does not allow it"
        yield f"passes of the {role} run with compile={report['mode']!r} in place of {asked!r}: {why}"
    if failure := report.get("failure"):
        yield f"passes of the {role} are not recorded: {failure}"
    if report.get("no_room"):
        yield f"passes of the {role} run eagerly where no memory was left to record them"


def _figures(out: Any) -> dict[str, Any]:
    """Counts and seconds of a call, which can be summed over calls; lists by position."""
    stats, total = out.stats, out.stats.total
    drafted, tested, accepted = Positions.of([r for row in stats.rows for r in row])
    return {
        **{name: getattr(total, name) for name in OF_ROUNDS},
        **{name: getattr(stats, name) for name in OF_CALLS},
        **{"tested": tested, "accepted": accepted, "drafted": drafted},
        "time": stats.times.to_dict(),
        "exact": out.provenance["exact"],
    }
