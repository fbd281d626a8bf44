"""The one exception that callers need to catch, and the messages for names and packages that do not exist."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterable
from typing import Any

from specdec.files.habits import ALIASES, HINTS

LONGEST = 1000  # characters of a message


class SpecdecError(ValueError):
    """Bad input or an impossible combination: one line that names the thing.

    The message is meant for a person at a shell: it says what is wrong, with which value, and where there is one,
    what would be right. Line breaks and repeated blanks are folded, so that it is always a single line; of a very long
    one, which quotes a whole file or a name of thousands of characters, the middle is left out.
    """

    def __init__(self, message: str) -> None:
        line = " ".join(str(message).split())
        super().__init__(line if len(line) <= LONGEST else f"{line[: LONGEST - 200]} ... {line[-200:]}")


class SettingWarning(UserWarning):
    """A setting that is allowed and does something else than its name says; the command line prints it."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for the end of a message: the known name that is most like `name`, "" if none is."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def need(module: str, what: str, extra: str) -> Any:
    """Import a module of an optional package, and return the package. Raises SpecdecError without it: `what` begins
    the message, and the extra is what to install."""
    package = module.partition(".")[0]
    try:
        importlib.import_module(module)
    except ImportError:
        raise SpecdecError(f"{what} the package {package}: install specdec[{extra}]") from None
    return sys.modules[package]


def unknown_name(kind: str, name: object, known: Iterable[str]) -> SpecdecError:
    """Make the error for a name that does not exist: what it is called here if it is transformers', else the nearest
    one that does exist."""
    known, name = list(known), str(name)
    is_place = kind.startswith(("column", "dimension", "axis", "option of strategy"))  # and nothing that a call takes
    alias = next((other for other in ALIASES.get(name, ()) if other in known), None)
    if is_place and alias is not None:
        return SpecdecError(f"there is no {kind} {name!r} here: write {alias!r}")
    if name in HINTS and (kind == "axis" or not is_place):
        return SpecdecError(f"there is no {kind} {name!r} here: {HINTS[name]}")
    listed = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    return SpecdecError(f"unknown {kind} {name!r}{nearest(name, known) or f'; known: {listed}'}")
