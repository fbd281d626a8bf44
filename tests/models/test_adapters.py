"""Adapters of PEFT, chosen per call: the text is that of the model with this adapter, and the model stays as it is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec
from specdec import SpecdecError
from specdec.models.adapters import carriers
from specdec.models.runner import Runner
from tests.helpers.recording import Rerun
from tests.helpers.tiny import tiny_model
from tests.helpers.tokens import word_level
from tests.oracle import oracle_greedy

peft = pytest.importorskip("peft", reason="adapters need peft (specdec[lora])")

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


def with_adapters(*names: str, model: Any = None) -> Any:
    """A tiny Llama with random adapters; the last one is active."""
    model = tiny_model("llama") if model is None else model
    for seed, name in enumerate(names):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
            peft.inject_adapter_in_model(settings, model, adapter_name=name)
    return set_adapter(model, names[-1]).eval()


def set_adapter(model: Any, *names: str) -> Any:
    """As peft's wrapper does it; no name = none."""
    for _, module in carriers(model):
        module.enable_adapters(bool(names))
        if names:
            module.set_adapter(list(names))
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return with_adapters("a", "b")


def alone(model: Any, adapter: str | None, length: int = 12) -> list[int]:
    """transformers' text with one adapter."""
    own = set_adapter(copy.deepcopy(model), *([adapter] if adapter else []))
    return oracle_greedy(own, PROMPT, length)


def state(model: Any) -> list[Any]:
    return [(m._active_adapter, m._disable_adapters) for m in model.modules() if "_active_adapter" in vars(m)] + [
        p.requires_grad for p in model.parameters()
    ]


@pytest.mark.parametrize("recorder", [None, Rerun])
def test_each_call_has_the_text_of_its_adapter(model: Any, recorder: Any) -> None:
    decoder = specdec.SpeculativeDecoder(model, strategies=["prompt-lookup"])
    if recorder is not None:
        decoder.target = Runner(model, recorder=recorder())
    before = state(model)
    wanted = {name: alone(model, name) for name in ("a", "b", None)}
    assert len({tuple(ids) for ids in wanted.values()}) == 3
    for name in ("a", "b", None, "a"):
        out = decoder.generate(PROMPT, 12, adapter=name)
        assert out.token_ids == [wanted[name]], name
        (entry,) = out.provenance["adapters"]["target"]
        assert (entry["disabled"], entry["active"]) == (name is None, [name or "b"])
    assert decoder.generate(PROMPT, 12).token_ids == [wanted["b"]]  # as the model is set
    assert state(model) == before
    captures = decoder.target.recorded[0]
    decoder.generate(PROMPT, 12, adapter="a")
    assert decoder.target.recorded[0] == captures  # what was recorded for a choice is kept


def test_adapters_that_are_added_up(model: Any) -> None:
    decoder = specdec.SpeculativeDecoder(model, strategies=[])
    own = set_adapter(copy.deepcopy(model), "a", "b")
    assert decoder.generate(PROMPT, 12, adapter=["a", "b"]).token_ids == [oracle_greedy(own, PROMPT, 12)]


def test_a_drafts_adapter_changes_what_is_accepted_and_never_the_text(model: Any) -> None:
    decoder = specdec.SpeculativeDecoder(model, model, strategies=["draft-model:n_max=3"])
    options = {"max_new_tokens": 24, "adapter": "a", "ignore_eos": True}
    same, other = (decoder.generate(PROMPT, draft_adapter=name, **options) for name in ("a", "b"))
    assert same.token_ids == other.token_ids == [alone(model, "a", 24)]
    assert same.stats.accepted_tokens > other.stats.accepted_tokens


def test_a_peft_model_is_switched_as_well() -> None:
    base = tiny_model("llama")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(base, settings, adapter_name="x").eval()
    decoder = specdec.SpeculativeDecoder(wrapped, strategies=[])
    with wrapped.disable_adapter():
        plain = oracle_greedy(base, PROMPT, 12)
    assert decoder.generate(PROMPT, 12, adapter=None).token_ids == [plain]
    assert decoder.generate(PROMPT, 12, adapter="x").token_ids == [oracle_greedy(base, PROMPT, 12)] != [plain]


def test_generators_in_flight_have_their_own_adapters(model: Any) -> None:
    decoder = specdec.SpeculativeDecoder(model, strategies=[])
    both = [decoder.rounds(PROMPT, 12, adapter=name) for name in ("a", "b")]
    found: list[list[int]] = [[], []]
    for pair in zip(*both, strict=True):
        for tokens, entry in zip(found, pair, strict=True):
            tokens += entry.tokens
    assert found == [alone(model, "a"), alone(model, "b")]


def test_what_was_kept_with_another_adapter_is_dropped(model: Any) -> None:
    decoder = specdec.SpeculativeDecoder(model, strategies=[])
    first = decoder.generate(PROMPT, 4, adapter="a", keep_state=True)
    longer = [*PROMPT, *first.token_ids[0]]
    for name, dropped in (("a", []), ("b", ["target"]), (None, ["target"])):
        out = decoder.generate(longer, 6, adapter=name, keep_state=True)
        assert out.provenance["dropped_state"] == dropped
        assert out.token_ids == decoder.generate(longer, 6, adapter=name).token_ids


def test_weights_of_an_adapter_that_are_trained_on_are_the_new_ones(model: Any) -> None:
    own = copy.deepcopy(model)
    decoder = specdec.SpeculativeDecoder(own, strategies=[])
    decoder.target = Runner(own, recorder=Rerun())
    before = decoder.generate(PROMPT, 12, adapter="a", keep_state=True)
    with torch.no_grad():
        for name, p in own.named_parameters():
            if ".lora_B.a." in name:
                p.mul_(-1)
    after = decoder.generate(PROMPT, 12, adapter="a", keep_state=True)
    assert after.provenance["dropped_state"] == ["target"]
    assert after.token_ids == [alone(own, "a")] != before.token_ids


def test_adapters_of_a_pair_are_loaded_by_name_and_off_until_they_are_chosen(tmp_path: Path) -> None:
    base = tiny_model("llama")
    word_level([f"w{i}" for i in range(128)]).save_pretrained(tmp_path / "base")
    base.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(copy.deepcopy(base), settings).eval()
    wrapped.save_pretrained(tmp_path / "adapter")
    decoder = specdec.SpeculativeDecoder.from_pretrained(
        tmp_path / "base", device="cpu", strategies=[], adapters=dict.fromkeys(("sql", "other"), tmp_path / "adapter")
    )
    assert decoder.generate(PROMPT, 12).token_ids == [oracle_greedy(base, PROMPT, 12)]
    expected = oracle_greedy(wrapped.get_base_model(), PROMPT, 12)
    for name in ("sql", "other"):
        assert decoder.generate(PROMPT, 12, adapter=name).token_ids == [expected]
    with pytest.raises(SpecdecError, match=r"cannot load adapter 'x' from .*nowhere"):
        specdec.load_pair(tmp_path / "base", device="cpu", adapters={"x": tmp_path / "nowhere"})


def test_what_cannot_be_chosen_is_named(model: Any) -> None:
    decoder = specdec.SpeculativeDecoder(model, strategies=[])
    with pytest.raises(SpecdecError, match=r"unknown adapter of the target 'c'.*a, b"):
        decoder.generate(PROMPT, 2, adapter="c")
    with pytest.raises(SpecdecError, match="draft_adapter='a' has no effect without a draft"):
        decoder.generate(PROMPT, 2, draft_adapter="a")
    with pytest.raises(SpecdecError, match="target: the model has no adapters"):
        specdec.SpeculativeDecoder(tiny_model("llama"), check=False).generate(PROMPT, 2, adapter="a")
    merged = copy.deepcopy(model)
    merged.model.layers[0].mlp.down_proj.merge(adapter_names=["a"])
    with pytest.raises(SpecdecError, match="adapter 'a' is merged"):
        specdec.SpeculativeDecoder(merged, check=False).generate(PROMPT, 2, adapter="b")
