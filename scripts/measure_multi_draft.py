"""How often rules for several drafts of one token accept, against the most that any rule could, on a small vocabulary.

    python scripts/measure_multi_draft.py --out results/multi_draft.json
    python scripts/write_results.py    # the table of docs/validation.md

p is a random distribution over six tokens, q the mean of p and another. The optimum over all couplings of one sample of
p with the siblings is a transport problem; by the max-flow min-cut theorem it is 1 + min over sets H of tokens of p(H)
- P(all siblings are in H), here over all 2^V sets. Recursive rejection is enumerated in plain loops, `gumbel-list` is
sampled.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.decoding.acceptance import Block, judge
from specdec.decoding.multi_draft import GUMBEL_LIST
from specdec.drafters.siblings import sample_siblings
from specdec.files.compact_json import write_json
from specdec.models.trees import Tree
from specdec.research.bench import origin
from specdec.sampling.sampling import Purpose, Sampling, fold, streams

V, PAIRS, MOST, DEPTH, SAMPLES = 6, 40, 4, 3, 10_000
Siblings = list[tuple[tuple[int, ...], float]]  # sequences, and their probabilities


def optimum(p: np.ndarray, inside: Callable[[np.ndarray], float]) -> float:
    """The most that any rule accepts; inside(H): the probability that all siblings are in a set H [V] of tokens."""
    sets = (np.array(bits, dtype=bool) for bits in product([False, True], repeat=len(p)))
    return float(1 + min(p[h].sum() - inside(h) for h in sets))


def without_replacement(q: np.ndarray, k: int) -> Siblings:
    """All sequences of k different tokens."""
    found = []
    for tokens in product(range(len(q)), repeat=k):
        chance, left = 1.0, 1.0
        for token in tokens:
            chance, left = chance * q[token] / left if left > 1e-12 else 0.0, left - q[token]
        found += [(tokens, chance)] if len(set(tokens)) == k and chance > 0 else []
    return found


def independent(q: np.ndarray, k: int) -> Siblings:
    """All sequences of k tokens."""
    return [(t, float(np.prod(q[list(t)]))) for t in product(range(len(q)), repeat=k)]


def rejection(p: np.ndarray, q: np.ndarray, tokens: tuple[int, ...], replaced: bool) -> float:
    """The probability that recursive rejection accepts one of the siblings, in plain loops."""
    left, own, none = p.copy(), q.copy(), 1.0
    for token in tokens:
        none *= 1 - min(1.0, left[token] / own[token])
        rest = np.maximum(left - own, 0)
        left = rest / rest.sum() if rest.sum() > 0 else left
        if not replaced:
            own[token] = 0.0
            own = own / own.sum() if own.sum() > 0 else own
    return float(1 - none)


def listed(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """How often `gumbel-list` accepts one of k siblings, over `SAMPLES` rows."""
    ones = torch.ones(SAMPLES, dtype=torch.int64)
    keys, q_rows = fold(ones, torch.arange(SAMPLES)), torch.tensor(q, dtype=torch.float32).expand(SAMPLES, -1)
    drafted = sample_siblings(q_rows, streams(keys, ones, Purpose.SAMPLE), k, independent=True)[0]
    block = Block(
        scores=torch.tensor(p).float().log().expand(SAMPLES, k + 1, -1),
        draft=torch.nn.functional.pad(drafted, (0, 1)),
        lengths=ones * k,
        final=ones > 0,
        totals=ones * k,
        keys=keys,
        positions=ones,
        sampling=Sampling(1.0),
        tree=Tree.of_rows([(-1,) * k] * SAMPLES, k + 1, torch.device("cpu")),
    )
    return float(judge(block, GUMBEL_LIST).accepted.double().mean())


def rules(p: np.ndarray, q: np.ndarray, k: int) -> dict[str, tuple[float, float]]:
    """The acceptance of each rule with k siblings, and the optimum for siblings that are made as its are."""
    distinct, free, tokens = without_replacement(q, k), independent(q, k), np.argsort(-q)[:k]
    best = optimum(p, lambda h: sum(chance for t, chance in distinct if h[list(t)].all()))
    best_free = optimum(p, lambda h: float(q[h].sum() ** k))
    return {
        "leviathan": (sum(chance * rejection(p, q, t, False) for t, chance in distinct), best),
        "specinfer": (sum(chance * rejection(p, q, t, True) for t, chance in free), best_free),
        "gumbel-list": (listed(p, q, k), best_free),
        "eagle": (float(p[tokens].sum()), optimum(p, lambda h: float(h[tokens].all()))),
    }


def length(acceptance: float) -> float:
    """Accepted tokens of `DEPTH` levels whose nodes all have this acceptance."""
    return sum(acceptance**depth for depth in range(1, DEPTH + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out, rng = parser.parse_args().out, np.random.default_rng(0)
    drawn = [rng.dirichlet(np.full(V, 0.7), size=2) for _ in range(PAIRS)]
    pairs = [(p, (p + other) / 2) for p, other in drawn]
    rows: list[dict[str, Any]] = []
    for k in range(1, MOST + 1):
        found = [rules(p, q, k) for p, q in pairs]
        for rule in found[0]:
            values = np.array([f[rule] for f in found])  # [pairs, 2]: the rule's, the optimum
            lengths = np.array([[length(a) for a in row] for row in values]).mean(axis=0)
            names, figures = ("acceptance", "optimum", "length", "longest"), [*values.mean(axis=0), *lengths]
            rows.append({"rule": rule, "siblings": k, **dict(zip(names, np.round(figures, 4).tolist(), strict=True))})
            print(rows[-1], flush=True)
    settings = {"tokens": V, "pairs": PAIRS, "levels": DEPTH}
    write_json(out, {"benchmark": "multi_draft", **origin(), **settings, "rows": rows})


if __name__ == "__main__":
    main()
