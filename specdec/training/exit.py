"""Early exit in training: an adapter after the target's first layers, with the loss of a draft model.

The model that drafts is the target without its other layers, over the same weights (models/layer_subset.py). Only the
adapter learns, so that the target stays what it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from specdec.drafters import EarlyExit
from specdec.drafters.self_speculation.adapter import ExitAdapter, load_adapter
from specdec.errors import SpecdecError
from specdec.models.layer_subset import leave_out
from specdec.models.view import ModelView
from specdec.training.config import ExitStart, TrainingConfig
from specdec.training.draft import DraftTraining


def make_adapter(start: ExitStart, target: Any, seed: int) -> ExitAdapter:
    """A new adapter, or one from a checkpoint. Raises SpecdecError for one that does not fit the target."""
    text = target.config.get_text_config()
    if start.checkpoint is not None:
        made = load_adapter(start.checkpoint)
    else:
        assert start.layers is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = ExitAdapter(start.layers, text.hidden_size, start.rank or text.hidden_size)
    if made.layers >= text.num_hidden_layers or made.hidden_size != text.hidden_size:
        raise SpecdecError(
            f"exit: {made.layers} layers of width {made.hidden_size} are no beginning of the target's "
            f"{text.num_hidden_layers} layers of width {text.hidden_size}"
        )
    return made.float().requires_grad_(True)


class ExitModel(nn.Module):
    """The target's first layers, the adapter, the target's norm and head. Its parameters are the adapter's."""

    def __init__(self, target: Any, adapter: ExitAdapter):
        super().__init__()
        self.adapter = adapter
        count = target.config.get_text_config().num_hidden_layers
        rest = range(adapter.layers, count)
        view = ModelView(
            target, target.config._attn_implementation, lambda model: leave_out(model, count, rest, adapter)
        )
        self.rest = (view.model,)  # not as a submodule: its weights are the target's

    def forward(self, **inputs: Any) -> Any:
        return self.rest[0](**inputs)


class ExitTask:
    """An adapter in training."""

    layers: tuple[int, ...] = ()
    steps = 1

    def __init__(self, target: Any, adapter: ExitAdapter, config: TrainingConfig):
        self.adapter, self.config = adapter, config
        self.module = DraftTraining(ExitModel(target, adapter), config.loss, config.data.temperature)

    def decoding(self, length: int) -> tuple[Any, list[Any]]:
        return None, [EarlyExit(adapter=self.adapter, n_max=length)]

    def save(self, folder: Path) -> None:
        """As a folder that `early-exit:adapter=` takes."""
        self.adapter.save(folder, getattr(torch, self.config.save_dtype))
