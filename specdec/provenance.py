"""What a result was made with, so that it can be made again."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

import specdec
from specdec.device import sync_allowed

_SAMPLES = 64  # values read per parameter


class WeightHash:
    """A short hash of a model's parameters: names, shapes, dtypes and evenly spaced values of each.

    It tells two checkpoints apart and notices training steps; it is no proof against tampering. Computed again only
    when a parameter was replaced or written to.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.key: Any = None
        self.value = ""

    def get(self) -> str:
        parameters = list(self.model.named_parameters())
        key = tuple((p.data_ptr(), p._version) for _, p in parameters)
        if key != self.key:
            self.key, self.value = key, _hash_parameters(parameters)
        return self.value


def _hash_parameters(parameters: Sequence[tuple[str, nn.Parameter]]) -> str:
    digest = hashlib.sha256()
    with torch.no_grad(), sync_allowed(parameters[0][1].device if parameters else torch.device("cpu")):
        samples = []
        for name, p in parameters:
            digest.update(f"{name}{tuple(p.shape)}{p.dtype}".encode())
            flat = p.detach().reshape(-1)
            samples.append(flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].to(torch.float32).cpu())
        if samples:
            digest.update(torch.cat(samples).numpy().tobytes())
    return digest.hexdigest()[:16]


def hash_ids(ids: Sequence[int]) -> str:
    """A short hash of one prompt's token ids."""
    return hashlib.sha256(np.asarray(ids, dtype=np.int64).tobytes()).hexdigest()[:16]


def hash_template(tokenizer: Any) -> str | None:
    """A short hash of a tokenizer's chat template, as `sha256sum` of its text begins; None where there is none."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    return {
        "specdec": specdec.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def device_name(device: torch.device) -> str:
    """The device in words: the GPU's name, or the processor's architecture and thread count."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"
