"""Exact mode: what it rests on, what it refuses, and the benchmark that proves it row by row."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import specdec
from specdec.cli import app
from specdec.config import dump_yaml, load_yaml
from specdec.decoding.acceptance import RULES
from specdec.drafters import make_drafters
from specdec.errors import SpecdecError
from specdec.models.runner import Runner
from specdec.research.exactness.equality import content_dependence
from specdec.research.exactness.run import PARTS, ExactnessConfig, Group, plan, run_exactness
from specdec.research.exactness.summary import cost_of_exact, exact_holds, fastest_plain, rows
from tests.helpers.broken import BROKEN_RULES
from tests.helpers.playing import quoting_ids, random_ids, weaker
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_greedy

ROOT = Path(__file__).resolve().parents[2]
# The embedded draft, two layers deep, as the target, and its coarsened self as the draft.
SMALL = ExactnessConfig(
    target="demo-draft", draft=None, coarsen=0.3, prompts=2, few=2, longest=24, max_new_tokens=12, device="cpu",
    chains={"draft-model": ["draft-model:n_max=3"]},
)  # fmt: skip


def experts(kind: str, width: int = 64) -> Any:
    """A tiny mixture whose experts run in the given way."""
    model = tiny_model("mixtral", hidden_size=width, intermediate_size=4 * width)
    model.set_experts_implementation(kind)
    return model


def products_depend_on_rows(width: int, out: int) -> bool:
    """True if this machine rounds a row of a matrix product differently when there are more rows beside it."""
    x, w = torch.randn(16, width), torch.randn(width, out)
    return any(not torch.equal((x @ w)[:n], x[:n] @ w) for n in range(1, 16))


# -- what exact mode rests on, and what it refuses ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_in_a_fixed_shape_a_tokens_logits_do_not_depend_on_the_rest_of_the_pass(dtype: torch.dtype, batch: int) -> None:
    runner = Runner(tiny_model("llama", hidden_size=64).to(dtype))
    assert content_dependence(runner, 12, batch) == {"compared": 11, "differing": 0, "largest": 0.0}


def test_grouped_experts_do_depend_on_it_and_batched_ones_do_not() -> None:
    """The control of the test above, and why mixtures are refused unless their experts are batched."""
    assert content_dependence(Runner(experts("batched_mm", 128)), 24)["differing"] == 0
    if not products_depend_on_rows(128, 512):
        pytest.skip("this machine rounds a row of a matrix product the same way whatever other rows there are")
    grouped = content_dependence(Runner(experts("eager", 128)), 24)
    assert grouped["differing"] > 0
    assert 0 < grouped["largest"] < 1e-4


@pytest.mark.parametrize("kind", ["eager", "grouped_mm"])
def test_exact_mode_refuses_grouped_experts_by_name(kind: str) -> None:
    decoder = specdec.SpeculativeDecoder(experts(kind), check=False)
    with pytest.raises(SpecdecError, match=r"mixture-of-experts.*batched_mm"):
        decoder.generate([1, 2, 3], 2, exact=True)
    assert not decoder.generate([1, 2, 3], 2).provenance["exact"]


def test_exact_mode_covers_batched_experts() -> None:
    model = experts("batched_mm")
    decoder = specdec.SpeculativeDecoder(model, weaker(model))
    prompts = [quoting_ids(9, 1), random_ids(4, 2)]
    plain = decoder.generate(prompts, 10, strategies=[], exact=True)
    fast = decoder.generate(prompts, 10, strategies=["prompt-lookup", "draft-model:n_max=5"], exact=True)
    assert plain.provenance["exact"]
    assert fast.token_ids == plain.token_ids == [oracle_greedy(model, p, 10) for p in prompts]
    assert fast.stats.accepted_tokens > 0


def test_exact_mode_refuses_quantised_models_by_name() -> None:
    model = tiny_model("llama")
    decoder = specdec.SpeculativeDecoder(model)
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(SpecdecError, match="quantised"):
        decoder.resolve_exact(True)
    assert decoder.resolve_exact("auto") is False


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flex_attention", "paged|sdpa"])
def test_row_20_attention_that_takes_no_4d_mask_is_refused(name: str) -> None:
    with pytest.raises(SpecdecError, match=r"is not supported: a ragged batch needs a 4D mask"):
        specdec.SpeculativeDecoder(tiny_model("llama"), attn_implementation=name)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_row_20_a_model_made_for_such_attention_runs_on_specdecs_own(attention: str) -> None:
    """The choice in the caller's config is left alone, and not used."""
    model = tiny_model("llama")
    text = oracle_greedy(model, [3, 4, 5], 8)
    model.config._attn_implementation_internal = attention
    assert specdec.SpeculativeDecoder(model).generate([3, 4, 5], 8).token_ids[0] == text
    assert model.config._attn_implementation_internal == attention


# -- the benchmark ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    saved: list[int] = []
    result = run_exactness(SMALL, ["batch-8", "sampling"], save=lambda r: saved.append(len(r["groups"])))
    assert saved[:2] == [1, 2]
    return result


@pytest.mark.full
def test_plain_and_speculative_rows_are_compared_in_every_setting(measured: dict[str, Any]) -> None:
    assert exact_holds(measured)
    run = [g for g in measured["groups"] if "runs" in g]
    assert [(g["part"], g["batch"], g["exact"], g["rule"]) for g in run][:3] == [
        ("batch-8", 8, True, None), ("batch-8", 8, False, None), ("sampling", 1, True, "match"),
    ]  # fmt: skip
    for group in run:
        assert group["plain"]["tokens_per_round"] == 1
        drafted = group["runs"]["draft-model"]
        assert (drafted["identical"], drafted["differing"], drafted["reports"]) == (2, [], [])
        assert drafted["tokens_per_round"] > 1
        assert 0 < drafted["acceptance"] < 1
    assert {g["rule"] for g in measured["groups"] if "skipped" in g} == {"coupled"} - set(RULES)
    assert measured["content"]["float32"]["differing"] == 0


@pytest.mark.full
def test_the_document_is_json_without_paths(measured: dict[str, Any]) -> None:
    text = json.dumps(measured, allow_nan=False)
    assert str(ROOT) not in text
    assert str(Path.home()) not in text
    assert {"commit", "versions", "machine", "date", "config", "models"} <= set(measured)
    assert Path(ExactnessConfig(target="/a/b/model").to_dict()["target"]) == Path("model")


@pytest.mark.full
def test_a_lossy_rule_fails_the_benchmark_and_is_called_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The control: a rule that takes every draft, in the place of `match`."""
    monkeypatch.setitem(RULES, "match", BROKEN_RULES["accept-all"])
    config, file = tmp_path / "config.yaml", tmp_path / "out.json"
    config.write_text(dump_yaml(SMALL), encoding="utf-8")
    arguments = ["--config", str(config), "--part", "sampling", "--out", str(file)]
    done = CliRunner().invoke(app, ["bench", "--exactness", *arguments])
    assert done.exit_code == 1
    assert "FAULT" in done.stdout
    result = json.loads(file.read_text(encoding="utf-8"))
    assert not exact_holds(result)
    reports = [r for g in result["groups"] if "runs" in g for r in g["runs"]["draft-model"]["reports"]]
    assert len(reports) >= 2
    assert {report["verdict"] for report in reports} == {"fault"}


def test_an_inflated_target_is_drafted_for_by_its_coarsened_small_self() -> None:
    result = run_exactness(replace(SMALL, inflate="hidden_size=256:layers=3"), ["batch-1"])
    assert exact_holds(result)
    target, draft = result["models"]["target"], result["models"]["draft"]
    assert (target["hidden_size"], target["num_hidden_layers"]) == (256, 3)
    assert (draft["hidden_size"], draft["num_hidden_layers"]) == (192, 2)


def test_what_the_time_limit_keeps_from_running_is_listed_and_proves_nothing() -> None:
    result = run_exactness(SMALL, ["batch-1", "contrast"], time_limit=0)
    assert [g["skipped"] for g in result["groups"]] == ["the time limit was reached"] * 3
    assert not exact_holds(result)


def test_the_parts_cover_what_exactness_promises() -> None:
    groups = plan(ExactnessConfig(), PARTS, "bfloat16")
    assert {(g.batch, g.prompts) for g in groups if g.part in ("batch-1", "batch-8")} == {(1, 100), (8, 100)}
    assert {g.exact for g in groups if g.part == "contrast"} == {True, False}
    assert {(g.rule, g.batch, g.prompts) for g in groups if g.rule} == {
        (rule, batch, 20) for rule in ("match", "coupled") for batch in (1, 8)
    }
    assert [g.dtype for g in groups if g.part == "float16"] == ["float16"]
    with pytest.raises(SpecdecError, match="batch-2"):
        plan(ExactnessConfig(), ["batch-2"], "bfloat16")


def test_the_config_file_is_valid() -> None:
    config = load_yaml(ROOT / "configs" / "exactness.yaml", ExactnessConfig)
    assert config.inflate == "1b"
    assert (config.prompts, config.max_new_tokens, config.draft) == (100, 64, None)
    for chain in config.chains.values():
        assert make_drafters(list(chain), has_draft=True)
    assert config.chains == {k: list(v) for k, v in ExactnessConfig().chains.items()}


# -- the summary --------------------------------------------------------------------------------------------------


def group(exact: bool, tokens_per_second: float, ms: float, identical: int = 3, **changed: Any) -> dict[str, Any]:
    entry = vars(Group("contrast", "bfloat16", 1, 3, exact, ("c",))) | changed
    drafted = {
        "identical": identical, "differing": [], "failed_rows": 0, "tokens_per_second": 30.0, "tokens_per_round": 2.0,
        "acceptance": 0.5, "reports": [{"verdict": "tie"}] * (3 - identical),
    }  # fmt: skip
    return {**entry, "plain": {"tokens_per_second": tokens_per_second, "ms_per_pass": ms}, "runs": {"c": drafted}}


def test_speed_is_quoted_against_the_fastest_plain() -> None:
    groups = [group(True, 18.0, 44.0), group(False, 20.0, 40.0, identical=1)]
    assert fastest_plain(groups, groups[0]) == 20.0
    assert cost_of_exact(groups, groups[0]) == pytest.approx(0.1)
    assert cost_of_exact(groups, groups[1]) is None
    exact, other = (cells for cells, _ in rows({"groups": groups, "config": {"temperature": 0.8}}))
    assert exact[2:] == ["3 of 3", "0", "30.0", "1.50", "2.00", "0.50", "+10.0%"]
    assert other[2:] == ["1 of 3", "2 (explained: 2 tie)", "30.0", "1.50", "2.00", "0.50", "-"]


def test_a_document_without_times_shows_none() -> None:
    timed = [group(True, 18.0, 44.0), group(False, 20.0, 40.0)]
    groups = [
        {**g, "plain": {}, "runs": {"c": {k: v for k, v in g["runs"]["c"].items() if k != "tokens_per_second"}}}
        for g in timed
    ]
    for cells, _ in rows({"groups": groups, "config": {"temperature": 0.8}}):
        assert cells[2:] == ["3 of 3", "0", "-", "-", "2.00", "0.50", "-"]


def test_exact_plain_alone_is_no_measure_of_speed() -> None:
    groups = [group(True, 18.0, 44.0), group(False, 20.0, 40.0, batch=8)]
    assert fastest_plain(groups, groups[0]) is None
    assert cost_of_exact(groups, groups[0]) is None


def test_only_exact_runs_must_be_identical() -> None:
    assert exact_holds({"groups": [group(True, 1, 1), group(False, 1, 1, identical=0)]})
    assert not exact_holds({"groups": [group(True, 1, 1, identical=2)]})
    failed = group(True, 1, 1)
    failed["runs"]["c"]["failed_rows"] = 1
    assert not exact_holds({"groups": [failed]})
    assert not exact_holds({"groups": [group(False, 1, 1)]})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--smoke", "--exactness"), "one of them"),
        (("--smoke", "--target", "demo-target"), "--target is no option of --smoke"),
        (("--exactness", "--quick"), "--quick is no option of --exactness"),
        (("--exactness", "--inflate", "9b"), "9b"),
        (("--exactness", "--part", "batch-2"), "batch-2"),
        (("--exactness", "--config", "none.yaml"), "none.yaml"),
    ],
)
def test_bad_options_of_bench_are_named(arguments: tuple[str, ...], named: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2
    assert named in done.stderr
