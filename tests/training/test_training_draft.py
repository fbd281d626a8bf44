"""Draft models in training: where they start from, and that their loss is over the right tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import SpecdecError
from specdec.training.answers import Answer
from specdec.training.config import DraftStart, TrainingConfig, TrainingData
from specdec.training.draft import DraftTraining, make_draft, pruned
from specdec.training.features import Live
from specdec.training.run import run_training, try_task
from tests.helpers.tiny import tiny_model
from tests.helpers.training import config_of, save_target, settings

CONFIG = TrainingConfig("t", "out", TrainingData(texts=("a",)))
IDS = torch.tensor([[5, 9, 2, 7, 7, 1]])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_all_layers_of_the_target_are_the_target(kind: str) -> None:
    target = tiny_model(kind, seed=1)
    torch.testing.assert_close(pruned(target, [0, 1, 2])(IDS).logits, target(IDS).logits)


@torch.no_grad()
def test_kept_layers_follow_one_another() -> None:
    target = tiny_model("llama", seed=1)
    draft = pruned(target, [0, 2])
    assert draft.config.num_hidden_layers == 2
    target.model.layers = target.model.layers[::2]  # a reference: the layer between is taken out
    torch.testing.assert_close(draft(IDS).logits, target(IDS, use_cache=False).logits)


@torch.no_grad()
def test_types_of_layers_are_kept() -> None:
    draft = pruned(tiny_model("gemma3", seed=1), [0, 1])
    assert draft.config.layer_types == ["sliding_attention", "full_attention"]


@pytest.mark.parametrize("layers", [[], [2, 1], [0, 3], [1, 1]])
def test_layers_that_the_target_lacks_are_refused(layers: list[int]) -> None:
    with pytest.raises(SpecdecError, match="layers must ascend from 0 to at most 2"):
        pruned(tiny_model("llama"), layers)


def test_a_draft_from_scratch_has_the_targets_config_but_for_its_options() -> None:
    target = tiny_model("llama", seed=1)
    start = DraftStart(options={"num_hidden_layers": 1, "intermediate_size": 20})
    draft, again, other = (make_draft(start, target, replace(CONFIG, seed=seed)) for seed in (0, 0, 1))
    assert (draft.config.num_hidden_layers, draft.config.intermediate_size) == (1, 20)
    assert draft.config.hidden_size == target.config.hidden_size
    weight = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(draft.state_dict()[weight], again.state_dict()[weight])
    assert not torch.equal(draft.state_dict()[weight], other.state_dict()[weight])
    assert target.config.num_hidden_layers == 3
    with pytest.raises(SpecdecError, match="did you mean 'num_hidden_layers'"):
        make_draft(DraftStart(options={"num_hidden_layer": 1}), target, CONFIG)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden_size": 100, "num_attention_heads": 8}, "hidden size"),  # transformers says so only when it is saved
        ({"num_attention_heads": 7}, "options make no model|cannot run"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected a whole number"),
        ({"hidden_size": "wide"}, "hidden_size: expected a whole number"),
        ({"head_dim": -1}, "head_dim: expected"),
        ({"rms_norm_eps": None}, "options make no model.*expected float"),
        ({"hidden_act": "swish9"}, "options make no model"),
        ({"num_key_value_heads": 3}, "options make no model|cannot run"),
    ],
)
def test_options_that_make_no_model_are_refused_before_any_work(options: dict[str, Any], words: str) -> None:
    target = tiny_model("llama")
    config = replace(CONFIG, draft=DraftStart(options=options))
    with pytest.raises(SpecdecError, match=words) as error:
        try_task("draft", config, target, None)
    assert len(str(error.value)) < 300


def test_a_run_with_such_options_writes_no_answers(tmp_path: Path) -> None:
    values = settings(save_target(tmp_path / "t"), tmp_path / "out", draft={"options": {"num_hidden_layers": 0}})
    with pytest.raises(SpecdecError, match="num_hidden_layers"):
        run_training(config_of(tmp_path / "c.yaml", "draft", values), "draft", print)
    assert not list(tmp_path.glob("out/*"))


def test_a_draft_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(SpecdecError, match="its vocabulary is not the target's"):
        make_draft(DraftStart(options={"vocab_size": 99}), tiny_model("llama"), CONFIG)


def test_the_loss_is_over_the_tokens_of_answers() -> None:
    target, draft = tiny_model("llama", seed=1).requires_grad_(False), tiny_model("llama", seed=2)
    answers = [Answer((5, 9, 2, 7, 7, 1), 3), Answer((4, 4, 8, 3), 2)]
    batch = Live(target, (), answers)([0, 1])
    module = DraftTraining(draft, "tv", 1.0).eval()
    found = module(batch)
    expected: list[Any] = []
    for answer in answers:
        ids = torch.tensor([answer.ids])
        p, q = (model(ids).logits[0].softmax(-1) for model in (target, draft))
        expected += [1 - torch.minimum(p[i], q[i]).sum() for i in range(answer.start - 1, len(answer.ids) - 1)]
    assert found.counted.tolist() == [len(expected)] == [5]
    torch.testing.assert_close(found.loss, torch.stack(expected).mean())
    torch.testing.assert_close(found.accepted[0], len(expected) - torch.stack(expected).sum())
