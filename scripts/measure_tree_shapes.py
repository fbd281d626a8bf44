"""Tokens per round of the best shapes of trees: estimated from a plain run, and in real runs, beside chains.

    python scripts/measure_tree_shapes.py --out results/tree_shapes_cpu.json
    python scripts/write_results.py    # the table of docs/trees.md

For each number of nodes the best fixed shape is chosen on plain texts of held-out prompts (`estimate(trees=[nodes])`),
beside the chain of as many nodes, and both are run; `opt-N` is run as well. A run under `leviathan` writes texts of its
own, so it is compared with the estimate for the very texts that it wrote. `held_out`: shapes that are chosen on half of
the prompts, estimated on the other half, beside the chain and the best shape of these, over `SPLITS` random halvings,
each both ways. Figures are counts, not times.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from measure_trees import TEMPERATURE, started

from specdec import SpeculativeDecoder
from specdec.files.compact_json import write_json
from specdec.models.trees import chain_parents
from specdec.research.bench import origin
from specdec.research.offline.what_if import estimate
from specdec.research.offline.what_if_trees import best_shape, tree_counts

PROMPTS, NEW_TOKENS, NODES, COPIES, SPLITS = 16, 40, (8, 16), 3, 6
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "match": {"acceptance": "match", "temperature": TEMPERATURE},
    "leviathan": {"acceptance": "leviathan", "temperature": TEMPERATURE, "num_return_sequences": COPIES},
}


def rows_of(decoder: SpeculativeDecoder, prompts: list[list[int]], mode: str, nodes: int) -> list[dict[str, Any]]:
    """The chain, the best shape and opt-N of one size in one mode."""
    call: dict[str, Any] = {**MODES[mode], "max_new_tokens": NEW_TOKENS, "batch_size": 16, "ignore_eos": True}
    sampled = mode == "leviathan"
    chain, best = estimate(decoder, prompts, ks=(nodes,), trees=[nodes], seed=1, **call).plans
    runs = [("chain", f"draft-model:n_max={nodes}", chain), ("best shape", best.chain, best)]
    if not sampled:  # it has no q: under leviathan it is judged as under match
        runs.append(("opt", f"draft-model:tree=opt-{nodes}:n_max=8", None))
    rows = []
    for kind, strategy, plan in runs:
        out = decoder.generate(prompts, strategies=[strategy], seed=2 if sampled else 1, **call)
        expected = None if plan is None else plan.tokens_per_round
        own = expected
        if sampled and plan is not None:
            shape = [1] * nodes if kind == "chain" else json.loads(strategy.partition("tree=")[2])
            again = estimate(decoder, prompts, ks=(), trees=[shape], outputs=out.token_ids, seed=2, **call)
            own = again.plans[0].tokens_per_round
        measured = out.stats.emitted_tokens / out.stats.rounds
        row = {"mode": mode, "nodes": nodes, "kind": kind, "strategy": strategy, "estimate": expected}
        rows.append({**row, "estimate_on_its_texts": own, "measured": measured, "tokens": out.stats.emitted_tokens})
        print(rows[-1], flush=True)
    return rows


def held_out(decoder: SpeculativeDecoder, prompts: list[list[int]], mode: str, nodes: int) -> dict[str, Any]:
    """Tokens per round on prompts that a shape was not chosen on; means over the halvings."""
    call = {
        **MODES[mode],
        "max_new_tokens": NEW_TOKENS,
        "batch_size": 24,
        "ignore_eos": True,
        "num_return_sequences": 1,
    }
    texts, found = estimate(decoder, prompts, ks=(), trees=[nodes], seed=1, **call).texts, []
    for split in range(SPLITS):
        order = np.random.default_rng(split).permutation(len(texts))
        halves = [[texts[i] for i in order[start::2]] for start in (0, 1)]
        for ours, others in (halves, halves[::-1]):
            shapes = best_shape(ours, nodes), chain_parents(nodes), best_shape(others, nodes)
            counts = [sum(np.array(tree_counts(t.siblings, s)) for t in others) for s in shapes]  # type: ignore[arg-type]
            found.append([tokens / rounds for tokens, rounds, _ in counts])
    names = ("chosen_on_others", "chain", "best_of_these")
    row = {"mode": mode, "nodes": nodes, **dict(zip(names, np.mean(found, axis=0).tolist(), strict=True))}
    print(row, flush=True)
    return row


def main() -> None:
    out, decoder, prompts = started(__doc__)
    rows = [row for mode in MODES for nodes in NODES for row in rows_of(decoder, prompts[:PROMPTS], mode, nodes)]
    apart = [held_out(decoder, prompts, mode, nodes) for mode in MODES for nodes in NODES]
    settings = {"temperature": TEMPERATURE, "prompts": PROMPTS, "new_tokens": NEW_TOKENS, "copies": COPIES}
    write_json(out, {"benchmark": "tree_shapes", **origin(), **settings, "shapes": rows, "held_out": apart})


if __name__ == "__main__":
    main()
