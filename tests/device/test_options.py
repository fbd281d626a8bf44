"""Every option of every strategy, recorded against eager. Without a GPU, by a recorder that runs a program again from
its own buffers, and with the few widths that passes have on a GPU; tests/device/test_gpu.py takes the same options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import specdec
from specdec.device.graphs import Recorded
from specdec.models.runner import Runner, Shapes
from specdec.research.traces.trace import record
from tests.helpers.options import CALLS, STRATEGIES, Outcome
from tests.helpers.playing import looping, quoting_ids, weaker
from tests.helpers.recording import Rerun
from tests.helpers.tiny import tiny_model
from tests.helpers.tokens import byte_level

VOCAB = 320
PROMPTS = [
    quoting_ids(9, 1, 3, VOCAB), quoting_ids(21, 2, 7, VOCAB), [5], quoting_ids(14, 3, 4, VOCAB), [7, 7, 7, 7],
    [40, 41], quoting_ids(33, 4, 6, VOCAB), [12, 13, 11],
]  # fmt: skip
TREES = [
    "branches=4",
    "branches=6, top_n",
    "tree=3x1x2",
    "tree=20",
    "tree, uneven",
    "lookup, then tree",
    "tree of 40",
    "recycling",
]
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module", autouse=True)
def shapes_of_a_gpu() -> Iterator[None]:
    choose = Shapes.choose
    with pytest.MonkeyPatch.context() as patch:
        on_gpu = staticmethod(lambda device, *shape: choose(torch.device("cuda"), *shape))
        patch.setattr(Shapes, "choose", on_gpu)
        yield


@pytest.fixture(scope="module")
def decoders(shapes_of_a_gpu: None) -> dict[str, specdec.SpeculativeDecoder]:
    """One eager, one recorded; all tests share them, so that programs of one option meet inputs of another."""
    target = looping(tiny_model("llama", vocab=VOCAB, num_hidden_layers=2, **SIZES))
    pair = target, weaker(target, 0.1)
    made = {mode: specdec.SpeculativeDecoder(*pair, byte_level(VOCAB), check=False) for mode in ("eager", "recorded")}
    recorded = made["recorded"]
    recorded.target, recorded.draft = (Runner(model, recorder=Rerun()) for model in pair)
    return made


def compare(decoders: dict[str, specdec.SpeculativeDecoder], name: str, call: str, tokens: int = 10) -> Outcome:
    """The outcomes of the call are equal; returns that of recorded passes."""
    eager, recorded = (
        Outcome(dec, PROMPTS, name, call, max_new_tokens=tokens, eos_token_id=[17, 99, 130])
        for dec in decoders.values()
    )  # fmt: skip
    assert recorded == eager
    for ours, theirs in zip(recorded.logprobs or (), eager.logprobs or (), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    return recorded


@pytest.mark.fast(9)
@pytest.mark.parametrize("name", STRATEGIES)
def test_options_give_the_eager_outcome_when_recorded(
    decoders: dict[str, specdec.SpeculativeDecoder], name: str
) -> None:
    compare(decoders, name, "sampled", 6)
    if name in TREES:
        compare(decoders, name, "greedy", 6)
        compare(decoders, name, "one-hot", 6)


@pytest.mark.full
@pytest.mark.parametrize("name", STRATEGIES)
def test_options_give_the_eager_outcome_in_every_call(
    decoders: dict[str, specdec.SpeculativeDecoder], name: str
) -> None:
    for call in CALLS:
        compare(decoders, name, call)


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", TREES)
def test_options_of_trees_leave_records_as_they_are(decoders: dict[str, specdec.SpeculativeDecoder], name: str) -> None:
    """Traces bring their details from the device by the same programs."""
    options: dict[str, Any] = {"strategies": STRATEGIES[name], "draft_length": "given", "seed": 3, "temperature": 0.8}
    eager, recorded = (record(dec, PROMPTS[:4], max_new_tokens=8, **options) for dec in decoders.values())
    for ours, theirs in zip(recorded.rounds, eager.rounds, strict=True):
        for field in ("draft", "parents", "path", "tokens", "strategy"):
            assert getattr(ours, field) == getattr(theirs, field)
        assert ours.p == pytest.approx(theirs.p, abs=1e-5)
        assert ours.details.entropy == pytest.approx(theirs.details.entropy, abs=1e-4)


def test_options_share_few_programs(decoders: dict[str, specdec.SpeculativeDecoder]) -> None:
    """The third time nothing is recorded, and of one option's trees, whatever grows, there are few sizes."""
    dec = decoders["recorded"]
    for _ in range(2):
        compare(decoders, "branches=4", "match")
    before = dec.target.recorded[0], dec.draft.recorded[0]
    compare(decoders, "branches=4", "match")
    assert (dec.target.recorded[0], dec.draft.recorded[0]) == before


def test_buffers_of_another_shape_are_never_refilled(
    decoders: dict[str, specdec.SpeculativeDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies between shapes that broadcast would go unnoticed, so every replay of the options above looks."""
    real, replays = Recorded.__call__, [0]

    def checked(program: Recorded[Any, Any], inputs: Any) -> Any:
        replays[0] += 1
        for mine, theirs in zip(program.inputs.tensors(), inputs.tensors(), strict=True):
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        return real(program, inputs)

    monkeypatch.setattr(Recorded, "__call__", checked)
    for name in ("tree=20", "tree=2x2x2", "branches=4", "n_max=5", "lookup, then tree"):
        compare(decoders, name, "coupled", 8)
    assert replays[0] > 0
