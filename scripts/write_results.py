"""Write the blocks of results in the documents from the JSON documents in results/.

    specdec bench --smoke --out results/bench_smoke_cpu.json     # README.md
    specdec bench configs/NAME.yaml --out results/NAME.json      # README.md and docs/benchmarks.md
    scripts/run_exactness.sh MODEL results                       # docs/exactness.md, on a GPU
    python scripts/measure_laws.py --out results/laws.json                 # docs/losslessness.md
    python scripts/measure_ngrams.py WHAT --out results/ngram_WHAT.json    # docs/ngram.md, cost and acceptance
    python scripts/measure_what_if.py WHAT --out results/what_if_WHAT.json # docs/analysis.md
    python scripts/measure_ablation.py --out results/ablation_overhead.json                # docs/ablation.md
    python scripts/make_figures.py --keep RUNS                             # docs/figures.md, from two ablations
    python scripts/measure_auto_length.py WHAT --out results/auto_length_WHERE.json        # docs/automatic_length.md
    python scripts/measure_graphs.py --out results/graphs_h100.json        # docs/speed.md, on a GPU
    python scripts/measure_trees.py --out results/trees_cpu.json           # docs/trees.md and docs/exactness.md
    python scripts/measure_tree_shapes.py --out results/tree_shapes_cpu.json                  # docs/trees.md
    python scripts/sweep_models.py --out results/models.json               # docs/models.md
    python scripts/measure_block_verification.py --out results/block_verification.json     # docs/validation.md
    python scripts/measure_alpha.py --out results/alpha.json               # docs/validation.md
    python scripts/measure_multi_draft.py --out results/multi_draft.json   # docs/validation.md
    python scripts/measure_spec_bench.py ... --out results/spec_bench_WHAT.json            # docs/validation.md
    python scripts/write_results.py

A test fails when a block is not the one that its files give.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from documents import made_with, speeds_and_theory
from measure_spec_bench import rank_correlation
from ngram_report import acceptance_block, cost_block
from speed_report import speed_block

from specdec.research.ablation.plots import PLOTS, context_curve
from specdec.research.bench import report, smoke
from specdec.research.bench.tables import interval, markdown
from specdec.research.exactness.run import PARTS
from specdec.research.exactness.summary import table

ROOT = Path(__file__).resolve().parents[1]
NOT_MEASURED = "Not measured yet."
MANY_TARGETS = 15  # that are listed only if one is missed
HEADLINES = ("bench_h100",)  # whose first scenario is in README.md
Result = dict[str, Any]


def smoke_block(result: Result) -> str:
    """The README's first table."""
    return (
        f"{made_with(result, 'specdec bench --smoke')} Greedy, float32, batch 1; tokens per second of whole calls, "
        "prefill included; medians over the repeats, ratios with their range. *Same ids*: whether all three gave the "
        f"same token ids.\n\n{smoke.tables(result)[0].markdown()}"
    )


def readme_block(results: list[Result]) -> str:
    benchmarks = [result for result in results if result["benchmark"] != "smoke"]
    speeds = [smoke_block(result) for result in results if result["benchmark"] == "smoke"]
    return "\n\n".join(part for part in (*speeds, bench_headline(benchmarks)) if part)


def bench_headline(results: list[Result]) -> str:
    """The README's tables: the first scenario of every benchmark."""
    parts = []
    for result in results:
        first = next(iter(result["scenarios"]))
        parts.append(f"{bench_made_with(result)}\n\n{report.speeds(result, first).markdown()}")
    return "\n\n".join(parts)


def bench_blocks(results: list[Result]) -> str:
    """The whole document: every benchmark with all its tables."""
    return "\n\n".join(_bench_block(result) for result in results) or NOT_MEASURED


def _bench_block(result: Result) -> str:
    parts = [f"### {result.get('file', result['name'])}", bench_made_with(result)]
    for name in result["scenarios"]:
        parts.append(speeds_and_theory(result, name).markdown())
    parts.append(report.passes(result).markdown())
    parts += [table.markdown() for profile in result["profile"].items() for table in report.rounds_of(*profile)[:1]]
    targets = result.get("targets", {})
    if len(targets) > MANY_TARGETS and all(t["met"] for t in targets.values()):
        parts.append(f"All {len(targets)} targets of the config are met, intervals aside.")
    else:
        parts.append(report.targets(result).markdown())
    return "\n\n".join(part for part in parts if part)


def bench_made_with(result: Result) -> str:
    """By what, where, when and with which models."""
    models, choice = result["models"], result["config"]["models"]
    by = f"specdec bench configs/{result['name']}.yaml"
    others = {c["kind"]: c["version"] for c in result["contenders"].values() if c["version"]}
    size = {role: models[role]["parameters"] / 1e9 for role in ("target", "draft")}
    grown = f" inflated to {choice['inflate']}" if choice["inflate"] else ""
    draft = choice["draft"] or f"its small self, coarsened by {choice['coarsen']:g}"
    return (
        f"{made_with(result, by, **others)} Target {choice['target']}{grown} ({size['target']:.2f} billion "
        f"parameters, {models['dtype']}), draft {draft} ({size['draft']:.2f} billion). A copy moves "
        f"{result['copy']['bytes_per_second'] / 1e9:.1f} GB/s, reads and writes counted. Tokens per second of whole "
        "calls, prefill included, medians over the repeats; ratios are paired; 95 % intervals."
        f"{_modes(result)}"
    )


def _modes(result: Result) -> str:
    """How specdec's contenders ran their passes, where that differs; contenders of one mode together."""
    groups: dict[str, list[str]] = {}
    for name, made in result["contenders"].items():
        if made["kind"] == "specdec":
            own = made.get("draft_compile") or made["compile"]
            of_draft = f", draft {own}" if own != made["compile"] else ""
            mode = f"compile {made['compile']}{of_draft}{', fused projections' if made.get('fuse') else ''}"
            groups.setdefault(mode, []).append(name)
    told = [f"{', '.join(names)}: {mode}" for mode, names in groups.items()]
    return f" Passes of {'; '.join(told)}." if len(told) > 1 else ""


def exactness_block(results: list[Result]) -> str:
    """One header for each machine and state of the code, then the runs."""
    parts: list[str] = []
    for head in dict.fromkeys(map(_exactness_head, results)):
        same = [r for r in results if _exactness_head(r) == head]
        contents = {d: c for r in same for d, c in r["content"].items()}
        notes = [
            f"{dtype}: other content changed a token's logits in {c['differing']} of {c['compared']} passes."
            for dtype, c in contents.items()
        ]
        parts += [head, " ".join(notes), table(same).markdown()]
    return "\n\n".join(parts) or NOT_MEASURED


def _exactness_head(result: Result) -> str:
    config, target = result["config"], result["models"]
    model = f"{config['target']}" + (f" inflated to {config['inflate']}" if config["inflate"] else "")
    size = f"{target['target']['parameters'] / 1e9:.2f} billion parameters" if target else "nothing run"
    draft = config["draft"] or f"its small self, coarsened by {config['coarsen']:g}"
    return (
        f"{made_with(result, 'specdec bench --exactness')} Target {model} ({size}), draft {draft}; "
        f'{config["dataset"]}, {config["max_new_tokens"]} tokens a row, `compile="auto"`.'
    )


RULES_LAW = "every_rule_follows_the_target_under_every_processor"
TWIN_LAWS = {  # test of the right one -> test of its broken twin
    "every_strategy_follows_the_target": "a_strategy_that_claims_another_q_is_rejected",
    "every_length_policy_follows_the_target": "a_length_policy_that_takes_back_sampled_tokens_is_rejected",
}


def laws_block(result: Result) -> str:
    """Show how well every case of the losslessness tests fits the enumerated distribution."""
    found: dict[str, dict[str, list[Any]]] = {}
    for test, *figures in result["cases"]:
        name, _, case = test.rstrip("]").partition("[")
        found.setdefault(name, {})[case] = figures
    rules = {case.rpartition("-")[::2]: figures for case, figures in found.pop(RULES_LAW, {}).items()}
    processors, names = ([*dict.fromkeys(key[i] for key in rules)] for i in (1, 0))
    rows = [[f"`{n}`", *(_fit(rules[n, p]) if (n, p) in rules else "-" for p in processors)] for n in names]
    sizes = " to ".join(f"{n:,}" for n in sorted({figures[0] for figures in rules.values()}))
    said = f"{made_with(result, 'scripts/measure_laws.py')} {sizes} samples a case of the rules."
    parts = [said, markdown(["rule", *processors], rows)] if rules else [made_with(result, "scripts/measure_laws.py")]
    for law, twin in TWIN_LAWS.items():
        right, wrong = found.pop(law, {}), found.pop(twin, {})
        rows = [[case, _fit(figures), _fit(wrong[case]) if case in wrong else "-"] for case, figures in right.items()]
        parts.append(markdown([law.split("_follows")[0].replace("_", " "), "fit", "broken twin"], rows))
    rows = [
        [f"{name.replace('_', ' ')}: {case}".removesuffix(": "), f"{figures[0]:,}", _fit(figures), _verdict(figures)]
        for name, cases in found.items()
        for case, figures in cases.items()
    ]
    return "\n\n".join([*parts, markdown(("other cases", "samples", "fit", "verdict"), rows)])


def _fit(figures: list[Any]) -> str:
    """The statistic and the quantile that it must stay below."""
    return f"{'infinite' if figures[1] is None else format(figures[1], ',.0f')} of {figures[2]:,.0f}"


def _verdict(figures: list[Any]) -> str:
    return "follows the distribution" if figures[1] is not None and figures[1] < figures[2] else "rejected"


def what_if_block(results: list[Result]) -> str:
    """Show estimates and real runs."""
    heads = ["rule", "draft", "plan", "texts", "tokens", "estimate", "measured", "difference (95 %)"]
    parts = []
    for result in results:
        rows = []
        for row in result["rows"]:
            plan = [row["rule"], row["draft"] or "-", f"`{row['strategies']}`", str(row["texts"]), f"{row['tokens']:,}"]
            plain = row.get("from_plain_texts")
            cells = [f"{row[name]:.3f}" for name in ("estimate", "measured")]
            rows.append([*plan, *cells, _bounded(row), "-" if plain is None else _bounded(plain)])
        head = f"{made_with(result, result['made_by'])} Tokens per round, up to {result['new_tokens']} tokens a text."
        made = markdown([*heads, "from plain texts (95 %)"], rows)
        parts.append(f"{head} {_agreement(result)}\n\n{made}")
    return "\n\n".join(parts) or NOT_MEASURED


def _bounded(entry: Result) -> str:
    """A relative difference and its interval."""
    if entry["low"] is None:
        return f"{entry['difference']:+.2%} (error unknown)"
    if entry["low"] == entry["high"]:
        return f"{entry['difference']:+.2%}"
    return f"{entry['difference']:+.2%} ({entry['low']:+.2%} to {entry['high']:+.2%})"


def _agreement(result: Result) -> str:
    """What the table says, in sentences."""
    sure = [row for row in result["rows"] if row["rule"] != "leviathan"]
    random = [row for row in result["rows"] if row["rule"] == "leviathan"]
    same, exact = sum(row["same_texts"] for row in sure), sum(row["difference"] == 0.0 for row in sure)
    said = (
        f"{same} of {len(sure)} greedy, `match` and `coupled` plans wrote plain decoding's texts, and {exact} took "
        "exactly the estimated rounds."
    )
    bounds = [max(abs(row["low"]), abs(row["high"])) for row in random if row["low"] is not None]
    if bounds:
        most = max(bounds)
        said += f" The 95 % intervals of the {len(bounds)} `leviathan` plans lie within {most:.1%} of no difference."
    errors = [(row["standard_error"], (row.get("from_plain_texts") or {}).get("standard_error")) for row in random]
    shares = [plain / own for own, plain in errors if own and plain]
    if shares:
        said += f" From plainly sampled texts the standard errors are {min(shares):.1f} to {max(shares):.1f} times as "
        said += "large."
    return said


def ablation_block(result: Result) -> str:
    """The runner's cost."""
    equal = result["rows_compared"] - result["rows_differing"]
    loading, between, merging = (result["parts"][n] for n in ("loading", "between_cells", "config_and_merge"))
    return (
        f"{made_with(result, 'scripts/measure_ablation.py')} {result['rows']:,} of {result['cells']:,} cells of the "
        f"embedded pair, one prompt and {result['tokens_per_row']} tokens a row: {result['runner']['decode']:.0f} s of "
        f"decoding, and {loading + between + merging:.1%} of that for everything else, from the config to the report: "
        f"{loading:.1%} for loading the models, {between:.1%} between the cells, with every row synced to the disk, "
        f"and {merging:.1%} for the table and the report. {equal:,} of {result['rows_compared']:,} compared rows had "
        "plain decoding's text."
    )


def figures_block(results: list[Result]) -> str:
    """Show what each table was made with, and the plots made from it."""
    parts = []
    for result in results:
        gate = result["gate"]
        parts.append(
            f"[{result['config']}](../{result['config']}): {made_with(result, 'specdec ablate')} {result['rows']} "
            f"rows, {gate['compared'] - len(gate['differing'])} of {gate['compared']} compared ones with plain "
            "decoding's text."
        )
        alone = result["config"].endswith("context.yaml")
        chosen = {title: plot for title, plot in PLOTS.items() if (plot is context_curve) == alone}
        parts += [f"![{title}](images/plot_{plot.__name__}.svg)" for title, plot in chosen.items()]
    return "\n\n".join(parts)


def length_block(result: Result) -> str:
    """Speed over plain decoding by strategy and category, each with its interval."""
    costs, strategies = result["costs"]["source"], result["strategies"]
    how = f"Simulated on the kept greedy texts of SmolLM2-135M with {costs} costs, prefill left out"
    if result["kind"] == "run":
        many = f", {result['workers']} processes side by side" if result.get("workers", 1) > 1 else ""
        how = f"SmolLM2-135M in float32{many}: whole calls, {costs} costs"
    rows = [
        [category, str(entry["prompts"]), *(interval(entry["speedups"][name]) for name in strategies)]
        for category, entry in result["summary"].items()
    ]
    return (
        f"{made_with(result, 'scripts/measure_auto_length.py')} {how}; greedy, batch 1, {result['new_tokens']} new "
        "tokens. Speed over plain decoding with automatic length, and its 95 % interval over the prompts.\n\n"
        f"{markdown(['category', 'prompts', *(f'`{s}`' for s in strategies)], rows)}"
    )


def tree_block(result: Result) -> str:
    """Tokens per round of trees and chains with equally many verified tokens."""
    modes, shapes = ([*dict.fromkeys(e[key] for e in result["trees"])] for key in ("mode", "shape"))
    found = {(e["shape"], e["mode"]): e for e in result["trees"]}
    rows = []
    for shape in shapes:
        cells = [found[shape, mode] for mode in modes]
        figures = (f"{e['tokens_per_round']:.2f} ± {e['error']:.2f}" for e in cells)
        rows.append([shape, str(cells[0]["draft_passes"]), *figures])
    return markdown(["shape", "draft passes", *modes], rows)


def shapes_block(result: Result) -> str:
    """Tokens per round of the best shapes and of chains, estimated and measured."""
    rows = []
    for e in result["shapes"]:
        shape = e["strategy"].removeprefix("draft-model:")
        figures = [e["estimate"], e["estimate_on_its_texts"], e["measured"]]
        texts = ["-" if value is None else f"{value:.3f}" for value in figures]
        difference = "-" if figures[1] is None else f"{figures[2] / figures[1] - 1:+.1%}"
        rows.append([e["mode"], str(e["nodes"]), e["kind"], f"`{shape}`", *texts, difference])
    heads = ["rule", "nodes", "kind", "shape", "estimate", "on the run's texts", "measured", "difference"]
    names = ("chain", "chosen_on_others", "best_of_these")
    apart = [[e["mode"], str(e["nodes"]), *(f"{e[n]:.3f}" for n in names)] for e in result.get("held_out", ())]
    other = markdown(["rule", "nodes", "chain", "best shape of other prompts", "best shape of these prompts"], apart)
    return f"{markdown(heads, rows)}\n\n{other}" if apart else markdown(heads, rows)


def formula_block(result: Result) -> str:
    """Measured acceptance and its formulas."""
    heads = ("rule", "positions", "measured", "formula", "standard error", "1 - TV there")
    figures = ("measured", "expected", "error", "one_minus_tv")
    rows = [
        [f"`{e['rule']}`", str(e["positions"]), *(f"{e[name]:.3f}" for name in figures)] for e in result["acceptance"]
    ]
    return markdown(heads, rows)


def parallel_block(result: Result) -> str:
    """Times of one GPU over those of two."""
    rows = [
        [layout, name, f"{ratio:.2f}", texts.removesuffix(" texts equal")]
        for layout, name, ratio, texts in result["rows"]
    ]
    heads = ("layout", "what", "one GPU's time over its time", "texts that are one GPU's")
    return f"{made_with(result, 'scripts/measure_parallel.py')}\n\n{markdown(heads, rows)}"


def models_block(result: Result) -> str:
    """Say what became of the families that papers use, and of every model type."""
    rows, families = result["rows"], []
    for family, members in result["families"].items():
        found = [
            [f"`{r['model_type']}`" for r in rows if r["model_type"] in members and r["outcome"] == o]
            for o in ("equal", "refused")
        ]
        families.append([family, *(", ".join(names) or "-" for names in found)])
    kinds = {
        kind: [row for row in rows if row["outcome"] == kind] for kind in ("equal", "wrong", "refused", "not built")
    }
    head = (
        f"{made_with(result, 'scripts/sweep_models.py')} Of {len(rows)} types, tiny and with random weights, "
        f"{len(kinds['equal'])} give the greedy text of `model.generate` in float32 as a target (rows of different "
        "lengths, past every window; plain, with chains, with trees but for recurrent layers, with drafts that are "
        "right in part, with shared and with kept beginnings) and propose as a draft what they say by themselves, "
        f"{len(kinds['refused'])} are refused, {len(kinds['wrong'])} are wrong, and {len(kinds['not built'])} cannot "
        "be built at this size."
    )
    table = []
    for kind, found in kinds.items():
        reasons = Counter(map(_general, found))
        for reason in sorted(reasons, key=lambda r: -reasons[r]):
            types = ", ".join(f"`{row['model_type']}`" for row in found if _general(row) == reason)
            table.append([f"{kind}: {reason}" if reason else kind, types])
    chosen = markdown(("family", "works as target and as draft", "refused"), families)
    return f"{head}\n\n{chosen}\n\n{markdown(('what becomes of it', 'types'), table)}"


def _general(row: Result) -> str:
    """A reason without the type's name, the figures, and what torch or transformers said."""
    reason = re.sub(r"^target \([^)]*\) (is not supported: )?", "", row["reason"]).split("; a pass over")[0]
    return re.sub(r" \([^()]*(\([^()]*\)[^()]*)*\)$", "", reason)


def block_verification_block(result: Result) -> str:
    """Gain of block verification by draft length and temperature, per fresh round and in whole calls."""
    temperatures, parts = [*dict.fromkeys(e["temperature"] for e in result["rounds"])], []
    for entries in (result["rounds"], result["calls"]):
        rows = [[str(k)] for k in dict.fromkeys(e["n_max"] for e in entries)]
        for entry in entries:
            row = next(r for r in rows if r[0] == str(entry["n_max"]))
            row += [f"{entry['token']:.3f}", interval(entry["gain"], 3)]
        heads = [head for t in temperatures for head in (f"T = {t:g}: token-wise", "gain of `block`")]
        parts.append(markdown(["n_max", *heads], rows))
    example, prompts = result["example"], f"{result['contexts']} prompts"
    said = f"The paper's example: {example['block']} accepted tokens, token by token {example['token']}."
    fresh = f"Tokens per round of fresh rounds, {result['drafts']} drafts after each of {prompts}:"
    whole = f"Tokens per round of whole calls, {prompts} of {result['new_tokens']} new tokens:"
    head = made_with(result, "scripts/measure_block_verification.py")
    return "\n\n".join([f"{head} {said}", fresh, parts[0], whole, parts[1]])


def multi_draft_block(result: Result) -> str:
    """Acceptance and accepted length of rules for several drafts, each beside the optimum."""
    sizes = [*dict.fromkeys(e["siblings"] for e in result["rows"])]
    rows = [
        [f"`{rule}`", *(f"{e[a]:.3f} of {e[b]:.3f}" for e in result["rows"] if e["rule"] == rule)]
        for a, b in (("acceptance", "optimum"), ("length", "longest"))
        for rule in dict.fromkeys(e["rule"] for e in result["rows"])
    ]
    heads, half = [f"{k} sibling{'s' * (k > 1)}" for k in sizes], len(rows) // 2
    said = (
        f"{result['pairs']} random pairs of p and q over {result['tokens']} tokens; the optimum comes last in a cell."
    )
    return "\n\n".join(
        [
            f"{made_with(result, 'scripts/measure_multi_draft.py')} {said}",
            markdown(["acceptance of a node", *heads], rows[:half]),
            markdown([f"accepted length, {result['levels']} levels", *heads], rows[half:]),
        ]
    )


def baselines_block(result: Result) -> str:
    """Every baseline in one table and one plot."""
    names = ("tokens_per_round", "conditional_acceptance_rate", "draft_acceptance_rate")
    rows = []
    for name, entry in result["settings"].items():
        distance = interval(entry["distance"], 3) if entry["lossy"] else "-"
        rows.append([name, *(interval(entry[n]) for n in names), distance])
    prompts, gate = max(e["prompts"] for e in result["settings"].values()), result["gate"]
    said = (
        f"{made_with(result, 'specdec ablate')} {prompts} prompts; {gate['compared'] - len(gate['differing'])} of "
        f"{gate['compared']} comparable rows have plain decoding's text."
    )
    rates = ("tokens per round", "accepted per tested", "accepted per drafted")
    heads = ["setting", *rates, "distance to p (lossy rules)"]
    return f"{said}\n\n{markdown(heads, rows)}\n\n![cost and acceptance of the baselines](images/plot_baselines.svg)"


def alpha_block(result: Result) -> str:
    """Leviathan's alpha and formula against runs."""
    heads = (
        "draft", "T", "tested", "accepted / tested", "1 - E[TV], tested", "difference", "1 - E[TV], everywhere",
        "tokens per round", "formula", "residual",
    )  # fmt: skip
    shown = ("measured", "tested", "difference", "everywhere", "tokens_per_round")
    rows = [
        [
            *(e["draft"], f"{e['temperature']:g}", f"{e['tested_tokens']:,}"),
            *(interval(e[n], 3) for n in shown),
            *(f"{e['formula']:.3f}", f"{e['residual']:+.3f}"),
        ]
        for e in result["rows"]
    ]
    head = made_with(result, "scripts/measure_alpha.py")
    sizes = f"{result['prompts']} prompts of {result['new_tokens']} new tokens, n_max = {result['n_max']}."
    return f"{head} {sizes}\n\n{markdown(heads, rows)}"


def spec_bench_block(result: Result) -> str:
    """Tokens per round by group, the published speed-ups, and the correlation of their order."""
    groups = [*next(iter(result["strategies"].values()))["groups"]]
    rows = []
    for name, entry in result["strategies"].items():
        found = {g: interval(entry["groups"].get(g)) for g in groups}
        ranked = ["-", "-"]
        if "published" in entry:
            pairs = {g: (entry["groups"][g]["value"], p) for g, p in zip(groups, entry["published"], strict=True)}
            kept = [pair for group, pair in pairs.items() if group != "translation"]
            ranked = [f"{rank_correlation(*zip(*p, strict=True)):.2f}" for p in (list(pairs.values()), kept)]
        rows.append([name, *found.values(), *ranked])
        if "published" in entry and "," not in name:
            rows.append(["- published speed-up", *(f"{value:.2f}" for value in entry["published"]), "", ""])
    head = made_with(result, "scripts/measure_spec_bench.py")
    return (
        f"{head} Target {result['target']}, draft {result['draft']}; greedy, {result['new_tokens']} new tokens, "
        f"{result['prompts']} prompts; the texts of {result['same_texts']} were plain decoding's under every strategy."
        f"\n\n{markdown(['strategy', *groups, 'rank correlation', 'without translation'], rows)}"
    )


def head_block(result: Result) -> str:
    """What the embedded head drafts of held-out excerpts, next to the draft model, from metrics.json."""
    head = result["head"]
    rows = [
        [
            *(f"`{e['strategy']}`", f"{e['acceptance_length']:.2f}", f"{e['rounds']}", f"{e['draft_passes']}"),
            *(f"{e[key]:.2f}" if key in e else "-" for key in ("draft_ms", "draft_ms_together")),
        ]
        for e in (head[name] for name in ("chain", "tree", "draft_model"))
    ]
    said = made_with(head, "scripts/measure_demo_models.py --head")
    if "training" in head:
        end = head["training"]
        forced = ", ".join(f"{rate:.2f}" for rate in end["teacher_forced"])
        said += (
            f" Trained for {end['step']:,} steps in {end['seconds'] / 60:.1f} minutes; on texts that were kept from "
        )
        said += f"training the expected acceptance of a draft's tokens is {forced}, teacher-forced."
    heads = ["strategy", "accepted length", "rounds", "draft passes", "draft, ms a round, alone", "in a batch"]
    return f"{said} The head weighs {head['bytes'] / 1e6:.1f} MB.\n\n{markdown(heads, rows)}"


class Block(NamedTuple):
    """The text between the marks `<!-- MARK:start -->` and `<!-- MARK:end -->` of a document.

    document: path of the document
    names: results that are shown, those that exist; paths from results/ without the suffix
    make: makes the text from them
    """

    document: str
    names: list[str]
    make: Callable[[list[Result]], str]
    mark: str = "results"

    def text(self) -> str:
        paths = [ROOT / "results" / f"{name}.json" for name in self.names]
        found = [{**json.loads(p.read_text(encoding="utf-8")), "file": p.stem} for p in paths if p.is_file()]
        return self.make(found) if found else NOT_MEASURED


def each(make: Callable[[Result], str]) -> Callable[[list[Result]], str]:
    """One block after the other."""
    return lambda results: "\n\n".join(map(make, results))


BLOCKS = [
    Block("README.md", ["bench_smoke_cpu", *HEADLINES], readme_block),
    Block("docs/exactness.md", [f"exactness-{part}" for part in PARTS], exactness_block),
    Block("docs/exactness.md", ["trees_cpu"], each(formula_block), "acceptance"),
    Block("docs/eagle.md", ["eagle3_smollm2"], each(spec_bench_block), "spec-bench"),
    Block("docs/eagle.md", ["bench_heads"], bench_blocks, "bench"),
    Block("specdec/demo_models/MODEL_CARD.md", ["../specdec/demo_models/metrics"], each(head_block), "head"),
    Block("docs/trees.md", ["trees_cpu"], each(tree_block), "trees"),
    Block("docs/trees.md", ["tree_shapes_cpu"], each(shapes_block), "shapes"),
    Block(
        "docs/benchmarks.md",
        [f"bench_{name}" for name in ("defaults", "h100", "cpu", "batches")],
        bench_blocks,
    ),
    Block("docs/losslessness.md", ["laws"], each(laws_block)),
    Block("docs/analysis.md", ["what_if_embedded", "what_if_smollm2"], what_if_block),
    Block("docs/ablation.md", ["ablation_overhead"], each(ablation_block)),
    Block("docs/figures.md", ["figures", "context"], figures_block),
    Block("docs/automatic_length.md", ["auto_length_simulated", "auto_length_cpu"], each(length_block)),
    Block("docs/speed.md", ["graphs_h100"], each(speed_block)),
    Block("docs/models.md", ["models"], each(models_block)),
    Block("docs/parallel.md", ["parallel_h200"], each(parallel_block)),
    Block("docs/validation.md", ["baselines"], each(baselines_block), "baselines"),
    Block("docs/validation.md", ["block_verification"], each(block_verification_block), "block"),
    Block("docs/validation.md", ["spec_bench_smollm2", "spec_bench_embedded"], each(spec_bench_block), "spec-bench"),
    Block("docs/validation.md", ["multi_draft"], each(multi_draft_block), "multi-draft"),
    Block("docs/validation.md", ["alpha"], each(alpha_block), "alpha"),
    # The second cost is of a machine several times slower.
    Block(
        "docs/ngram.md",
        ["ngram_cost", "ngram_cost_slow", "ngram_acceptance"],
        each(lambda result: cost_block(result) if result["benchmark"].endswith("cost") else acceptance_block(result)),
    ),
]


def replaced(text: str, made: str, mark: str = "results") -> str:
    """A document with a block replaced."""
    start, end = f"<!-- {mark}:start -->", f"<!-- {mark}:end -->"
    before, rest = text.split(start, 1)
    return f"{before}{start}\n{made}\n{end}{rest.split(end, 1)[1]}"


def documents() -> dict[Path, str]:
    """Every document with results, as it must read."""
    made: dict[Path, str] = {}
    for block in BLOCKS:
        path = ROOT / block.document
        made[path] = replaced(made.get(path) or path.read_text(encoding="utf-8"), block.text(), block.mark)
    return made


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
