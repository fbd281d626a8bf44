"""Loading a pair from disk: what is accepted, what is refused before a weight is read, and what the report predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as bars

from specdec import DraftModel, LoadedPair, SpecdecError, SpeculativeDecoder, demo_models, load_pair
from specdec.models.vocabulary import compare_vocabularies
from tests.helpers.playing import random_ids
from tests.helpers.tiny import TINY_KINDS, tiny_model
from tests.helpers.tokens import byte_level, word_level
from tests.oracle import oracle_greedy

WORDS = [f"w{i}" for i in range(300)]


def saved(folder: Path, model: Any, tokenizer: Any) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test when a weight is read or allocated."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)


# -- what works ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_pair_saved_to_folders_decodes_like_the_models_in_hand(kind: str, tmp_path: Path) -> None:
    tokenizer = byte_level()
    size = len(tokenizer)
    target, draft = tiny_model(kind, vocab=size), tiny_model("llama", seed=1, vocab=size, hidden_size=16)
    paths = [saved(tmp_path / "t", target, tokenizer), saved(tmp_path / "d", draft, tokenizer)]
    decoder = SpeculativeDecoder.from_pretrained(*paths, device="cpu")
    assert decoder.report.vocabulary == "identical"  # and the different hidden sizes are nobody's business
    ids = tokenizer("the quick brown fox")["input_ids"]
    out = decoder.generate("the quick brown fox", 12)
    assert out.token_ids == [oracle_greedy(target, ids, 12)]
    assert out.texts == [tokenizer.decode(out.token_ids[0], skip_special_tokens=True)]
    assert [m.parameters for m in decoder.report.models] == [
        sum(p.numel() for p in m.parameters()) for m in (target, draft)
    ]
    assert [d.name for d in decoder.strategies] == ["draft-model"]
    assert [d.name for d in SpeculativeDecoder.from_pretrained(paths[0], device="cpu").strategies] == ["prompt-lookup"]


def test_the_embedded_pair_is_loaded_by_name() -> None:
    if not (demo_models.target_path() / "model.safetensors").is_file():
        pytest.skip("the embedded models are not there")
    decoder = SpeculativeDecoder.from_pretrained("demo-target", "demo-draft", device="cpu")
    out = decoder.generate("def main(", 16)
    assert out.token_ids == decoder.generate("def main(", 16, strategies=[]).token_ids
    ids = decoder.tokenizer("def main(")["input_ids"]
    assert out.token_ids[0] == oracle_greedy(decoder.target.model, ids, 16)[: len(out.token_ids[0])]
    assert decoder.report.vocabulary == "identical"


def test_dtypes_and_devices_are_as_asked(tmp_path: Path) -> None:
    tokenizer = word_level(WORDS)
    path = saved(tmp_path / "m", tiny_model("llama", vocab=300).to(torch.bfloat16), tokenizer)
    for dtype, wanted in ((None, torch.float32), ("auto", torch.bfloat16), ("bfloat16", torch.bfloat16)):
        assert load_pair(path, device="cpu", dtype=dtype).target.dtype == wanted
    assert load_pair(path, device="cpu", dtype=torch.float16).target.dtype == torch.float16
    pair = load_pair(path, path, device="cpu", dtype="float32", draft_dtype="bfloat16", draft_device="cpu")
    assert (pair.target.dtype, pair.draft.dtype) == (torch.float32, torch.bfloat16)
    assert not pair.target.training
    for options in ({"device": "mps"}, {"device": "tpu:1"}, {"draft_device": "nowhere"}, {"dtype": "float31"}):
        with pytest.raises(SpecdecError, match=str(next(iter(options.values())))):
            load_pair(path, path, **options)
    with pytest.raises(SpecdecError, match="devise"):
        load_pair(path, devise="cpu")
    with pytest.raises(SpecdecError, match="flash"):
        load_pair(path, device="cpu", attn_implementation="flash_attention_2")


# -- vocabularies: llama.cpp's rule ---------------------------------------------------------------------------------


def test_equal_tokenizers_make_padded_vocabularies_fine(tmp_path: Path) -> None:
    tokenizer = word_level(WORDS[:250])
    sizes = (256, 384)
    for t, d in (sizes, sizes[::-1]):
        target, draft = tiny_model("llama", vocab=t), tiny_model("llama", seed=1, vocab=d)
        paths = [saved(tmp_path / f"{t}", target, tokenizer), saved(tmp_path / f"{d}", draft, tokenizer)]
        decoder = SpeculativeDecoder.from_pretrained(*paths, device="cpu")
        assert decoder.report.vocabulary == "identical"
        prompt = random_ids(6, 1, 250)
        assert decoder.generate(prompt, 12).token_ids == [oracle_greedy(target, prompt, 12)]


def bpe(words: list[str]) -> Any:
    inner = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def test_the_first_five_ids_may_differ_and_no_other() -> None:
    base = word_level(WORDS)
    special = ["x0", "x1", "x2", "x3", "x4"]
    assert compare_vocabularies(base, word_level([*special, *WORDS[5:]])) == "compatible"
    for i in (5, 100, 299):
        changed = [*WORDS[:i], "other", *WORDS[i + 1 :]]
        assert f"token {i}" in compare_vocabularies(base, word_level(changed))
    assert "token 5" in compare_vocabularies(base, word_level([*WORDS[:5], WORDS[6], WORDS[5], *WORDS[7:]]))


@pytest.mark.parametrize(("difference", "fine"), [(0, True), (127, True), (128, True), (129, False)])
def test_vocabulary_sizes_may_differ_by_128(difference: int, fine: bool) -> None:
    big, small = word_level(WORDS), word_level(WORDS[: 300 - difference])
    for pair in ((big, small), (small, big)):
        answer = compare_vocabularies(*pair)
        assert (answer in ("identical", "compatible")) == fine
        assert fine or all(str(n) in answer for n in (300, 171, 128))


def test_kinds_of_tokenizers_must_be_equal() -> None:
    answer = compare_vocabularies(word_level(WORDS), bpe([*WORDS[:-1], "a"]))
    assert "WordLevel" in answer
    assert "BPE" in answer


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_bos_and_eos_must_be_added_by_both_or_by_neither(name: str) -> None:
    from tokenizers.processors import TemplateProcessing

    def adding(token: int | None) -> Any:
        tokenizer = word_level([*WORDS, f"extra{token}"], **{f"{name}_token": f"w{token or 0}"})
        if token is not None:
            template = f"w{token} $A" if name == "bos" else f"$A w{token}"
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                single=template, special_tokens=[(f"w{token}", token)]
            )
        return tokenizer

    # The last word differs, so that no pair is identical; with one id more on either side it is not compared.
    for a, b, fine in ((7, 7, True), (7, None, False), (None, 7, False), (7, 8, False)):
        mine, theirs = adding(a), adding(b)
        if a == b:
            theirs = word_level([*WORDS[:2], "zz", *WORDS[3:], f"extra{a}"], **{f"{name}_token": f"w{a}"})
            theirs.backend_tokenizer.post_processor = mine.backend_tokenizer.post_processor
        answer = compare_vocabularies(mine, theirs)
        assert (answer == "compatible") == fine, answer
        assert fine or name.upper() in answer


@pytest.mark.usefixtures("no_weights")
def test_a_mismatch_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    config = tiny_model("llama", vocab=320).config
    for name, tokenizer in (("t", byte_level()), ("d", word_level(WORDS))):
        config.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    with pytest.raises(SpecdecError, match="tokenizer mismatch"):
        load_pair(str(tmp_path / "t"), str(tmp_path / "d"), device="cpu")
    with pytest.raises(AssertionError, match="weights were loaded"):  # the fixture does watch
        load_pair(str(tmp_path / "t"), device="cpu")


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("name", ["missing", "missing.gguf", "folder.gguf"])
def test_a_wrong_path_is_named_before_a_weight_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    tiny_model("llama").config.save_pretrained(tmp_path / "good")
    word_level(WORDS).save_pretrained(tmp_path / "good")
    for pair in ((tmp_path / name, None), (tmp_path / "good", tmp_path / name)):
        with pytest.raises(SpecdecError, match=name):
            LoadedPair.load(*pair, device="cpu")


def test_a_folder_without_a_model_or_with_a_broken_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match="cannot load"):
        load_pair(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(SpecdecError, match="cannot load"):
        load_pair(tmp_path, device="cpu")
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(SpecdecError, match=r"file\.txt"):
        load_pair(tmp_path / "file.txt", device="cpu")


# -- the report --------------------------------------------------------------------------------------------------------


def test_warnings_name_the_size_ratio_and_the_shorter_context(tmp_path: Path) -> None:
    tokenizer = word_level(WORDS)
    small = tiny_model("llama", vocab=300, hidden_size=8, intermediate_size=8, num_hidden_layers=1, head_dim=2)
    big = tiny_model("llama", vocab=300, max_position_embeddings=1024, num_hidden_layers=4)
    assert SpeculativeDecoder(big, small, tokenizer, check=False).report.size_ratio < 1 / 3
    report = SpeculativeDecoder(big, big, tokenizer).report
    assert report.size_ratio == 1.0
    assert any("1 : 3" in w for w in report.warnings)
    paths = [saved(tmp_path / "big", big, tokenizer), saved(tmp_path / "small", small, tokenizer)]
    warnings = load_pair(*paths, device="cpu").report.warnings
    assert not any("1 : 3" in w for w in warnings)
    assert any("512" in w and "1024" in w for w in warnings)
    assert load_pair(paths[1], paths[1], device="cpu").report.warnings[0].startswith("the draft has 1.00")


def cache_bytes(pool: Any) -> int:
    return int(pool.idle.nbytes)


@pytest.mark.fast(2, full=8)
@pytest.mark.parametrize("kind", TINY_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_takes_the_memory_that_the_report_predicted(kind: str, dtype: torch.dtype) -> None:
    target = tiny_model(kind).to(dtype)
    draft = tiny_model("qwen2", seed=1, num_hidden_layers=2, num_key_value_heads=1)
    decoder = SpeculativeDecoder(target, draft, exact=False)
    prompts = [random_ids(n, n) for n in (30, 100, 7)]
    decoder.generate(prompts, 20)
    predicted = decoder.report.memory(batch=3, tokens=120)
    allocated = cache_bytes(decoder.target.pool) + cache_bytes(decoder.draft.pool)
    assert abs(predicted["kv_cache"] - allocated) <= 0.05 * allocated
    weights = sum(p.numel() * p.element_size() for m in (target, draft) for p in m.parameters())
    assert predicted["weights"] == weights
    assert predicted["total"] == predicted["weights"] + predicted["kv_cache"] + predicted["logits"]


def test_the_memory_of_a_draft_with_a_shorter_context_or_another_vocabulary_is_predicted_too() -> None:
    short = SpeculativeDecoder(tiny_model("llama"), tiny_model("llama", max_position_embeddings=40))
    short.generate(random_ids(20, 1), 60)
    allocated = cache_bytes(short.target.pool) + cache_bytes(short.draft.pool)
    assert abs(short.report.memory(1, 80)["kv_cache"] - allocated) <= 0.05 * allocated
    other = byte_level()
    translating = SpeculativeDecoder(
        tiny_model("llama", vocab=300), tiny_model("llama", vocab=len(other)), word_level(WORDS), other,
        strategies=[DraftModel(translate=True)],
    )  # fmt: skip
    translating.generate(random_ids(60, 1), 20)
    allocated = cache_bytes(translating.target.pool) + cache_bytes(translating.draft.pool)
    assert abs(translating.report.memory(1, 80)["kv_cache"] - allocated) <= 0.05 * allocated


def test_the_report_of_folders_is_the_report_of_the_models(tmp_path: Path) -> None:
    tokenizer = word_level(WORDS)
    model = tiny_model("gemma3", vocab=300)
    path = saved(tmp_path / "m", model, tokenizer)
    from_disk = load_pair(path, path, device="cpu").report
    in_hand = SpeculativeDecoder(model, model, tokenizer, tokenizer).report
    assert from_disk.memory(2, 50) == in_hand.memory(2, 50)
    assert from_disk.to_dict(2, 50)["memory"] == from_disk.memory(2, 50)
    assert [m.vocab_size for m in from_disk.models] == [300, 300]


@pytest.mark.parametrize("on", [True, False])
def test_the_embedded_models_load_without_a_bar_and_leave_the_bars_as_they_were(
    on: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    before = bars.is_progress_bar_enabled(), are_progress_bars_disabled()
    try:
        bars.enable_progress_bar() if on else bars.disable_progress_bar()
        LoadedPair.load("demo-target", draft="demo-draft")
        assert (bars.is_progress_bar_enabled(), are_progress_bars_disabled()) == (on, not on)
        assert capsys.readouterr().err == ""
    finally:
        bars.enable_progress_bar() if before[0] else bars.disable_progress_bar()
        disable_progress_bars() if before[1] else enable_progress_bars()
