"""Copies between devices: the host waits for what it is going to read, and for nothing else."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch

import specdec
from specdec.device.transfer import moved


def test_only_a_copy_to_a_gpu_is_not_waited_for() -> None:
    values = mock.Mock(spec=torch.Tensor)
    for name in ("cpu", "cuda"):
        moved(values, torch.device(name))
    assert values.to.call_args_list == [
        mock.call(torch.device("cpu"), non_blocking=False),
        mock.call(torch.device("cuda"), non_blocking=True),
    ]


def test_every_copy_between_devices_goes_that_way() -> None:
    """A transfer to the host that nobody waits for gives what was in its memory before, most of the time correctly."""
    free = {"transfer.py"}  # the function itself
    root = Path(specdec.__file__).parent
    found = {p.name for p in root.rglob("*.py") if "non_blocking=True" in p.read_text(encoding="utf-8")}
    assert found <= free
