"""Every type of model that people bring, tiny, against `model.generate`, as target and as draft."""

from __future__ import annotations

import re
from dataclasses import asdict

import pytest

from tests.helpers.scripts import load_script

SWEEP = load_script("sweep_models")
EQUAL, REFUSED, NOT_BUILT, Found = SWEEP.EQUAL, SWEEP.REFUSED, SWEEP.NOT_BUILT, SWEEP.Found

# Layers that take keys and values from others, that differ in heads or widths, that run several times.
SHARED = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")
UNEVEN = ("jetmoe", "laguna", "mimo_v2_flash")
REPEATED = ("dory",)


@pytest.mark.fast(1)
@pytest.mark.parametrize("kind", SHARED)
def test_layers_that_share_keys_and_values_give_the_texts_of_generate(kind: str) -> None:
    assert SWEEP.try_type(kind) == Found(kind, EQUAL)


@pytest.mark.fast(2)
@pytest.mark.parametrize("kind", [*UNEVEN, *REPEATED])
def test_uneven_layers_give_the_texts_of_generate(kind: str) -> None:
    assert SWEEP.try_type(kind, quick=True) == Found(kind, EQUAL)


TENSORS = re.compile(r"tensor|\bsizes?\b|\bshapes?\b|dimension", re.IGNORECASE)  # no words of a user's
# Types that papers use and that cannot be done, by the word that says why.
MISSING = {
    "falcon:alibi": "ALiBi", "llama:dynamic": "dynamic RoPE", "nemotron_h": "time step", "zamba2": "time step",
    **dict.fromkeys(("minimax", "recurrent_gemma", "rwkv", "xlstm"), "place of its own"),
}  # fmt: skip


PAPERS = sorted({kind for kinds in SWEEP.FAMILIES.values() for kind in kinds})
FIRST = [kinds[0] for kinds in SWEEP.FAMILIES.values()]


@pytest.mark.fast(3)
@pytest.mark.parametrize("kind", PAPERS)
def test_types_that_papers_use_are_equal_or_say_what_is_missing(kind: str) -> None:
    """By every way of decoding for the first of each family, by chains, by trees and as a draft for the others."""
    found = SWEEP.try_type(kind, quick=kind not in FIRST)
    if kind in MISSING:
        assert found.outcome == REFUSED
        assert MISSING[kind] in found.reason
        assert not TENSORS.search(found.reason)
    else:
        assert found == Found(kind, EQUAL)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("deepseek_v32", "keys and values"),
        ("zaya", "recurrent"),
        ("zamba2", "time step"),
        ("roberta", "encoder"),
        ("openai-gpt", "takes no cache"),
        ("doge", "masks and position_ids"),
    ],
)
def test_what_cannot_work_is_refused_in_words(kind: str, why: str) -> None:
    found = SWEEP.try_type(kind)
    assert found.outcome == REFUSED
    assert why in found.reason
    assert not TENSORS.search(found.reason)


def test_the_table_holds_every_outcome() -> None:
    rows = [
        Found("a", EQUAL),
        Found("b", REFUSED, "target (b) is not supported: it takes no cache; a pass over it fails (torch (says) so)"),
        Found("c", REFUSED, "target (cc) is not supported: it takes no cache; a pass over it differs (by 3)"),
        Found("d", NOT_BUILT, "ValueError: no"),
    ]
    versions = {"transformers": "5", "torch": "2", "specdec": "0"}
    rows_of = [asdict(row) for row in rows]
    result = {"date": "today", "versions": versions, "families": {"few": ["a", "b"]}, "rows": rows_of}
    block = load_script("write_results").models_block(result)
    assert "Of 4 types" in block
    assert "| few | `a` | `b` |" in block
    assert "| refused: it takes no cache | `b`, `c` |" in block
    assert "| not built: ValueError: no | `d` |" in block


@pytest.mark.full
def test_every_other_type_is_equal_or_refused_in_words() -> None:
    for found in SWEEP.sweep(sorted({*SWEEP.model_types()} - {*PAPERS}), quick=True):
        assert found.outcome in (EQUAL, REFUSED, NOT_BUILT), found
        if found.outcome == REFUSED:
            assert found.reason.startswith("target ("), found
            assert not TENSORS.search(found.reason), found
