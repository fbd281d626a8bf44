"""A target whose weights are spread over processes by transformers' tensor parallelism.

Each process holds some heads of every attention and some columns of every product, and the partial results are summed
twice a layer. K/V caches hold a process's own heads. The draft is loaded whole in every process.

transformers gives each spread module a `forward` of its own, which code that is compiled once for all layers cannot
serve. So in specdec's view of the model they have a class in its place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers.distributed import DistributedConfig

from specdec.device.sums import add, shared_memory
from specdec.errors import SpecdecError
from specdec.models.kinds import attention_heads, layer_configs


def own_device() -> torch.device:
    """Return the device of this process: the GPU numbered by its rank on this machine, or the CPU."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


def loading_options(tp_plan: Any, config: Any, where: str) -> dict[str, Any]:
    """Return what `from_pretrained` takes to spread a model of this config over torchrun's processes.

    tp_plan: "auto", or rules by module that replace the model's own
    Raises SpecdecError outside torchrun, and for a model that cannot be spread over so many processes.
    """
    if tp_plan != "auto" and not isinstance(tp_plan, Mapping):
        raise SpecdecError(f"tp_plan must be 'auto' or a mapping of modules to styles, got {tp_plan!r}")
    if "LOCAL_RANK" not in os.environ:
        raise SpecdecError(
            "tp_plan spreads the target over several processes, and this is one: start them all with "
            "torchrun --nproc-per-node N"
        )
    size = int(os.environ["WORLD_SIZE"])
    for layer in layer_configs(config.get_text_config()):
        for name, heads in zip(("attention", "key-value"), attention_heads(layer), strict=True):
            if heads % size:
                raise SpecdecError(f"{where} has {heads} {name} heads, which {size} processes cannot share evenly")
    # A plan of one process is not spread at all.
    return {"distributed_config": DistributedConfig(tp_plan=tp_plan if tp_plan == "auto" else dict(tp_plan))}


class Columns(nn.Linear):
    """A projection of which a process computes some columns."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, own_part(self.weight), own_part(self.bias))


class Rows(nn.Linear):
    """A projection that takes some columns of its input from each process of `group`, which add their parts.

    shared, name: what `shared_memory` gives for the group, and its name
    """

    group: Any
    name: str
    shared: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        out = add(F.linear(x, own_part(self.weight)), self.shared, self.group, self.name)
        return out if self.bias is None else out + own_part(self.bias)


STYLES = {"colwise": Columns, "rowwise": Rows}


def share_forwards(model: nn.Module) -> None:
    """Give the spread projections of a view, whose modules are copies, forwards that do not name themselves."""
    plan = getattr(model, "tp_plan", None) or {}
    for name, module in model.named_modules():
        style = STYLES.get(plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), ""))
        weight: Any = getattr(module, "weight", None)
        if style is not None and type(module) is nn.Linear and isinstance(weight, DTensor):
            vars(module).pop("forward", None)
            module.__class__ = style
            group = weight.device_mesh.get_group()
            vars(module).update(group=group, name=group.group_name)
            vars(module)["shared"] = shared_memory(group, weight.dtype, weight.to_local().device)


def own_part(weight: Any) -> Any:
    """Return this process's part of a weight, all of one that is not spread; None for no bias."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
