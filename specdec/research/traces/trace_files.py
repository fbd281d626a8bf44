"""Traces on disk: NAME.safetensors holds the numbers as flat arrays, NAME.json their structure, texts and provenance.

Lists of different lengths are stored end to end, with how many entries belong to each round under `sizes/`. Numbers
come back exactly: probabilities are float32 where they are computed, times float64. The JSON file carries a hash of all
that both hold: halves of two traces, and a trace that was edited, are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load as read_arrays
from safetensors.numpy import save as arrays_bytes

from specdec.decoding.probe import RoundDetails
from specdec.decoding.result import Round
from specdec.errors import SpecdecError
from specdec.files.texts import as_path, parse_json, read_bytes, read_text, write_file

if TYPE_CHECKING:
    from specdec.research.traces.trace import Trace

FORMAT, VERSION = "specdec-trace", 3
FROM_ZERO = 2  # the version whose ranks count from 0
NOTHING = -1  # in place of an id or a name that a round has not
# field -> (which of its round's lengths it has, type)
LISTS = {"draft": ("drafted", np.int32), "p": ("drafted", np.float32), "tokens": ("emitted", np.int32)}
OPTIONAL = {"q": ("drafted", np.float32), "parents": ("drafted", np.int16), "path": ("accepted", np.int16)}
DETAILS = {
    "rank": ("drafted", np.int32), "tv": ("drafted", np.float32), "expected": ("drafted", np.float32),
    "entropy": ("columns", np.float32), "top_ids": ("columns", np.int32), "top": ("columns", np.float32),
    "draft_top_ids": ("drafted", np.int32), "draft_top": ("drafted", np.float32),
    "emitted_p": ("taken", np.float32), "emitted_rank": ("taken", np.int32), "emitted_column": ("taken", np.int16),
}  # fmt: skip
SOMETIMES = (*OPTIONAL, "tv", "draft_top_ids", "draft_top")  # rounds may lack these
WIDE = ("top_ids", "top", "draft_top_ids", "draft_top")


def save(trace: Trace, path: str | Path) -> Path:
    """Write the two files; returns the JSON file's path. Raises SpecdecError where they cannot be written."""
    arrays, text = paths_of(path)
    names: dict[str, list[str]] = {"strategy": trace.strategies, "finish_reason": []}
    data = arrays_bytes(_arrays(trace, names))
    document = {
        "format": FORMAT,
        "version": VERSION,
        "rounds": len(trace.rounds),
        "names": names,
        "texts": [r.text for r in trace.rounds],
        "rows": [asdict(row) for row in trace.rows],
        "tokens": trace.tokens,
        "stats": trace.stats,
        "provenance": trace.provenance,
    }
    document = json.loads(json.dumps(document))  # keys are texts
    document["sha256"] = _hash(document, data)
    with suppress(OSError):  # the files themselves say what is wrong
        text.parent.mkdir(parents=True, exist_ok=True)
    write_file(arrays, data, "trace file")
    return write_file(text, json.dumps(document, ensure_ascii=False), "trace file")


def paths_of(path: str | Path) -> tuple[Path, Path]:
    """The two files of a trace, numbers first. Raises SpecdecError for the name of a folder."""
    name = as_path(path, "trace file")
    if not name.name:
        raise SpecdecError(f"trace file: {str(path)!r} is the name of a folder")
    stem = name.with_suffix("") if name.suffix in (".json", ".safetensors") else name
    return stem.with_name(f"{stem.name}.safetensors"), stem.with_name(f"{stem.name}.json")


def _arrays(trace: Trace, names: dict[str, list[str]]) -> dict[str, np.ndarray]:
    rounds = trace.rounds
    reasons = names["finish_reason"] = sorted({r.finish_reason for r in rounds if r.finish_reason is not None})
    arrays: dict[str, np.ndarray] = {
        "row": np.array([r.row for r in rounds], np.int32),
        "position": np.array([r.position for r in rounds], np.int32),
        "accepted": np.array([r.accepted for r in rounds], np.int32),
        "bonus": np.array([NOTHING if r.bonus is None else r.bonus for r in rounds], np.int32),
        "strategy": np.array([_index(names["strategy"], r.strategy) for r in rounds], np.int16),
        "finish_reason": np.array([_index(reasons, r.finish_reason) for r in rounds], np.int16),
        "seconds": np.array([[r.times["draft"], r.times["verify"]] for r in rounds], np.float64).reshape(-1, 2),
        "sizes/drafted": np.array([len(r.draft) for r in rounds], np.int32),
        "sizes/emitted": np.array([len(r.tokens) for r in rounds], np.int32),
    }
    details = [r.details for r in rounds]
    arrays["sizes/columns"] = np.array([0 if d is None else len(d.entropy) for d in details], np.int32)
    arrays["sizes/taken"] = np.array([0 if d is None else len(d.emitted_p) for d in details], np.int32)
    arrays["has/details"] = np.array([d is not None for d in details], np.uint8)
    for group, holders in ((LISTS | OPTIONAL, rounds), (DETAILS, details)):
        for name, (_, kind) in group.items():
            values = [None if holder is None else getattr(holder, name) for holder in holders]
            if name in SOMETIMES:
                arrays[f"has/{name}"] = np.array([v is not None for v in values], np.uint8)
            flat: list[Any] = [np.nan if x is None else x for v in values if v is not None for x in v]
            best = len(flat[0]) if name in WIDE and flat else 1
            arrays[name] = np.array(flat, kind).reshape((len(flat), best) if name in WIDE else (len(flat),))
    return arrays


def _index(names: Sequence[str], name: str | None) -> int:
    return NOTHING if name is None else names.index(name)


def load(path: str | Path) -> tuple[list[dict[str, Any]], list[Round], dict[int, str], dict[str, Any], dict[str, Any]]:
    """Read the two files: rows, rounds, tokens, provenance and stats of the trace. Raises SpecdecError where one is
    missing, is no part of a trace, belongs to another, or was changed."""
    arrays_path, text_path = paths_of(path)
    text, data = read_text(text_path, "trace file"), read_bytes(arrays_path, "trace file")
    try:
        document = parse_json(text, str(text_path))
    except SpecdecError as error:
        raise SpecdecError(f"{text_path} is not a trace: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise SpecdecError(f"{text_path} is not a trace: it does not say format = {FORMAT!r}")
    if document.get("version") not in (VERSION, FROM_ZERO):
        raise SpecdecError(f"{text_path} is a trace of version {document.get('version')!r}; this is version {VERSION}")
    if document.pop("sha256", None) != _hash(document, data):
        raise SpecdecError(
            f"{text_path} and {arrays_path.name} are not as they were written together: record the trace again"
        )
    arrays = read_arrays(data)
    if document["version"] == FROM_ZERO:
        arrays |= {name: arrays[name] + 1 for name in ("rank", "emitted_rank")}
    rounds = list(_rounds(document, arrays))
    tokens = {int(token): text for token, text in document["tokens"].items()}
    return document["rows"], rounds, tokens, document["provenance"], document["stats"]


def _hash(document: Mapping[str, Any], data: bytes) -> str:
    """The SHA-256 of what both files hold."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode() + data).hexdigest()


def _rounds(document: dict[str, Any], arrays: dict[str, np.ndarray]) -> Iterator[Round]:
    names = {kind: dict(enumerate(listed)) for kind, listed in document["names"].items()}
    lists = {name: _split(name, size, arrays) for name, (size, _) in (LISTS | OPTIONAL | DETAILS).items()}
    for i, text in enumerate(document["texts"]):
        values = {name: split[i] for name, split in lists.items()}
        details = {name: values.pop(name) for name in DETAILS}
        draft, verify = arrays["seconds"][i].tolist()
        bonus = int(arrays["bonus"][i])
        if details["expected"] is not None:
            details["expected"] = [None if np.isnan(x) else x for x in details["expected"]]
        yield Round(
            row=int(arrays["row"][i]),
            position=int(arrays["position"][i]),
            strategy=names["strategy"].get(int(arrays["strategy"][i])),
            accepted=int(arrays["accepted"][i]),
            bonus=None if bonus == NOTHING else bonus,
            text=text,
            times={"draft": draft, "verify": verify},
            finish_reason=names["finish_reason"].get(int(arrays["finish_reason"][i])),
            details=RoundDetails(**details) if arrays["has/details"][i] else None,
            **values,
        )


def _split(name: str, size: str, arrays: dict[str, np.ndarray]) -> list[Any]:
    """A flat array as one list a round; None where the round has none."""
    if name in SOMETIMES:
        has = arrays[f"has/{name}"]
    else:
        has = arrays["has/details"] if name in DETAILS else np.ones(len(arrays["row"]), np.uint8)
    lengths = np.where(has > 0, arrays["accepted" if size == "accepted" else f"sizes/{size}"], 0)
    ends = np.cumsum(lengths)
    flat = arrays[name].tolist()
    return [flat[a:b] if there else None for a, b, there in zip(ends - lengths, ends, has, strict=True)]
