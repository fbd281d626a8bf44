"""Transfers between host and device that do not make the host wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


FEW = 4  # up to so many rows are copied one by one faster than by one indexed write


def put_rows(table: Tensor, rows: Mapping[int, Tensor], column: int = 0) -> None:
    """Set table[b, column : column + len(rows[b])] = rows[b] for every b.

    table [B, S, ...]: contiguous
    rows [n, ...]: on any device
    """
    lengths = {b: row.shape[0] for b, row in rows.items()}
    if len(rows) <= FEW:
        for b, row in rows.items():
            table[b, column : column + lengths[b]].copy_(row, non_blocking=table.is_cuda)
    elif list(rows) == list(range(len(table))) and len(set(lengths.values())) == 1:
        together = moved(torch.stack(list(rows.values())), table.device)
        table[:, column : column + lengths[0]].copy_(together)
    else:
        flat = torch.cat([moved(row, table.device).to(table.dtype) for row in rows.values()])
        places = np.concatenate([b * table.shape[1] + column + np.arange(n) for b, n in lengths.items()])
        table.view(-1, *table.shape[2:]).index_copy_(0, array_on(places, table.device), flat)
