"""From what users type to configs: options that were given, chains, prompts, generation options."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.config import GenerationSettings
from specdec.drafters import make_drafters
from specdec.errors import SpecdecError
from specdec.files.texts import parse_yaml, read_text

# What --dataset takes, in every verb: docs/datasets.md.
SETS = "spec-bench, humaneval, gsm8k; a JSON-lines, chat or text file; or hf:owner/name."


def given(**options: Any) -> dict[str, Any]:
    """The options that were given: everything that is not None."""
    return {name: value for name, value in options.items() if value is not None}


def refuse_beside(what: str, options: Mapping[str, Any]) -> None:
    """Raise SpecdecError for an option that was given and has no effect beside `what`."""
    for name in options:
        raise SpecdecError(f"--{name.replace('_', '-')} has no effect beside {what}")


def chain(
    text: str | None, translate: bool = False, has_draft: bool = True, known: Sequence[Any] | None = None
) -> tuple[Any, ...] | None:  # fmt: skip
    """A chain as typed, where nothing was, the known one; `none` = plain decoding; translate: set it on the draft
    models.

    Raises SpecdecError for an unknown strategy or option.
    """
    if text is None and not translate:
        return None if known is None else tuple(known)
    given_chain = (None if known is None else list(known)) if text is None else text
    drafters = [] if text is not None and text.strip() == "none" else make_drafters(given_chain, has_draft)
    if translate:
        models = [d for d in drafters if d.name == "draft-model"]
        if not models:
            raise SpecdecError("--translate needs the strategy draft-model and a draft model: give --draft")
        for model in models:
            model.translate = True
    return tuple(drafters)


def read_prompts(prompts: Sequence[str], files: Sequence[Path]) -> list[str]:
    """Prompts as typed, then one from each file; `-` is standard input. Raises SpecdecError for what cannot be read."""
    return [*prompts, *(_read(file) for file in files)]


def _read(file: Path) -> str:
    if str(file) != "-":
        return read_text(file, "prompt file")
    try:
        return sys.stdin.read().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise SpecdecError(f"standard input cannot be read as UTF-8 text: {error}") from None


def with_extra(options: dict[str, Any], pairs: Sequence[str]) -> dict[str, Any]:
    """Generation options that were given by their own names, and those of `--option name=value` with values as YAML
    reads them. Raises SpecdecError for one that was given both ways, and for one that does not exist."""
    made = dict(options)
    for pair in pairs:
        name, separator, value = (part.strip() for part in pair.partition("="))
        if not separator or not name:
            raise SpecdecError(f"--option: expected name=value, got {pair!r}")
        if name in options:
            raise SpecdecError(f"--option {name}: --{name.replace('_', '-')} says it already")
        made[name] = parse_yaml(value, f"--option {name}: the value {value!r}")
    GenerationSettings.parse(made)
    return made
