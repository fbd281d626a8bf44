"""Transfers between host and device that do not make the host wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


@contextmanager
def sync_allowed(device: torch.device) -> Iterator[None]:
    """Suspend `torch.cuda.set_sync_debug_mode`, by which a caller can prove that nothing else waits."""
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
    """Send a host tensor to `device` without making the host wait: to a GPU from pinned memory."""
    return moved(values.pin_memory() if device.type == "cuda" else values, device)


def moved(values: Tensor, device: torch.device) -> Tensor:
    """Move `values` to `device`. Only the host waits, if they come to it: it would read memory not written yet."""
    return values.to(device, non_blocking=device.type == "cuda")


def fetched(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start moving `values` to the host; returns them and the event to wait for before reading (None: they are there).

    Kernels launched later do not delay them.
    """
    if not values.is_cuda:
        return values if values.device.type == "cpu" else values.cpu(), None
    with torch.cuda.device(values.device):
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return host, event


def array_on(values: np.ndarray, device: torch.device) -> Tensor:
    """Send a host array to `device` without making the host wait."""
    return sent(torch.from_numpy(values), device)


def to_device(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Send a host list to `device` without making the host wait."""
    # Through numpy: torch reads nested lists ten times slower.
    return array_on(np.array(values), device).to(dtype)
