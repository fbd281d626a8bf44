"""Which model it is: what it was loaded from, for everything that says what a result was made with."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

# Models that specdec loaded: name and revision as they were asked for. transformers notes where the files lie, which
# for an embedded model or a GGUF file is another name, and no revision.
_LOADED: WeakKeyDictionary[Any, tuple[str, str | None]] = WeakKeyDictionary()


def note_name(model: Any, name: str | Path, revision: str | None) -> None:
    """Note what a model was loaded from."""
    _LOADED[model] = str(name), revision


def model_name(model: Any) -> dict[str, str | None]:
    """Name a model.

    name: the hub id, folder or file that it was loaded from; of a module in hand its `name_or_path`, if it has one.
    revision: as it was asked for; None = none was.
    commit: the hub's commit that was loaded; None for local files.
    class: of the module.
    """
    name, revision = _LOADED.get(model, (getattr(model, "name_or_path", None) or None, None))
    commit = getattr(model.config, "_commit_hash", None)
    return {"name": name, "revision": revision, "commit": commit, "class": type(model).__name__}
