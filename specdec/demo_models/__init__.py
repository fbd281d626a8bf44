"""The embedded models: a target, its draft and its EAGLE-3 head, of CPython's standard library (MODEL_CARD.md).

Nothing is loaded on import; the functions return folders that ``from_pretrained`` reads offline.
"""

from pathlib import Path

__all__ = ["draft_path", "head_path", "target_path"]

_FOLDER = Path(__file__).resolve().parent


def target_path() -> Path:
    """Return the folder of the target: Llama architecture, 24 layers, 7.4 million parameters."""
    return _FOLDER / "target"


def draft_path() -> Path:
    """Return the folder of the draft distilled from it: two layers, one million parameters, the same tokenizer."""
    return _FOLDER / "draft"


def head_path() -> Path:
    """Return the folder of an EAGLE-3 head for the target, made by `specdec train eagle3`."""
    return _FOLDER / "head"
