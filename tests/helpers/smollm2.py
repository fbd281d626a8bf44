"""SmolLM2-135M-Instruct for tests: loaded once a process, in float32 on the CPU."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


@lru_cache(maxsize=1)
def load_smollm2(path: Path) -> tuple[Any, Any]:
    """(model, tokenizer) from the GGUF file at `path`, by transformers alone: independent of specdec's own loading."""
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    return model.eval(), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
