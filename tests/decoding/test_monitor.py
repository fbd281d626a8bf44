"""The divergence monitor: silent while drafts are accepted, and right about why when they are not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import specdec
from specdec import SpecdecError
from specdec.decoding.result import Round
from specdec.research.traces.monitor import DivergenceWarning, Monitor
from specdec.research.traces.trace import record
from tests.helpers.playing import Scripted, random_ids, right_until, weaker
from tests.helpers.tiny import tiny_model
from tests.helpers.tokens import byte_level

PROMPTS = [random_ids(6, i) for i in range(4)]


def watched(decoder: Any, prompts: Any = PROMPTS, window: int = 24, chat: bool = False, **options: Any) -> Monitor:
    monitor = Monitor(decoder, window=window, chat=chat, warn=lambda text: None)
    record(decoder, prompts, watch=monitor, **{"max_new_tokens": 20, "draft_length": "given", **options})
    return monitor


def pair(draft: Any, target: Any = None, **options: Any) -> specdec.SpeculativeDecoder:
    return specdec.SpeculativeDecoder(target or tiny_model("llama", 5), draft, check=False, **options)


def test_a_good_draft_gives_no_warning() -> None:
    assert watched(pair(weaker(tiny_model("llama", 5), 0.02))).found == []


def test_a_stranger_is_called_another_family() -> None:
    [found] = watched(pair(tiny_model("llama", 77))).found
    assert [c.name for c in found.causes][-1] == "family"
    assert found.acceptance < 0.5
    assert "another family" in str(found)


def test_sampling_is_named_where_the_best_tokens_agree() -> None:
    """Under `match` the draft's argmax is compared with a sample of a flat law."""
    model = tiny_model("llama", 5, initializer_range=0.2)
    [found, *_] = watched(pair(model, model), temperature=3.0, acceptance="match").found
    assert [c.name for c in found.causes] == ["temperature"]


def test_a_draft_that_was_good_before_lost_the_context() -> None:
    decoder = pair(None)
    prompt = PROMPTS[0]
    [plain] = decoder.generate(prompt, max_new_tokens=60, strategies=[]).token_ids
    right = right_until([[*prompt, *plain]], 3)

    def forgets(ids: list[int]) -> list[int]:
        drafted = right(ids)
        return drafted if len(ids) < 40 else [(t + 1) % 128 for t in drafted]

    [found] = watched(decoder, prompt, strategies=[Scripted(forgets, "mtp")], max_new_tokens=60).found
    assert [c.name for c in found.causes] == ["context"]
    assert found.position > 40


@pytest.mark.parametrize(("first", "cause"), [(8, "family"), (16, "context")])
def test_a_fall_that_chance_explains_is_not_the_contexts(first: int, cause: str) -> None:
    """From 8 of 16 accepted to 7 is noise, from 16 to 7 is not."""
    monitor = Monitor(window=16, warn=lambda text: None)
    for stood in [True] * first + [False] * (32 - first):
        tokens = [1, 2] if stood else [2]
        monitor(Round(0, 9, "draft-model", [1], [0.5], [0.5], int(stood), 2, tokens, None, {}))
    [found] = monitor.found
    assert found.acceptance == 7 / 16
    assert [c.name for c in found.causes] == [cause]


def test_a_prompt_outside_the_chat_template_is_named() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    decoder = pair(tiny_model("llama", 77, 320), tiny_model("llama", 5, 320), tokenizer=tokenizer)
    [found] = watched(decoder, "the quick brown", max_new_tokens=40, ignore_eos=True).found
    assert "template" in [c.name for c in found.causes]
    chat = [[{"role": "user", "content": "the quick brown"}]]
    [found] = watched(decoder, chat, chat=True, max_new_tokens=40, ignore_eos=True).found
    assert "template" not in [c.name for c in found.causes]


def test_an_unchecked_vocabulary_comes_before_the_family() -> None:
    """The same weights under permuted ids: what a wrong tokenizer does."""
    target = tiny_model("llama", 5)
    [found] = watched(pair(tiny_model("llama", 5, 120), target)).found
    assert found.causes[0].name == "tokenizer"
    assert "128 and 120" in found.causes[0].evidence


def test_warnings_come_once_until_acceptance_has_risen_again() -> None:
    decoder = pair(None)
    prompt = PROMPTS[0]
    [plain] = decoder.generate(prompt, max_new_tokens=90, strategies=[]).token_ids
    right = right_until([[*prompt, *plain]], 2)

    def waves(ids: list[int]) -> list[int]:
        drafted = right(ids)
        return drafted if len(ids) // 30 % 2 else [(t + 1) % 128 for t in drafted]

    assert len(watched(decoder, prompt, 8, strategies=[Scripted(waves, "mtp")], max_new_tokens=90).found) == 2
    assert watched(decoder, prompt, 8, strategies=[Scripted(waves, "own")], max_new_tokens=40).found == []


def test_without_a_function_it_warns_as_python_does() -> None:
    decoder = pair(tiny_model("llama", 77))
    monitor = Monitor(window=8)
    with pytest.warns(DivergenceWarning, match="draft-model: accepted per tested 0"):
        record(decoder, PROMPTS, 16, watch=monitor, draft_length="given")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record(pair(tiny_model("llama", 5)), PROMPTS, 16, watch=Monitor(window=8), draft_length="given")


@pytest.mark.parametrize("bad", [{"window": 0}, {"threshold": 2.0}])
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(SpecdecError, match=next(iter(bad))):
        Monitor(**bad)
