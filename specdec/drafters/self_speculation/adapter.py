"""What is trained for early exit: a small network between the last layer that drafts and the target's norm and head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.errors import SpecdecError
from specdec.files.forms import check, whole
from specdec.files.texts import as_path, expanded, first_line, read_json, unfinished, write_file
from specdec.models.checkpoint import CONFIG, check_finite

WEIGHTS = "adapter.safetensors"
FORM = {"layers": whole(1), "hidden_size": whole(1), "rank": whole(1)}


class ExitAdapter(nn.Module):
    """h + down(silu(up(norm(h)))), in float32 or the dtype that it is given; a new one returns h.

    layers: how many first layers of the target draft
    """

    def __init__(self, layers: int, hidden_size: int, rank: int):
        super().__init__()
        self.layers, self.hidden_size, self.rank = layers, hidden_size, rank
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.up = nn.Linear(hidden_size, rank, bias=False)
        self.down = nn.Linear(rank, hidden_size, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, h: Tensor) -> Tensor:
        """h: [..., H]"""
        inner = self.down(F.silu(self.up(self.norm(h.to(self.up.weight.dtype)))))
        return h + inner.to(h.dtype)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write config.json and the weights."""
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished(folder / WEIGHTS, "adapter") as file:
            save_file({name: t.to(dtype).contiguous() for name, t in self.state_dict().items()}, file)
        write_file(folder / CONFIG, json.dumps({name: getattr(self, name) for name in FORM}), "adapter")


def load_adapter(source: Any) -> ExitAdapter:
    """Read what `save` wrote, in float32. Raises SpecdecError for a folder that holds no adapter."""
    folder = expanded(as_path(source, "adapter"))
    found = read_json(folder / CONFIG, "config of an early-exit adapter")
    check(found, FORM, str(folder / CONFIG))
    made = ExitAdapter(**found)
    try:
        made.load_state_dict(load_file(folder / WEIGHTS))
    except Exception as error:  # whatever a damaged file makes of it
        raise SpecdecError(f"{folder / WEIGHTS} is not the adapter of its config: {first_line(error)}") from None
    check_finite(made.state_dict().items(), str(folder / WEIGHTS))
    return made.requires_grad_(False)
