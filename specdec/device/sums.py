"""Sums over processes whose GPUs read one another's memory.

A pass of a model that is spread over processes adds parts twice a layer, a few kilobytes each. NCCL takes 15
microseconds for each; here it is one kernel of 7 over torch's symmetric memory, which the GPUs of one machine share. In
it each process waits for the others before it reads, and before it goes on. Larger sums are NCCL's.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specdec.device.ranks import Ranks
from specdec.device.transfer import sync_allowed
from specdec.files.texts import first_line

LARGEST = 1 << 20  # bytes of a sum
DTYPES = (torch.float32, torch.bfloat16)  # those of torch's kernel

log = logging.getLogger("specdec")
_shared: dict[tuple[Any, torch.dtype], Tensor | None] = {}  # by the group itself: a later one may have its name


def shared_memory(group: Any, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return memory of this process, [n] of `dtype`, that the others of `group` can read; None: there is none.

    All of them call this together, and all get some or none.
    """
    key = (group, dtype)
    if key not in _shared:
        _shared[key] = _made(group, dtype, device) if device.type == "cuda" and dtype in DTYPES else None
    return _shared[key]


def _made(group: Any, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    size = dist.get_world_size(group)
    near = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) == size <= torch.cuda.device_count()
    others = [i for i in range(size) if i != device.index]
    near = near and all(torch.cuda.can_device_access_peer(device, other) for other in others)
    with sync_allowed(device):
        found = _opened(group, dtype, device) if near else None
    return found if all(Ranks(group).all(found is not None)) else None


def _opened(group: Any, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    import torch.distributed._symmetric_memory as symmetric

    try:
        found = symmetric.empty(LARGEST // dtype.itemsize, dtype=dtype, device=device)
        symmetric.rendezvous(found, group)
        ones = torch.ones((2, 64), dtype=dtype, device=device)
        if bool((_add(ones, found, group.group_name) == dist.get_world_size(group)).all()):
            return found
        log.warning("processes add their parts through NCCL: a sum over shared memory went wrong")
    except (AttributeError, RuntimeError) as error:  # a torch without these functions, or a host that forbids it
        log.warning("processes add their parts through NCCL: %s", first_line(error))
    return None


def add(part: Tensor, shared: Tensor | None, group: Any, name: str) -> Tensor:
    """Return the sum of the processes' parts, in any shape; `part` may be overwritten.

    shared, name: what `shared_memory` gives for the group, and the group's name
    """
    if shared is not None and part.dtype == shared.dtype and part.numel() <= shared.numel():
        return _add(part, shared, name)
    dist.all_reduce(part, group=group)
    return part


# The compiler must not look inside: later versions of it would take the shared memory for a buffer of its own.
@torch.library.custom_op("specdec::add_parts", mutates_args=())
def _add(part: Tensor, shared: Tensor, name: str) -> Tensor:
    part = part.contiguous()
    own = shared[: part.numel()].view_as(part)
    return torch.ops.symm_mem.one_shot_all_reduce_copy(own, part, "sum", name)


@_add.register_fake
def _(part: Tensor, shared: Tensor, name: str) -> Tensor:
    return torch.empty_like(part, memory_format=torch.contiguous_format)
