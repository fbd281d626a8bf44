"""Torch's ambient modes around a call: the same text, no mode changed, and nothing left that breaks later calls."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import specdec
from specdec.drafters import DraftModel
from tests.helpers.playing import generated_by_transformers, quoting_ids, weaker
from tests.helpers.tiny import tiny_model

PROMPTS = [quoting_ids(14, 0), quoting_ids(9, 1)]
PROCESSORS: dict[str, Any] = {
    "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "no_repeat_ngram_size": 3,
    "bad_words_ids": [[5, 6], [7]], "min_new_tokens": 3, "eos_token_id": 9, "suppress_tokens": [11],
    "exponential_decay_length_penalty": (4, 1.1), "sequence_bias": {(3,): 1.5, (4, 8): -2.0},
}  # fmt: skip
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.95, "seed": 5}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def strict_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def nested_autocast() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", dtype=torch.float16):
        yield


@contextlib.contextmanager
def everything() -> Iterator[None]:
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    with torch.inference_mode(), autocast, default_dtype(torch.bfloat16), torch.device("meta"):
        yield


MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
    "set_grad": lambda: torch.set_grad_enabled(True),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast, nested": nested_autocast,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "device meta": lambda: torch.device("meta"),
    "default device meta": lambda: default_device("meta"),
    "default device cpu": lambda: default_device("cpu"),
    "deterministic": deterministic,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "matmul precision": lambda: precision("high"),
    "sdpa": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "numpy errors": lambda: np.errstate(all="raise"),
    "warnings": strict_warnings,
    "everything": everything,
}


def ambient() -> tuple[Any, ...]:
    """The modes as they are."""
    return (
        torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(), torch._C._len_torch_function_stack(), torch.get_autocast_dtype("cpu"),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
    )  # fmt: skip


def pair() -> specdec.SpeculativeDecoder:
    model = tiny_model("llama", num_hidden_layers=2)
    return specdec.SpeculativeDecoder(model, weaker(model, 0.05))


CALLS: list[dict[str, Any]] = [{}, SAMPLED, {**PROCESSORS, **SAMPLED, "acceptance": "coupled"}, PROCESSORS]


def texts(dec: specdec.SpeculativeDecoder) -> list[Any]:
    found: list[Any] = [dec.generate(PROMPTS, 6, **options).token_ids for options in CALLS]
    found.append(dec.generate(PROMPTS, 6, strategies=[DraftModel(n_max=3, branches=2)], **SAMPLED).token_ids)
    found.append(dec.generate(PROMPTS, 6, keep_state=True).token_ids)
    found.append([t for r in dec.rounds(PROMPTS[0], 8) for t in r.tokens])
    return found


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return texts(pair())


@pytest.mark.fast(5)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_around_calls_changes_nothing(mode: str, expected: list[Any]) -> None:
    dec = pair()
    with MODES[mode]():
        before = ambient()
        assert texts(dec) == expected
        assert ambient() == before
    assert texts(dec) == expected


@pytest.mark.fast(2)
@pytest.mark.parametrize("mode", ["inference_mode", "autocast", "float64", "device meta", "everything"])
def test_a_decoder_that_is_built_inside_a_mode_works_outside(mode: str, expected: list[Any]) -> None:
    with MODES["inference_mode" if mode == "everything" else "no_grad"]():  # its weights can be inference tensors
        model = tiny_model("llama", num_hidden_layers=2)
        draft = weaker(model, 0.05)
    with MODES[mode]():
        dec = specdec.SpeculativeDecoder(model, draft)
    assert texts(dec) == expected
    with MODES[mode]():
        assert texts(dec) == expected


@pytest.mark.fast(4)
@pytest.mark.parametrize("mode", ["inference_mode", "autocast", "bfloat16", "device meta", "everything"])
@pytest.mark.parametrize("begins_inside", [True, False])
def test_a_generator_may_cross_the_border_of_a_mode(mode: str, begins_inside: bool, expected: list[Any]) -> None:
    dec = pair()
    rounds = dec.rounds(PROMPTS[0], 8, **PROCESSORS, **SAMPLED)
    whole = [t for r in pair().rounds(PROMPTS[0], 8, **PROCESSORS, **SAMPLED) for t in r.tokens]
    with MODES[mode]() if begins_inside else contextlib.nullcontext():
        found = list(next(rounds).tokens)
        before = ambient()
    with contextlib.nullcontext() if begins_inside else MODES[mode]():
        inside = ambient()
        found += [t for r in rounds for t in r.tokens]
        assert ambient() == inside
    assert found == whole
    assert before is not None
    assert texts(dec) == expected


def test_a_mode_around_loading() -> None:
    expected = specdec.SpeculativeDecoder.from_pretrained("demo-target", "demo-draft").generate([PROMPTS[0]], 8)
    with everything():
        dec = specdec.SpeculativeDecoder.from_pretrained("demo-target", "demo-draft", check=False)
    assert {(p.device.type, p.is_inference()) for p in dec.target.model.parameters()} == {("cpu", False)}
    assert dec.generate([PROMPTS[0]], 8).token_ids == expected.token_ids


def test_inference_weights_are_watched_by_their_contents() -> None:
    """They count no writes."""
    with torch.inference_mode():
        model = tiny_model("llama", num_hidden_layers=2)
    dec = specdec.SpeculativeDecoder(model, strategies=[], check=False)
    first = dec.generate([PROMPTS[0]], 6, keep_state=True)
    text = [*PROMPTS[0], *first.token_ids[0]]
    assert dec.generate([text], 4, keep_state=True).provenance["dropped_state"] == []
    with torch.inference_mode():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    out = dec.generate([text], 8, keep_state=True)
    assert out.provenance["dropped_state"] == ["target"]
    assert out.provenance["weights"] != first.provenance["weights"]
    assert out.token_ids[0] == generated_by_transformers(model, text, 8)


@pytest.mark.parametrize("mode", ["inference_mode", "autocast", "float64", "everything"])
def test_a_users_processor_and_criterion_see_specdecs_modes(mode: str) -> None:
    seen = []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append((scores.dtype, scores.is_inference(), torch.tensor([0.5]).dtype))
        return scores + torch.zeros(scores.shape[-1])

    dec = pair()
    expected = dec.generate(PROMPTS, 8).token_ids
    with MODES[mode]():
        assert dec.generate(PROMPTS, 8, logits_processor=processor).token_ids == expected
    assert set(seen) == {(torch.float32, False, torch.float32)}


def test_a_training_model_with_dropout_is_run_without() -> None:
    model = tiny_model("llama", num_hidden_layers=2, attention_dropout=0.5)
    expected = generated_by_transformers(model, PROMPTS[0], 10)
    dec = specdec.SpeculativeDecoder(model.train())
    assert dec.generate([PROMPTS[0]], 10).token_ids[0] == expected
    assert model.training


def test_bfloat16_models_run_in_their_own_dtype_under_autocast() -> None:
    model = tiny_model("llama", num_hidden_layers=2).to(torch.bfloat16)
    dec = specdec.SpeculativeDecoder(model, strategies=["prompt-lookup"], check=False)
    expected = dec.generate(PROMPTS, 10).token_ids
    with torch.autocast("cpu", dtype=torch.float16):
        out = dec.generate(PROMPTS, 10)
    assert out.token_ids == expected
    assert out.provenance["dtypes"]["target"] == "torch.bfloat16"
