"""The engine emits what `specdec/reference.py` says, token for token."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specdec import DraftModel, SpeculativeDecoder, reference
from tests.helpers.playing import random_ids, weaker
from tests.helpers.tiny import tiny_model

NEW = 12
PROMPTS = [random_ids(5, 1, 24), random_ids(11, 2, 24), random_ids(2, 3, 24)]


@cache
def pair() -> tuple[Any, Any]:
    """A target and a draft that is accepted about half of the time."""
    target = tiny_model("llama", vocab=24, num_hidden_layers=2)
    return target, weaker(target, 0.12)


@cache
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(*pair(), check=False)


@cache
def expected(k: int, rule: str, temperature: float, seed: int, eos: tuple[int, ...] = ()) -> list[list[int]]:
    options: dict[str, Any] = {"k": k, "rule": rule, "temperature": temperature, "seed": seed, "eos": eos}
    return [reference.generate(*pair(), prompt, NEW, row=row, **options) for row, prompt in enumerate(PROMPTS)]


def from_engine(k: int, rule: str, temperature: float, seed: int, eos: tuple[int, ...] = (), batch: int = 3) -> Any:
    return decoder().generate(
        PROMPTS, NEW, [DraftModel(n_max=k)], acceptance=rule, temperature=temperature, seed=seed,
        eos_token_id=list(eos) or None, batch_size=batch,
    )  # fmt: skip


@pytest.mark.fast(9)
@pytest.mark.parametrize("rule", ["leviathan", "match", "coupled"])
@pytest.mark.parametrize(("k", "temperature"), [(1, 1.0), (4, 0.7), (7, 1.5), (4, 0.0)])
def test_the_engine_equals_the_reference(rule: str, k: int, temperature: float) -> None:
    assert from_engine(k, rule, temperature, 7).token_ids == expected(k, rule, temperature, 7)


def test_a_round_has_both_rejections_and_acceptances_in_these_tests() -> None:
    stats = from_engine(4, "leviathan", 0.7, 0).stats
    assert 0.2 < stats.draft_acceptance_rate < 0.9
    assert stats.acceptance_histogram[0] > 0
    assert stats.acceptance_histogram[4] > 0


@pytest.mark.fast(3)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rule", ["leviathan", "match", "coupled"])
def test_the_size_of_the_batch_changes_nothing(rule: str, batch: int) -> None:
    assert from_engine(4, rule, 0.7, 3, batch=batch).token_ids == expected(4, rule, 0.7, 3)


@pytest.mark.fast(4)
@pytest.mark.parametrize("rule", ["leviathan", "match", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_eos_inside_an_accepted_block_ends_both(rule: str, temperature: float) -> None:
    full = expected(5, rule, temperature, 1)
    for token in (full[0][3], full[1][7]):
        out = from_engine(5, rule, temperature, 1, eos=(token,))
        assert out.token_ids == [ids[: ids.index(token) + 1] if token in ids else ids for ids in full]
        assert out.token_ids == expected(5, rule, temperature, 1, eos=(token,))


def test_the_reference_fits_on_a_screen() -> None:
    assert len(Path(reference.__file__).read_text().splitlines()) <= 80
