"""Configs, summaries, the report, plots and `specdec compare`."""

from __future__ import annotations

import html.parser
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

from specdec import SpeculativeDecoder, theory
from specdec.cli import app
from specdec.cli.ablate import print_summary
from specdec.errors import SpecdecError
from specdec.research.ablation import as_rows, merge, plots, report, run_ablation
from specdec.research.ablation.compare import along, candidate_name, compare, compare_config, examine, reasons
from specdec.research.ablation.summary import measured_costs, paired, predicted_speedup, summarise, theoretical_speedup
from specdec.research.ablation.table import first_difference
from specdec.research.ablation.tables import comparison_table, settings_table
from specdec.research.ablation.weak_drafts import pooled
from specdec.research.results import Results
from tests.helpers.browser import browser, find_chromium
from tests.helpers.grid import PROMPTS, grid, save_model, save_pair
from tests.research.test_plots import K1, K2, row

CHROMIUM = find_chromium()
EVIL = '<script>alert(1)</script><img src=http://x.example/a.png onerror=alert(2)> & "quotes" </pre>\x00'


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def finished(pair: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grid with an axis k, two seeds of sampled cells, and a prompt full of HTML."""
    out = tmp_path_factory.mktemp("ablation")
    config = grid(
        pair, prompts=(EVIL, PROMPTS[0], PROMPTS[1]), axes={"k": [1, 3], "seed": [0, 1]},
        strategies={"draft": ["draft-model"], "lookup": ["prompt-lookup:ngram_min=1"]},
        generation={"max_new_tokens": 8, "acceptance": "match", "temperature": 0.7},
    )  # fmt: skip
    run_ablation(config, out)
    assert merge(out) is not None
    return out


# -- drafts that contribute nothing ------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_draft_that_contributes_nothing_is_named_once_a_setting_over_all_its_rows(tmp_path: Path) -> None:
    """No row has the 100 rounds that a call must have; a setting's rows have them together."""
    pair = {"target": save_model(tmp_path / "target"), "draft": save_model(tmp_path / "draft", seed=9)}
    values = {
        "pairs": {"other": pair, "same": {**pair, "draft": pair["target"]}}, "prompts": list(PROMPTS[:4]),
        "strategies": {"draft": ["draft-model:n_max=1"]}, "generation": {"max_new_tokens": 16},
        "axes": {"seed": [0, 1]},
    }  # fmt: skip
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(values))
    done = invoke("ablate", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    [line] = [line for line in done.stderr.splitlines() if "contributes nothing" in line]
    assert line.startswith("warning: other draft: strategy 'draft-model' contributes nothing: ")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert f"warning: other draft: {' '.join(summary['warnings']['other draft'])}" == line
    assert set(summary["warnings"]) == {"other draft"}
    assert "Look at the pair" in line
    assert (tmp_path / "out" / "report.html").read_text().count("contributes nothing") == 1

    config = compare_config(pair["target"], [pair["draft"]], prompts=PROMPTS, max_new_tokens=24)
    [found] = compare(config, tmp_path / "compared")["candidates"]
    assert [reason for reason in found["reasons"] if reason.startswith("strategy 'draft-model' contributes nothing: ")]


def test_skipped_requests_of_all_rows_count_as_those_of_a_call_do() -> None:
    entry = {"records": [["draft-model", 2, 0, None, False, True]], "skipped": {"draft-model": 47 / 3}}
    assert list(pooled([entry] * 6).hardly_accepted()) == ["draft-model"]
    assert not pooled([entry] * 5).hardly_accepted()
    assert not pooled([{"records": [], "status": "error"}]).hardly_accepted()


# -- summary ----------------------------------------------------------------------------------------------------------


def test_seeds_of_a_setting_are_pooled_and_speedups_paired(finished: Path) -> None:
    rows = as_rows(finished)
    summary = summarise(rows)
    entry = summary["settings"]["draft k=3"]
    group = [r for r in rows if r["setting"] == "draft k=3"]
    assert (entry["rows"], entry["prompts"], entry["compared"], entry["differing"]) == (6, 3, 6, 0)
    assert entry["tokens_per_round"]["value"] == pytest.approx(
        sum(r["generated_tokens"] for r in group) / sum(r["rounds"] for r in group)
    )
    plain = [r for r in rows if r["setting"] == "plain"]
    seconds = [sum(r["seconds"] for r in side) for side in (group, plain)]
    assert entry["speedup"]["value"] == pytest.approx(seconds[1] / seconds[0])
    compared = {c["setting"]: c for c in summary["comparisons"]}
    assert set(compared) == {"draft k=3", "lookup k=1", "lookup k=3"}
    assert compared["draft k=3"]["against"] == "draft k=1"
    assert summary["gate"]["passed"]


def test_a_lossy_rule_is_marked_with_its_distance_beside_the_gain(pair: dict[str, str], tmp_path: Path) -> None:
    chain, rules = {"draft": ["draft-model:n_max=3"]}, ["match", "near:delta=1"]
    config = grid(
        pair, prompts=tuple(PROMPTS[:2]), strategies=chain, axes={"acceptance": rules},
        generation={"max_new_tokens": 8, "temperature": 0.9},
    )  # fmt: skip
    run_ablation(config, tmp_path)
    summary = merge(tmp_path)
    assert summary is not None
    rows, entry = as_rows(tmp_path), summary["settings"]["draft near:delta=1"]
    lossy = [r for r in rows if r["lossy"]]
    assert sum(r["distance"] for r in lossy) / 16 == pytest.approx(entry["distance"]["value"])
    assert 0 < entry["distance"]["value"] < 1
    assert all(r["distance"] is None for r in rows if not r["lossy"])
    table = settings_table(summary)
    cells = {row[0]: row[table.heads.index("distance to p")] for row in table.rows}
    assert cells.keys() == {"plain", "draft match", "draft near:delta=1 (lossy)"}
    assert [cells["plain"], cells["draft match"]] == ["-", "-"] != [cells["draft near:delta=1 (lossy)"]] * 2
    old = [{k: v for k, v in r.items() if k != "distance"} for r in rows]
    assert summarise(as_rows(old))["settings"]["draft near:delta=1"]["distance"]["value"] is None
    shown = Results(rows).by("setting").text_table()
    assert "distance to p" in shown.heads


def test_settings_are_compared_with_the_first_of_their_temperature_or_with_a_named_one() -> None:
    rows = []
    for n in range(8):
        for temperature in (0.0, 0.7):
            rows += [
                row(f"{name} T={temperature:g}", f"p{n}", records, temperature=temperature, strategies=name)
                for name, records in (("a", K1), ("b", K2))
            ]
    summary = summarise(rows)
    pairs = [(c["setting"], c["against"]) for c in summary["comparisons"]]
    assert pairs == [("b T=0", "a T=0"), ("b T=0.7", "a T=0.7")]
    named = summarise(rows, "b T=0")["comparisons"]
    assert [(c["setting"], c["against"]) for c in named] == [("a T=0", "b T=0"), ("a T=0.7", "b T=0.7")]
    assert [(r["setting"], r["against"]) for r in Results(rows).against("b T=0")] == [
        (c["setting"], c["against"]) for c in named
    ]
    alone = [r for r in rows if r["setting"] != "b T=0.7"]
    assert [c["setting"] for c in summarise(alone, "b T=0")["comparisons"]] == ["a T=0"], "no pair for the other one"
    penalised = [{**r, "repetition_penalty": 1.0 if r["strategies"] == "a" else 1.2} for r in rows]
    assert summarise(penalised, "b T=0")["comparisons"] == []
    assert named[0]["least_p"] == 2 / 2**8 == named[0]["tokens_per_round"]["p"]
    assert "with 8 prompts no p is below 0.0078" in comparison_table(summary).title
    with pytest.raises(SpecdecError, match="unknown setting 'b T=1'"):
        summarise(rows, "b T=1")


def test_predicted_speedup_is_theory_with_the_measured_figures() -> None:
    names = ("generated_tokens", "rounds", "accepted_tokens", "tested_tokens", "draft_tokens", "drafted_rounds")
    times = {"emitted_tokens": 0.0, "seconds": 0.0, "prefill_seconds": 0.0, "loop_tokens": 0}
    mine = dict(
        zip(names, (300, 100, 200, 250, 400, 100), strict=True), draft_seconds=4.0, verify_seconds=12.0, **times
    )
    plain = dict(zip(names, (300, 300, 0, 0, 0, 0), strict=True), draft_seconds=0.0, verify_seconds=30.0, **times)
    costs = measured_costs([mine], [plain])
    assert costs is not None
    assert costs["acceptance"] == pytest.approx(0.8)
    assert (costs["draft_cost"], costs["width_cost"]) == (pytest.approx(0.1), pytest.approx(0.2))
    assert predicted_speedup(costs) == pytest.approx(3 / (1 + 4 * 0.1 + 0.2))
    assert theoretical_speedup(costs, 4) == pytest.approx(theory.speedup(0.8, 4, 0.1, 0.2))


def test_settings_of_different_batches_are_paired_by_prompt() -> None:
    """Their calls have different prompts: paired by call, prompts would be compared with others."""
    counts = dict.fromkeys(
        ("generated_tokens", "accepted_tokens", "tested_tokens", "draft_tokens", "drafted_rounds", "emitted_tokens",
         "draft_seconds", "verify_seconds", "prefill_seconds", "loop_tokens"), 1.0,
    )  # fmt: skip
    rows = [
        [{"prompt": f"p{i}", "seed": 0, "batch_size": size, "call": i // size, "rounds": i, "seconds": i, **counts}
         for i in range(8)]
        for size in (2, 4)
    ]  # fmt: skip
    mine, other = paired(*rows)
    assert [c["seconds"] for c in mine] == [c["seconds"] for c in other] == list(range(8))
    mine, _ = paired(rows[0], rows[0])
    assert [c["seconds"] for c in mine] == [1, 5, 9, 13]


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


# -- report -----------------------------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """Tags, their attributes and all text of a page, as a browser would find them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_shows_html_in_prompts_as_text_and_fetches_nothing(finished: Path) -> None:
    page = Page()
    page.feed((finished / "report.html").read_text(encoding="utf-8"))
    assert EVIL.replace("\x00", "\ufffd") in page.text
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "base", "a", "form"}
    images = [attributes["src"] or "" for tag, attributes in page.tags if tag == "img"]
    assert len(images) >= 5
    assert all(source.startswith("data:image/svg+xml;base64,") for source in images)
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    policy = [a.get("content") for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert "all 24 comparable rows" in page.text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install one, or name it in SPECDEC_CHROMIUM")
def test_in_a_browser_the_report_shows_html_as_text_and_fetches_nothing(finished: Path, tmp_path: Path) -> None:
    with browser(str(CHROMIUM), tmp_path / "profile") as page:
        page.open(finished / "report.html")
        address, *images = page.requests
        assert address == (finished / "report.html").resolve().as_uri()
        assert all(image.startswith("data:image/svg+xml;base64,") for image in images)
        assert page.errors == []
        assert page.run("document.scripts.length") == 0
        assert EVIL.replace("\x00", "\ufffd") in page.run("document.body.textContent")
        assert page.run("[...document.images].every(i => i.complete && i.naturalWidth > 100)")


def test_the_report_has_every_setting_and_the_config(finished: Path) -> None:
    text = (finished / "report.html").read_text(encoding="utf-8")
    for name in summarise(as_rows(finished))["settings"]:
        assert f"<td>{name}</td>" in text
    assert "max_new_tokens: 8" in text


# -- plots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(plots.PLOTS))
def test_every_plot_takes_a_folder_a_table_or_rows(finished: Path, name: str) -> None:
    import pyarrow.parquet

    rows = as_rows(finished)
    for results in (finished, finished / "table.parquet", pyarrow.parquet.read_table(finished / "table.parquet"), rows):
        axes = plots.PLOTS[name](results).axes[0]
        assert axes.get_xlabel()
        assert axes.get_ylabel()


def test_acceptance_by_position_draws_the_measured_rates(finished: Path) -> None:
    axes = plots.acceptance_by_position(finished).axes[0]
    group = [r for r in as_rows(finished) if r["setting"] == "draft k=3"]
    reached, tested = (sum(r[name][0] for r in group) for name in ("reached", "tested"))
    lines = dict(zip(axes.get_legend_handles_labels()[1], axes.get_legend_handles_labels()[0], strict=True))
    assert lines["draft k=3"].lines[0].get_ydata()[0] == pytest.approx(reached / tested)


def test_the_strategy_share_adds_up(finished: Path) -> None:
    figure = plots.strategy_share_over_time(finished, "draft k=3")
    top = max(float(c.get_paths()[0].vertices[:, 1].max()) for c in figure.axes[0].collections)
    assert top == pytest.approx(1.0)


def test_plots_without_matter_say_so(finished: Path) -> None:
    plain = [r for r in as_rows(finished) if not r["drafts"]]
    with pytest.raises(SpecdecError, match="draft"):
        plots.acceptance_by_position(plain)
    with pytest.raises(SpecdecError, match="axis k"):
        plots.speedup_against_k(plain)
    with pytest.raises(SpecdecError, match="no results table"):
        plots.context_curve(finished / "nothing.parquet")
    with pytest.raises(SpecdecError, match="no drafting setting"):
        plots.strategy_share_over_time(finished, "plain")


def test_an_ablation_whose_rows_all_failed_says_so_in_its_report_and_on_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run_ablation(grid({"target": str(tmp_path / "empty")}, strategies={"x": ["prompt-lookup"]}), tmp_path / "out")
    done = invoke("ablate", "merge", str(tmp_path / "out"))
    assert done.exit_code == 1
    assert "Every row failed" in done.stdout
    assert "cannot load" in done.stdout
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Every row failed" in page
    for plot in plots.PLOTS.values():
        assert f"Not drawn: {plot.__name__}: every row of the results table failed" in page
    with pytest.raises(SpecdecError, match="every row"):
        plots.acceptance_by_position(tmp_path / "out")


def test_a_report_says_why_a_plot_is_not_in_it(pair: dict[str, str], tmp_path: Path) -> None:
    run_ablation(grid(pair, strategies={}, prompts=PROMPTS[:1]), tmp_path)
    merge(tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Not drawn: acceptance_by_position: the results table has no row with a draft." in page
    assert "Not drawn: speedup_against_k: the results table has no drafting setting with an axis k" in page


# -- the command line -------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_merge_prints_the_table_and_json(finished: Path) -> None:
    done = invoke("ablate", "merge", str(finished), "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["complete"] is True
    assert document["gate"]["passed"] is True
    console = Console(record=True, width=120, file=io.StringIO())
    print_summary(console, document)
    shown = console.export_text()
    assert "draft k=3" in shown
    assert "all 24 comparable rows are plain decoding's" in shown
    first = {"setting": "draft k=3", "prompt": "prompt/1", "seed": 0, "first_difference": 4}
    print_summary(console, {**document, "gate": {**document["gate"], "differing": [first]}})
    assert "EQUALITY GATE FAILED: 1 of 24" in console.export_text()


@pytest.mark.full
def test_merge_takes_a_baseline(finished: Path) -> None:
    named = invoke("ablate", "merge", str(finished), "--baseline", "lookup k=1")
    assert "lookup k=1" in named.stdout
    assert "no p is below" in " ".join(named.stdout.split())
    assert "known" in invoke("ablate", "merge", str(finished), "--baseline", "nothing").stderr
    assert invoke("ablate", "merge", str(finished)).exit_code == 0


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    for arguments in (
        ("ablate", str(tmp_path / "none.yaml"), "--out", str(tmp_path)),
        ("ablate", "--out", str(tmp_path), str(tmp_path / "none.yaml")),
        ("ablate", "merge", str(tmp_path)),
        ("compare", "--target", "demo-target"),
        ("compare", "--target", "demo-target", "--draft", "demo-draft", "--draft", "demo-draft"),
        ("compare", "--target", "demo-target", "--strategy", "suffix,draft-model:n_max=2"),
        ("compare", "--target", "demo-target", "--draft", "demo-draft", "--option", "strategies=x"),
        (
            "compare",
            "--target",
            "demo-target",
            "--draft",
            "demo-draft",
            "--temperature",
            "0",
            "--option",
            "temperature=1",
        ),
        ("generate", "--target", "demo-target", "--prompt", "a", "--seed", "1", "--option", "seed=2"),
        ("trace", "record", "--target", "demo-target", "--out", "x", "--seed", "1", "--option", "seed=2"),
    ):
        done = invoke(*arguments)
        assert done.exit_code == 2, (arguments, done.output)
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


# -- compare ----------------------------------------------------------------------------------------------------------


def test_candidates_have_rules_of_their_own_and_one_that_is_refused_stops_no_other() -> None:
    refused: dict[str, str] = {}
    chains = ["draft-model:tree=2x1@typical:eps=0.3", "suffix,prompt-lookup", "eagle3", "suffix @ no_rule", "suffx"]
    config = compare_config("demo-target", ["demo-draft", "./none"], chains, prompts=["a"], refused=refused)
    ran = {candidate_name(c.pair, c.chain): c for c in config.expand() if c.strategies}
    assert list(ran) == ["demo-draft", f"demo-draft {chains[0]}", "suffix,prompt-lookup"]
    assert [c.generation["acceptance"] for c in ran.values()] == ["leviathan", "typical:eps=0.3", "leviathan"]
    assert [s["name"] for s in ran["suffix,prompt-lookup"].strategies] == ["suffix", "prompt-lookup"]
    assert set(refused) == {"none", f"none {chains[0]}", *chains[2:]}
    for name, word in {"none": "./none", "eagle3": "head", "suffix @ no_rule": "no_rule", "suffx": "'suffix'"}.items():
        assert word in refused[name]
    with pytest.raises(SpecdecError, match="draft"):
        compare_config("demo-target", [], ["draft-model"], prompts=["a"], refused={})


@pytest.mark.full
def test_compare_ranks_and_explains(pair: dict[str, str], tmp_path: Path) -> None:
    """The target as its own draft is always right and never pays; a strategy beside it needs no draft."""
    arguments = (
        "compare", "--target", pair["target"], "--draft", pair["target"], "--draft", pair["draft"], "--strategy",
        "prompt-lookup:ngram_min=1", "--strategy", "draft-model:tree=2x1@match", "--strategy", "suffx", "--k", "2",
        "--prompt", PROMPTS[0], "--prompt", PROMPTS[3], "--max-new-tokens",
        "12", "--acceptance", "coupled", "--out", str(tmp_path), "--json", "--baseline", "draft",
    )  # fmt: skip
    done = invoke(*arguments)
    assert done.exit_code == 1, done.output
    result = json.loads(done.stdout)
    assert list(result["refused"]) == ["suffx"]
    assert "suffx cannot run: strategies.suffx: unknown strategy 'suffx'" in done.stderr
    assert result["prompts"] == {"dataset": None, "count": 2, "categories": ["prompts"]}
    found = {c["name"]: c for c in result["candidates"]}
    trees = {f"{draft} draft-model:tree=2x1@match" for draft in ("target", "draft")}
    assert set(found) == {"target", "draft", "prompt-lookup:ngram_min=1", *trees}
    assert {pair: [m["target"]["name"] for m in loaded] for pair, loaded in result["models"].items()} == {
        name: [pair["target"]] for name in ("target", "draft", "no draft")
    }
    speeds = [c["speedup"]["value"] for c in result["candidates"]]
    assert speeds == sorted(speeds, reverse=True)
    own = found["target"]
    assert own["acceptance_by_position"] == [1.0, 1.0]
    assert own["facts"]["distributions"]["agreement"] == 1.0
    assert own["facts"]["distributions"]["expected_acceptance"] == pytest.approx(1.0, abs=1e-5)
    assert own["facts"]["size_ratio"] == 1.0
    assert any(r.startswith("size:") for r in own["reasons"])
    assert found["draft"]["facts"]["distributions"]["agreement"] < 1.0
    assert found["prompt-lookup:ngram_min=1"]["facts"] is None
    assert {(c["setting"], c["against"]) for c in result["comparisons"]} == {
        (name, "draft") for name in found if name != "draft"
    }  # fmt: skip
    assert result["gate"]["passed"]
    again = json.loads(invoke(*arguments).stdout)
    assert again["candidates"][0]["tokens_per_second"] == result["candidates"][0]["tokens_per_second"], "it ran again"


def test_the_distributions_are_those_of_the_emitted_positions(pair: dict[str, str]) -> None:
    """Against a forward pass a position: one off would look at the wrong ones."""
    decoder = SpeculativeDecoder.from_pretrained(pair["target"], pair["draft"])
    prompt = [5, 9, 300, 17]
    tokens = decoder.generate([prompt], 6, strategies=[]).token_ids[0]
    [[acceptance, *_]] = along(decoder, [(prompt, tokens)], {})
    assert len(acceptance) == len(tokens)
    assert not acceptance.requires_grad
    for i in range(len(tokens)):
        ids = torch.tensor([[*prompt, *tokens[:i]]])
        p, q = (
            torch.softmax(r.model(input_ids=ids).logits[0, -1].detach(), -1) for r in (decoder.target, decoder.draft)
        )  # type: ignore[union-attr]
        assert int(p.argmax()) == tokens[i]
        assert acceptance[i].item() == pytest.approx(torch.minimum(p, q).sum().item(), abs=1e-5)


def test_a_pair_is_examined_as_far_as_the_drafts_context_reaches(pair: dict[str, str], tmp_path: Path) -> None:
    short = save_model(tmp_path / "short", max_position_embeddings=16)
    decoder = SpeculativeDecoder.from_pretrained(pair["target"], short)
    config = grid({"target": pair["target"], "draft": short}, axes={})
    cells, prompt = config.expand(), [5] * 10
    plain = next(cell for cell in cells if not cell.strategies)
    rows = {(plain.key, name): {"status": "ok", "tokens": [7] * n} for name, n in (("a", 20), ("b", 0))}
    facts = examine(decoder, cells, {"a": prompt, "b": prompt, "c": prompt}, rows)
    assert facts["longest_text"] == 30
    assert 0 <= facts["distributions"]["expected_acceptance"] <= 1
    assert examine(decoder, cells, {"b": prompt}, rows)["distributions"] is None


def test_a_reason_is_given_exactly_where_its_figure_says_so() -> None:
    means = {
        "expected_acceptance": 0.7, "agreement": 0.9, "entropy": 1.0, "draft_entropy": 1.0, "acceptance_certain": 0.9,
        "acceptance_uncertain": 0.8, "acceptance_early": 0.7, "acceptance_late": 0.7,
    }  # fmt: skip
    costs = {"acceptance": 0.8, "length": 4.0, "drafted_share": 1.0, "draft_cost": 0.05, "width_cost": 0.0}
    facts = {"size_ratio": 0.1, "distributions": means, "longest_text": 50, "draft_context": 512, "same_template": True}
    quiet = {"facts": facts, "costs": costs, "best_length": 4, "best_length_speedup": 2.0, "decode_speedup": None}
    assert reasons({**quiet, "predicted_speedup": None}) == []
    changes: dict[str, dict[str, Any]] = {
        "size:": {"facts": {**facts, "size_ratio": 0.5}},
        "agreement:": {"facts": {**facts, "distributions": {**means, "agreement": 0.4}}},
        "entropy: expected": {"facts": {**facts, "distributions": {**means, "acceptance_uncertain": 0.5}}},
        "entropy: the draft": {"facts": {**facts, "distributions": {**means, "draft_entropy": 0.5}}},
        "context: expected": {"facts": {**facts, "distributions": {**means, "acceptance_late": 0.5}}},
        "context: the draft": {"facts": {**facts, "draft_context": 32}},
        "template:": {"facts": {**facts, "same_template": False}},
        "tokenizer:": {"facts": {**facts, "vocabulary": "translated"}},
        "cost:": {"best_length": 0},
        "length:": {"best_length": 9},
        "coverage: only": {"costs": {**costs, "drafted_share": 0.4, "length": 1.6}},
        "coverage: no": {"costs": {**costs, "drafted_share": 0.0, "length": 0.0}, "best_length": None},
        "overhead:": {"decode_speedup": {"value": 1.5}, "predicted_speedup": 2.0},
    }
    for start, change in changes.items():
        said = reasons({**quiet, "predicted_speedup": None, **change})
        assert len(said) == 1, (start, said)
        assert said[0].startswith(start)


def test_the_report_says_what_it_does_not_show() -> None:
    prompts = [{"id": f"p{i}", "text": "t"} for i in range(report.SHOWN_ROWS + 2)]
    rows = [{"prompt": "p0", "text": f"text {i}", "setting": "s"} for i in range(report.SHOWN_TEXTS + 4)]
    page = report._examples({"prompts": prompts}, rows)
    assert "<p>and 4 more texts</p>" in page
    assert "<p>and 2 more prompts</p>" in page
    assert "more" not in report._examples({"prompts": prompts[:2]}, rows[:2])
