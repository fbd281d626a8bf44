"""Drafts, counters, hashes and files of llama.cpp, replayed: every single one must come out the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec import LookupCache, NgramSimple
from specdec.drafters.ngram.hashing import MAP_MASK, MAP_MULTIPLIER, MOD_MULTIPLIER, hash_windows, powers
from specdec.drafters.ngram.lookup_cache import LONGEST, Part, key_hash
from tests.helpers import vectors


def shown(wrong: Sequence[str]) -> str:
    return f"{len(wrong)} differences, the first ones:\n" + "\n".join(wrong[:5])


@pytest.mark.fast(5, again=True)
@pytest.mark.filterwarnings("ignore:ngram-mod")  # the data has short n-grams too
@pytest.mark.parametrize("kind", ["ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"])
def test_every_draft_and_counter_of_llama_cpp(kind: str) -> None:
    wrong = vectors.replay(f"{kind.replace('-', '_')}.json", "chain", vectors.replay_chain)
    assert not wrong, shown(wrong)


@pytest.mark.fast(1, again=True)
@pytest.mark.filterwarnings("ignore:ngram-mod")
def test_every_draft_and_counter_of_llama_cpps_chains() -> None:
    wrong = vectors.replay("chain.json", "chain", vectors.replay_chain)
    assert not wrong, shown(wrong)


@pytest.mark.fast(1, again=True)
def test_every_draft_of_llama_cpps_lookup_programs() -> None:
    wrong = vectors.replay("ngram_cache.json", "lookup", vectors.replay_lookup)
    assert not wrong, shown(wrong)


def test_a_strategy_with_other_parameters_is_found_out() -> None:
    def shorter(kind: str, params: Any) -> Any:
        return NgramSimple(size_n=params["size_n"], size_m=max(1, params["size_m"] - 1))

    drafting = [case for case in vectors.cases("ngram_simple.json") if case["stats"][0]["n_gen_drafts"] > 0]
    assert vectors.replay_chain(drafting[0], shorter)


def mod_slot(ids: Sequence[int]) -> int:
    [value] = hash_windows(np.array(ids), powers(MOD_MULTIPLIER, len(ids))).tolist()
    return int(value) % 4194304


def map_hash(ids: Sequence[int]) -> int:
    [value] = hash_windows(np.array(ids), powers(MAP_MULTIPLIER, len(ids))).tolist()
    return int(value) & MAP_MASK


def cache_hash(ids: Sequence[int]) -> str:
    return str(key_hash(ids))


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


FILES = ["cache_static", "cache_dynamic", "cache_small"]


def entries(cache: LookupCache) -> list[Any]:
    """The cache in the form of the recorded contents, in iteration order."""
    items = cache.items()
    return [[[*key, *[-1] * (LONGEST - len(key))], [list(pair) for pair in pairs]] for key, pairs in items]


def loaded(name: str) -> tuple[LookupCache, Any]:
    data = vectors.load(f"{name}.json")
    return LookupCache.load(vectors.FOLDER / f"{name}.bin"), data


@pytest.mark.parametrize("name", FILES)
def test_files_of_llama_cpp_are_read_entry_by_entry(name: str) -> None:
    cache, data = loaded(name)
    assert data["entries"]
    recorded = {tuple(key): pairs for key, pairs in data["entries"]}
    assert len(cache) == len(recorded)
    assert {tuple(key): sorted(pairs) for key, pairs in entries(cache)} == {k: sorted(v) for k, v in recorded.items()}
    for key, part in cache.parts.items():  # ties depend on the order of insertion, which is the file's
        if isinstance(part, Part):
            assert list(part.counts) == [token for token, _ in recorded[*key, *[-1] * (LONGEST - len(key))]]


def test_loaded_files_are_walked_in_llama_cpps_order() -> None:
    cache, data = loaded("cache_small")
    assert entries(cache) == data["iter_after_load"]


@pytest.mark.parametrize("name", FILES)
def test_saving_a_loaded_file_keeps_every_entry(name: str, tmp_path: Path) -> None:
    cache, _ = loaded(name)
    cache.save(tmp_path / "again.bin")
    again = LookupCache.load(tmp_path / "again.bin")
    assert dict(again.items()).keys() == dict(cache.items()).keys()
    assert all(sorted(pairs) == sorted(cache.successors(key)) for key, pairs in again.items())


def test_a_saved_file_is_llama_cpps_byte_for_byte(tmp_path: Path) -> None:
    cache, _ = loaded("cache_small")
    cache.save(tmp_path / "again.bin")
    assert (tmp_path / "again.bin").read_bytes() == (vectors.FOLDER / "cache_small_resaved.bin").read_bytes()
