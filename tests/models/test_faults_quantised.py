"""Quantised modules: weights in few bits work, whatever holds them; activations in few bits are refused in a target."""

from __future__ import annotations

import importlib.util
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import specdec
from specdec.decoding.provenance import weight_hash
from specdec.errors import SpecdecError
from specdec.models.attention import MaskBuilder
from specdec.models.kv_cache import RaggedCache
from specdec.models.runner import Runner
from specdec.models.self_test import self_test
from tests.helpers.playing import generated_by_transformers
from tests.helpers.tiny import tiny_model
from tests.helpers.tokens import word_level

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


class Int8(torch.Tensor):
    """A weight as torchao holds it: two tensors behind the face of one, which takes part in few operations."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, act_quant_kwargs: Any = None) -> Int8:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, act_quant_kwargs: Any = None):
        self.values, self.scale, self.act_quant_kwargs = values, scale, act_quant_kwargs

    @staticmethod
    def of(weight: torch.Tensor, **options: Any) -> Int8:
        scale = weight.detach().abs().amax(dim=1, keepdim=True) / 127
        return Int8((weight.detach() / scale).round().to(torch.int8), scale, **options)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values", "scale"], self.act_quant_kwargs

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Int8:
        return cls(inner["values"], inner["scale"], context)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if function is F.linear:
            x, weight, *bias = given
            return F.linear(x, weight.values.to(weight.scale.dtype) * weight.scale, *bias, **(named or {}))
        return super().__torch_function__(function, types, given, named or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(given[0].values, given[0].scale, given[0].act_quant_kwargs)
        raise NotImplementedError(f"Int8: {function}")


class Packed4(nn.Linear):
    """As bitsandbytes' Linear4bit: `weight` is a column of bytes, two numbers each."""

    def __init__(self, plain: nn.Linear):
        super().__init__(plain.in_features, plain.out_features, bias=False)
        scale = plain.weight.detach().abs().amax(dim=1, keepdim=True) / 7
        codes = (plain.weight.detach() / scale).round().to(torch.int64) + 8
        low, high = codes.reshape(-1, 2).unbind(1)
        self.weight = nn.Parameter((low + 16 * high).to(torch.uint8)[:, None], requires_grad=False)
        self.absmax = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = torch.stack([self.weight[:, 0] % 16, self.weight[:, 0] // 16], dim=1).reshape(self.out_features, -1)
        return F.linear(x, (codes.to(x.dtype) - 8) * self.absmax)


class Int8Buffers(nn.Module):
    """As GPTQ's or HQQ's: no parameter at all, the weight lies in buffers."""

    def __init__(self, plain: nn.Linear):
        super().__init__()
        scale = plain.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("qweight", (plain.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scales", scale)
        self.in_features, self.out_features = plain.in_features, plain.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.qweight.to(x.dtype) * self.scales)


def subclass(model: Any, **options: Any) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Int8.of(module.weight, **options), requires_grad=False)
    return model


def modules(model: Any, kind: Any) -> Any:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(name, kind(module))
    return model


def torch_dynamic(model: Any, dtype: torch.dtype) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=dtype)


def torchao(model: Any, name: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed: an optional package")
    quantization.quantize_(model, getattr(quantization, name)())
    return model


WEIGHTS_ONLY: dict[str, Any] = {
    "tensor subclass": subclass,
    "packed bytes": lambda model: modules(model, Packed4),
    "buffers": lambda model: modules(model, Int8Buffers),
    "torch.ao float16": lambda model: torch_dynamic(model, torch.float16),
    "torchao int8": lambda model: torchao(model, "Int8WeightOnlyConfig"),
    "torchao float8": lambda model: torchao(model, "Float8WeightOnlyConfig"),
}
ACTIVATIONS: dict[str, Any] = {
    "tensor subclass": lambda model: subclass(model, act_quant_kwargs="per token"),
    "torch.ao int8": lambda model: torch_dynamic(model, torch.qint8),
    "torch.ao int8, layers": lambda model: setattr(model, "model", torch_dynamic(model.model, torch.qint8)) or model,
    "torchao int8": lambda model: torchao(model, "Int8DynamicActivationInt8WeightConfig"),
}


@pytest.mark.fast(3, full=6)
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("kind", WEIGHTS_ONLY)
def test_weights_in_few_bits_work_as_target_and_as_draft(kind: str, fuse: bool) -> None:
    model = WEIGHTS_ONLY[kind](tiny_model("llama"))
    expected = generated_by_transformers(model, PROMPT, 16)
    dec = specdec.SpeculativeDecoder(model, model, fuse=fuse)
    out = dec.generate([PROMPT, PROMPT[:5]], 16, keep_state=True)
    assert out.token_ids[0] == expected
    assert out.stats.accepted_tokens > 0
    longer = [*PROMPT, *expected, 5]
    again = dec.generate([longer], 8, keep_state=True)
    assert again.token_ids[0] == generated_by_transformers(model, longer, 8)
    assert again.provenance["dropped_state"] == []
    assert dec.generate([PROMPT], 16, strategies=["prompt-lookup"]).token_ids[0] == expected
    with pytest.raises(SpecdecError, match="vocabulary"):
        dec.generate([[model.config.vocab_size]], 1)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_in_few_bits_are_refused_in_a_target_by_name(kind: str) -> None:
    model = ACTIVATIONS[kind](tiny_model("llama"))
    with pytest.raises(SpecdecError, match=r"rounds activations to few bits.*quantise the weights only"):
        specdec.SpeculativeDecoder(model)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_in_few_bits_make_a_draft_like_any_other(kind: str) -> None:
    target = tiny_model("llama")
    out = specdec.SpeculativeDecoder(target, ACTIVATIONS[kind](tiny_model("llama"))).generate([PROMPT], 16)
    assert out.token_ids[0] == generated_by_transformers(target, PROMPT, 16)
    assert out.stats.accepted_tokens > 0


@pytest.mark.parametrize("kind", ["tensor subclass", "torch.ao float16"])
def test_exact_mode_says_that_it_does_not_cover_them(kind: str) -> None:
    dec = specdec.SpeculativeDecoder(WEIGHTS_ONLY[kind](tiny_model("llama")), strategies=[])
    with pytest.raises(SpecdecError, match="does not cover quantised models"):
        dec.generate([PROMPT], 2, exact=True)


@pytest.mark.parametrize("kind", ["tensor subclass", "packed bytes", "buffers"])
def test_quantised_weights_are_hashed_and_watched(kind: str) -> None:
    def values(model: Any) -> torch.Tensor:
        layer = model.model.layers[0].mlp.up_proj
        if kind == "tensor subclass":
            return layer.weight.values
        return layer.weight if kind == "packed bytes" else layer.qweight

    a, b = (WEIGHTS_ONLY[kind](tiny_model("llama", seed=seed)) for seed in (0, 1))
    assert weight_hash(a) == weight_hash(WEIGHTS_ONLY[kind](tiny_model("llama"))) != weight_hash(b)
    dec = specdec.SpeculativeDecoder(a, strategies=[], check=False)
    text = [*PROMPT, *dec.generate([PROMPT], 6, keep_state=True).token_ids[0]]
    values(a).data.copy_(values(b))
    out = dec.generate([text], 8, keep_state=True)
    assert out.provenance["dropped_state"] == ["target"]
    assert out.token_ids[0] == generated_by_transformers(a, text, 8)


# -- the self-test -----------------------------------------------------------------------------------------------------

BUILD, PREPARE, COPY = MaskBuilder.__call__, Runner.prepare, RaggedCache.copy_row_from


def shifted(self: Runner, inputs: Any, width: int, *more: Any) -> Any:
    tokens, positions, slots, masks = PREPARE(self, inputs, width, *more)
    return tokens, positions + (positions > 0), slots, masks


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "mask sees one more": (MaskBuilder, "__call__", lambda self, at, *more: BUILD(self, at + 1, *more)),
    "mask sees one less": (MaskBuilder, "__call__", lambda self, at, *more: BUILD(self, (at - 1).clamp(min=0), *more)),
    "positions one late": (Runner, "prepare", shifted),
    "rejected branch stays": (RaggedCache, "compact", lambda *_: None),
    "prefix copied one short": (RaggedCache, "copy_row_from", lambda self, o, s, t, n: COPY(self, o, s, t, n - 1)),
}


@pytest.mark.fast(4)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", ["tensor subclass", "packed bytes", "buffers"])
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_faults_of_passes_show_in_quantised_models(
    kind: str, half: bool, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the self-test lets pass as rounding hides no fault, and no healthy model is refused."""
    model = WEIGHTS_ONLY[kind](tiny_model("llama").to(torch.bfloat16 if half else torch.float32))
    if fault is not None:
        monkeypatch.setattr(*FAULTS[fault])
    runner, said = Runner(model), ""
    try:
        self_test(runner, "target")
    except SpecdecError as error:
        said = str(error)
    assert bool(said or runner.tree_fault) == (fault is not None)


# -- through transformers' loader --------------------------------------------------------------------------------------

QUANTISED_BY: dict[str, tuple[str, dict[str, Any]]] = {
    "bitsandbytes 4 bits": ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "quanto 8 bits": ("optimum.quanto", {"quant_method": "quanto", "weights": "int8"}),
}
EIGHT_BITS = {"quant_method": "bitsandbytes", "load_in_8bit": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", hidden_size=128, intermediate_size=128).save_pretrained(folder)
    word_level([f"w{i}" for i in range(128)]).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", QUANTISED_BY)
def test_a_config_file_may_ask_for_quantised_weights(kind: str, checkpoint: str) -> None:
    package, options = QUANTISED_BY[kind]
    pytest.importorskip(package, reason=f"{package} is not installed: an optional package")
    dec = specdec.SpeculativeDecoder.from_pretrained(
        checkpoint, checkpoint, device="cpu", quantization_config=options, strategies=["draft-model:n_max=3"]
    )
    out = dec.generate(PROMPT, 16)
    assert out.token_ids[0] == generated_by_transformers(dec.target.model, PROMPT, 16)
    assert out.stats.accepted_tokens > 0
    assert dec.resolve_exact("auto") is False


def test_eight_bits_of_bitsandbytes_round_activations_so_only_a_draft_may_have_them(checkpoint: str) -> None:
    """Its outliers are columns in which any token of the pass is large."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: an optional package")
    options = {"device": "cpu", "strategies": ["draft-model:n_max=3"]}
    with pytest.raises(SpecdecError, match="target: bitsandbytes's Linear8bitLt rounds activations"):
        specdec.SpeculativeDecoder.from_pretrained(checkpoint, quantization_config=EIGHT_BITS, device="cpu")
    dec = specdec.SpeculativeDecoder.from_pretrained(
        checkpoint, checkpoint, draft_quantization_config=EIGHT_BITS, draft_dtype="float16", **options
    )
    out = dec.generate(PROMPT, 16)
    assert out.token_ids[0] == generated_by_transformers(dec.target.model, PROMPT, 16)
    assert out.stats.accepted_tokens > 0


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_a_quantised_checkpoint_lacks_is_named(method: str, checkpoint: str, tmp_path: Path) -> None:
    """Their kernels do not install on a CPU."""
    if importlib.util.find_spec("gptqmodel") is not None:
        pytest.skip("gptqmodel is installed")
    shutil.copytree(checkpoint, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecdecError, match=r"cannot load .*(gptq|GPTQ|AWQ|optimum|gptqmodel)"):
        specdec.SpeculativeDecoder.from_pretrained(tmp_path / "m", device="cpu")
