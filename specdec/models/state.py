"""What a model computes, in a form that can be compared.

Keys and values kept from one call to the next are good only as long as the model would make the same ones again.
`ModelState` holds what that depends on: the tensors' memory, versions and contents, and values on modules, hooks and
patched functions (an adapter that is switched, a factor that is changed).

torch counts the writes to a tensor, but not those through `tensor.data`, which hand-written updates use. So the
contents are summed as well: every weight is read once, which takes about as long as a pass of one token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specdec.device.transfer import sync_allowed
from specdec.models.view import CONTAINERS, LARGEST, NOT_FOLLOWED, PLAIN, ModelView, content_of

WORDS = 509  # words of 8 bytes to a block: a prime, so that columns of a matrix fall into different blocks
DEPTH = 6  # values are looked for this many objects deep: hooks -> hook -> its defaults -> a table -> a value


class ModelState:
    """The state of a view's model now. Two are equal only if keys and values of one are good for the other."""

    def __init__(self, view: ModelView):
        found: list[Tensor] = []
        self.values = (view.changes, view.chosen, *_values(view, found))
        tensors = {id(part): part for t in (*_tensors(view.seen.modules), *found) for part in parts_of(t)}
        # While a weak reference lives, no other storage gets the address.
        self.storages = [_storage(t) for t in tensors.values()]
        self.places = [
            (None if ref is None else ref.cdata, _version(t), t.dtype, tuple(t.shape), t.device)
            for t, ref in zip(tensors.values(), self.storages, strict=True)
        ]
        self.sums = _sums(tensors.values())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelState):
            return NotImplemented
        return (self.values, self.places, self.sums) == (other.values, other.places, other.sums)

    __hash__ = None  # type: ignore[assignment]


def recorded_from(view: ModelView) -> tuple[Any, ...]:
    """Return what recorded passes depend on: modules, numbers that Python computes with, addresses of weights."""
    places = [part.data_ptr() for t in _tensors(view.seen.modules) for part in parts_of(t)]
    return (view.builds, *_values(view, []), *places)


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors in a tensor: itself, or those that a subclass wraps (quantised or spread weights)."""
    if type(tensor) in (nn.Parameter, Tensor) or not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):  # torch 2.13 lists a DTensor's mesh too
            yield from parts_of(part)


def _tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield the modules' own parameters and buffers: a walk by names takes four times as long, and a call waits."""
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # a tensor without memory
        return None


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # inference tensors do not count: their sums tell


# -- values ------------------------------------------------------------------------------------------------------------


def _values(view: ModelView, found: list[Tensor]) -> list[Any]:
    """Return values that may change while their holder stays: in containers, objects, functions on modules, hooks.

    Tensors among them are appended to `found`.
    """
    return [_comparable(value, found, DEPTH, lists=True) for value in view.seen.watched]


def _comparable(value: Any, found: list[Tensor], depth: int, lists: bool = False) -> Any:
    """Return a value in a form that can be compared.

    lists: also what is in lists and sets; not so for functions, where hooks keep what they have seen in lists
    """
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        found.append(value)
        return "tensor"
    if isinstance(value, nn.Module):  # one that a function uses
        found.extend(_tensors(value.modules()))
        return tuple((name, v) for name, v in vars(value).items() if isinstance(v, PLAIN) and name != "training")
    if depth == 0 or isinstance(value, NOT_FOLLOWED) or (isinstance(value, CONTAINERS) and len(value) > LARGEST):
        return id(value)
    inner: Callable[[Any], Any] = functools.partial(_comparable, found=found, depth=depth - 1, lists=lists)
    if isinstance(value, dict):
        return tuple((key if isinstance(key, PLAIN) else id(key), inner(v)) for key, v in value.items())
    if isinstance(value, tuple) or (lists and isinstance(value, CONTAINERS)):
        return tuple(map(inner, value))
    if isinstance(value, MethodType):
        return inner(value.__func__), inner(value.__self__)
    if isinstance(value, functools.partial):
        return inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, FunctionType):
        return tuple(_comparable(v, found, depth - 1) for v in _used(value))
    if hasattr(value, "__dict__") and not isinstance(value, CONTAINERS):
        return tuple((name, inner(v)) for name, v in vars(value).items())
    return id(value)


def _used(function: FunctionType) -> list[Any]:
    """List what a function computes with: its closure, its default values, and global numbers and tensors."""
    cells = [content_of(cell) for cell in function.__closure__ or ()]
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    kept = [v for v in named if isinstance(v, (*PLAIN, Tensor, dict)) and v is not None]
    return [*cells, function.__defaults__, function.__kwdefaults__, *kept]


# -- contents ----------------------------------------------------------------------------------------------------------


def _sums(tensors: Iterable[Tensor]) -> list[int]:
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and not tensor.is_meta:
            by_device.setdefault(tensor.device, []).append(_sum(tensor))
    found: list[int] = []
    for device, sums in by_device.items():
        with sync_allowed(device):
            found += torch.stack(sums).tolist()
    return found


def _sum(tensor: Tensor) -> Tensor:
    """Compute a number, int64 [], that changes with any bit of a tensor, and with their order."""
    plain = tensor.detach()
    plain = plain.int_repr() if plain.is_quantized else plain
    data = plain.reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    words = data[: len(data) // 8 * 8].view(torch.int64)
    whole = len(words) // WORDS * WORDS
    ends = torch.cat([words[whole:], data[len(words) * 8 :].to(torch.int64)])
    sums = torch.cat([words[:whole].view(-1, WORDS).sum(dim=1), ends])
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()
