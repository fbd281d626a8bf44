"""Recorded passes: reused, refilled, dropped with their cache, and equal to eager ones. Without a GPU, by a recorder
that runs the pass again; tests/device/test_gpu.py has the real ones."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specdec
from specdec.decoder import SpeculativeDecoder
from specdec.decoding.acceptance import MATCH, AcceptanceRule, Block
from specdec.decoding.verification import Verifier
from specdec.device.graphs import LEAST_LAYERS, LEAST_PARAMETERS, check_compile, choose_mode
from specdec.errors import SpecdecError
from specdec.models.kv_cache import CachePool, RaggedCache, compiled_slots, rounded_up
from specdec.models.passes import ALL_LAYERS
from specdec.models.runner import Runner
from tests.helpers.recording import Frozen, OnlyPasses, Refusing, Rerun, replayed
from tests.helpers.tiny import tiny_model

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [9, 9, 8]]


def decoder(recorder: type | None = None, kind: str = "llama") -> SpeculativeDecoder:
    """A pair whose draft is the target with other noise; its passes are recorded by `recorder`."""
    target = tiny_model(kind)
    draft = copy.deepcopy(target)
    with torch.no_grad():
        for p in draft.parameters():
            p.mul_(1 + 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    made = SpeculativeDecoder(target, draft, check=False)
    if recorder is not None:
        made.target, made.draft = Runner(target, recorder=recorder()), Runner(draft, recorder=recorder())
    return made


CALLS = {
    "plain": {"strategies": []},
    "draft-model": {"draft_length": "given"},
    "sampled": {"temperature": 0.9, "seed": 3, "draft_length": "given"},
    "tree": {"strategies": ["draft-model:tree=2x2"], "temperature": 0.9, "seed": 3},
    "chain of strategies": {"strategies": ["prompt-lookup", "draft-model:n_max=5:p_min=0.2"]},
}


@pytest.mark.fast(1)
@pytest.mark.parametrize("call", CALLS)
def test_recorded_passes_give_the_eager_text(call: str) -> None:
    eager, recorded = decoder(), decoder(Rerun)
    for prompts in (PROMPTS, PROMPTS[:1], [p * 3 for p in PROMPTS]):
        expected = eager.generate(prompts, 24, **CALLS[call])
        out = recorded.generate(prompts, 24, **CALLS[call])
        assert out.token_ids == expected.token_ids
        assert out.stats.to_dict()["accepted_tokens"] == expected.stats.to_dict()["accepted_tokens"]
    assert recorded.target.graphs.recorder.replays > 0


def test_a_round_is_one_replay_to_draft_and_one_to_verify() -> None:
    dec = decoder(Rerun)
    short = specdec.DraftModel(n_max=3, p_min=0.3)
    for options in ({}, {"temperature": 0.9, "acceptance": "match"}, {"strategies": [short]}):
        for _ in range(2):  # prompts are recorded when they come again
            dec.generate(PROMPTS, 24, **options)
        with replayed() as counts:
            out = dec.generate(PROMPTS, 24, **options)
        drafts = out.stats.counters["draft-model"].n_call_draft
        prefills = len(PROMPTS)  # by the target; the draft takes such short prompts into its first step
        assert counts == {"Verified": out.stats.verify_passes, "Proposal": drafts, "PassResult": prefills}


def test_passes_of_replayed_programs_are_counted_as_those_of_others() -> None:
    counted = []
    for dec in (decoder(), decoder(Rerun)):
        dec.generate(PROMPTS, 12)
        out = dec.generate(PROMPTS, 12, strategies=[specdec.DraftModel(n_max=3)])
        counted.append(out.stats.draft_passes)
    calls = out.stats.counters["draft-model"].n_call_draft
    assert calls < counted[0] <= counted[1] <= 3 * calls


def test_what_a_program_depends_on_makes_another_program() -> None:
    """Temperature, warpers, rule and stops are fixed in a recording: calls that differ in them take turns here."""
    eager, recorded = decoder(), decoder(Rerun)
    calls = [
        {"temperature": 0.9}, {"temperature": 0.4}, {}, {"temperature": 0.9, "top_k": 5},
        {"temperature": 0.9, "top_k": 50}, {"temperature": 0.9, "acceptance": "match"},
        {"temperature": 0.9, "acceptance": "coupled"},
        {"strategies": ["draft-model:p_min=0.02"]}, {"strategies": ["draft-model:p_min=0.5"]},
        {"output_logprobs": True},
    ]  # fmt: skip
    for _ in range(2):
        for call in calls:
            expected, out = (d.generate(PROMPTS[:2], 8, seed=3, **call) for d in (eager, recorded))
            assert out.token_ids == expected.token_ids, call
            assert out.stats.draft_tokens == expected.stats.draft_tokens, call


@pytest.mark.fast(2)
@pytest.mark.parametrize("call", ["sampled", "tree"])
def test_where_only_passes_can_be_recorded_these_are(call: str, caplog: pytest.LogCaptureFixture) -> None:
    recorded = decoder(OnlyPasses)
    out = recorded.generate(PROMPTS, 24, **CALLS[call])
    assert out.token_ids == decoder().generate(PROMPTS, 24, **CALLS[call]).token_ids
    assert recorded.target.graphs.recorder.replays == out.stats.verify_passes
    told = [r.getMessage() for r in caplog.records if "pass by pass" in r.getMessage()]
    assert len(told) == sum(len(r.graphs.failures) for r in (recorded.target, recorded.draft)) > 0


def test_processors_that_read_text_and_rules_of_users_are_not_recorded() -> None:
    """Both are Python, which a replay would not call again: here each counts, and the pass alone is recorded."""
    calls = [0]

    def stands(block: Block) -> torch.Tensor:
        calls[0] += 1
        return MATCH.accepts(block)

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return scores

    rule = AcceptanceRule("counting", "argmax", stands, MATCH.next_token)
    for options in ({"acceptance": rule}, {"logits_processor": processor, "acceptance": "match"}):
        dec = decoder(Rerun)
        for _ in range(2):
            calls[0] = 0
            out = dec.generate(PROMPTS, 12, strategies=["prompt-lookup"], **options)
            assert calls[0] >= out.stats.verify_passes
        prefills = len(PROMPTS)  # the second time
        assert dec.target.graphs.recorder.replays == 2 * out.stats.verify_passes + prefills


def test_a_recorder_that_ignores_its_inputs_is_seen_by_that_test() -> None:
    expected = decoder().generate(PROMPTS, 24)
    assert decoder(Frozen).generate(PROMPTS, 24).token_ids != expected.token_ids


@pytest.mark.parametrize("kind", ["gemma3", "mixtral"])
def test_recorded_passes_of_other_models_give_the_eager_text(kind: str) -> None:
    assert decoder(Rerun, kind).generate(PROMPTS, 16).token_ids == decoder(None, kind).generate(PROMPTS, 16).token_ids


def test_a_second_identical_call_records_prompts_and_a_third_nothing() -> None:
    dec = decoder(Rerun)
    first, second, third = (dec.generate(PROMPTS, 24).provenance["compile"] for _ in range(3))
    for role in ("target", "draft"):
        assert first[role]["mode"] == "graph"
        assert first[role]["captured"] == first[role]["graphs"] > 0
        assert first[role]["seconds"] > 0
        assert second[role]["captured"] == (len(PROMPTS) if role == "target" else 0)
        assert third[role]["captured"] == 0
        assert third[role]["seconds"] == 0
        assert third[role]["graphs"] == second[role]["graphs"]


def test_calls_of_other_lengths_share_a_cache_and_its_passes() -> None:
    dec = decoder(Rerun)
    dec.generate(PROMPTS, 24, strategies=[])
    cache = dec.target.pool.idle
    out = dec.generate([p * 2 for p in PROMPTS], 15, strategies=[])
    assert dec.target.pool.idle is cache
    assert out.provenance["compile"]["target"]["captured"] == 0


@pytest.mark.fast(1)
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_program_of_a_short_call_serves_a_longer_one(kind: str) -> None:
    """What a program takes for the end of a row must not be the end of the call that it was recorded in."""
    eager, recorded = decoder(kind=kind), decoder(Rerun, kind)
    for prompt, length in (([3, 1, 4], 8), ([2, 7, 1, 8] * 4, 40), ([3, 1, 4], 8)):
        out, expected = (d.generate([prompt], length, **CALLS["draft-model"]) for d in (recorded, eager))
        assert out.token_ids == expected.token_ids
        assert out.stats.accepted_tokens == expected.stats.accepted_tokens
    assert recorded.draft.graphs.recorder.replays > 0


def test_chunks_of_prompts_are_recorded_when_they_come_again() -> None:
    """Most of them never do. Here lengths share a width, and each row has recordings of its own."""
    prompts = [[(7 * i + row) % 100 for i in range(31 + row)] for row in range(3)]
    eager, dec = decoder(), decoder(Rerun)
    captured = []
    for texts in (prompts, prompts[::-1], [p[:-3] for p in prompts]):
        out = dec.generate(texts, 8, strategies=["draft-model:n_max=2"])
        assert out.token_ids == eager.generate(texts, 8, strategies=["draft-model:n_max=2"]).token_ids
        for runner in (dec.target, dec.draft):
            captured.append(sum(p is not None and p.is_prefill for p in runner.pool.idle.graphs.values()))
    assert captured == [0, 0, 3, 3, 3, 3]


def test_of_many_prompts_only_so_many_chunks_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.device.graphs.PREFILL_LIMIT", 2)
    eager, dec = decoder(), decoder(Rerun)
    prompts = [[(7 * i + n) % 100 for i in range(n)] for n in (20, 28, 40, 60)]
    for _ in range(2):
        for prompt in prompts:
            out = dec.generate([prompt], 4, strategies=[])
            assert out.token_ids == eager.generate([prompt], 4, strategies=[]).token_ids
    known = dec.target.pool.idle.graphs
    assert sum(program is not None and program.is_prefill for program in known.values()) == 2


def test_passes_die_with_their_cache() -> None:
    dec = decoder(Rerun)
    dec.generate(PROMPTS, 8)
    before = dec.target.pool.idle
    out = dec.generate(PROMPTS[:2], 8)  # another batch is another cache
    assert dec.target.pool.idle is not before
    assert out.provenance["compile"]["target"]["captured"] > 0


def test_input_buffers_stay_where_they_are() -> None:
    dec = decoder(Rerun)
    for _ in range(2):
        dec.generate(PROMPTS, 8)

    def addresses() -> list[int]:
        return [t.data_ptr() for p in dec.target.pool.idle.graphs.values() if p for t in p.inputs.tensors()]

    before = addresses()
    dec.generate(PROMPTS, 8)
    assert addresses() == before


def test_passes_are_recorded_anew_when_weights_have_moved() -> None:
    dec = decoder(Rerun)
    for _ in range(2):
        dec.generate(PROMPTS, 8)
    weight = dec.target.model.model.layers[0].mlp.up_proj
    weight.weight.data.add_(0)  # a training step: same place
    assert dec.generate(PROMPTS, 8).provenance["compile"]["target"]["captured"] == 0
    weight.weight = torch.nn.Parameter(weight.weight.detach().clone())
    assert dec.generate(PROMPTS, 8).provenance["compile"]["target"]["captured"] > 0


def test_results_survive_the_next_pass() -> None:
    """Drafters may keep what they observed, also where the pass that made it is replayed into the same memory."""
    runner = Runner(tiny_model("llama"), recorder=Rerun())
    cache, shapes = runner.lease(1, 64), specdec.models.runner.Shapes((1, 4), 4, 32)
    first = runner.step(cache, shapes, torch.tensor([[5]]), [0], [1], observed=ALL_LAYERS)
    kept = [first.logits.clone(), *(h.clone() for h in first.hidden)]
    runner.step(cache, shapes, torch.tensor([[7]]), [1], [1], observed=ALL_LAYERS)
    assert all(torch.equal(a, b) for a, b in zip([first.logits, *first.hidden], kept, strict=True))


def test_a_model_that_cannot_be_recorded_runs_eagerly_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    dec = decoder(Refusing)
    out = dec.generate(PROMPTS, 12, strategies=[])
    assert out.token_ids == decoder().generate(PROMPTS, 12, strategies=[]).token_ids
    told = [r.getMessage() for r in caplog.records if "eagerly" in r.getMessage()]
    assert len(told) == 1
    assert "LlamaForCausalLM" in told[0]
    report = out.provenance["compile"]["target"]
    assert report["captured"] == 0
    assert "capturing" in report["failure"]


def test_the_model_is_as_before_after_a_recorded_call() -> None:
    dec = decoder(Rerun)
    model = dec.target.model.train()
    before = model.config._attn_implementation_internal
    dec.generate(PROMPTS, 4)
    assert model.config._attn_implementation_internal == before
    assert all(m.training for m in model.modules())


def test_kept_state_is_recorded_in_its_own_cache() -> None:
    eager, dec = decoder(), decoder(Rerun)
    text: list[int] = PROMPTS[0]
    for _ in range(4):
        out = dec.generate([text], 4, strategies=[], keep_state=True)
        assert out.token_ids == eager.generate([text], 4, strategies=[], keep_state=True).token_ids
        text = text + out.token_ids[0]
    assert out.provenance["compile"]["target"]["captured"] == 0  # two caches take turns, and both are known by now


def test_unknown_values_of_compile_are_refused() -> None:
    for value in ("fast", True, None):
        with pytest.raises(SpecdecError, match="compile must be 'auto'"):
            check_compile(value)
    with pytest.raises(SpecdecError, match="compile"):
        SpeculativeDecoder(tiny_model("llama"), compile="fast")
    with pytest.raises(SpecdecError, match="compile"):
        SpeculativeDecoder.from_pretrained("no such model", compile="fast")


@pytest.mark.parametrize("value", ["graph", "inductor", "max"])
def test_on_a_cpu_graphs_fall_back_with_one_line(value: str) -> None:
    with pytest.warns(UserWarning, match="needs a CUDA device") as told:
        dec = SpeculativeDecoder(tiny_model("llama"), compile=value, check=False)
    assert len(told) == 1
    assert "\n" not in str(told[0].message)
    assert dec.generate(PROMPTS, 2).provenance["compile"]["target"]["mode"] == "off"


def test_auto_is_silent_on_a_cpu() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dec = SpeculativeDecoder(tiny_model("llama"), check=False)
    report = dec.generate(PROMPTS, 2).provenance["compile"]["target"]
    assert report["mode"] == "off"
    assert "CUDA" in report["reason"]


class Sized:
    """Something with parameters, of which only the number counts."""

    def __init__(self, parameters: int):
        self.weight = torch.empty(1).expand(parameters)

    def parameters(self) -> list[torch.Tensor]:
        return [self.weight]


@pytest.mark.parametrize(
    ("layers", "parameters", "triton", "mode", "reason"),
    [
        (30, 135_000_000, True, "max", None),
        (LEAST_LAYERS, LEAST_PARAMETERS, True, "max", None),
        (LEAST_LAYERS - 1, 10**9, True, "graph", "layers"),
        (24, LEAST_PARAMETERS - 1, True, "graph", "parameters"),
        (30, 135_000_000, False, "graph", "triton"),
    ],
)
def test_auto_compiles_by_the_size_of_a_model_and_says_why_not(
    layers: int, parameters: int, triton: bool, mode: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if triton else None)
    found = choose_mode("auto", Sized(parameters), layers, torch.device("cuda"))
    assert found.mode == mode
    assert (found.reason is None) if reason is None else (reason in str(found.reason))
    assert choose_mode("max", Sized(1), 1, torch.device("cuda")) == ("max", None)
    assert choose_mode("off", Sized(parameters), layers, torch.device("cuda")) == ("off", None)


def test_compiled_passes_have_few_sizes() -> None:
    """One compilation for each: of a cache and of what is read of it."""
    assert [compiled_slots(n) for n in (1, 513, 4096, 4097, 8000, 8193)] == [512, 1024, 4096, 5120, 8192, 10240]
    pool = CachePool(1, 256, coarse=True)
    assert {pool.room(n) for n in range(1, 4097)} == {512, 1024, 2048, 4096}
    assert all(n <= pool.room(n) <= 1.25 * n + 1024 for n in range(4097, 20000, 7))
    assert [pool.lease(rows, 100).capacity for rows in (1, 2, 4, 8)] == [2048, 1024, 512, 512]


def test_sizes_come_from_short_lists() -> None:
    assert [rounded_up(n, 256, 4) for n in (1, 256, 257, 1030, 2050, 4097)] == [256, 256, 512, 1280, 2560, 5120]
    assert len({rounded_up(n, 256, 4) for n in range(1, 32768)}) == 4 + 4 * 5
    assert all(rounded_up(n, 256, 16) < 1.0625 * n + 256 for n in range(1, 20000, 7))


def test_an_accepted_path_is_copied_once_though_recording_runs_a_function_twice() -> None:
    """Copied twice, a path would be taken from slots that the first copy has overwritten."""
    found, runner = [], decoder(Rerun).target
    for graphs in (None, {}):  # eagerly, recorded
        cache = RaggedCache(1, 2, 8)
        cache.aim(torch.arange(8).expand(2, -1), slice(0, 2), 8)
        cache.update(*[torch.arange(64.0).reshape(2, 1, 8, 4)] * 2, 0)
        cache.graphs = graphs
        for accepted in (torch.tensor([3, 1]), torch.tensor([0, 2])):
            verdict: Any = {"path": torch.tensor([[1, 3, 5], [4, 6, 0]]), "accepted": accepted}
            Verifier._keep_paths(SimpleNamespace(runner=runner, cache=cache, batch=2), torch.tensor([1, 0]), verdict)  # type: ignore[arg-type]
        found.append(cache.layers[0].keys[:, 0, :, 0] // 4 % 8)
    assert found[0].tolist() == [[0, 1, 3, 5, 7, 5, 6, 7, 0], [0, 5, 7, 3, 4, 5, 6, 7, 0]]
    assert torch.equal(*found)
    assert runner.graphs.captures == 1
