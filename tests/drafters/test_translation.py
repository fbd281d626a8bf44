"""draft-model over text: another vocabulary never changes the output, and a good draft is worth something."""

from __future__ import annotations

from typing import Any

import pytest

import specdec
from specdec.errors import SpecdecError
from tests.helpers.tiny import tiny_model
from tests.helpers.tokens import byte_level

PROMPTS = ["def read(self, path):\n    with open(path) as f:\n", "import os\nimport sys\n\n\ndef main():\n    "]


@pytest.fixture(scope="module")
def pair() -> specdec.LoadedPair:
    return specdec.load_pair("demo-target")


def decoder(pair: specdec.LoadedPair, draft: Any, tokenizer: Any, **options: Any) -> specdec.SpeculativeDecoder:
    strategy = specdec.DraftModel(n_max=4, translate=True, **options)
    return specdec.SpeculativeDecoder(pair.target, draft, pair.tokenizer, tokenizer, strategies=[strategy])


@pytest.mark.fast(1)
def test_a_draft_with_another_vocabulary_leaves_the_text_as_it_is(pair: specdec.LoadedPair) -> None:
    dec = decoder(pair, tiny_model("llama", vocab=300, max_position_embeddings=512), byte_level(vocab=300))
    out = dec.generate(PROMPTS, max_new_tokens=12)
    assert out.token_ids == dec.generate(PROMPTS, max_new_tokens=12, strategies=[]).token_ids
    assert out.stats.draft_tokens > 0
    assert dec.report.vocabulary == "translated"


def test_the_target_drafting_for_itself_through_text_is_mostly_accepted(pair: specdec.LoadedPair) -> None:
    dec = decoder(pair, pair.target, pair.tokenizer)
    out = dec.generate(PROMPTS, max_new_tokens=24)
    assert out.token_ids == dec.generate(PROMPTS, max_new_tokens=24, strategies=[]).token_ids
    # Drafts are lost only where the joint tokenisation moves a boundary.
    assert out.stats.tokens_per_round > 2.5


def test_replacements_go_to_the_draft_and_come_back(pair: specdec.LoadedPair) -> None:
    dec = decoder(pair, pair.target, pair.tokenizer, replacements={"self": "this", "\t": "    "})
    out = dec.generate(PROMPTS, max_new_tokens=16)
    assert out.token_ids == dec.generate(PROMPTS, max_new_tokens=16, strategies=[]).token_ids


def test_another_vocabulary_without_translation_is_refused(pair: specdec.LoadedPair) -> None:
    with pytest.raises(SpecdecError, match=r"tokenizer mismatch.*translate=True"):
        specdec.SpeculativeDecoder(pair.target, tiny_model("llama", vocab=300), pair.tokenizer, byte_level(vocab=300))


def test_sampled_text_is_plain_text_under_match(pair: specdec.LoadedPair) -> None:
    dec = decoder(pair, pair.target, pair.tokenizer)
    options = {"max_new_tokens": 12, "temperature": 0.8, "acceptance": "match", "seed": 3}
    assert dec.generate(PROMPTS, **options).token_ids == dec.generate(PROMPTS, strategies=[], **options).token_ids
