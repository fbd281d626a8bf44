"""The self-test at load finds models for which some kind of pass is wrong, and lets right ones through."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import LlamaForCausalLM, MptConfig, MptForCausalLM

from specdec import DraftModel, SpeculativeDecoder
from specdec.errors import SpecdecError
from specdec.models.alibi import Alibi
from specdec.models.kv_cache import RaggedCache
from tests.helpers.playing import counting_passes, random_ids, weaker
from tests.helpers.tiny import TINY_KINDS, tiny_model
from tests.oracle import oracle_greedy


def mpt(vocab: int = 64) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MptForCausalLM(MptConfig(vocab_size=vocab, d_model=48, n_heads=6, n_layers=2, max_seq_len=128)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(9 if parameter.ndim == 2 else 1)
    return model


def changed(rotary: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A Llama whose rotary module sees other positions than it is given."""
    model = copy.deepcopy(tiny_model("llama"))
    module = model.model.rotary_emb
    module.forward = lambda x, position_ids: type(module).forward(module, x, rotary(position_ids))
    return model


def test_trees_are_right_where_the_model_counts_distances_in_the_order_of_the_cache() -> None:
    target = mpt()
    decoder = SpeculativeDecoder(target, weaker(target, 0.05))
    prompts = [random_ids(n, n, 64) for n in (5, 9, 12)]
    wanted = [oracle_greedy(target, prompt, 16) for prompt in prompts]
    for strategy in (DraftModel(tree=[3, 2, 1]), DraftModel(n_max=5, branches=3), DraftModel(n_max=4)):
        assert decoder.generate(prompts, 16, strategies=[strategy]).token_ids == wanted


def test_trees_are_refused_where_they_are_wrong_and_chains_go_on() -> None:
    target = mpt()
    with mock.patch.object(Alibi, "of", return_value=None):  # as for another model of this kind
        decoder = SpeculativeDecoder(target, weaker(target, 0.05))
    prompt = random_ids(9, 1, 64)
    for strategy in (DraftModel(tree=[3, 2, 1]), DraftModel(branches=2)):
        with pytest.raises(SpecdecError, match=r"target \(mpt\).*order of its cache.*chains work"):
            decoder.generate(prompt, 12, strategies=[strategy])
    assert decoder.generate(prompt, 12).token_ids == [oracle_greedy(target, prompt, 12)]


def test_trees_of_a_draft_model_that_cannot_evaluate_them_are_refused() -> None:
    with mock.patch.object(Alibi, "of", return_value=None):
        decoder = SpeculativeDecoder(tiny_model("llama", vocab=64), mpt())
    with pytest.raises(SpecdecError, match=r"draft \(mpt\)"):
        decoder.generate([1, 2, 3], 4, strategies=[DraftModel(tree=[2, 1])])
    assert len(decoder.generate([1, 2, 3], 4).token_ids[0]) == 4


@pytest.mark.parametrize("threshold", [40, 300, 500])
def test_rows_that_depend_on_how_long_their_neighbours_are_are_refused(threshold: int) -> None:
    """As under a rope of a kind that is not known: factors by the largest position of the pass."""
    model = changed(lambda ids: ids * 2 if int(ids.max()) >= threshold else ids)
    with pytest.raises(SpecdecError, match="how long the rows beside it are"):
        SpeculativeDecoder(model)


class Odd(LlamaForCausalLM):
    """Takes other positions than it is given, by `wrong`; plain forwards give it none."""

    wrong: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, *given: Any, position_ids: Any = None, **named: Any) -> Any:
        if position_ids is not None:
            position_ids = type(self).wrong(position_ids)
        return super().forward(*given, position_ids=position_ids, **named)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda ids: ids, None),
        (lambda ids: ids * 2 if ids.shape[1] == 1 else ids, "plain forward"),  # a token alone
        (lambda ids: ids * 2 if ids.shape == (2, 7) else ids, "plain forward"),  # a wider pass of two rows
        (lambda ids: torch.arange(ids.shape[1]).expand_as(ids), "plain forward"),  # whatever it is given
        (lambda ids: torch.cat([ids[:1], ids[1:] * 2]), "plain forward"),  # other rows than the first
        (lambda ids: ids.new_zeros(99), "for each row fails"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*past_key_values")
def test_a_pass_of_any_width_that_is_wrong_is_found(wrong: Any, match: str | None) -> None:
    model = Odd(tiny_model("llama").config).eval()
    model.load_state_dict(tiny_model("llama").state_dict())
    with mock.patch.object(Odd, "wrong", staticmethod(wrong), create=True):
        if match is None:
            assert SpeculativeDecoder(model).target.tree_fault is None
        else:
            with pytest.raises(SpecdecError, match=match):
                SpeculativeDecoder(model)


def test_copies_and_compaction_are_tried() -> None:
    with mock.patch.object(RaggedCache, "copy_row_from"), pytest.raises(SpecdecError, match="plain forward"):
        SpeculativeDecoder(tiny_model("llama"))
    with mock.patch.object(RaggedCache, "compact"):
        assert SpeculativeDecoder(tiny_model("llama")).target.tree_fault is not None


@pytest.mark.fast(12)
@pytest.mark.parametrize("kind", TINY_KINDS)
@pytest.mark.parametrize("context", [2, 5, 13, 15, 512])
def test_right_models_pass_whatever_their_context(kind: str, context: int) -> None:
    model = tiny_model(kind, max_position_embeddings=context)
    for attention in (None, "eager"):
        assert SpeculativeDecoder(model, attn_implementation=attention).target.tree_fault is None


def test_a_context_that_is_not_stated_is_not_taken_for_endless() -> None:
    """The neighbour far away must still be inside the table of positions."""
    model = copy.deepcopy(tiny_model("llama", max_position_embeddings=64))
    table = torch.arange(64.0)
    rotary = model.model.rotary_emb
    rotary.forward = lambda x, position_ids: type(rotary).forward(rotary, x, table[position_ids].long())
    vars(model.config)["max_position_embeddings"] = None
    SpeculativeDecoder(model)


def test_the_self_test_takes_five_passes() -> None:
    model = tiny_model("llama")
    with counting_passes(model) as passes:
        SpeculativeDecoder(model)
    assert len(passes) == 5  # the plain forward among them: it was six without trees and copies


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_checkpoint_with_numbers_that_are_none_is_named(value: float) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    model.model.layers[1].self_attn.k_proj.weight.data[0, 0] = value
    with pytest.raises(SpecdecError, match=r"logits are NaN: the checkpoint has NaN or infinity in .*k_proj"):
        SpeculativeDecoder(model)
