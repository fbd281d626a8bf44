"""What a trace must be before anything works with it: a file that was edited by hand is refused where it is wrong.

First the files' own form (`check_document`, `check_arrays`), then the rounds, whose parts must fit together: everything
that looks at a trace (the token page, analysis, the terminal) relies on what is checked here, and on no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.errors import SpecdecError
from specdec.files.forms import ANYTHING, TEXT, WHOLE, MapOf, Maybe, check, number, shown, whole

if TYPE_CHECKING:
    from specdec.decoding.result import Round
    from specdec.research.traces.trace import Trace

MOST_ID = (1 << 31) - 1  # ids are int32 on disk
ROUNDING = 1e-4  # how far rounding may carry a probability over 1
IDS = [whole(0, MOST_ID)]
ROW = {
    "prompt": IDS, "output": IDS, "finish_reason": TEXT, "prompt_text": TEXT, "pieces": [TEXT], "id": TEXT,
    "category": TEXT,
}  # fmt: skip
DOCUMENT = {
    "arrays": {"sha256": TEXT},
    "rounds": WHOLE,
    "names": {"strategy": [TEXT], "finish_reason": [TEXT]},
    "texts": [Maybe(TEXT)],
    "rows": [ROW],
    "tokens": MapOf(TEXT),
    "stats": {"emitted_tokens": WHOLE, "rounds": WHOLE, "tokens_per_round": Maybe(number(0.0))},
    "provenance": MapOf(ANYTHING),
}
KINDS = {"i": "whole numbers", "f": "numbers", "u": "0 or 1"}


def check_document(document: Mapping[str, Any], where: str) -> None:
    """The JSON part. Raises SpecdecError."""
    check(document, DOCUMENT, where)
    for name in ("settings", "versions"):
        check(document["provenance"].get(name, {}), MapOf(ANYTHING), f"{where}: provenance.{name}")
    for i, row in enumerate(document["rows"]):
        extra = sorted(set(row) - set(ROW))
        if extra:
            raise SpecdecError(f"{where}: rows[{i}].{extra[0]}: no row has that; a row has {', '.join(ROW)}")
        if row["pieces"] and len(row["pieces"]) != len(row["output"]):
            raise SpecdecError(f"{where}: rows[{i}].pieces: {len(row['pieces'])} of {len(row['output'])} output tokens")
    for token in document["tokens"]:
        if not (token.isascii() and token.isdigit() and len(token) <= len(str(MOST_ID))):
            raise SpecdecError(f"{where}: tokens: {shown(token)} is no token id")
    if len(document["texts"]) != document["rounds"]:
        raise SpecdecError(f"{where}: it lists {document['rounds']} rounds and {len(document['texts'])} texts")


def check_array(
    arrays: Mapping[str, np.ndarray], name: str, kind: Any, shape: Sequence[int | None], where: str
) -> None:
    """One array: there, of this kind, and of this shape (None: of any length). Raises SpecdecError."""
    if name not in arrays:
        raise SpecdecError(f"{where}: {name} is missing")
    array, wanted = arrays[name], np.dtype(kind)
    if array.dtype != wanted:
        raise SpecdecError(f"{where}: {name} holds {array.dtype}, expected {wanted} ({KINDS[wanted.kind]})")
    fits = array.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, array.shape, strict=True))
    if not fits:
        sizes = " x ".join("n" if n is None else str(n) for n in shape)
        raise SpecdecError(f"{where}: {name} has the shape {' x '.join(map(str, array.shape))}, expected {sizes}")


def check_range(array: np.ndarray, name: str, low: int, high: int, where: str) -> None:
    """Raise SpecdecError for the first whole number outside [low, high]."""
    wrong = np.flatnonzero((array < low) | (array > high))
    if len(wrong):
        place = f"{name}[{wrong[0]}]"
        raise SpecdecError(f"{where}: {place}: expected {low} to {high}, got {array.flat[wrong[0]]}")


def check_rounds(trace: Trace, where: str) -> None:
    """Whether every round fits together and all of them make the rows. Raises SpecdecError."""
    emitted: list[list[int]] = [[] for _ in trace.rows]
    for i, entry in enumerate(trace.rounds):
        place = f"{where}: round {i}"
        if not 0 <= entry.row < len(trace.rows):
            raise SpecdecError(f"{place}: row: expected 0 to {len(trace.rows) - 1}, got {entry.row}")
        position = len(trace.rows[entry.row].prompt) + len(emitted[entry.row]) - 1
        if entry.position != position:
            raise SpecdecError(f"{place}: position: the row's newest token is at {position}, got {entry.position}")
        fault = next(_faults(entry), None)
        if fault is not None:
            raise SpecdecError(f"{place}: {fault}")
        emitted[entry.row] += entry.tokens
    for i, row in enumerate(trace.rows):
        if emitted[i] != row.output:
            raise SpecdecError(f"{where}: rows[{i}].output is not what its rounds emitted")
    total = sum(map(len, emitted))
    if trace.stats["emitted_tokens"] != total:
        counted = trace.stats["emitted_tokens"]
        raise SpecdecError(f"{where}: stats.emitted_tokens is {counted}, and the rows hold {total} tokens")
    _check_texts(trace, where)


def _check_texts(trace: Trace, where: str) -> None:
    """Where ids have texts, all that occur have one."""
    known = set(trace.tokens)
    for i, row in enumerate(trace.rows) if known else ():
        unknown = next((t for t in (*row.prompt, *row.output) if t not in known), None)
        if unknown is not None:
            raise SpecdecError(f"{where}: rows[{i}]: the id {unknown} is not among tokens")


PROBABILITY = (0.0, 1.0 + ROUNDING)
# Ranges of the numbers of a round and of its details; where a row's distribution broke down, probabilities may be NaN.
RANGES: dict[str, tuple[float, float]] = {
    "draft": (0, MOST_ID), "tokens": (0, MOST_ID), "p": PROBABILITY, "q": PROBABILITY,
    "rank": (0, MOST_ID), "tv": PROBABILITY, "expected": PROBABILITY, "entropy": (0.0, math.inf),
    "emitted_p": PROBABILITY, "emitted_rank": (0, MOST_ID), "top_ids": (0, MOST_ID), "top": PROBABILITY,
    "draft_top_ids": (0, MOST_ID), "draft_top": PROBABILITY,
}  # fmt: skip


def _faults(r: Round) -> Iterator[str]:
    """What is wrong with a round."""
    failed, d = r.finish_reason == "error", r.details
    for name, (low, high) in RANGES.items():
        for i, value in enumerate(getattr(r if hasattr(r, name) else d, name, None) or ()):
            many = isinstance(value, list)
            for place, x in enumerate(value) if many else [(i, value)]:
                yield from _outside(f"{name}[{i}][{place}]" if many else f"{name}[{i}]", x, low, high, failed)
    for name, seconds in r.times.items():
        yield from _outside(f"seconds: {name}", seconds, 0.0, math.inf)
    if r.accepted > len(r.draft):
        yield f"accepted: {r.accepted} of {len(r.draft)} drafted tokens"
    if len(r.tokens) > r.accepted + 1:
        yield f"tokens: {len(r.tokens)} emitted with {r.accepted} accepted"
    if r.bonus is not None:
        yield from _outside("bonus", r.bonus, 0, MOST_ID)
    yield from _tree_faults(r)
    if d is not None:
        for i, column in enumerate(d.emitted_column):
            yield from _outside(f"emitted_column[{i}]", column, 0, len(r.draft))
        if (d.draft_top_ids is None) != (d.draft_top is None):
            yield "draft_top_ids and draft_top: there are both, or none"
        if len(d.emitted_p) < len(r.tokens):
            yield f"emitted_p: {len(d.emitted_p)} of {len(r.tokens)} tokens"


def _tree_faults(r: Round) -> Iterator[str]:
    if (r.parents is None) != (r.path is None):
        yield "parents and path: a tree has both, a chain none"
    if r.parents is None or r.path is None:
        return
    for node, parent in enumerate(r.parents):
        if not -1 <= parent < node:
            yield f"parents[{node}]: expected -1 to {node - 1}, got {parent}: a node follows an earlier one"
    before = -1
    for i, node in enumerate(r.path):
        if not 0 <= node < len(r.parents) or r.parents[node] != before:
            yield f"path[{i}]: node {node} does not follow node {before}"
            return
        before = node


def _outside(name: str, value: float | None, low: float, high: float, failed: bool = False) -> Iterator[str]:
    if value is not None and not low <= value <= high and not (failed and math.isnan(value)):
        upper = "or more" if high in (math.inf, MOST_ID) else f"to {high:g}"
        yield f"{name}: expected {low:g} {upper}, got {value}"
