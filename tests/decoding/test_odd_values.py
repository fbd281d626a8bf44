"""Processor fields with empty, double, nested and foreign values: transformers' text, or one line that names them."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from specdec import SpecdecError, SpeculativeDecoder
from tests.helpers.tiny import tiny_model

V, N = 32, 10
PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 5], [9]]


@cache
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_model("llama", vocab=V), tiny_model("llama", seed=1, vocab=V), check=False)


def of_transformers(prompt: list[int], options: dict[str, Any]) -> list[int]:
    ids = torch.tensor([prompt])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = decoder().target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=N, do_sample=False, pad_token_id=0, **options
        )
    return out[0, len(prompt) :].tolist()


@cache
def plain() -> list[list[int]]:
    return [of_transformers(prompt, {}) for prompt in PROMPTS]


FIRST, EOS, OTHER = 14, 11, 16  # ids of the plain texts: the first one's first and second, the second one's third


def eos(**options: Any) -> dict[str, Any]:
    return {"eos_token_id": [EOS, OTHER], **options}


EQUAL: list[dict[str, Any]] = [
    *({"bad_words_ids": v} for v in ([[]], [[], [FIRST]], [[FIRST], [FIRST]], [[FIRST], [EOS, 31], [FIRST]])),
    *({"bad_words_ids": v} for v in ([[np.int64(FIRST)]], [[3, FIRST]], [[0] * 20], None)),
    *(eos(bad_words_ids=v) for v in ([[EOS], [FIRST]], [[EOS], [OTHER]], [[OTHER], [FIRST]], [[EOS, OTHER]])),
    *({"sequence_bias": v} for v in (None, {(FIRST,): -9.0}, {(FIRST,): float("-inf")}, [[[], 1.0]])),
    *({"sequence_bias": v} for v in ([[[FIRST], 2.0], [[FIRST], -9.0]], {(np.int64(EOS),): -9.0})),
    {"sequence_bias": {(3, 4, FIRST): -9.0}},
    *({field: v} for field in ("suppress_tokens", "begin_suppress_tokens") for v in (
        [], (), {}, None, [FIRST], [FIRST, FIRST], (FIRST,), {FIRST}, range(FIRST, FIRST + 2), np.array([FIRST]),
        torch.tensor([FIRST, EOS]), torch.tensor([]), [np.int64(FIRST)],
    )),
    *({field: v} for field in ("forced_bos_token_id", "forced_eos_token_id") for v in (
        None, 3, [3], [3, 3], (3, 4), np.int64(3), np.array([3, 4]), torch.tensor(3), torch.tensor([3]), 0,
    )),
    *(eos(exponential_decay_length_penalty=v) for v in (
        None, (2, 1.5), [0, 2.0], (2, 1), (2, 0), (2.5, 1.5), (-1, 1.5), (2, -1.0), (100, 1.5), (2, 1.5, 3),
        np.array([2, 1.5]), torch.tensor([2, 1.5]),
    )),
    *(eos(**{field: v}) for field in ("min_new_tokens", "min_length") for v in (None, 0, 1, 4, 50)),
    {"min_new_tokens": 4}, {"min_length": 20},
    *({"no_repeat_ngram_size": v} for v in (None, 0, 1, 2, 5, 50, 2**40)),
    *({"eos_token_id": v} for v in (
        None, [], EOS, [EOS], [EOS, EOS], (EOS, OTHER), np.int64(EOS), [np.int64(EOS)], np.array([EOS, OTHER]),
        torch.tensor(EOS), torch.tensor([EOS, OTHER]), torch.tensor([]), [torch.tensor(EOS)],
    )),
    *({"eos_token_id": [EOS, EOS, OTHER], "min_new_tokens": 5, field: v} for field, v in (
        ("forced_eos_token_id", [EOS, OTHER]), ("bad_words_ids", [[EOS], [FIRST]]), ("suppress_tokens", [EOS]),
        ("exponential_decay_length_penalty", (1, 1.3)),
    )),
    {"renormalize_logits": None}, {"remove_invalid_values": None},
]  # fmt: skip

REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"bad_words_ids": v}, "bad_words_ids") for v in ([], "", {}, [1, 2], 5, [[[1]]], [["a"]], [[1.0]], [[True]])),
    *(({"bad_words_ids": v}, "bad_words_ids") for v in ([(1, 2)], np.array([[1]]), torch.tensor([[1]]), [[V]], [[-1]])),
    *(({"sequence_bias": v}, "sequence_bias") for v in ({}, [], "", {(1,): 2}, [[[1], 2]], {1: 2.0}, {(): 1.0}, [[]])),
    *(({"sequence_bias": v}, "sequence_bias") for v in ([[[1]]], {(V,): 1.0}, {(-1,): 1.0}, {(1,): float("nan")})),
    ({"sequence_bias": {(1,): float("inf")}}, "sequence_bias"),
    *(({field: v}, field) for field in ("suppress_tokens", "begin_suppress_tokens") for v in (
        "", 3, [[3]], [1.0], [True], ["a"], [V], [-1],
    )),
    *(({field: v}, field) for field in ("forced_bos_token_id", "forced_eos_token_id") for v in (
        "", [], {}, 1.5, True, [[3]], V, -1, torch.tensor([1.5]),
    )),
    *((eos(exponential_decay_length_penalty=v), "exponential_decay_length_penalty") for v in (
        (), [], {}, "", 5, (2,), ("a", 1.5), (2, "a"), (2, float("nan")), (0, 1e300),
    )),
    ({"exponential_decay_length_penalty": (2, 1.5)}, "exponential_decay_length_penalty"),  # without an end
    *(({field: v}, field) for field in ("min_new_tokens", "min_length", "no_repeat_ngram_size") for v in (
        -1, 10**30, 2**63 - 1, 2.0, "3", True, [3], torch.tensor(3), np.array([3, 4]),
    )),
    *(({field: np.array([1, 2])}, field) for field in ("exact", "order", "draft_length")),
    ({"progress": 3}, "progress must be callable"),
    *(({"eos_token_id": v}, "eos_token_id") for v in ("", {}, 1.5, True, -1, V, [EOS, V], [[EOS]])),
    ({"eos_token_id": torch.tensor([1.5])}, "eos_token_id"),
    *(({field: v}, field) for field in ("renormalize_logits", "remove_invalid_values") for v in (1, "", [])),
    *(({field: v}, field) for field in ("typical_p", "top_h") for v in (0, 2, "", [], True)),
]  # fmt: skip


def named(value: Any) -> str:
    return " ".join(str(value).split())


@pytest.mark.fast(36)
@pytest.mark.parametrize("options", EQUAL, ids=named)
def test_the_text_is_transformers_own(options: dict[str, Any]) -> None:
    wanted = [of_transformers(prompt, options) for prompt in PROMPTS]
    out = decoder().generate(PROMPTS, N, strategies=["draft-model:n_max=3"], **{"eos_token_id": None, **options})
    assert out.token_ids == wanted


def test_the_table_looks_at_values_that_change_the_text() -> None:
    assert plain()[0][:2] == [FIRST, EOS]
    assert OTHER in plain()[1]
    for options in (
        {"bad_words_ids": [[], [FIRST]]},
        {"suppress_tokens": [FIRST, FIRST]},
        {"forced_eos_token_id": [3, 3]},
    ):
        assert [of_transformers(prompt, options) for prompt in PROMPTS] != plain()


@pytest.mark.parametrize(("options", "field"), REFUSED, ids=named)
def test_what_cannot_be_done_is_refused_in_one_line(options: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecdecError, match=field) as refused:
        decoder().generate(PROMPTS, N, strategies=["draft-model:n_max=3"], **{"eos_token_id": None, **options})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: hf.SuppressTokensLogitsProcessor([]),
        lambda: hf.SuppressTokensLogitsProcessor([FIRST, -1, V, FIRST]),
        lambda: hf.SuppressTokensAtBeginLogitsProcessor([], 4),
        lambda: hf.SuppressTokensAtBeginLogitsProcessor([FIRST, V], 4),
        lambda: hf.MinLengthLogitsProcessor(6, [EOS, EOS, V]),
        lambda: hf.MinNewTokensLengthLogitsProcessor(4, 3, torch.tensor([EOS, OTHER])),
        lambda: hf.NoBadWordsLogitsProcessor([[], [FIRST]]),
        lambda: hf.SequenceBiasLogitsProcessor([[[], 1.0], [[FIRST], -9.0]]),
        lambda: hf.ForcedEOSTokenLogitsProcessor(8, [3, 3]),
    ],
)
def test_odd_values_in_a_users_own_processors(make: Any) -> None:
    prompts = PROMPTS[:2]
    options = {"eos_token_id": [EOS, OTHER]}
    wanted = [of_transformers(p, {**options, "logits_processor": hf.LogitsProcessorList([make()])}) for p in prompts]
    out = decoder().generate(prompts, N, strategies=["draft-model:n_max=3"], logits_processor=[make()], **options)
    assert out.token_ids == wanted


@pytest.mark.parametrize("allowed", [[[3]], [3, 3], (5,), np.array([3, 4]), torch.tensor([[3], [4]])], ids=str)
def test_what_a_function_of_prefixes_returns_is_read_as_transformers_reads_it(allowed: Any) -> None:
    prompt, options = PROMPTS[0], {"prefix_allowed_tokens_fn": lambda *_: allowed}
    assert decoder().generate(prompt, N, **options).token_ids[0][:N] == of_transformers(prompt, options)[:N]


@pytest.mark.parametrize("allowed", ["x", [-1], [1.5], None, [[1], [2, 3]]], ids=str)
def test_a_function_of_prefixes_that_returns_no_ids_is_named(allowed: Any) -> None:
    with pytest.raises(SpecdecError, match="prefix_allowed_tokens_fn"):
        decoder().generate(PROMPTS[0], 4, prefix_allowed_tokens_fn=lambda *_: allowed)
