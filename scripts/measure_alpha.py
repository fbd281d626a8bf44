"""Leviathan's acceptance and his formula for tokens per round, against real runs with drafts of different quality.

    python scripts/measure_alpha.py --out results/alpha.json
    python scripts/write_results.py    # the table of docs/validation.md

Drafts are the embedded draft and coarsened copies of the embedded target. p and q are computed along the texts of a
run: a drafted token is tested only if all before it were accepted, so its context is the text itself.

measured: accepted / tested tokens of the run. tested: 1 - E[TV(p, q)] at the tested positions, which it must equal up
to the coins. everywhere: the same at all positions, Leviathan's alpha, as if acceptance were independent of context.
formula: tokens per round that follow from `everywhere` and n_max; residual: the run's tokens per round less those.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from measure_trees import started

from specdec import DraftModel, SpeculativeDecoder, theory
from specdec.files.compact_json import write_json
from specdec.research.bench import origin
from specdec.research.bootstrap import difference, ratio
from specdec.research.models.inflate import coarsen
from specdec.stats import RoundRecord

PROMPTS, NEW_TOKENS, N_MAX = 16, 64, 4
TEMPERATURES, COARSE = (0.3, 0.6, 1.0), (0.6, 0.8, 1.0)


def tested_positions(records: list[RoundRecord]) -> list[int]:
    """The positions of a row, from its first new token, at which a drafted token was tested."""
    found, start = [], 0
    for record in records:
        found += [start + i for i in range(record.drafted) if record.tested(i)]
        start += record.tokens
    return found


@torch.no_grad()
def overlap(decoder: SpeculativeDecoder, prompt: list[int], tokens: list[int], temperature: float) -> np.ndarray:
    """1 - TV(p, q) at every new token, [n]."""
    assert decoder.draft is not None
    ids, both = torch.tensor([[*prompt, *tokens]]), []
    for model in (decoder.target.model, decoder.draft.model):
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        both.append(torch.softmax(logits.double() / temperature, dim=-1))
    found: np.ndarray = theory.expected_acceptance(*both).numpy()
    return found


def measure(decoder: SpeculativeDecoder, prompts: list[list[int]], draft: str, temperature: float) -> dict[str, Any]:
    """One row of the table; intervals over prompts."""
    out = decoder.generate(
        prompts,
        NEW_TOKENS,
        [DraftModel(n_max=N_MAX)],
        temperature=temperature,
        seed=1,
        ignore_eos=True,
        batch_size=len(prompts),
    )
    along = [overlap(decoder, p, t, temperature) for p, t in zip(prompts, out.token_ids, strict=True)]
    at = [tested_positions(records) for records in out.stats.rows]
    tested, accepted = [len(places) for places in at], [sum(r.accepted for r in row) for row in out.stats.rows]
    expected = [float(values[places].sum()) for values, places in zip(along, at, strict=True)]
    rounds, tokens = [len(row) for row in out.stats.rows], [len(ids) for ids in out.token_ids]
    everywhere = ratio([float(v.sum()) for v in along], tokens)
    per_round = ratio(tokens, rounds)
    assert everywhere.value is not None
    assert per_round.value is not None
    # A run's length ends its last drafts early: the formula is for the lengths that were drafted.
    lengths = [r.drafted for row in out.stats.rows for r in row]
    formula = float(np.mean([theory.tokens_per_round(everywhere.value, k) for k in lengths]))
    made = {
        "draft": draft, "temperature": temperature, "tested_tokens": sum(tested),
        "measured": ratio(accepted, tested).to_dict(), "tested": ratio(expected, tested).to_dict(),
        "difference": difference((accepted, tested), (expected, tested)).to_dict(), "everywhere": everywhere.to_dict(),
        "tokens_per_round": per_round.to_dict(), "formula": formula, "residual": per_round.value - formula,
    }  # fmt: skip
    print(draft, temperature, *(f"{made[n]['value']:.3f}" for n in ("measured", "tested", "everywhere")), flush=True)  # type: ignore[index]
    return made


def main() -> None:
    out, first, prompts = started(__doc__)
    pairs = {"demo-draft": first}
    for strength in COARSE:
        draft = coarsen(first.target.model, strength)
        pairs[f"target, coarsened by {strength:g}"] = SpeculativeDecoder(first.target.model, draft, check=False)
    rows = [measure(pairs[draft], prompts[:PROMPTS], draft, t) for draft, t in product(pairs, TEMPERATURES)]
    settings = {"prompts": PROMPTS, "new_tokens": NEW_TOKENS, "n_max": N_MAX}
    write_json(out, {"benchmark": "alpha", **origin(), **settings, "rows": rows})


if __name__ == "__main__":
    main()
