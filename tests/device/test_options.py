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
from specdec.sampling.processors import Stage
from specdec.sampling.texts import Known, KnownTexts
from tests.helpers.options import CALLS, STRATEGIES, Outcome
from tests.helpers.playing import looping, quoting_ids, weaker
from tests.helpers.recording import Rerun, replayed
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


@pytest.mark.fast(9, full=0)
@pytest.mark.parametrize("name", STRATEGIES)
def test_options_give_the_eager_outcome_when_recorded(
    decoders: dict[str, specdec.SpeculativeDecoder], name: str
) -> None:
    compare(decoders, name, "sampled", 6)
    if name in TREES:
        compare(decoders, name, "greedy", 6)
        compare(decoders, name, "one-hot", 6)


@pytest.mark.fast(0, full=84)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_options_give_the_eager_outcome_in_many_calls(
    decoders: dict[str, specdec.SpeculativeDecoder], name: str, call: str
) -> None:
    """Each option in two of the calls, each call with six or seven options."""
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


PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "presence, frequency": {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    "no repeated n-gram": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[9], [12, 13], [3, 4, 5]]},
    "biases": {"sequence_bias": [[[40], 2.0], [[7, 7], -4.0]]},
    "least lengths": {"min_new_tokens": 4, "min_length": 12},
    "suppressed": {"suppress_tokens": [5, 6], "begin_suppress_tokens": [17, 99]},
    "forced": {"forced_bos_token_id": 40, "forced_eos_token_id": 99},
    "decay": {"exponential_decay_length_penalty": (2, 1.3)},
    "scores alone": {"remove_invalid_values": True, "renormalize_logits": True, "top_k": 50},
}
PENALTIES["all"] = {name: value for options in list(PENALTIES.values())[:-1] for name, value in options.items()}
SHAPES = {"plain": [], "chain": ["draft-model:n_max=3"], "p_min": ["draft-model:n_max=5:p_min=0.3"],
          "tree": ["draft-model:tree=2x2"], "lookup": ["prompt-lookup"], "recycling": ["recycling:nodes=12"],
          "early-exit": ["early-exit:layers=1:n_max=2"]}  # fmt: skip


def penalised(dec: specdec.SpeculativeDecoder, shape: str, prompts: int = 8, **options: Any) -> Any:
    """A call with fewer slots than prompts."""
    fixed: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": [17, 99, 130], "batch_size": 3, "seed": 5}
    return dec.generate(PROMPTS[:prompts], strategies=SHAPES[shape], draft_length="given", **fixed, **options)


@pytest.mark.fast(5, full=40)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PENALTIES)
def test_options_of_processors_give_the_eager_outcome_when_recorded(
    decoders: dict[str, specdec.SpeculativeDecoder], name: str, shape: str, temperature: float
) -> None:
    options = {"temperature": temperature, **PENALTIES[name]}
    eager = penalised(decoders["eager"], shape, **options)
    with replayed() as counts:
        recorded = penalised(decoders["recorded"], shape, **options)
    assert recorded.token_ids == eager.token_ids
    assert recorded.stats.draft_tokens == eager.stats.draft_tokens
    assert recorded.stats.accepted_tokens == eager.stats.accepted_tokens
    assert counts["Verified"] == recorded.stats.verify_passes
    if shape in ("chain", "p_min", "early-exit"):
        assert counts["Proposal"] >= sum(c.n_call_draft for c in recorded.stats.counters.values()) > 0


def test_options_of_processors_that_differ_take_turns(decoders: dict[str, specdec.SpeculativeDecoder]) -> None:
    """What is fixed in a recording, and what comes to it anew: other ids of as many words need no other one."""
    calls = [{"repetition_penalty": 1.2}, {"repetition_penalty": 1.9}, {"no_repeat_ngram_size": 2}]
    calls += [{"no_repeat_ngram_size": 3}, {"bad_words_ids": [[9]]}, {"bad_words_ids": [[12]]}]
    recorded = decoders["recorded"]
    for call in calls:
        made = recorded.target.recorded[0]
        out = penalised(recorded, "lookup", 4, **call)
        assert out.token_ids == penalised(decoders["eager"], "lookup", 4, **call).token_ids, call
    assert recorded.target.recorded[0] == made  # other bad words, of which there are as many
    penalised(recorded, "lookup", 4, **calls[0])
    assert recorded.target.recorded[0] == made


def first_numbers(self: KnownTexts, row: int, ids: Any, processors: Any, real: Any = KnownTexts.start) -> None:
    real(self, row, ids, processors)
    self.numbers[row] = self.numbers[0]


# fault -> what is broken, and calls of which the last one shows it
BROKEN: dict[str, tuple[type, str, Any, list[dict[str, Any]]]] = {
    "emitted tokens are not written": (
        KnownTexts, "grow", lambda self, positions, tokens: None, [{"repetition_penalty": 1.6}],
    ),
    "drafted tokens are not written": (
        Known, "grown", lambda self, tokens, lengths: self, [{"no_repeat_ngram_size": 1}],
    ),
    "every row has the first one's numbers": (KnownTexts, "start", first_numbers, [{"presence_penalty": 2.0}]),
    "penalties are not told apart": (
        Stage, "signature", (), [{"repetition_penalty": 1.01}, {"repetition_penalty": 1.6}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_texts_are_noticed_by_options_of_processors(
    fault: str, decoders: dict[str, specdec.SpeculativeDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, broken, calls = BROKEN[fault]
    expected = penalised(decoders["eager"], "chain", **calls[-1])
    recorded = decoders["recorded"]
    recorded.target.pool.idle = recorded.draft.pool.idle = None
    monkeypatch.setattr(owner, name, broken)
    for call in calls:
        out = penalised(recorded, "chain", **call)
    recorded.target.pool.idle = recorded.draft.pool.idle = None  # with recordings of the fault
    assert (out.token_ids, out.stats.accepted_tokens) != (expected.token_ids, expected.stats.accepted_tokens)
