"""Write JSON for people: what fits on a line stays on one, so that a row of a table is a line of the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specdec.files.texts import write_file

WIDTH = 120
_NESTED = (Mapping, list, tuple)


def compact_json(document: Any) -> str:
    """The document as JSON, indented by one space a level, in lines of up to `WIDTH` characters where that can be.

    A list or mapping that fits stays on one line. In a table, which holds nothing but lists or mappings, each of them
    begins a line; what another list or mapping holds fills lines.
    """
    return _text(document, "", 0) + "\n"


def write_json(path: Path, document: Any) -> None:
    """Write a result's document. Raises SpecdecError for a file that cannot be written."""
    write_file(path, compact_json(document), "result")


def _text(value: Any, indent: str, used: int) -> str:
    """`value` as it follows `used` characters on its first line; its other lines begin with `indent`."""
    flat = json.dumps(value)
    if not (isinstance(value, _NESTED) and value) or used + len(flat) < WIDTH:
        return flat
    start, end = "{}" if isinstance(value, Mapping) else "[]"
    inner, parts = indent + " ", list(_parts(value))
    texts = [head + _text(part, inner, len(inner + head)) for head, part in parts]
    if all(isinstance(part, _NESTED) for _, part in parts):
        return f"{start}\n{inner}" + f",\n{inner}".join(texts) + f"\n{indent}{end}"
    return start + _filled(texts, inner, used + 1) + end


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is written before each part (its name in a mapping), and the part."""
    if isinstance(value, Mapping):
        yield from ((f"{json.dumps(str(name))}: ", part) for name, part in value.items())
    else:
        yield from (("", part) for part in value)


def _filled(texts: list[str], indent: str, used: int) -> str:
    """The texts in as few lines as hold them; one of several lines shares none with others."""
    made, at = "", used
    for i, text in enumerate(texts):
        fits = "\n" not in text and at + len(text) + 3 <= WIDTH
        if i:
            made += ", " if fits else f",\n{indent}"
            at = at + 2 if fits else len(indent)
        made += text
        at = WIDTH if "\n" in text else at + len(text)
    return made
