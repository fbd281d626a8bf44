"""The tables of an ablation's summary, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specdec.research.ablation.summary import COMPARED
from specdec.research.bench.tables import NOISY, Table, figure, interval
from specdec.research.results_table import IN_WORDS, in_words, intervals_over, spelled
from specdec.stats import PER_TESTED, RATES

LOOP_HEADS = (IN_WORDS["loop_share"], f"{PER_TESTED} without loops")
WHOLE = "speed-up over plain decoding of the same prompts and seeds, prefill included"


def settings_table(summary: Mapping[str, Any]) -> Table:
    """Figures of every setting."""
    names = ("tokens_per_round", *RATES.values(), "tokens_per_second", "speedup", "decode_speedup", "predicted_speedup")
    heads = ["setting", *(IN_WORDS[name] for name in names), "p"]
    loops, lossy = (find(summary["settings"].values()) for find in (any_loops, any_lossy))
    heads += [IN_WORDS["distance"]] if lossy else []
    rows = []
    for name, entry in summary["settings"].items():
        figures = [interval(entry["tokens_per_round"])]
        figures += [interval(entry[rate]) if entry["drafts"] else "-" for rate in RATES.values()]
        figures += [interval(entry["tokens_per_second"], 1), interval(entry.get("speedup"))]
        figures += [interval(entry.get("decode_speedup")), figure(entry.get("predicted_speedup"))]
        same = "-" if not entry["compared"] else f"{entry['compared'] - entry['differing']}/{entry['compared']}"
        figures += [p_value(entry.get("speedup_p")), *([distance_cell(entry)] if lossy else [])]
        figures += loop_cells(entry) if loops else []
        rows.append([marked(name, entry), *figures, same, str(entry["rows"]), str(entry["errors"])])
    heads += [*LOOP_HEADS] * loops + ["same text", "rows", "errors"]
    return Table(f"pooled figures; {_about(summary['settings'].values())}", heads, rows)


def candidates_table(candidates: Sequence[Mapping[str, Any]]) -> Table:
    """Figures of every candidate of a comparison."""
    names = ("tokens_per_round", *RATES.values(), "speedup", "decode_speedup")
    heads = ["candidate", *(IN_WORDS[name] for name in (*names, "predicted_speedup")), "cost c", "best length"]
    loops, lossy = any_loops(candidates), any_lossy(candidates)
    heads += [IN_WORDS["distance"]] * lossy + [*LOOP_HEADS] * loops
    rows = []
    for entry in candidates:
        best = entry["best_length"]
        cells = [*(interval(entry[name]) for name in names), figure(entry["predicted_speedup"])]
        cells += [figure(entry["cost_ratio"], 3), "-" if best is None else str(best) if best else "off"]
        cells += [distance_cell(entry)] if lossy else []
        rows.append([marked(entry["name"], entry), *cells, *(loop_cells(entry) if loops else ())])
    return Table(f"fastest first; {_about(candidates)}", heads, rows)


def _about(entries: Iterable[Mapping[str, Any]]) -> str:
    """What the intervals are over, what the speed-up is, and whether noise of the costs is in what is predicted."""
    found = list(entries)
    noisy = any(((entry.get("costs") or {}).get("width_cost") or 0) < 0 for entry in found)
    return "; ".join([intervals_over([e["prompts"] for e in found if "prompts" in e]), WHOLE, *[NOISY] * noisy])


def any_lossy(entries: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the rule of a setting changes the target's distribution."""
    return any(entry.get("lossy") for entry in entries)


def marked(name: str, entry: Mapping[str, Any]) -> str:
    """A setting's name; of a lossy rule it says so."""
    return f"{name} (lossy)" if entry.get("lossy") else name


def distance_cell(entry: Mapping[str, Any]) -> str:
    """The distance of a lossy rule's tokens from the target's distribution."""
    return interval(entry.get("distance"), 3) if entry.get("lossy") else "-"


def any_loops(entries: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a setting has a looped text."""
    return any(entry.get("looped_rows") for entry in entries)


def loop_cells(entry: Mapping[str, Any]) -> list[str]:
    """The cells of a setting under LOOP_HEADS."""
    without = entry.get("without_loops", entry) if entry["drafts"] else {}
    return [interval(entry["loop_share"]), interval(without.get("conditional_acceptance_rate"))]


def loop_warning(summary: Mapping[str, Any]) -> str | None:
    """A sentence on texts that repeat themselves; None where there is none."""
    if summary.get("dropped_loops"):
        return f"{summary['dropped_loops']} rows whose texts are loops are left out of all figures but the gate"
    entries = summary["settings"].values()
    looped, all_rows = (sum(e[name] for e in entries) for name in ("looped_rows", "rows"))
    if not looped:
        return None
    return (
        f"{looped} of {all_rows} texts are loops: they repeat one piece to their end, which is easily drafted; "
        "--drop-loops leaves them out"
    )


def comparison_table(summary: Mapping[str, Any]) -> Table:
    """Paired differences of the settings that draft; the title says what p cannot fall below."""
    heads = ["setting", "against"]
    for name in COMPARED:
        heads += [in_words(f"{name}_difference"), in_words(f"{name}_p")]
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
    several = summary["categories"].values()
    prompts = {c: [e[c]["prompts"] for e in several if "prompts" in e.get(c, ())] for c in categories}
    heads = [f"{c} ({spelled(n)})" if n else c for c, n in prompts.items()]
    return Table("", ["setting", *heads], rows)


def p_value(p: float | None) -> str:
    """A p-value that may not be known."""
    return "-" if p is None else f"{p:.3g}"
