"""Processors that depend on more than (input_ids, scores): refused where that can be seen, and why they must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation import logits_process as hf

from specdec import DraftModel, PromptLookup, SpecdecError, SpeculativeDecoder
from specdec.sampling.processor_check import REFUSED, check_processors
from tests.helpers.laws import small_model

V = 13
PROMPT = [5, 7, 5, 7, 5]


def _pair() -> SpeculativeDecoder:
    return SpeculativeDecoder(small_model(0, V), small_model(1, V), check=False)


def _check(processor: Any) -> None:
    check_processors([processor], PROMPT, V, torch.device("cpu"))


class Counter(hf.LogitsProcessor):
    """Favours another token at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = scores.clone()
        out[:, self.calls % V] += 9.0
        return out


class LateCounter(Counter):
    """The same, but only from the hundredth call on: only its attributes give it away."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores if self.calls < 100 else scores * 2


class Incremental:
    """Follows the text by the newest id of every call, as matchers without rollback do."""

    def __init__(self) -> None:
        self.length, self.total = 0, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] != self.length:
            self.length, self.total = input_ids.shape[1], self.total + int(input_ids[0, -1]) + 1
        return scores * (1 + self.total % 3)


class Noisy:
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.rand_like(scores)


class Memo:
    """Keeps results by prefix: a state that changes nothing."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, ...], int] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        key = tuple(input_ids[0].tolist())
        self.kept.setdefault(key, sum(key) % 3)
        return scores * (1 + self.kept[key])


class Logger:
    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return scores


def _closure() -> Any:
    calls = []

    def counting(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return scores * len(calls)

    return counting


@pytest.mark.parametrize(
    ("processor", "says"),
    [
        (Counter(), "Counter: two calls with the same arguments differ"),
        (Noisy(), "Noisy: two calls with the same arguments differ"),
        (_closure(), "counting: two calls with the same arguments differ"),
        (LateCounter(), "LateCounter: a call changes its attributes"),
        (Logger(), "set prefix_only = True"),
        (Incremental(), "Incremental: its result depends on earlier calls"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_processor_that_remembers_is_refused_by_name(processor: Any, says: str) -> None:
    with pytest.raises(SpecdecError) as caught:
        _pair().generate(PROMPT, 4, logits_processor=[processor])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_classes_of_transformers_with_a_state_are_refused_by_name(name: str) -> None:
    kind = getattr(hf, name, None)
    if kind is None:
        pytest.skip(f"this transformers has no {name}")
    with pytest.raises(SpecdecError, match=name):
        _check(kind.__new__(kind))
    inherited = type("Mine", (kind,), {})
    with pytest.raises(SpecdecError, match=name):
        _check(inherited.__new__(inherited))


@pytest.mark.fast(4)
@pytest.mark.parametrize(
    "processor",
    [
        Memo(),
        lambda ids, scores: scores * ids.shape[1],
        hf.RepetitionPenaltyLogitsProcessor(1.2),
        hf.SequenceBiasLogitsProcessor([[[3], 1.0], [[1, 2], 2.0]]),
        hf.WatermarkLogitsProcessor(V, "cpu", greenlist_ratio=0.4),
        type("Mine", (hf.SequenceBiasLogitsProcessor,), {})([[[3], 1.0]]),  # prepares itself in its first call
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_function_of_text_and_scores_is_taken(processor: Any) -> None:
    _check(processor)
    for strategies in ([], [PromptLookup(), DraftModel(n_max=3)]):
        options: dict[str, Any] = {"temperature": 0.9, "acceptance": "match", "logits_processor": [processor]}
        out = _pair().generate(PROMPT, 16, strategies=strategies, **options)
        assert out.token_ids == _pair().generate(PROMPT, 16, strategies=[], **options).token_ids


def test_the_check_leaves_the_callers_object_alone() -> None:
    memo = Memo()
    _check(memo)
    assert memo.kept == {}


def test_a_logger_that_says_so_is_taken_and_sees_every_position() -> None:
    logger = Logger()
    logger.prefix_only = True  # type: ignore[attr-defined]
    out = _pair().generate(PROMPT, 12, strategies=[PromptLookup()], logits_processor=[logger])
    assert len(logger.lengths) == out.stats.draft_tokens + out.stats.rounds


def test_a_processor_that_does_not_take_made_up_texts_is_left_to_the_real_call() -> None:
    follows = {5: 7, 7: 5}  # a KeyError for anything else

    def strict(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(scores, float("-inf"))
        out[0, follows[int(ids[0, -1])]] = 0.0
        return out

    assert _pair().generate(PROMPT, 4, strategies=[], logits_processor=[strict]).token_ids == [[7, 5, 7, 5]]


def test_a_refused_processor_would_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for all this: without the check, drafting changes what a counter makes of greedy decoding."""
    monkeypatch.setattr("specdec.decoding.call.check_processors", lambda *_: None)
    texts = [
        _pair().generate(PROMPT, 16, strategies=strategies, logits_processor=[Counter()]).token_ids
        for strategies in ([], [PromptLookup(n_max=3)])
    ]
    assert texts[0] != texts[1]
