"""Bad values of options and malformed drafts are one line that names the culprit, never a raw exception."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import specdec
from specdec.errors import SpecdecError
from tests.helpers.tiny import tiny_model

VOCAB = 128


@pytest.fixture(scope="module")
def decoder() -> specdec.SpeculativeDecoder:
    return specdec.SpeculativeDecoder(tiny_model("llama", vocab=VOCAB))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words_ids", [[VOCAB]]),
        ("bad_words_ids", "a"),
        ("bad_words_ids", []),
        ("sequence_bias", {(VOCAB,): 1.0}),
        ("sequence_bias", [[[1, VOCAB], 1.0]]),
        ("forced_eos_token_id", VOCAB),
        ("forced_bos_token_id", -1),
        ("suppress_tokens", [1, VOCAB]),
        ("begin_suppress_tokens", [VOCAB]),
        ("eos_token_id", VOCAB),
        ("exponential_decay_length_penalty", (2, 1.1)),  # the model has no EOS to favour
    ],
)
def test_a_bad_processor_field_is_named_before_any_pass(
    decoder: specdec.SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    monkeypatch.setattr(decoder.target, "step", None)  # a pass would fail with another error
    with pytest.raises(SpecdecError, match=name) as caught:
        decoder.generate([1, 2, 3], max_new_tokens=4, **{name: value})
    assert "\n" not in str(caught.value)


class Returning:
    """A strategy that returns whatever it was made with."""

    name = "returning"

    def __init__(self, value: Any):
        self.value = value

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        return None

    def draft(self, requests: Sequence[specdec.DraftRequest]) -> Any:
        return self.value

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        return None


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [None],
        [[1, 2]],
        [specdec.Draft([1]), specdec.Draft([1])],
        [specdec.Draft([1.5])],  # type: ignore[list-item]
        [specdec.Draft(torch.tensor([[1, 2]]))],
        [specdec.Draft(torch.tensor([1.0]))],
        [specdec.Draft([1], q=torch.ones(VOCAB))],
        [specdec.Draft([1, 2], q=torch.ones(1, VOCAB))],
        [specdec.Draft([1], q=torch.ones(1, VOCAB - 3))],
        [specdec.Draft([VOCAB])],
    ],
    ids=repr,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_malformed_draft_names_its_strategy_and_leaves_the_decoder_usable(
    decoder: specdec.SpeculativeDecoder, value: Any, temperature: float
) -> None:
    options = {"max_new_tokens": 6, "temperature": temperature}
    with pytest.raises(SpecdecError, match="returning"):
        decoder.generate([1, 2, 3], strategies=[Returning(value)], **options)
    assert len(decoder.generate([1, 2, 3], **options).token_ids[0]) == 6


@pytest.mark.parametrize("value", [5, {"": "x"}, {"a": 1}, {1: "a"}])
def test_replacements_must_map_text_to_text(value: Any) -> None:
    with pytest.raises(SpecdecError, match="replacements"):
        specdec.DraftModel(translate=True, replacements=value)


def test_replacements_without_translation_are_refused() -> None:
    with pytest.raises(SpecdecError, match="translate=True"):
        specdec.DraftModel(replacements={"a": "b"})


@pytest.mark.parametrize("thing", [None, "demo-target", 3])
def test_what_is_no_model_is_named(thing: Any) -> None:
    with pytest.raises(SpecdecError, match="from_pretrained"):
        specdec.SpeculativeDecoder(thing)


@pytest.mark.parametrize("thing", [None, 3, ""])
def test_what_is_no_source_is_named(thing: Any) -> None:
    with pytest.raises(SpecdecError, match="hub id"):
        specdec.SpeculativeDecoder.from_pretrained(thing)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"exact": "no"}, "exact"),
        ({"fuse": "no"}, "fuse"),
        ({"strategies": ["draft-model"]}, "needs a draft"),
        ({"dtyp": 1}, "dtype"),
    ],
)
def test_options_are_refused_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], match: str
) -> None:
    def load(*arguments: Any, **options: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load)
    with pytest.raises(SpecdecError, match=match):
        specdec.SpeculativeDecoder.from_pretrained("demo-target", **options)


def test_numpy_seeds_and_the_name_none_are_understood(decoder: specdec.SpeculativeDecoder) -> None:
    options = {"max_new_tokens": 8, "temperature": 1.0, "acceptance": "match"}
    expected = decoder.generate([1, 2, 3], seed=3, **options).token_ids
    assert decoder.generate([1, 2, 3], seed=np.int64(3), **options).token_ids == expected
    assert decoder.generate([1, 2, 3], seed=3, strategies="none", **options).token_ids == expected
