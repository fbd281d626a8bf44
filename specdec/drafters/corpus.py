"""A corpus for `rest`: files of text or token ids, tokenised and indexed once for every tokenizer of a process.

A file is a text (one document), `.npy` (token ids, a document a row), or `.json` and `.jsonl` with texts, lists of ids,
or records as prompt sets have them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from specdec.drafters.suffix_index import SuffixStore
from specdec.errors import SpecdecError
from specdec.files.texts import parse_json, parse_json_lines, read_text, reading

LINES, DOCUMENT, IDS = (".jsonl", ".ndjson"), ".json", ".npy"
FIELDS = ("text", "prompt", "turns", "messages", "conversations", "content", "value", "answer", "output", "token_ids")

Stamp = tuple[str, int, int]  # path, time and size: another file is read anew


def stamp(path: Path) -> Stamp:
    """Name a file and its state. Raises SpecdecError if it is not there."""
    with reading(path, "rest: corpus") as found:
        state = os.stat(found)
        return str(found), state.st_mtime_ns, state.st_size


@lru_cache(maxsize=4)
def read_store(files: tuple[Stamp, ...], tokenizer: Any, depth: int) -> SuffixStore:
    """Read and index a corpus. Raises SpecdecError for texts without a tokenizer and files that are no corpus."""
    store = SuffixStore(depth=depth)
    for path, _, _ in files:
        for document in documents(Path(path)):
            if isinstance(document, str):
                if tokenizer is None:
                    raise SpecdecError(f"rest: {path} holds text, and the decoder has no tokenizer: give token ids")
                document = tokenizer(document, add_special_tokens=False)["input_ids"]
            store.add(document)
    if store.size == 0:
        raise SpecdecError(f"rest: {', '.join(path for path, _, _ in files)}: the corpus is empty")
    store.freeze()
    return store


def documents(path: Path) -> Iterator[str | list[int] | np.ndarray]:
    """Yield the documents of a file: texts or ids. Raises SpecdecError."""
    what, kind = "rest: corpus", path.suffix.lower()
    if kind == IDS:
        try:
            with reading(path, what) as found:
                ids = np.load(found, allow_pickle=False)
        except SpecdecError:
            raise
        except Exception:  # numpy reads the head as Python code, which can fail in any way
            raise SpecdecError(f"{what} {path} is no array of numpy's, or damaged") from None
        if not isinstance(ids, np.ndarray):
            raise SpecdecError(f"{what} {path} is an archive of numpy's: save one array")
        if ids.dtype.kind not in "iu" or (ids.size and ids.min() < 0):
            raise SpecdecError(f"{what} {path} holds no token ids: expected whole numbers from 0 on")
        yield from np.atleast_2d(ids)
    elif kind in LINES:
        for number, record in parse_json_lines(read_text(path, what), str(path)):
            yield from _parts(record, f"{path}, line {number}")
    elif kind == DOCUMENT:
        yield from _parts(parse_json(read_text(path, what), str(path)), str(path))
    else:
        yield read_text(path, what)


def _parts(record: Any, where: str) -> Iterator[str | list[int]]:
    """Yield the texts and lists of ids in a JSON record."""
    if isinstance(record, str):
        yield record
    elif isinstance(record, Mapping):
        for name in FIELDS:
            if record.get(name) is not None:
                yield from _parts(record[name], where)
    elif isinstance(record, list) and record and all(type(t) is int and t >= 0 for t in record):
        yield record
    elif isinstance(record, list):
        for part in record:
            yield from _parts(part, where)
    else:
        raise SpecdecError(f"{where}: expected texts, lists of token ids, or records with {', '.join(FIELDS[:4])}")
