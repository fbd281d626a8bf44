"""What the pair report says about two tokenizers, beyond what it refuses."""

from __future__ import annotations

import specdec
from tests.helpers.tiny import tiny_model
from tests.helpers.tokens import byte_level


def test_an_end_token_that_differs_is_told() -> None:
    mine, theirs = byte_level(), byte_level()
    theirs.eos_token = "<s>"
    decoder = specdec.SpeculativeDecoder(tiny_model("llama"), tiny_model("llama", seed=1), mine, theirs)
    assert decoder.report.vocabulary == "identical"
    assert any(w.startswith("EOS differs") for w in decoder.report.warnings)
    assert not any(w.startswith("BOS differs") for w in decoder.report.warnings)


def test_without_a_second_tokenizer_other_sizes_are_told() -> None:
    target, draft = tiny_model("llama", vocab=128), tiny_model("llama", seed=1, vocab=124)
    report = specdec.SpeculativeDecoder(target, draft).report
    assert report.vocabulary == "unchecked"
    assert any("sizes differ" in w for w in report.warnings)
