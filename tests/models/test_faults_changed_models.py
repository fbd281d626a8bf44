"""Models that change between calls: nothing computed with the old ones is used, and nothing of them is remembered."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

import specdec
from specdec.decoding.provenance import weight_hash
from specdec.errors import SpecdecError
from tests.helpers.playing import counting_passes, generated_by_transformers, weaker
from tests.helpers.recording import Rerun
from tests.helpers.tiny import tiny_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


def decoder(model: Any, draft: Any = None, **options: Any) -> specdec.SpeculativeDecoder:
    return specdec.SpeculativeDecoder(model, draft, check=False, **options)


class Adapter(nn.Module):
    """As peft's: a layer with a side branch that can be switched, merged and scaled, by attributes alone."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base_layer = base
        self.lora = nn.Linear(base.in_features, base.out_features, bias=False)
        with torch.no_grad():
            self.lora.weight.copy_(base.weight.flip(0))
        self._active_adapter = ["default"]
        self._disable_adapters = True
        self.merged_adapters: list[str] = []
        self.scaling = {"default": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(x)
        return out if self._disable_adapters else out + self.scaling["default"] * self.lora(x)


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)


def load_state(model: Any) -> None:
    model.load_state_dict(weaker(model, 0.05, 3).state_dict())


def optimiser_step(model: Any) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    model(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    optimiser.step()


def through_data(model: Any) -> None:
    """torch counts no such write."""
    model.model.layers[1].self_attn.v_proj.weight.data.mul_(2.0)


def one_row_through_data(model: Any) -> None:
    model.model.layers[1].self_attn.v_proj.weight.data[5] += 3.0


def reordered_through_data(model: Any) -> None:
    weight = model.model.layers[1].self_attn.v_proj.weight.data
    weight.copy_(weight[:, torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))])


def other_data_twice(model: Any) -> None:
    """The second tensor can get the memory of the first: address and version are then as before."""
    weight = model.model.layers[0].self_attn.v_proj.weight
    weight.data = weight.data * 2
    weight.data = weight.data * 2


def replaced(model: Any) -> None:
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def layer_replaced(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])
    model.model.layers[1].self_attn.layer_idx = 1


def buffer_in_place(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def attribute(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 2


def patched(model: Any) -> None:
    layer = model.model.layers[0].mlp
    old = layer.forward
    layer.forward = lambda x: old(x) * 2


def hooked(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, out: out * 2)


def cast_and_back(model: Any) -> None:
    model.to(torch.bfloat16).to(torch.float32)


CHANGES = [
    in_place, load_state, optimiser_step, through_data, one_row_through_data, reordered_through_data, other_data_twice,
    replaced, layer_replaced, buffer_in_place, attribute, patched, hooked, cast_and_back,
]  # fmt: skip


@pytest.mark.fast(4)
@pytest.mark.parametrize("change", CHANGES)
def test_kept_keys_and_values_of_a_target_that_has_changed_are_dropped(change: Callable[[Any], None]) -> None:
    model = tiny_model("llama")
    dec = decoder(model, strategies=["prompt-lookup"])
    first = dec.generate([PROMPT], 8, keep_state=True)
    assert first.provenance["dropped_state"] == []
    longer = [*PROMPT, *first.token_ids[0], 7, 7]
    again = dec.generate([longer], 8, keep_state=True)
    assert again.provenance["dropped_state"] == []
    change(model)
    out = dec.generate([[*longer, 5]], 12, keep_state=True)
    assert out.token_ids[0] == generated_by_transformers(model, [*longer, 5], 12)
    assert out.provenance["dropped_state"] == ["target"]
    once_more = dec.generate([[*longer, 5, 6]], 12, keep_state=True)
    assert once_more.provenance["dropped_state"] == []
    assert once_more.token_ids[0] == generated_by_transformers(model, [*longer, 5, 6], 12)


@pytest.mark.fast(3)
@pytest.mark.parametrize("change", [in_place, through_data, layer_replaced, patched])
def test_kept_keys_and_values_of_a_draft_that_has_changed_are_dropped(change: Callable[[Any], None]) -> None:
    """The text is the target's all the same; what shows is acceptance, as of a decoder that has kept nothing."""
    model = tiny_model("llama")
    draft = weaker(model, 0.02)
    dec = decoder(model, draft)
    text = dec.generate([PROMPT], 8, keep_state=True).token_ids[0]
    change(draft)
    longer = [*PROMPT, *text, 7]
    out = dec.generate([longer], 24, keep_state=True)
    assert out.provenance["dropped_state"] == ["draft"]
    fresh = decoder(model, draft).generate([longer], 24)
    assert out.token_ids == fresh.token_ids
    assert out.stats.accepted_tokens == fresh.stats.accepted_tokens


def test_what_is_kept_of_a_model_that_stays_is_used() -> None:
    model = tiny_model("llama")
    seen: list[int] = []
    dec = decoder(model, strategies=[])
    first = dec.generate([PROMPT], 8, keep_state=True).token_ids[0]
    hook = model.register_forward_pre_hook(
        lambda module, given, named: seen.append(named["input_ids"].numel()), with_kwargs=True
    )
    dec.generate([[*PROMPT, *first]], 2, keep_state=True)  # a hook is new
    seen.clear()
    model.train()
    model.eval()
    generated_by_transformers(model, PROMPT, 2)
    seen.clear()
    dec.generate([[*PROMPT, *first, 5]], 2, keep_state=True)
    assert sum(seen) <= 5
    hook.remove()


@pytest.mark.parametrize("compile", ["off", "graph"])
def test_an_adapter_that_is_switched_is_switched_also_for_what_is_kept(compile: str) -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)
    dec = decoder(model, strategies=["prompt-lookup"])
    if compile == "graph":
        dec.target = type(dec.target)(model, recorder=Rerun())
    adapters = [layer.self_attn.v_proj for layer in model.model.layers]
    text, hashes, seen = list(PROMPT), [], []

    def scale(adapter: Adapter) -> None:
        adapter.scaling["default"] = 2.0

    def merge(adapter: Adapter) -> None:
        adapter.merged_adapters.append("default")
        adapter._disable_adapters = True
        adapter.base_layer.weight.data += adapter.lora.weight.data

    def enable(adapter: Adapter) -> None:
        adapter._disable_adapters = False

    def train(adapter: Adapter) -> None:
        adapter.lora.weight.data.mul_(0.5)

    for step in (lambda adapter: None, enable, scale, train, merge):
        for adapter in adapters:
            step(adapter)
        out = dec.generate([text], 10, keep_state=True)
        assert out.token_ids[0] == generated_by_transformers(model, text, 10)
        hashes.append(out.provenance["weights"]["target"])
        seen.append(out.provenance["adapters"]["target"])
        text += [*out.token_ids[0], 1]
    assert len(set(hashes)) == 5
    assert [entry["disabled"] for [entry] in seen] == [True, False, False, False, True]
    assert seen[2][0] == {
        "active": ["default"],
        "disabled": False,
        "merged": [],
        "scale": {"default": 2.0},
        "modules": 3,
    }
    assert dec.generate([PROMPT], 2).provenance["adapters"]["target"][0]["merged"] == ["default"]


@pytest.mark.parametrize("holder", ["closure", "dict", "object", "method", "partial", "tensor", "default"])
def test_a_factor_that_a_hook_reads_elsewhere_is_noticed(holder: str) -> None:
    """Activation steering: the hook stays, its strength changes."""

    class Steering:
        def __init__(self) -> None:
            self.factor = 1.0

        def hook(self, module: nn.Module, given: Any, out: Any) -> Any:
            return out * self.factor

    model = tiny_model("llama")
    steering, table, factor, tensor = Steering(), {"factor": 1.0}, 1.0, torch.tensor(1.0)

    def of_default(module: nn.Module, given: Any, out: Any, table: dict[str, float] = table) -> Any:
        return out * table["factor"]

    hook: Any = {
        "closure": lambda module, given, out: out * factor,
        "dict": lambda module, given, out: out * table["factor"],
        "object": lambda module, given, out: out * steering.factor,
        "method": steering.hook,
        "partial": functools.partial(lambda table, module, given, out: out * table["factor"], table),
        "tensor": lambda module, given, out: out * tensor,
        "default": of_default,
    }[holder]
    model.model.layers[0].mlp.register_forward_hook(hook)
    dec = decoder(model, strategies=[])
    text = [*PROMPT, *dec.generate([PROMPT], 6, keep_state=True).token_ids[0]]
    steering.factor = table["factor"] = factor = 3.0
    tensor.fill_(3.0)
    out = dec.generate([text], 12, keep_state=True)
    assert out.provenance["dropped_state"] == ["target"]
    assert out.token_ids[0] == generated_by_transformers(model, text, 12)


def test_hooks_that_write_down_what_they_see_cost_nothing_that_is_kept() -> None:
    model = tiny_model("llama")
    seen: list[Any] = []
    model.model.layers[0].register_forward_hook(lambda module, given, out: seen.append(out))
    dec = decoder(model, strategies=[])
    text = [*PROMPT, *dec.generate([PROMPT], 6, keep_state=True).token_ids[0]]
    assert dec.generate([text], 4, keep_state=True).provenance["dropped_state"] == []
    assert seen


# -- what a decoder remembers of a model -------------------------------------------------------------------------------


def resize(model: Any, vocab: int) -> None:
    model.resize_token_embeddings(vocab, mean_resizing=False)
    with torch.no_grad():  # so that new ids are the likeliest
        model.lm_head.weight[-8:] = 4 * model.lm_head.weight[:8]


@pytest.mark.parametrize(
    ("vocab", "strategies"), [(160, ["prompt-lookup"]), (100, ["draft-model"]), (140, ["draft-model"])]
)
def test_a_vocabulary_that_was_resized_is_read_anew(vocab: int, strategies: list[str]) -> None:
    model = tiny_model("llama")
    dec = decoder(model, tiny_model("llama", seed=1), strategies=strategies)
    dec.generate([PROMPT], 4, keep_state=True)
    resize(model, vocab)
    expected = generated_by_transformers(model, PROMPT, 24)
    assert any(t >= vocab - 8 for t in expected)
    assert dec.generate([PROMPT], 24, keep_state=True).token_ids[0] == expected
    dec.generate([[vocab - 1]], 2)
    with pytest.raises(SpecdecError, match=str(vocab)):
        dec.generate([[vocab]], 2)
    with pytest.raises(SpecdecError, match="token"):
        dec.generate([PROMPT], 2, bad_words_ids=[[vocab]])


def test_a_draft_whose_vocabulary_was_resized_drafts_with_the_new_one() -> None:
    model = tiny_model("llama")
    draft = weaker(model, 0.01)
    dec = decoder(model, draft)
    expected = generated_by_transformers(model, PROMPT, 16)
    for vocab in (100, 150):
        draft.resize_token_embeddings(vocab, mean_resizing=False)
        assert dec.generate([PROMPT], 16).token_ids[0] == expected


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_dtype_that_was_changed_is_followed(dtype: torch.dtype, fuse: bool) -> None:
    model, draft = tiny_model("llama"), tiny_model("llama", seed=1)
    dec = decoder(model, draft, fuse=fuse)
    dec.generate([PROMPT], 8, keep_state=True)
    model.to(dtype)
    out = dec.generate([PROMPT], 16, keep_state=True)
    assert out.provenance["dtypes"] == {"target": str(dtype), "draft": "torch.float32"}
    assert out.token_ids == decoder(model, draft, fuse=fuse).generate([PROMPT], 16).token_ids
    draft.to(dtype)
    assert dec.generate([PROMPT], 16, keep_state=True).token_ids == out.token_ids


def test_end_of_text_context_and_tied_heads_are_read_for_each_call() -> None:
    model = tiny_model("llama")
    dec = decoder(model, strategies=["prompt-lookup"])
    text = dec.generate([PROMPT], 12).token_ids[0]
    model.generation_config.eos_token_id = text[3]
    assert dec.generate([PROMPT], 12).token_ids[0] == text[: text.index(text[3]) + 1]
    model.generation_config = GenerationConfig(eos_token_id=[text[2], text[5]])
    assert dec.generate([PROMPT], 12).finish_reasons == ["eos"]
    model.generation_config = GenerationConfig()
    model.config.max_position_embeddings = len(PROMPT) + 5
    out = dec.generate([PROMPT], 12)
    assert (out.token_ids[0], out.finish_reasons) == (text[: len(out.token_ids[0])], ["context"])
    model.config.max_position_embeddings = 512
    model.lm_head.weight = model.model.embed_tokens.weight
    assert dec.generate([PROMPT], 12).token_ids[0] == generated_by_transformers(model, PROMPT, 12)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0))
    assert dec.generate([PROMPT], 12).token_ids[0] == generated_by_transformers(model, PROMPT, 12)


@pytest.mark.parametrize("when", ["before the first step", "between two steps"])
@pytest.mark.parametrize("change", ["vocabulary", "dtype"])
def test_a_call_whose_model_takes_another_form_meanwhile_says_so(when: str, change: str) -> None:
    model = tiny_model("llama")
    dec = decoder(model, strategies=["prompt-lookup"])
    rounds = dec.rounds(PROMPT, 20)
    if when == "between two steps":
        next(rounds)
    if change == "vocabulary":
        resize(model, 64)
    else:
        model.to(torch.float64)
    with pytest.raises(SpecdecError, match="has changed since this call"):
        list(rounds)
    assert dec.generate([PROMPT], 8).token_ids[0] == generated_by_transformers(model, PROMPT, 8)


def test_weights_that_change_while_a_generator_waits_do_not_spoil_later_calls() -> None:
    model = tiny_model("llama")
    dec = decoder(model, strategies=["prompt-lookup"])
    rounds = dec.rounds(PROMPT, 12, keep_state=True)
    next(rounds)
    in_place(model)
    text = [t for r in rounds for t in r.tokens]
    longer = [*PROMPT, *text]
    assert dec.generate([longer], 8, keep_state=True).token_ids[0] == generated_by_transformers(model, longer, 8)


def test_a_cache_of_the_models_earlier_form_is_not_used_again() -> None:
    model = tiny_model("llama")
    dec = decoder(model, strategies=[])
    waiting = dec.rounds(PROMPT, 8)
    next(waiting)
    model.to(torch.float64)
    dec.generate([PROMPT], 4)
    waiting.close()  # gives its float32 cache back
    assert dec.generate([PROMPT], 8).token_ids[0] == generated_by_transformers(model, PROMPT, 8)


def test_the_hash_of_weights_notices_every_kind_of_write() -> None:
    model = tiny_model("llama")
    dec = decoder(model, strategies=[])
    hashes = [dec.generate([PROMPT], 1).provenance["weights"]["target"]]
    for change in (in_place, through_data, other_data_twice, patched):
        change(model)
        hashes.append(dec.generate([PROMPT], 1).provenance["weights"]["target"])
    assert len(set(hashes)) == len(hashes)
    assert tiny_hash() == tiny_hash()


def tiny_hash() -> str:
    return weight_hash(tiny_model("llama"))


def test_hooks_of_the_whole_model_cost_nothing_that_is_kept() -> None:
    """They count passes, or read logits."""
    model = tiny_model("llama")
    dec = decoder(model, model)
    text = [*PROMPT, *dec.generate([PROMPT], 6, keep_state=True).token_ids[0]]
    seen: list[Any] = []
    with counting_passes(model) as passes:
        model.register_forward_hook(lambda module, given, out: seen.append(out.logits))
        out = dec.generate([[*text, 5]], 4, keep_state=True)
    assert out.provenance["dropped_state"] == []
    assert sum(passes) <= 20
    assert len(seen) == len(passes)


def test_a_call_inside_a_call_follows_what_has_changed_since_that_one_began() -> None:
    """`progress` is the user's code: it may change a model and decode with it."""
    model = tiny_model("llama")
    dec = decoder(model, strategies=[])
    inner: list[list[int]] = []

    def progress(done: float) -> None:
        if not inner:
            model.lm_head = copy.deepcopy(tiny_model("llama", seed=5).lm_head)
            inner.append(dec.generate([PROMPT], 6).token_ids[0])

    dec.generate([PROMPT], 4, progress=progress)
    assert inner == [generated_by_transformers(model, PROMPT, 6)]
