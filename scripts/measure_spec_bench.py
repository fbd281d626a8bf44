"""Tokens per round by the six groups of Spec-Bench, and whether their order is the published one.

    python scripts/measure_spec_bench.py --target demo-target --draft demo-draft --out results/spec_bench_embedded.json
    python scripts/measure_spec_bench.py --target smollm2 --coarsen 0.2 --texts results/texts_smollm2.npz \
        --device cuda --each 20 --new-tokens 96 --batch 20 --out results/spec_bench_smollm2.json
    python scripts/measure_spec_bench.py --target smollm2 --head runs/eagle3_smollm2/head --each 40 --new-tokens 64 \
        --device cuda --batch 40 --out results/eagle3_smollm2.json
    python scripts/write_results.py    # the tables of docs/validation.md and docs/eagle.md

Greedy, `prompt-lookup`, `recycling` and `draft-model` on the same prompts; --draft, or --coarsen for a draft made of
the target. With --head, an EAGLE head as chain and as trees in place of the draft, and `suffix`. The order of the
groups is compared with that of the published speed-ups (`PUBLISHED`) by Spearman's rank correlation. --texts: kept
greedy texts of the target; on a CPU, texts of the runs must begin them (elsewhere plain decoding's are made anew),
and `prompt-lookup`, which reads ids alone, is replayed on all of them. The result is written after every batch: a run
may be stopped.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec import SpeculativeDecoder
from specdec.files.compact_json import write_json
from specdec.research.bench import origin
from specdec.research.bootstrap import ratio
from specdec.research.models.inflate import coarsen
from specdec.research.models.smollm2 import fetch_folder
from specdec.research.offline.replay import load_texts, model_free_chain, replay
from specdec.research.prompts.datasets import Prompt, as_given, load_prompts
from specdec.stats import Tally

TALK = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")  # MT-bench
GROUPS = {
    "conversation": TALK, "translation": ("translation",), "summarization": ("summarization",), "qa": ("qa",),
    "math": ("math_reasoning",), "rag": ("rag",),
}  # fmt: skip
TEMPLATE = 64  # tokens that a chat template may add
STRATEGIES = {"prompt-lookup": "prompt-lookup", "recycling": "recycling", "draft-model": "draft-model:n_max=4"}
HEAD = {"eagle3, chain": "n_max=5", "eagle3, tree of 24": "nodes=24:top_k=6:depth=4", "eagle3, tree of 60": "nodes=60"}
# Speed-ups of the groups, in the order of GROUPS: Vicuna-7B-v1.3, greedy, float16, batch 1, one RTX 3090. Source: Xia
# et al. 2024 (Spec-Bench), Leaderboard.md of github.com/hemingkx/Spec-Bench at commit 5544fd7: PLD, Recycling, SpS.
PUBLISHED = {
    "prompt-lookup": (1.64, 1.15, 2.46, 1.28, 1.72, 1.71),
    "recycling": (1.42, 1.29, 1.43, 1.30, 1.59, 1.36),
    "draft-model": (1.94, 1.37, 1.96, 1.86, 1.81, 1.83),
}


def rank_correlation(a: list[float], b: tuple[float, ...]) -> float:
    """Spearman's; equal values share their mean rank."""
    ranks = [[sum((y < x) + (y == x) / 2 for y in side) for x in side] for side in (a, b)]
    return statistics.correlation(*ranks)


def chosen(each: int) -> Iterator[tuple[str, Prompt]]:
    """The prompts, the first of every group before any second one."""
    piles = {group: load_prompts("spec-bench", categories=names, limit=each) for group, names in GROUPS.items()}
    for i in range(each):
        yield from ((group, pile[i]) for group, pile in piles.items())


def summary(rows: list[dict[str, Any]], strategies: list[str]) -> dict[str, Any]:
    """Tokens per round with intervals over prompts, by strategy and group, and the order of the groups."""
    made = {}
    for strategy in strategies:
        mine = {group: [r[strategy] for r in rows if r["group"] == group] for group in GROUPS}
        figures = {g: ratio(*map(list, zip(*counts, strict=True))).to_dict() for g, counts in mine.items() if counts}
        made[strategy] = {"groups": figures}
        published = PUBLISHED.get(strategy.removesuffix(", all texts"))
        if published and len(figures) == len(GROUPS):
            values = [f["value"] or 0.0 for f in figures.values()]
            made[strategy] |= {"published": published, "rank_correlation": rank_correlation(values, published)}
    return made


def replayed(path: Path) -> list[dict[str, Any]]:
    """Prompt lookup on kept texts: tokens and rounds of each."""
    rows = []
    for text in load_texts(path):
        chain = model_free_chain(STRATEGIES["prompt-lookup"], len(text.prompt) + len(text.output))
        records = replay(chain, text.prompt, text.output)
        group = next(g for g, names in GROUPS.items() if text.category in names)
        counts = [sum(r.tokens for r in records), len(records)]
        rows.append({"group": group, "prompt-lookup, all texts": counts})
    return rows


def decode(
    decoder: SpeculativeDecoder,
    prompts: list[Prompt],
    strategies: dict[str, str],
    new_tokens: int,
    kept: dict[str, Any],
) -> list[dict[str, Any]]:
    """Tokens and rounds of each prompt by strategy, and whether all texts are plain decoding's; one batch."""
    room = decoder.target.context - new_tokens - TEMPLATE
    given = [as_given(p, decoder.tokenizer, longest=room) for p in prompts]  # a longer prompt is cut
    if all(p.id in kept for p in prompts):
        plain = [kept[p.id][:new_tokens].tolist() for p in prompts]
    else:
        plain = decoder.generate(given, new_tokens, [], batch_size=len(given)).token_ids
    rows: list[dict[str, Any]] = [{"prompt": p.id, "same_text": True} for p in prompts]
    for name, strategy in strategies.items():
        out = decoder.generate(given, new_tokens, strategy, batch_size=len(given))
        for row, text, wanted, records in zip(rows, out.token_ids, plain, out.stats.rows, strict=True):
            tally = Tally.of(records)
            row[name] = [tally.generated_tokens, tally.rounds]
            row["same_text"] = row["same_text"] and text == wanted
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="smollm2, or a model as specdec takes it")
    parser.add_argument("--draft", help="the draft model")
    parser.add_argument("--coarsen", type=float, default=0.2, help="without a draft: how coarse a copy of the target")
    parser.add_argument("--head", help="an EAGLE head's folder, in place of a draft")
    parser.add_argument("--batch", type=int, default=1, help="prompts that are decoded together")
    parser.add_argument("--each", type=int, default=2, help="prompts of a group")
    parser.add_argument("--device", default="cpu", help="where it runs, in float32")
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--texts", type=Path, help="kept greedy texts of the target")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    folder = str(fetch_folder()) if given.target == "smollm2" else given.target
    how: dict[str, Any] = {} if given.device == "cpu" else {"compile": "graph"}  # trees have many widths
    decoder = SpeculativeDecoder.from_pretrained(folder, given.draft, dtype="float32", device=given.device, **how)
    strategies = dict(STRATEGIES)
    if given.head is not None:
        del strategies["draft-model"]
        strategies |= {"suffix": "suffix", **{n: f"eagle3:head={given.head}:{how}" for n, how in HEAD.items()}}
    elif given.draft is None:
        draft = coarsen(decoder.target.model, given.coarsen)
        decoder = SpeculativeDecoder(decoder.target.model, draft, tokenizer=decoder.tokenizer, check=False, **how)
    kept = {text.id: text.output for text in load_texts(given.texts)} if given.texts and given.device == "cpu" else {}
    all_texts = summary(replayed(given.texts), ["prompt-lookup, all texts"]) if given.texts else {}
    draft_name = given.draft or f"the target, coarsened by {given.coarsen:g}"
    names = {"target": given.target, "draft": "an EAGLE-3 head" if given.head is not None else draft_name}
    head = {"benchmark": "spec-bench", **origin(), **names, "new_tokens": given.new_tokens, "kept_texts": len(kept)}
    rows: list[dict[str, Any]] = []
    waiting = list(chosen(given.each))
    while waiting:
        batch, waiting = waiting[: given.batch], waiting[given.batch :]
        made = decode(decoder, [prompt for _, prompt in batch], strategies, given.new_tokens, kept)
        rows += [{"group": group, **row} for (group, _), row in zip(batch, made, strict=True)]
        print(*rows[-len(batch) :], sep="\n", flush=True)
        found = {**summary(rows, list(strategies)), **all_texts}
        same = sum(r["same_text"] for r in rows)
        write_json(given.out, {**head, "prompts": len(rows), "same_texts": same, "strategies": found})


if __name__ == "__main__":
    main()
