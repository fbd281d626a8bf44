"""Write the blocks of results in the documents from the JSON documents in results/.

    specdec bench --smoke --out results/bench_smoke_cpu.json     # README.md
    specdec bench configs/NAME.yaml --out results/NAME.json      # README.md and docs/benchmarks.md, NAME in BENCHMARKS
    scripts/run_exactness.sh MODEL results                       # docs/exactness.md, on a GPU
    python scripts/measure_laws.py --out results/laws.json                 # docs/losslessness.md
    python scripts/measure_ngrams.py WHAT --out results/ngram_WHAT.json    # docs/ngram.md, cost and acceptance
    python scripts/measure_what_if.py WHAT --out results/what_if_WHAT.json # docs/analysis.md
    python scripts/measure_ablation.py --out results/ablation_overhead.json                # docs/ablation.md
    python scripts/make_figures.py --keep RUNS                             # docs/figures.md, from two ablations
    python scripts/measure_auto_length.py WHAT --out results/auto_length_WHERE.json        # docs/automatic_length.md
    python scripts/measure_graphs.py --out results/graphs_h100.json        # docs/speed.md, on a GPU
    python scripts/sweep_models.py --out results/models.json               # docs/models.md
    python scripts/write_results.py

A test fails when a block is not the one that its files give.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.research.ablation.plots import PLOTS, context_curve
from specdec.research.bench import report
from specdec.research.bench.ngram_report import acceptance_block, cost_block, table
from specdec.research.bench.speed_report import speed_block
from specdec.research.exactness.run import PARTS
from specdec.research.exactness.summary import RunRow, rows
from specdec.research.models.sweep import models_block

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "bench_smoke_cpu.json"
README = ROOT / "README.md"
EXACTNESS = ROOT / "docs" / "exactness.md"
EXACTNESS_RESULTS = [ROOT / "results" / f"exactness-{part}.json" for part in PARTS]
LAWS, LAWS_RESULTS = ROOT / "docs" / "losslessness.md", ROOT / "results" / "laws.json"
ANALYSIS, WHAT_IF_RESULTS = ROOT / "docs" / "analysis.md", sorted((ROOT / "results").glob("what_if_*.json"))
NGRAM = ROOT / "docs" / "ngram.md"
NGRAM_BLOCKS = {
    "ngram_cost.json": cost_block,
    "ngram_cost_slow.json": cost_block,  # a machine several times slower
    "ngram_acceptance.json": acceptance_block,
}
ABLATION, ABLATION_RESULTS = ROOT / "docs" / "ablation.md", ROOT / "results" / "ablation_overhead.json"
FIGURES, FIGURES_RESULTS = (
    ROOT / "docs" / "figures.md",
    [ROOT / "results" / f"{n}.json" for n in ("figures", "context")],
)
LENGTH = ROOT / "docs" / "automatic_length.md"
LENGTH_RESULTS = [ROOT / "results" / f"auto_length_{name}.json" for name in ("simulated", "cpu")]
SPEED = ROOT / "docs" / "speed.md"
SPEED_RESULTS = ROOT / "results" / "graphs_h100.json"
MODELS, MODELS_RESULTS = ROOT / "docs" / "models.md", ROOT / "results" / "models.json"
BENCHMARKS = [
    ROOT / "results" / f"bench_{name}.json" for name in ("h100", "h100_all", "cpu", "batches")
]  # fmt: skip
HEADLINES = ("bench_h100", "bench_cpu")  # whose first scenario is in README.md
BENCHMARK = ROOT / "docs" / "benchmarks.md"
START, END = "<!-- results:start -->", "<!-- results:end -->"
TITLES = {
    "smollm2-135m": "SmolLM2-135M-Instruct, `prompt-lookup`",
    "embedded-pair": "embedded pair, the demo's chain",
}


def block(result: dict[str, Any]) -> str:
    """The Markdown between the two marks."""
    machine, versions = result["machine"], result["versions"]
    heads = ("model and strategy", "prompts", "transformers", "plain", "speculative", "plain : transformers")
    heads = (*heads, "speculative : plain", "tokens per round", "same ids")
    lines = [
        f"Measured by `specdec bench --smoke` on {result['date']}: {machine['processor']}, {machine['threads']} "
        f"threads, torch {versions['torch']}, transformers {versions['transformers']}, specdec {versions['specdec']} "
        f"at commit {result['commit']}. Greedy, float32, batch 1; tokens per second of whole calls, prefill included; "
        "medians over the repeats, ratios with their range. *Same ids*: whether all three gave the same token ids.",
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
    ]
    for name, suite in result["suites"].items():
        if "skipped" in suite:
            lines.append(f"| {TITLES.get(name, name)} | skipped: {suite['skipped']} | | | | | | | |")
            continue
        lines += [_row(TITLES.get(name, name), category, entry) for category, entry in _entries(suite["summary"])]
    return "\n".join(lines)


def _entries(summary: dict[str, Any]) -> list[tuple[str, Any]]:
    """Categories and the total; of a single category the total alone says the same."""
    return [(c, e) for c, e in summary.items() if c != "total" or len(summary) > 2]


def _row(title: str, category: str, entry: dict[str, Any]) -> str:
    speeds = (f"{entry['tokens_per_second'][m]['median']:.1f}" for m in ("transformers", "plain", "speculative"))
    ratios = (_ratio(entry["ratios"][name]) for name in ("plain_to_transformers", "speculative_to_plain"))
    same = "yes" if all(entry["equal_token_ids"].values()) else "no"
    cells = [title, category, *speeds, *ratios, f"{entry['tokens_per_round']:.2f}", same]
    return f"| {' | '.join(cells)} |"


def _ratio(entry: dict[str, float]) -> str:
    return f"{entry['median']:.2f} ({entry['min']:.2f}-{entry['max']:.2f})"


def exactness_block(results: Sequence[dict[str, Any]]) -> str:
    """The Markdown of the exactness documents: one header for each machine and state of the code, then the runs."""
    if not results:
        return "Not measured yet."
    parts: list[str] = []
    for header in dict.fromkeys(_made_with(r) for r in results):
        same = [r for r in results if _made_with(r) == header]
        heads = ("dtype x slots", "chain", "identical rows", "differing rows", "tok/s", "speed : fastest plain")
        heads = (*heads, "tokens per round", "acceptance", "cost of exact")
        table = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        table += [_run_row(row) for result in same for row in rows(result)]
        contents = {d: c for r in same for d, c in r["content"].items()}
        notes = [
            f"{dtype}: other content changed a token's logits in {c['differing']} of {c['compared']} passes."
            for dtype, c in contents.items()
        ]
        parts += [header, "", " ".join(notes), "", *table, ""]
    return "\n".join(parts).rstrip()


def _made_with(result: dict[str, Any]) -> str:
    machine, versions, config, target = (result[k] for k in ("machine", "versions", "config", "models"))
    model = f"{config['target']}" + (f" inflated to {config['inflate']}" if config["inflate"] else "")
    size = f"{target['target']['parameters'] / 1e9:.2f} billion parameters" if target else "nothing run"
    draft = config["draft"] or f"its small self, coarsened by {config['coarsen']:g}"
    return (
        f"Measured by `specdec bench --exactness` on {result['date']}: {machine['gpu'] or machine['processor']}, torch "
        f"{versions['torch']}, transformers {versions['transformers']}, specdec {versions['specdec']} at commit "
        f"{result['commit']}. Target {model} ({size}), draft {draft}; {config['dataset']}, {config['max_new_tokens']} "
        'tokens a row, `compile="auto"`.'
    )


def _run_row(row: RunRow) -> str:
    if row.skipped is not None:
        return f"| {row.setting} | {row.chain} | skipped: {row.skipped} | | | | | | |"
    assert row.identical is not None
    figures = [_figure(x, ".2f") for x in (row.speedup, row.tokens_per_round, row.acceptance)]
    others = row.prompts - row.identical
    differing = f"{others} (explained: {row.verdicts})" if others else "0"
    cells = [row.setting, row.chain, f"{row.identical} of {row.prompts}", differing]
    cells += [_figure(row.tokens_per_second, ".1f"), *figures, _figure(row.cost, "+.1%")]
    return f"| {' | '.join(cells)} |"


def laws_block(result: dict[str, Any]) -> str:
    """How well every case of the tests of losslessness fitted."""
    machine, versions = result["machine"], result["versions"]
    head = (
        f"Measured by `scripts/measure_laws.py` on {result['date']}: {machine['processor']}, torch "
        f"{versions['torch']}, transformers {versions['transformers']}, specdec {versions['specdec']} at commit "
        f"{result['commit']}."
    )
    rows = []
    for case in sorted(result["cases"], key=lambda c: (-c["samples"], c["test"])):
        statistic = "infinite" if case["statistic"] is None else f"{case['statistic']:.0f}"
        fits = case["statistic"] is not None and case["statistic"] < case["critical"]
        name = case["test"].removeprefix("test_").replace("_", " ").replace("[", ": ").rstrip("]")
        figures = [f"{case['samples']:,}", statistic, f"{case['critical']:.0f}", f"{case['total_variation']:.3f}"]
        rows.append([name, *figures, "follows the law" if fits else "rejected"])
    heads = ("case", "samples", "chi-square", "99.9 % quantile", "total variation", "verdict")
    return f"{head}\n\n{table(heads, rows)}"


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def what_if_block(results: Sequence[dict[str, Any]]) -> str:
    """The Markdown of docs/analysis.md: estimates beside real runs."""
    heads = ("rule", "draft", "plan", "texts", "tokens", "estimate", "measured", "difference (95 %)")
    parts = []
    for result in results:
        rows = []
        for row in result["rows"]:
            plan = [row["rule"], row["draft"] or "-", f"`{row['strategies']}`", str(row["texts"]), f"{row['tokens']:,}"]
            plain = row.get("from_plain_texts")
            cells = [f"{row[name]:.3f}" for name in ("estimate", "measured")]
            rows.append([*plan, *cells, _bounded(row), "-" if plain is None else _bounded(plain)])
        versions = result["versions"]
        head = (
            f"Tokens per round, by `{result['made_by']}` with specdec {versions['specdec']} and torch "
            f"{versions['torch']} on {result['device']}; up to {result['new_tokens']} tokens a text."
        )
        parts.append(f"{head} {_agreement(result)}\n\n{table((*heads, 'from plain texts (95 %)'), rows)}")
    return "\n\n".join(parts) or "Not measured yet."


def _bounded(entry: dict[str, Any]) -> str:
    """A relative difference and its interval."""
    if entry["low"] is None:
        return f"{entry['difference']:+.2%} (error unknown)"
    if entry["low"] == entry["high"]:
        return f"{entry['difference']:+.2%}"
    return f"{entry['difference']:+.2%} ({entry['low']:+.2%} to {entry['high']:+.2%})"


def _agreement(result: dict[str, Any]) -> str:
    """What the table says, in sentences."""
    sure = [row for row in result["rows"] if row["rule"] != "leviathan"]
    random = [row for row in result["rows"] if row["rule"] == "leviathan"]
    exact = sum(row["difference"] == 0.0 for row in sure)
    same = sum(row["same_texts"] for row in sure)
    said = [
        f"Of {len(sure)} greedy, `match` and `coupled` plans {same} wrote plain decoding's texts, and {exact} took "
        "exactly the estimated rounds."
    ]
    bounds = [max(abs(row["low"]), abs(row["high"])) for row in random if row["low"] is not None]
    if bounds:
        said.append(
            f"The 95 % intervals of the {len(bounds)} `leviathan` plans lie within {max(bounds):.1%} of no difference."
        )
    errors = [(row["standard_error"], (row.get("from_plain_texts") or {}).get("standard_error")) for row in random]
    shares = [plain / own for own, plain in errors if own and plain]
    if shares:
        said.append(
            "From texts that were drawn plainly the standard errors are "
            f"{min(shares):.1f} to {max(shares):.1f} times as large."
        )
    return " ".join(said)


def ablation_block(result: dict[str, Any]) -> str:
    """The Markdown of the runner's cost."""
    runner, machine = result["runner"], result["machine"]
    equal = result["rows_compared"] - result["rows_differing"]
    loading, between, merging = (result["parts"][n] for n in ("loading", "between_cells", "config_and_merge"))
    return (
        f"Measured by `scripts/measure_ablation.py` on {result['date']}: {machine['processor']}, {machine['threads']} "
        f"threads. {result['rows']:,} of {result['cells']:,} cells of the embedded pair, one prompt and "
        f"{result['tokens_per_row']} tokens a row: {runner['decode']:.0f} s of decoding, and "
        f"{loading + between + merging:.1%} of that for everything else, from the config to the report: {loading:.1%} "
        f"for loading the models, {between:.1%} between the cells, with every row synced to the disk, and "
        f"{merging:.1%} for the table and the report. {equal:,} of {result['rows_compared']:,} compared rows had plain "
        "decoding's text."
    )


def figures_block(results: Sequence[dict[str, Any]]) -> str:
    """The Markdown of the plots: what each table was made with, and the plots that are drawn from it."""
    parts = []
    for result in results:
        versions, machine, gate = result["versions"], result["machine"], result["gate"]
        parts.append(
            f"From [{result['config']}](../{result['config']}), run on {result['date']}: {machine['processor']}, "
            f"{machine['threads']} threads, torch {versions['torch']}, specdec {versions['specdec']} at commit "
            f"{result['commit']}; {result['rows']} rows, {gate['compared'] - len(gate['differing'])} of "
            f"{gate['compared']} compared ones with plain decoding's text."
        )
        alone = result["config"].endswith("context.yaml")
        for title, plot in PLOTS.items():
            if (plot is context_curve) == alone:
                parts.append(f"![{title}](images/plot_{plot.__name__}.png)")
    return "\n\n".join(parts) or "Not drawn yet."


def length_block(result: dict[str, Any]) -> str:
    """Speed over plain decoding by strategy and category, each with its interval."""
    machine, costs = result["machine"], result["costs"]
    how = f"Simulated on the kept greedy texts of SmolLM2-135M with {costs['source']} costs, prefill left out"
    if result["kind"] == "run":
        many = f" ({result['workers']} processes of so many side by side)" if result.get("workers", 1) > 1 else ""
        how = (
            f"Measured on {machine['processor']}, {machine['threads']} threads{many}, SmolLM2-135M in float32: whole "
            f"calls, {costs['source']} costs"
        )
    head = (
        f"{how}; greedy, batch 1, {result['new_tokens']} new tokens; {result['date']}, commit {result['commit']}. "
        "Speed over plain decoding with automatic length, and its 95 % interval over the prompts."
    )
    rows = []
    for category, entry in result["summary"].items():
        cells = [report.interval(entry["speedups"][name]) for name in result["strategies"]]
        rows.append([category, str(entry["prompts"]), *cells])
    return f"{head}\n\n{table(('category', 'prompts', *(f'`{s}`' for s in result['strategies'])), rows)}"


def replaced(text: str, made: str) -> str:
    """A document with its block replaced."""
    before, rest = text.split(START, 1)
    _, after = rest.split(END, 1)
    return f"{before}{START}\n{made}\n{END}{after}"


def with_block(readme: str, result: dict[str, Any]) -> str:
    """The README with its block replaced."""
    return replaced(readme, block(result))


def documents() -> dict[Path, str]:
    """Every document with results, as it must read."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in EXACTNESS_RESULTS if path.is_file()]
    made = {EXACTNESS: exactness_block(found)}
    benchmarks = [
        {**json.loads(path.read_text(encoding="utf-8")), "file": path.stem} for path in BENCHMARKS if path.is_file()
    ]
    made[BENCHMARK] = report.blocks(benchmarks)
    if RESULTS.is_file():
        smoke = block(json.loads(RESULTS.read_text(encoding="utf-8")))
        shown = [result for result in benchmarks if result["file"] in HEADLINES]
        made[README] = "\n\n".join(part for part in (smoke, report.headline(shown)) if part)
    if LAWS_RESULTS.is_file():
        made[LAWS] = laws_block(json.loads(LAWS_RESULTS.read_text(encoding="utf-8")))
    made[ANALYSIS] = what_if_block([json.loads(path.read_text(encoding="utf-8")) for path in WHAT_IF_RESULTS])
    if ABLATION_RESULTS.is_file():
        made[ABLATION] = ablation_block(json.loads(ABLATION_RESULTS.read_text(encoding="utf-8")))
    drawn = [json.loads(path.read_text(encoding="utf-8")) for path in FIGURES_RESULTS if path.is_file()]
    made[FIGURES] = figures_block(drawn)
    lengths = [json.loads(path.read_text(encoding="utf-8")) for path in LENGTH_RESULTS if path.is_file()]
    made[LENGTH] = "\n\n".join(length_block(result) for result in lengths) or "Not measured yet."
    made[SPEED] = "Not measured yet."
    if SPEED_RESULTS.is_file():
        made[SPEED] = speed_block(json.loads(SPEED_RESULTS.read_text(encoding="utf-8")))
    if MODELS_RESULTS.is_file():
        made[MODELS] = models_block(json.loads(MODELS_RESULTS.read_text(encoding="utf-8")))
    ngram = [(ROOT / "results" / name, make) for name, make in NGRAM_BLOCKS.items()]
    measured = [make(json.loads(path.read_text(encoding="utf-8"))) for path, make in ngram if path.is_file()]
    made[NGRAM] = "\n\n".join(measured) or "Not measured yet."
    return {path: replaced(path.read_text(encoding="utf-8"), text) for path, text in made.items()}


def main() -> None:
    """Rewrite the documents in place, or say which are stale."""
    parser = argparse.ArgumentParser(description="Write the tables of README.md and docs/ from results/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a document is stale")
    check = parser.parse_args().check
    stale = {path: text for path, text in documents().items() if path.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        if check:
            print(f"stale: {path.relative_to(ROOT)}")
        else:
            path.write_text(text, encoding="utf-8")
    if check and stale:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
