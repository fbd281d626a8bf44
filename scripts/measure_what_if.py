"""Compare the estimates of specdec.research.what_if with real runs of the same plans.

    python scripts/measure_what_if.py embedded --out results/what_if_embedded.json [--seconds S]
    python scripts/measure_what_if.py smollm2 --out results/what_if_smollm2.json [--seconds S]

`embedded`: the embedded pair on HumanEval prompts. `smollm2`: SmolLM2-135M-Instruct on prompts of
results/texts_smollm2.npz, with n-gram strategies, and with two drafts made of the model: a coarser copy, and one with
fewer layers.

Every run is compared with the estimate for the very texts that it wrote: what a run's rounds are on average, given its
text. Greedy, `match` and `coupled` texts must be plain decoding's, and the rounds the estimate's. A `leviathan` run
writes a text of its own, on which rounds come and go by the coins of acceptance; --error is the standard error to
reach. That difference is the one between plain texts and runs, without what texts differ by among themselves, as long
as runs write texts of the target's distribution (docs/losslessness.md). The result also has the difference from plainly
sampled texts, which does not assume that, and whose error is many times larger.

The work is cut into small pieces, every plan's first piece before any second one. What is done is kept beside the
result (NAME.work.jsonl), and the result is written after each piece: a run that is stopped goes on when it is started
again. No piece is begun that would not end within --seconds, the loading of models included, if it takes as long as the
longest of its plan has.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import specdec
from specdec.decoding.provenance import device_name, versions
from specdec.files.compact_json import write_json
from specdec.files.texts import write_atomically
from specdec.research.offline import what_if
from specdec.research.offline.replay import Text, load_texts
from specdec.research.prompts.datasets import load_prompts

ROOT = Path(__file__).resolve().parents[1]
Z95 = 1.959964
CHAIN = "ngram-simple:size_n=3:size_m=6,draft-model:n_max=4"
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "match": {"acceptance": "match", "temperature": 0.8},
    "coupled": {"acceptance": "coupled", "temperature": 0.8},
    "leviathan": {"acceptance": "leviathan", "temperature": 0.8},
}
NGRAMS = ("prompt-lookup", "ngram-simple:size_n=3:size_m=8", "suffix", "ngram-cache")
COARSE = 0.2
LEFT_OUT = range(14, 18)  # of SmolLM2's 30 layers, those that its greedy text depends on the least
Row = dict[str, Any]


# -- what is compared ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A line of the table. draft: of what kind, None = none; strategies: a chain, or None for `draft-model` with k and
    p_min; prompts: which; pieces: prompts of a piece of work, 0 = all and again, with other seeds; each: texts of a
    prompt in a piece."""

    rule: str
    draft: str | None
    chain: str | None
    k: int
    p_min: float
    prompts: tuple[int, ...]
    piece: int
    each: int

    @property
    def strategies(self) -> str:
        return self.chain or f"draft-model:n_max={self.k}:p_min={self.p_min}"

    @property
    def key(self) -> tuple[Any, ...]:
        return self.rule, self.draft, self.strategies

    def part(self, level: int) -> tuple[int, ...]:
        """The prompts of a piece; none when all are done."""
        return self.prompts[level * self.piece :][: self.piece] if self.piece else self.prompts


@dataclass
class Found:
    """What the pieces of a case have given. runs: prompt, tokens, expected rounds and rounds of each text that a run
    wrote; plain: prompt, tokens and expected rounds of each that was written plainly; same: whether every run wrote
    plain decoding's."""

    runs: list[list[float]] = field(default_factory=list)
    plain: list[list[float]] = field(default_factory=list)
    same: bool = True

    def summary(self) -> Row:
        """Tokens a round by estimate and run, and their relative differences with 95 % intervals."""
        prompts, tokens, expected, rounds = np.array(self.runs).T
        measured = tokens.sum() / rounds.sum()
        own = _difference(rounds.sum() / expected.sum(), ratio_error(rounds, expected, prompts))
        if np.allclose(rounds, expected):
            own = _difference(1.0, 0.0)
        row = {
            "same_texts": self.same,
            "texts": len(tokens),
            "tokens": int(tokens.sum()),
            "measured": measured,
            "estimate": tokens.sum() / expected.sum(),
            **own,
        }
        if self.plain:
            groups, length, other = np.array(self.plain).T
            estimate = length.sum() / other.sum()
            errors = (ratio_error(length, other, groups), ratio_error(tokens, rounds, prompts))
            known = None if None in errors else math.hypot(errors[0] / estimate, errors[1] / measured)
            row["from_plain_texts"] = {
                "texts": len(length),
                "estimate": estimate,
                **_difference(estimate / measured, known),
            }
        return row


def ratio_error(numerators: Sequence[float], denominators: Sequence[float], groups: Sequence[int]) -> float | None:
    """Standard error of sum over sum, of independent rows in given groups (texts drawn of each prompt), linearised:
    only what rows of one group differ by counts. None where a group has one row."""
    top, bottom, names = (np.asarray(column, dtype=np.float64) for column in (numerators, denominators, groups))
    rest = top - top.sum() / bottom.sum() * bottom
    variance = 0.0
    for name in np.unique(names):
        own = rest[names == name]
        if len(own) < 2:
            return None
        variance += len(own) * float(own.var(ddof=1))
    return float(np.sqrt(variance) / bottom.sum())


def _difference(ratio: float, error: float | None) -> Row:
    """Estimate over measurement, less 1; error: of the ratio, relative for ratios near 1."""
    value = ratio - 1.0
    bounds = (None, None) if error is None else (value - Z95 * error, value + Z95 * error)
    return {"difference": value, "standard_error": error, "low": bounds[0], "high": bounds[1]}


# -- the work --------------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """One half of the comparison: its models and prompts. kept: greedy texts that are known already, by prompt."""

    pairs: dict[str | None, Any]
    prompts: list[Any]
    cases: list[Case]
    tokens: int
    kept: list[list[int]] | None = None
    written: dict[Any, list[list[int]]] = field(default_factory=dict)

    def call(self, case: Case, part: Sequence[int]) -> Row:
        """Options of `generate` for a piece."""
        sizes = {"max_new_tokens": self.tokens, "num_return_sequences": case.each}
        return {**RULES[case.rule], **sizes, "batch_size": case.each * len(part)}

    def run(self, case: Case, part: tuple[int, ...], seed: int) -> tuple[list[list[float]], bool]:
        """A real run: the rows of Found.runs, and whether its texts are plain decoding's."""
        prompts, call = [self.prompts[i] for i in part], self.call(case, part)
        out = self.pairs[case.draft].generate(prompts, strategies=case.strategies, seed=seed, **call)
        expected = self._estimate(case, part, out.token_ids, seed)
        sizes = zip(out.token_ids, expected, out.stats.rows, strict=True)
        rows = [[part[i // case.each], len(text), e, len(r)] for i, (text, e, r) in enumerate(sizes)]
        same = case.rule != "leviathan" and out.token_ids == self._plain(case, part, seed)
        return rows, same

    def _estimate(self, case: Case, part: Sequence[int], texts: Sequence[Sequence[int]], seed: int) -> list[float]:
        """Rounds that are expected for each of these texts."""
        prompts = [self.prompts[i] for i in part]
        if case.draft is None:
            own = [Text("", "", np.array(p), np.array(t)) for p, t in zip(prompts, texts, strict=True)]
            plan = what_if.ngrams(own, case.strategies)
        else:
            models = ((), (), [case.chain]) if case.chain else ((case.k,), (case.p_min,), ())
            call = self.call(case, part)
            [plan] = what_if.estimate(self.pairs[case.draft], prompts, *models, outputs=texts, seed=seed, **call).plans
        return [rounds for _, rounds, _ in plan.counts]

    def _plain(self, case: Case, part: tuple[int, ...], seed: int) -> list[list[int]]:
        """Plain decoding's texts: written once for all plans of a rule."""
        if case.rule == "greedy" and self.kept is not None:
            return [self.kept[i] for i in part]
        name = (case.rule, case.draft, part, seed)
        if name not in self.written:
            prompts = [self.prompts[i] for i in part]
            out = self.pairs[case.draft].generate(prompts, strategies=[], seed=seed, **self.call(case, part))
            self.written[name] = out.token_ids
        return self.written[name]

    def plain(self, cases: Sequence[Case], seed: int) -> list[list[list[float]]]:
        """Texts written plainly, and what is expected of every plan on them: the rows of Found.plain, by case."""
        first, part = cases[0], cases[0].part(0)
        models = [c for c in cases if not c.chain]
        grid = (sorted({c.k for c in models}), sorted({c.p_min for c in models}), [c.chain for c in cases if c.chain])
        prompts, call = [self.prompts[i] for i in part], self.call(first, part)
        found = what_if.estimate(self.pairs[first.draft], prompts, *grid, seed=seed, **call)
        known = {p.chain if p.k is None else (p.k, p.p_min): p for p in found.plans}
        plans = [known[c.chain or (c.k, c.p_min)] for c in cases]
        return [[[part[i // first.each], t, r] for i, (t, r, _) in enumerate(plan.counts)] for plan in plans]


class Record:
    """What is done, kept in a file of JSON lines beside the result; and the result."""

    def __init__(self, part: Part, arguments: argparse.Namespace):
        self.part, self.arguments = part, arguments
        self.found = {case.key: Found() for case in part.cases}
        self.done: set[tuple[Any, ...]] = set()
        self.file = arguments.out.with_suffix(".work.jsonl")
        cases = [asdict(case) for case in part.cases]
        head = json.dumps({"versions": versions(), "tokens": part.tokens, "cases": cases}, sort_keys=True)
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.is_file() else []
        if lines and lines[0] != head:
            raise SystemExit(f"{self.file} is of other settings or versions: give another --out, or remove it")
        for line in lines[1:]:
            self._take(**json.loads(line))
        self.lines = lines or [head]

    def add(self, **entry: Any) -> None:
        """A piece that is done: key, kind (run or plain), level, rows, same."""
        self._take(**entry)
        self.lines.append(json.dumps(entry))
        write_atomically(self.file, "\n".join(self.lines) + "\n")
        self.write()

    def _take(self, key: Sequence[Any], kind: str, level: int, rows: list[list[float]], same: bool) -> None:
        found = self.found[tuple(key)]
        (found.runs if kind == "run" else found.plain).extend(rows)
        found.same = found.same and same
        self.done.add((tuple(key), kind, level))

    def write(self) -> None:
        """The result, from what is done so far."""
        rows = []
        for case in self.part.cases:
            found = self.found[case.key]
            if found.runs:
                about = {"rule": case.rule, "draft": case.draft, "strategies": case.strategies}
                rows.append({**about, "prompts": len({r[0] for r in found.runs}), **found.summary()})
        ends = [abs(row[end]) for row in rows for end in ("low", "high") if row[end] is not None]
        result = {
            "made_by": f"scripts/measure_what_if.py {self.arguments.part}",
            "versions": versions(),
            "device": device_name(torch.device("cpu")),
            "new_tokens": self.part.tokens,
            "largest_difference": max((abs(row["difference"]) for row in rows), default=None),
            "largest_bound": max(ends, default=None),
            "rows": rows,
        }
        write_json(self.arguments.out, result)

    def missing(self, case: Case) -> tuple[bool, bool]:
        """What a random case needs more of before both its errors are as small as is asked for: runs, plain texts."""
        found = self.found[case.key]
        if not (found.runs and found.plain):
            return not found.runs, not found.plain
        row = found.summary()
        own, plain = row["standard_error"], row["from_plain_texts"]["standard_error"]
        short = plain is None or plain > self.arguments.plain_error
        return short or own is None or own > self.arguments.error, short


def pieces(record: Record) -> Iterator[tuple[str, list[Case], int]]:
    """What is left to do: kind, cases and level of a piece. Every case's first piece comes before any second."""
    cases = record.part.cases
    for level in itertools.count():
        more = False
        for case in cases:
            if case.part(level) and (case.piece or record.missing(case)[0]):
                more = True
                if (case.key, "run", level) not in record.done:
                    yield "run", [case], level
        for draft in {c.draft: None for c in cases if not c.piece}:
            group = [c for c in cases if c.draft == draft and not c.piece]
            if any(record.missing(c)[1] for c in group):
                more = True
                if (group[0].key, "plain", level) not in record.done:
                    yield "plain", group, level
        if not more:
            return


def work(record: Record, deadline: float) -> None:
    """Do piece after piece until all is done or the time is over."""
    longest: dict[Any, float] = {}
    for kind, cases, level in pieces(record):
        name, begun = (kind, cases[0].key), time.monotonic()
        if begun + longest.get(name, 0.0) > deadline:
            return
        # Texts of runs and those written plainly must be independent of each other: no seed is used for both.
        if kind == "run":
            case = cases[0]
            seed = 0 if case.piece else 2 * level + 1
            rows, same = record.part.run(case, case.part(level), seed)
            record.add(key=case.key, kind=kind, level=level, rows=rows, same=same)
        else:
            for case, rows in zip(cases, record.part.plain(cases, 2 * level), strict=True):
                record.add(key=case.key, kind=kind, level=level, rows=rows, same=False)
        longest[name] = max(longest.get(name, 0.0), time.monotonic() - begun)
        _show(record, cases, time.monotonic() - begun)


def _show(record: Record, cases: Sequence[Case], seconds: float) -> None:
    for case in cases:
        found = record.found[case.key]
        if found.runs:
            row = found.summary()
            error = "-" if row["standard_error"] is None else f"{row['standard_error']:.2%}"
            what = f"{case.rule:9} {case.draft or '':22} {case.strategies:50} {row['tokens']:6}"
            print(f"{seconds:5.1f} s  {what} {row['measured']:.3f} {row['difference']:+.2%} +- {error}", flush=True)


# -- the two parts ---------------------------------------------------------------------------------------------------


def embedded(arguments: argparse.Namespace) -> Part:
    """The embedded pair; every rule, three plans and a chain."""
    decoder = specdec.SpeculativeDecoder.from_pretrained("demo-target", draft="demo-draft", device="cpu")
    prompts = [p.text for p in load_prompts("humaneval", limit=arguments.prompts or 6)]
    own, cases = tuple(range(len(prompts))), []
    for rule, each in (("greedy", 1), ("match", 2), ("coupled", 2), ("leviathan", arguments.samples or 16)):
        piece = 0 if rule == "leviathan" else len(prompts)
        for chain, k, p_min in ((None, 2, 0.0), (None, 4, 0.0), (None, 8, 0.4), (CHAIN, 0, 0.0)):
            cases.append(Case(rule, "demo-draft", chain, k, p_min, own, piece, each))
    return Part({"demo-draft": decoder}, prompts, cases, arguments.tokens)


def smollm2(arguments: argparse.Namespace) -> Part:
    """n-gram strategies on prompts of many lengths, prompt by prompt; drafts on the shortest, which batch well."""
    from specdec.research.models.inflate import coarsen
    from specdec.research.models.smollm2 import fetch_folder

    known = sorted(load_texts(ROOT / "results" / "texts_smollm2.npz"), key=lambda t: len(t.prompt))
    known = [t for t in known if len(t.prompt) <= 256 and len(t.output) >= arguments.tokens]
    count = arguments.prompts or 6
    texts = [*known[len(known) // (2 * count) :: len(known) // count][:count], *known[:4]]
    spread, short = tuple(range(count)), tuple(range(count, len(texts)))
    alone = specdec.SpeculativeDecoder.from_pretrained(str(fetch_folder()), device="cpu")
    target = alone.target.model
    coarse, fewer = f"coarsened by {COARSE}", f"without layers {LEFT_OUT.start} to {LEFT_OUT.stop - 1}"
    pairs: dict[str | None, Any] = {None: alone}
    for name, draft in ((coarse, coarsen(target, COARSE)), (fewer, _shortened(target))):
        pairs[name] = specdec.SpeculativeDecoder(target, draft, alone.tokenizer)
    cases = [Case("greedy", None, chain, 0, 0.0, spread, 1, 1) for chain in NGRAMS]
    for draft, k, p_min in ((coarse, 4, 0.0), (coarse, 8, 0.4), (fewer, 2, 0.0)):
        cases.append(Case("greedy", draft, None, k, p_min, short, len(short), 1))
    cases.append(Case("greedy", coarse, CHAIN, 0, 0.0, short, len(short), 1))
    cases += [Case(rule, coarse, None, 4, 0.0, short, len(short), 1) for rule in ("match", "coupled")]
    for draft, k, p_min in ((coarse, 4, 0.0), (fewer, 2, 0.0)):
        cases.append(Case("leviathan", draft, None, k, p_min, short, 0, arguments.samples or 4))
    prompts, kept = [t.prompt.tolist() for t in texts], [t.output[: arguments.tokens].tolist() for t in texts]
    return Part(pairs, prompts, cases, arguments.tokens, kept)


def _shortened(model: Any) -> Any:
    """A copy without some of its layers."""
    made = copy.deepcopy(model)
    layers = [layer for i, layer in enumerate(made.model.layers) if i not in LEFT_OUT]
    for i, layer in enumerate(layers):
        layer.self_attn.layer_idx = i
    made.model.layers = torch.nn.ModuleList(layers)
    made.config.num_hidden_layers = len(layers)
    return made


def main() -> None:
    """Run one part and write its figures."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("embedded", "smollm2"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, help="else 6; SmolLM2: of those for n-gram strategies")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a text")
    parser.add_argument("--samples", type=int, help="texts of a prompt in a call under leviathan; else 16, SmolLM2: 4")
    parser.add_argument("--error", type=float, default=0.005, help="standard error to reach on the runs' own texts")
    parser.add_argument("--plain-error", type=float, default=0.0125, help="and between plain texts and runs")
    parser.add_argument("--seconds", type=float, default=600.0, help="time for everything")
    arguments = parser.parse_args()
    record = Record((embedded if arguments.part == "embedded" else smollm2)(arguments), arguments)
    work(record, begun + arguments.seconds)
    record.write()


if __name__ == "__main__":
    main()
