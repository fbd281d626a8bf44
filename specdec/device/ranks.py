"""Processes that compute one model together (tensor parallel): what they must have in common.

Every process runs the whole loop, and each holds a part of the target's weights. The loop is the same everywhere as
long as its inputs are: so what a pass is fed, and what comes back from the device, are the first process's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from specdec.device.transfer import sync_allowed
from specdec.errors import SpecdecError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The processes that share a model. group: torch's process group; None: one process has the whole model."""

    group: Any = None

    @staticmethod
    def of(model: nn.Module) -> Ranks:
        """Find the processes among which a model's parameters are spread."""
        weights: Any = (p for module in model.modules() for p in module._parameters.values())
        mesh = next((p.device_mesh for p in weights if isinstance(p, DTensor)), None)
        if mesh is None or mesh.size() == 1:
            return Ranks()
        return Ranks(mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD)

    @property
    def size(self) -> int:
        """How many there are."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def is_first(self) -> bool:
        """True in the process whose values count."""
        return self.group is None or dist.get_rank(self.group) == 0

    def first(self, values: Tensor) -> Tensor:
        """Overwrite a contiguous tensor with the first process's, without making the host wait; returns it."""
        if self.group is not None:
            dist.broadcast(values, group=self.group, group_src=0)
        return values

    def agreed(self, value: T) -> T:
        """Return the first process's value, any plain object."""
        return value if self.group is None else self.all(value)[0]

    def all(self, value: T) -> list[T]:
        """Return the values of all processes in order."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.size
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with sync_allowed(device):
            dist.all_gather_object(found, value, group=self.group)
        return found

    def check_same(self, what: str, value: Any) -> None:
        """Raise SpecdecError in every process if `value` is not the same in all: they would wait for one another."""
        found = self.all(value)
        if any(other != found[0] for other in found):
            raise SpecdecError(
                f"{what} differ among the {self.size} processes that share the target: all take the same"
            )
