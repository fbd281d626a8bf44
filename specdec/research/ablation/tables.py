"""The tables of an ablation's summary, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.research.ablation.summary import COMPARED
from specdec.research.bench.tables import Table, figure, interval
from specdec.stats import RATES

_IN_WORDS = {name: words for words, name in RATES.items()}


def settings_table(summary: Mapping[str, Any]) -> Table:
    """Figures of every setting."""
    title = "pooled figures with 95 % intervals over prompts; speed-up paired with plain decoding, prefill included"
    heads = ["setting", "tokens/round", *RATES, "tokens/s", "speed-up", "without prefill", "predicted", "p"]
    rows = []
    for name, entry in summary["settings"].items():
        figures = [interval(entry["tokens_per_round"])]
        figures += [interval(entry[rate]) if entry["drafts"] else "-" for rate in RATES.values()]
        figures += [interval(entry["tokens_per_second"], 1), interval(entry.get("speedup"))]
        figures += [interval(entry.get("decode_speedup")), figure(entry.get("predicted_speedup"))]
        same = "-" if not entry["compared"] else f"{entry['compared'] - entry['differing']}/{entry['compared']}"
        rows.append([name, *figures, p_value(entry.get("speedup_p")), same, str(entry["rows"]), str(entry["errors"])])
    return Table(title, [*heads, "same text", "rows", "errors"], rows)


def comparison_table(summary: Mapping[str, Any]) -> Table:
    """Paired differences of the settings that draft; the title says what p cannot fall below."""
    heads = ["setting", "against"]
    for name in COMPARED:
        heads += [f"{_IN_WORDS.get(name) or name.replace('_', ' ')}: difference", "p"]
    rows = []
    for entry in summary["comparisons"]:
        cells = [entry["setting"], entry["against"]]
        for name in COMPARED:
            cells += [interval(entry[name]), p_value(entry[name]["p"])]
        rows.append(cells)
    least = [entry["least_p"] for entry in summary["comparisons"] if entry.get("least_p") is not None]
    fewest = min((entry["clusters"] for entry in summary["comparisons"]), default=0)
    floor = f"paired; with {fewest} prompts no p is below {max(least, default=1):.2g}"
    return Table(f"{floor}, not corrected for many comparisons" if least else "", heads, rows)


def category_table(summary: Mapping[str, Any]) -> Table:
    """Tokens per round by category."""
    categories = list(dict.fromkeys(c for entry in summary["categories"].values() for c in entry))
    rows = [
        [name, *(interval((entry.get(c) or {}).get("tokens_per_round")) for c in categories)]
        for name, entry in summary["categories"].items()
        if summary["settings"][name]["drafts"]
    ]
    return Table("", ["setting", *categories], rows)


def p_value(p: float | None) -> str:
    """A p-value that may not be known."""
    return "-" if p is None else f"{p:.3g}"
