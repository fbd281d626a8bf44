"""Losslessness beside test_laws.py: chunks, drafts that are the target, wrong drafters, and one text for one seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specdec import SpecdecError, SpeculativeDecoder
from specdec.decoding.acceptance import AcceptanceRule
from specdec.decoding.result import Generation
from specdec.drafters import DraftModel, NgramSimple, PromptLookup
from specdec.models.runner import Shapes
from tests.helpers.broken import CUTS_OUTSIDE, FAULTS, SampledDrafter
from tests.helpers.laws import Fit, cell, check_fit, fit, samples, small_model, three_token_law, three_tokens

V = 13
PROMPT = [5, 7, 5, 7, 5]  # repeats, so that prompt lookup drafts from the first round on
SAMPLES, CONTROL_SAMPLES = samples(8_000, 3_000), 3_000
LOOKUP_THEN_MODEL = (PromptLookup(n_max=2), DraftModel(n_max=2))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Passes of a tiny model are faster on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _decoder(draft: Any = None) -> SpeculativeDecoder:
    return SpeculativeDecoder(small_model(3, V), draft, strategies=[], check=False)


def _sample(draft: Any, strategies: Any, n: int, **options: Any) -> Generation:
    return three_tokens(_decoder(draft), PROMPT, n, strategies=list(strategies), **options)


def _fit(out: Generation, temperature: float = 0.8, **law: float) -> Fit:
    return fit(cell(out.token_ids, V), three_token_law(small_model(3, V), PROMPT, temperature, **law))


@pytest.mark.law
@pytest.mark.full
def test_draft_equal_to_the_target_follows_the_targets_law_and_always_stands(record_property: Any) -> None:
    target = small_model(3, V)
    out = _sample(target, [DraftModel(n_max=2)], SAMPLES, acceptance="leviathan")
    check_fit(_fit(out), record_property)
    assert out.stats.accepted_tokens >= out.stats.draft_tokens - 2  # passes of other shapes differ by 1e-6


@pytest.mark.law
@pytest.mark.full
def test_drafts_verified_in_chunks_follow_the_targets_law(
    monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """Two fed tokens a pass: a draft of four goes over three passes, its q with it."""
    chunked = Shapes((*range(1, 18),), 2, 32)
    monkeypatch.setattr(Shapes, "choose", staticmethod(lambda *_: chunked))
    out = _sample(small_model(1, V), [DraftModel(n_max=4)], SAMPLES // 2, acceptance="leviathan", max_new_tokens=5)
    check_fit(_fit(out), record_property)
    assert out.stats.verify_passes > 3 * SAMPLES / 2 / 500


# -- negative controls: the test above must reject each of these -----------------------------------------------------


@pytest.mark.law
@pytest.mark.fast(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_drafter_is_rejected(fault: str, record_property: Any) -> None:
    draft = _flat(V) if fault == "reuses-noise" else small_model(1, V)
    result = _control([SampledDrafter(draft, V, fault)], n=3 * CONTROL_SAMPLES if fault == "reuses-noise" else None)
    check_fit(result, record_property, holds=False)


def test_a_draft_cut_at_ids_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(SpecdecError, match="gave a q that its tokens cannot have been sampled from"):
        _control([SampledDrafter(small_model(1, V + 4), V, CUTS_OUTSIDE)], n=50)


@pytest.mark.fast(1)
@pytest.mark.parametrize(("vocab", "keyed"), [(V, False), (V + 4, False), (V, True)])
def test_the_controls_drafter_is_lossless_without_its_fault(vocab: int, keyed: bool) -> None:
    result = _control([SampledDrafter(_flat(vocab) if keyed else small_model(1, vocab), V, keyed=keyed)])
    assert result.holds, str(result)


def _flat(vocab: int) -> Any:
    """A draft with the same law everywhere: reused numbers then propose the very same token again."""
    model = small_model(1, vocab)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    return model


def _control(strategies: Any, rule: AcceptanceRule | str = "leviathan", n: int | None = None) -> Fit:
    result = _fit(_sample(small_model(1, V), strategies, n or CONTROL_SAMPLES, acceptance=rule))
    print(result)
    return result


def test_the_statistic_accepts_exact_samples_and_rejects_a_law_three_percent_off() -> None:
    import numpy as np

    law = three_token_law(small_model(3, V), PROMPT, 0.8)
    other = three_token_law(small_model(1, V), PROMPT, 0.8)
    rng = np.random.default_rng(3)
    assert fit(rng.choice(V**3, SAMPLES, p=law), law).holds
    mixed = 0.96 * law + 0.04 * other
    assert np.abs(mixed - law).sum() / 2 == pytest.approx(0.032, abs=1e-3)
    assert not fit(rng.choice(V**3, 8_000, p=mixed), law).holds
    top = three_token_law(small_model(3, V), PROMPT, 0.8, top_k=3)
    outside = int(np.flatnonzero(top == 0)[0])
    assert not fit(np.append(rng.choice(V**3, SAMPLES, p=top), outside), top).holds


# -- one seed, one text ----------------------------------------------------------------------------------------------

PROMPTS = [[5, 7, 5, 7, 5], [1], [2, 3, 4, 2, 3], [9, 9, 9], [0, 12, 6, 3, 8, 1, 0, 12], [4, 4]]
DRAFTERS = {
    "model": [DraftModel(n_max=5)],
    "model with p_min": [DraftModel(n_max=6, p_min=0.25, n_min=2)],
    "lookup": [PromptLookup()],
    "ngram": [NgramSimple(size_n=1, size_m=4)],
    "lookup then model": [PromptLookup(ngram_min=2), DraftModel(n_max=3)],
    "a drafter that claims q": [SampledDrafter(small_model(2, V), V)],
}


@pytest.mark.fast(5, full=10)
@pytest.mark.parametrize("cuts", [{}, {"top_k": 6, "top_p": 0.9}], ids=["plain", "cut"])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("acceptance", ["match", "coupled"])
def test_match_and_coupled_give_plain_decodings_text_whatever_the_drafter(
    acceptance: str, name: str, cuts: dict[str, Any]
) -> None:
    options = {"acceptance": acceptance, "temperature": 0.9, "seed": 11, "max_new_tokens": 30, **cuts}
    decoder = _decoder(small_model(4, V))
    plain = decoder.generate(PROMPTS, strategies=[], **options)
    out = decoder.generate(PROMPTS, strategies=DRAFTERS[name], **options)
    assert out.token_ids == plain.token_ids
    assert out.stats.accepted_tokens > 0
    assert decoder.generate(PROMPTS, strategies=[], **{**options, "acceptance": "leviathan"}).token_ids == (
        plain.token_ids
    )


@pytest.mark.fast(1)
@pytest.mark.parametrize("acceptance", ["match", "leviathan", "coupled"])
def test_a_row_does_not_depend_on_neighbours_batch_size_or_order(acceptance: str) -> None:
    decoder = _decoder(small_model(1, V))
    seeds = [3, 3, -1, 2**70, 0, 5]

    def run(order: list[int], batch: int) -> dict[int, list[int]]:
        out = decoder.generate(
            [PROMPTS[i] for i in order], strategies=LOOKUP_THEN_MODEL, acceptance=acceptance, temperature=0.8,
            seed=[seeds[i] for i in order], batch_size=batch, max_new_tokens=24,
        )  # fmt: skip
        return dict(zip(order, out.token_ids, strict=True))

    expected = run(list(range(6)), 6)
    for order, batch in (([5, 4, 3, 2, 1, 0], 6), ([2, 0, 5, 1, 4, 3], 2), ([3, 1], 2)):
        got = run(order, batch)
        assert got == {i: expected[i] for i in order}
    for i in range(6):
        alone = decoder.generate(
            PROMPTS[i], strategies=LOOKUP_THEN_MODEL, acceptance=acceptance, temperature=0.8, seed=seeds[i],
            max_new_tokens=24,
        )  # fmt: skip
        assert alone.token_ids[0] == expected[i]


@pytest.mark.fast(1)
@pytest.mark.parametrize("acceptance", ["match", "leviathan", "coupled"])
def test_seeds_repeat_and_differ_as_documented(acceptance: str) -> None:
    decoder = _decoder(small_model(1, V))

    def run(prompts: Any, **options: Any) -> Generation:
        return decoder.generate(
            prompts,
            strategies=[DraftModel(n_max=5)],
            acceptance=acceptance,
            temperature=0.8,
            max_new_tokens=20,
            **options,
        )

    same = [PROMPT] * 5
    first = run(same, seed=4).token_ids
    assert run(same, seed=4).token_ids == first
    assert run(same, seed=5).token_ids != first
    assert len({tuple(row) for row in first}) == 5  # row i is keyed (s, i)
    assert run(same[:3], seed=4).token_ids == first[:3]
    assert run(PROMPT, seed=4, num_return_sequences=5).token_ids == first
    unseeded = run(same, seed=None)
    again = run(same, seed=None)
    assert len({tuple(row) for row in unseeded.token_ids + again.token_ids}) == 10
    assert run(same, seed=unseeded.provenance["seed"]).token_ids == unseeded.token_ids
