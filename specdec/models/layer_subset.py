"""A model without some of its layers, over the same weights and the same cache.

A layer that is left out hands its hidden states on. The others keep their numbers, so that they read and write the
cache where the whole model does. What the first gap saw can be read after a pass, and given to the last gap of the
model that lacks the layers before: that model then goes on where the first one stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from specdec.errors import SpecdecError


class PassThrough(nn.Module):
    """In a decoder layer's place: returns its input as the layer would return its output.

    seen: its input in the last pass, [B, S, H]
    given: returned in place of the input; None: the input is
    adapter: a function of what is returned; None: there is none
    """

    def __init__(self, layer: nn.Module, in_tuple: bool):
        super().__init__()
        self.in_tuple = in_tuple
        # Not as submodules: their parameters are not this model's.
        vars(self).update(replaced=layer, seen=None, given=None, adapter=None)

    def __getattr__(self, name: str) -> Any:
        # Models read some attributes of their layers, such as the kind of attention.
        return getattr(vars(self)["replaced"], name)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        own = vars(self)
        own["seen"] = hidden_states
        out = hidden_states if own["given"] is None else own["given"]
        out = out if own["adapter"] is None else own["adapter"](out)
        return (out,) if self.in_tuple else out


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
def leave_out(
    model: nn.Module, count: int, skip: Sequence[int], adapter: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> list[PassThrough]:
    """Replace the layers `skip` of a model of `count` layers, whose list is changed in place; returns the gaps.

    adapter: a function of what the last gap hands on
    """
    layers = layers_of(model, count)
    returned: list[Any] = []
    hook = layers[0].register_forward_hook(lambda module, given, out: returned.append(out))
    try:
        device = next(model.parameters()).device
        model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=device), use_cache=False)
    finally:
        hook.remove()
    gaps = [PassThrough(layers[index], isinstance(returned[0], tuple)) for index in skip]
    for index, gap in zip(skip, gaps, strict=True):
        layers[index] = gap
    vars(gaps[-1])["adapter"] = adapter
    return gaps
