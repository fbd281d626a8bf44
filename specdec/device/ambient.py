"""Torch's ambient modes: what the caller has set may not change specdec's own work.

A call, and each step of a generator, runs without gradients, outside `torch.inference_mode` (a tensor made inside could
never be written to outside, and caches outlive calls), without autocast (models run in their own dtype, and so do their
caches), with float32 as the default dtype and the CPU as the default device. The caller's modes are back after each
call and between the steps of a generator.

Left alone, because they choose implementations and not results: deterministic algorithms, the precision of float32
products, anomaly detection, the choice of SDPA kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
AUTOCAST = ("cpu", "cuda")


@contextmanager
def pinned() -> Iterator[None]:
    """Set torch's ambient modes to specdec's. Costs a few microseconds if they are set already."""
    if _are_pinned():
        yield
        return
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch.is_grad_enabled():
            stack.enter_context(torch.no_grad())
        for kind in AUTOCAST:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch._C._len_torch_function_stack():  # where a default device is kept
            stack.enter_context(torch.device("cpu"))
        if _default_dtype.enter():
            stack.callback(_default_dtype.leave)
        yield


def _are_pinned() -> bool:
    return not (
        torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or any(map(torch.is_autocast_enabled, AUTOCAST))
        or torch._C._len_torch_function_stack()
        or _default_dtype.users
        or torch.get_default_dtype() is not torch.float32
    )


class _DefaultDtype:
    """The default dtype belongs to the process: the first thread that needs another sets it, the last one restores."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.before = torch.float32

    def enter(self) -> bool:
        """Set it to float32. Returns True if `leave` must be called."""
        with self.lock:
            if self.users == 0:
                self.before = torch.get_default_dtype()
                if self.before is torch.float32:
                    return False
                torch.set_default_dtype(torch.float32)
            self.users += 1
            return True

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                torch.set_default_dtype(self.before)


_default_dtype = _DefaultDtype()


class Steps(Generic[T]):
    """An iterator whose steps wait for a lock and run with torch's modes pinned. Between steps nothing is held."""

    def __init__(self, steps: Iterator[T], lock: Any):
        self.steps, self.lock = steps, lock

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self.lock, pinned():
            return next(self.steps)

    def close(self) -> None:
        """End early, like `close` of a generator."""
        with self.lock, pinned():
            self.steps.close()  # type: ignore[attr-defined]
