"""What a run goes on from: weights, optimiser, schedule, the number of steps done (from which the data's position
follows) and the state of torch's random numbers. One file, replaced as a whole."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from specdec.errors import SpecdecError
from specdec.files.forms import shown
from specdec.files.texts import unfinished

CHECKPOINT = "checkpoint.pt"
WHY = dict.fromkeys(("steps", "minutes"), " (the learning rate of every step depends on it)")


def write_checkpoint(folder: Path, parts: dict[str, Any], mark: dict[str, Any], step: int) -> None:
    """parts: what has a state, by name; mark: all that the curve depends on, by name."""
    states = {name: part.state_dict() for name, part in parts.items()}
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    with unfinished(folder / CHECKPOINT, "checkpoint") as file:
        torch.save({"mark": mark, "step": step, "states": states, "rng": rng}, file)


def read_checkpoint(folder: Path, parts: dict[str, Any], mark: dict[str, Any], device: torch.device) -> int:
    """Put the states back; returns the steps done, 0 = there is no checkpoint. Raises SpecdecError for one of another
    run, and for a damaged one."""
    file = folder / CHECKPOINT
    if not file.exists():
        return 0
    try:
        saved = torch.load(file, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
        raise SpecdecError(f"{file} cannot be read: {error}; remove it to start again") from None
    if saved["mark"] != mark:
        raise SpecdecError(
            f"{file} is of another config, target or answers: {_changed(saved['mark'], mark)}; set back what "
            "changed, give another `out`, or remove it"
        )
    for name, part in parts.items():
        part.load_state_dict(saved["states"][name])
    torch.set_rng_state(saved["rng"]["cpu"].cpu())
    if "cuda" in saved["rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["rng"]["cuda"].cpu())
    return int(saved["step"])


def _changed(before: Any, now: dict[str, Any]) -> str:
    """Say what differs, by name."""
    if not isinstance(before, dict):
        return "an earlier version wrote it, which did not say of which"
    said = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old != new:
            values = "" if " " in name else f" was {shown(old)} and is {shown(new)}"
            said.append(f"{name}{values or ' changed'}{WHY.get(name, '')}")
    return ", ".join(said)
