"""`specdec.theory` against exact enumeration and against simulations written from the definitions."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import theory
from specdec.errors import SpecdecError

VOCAB = 3


# --- tokens per round, speed-up, best k ---------------------------------------------------------------------------


def enumerated_accepted(a: Fraction, k: int) -> Fraction:
    """Mean accepted drafts, over all 2^k outcomes of k independent tests."""
    total = Fraction(0)
    for passed in itertools.product([True, False], repeat=k):
        probability = math.prod((a if ok else 1 - a for ok in passed), start=Fraction(1))
        total += probability * len(list(itertools.takewhile(bool, passed)))
    return total


@pytest.mark.parametrize("a", [Fraction(0), Fraction(1, 7), Fraction(1, 2), Fraction(9, 10), Fraction(1)])
@pytest.mark.parametrize("k", range(9))
def test_tokens_per_round_equals_enumeration_of_all_outcomes(a: Fraction, k: int) -> None:
    exact = enumerated_accepted(a, k)
    assert theory.accepted_per_round(float(a), k) == pytest.approx(float(exact), rel=1e-14, abs=0)
    assert theory.tokens_per_round(float(a), k) == pytest.approx(float(exact + 1), rel=1e-14, abs=0)


@given(st.floats(0.0, 1.0), st.integers(0, 64))
def test_tokens_per_round_is_the_sum_of_powers_also_next_to_one_and_zero(a: float, k: int) -> None:
    powers = [a**i for i in range(k + 1)]
    assert theory.tokens_per_round(a, k) == pytest.approx(math.fsum(powers), rel=1e-13, abs=0)
    assert theory.accepted_per_round(a, k) == pytest.approx(math.fsum(powers[1:]), rel=1e-13, abs=0)


@pytest.mark.parametrize("a", [1 - 1e-9, 1 - 1e-12, 1 - 2**-53])
def test_tokens_per_round_keeps_its_digits_next_to_one(a: float) -> None:
    exact = sum(Fraction(a) ** i for i in range(41))
    assert theory.tokens_per_round(a, 40) == pytest.approx(float(exact), rel=1e-15)


def test_the_common_wrong_formula_is_not_used() -> None:
    assert theory.accepted_per_round(0.8, 4) == pytest.approx(0.8 + 0.64 + 0.512 + 0.4096)
    assert theory.accepted_per_round(0.8, 4) < (1 - 0.8**4) / (1 - 0.8)


def test_tokens_per_round_equals_a_simulation() -> None:
    a, k, rounds = 0.7, 5, 200_000
    passed = np.random.default_rng(0).random((rounds, k)) < a
    emitted = passed.cumprod(1).sum(1) + 1
    assert abs(emitted.mean() - theory.tokens_per_round(a, k)) < 4 * emitted.std() / math.sqrt(rounds)


def test_speedup_counts_draft_steps_and_the_wide_pass() -> None:
    # 100 rounds of accepted = 4: 500 tokens; each costs 4 drafts at 0.1 and a pass at 1.05.
    assert theory.speedup(1.0, 4, 0.1, 0.05) == pytest.approx(500 / (100 * (4 * 0.1 + 1.05)), rel=1e-15)
    assert theory.speedup(0.3, 0, 0.5) == 1.0
    assert theory.speedup(0.0, 3, 0.2) == pytest.approx(1 / 1.6, rel=1e-15)


@pytest.mark.parametrize("v", [0.0, 0.1, [9.0, 0.0, 0.01, 0.02, 0.5, 0.5, 0.5, 0.5, 0.5], lambda k: 0.03 * k])
@pytest.mark.parametrize(("a", "c"), [(0.0, 0.1), (0.5, 0.02), (0.8, 0.1), (0.8, 0.9), (0.95, 0.05), (1.0, 0.0)])
def test_best_k_is_the_maximum_over_all_lengths(a: float, c: float, v: object) -> None:
    def cost(k: int) -> float:
        return v(k) if callable(v) else v[k] if isinstance(v, list) else v  # type: ignore[return-value]

    gains = [1.0] + [theory.speedup(a, k, c, cost(k)) for k in range(1, 9)]
    assert theory.best_k(a, c, v, k_max=8) == int(np.argmax(gains))  # type: ignore[arg-type]


def test_best_k_says_off_when_drafting_loses() -> None:
    assert theory.best_k(0.1, 0.5) == 0
    assert theory.best_k(0.9, 0.05, v=10.0) == 0
    assert theory.best_k(1.0, 0.0, k_max=0) == 0


def test_floats_arrays_and_tensors_are_answered_in_kind() -> None:
    rates = [0.0, 0.25, 0.5, 1.0]
    expected = [theory.tokens_per_round(a, 3) for a in rates]
    assert all(type(x) is float for x in expected)
    array = theory.tokens_per_round(np.array(rates), 3)
    assert isinstance(array, np.ndarray)
    assert array.tolist() == expected
    tensor = theory.tokens_per_round(torch.tensor(rates), 3)
    assert isinstance(tensor, torch.Tensor)
    assert tensor.tolist() == expected
    grid = theory.speedup(np.array(rates)[:, None], np.arange(5), 0.1)
    assert grid.shape == (4, 5)
    assert grid[2, 3] == theory.speedup(0.5, 3, 0.1)
    assert type(theory.expected_acceptance([0.5, 0.5], [1.0, 0.0])) is float
    assert isinstance(theory.expected_acceptance(np.full((2, 4), 0.25), np.full((2, 4), 0.25)), np.ndarray)


# --- acceptance at one position -----------------------------------------------------------------------------------


def laws(seed: int, *shape: int, sparse: bool = False) -> np.ndarray:
    rng = np.random.default_rng(seed)
    weights = rng.gamma(0.5, size=shape)
    if sparse:
        weights *= rng.random(shape) < 0.6
        weights[..., 0] += 1e-3
    return weights / weights.sum(-1, keepdims=True)


def coupled_by_definition(p: np.ndarray, q: np.ndarray) -> float:
    support = [x for x in range(len(p)) if p[x] > 0 and q[x] > 0]
    return sum(1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(len(p))) for x in support)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("vocab", [1, 2, 7, 50])
def test_expected_acceptance_follows_the_definitions(vocab: int, sparse: bool) -> None:
    for seed in range(20):
        p, q = laws(seed, vocab, sparse=sparse), laws(1000 + seed, vocab, sparse=sparse)
        tv = 0.5 * np.abs(p - q).sum()
        assert theory.expected_acceptance(p, q, "leviathan") == pytest.approx(1 - tv, abs=1e-14)
        assert theory.expected_acceptance(p, q, "match", "sample") == pytest.approx(p @ q, abs=1e-14)
        assert theory.expected_acceptance(p, q, "match") == p[q.argmax()]
        assert theory.expected_acceptance(p, q, "leviathan", "argmax") == p[q.argmax()]
        coupled = theory.expected_acceptance(p, q, "coupled")
        assert coupled == pytest.approx(coupled_by_definition(p, q), abs=1e-13)
        assert (1 - tv) / (1 + tv) - 1e-13 <= coupled <= 1 - tv + 1e-13
        assert coupled >= p @ q - 1e-13


def test_expected_acceptance_of_equal_and_of_disjoint_laws() -> None:
    p, q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.0, 0.0, 0.0, 1.0])
    for rule in theory.RULES:
        assert theory.expected_acceptance(p, q, rule, "sample") == 0.0
    assert theory.expected_acceptance(p, p, "leviathan") == pytest.approx(1.0, abs=1e-15)
    assert theory.expected_acceptance(p, p, "coupled") == pytest.approx(1.0, abs=1e-15)
    assert theory.expected_acceptance(p, p, "match", "sample") == pytest.approx(0.38, abs=1e-15)


def test_expected_acceptance_equals_simulated_rules() -> None:
    n, rng = 200_000, np.random.default_rng(1)
    p, q = laws(5, 6), laws(6, 6)
    drafts, targets = rng.choice(6, n, p=q), rng.choice(6, n, p=p)
    race = -np.log1p(-rng.random((n, 6)))  # the same exponentials for both models
    simulated = {
        "leviathan": rng.random(n) * q[drafts] < p[drafts],
        "match": drafts == targets,
        "coupled": (race / p).argmin(1) == (race / q).argmin(1),
    }
    for rule, accepted in simulated.items():
        expected = theory.expected_acceptance(p, q, rule, "sample")
        assert abs(accepted.mean() - expected) < 4 * math.sqrt(expected * (1 - expected) / n), rule


def test_batched_tensors_give_the_acceptance_of_each_row() -> None:
    p, q = laws(3, 2, 4, 11), laws(4, 2, 4, 11)
    for rule in theory.RULES:
        batched = theory.expected_acceptance(torch.tensor(p), torch.tensor(q), rule)
        assert batched.shape == (2, 4)
        for i, j in np.ndindex(2, 4):
            assert float(batched[i, j]) == pytest.approx(theory.expected_acceptance(p[i, j], q[i, j], rule), abs=1e-15)


@pytest.mark.parametrize("proposal", theory.PROPOSALS)
@pytest.mark.parametrize("rule", theory.RULES)
def test_realised_acceptance_averages_to_the_expected_one(rule: str, proposal: str) -> None:
    for seed in range(10):
        p, q = laws(seed, 9, sparse=True), laws(50 + seed, 9, sparse=True)
        drawn = np.flatnonzero(p)
        rows = np.ones((len(drawn), 1))
        w = theory.realised_acceptance(rows * p, rows * q, drawn, rule, proposal)
        assert ((w >= 0) & (w <= 1)).all()
        assert p[drawn] @ w == pytest.approx(theory.expected_acceptance(p, q, rule, proposal), abs=1e-13)


# --- whole texts: a toy pair whose laws depend on the whole prefix ------------------------------------------------

DEPTH = 5
_P, _Q = laws(11, VOCAB**DEPTH, VOCAB), laws(12, VOCAB**DEPTH, VOCAB)


def toy(prefix: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Target and draft law after `prefix`."""
    row = sum(x * VOCAB**i for i, x in enumerate(prefix)) + len(prefix)
    p = _P[row % len(_P)]
    # The draft is good after token 0 and bad after the others: what makes accepted prefixes differ from plain ones.
    return p, 0.9 * p + 0.1 * _Q[row % len(_Q)] if prefix[-1:] == (0,) else _Q[row % len(_Q)]


def texts(n: int) -> list[tuple[tuple[int, ...], float, np.ndarray, np.ndarray]]:
    """Every text of n tokens with its probability under the target and the laws along it, `[n, V]`."""
    result = []
    for text in itertools.product(range(VOCAB), repeat=n):
        along = [toy(text[:i]) for i in range(n)]
        p, q = np.array([x[0] for x in along]), np.array([x[1] for x in along])
        result.append((text, float(np.prod(p[np.arange(n), text])), p, q))
    return result


def true_accepted_length(k: int) -> float:
    """Mean accepted drafts by the algorithm: draw the draft from q, test its tokens one after another."""
    total = 0.0
    for draft in itertools.product(range(VOCAB), repeat=k):
        along = [toy(draft[:i]) for i in range(k)]
        drawn = math.prod(q[x] for (_, q), x in zip(along, draft, strict=True))
        stands = [min(1.0, p[x] / q[x]) for (p, q), x in zip(along, draft, strict=True)]
        total += drawn * sum(math.prod(stands[:m]) for m in range(1, k + 1))
    return total


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_accepted_length_from_text_is_unbiased_by_exact_enumeration(k: int) -> None:
    estimate = sum(
        chance * theory.accepted_length_from_text(theory.realised_acceptance(p, q, np.array(text)), k)[0]
        for text, chance, p, q in texts(k)
    )
    assert estimate == pytest.approx(true_accepted_length(k), abs=1e-12)


def test_the_product_of_one_minus_tv_is_biased_beyond_the_first_position() -> None:
    def product_estimate(k: int) -> float:
        return sum(
            chance * theory.accepted_length_from_text(theory.expected_acceptance(p, q), k)[0]
            for _, chance, p, q in texts(k)
        )

    assert product_estimate(1) == pytest.approx(true_accepted_length(1), abs=1e-12)
    assert abs(product_estimate(4) / true_accepted_length(4) - 1) > 0.03


def speculative_rounds(prefix: tuple[int, ...], n: int, k: int) -> dict[tuple[int, ...], tuple[float, float]]:
    """{text: (probability, probability x rounds)} of a real leviathan run from `prefix` to n tokens, all paths."""
    if len(prefix) >= n:
        return {prefix[:n]: (1.0, 0.0)}
    ends: dict[tuple[int, ...], float] = {}

    def test_position(text: tuple[int, ...], chance: float, left: int) -> None:
        p, q = toy(text)
        if left == 0 or len(text) >= n:  # the bonus token; beyond n nothing matters
            for x in range(VOCAB):
                ends[(*text, x)] = ends.get((*text, x), 0.0) + chance * p[x]
            return
        residual = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
        for x in range(VOCAB):
            stands = min(1.0, p[x] / q[x])
            test_position((*text, x), chance * q[x] * stands, left - 1)
            for y in range(VOCAB):
                ends[(*text, y)] = ends.get((*text, y), 0.0) + chance * q[x] * (1 - stands) * residual[y]

    test_position(prefix, 1.0, k)
    result: dict[tuple[int, ...], tuple[float, float]] = {}
    for text, chance in ends.items():
        for final, (weight, rounds) in speculative_rounds(text, n, k).items():
            old = result.get(final, (0.0, 0.0))
            result[final] = (old[0] + chance * weight, old[1] + chance * (weight + rounds))
    return result


@pytest.mark.parametrize("k", [1, 2, 3])
def test_expected_rounds_from_text_equals_every_path_of_a_real_run(k: int) -> None:
    n = 4
    run = speculative_rounds((), n, k)
    for text, chance, p, q in texts(n):
        weight, rounds = run[text]
        assert weight == pytest.approx(chance, abs=1e-13)  # the run is lossless
        predicted = theory.expected_rounds_from_text(theory.realised_acceptance(p, q, np.array(text)), k)
        assert rounds / weight == pytest.approx(predicted, abs=1e-12)  # and so is each text's number of rounds


def test_expected_rounds_at_the_edges() -> None:
    ones, zeros = [1.0] * 10, [0.0] * 10
    assert theory.expected_rounds_from_text(ones, 4) == 2.0
    assert theory.expected_rounds_from_text(ones, 100) == 1.0
    assert theory.expected_rounds_from_text(zeros, 4) == 10.0
    assert theory.expected_rounds_from_text([0.3] * 10, 0) == 10.0
    assert theory.accepted_length_from_text(ones, 4).tolist() == [4.0] * 7


def test_expected_rounds_of_a_long_uniform_text_agree_with_tokens_per_round() -> None:
    n = 4000
    rounds = theory.expected_rounds_from_text(torch.full((2, n), 0.6), 3)
    assert rounds.shape == (2,)
    assert n / float(rounds[0]) == pytest.approx(theory.tokens_per_round(0.6, 3), rel=1e-3)


# --- histograms ---------------------------------------------------------------------------------------------------


def test_conditional_acceptance_counts_tested_positions_only() -> None:
    # 10 drafts of 3: 4 accepted none, 3 one, 1 two, 2 all.
    rates = theory.conditional_acceptance_from_histogram([4, 3, 1, 2])
    assert rates.tolist() == [6 / 10, 3 / 6, 2 / 3]
    assert theory.pooled_acceptance_from_histogram([4, 3, 1, 2]) == (6 + 3 + 2) / (10 + 6 + 3)


def test_conditional_acceptance_with_drafts_of_several_lengths_equals_counting() -> None:
    rng = np.random.default_rng(2)
    k, histogram = 4, np.zeros((5, 5))
    tested, accepted = np.zeros(k), np.zeros(k)
    for _ in range(500):
        length = int(rng.integers(0, k + 1))
        n = 0
        while n < length:
            tested[n] += 1
            if rng.random() > 0.7:
                break
            accepted[n] += 1
            n += 1
        histogram[length, n] += 1
    assert theory.conditional_acceptance_from_histogram(histogram).tolist() == (accepted / tested).tolist()
    assert theory.pooled_acceptance_from_histogram(torch.tensor(histogram)) == accepted.sum() / tested.sum()


def test_untested_positions_are_nan_not_zero() -> None:
    assert np.isnan(theory.conditional_acceptance_from_histogram([5, 0, 0])[1])
    assert np.isnan(theory.pooled_acceptance_from_histogram([7]))
    assert theory.conditional_acceptance_from_histogram([7]).shape == (0,)


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: theory.tokens_per_round(1.1, 2), "a"),
        (lambda: theory.tokens_per_round(float("nan"), 2), "a"),
        (lambda: theory.tokens_per_round(0.5, -1), "k"),
        (lambda: theory.accepted_per_round(0.5, 1.5), "k"),
        (lambda: theory.tokens_per_round("high", 1), "a"),
        (lambda: theory.speedup(0.5, 2, -0.1), "c"),
        (lambda: theory.speedup(0.5, 2, float("inf")), "c"),
        (lambda: theory.speedup(0.5, 2, 0.1, -1.0), "v"),
        (lambda: theory.best_k(0.5, 0.1, [0.0, 0.1], k_max=5), "v"),
        (lambda: theory.expected_acceptance([0.5, 0.4], [0.5, 0.5]), "p"),
        (lambda: theory.expected_acceptance([0.5, 0.5], [1.5, -0.5]), "q"),
        (lambda: theory.expected_acceptance([0.5, 0.5], [1.0, 0.0, 0.0]), "p and q"),
        (lambda: theory.expected_acceptance([0.5, 0.5], [0.5, 0.5], "typical"), "rule"),
        (lambda: theory.expected_acceptance([0.5, 0.5], [0.5, 0.5], "match", "beam"), "proposal"),
        (lambda: theory.realised_acceptance([0.5, 0.5], [0.5, 0.5], 2), "tokens"),
        (lambda: theory.realised_acceptance([0.5, 0.5], [0.5, 0.5], [0, 1]), "tokens"),
        (lambda: theory.realised_acceptance([1.0, 0.0], [0.5, 0.5], 1), "tokens"),
        (lambda: theory.accepted_length_from_text([0.5, 0.5], 3), "k"),
        (lambda: theory.accepted_length_from_text([0.5, 1.5], 1), "weights"),
        (lambda: theory.expected_rounds_from_text(0.5, 1), "weights"),
        (lambda: theory.conditional_acceptance_from_histogram([[1, 1], [0, 0]]), "histogram"),
        (lambda: theory.conditional_acceptance_from_histogram([-1, 2]), "histogram"),
    ],
)
def test_bad_input_is_one_line_that_names_the_argument(call: object, named: str) -> None:
    with pytest.raises(SpecdecError) as caught:
        call()  # type: ignore[operator]
    assert str(caught.value).startswith(f"{named}: ")
    assert "\n" not in str(caught.value)


def test_costs_give_the_speedup_and_the_best_length_of_their_c_and_v() -> None:
    costs = theory.Costs(0.1, lambda drafted: 0.02 * drafted)
    tokens = theory.tokens_per_round(0.8, 4)
    assert costs.speedup(tokens, 4, 4) == pytest.approx(theory.speedup(0.8, 4, 0.1, 0.08))
    assert costs.best_k(0.8) == theory.best_k(0.8, 0.1, lambda k: 0.02 * k)
    # Half of the rounds draft: they alone pay for the wide pass.
    assert costs.of_round(2, 4, share=0.5) == pytest.approx(1 + 0.2 + 0.04)
    assert theory.Costs().of_round(7, 7) == 1
