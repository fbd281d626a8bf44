"""A small ablation on random models, saved as folders: a whole run takes seconds."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from specdec.demo_models import target_path
from specdec.research.ablation import AblationConfig
from tests.helpers.tiny import tiny_model

VOCABULARY = 2048  # of the embedded models' tokenizer, which the random models borrow
PROMPTS = ("def add(self, item):", "import os\nimport", "for x in <b>range</b>(", "a = b = a = b", "return self")


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(target_path())


def save_model(folder: Path, seed: int = 0, **overrides: Any) -> str:
    """A random Llama with the embedded models' tokenizer."""
    tiny_model("llama", seed, VOCABULARY, **overrides).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return str(folder)


def save_pair(folder: Path) -> dict[str, str]:
    """A target, and a draft that often agrees with it: the same model with its last layer missing."""
    target = save_model(folder / "target", num_hidden_layers=2)
    return {"target": target, "draft": save_model(folder / "draft", num_hidden_layers=1)}


def grid(pair: dict[str, str], **overrides: Any) -> AblationConfig:
    """Two chains, two temperatures, five prompts: 30 rows with plain decoding."""
    values: dict[str, Any] = {
        "pairs": {"tiny": pair},
        "strategies": {"draft": ["draft-model:n_max=3"], "lookup": ["prompt-lookup:ngram_min=1"]},
        "prompts": PROMPTS,
        "generation": {"max_new_tokens": 8, "acceptance": "coupled"},
        "axes": {"temperature": [0.0, 1.0]},
        "warm_up_tokens": 1,
        **overrides,
    }
    return AblationConfig(**values)
