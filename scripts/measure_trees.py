"""Tokens per round of trees and chains with equally many verified tokens, and acceptance against its formulas.

    python scripts/measure_trees.py --out results/trees_cpu.json
    python scripts/write_results.py    # the tables of docs/trees.md and docs/exactness.md

Prompts are the beginnings of held-out files of the embedded pair's corpus. Figures are counts, not times: they do not
depend on the machine, but for rounding.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure_demo_models import read_corpus

from specdec import DraftModel, SpeculativeDecoder, theory
from specdec.files.compact_json import write_json
from specdec.research.bench import origin

PROMPTS, NEW_TOKENS, TEMPERATURE = 24, 48, 0.8  # for the acceptance; trees: TREE_PROMPTS of TREE_TOKENS
TREE_PROMPTS, TREE_TOKENS = 16, 40
SHAPES: dict[str, dict[str, Any]] = {
    "4 nodes: chain": {"n_max": 4},
    "4 nodes: 2, then one each": {"tree": [2, 1]},
    "8 nodes: chain": {"n_max": 8},
    "8 nodes: chain of 5, a second child at its first three": {"tree": [2, [2, 0], [2, 0], [1, 0], 1]},
    "8 nodes: two chains of 4": {"tree": [2, 1, 1, 1]},
    "8 nodes: 3, 3, 2": {"tree": [3, [2, 1, 0], [1, 1, 0]]},
    "8 nodes: four chains of 2": {"tree": [4, 1]},
    "16 nodes: chain": {"n_max": 16},
    "16 nodes: 4, 5, 4, 3": {"tree": [4, [3, 1, 1, 0], [2, 1, 0, 1, 0], [2, 1, 0, 0]]},
}
SAMPLED = {rule: {"acceptance": rule, "temperature": TEMPERATURE} for rule in ("match", "coupled", "leviathan")}
MODES: dict[str, dict[str, Any]] = {"greedy": {}, **SAMPLED}


def held_out_prompts(decoder: SpeculativeDecoder) -> list[list[int]]:
    """The first 40 tokens of held-out files."""
    _, held = read_corpus(Path(platform.__file__).parent)
    texts = [text for _, text in held if len(text) > 2_000][:PROMPTS]
    return [decoder.tokenizer(text)["input_ids"][:40] for text in texts]


def started(about: str | None) -> tuple[Path, SpeculativeDecoder, list[list[int]]]:
    """Read the option --out of a script with this docstring; returns it, the embedded pair and the held-out prompts."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    decoder = SpeculativeDecoder.from_pretrained("demo-target", draft="demo-draft")
    return out, decoder, held_out_prompts(decoder)


def tokens_per_round(decoder: SpeculativeDecoder, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """One entry a shape and mode; `error`: the standard error of the mean over prompts."""
    entries = []
    for (shape, options), (mode, call) in [(s, m) for s in SHAPES.items() for m in MODES.items()]:
        drafter = DraftModel(**options)
        out = decoder.generate(prompts, TREE_TOKENS, [drafter], ignore_eos=True, seed=1, batch_size=16, **call)
        rows = [row["tokens_per_round"] for row in out.stats.to_dict()["rows"]]
        error, mean = statistics.stdev(rows) / len(rows) ** 0.5, out.stats.tokens_per_round
        passes = len(drafter.tree or range(options.get("n_max", 0)))
        entry = {"shape": shape, "mode": mode, "tokens_per_round": mean, "error": error, "draft_passes": passes}
        entries.append({**entry, "by_depth": out.stats.acceptance_rate_per_position})
        print(f"{shape:56} {mode:10} {mean:.2f} +- {error:.2f}", flush=True)
    return entries


def acceptance(decoder: SpeculativeDecoder, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Measured acceptance of drafts of one token, and the formulas at the p and q of the same positions."""
    entries = []
    for rule, call in SAMPLED.items():
        accepted, expected, overlap = [], [], []
        for i, prompt in enumerate(prompts):
            rounds = list(decoder.rounds(prompt, NEW_TOKENS, [DraftModel(n_max=1)], ignore_eos=True, seed=[i], **call))
            drafted, text = [r for r in rounds if r.draft], [*prompt, *(t for r in rounds for t in r.tokens)]
            p, q = (distributions(model, text) for model in (decoder.target.model, decoder.draft.model))
            at = [r.position for r in drafted]
            accepted += [r.accepted for r in drafted]
            expected += theory.expected_acceptance(p[at], q[at], rule).tolist()
            overlap += theory.expected_acceptance(p[at], q[at], "leviathan").tolist()
        error = float(np.sqrt(np.sum(np.array(expected) * (1 - np.array(expected)))) / len(accepted))
        measured, formula, one_minus_tv = (float(np.mean(values)) for values in (accepted, expected, overlap))
        entry = {"rule": rule, "positions": len(accepted), "measured": measured, "expected": formula}
        entries.append({**entry, "one_minus_tv": one_minus_tv, "error": error})
        print(entries[-1], flush=True)
    return entries


@torch.no_grad()
def distributions(model: Any, text: list[int]) -> np.ndarray:
    """The distribution of the token after each position, float64 [len(text), V]."""
    logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0].double()
    return torch.softmax(logits / TEMPERATURE, dim=-1).numpy()


def main() -> None:
    out, decoder, prompts = started(__doc__)
    settings = {
        "temperature": TEMPERATURE,
        "prompts": {"acceptance": len(prompts), "trees": TREE_PROMPTS},
        "new_tokens": {"acceptance": NEW_TOKENS, "trees": TREE_TOKENS},
    }
    found = {"acceptance": acceptance(decoder, prompts), "trees": tokens_per_round(decoder, prompts[:TREE_PROMPTS])}
    write_json(out, {"benchmark": "trees", **origin(), **settings, **found})


if __name__ == "__main__":
    main()
