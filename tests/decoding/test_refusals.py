"""Bad values of options and malformed drafts are one line that names the culprit, never a raw exception."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import specdec
from specdec.config import GenerationSettings
from specdec.drafters import make_drafters
from specdec.drafters.policies import find_policy
from specdec.errors import SpecdecError
from specdec.models.loading import check_model_kind
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_greedy

VOCAB = 128


@pytest.fixture(scope="module")
def decoder() -> specdec.SpeculativeDecoder:
    return specdec.SpeculativeDecoder(tiny_model("llama", vocab=VOCAB))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words_ids", [[VOCAB]]),
        ("bad_words_ids", "a"),
        ("bad_words_ids", []),
        ("sequence_bias", {(VOCAB,): 1.0}),
        ("sequence_bias", [[[1, VOCAB], 1.0]]),
        ("forced_eos_token_id", VOCAB),
        ("forced_bos_token_id", -1),
        ("suppress_tokens", [1, VOCAB]),
        ("begin_suppress_tokens", [VOCAB]),
        ("eos_token_id", VOCAB),
        ("exponential_decay_length_penalty", (2, 1.1)),  # the model has no EOS to favour
    ],
)
def test_a_bad_processor_field_is_named_before_any_pass(
    decoder: specdec.SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    monkeypatch.setattr(decoder.target, "step", None)  # a pass would fail with another error
    with pytest.raises(SpecdecError, match=name) as caught:
        decoder.generate([1, 2, 3], max_new_tokens=4, **{name: value})
    assert "\n" not in str(caught.value)


class Returning:
    """A strategy that returns whatever it was made with."""

    name = "returning"

    def __init__(self, value: Any):
        self.value = value

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        return None

    def draft(self, requests: Sequence[specdec.DraftRequest]) -> Any:
        return self.value

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        return None


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [None],
        [[1, 2]],
        [specdec.Draft([1]), specdec.Draft([1])],
        [specdec.Draft([1.5])],  # type: ignore[list-item]
        [specdec.Draft(torch.tensor([[1, 2]]))],
        [specdec.Draft(torch.tensor([1.0]))],
        [specdec.Draft([1], q=torch.ones(VOCAB))],
        [specdec.Draft([1, 2], q=torch.ones(1, VOCAB))],
        [specdec.Draft([1], q=torch.ones(1, VOCAB - 3))],
        [specdec.Draft([VOCAB])],
    ],
    ids=repr,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_malformed_draft_names_its_strategy_and_leaves_the_decoder_usable(
    decoder: specdec.SpeculativeDecoder, value: Any, temperature: float
) -> None:
    options = {"max_new_tokens": 6, "temperature": temperature}
    with pytest.raises(SpecdecError, match="returning"):
        decoder.generate([1, 2, 3], strategies=[Returning(value)], **options)
    assert len(decoder.generate([1, 2, 3], **options).token_ids[0]) == 6


@pytest.mark.parametrize("value", [5, {"": "x"}, {"a": 1}, {1: "a"}])
def test_replacements_must_map_text_to_text(value: Any) -> None:
    with pytest.raises(SpecdecError, match="replacements"):
        specdec.DraftModel(translate=True, replacements=value)


def test_replacements_without_translation_are_refused() -> None:
    with pytest.raises(SpecdecError, match="translate=True"):
        specdec.DraftModel(replacements={"a": "b"})


@pytest.mark.parametrize("thing", [None, "demo-target", 3])
def test_what_is_no_model_is_named(thing: Any) -> None:
    with pytest.raises(SpecdecError, match="from_pretrained"):
        specdec.SpeculativeDecoder(thing)


@pytest.mark.parametrize("thing", [None, 3, ""])
def test_what_is_no_source_is_named(thing: Any) -> None:
    with pytest.raises(SpecdecError, match="hub id"):
        specdec.SpeculativeDecoder.from_pretrained(thing)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"exact": "no"}, "exact"),
        ({"fuse": "no"}, "fuse"),
        ({"strategies": ["draft-model"]}, "needs a draft"),
        ({"dtyp": 1}, "dtype"),
    ],
)
def test_options_are_refused_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], match: str
) -> None:
    def load(*arguments: Any, **options: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load)
    with pytest.raises(SpecdecError, match=match):
        specdec.SpeculativeDecoder.from_pretrained("demo-target", **options)


def test_numpy_seeds_and_the_name_none_are_understood(decoder: specdec.SpeculativeDecoder) -> None:
    options = {"max_new_tokens": 8, "temperature": 1.0, "acceptance": "match"}
    expected = decoder.generate([1, 2, 3], seed=3, **options).token_ids
    assert decoder.generate([1, 2, 3], seed=np.int64(3), **options).token_ids == expected
    assert decoder.generate([1, 2, 3], seed=3, strategies="none", **options).token_ids == expected


# -- models: what they have that specdec cannot do, and never torch's message alone ------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
BART: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32,
}  # fmt: skip
MODELS: dict[str, tuple[Any, str]] = {
    "falcon": (
        transformers.FalconConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True,
            new_decoder_architecture=False,
        ),
        "ALiBi",
    ),
    "bert": (transformers.BertConfig(**SMALL), "as in an encoder .*is_decoder=True"),
    "electra": (transformers.ElectraConfig(**SMALL, embedding_size=32), "as in an encoder"),
    "rembert": (transformers.RemBertConfig(**SMALL, input_embedding_size=16), "as in an encoder"),
    "bart": (transformers.BartConfig(**BART), "how full its cache is"),
    "mbart": (transformers.MBartConfig(**BART), "how full its cache is"),
    "openai-gpt": (transformers.OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4), "takes no cache"),
    "xlnet": (transformers.XLNetConfig(vocab_size=64, d_model=32, n_layer=2, n_head=4, d_inner=32), "takes no cache"),
    "deepseek_v3": (transformers.DeepseekV3Config(**SMALL, **LATENT), "num_key_value_heads=2"),
    "minicpm3": (transformers.MiniCPM3Config(**SMALL, **LATENT), "num_key_value_heads=2"),
    "rwkv": (transformers.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2), "recurrent"),
}  # fmt: skip


def made(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(8 if parameter.ndim > 1 else 1)
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_cannot_work_is_refused_by_what_it_has(kind: str) -> None:
    config, why = MODELS[kind]
    with pytest.raises(SpecdecError, match=rf"target \({kind}\) .*{why}") as caught:
        specdec.SpeculativeDecoder(made(config))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layer", ["linear_attention", "hybrid", "conv"])
def test_recurrent_layers_whose_states_are_not_in_the_cache_are_refused(layer: str) -> None:
    """Also in a model whose name says nothing."""
    model = copy.deepcopy(tiny_model("llama"))
    model.config.layer_types = ["full_attention", layer, "full_attention"]
    with pytest.raises(SpecdecError, match=r"recurrent layers in a place of its own"):
        specdec.SpeculativeDecoder(model)


def test_a_decoder_of_an_encoders_kind_works() -> None:
    model = made(transformers.BertConfig(**SMALL, is_decoder=True))
    assert specdec.SpeculativeDecoder(model).generate([1, 2, 3], 8).token_ids[0] == oracle_greedy(model, [1, 2, 3], 8)


@pytest.mark.parametrize("part", ["model.layers.1", "lm_head", "model.embed_tokens", ""])
def test_weights_that_are_not_there_are_counted(part: str) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    model.get_submodule(part).to("meta")
    with pytest.raises(SpecdecError, match=r"draft \(llama\) has \d+ parameters without data .*offloaded"):
        specdec.SpeculativeDecoder(tiny_model("llama"), model)


@pytest.mark.parametrize("part", ["mlp", "self_attn", "lm_head"])
def test_dtypes_that_do_not_go_together_are_named(part: str) -> None:
    model = copy.deepcopy(tiny_model("llama")).bfloat16()
    for name, module in model.named_modules():
        if name.endswith(part):
            module.float()
    with pytest.raises(SpecdecError, match=r"several dtypes \(bfloat16, float32\)"):
        specdec.SpeculativeDecoder(model)


def test_dtypes_that_go_together_work() -> None:
    """Gemma's norms may be float32. The dtype of a model is that of its first parameter, which may be the odd one."""
    model = copy.deepcopy(tiny_model("gemma2")).bfloat16()
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.float()
    wanted = specdec.SpeculativeDecoder(model).generate([1, 2, 3], 6, strategies=[]).token_ids
    model.register_parameter("odd", torch.nn.Parameter(torch.zeros(1)))
    assert model.dtype == torch.float32
    assert specdec.SpeculativeDecoder(model).generate([1, 2, 3], 6, strategies=[]).token_ids == wanted


def test_a_model_of_several_stacks_is_refused() -> None:
    with pytest.raises(SpecdecError, match=r"blt.*num_hidden_layers"):
        check_model_kind(transformers.BltConfig(), "target")


@pytest.mark.parametrize("how", ["torch.compile", "compile()", "layers", "layers in place"])
def test_models_that_are_compiled_already_work(how: str) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    layers = model.model.layers
    if how == "torch.compile":
        model = torch.compile(model, backend="eager")
    elif how == "compile()":
        model.compile(backend="eager")
    for i, layer in enumerate(layers if how.startswith("layers") else ()):
        if how == "layers":
            layers[i] = torch.compile(layer, backend="eager")
        else:
            layer.compile(backend="eager")
    prompt = [1, 2, 3, 4]
    out = specdec.SpeculativeDecoder(model).generate([prompt, [5, 6]], 8)
    assert out.token_ids[0] == oracle_greedy(tiny_model("llama"), prompt, 8)


def test_commas_inside_brackets_do_not_split_a_chain() -> None:
    made = make_drafters("draft-model:tree=[2,[3,1]], prompt-lookup, none", has_draft=True)
    assert [d.name for d in made] == ["draft-model", "prompt-lookup"]
    assert made[0].tree_nodes == 2 + 3 + 1


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("suffix:n_max=2:n_max=3", "n_max is given twice"),
        ("early-exit:layers=1:resume=maybe", "early-exit: resume must be True or False"),
        ({"name": "rest", "corpus": []}, "rest needs a datastore"),
        ("draft-model:tree=opt-24:n_max=1", "1 levels of 10 tokens have 10 candidates, fewer than the 24 nodes"),
    ],
)
def test_options_that_once_passed_unseen_are_refused(strategy: Any, words: str) -> None:
    with pytest.raises(SpecdecError, match=words):
        make_drafters([strategy], has_draft=True)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("classifier:weights=abc", "give its three weights"),
        ("classifier:weights=[a,b,c]", "classifier: weights must be a number"),
        ("classifier:weights=[1.0,2.0,.nan]", "classifier: weights must be a number"),
        ("classifier:weights=3", "give its three weights"),
        ({"start": 1}, "the mapping needs a name"),
    ],
)
def test_length_policies_that_cannot_be_are_refused(policy: Any, words: str) -> None:
    with pytest.raises(SpecdecError, match=words):
        find_policy(policy)


@pytest.mark.parametrize("value", [None, "5", 2.5, 0])
def test_output_logprobs_says_that_it_takes_a_number(value: Any) -> None:
    with pytest.raises(SpecdecError, match="true, false, or how many most likely tokens"):
        GenerationSettings.parse({"output_logprobs": value})
