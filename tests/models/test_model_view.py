"""The view of a model: the caller's weights, nothing of the caller's changed, and every change of the caller's seen."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import specdec
from specdec.models.attention import RAGGED
from specdec.models.view import ModelView
from tests.helpers.playing import generated_by_transformers
from tests.helpers.tiny import tiny_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def decoder(model: Any, **options: Any) -> specdec.SpeculativeDecoder:
    return specdec.SpeculativeDecoder(model, strategies=["prompt-lookup"], check=False, **options)


def state(model: nn.Module) -> list[dict[str, Any]]:
    """Everything that hangs on the modules, dicts and config values as copies."""
    values = [{k: dict(v) if isinstance(v, dict) else v for k, v in vars(m).items()} for m in model.modules()]
    return [*values, *({k: str(v) for k, v in vars(m.config).items()} for m in model.modules() if hasattr(m, "config"))]


@pytest.mark.fast(2)
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_nothing_of_the_callers_model_changes_during_a_call(fuse: bool, training: bool) -> None:
    model, draft = tiny_model("gemma3").train(training), tiny_model("gemma3", seed=1).train(training)
    dec = specdec.SpeculativeDecoder(model, draft, fuse=fuse)
    before = state(model), state(draft)
    rounds = dec.rounds(PROMPT, 20)
    next(rounds)
    assert (state(model), state(draft)) == before
    assert generated_by_transformers(model.eval(), PROMPT, 20) == dec.generate([PROMPT], 20).token_ids[0]
    model.train(training)
    list(rounds)
    assert (state(model), state(draft)) == before


def test_a_view_shares_the_weights_and_has_its_own_attention() -> None:
    model = tiny_model("llama")
    view = ModelView(model, RAGGED)
    assert view.private
    pairs = list(zip(model.named_parameters(), view.model.named_parameters(), strict=True))
    assert all(ours is theirs for (_, ours), (_, theirs) in pairs)
    assert view.model.config._attn_implementation == RAGGED
    assert view.model.config is view.model.model.layers[1].self_attn.config is not model.config
    assert model.config._attn_implementation == "sdpa"
    assert not {id(m) for m in model.modules()} & {id(m) for m in view.model.modules()}


def test_hooks_see_the_callers_modules_and_what_they_set_there_is_taken_over() -> None:
    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    model = tiny_model("llama")
    names = {m: name for name, m in model.named_modules()}
    layer = model.model.layers[1].mlp.up_proj
    layer.__class__ = Scaled
    seen = []

    def hook(module: nn.Module, given: Any) -> None:
        seen.append(names[module])
        module.scale = 2.0

    layer.register_forward_pre_hook(hook)
    dec = decoder(model)
    text = dec.generate([PROMPT], 12).token_ids[0]
    assert set(seen) == {"model.layers.1.mlp.up_proj"}
    assert text == generated_by_transformers(model, PROMPT, 12)


def double(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **named: _twice(forward(*given, **named))


def _twice(out: Any) -> Any:
    return out * 2 if isinstance(out, torch.Tensor) else (out[0] * 2, *out[1:])


def by_closure(layer: nn.Module) -> None:
    layer.forward = double(layer.forward)


def by_partial(layer: nn.Module) -> None:
    layer.forward = functools.partial(lambda old, *given, **named: _twice(old(*given, **named)), layer.forward)


def by_method(layer: nn.Module) -> None:
    def forward(self: nn.Module, *given: Any, **named: Any) -> Any:
        return _twice(type(self).forward(self, *given, **named))

    layer.forward = types.MethodType(forward, layer)


def by_object(layer: nn.Module) -> None:
    class Doubled:
        def __init__(self, inner: Any):
            self.inner = [inner]

        def __call__(self, *given: Any, **named: Any) -> Any:
            return _twice(self.inner[0](*given, **named))

    layer.forward = Doubled(layer.forward)


def by_default_value(layer: nn.Module) -> None:
    def forward(*given: Any, old: Any = layer.forward, **named: Any) -> Any:
        return _twice(old(*given, **named))

    layer.forward = forward


def by_two_wrappers(layer: nn.Module) -> None:
    by_closure(layer)
    by_closure(layer)


def by_accelerate(layer: nn.Module) -> None:
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")

    class Doubling(hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return _twice(output)

    hooks.add_hook_to_module(layer, Doubling())


PATCHES = [by_closure, by_partial, by_method, by_object, by_default_value, by_two_wrappers, by_accelerate]
layer_of_the_module: Any = None


def by_global(layer: nn.Module) -> None:
    """As in a script: the patch finds the layer through a global variable."""
    global layer_of_the_module
    layer_of_the_module = layer.forward

    def forward(*given: Any, **named: Any) -> Any:
        return _twice(layer_of_the_module(*given, **named))

    layer.forward = forward


@pytest.mark.fast(9, full=8)
@pytest.mark.parametrize("patch", [*PATCHES, by_global])
@pytest.mark.parametrize("where", ["layers.1", "layers.1.self_attn", "layers.0.mlp"])
def test_a_patched_forward_is_followed(patch: Callable[[nn.Module], None], where: str) -> None:
    model = tiny_model("qwen2")
    dec = decoder(model)
    plain = dec.generate([PROMPT], 16).token_ids[0]
    patch(model.model.get_submodule(where))
    before = state(model)
    after = dec.generate([PROMPT], 16).token_ids[0]
    assert state(model) == before
    assert after == generated_by_transformers(model, PROMPT, 16) != plain
    assert decoder(model).generate([PROMPT], 16).token_ids[0] == after
    assert dec.target.view.private == (patch is not by_global)


def replace_layer(model: Any) -> None:
    model.model.layers[1] = tiny_model("llama", seed=5).model.layers[1]


def swap_layers(model: Any) -> None:
    model.model.layers = nn.ModuleList([model.model.layers[i] for i in (1, 0, 2)])


def patch_class(model: Any) -> None:
    layer = model.model.layers[0].mlp
    layer.__class__ = type(
        "Doubled", (type(layer),), {"forward": lambda self, x: super(type(self), self).forward(x) * 2}
    )


def change_attribute(model: Any) -> None:
    model.model.layers[2].self_attn.scaling *= 3


def change_config(model: Any) -> None:
    model.config.rope_parameters["rope_theta"] = 100.0
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


def add_hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, given, out: out * 2)


def replace_parameter(model: Any) -> None:
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach() * 3)


def replace_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.3


@pytest.mark.parametrize(
    "change",
    [replace_layer, swap_layers, patch_class, change_attribute, change_config, add_hook, replace_parameter,
     replace_buffer],
)  # fmt: skip
def test_changes_between_calls_are_followed(change: Callable[[Any], None]) -> None:
    model = tiny_model("llama")
    dec = decoder(model)
    before = dec.generate([PROMPT], 16).token_ids[0]
    change(model)
    after = dec.generate([PROMPT], 16).token_ids[0]
    assert after == generated_by_transformers(model, PROMPT, 16) != before


def test_a_model_that_stays_is_not_copied_again() -> None:
    model = tiny_model("mixtral")
    dec = decoder(model)
    view = dec.target.view.model
    dec.generate([PROMPT], 8)
    model.train()
    generated_by_transformers(model.eval(), PROMPT, 4)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    dec.generate([PROMPT], 8)
    assert dec.target.view.model is view


def test_a_model_that_the_caller_compiles_runs_as_it_is() -> None:
    model = tiny_model("llama")
    expected = generated_by_transformers(model, PROMPT, 12)
    model.model.layers[0].compile(backend="eager")
    assert decoder(model).generate([PROMPT], 12).token_ids[0] == expected


def test_modules_that_cannot_be_copied_run_under_a_lock() -> None:
    class Odd(nn.Module, dict):  # type: ignore[type-arg]
        """Python makes no empty object of such a class."""

        __hash__, __eq__ = object.__hash__, object.__eq__  # type: ignore[assignment]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model = tiny_model("llama")
    expected = generated_by_transformers(model, PROMPT, 12)
    odd = Odd()
    odd.inner = model.model.layers[1].mlp
    model.model.layers[1].mlp = odd
    before = state(model)
    dec = decoder(model)
    assert not dec.target.view.private
    assert dec.generate([PROMPT], 12).token_ids[0] == expected
    assert state(model) == before
