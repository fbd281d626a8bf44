"""Rules for several drafts of one token: their laws, how often they accept, and the most that any rule could.

The optimum over all couplings of one sample of p with the drafted siblings is a transport problem; by the max-flow
min-cut theorem it is 1 + min over sets H of tokens of p(H) - P(all siblings are in H), here over all 2^V sets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import DraftModel, PromptLookup, SpeculativeDecoder
from specdec.decoding.acceptance import COUPLED, LEVIATHAN, AcceptanceRule, Block, children_of, find_rule, judge, pick
from specdec.decoding.multi_draft import EAGLE, GUMBEL_LIST, SPECINFER, list_token
from specdec.drafters.tree_plan import plan_parents
from specdec.sampling.sampling import Purpose, Sampling, fold, race, streams, uniform
from tests.decoding.test_acceptance import make_block
from tests.helpers.branching import Language, sample
from tests.helpers.laws import cell, fit, samples, small_model, three_token_law, three_tokens
from tests.helpers.playing import check_counts, quoting_ids, weaker
from tests.helpers.tiny import tiny_model

V, N = 6, 20_000
TARGET, SOURCE = Language.random(1, V), Language.random(2, V)
RULES = {rule.name: rule for rule in (SPECINFER, GUMBEL_LIST, EAGLE)}
P, Q = (language.laws[0][0].double().numpy() for language in (TARGET, SOURCE))


# -- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_three_tokens_after_a_tree_follow_the_targets_law(name: str) -> None:
    """Uneven trees, and laws in which p and q lack tokens."""
    plans: list[tuple[Any, int]] = [((3, (2, 1, 0), 1), 0), ((3, 2), 3)]
    for plan, cut in plans:
        target, source = (Language.random(seed, V, cut=cut) for seed in (1, 2))
        cells, verdict = sample(target, source, plan_parents(plan), RULES[name], samples(60_000, 8_000))
        result = fit(cells, target.three_tokens(), tests=len(plans))
        assert result.holds, f"{plan}: {result}"
        assert 0.3 < float(verdict.accepted.float().mean()) < 2.9
        assert verdict.unsound is not None
        assert not verdict.unsound.any()


def _without_residual(block: Block, column: Tensor) -> Tensor:
    """EAGLE's walk that forgets to take a rejected sibling out of p."""
    assert block.tree is not None
    p, found = pick(block.p, column), torch.zeros_like(column)
    stream = streams(block.keys, block.positions + pick(block.tree.depths, column), Purpose.ACCEPT)
    for i, (child, node, exists) in enumerate(children_of(block, column)):
        accepts = uniform(fold(stream, i + 1)) < p.gather(1, pick(block.draft, node)[:, None])[:, 0]
        found = torch.where(exists & (found == 0) & accepts, child, found)
    return found


def _any_list(block: Block, column: Tensor) -> Tensor:
    """Accepts a sibling that wins its own race under p, whatever the other races say."""
    assert block.tree is not None
    stream = streams(block.keys, block.positions + pick(block.tree.depths, column), Purpose.SAMPLE)
    p, found = pick(block.p, column), torch.zeros_like(column)
    for i, (child, node, exists) in enumerate(children_of(block, column)):
        own = race(p, stream if i == 0 else fold(stream, i))
        found = torch.where(exists & (found == 0) & (own == pick(block.draft, node)), child, found)
    return found


BROKEN: dict[str, tuple[AcceptanceRule, str]] = {
    "eagle without residual": (replace(EAGLE, pick_child=_without_residual), "argmax"),
    "lists judged one by one": (replace(GUMBEL_LIST, pick_child=_any_list), "coupled-independent"),
    "the first list's token follows": (replace(GUMBEL_LIST, next_token=COUPLED.next_token), "coupled-independent"),
    "point masses that claim q": (SPECINFER, "argmax"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_twins_are_rejected(name: str) -> None:
    rule, proposal = BROKEN[name]
    claims = True if name == "point masses that claim q" else None
    cells, _ = sample(TARGET, SOURCE, plan_parents((3, 2)), rule, N, proposal=proposal, claims=claims)
    assert not fit(cells, TARGET.three_tokens()).holds


@pytest.mark.fast(2, again=True)
@pytest.mark.parametrize("name", RULES)
def test_texts_of_the_engine_follow_the_targets_law(name: str) -> None:
    """Three tokens over as many rounds as they take: coins and races of a position are met again in the next round."""
    vocab, prompt, n = 13, [5, 7, 5, 7, 5], samples(6_000, 1_500)
    decoder = SpeculativeDecoder(small_model(3, vocab), small_model(1, vocab), strategies=[], check=False)
    strategies = [PromptLookup(n_max=2, ngram_min=2), DraftModel(tree="3x2")]
    out = three_tokens(decoder, prompt, n, strategies=strategies, acceptance=name, top_p=0.9)
    result = fit(cell(out.token_ids, vocab), three_token_law(small_model(3, vocab), prompt, 0.8, top_p=0.9))
    assert result.holds, str(result)
    assert not out.lossy
    check_counts(out)


# -- chains and greedy -------------------------------------------------------------------------------------------------


def test_a_chain_is_judged_as_the_rule_for_one_draft() -> None:
    for seed in range(20):
        block = make_block(seed, (12, 5, 6), "some", score_kinds=("free", "cut"))
        for rule, one in ((SPECINFER, LEVIATHAN), (GUMBEL_LIST, COUPLED)):
            ours, known = judge(block, rule), judge(block, one)
            assert torch.equal(ours.accepted, known.accepted)
            assert torch.equal(ours.token, known.token)


def test_an_eagle_chain_accepts_by_its_coin_and_takes_the_rejected_token_out_of_p() -> None:
    rejected = 0
    for seed in range(20):
        block = make_block(seed, (12, 5, 6), "none", score_kinds=("free", "cut"))
        verdict = judge(block, EAGLE)
        coin = uniform(block.streams(Purpose.ACCEPT))
        for row in range(12):
            n, length = 0, int(block.lengths[row])
            while n < length and coin[row, n] < block.p[row, n, block.draft[row, n]]:
                n += 1
            assert int(verdict.accepted[row]) == n
            if n < length:
                p = block.p[row, n].clone()
                p[block.draft[row, n]] = 0
                stream = streams(block.keys[row], block.positions[row] + n, Purpose.RESIDUAL)
                assert int(verdict.token[row]) == int(race(p, stream))
                rejected += 1
    assert rejected > 40


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", RULES)
def test_greedy_texts_are_plain_decodings(name: str) -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, weaker(model), check=False)
    prompts = [quoting_ids(12, 1), [4, 2], [7]]
    plain = decoder.generate(prompts, 16, strategies=[])
    for strategies in ([DraftModel(n_max=3)], [DraftModel(tree="2x2")]):
        assert decoder.generate(prompts, 16, strategies, acceptance=name, batch_size=2).token_ids == plain.token_ids


def test_rules_are_found_by_name_and_promise_what_they_keep() -> None:
    for name, rule in RULES.items():
        assert find_rule(name) is rule
        assert not rule.lossy
        assert not rule.same_text
        assert rule.keeps_text(greedy=True)


# -- how often they accept ---------------------------------------------------------------------------------------------


def optimum(p: np.ndarray, inside: Callable[[np.ndarray], float]) -> float:
    """The most that any rule accepts; inside(H): the probability that all siblings are in a set H [V] of tokens."""
    sets = (np.array(bits, dtype=bool) for bits in product([False, True], repeat=len(p)))
    return 1 + min(p[h].sum() - inside(h) for h in sets)


def without_replacement(q: np.ndarray, k: int) -> list[tuple[tuple[int, ...], float]]:
    """All sequences of k different tokens, and their probabilities."""
    found = []
    for tokens in product(range(len(q)), repeat=k):
        chance, left = 1.0, 1.0
        for token in tokens:
            chance, left = chance * q[token] / left if left > 1e-12 else 0.0, left - q[token]
        found += [(tokens, chance)] if len(set(tokens)) == k and chance > 0 else []
    return found


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
    return 1 - none


def measured(rule: AcceptanceRule, k: int) -> float:
    return float((sample(TARGET, SOURCE, (-1,) * k, rule, N)[1].accepted > 0).double().mean())


def near(value: float, expected: float) -> bool:
    return abs(value - expected) < 4 * np.sqrt(max(expected * (1 - expected), 1e-4) / N)


def test_one_draft_is_accepted_as_often_as_total_variation_allows() -> None:
    assert abs(optimum(P, lambda h: Q[h].sum()) - np.minimum(P, Q).sum()) < 1e-6  # rows of float32


@pytest.mark.parametrize("k", [2, 3])
def test_acceptance_is_what_the_rule_promises_and_never_above_the_optimum(k: int) -> None:
    distinct = without_replacement(Q, k)
    best = optimum(P, lambda h: sum(chance for tokens, chance in distinct if h[list(tokens)].all()))
    recursive = sum(chance * rejection(P, Q, tokens, False) for tokens, chance in distinct)
    assert np.minimum(P, Q).sum() < recursive <= best + 1e-9
    assert near(measured(LEVIATHAN, k), recursive)

    independent = [(t, float(np.prod(Q[list(t)]))) for t in product(range(V), repeat=k)]
    best = optimum(P, lambda h: Q[h].sum() ** k)
    specinfer = sum(chance * rejection(P, Q, tokens, True) for tokens, chance in independent)
    assert np.minimum(P, Q).sum() < specinfer <= best + 1e-9
    assert near(measured(SPECINFER, k), specinfer)

    ratios = np.maximum(P[:, None] / P[None], Q[:, None] / Q[None]).sum(axis=0)  # [j]
    least = (k / ((k - 1) / P + ratios)).sum()  # one list's token equals the winner: the list matching lemma
    listed, error = measured(GUMBEL_LIST, k), 4 * np.sqrt(0.25 / N)
    assert least - error < listed < best + error
    assert listed > measured(COUPLED, 1) + 0.02

    tokens = np.argsort(-Q)[:k]  # for given siblings the optimum is their share of p
    best = optimum(P, lambda h: float(h[tokens].all()))
    assert abs(best - P[tokens].sum()) < 1e-6
    assert near(measured(EAGLE, k), best)


def test_a_node_with_no_children_gives_the_targets_sample() -> None:
    keys = torch.arange(9)
    scores = TARGET.laws[0].log().expand(9, 1, -1)
    zeros = torch.zeros(9, dtype=torch.int64)
    block = Block(scores, zeros[:, None], zeros, zeros == 0, zeros, keys, zeros, Sampling(1.0))
    assert torch.equal(list_token(block, zeros), block.own[:, 0])
