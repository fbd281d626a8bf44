"""What can only be seen on a CUDA device: no hidden host reads, devices that differ, fixed shapes in bfloat16."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

import specdec
from specdec.decoding.acceptance import MATCH, AcceptanceRule, Block
from specdec.device.graphs import MODES
from specdec.models.runner import Runner
from specdec.research.exactness.equality import content_dependence
from specdec.research.models.inflate import coarsen, inflate
from tests.helpers.options import STRATEGIES, Outcome
from tests.helpers.recording import replayed
from tests.helpers.tiny import tiny_model

pytestmark = pytest.mark.gpu

PROMPTS = [
    "def read(self, path):\n    with open(path) as f:\n",
    "import os\nimport sys\n",
    "class Node:\n    def __init__(",
]


EIGHT = [
    *PROMPTS,
    "for i in range(10):\n    print(i)\n" * 4,
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1, 2,",
    "#",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a",
    "try:\n    value = int(text)\nexcept ValueError:\n",
]
DEVICE, NEW_TOKENS = "cuda", 16
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1, "no_repeat_ngram_size": 4}
OTHERS = {
    "bad_words_ids": [[9], [10, 11]], "sequence_bias": [[[40], 1.0], [[10, 20], 2.0]], "suppress_tokens": [5],
    "begin_suppress_tokens": [6], "ignore_eos": False, "eos_token_id": [3], "min_new_tokens": 8,
    "forced_eos_token_id": 3, "exponential_decay_length_penalty": (30, 1.02), "remove_invalid_values": True,
}  # fmt: skip


@pytest.fixture(scope="module", params=["off", "graph"])
def decoder(request: pytest.FixtureRequest) -> specdec.SpeculativeDecoder:
    return specdec.SpeculativeDecoder.from_pretrained(
        "demo-target", "demo-draft", device="cuda", dtype="bfloat16", compile=request.param
    )


@pytest.fixture
def sync_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.8, "acceptance": "match"},
        {"strategies": ["draft-model:p_min=0.3"], "temperature": 0.8},
        {"output_logprobs": True},
        {"strategies": ["prompt-lookup", "draft-model:n_max=5"]},
        {"strategies": ["draft-model:tree=2x2"], "temperature": 0.8},
        {"strategies": ["draft-model:n_max=3"]},
        {"strategies": ["draft-model:n_max=3"], "temperature": 0.8},
        {"strategies": ["draft-model:n_max=3"], "temperature": 0.8, **PENALTIES},
        {"strategies": ["draft-model:tree=2x2"], **PENALTIES},
    ],
)
def test_a_round_waits_for_the_device_once(
    decoder: specdec.SpeculativeDecoder, options: dict, sync_is_an_error: None
) -> None:
    out = decoder.generate(PROMPTS, max_new_tokens=24, ignore_eos=True, **options)
    assert out.stats.host_reads == out.stats.verify_passes
    assert [len(row) for row in out.token_ids] == [24] * 3


@pytest.fixture(scope="module")
def outcome() -> Callable[[str, str, str], Outcome]:
    """(mode, strategy, call) -> what 8 prompts come to, on the embedded pair in float32. All modes have the same models
    and one decoder each; no call is made twice."""
    pair = specdec.load_pair(
        "demo-target", "demo-draft", device=DEVICE, draft_device=DEVICE, dtype="float32", draft_dtype="float32"
    )

    @cache
    def decoder(mode: str) -> specdec.SpeculativeDecoder:
        models = pair.target, pair.draft, pair.tokenizer, pair.draft_tokenizer
        return specdec.SpeculativeDecoder(*models, compile=mode, check=False)

    @cache
    def made(mode: str, name: str, call: str) -> Outcome:
        return Outcome(decoder(mode), EIGHT, name, call, max_new_tokens=NEW_TOKENS)

    return made


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_options_give_the_eager_outcome(outcome: Callable[[str, str, str], Outcome], name: str, mode: str) -> None:
    """Drafts come out the same but for rounding, after which a draft may prefer another of two tokens that are about as
    likely: so texts are equal, and what is accepted nearly so."""
    for call in ("greedy", "sampled") if mode in ("off", "graph") else ("greedy",):
        found, eager = outcome(mode, name, call), outcome("off", name, call)
        assert found.token_ids == eager.token_ids
        assert found.finish_reasons == eager.finish_reasons
        for report in found.compile.values():
            assert report["mode"] == mode
            assert "failure" not in report
        assert found.counts["tokens_per_round"] == pytest.approx(eager.counts["tokens_per_round"], rel=0.1)
        if call == "greedy":
            assert found.token_ids == outcome("off", "plain", call).token_ids


@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_target_and_draft_on_different_devices(devices: tuple[str, str], temperature: float) -> None:
    mixed = specdec.SpeculativeDecoder.from_pretrained(
        "demo-target", "demo-draft", device=devices[0], draft_device=devices[1], dtype="float32", draft_dtype="float32"
    )
    options = {"max_new_tokens": 24, "temperature": temperature, "acceptance": "match", "seed": 5}
    options["draft_length"] = "given"  # chosen lengths would be none: a draft on a CPU is as slow as a target on a GPU
    out = mixed.generate(PROMPTS, **options)
    assert out.token_ids == mixed.generate(PROMPTS, strategies=[], **options).token_ids
    assert out.stats.accepted_tokens > 0


@pytest.mark.parametrize("mode", ["off", "graph"])
def test_float32_on_the_gpu_equals_transformers_generate(mode: str) -> None:
    dec = specdec.SpeculativeDecoder.from_pretrained(
        "demo-target", "demo-draft", device="cuda", dtype="float32", compile=mode
    )
    ids = [dec.tokenizer(p)["input_ids"] for p in PROMPTS]
    out = dec.generate(ids, max_new_tokens=48, ignore_eos=True)
    for row, prompt in enumerate(ids):
        x = torch.tensor([prompt], device="cuda")
        model = dec.target.model
        reference = model.generate(
            x, attention_mask=torch.ones_like(x), max_new_tokens=48, min_new_tokens=48, do_sample=False, pad_token_id=0
        )
        assert out.token_ids[row] == reference[0, len(prompt) :].tolist()


@pytest.mark.parametrize("batch", [1, 3])
def test_bfloat16_is_exact_by_default(decoder: specdec.SpeculativeDecoder, batch: int) -> None:
    for options in ({}, {"temperature": 0.8, "acceptance": "match"}):
        call = {"max_new_tokens": 64, "ignore_eos": True, "batch_size": batch, **options}
        plain = decoder.generate(PROMPTS, strategies=[], **call)
        fast = decoder.generate(PROMPTS, strategies=["prompt-lookup:n_max=12", "draft-model:n_max=5"], **call)
        assert plain.provenance["exact"]
        assert fast.token_ids == plain.token_ids
        assert fast.stats.accepted_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        {"strategies": []},
        {},
        {"strategies": ["draft-model:n_max=3"]},
        {"strategies": ["draft-model:n_max=3:p_min=0.3"], "temperature": 0.8, "seed": 4},
        {"temperature": 0.8, "seed": 4},
        {"temperature": 0.8, "seed": 4, "strategies": ["draft-model:tree=3x2"]},
        {"strategies": ["prompt-lookup", "draft-model:p_min=0.3"], "output_logprobs": True},
        {"temperature": 0.8, "seed": 4, "strategies": ["draft-model:n_max=3"], **PENALTIES, **OTHERS},
        {"temperature": 0.8, "seed": 4, "strategies": ["draft-model:tree=3x2"], **PENALTIES, **OTHERS},
    ],
)
def test_graphs_give_the_eager_text_at_any_prompt_length(options: dict) -> None:
    eager, graph = (
        specdec.SpeculativeDecoder.from_pretrained(
            "demo-target", "demo-draft", device="cuda", dtype="float32", draft_dtype="float32", compile=mode
        )
        for mode in ("off", "graph")
    )
    for prompts in (PROMPTS, [PROMPTS[0] * 8], [PROMPTS[2] * 40, *PROMPTS[:2]], PROMPTS):
        # Automatic length chooses other drafts where passes cost something else.
        call = {"max_new_tokens": 40, "ignore_eos": True, "draft_length": "given", **options}
        out = graph.generate(prompts, **call)
        assert out.token_ids == eager.generate(prompts, **call).token_ids
        assert out.provenance["compile"]["target"]["mode"] == "graph"
        assert "failure" not in out.provenance["compile"]["target"]
    for _ in range(2):
        again = graph.generate(PROMPTS, **call).provenance["compile"]
    assert {role: report["captured"] for role, report in again.items()} == {"target": 0, "draft": 0}
    assert again["target"]["graphs"] > 0


def test_a_larger_cache_of_an_earlier_call_does_not_change_exact_text(decoder: specdec.SpeculativeDecoder) -> None:
    call = {"max_new_tokens": 48, "ignore_eos": True, "strategies": []}
    fresh = specdec.SpeculativeDecoder(decoder.target.model, None, decoder.tokenizer, compile=decoder.target.mode)
    expected = fresh.generate(PROMPTS, **call).token_ids
    decoder.generate([p * 60 for p in PROMPTS], **call)
    out = decoder.generate(PROMPTS, **call)
    assert decoder.target.pool.idle.capacity > fresh.target.pool.idle.capacity
    assert out.token_ids == expected


def test_a_pass_that_cannot_be_recorded_leaves_a_working_decoder() -> None:
    model = tiny_model("llama").to("cuda", torch.bfloat16)
    model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * float(output.sum() * 0 + 1))
    dec = specdec.SpeculativeDecoder(model, check=False, compile="graph")
    for _ in range(2):
        out = dec.generate([[1, 2, 3], [4, 5]], 16)
    eager = specdec.SpeculativeDecoder(model, check=False, compile="off").generate([[1, 2, 3], [4, 5]], 16)
    assert out.token_ids == eager.token_ids
    assert out.provenance["compile"]["target"]["captured"] == 0
    assert "failure" in out.provenance["compile"]["target"]
    assert torch.randint(0, 9, (4,), device="cuda").shape == (4,)  # the generator is not left in a recording


def test_where_a_rule_waits_for_the_device_passes_are_recorded_without_it() -> None:
    def stands(block: Block) -> torch.Tensor:
        assert block.draft.max().item() >= 0
        return MATCH.accepts(block)

    rule = AcceptanceRule("waiting", "argmax", stands, MATCH.next_token, recordable=True)
    model = tiny_model("llama").to("cuda", torch.bfloat16)
    dec = specdec.SpeculativeDecoder(model, check=False, compile="graph")
    call = {"strategies": ["prompt-lookup"], "acceptance": rule, "ignore_eos": True}
    out = dec.generate([[1, 2, 3], [4, 5]], 16, **call)
    assert out.token_ids == dec.generate([[1, 2, 3], [4, 5]], 16, strategies=[], ignore_eos=True).token_ids
    report = out.provenance["compile"]["target"]
    assert "failure" in report
    assert report["captured"] > 0


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.8, "acceptance": "match"}, {**PENALTIES, **OTHERS}],
)
def test_a_round_is_one_replay_to_draft_and_one_to_verify(options: dict) -> None:
    dec = specdec.SpeculativeDecoder.from_pretrained(
        "demo-target", "demo-draft", device="cuda", dtype="bfloat16", compile="graph"
    )
    call = {"max_new_tokens": 32, "ignore_eos": True, "strategies": ["draft-model"], **options}
    for _ in range(2):  # prompts are recorded when they come again
        dec.generate(PROMPTS, **call)
    with replayed() as counts:
        out = dec.generate(PROMPTS, **call)
    drafts = out.stats.counters["draft-model"].n_call_draft
    assert counts["Verified"] == out.stats.verify_passes
    assert counts["Proposal"] == drafts
    assert counts["PassResult"] <= 2 * len(PROMPTS)
    assert "failure" not in out.provenance["compile"]["target"]


def test_graphs_survive_what_other_graphs_of_the_process_do_to_cublas() -> None:
    """torch.compile frees cuBLAS's workspaces before it records, and torch.cuda.graph gives free memory back."""
    model = tiny_model("llama", hidden_size=512, intermediate_size=2048).to("cuda", torch.bfloat16)
    dec = specdec.SpeculativeDecoder(model, coarsen(model, 0.3), compile="graph", check=False)
    expected = dec.generate([[1, 2, 3], [4, 5]], 32).token_ids
    for _ in range(3):
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        taken = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
        out = dec.generate([[1, 2, 3], [4, 5]], 32)
        assert out.token_ids == expected
        assert out.provenance["compile"]["target"]["graphs"] > 0
        assert all(bool(t.isnan().all()) for t in taken)


@pytest.mark.parametrize("strategies", [[], ["draft-model:n_max=3"], ["draft-model:tree=2x2"], ["prompt-lookup"]])
def test_recorded_passes_over_keys_of_8_bits_give_the_eager_text(strategies: list[str]) -> None:
    model = tiny_model("llama", hidden_size=64).to("cuda", torch.bfloat16)
    draft = coarsen(model, 0.3)
    made = [specdec.SpeculativeDecoder(model, draft, compile=m, kv_cache_dtype="fp8") for m in ("off", "graph")]
    eager, recorded = (dec.generate([[1, 2, 3], [4, 5]], 32, strategies=strategies) for dec in made)
    assert recorded.token_ids == eager.token_ids
    assert "failure" not in recorded.provenance["compile"]["target"]


def test_fused_projections_are_exact() -> None:
    model = tiny_model("llama", hidden_size=64).to("cuda", torch.bfloat16)
    with pytest.warns(DeprecationWarning, match="fuse"):
        dec = specdec.SpeculativeDecoder(model, coarsen(model, 0.3), compile="graph", fuse=True)
    plain = dec.generate([[1, 2, 3], [4, 5]], 32, strategies=[])
    fast = dec.generate([[1, 2, 3], [4, 5]], 32)
    assert plain.provenance["exact"]
    assert fast.token_ids == plain.token_ids


@pytest.mark.parametrize("mode", ["inductor", "max", "auto"])
def test_compiled_passes_are_exact(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.device.graphs.LEAST_LAYERS", 1)
    monkeypatch.setattr("specdec.device.graphs.LEAST_PARAMETERS", 1)
    model = tiny_model("llama", hidden_size=64).to("cuda", torch.bfloat16)
    dec = specdec.SpeculativeDecoder(model, coarsen(model, 0.3), compile=mode)
    plain = dec.generate([[1, 2, 3], [4, 5]], 32, strategies=[])
    fast = dec.generate([[1, 2, 3], [4, 5]], 32)
    assert plain.provenance["exact"]
    for report in fast.provenance["compile"].values():
        assert report["mode"] == ("max" if mode == "auto" else mode)
        assert "reason" not in report
        assert report["graphs"] > 0
        assert "failure" not in report
    assert set(fast.provenance["fused"]) == ({"target", "draft"} if mode != "inductor" else set())
    assert fast.token_ids == plain.token_ids
    assert fast.stats.accepted_tokens > 0
    torch._dynamo.reset()  # what was recorded must not need the compiler's own memory of it
    gc.collect()
    again = dec.generate([[1, 2, 3], [4, 5]], 32)
    assert again.token_ids == plain.token_ids
    assert again.provenance["compile"]["target"]["captured"] <= 2  # prompts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "batched experts"])
def test_content_does_not_change_logits_in_a_fixed_shape(kind: str, dtype: torch.dtype) -> None:
    model = tiny_model("llama" if kind == "llama" else "mixtral", hidden_size=256, intermediate_size=512)
    if kind != "llama":
        model.set_experts_implementation("batched_mm")
    runner = Runner(model.to("cuda", dtype))
    for batch in (1, 8):
        assert content_dependence(runner, 64, batch)["differing"] == 0


def test_an_inflated_model_is_made_on_the_device_and_is_exact() -> None:
    small = tiny_model("llama")
    big = inflate(small, hidden_size=128, layers=6, intermediate_size=256, dtype=torch.bfloat16, device="cuda")
    assert {p.device.type for p in big.parameters()} == {"cuda"}
    dec = specdec.SpeculativeDecoder(big, coarsen(small, 0.3).to("cuda", torch.bfloat16))
    plain = dec.generate([[1, 2, 3], [4, 5]], 32, strategies=[])
    fast = dec.generate([[1, 2, 3], [4, 5]], 32)
    assert plain.provenance["exact"]
    assert fast.token_ids == plain.token_ids
    assert fast.stats.accepted_tokens > 0


def test_a_mixture_of_experts_is_not_claimed_exact() -> None:
    dec = specdec.SpeculativeDecoder(tiny_model("mixtral").to("cuda", torch.bfloat16))
    assert not dec.generate([[1, 2, 3]], max_new_tokens=2).provenance["exact"]
    with pytest.raises(specdec.SpecdecError, match="mixture-of-experts"):
        dec.generate([[1, 2, 3]], exact=True)


@pytest.mark.parametrize("mode", ["off", "graph"])
def test_a_pair_takes_the_memory_that_the_report_predicts(mode: str) -> None:
    """On a target large enough that cuBLAS's workspaces, some tens of megabytes, do not decide."""
    small = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 12}
    large = {"hidden_size": 1024, "intermediate_size": 4096, "vocab": 32000, "max_position_embeddings": 4096}
    gc.collect()  # what earlier tests left behind would be freed in between
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    target = tiny_model("llama", **small, **large).to("cuda", torch.bfloat16)
    draft = tiny_model("llama", **{**small, "num_hidden_layers": 2}, **large).to("cuda", torch.bfloat16)
    dec = specdec.SpeculativeDecoder(target, draft, compile=mode)
    tokens = 4000
    dec.generate([[1] * (tokens - 24)] * 8, 24)
    held = torch.cuda.memory_allocated() - before
    assert held == pytest.approx(dec.report.memory(8, tokens)["total"], rel=0.1)


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@TWO
@pytest.mark.parametrize("strategies", [[], ["draft-model:n_max=3"], ["draft-model:tree=2x2"], ["prompt-lookup"]])
def test_layers_on_two_gpus_give_the_text_of_one(strategies: list[str]) -> None:
    places = {f"model.layers.{i}": i // 12 for i in range(24)} | {"model.norm": 1, "model.rotary_emb": 0}
    places |= {"model.embed_tokens": 0, "lm_head": 0}
    spread = specdec.SpeculativeDecoder.from_pretrained(
        "demo-target", "demo-draft", dtype="float32", draft_dtype="float32", device_map=places, draft_device="cuda:0"
    )
    assert {p.device.index for p in spread.target.model.parameters()} == {0, 1}
    out = spread.generate(PROMPTS, 24, strategies=strategies, ignore_eos=True)
    alone = specdec.SpeculativeDecoder.from_pretrained("demo-target", dtype="float32", strategies=[])
    assert out.token_ids == alone.generate(PROMPTS, 24, ignore_eos=True).token_ids


@TWO
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_on_a_gpu_of_its_own_overlaps_and_drafts_the_same(temperature: float) -> None:
    options = {"temperature": temperature, "seed": 3, "ignore_eos": True, "strategies": ["draft-model:n_max=3"]}
    found = []
    for device in ("cuda:0", "cuda:1"):
        pair = specdec.SpeculativeDecoder.from_pretrained(
            "demo-target", "demo-draft", dtype="float32", draft_dtype="float32", device="cuda:0", draft_device=device
        )
        found.append(pair.generate(PROMPTS[:1], 48, **options))
    assert found[0].token_ids == found[1].token_ids
    assert found[1].provenance["overlap"]["draft-model"]["right"] > 0
    assert not found[0].provenance["overlap"]
