"""Results as data: every expected number is worked out by hand, and all verbs say the same of one run."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specdec import Results, SpeculativeDecoder, Stats
from specdec.cli import app
from specdec.cli.serve import start_worker
from specdec.errors import SpecdecError
from specdec.research import results_table
from specdec.research.ablation import plots
from specdec.research.ablation.compare import candidate
from specdec.research.ablation.summary import by_setting, summarise
from specdec.research.ablation.table import write_table
from specdec.research.ablation.tables import candidates_table, category_table, settings_table
from specdec.research.bench.report import theory
from specdec.research.bench.tables import spread
from specdec.research.bootstrap import least_p, swap_test
from specdec.research.facets import facets
from specdec.research.results_table import escape_latex
from specdec.stats import RATES
from tests.helpers.grid import PROMPTS
from tests.research.test_plots import BEATEN, K1, K2, PLAIN, row

CHAIN = [("prompt-lookup", 2, 1), ("draft-model", 3, 3), (None, 0, 0), ("draft-model", 3, 0)]


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    made = []
    for prompt, category in (("a", "code"), ("b", "code"), ("c", "a_b & c")):
        made += [
            row("plain", prompt, PLAIN, category=category, k=None, strategies="plain"),
            row("draft k=1", prompt, K1, 0.1, category=category, k=1, strategies="draft"),
            row("draft k=2", prompt, K2, 0.1, category=category, k=2, strategies="draft"),
            row("lookup", prompt, BEATEN, category=category, k=None, strategies="lookup"),
        ]
    return made


def value(table: Any, figure: str, **where: Any) -> Any:
    [found] = [r for r in table.flat() if all(r[n] == v for n, v in where.items())]
    return found[figure]


def test_positions_have_three_rates_by_their_names(rows: list[Any]) -> None:
    table = Results.load(rows).by("strategy", "k", "position")
    assert [(r["strategy"], r["k"], r["position"]) for r in table.rows] == [
        ("draft-model", 1, 1), ("draft-model", 2, 1), ("draft-model", 2, 2), ("prompt-lookup", None, 1),
    ]  # fmt: skip
    second = next(r for r in table.flat() if r["position"] == 2)
    assert (second["drafted"], second["tested"], second["accepted"]) == (15, 12, 9)
    assert second["conditional_acceptance_rate"] == pytest.approx(9 / 12)
    assert second["draft_acceptance_rate"] == second["acceptance_rate"] == pytest.approx(9 / 15)
    assert second["conditional_acceptance_rate_low"] <= 9 / 12 <= second["conditional_acceptance_rate_high"]


def test_groups_of_rows_pool_counts_and_pair_speeds(rows: list[Any]) -> None:
    table = Results.load(rows).by("setting", "category")
    assert value(table, "tokens_per_round", setting="draft k=2", category="code") == pytest.approx(12 / 5)
    assert value(table, "conditional_acceptance_rate", setting="draft k=1", category="code") == pytest.approx(0.5)
    assert value(table, "acceptance_length", setting="draft k=2", category="code") == pytest.approx(1 + 7 / 5)
    assert value(table, "speedup", setting="draft k=1", category="code") == pytest.approx(13 / 9.8)
    assert value(table, "draft_acceptance_rate", setting="plain", category="code") is None
    assert "plain" not in {r["k"] for r in Results.load(rows).by("k").flat()}


def test_a_mixed_chain_is_split_by_who_drafted_and_how_much() -> None:
    mixed = [row("chain", p, CHAIN, strategies="both") for p in ("a", "b")]
    table = Results.load(mixed).by("strategy")
    assert value(table, "draft_acceptance_rate", strategy="draft-model") == pytest.approx(3 / 6)
    assert value(table, "conditional_acceptance_rate", strategy="draft-model") == pytest.approx(3 / 4)
    assert value(table, "tokens_per_round", strategy="(no draft)") == 1.0
    histogram = Results.load(mixed).by("length", "accepted_length")
    assert sum(r["drafted_rounds"] for r in histogram.rows) == 6
    assert sum(r["drafted_rounds"] * r["accepted_length"] for r in histogram.rows) == (
        sum(r["accepted_tokens"] for r in histogram.rows)
    )
    assert histogram.text_table().heads == ["length", "accepted length", "drafted rounds"]
    by_length = Results.load(mixed).by("length")
    assert [(r["length"], r["drafted_rounds"]) for r in by_length.rows] == [(2, 2), (3, 4)]


def test_a_filter_keeps_the_plain_rows_that_speed_ups_need(rows: list[Any]) -> None:
    few = Results.load(rows).where(k=[1], category="code")
    assert {r["setting"] for r in few.rows} == {"plain", "draft k=1"}
    assert value(few.by("k"), "speedup", k=1) == pytest.approx(13 / 9.8)
    assert len(Results.load(rows).where(strategy="prompt-lookup").by("strategy").rows) == 2


def test_lists_mappings_lengths_and_iteration_do_what_is_expected(rows: list[Any]) -> None:
    found = Results.load(rows)
    assert found.by(["strategy", "k"]).rows == found.by("strategy", "k").rows
    assert found.where({"k": 1}).rows == found.where(k=1).rows
    assert (len(found), list(found)) == (len(rows), found.rows)
    table = found.by("k")
    assert (len(table), [r["tokens_per_round"] for r in table]) == (3, [r["tokens_per_round"] for r in table.flat()])


def test_csv_and_data_frame_have_the_same_columns(rows: list[Any], tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    table = Results.load(rows).by("strategy", "k")
    frame = table.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    text = table.to_csv(tmp_path / "a.csv")
    read = list(csv.DictReader(io.StringIO((tmp_path / "a.csv").read_text())))
    assert list(read[0]) == list(frame.columns)
    assert len(read) == len(frame) == text.count("\n") - 1
    assert "records" not in Results.load(rows).to_csv().splitlines()[0]


def test_latex_has_rules_intervals_and_escaped_names(rows: list[Any]) -> None:
    made = Results.load(rows).by("category").to_latex(figures=["tokens_per_round", "rounds"])
    assert r"a\_b \& c" in made
    for part in (
        r"\toprule",
        r"\midrule",
        r"\bottomrule",
        r"\begin{tabular}{lrr}",
        "category & tokens per round & rounds",
    ):
        assert part in made
    assert re.search(r"\$\d\.\d\d\$ \[\$\d\.\d\d\$, \$\d\.\d\d\$\]", made), "an interval"
    worse = Results.load(rows).against("draft k=2").to_latex(figures=["tokens_per_round_difference"])
    assert re.search(r"\$-\d\.\d\d\$ \[\$-\d\.\d\d\$, \$-\d\.\d\d\$\]", worse), "no dash between two signs"
    assert escape_latex("50% of {x}\\") == r"50\% of \{x\}\textbackslash{}"


def test_a_latex_table_longer_than_a_page_is_a_longtable_and_says_its_package(rows: list[Any]) -> None:
    many = [
        {**r, "prompt": f"{r['prompt']}{i}", "category": f"c{i}"} for i in range(results_table.LONG + 1) for r in rows
    ]
    made = Results.load(many).by("category").to_latex()
    for part in (r"\usepackage{booktabs,longtable}", r"\begin{longtable}{lr", r"\endhead", r"\end{longtable}"):
        assert made.count(part) == 1, part
    assert made.index(r"\bottomrule") < made.index(r"\endfoot") < made.index("c0")
    short = Results.load(rows).by("category")
    assert "longtable" not in short.to_latex()
    assert "longtable" in short.to_latex(long=True)


def test_intervals_say_of_how_many_prompts_they_are(rows: list[Any]) -> None:
    found = Results.load(rows)
    for names in (("category",), ("category", "position"), ("category", "length")):
        table = found.by(*names)
        assert {r["category"]: r["prompts"] for r in table.rows} == {"code": 2, "a_b & c": 1}, names
        assert table.intervals.startswith("95 % intervals over 1 to 2 prompts"), names
        assert "prompts &" in table.to_latex()
    assert category_table(summarise(rows)).heads == ["setting", "code (2 prompts)", "a_b & c (1 prompt)"]
    drawn = facets(rows, "tokens_per_round", x="category")
    assert [t.get_text() for t in drawn.axes[0].get_xticklabels()] == ["code\n2 prompts", "a_b & c\n1 prompt"]
    note = " ".join(drawn.legends[0].get_title().get_text().split())
    assert note == "95 % intervals over 1 to 2 prompts; pooled over k (1, 2); 9 of 9 rows end in a loop"
    one = facets(found.where(k=1), "tokens_per_round", x="k").legends[0].get_title().get_text()
    assert " ".join(one.split()) == "95 % intervals over 3 prompts; 3 of 3 rows end in a loop 100% in loops"


def test_one_prompt_has_no_intervals_however_many_calls_it_is_in(rows: list[Any]) -> None:
    one = [r for r in rows if r["prompt"] == "a"]
    calls = [{**r, "seed": i, "batch_size": 2, "call": f"{r['call']} {i}"} for r in one for i in range(3)]
    for made in (one, calls):
        found = Results.load(made)
        tables = [found.by(*names) for names in (("setting",), ("position",), ("length",))]
        for table in (*tables, found.against("lookup")):
            assert table.intervals.startswith("one prompt: no intervals")
            assert "[" not in table.to_latex(long=False).partition("midrule")[2]
        shown = settings_table(summarise(made))
        assert "one prompt: no intervals" in shown.title
        assert not any("(" in cell for cells in shown.rows for cell in cells[1:])
        assert "one prompt" in facets(found, x="k").legends[0].get_title().get_text().replace("\n", " ")


def test_costs_below_plains_are_called_noise(rows: list[Any]) -> None:
    summary = summarise(rows)
    assert "noise" not in settings_table(summary).title
    entry = next(e for e in summary["settings"].values() if e["drafts"])
    entry["costs"]["width_cost"] = -0.1
    assert "measured with noise" in settings_table(summary).title
    noisy = {**entry, "name": "a", "best_length": None, "cost_ratio": 0.1}
    assert "measured with noise" in candidates_table([noisy]).title


def test_without_pandas_one_line_says_what_to_install(rows: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SpecdecError, match=r"pandas.*specdec\[research\]"):
        Results.load(rows).by("k").to_pandas()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: r.by("strateg"), ("strateg", "strategy")),
        (lambda r: r.by("k", "k"), ("twice",)),
        (lambda r: r.by(3), ("by: expected a name, got 3",)),
        (lambda r: r.by(["k"], "setting"), ("by: expected a name",)),
        (lambda r: r.where("k=4"), ("where: expected a function",)),
        (lambda r: r.where(kk=3), ("kk",)),
        (lambda r: r.where(k=99), ("99",)),
        (lambda r: r.by("k").to_latex(figures=["speed"]), ("unknown figure 'speed'",)),
        (lambda r: r.by("position").to_latex(figures=["speedup"]), ("'speedup' is not defined by position",)),
        (lambda r: facets(r, "speedup", x="position"), ("'speedup' is not defined by strategy, position",)),
        (lambda r: r.against("nobody"), ("nobody",)),
        (lambda r: Results.load("no/such/folder"), ("no/such/folder",)),
        (lambda r: Results.load([]), ("no rows",)),
    ],
)
def test_bad_names_are_one_line(rows: list[Any], call: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(SpecdecError) as error:
        call(Results.load(rows))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("position=2",), "position is of rounds, and rows have rounds of several: group by it (--by position)"),
        (("length=2",), "group by it (--by length)"),
        (("k=2,4",), "no row that drafts has k=2,4; k is one of 1, 2, null; for several values give a list, k=[...]"),
        (("k=7", "k=8"), "no row that drafts has k=7 or 8; k is one of 1, 2, null"),
        (("k=2", "strategy=prompt-lookup"), "no row that drafts has k=2 and strategy=prompt-lookup"),
        (("strategy=nobody",), "has strategy=nobody; strategy is one of draft-model, prompt-lookup"),
    ],
)
def test_where_says_in_the_users_words_what_leaves_no_row(
    rows: list[Any], tmp_path: Path, typed: tuple[str, ...], said: str
) -> None:
    write_table(rows, tmp_path / "table.parquet")
    done = CliRunner().invoke(app, ["results", str(tmp_path), *(w for pair in typed for w in ("--where", pair))])
    assert done.exit_code == 2
    assert said in done.stderr
    assert not set("{}'") & set(done.stderr)


def test_where_repeated_for_one_column_keeps_each_of_its_values(rows: list[Any], tmp_path: Path) -> None:
    """The last one had won, in silence."""
    write_table(rows, tmp_path / "table.parquet")
    for typed in (("k=1", "k=2"), ("k=[1,2]",), ("k=[1]", "k=2")):
        where = [w for pair in typed for w in ("--where", pair)]
        done = CliRunner().invoke(app, ["results", str(tmp_path), "--by", "k", *where, "--json"])
        assert [r["k"] for r in json.loads(done.stdout)] == [1, 2]


def test_a_named_baseline_pairs_the_settings_and_says_the_least_p(rows: list[Any]) -> None:
    table = Results.load(rows).against("lookup")
    assert {(r["setting"], r["against"]) for r in table.rows} == {("draft k=1", "lookup"), ("draft k=2", "lookup")}
    difference = value(table, "tokens_per_round_difference", setting="draft k=1")
    assert difference == pytest.approx(12 / 8 - 12 / 11)
    assert value(table, "least_p", setting="draft k=1") == least_p(3) == 2 / 2**3
    assert table.text_table().heads[3:5] == ["tokens per round: difference", "tokens per round: p"]


def test_a_candidate_of_a_comparison_is_a_baseline_by_its_name_there(rows: list[Any], tmp_path: Path) -> None:
    """'demo-draft' was answered with 'demo-draft plain'."""
    made = [
        row(f"{pair} {chain}", p, records, pair=pair, strategies=chain, drafts=chain != "plain")
        for p in ("a", "b")
        for pair, chain, records in (
            ("demo-draft", "plain", PLAIN), ("demo-draft", "draft-model", K1), ("no draft", "plain", PLAIN),
            ("no draft", "eagle3:nodes=16", K2), ("demo-draft", "draft-model:tree=2x2", K2),
        )
    ]  # fmt: skip
    write_table(made, tmp_path / "table.parquet")
    names = {
        "demo-draft": "demo-draft draft-model", "eagle3:nodes=16": "no draft eagle3:nodes=16",
        "demo-draft draft-model:tree=2x2": "demo-draft draft-model:tree=2x2",
        "demo-draft draft-model": "demo-draft draft-model",
    }  # fmt: skip
    for name, setting in names.items():
        assert {r["against"] for r in Results(made).against(name).rows} == {setting}
        assert summarise(made, name)["baseline"] == setting
        done = CliRunner().invoke(app, ["results", str(tmp_path), "--baseline", name, "--json"])
        assert {r["against"] for r in json.loads(done.stdout)} == {setting}
    twice = [*made, *({**r, "setting": f"{r['setting']} T=0.7"} for r in made)]
    with pytest.raises(SpecdecError, match="unknown setting 'demo-draft'"):
        Results(twice).against("demo-draft")


@pytest.mark.parametrize("n", [2, 5, 13])
def test_no_test_falls_below_the_least_p(n: int) -> None:
    one = [1.0] * n
    assert swap_test(([1.0 + i for i in range(n)], one), ([0.0] * n, one)) == least_p(n)


def test_the_verb_prints_every_form(rows: list[Any], tmp_path: Path) -> None:
    write_table(rows, tmp_path / "table.parquet")

    def ask(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["results", str(tmp_path), *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    found = json.loads(ask("--by", "k,position", "--json"))
    assert {entry["position"] for entry in found} == {1, 2}
    assert ask("--by", "k", "--csv", "--where", "category=code").startswith("k,rows,prompts")
    assert r"\toprule" in ask("--latex", "--figures", "speedup")
    assert "accepted per" in ask("--by", "strategy")
    assert "lookup" in ask("--baseline", "lookup")
    wrong = CliRunner().invoke(app, ["results", str(tmp_path), "--baseline", "lookup", "--by", "k"])
    assert wrong.exit_code == 2


# -- one run, every verb ----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_over_one_run_every_verb_gives_the_same_value_for_the_same_name(tmp_path: Path) -> None:
    pair = {"target": "demo-target", "draft": "demo-draft"}
    texts = list(PROMPTS[:3])
    (tmp_path / "a.yaml").write_text(
        json.dumps(
            {
                "pairs": {"tiny": pair}, "strategies": {"draft-model": [{"name": "draft-model", "n_max": 3}]},
                "prompts": texts, "generation": {"max_new_tokens": 12}, "warm_up_tokens": 0,
            }
        )
    )  # fmt: skip
    prompts = [part for text in texts for part in ("--prompt", text)]
    models = ["--target", pair["target"], "--draft", pair["draft"], "--max-new-tokens", "12", *prompts]
    chain = ["--strategies", "draft-model:n_max=3"]

    def ask(*arguments: str) -> Any:
        done = CliRunner().invoke(app, [*arguments, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    out = ask("generate", *models, *chain)["stats"]
    ablated = ask("ablate", str(tmp_path / "a.yaml"), "--out", str(tmp_path / "runs"))["settings"]["draft-model"]
    compared = ask("compare", *models, "--k", "3", "--out", str(tmp_path / "compared"))["candidates"][0]
    ask("trace", "record", *models, *chain, "--out", str(tmp_path / "trace"))
    grouped = [
        next(e for e in ask("results", str(tmp_path / name), "--by", "strategy") if e["strategy"] == "draft-model")
        for name in ("runs", "trace")
    ]
    traced = ask("trace", "show", str(tmp_path / "trace"))
    shown = ask("demo", *prompts, *chain, "--max-new-tokens", "12", "--repeats", "1")
    (tmp_path / "set.jsonl").write_text("".join(json.dumps({"id": t, "prompt": t}) + "\n" for t in texts))
    (tmp_path / "b.yaml").write_text(
        json.dumps(
            {
                "models": pair, "data": {"dataset": "set.jsonl"},
                "contenders": {"plain": {"kind": "specdec"}, "draft": {"kind": "specdec", "strategies": chain[1:]}},
                "scenarios": {"one": {"prompts": len(texts), "max_new_tokens": 12, "repeats": 1}},
            }
        )
    )  # fmt: skip
    benched = ask("bench", str(tmp_path / "b.yaml"), "--out", str(tmp_path / "b.json"))["scenarios"]["one"][
        "contenders"
    ]
    [of_bench] = [e for e in ask("results", str(tmp_path / "b.json")) if e["contender"] == "draft"]
    assert 0 < out["draft_acceptance_rate"] < out["conditional_acceptance_rate"] < 1
    for name in ("draft_acceptance_rate", "conditional_acceptance_rate", "tokens_per_round"):
        others = [ablated[name]["value"], compared[name]["value"], *(g[name] for g in grouped)]
        assert others == pytest.approx([out[name]] * len(others)), name
        assert out["strategies"]["draft-model"][name] == pytest.approx(out[name])
        assert (shown["stats"][name], benched["draft"][name]) == pytest.approx((out[name], out[name])), name
        assert of_bench[name] == benched["draft"][name]
        assert shown["strategies"]["draft-model"][name] == pytest.approx(out[name])
    assert grouped[0]["draft_tokens"] == grouped[1]["draft_tokens"] == out["draft_tokens"]
    assert compared["conditional_acceptance_rate_per_position"] == pytest.approx(
        out["conditional_acceptance_rate_per_position"]
    )
    assert "draft_acceptance_rate" in json.dumps(traced)
    assert ablated["acceptance"] == ablated["conditional_acceptance_rate"]  # the old name
    # Seconds are of one run: those of the comparison, in the verbs that read its folder.
    [again] = [e for e in ask("results", str(tmp_path / "compared")) if e["setting"].endswith("draft-model")]
    [merged] = [s for s in ask("ablate", "merge", str(tmp_path / "compared"))["settings"].values() if s["drafts"]]
    for name in ("speedup", "decode_speedup", "tokens_per_second"):
        assert compared[name]["value"] == merged[name]["value"] == again[name], name
    assert compared["speedup"]["value"] != compared["decode_speedup"]["value"]


def test_a_server_gives_the_figures_of_generate_under_the_same_names() -> None:
    pytest.importorskip("httpx", reason="the extra specdec[serve] is not installed")
    serving = pytest.importorskip("specdec.cli.serving.app", reason="the extra specdec[serve] is not installed")
    from tests.cli.test_serve import COMPLETIONS, post

    strategies = ["draft-model:n_max=3"]
    decoder = SpeculativeDecoder.from_pretrained("demo-target", "demo-draft", strategies, check=False)
    texts = list(PROMPTS[:3])
    out = decoder.generate(texts, max_new_tokens=12).stats.to_dict()
    worker = start_worker(serving, decoder, {"temperature": 0.0}, 64, "tiny")
    try:
        served = post(worker, COMPLETIONS, model="tiny", prompt=texts, max_tokens=12)["usage"]["specdec"]
    finally:
        worker.drain(0)
        worker.join(20)
    shared = set(served) & set(out) - {"strategies"}
    assert shared >= {"tokens_per_round", "acceptance_length", "tested_tokens", *RATES.values()}
    assert {name: served[name] for name in shared} == pytest.approx({name: out[name] for name in shared})
    ours = out["strategies"]["draft-model"]
    assert served["strategies"] == {"draft-model": {name: ours[name] for name in ("draft_tokens", "accepted_tokens")}}


def test_every_table_has_the_same_value_under_the_same_head(rows: list[Any]) -> None:
    named = [{**r, "pair": r["setting"], "k": None} for r in rows]
    groups = [group for group in by_setting(named).values() if group[0]["drafts"]]
    tables = [
        settings_table(summarise(named)),
        candidates_table([candidate(group, named, None) for group in groups]),
        Results.load(named).by().text_table(),
        Results.load(named).by().text_table(["decode_speedup"]),
    ]
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for table, cells in ((t, r) for t in tables for r in t.rows):
        for head, cell in zip(table.heads[1:], cells[1:], strict=True):
            found[cells[0], head].add(cell)
    assert {key: texts for key, texts in found.items() if len(texts) > 1} == {}
    assert {"speed-up", "speed-up without prefill", "accepted per tested"} < {head for _, head in found}
    for group in groups:
        name = group[0]["setting"]
        assert found[name, "speed-up"].isdisjoint(found[name, "speed-up without prefill"])
    drawn = plots.speedup_against_k(rows).axes[0].get_ylabel()
    assert drawn == "speed-up without prefill"
    assert found["plain", "acceptance length"] == {"1.00"} == {f"{Stats().total.acceptance_length:.2f}"}


# -- documents of specdec bench ---------------------------------------------------------------------------------------


def test_a_benchs_document_is_results_too(tmp_path: Path) -> None:
    speed = {"value": 20.0, "low": 18.0, "high": 22.0}
    plain = {"tokens_per_second": speed, "tokens_per_round": 1.0, "acceptance": {"tested": None}}
    draft = {**plain, "tokens_per_round": 2.5, "acceptance": {"tested": 0.75}, "over_plain": {**speed, "value": 2.0}}
    document = {"scenarios": {"batch-1": {"contenders": {"plain": plain, "draft": draft, "broken": {"error": "e"}}}}}
    (tmp_path / "bench.json").write_text(json.dumps(document))
    found = Results.load(tmp_path / "bench.json")
    table = found.by("contender")
    assert [r["contender"] for r in table.rows] == ["plain", "draft"]
    assert value(table, "conditional_acceptance_rate", contender="draft") == 0.75
    assert value(table, "speedup_low", contender="draft") == 18.0
    assert found.where(contender="draft").by().names == ("scenario", "contender")
    assert "$20.0$ [$18.0$, $22.0$]" in found.to_latex(figures=["tokens_per_second"], digits=1)
    assert (len(found), [r["contender"] for r in found]) == (2, ["plain", "draft"])
    drawn = facets(found, "tokens_per_second", x="contender", colour="scenario").axes[0]
    assert [t.get_text() for t in drawn.get_xticklabels()] == ["plain", "draft"]
    for needs_rows in (found.without_loops, lambda: found.against("plain"), lambda: facets(found)):
        with pytest.raises(SpecdecError):
            needs_rows()
    two = {"scenarios": {**document["scenarios"], "batch-8": document["scenarios"]["batch-1"]}}
    (tmp_path / "two.json").write_text(json.dumps(two))
    with pytest.raises(SpecdecError, match="group by scenario too, or choose one: batch-1, batch-8"):
        Results.load(tmp_path / "two.json").by("contender")
    for wrong, words in ((lambda: found.by("k"), "dimension of by"), (lambda: found.where(contender="x"), "no row")):
        with pytest.raises(SpecdecError, match=words):
            wrong()
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SpecdecError, match="neither a trace nor a document"):
        Results.load(tmp_path / "other.json")


def test_one_repeat_has_no_range(tmp_path: Path) -> None:
    for high, latex, text in ((20.0, "$20.0$", "20.0"), (22.0, "$20.0$ [$20.0$, $22.0$]", "20.0 (20.0-22.0)")):
        speed = {"median": 20.0, "min": 20.0, "max": high}
        entry = {"advice": {}, "tokens_per_second": {"plain": speed}, "ratios": {}}
        (tmp_path / "smoke.json").write_text(json.dumps({"suites": {"s": {"summary": {"total": entry}}}}))
        made = Results.load(tmp_path / "smoke.json").to_latex(figures=["tokens_per_second"], digits=1)
        assert f"plain & {latex} " in made
        assert spread(speed, 1) == text


@pytest.mark.parametrize("v", [-0.02, 0.02])
def test_a_benchs_theory_says_where_costs_are_noise(v: float) -> None:
    names = ("plain_ms", "verify_ms", "draft_ms", "c", "k", "predicted", "measured_to_predicted", "outside")
    found = {**dict.fromkeys(names, 0.5), "v": v, "measured": {"value": 1.0}}
    entry = {"tokens_per_second": {"value": 1.0}, "acceptance": {"tested": 0.5}, "theory": found}
    made = theory({"scenarios": {"batch-1": {"contenders": {"draft": entry}}}}, "batch-1")
    assert ("measured with noise" in made.title) is (v < 0)


@pytest.mark.parametrize("name", ["bench_smoke_cpu", "bench_cpu", "bench_h100", "bench_batches"])
def test_the_documents_in_results_load(name: str) -> None:
    done = CliRunner().invoke(app, ["results", f"results/{name}.json", "--csv"])
    assert done.exit_code == 0, done.output
    assert done.stdout.count("\n") > 4
    assert CliRunner().invoke(app, ["results", f"results/{name}.json", "--drop-loops"]).exit_code == 2


def test_plain_decoding_has_the_same_counts_in_every_document() -> None:
    for name in ("bench_smoke_cpu", "bench_cpu"):
        plain = [r for r in Results.load(f"results/{name}.json") if r["contender"] == "plain"]
        assert {(r["tokens_per_round"], r["acceptance_length"]) for r in plain} == {(1.0, 1.0)}


def test_a_table_says_what_it_mixes_and_what_loops(rows: list[Any]) -> None:
    made = [{**r, "temperature": t} for t in (0.0, 0.7) for r in rows]
    assert "pooled over temperature (0.0, 0.7)" in Results(made).by("k").to_latex()
    assert "pooled over temperature" not in Results(made).by("k", "temperature").intervals
    assert "pooled" not in Results(made).by().intervals
    looped = [{**r, "loop_share": 0.5 if r["drafts"] else 0.0} for r in rows]
    drafting = sum(bool(r["drafts"]) for r in rows)
    assert f"{drafting} of {drafting} rows end in a loop" in Results(looped).by("k").intervals
    assert "loop" not in Results([{**r, "loop_share": 0.0} for r in rows]).by("k").intervals


def test_a_table_says_what_is_pooled_within_its_groups_and_nothing_else() -> None:
    """A chain and a tree of one strategy, and a strategy in a pair of its own."""
    chains = {"head": "with draft", "head:nodes=16": "with draft", "draft": "with draft", "lookup": "no draft"}
    made = [
        row(name, p, K1, strategies=name, pair=pair, k=None, **{"head.top_k": None})
        for p in ("a", "b") for name, pair in chains.items()
    ]  # fmt: skip
    whose = {"head": "eagle3", "head:nodes=16": "eagle3", "draft": "draft-model", "lookup": "prompt-lookup"}
    for r in made:
        r["records"] = [[whose[r["setting"]], *record[1:]] for record in r["records"]]
    found = Results(made)
    for names in (("strategy",), ("strategy", "position"), ("strategy", "length")):
        assert "pooled over strategies (head, head:nodes=16)" in found.by(*names).intervals, names
        assert "pair" not in found.by(*names).intervals, names
    assert "pooled over pair (with draft, no draft)" in found.by("position").intervals
    assert "pooled" not in found.by("strategies", "position").intervals
    other = [{**r, "setting": f"{r['setting']} 5", "head.top_k": 5} for r in made if r["strategies"] == "head"]
    assert "pooled over head.top_k (none, 5)" in Results(made + other).by("strategies").intervals


def test_a_folder_that_is_not_finished_names_the_command_that_merges_it(tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match="no results table at"):
        Results.load(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(SpecdecError, match="not finished; specdec ablate merge FOLDER --partial"):
        Results.load(tmp_path)


def test_a_figure_that_fewer_prompts_have_has_a_least_p_of_its_own(rows: list[Any]) -> None:
    first = rows[0]["prompt"]
    untested = [
        {**r, "tested_tokens": 0, "accepted_tokens": 0} if r["prompt"] == first and r["drafts"] else r for r in rows
    ]
    table = Results(untested).against("lookup")
    assert value(table, "least_p", setting="draft k=1") == least_p(3)
    assert value(table, "conditional_acceptance_rate_least_p", setting="draft k=1") == least_p(2)
