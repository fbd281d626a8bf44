"""Tensors that belong together and keep their places: what a recorded program reads, and what it returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

from torch import Tensor

B = TypeVar("B", bound="Buffers")


class Buffers:
    """Base of dataclasses whose fields are tensors, other `Buffers`, tuples of tensors, or None; anything else in a
    field is fixed and is handed on as it is."""

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor, field by field."""
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, Buffers):
                yield from value.tensors()
            elif isinstance(value, tuple):
                yield from (part for part in value if isinstance(part, Tensor))

    def copies(self: B) -> B:
        """The same values in tensors of their own."""
        return replace(self, **{f.name: _copied(getattr(self, f.name)) for f in fields(self)})  # type: ignore

    def refill(self: B, new: B) -> None:
        """Take over the values of another of the same shapes, in place."""
        for mine, theirs in zip(self.tensors(), new.tensors(), strict=True):
            mine.copy_(theirs, non_blocking=mine.is_cuda)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Buffers):
        return value.copies()
    return tuple(map(_copied, value)) if isinstance(value, tuple) else value
