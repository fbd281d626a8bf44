"""Compiled passes: one compilation serves all layers, and the numbers are the model's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

import specdec
from specdec.device.graphs import Choice
from specdec.models import compile_layers
from specdec.models.compile_layers import (
    CompiledFunction,
    CompiledLayers,
    Compiler,
    compiled_forward,
    keep_compiled_code,
    parts_of,
)
from specdec.models.passes import ALL_LAYERS
from specdec.models.runner import Runner, Shapes
from specdec.models.self_test import self_test
from specdec.models.small_matmul_pass import LARGEST, ROWS, RowSums
from specdec.sampling.sampling import best, largest
from tests.helpers.recording import Rerun
from tests.helpers.tiny import tiny_model

SHAPES = Shapes((1, 4), 4, 32)


def passes(runner: Runner, observed: tuple[int, ...] | None = None) -> list[torch.Tensor]:
    """Real logits of two passes with caches of their own, at other positions."""
    found = []
    for start in (0, 4):
        cache = runner.lease(2, 32)
        if start:
            runner.step(cache, SHAPES, torch.arange(8).reshape(2, 4), [0, 0], [4, 4], observed=observed)
        out = runner.step(cache, SHAPES, torch.arange(8).reshape(2, 4) + start, [start] * 2, [4, 3], observed=observed)
        found += [out.logits[0], out.logits[1, :3], *(h[0] for h in out.hidden or ())]
    return found


def compiled(model: Any, backend: Any = "aot_eager", **options: Any) -> Runner:
    runner = Runner(model, **options)
    runner.compiled = compiled_forward(runner.view.model, runner.config, "inductor", backend)
    return runner


@pytest.mark.fast(1)
@pytest.mark.parametrize(("kind", "rotations"), [("llama", 1), ("gemma3", 2), ("mixtral", 1)])
def test_layers_share_one_compilation(kind: str, rotations: int) -> None:
    model = tiny_model(kind)
    counter = CompileCounterWithBackend("aot_eager")
    runner = compiled(model, counter)
    expected = passes(Runner(copy.deepcopy(model)))
    before = [dict(vars(m)) for m in model.modules()]
    for ours, theirs in zip(passes(runner), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert isinstance(runner.compiled, CompiledLayers)
    assert runner.compiled.compiler.whole
    assert counter.frame_count == 3 + rotations  # a layer, the norm behind the last one, rotations, and masks
    assert [dict(vars(m)) for m in model.modules()] == before


def test_fused_layers_share_one_compilation() -> None:
    model = tiny_model("qwen2")
    counter = CompileCounterWithBackend("aot_eager")
    runner = compiled(copy.deepcopy(model), counter, fuse=True)
    for ours, theirs in zip(passes(runner), passes(Runner(model)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 4


def test_compiled_layers_read_keys_of_8_bits() -> None:
    model, counter = tiny_model("llama"), CompileCounterWithBackend("aot_eager")
    ours = passes(compiled(copy.deepcopy(model), counter, kv_cache_dtype="fp8"))
    for one, other in zip(ours, passes(Runner(model, kv_cache_dtype="fp8")), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 4


def test_fused_products_follow_weights_that_were_replaced() -> None:
    """A compiled pass knows the product and not the weights; without renewing it would go on with the old ones."""
    model = tiny_model("llama")
    runner = compiled(model, fuse=True)
    passes(runner)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight = nn.Parameter(layer.self_attn.k_proj.weight.detach().flip(0))
        layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data * 2
    runner.refresh()
    assert runner.fusion is not None
    assert runner.fusion.is_whole
    assert len(runner.fusion) == 6
    for ours, theirs in zip(passes(runner), passes(Runner(copy.deepcopy(model))), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.fast(1)
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_hidden_states_are_the_models_and_cost_no_compilation(kind: str) -> None:
    model = tiny_model(kind)
    counter = CompileCounterWithBackend("aot_eager")
    runner = compiled(copy.deepcopy(model), counter)
    passes(runner)
    expected = passes(Runner(model), observed=ALL_LAYERS)
    for ours, theirs in zip(passes(runner, observed=ALL_LAYERS), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 4
    assert runner.compiled.compiler.whole


def test_what_is_around_the_layers_of_a_large_model_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_layers, "LARGE", 1)
    model = tiny_model("llama")
    counter = CompileCounterWithBackend("eager")
    runner = compiled(copy.deepcopy(model), counter)
    passes(runner)
    expected = passes(Runner(model), observed=ALL_LAYERS)
    for ours, theirs in zip(passes(runner, observed=ALL_LAYERS), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 2  # a layer, and masks


@pytest.mark.full
def test_what_one_model_breaks_another_is_spared() -> None:
    """dynamo gives up code, not functions: models whose layers are the same code do not share it."""
    broken = tiny_model("llama")
    passes(Runner(broken), observed=ALL_LAYERS)  # leaves hooks in the model that dynamo cannot trace
    passes(compiled(broken))
    counter = CompileCounterWithBackend("aot_eager")
    passes(compiled(tiny_model("llama"), counter))
    assert counter.frame_count == 4


def test_a_model_whose_layers_are_not_found_is_compiled_as_a_whole_once_a_shape() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    counter = CompileCounterWithBackend("aot_eager")
    runner = compiled(copy.deepcopy(model), counter)
    assert isinstance(runner.compiled, CompiledFunction)
    for ours, theirs in zip(passes(runner), passes(Runner(model)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert runner.compiled.compiler.whole
    assert counter.frame_count == 2  # and the masks


def test_a_layer_whose_forward_somebody_replaced_is_left_alone() -> None:
    model = tiny_model("llama")
    parts = parts_of(model, 3)
    assert parts is not None
    assert [len(part) for part in parts] == [3, 1, 1]
    model.model.layers[1].forward = model.model.layers[1].forward
    assert parts_of(model, 3) is None


@pytest.mark.fast(1)
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "yarn"])
def test_rotations_that_look_at_how_far_positions_go_are_not_compiled(kind: str) -> None:
    scaling: dict[str, Any] = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    model = tiny_model("llama", rope_parameters=scaling, head_dim=8)
    parts = parts_of(model, 3)
    assert parts is not None
    assert len(parts.rotations) == (kind == "yarn")
    runner = compiled(copy.deepcopy(model))
    for ours, theirs in zip(passes(runner), passes(Runner(model)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert runner.compiled.compiler.whole


@pytest.mark.full
def test_a_layer_that_breaks_the_graph_is_compiled_in_parts(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    expected = passes(Runner(copy.deepcopy(model)))
    for layer in model.model.layers:
        layer.mlp = Breaking(layer.mlp)
    runner = compiled(model)
    for ours, theirs in zip(passes(runner), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert not runner.compiled.compiler.whole
    assert [r.getMessage() for r in caplog.records if "compiled in parts" in r.getMessage()]


@pytest.mark.parametrize(("layers", "mode"), [(3, "max"), (1, "graph")])
def test_auto_compiles_no_model_as_a_whole(layers: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "_choose_mode", lambda self, layers: Choice("max"))
    model = tiny_model("llama", num_hidden_layers=layers)
    runner = Runner(model, compile="auto", recorder=Rerun())
    report = runner.compile_report(runner.recorded)
    assert (runner.mode, runner.compiled is None, "reason" in report) == (mode, mode == "graph", mode == "graph")
    assert runner.pool.coarse == (mode == "max")
    assert Runner(model, compile="max", recorder=Rerun()).mode == "max"


class Breaking(nn.Module):
    """A layer's part that dynamo cannot trace whole."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.inner(x)


def no_kernels(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no kernels\nand more")


@pytest.mark.parametrize("fault", ["backend", "parts"])
def test_what_cannot_be_compiled_is_recorded_alone_and_says_why(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """As `auto` compiles: whole or not at all. Recordings with compiled passes among them are dropped."""
    model = tiny_model("llama")
    expected = specdec.SpeculativeDecoder(copy.deepcopy(model), check=False).generate([[1, 2, 3], [4, 5]], 6).token_ids
    if fault == "parts":
        for layer in model.model.layers:
            layer.mlp = Breaking(layer.mlp)
    dec = specdec.SpeculativeDecoder(model, check=False)
    runner = dec.target = Runner(model, recorder=Rerun())
    runner.mode, backend = "max", no_kernels if fault == "backend" else "eager"
    how: dict[str, Any] = {"parts": False, "give_up": runner._stop_compiling}
    runner.compiled = compiled_forward(runner.view.model, runner.config, "inductor", backend, **how)
    for _ in range(3):  # the second records without compiled code, the third the prompts
        out = dec.generate([[1, 2, 3], [4, 5]], 6, strategies=[])
        report = out.provenance["compile"]["target"]
        assert out.token_ids == expected
        assert (report["mode"], report["graphs"] > 0) == ("graph", True)
        assert report["reason"].startswith("torch.compile: ")
        assert report["captured"] > 0
    assert dec.generate([[1, 2, 3], [4, 5]], 6, strategies=[]).provenance["compile"]["target"]["captured"] == 0
    told = [r.getMessage() for r in caplog.records if r.name == "specdec"]
    assert len(told) == 1
    assert "\n" not in told[0]


def test_what_precedes_the_layers_is_compiled_too() -> None:
    model = tiny_model("gemma3")  # with masks for two kinds of layers
    counter = CompileCounterWithBackend("aot_eager")
    runner = compiled(copy.deepcopy(model))
    runner.compiled.compiler.backend = counter  # what is compiled later has it
    for ours, theirs in zip(passes(runner), passes(Runner(model)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 1
    assert runner.parts[runner.prepare].compiler.whole


@pytest.mark.full
def test_compiled_decoding_writes_the_same_text() -> None:
    model = tiny_model("llama")
    expected = specdec.SpeculativeDecoder(model, check=False).generate([[1, 2, 3], [4, 5]], 12).token_ids
    dec = specdec.SpeculativeDecoder(model, copy.deepcopy(model), check=False)
    dec.target, dec.draft = (compiled(m, recorder=Rerun()) for m in (model, dec.draft.model))
    for strategies in ([], ["draft-model:n_max=3"], ["draft-model:n_max=4:p_min=0.1"]):
        out = dec.generate([[1, 2, 3], [4, 5]], 12, strategies=strategies)
        assert out.token_ids == expected
    assert {f.__name__ for f in dec.draft.parts} == {"prepare", "best", "next_inputs", "_caught_up"}
    assert {f.__name__ for f in dec.target.parts} == {"prepare", "_decide"}
    assert all(part.compiler.whole for runner in (dec.target, dec.draft) for part in runner.parts.values())
    assert out.stats.accepted_tokens > 0


def test_the_self_test_compiles_nothing() -> None:
    counter = CompileCounterWithBackend("eager")
    self_test(compiled(tiny_model("llama"), counter), "target")
    assert counter.frame_count == 0


@pytest.mark.full
def test_drafts_of_all_lengths_share_their_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the shapes of a GPU: five for the target in exact mode, eleven for drafts, and then none for other calls."""
    choose = Shapes.choose
    on_gpu = staticmethod(lambda device, *shape, **more: choose(torch.device("cuda"), *shape, **more))
    monkeypatch.setattr(Shapes, "choose", on_gpu)
    model = tiny_model("llama", max_position_embeddings=4096)
    dec = specdec.SpeculativeDecoder(model, copy.deepcopy(model), check=False, exact=True)
    counter = CompileCounterWithBackend("eager")
    dec.target, dec.draft = (compiled(m, counter, recorder=Rerun()) for m in (model, dec.draft.model))
    dec.target.pool.coarse = dec.draft.pool.coarse = True
    flat = specdec.CostTable((((1.0, 1.02),),), (((0.05, 0.06),),), widths=(1, 17))
    calls = [([], 5), (["draft-model:n_max=5"], 16), (["draft-model:n_max=3"], 16), (["draft-model"], 16)]
    for strategies, count in calls:
        dec.generate([[1 + i % 100 for i in range(60)]], 24, strategies=strategies, ignore_eos=True, costs=flat)
        assert counter.frame_count == count, strategies
    processed: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}
    for i in range(40):  # other lengths of text within the same slots
        options = processed if i % 2 else {}
        dec.generate([[1 + i] * (8 + 7919 * i % 440)], 6 + i % 9, strategies=calls[i % 4][0], costs=flat, **options)
    assert counter.frame_count == 16


@pytest.mark.fast(2)
@pytest.mark.parametrize("width", [7, 1024, 1025, 5000])
def test_the_best_token_is_the_same_in_blocks(width: int) -> None:
    """Ties, nothing but -inf, NaN and infinities included."""
    torch.manual_seed(0)
    logits = torch.randn(9, width).to(torch.bfloat16)
    logits[1] = 0.0
    logits[2] = float("-inf")
    logits[3, width // 2] = float("nan")
    logits[4, -1] = float("inf")
    logits[5, : width - 1] = float("-inf")
    logits[6, width // 3] = logits[6, -1] = 9.0
    token, sound = CompiledFunction(best, Compiler("best", "inductor", "aot_eager"))(logits)
    expected = logits.float()
    assert token.tolist() == expected.argmax(dim=-1).tolist() == best(logits)[0].tolist()
    assert sound.tolist() == expected.amax(dim=-1).isfinite().tolist() == best(logits)[1].tolist()


def in_compiled_code(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`largest`, traced."""
    return torch.compile(lambda given: largest(given, count), backend="aot_eager", fullgraph=True)(scores)


@pytest.mark.parametrize("found", [lambda scores, n: largest(scores, n, blocks=True), in_compiled_code])
@pytest.mark.parametrize("width", [5000, 49152, 128256])
def test_the_largest_are_the_same_in_blocks_and_in_turn(width: int, found: Callable) -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 7, width)
    scores[0, 1, : width - 2] = float("-inf")  # fewer than are asked for, at the end
    scores[0, 2], scores[0, 3, 5] = float("-inf"), float("nan")
    scores[1, 4, [7, width - 1]] = float("inf")
    values, ids = found(scores, 4)
    assert ids.max() < width
    torch.testing.assert_close(values, scores.topk(4).values, rtol=0, atol=0, equal_nan=True)
    exist = values > float("-inf")
    torch.testing.assert_close(scores.gather(-1, ids)[exist], values[exist], rtol=0, atol=0)


def test_compiled_code_is_kept_for_later_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert keep_compiled_code() == tmp_path / "specdec" / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    assert keep_compiled_code() == tmp_path / "own"
    runner = Runner(tiny_model("llama", num_hidden_layers=1), recorder=Rerun())
    assert "cache" not in runner.compile_report(runner.recorded)
    report = compiled(runner.model, "eager").compile_report(runner.recorded)["cache"]
    assert report["found"] >= 0
    assert report["compiled"] >= 0


def with_sums(layer: nn.Linear, x: torch.Tensor) -> torch.fx.GraphModule:
    """The layer's graph after the pass, whose products are still the layer's."""
    graph = make_fx(lambda given: layer(given), tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    RowSums()(graph.graph)
    graph.recompile()
    graph.graph.lint()
    torch.testing.assert_close(graph(x), layer(x))
    return graph


def test_only_small_matrices_are_made_sums_and_no_pass_of_a_target_in_exact_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the number of weights alone, whichever side is long. In exact mode no pass of a target has so few rows."""
    monkeypatch.setattr("specdec.models.small_matmul_pass.LARGEST", 24 * 40)
    for inside, outside, kept in ((24, 40, 0), (40, 24, 0), (25, 40, 1), (24, 41, 1)):
        layer, x = nn.Linear(inside, outside, bias=False), torch.randn(1, 1, inside)
        graph = with_sums(layer, x)
        assert sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes) == kept
    device = torch.device("cuda")
    assert Shapes.choose(device, True, 256).widths[0] > ROWS


def test_which_matrices_of_measured_models_are_made_sums() -> None:
    """The figures are in small_matmul_pass.py: all of a 135M model's, fused, and none of a 6.4B model's."""
    small = [576 * (576 + 2 * 192), 576 * 576, 576 * 2 * 1536, 1536 * 576]
    large = [4096 * 1344, 4096 * 4032, 4096 * 12288, 4096 * 2 * 12288]
    assert max(small) <= LARGEST < min(large)


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_a_few_rows_become_sums(bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 40, bias=bias)
    for rows, kept in ((1, 0), (ROWS, 0), (ROWS + 1, 1)):
        x = torch.randn(1, rows, 24)
        graph = with_sums(layer, x)
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        assert sum(node.target in products for node in graph.graph.nodes) == kept
    assert Compiler("", "max").options["post_grad_custom_pre_pass"].uuid() == RowSums().uuid()
