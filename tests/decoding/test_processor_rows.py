"""Processors that know their row or their batch do what they do in transformers' generate, whatever the slots."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as hf

from specdec import SpecdecError, SpeculativeDecoder
from tests.helpers.playing import check_counts, random_ids
from tests.helpers.tiny import tiny_model

V, N, LENGTH = 32, 8, 6
PROMPTS = [random_ids(LENGTH, i, V) for i in range(1, 5)]  # of one length: transformers' padding has no part in this
ROWS = len(PROMPTS)
CHAINS: list[Any] = [[], ["prompt-lookup:ngram_max=1", "draft-model:n_max=3"]]


@cache
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_model("llama", vocab=V), tiny_model("llama", seed=1, vocab=V), check=False)


class Index(hf.LogitsProcessor):
    """Row i may not write ids that leave the rest i modulo the number of rows."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for i in range(input_ids.shape[0]):
            scores[i, i :: input_ids.shape[0]] = float("-inf")
        return scores


class Table(hf.LogitsProcessor):
    """A bias for each row."""

    def __init__(self) -> None:
        self.bias = 4 * torch.randn(ROWS, V, generator=torch.Generator().manual_seed(0))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.bias


class Late(hf.LogitsProcessor):
    """Row i is forced to id i from its fourth token on: nothing tells rows apart before."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] < LENGTH + 3:
            return scores
        rows = torch.arange(len(scores))[:, None]
        return torch.where(torch.arange(V) == rows, scores, float("-inf"))


class Lengths(hf.LogitsProcessor):
    """Row i may not write even ids before it has 2 i tokens."""

    def __init__(self) -> None:
        self.least = LENGTH + 2 * torch.arange(ROWS)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        early = input_ids.shape[1] < self.least
        return scores.masked_fill(early[:, None] & (torch.arange(V) % 2 == 0), float("-inf"))


class Own(hf.PrefixConstrainedLogitsProcessor):
    """A subclass, whose call may be anything."""


def by_row(row: int, ids: torch.Tensor) -> list[int]:
    return list(range(5 * row, 5 * row + 7))


def function(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores - 9.0 * torch.nn.functional.one_hot(torch.arange(len(scores)) + 3, V)


def encoder_ids() -> torch.Tensor:
    return torch.tensor([random_ids(3, 20 + i, V) for i in range(ROWS)])


PROCESSORS: dict[str, Any] = {
    "prefixes": lambda: hf.PrefixConstrainedLogitsProcessor(by_row, 1),
    "prefixes, two beams": lambda: hf.PrefixConstrainedLogitsProcessor(by_row, 2),
    "prefixes, a subclass": lambda: Own(by_row, 1),
    "prefixes, allowed as a mask": lambda: hf.PrefixConstrainedLogitsProcessor(
        lambda row, ids: torch.arange(V) % ROWS == row, 1
    ),
    "an index": Index,
    "a table": Table,
    "late": Late,
    "lengths": Lengths,
    "a function": lambda: function,
    "repetition of padded prompts": lambda: hf.RepetitionPenaltyLogitsProcessor(9.0, torch.tensor([0, 3, 5, 6])),
    "encoder repetition": lambda: hf.EncoderRepetitionPenaltyLogitsProcessor(0.1, encoder_ids()),
    "encoder n-grams": lambda: hf.EncoderNoRepeatNGramLogitsProcessor(1, encoder_ids()),
}


def of_transformers(rows: list[list[int]], **options: Any) -> list[list[int]]:
    ids = torch.tensor(rows)
    out = decoder().target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=N, do_sample=False, pad_token_id=0, **options
    )
    return out[:, LENGTH:].tolist()


def processors(*made: Any) -> hf.LogitsProcessorList:
    return hf.LogitsProcessorList(made)


@pytest.mark.fast(5)
@pytest.mark.parametrize("name", PROCESSORS)
def test_every_row_is_treated_as_in_transformers(name: str) -> None:
    make = PROCESSORS[name]
    wanted = of_transformers(PROMPTS, logits_processor=processors(make()))
    assert wanted != of_transformers(PROMPTS)
    for chain, batch in ((CHAINS[0], None), (CHAINS[1], 1), (CHAINS[1], 3)):  # fewer slots than rows: a queue
        own = processors(make())
        out = decoder().generate(PROMPTS, N, strategies=chain, batch_size=batch, logits_processor=own)
        assert out.token_ids == wanted, (chain, batch)
        check_counts(out)


@pytest.mark.parametrize("rule", ["leviathan", "match"])
def test_returned_sequences_have_rows_of_their_own(rule: str) -> None:
    for own in (hf.PrefixConstrainedLogitsProcessor(lambda row, ids: [10 + row], 1), OnlyIts()):
        out = decoder().generate(
            PROMPTS[:2], 3, strategies=["draft-model:n_max=2"], num_return_sequences=2, temperature=1.0, batch_size=3,
            logits_processor=processors(own), acceptance=rule,
        )  # fmt: skip
        assert out.token_ids == [[10 + row] * 3 for row in range(4)]


class OnlyIts(hf.LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(V) == 10 + torch.arange(len(scores))[:, None], 0.0, float("-inf"))


def test_a_users_own_processor_takes_the_place_of_an_options_with_a_warning() -> None:
    even = lambda row, ids: list(range(0, V, 2))  # noqa: E731
    twice: dict[str, Any] = {
        "PrefixConstrained": ({"prefix_allowed_tokens_fn": by_row}, hf.PrefixConstrainedLogitsProcessor(even, 1)),
        "RepetitionPenalty": ({"repetition_penalty": 1.1}, hf.RepetitionPenaltyLogitsProcessor(9.0)),
        "SuppressTokens": ({"suppress_tokens": [1]}, hf.SuppressTokensLogitsProcessor(list(range(16)))),
        "NoRepeatNGram": ({"no_repeat_ngram_size": 3}, hf.NoRepeatNGramLogitsProcessor(1)),
    }
    for name, (options, own) in twice.items():
        wanted = of_transformers(PROMPTS, logits_processor=processors(own), **options)
        with pytest.warns(UserWarning, match=f"logits_processor has a {name}LogitsProcessor") as said:
            out = decoder().generate(PROMPTS, N, strategies=CHAINS[1], logits_processor=processors(own), **options)
        assert out.token_ids == wanted, name
        assert len(said) == 1


def test_beams_that_do_not_divide_the_rows_are_refused() -> None:
    own = processors(hf.PrefixConstrainedLogitsProcessor(by_row, 3))
    with pytest.raises(SpecdecError, match="num_beams=3 does not divide the 4 rows of the call"):
        decoder().generate(PROMPTS, N, logits_processor=own)


def test_a_processor_can_say_that_it_knows_its_row() -> None:
    class Hidden(hf.LogitsProcessor):
        """Rows differ after one text only, which no trial meets."""

        by_row = True

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == LENGTH + 2:
                scores[1, :20] = float("-inf")
            return scores

    wanted = of_transformers(PROMPTS, logits_processor=processors(Hidden()))
    assert decoder().generate(PROMPTS, N, strategies=[], logits_processor=processors(Hidden())).token_ids == wanted


def test_a_processor_that_treats_rows_alike_sees_one_row() -> None:
    class Witness(hf.LogitsProcessor):
        prefix_only = True

        def __init__(self) -> None:
            self.shapes: list[int] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.shapes.append(len(input_ids))
            return scores - scores.logsumexp(-1, keepdim=True)

    witness = Witness()
    decoder().generate(PROMPTS, N, strategies=[], logits_processor=[witness])
    assert set(witness.shapes) == {1}
