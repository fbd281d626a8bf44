"""Compare the estimates of specdec.research.what_if with real runs of the same plans.

    python scripts/measure_what_if.py embedded --out results/what_if_embedded.json [--seconds S]
    python scripts/measure_what_if.py smollm2 --out results/what_if_smollm2.json [--seconds S]

`embedded`: the embedded pair on HumanEval prompts. `smollm2`: n-gram strategies replayed on results/texts_smollm2.npz,
against runs of SmolLM2-135M-Instruct on some of these prompts; then the model with a coarser copy of itself as draft,
on the shortest prompts. What there is no time for is left out.

Greedy, `match` and `coupled` runs write the very texts that the estimate has read, and must agree with it. Under
`leviathan` text and estimate are independent samples: both are drawn again and again, until the standard error of every
difference is below --error, or S seconds are over. The error is that of texts drawn for these prompts.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import specdec
from specdec.provenance import device_name, versions
from specdec.research import what_if
from specdec.research.bootstrap import ratio_error
from specdec.research.datasets import load_prompts
from specdec.research.replay import load_texts

ROOT = Path(__file__).resolve().parents[1]
PLANS = ((2, 0.0), (4, 0.0), (8, 0.4))  # k, p_min
CHAIN = "ngram-simple:size_n=3:size_m=6,draft-model:n_max=4"
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "match": {"acceptance": "match", "temperature": 0.8, "num_return_sequences": 2},
    "coupled": {"acceptance": "coupled", "temperature": 0.8, "num_return_sequences": 2},
    "leviathan": {"acceptance": "leviathan", "temperature": 0.8},
}
NGRAMS = ("prompt-lookup", "ngram-simple:size_n=3:size_m=8", "suffix", "ngram-cache")
COARSE = 0.2  # agrees with the model's greedy text in four of five tokens
Row = dict[str, Any]


@dataclass
class Sample:
    """Texts of one side of a comparison: their tokens and rounds, and which prompt each is of."""

    tokens: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[float], rounds: Sequence[float], each: int) -> None:
        """Rows of a call, `each` of every prompt."""
        self.tokens += tokens
        self.rounds += rounds
        self.prompts += [i // each for i in range(len(tokens))]

    @property
    def tokens_per_round(self) -> float:
        return sum(self.tokens) / sum(self.rounds)

    @property
    def relative_error(self) -> float | None:
        error = ratio_error(self.tokens, self.rounds, self.prompts)
        return None if error is None else error / self.tokens_per_round


@dataclass
class Comparison:
    """One plan: what was estimated and what real runs gave. same: whether both are about the same texts."""

    rule: str
    strategies: str
    estimate: Sample = field(default_factory=Sample)
    measured: Sample = field(default_factory=Sample)
    same: bool = True

    def add(self, plan: what_if.Plan, out: specdec.Generation, texts: Sequence[Sequence[int]], each: int) -> None:
        """A further estimate and a further run."""
        self.estimate.add([c[0] for c in plan.counts], [c[1] for c in plan.counts], each)
        self.measured.add([len(t) for t in out.token_ids], [len(r) for r in out.stats.rows], each)
        self.same = self.same and [list(t) for t in texts] == out.token_ids

    @property
    def difference(self) -> float:
        return self.estimate.tokens_per_round / self.measured.tokens_per_round - 1

    @property
    def error(self) -> float | None:
        """Standard error of the difference; 0 where both sides are about the same texts."""
        sides = (self.estimate.relative_error, self.measured.relative_error)
        if self.same:
            return 0.0
        return None if None in sides else math.hypot(*(s for s in sides if s is not None)) * (1 + self.difference)

    def to_dict(self) -> Row:
        row = {
            "rule": self.rule, "strategies": self.strategies, "same_texts": self.same,
            "estimate": {"tokens_per_round": self.estimate.tokens_per_round, "tokens": sum(self.estimate.tokens)},
            "measured_tokens_per_round": self.measured.tokens_per_round, "measured_tokens": sum(self.measured.tokens),
            "difference": self.difference, "standard_error": self.error,
        }  # fmt: skip
        error = "unknown" if self.error is None else f"{self.error:.2%}"
        estimate, measured = self.estimate.tokens_per_round, self.measured.tokens_per_round
        figures = f"{estimate:.3f} {measured:.3f} {self.difference:+.2%}, standard error {error}"
        print(f"{self.rule:10} {self.strategies:52} {figures}", flush=True)
        return row


def main() -> None:
    """Run one part and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("embedded", "smollm2"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--samples", type=int, help="texts of a prompt in a call under leviathan; else 16, SmolLM2: 4")
    parser.add_argument("--error", type=float, default=0.0075, help="standard error to reach under leviathan")
    parser.add_argument("--seconds", type=float, default=600.0, help="no further call is begun after these")
    arguments = parser.parse_args()
    arguments.samples = arguments.samples or (16 if arguments.part == "embedded" else 4)
    arguments.deadline = time.monotonic() + arguments.seconds
    part = _embedded if arguments.part == "embedded" else _smollm2
    rows = [comparison.to_dict() for comparison in part(arguments)]
    result = {
        "made_by": f"scripts/measure_what_if.py {arguments.part}",
        "versions": versions(),
        "device": device_name(torch.device("cpu")),
        "prompts": arguments.prompts,
        "tokens": arguments.tokens,
        "largest_difference": max(abs(row["difference"]) for row in rows),
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"largest difference {result['largest_difference']:.2%}")


def _embedded(arguments: argparse.Namespace) -> Iterator[Comparison]:
    decoder = specdec.SpeculativeDecoder.from_pretrained("demo-target", draft="demo-draft", device="cpu")
    prompts = [p.text for p in load_prompts("humaneval", limit=arguments.prompts)]
    for rule, options in RULES.items():
        yield from _plans(decoder, prompts, rule, options, PLANS, [CHAIN], arguments)


def _smollm2(arguments: argparse.Namespace) -> Iterator[Comparison]:
    from specdec.research.inflate import coarsen
    from specdec.research.smollm2 import fetch_folder

    known = sorted(load_texts(ROOT / "results" / "texts_smollm2.npz"), key=lambda t: len(t.prompt))
    texts = known[:: len(known) // arguments.prompts][: arguments.prompts]
    prompts = [t.prompt.tolist() for t in texts]
    alone = specdec.SpeculativeDecoder.from_pretrained(str(fetch_folder()), device="cpu")
    for strategies in NGRAMS:
        if time.monotonic() > arguments.deadline:
            return
        longest = max(len(t.output) for t in texts)
        out = alone.generate(prompts, max_new_tokens=longest, strategies=strategies, batch_size=1)
        found = Comparison("greedy", strategies)
        found.add(what_if.ngrams(texts, strategies), out, [t.output.tolist() for t in texts], 1)
        yield found
    target = alone.target.model
    pair = specdec.SpeculativeDecoder(target, coarsen(target, COARSE), alone.tokenizer)
    short = [t.prompt.tolist() for t in known[: arguments.prompts]]  # many rows of them fit into one call
    for rule in ("greedy", "leviathan"):
        if time.monotonic() < arguments.deadline:
            yield from _plans(pair, short, rule, RULES[rule], PLANS[1:], [], arguments)


def _plans(
    decoder: Any, prompts: Sequence[Any], rule: str, options: dict[str, Any], models: Sequence[tuple[int, float]],
    chains: Sequence[str], arguments: argparse.Namespace,
) -> list[Comparison]:  # fmt: skip
    """Every plan, once where text and estimate are about the same texts, else until the error is small."""
    ks, p_mins = [k for k, _ in models], sorted({p for _, p in models})
    made = [Comparison(rule, s) for s in (*(f"draft-model:n_max={k}:p_min={p}" for k, p in models), *chains)]
    each = arguments.samples if rule == "leviathan" else options.get("num_return_sequences", 1)
    call = {**options, "max_new_tokens": arguments.tokens, "num_return_sequences": each}
    call["batch_size"] = each * len(prompts)
    for count in range(1 if rule != "leviathan" else 10_000):
        # Estimate and runs of `leviathan` must be independent of each other, and share their seed under other rules.
        seeds = (2 * count, 2 * count + 1 if rule == "leviathan" else 2 * count)
        found = what_if.estimate(decoder, prompts, ks, p_mins, chains, seed=seeds[0], **call)
        known = {(p.k, p.p_min): p for p in found.plans}
        plans = [*(known[model] for model in models), *found.plans[len(ks) * len(p_mins) :]]
        texts = [t.output.tolist() for t in found.texts]
        for comparison, plan in zip(made, plans, strict=True):
            out = decoder.generate(prompts, strategies=comparison.strategies, seed=seeds[1], **call)
            comparison.add(plan, out, texts, each)
        errors = [c.error for c in made]
        if all(e is not None and e < arguments.error for e in errors) or time.monotonic() > arguments.deadline:
            break
    return made


if __name__ == "__main__":
    main()
