"""Write the README's results block from results/bench_smoke_cpu.json, the output of `specdec bench --smoke`.

    specdec bench --smoke --out results/bench_smoke_cpu.json
    python scripts/write_results.py

A test fails when the block is not the one that the file gives.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "bench_smoke_cpu.json"
README = ROOT / "README.md"
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


def with_block(readme: str, result: dict[str, Any]) -> str:
    """The README with its block replaced."""
    before, rest = readme.split(START, 1)
    _, after = rest.split(END, 1)
    return f"{before}{START}\n{block(result)}\n{END}{after}"


def main() -> None:
    """Rewrite the README in place."""
    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    README.write_text(with_block(README.read_text(encoding="utf-8"), result), encoding="utf-8")


if __name__ == "__main__":
    main()
