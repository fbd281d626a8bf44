"""What the host may do while the device works, and how tensors get there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


@contextmanager
def sync_allowed(device: torch.device) -> Iterator[None]:
    """Suspend `torch.cuda.set_sync_debug_mode`, with which a caller can prove that nothing else waits."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`, without making the host wait: to a GPU from pinned memory."""
    return moved(values.pin_memory() if device.type == "cuda" else values, device)


def moved(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`. On its way to a GPU nobody waits: what reads it there comes later. On its way to the host
    the host must: it would read memory that is not written yet."""
    return values.to(device, non_blocking=device.type == "cuda")


def fetched(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """`values` on their way to the host, and the event before which nobody may look at them (None: they are there).
    What is launched behind this does not delay them."""
    if not values.is_cuda:
        return values if values.device.type == "cpu" else values.cpu(), None
    with torch.cuda.device(values.device):
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return host, event


def array_on(values: np.ndarray, device: torch.device) -> Tensor:
    """A host array as a tensor on `device`, without making the host wait for the device."""
    return sent(torch.from_numpy(values), device)


def to_device(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A host list as a tensor on `device`, without making the host wait for the device."""
    # Through numpy: torch reads nested lists ten times slower.
    return array_on(np.array(values), device).to(dtype)
