"""Kinds of models that once went wrong, against `model.generate`: plain, chains, trees, shared and kept beginnings."""

from __future__ import annotations

import pytest

from specdec.research.model_sweep import EQUAL, Found, try_type

# Layers that take keys and values from others, that differ in heads or widths, that run several times.
SHARED = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")
UNEVEN = ("jetmoe", "laguna", "mimo_v2_flash")
REPEATED = ("dory",)


@pytest.mark.parametrize("kind", [*SHARED, *UNEVEN, *REPEATED])
def test_uneven_layers_give_the_texts_of_generate(kind: str) -> None:
    assert try_type(kind) == Found(kind, EQUAL)
