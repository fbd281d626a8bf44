"""The losses: each against its formula in float64, renormalisation, masks, and what is measured."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specdec.training.losses import LOSSES, TargetDistribution, masked_mean

V, IDS = 9, torch.tensor([0, 2, 3, 7])


def softmax(row: list[float]) -> list[float]:
    total = math.fsum(math.exp(x) for x in row)
    return [math.exp(x) / total for x in row]


FORMULAS = {
    "forward-kl": lambda p, q: math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)),
    "reverse-kl": lambda p, q: math.fsum(b * math.log(b / a) for a, b in zip(p, q, strict=True)),
    "tv": lambda p, q: math.fsum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
    "acceptance": lambda p, q: -math.log(math.fsum(map(min, p, q))),
}


def logits(seed: int, *shape: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_formula(name: str) -> None:
    target, draft = logits(0, 5, V), logits(1, 5, V)
    found = LOSSES[name](target.log_softmax(-1), draft.log_softmax(-1))
    expected = [FORMULAS[name](softmax(t), softmax(d)) for t, d in zip(target.tolist(), draft.tolist(), strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_least_where_both_agree_and_descends_to_it(name: str) -> None:
    target = logits(0, 1, V).float()
    draft = logits(1, 1, V).float().requires_grad_(True)
    optimizer = torch.optim.Adam([draft], 0.1)
    for _ in range(300):
        optimizer.zero_grad()
        loss = LOSSES[name](target.log_softmax(-1), draft.log_softmax(-1)).sum()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.02
    torch.testing.assert_close(draft.softmax(-1), target.softmax(-1), atol=0.02, rtol=0)


def test_no_overlap_at_all_gives_a_finite_loss_and_gradient() -> None:
    draft = torch.tensor([[0.0, 200.0]], requires_grad=True)
    loss = LOSSES["acceptance"](torch.tensor([[200.0, 0.0]]).log_softmax(-1), draft.log_softmax(-1)).sum()
    loss.backward()
    assert loss.isfinite()
    assert draft.grad is not None
    assert draft.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_with_a_draft_vocabulary_p_is_renormalised_over_it(name: str) -> None:
    target, draft = logits(2, 1, 6, V).float(), logits(3, 1, 4, len(IDS)).float()
    found = TargetDistribution(target, IDS, 1.0).losses(name, draft, first=1)
    for i in range(4):
        expected = FORMULAS[name](softmax(target[0, 1 + i, IDS].tolist()), softmax(draft[0, i].tolist()))
        assert found[0, i].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_positions_whose_best_token_has_no_draft_id_are_outside() -> None:
    target = torch.zeros(1, 3, V)
    target[0, 0, 2] = target[0, 1, 4] = target[0, 2, 7] = 1.0
    assert TargetDistribution(target, IDS, 1.0).inside.tolist() == [[True, False, True]]
    assert TargetDistribution(target, None, 1.0).inside.all()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_expected_acceptance_counts_the_whole_p(temperature: float) -> None:
    target, draft = logits(4, 1, 2, V), logits(5, 1, 2, len(IDS))
    found = TargetDistribution(target, IDS, temperature).expected_acceptance(draft, 0)
    for i in range(2):
        p = softmax([x / temperature for x in target[0, i].tolist()])
        q = softmax([x / temperature for x in draft[0, i].tolist()])
        expected = math.fsum(min(p[int(t)], q[n]) for n, t in enumerate(IDS))
        assert found[0, i].item() == pytest.approx(expected, rel=1e-5)


def test_greedy_acceptance_is_agreement_of_the_best_tokens() -> None:
    target, draft = torch.zeros(1, 2, V), torch.zeros(1, 2, len(IDS))
    target[0, 0, 3] = target[0, 1, 3] = 1.0
    draft[0, 0, 2] = draft[0, 1, 1] = 1.0  # the target ids 3 and 2
    assert TargetDistribution(target, IDS, 0.0).expected_acceptance(draft, 0).tolist() == [[1.0, 0.0]]


def test_a_masked_mean_ignores_what_is_masked_and_is_0_of_nothing() -> None:
    values, mask = torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([True, False, True])
    assert masked_mean(values, mask).item() == 2
    assert masked_mean(values, torch.zeros(3, dtype=torch.bool)).item() == 0
