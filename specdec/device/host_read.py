"""The one way in which values come back from the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.device.buffers import Buffers
from specdec.device.ranks import Ranks
from specdec.device.transfer import fetched

Form = tuple[tuple[int, ...], bool]


@dataclass(frozen=True)
class Packed(Buffers):
    """Named tensors on their way to the host.

    flat [n]: all of them as float64, which holds token ids, lengths and float32 values exactly
    names: the name of each
    forms: (shape, True for floats) of each
    """

    flat: Tensor
    names: tuple[str, ...]
    forms: tuple[Form, ...]

    def __getitem__(self, name: str) -> Tensor:
        """Return one of the tensors, still on the device."""
        index = self.names.index(name)
        offset = sum(math.prod(shape) for shape, _ in self.forms[:index])
        shape, of_floats = self.forms[index]
        part = self.flat[offset : offset + math.prod(shape)].reshape(shape)
        return part if of_floats else part.to(torch.int64)

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> Packed:
        """Pack tensors under their names, on the device of the first."""
        values = list(tensors.values())
        flat = torch.cat([t.detach().to(values[0].device).reshape(-1).to(torch.float64) for t in values])
        return Packed(flat, tuple(tensors), tuple((tuple(t.shape), t.is_floating_point()) for t in values))


@dataclass(frozen=True)
class Arriving:
    """Packed tensors on their way: `flat` on the host, to be read after `event`."""

    flat: Tensor
    names: tuple[str, ...]
    forms: tuple[Form, ...]
    event: torch.cuda.Event | None = None

    @staticmethod
    def of(packed: Packed) -> Arriving:
        """Start the transfer. Kernels launched later do not delay it."""
        flat, event = fetched(packed.flat)
        return Arriving(flat, packed.names, packed.forms, event)


class HostReader:
    """The only way values come back from the device, one transfer per read. `count`: transfers so far.

    ranks: processes that share the target; all of them read the first one's values
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.count = 0
        self.ranks = ranks or Ranks()

    def start(self, packed: Packed) -> Arriving:
        """Start a transfer to the host."""
        self.ranks.first(packed.flat)
        return Arriving.of(packed)

    def read(self, *tensors: Tensor) -> list[Any]:
        """Return tensors as nested lists of Python numbers, ints for integral or boolean tensors."""
        if tensors:
            return self.fetch(self.start(Packed.of({str(i): t for i, t in enumerate(tensors)})))
        self.count += 1
        return []

    def fetch_named(self, arriving: Arriving) -> dict[str, Any]:
        """Wait for tensors on their way; returns their lists by name."""
        return dict(zip(arriving.names, self.fetch(arriving), strict=True))

    def fetch(self, arriving: Arriving) -> list[Any]:
        """Wait for tensors on their way; returns their lists in order."""
        self.count += 1
        if arriving.event is not None:
            arriving.event.synchronize()
        flat = arriving.flat.numpy()
        floats = any(of_floats for _, of_floats in arriving.forms)
        values = flat if floats else flat.astype(np.int64)
        out, offset = [], 0
        for shape, of_floats in arriving.forms:
            end = offset + math.prod(shape)
            part = values[offset:end].reshape(shape)
            out.append((part.astype(np.int64) if floats and not of_floats else part).tolist())
            offset = end
        return out
