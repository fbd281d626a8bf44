"""Tokens per round of trees and chains with equally many verified tokens, and acceptance against its formulas.

    python scripts/measure_trees.py           # measure, write results/trees_cpu.json and the tables
    python scripts/measure_trees.py --tables  # only write the tables of docs/trees.md and docs/exactness.md again

Prompts are the beginnings of held-out files of the embedded pair's corpus. Figures are counts, not times: they do not
depend on the machine, but for rounding.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from measure_demo_models import read_corpus

import specdec
from specdec import DraftModel, SpeculativeDecoder, theory
from specdec.files.compact_json import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "trees_cpu.json"
PAGES = {"trees": ROOT / "docs" / "trees.md", "acceptance": ROOT / "docs" / "exactness.md"}
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
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "match": {"acceptance": "match", "temperature": TEMPERATURE},
    "coupled": {"acceptance": "coupled", "temperature": TEMPERATURE},
    "leviathan": {"acceptance": "leviathan", "temperature": TEMPERATURE},
}


def held_out_prompts(decoder: SpeculativeDecoder) -> list[list[int]]:
    """The first 40 tokens of held-out files."""
    _, held = read_corpus(Path(platform.__file__).parent)
    texts = [text for _, text in held if len(text) > 2_000][:PROMPTS]
    return [decoder.tokenizer(text)["input_ids"][:40] for text in texts]


def tokens_per_round(decoder: SpeculativeDecoder, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """One entry a shape and mode; `error`: the standard error of the mean over prompts."""
    entries = []
    for shape, options in SHAPES.items():
        for mode, call in MODES.items():
            out = decoder.generate(
                prompts, TREE_TOKENS, [DraftModel(**options)], ignore_eos=True, seed=1, batch_size=16, **call
            )
            rows = [row["tokens_per_round"] for row in out.stats.to_dict()["rows"]]
            entries.append({
                "shape": shape, "mode": mode, "tokens_per_round": out.stats.tokens_per_round,
                "error": statistics.stdev(rows) / len(rows) ** 0.5,
                "draft_passes": len(DraftModel(**options).tree or range(options.get("n_max", 0))),
                "by_depth": out.stats.acceptance_rate_per_position,
            })  # fmt: skip
            print(f"{shape:56} {mode:10} {out.stats.tokens_per_round:.2f} +- {entries[-1]['error']:.2f}")
    return entries


def acceptance(decoder: SpeculativeDecoder, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Measured acceptance of drafts of one token, and the formulas at the p and q of the same positions."""
    entries = []
    for rule in theory.RULES:
        stood, expected, overlap = [], [], []
        for i, prompt in enumerate(prompts):
            rounds = decoder.rounds(
                prompt, NEW_TOKENS, [DraftModel(n_max=1)], ignore_eos=True, seed=[i], acceptance=rule,
                temperature=TEMPERATURE,
            )  # fmt: skip
            drafted, text = [], list(prompt)
            for r in rounds:
                drafted += [r] if r.draft else []
                text += r.tokens
            p, q = (laws(model, text) for model in (decoder.target.model, decoder.draft.model))
            at = [r.position for r in drafted]
            stood += [r.accepted for r in drafted]
            expected += theory.expected_acceptance(p[at], q[at], rule).tolist()
            overlap += theory.expected_acceptance(p[at], q[at], "leviathan").tolist()
        entries.append({
            "rule": rule, "positions": len(stood), "measured": float(np.mean(stood)),
            "expected": float(np.mean(expected)), "one_minus_tv": float(np.mean(overlap)),
            "error": float(np.sqrt(np.sum(np.array(expected) * (1 - np.array(expected)))) / len(stood)),
        })  # fmt: skip
        print(entries[-1])
    return entries


@torch.no_grad()
def laws(model: Any, text: list[int]) -> np.ndarray:
    """The law of the token after each position, float64 [len(text), V]."""
    logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0].double()
    return torch.softmax(logits / TEMPERATURE, dim=-1).numpy()


def tree_table(result: dict[str, Any]) -> str:
    lines = [f"| shape | draft passes | {' | '.join(MODES)} |", f"|{'---|' * (len(MODES) + 2)}"]
    found = {(e["shape"], e["mode"]): e for e in result["trees"]}
    for shape in SHAPES:
        cells = [found[shape, mode] for mode in MODES]
        figures = (f"{e['tokens_per_round']:.2f} ± {e['error']:.2f}" for e in cells)
        lines.append(f"| {shape} | {cells[0]['draft_passes']} | {' | '.join(figures)} |")
    return "\n".join(lines)


def acceptance_table(result: dict[str, Any]) -> str:
    lines = ["| rule | positions | measured | formula | standard error | 1 - TV there |", f"|{'---|' * 6}"]
    for e in result["acceptance"]:
        lines.append(
            f"| `{e['rule']}` | {e['positions']} | {e['measured']:.3f} | {e['expected']:.3f} | {e['error']:.3f} "
            f"| {e['one_minus_tv']:.3f} |"
        )
    return "\n".join(lines)


def write_tables(result: dict[str, Any]) -> None:
    for name, made in (("trees", tree_table(result)), ("acceptance", acceptance_table(result))):
        page = PAGES[name].read_text()
        start, end = f"<!-- {name}:start -->\n", f"\n<!-- {name}:end -->"
        before, rest = page.split(start)
        PAGES[name].write_text(before + start + made + end + rest.split(end)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="measure nothing, write the tables again")
    if not parser.parse_args().tables:
        decoder = SpeculativeDecoder.from_pretrained("demo-target", draft="demo-draft")
        prompts = held_out_prompts(decoder)
        result = {
            "versions": {
                "specdec": specdec.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "temperature": TEMPERATURE, "prompts": {"acceptance": len(prompts), "trees": TREE_PROMPTS},
            "new_tokens": {"acceptance": NEW_TOKENS, "trees": TREE_TOKENS},
            "acceptance": acceptance(decoder, prompts), "trees": tokens_per_round(decoder, prompts[:TREE_PROMPTS]),
        }  # fmt: skip
        write_json(RESULTS, result)
    write_tables(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
