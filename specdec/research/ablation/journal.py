"""The journal: one JSON object a line, appended and synced as rows are finished. Nothing in it is ever rewritten.

A process that is killed leaves at most one torn line, at the end of its own file: no newline, or no JSON. The owner
cuts it off before it appends; readers pass over it. Each process of a launch has a file of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.files.forms import ANYTHING, BOOL, NUMBER, SECONDS, TEXT, WHOLE, MapOf, Maybe, OneOf, check, shown, whole
from specdec.files.texts import parse_json, read_bytes, writing
from specdec.stats import RoundRecord

PATTERN = "journal-*.jsonl"
FORMS: dict[str, Any] = {
    "row": {
        "cell": TEXT, "prompt": TEXT, "fingerprint": TEXT, "call": WHOLE, "status": OneOf(("ok", "error")),
        "error": Maybe(TEXT),
    },
    "facts": {"cell": TEXT, "facts": Maybe(MapOf(ANYTHING))},
    "session": {"rows": WHOLE, "wall": NUMBER, "load": NUMBER, "decode": NUMBER},
}  # fmt: skip
RESULT = {"tokens": [WHOLE], "records": [[ANYTHING]], "seconds": SECONDS}  # of a row that came through
OPTIONAL: dict[str, Any] = {
    "tokens": Maybe([WHOLE]), "records": Maybe([[ANYTHING]]), "text": Maybe(TEXT), "finish_reason": Maybe(TEXT),
    "prompt_tokens": Maybe(WHOLE), "prompt_hash": Maybe(TEXT), "chat_template": Maybe(TEXT), "row_seed": Maybe(WHOLE),
    "exact": Maybe(BOOL), "lossy": Maybe(BOOL), "versions": Maybe(TEXT), "weights": Maybe(MapOf(TEXT)),
    "strategy_seconds": Maybe(MapOf(SECONDS)), "seconds": Maybe(SECONDS), "prefill_seconds": Maybe(SECONDS),
    "draft_seconds": Maybe(SECONDS), "verify_seconds": Maybe(SECONDS), "other_seconds": Maybe(SECONDS),
    "distance": Maybe(NUMBER), "skipped": Maybe(MapOf(SECONDS)),
}  # fmt: skip
LONGEST_DRAFT = whole(0, 1 << 17)  # figures have an entry for each position
RECORD = {
    "strategy": Maybe(TEXT), "drafted": LONGEST_DRAFT, "accepted": LONGEST_DRAFT, "levels": Maybe(LONGEST_DRAFT),
    "exhausted": BOOL, "own": BOOL,
}  # fmt: skip


class Journal:
    """The file of one process, open for appending. Raises SpecdecError where another process holds it."""

    def __init__(self, folder: Path, rank: int = 0):
        self.path = folder / f"journal-{rank:05d}.jsonl"
        try:
            self.file = self.path.open("ab+")
        except OSError as error:
            raise SpecdecError(f"cannot write {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.close()
            raise SpecdecError(
                f"{self.path} is in use: another process writes to it; give each its own --shard"
            ) from None
        self.cut = self._cut_torn_end()

    def append(self, entries: Sequence[dict[str, Any]]) -> None:
        """Write entries; when this returns they are on the disk."""
        lines = "".join(json.dumps(entry, ensure_ascii=False, separators=(",", ":")) + "\n" for entry in entries)
        with writing(self.path, "journal"):
            self.file.write(lines.encode("utf-8", "surrogatepass"))
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self) -> None:
        """Let other processes have the file."""
        with suppress(OSError):  # what could not be written has been said
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
    its rows count as not done. Raises SpecdecError for an entry that no run can have written."""
    for path in sorted(folder.glob(PATTERN)):
        *lines, _ = read_bytes(path, "journal").split(b"\n")
        for number, line in enumerate(lines, 1):
            entry = _parse(line)
            if entry is not None:
                _check(entry, f"{path}, line {number}")
                yield entry


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = parse_json(line.decode("utf-8", "surrogatepass"), "journal")
    except (UnicodeDecodeError, SpecdecError):
        return None
    return entry if isinstance(entry, dict) else None


def _check(entry: dict[str, Any], where: str) -> None:
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in FORMS:
        return  # nothing reads it
    check(entry, FORMS[kind], where)
    if kind == "row":
        if entry["status"] == "ok":
            check(entry, RESULT, where)
        check(entry, {name: form for name, form in OPTIONAL.items() if name in entry}, where)
        for i, record in enumerate(entry.get("records") or ()):
            _check_record(record, f"{where}: records[{i}]")


def _check_record(record: list[Any], where: str) -> None:
    """A round as it is written: `specdec.stats.RoundRecord`."""
    if not 3 <= len(record) <= len(RoundRecord._fields):
        raise SpecdecError(f"{where}: expected {', '.join(RoundRecord._fields)}, got {shown(record)}")
    check(RoundRecord(*record)._asdict(), RECORD, where)
    drafted, accepted = record[1:3]
    if accepted > drafted:
        raise SpecdecError(f"{where}: {accepted} of {drafted} drafted tokens accepted")
