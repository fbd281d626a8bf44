"""Journals, cost tables, kept texts and prompt sets edited by hand: refused by file, line and field."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec import CostTable, SpecdecError
from specdec.research.ablation import merge
from specdec.research.ablation.store import Store
from specdec.research.ablation.table import build_table
from specdec.research.offline.replay import load_texts, save_texts
from specdec.research.prompts.datasets import load_prompts
from tests.research.test_damaged_traces import ODD, changed, drop, places, put

SHARE = pytest.mark.parametrize("share", [0.3, pytest.param(1.0, marks=pytest.mark.full)])


def cell(key: str, chain: str, strategies: list[Any]) -> dict[str, Any]:
    return {
        "key": key, "plain": "p", "comparable": True, "pair": "pair", "chain": chain, "models": {"target": "t"},
        "strategies": strategies, "generation": {"acceptance": "match", "temperature": 0.7}, "settings": {"k": 3},
        "seed": 0, "batch_size": 1,
    }  # fmt: skip


def row(key: str, prompt: str, records: list[Any]) -> dict[str, Any]:
    times = {f"{part}seconds": 0.5 for part in ("", "prefill_", "draft_", "verify_", "other_")}
    return {
        "kind": "row", "cell": key, "prompt": prompt, "fingerprint": f"f-{prompt}", "call": 0, "status": "ok",
        "error": None, "tokens": [1, 2, 3], "text": "abc", "finish_reason": "length", "records": records,
        "lossy": False, "exact": False, "strategy_seconds": {"suffix": 0.1}, "weights": {"target": "w"},
        "row_seed": 5, "prompt_tokens": 4, "prompt_hash": "h", "chat_template": None, "versions": "v", **times,
    }  # fmt: skip


MANIFEST = {
    "config": {"pairs": {}}, "date": "2026-01-01", "commit": None,
    "versions": {"specdec": "1", "torch": "2", "transformers": "5"},
    "machine": {"gpu": None, "processor": "x", "threads": 1},
    "cells": [cell("p", "plain", []), cell("d", "draft", [{"name": "suffix"}])],
    "prompts": [{"id": i, "category": "c", "fingerprint": f"f-{i}", "text": "t"} for i in ("x", "y")],
}  # fmt: skip
ENTRIES = [
    *(row("p", prompt, [[None, 0, 0]] * 3) for prompt in ("x", "y")),
    *(row("d", prompt, [["suffix", 2, 1], [None, 0, 0, None, False, True]]) for prompt in ("x", "y")),
    {"kind": "facts", "cell": "p", "facts": {"a": 1}},
    {"kind": "session", "rows": 4, "wall": 1.0, "load": 0.5, "decode": 0.4},
]


def write(folder: Path, manifest: Any = MANIFEST, entries: Any = ENTRIES) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(manifest))
    (folder / "journal-00000.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


def use(folder: Path) -> bool:
    """Read the folder; whether it was refused, in one line that names a file."""
    try:
        build_table(folder)
        Store(folder).read()
    except SpecdecError as error:
        message = str(error)
    else:
        return False
    assert "\n" not in message
    assert "run.json" in message or "journal-00000.jsonl, line " in message
    return True


def test_the_sound_folder_merges(tmp_path: Path) -> None:
    made = merge(write(tmp_path / "a"))
    assert made is not None
    assert made["rows"] == 4


DAMAGE: list[tuple[str, tuple[Any, ...], Callable[[Any, Any], None], str]] = [
    ("journal", (0, "cell"), drop, "line 1: cell: is missing"),
    ("journal", (1, "tokens"), drop, "line 2: tokens: is missing"),
    ("journal", (2, "tokens", 1), put("x"), r"line 3: tokens\[1\]: expected a whole number >= 0, got 'x'"),
    ("journal", (2, "records"), put(None), "line 3: records: expected a list"),
    ("journal", (2, "records", 0), put([]), r"line 3: records\[0\]: expected strategy, drafted"),
    ("journal", (2, "records", 0, 1), put(-1), r"line 3: records\[0\]: drafted"),
    ("journal", (2, "records", 0, 1), put(10**9), r"line 3: records\[0\]: drafted"),
    ("journal", (2, "records", 0, 2), put(9), r"line 3: records\[0\]: 9 of 2 drafted tokens accepted"),
    ("journal", (3, "seconds"), put(math.nan), "line 4: seconds: expected a finite number"),
    ("journal", (3, "status"), put("fine"), "line 4: status: expected 'ok' or 'error', got 'fine'"),
    ("journal", (3, "strategy_seconds"), put({"a": "b"}), "line 4: strategy_seconds.a: "),
    ("journal", (3, "weights"), put([]), "line 4: weights: expected a mapping"),
    ("journal", (4, "cell"), put(3), "line 5: cell: expected a text, got 3"),
    ("journal", (5, "wall"), put("long"), "line 6: wall: expected a finite number"),
    ("journal", (5, "decode"), drop, "line 6: decode: is missing"),
    ("run", ("cells",), drop, "run.json is not the description"),
    ("run", ("prompts",), put({}), "run.json is not the description"),
    ("run", ("cells", 0, "key"), put(3), r"run.json is damaged: cells\[0\].key: expected a text"),
    ("run", ("cells", 1, "key"), put("p"), "run.json is damaged: the key 'p' occurs twice"),
    ("run", ("cells", 1, "generation"), put({}), r"cells\[1\].generation.acceptance: is missing"),
    ("run", ("cells", 1, "generation", "temperature"), put("hot"), r"cells\[1\].generation.temperature"),
    ("run", ("cells", 1, "batch_size"), put(0), r"cells\[1\].batch_size: expected a whole number >= 1, got 0"),
    ("run", ("prompts", 1, "id"), put("x"), "the id 'x' occurs twice"),
    ("run", ("versions",), put(None), "run.json is damaged: versions: expected a mapping"),
]


@pytest.mark.parametrize(("file", "path", "change", "message"), DAMAGE, ids=[f"{d[0]} {d[1]} {d[3]}" for d in DAMAGE])
def test_a_damaged_ablation_is_refused_by_line_and_field(
    file: str, path: tuple[Any, ...], change: Callable[[Any, Any], None], message: str, tmp_path: Path
) -> None:
    if file == "run":
        write(tmp_path, changed(MANIFEST, path, change))
    else:
        write(tmp_path, entries=changed(ENTRIES, path, change))
    with pytest.raises(SpecdecError, match=message):
        merge(tmp_path)


@SHARE
def test_no_change_of_an_ablations_files_ends_in_another_error(share: float, tmp_path: Path) -> None:
    rng, refused, tried = random.Random(3), 0, 0
    for what, document in (("run", MANIFEST), ("journal", ENTRIES)):
        found = [path for path in places(document) if what == "run" or len(path) > 1]
        for path in rng.sample(found, int(share * len(found))):
            for change in (drop, *map(put, rng.sample(ODD, 3))):
                made = changed(document, path, change)
                write(tmp_path, *((made, ENTRIES) if what == "run" else (MANIFEST, made)))
                refused += use(tmp_path)
                tried += 1
    assert refused > tried / 4


@pytest.mark.parametrize("line", ["{", "", "[]", "3", "null", "[" * 10_000, '{"kind": ' + "9" * 5_000 + "}", "\\ud800"])
def test_lines_that_are_torn_or_no_entries_are_passed_over(line: str, tmp_path: Path) -> None:
    journal = write(tmp_path) / "journal-00000.jsonl"
    journal.write_text(line + "\n" + journal.read_text())
    assert build_table(tmp_path)[1] == 0


# -- cost tables, kept texts, prompt sets -----------------------------------------------------------------------------

COSTS = {
    "target": [[[1.0, 2.0]]], "draft": [[[0.1, 0.2]]], "batches": [1], "contexts": [0], "widths": [1, 2],
    "round": 0.1, "calls": {"suffix": 0.1}, "device": "x", "source": "nominal",
}  # fmt: skip


def test_no_change_of_a_cost_table_ends_in_another_error(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    for path in places(COSTS):
        for change in (drop, *map(put, ODD)):
            file.write_text(json.dumps(changed(COSTS, path, change)))
            try:
                table = CostTable.load(file)
            except SpecdecError:
                continue
            assert table.seconds("target", 1, 5, 3) > 0
            assert CostTable.from_dict(table.to_dict()) == table


def texts(path: Path, **changes: Any) -> Path:
    save_texts(path, ["a", "b"], ["x", "y"], [[1, 2], [3]], [[4], [5, 6]])
    with np.load(path) as data:
        arrays = {**data, **changes}
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": None}, {"outputs_sizes": None}, {"prompts_sizes": np.array([1, 1])}, {"ids": np.array(["a"])},
        {"outputs_sizes": np.array([-1, 4])}, {"prompts": np.array([1.5, 2, 3])}, {"prompts": np.array([-1, 2, 3])},
        {"prompts": np.array(["a", "b", "c"])}, {"ids": np.array(3)}, {"prompts": np.array([[1, 2, 3]])},
        {"ids": np.array([None, {}], dtype=object)},
    ],
    ids=str,
)  # fmt: skip
def test_kept_texts_that_do_not_fit_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    assert len(load_texts(texts(tmp_path / "sound.npz"))) == 2
    with pytest.raises(SpecdecError, match=r"texts\.npz is not a file of texts"):
        load_texts(texts(tmp_path / "texts.npz", **changes))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_kept_texts_that_are_cut_are_refused(share: float, tmp_path: Path) -> None:
    file = texts(tmp_path / "texts.npz")
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(SpecdecError, match=r"texts\.npz"):
        load_texts(file)


RECORDS = [
    {"prompt": "a", "id": "1", "category": "x"},
    {"turns": ["a", "b"], "question_id": 2},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
    {"conversations": [{"from": "human", "value": [{"type": "text", "text": "b"}]}]},
]


def test_no_change_of_a_prompt_set_ends_in_another_error(tmp_path: Path) -> None:
    file, rng = tmp_path / "set.jsonl", random.Random(5)
    for path in places(RECORDS):
        for change in (drop, *map(put, rng.sample(ODD, 6))):
            file.write_text("".join(json.dumps(record) + "\n" for record in changed(RECORDS, path, change)))
            try:
                prompts = load_prompts(file, limit=3)
            except SpecdecError as error:
                message = str(error)
            else:
                assert all(isinstance(p.text, str) and p.chat() for p in prompts)
                continue
            assert "set.jsonl, line " in message or "set/" in message or "holds no prompts" in message
