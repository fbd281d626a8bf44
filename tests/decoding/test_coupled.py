"""The acceptance that runs measure is the one that theory computes from p and q, rule by rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec import DraftModel, SpeculativeDecoder, theory
from tests.helpers.laws import small_model
from tests.oracle import oracle_logits

PROMPTS = ([5, 7, 5, 7, 5], [1, 2], [9, 0, 12, 4])
ROWS, TEMPERATURE = 500, 0.8


@pytest.fixture(scope="module")
def shares() -> dict[str, list[tuple[float, float]]]:
    """rule -> (measured, expected) acceptance of the first drafted token after each prompt."""
    target, draft = small_model(3, 13), small_model(1, 13)
    decoder = SpeculativeDecoder(target, draft, strategies=[DraftModel(n_max=1)], check=False)
    found: dict[str, list[tuple[float, float]]] = {}
    for rule in theory.RULES:
        for prompt in PROMPTS:
            out = decoder.generate(
                [list(prompt)] * ROWS, max_new_tokens=2, acceptance=rule, temperature=TEMPERATURE, batch_size=ROWS
            )
            p, q = (
                torch.softmax(oracle_logits(model, prompt)[-1].double() / TEMPERATURE, dim=-1).numpy()
                for model in (target, draft)
            )
            measured = float(np.mean([row[0].accepted for row in out.stats.rows]))
            found.setdefault(rule, []).append((measured, float(theory.expected_acceptance(p, q, rule))))
    return found


def _misfit(shares: dict[str, list[tuple[float, float]]], rule: str, formula: str) -> float:
    """Chi-square over the prompts of what `rule` measured against the formula of `formula`."""
    pairs = zip(shares[rule], shares[formula], strict=True)
    return float(sum((m - e) ** 2 / (e * (1 - e) / ROWS) for (m, _), (_, e) in pairs))


@pytest.mark.full
@pytest.mark.parametrize("rule", theory.RULES)
def test_measured_acceptance_is_that_of_its_own_formula_and_of_no_other(
    rule: str, shares: dict[str, list[tuple[float, float]]]
) -> None:
    critical = 16.3  # the 99.9 % quantile for three prompts
    assert _misfit(shares, rule, rule) < critical
    for other in set(theory.RULES) - {rule}:
        assert _misfit(shares, rule, other) > critical, other


def test_rounds_record_q_under_coupled() -> None:
    target, draft = small_model(3, 13), small_model(1, 13)
    decoder = SpeculativeDecoder(target, draft, check=False)
    rounds = decoder.rounds(PROMPTS[0], max_new_tokens=8, acceptance="coupled", temperature=TEMPERATURE)
    text = list(PROMPTS[0])
    for r in rounds:
        for i in range(len(r.draft)):
            for model, recorded in ((target, r.p), (draft, r.q or [])):
                law = torch.softmax(oracle_logits(model, [*text, *r.draft[:i]])[-1] / TEMPERATURE, dim=-1)
                assert abs(float(law[r.draft[i]]) - recorded[i]) < 1e-4
        text += r.tokens
