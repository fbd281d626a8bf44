"""What the host may do while the device works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
