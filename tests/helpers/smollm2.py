"""SmolLM2-135M-Instruct for tests: loaded once a process, in float32 on the CPU."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@lru_cache(maxsize=1)
def load_smollm2(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer) from the fixture `smollm2_folder`, by transformers alone: independent of specdec's loading.

    Every caller of a process shares the two: leave them as they are.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)
