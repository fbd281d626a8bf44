"""The n-gram drafters against literal implementations of their rules."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import DraftRequest, NgramSimple, PromptLookup
from specdec.errors import SpecdecError

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def ask(drafter: NgramSimple | PromptLookup, text: Sequence[int], n_max: int = 0) -> list[int]:
    [draft] = drafter.draft([DraftRequest(0, list(text[:-1]), text[-1], n_max)])
    return list(draft.tokens)


def literal_ngram_simple(text: list[int], n: int, m: int) -> list[int]:
    """llama.cpp's rule, position by position."""
    t, last = text[:-1], text[-1]
    length = len(t)
    if length <= n + m + 1:
        return []
    pattern = [*t[length - n + 1 :], last] if n > 1 else [last]
    for j in range(length - n - 1, 0, -1):
        if t[j : j + n] == pattern:
            count = min(m, length - (j + n))
            return [] if count < n else t[j + n : j + n + count]
    return []


def literal_prompt_lookup(text: list[int], n_max: int, longest: int, shortest: int, latest: bool) -> list[int]:
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        starts = [j for j in range(len(text) - n) if text[j : j + n] == text[-n:]]
        if starts:
            j = starts[-1] if latest else starts[0]
            return text[j + n : j + n + n_max]
    return []


@given(texts, st.integers(1, 5), st.integers(1, 8))
def test_ngram_simple_follows_llama_cpps_rule(text: list[int], n: int, m: int) -> None:
    assert ask(NgramSimple(size_n=n, size_m=m), text) == literal_ngram_simple(text, n, m)


@given(texts, st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_prompt_lookup_takes_the_longest_match_first(text: list[int], k: int, a: int, b: int, latest: bool) -> None:
    longest, shortest = max(a, b), min(a, b)
    drafter = PromptLookup(k, longest, shortest, "latest" if latest else "earliest")
    assert ask(drafter, text) == literal_prompt_lookup(text, k, longest, shortest, latest)


@given(texts, st.integers(-1, 5))
def test_no_strategy_proposes_more_than_asked_or_a_token_it_has_not_seen(text: list[int], n_max: int) -> None:
    for drafter in (PromptLookup(n_max=7), NgramSimple(size_n=1, size_m=7)):
        drafted = ask(drafter, text, n_max)
        assert set(drafted) <= set(text)
        assert len(drafted) <= 7
    if n_max > 0:
        assert len(ask(PromptLookup(n_max=7), text, n_max)) <= n_max


@pytest.mark.parametrize("options", [{"n_max": 0}, {"ngram_min": 0}, {"ngram_min": 4}, {"match": "middle"}])
def test_parameters_out_of_range_are_refused(options: dict) -> None:
    with pytest.raises(SpecdecError, match="prompt-lookup"):
        PromptLookup(**options)
