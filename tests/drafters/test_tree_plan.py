"""Shapes of trees: plans and their nodes, the best static tree against all trees, and trees of the best nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specdec import Draft, DraftModel, DraftRequest, SpecdecError, SpeculativeDecoder
from specdec.drafters.tree_plan import best_plan, parse_plan, plan_levels, plan_of, plan_parents
from specdec.models.trees import depths_of
from tests.helpers.playing import check_counts, weaker
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_logits

PROMPTS = [[1, 2, 3, 4, 5], [9], [7, 7, 3], [4, 5, 6, 1, 2, 3, 4]]
Shape = tuple[Any, ...]  # of a node: the shapes of its children


def forests(nodes: int, depth: int, ranks: int) -> Iterator[Shape]:
    """All ways to hang `nodes` nodes under one."""
    if nodes == 0:
        yield ()
    elif depth and ranks:
        for first in range(1, nodes + 1):
            for below in forests(first - 1, depth - 1, 99):
                for others in forests(nodes - first, depth, ranks - 1):
                    yield (below, *others)


def value(shape: Shape, acceptance: np.ndarray, depth: int = 0) -> float:
    if depth == len(acceptance):
        return 0.0
    return sum(
        float(acceptance[depth, rank]) * (1 + value(below, acceptance, depth + 1))
        for rank, below in enumerate(shape)
        if rank < acceptance.shape[1]
    )


def expected_accepted(parents: Sequence[int], acceptance: np.ndarray) -> float:
    """Sum the chance that a node is accepted over a tree's nodes. acceptance: as in `best_plan`."""
    chances, children = [1.0], [0] * (len(parents) + 1)
    depths = [0, *depths_of(parents)]
    for parent in parents:
        depth, rank = depths[parent + 1], children[parent + 1]
        inside = depth < acceptance.shape[0] and rank < acceptance.shape[1]
        chances.append(chances[parent + 1] * float(acceptance[depth, rank]) if inside else 0.0)
        children[parent + 1] += 1
    return sum(chances) - 1.0


def test_no_tree_is_better_than_the_best_plan() -> None:
    rng = np.random.default_rng(0)
    for _ in range(25):
        depth, ranks, nodes = int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.integers(1, 7))
        acceptance = rng.dirichlet(np.ones(ranks + 1), size=depth)[:, :ranks]
        best = max(value(shape, acceptance) for n in range(nodes + 1) for shape in forests(n, depth, ranks))
        parents = best_plan(acceptance, nodes)
        assert len(parents) <= nodes
        assert expected_accepted(parents, acceptance) == pytest.approx(best)
        assert plan_parents(parse_plan(list(plan_of(parents)))) == parents


def test_levels_of_a_plan_name_the_nodes_that_are_fed() -> None:
    levels = plan_levels(plan_parents(parse_plan([3, [2, 0, 1], [0, 2, 1]])))
    assert [level.fed for level in levels] == [(-1,), (0, 2), (4, 5)]
    assert [level.origin for level in levels] == [(0,), (0, 0), (0, 1)]
    assert [level.counts for level in levels] == [(3,), (2, 1), (2, 1)]


# -- trees of the best nodes -------------------------------------------------------------------------------------------


class Watched(DraftModel):
    """Remembers each draft, and the text that it follows."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        made = super().draft(requests)
        self.seen += [([*map(int, r.tokens), r.last], d) for r, d in zip(requests, made, strict=True)]
        return made

    seen: list[tuple[list[int], Draft]]


def slow_best(model: Any, text: list[int], nodes: int, depth: int) -> dict[tuple[int, ...], float]:
    """The most likely paths up to a depth, one node at a time: the chance of each."""
    found: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        children = {}
        for path, chance in level.items():
            q = torch.softmax(oracle_logits(model, [*text, *path])[-1], dim=-1)
            best = q.topk(nodes)
            for token, x in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                children[(*path, token)] = chance * x
        found |= children
        level = dict(sorted(children.items(), key=lambda kv: -kv[1])[:nodes])
    return dict(sorted(found.items(), key=lambda kv: -kv[1])[:nodes])


def test_opt_trees_hold_the_most_likely_paths_and_give_plain_decodings_text() -> None:
    target = tiny_model("llama")
    draft = weaker(target, 0.15)
    decoder = SpeculativeDecoder(target, draft, check=False)
    strategy = Watched(tree="opt:6", n_max=3)
    strategy.seen = []
    plain = decoder.generate(PROMPTS, 8, strategies=[])
    out = decoder.generate(PROMPTS, 8, strategies=[strategy], batch_size=3)
    assert out.token_ids == plain.token_ids
    assert out.stats.host_reads == out.stats.verify_passes
    check_counts(out)
    for text, made in strategy.seen[::4]:
        parents, tokens = made.parents.tolist(), made.tokens.tolist()  # type: ignore[union-attr]
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        expected = slow_best(draft, text, 6, min(3, max(depths_of(parents))))
        if made.levels == 3:
            assert set(paths) == set(expected)


@pytest.mark.fast(1)
@pytest.mark.parametrize("acceptance", ["leviathan", "match"])
def test_opt_trees_give_plain_decodings_samples(acceptance: str) -> None:
    """They have no q, whatever the rule; rows end at different depths."""
    target = tiny_model("llama", max_position_embeddings=20)
    decoder = SpeculativeDecoder(target, weaker(target, 0.15), check=False)
    call: dict[str, Any] = {"temperature": 0.9, "acceptance": acceptance, "max_new_tokens": 30}
    plain = decoder.generate(PROMPTS, strategies=[], **call)
    out = decoder.generate(PROMPTS, strategies=[DraftModel(tree="opt-9", n_max=4)], batch_size=3, **call)
    assert out.token_ids == plain.token_ids
    assert out.stats.accepted_tokens > 5


@pytest.mark.parametrize("tree", ["opt", "opt-0", "opt-x"])
def test_opt_needs_a_number_of_nodes(tree: str) -> None:
    with pytest.raises(SpecdecError, match="tree"):
        DraftModel(tree=tree)


@pytest.mark.parametrize("shape", [{"tree": "opt-4"}, {"branches": 2}], ids=str)
def test_a_tree_has_no_more_levels_than_nodes(shape: dict[str, Any]) -> None:
    """A level is a pass of the draft; n_max bounds them too, but may be anything."""
    target = tiny_model("llama")
    decoder = SpeculativeDecoder(target, weaker(target, 0.15), check=False)
    levels = 4 if "tree" in shape else 16
    out, deep = (decoder.generate(PROMPTS, 8, [DraftModel(n_max=n, **shape)]) for n in (levels, 10**9))
    assert deep.token_ids == out.token_ids
    assert deep.stats.draft_passes == out.stats.draft_passes


def test_trees_larger_than_a_pass_are_refused() -> None:
    with pytest.raises(SpecdecError, match="more than 511 nodes"):
        DraftModel(tree="opt-512", n_max=60)
