"""Tensors that belong together and keep their addresses: what a recorded function reads, and what it returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor

B = TypeVar("B", bound="Buffers")


class Buffers:
    """Base of dataclasses of tensors, other `Buffers`, tuples of tensors, or None; other fields are fixed."""

    # Copied and refilled every round: `dataclasses.fields` and `replace` took longer than the copies.
    __dataclass_fields__: dict[str, Any]

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor, field by field."""
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, Buffers):
                yield from value.tensors()
            elif _are_tensors(value):
                yield from value

    def signature(self) -> tuple[Any, ...]:
        """Return what `refill` needs to be equal: shapes and dtypes of tensors, None, and fixed fields."""
        return tuple([_signed(getattr(self, name)) for name in self.__dataclass_fields__])

    def copies(self: B) -> B:
        """Copy every tensor."""
        made = object.__new__(type(self))
        vars(made).update({name: _copied(getattr(self, name)) for name in self.__dataclass_fields__})
        return made

    def refill(self: B, new: B) -> None:
        """Copy values of the same signature in place."""
        for mine, theirs in zip(self.tensors(), new.tensors(), strict=True):
            mine.copy_(theirs, non_blocking=mine.is_cuda)


def _are_tensors(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], Tensor)


def _signed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, Buffers):
        return value.signature()
    return tuple([(v.shape, v.dtype) for v in value]) if _are_tensors(value) else value


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Buffers):
        return value.copies()
    return tuple(v.clone() for v in value) if _are_tensors(value) else value
