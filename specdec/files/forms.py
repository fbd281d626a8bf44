"""What a document that was read must look like, so that a file edited by hand is refused where it is wrong.

    check(data, {"rows": [{"id": TEXT, "tokens": [WHOLE]}], "seconds": Maybe(SECONDS)}, "run.json")
    -> SpecdecError: run.json: rows[3].tokens[0]: expected a whole number >= 0, got 'x'

A form is a `Leaf`, `Maybe(form)` (or null), `OneOf(values)`, `[form]` (a list of any length), `MapOf(form)` (texts ->
form), or a mapping with every key that must be there; other keys are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from specdec.errors import SpecdecError

MOST = (1 << 63) - 1  # what a whole number in a file may reach


@dataclass(frozen=True)
class Leaf:
    """A value that is no list and no mapping: whether it fits, and what it must be, in words."""

    fits: Callable[[Any], bool]
    words: str


@dataclass(frozen=True)
class Maybe:
    """The form, or null."""

    form: Any


@dataclass(frozen=True)
class MapOf:
    """A mapping of texts to values of one form."""

    form: Any


@dataclass(frozen=True)
class OneOf:
    """One of a few values."""

    values: tuple[Any, ...]


def whole(least: int = 0, most: int = MOST) -> Leaf:
    """A whole number; a bool is none."""
    bounds = f">= {least}" if most == MOST else f"from {least} to {most}"
    return Leaf(lambda value: type(value) is int and least <= value <= most, f"a whole number {bounds}")


def number(low: float = -math.inf, high: float = math.inf) -> Leaf:
    """A finite number; a bool is none."""

    def fits(value: Any) -> bool:
        return type(value) in (int, float) and low <= value <= high and math.isfinite(value)

    bounds = "" if (low, high) == (-math.inf, math.inf) else f" from {low:g} to {high:g}"
    return Leaf(fits, f"a finite number{bounds}")


INTEGER = Leaf(lambda value: type(value) is int, "a whole number")
TEXT = Leaf(lambda value: isinstance(value, str), "a text")
BOOL = Leaf(lambda value: isinstance(value, bool), "true or false")
ANYTHING = Leaf(lambda value: True, "anything")
WHOLE = whole()
NUMBER = number()
SECONDS = number(0.0)


def check(value: Any, form: Any, where: str) -> None:
    """Raise SpecdecError for the first place of `value` that is not as `form` has it; `where` names the document."""
    found = _fault(value, form, "")
    if found is not None:
        place, fault = found
        raise SpecdecError(f"{where}: {place or 'the document'}: {fault}")


def check_fields(part: Any, form: Mapping[str, Any], where: str) -> None:
    """Check a dataclass whose fields came from a document; lists arrive as tuples."""
    check({k: list(v) if isinstance(v, tuple) else v for k, v in vars(part).items()}, form, where)


def checked(form: Any, default: Any) -> Any:
    """Declare a field of a dataclass with its form, for `check_declared`."""
    return field(default=default, metadata={"form": form})


def check_declared(part: Any, where: str) -> None:
    """Check the fields of a dataclass that were declared with a form."""
    check_fields(part, {f.name: f.metadata["form"] for f in fields(part) if "form" in f.metadata}, where)


def _fault(value: Any, form: Any, place: str) -> tuple[str, str] | None:
    """The place that does not fit, and what is wrong with it."""
    if isinstance(form, Leaf):
        return None if form.fits(value) else (place, f"expected {form.words}, got {shown(value)}")
    if isinstance(form, Maybe):
        return None if value is None else _fault(value, form.form, place)
    if isinstance(form, OneOf):
        fits = any(type(value) is type(one) and value == one for one in form.values)
        words = " or ".join(map(repr, form.values))
        return None if fits else (place, f"expected {words}, got {shown(value)}")
    if isinstance(form, list):
        if not isinstance(value, list):
            return place, f"expected a list, got {shown(value)}"
        return _first((part, form[0], f"{place}[{i}]") for i, part in enumerate(value))
    if not isinstance(value, Mapping):
        return place, f"expected a mapping, got {shown(value)}"
    if isinstance(form, MapOf):
        return _first((part, form.form, _inside(place, name)) for name, part in value.items())
    missing = next((name for name in form if name not in value), None)
    if missing is not None:
        return _inside(place, missing), "is missing"
    return _first((value[name], part, _inside(place, name)) for name, part in form.items())


def _first(parts: Iterable[tuple[Any, Any, str]]) -> tuple[str, str] | None:
    return next((found for part in parts if (found := _fault(*part)) is not None), None)


def _inside(place: str, name: Any) -> str:
    return f"{place}.{name}" if place else str(name)


def shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
