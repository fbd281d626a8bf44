"""Synthetic acceptance: the formulas, and that runs accept at the rates asked for and say that they are lossy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import specdec
from specdec import SpecdecError
from specdec.research.models.synthetic import conditional_rates, rates_of_length, synthetic
from tests.helpers.laws import small_model
from tests.helpers.playing import Scripted, check_counts, random_ids

VOCAB = 24
PROMPTS = [random_ids(4, i, VOCAB) for i in range(64)]


def root(k: int, length: float) -> float:
    """p in (0, 1) with p + ... + p^k = length - 1, from the polynomial's roots."""
    found = np.roots([*[1.0] * k, -(length - 1)])
    return float(next(r.real for r in found if abs(r.imag) < 1e-9 and 0 < r.real < 1))


@pytest.mark.parametrize(("k", "length"), [(1, 1.25), (3, 1.001), (4, 2.5), (5, 3.0), (8, 8.9), (16, 6.0)])
def test_rates_are_powers_whose_sum_is_the_length_to_a_bisection_of_32_steps(k: int, length: float) -> None:
    rates = rates_of_length(k, length)
    assert rates[0] == pytest.approx(root(k, length), abs=2.0**-32)
    assert rates == pytest.approx([rates[0] ** (i + 1) for i in range(k)])
    # The midpoint of the 32nd interval: a dyadic number of 33 bits.
    assert math.ldexp(rates[0], 33) == int(math.ldexp(rates[0], 33)) % 2**33


def test_the_ends_are_exact() -> None:
    assert rates_of_length(3, 4.0) == [1.0] * 3
    assert rates_of_length(3, 1.0) == [0.0] * 3


def test_conditional_rates_divide_by_the_rate_before() -> None:
    assert conditional_rates([0.8, 0.4, 0.4, 0.0, 0.0]) == [0.8, 0.5, 1.0, 0.0, 0.0]


def lucky(n: int) -> Scripted:
    """A drafter without any idea: whatever stands, stands by the coin."""
    return Scripted(lambda ids: [(ids[-1] + 1 + i) % VOCAB for i in range(n)])


@pytest.fixture(scope="module")
def decoder() -> specdec.SpeculativeDecoder:
    return specdec.SpeculativeDecoder(small_model(1, VOCAB), check=False)


def run(decoder: specdec.SpeculativeDecoder, rule: Any, drafted: int, **options: Any) -> Any:
    settings = {"max_new_tokens": 48, "batch_size": 64, "temperature": 1.0, **options}
    return decoder.generate(PROMPTS, acceptance=rule, strategies=[lucky(drafted)], **settings)


def test_a_run_accepts_at_the_rates_and_is_marked_lossy(decoder: specdec.SpeculativeDecoder) -> None:
    rates = [0.8, 0.7, 0.3]
    out = run(decoder, synthetic(3, rates=rates), 3)
    check_counts(out)
    assert out.lossy
    assert out.provenance["lossy"] is True
    full = [r for row in out.stats.rows for r in row if r.drafted == 3]
    found = [sum(r.accepted > i for r in full) / len(full) for i in range(3)]
    assert len(full) > 900
    for share, rate in zip(found, rates, strict=True):
        assert abs(share - rate) < 4 * math.sqrt(rate * (1 - rate) / len(full))


@pytest.mark.parametrize("length", [1.0, 2.4, 4.0])
def test_the_mean_round_has_the_length_asked_for(decoder: specdec.SpeculativeDecoder, length: float) -> None:
    out = run(decoder, synthetic(3, length=length), 3, temperature=0.0)
    full = [r.accepted + 1 for row in out.stats.rows for r in row if r.drafted == 3]
    assert abs(np.mean(full) - length) <= 4 * float(np.std(full)) / math.sqrt(len(full))


def test_rates_go_on_in_the_next_pass_of_a_long_draft(decoder: specdec.SpeculativeDecoder) -> None:
    """40 drafted tokens take three passes of 17: the coin of the 35th must be the 35th, not the first again."""
    out = run(decoder, synthetic(40, rates=[1.0] * 34 + [0.0] * 6), 40, max_new_tokens=90)
    assert {r.accepted for row in out.stats.rows for r in row if r.drafted == 40} == {34}


def test_drafts_longer_than_k_fall_behind_it(decoder: specdec.SpeculativeDecoder) -> None:
    out = run(decoder, synthetic(2, length=3.0), 5, max_new_tokens=12)
    assert {r.accepted for row in out.stats.rows for r in row if r.drafted == 5} == {2}


def test_a_tree_is_refused(decoder: specdec.SpeculativeDecoder) -> None:
    model = decoder.target.model
    trees = specdec.SpeculativeDecoder(model, model, strategies=[specdec.DraftModel(tree="2x1")], check=False)
    with pytest.raises(SpecdecError, match="'synthetic' judges chains only"):
        trees.generate(PROMPTS[0], acceptance=synthetic(3, length=2.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0, "length": 1.0}, "k must be a whole number >= 1"),
        ({"k": 3}, "length or rates"),
        ({"k": 3, "length": 2.0, "rates": [1.0, 1.0, 1.0]}, "length or rates"),
        ({"k": 3, "length": 4.5}, "between 1 and 4"),
        ({"k": 3, "length": 0.5}, "between 1 and 4"),
        ({"k": 3, "rates": [0.5, 0.5]}, "2 rates for k=3"),
        ({"k": 2, "rates": [0.5, 0.6]}, "must not rise"),
        ({"k": 2, "rates": [1.5, 0.6]}, r"in \[0, 1\]"),
        ({"k": 2, "rates": [float("nan"), 0.6]}, r"in \[0, 1\]"),
    ],
)
def test_what_has_no_meaning_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecdecError, match=message):
        synthetic(**arguments)
