"""Drafts, counters, hashes and files of llama.cpp, replayed: every single one must come out the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from specdec import NgramSimple
from tests.helpers import vectors

ABSENT = ("ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")  # not in STRATEGIES yet: remove when they are


def expected(*kinds: str) -> Any:
    """The parameters of a test for these strategies; strict, so that the mark cannot outlive its reason."""
    reason = "not registered yet"
    marks = [pytest.mark.xfail(reason=reason, strict=True)] if set(kinds) & set(ABSENT) else []
    return pytest.param("-".join(kinds), marks=marks, id="-".join(kinds))


def shown(wrong: Sequence[str]) -> str:
    return f"{len(wrong)} differences, the first ones:\n" + "\n".join(wrong[:5])


@pytest.mark.parametrize(
    "kind", [expected(k) for k in ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")]
)
def test_every_draft_and_counter_of_llama_cpp(kind: str) -> None:
    wrong = vectors.replay(f"{kind.replace('-', '_')}.json", "chain", vectors.replay_chain)
    assert not wrong, shown(wrong)


@pytest.mark.xfail(bool(ABSENT), reason="not all registered yet", strict=True)
def test_every_draft_and_counter_of_llama_cpps_chains() -> None:
    wrong = vectors.replay("chain.json", "chain", vectors.replay_chain)
    assert not wrong, shown(wrong)


def test_a_strategy_with_other_parameters_is_found_out() -> None:
    def shorter(kind: str, params: Any) -> Any:
        return NgramSimple(size_n=params["size_n"], size_m=max(1, params["size_m"] - 1))

    assert vectors.replay("ngram_simple.json", "chain", lambda case: vectors.replay_chain(case, shorter))


def mod_slot(ids: Sequence[int]) -> int:
    value = 0
    for token in ids:
        value = (value * 6364136223846793005 + token) % (1 << 64)
    return value % 4194304


def map_hash(ids: Sequence[int]) -> int:
    value = 0
    for token in ids:
        value = (value * 2654435761 + token) % (1 << 32)
    return value


def cache_hash(ids: Sequence[int]) -> str:
    value = 0
    for token in (*ids, *[-1] * (4 - len(ids))):
        value ^= (token % (1 << 64)) * 11400714819323198485 % (1 << 64)
    return str(value)


@pytest.mark.parametrize(
    ("name", "function"), [("mod_idx_4194304", mod_slot), ("map_hash32", map_hash), ("cache_hash64", cache_hash)]
)
def test_hashes_of_llama_cpp(name: str, function: Callable[[Sequence[int]], Any]) -> None:
    data = vectors.load("hash.json")
    compared = 0
    for entry in data["vectors"]:
        if entry[name] is None:
            continue
        ids, n = data["streams"][entry["stream"]], entry["n"]
        assert [function(ids[i : i + n]) for i in range(len(ids) - n)] == entry[name]
        compared += len(entry[name])
    assert compared
