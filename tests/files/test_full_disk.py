"""A disk that is full while something is written: one line that names the file, the old file whole, nothing left beside
it, and what was made before is kept."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from specdec.drafters.eagle3.export import export
from specdec.drafters.ngram.lookup_cache import LookupCache
from specdec.drafters.self_speculation.adapter import ExitAdapter
from specdec.errors import SpecdecError
from specdec.files.compact_json import write_json
from specdec.files.texts import unfinished, write_file
from specdec.research.ablation.journal import Journal, read_journals
from specdec.research.offline.replay import save_texts
from specdec.training.checkpoint import write_checkpoint
from tests.cli.test_cli import run
from tests.helpers.eagle3 import random_head
from tests.helpers.grid import save_pair

LIMIT = 512  # bytes that fit into a file


@contextmanager
def full_disk(most: int = LIMIT) -> Iterator[None]:
    """The system takes no more than `most` bytes of any file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def checkpoint(path: Path) -> None:
    write_checkpoint(path.parent, {"module": nn.Linear(64, 64)}, "mark", 1)


def numbers(count: int = 4000) -> list[int]:
    return [int(n) for n in np.random.default_rng(0).integers(0, 1 << 30, count)]


WRITERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a result": ("a.json", lambda path: write_json(path, {"rows": numbers()})),
    "a text": ("a.txt", lambda path: write_file(path, "x" * 4096, "text")),
    "a lookup cache": ("a.bin", lambda path: LookupCache(parts={(i,): 1 << 32 for i in range(500)}).save(path)),
    "a checkpoint": ("checkpoint.pt", checkpoint),
    "a head": ("model.safetensors", lambda path: export(random_head(0), path.parent, "safeailab")),
    "an adapter": ("adapter.safetensors", lambda path: ExitAdapter(2, 64, 16).save(path.parent, torch.float32)),
    "texts": ("a.npz", lambda path: save_texts(path, ["a"], ["b"], [numbers()], [numbers()])),
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_old_file_stays_and_a_line_names_it(name: str, tmp_path: Path) -> None:
    file, write = WRITERS[name]
    path = tmp_path / file
    path.write_bytes(b"old")
    with full_disk(), pytest.raises(SpecdecError, match=r"[Ff]ile too large|write failed|unexpected pos") as error:
        write(path)
    assert "\n" not in str(error.value)
    assert file in str(error.value) or name == "a head"  # whose config comes first
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == [file]
    write(path)
    assert path.read_bytes() != b"old"


def test_other_errors_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    def fail(error: Exception) -> None:
        with unfinished(tmp_path / "a", "file") as new:
            new.write_text("half")
            raise error

    with pytest.raises(KeyError):
        fail(KeyError("mine"))
    with pytest.raises(SpecdecError, match=r"^already said$"):
        fail(SpecdecError("already said"))
    assert list(tmp_path.iterdir()) == []


def test_a_journal_keeps_its_rows_and_goes_on(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"kind": "note", "number": i, "text": "x" * 100} for i in range(9)]
    written: list[int] = []

    def append() -> None:
        with Journal(tmp_path) as journal:
            for row in rows:
                journal.append([row])
                written.append(row["number"])

    with full_disk(), pytest.raises(SpecdecError, match=r"journal-00000.jsonl cannot be written"):
        append()
    assert 0 < len(written) < 9
    with Journal(tmp_path) as journal:
        journal.append(rows[len(written) :])
    assert [entry["number"] for entry in read_journals(tmp_path)] == list(range(9))


def test_generate_shows_the_texts_that_cannot_be_written(tmp_path: Path) -> None:
    pair, out = save_pair(tmp_path), tmp_path / "out.jsonl"
    out.write_text("old")
    command = (
        "generate",
        "--target",
        pair["target"],
        "--prompt",
        "def add",
        "--max-new-tokens",
        "4",
        "--out",
        str(out),
    )
    with full_disk():
        done = run(*command, "--json")
    assert done.exit_code == 2
    assert done.stderr == f"error: --out {out} cannot be written: File too large\n"
    assert len(json.loads(done.stdout)["token_ids"][0]) == 4
    assert out.read_text() == "old"


def test_a_full_disk_that_nobody_expected_is_a_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("specdec.research.demo.run_demo", full)
    done = run("demo")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: No space left on device: free some")
