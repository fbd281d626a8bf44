"""Modules that are changed during a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(attributes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give objects attributes of their own inside the block: (object, name, value) each."""
    made = [(vars(owner), name, value) for owner, name, value in attributes]
    before = [{name: own[name]} if name in own else {} for own, name, _ in made]
    for own, name, value in made:
        own[name] = value
    try:
        yield
    finally:
        for (own, name, _), old in zip(made, before, strict=True):
            own.pop(name, None)
            own.update(old)
