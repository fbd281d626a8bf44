"""An adapter for early exit: it starts as no adapter, only it learns, and what was trained is what drafts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import EarlyExit, SpecdecError, SpeculativeDecoder
from specdec.drafters.self_speculation.adapter import ExitAdapter, load_adapter
from specdec.models.layer_subset import PassThrough
from specdec.training.answers import Answer
from specdec.training.config import ExitStart, TrainingConfig, TrainingData
from specdec.training.exit import ExitModel, ExitTask, make_adapter
from specdec.training.features import Live
from specdec.training.run import run_training
from specdec.training.skip_search import search_skip_sets
from tests.helpers.tiny import tiny_model
from tests.helpers.training import EXIT, config_of, save_target, settings

CONFIG = TrainingConfig("t", "out", TrainingData(texts=("a",)), exit=ExitStart(layers=2, rank=8))
IDS = torch.tensor([[5, 9, 2, 7, 7, 1]])


def bent(hidden_size: int = 32) -> ExitAdapter:
    """An adapter that changes what it is given."""
    torch.manual_seed(0)
    made = ExitAdapter(2, hidden_size, 8)
    torch.nn.init.normal_(made.down.weight)
    return made.requires_grad_(False)


def drafts_of(decoder: SpeculativeDecoder, drafter: Any, **options: Any) -> list[Any]:
    rounds = decoder.rounds([3, 1, 4, 1, 5], max_new_tokens=16, strategies=[drafter], **options)
    return [(r.draft, r.accepted, r.tokens) for r in rounds]


def test_only_the_adapter_learns_and_it_starts_as_none() -> None:
    target = tiny_model("llama", seed=1).requires_grad_(False)
    before = [p.clone() for p in target.parameters()]
    adapter = make_adapter(CONFIG.exit, target, 0)  # type: ignore[arg-type]
    task = ExitTask(target, adapter, CONFIG)
    assert {id(p) for p in task.module.parameters()} == {id(p) for p in adapter.parameters()}
    assert set(task.module.state_dict()) == {f"model.adapter.{name}" for name in adapter.state_dict()}
    short = tiny_model("llama", seed=1)
    short.model.layers = short.model.layers[:2]
    expected = short(IDS, use_cache=False).logits
    torch.testing.assert_close(ExitModel(target, adapter)(input_ids=IDS, use_cache=False).logits, expected)
    batch = Live(target, (), [Answer((5, 9, 2, 7, 7, 1), 2), Answer((4, 4, 8, 3), 2)])([0, 1])
    optimiser = torch.optim.AdamW(adapter.parameters(), lr=0.02)
    losses = []
    for _ in range(20):
        loss = task.module(batch).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(torch.equal(a, b) for a, b in zip(before, target.parameters(), strict=True))


@torch.no_grad()
def test_drafts_come_from_the_adapted_state_and_texts_are_plain_decodings() -> None:
    model, adapter = tiny_model("llama"), bent()
    decoder = SpeculativeDecoder(model, check=False)
    adapted = ExitModel(model, adapter)
    text, seen = [3, 1, 4, 1, 5], set()
    for draft, _, tokens in drafts_of(decoder, EarlyExit(adapter=adapter, n_max=1)):
        if draft:
            logits = adapted(input_ids=torch.tensor([text]), use_cache=False).logits
            assert draft == [int(logits[0, -1].argmax())]
            seen.add(draft[0])
        text += tokens
    assert text[5:] == decoder.generate([3, 1, 4, 1, 5], 16, strategies=[]).token_ids[0]
    assert drafts_of(decoder, EarlyExit(adapter=adapter)) != drafts_of(decoder, EarlyExit(layers=2))
    # The verify pass goes on from the state before the adapter.
    options: dict[str, Any] = {"temperature": 0.9, "acceptance": "match", "seed": 3}
    plain = decoder.generate([[3, 1, 4], [1, 5]], 16, strategies=[], **options)
    out = decoder.generate([[3, 1, 4], [1, 5]], 16, strategies=[EarlyExit(adapter=adapter)], **options)
    assert out.token_ids == plain.token_ids
    assert out.provenance["resumed"]["passes"] > 0


def test_an_adapter_is_written_and_read(tmp_path: Path) -> None:
    adapter = bent()
    adapter.save(tmp_path / "a", torch.float32)
    again = load_adapter(tmp_path / "a")
    assert (again.layers, again.rank) == (2, 8)
    assert all(torch.equal(a, b) for a, b in zip(adapter.parameters(), again.parameters(), strict=True))
    drafter = EarlyExit(adapter=str(tmp_path / "a"))
    assert drafter.layers == 2
    assert json.dumps(drafter.parameters())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("layers", "the adapter is for layers=2; leave out layers and skip"),
        ("width", "the adapter is for hidden states of 48, the target's have 32; train one for this target"),
        ("config", "rank: expected a whole number >= 1"),
        ("weights", "is not the adapter of its config"),
        ("folder", "nowhere"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path, fault: str, message: str) -> None:
    bent(48 if fault == "width" else 32).save(tmp_path / "a", torch.float32)
    config = tmp_path / "a" / "config.json"
    if fault in ("config", "weights"):
        config.write_text(config.read_text().replace('"rank": 8', '"rank": 0' if fault == "config" else '"rank": 9'))
    options = {"layers": 1} if fault == "layers" else {}
    folder = tmp_path / ("nowhere" if fault == "folder" else "a")
    decoder = SpeculativeDecoder(tiny_model("llama"), check=False)
    with pytest.raises(SpecdecError) as error:
        decoder.generate([1, 2], 4, strategies=[EarlyExit(adapter=str(folder), **options)])
    assert message in str(error.value)


def test_layers_that_the_target_lacks_are_refused() -> None:
    with pytest.raises(SpecdecError, match="3 layers of width 32 are no beginning"):
        make_adapter(ExitStart(layers=3), tiny_model("llama"), 0)


def test_a_run_ends_with_an_adapter_that_drafts(tmp_path: Path) -> None:
    target = save_target(tmp_path)
    config = config_of(tmp_path / "e.yaml", "exit", settings(target, tmp_path / "e", **EXIT, steps=2, eval_every=2))
    log = run_training(config, "exit", lambda words: None)
    assert len(log[-1]["teacher_forced"]) == 1
    decoder = SpeculativeDecoder.from_pretrained(target, strategies=[], device="cpu", check=False)
    out = decoder.generate("def one", 8, strategies=[f"early-exit:adapter={config.folder / 'adapter'}"])
    assert out.token_ids == decoder.generate("def one", 8, strategies=[]).token_ids
    assert out.stats.draft_tokens > 0


# -- layers to leave out -----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_search_leaves_out_first_what_does_nothing() -> None:
    target = tiny_model("llama", seed=1, num_hidden_layers=4, initializer_range=0.2)
    for i in (1, 2):
        target.model.layers[i].self_attn.o_proj.weight.zero_()
        target.model.layers[i].mlp.down_proj.weight.zero_()
    answers = [Answer((5, 9, 2, 7, 7, 1), 2), Answer((4, 4, 8, 3), 1)]
    found = sorted(search_skip_sets(target, answers), key=lambda one: len(one.skip))
    assert [set(one.skip) <= {1, 2} for one in found] == [True, True, False]
    assert [one.acceptance for one in found[:2]] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert found[2].acceptance < 0.99  # the control: a layer that does something
    assert found[1].strategy.startswith("early-exit:skip=1-2:n_max=")
    assert EarlyExit(skip="1-2").skip == found[1].skip
    layers = sum(p.nbytes for i in (1, 2) for p in target.model.layers[i].parameters())
    assert found[1].cost == pytest.approx(1 - layers / sum(p.nbytes for p in target.parameters()))
    assert all(type(layer).__name__ != "PassThrough" for layer in target.model.layers)


@torch.no_grad()
def test_the_acceptance_of_a_set_is_that_of_a_model_without_these_layers() -> None:
    target = tiny_model("llama", seed=1, num_hidden_layers=3, initializer_range=0.2)
    answer = Answer((5, 9, 2, 7, 7, 1), 3)
    rates = {}
    for i in range(3):
        without = copy.deepcopy(target)
        without.model.layers[i] = PassThrough(without.model.layers[i], False)
        p, q = (m(torch.tensor([answer.ids]), use_cache=False).logits[0, 2:-1].softmax(-1) for m in (target, without))
        rates[i] = torch.minimum(p, q).sum(-1).mean().item()
    best = max(rates, key=rates.__getitem__)
    first = min(search_skip_sets(target, [answer]), key=lambda one: len(one.skip))
    assert first.skip == (best,)
    assert first.acceptance == pytest.approx(rates[best], abs=1e-5)
