"""Strategies and rules by name: `name:key=value`, and classes and functions of one's own, `my_module:MyDrafter`.

A module is looked for beside the config files that were read, in the current folder (command line), and where Python
looks for modules.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from specdec.errors import SpecdecError, nearest, unknown_name
from specdec.files.texts import is_file, parse_yaml

_FOLDERS: list[Path] = []  # searched for modules, the newest first


def search_folder(folder: str | Path) -> None:
    """Look for modules in this folder first."""
    path = Path(folder).resolve()
    _FOLDERS[:] = [path, *(known for known in _FOLDERS if known != path)]


def beside_config(path: Path) -> Path:
    """The file as it is named, or, where there is none, the one of that name beside a config that was read."""
    places = [path, *(folder / path for folder in _FOLDERS)]
    return next((place for place in places if is_file(place)), path)


def parse_name(text: str, known: Collection[str], kind: str) -> tuple[str, dict[str, Any]]:
    """Split `name:key=value:key=value` into the name and its options.

    text: what the user wrote; a name that is not known may be `module:attribute`.
    known: the registered names.
    kind: "strategy" or "acceptance rule", for messages.
    """
    name, *parts = text.split(":")
    if parts and name not in known and _is_module_name(name) and parts[0].isidentifier():
        name = f"{name}:{parts.pop(0)}"
    options: dict[str, Any] = {}
    for part in parts:
        key, separator, value = part.partition("=")
        if not separator:
            raise SpecdecError(f"{kind} {name!r}: expected key=value, got {part!r}")
        if key in options:
            raise SpecdecError(f"{kind} {name!r}: {key} is given twice; give one of them")
        options[key] = parse_yaml(value, f"{kind} {name!r}: the value of {key}")
    return name, options


def split_list(text: str) -> list[str]:
    """Split a comma-separated list of names with options, but not inside brackets, and drop empty parts."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def find_object(name: str, known: Collection[str], kind: str) -> Any:
    """The class or function behind `module:attribute`. Raises SpecdecError where there is none."""
    module_name, separator, attribute = name.partition(":")
    if not separator:
        raise unknown_name(kind, name, known)
    module = _import_module(module_name, f"{kind} {name!r}")
    if not hasattr(module, attribute):
        public = [n for n in vars(module) if not n.startswith("_")]
        hint = nearest(attribute, public)
        raise SpecdecError(f"{kind} {name!r}: {getattr(module, '__file__', module_name)} has no {attribute!r}{hint}")
    return getattr(module, attribute)


def parameters(make: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a class or function that can be given by name, with their defaults."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        found = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # a class in C that does not say
        return {}
    return {p.name: p.default for p in found if p.kind in kinds}


def make_object(make: Callable[..., Any], name: str, options: Mapping[str, Any], kind: str) -> Any:
    """Call a class or function with the options that a user gave. Raises SpecdecError for those that it refuses."""
    for key in options:
        if key not in parameters(make):
            raise unknown_name(f"option of {kind} {name!r}", key, parameters(make))
    try:
        return make(**options)
    except SpecdecError:
        raise
    except TypeError as error:
        raise SpecdecError(f"{kind} {name!r}: {error}") from error
    except Exception as error:  # code of the user's
        raise SpecdecError(f"{kind} {name!r}: {type(error).__name__}: {error}") from error


def source_hash(name: str) -> str | None:
    """A short hash of the file behind `module:attribute`; None for a registered name."""
    module = sys.modules.get(name.partition(":")[0]) if ":" in name else None
    file = getattr(module, "__file__", None)
    return None if file is None else _file_hash(file)


def code_hashes(objects: Iterable[Any]) -> dict[str, str]:
    """Short hashes of the files of the user's own code behind drafters and rules, by module."""
    modules = {getattr(o, "__module__", None) or "" for o in objects}
    own = {name: sys.modules.get(name) for name in sorted(modules) if name.split(".")[0] != "specdec"}
    files = {name: getattr(module, "__file__", None) for name, module in own.items()}
    return {name: _file_hash(file) for name, file in files.items() if file is not None and Path(file).is_file()}


def _file_hash(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


def _is_module_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _import_module(name: str, where: str) -> ModuleType:
    if not _is_module_name(name):
        raise SpecdecError(f"{where}: {name!r} is not the name of a module")
    try:
        with _searching():
            module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise SpecdecError(f"{where}: the module cannot be imported: {error}") from error
        files = [file.stem for folder in _FOLDERS for file in folder.glob("*.py")]
        places = [*map(str, _FOLDERS), "Python's path"]
        hint = nearest(name, files)
        raise SpecdecError(f"{where}: there is no module {name!r} in {' or '.join(places)}{hint}") from None
    except (Exception, SystemExit) as error:  # code of the user's
        raise SpecdecError(f"{where}: the module cannot be imported: {type(error).__name__}: {error}") from error
    _check_place(module, name, where)
    return module


@contextmanager
def _searching() -> Iterator[None]:
    before = list(sys.path)
    sys.path[:0] = map(str, _FOLDERS)
    importlib.invalidate_caches()  # the file may be younger than Python's list of the folder
    try:
        yield
    finally:
        sys.path[:] = before


def _check_place(module: ModuleType, name: str, where: str) -> None:
    """Raise SpecdecError if another file of this name was imported before: Python keeps one module of a name."""
    relative = Path(*name.split("."))
    found = (f / end for f in _FOLDERS for end in (relative.with_suffix(".py"), relative / "__init__.py"))
    wanted = next((path for path in found if path.is_file()), None)
    file = getattr(module, "__file__", None)
    if wanted is not None and (file is None or Path(file).resolve() != wanted.resolve()):
        raise SpecdecError(
            f"{where}: {wanted} was not imported, since {name!r} is {file or 'built in'}: rename the file"
        )
