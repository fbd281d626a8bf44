"""Intervals cover what they say, pairing narrows them, and the test keeps its level."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import t as student

from specdec.errors import SpecdecError
from specdec.research.bootstrap import (
    difference,
    median,
    ratio,
    ratio_of_ratios,
    swap_test,
    t_quantile,
)

RATE = 0.7  # tokens accepted of those tested
CLUSTERS, PER_CLUSTER, TRIALS = 12, 12, 300


def trial(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Accepted and tested tokens of 12 prompts, each with an acceptance of its own around 0.7 [12, 12]."""
    own = rng.beta(RATE * 5, (1 - RATE) * 5, size=CLUSTERS)
    tested = rng.integers(1, 6, size=(CLUSTERS, PER_CLUSTER))
    return rng.binomial(tested, own[:, None]), tested


def coverage(per_round: bool) -> float:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(TRIALS):
        top, bottom = trial(rng)
        entries = (top.ravel(), bottom.ravel()) if per_round else (top.sum(1), bottom.sum(1))
        found = ratio(*(entry.tolist() for entry in entries))
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= RATE <= found.high
    return hits / TRIALS


def test_intervals_over_prompts_cover_and_intervals_over_rounds_do_not() -> None:
    """The wrong unit is the negative control: rounds of a prompt resemble each other."""
    assert 0.91 < coverage(per_round=False) < 0.98
    assert coverage(per_round=True) < 0.75


def test_a_figure_is_pooled_and_not_a_mean_of_ratios() -> None:
    assert ratio([1, 9], [10, 10]).value == pytest.approx(0.5)
    assert ratio([1, 90], [10, 100]).value == pytest.approx(91 / 110)


def test_pairing_takes_out_what_a_prompt_does_to_both() -> None:
    """Prompts differ fourfold in speed, settings by a tenth: seen in the paired interval, lost in unpaired ones."""
    rng = np.random.default_rng(1)
    seconds = rng.uniform(1, 4, size=20)
    tokens = [100.0] * 20
    slow, fast = seconds.tolist(), (seconds / 1.1 * rng.normal(1, 0.01, size=20)).tolist()
    found = ratio_of_ratios((tokens, fast), (tokens, slow))
    assert found.value == pytest.approx(1.1, rel=0.02)
    assert found.low is not None
    assert found.low > 1.05
    a, b = ratio(tokens, fast), ratio(tokens, slow)
    assert a.low is not None
    assert b.high is not None
    assert a.low < b.high
    gap = difference((tokens, fast), (tokens, slow))
    assert gap.low is not None
    assert gap.low > 0


def test_equal_settings_differ_by_exactly_nothing() -> None:
    side = ([3.0, 5.0, 8.0], [2.0, 2.0, 4.0])
    assert difference(side, side).to_dict() == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert ratio_of_ratios(side, side).to_dict() == {"value": 1.0, "low": 1.0, "high": 1.0}


def flipped(differences: list[float], **options: int) -> float | None:
    """Of differences, each over one: swapping flips their signs."""
    one = [1.0] * len(differences)
    return swap_test((differences, one), ([0.0] * len(differences), one), **options)


def test_the_exact_test_is_the_enumeration() -> None:
    d = [0.3, -0.1, 0.5, 0.2, 0.4]
    signs = list(itertools.product((-1, 1), repeat=5))
    expected = sum(abs(sum(s * x for s, x in zip(sign, d, strict=True))) >= 1.3 - 1e-9 for sign in signs) / len(signs)
    assert flipped(d) == pytest.approx(expected)
    assert flipped([1.0, 1.0, 1.0, 1.0]) == pytest.approx(2 / 16)


@pytest.mark.parametrize("n", [8, 25])
def test_the_test_keeps_its_level_and_sees_a_difference(n: int) -> None:
    """Exact with 8 clusters, from random flips with 25."""
    rng = np.random.default_rng(2)
    level = np.mean([flipped(rng.normal(0, 1, n).tolist(), draws=500) <= 0.1 for _ in range(200)])  # type: ignore[operator]
    power = np.mean([flipped(rng.normal(1.5, 1, n).tolist(), draws=500) <= 0.1 for _ in range(100)])  # type: ignore[operator]
    assert 0.03 < level < 0.17
    assert power > 0.9


def test_what_cannot_be_known_is_none() -> None:
    assert ratio([1.0], [2.0]).to_dict() == {"value": 0.5, "low": None, "high": None}
    assert ratio([0.0, 0.0], [0.0, 0.0]).value is None
    assert flipped([1.0]) is None
    assert swap_test(([1.0, 0.0], [2.0, 0.0]), ([1.0, 0.0], [3.0, 0.0])) is None


def test_the_test_and_the_interval_are_of_the_same_pooled_difference() -> None:
    """One prompt with 22 of 27, one with 3 of 3, one with 0 of 3, and one that only one setting has counted."""
    a, b = ([22.0, 3.0, 0.0, 1.0], [27.0, 3.0, 3.0, 2.0]), ([9.0, 3.0, 1.0, 0.0], [27.0, 3.0, 3.0, 0.0])
    expected = []
    for swaps in itertools.product((False, True), repeat=4):
        sides = np.array([a, b])  # [settings, counts, clusters]
        sides[:, :, swaps] = sides[::-1, :, swaps]
        left, right = (tops.sum() / bottoms.sum() for tops, bottoms in sides)
        expected.append(abs(left - right))
    assert expected[0] == pytest.approx(difference(a, b).value)
    assert swap_test(a, b) == pytest.approx(np.mean([e >= expected[0] - 1e-12 for e in expected]))
    assert swap_test(a, a) == 1.0


def test_other_clusters_are_refused() -> None:
    with pytest.raises(SpecdecError, match="same clusters"):
        difference(([1.0], [1.0]), ([1.0, 2.0], [1.0, 1.0]))
    with pytest.raises(SpecdecError, match="one numerator"):
        ratio([], [])
    with pytest.raises(SpecdecError, match="level"):
        ratio([1.0, 2.0], [1.0, 1.0], level=95)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 12, 39, 40, 479, 10_000])
@pytest.mark.parametrize("probability", [0.6, 0.95, 0.975, 0.9995])
def test_the_quantiles_are_students(degrees: int, probability: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(student.ppf(probability, degrees), rel=1e-9)


def test_intervals_of_medians_cover_and_one_outlier_moves_no_median() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(TRIALS):
        found = median((3.0 + rng.standard_normal(9)).tolist())
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 3.0 <= found.high
    assert 0.91 < hits / TRIALS <= 1.0
    assert median([1.0, 1.1, 0.9, 1.0, 50.0]).value == 1.0
    assert (median([2.0]).value, median([2.0]).low) == (2.0, None)
    assert median([1.0, float("nan")]).value is None
    with pytest.raises(SpecdecError, match="one value a repeat"):
        median([])
