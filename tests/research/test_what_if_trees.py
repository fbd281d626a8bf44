"""Estimates of trees: exact where the text is plain's, against enumerated chances, and never below the chain's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import specdec
from specdec import SpecdecError
from specdec.drafters.tree_plan import best_plan, plan_of, plan_parents
from specdec.models.trees import Parents, chain_parents, path_to
from specdec.research.offline.forcing import _siblings
from specdec.research.offline.what_if import draft_lengths, estimate, round_starts
from specdec.research.offline.what_if_trees import acceptance_of_rounds, tree_counts
from specdec.research.traces.trace import record
from specdec.sampling.sampling import fold
from tests.decoding.test_multi_draft_rules import P, Q, V, rejection, without_replacement
from tests.helpers.laws import small_model
from tests.helpers.playing import looping, quoting_ids, random_ids, weaker
from tests.helpers.tiny import tiny_model

SHAPES = ["3x2", [2, [2, 0], [1, 1], 1]]


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.8, "acceptance": "match", "top_p": 0.9}, {"temperature": 0.8, "acceptance": "coupled"}],
    ids=["greedy", "match", "coupled"],
)
def test_where_the_text_is_plain_decodings_estimates_are_exact(options: dict[str, Any]) -> None:
    """To the round and to the node; the best shape of a size is never below the best chain of as many nodes."""
    target = looping(tiny_model("llama", 5))
    decoder = specdec.SpeculativeDecoder(target, weaker(target, 0.3), check=False)
    prompts, call = [random_ids(9, 1), quoting_ids(12, 2)], {"max_new_tokens": 10, **options}
    found = estimate(decoder, prompts, ks=(5,), trees=[*SHAPES, 5], **call)
    chain, *trees = found.plans
    assert trees[-1].tokens_per_round >= chain.tokens_per_round
    for plan in trees:
        out = decoder.generate(prompts, strategies=[plan.chain], batch_size=1, **call)
        assert plan.tokens_per_round == pytest.approx(out.stats.emitted_tokens / out.stats.rounds), plan
        assert plan.drafted_per_round == pytest.approx(out.stats.draft_tokens / out.stats.rounds), plan


def slow_rounds(chances: np.ndarray, parents: Parents) -> float:
    """Expected rounds: every way in which a round can end, one place at a time."""
    n, ends = len(chances), [0.0] * (len(chances) + 1)
    ends[0] = 1.0
    for t in range(n):
        nodes = [[], *(path_to(parents, node) for node in range(len(parents)))]
        for path in nodes:
            chance = 1.0
            for depth, node in enumerate(path):
                siblings = [i for i, parent in enumerate(parents) if parent == parents[node]]
                chance *= chances[t + depth, siblings.index(node)] if t + depth < n - 1 else 0.0
            at = path[-1] if path else -1
            children = [i for i, parent in enumerate(parents) if parent == at]
            going = sum(chances[t + len(path), rank] for rank in range(len(children))) if t + len(path) < n - 1 else 0.0
            if chance:
                ends[t + len(path) + 1] += ends[t] * chance * (1 - going)
    return sum(ends[:n])


def test_rounds_are_those_of_the_slow_definition_and_a_chain_is_a_tree() -> None:
    rng = np.random.default_rng(0)
    for shape in ((3, 2), (2, (2, 0), (1, 1), 1), (1, 1, 1)):
        chances = rng.dirichlet(np.ones(4), size=9)[:, :3]
        parents = plan_parents(shape)
        assert tree_counts(chances, parents)[1] == pytest.approx(slow_rounds(chances, parents))
    weight = rng.random(12)
    starts = round_starts(weight, (lengths := draft_lengths(np.ones(12), 4, 0.0)))
    _, rounds, drafted = tree_counts(weight[:, None], chain_parents(4))
    assert rounds == pytest.approx(starts.sum())
    assert drafted == pytest.approx(float(starts @ lengths))


def test_chances_of_siblings_under_leviathan_are_the_enumerated_ones() -> None:
    """Over tokens written with p: the chance that sibling j is accepted. A twin without residuals is told apart."""
    n, count = 1_500, 3
    scores = [torch.tensor(law, dtype=torch.float32).log().expand(n, -1) for law in (P, Q)]
    found = np.zeros(count)
    for x in range(V):
        own = fold(torch.full((n,), x), torch.arange(n))
        found += P[x] * _siblings(*scores, torch.full((n,), x), own, "leviathan", count).mean(axis=0)
    accepted = [
        sum(chance * rejection(P, Q, tokens, False) for tokens, chance in without_replacement(Q, k))
        for k in range(1, count + 1)
    ]
    expected = np.diff([0.0, *accepted])
    assert np.abs(found - expected).max() < 0.004
    plain = np.array([np.minimum(P, Q).sum() * (1 - np.minimum(P, Q).sum()) ** j for j in range(count)])
    assert np.abs(plain - expected).max() > 0.012


@pytest.mark.full
def test_under_leviathan_a_real_run_is_within_three_percent() -> None:
    target = small_model(1, 24, 0.4)
    decoder = specdec.SpeculativeDecoder(target, weaker(target, 0.4), check=False)
    prompts = [random_ids(4, i, 24) for i in range(8)]
    call: dict[str, Any] = {"temperature": 0.9, "max_new_tokens": 90, "num_return_sequences": 16, "batch_size": 64}
    found = estimate(decoder, prompts, ks=(8,), trees=[8], **call)
    chain, best = found.plans
    assert best.tokens_per_round >= chain.tokens_per_round
    out = decoder.generate(prompts, strategies=[best.chain], seed=7, **call)
    assert best.tokens_per_round == pytest.approx(out.stats.emitted_tokens / out.stats.rounds, rel=0.03)


def test_trees_need_a_draft_model_and_a_shape() -> None:
    alone = specdec.SpeculativeDecoder(tiny_model("llama"), check=False)
    with pytest.raises(SpecdecError, match="trees need a draft model"):
        estimate(alone, [[1, 2]], trees=[4], max_new_tokens=4)
    pair = specdec.SpeculativeDecoder(tiny_model("llama"), tiny_model("llama"), check=False)
    with pytest.raises(SpecdecError, match="what_if: tree must list children"):
        estimate(pair, [[1, 2]], trees=["3y2"], max_new_tokens=4)


def test_acceptance_by_rank_and_depth_is_counted_from_recorded_rounds() -> None:
    """Against the figures of the run by depth: one of a node's children was accepted, or none."""
    target = looping(tiny_model("llama", 5))
    decoder = specdec.SpeculativeDecoder(target, weaker(target, 0.3), check=False)
    prompts = [random_ids(9, 1), quoting_ids(12, 2)]
    trace = record(decoder, prompts, strategies=["draft-model:tree=3x2"], max_new_tokens=12)
    table = acceptance_of_rounds(trace.rounds)
    assert table.shape == (2, 3)
    by_depth = trace.result.stats.conditional_acceptance_rate_per_position  # type: ignore[union-attr]
    assert table.sum(axis=1) == pytest.approx(by_depth)
    assert plan_of(best_plan(table, 4))
    with pytest.raises(SpecdecError, match="no drafts"):
        acceptance_of_rounds([])
