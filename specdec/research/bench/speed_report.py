"""The block of docs/speed.md, from the document of scripts/measure_graphs.py."""

from __future__ import annotations

from typing import Any

GRAPHS = ("kernel", "products", "graph", "fused")  # how scripts/measure_graphs.py names them


def speed_block(result: dict[str, Any]) -> str:
    """The Markdown of one document: what it was made with, passes, compiled passes, generations."""
    made, versions, settings = result["machine"], result["versions"], result["settings"]
    parts = [
        f"Measured by `scripts/measure_graphs.py` on {result['date']}: {made['gpu'] or made['processor']}, torch "
        f"{versions['torch']}, transformers {versions['transformers']}, specdec {versions['specdec']} at commit "
        f"{result['commit']}. {settings['dtype']}, medians of {settings['repeats']} repeats. A copy moves "
        f"{result['copy_bandwidth'] / 1e12:.2f} TB/s, reads and writes counted.",
        "",
        *_table(("model", "pass", "eager ms", *(f"{name} ms" for name in GRAPHS), "eager : best", "best : read once")),
    ]
    for size, entry in result["passes"].items():
        parts += [_pass_row(size, name, row, entry["read_once_ms"]) for name, row in entry["table"].items()]
    compiled = [
        _compiled_row(size, name, row, entry["read_once_ms"])
        for size, entry in result["passes"].items()
        for name, row in entry.get("compiled", {}).items()
        if name != "cut"
    ]
    prefill = [
        f"| {size} | {name} | {row['median']:.1f} |"
        for size, entry in result["passes"].items()
        for name, row in entry.get("prefill", {}).items()
    ]
    if prefill:
        parts += ["", *_table(("model", "prefill", "ms")), *prefill]
    if compiled:
        parts += ["", *_table(("model", "pass", "compiled ms", "compiled : weights read once", "made in s")), *compiled]
    if result["generation"]:
        heads = ("embedded pair", "eager ms a token", "graph ms a token", "same ids", "graphs", "made in s")
        parts += ["", *_table(heads), *(_call_row(*item) for item in result["generation"].items())]
    return "\n".join(parts)


def _table(heads: tuple[str, ...]) -> list[str]:
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]


def _pass_row(size: str, name: str, row: dict[str, Any], read_once: float) -> str:
    eager, found = row["off"]["median"], [row.get(kind, {}).get("median") for kind in GRAPHS]
    best = min((ms for ms in found if ms is not None), default=None)
    ratios = ["-"] * 2 if best is None else [f"{eager / best:.2f}", f"{best / read_once:.2f}"]
    cells = [f"{eager:.2f}", *("-" if ms is None else f"{ms:.2f}" for ms in found), *ratios]
    return f"| {' | '.join([size, name, *cells])} |"


def _compiled_row(size: str, name: str, row: dict[str, Any], read_once: float) -> str:
    cells = [size, name, f"{row['median']:.2f}", f"{row['median'] / read_once:.2f}", f"{row['made_in_s']:.0f}"]
    return f"| {' | '.join(cells)} |"


def _call_row(name: str, entry: dict[str, Any]) -> str:
    eager, graph = entry["eager"], entry["graph"]
    first = graph["first_call"].values()
    cells = [name, f"{eager['ms_a_token']:.2f}", f"{graph['ms_a_token']:.2f}"]
    cells += ["yes" if entry["graph_equals_eager"] else "no", str(sum(r["captured"] for r in first))]
    return f"| {' | '.join([*cells, format(sum(r['seconds'] for r in first), '.1f')])} |"
