"""Reading and replaying recorded drafts of llama.cpp (schema `specdec-llama-ngram-v1`, see SCHEMA.md beside the data).

A case is a chain of n-gram strategies (`types`, `params`) that went through turns of steps; replaying it means asking
specdec's chain at every step and comparing each draft, the strategy that made it, and the counters at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec import STRATEGIES, DraftRequest, LookupCache
from specdec.drafters.base import DraftContext
from specdec.drafters.chain import Chain, build_chain, upstream_order
from specdec.drafters.ngram.cache import propose

FOLDER = Path(os.environ.get("SPECDEC_VECTORS", Path(__file__).parents[1] / "data" / "llama_cpp_vectors"))
SCHEMA = "specdec-llama-ngram-v1"
# Upstream's name of a parameter -> the field of the strategy here.
FIELDS = {
    "ngram-simple": {"size_n": "size_n", "size_m": "size_m", "min_hits": "min_hits"},
    "ngram-map-k": {"size_n": "size_n", "size_m": "size_m", "min_hits": "min_hits", "hash_map_size": "hash_size"},
    "ngram-map-k4v": {"size_n": "size_n", "size_m": "size_m", "min_hits": "min_hits", "hash_map_size": "hash_size"},
    "ngram-mod": {"n_match": "n_match", "n_min": "n_min", "n_max": "n_max", "mod_table_size": "table_size"},
    "ngram-cache": {"cache_n_draft": "n_draft", "static": "static", "dynamic": "dynamic"},
}
FILES = ("static", "dynamic")
Case = Mapping[str, Any]
Factory = Callable[[str, Mapping[str, Any]], Any]


def load(name: str) -> Any:
    """A JSON file of the folder; skips the test where another folder lacks it."""
    path = FOLDER / name
    assert FOLDER.is_dir(), f"SPECDEC_VECTORS names no folder: {FOLDER}"
    if not path.is_file():
        pytest.skip(f"{FOLDER} has no {name}")
    return json.loads(path.read_text(encoding="utf-8"))


def cases(name: str) -> list[Case]:
    """The cases of a strategy's file."""
    data = load(name)
    assert data["schema"] == SCHEMA
    assert data["cases"], f"{name} holds no cases"
    return list(data["cases"])


@lru_cache(maxsize=1)
def streams() -> dict[str, np.ndarray]:
    return {name: np.asarray(ids, dtype=np.int64) for name, ids in load("streams.json").items()}


def options(kind: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments of a strategy for a case's params."""
    values = {field: params[name] for name, field in FIELDS[kind].items() if name in params}
    return {field: cache_file(value) if field in FILES else value for field, value in values.items()}


@lru_cache(maxsize=8)
def cache_file(name: str) -> LookupCache:
    """A lookup cache of the folder, loaded once: chains only read it."""
    return LookupCache.load(FOLDER / name)


def make(kind: str, params: Mapping[str, Any]) -> Any:
    """The configured strategy of a case. Fails for one that is not registered."""
    assert kind in STRATEGIES, f"strategy {kind!r} is not registered"
    return STRATEGIES[kind](**options(kind, params))


def steps(turn: Mapping[str, Any]) -> Iterator[tuple[np.ndarray, int, Sequence[Any]]]:
    """(ids without the newest, the newest, step) of a turn; checks that the steps walk the stream as recorded."""
    stream, size = streams()[turn["stream"]], turn["prompt_len"]
    for step in turn["steps"]:
        assert (step[0], step[1]) == (size, stream[size])
        yield stream[:size], int(stream[size]), step
        size += step[4] + 1


def replay_chain(case: Case, factory: Factory = make) -> list[str]:
    """What differs from the record of a case of style `chain`, one line each."""
    drafters = upstream_order([factory(kind, case["params"]) for kind in case["types"]])
    chain = build_chain(drafters, DraftContext(case["n_seq"], 1 << 20, 1 << 31))
    wrong = []
    for t, turn in enumerate(case["turns"]):
        row = turn["seq"]
        chain.begin(row, streams()[turn["stream"]][: turn["prompt_len"]])
        for s, (tokens, last, (size, _, n_max, wanted, accepted, called, impl)) in enumerate(steps(turn)):
            if n_max == 0:
                continue
            [draft] = chain.draft([DraftRequest(row, tokens, last, n_max, size)])
            got = [int(token) for token in draft.tokens]
            winner = chain.labels.index(draft.drafter) if got else -1
            if (got, winner) != (wanted, impl):
                wrong.append(f"{case['name']} turn {t} step {s}: {winner}: {got} instead of {impl}: {wanted}")
            if called:
                chain.accept(row, accepted)
    return wrong + _wrong_counters(case, chain)


def _wrong_counters(case: Case, chain: Chain) -> list[str]:
    wrong = []
    assert [entry["type"] for entry in case["stats"]] == [d.name for d in chain.drafters]
    for drafter, label, entry in zip(chain.drafters, chain.labels, case["stats"], strict=True):
        known: dict[str, Any] = dict(vars(chain.counters[label]))
        if "mod_used" in entry:
            known["mod_used"] = drafter.used  # type: ignore[attr-defined]
        if "n_keys" in entry:
            known["n_keys"] = drafter.n_keys(0)  # type: ignore[attr-defined]
        for name, value in entry.items():
            if name != "type" and known[name] != value:
                wrong.append(f"{case['name']} {label} {name}: {known[name]} instead of {value}")
    return wrong


def replay_lookup(case: Case) -> list[str]:
    """What differs from the record of a case of style `lookup`: counts token by token, no chain."""
    static, dynamic = (LookupCache.load(FOLDER / case["params"][n]) if n in case["params"] else None for n in FILES)
    if case["params"].get("merge_after_turn") and dynamic is None:
        dynamic = LookupCache()
    n_draft, wrong = case["params"].get("cache_n_draft", 8), []
    for t, turn in enumerate(case["turns"]):
        stream = streams()[turn["stream"]].tolist()
        text, context = stream[: turn["prompt_len"] + 1], LookupCache()
        context.update(text)
        for s, (tokens, _, step) in enumerate(steps(turn)):
            assert len(tokens) == len(text) - 1
            got = propose(text, n_draft, context, dynamic, static)
            if got != step[3]:
                wrong.append(f"{case['name']} turn {t} step {s}: {got} instead of {step[3]}")
            for token in stream[len(text) : len(text) + step[4] + 1]:
                text.append(token)
                context.update(text, 1)
        if case["params"].get("merge_after_turn") and dynamic is not None:
            dynamic.merge(context)
    return wrong


def replay(name: str, style: str, one: Callable[[Case], list[str]]) -> list[str]:
    """What differs in all cases of one style of a file; skips where there are none. The fast tier replays every eighth
    case of our own files."""
    chosen = [case for case in cases(name) if case["style"] == style]
    if not chosen:
        pytest.skip(f"{FOLDER / name} has no cases of style {style}")
    every = 8 if os.environ.get("SPECDEC_TIER") == "fast" and "SPECDEC_VECTORS" not in os.environ else 1
    return [line for case in chosen[::every] for line in one(case)]
