"""The embedded models: they load offline, keep within their sizes, and are what its metrics.json says it is."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import SpeculativeDecoder
from specdec.demo_models import draft_path, head_path, target_path
from specdec.research.demo import with_demo_head

FOLDERS = {"target": target_path(), "draft": draft_path()}
LIMITS = {"target": 16_000_000, "draft": 2_000_000}
METRICS: dict[str, Any] = json.loads((target_path().parent / "metrics.json").read_text(encoding="utf-8"))
TEXTS = [
    "def f(x):\n    return x  +  1\n",
    "  leading and trailing  \n\n\t",
    "don't . stop , here ! (n't 've)",
    "naïve 漢字 🙂 \x00\x7f\r\n",
    "<|endoftext|>",
    "",
]


@pytest.fixture(scope="module")
def pair() -> dict[str, Any]:
    offline = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        return {n: AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for n, f in FOLDERS.items()}
    finally:
        if offline is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = offline


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(target_path())


@pytest.mark.parametrize("name", ["target", "draft"])
def test_size_is_within_its_limit_and_as_recorded(name: str, pair: dict[str, Any]) -> None:
    size = (FOLDERS[name] / "model.safetensors").stat().st_size
    assert size <= LIMITS[name]
    assert METRICS[f"{name}_size"] == {"parameters": pair[name].num_parameters(), "bytes": size}


def test_pair_is_llama_with_grouped_queries_and_one_vocabulary(pair: dict[str, Any], tokenizer: Any) -> None:
    for model in pair.values():
        config = model.config
        assert config.model_type == "llama"
        assert config.num_attention_heads > config.num_key_value_heads
        assert config.max_position_embeddings == 2048
        assert config.vocab_size == len(tokenizer)
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 0
    assert (target_path() / "tokenizer.json").read_bytes() == (draft_path() / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trip(text: str, tokenizer: Any) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_round_trip_on_a_source_file_and_adds_nothing(tokenizer: Any) -> None:
    text = Path(json.__file__).read_text(encoding="utf-8")
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert 0 not in ids


def test_recorded_agreement_reaches_the_goal() -> None:
    assert METRICS["held_out"]["agreement"] >= 0.7
    assert METRICS["greedy"]["agreement"] > METRICS["held_out"]["agreement"]
    assert METRICS["held_out"]["target_loss"] < METRICS["held_out"]["draft_loss"]


@torch.no_grad()
def test_agreement_measured_again_on_held_out_excerpts(pair: dict[str, Any], tokenizer: Any) -> None:
    agreed = positions = 0
    for excerpt in METRICS["check"]:
        ids = torch.tensor([tokenizer(excerpt["text"])["input_ids"]])
        assert ids.shape[1] == excerpt["tokens"]
        target, draft = (pair[name](ids[:, :-1]).logits.argmax(-1) for name in ("target", "draft"))
        same, n = int((target == draft).sum()), ids.shape[1] - 1
        assert same / n == pytest.approx(excerpt["agreement"], abs=2.5 / n)  # rounding may turn a near tie or two
        agreed, positions = agreed + same, positions + n
    # against the whole held-out part: four standard errors, doubled variance because neighbours are alike
    expected = METRICS["held_out"]["agreement"]
    tolerance = 4 * (2 * expected * (1 - expected) / positions) ** 0.5
    assert agreed / positions == pytest.approx(expected, abs=tolerance)


@torch.no_grad()
def test_target_predicts_python_better_than_chance(pair: dict[str, Any], tokenizer: Any) -> None:
    ids = torch.cat([torch.tensor(tokenizer(e["text"])["input_ids"]) for e in METRICS["check"]])[None]
    losses = {name: float(model(ids, labels=ids).loss) for name, model in pair.items()}
    assert losses["target"] < losses["draft"] < 4.0  # ln 2048 = 7.6


def test_the_head_is_small_and_drafts_for_the_target() -> None:
    assert (head_path() / "model.safetensors").stat().st_size <= 4_000_000
    decoder = SpeculativeDecoder.from_pretrained("demo-target", strategies="eagle3:head=demo-head", device="cpu")
    prompts = [piece["text"] for piece in METRICS["check"][:2]]
    out = decoder.generate(prompts, 24)
    assert out.token_ids == decoder.generate(prompts, 24, strategies=[]).token_ids
    assert out.stats.to_dict()["acceptance_length"] > 1.2


def test_the_demo_gives_a_headless_eagle3_the_embedded_head() -> None:
    assert with_demo_head("suffix, eagle3:n_max=3") == "suffix,eagle3:n_max=3:head=demo-head"
    assert with_demo_head("eagle3:head=mine") == "eagle3:head=mine"
    assert with_demo_head(None) is None
