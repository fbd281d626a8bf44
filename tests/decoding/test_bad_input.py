"""Bad input gets one line that names the thing, before any work; a law that is no law ends its row and no other."""

from __future__ import annotations

import copy
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    FalconConfig,
    Gemma3Config,
    GPTNeoConfig,
    LlamaConfig,
    LlavaConfig,
    MptConfig,
    OPTConfig,
    RwkvConfig,
    T5Config,
)

from specdec import DraftModel, NgramSimple, PromptLookup, SpecdecError, SpeculativeDecoder, load_pair
from specdec.models.loading import check_model_kind
from tests.helpers.playing import check_counts, counting_passes, quoting_ids, random_ids, weaker
from tests.helpers.tiny import tiny_model
from tests.helpers.tokens import byte_level, word_level
from tests.oracle import oracle_greedy

CONTEXT = 64
PROMPTS = [random_ids(5, 1), quoting_ids(19, 2), random_ids(2, 3), random_ids(9, 4)]


@cache
def decoder() -> SpeculativeDecoder:
    model = tiny_model("llama", max_position_embeddings=CONTEXT)
    return SpeculativeDecoder(model, weaker(model))


def one_line(error: Any) -> str:
    text = str(error.value)
    assert type(error.value) is SpecdecError
    assert "\n" not in text
    assert 10 < len(text) < 300
    return text


def refuse(*named: str, pair: SpeculativeDecoder | None = None, prompts: Any = (1, 2, 3), **options: Any) -> None:
    """`generate`, `stream` and `rounds` all refuse, name every one of `named`, and run no pass."""
    pair = pair or decoder()
    with counting_passes(pair.target.model, pair.draft.model if pair.draft else None) as passes:
        with pytest.raises(SpecdecError) as error:
            pair.generate(prompts, **options)
        text = one_line(error)
        assert all(name in text for name in named), text
        with pytest.raises(SpecdecError):
            next(iter(pair.rounds(prompts, **options)))
    assert passes == []


# -- options ---------------------------------------------------------------------------------------------------------

BAD_OPTIONS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"strategies": ["promt-lookup"]}, ("promt-lookup", "'prompt-lookup'")),
    ({"strategies": "ngram-simpel"}, ("ngram-simpel", "'ngram-simple'")),
    ({"strategies": ["prompt-lookup:nmax=3"]}, ("nmax", "prompt-lookup", "'n_max'")),
    ({"strategies": [{"name": "draft-model", "p_mim": 0.5}]}, ("p_mim", "'p_min'")),
    ({"strategies": [{"n_max": 3}]}, ("name",)),
    ({"strategies": [3]}, ("3",)),
    ({"strategies": [PromptLookup]}, ("PromptLookup",)),
    ({"strategies": ["draft-model:n_max=0"]}, ("n_max", "0")),
    ({"strategies": ["draft-model:n_max=x"]}, ("n_max", "'x'")),
    ({"strategies": ["draft-model:n_max=2.5"]}, ("n_max", "2.5")),
    ({"strategies": ["draft-model:p_min=1.5"]}, ("p_min", "1.5")),
    ({"strategies": ["draft-model:p_min=.nan"]}, ("p_min", "nan")),
    ({"strategies": ["draft-model:preset=llama-1999"]}, ("llama-1999", "llama-2026")),
    ({"strategies": ["prompt-lookup:n_max=true"]}, ("n_max", "True")),
    ({"strategies": ["prompt-lookup:ngram_max=1.5"]}, ("ngram_max", "1.5")),
    ({"strategies": ["prompt-lookup:match=first"]}, ("match", "first")),
    ({"strategies": ["ngram-simple:size_n=0"]}, ("size_n", "0")),
    ({"strategies": ["ngram-simple:size_m=2000"]}, ("size_m=2000",)),
    ({"strategies": ["ngram-simple:size_n=1.5"]}, ("size_n", "1.5")),
    ({"temprature": 1.0}, ("temprature", "'temperature'")),
    ({"max_tokens": 5}, ("max_tokens",)),
    ({"num_beams": 4}, ("beam search",)),
    ({"num_beam_groups": 2}, ("beam search",)),
    ({"do_sample": True}, ("do_sample", "temperature")),
    ({"assistant_model": None}, ("assistant_model",)),
    ({"max_new_tokens": -1}, ("max_new_tokens", "-1")),
    ({"max_new_tokens": 3.0}, ("max_new_tokens", "3.0")),
    ({"max_new_tokens": True}, ("max_new_tokens", "True")),
    ({"temperature": -0.1}, ("temperature", "-0.1")),
    ({"temperature": math.nan}, ("temperature", "nan")),
    ({"temperature": math.inf}, ("temperature", "inf")),
    ({"temperature": "hot"}, ("temperature", "hot")),
    ({"temperature": True}, ("temperature", "True")),
    ({"top_p": 0}, ("top_p", "0")),
    ({"top_p": 0.0}, ("top_p", "0")),
    ({"top_p": 1.5}, ("top_p", "1.5")),
    ({"top_p": -1}, ("top_p", "-1")),
    ({"top_p": math.nan}, ("top_p", "nan")),
    ({"top_k": -1}, ("top_k", "-1")),
    ({"top_k": 2.5}, ("top_k", "2.5")),
    ({"top_k": True}, ("top_k", "True")),
    ({"min_p": 2}, ("min_p", "2")),
    ({"repetition_penalty": 0}, ("repetition_penalty", "0")),
    ({"repetition_penalty": -2.0}, ("repetition_penalty", "-2")),
    ({"no_repeat_ngram_size": -2}, ("no_repeat_ngram_size", "-2")),
    ({"typical_p": 1.5, "temperature": 1.0}, ("typical_p", "1.5")),
    ({"num_return_sequences": 0}, ("num_return_sequences", "0")),
    ({"num_return_sequences": True}, ("num_return_sequences", "True")),
    ({"batch_size": 0}, ("batch_size", "0")),
    ({"batch_size": True}, ("batch_size", "True")),
    ({"seed": 1.5}, ("seed", "1.5")),
    ({"seed": True}, ("seed", "True")),
    ({"seed": [1, 2]}, ("seed", "2", "1 prompt")),
    ({"seed": []}, ("seed", "0", "1 prompt")),
    ({"seed": ["a"]}, ("seed", "'a'")),
    ({"exact": "yes"}, ("exact", "yes")),
    ({"order": "mine"}, ("order", "mine")),
    ({"acceptance": "medusa"}, ("medusa", "leviathan")),
    ({"acceptance": ["match"]}, ("match",)),
    ({"stop_strings": "stop"}, ("stop_strings", "tokenizer")),
    ({"stop_strings": [""]}, ("stop_strings", "''")),
    ({"stop_strings": [3]}, ("stop_strings", "3")),
    ({"stop_strings": 3}, ("stop_strings", "3")),
    ({"eos_token_id": "</s>"}, ("eos_token_id", "</s>")),
    ({"eos_token_id": 1.5}, ("eos_token_id", "1.5")),
    ({"ignore_eos": "no"}, ("ignore_eos", "no")),
    ({"keep_state": 1}, ("keep_state", "1")),
    ({"output_logprobs": "yes"}, ("output_logprobs", "yes")),
    ({"output_logprobs": 0}, ("output_logprobs", "0")),
    ({"logits_processor": 3}, ("logits_processor", "3")),
    ({"stopping_criteria": ["x"]}, ("stopping_criteria", "x")),
]


@pytest.mark.parametrize(("options", "named"), BAD_OPTIONS, ids=[str(o) for o, _ in BAD_OPTIONS])
def test_a_bad_option_is_named(options: dict[str, Any], named: tuple[str, ...]) -> None:
    refuse(*named, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DraftModel(n_max=True), lambda: DraftModel(n_max="x"), lambda: DraftModel(n_max=2.5),  # type: ignore
        lambda: DraftModel(n_min=9), lambda: DraftModel(p_min="x"), lambda: DraftModel(top_n=0),  # type: ignore
        lambda: PromptLookup(n_max=1.5), lambda: PromptLookup(ngram_min=4), lambda: PromptLookup(match="x"),  # type: ignore
        lambda: NgramSimple(size_n="x"), lambda: NgramSimple(min_hits=0), lambda: NgramSimple(size_m=True),  # type: ignore
    ],
)  # fmt: skip
def test_a_bad_parameter_of_a_strategy_object_is_refused(make: Any) -> None:
    with pytest.raises(SpecdecError) as error:
        make()
    one_line(error)


def test_a_decoders_own_options_are_checked() -> None:
    model = tiny_model("llama")
    for options in (
        {"strategies": ["nothing"]}, {"exact": "yes"}, {"attn_implementation": "flash_attention_2"},
        {"tokenizer": "str"}, {"draft_tokenizer": "str"},
    ):  # fmt: skip
        with pytest.raises(SpecdecError) as error, counting_passes(model) as passes:
            SpeculativeDecoder(model, **options)  # type: ignore[arg-type]
        assert str(next(iter(options.values()))).strip("[]'") in one_line(error)
        assert passes == []


def test_draft_model_without_a_draft_is_refused() -> None:
    refuse("draft-model", pair=SpeculativeDecoder(tiny_model("llama")), strategies=["draft-model"])


# -- prompts -------------------------------------------------------------------------------------------------------

BAD_PROMPTS: list[tuple[Any, tuple[str, ...]]] = [
    ("", ("prompt 0", "empty")),
    ([[]], ("prompt 0", "empty")),
    ([[1], []], ("prompt 1", "empty")),
    (["", [1]], ("prompt 0", "empty")),
    ([1, -1], ("prompt 0", "-1")),
    ([[1], [3, 128]], ("prompt 1", "128")),
    ([1] * (CONTEXT + 1), ("prompt 0", "65", "64")),
    ([[1], [1] * 100], ("prompt 1", "100", "64")),
    ("text", ("prompt 0", "tokenizer")),
    ([[1], "text"], ("prompt 1", "tokenizer")),
    ([{"role": "user", "content": "hi"}], ("prompt 0", "tokenizer")),
    ([1.5], ("float",)),
    ([1, 2.5], ("2.5",)),
    ([True, False], ("bool",)),
    ([[1, True]], ("True",)),
    (7, ("int",)),
    (None, ("NoneType",)),
    ([None], ("NoneType",)),
    ({"prompt": "x"}, ("dict",)),
]


@pytest.mark.parametrize(("prompts", "named"), BAD_PROMPTS, ids=[str(p)[:30] for p, _ in BAD_PROMPTS])
def test_a_bad_prompt_is_named(prompts: Any, named: tuple[str, ...]) -> None:
    refuse(*named, prompts=prompts)


def test_no_prompts_are_an_empty_result() -> None:
    with counting_passes(decoder().target.model) as passes:
        out = decoder().generate([], output_logprobs=True, temperature=0.5, seed=[])
    assert (out.token_ids, out.finish_reasons, out.logprobs, len(out)) == ([], [], [], 0)
    assert passes == []
    assert out.stats.to_dict()["generated_tokens"] == 0
    check_counts(out)


def test_stream_and_rounds_take_one_prompt() -> None:
    for prompts in ([[1, 2], [3]], []):
        with pytest.raises(SpecdecError, match="one prompt"):
            decoder().rounds(prompts)


# -- models --------------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BAD_CONFIGS: list[tuple[Any, str]] = [
    (T5Config(d_model=32), "encoder-decoder"),
    (RwkvConfig(hidden_size=32, num_hidden_layers=2), "recurrent"),
    (LlavaConfig(), "images"),
    (Gemma3Config(), "images"),
]


@pytest.mark.parametrize(("config", "why"), BAD_CONFIGS, ids=[c.model_type for c, _ in BAD_CONFIGS])
def test_an_unsupported_kind_of_model_is_refused_by_its_config(config: Any, why: str, tmp_path: Path) -> None:
    for role in ("target", "draft"):
        with pytest.raises(SpecdecError) as error:
            check_model_kind(config, role)
        text = one_line(error)
        assert all(part in text for part in (role, config.model_type, why))
    config.save_pretrained(tmp_path)
    with pytest.raises(SpecdecError, match=config.model_type):
        load_pair(str(tmp_path))


def random_model(config: Any) -> Any:
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6.0 if p.dim() > 1 else 1.0)
    return model


LOCAL: Any = {"num_layers": 2, "num_heads": 4, "window_size": 4, "attention_types": [[["global", "local"], 1]]}
IMPOSSIBLE: list[Any] = [  # they build a bias or a mask of their own from the whole mask, or look ahead
    FalconConfig(**SMALL, alibi=True, new_decoder_architecture=False),
    BertConfig(**SMALL, intermediate_size=64),
]
UNUSUAL: list[Any] = [  # learned and relative positions, and windows that are asked for in a mask of their own
    BloomConfig(**SMALL),
    GPTNeoConfig(vocab_size=64, hidden_size=32, **LOCAL),
    OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32),
    MptConfig(vocab_size=64, d_model=32, n_heads=4, n_layers=2),
]


@pytest.mark.parametrize("config", IMPOSSIBLE, ids=[c.model_type for c in IMPOSSIBLE])
def test_a_model_that_goes_around_the_cache_is_refused_by_the_self_test(config: Any) -> None:
    model = random_model(config)
    with pytest.raises(SpecdecError) as error:
        SpeculativeDecoder(model)
    assert f"target ({config.model_type})" in one_line(error)
    with pytest.raises(SpecdecError) as error:
        SpeculativeDecoder(tiny_model("llama", vocab=64), model)
    assert f"draft ({config.model_type})" in one_line(error)


@pytest.mark.parametrize("config", UNUSUAL, ids=[c.model_type for c in UNUSUAL])
def test_a_model_that_passes_the_self_test_is_right(config: Any) -> None:
    model = random_model(config)
    prompts = [random_ids(7, 1, 64), random_ids(2, 2, 64)]
    out = SpeculativeDecoder(model).generate(prompts, 16, strategies=[PromptLookup(ngram_max=1)])
    assert out.token_ids == [oracle_greedy(model, p, 16) for p in prompts]


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(SpecdecError, match="head"):
        SpeculativeDecoder(tiny_model("llama").model)


def test_a_tokenizer_mismatch_is_refused_before_any_pass() -> None:
    target = tiny_model("llama", vocab=320)
    with counting_passes(target) as passes, pytest.raises(SpecdecError) as error:
        SpeculativeDecoder(target, tiny_model("llama", vocab=300), byte_level(), word_level(["a", "b"]))
    assert "tokenizer mismatch" in one_line(error)
    assert passes == []


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    for name in (tmp_path / "nowhere", tmp_path / "model.gguf", "./nowhere", "~/no/where", "nowhere.gguf"):
        with pytest.raises(SpecdecError, match="not found") as error:
            load_pair(name)
        assert str(name) in one_line(error)
    LlamaConfig().save_pretrained(tmp_path / "empty")
    with pytest.raises(SpecdecError, match="cannot load"):
        SpeculativeDecoder.from_pretrained(str(tmp_path / "empty"), device="cpu")


# -- laws that are none ----------------------------------------------------------------------------------------------


def broken_from(position: int, value: float, model: Any) -> Any:
    """A copy whose logits are all `value` wherever the input position is `position` or later."""
    other = copy.deepcopy(model)

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids, positions = kwargs["input_ids"], kwargs.get("position_ids")
        module.bad = (torch.arange(ids.shape[1])[None] if positions is None else positions) >= position

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        bad = other.bad[:, -output.shape[1] :]
        return torch.where(bad[..., None], torch.tensor(value), output)

    other.register_forward_pre_hook(note, with_kwargs=True)
    other.lm_head.register_forward_hook(spoil)
    return other


CHAINS: dict[str, Any] = {"plain": [], "draft": [DraftModel(n_max=5)], "lookup": [PromptLookup(n_max=6)]}


@pytest.mark.fast(3, full=8)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("chain", CHAINS)
def test_logits_that_are_no_law_end_their_row_and_no_other(chain: str, value: float, temperature: float) -> None:
    model = tiny_model("llama")
    pair = SpeculativeDecoder(broken_from(15, value, model), weaker(model, 0.05))
    options: dict[str, Any] = {"strategies": CHAINS[chain], "temperature": temperature, "acceptance": "match"}
    prompts = [PROMPTS[0], PROMPTS[3], PROMPTS[2]]  # 5, 9 and 2 tokens: with 8 new ones only the second gets there
    healthy = SpeculativeDecoder(model, weaker(model, 0.05)).generate(prompts, 8, **options)
    out = pair.generate(prompts, 8, **options, output_logprobs=True)
    assert out.finish_reasons == ["length", "error", "length"]
    assert out.token_ids == [healthy.token_ids[0], healthy.token_ids[1][:7], healthy.token_ids[2]]
    assert out.errors[0] is None
    assert "row 1" in str(out.errors[1])
    assert "position 16" in str(out.errors[1])  # the id at position 15 is good; what should follow it is not a law
    check_counts(out)
    assert pair.generate(prompts[::2], 8, **options).token_ids[0] == healthy.token_ids[0]
    with pytest.raises(SpecdecError, match=r"row 0.*position 16"):
        pair.generate(prompts[1], 20, **options)
    assert pair.generate([prompts[0]] * 3, 8, strategies=[]).finish_reasons == ["length"] * 3  # still usable


@pytest.mark.parametrize("batch_size", [1, 3])
def test_nothing_of_a_failed_row_is_left_in_the_cache(batch_size: int) -> None:
    """Also NaN in keys and values, which a mask alone does not keep out: 0 * NaN is NaN."""
    model = tiny_model("llama")
    target = copy.deepcopy(model)
    armed = [True]

    def poison(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.where(args[0].isnan().any() | torch.tensor(armed[0] and args[0].shape[1] == 1), math.nan, output)

    handle = target.model.layers[0].self_attn.v_proj.register_forward_hook(poison)
    pair = SpeculativeDecoder(target, check=False)
    with pytest.raises(SpecdecError, match="NaN"):
        pair.generate(PROMPTS, 12, strategies=[], batch_size=batch_size)
    armed[0] = False
    handle.remove()
    out = pair.generate(PROMPTS, 12, strategies=[], batch_size=batch_size)
    assert out.token_ids == [oracle_greedy(model, p, 12) for p in PROMPTS]


@pytest.mark.fast(2)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "acceptance": "match"}, {"temperature": 0.8}])
def test_a_broken_draft_model_does_the_text_no_harm(value: float, options: dict[str, Any]) -> None:
    model = tiny_model("llama")
    pair = SpeculativeDecoder(model, broken_from(12, value, weaker(model, 0.05)), check=False)
    plain = pair.generate(PROMPTS, 16, strategies=[], **options)
    for strategy in (DraftModel(n_max=4), DraftModel(n_max=4, p_min=0.2)):
        out = pair.generate(PROMPTS, 16, strategies=[strategy], **options)
        assert out.finish_reasons == ["length"] * 4
        if options != {"temperature": 0.8}:
            assert out.token_ids == plain.token_ids
        assert 0 < out.stats.draft_tokens < 4 * out.stats.rounds
        check_counts(out)


def test_a_logits_processor_that_forbids_everything_ends_its_row() -> None:
    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -math.inf) if ids.shape[1] == 23 else scores

    wanted = [oracle_greedy(tiny_model("llama"), p, 12) for p in PROMPTS]
    out = decoder().generate(PROMPTS, 12, logits_processor=[processor])
    assert out.finish_reasons == ["length", "error", "length", "length"]
    assert out.token_ids == [wanted[0], wanted[1][:4], *wanted[2:]]
    assert "row 1" in str(out.errors[1])
    assert "position 23" in str(out.errors[1])
