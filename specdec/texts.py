"""Files of text: JSON and YAML as other people write it, whose every fault becomes one clear error, and writing."""

from __future__ import annotations

import json
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from specdec.errors import SpecdecError


def parse_json(text: str, where: str) -> Any:
    """A JSON document; `where` names it in the SpecdecError that any text that is none raises, also one nested too
    deeply or with too long a number."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecdecError(f"{where}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise SpecdecError(f"{where}: not JSON that can be read: {first_line(error)}") from None


def parse_yaml(text: str, where: str) -> Any:
    """A YAML document, likewise; a key that stands twice in a mapping is a fault, not one value that wins."""
    try:
        return yaml.load(text, _UniqueKeys)  # a safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecdecError(f"{where}: not valid YAML: {first_line(error)}") from None


class _UniqueKeys(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise yaml.YAMLError(f"the key {twice!r} stands twice in the mapping at line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


def first_line(error: Exception) -> str:
    """What an error says first; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: it holds no half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def write_atomically(path: Path, data: str | bytes) -> None:
    """A reader finds the old file or the new one, never half of it; a write that fails leaves the old one alone.

    Raises OSError, with the name of `path`.
    """
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("xb") as file:
            file.write(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):
            unfinished.unlink()
