"""What the pair report says about two tokenizers, beyond what it refuses."""

from __future__ import annotations

import torch
from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM

import specdec
from specdec.models.kv_cache import kv_cache_bytes
from specdec.models.pair_report import UNSTATED, ModelFacts, PairReport
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


def test_a_context_that_is_not_stated_is_no_number_and_states_are_not_in_the_memory() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32}
    bloom = BloomForCausalLM(BloomConfig(**sizes, n_layer=2, n_head=4))
    mamba = MambaForCausalLM(MambaConfig(**sizes, num_hidden_layers=2))
    report = PairReport.make([ModelFacts.from_module("target", bloom), ModelFacts.from_module("draft", mamba)])
    assert not report.models[0].states_context
    assert (report.row_tokens(None), report.row_tokens(77)) == (UNSTATED, 77)
    assert report.memory()["kv_cache"] == kv_cache_bytes(bloom.config, torch.float32, 1, UNSTATED)
    assert any("states of recurrent layers of the draft" in w for w in report.warnings)
