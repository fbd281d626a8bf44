"""A real model on real prompts: every text equals transformers' own greedy text, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec
from specdec.research.prompts.datasets import load_prompts
from tests.helpers.smollm2 import load_smollm2

pytestmark = pytest.mark.smollm2

PROMPTS, LONGEST, NEW = 20, 260, 24
TIE = 1e-4  # two best logits closer than this can swap between passes of different width in float32


@pytest.fixture(scope="module")
def decoder(smollm2_folder: Path) -> specdec.SpeculativeDecoder:
    model, tokenizer = load_smollm2(smollm2_folder)
    return specdec.SpeculativeDecoder(model, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def prompts(decoder: specdec.SpeculativeDecoder) -> list[list[int]]:
    """20 Spec-Bench prompts of all categories, through the chat template, short enough for two cores."""
    found: dict[str, list[list[int]]] = {}
    for prompt in load_prompts("spec-bench"):
        chat = [{"role": "user", "content": prompt.text}]
        ids = decoder.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        if len(ids) <= LONGEST:
            found.setdefault(prompt.category, []).append(ids)
    rounds = [rows[i] for i in range(4) for rows in found.values() if i < len(rows)]
    assert len(rounds) >= PROMPTS
    return rounds[:PROMPTS]


@pytest.fixture(scope="module")
def reference(decoder: specdec.SpeculativeDecoder, prompts: list[list[int]]) -> list[list[int]]:
    rows = []
    for ids in prompts:
        x = torch.tensor([ids])
        out = decoder.target.model.generate(
            x, attention_mask=torch.ones_like(x), max_new_tokens=NEW, do_sample=False, pad_token_id=2
        )
        rows.append(out[0, len(ids) :].tolist())
    return rows


def margin(model: Any, ids: Sequence[int]) -> float:
    """How far apart the two best next tokens are, by a full forward."""
    with torch.no_grad():
        best = model(torch.tensor([list(ids)]), use_cache=False).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


@pytest.mark.parametrize(
    ("strategies", "batch"),
    [([], 8), (["prompt-lookup"], 8), (["ngram-simple:size_n=3:size_m=10", "prompt-lookup:match=earliest"], 1)],
    ids=["plain", "prompt-lookup", "chain"],
)
def test_greedy_text_equals_transformers_generate(
    decoder: specdec.SpeculativeDecoder,
    prompts: list[list[int]],
    reference: list[list[int]],
    strategies: list[str],
    batch: int,
) -> None:
    out = decoder.generate(prompts, max_new_tokens=NEW, strategies=strategies, batch_size=batch)
    for prompt, mine, theirs in zip(prompts, out.token_ids, reference, strict=True):
        if mine != theirs:
            same = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
            assert margin(decoder.target.model, [*prompt, *mine[:same]]) < TIE
    assert out.stats.generated_tokens == out.stats.accepted_tokens + out.stats.rounds
    assert strategies == [] or out.stats.accepted_tokens > 0
