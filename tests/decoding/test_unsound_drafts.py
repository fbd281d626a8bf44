"""Drafts and processors that break their contract are refused in one line; none of them changes the text silently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specdec import Draft, SpecdecError, SpeculativeDecoder
from specdec.research import why_not_equal
from tests.helpers.tiny import tiny_model

V = 16
FLAT = torch.full((1, V), 1 / V)


class Own:
    """Drafts the same thing every time."""

    name = "own"
    makes_trees = True

    def __init__(self, draft: Any):
        self.made = draft

    def begin(self, row: int, prompt: Any) -> None:
        return None

    def draft(self, requests: Sequence[Any]) -> list[Any]:
        return [self.made] * len(requests)

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        return None


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_model("llama", vocab=V), strategies=[], check=False)


def run(decoder: SpeculativeDecoder, draft: Any, **options: Any) -> Any:
    return decoder.generate([[1, 2, 3]] * 3, strategies=[Own(draft)], max_new_tokens=4, **options)


def _without_own() -> torch.Tensor:
    law = torch.full((1, V), 1 / (V - 1))
    law[0, 1] = 0
    return law


LAWS = {
    "negative": -FLAT,
    "no chance for its own token": _without_own(),
    "half": FLAT / 2,
    "double": FLAT * 2,
    "NaN": FLAT * float("nan"),
    "infinite": FLAT * float("inf"),
}


@pytest.mark.fast(6)
@pytest.mark.parametrize("parents", [None, [-1]], ids=["chain", "tree"])
@pytest.mark.parametrize("name", LAWS)
def test_a_q_that_cannot_be_is_refused_where_it_matters(name: str, parents: Any, decoder: SpeculativeDecoder) -> None:
    draft = Draft([1], parents, LAWS[name])
    with pytest.raises(SpecdecError, match="'own' gave a q that its tokens cannot have been sampled from"):
        run(decoder, draft, temperature=0.8)
    for options in ({}, {"temperature": 0.8, "acceptance": "coupled"}):  # tokens are compared: q does not matter
        plain = decoder.generate([[1, 2, 3]] * 3, strategies=[], max_new_tokens=4, **options)
        assert run(decoder, draft, **options).token_ids == plain.token_ids


@pytest.mark.parametrize("token", [-1, V, V + 5])
@pytest.mark.parametrize("parents", [None, [-1, -1]], ids=["chain", "tree"])
def test_ids_outside_the_vocabulary_are_refused_in_tensors_too(
    token: int, parents: Any, decoder: SpeculativeDecoder
) -> None:
    for tokens in (torch.tensor([token, 3]), [token, 3]):
        with pytest.raises(SpecdecError, match="'own' proposed an id outside the target's vocabulary"):
            run(decoder, Draft(tokens, parents))


MALFORMED: dict[str, Draft] = {
    "fractional parent": Draft([1, 2], [-1, 0.5]),  # type: ignore[list-item]
    "floating parents": Draft([1, 2], [-1.0, 0.0]),  # type: ignore[list-item]
    "text as parents": Draft([1, 2], "ab"),  # type: ignore[arg-type]
    "nothing as a parent": Draft([1, 2], [-1, None]),  # type: ignore[list-item]
    "a number as parents": Draft([1], 5),  # type: ignore[arg-type]
    "a list as q": Draft([1], None, [[0.5] * V]),  # type: ignore[arg-type]
    "an array as q": Draft([1], None, np.full((1, V), 1 / V)),  # type: ignore[arg-type]
    "whole numbers as q": Draft([1], None, torch.ones(1, V, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_malformed_drafts_are_named(name: str, temperature: float, decoder: SpeculativeDecoder) -> None:
    with pytest.raises(SpecdecError, match="strategy 'own'"):
        run(decoder, MALFORMED[name], temperature=temperature)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}, {"temperature": 0.8, "acceptance": "coupled"}], ids=str)
def test_a_q_of_another_width_is_refused_under_every_rule(options: Any, decoder: SpeculativeDecoder) -> None:
    with pytest.raises(SpecdecError, match="gave a q over 15 ids, the target has 16"):
        run(decoder, Draft([1], None, torch.full((1, V - 1), 1 / (V - 1))), **options)


def _raises(ids: Any, scores: Any) -> Any:
    raise KeyError("table")


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda ids, scores: scores[:, :5], "returned \\(1, 5\\), expected scores of \\(1, 16\\)"),
        (lambda ids, scores: None, "returned NoneType"),
        (_raises, "_raises failed: KeyError"),
    ],
)
def test_a_processor_that_fails_is_named(processor: Any, message: str, decoder: SpeculativeDecoder) -> None:
    with pytest.raises(SpecdecError, match=message):
        decoder.generate([1, 2, 3], strategies=[], max_new_tokens=2, logits_processor=[processor])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2, 3], [1], [99]), "b holds an id outside the target's vocabulary of 16"),
        (([1, 2, 3], [1], None), "b must be one row of generated ids"),
        (([1, 2, 3], ["x"], [1]), "a must be one row of generated ids"),
        (([], [1], [2]), "takes one prompt, got 0"),
    ],
)
def test_why_not_equal_refuses_what_it_cannot_compare(
    arguments: Any, message: str, decoder: SpeculativeDecoder
) -> None:
    with pytest.raises(SpecdecError, match=message):
        why_not_equal(decoder, *arguments)
    for row in (-1, "x"):
        with pytest.raises(SpecdecError, match="row must be a whole number"):
            why_not_equal(decoder, [1, 2, 3], [1], [2], row=row)  # type: ignore[arg-type]
