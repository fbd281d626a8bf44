"""`specdec bench --smoke`: plain and speculative decoding against transformers' `generate`, in minutes.

Two suites, each a scenario (scenario.py) of three contenders: SmolLM2-135M in float32 with prompt-lookup on prompts
that quote their input (Spec-Bench's summarisation and RAG), and the embedded pair with the demo's chain on held-out
text. A ratio of speeds is taken within each repeat over all its prompts; reported are the median and the range over the
repeats. Token ids are compared, never assumed equal.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdec.demo_models import target_path
from specdec.errors import SpecdecError, unknown_name
from specdec.research.bench import figures
from specdec.research.bench.config import Scenario
from specdec.research.bench.contenders import make_contender
from specdec.research.bench.document import origin
from specdec.research.bench.pair import Pair, calls_of
from specdec.research.bench.scenario import ScenarioRun
from specdec.research.bench.tables import Table, figure, spread
from specdec.research.demo import DEMO
from specdec.research.models.choice import SMOLLM2, ModelChoice, locate
from specdec.research.models.smollm2 import VARIABLE
from specdec.research.prompts.datasets import Prompt, load_prompts
from specdec.stats import RATES
from specdec.theory import Costs

METHODS = ("transformers", "plain", "speculative")
RATIOS = {
    "speculative_to_plain": ("speculative", "plain"),
    "plain_to_transformers": ("plain", "transformers"),
    "speculative_to_transformers": ("speculative", "transformers"),
}
COUNTED = ("tokens_per_round", "acceptance_length", *RATES.values())
LIMIT = 120.0  # seconds of a suite after which no repeat begins, except the first
HELD_OUT_TOKENS = 64  # of a held-out excerpt; the rest is for the model to write
Progress = Callable[[str], None]
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Suite:
    """One model or pair on a set of prompts."""

    name: str
    models: ModelChoice
    strategies: tuple[Any, ...]
    prompts: tuple[Prompt, ...]
    max_new_tokens: int
    repeats: int

    def settings(self) -> dict[str, Any]:
        """What the suite ran, without the prompts' texts and without this machine's paths."""
        models, strategies = {**asdict(self.models), **self.models.names()}, [str(s) for s in self.strategies]
        return {**asdict(self), "models": models, "strategies": strategies, "prompts": [p.id for p in self.prompts]}


def smollm2_suite(quick: bool = False) -> Suite:
    """SmolLM2-135M with prompt-lookup. Raises SpecdecError where the model cannot be had."""
    locate(SMOLLM2)
    prompts: list[Prompt] = []
    for category, count in (("summarization", 2), ("rag", 1)):
        # The shortest ones: on a CPU the prefill of a long document would hide what is measured.
        shortest = sorted(load_prompts("spec-bench", categories=category), key=lambda p: len(p.text))
        prompts += shortest[: 1 if quick else count]
    models = ModelChoice(SMOLLM2, None, dtype="float32")
    sizes = (24, 1) if quick else (48, 3)
    return Suite("smollm2-135m", models, ("prompt-lookup:ngram_min=2",), tuple(prompts), *sizes)


def embedded_suite(quick: bool = False) -> Suite:
    """The embedded pair with the demo's chain, on text that it was not trained on."""
    prompts = held_out_prompts()[: 2 if quick else 4]
    sizes = (24, 2) if quick else (80, 3)
    return Suite("embedded-pair", ModelChoice(dtype="float32"), tuple(DEMO.strategies or ()), tuple(prompts), *sizes)


def held_out_prompts() -> list[Prompt]:
    """The beginnings of the excerpts on which the models' own card reports agreement."""
    from transformers import AutoTokenizer

    metrics = json.loads((target_path().parent / "metrics.json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    prompts = []
    for entry in metrics["check"]:
        ids = tokenizer(entry["text"], add_special_tokens=False)["input_ids"]
        if len(ids) >= HELD_OUT_TOKENS:
            text = tokenizer.decode(ids[:HELD_OUT_TOKENS])
            prompts.append(Prompt(f"held-out/{entry['path']}", "held-out code", text, (text,)))
    return prompts


TITLES = {"smollm2-135m": "SmolLM2-135M-Instruct, `prompt-lookup`", "embedded-pair": "embedded pair, the demo's chain"}
SUITES: dict[str, Callable[[bool], Suite]] = {"smollm2-135m": smollm2_suite, "embedded-pair": embedded_suite}


def run_smoke(
    quick: bool = False,
    suites: Iterable[str] = tuple(SUITES),
    progress: Progress = lambda what: None,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Run the suites; one whose model cannot be had is skipped, with the reason in its place.

    progress: told what is about to run. save: gets the result so far after every suite, and when one is interrupted.
    Raises SpecdecError for an unknown suite, and where SPECDEC_SMOLLM2 names no model.
    """
    names = list(suites)
    for name in names:
        if name not in SUITES:
            raise unknown_name("suite", name, SUITES)
    results: dict[str, Any] = {}
    document = {"benchmark": "smoke", "quick": quick, **origin(), "suites": results}
    for name in names:
        progress(f"loading {name}")
        try:
            suite = SUITES[name](quick)
        except SpecdecError as error:
            if os.environ.get(VARIABLE):
                raise SpecdecError(f"{VARIABLE}: {error}") from None
            results[name] = {"skipped": str(error)}
            continue
        results[name] = measure(suite, progress)
        save(document)
        if results[name].get("interrupted"):
            raise KeyboardInterrupt
    return document


def measure(suite: Suite, progress: Progress = lambda what: None) -> dict[str, Any]:
    """Run every prompt with every method, in turns, once or as often as the time allows."""
    until = time.perf_counter() + LIMIT
    pair = Pair.build(suite.models)
    own: dict[str, Any] = {"kind": "specdec", "compile": "auto"}
    options = ({"kind": "transformers"}, own, {**own, "strategies": suite.strategies})
    order = [make_contender(name, given) for name, given in zip(METHODS, options, strict=True)]
    for contender in order:
        contender.enter(pair)
    calls = calls_of(suite.prompts, pair, 1, pair.target.config.max_position_embeddings)
    setting = Scenario(None, 1, len(suite.prompts), suite.max_new_tokens, suite.repeats)
    found = ScenarioRun(suite.name, setting, pair, calls, order, until, progress).run()
    failed = {name: entry["error"] for name, entry in found["contenders"].items() if "error" in entry}
    if failed:
        raise SpecdecError(f"{suite.name}: {next(iter(failed))} failed: {next(iter(failed.values()))}")
    categories = {p.id: p.category for p in suite.prompts}
    runs = [{**run, "category": categories[calls[run["call"]].ids[0]]} for run in found["runs"]]
    names = ("prompts", "prompt_tokens", "prompt_hashes", "chat_template", "interrupted")
    asked = {name: found[name] for name in names if name in found}
    if warnings := {name: e["warnings"] for name, e in found["contenders"].items() if "warnings" in e}:
        asked["warnings"] = warnings
    return {"settings": suite.settings(), **asked, "summary": summarise(runs), "runs": runs}


def summarise(runs: Rows) -> dict[str, Any]:
    """Figures by category and in total. runs: those of a scenario with plain decoding and one chain, each with the
    category of its prompt."""
    categories = list(dict.fromkeys(run["category"] for run in runs))
    groups = {c: [run for run in runs if run["category"] == c] for c in categories}
    return {name: _summary(group) for name, group in (*groups.items(), ("total", list(runs)))}


def _summary(runs: Rows) -> dict[str, Any]:
    by = {method: [r for r in runs if r["contender"] == method] for method in METHODS}
    speeds = {method: _speeds(mine) for method, mine in by.items()}
    ratios = {name: [a / b for a, b in zip(speeds[x], speeds[y], strict=True)] for name, (x, y) in RATIOS.items()}
    plain, drafted = by["plain"], by["speculative"]
    counted = figures.summary(drafted)
    return {
        "repeats": len(speeds["plain"]),
        "tokens_per_second": {method: median(values) for method, values in speeds.items()},
        "ratios": {name: median(values) for name, values in ratios.items()},
        "equal_token_ids": {method: all(r["equal"] for r in mine) for method, mine in by.items()},
        **{name: counted[name] for name in COUNTED},
        "ms_per_round": {"plain": figures.ms(plain), "speculative": figures.ms(drafted)},
        "advice": advice(plain, drafted),
    }


def _speeds(runs: Rows) -> list[float]:
    """Tokens per second of all prompts together, one figure a repeat."""
    groups = [[r for r in runs if r["repeat"] == repeat] for repeat in sorted({r["repeat"] for r in runs})]
    return [figures.total(group, "tokens") / figures.total(group, "seconds") for group in groups]


def advice(plain: Rows, drafted: Rows, k_max: int = 16) -> dict[str, float | int]:
    """What theory makes of the measurement: acceptance a, costs c and v, and the best draft length; 0 = do not draft.

    The cost of a wide pass is taken to grow with the draft's length, from the mean length that was measured. Chains
    are treated as one drafter.
    """
    rounds, tokens = figures.total(drafted, "rounds"), figures.total(drafted, "draft_tokens")
    ms, per_pass, length = figures.ms(drafted), figures.ms(plain)["verify"], tokens / max(1.0, rounds)
    a = figures.acceptance(drafted)["tested"] or 0.0
    c, v = ms["draft"] / max(1e-9, length) / per_pass, max(0.0, ms["verify"] / per_pass - 1)
    best = Costs(c, lambda k: v * k / length).best_k(a, k_max) if length else 0
    return {
        "conditional_acceptance_rate": a,
        "acceptance": a,
        "draft_cost": c,
        "width_cost": v,
        "mean_draft_length": length,
        "best_draft_length": best,
    }


def median(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def equal(result: Mapping[str, Any]) -> bool:
    """Whether every method gave plain decoding's token ids in every suite that ran."""
    suites = [s for s in result["suites"].values() if "skipped" not in s]
    return all(same for s in suites for same in s["summary"]["total"]["equal_token_ids"].values())


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Speeds, and for each suite where the milliseconds of a round go and what theory advises."""
    heads = ["model and strategy", "prompts", *METHODS, "plain : transformers", "speculative : plain"]
    heads += ["tokens per round", "same ids"]
    speeds, rounds = [], []
    for name, suite in result["suites"].items():
        if "skipped" in suite:
            speeds.append([TITLES.get(name, name), f"skipped: {suite['skipped']}", *[""] * 7])
            continue
        # With one category the total says the same.
        entries = [(c, e) for c, e in suite["summary"].items() if c != "total" or len(suite["summary"]) > 2]
        for category, entry in entries:
            medians = [figure(entry["tokens_per_second"][m]["median"], 1) for m in METHODS]
            ratios = [spread(entry["ratios"][r]) for r in ("plain_to_transformers", "speculative_to_plain")]
            same = "yes" if all(entry["equal_token_ids"].values()) else "no"
            rate = figure(entry["tokens_per_round"])
            speeds.append([TITLES.get(name, name), category, *medians, *ratios, rate, same])
            plain, drafted = entry["ms_per_round"]["plain"], entry["ms_per_round"]["speculative"]
            times = [plain["verify"], *(drafted[part] for part in ("draft", "verify", "other"))]
            best = entry["advice"]["best_draft_length"] or "off"
            accepted = figure(entry["acceptance_length"])
            rounds.append([f"{name}, {category}", accepted, *(figure(x, 1) for x in times), str(best)])
    more = ("accept length", "plain ms", "draft ms", "verify ms", "other ms", "best length")
    return [
        Table("tokens per second and ratios, median (range)", heads, speeds),
        Table("milliseconds of a round, and the draft length that theory advises", ("prompts", *more), rounds),
    ]
