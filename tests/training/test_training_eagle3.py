"""The training-time test of EAGLE heads: it is what the head does when it drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import SpecdecError
from specdec.drafters.eagle3 import EagleHead
from specdec.training import eagle3
from specdec.training.answers import Answer
from specdec.training.config import HeadStart, TrainingConfig, TrainingData
from specdec.training.eagle3 import HeadTraining, StepKeys, ttt_logits
from specdec.training.features import Live
from specdec.training.losses import LOSSES
from specdec.training.new_head import draft_vocabulary, make_head
from specdec.training.run import try_task
from tests.helpers.eagle3 import Rows, random_head
from tests.helpers.tiny import tiny_model

S = 9
OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm_output": True, "fc_norm": True},
    {"num_hidden_layers": 2, "norm_before_residual": True},
    {"qk_norm": True, "norm_before_fc": True, "head_dim": 6},
]


def inputs(head: EagleHead, rows: int = 2) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(7)
    states = torch.randn(rows, S, head.config.observed_size, generator=rng)
    return torch.randint(head.config.vocab_size, (rows, S), generator=rng), states


def drafted(head: EagleHead, ids: Tensor, states: Tensor, entry: int, steps: int) -> list[Tensor]:
    """Logits [B, V_d] after entry `entry` and after each of the tokens that follow, as the head drafts: the context in
    one pass over a cache, then token by token on its own output."""
    rows = Rows(head, len(ids), S + steps)
    count, n = entry + 1, len(ids)
    logits, features = rows.feed(
        head.embed(ids[:, 1 : 1 + count]), head.project(states[:, :count]), [0] * n, [count] * n
    )
    found, features = [logits[:, -1]], features[:, -1:]
    for k in range(1, steps):
        token = head.embed(ids[:, entry + 1 + k, None])
        logits, features = rows.feed(token, features, [entry + k] * n, [1] * n)
        found.append(logits[:, 0])
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@torch.no_grad()
def test_every_step_has_the_logits_of_the_head_that_drafts(options: dict[str, Any]) -> None:
    head = random_head(3, **options)
    for parameter in head.parameters():
        parameter.mul_(0.5 if parameter.ndim == 2 else 1)  # as large as the reference cases', so that rounding is too
    ids, states = inputs(head)
    steps = list(ttt_logits(head, ids, states, S - 2))
    assert [s.shape[1] for s in steps] == [S - 2 - k for k in range(S - 2)]
    for entry in range(S - 2):
        depth = S - 2 - entry
        for k, expected in enumerate(drafted(head, ids, states, entry, depth)):
            torch.testing.assert_close(steps[k][:, entry], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_one_step_is_the_context_pass() -> None:
    head = random_head(4)
    ids, states = inputs(head)
    (logits,) = ttt_logits(head, ids, states, 1)
    rows = Rows(head, 2, S)
    expected, _ = rows.feed(head.embed(ids[:, 1:-1]), head.project(states[:, :-2]), [0, 0], [S - 2] * 2)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_step_that_forgets_its_own_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: without the keys of the steps between, the third step is another."""

    class Forgetful(StepKeys):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, index: int) -> Tensor:
            self.layers[index] = self.layers.get(index, [])[:1]
            return super().attend(query, key, value, index)

    head = random_head(3)
    ids, states = inputs(head)
    right = list(ttt_logits(head, ids, states, 3))
    monkeypatch.setattr(eagle3, "StepKeys", Forgetful)
    wrong = list(ttt_logits(head, ids, states, 3))
    torch.testing.assert_close(wrong[1], right[1])
    assert (wrong[2] - right[2]).abs().max() > 1e-2


def trained(loss: str = "forward-kl", size: int = 40, temperature: float = 1.0) -> tuple[HeadTraining, Live]:
    target = tiny_model("llama", seed=1, num_hidden_layers=8).requires_grad_(False)
    counts = torch.arange(128)
    head = make_head(HeadStart(draft_vocab_size=size, options={"intermediate_size": 48}), target, counts, 0)
    rng = torch.Generator().manual_seed(0)
    lengths = (12, 9, 20)
    answers = [Answer(tuple(torch.randint(128, (n,), generator=rng).tolist()), 4) for n in lengths]
    layers = head.config.observed_layers(8)
    return HeadTraining(head, 4, loss, 0.8, temperature), Live(target, layers, answers)


@pytest.mark.fast(3)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_head_learns_by_every_loss(loss: str) -> None:
    module, source = trained(loss)
    batch = source([0, 1, 2])
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], 3e-3)
    module.eval()
    before = module(batch)
    module.train()
    for _ in range(40):
        optimizer.zero_grad()
        figures = module(batch)
        figures.loss.backward()
        optimizer.step()
    module.eval()
    after = module(batch)
    assert after.loss < 0.7 * before.loss
    assert (after.accepted > before.accepted).all()
    assert after.counted.tolist() == [
        29,
        26,
        23,
        20,
    ]  # 8 + 5 + 16 tokens; one less in each for each step


def test_padding_and_prompts_have_no_part_in_loss_and_figures() -> None:
    module, source = trained()
    module.eval()
    together = module(source([0, 1, 2]))
    alone = [module(source([i])) for i in range(3)]
    torch.testing.assert_close(together.accepted, sum(f.accepted for f in alone), atol=1e-4, rtol=1e-4)
    assert together.counted.tolist() == torch.stack([f.counted for f in alone]).sum(0).tolist()


def test_the_target_and_its_tables_are_not_trained() -> None:
    module, source = trained()
    module(source([0])).loss.backward()
    assert all(p.grad is None for p in source.target.parameters())
    assert {n for n, p in module.named_parameters() if p.grad is None} == set()
    assert not any("embed_tokens" in n for n, _ in module.named_parameters())


def test_the_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    counts = torch.tensor([5, 0, 9, 9, 0, 1])
    assert draft_vocabulary(counts, 3).tolist() == [0, 2, 3]
    assert draft_vocabulary(counts, 5).tolist() == [0, 1, 2, 3, 5]
    module, _ = trained(size=40)
    assert module.ids is not None
    assert module.ids.tolist() == list(range(88, 128))
    with pytest.raises(SpecdecError, match="more than the target's 6"):
        draft_vocabulary(counts, 7)


def test_a_target_that_is_not_finite_is_refused_before_any_work() -> None:
    config = TrainingConfig("t", "out", TrainingData(texts=("a",)), head=HeadStart())
    model = tiny_model("llama", num_hidden_layers=8).requires_grad_(False)
    model.model.layers[2].mlp.up_proj.weight[0] = float("nan")
    with pytest.raises(SpecdecError, match="t: the target's logits are NaN or infinite"):
        try_task("eagle3", config, model, None)


def test_an_unknown_option_of_a_head_names_the_nearest() -> None:
    target = tiny_model("llama", num_hidden_layers=8)
    with pytest.raises(SpecdecError, match="did you mean 'intermediate_size'"):
        make_head(HeadStart(options={"intermediate": 3}), target, torch.ones(128), 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_hidden_layers": 0}, "head: options: num_hidden_layers: expected a whole number"),
        ({"intermediate_size": "wide"}, "head: options: intermediate_size: expected a whole number"),
        ({"rms_norm_eps": None}, "head: options: rms_norm_eps: expected"),
        ({"hidden_act": "swish9"}, "head: options: hidden_act: expected"),
        ({"layer_ids": 3}, "head: options: layer_ids: expected a list"),
        ({"num_attention_heads": 7}, "head: such a drafter cannot run on the target"),
        ({"rope": 3}, "head: such a drafter cannot run on the target"),
    ],
)
def test_options_that_make_no_head_are_refused_before_any_work(options: dict[str, Any], words: str) -> None:
    config = TrainingConfig("t", "out", TrainingData(texts=("a",)), head=HeadStart(options=options))
    with pytest.raises(SpecdecError, match=words):
        try_task("eagle3", config, tiny_model("llama", num_hidden_layers=8), None)
