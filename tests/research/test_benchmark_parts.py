"""Parts of `specdec bench CONFIG` alone: configs, prompts, traces, targets, other implementations."""

from __future__ import annotations

import copy
import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from specdec import SpeculativeDecoder
from specdec.cli import app
from specdec.cli.bench import bench_config
from specdec.config import from_dict, load_yaml
from specdec.decoding.provenance import hash_ids, hash_template
from specdec.drafters import Draft
from specdec.errors import SpecdecError
from specdec.files.own_code import search_folder
from specdec.research.bench import profile, run, targets
from specdec.research.bench.config import BenchConfig, DataChoice, Scenario, Target
from specdec.research.bench.contenders import Own, make_contender
from specdec.research.bench.contenders.base import until_end
from specdec.research.bench.contenders.hf import left_padded
from specdec.research.bench.document import warned
from specdec.research.bench.pair import Item, Pair, items, long_rows
from specdec.research.bench.passes import PassCosts
from specdec.research.bench.scenario import ScenarioRun
from specdec.research.models import smollm2
from specdec.research.models.choice import ModelChoice, Models, bytes_read, parameter_bytes, placed
from specdec.research.models.inflate import coarsen
from specdec.research.prompts.datasets import load_prompts
from tests.helpers.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("bench_*.yaml"))
search_folder(ROOT / "configs")  # for other_libraries.py
PLAIN: dict[str, Any] = {"contenders": {"plain": {"kind": "specdec"}}, "scenarios": {"one": {}}}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair.build(ModelChoice(device="cpu"))


def test_a_benchmark_keeps_keys_and_values_as_its_file_or_the_command_line_says(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without exact mode the texts of chains then need not be plain decoding's, in float32 either."""
    monkeypatch.setattr(SpeculativeDecoder, "_self_test", lambda self: None)
    models = Models(pair.target, pair.draft, pair.tokenizer, None, pair.device, "float32")
    monkeypatch.setattr(ModelChoice, "load", lambda self: models)
    file = tmp_path / "bench.yaml"
    file.write_text(yaml.safe_dump({**PLAIN, "models": {"device": "cpu", "kv_cache_dtype": "fp8"}}))
    config = bench_config(file, {})
    assert config.models.kv_cache_dtype == config.to_dict()["models"]["kv_cache_dtype"] == "fp8"
    assert bench_config(file, {"kv_cache_dtype": "fp8_e5m2"}).models.kv_cache_dtype == "fp8_e5m2"
    built = Pair.build(config.models)
    assert built.decoder("off", "auto").target.kv_cache_dtype == "fp8"
    for exact, must in (("auto", False), (True, True)):
        options: dict[str, Any] = {"kind": "specdec", "exact": exact}
        order = [make_contender(name, {**options, "strategies": s}) for name, s in (("plain", ()), ("own", "suffix"))]
        for contender in order:
            contender.enter(built)
        scenario = ScenarioRun("one", Scenario(), built, [], order, None, lambda what: None)
        assert scenario._plain_for(order[1]) == ("plain", must)


class Useless:
    """Drafts a token that the target hardly ever writes."""

    name = "useless"

    def begin(self, row: int, prompt: Any) -> None:
        pass

    def draft(self, requests: Any) -> list[Draft]:
        return [Draft([1]) for _ in requests]

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        pass


@pytest.mark.full
def test_drafts_that_contribute_nothing_are_named_by_all_calls_of_a_scenario_together(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call alone is too short to tell. A mode that this machine does not have is named too."""
    monkeypatch.setattr(Own, "passes", property(lambda self: ("off", "auto")))  # one decoder
    options: dict[str, Any] = {"plain": {}, "useless": {"strategies": [Useless()], "compile": "graph"}}
    order = [make_contender(name, {"kind": "specdec", **given}) for name, given in options.items()]
    for contender in order:
        contender.enter(pair)
    monkeypatch.setattr("specdec.research.bench.scenario.pass_costs", lambda *arguments: PassCosts(1.0, 1.0, 0.0))
    calls = [Item((str(i),), ((5 + i, 6, 7, 5 + i, 6),)) for i in range(3)]
    setting = Scenario(prompts=3, max_new_tokens=36, repeats=1, ignore_eos=True)
    run = ScenarioRun("one", setting, pair, calls, order, None, lambda what: None)
    found = run.run()["contenders"]
    [drafts, *modes] = found["useless"]["warnings"]
    assert re.match("strategy 'useless' contributes nothing: 0 of 1[0-9]{2} drafted tokens", drafts)
    run_as = "run with compile='off' in place of 'graph': the model does not allow it"
    assert modes == [f"passes of the {role} {run_as}" for role in ("target", "draft")]
    assert "warnings" not in found["plain"]
    assert all(not out.stats.hardly_accepted() for (name, _), out in run.firsts.items() if name == "useless")
    assert warned({"scenarios": {"one": {"contenders": found}}}) == [
        f"one: useless: {line}" for line in (drafts, *modes)
    ]


def test_bench_prints_the_warnings_of_every_kind_once_on_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    suites = {"s": {"skipped": "no network"}, "t": {"skipped": "no", "warnings": {"speculative": ["a", "b"]}}}
    monkeypatch.setattr("specdec.research.bench.smoke.run_smoke", lambda *arguments: {"suites": suites})
    monkeypatch.setattr("specdec.research.bench.smoke.equal", lambda result: True)
    done = CliRunner().invoke(app, ["bench", "--smoke", "--json"])
    assert [line.partition("t: ")[2] for line in done.stderr.splitlines()] == ["speculative: a", "speculative: b"]
    group = {"part": "sampling", "dtype": "float32", "batch": 8, "exact": True, "rule": "match"}
    groups = [
        {**group, "runs": {"chain": {"warnings": ["c"]}, "late": {"skipped": "late"}}},
        {**group, "skipped": "no"},
    ]
    assert warned({"groups": groups}) == ["sampling, float32, batch 8, exact, match: chain: c"]


# -- configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configs_name_contenders_figures_and_prompts_that_there_are(path: Path, tmp_path: Path) -> None:
    """A head that another config trains stands for itself: the embedded one is read in its place."""
    (tmp_path / path.name).write_text(path.read_text().replace("runs/eagle3_smollm2/head-6b", "demo-head"))
    config = load_yaml(tmp_path / path.name, BenchConfig)
    config.check_targets()
    run._check(config, {name: make_contender(name, options) for name, options in config.contenders.items()})
    for scenario in config.scenarios.values():
        assert len(load_prompts(config.data.dataset, config.data.categories, scenario.prompts)) == scenario.prompts


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scenario": {}}, "scenario"),
        ({"scenarios": {}}, "contenders and scenarios"),
        ({"models": {"inflat": "1b"}}, "inflat"),
        ({"models": {"dtype": "int8"}}, "int8"),
        ({"data": {"longest": 0}}, "longest"),
        ({"scenarios": {"one": {"contenders": ["nobody"]}}}, "nobody"),
        ({"scenarios": {"one": {"prompts": 3, "batch": 2}}}, "do not fill"),
        ({"passes": {"widths": [0]}}, "widths"),
        ({"profile": {"contenders": ["plain"], "scenario": "three"}}, "three"),
        ({"costs": {"contenders": ["nobody"]}}, "nobody"),
        ({"costs": {"widths": [2, 4]}}, "from 1"),
        ({"costs": {"widths": [1]}}, "2 or more"),
        ({"costs": {"batches": []}}, "1 or more"),
        ({"costs": {"contexts": [64, 32]}}, "ascend"),
        ({"data": 5}, "data: expected a mapping"),
        ({"reference": "nobody"}, "nobody"),
        ({"targets": {"t": {"value": "scenarios/one/plain/tokens_per_second"}}}, "at_least or at_most"),
    ],
)
def test_a_faulty_config_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecdecError, match=named):
        from_dict(BenchConfig, {**PLAIN, **change}, "bench.yaml")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kind": "specdek"}, "specdec"),
        ({"kind": "other_libraries:Economise"}, "Economize"),
        ({"kind": "other_libraries:dataclass"}, "no subclass of Contender"),
        ({"kind": "specdec", "strategy": "suffix"}, "strategies"),
        ({"kind": "specdec", "strategies": ["sufix"]}, "suffix"),
        ({"kind": "specdec", "compile": "fast"}, "fast"),
        ({"kind": "specdec", "strategies": 5}, "5 is not a strategy"),
        ({"kind": "specdec", "generate": {"temprature": 1}}, "temperature"),
        ({"kind": "transformers", "cache": "dynamic"}, "dynamic"),
        ({"kind": "transformers", "generate": 3}, "generate"),
        ({"kind": "other_libraries:Economize", "technique": "jump"}, "technique"),
    ],
)
def test_a_faulty_contender_is_named_before_anything_is_loaded(options: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecdecError, match=named):
        make_contender("c", options)


def test_a_target_that_nothing_can_give_is_refused_at_once() -> None:
    config = from_dict(BenchConfig, PLAIN, "bench.yaml")
    for path in (
        "scenarios/two/plain/tokens_per_second",
        "scenarios/one/hf/tokens_per_second",
        "passes/plain/x/ms",
        "x",
    ):
        with pytest.raises(SpecdecError, match=path):
            replace(config, targets={"t": Target(path, at_least=1)}).check_targets()


def test_the_reference_must_be_plain_decoding() -> None:
    config = from_dict(BenchConfig, {**PLAIN, "contenders": {"plain": {"kind": "transformers"}}}, "bench.yaml")
    with pytest.raises(SpecdecError, match="plain decoding"):
        run.run_bench(config, "x")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"models": {"draft": "demo-draft", "coarsen": 0.5}}, ("models", "coarsen=0.5", "draft='demo-draft'")),
        ({"contenders": {"plain": {"kind": "specdec", "generate": {"ignore_eos": True}}}}, ("plain", "ignore_eos")),
        ({"contenders": {"plain": {"kind": "specdec", "generate": {"acceptance": "no"}}}}, ("acceptance", "'no'")),
        (
            {"contenders": {**PLAIN["contenders"], "x": {"kind": "transformers", "assistant": True, "lookup": 3}}},
            ("x", "assistant", "lookup"),
        ),
        (
            {"contenders": {**PLAIN["contenders"], "x": {"kind": "transformers", "assistant_tokens": 3}}},
            ("x", "assistant_tokens"),
        ),
    ],
)  # fmt: skip
def test_keys_of_a_benchmark_that_have_no_effect_are_refused_before_models_are_built(
    change: dict[str, Any], parts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pair, "build", lambda choice: pytest.fail("a model was built"))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**PLAIN, **change}))
    done = CliRunner().invoke(app, ["bench", str(tmp_path / "c.yaml")])
    assert done.exit_code == 2, done.output
    assert len(done.stderr.strip().splitlines()) == 1
    assert all(part in done.stderr for part in parts), done.stderr


def test_a_draft_on_the_command_line_takes_the_place_of_the_coarsened_target(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**PLAIN, "models": {"draft": None, "coarsen": 0.5}}))
    assert bench_config(tmp_path / "c.yaml", {}, [], None).models.coarsen == 0.5
    models = bench_config(tmp_path / "c.yaml", {"draft": "d"}, [], None).models
    assert (models.draft, models.coarsen) == ("d", None)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(PLAIN))
    models = bench_config(tmp_path / "c.yaml", {"target": "t"}, [], None).models
    assert (models.draft, models.coarsen) == (None, 0.2)


# -- models and prompts ----------------------------------------------------------------------------------------------


def test_an_inflated_target_is_drafted_for_by_its_small_coarsened_self() -> None:
    built = Pair.build(ModelChoice(draft=None, inflate="hidden_size=256:layers=25", coarsen=0.3, device="cpu"))
    small = Pair.build(ModelChoice(device="cpu")).target
    ids = list(range(7, 19))
    facts = built.facts()
    assert facts["target"]["hidden_size"] == 256
    assert facts["draft"]["hidden_size"] == 192
    worse = dict(coarsen(small, 0.3).named_parameters())
    assert all((p == worse[name]).all() for name, p in built.draft.named_parameters())
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits for model in (built.target, small)]
    assert torch.allclose(*logits, atol=1e-3)


def test_a_pass_reads_all_weights_but_an_embedding_of_its_own(pair: Pair) -> None:
    assert bytes_read(pair.target) == parameter_bytes(pair.target)  # tied: the embedding is the head
    config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, tie_word_embeddings=False)  # fmt: skip
    model = LlamaForCausalLM(config)
    assert bytes_read(model) == parameter_bytes(model) - 50 * 16 * 4


def test_calls_are_full_and_the_longest_comes_first(pair: Pair) -> None:
    calls = items(pair, DataChoice("humaneval", longest=40), Scenario(batch=2, prompts=6))
    assert [len(call.prompts) for call in calls] == [2, 2, 2]
    assert calls[0].longest == max(len(p) for call in calls for p in call.prompts) <= 44
    assert len({name for call in calls for name in call.ids}) == 6


def test_a_scenario_says_which_ids_and_which_chat_template_its_prompts_are(pair: Pair) -> None:
    """Of what contenders are given, with a template, without one, and where a context is filled up."""
    chatty = copy.deepcopy(pair.tokenizer)
    chatty.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    found = {}
    for name, tokenizer, context in (("bare", pair.tokenizer, None), ("chat", chatty, None), ("long", chatty, 300)):
        setting = Scenario(batch=2, prompts=2, max_new_tokens=2, repeats=1, context=context)
        calls = items(replace(pair, tokenizer=tokenizer), DataChoice("humaneval", longest=64), setting)
        made = ScenarioRun(name, setting, pair, calls, [], None, lambda what: None).run()
        assert made["prompt_hashes"] == [hash_ids(p) for call in calls for p in call.prompts]
        assert len(made["prompt_hashes"]) == len(made["prompts"]) == 2
        found[name] = made
    assert found["chat"]["chat_template"] == hash_template(chatty)
    assert found["bare"]["chat_template"] is found["long"]["chat_template"] is None
    hashes = [h for made in found.values() for h in made["prompt_hashes"]]
    assert len(set(hashes)) == len(hashes)


def test_long_contexts_are_of_the_length_asked_for_and_end_with_the_prompt(pair: Pair) -> None:
    every = load_prompts("humaneval")
    rows = long_rows(every[:3], every, pair.tokenizer, 700)
    assert [len(row) for row in rows] == [700] * 3
    assert len({tuple(row[:100]) for row in rows}) == 3
    for row, prompt in zip(rows, every, strict=False):
        assert pair.tokenizer.decode(row).endswith(prompt.text + "\n\n")
    with pytest.raises(SpecdecError, match="fewer than the context of 5000"):
        long_rows(every[:1], every[:4], pair.tokenizer, 5000)


def test_padding_is_on_the_left() -> None:
    ids, mask = left_padded([[5, 6, 7], [8]], torch.device("cpu"))
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert until_end([4, 2, 0, 0], [2]) == [4, 2]
    assert until_end([4, 2, 0, 0], []) == [4, 2, 0, 0]


def test_the_small_model_comes_from_a_folder_a_file_or_its_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready"
    ready.mkdir()
    (ready / "config.json").write_text("{}")
    assert smollm2.folder_of(ready) == ready
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    content = [bytes([n]) * 10_000_001 for n in (1, 2)]
    for name, part in zip(("part00", "part01"), content, strict=True):
        (pieces / name).write_bytes(part)
    (pieces / "notes.txt").write_text("not a piece")
    monkeypatch.setenv("SPECDEC_SMOLLM2", str(ready))
    assert smollm2.fetch_folder() == ready
    monkeypatch.setattr(smollm2, "fetch_folder", lambda folder: folder / smollm2.FILE_NAME)
    with pytest.raises(SpecdecError, match="SHA-256"):
        smollm2.folder_of(pieces, tmp_path / "cache")
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(b"".join(content)).hexdigest())
    assert smollm2.folder_of(pieces, tmp_path / "cache").read_bytes() == b"".join(content)
    with pytest.raises(SpecdecError, match="neither"):
        smollm2.folder_of(tmp_path / "nowhere")


# -- traces ----------------------------------------------------------------------------------------------------------


def event(cat: str, name: str, start: float, length: float, correlation: int | None = None) -> dict[str, Any]:
    more = {} if correlation is None else {"args": {"correlation": correlation}}
    return {"cat": cat, "name": name, "ts": start, "dur": length, "ph": "X", **more}


TRACE = [
    event("user_annotation", "specdec: rounds", 0, 100),
    event("user_annotation", "specdec: drafting", 0, 30),
    event("user_annotation", "specdec: draft model", 5, 10),
    event("user_annotation", "specdec: acceptance", 30, 40),
    event("user_annotation", "specdec: verify model", 32, 20),
    event("cuda_runtime", "cudaGraphLaunch", 6, 1, 1),  # two kernels of one graph
    event("cuda_runtime", "cudaLaunchKernel", 20, 1, 2),
    event("cuda_driver", "cuLaunchKernelEx", 33, 1, 3),
    event("cuda_runtime", "cudaMemcpyAsync", 60, 1, 4),
    event("cuda_runtime", "cudaStreamSynchronize", 72, 20),
    event("cuda_runtime", "cudaLaunchKernel", 200, 1, 5),  # after the rounds
    event("kernel", "a", 10, 10, 1),
    event("kernel", "b", 20, 10, 1),
    event("kernel", "c", 25, 10, 2),  # overlaps with b
    event("kernel", "d", 50, 30, 3),
    event("gpu_memcpy", "e", 85, 5, 4),
    event("kernel", "f", 300, 50, 5),
]
GAPS = [
    event("user_annotation", "specdec: rounds", 0, 100),
    event("user_annotation", "specdec: draft graph", 0, 30),
    event("cuda_runtime", "cudaGraphLaunch", 6, 1, 1),
    event("cuda_runtime", "cudaGraphLaunch", 20, 1, 2),
    event("cuda_runtime", "cudaLaunchKernel", 25, 1, 3),
    event("kernel", "a", 10, 2, 1),
    event("kernel", "b", 18, 2, 1),  # the gap before it is inside the graph
    event("kernel", "c", 26, 4, 2),
    event("kernel", "d", 32, 3, 3),
]


def test_kernels_belong_to_the_part_that_launched_them() -> None:
    found = profile.table(TRACE, 2, True)
    shares = {part: (row["ms"] * 2e3, row["count"] * 2) for part, row in found["parts"].items()}
    assert shares == {
        "draft model": (20, 2), "verify model": (30, 1), "drafting": (10, 1), "acceptance": (5, 1),
    }  # fmt: skip
    assert found["span_ms"] == pytest.approx(80 / 2e3)
    assert found["idle_ms"] == pytest.approx((80 - 25 - 30 - 5) / 2e3)  # the overlap counts once
    assert found["idle_share"] == pytest.approx(20 / 80)
    assert found["outside_models_share"] == pytest.approx(1 - 50 / 80)
    assert found["outside_graphs_share"] == pytest.approx(1 - 20 / 80)
    assert found["launches"] == 3 / 2
    assert found["by_kernel"]["draft model"] == [
        {"kernel": "a", "count": 0.5, "us": 10.0}, {"kernel": "b", "count": 0.5, "us": 10.0},
    ]  # fmt: skip
    assert [row["kernel"] for row in found["by_kernel"]["acceptance"]] == ["e"]
    assert found["host_waits_ms"] == pytest.approx(20 / 2e3)


def test_a_graph_reaches_from_its_first_kernel_to_its_last() -> None:
    found = profile.table(GAPS, 1, True)
    assert found["outside_graphs_share"] == pytest.approx(1 - (10 + 4) / 25)
    eager = [{**e, "name": e["name"].replace("Graph", "")} for e in GAPS]
    assert profile.table(eager, 1, True)["outside_graphs_share"] is None


def test_host_parts_do_not_count_what_is_inside_them() -> None:
    found = profile.table(TRACE, 1, False)
    spent = {part: row["ms"] * 1e3 for part, row in found["parts"].items()}
    assert spent == {"draft model": 10, "verify model": 20, "drafting": 20, "acceptance": 20, "between": 30}
    assert found["span_ms"] == pytest.approx(0.1)


# -- targets ---------------------------------------------------------------------------------------------------------


def test_the_best_of_several_divisors_counts() -> None:
    speeds = {"a": 10.0, "b": 4.0, "c": 8.0}
    entries: dict[str, Any] = {n: {"tokens_per_second": {"value": v}} for n, v in speeds.items()}
    result = {"scenarios": {"s": {"contenders": {**entries, "d": {"skipped": "not installed"}}, "runs": []}}}
    over = [f"scenarios/s/{n}/tokens_per_second" for n in "bcd"]
    judged = targets.judge(
        result,
        {
            "of all": Target("scenarios/s/a/tokens_per_second", over, at_least=1.2),
            "least": Target("scenarios/s/a/tokens_per_second", over, "min", at_most=2.4),
            "nobody": Target("scenarios/s/a/tokens_per_second", over[2:], at_least=1),
        },
    )
    assert judged["of all"]["figure"] == pytest.approx(10 / 8)
    assert judged["of all"]["over"].split("/")[2] == "c"
    assert judged["of all"]["met"] is True
    assert judged["least"]["figure"] == pytest.approx(2.5)
    assert judged["least"]["met"] is False
    assert judged["nobody"]["met"] is None
    assert "not installed" in judged["nobody"]["reason"]


# -- other implementations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Economize", "Flashspec"])
def test_what_is_not_installed_says_so(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "install specdec[bench]" in str(make_contender("c", {"kind": f"other_libraries:{kind}"}).refuses(1))


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "other_libraries:Economize"},
        {"kind": "other_libraries:Economize", "technique": "draft-model", "cycle_length": 4},
        {"kind": "other_libraries:Economize", "technique": "lookup"},
        {"kind": "other_libraries:Economize", "technique": "hybrid", "max_drafts": 2},
        {"kind": "other_libraries:Flashspec"},
        {"kind": "other_libraries:Flashspec", "strategy": "bandit", "gamma": 3},
    ],
    ids=lambda options: "-".join(str(v) for v in options.values()),
)
def test_other_implementations_write_plain_decodings_ids(pair: Pair, options: dict[str, Any]) -> None:
    other, plain = make_contender("other", options), make_contender("plain", {"kind": "specdec"})
    if other.version() is None:
        pytest.skip(f"{other.kind} is not installed")
    call = items(pair, DataChoice("humaneval", longest=24), Scenario(prompts=1))[0]
    for contender in (other, plain):
        contender.enter(pair)
    assert other.refuses(1) is None
    output = other.run(call.prompts, 12, True)
    assert output.token_ids == plain.run(call.prompts, 12, True).token_ids
    if options.get("technique") != "plain" and output.figures:
        assert output.figures["accepted_tokens"] <= output.figures["draft_tokens"]


def test_placing_a_model_rounds_its_weights_and_not_its_buffers() -> None:
    model = tiny_model("llama")
    frequencies = model.model.rotary_emb.inv_freq.clone()
    moved = placed(model, torch.device("cpu"), torch.bfloat16)
    assert {p.dtype for p in moved.parameters()} == {torch.bfloat16} == {moved.dtype}
    assert torch.equal(moved.model.rotary_emb.inv_freq, frequencies)
