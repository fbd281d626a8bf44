"""Adapters of PEFT, chosen per call.

peft keeps the choice in the modules that carry adapters. A call's choice is set in specdec's own view of them
(models/view.py), so the caller's model stays as it is, and several calls in flight have their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from specdec.config import UNSET, as_list, unknown_name
from specdec.errors import SpecdecError, need

SWITCHES = ("_active_adapter", "_disable_adapters")
Chosen = tuple[str, ...] | None  # None: as the model is set; (): no adapter


def base_of(model: nn.Module) -> Any:
    """Return the model that peft's wrapper hands its arguments to; the model itself if it has no wrapper."""
    wrapper: Any = model
    return wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else wrapper


def carriers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that carry adapters, with their names."""
    for name, module in model.named_modules():
        if all(switch in vars(module) for switch in SWITCHES):
            yield name, module


def load_adapter(model: nn.Module, folder: str, name: str, wrapper: Any = None) -> Any:
    """Add an adapter from a folder to a model, in place and switched off. Raises SpecdecError without peft.

    wrapper: what this returned for the model's first adapter; peft's, which is needed for nothing else
    """
    peft = need("peft", "adapters need", "lora")
    if wrapper is None:
        wrapper = peft.PeftModel.from_pretrained(model, folder, adapter_name=name)
    else:
        wrapper.load_adapter(folder, adapter_name=name)
    for _, module in carriers(model):
        vars(module)["_disable_adapters"] = True
    return wrapper


def adapter_names(model: nn.Module) -> list[str]:
    """List the adapters that a model has."""
    found: set[str] = set()
    for _, module in carriers(model):
        found |= set(getattr(module, "_adapters", ()))  # whole modules that are trained beside adapters
        for name in getattr(module, "adapter_layer_names", ()):
            found |= set(getattr(module, name).keys())
    return sorted(found)


def adapter_folders(value: Any, role: str) -> dict[str, Any]:
    """Return adapters to load, name -> folder or hub id. Raises SpecdecError for anything else."""
    found = {} if value is None else value
    if not isinstance(found, Mapping) or not all(n and isinstance(n, str) for n in found):
        raise SpecdecError(f"{role}: adapters must map names to folders or hub ids, got {value!r}")
    for name, folder in found.items():
        if not isinstance(folder, str | Path) or not str(folder):
            raise SpecdecError(f"{role}: adapter {name!r} must be a folder or a hub id, got {folder!r}")
    return dict(found)


def parse_choice(model: nn.Module, wanted: Any, role: str) -> Chosen:
    """Return the adapters that a call wants.

    wanted: UNSET = as the model is set; None = none; a name, or a list of names that are added up
    Raises SpecdecError for a name that the model does not have, and while an adapter is merged into the weights.
    """
    if wanted is UNSET:
        return None
    names = adapter_names(model)
    for name in as_list(wanted):
        if name not in names:
            if not names:
                raise SpecdecError(f"{role}: the model has no adapters, so adapter={name!r} cannot be chosen")
            raise unknown_name(f"adapter of the {role}", str(name), names)
    merged = {name for _, m in carriers(model) for name in getattr(m, "merged_adapters", ())}
    if merged:
        raise SpecdecError(f"{role}: adapter {min(merged)!r} is merged into the weights: unmerge it to choose one")
    return tuple(as_list(wanted))


def switch(copy: nn.Module, original: nn.Module, chosen: Chosen) -> None:
    """Set a choice in the modules of a model's copy. requires_grad, which peft would set too, is the original's."""
    known = dict(carriers(original))
    for name, module in carriers(copy):
        own = vars(known[name])
        active, off = (own[s] for s in SWITCHES) if chosen is None else (list(chosen) or own[SWITCHES[0]], not chosen)
        vars(module).update(zip(SWITCHES, (active, off), strict=True))
