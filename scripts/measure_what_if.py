"""Compare the estimates of specdec.research.what_if with real runs of the same plans.

    python scripts/measure_what_if.py embedded --out results/what_if_embedded.json    # some minutes on two cores
    python scripts/measure_what_if.py smollm2 --out results/what_if_smollm2.json      # n-grams on kept texts, minutes

`embedded`: the embedded pair on HumanEval prompts, every rule; under `leviathan` text and estimate are independent
samples, so many rows are drawn. `smollm2`: n-gram strategies replayed on results/texts_smollm2.npz, against runs of
SmolLM2-135M-Instruct on some of these prompts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import specdec
from specdec.provenance import device_name, versions
from specdec.research import what_if
from specdec.research.datasets import load_prompts
from specdec.research.replay import load_texts

ROOT = Path(__file__).resolve().parents[1]
PLANS = ((2, 0.0), (4, 0.0), (8, 0.4))  # k, p_min
CHAIN = "ngram-simple:size_n=3:size_m=6,draft-model:n_max=4"
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"num_return_sequences": 1},
    "match": {"acceptance": "match", "temperature": 0.8, "num_return_sequences": 2},
    "coupled": {"acceptance": "coupled", "temperature": 0.8, "num_return_sequences": 2},
    "leviathan": {"acceptance": "leviathan", "temperature": 0.8, "num_return_sequences": 16},
}
NGRAMS = ("prompt-lookup", "ngram-simple:size_n=3:size_m=8", "suffix", "ngram-cache")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("embedded", "smollm2"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=96)
    arguments = parser.parse_args()
    rows = list((_embedded if arguments.part == "embedded" else _smollm2)(arguments))
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


def _embedded(arguments: argparse.Namespace) -> Iterable[dict[str, Any]]:
    decoder = specdec.SpeculativeDecoder.from_pretrained("demo-target", draft="demo-draft", device="cpu")
    prompts = [p.text for p in load_prompts("humaneval", limit=arguments.prompts)]
    for rule, options in RULES.items():
        call = {**options, "max_new_tokens": arguments.tokens, "batch_size": arguments.batch_size}
        ks, p_mins = [k for k, _ in PLANS], sorted({p for _, p in PLANS})
        found = what_if.estimate(decoder, prompts, ks=ks, p_mins=p_mins, chains=[CHAIN], **call).plans
        known = {(p.k, p.p_min): p for p in found}
        plans = [*(known[plan] for plan in PLANS), found[-1]]
        for plan, strategies in zip(plans, [*_model_plans(), CHAIN], strict=True):
            yield _row(rule, plan, decoder.generate(prompts, strategies=strategies, **call), strategies)


def _model_plans() -> list[str]:
    return [f"draft-model:n_max={k}:p_min={p_min}" for k, p_min in PLANS]


def _smollm2(arguments: argparse.Namespace) -> Iterable[dict[str, Any]]:
    from specdec.research.smollm2 import fetch_folder

    texts = sorted(load_texts(ROOT / "results" / "texts_smollm2.npz"), key=lambda t: len(t.prompt))
    texts = texts[:: len(texts) // arguments.prompts][: arguments.prompts]
    decoder = specdec.SpeculativeDecoder.from_pretrained(str(fetch_folder()), device="cpu")
    prompts = [t.prompt.tolist() for t in texts]
    for strategies in NGRAMS:
        plan = what_if.ngrams(texts, strategies)
        longest = max(len(t.output) for t in texts)
        out = decoder.generate(prompts, max_new_tokens=longest, strategies=strategies, batch_size=1)
        row = _row("greedy", plan, out, strategies)
        kept: Sequence[Any] = [t.output.tolist() for t in texts]
        yield {**row, "same_texts": sum(a == b for a, b in zip(out.token_ids, kept, strict=True))}


def _row(rule: str, plan: what_if.Plan, out: specdec.Generation, strategies: str) -> dict[str, Any]:
    measured = out.stats.emitted_tokens / out.stats.rounds
    row = {
        "rule": rule,
        "strategies": strategies,
        "estimate": plan.to_dict(),
        "measured_tokens_per_round": measured,
        "measured_tokens": out.stats.emitted_tokens,
        "difference": plan.tokens_per_round / measured - 1,
    }
    print(f"{rule:10} {strategies:60} {plan.tokens_per_round:.3f} {measured:.3f} {row['difference']:+.2%}", flush=True)
    return row


if __name__ == "__main__":
    main()
