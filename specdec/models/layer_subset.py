"""A model without some of its layers, over the same weights and the same cache.

A layer that is left out hands its hidden states on. The others keep their numbers, so that they read and write the
cache where the whole model does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from specdec.errors import SpecdecError


class PassThrough(nn.Module):
    """In a decoder layer's place: returns its input as the layer would return its output."""

    def __init__(self, layer: nn.Module, in_tuple: bool):
        super().__init__()
        self.in_tuple = in_tuple
        vars(self)["replaced"] = layer  # not as a submodule: its parameters are not this model's

    def __getattr__(self, name: str) -> Any:
        # Models read some attributes of their layers, such as the kind of attention.
        return getattr(vars(self)["replaced"], name)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states,) if self.in_tuple else hidden_states


def layers_of(model: nn.Module, count: int) -> nn.ModuleList:
    """Find the `count` decoder layers of a model. Raises SpecdecError if it has no list of so many."""
    for module in model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return child
    raise SpecdecError(
        f"{type(model).__name__} has no list of its {count} layers, so none can be left out; use another strategy"
    )


@torch.no_grad()
def leave_out(model: nn.Module, count: int, skip: Collection[int]) -> None:
    """Replace the layers `skip` of a model of `count` layers. The list of layers is changed in place."""
    layers = layers_of(model, count)
    returned: list[Any] = []
    hook = layers[0].register_forward_hook(lambda module, given, out: returned.append(out))
    try:
        device = next(model.parameters()).device
        model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=device), use_cache=False)
    finally:
        hook.remove()
    for index in skip:
        layers[index] = PassThrough(layers[index], isinstance(returned[0], tuple))
