"""What if, for trees of the draft model: the rounds of a fixed shape, and the best shape of a size.

Along a plain text each level of a round goes on with the child that is the written token, if the tree has it; which
sibling that is, or with what chance, is in `ForcedText.siblings`. So rounds are a Markov chain over their starts, as
those of chains are, and a shape's rounds are computed exactly from these chances.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from specdec.decoding.result import Round
from specdec.drafters.tree_plan import best_plan
from specdec.errors import SpecdecError
from specdec.models.trees import Parents, chain_parents, depths_of
from specdec.research.offline.forcing import ForcedText


def tree_counts(chances: np.ndarray, parents: Parents) -> tuple[float, float, float]:
    """Return (tokens, rounds, drafted nodes) of a text whose chances of siblings are [n, C], drafted as such trees."""
    n, ranks = chances.shape
    depths, rank, seen = depths_of(parents), [], dict[int, int]()
    for parent in parents:
        rank.append(seen.get(parent, 0))
        seen[parent] = rank[-1] + 1
    deepest = max(depths, default=0)
    # Nothing is drafted after the last token, and nothing beyond it is ever accepted.
    padded = np.concatenate([chances[:-1], np.zeros((deepest + 1, ranks))])
    reached: list[np.ndarray] = []  # [n]: P(a round that starts here accepts this node)
    by_depth = np.zeros((deepest + 2, n))  # P(it accepts so many tokens, or more)
    by_depth[0] = 1.0
    for node, parent in enumerate(parents):
        above = reached[parent] if parent >= 0 else np.ones(n)
        column = padded[depths[node] - 1 :][:n, rank[node]] if rank[node] < ranks else np.zeros(n)
        reached.append(above * column)
        by_depth[depths[node]] += reached[-1]
    exactly = by_depth[:-1] - by_depth[1:]  # [deepest + 1, n]
    starts = np.zeros(n + deepest + 1)
    starts[0] = 1.0
    for t in range(n):
        starts[t + 1 : t + deepest + 2] += starts[t] * exactly[:, t]
    nodes = np.searchsorted(depths, np.arange(n)[::-1], side="right")  # deeper ones are not drafted near the end
    return float(n), float(starts[:n].sum()), float(starts[:n] @ nodes)


def conditional_acceptance(texts: Sequence[ForcedText], depth: int) -> np.ndarray:
    """Measure P(the child of rank j is accepted), at a node of depth d that was reached, [depth, C].

    Means over texts and places, weighted by the chance that a tree with all siblings gets there.
    """
    known = [t.siblings for t in texts if t.siblings is not None]
    found = []
    weights = [np.ones(len(chances)) for chances in known]
    for d in range(depth):
        shifted = [np.concatenate([c[d:], np.zeros((min(d, len(c)), c.shape[1]))])[: len(c)] for c in known]
        alive = [w * (np.arange(len(w)) < len(w) - 1 - d) for w in weights]
        total = sum(float(w.sum()) for w in alive)
        found.append(sum((w @ c for w, c in zip(alive, shifted, strict=True)), np.zeros(1)) / max(total, 1e-300))
        weights = [w * c.sum(axis=1) for w, c in zip(alive, shifted, strict=True)]
    return np.stack(found)


def best_shape(texts: Sequence[ForcedText], nodes: int) -> Parents:
    """Choose the tree of `nodes` nodes with most tokens a round on these texts, among the best trees of every depth by
    measured acceptance (`best_plan`) and the chain."""
    acceptance = conditional_acceptance(texts, nodes)
    shapes = {chain_parents(nodes)} | {best_plan(acceptance[:depth], nodes) for depth in range(1, nodes + 1)}

    def rounds(parents: Parents) -> tuple[float, int]:
        """Rounds, and the draft passes that each takes, which decide among equals."""
        counts = [tree_counts(t.siblings, parents)[1] for t in texts if t.siblings is not None]
        return sum(counts), max(depths_of(parents))

    return min(sorted(shapes), key=rounds)


def acceptance_of_rounds(rounds: Iterable[Round]) -> np.ndarray:
    """Measure P(the child of rank j is accepted), at a node of depth d that was reached, [D, C], from recorded rounds.

    Of any strategy's trees: `best_plan` of it is the best shape for that strategy, as far down and across as its trees
    went. Raises SpecdecError for rounds without drafts.
    """
    counts: dict[tuple[int, int], list[int]] = {}
    for r in rounds:
        parents = chain_parents(len(r.draft)) if r.parents is None else r.parents
        path = list(range(r.accepted)) if r.path is None else list(r.path)
        for depth, (at, accepted) in enumerate(zip([-1, *path], [*path, None], strict=True)):
            children = [node for node, parent in enumerate(parents) if parent == at]
            for rank, node in enumerate(children):
                found = counts.setdefault((depth, rank), [0, 0])
                found[0] += 1
                found[1] += node == accepted
    if not counts:
        raise SpecdecError("what_if: these rounds have no drafts: record a run with a strategy that drafts trees")
    table = np.zeros((1 + max(d for d, _ in counts), 1 + max(rank for _, rank in counts)))
    for place, (tested, accepted_there) in counts.items():
        table[place] = accepted_there / tested
    return table
