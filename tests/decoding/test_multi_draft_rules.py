"""Rules for several drafts of one token: their laws, how often they accept, and the most that any rule could."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import DraftModel, SpeculativeDecoder
from specdec.decoding.acceptance import COUPLED, LEVIATHAN, AcceptanceRule, Block, children_of, find_rule, judge, pick
from specdec.decoding.multi_draft import EAGLE, GUMBEL_LIST, SPECINFER, list_token
from specdec.drafters.tree_plan import plan_parents
from specdec.sampling.sampling import Purpose, Sampling, fold, race, streams, uniform
from tests.decoding.test_acceptance import make_block
from tests.helpers.branching import Language, sample
from tests.helpers.laws import fit, samples
from tests.helpers.playing import quoting_ids, weaker
from tests.helpers.scripts import load_script
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
    "lists judged one by one": (replace(GUMBEL_LIST, pick_child=_any_list), "coupled-independent"),
    "point masses that claim q": (SPECINFER, "argmax"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_twins_are_rejected(name: str) -> None:
    rule, proposal = BROKEN[name]
    claims = True if name == "point masses that claim q" else None
    cells, _ = sample(TARGET, SOURCE, plan_parents((3, 2)), rule, N, proposal=proposal, claims=claims)
    assert not fit(cells, TARGET.three_tokens()).holds


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


SCRIPT = load_script("measure_multi_draft")
optimum, without_replacement, rejection = SCRIPT.optimum, SCRIPT.without_replacement, SCRIPT.rejection


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

    independent = SCRIPT.independent(Q, k)
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
