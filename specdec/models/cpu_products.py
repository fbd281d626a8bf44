"""Projections on a CPU through oneDNN, where it is much faster than what `F.linear` takes.

torch gives products in float32 to MKL. For the few rows of a decoding pass that reads a large matrix at a fraction of
the memory's bandwidth, on CPUs that are not Intel's once for every row; oneDNN, which torch has too and takes itself
for half precision, reads it once. From two rows on its bits depend neither on how many there are nor on their order.

It is for x86 processors that are not Intel's, where MKL is the faster one (SmolLM2 on two threads of a Xeon: 36 ms a
token, 46 through oneDNN), for models that no cache of a CPU holds, and in them for large matrices: a call of oneDNN
begins 15 microseconds later.
"""

from __future__ import annotations

import platform
from functools import cache

import torch
from torch import Tensor, nn

from specdec.device.processor import processor_fields

LARGE = 1 << 18  # weights of a matrix
CACHED = 1 << 24  # weights of a model that may stay in a cache


class OneDnnLinear(nn.Linear):
    """A projection through oneDNN, except where gradients are wanted."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not is_large(self.weight):  # weights may be replaced
            return super().forward(x)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def use_onednn(model: nn.Module) -> int:
    """Let the large projections of a view, whose modules are copies, go through oneDNN; returns how many do."""
    if not is_for_this_machine():
        return 0
    if sum(p.numel() for p in model.parameters()) < CACHED:
        return 0
    found = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m) and is_large(m.weight)]
    for layer in found:
        layer.__class__ = OneDnnLinear
    return len(found)


@cache
def is_for_this_machine() -> bool:
    """True on x86 processors that are not Intel's, for a torch that has oneDNN."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    return "Intel" not in processor_fields().get("vendor_id", platform.processor())


def is_large(weight: Tensor) -> bool:
    """True for what oneDNN is faster with."""
    plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype is torch.float32
    return plain and weight.numel() >= LARGE and weight.is_contiguous()
