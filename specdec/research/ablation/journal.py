"""The journal: one JSON object a line, appended and synced as rows are finished. Nothing in it is ever rewritten.

A process that is killed leaves at most one torn line, at the end of its own file: no newline, or no JSON. The owner
cuts it off before it appends; readers pass over it. Each process of a launch has a file of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError

PATTERN = "journal-*.jsonl"


class Journal:
    """The file of one process, open for appending. Raises SpecdecError where another process holds it."""

    def __init__(self, folder: Path, rank: int = 0):
        self.path = folder / f"journal-{rank:05d}.jsonl"
        self.file = self.path.open("ab+")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.close()
            raise SpecdecError(f"{self.path} is in use: another process writes to it") from None
        self.cut = self._cut_torn_end()

    def append(self, entries: Sequence[dict[str, Any]]) -> None:
        """Write entries; when this returns they are on the disk."""
        lines = "".join(json.dumps(entry, ensure_ascii=False, separators=(",", ":")) + "\n" for entry in entries)
        self.file.write(lines.encode("utf-8", "surrogatepass"))
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Let other processes have the file."""
        self.file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _cut_torn_end(self) -> int:
        """Bytes cut off."""
        self.file.seek(0)
        data = self.file.read()
        end = len(data)
        while end > 0:
            start = data.rfind(b"\n", 0, end - 1) + 1
            if data[end - 1 : end] == b"\n" and _parse(data[start:end]) is not None:
                break
            end = start
        self.file.truncate(end)
        self.file.seek(0, os.SEEK_END)
        return len(data) - end


def read_journals(folder: Path) -> Iterator[dict[str, Any]]:
    """Every whole entry of every process's file, in the order of the files. What is torn or no JSON is passed over:
    its rows count as not done."""
    for path in sorted(folder.glob(PATTERN)):
        *lines, _ = path.read_bytes().split(b"\n")
        for line in lines:
            entry = _parse(line)
            if entry is not None:
                yield entry


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line.decode("utf-8", "surrogatepass"))
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
