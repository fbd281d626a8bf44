"""JSON and YAML as other people write it: whatever is wrong with it becomes one clear error."""

from __future__ import annotations

import json
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
        raise SpecdecError(f"{where}: not JSON that can be read: {_first_line(error)}") from None


def parse_yaml(text: str, where: str) -> Any:
    """A YAML document, likewise."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecdecError(f"{where}: not valid YAML: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
