"""The folders: which may import which, no import cycle, few entries at the top, old names for one release."""

from __future__ import annotations

import ast
import functools
import importlib
import warnings
from pathlib import Path

import pytest

import specdec
from specdec.files.old_names import MOVED

ROOT = Path(specdec.__file__).parent
# A folder may import what stands left of it, and `USERS`: what users import.
ORDER = ("device", "models", "sampling", "drafters", "decoding", "research", "training", "cli")


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in ROOT.rglob("*.py")}


@functools.cache
def imports(name: str) -> set[str]:
    """The modules of this package that a module imports, also inside functions; not for annotations alone."""
    found = set()
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test))]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {n for n in found if n in MODULES and n != name and not name.startswith(n + ".")}


def folder(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_arrows_between_folders_go_one_way() -> None:
    for name in MODULES:
        if folder(name) in ORDER:
            behind = ORDER[ORDER.index(folder(name)) + 1 :]
            wrong = sorted(n for n in imports(name) if folder(n) in behind)
            assert not wrong, f"{name} imports {wrong}"


def test_no_module_imports_itself_through_others() -> None:
    known = {name: imports(name) for name in MODULES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in sorted(known[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


def test_the_package_has_few_entries() -> None:
    entries = [p.name for p in ROOT.iterdir() if p.name != "__pycache__"]
    assert len(entries) <= 20, sorted(entries)


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_new_module(old: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert importlib.import_module(f"specdec.{old}") is importlib.import_module(f"specdec.{MOVED[old]}")
