"""Acceptance: `judge` decides what a slow reading of the rules decides, row by row, in numpy.

The random numbers come from specdec.sampling, as inputs; what follows from them is decided here again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdec import theory
from specdec.decoding.acceptance import (
    COUPLED,
    LEVIATHAN,
    MATCH,
    RULES,
    AcceptanceRule,
    Block,
    Verdict,
    find_rule,
    judge,
    register_rule,
)
from specdec.decoding.multi_draft import EAGLE, GUMBEL_LIST, SPECINFER
from specdec.errors import SpecdecError
from specdec.sampling.sampling import Purpose, Sampling, fold, race, streams, uniform
from tests.helpers.broken import BROKEN_RULES
from tests.helpers.laws import fit

SCORE_KINDS = ("free", "one-hot", "cut", "like q", "nan", "nothing")
Q_KINDS = ("free", "one-hot", "cut", "zero at the draft", "only where p is not")


# -- the oracle ------------------------------------------------------------------------------------------------------


def _coin(key: int, position: int) -> float:
    return float(uniform(streams(torch.tensor(key), torch.tensor(position), Purpose.ACCEPT)))


def _draw(weights: np.ndarray, key: int, position: int, purpose: Purpose) -> int:
    """The winner of an exponential race; tokens without weight do not run."""
    stream = streams(torch.tensor(key), torch.tensor(position), purpose)
    u = uniform(fold(stream, torch.arange(len(weights)))).double().numpy()
    best, winner = np.inf, -1
    for token, weight in enumerate(weights):
        if weight > 0 and -np.log1p(-u[token]) / weight < best:
            best, winner = -np.log1p(-u[token]) / weight, token
    assert winner >= 0
    return winner


def _is_law(scores: np.ndarray) -> bool:
    return not np.isnan(scores).any() and bool(np.isfinite(scores.max()))


def oracle(block: Block, rule: str, row: int) -> tuple[int, int | None, bool]:
    """(accepted, token or None where none is due, failed) of one row."""
    scores, p = block.scores[row].numpy(), block.p[row].double().numpy()
    draft, length = block.draft[row].tolist(), int(block.lengths[row])
    key, first = int(block.keys[row]), int(block.positions[row])
    claims = rule == "leviathan" and not block.sampling.greedy and block.has_q is not None and bool(block.has_q[row])
    accepted, rejected, q = 0, False, np.zeros(p.shape[1])
    for s in range(length):
        if not _is_law(scores[s]):
            return accepted, None, True
        if claims:
            assert block.q is not None
            q = block.q[row, s].double().numpy()
            stands = _coin(key, first + s) * q[draft[s]] < p[s, draft[s]]
        elif block.sampling.greedy:
            stands = int(np.argmax(scores[s])) == draft[s]
        else:
            stands = _draw(p[s], key, first + s, Purpose.SAMPLE) == draft[s]
        if not stands:
            rejected = True
            break
        accepted += 1
    if not rejected and not bool(block.final[row]):
        return accepted, None, False
    if not _is_law(scores[accepted]):
        return accepted, None, True
    if block.sampling.greedy:
        return accepted, int(np.argmax(scores[accepted])), False
    if not (rejected and claims):
        return accepted, _draw(p[accepted], key, first + accepted, Purpose.SAMPLE), False
    residual = np.maximum(p[accepted] - q, 0)
    weights = residual if residual.sum() > 0 else p[accepted]
    return accepted, _draw(weights, key, first + accepted, Purpose.RESIDUAL), False


def check(block: Block, rule: AcceptanceRule) -> Verdict:
    """judge == oracle, in every row."""
    verdict = judge(block, rule)
    for row in range(len(block.keys)):
        accepted, token, failed = oracle(block, rule.name, row)
        assert int(verdict.accepted[row]) == accepted, row
        assert bool(verdict.failed[row]) == failed, row
        if token is not None:
            assert int(verdict.token[row]) == token, row
    return verdict


# -- random blocks ---------------------------------------------------------------------------------------------------


def _scores(rng: np.random.Generator, kind: str, q: np.ndarray) -> np.ndarray:
    scores = rng.normal(0, 2, len(q))
    if kind == "one-hot":
        scores[np.arange(len(q)) != rng.integers(len(q))] = -np.inf
    elif kind == "cut":
        scores[rng.permutation(len(q))[: len(q) // 2]] = -np.inf
    elif kind == "like q":
        with np.errstate(divide="ignore"):
            scores = np.log(q)
    elif kind == "nan":
        scores[rng.integers(len(q))] = np.nan
    elif kind == "nothing":
        scores[:] = -np.inf
    return scores


def _law(rng: np.random.Generator, kind: str, draft: int, size: int) -> np.ndarray:
    law = rng.dirichlet(np.ones(size))
    if kind == "one-hot":
        law = np.eye(size)[draft]
    elif kind == "cut":
        law[rng.permutation(size)[: size // 2]] = 0
        law[draft] += 0.1
    elif kind == "zero at the draft":
        law[draft] = 0
    return law / law.sum()


def _cell(
    rng: np.random.Generator, draft: int, size: int, score_kinds: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Scores and q [V] of one position."""
    kind = str(rng.choice(Q_KINDS))
    q = _law(rng, kind, draft, size)
    scores = _scores(rng, str(rng.choice(score_kinds)), q)
    others = np.delete(scores, draft)
    if kind == "only where p is not" and (others > -np.inf).any():
        scores[draft] = -np.inf
        q = np.eye(size)[draft]
    return scores, q


def make_block(
    seed: int, shape: tuple[int, int, int], claim: str = "some", greedy: bool = False,
    score_kinds: tuple[str, ...] = SCORE_KINDS,
) -> Block:  # fmt: skip
    """A random block [B, S, V]. claim: which rows have a q: none, some, all or all-known."""
    rng = np.random.default_rng(seed)
    B, S, V = shape
    draft = rng.integers(0, V, (B, S))
    cells = [[_cell(rng, int(draft[b, s]), V, score_kinds) for s in range(S)] for b in range(B)]
    scores = np.array([[c[0] for c in row] for row in cells])
    q = np.array([[c[1] for c in row] for row in cells])
    usable = ~np.isnan(scores).any(axis=-1)
    follow = usable & (rng.random((B, S)) < 0.5)  # enough likely drafts that rows get past their first position
    draft = np.where(follow, np.where(np.isnan(scores), -np.inf, scores).argmax(axis=-1), draft)
    final = rng.random(B) < 0.6
    lengths = np.where(final, rng.integers(0, S, B), S)  # a chunk that goes on fills its pass
    has_q = np.zeros(B, dtype=bool) if claim == "none" else np.ones(B, dtype=bool)
    if claim == "some":
        has_q = rng.random(B) < 0.5
    return Block(
        scores=torch.tensor(scores, dtype=torch.float32), draft=torch.tensor(draft), lengths=torch.tensor(lengths),
        final=torch.tensor(final), totals=torch.tensor(lengths), sampling=Sampling(0.0 if greedy else 1.0),
        keys=torch.tensor(rng.integers(-(2**63), 2**63 - 1, B)), positions=torch.tensor(rng.integers(0, 5000, B)),
        q=None if claim == "none" else torch.tensor(q, dtype=torch.float32),
        has_q=None if claim == "none" else torch.tensor(has_q), all_have_q=claim == "all-known",
    )  # fmt: skip


SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(2, 12))
SEEDS = st.integers(0, 2**32)
CLAIMS = st.sampled_from(["none", "some", "all", "all-known"])


@settings(max_examples=300)
@given(SEEDS, SHAPES, CLAIMS, st.booleans())
@example(0, (1, 1, 2), "all", False)
def test_leviathan_decides_as_the_rule_reads(seed: int, shape: Any, claim: str, greedy: bool) -> None:
    check(make_block(seed, shape, claim, greedy), LEVIATHAN)


@settings(max_examples=150)
@given(SEEDS, SHAPES, CLAIMS, st.booleans())
def test_match_decides_as_the_rule_reads_and_ignores_q(seed: int, shape: Any, claim: str, greedy: bool) -> None:
    block = make_block(seed, shape, claim, greedy)
    verdict = check(block, MATCH)
    without = judge(replace(block, q=None, has_q=None, all_have_q=False), MATCH)
    assert torch.equal(verdict.accepted, without.accepted)
    assert torch.equal(verdict.token, without.token)


@settings(max_examples=60)
@given(SEEDS, SHAPES)
def test_sound_scores_never_fail_and_never_give_a_token_without_probability(seed: int, shape: Any) -> None:
    block = make_block(seed, shape, "some", score_kinds=("free", "one-hot", "cut", "like q"))
    for rule in (MATCH, LEVIATHAN):
        verdict = check(block, rule)
        assert not verdict.failed.any()
        for b in range(shape[0]):
            n = int(verdict.accepted[b])
            kept = block.draft[b, :n]
            assert (block.p[b, torch.arange(n), kept] > 0).all()
            if n < shape[1]:
                assert block.p[b, n, verdict.token[b]] > 0


@settings(max_examples=60)
@given(SEEDS, SHAPES)
def test_rows_are_judged_independently_of_each_other(seed: int, shape: Any) -> None:
    block = make_block(seed, shape, "some")
    together = judge(block, LEVIATHAN)
    for b in range(shape[0]):
        one = {
            name: getattr(block, name)[b : b + 1]
            for name in ("scores", "draft", "lengths", "final", "totals", "keys", "positions", "q", "has_q")
        }
        alone = judge(replace(block, **one), LEVIATHAN)
        assert int(alone.accepted) == int(together.accepted[b])
        assert bool(alone.failed) == bool(together.failed[b])
        if not bool(alone.failed):
            assert int(alone.token) == int(together.token[b])


# -- corners ---------------------------------------------------------------------------------------------------------


def _one(p: list[list[float]], q: list[list[float]], draft: list[int], n: int = 400) -> Block:
    """n rows with the same laws [S, V] and draft, and keys of their own; the whole draft is tested."""
    S = len(p)
    tested = len(draft)
    draft = draft + [0] * (S - tested)
    ones = torch.ones(n, dtype=torch.int64)
    return Block(
        scores=torch.tensor(p).log().expand(n, -1, -1).contiguous(), draft=torch.tensor(draft).repeat(n, 1),
        lengths=ones * tested, final=torch.ones(n, dtype=torch.bool), totals=ones * tested,
        keys=fold(ones, torch.arange(n)), positions=ones * 7, sampling=Sampling(1.0),
        q=torch.tensor(q).expand(n, -1, -1).contiguous(), has_q=torch.ones(n, dtype=torch.bool),
    )  # fmt: skip


def test_a_draft_from_the_targets_own_law_always_stands() -> None:
    law = torch.softmax(torch.tensor([0.3, -1.0, 2.0, 0.7]), dim=-1).tolist()
    for token in range(4):
        block = _one([law, law], [law, law], [token])
        exact = replace(block, q=block.p)
        assert (judge(exact, LEVIATHAN).accepted == 1).all()


def test_an_empty_residual_falls_back_to_the_targets_law() -> None:
    """q at least p everywhere, as rounding can make it: the token comes from p and not from nothing."""
    verdict = check(_one([[0.0, 0.5, 0.5]] * 2, [[0.9, 0.5, 0.5]] * 2, [0]), LEVIATHAN)
    assert (verdict.accepted == 0).all()
    assert set(verdict.token.tolist()) == {1, 2}
    assert not verdict.failed.any()


def test_a_residual_below_float32s_normal_numbers_still_names_its_token() -> None:
    block = _one([[0.0, 0.5, 0.5, 0.0]] * 2, [[1e-30, 0.5, 0.5, 0.0]] * 2, [0])
    tiny = torch.tensor([0.0, 0.5, 0.5, 1e-40])
    block.p[:] = tiny
    verdict = judge(block, LEVIATHAN)
    assert (verdict.accepted == 0).all()
    assert set(verdict.token.tolist()) == {3}


def test_a_token_that_only_the_draft_allows_never_stands() -> None:
    verdict = check(_one([[0.0, 1.0]] * 2, [[1.0, 0.0]] * 2, [0]), LEVIATHAN)
    assert (verdict.accepted == 0).all()
    assert (verdict.token == 1).all()


@pytest.mark.parametrize("rule", [MATCH, LEVIATHAN, COUPLED, EAGLE, SPECINFER, GUMBEL_LIST], ids=lambda r: r.name)
@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_a_broken_position_fails_only_rows_that_reach_it(rule: AcceptanceRule, bad: float) -> None:
    sure, other = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]
    block = _one([sure, sure, sure], [sure, sure, sure], [0, 0], n=3)
    block.scores[:, 1] = bad
    block.draft[1:2] = torch.tensor([1, 0, 0])  # row 1 is rejected before the broken position
    block.q[1, 0] = torch.tensor(other)  # type: ignore[index]
    block.lengths[2], block.final[2] = 1, False  # row 2 goes on: its next position is the next pass's business
    verdict = judge(block, rule)
    assert verdict.accepted.tolist() == [1, 0, 1]
    assert verdict.failed.tolist() == [True, False, False]
    assert int(verdict.token[1]) == 0


# -- the law of what comes out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [Purpose.SAMPLE, Purpose.DRAFT], ids=["shared numbers", "numbers of its own"])
def test_coupled_accepts_as_theory_says_only_where_draft_and_target_share_their_numbers(draw: Purpose) -> None:
    """The control draws x ~ q from other numbers: the text is still right, but the acceptance is that of `match`."""
    rng = np.random.default_rng(5)
    p, q = rng.dirichlet(np.ones(12)), rng.dirichlet(np.ones(12))
    block = _one([p.tolist()] * 2, [q.tolist()] * 2, [0], n=20_000)
    first = race(block.q[:, 0], streams(block.keys, block.positions, draw))  # type: ignore[index]
    block = replace(block, draft=torch.stack([first, first], dim=1))
    verdict = judge(block, COUPLED)
    emitted = torch.where(verdict.accepted > 0, block.draft[:, 0], verdict.token)
    assert fit(emitted.numpy(), p).holds
    assert fit(first.numpy(), q).holds
    expected = float(theory.expected_acceptance(p, q, "coupled"))
    far = abs(float(verdict.accepted.float().mean()) - expected) / np.sqrt(expected * (1 - expected) / len(first))
    assert far < 4 if draw == Purpose.SAMPLE else far > 20
    assert expected >= (1 - np.abs(p - q).sum() / 2) / (1 + np.abs(p - q).sum() / 2)


def _emitted(rule: AcceptanceRule, n: int = 20_000) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """First emitted tokens of n independent rows, p, q, and the share that was accepted. x ~ q from numpy."""
    rng = np.random.default_rng(5)
    p, q = rng.dirichlet(np.ones(12)), rng.dirichlet(np.ones(12))
    block = _one([p.tolist()] * 2, [q.tolist()] * 2, [0], n)
    draft = torch.tensor(rng.choice(12, n, p=q))
    block = replace(block, draft=torch.stack([draft, draft], dim=1))
    verdict = judge(block, rule)
    first = torch.where(verdict.accepted > 0, draft, verdict.token)
    return first.numpy(), p, q, float(verdict.accepted.float().mean())


@pytest.mark.parametrize("rule", [MATCH, LEVIATHAN], ids=lambda r: r.name)
def test_the_emitted_token_has_the_targets_law_and_the_acceptance_theory_says(rule: AcceptanceRule) -> None:
    first, p, q, share = _emitted(rule)
    assert fit(first, p).holds, str(fit(first, p))
    expected = float((p * q).sum() if rule is MATCH else np.minimum(p, q).sum())
    assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / len(first))


@pytest.mark.parametrize("name", BROKEN_RULES)
def test_broken_rules_do_not_give_the_targets_law(name: str) -> None:
    first, p, _, _ = _emitted(BROKEN_RULES[name])
    assert not fit(first, p).holds


# -- the registry ----------------------------------------------------------------------------------------------------


def test_a_registered_rule_is_found_by_name_and_an_unknown_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.decoding.acceptance.RULES", dict(RULES))
    rule = register_rule(BROKEN_RULES["accept-all"])
    assert find_rule("accept-all") is rule
    assert find_rule(LEVIATHAN) is LEVIATHAN
    with pytest.raises(SpecdecError, match=r"'medusa'.*leviathan.*match"):
        find_rule("medusa")


def test_results_of_a_lossy_rule_are_marked() -> None:
    from specdec import SpeculativeDecoder
    from tests.helpers.laws import small_model

    decoder = SpeculativeDecoder(small_model(0, 13), small_model(1, 13), check=False)
    out = decoder.generate([1, 2], max_new_tokens=3, acceptance=BROKEN_RULES["accept-all"])
    assert out.lossy
    assert out.provenance["lossy"] is True
    assert out.to_dict()["lossy"] is True
    assert decoder.generate([1, 2], max_new_tokens=3).lossy is False
