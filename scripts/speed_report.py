"""The block of docs/speed.md, from what scripts/measure_graphs.py measured."""

from __future__ import annotations

from typing import Any

from documents import made_with

from specdec.research.bench.tables import Table, figure

GRAPHS = ("kernel", "products", "graph", "fused")  # how scripts/measure_graphs.py names them


def speed_block(result: dict[str, Any]) -> str:
    """What it was made with; passes, prefill, compiled passes and generations, as far as they are there."""
    settings, sizes = result["settings"], result["passes"].items()
    head = (
        f"{made_with(result, 'scripts/measure_graphs.py')} {settings['dtype']}, medians of {settings['repeats']} "
        f"repeats. A copy moves {result['copy_bandwidth'] / 1e12:.2f} TB/s, reads and writes counted."
    )
    passes = [
        _pass(size, name, row, entry["read_once_ms"]) for size, entry in sizes for name, row in entry["table"].items()
    ]
    prefill = [
        [size, name, figure(row["median"], 1)]
        for size, entry in sizes
        for name, row in entry.get("prefill", {}).items()
    ]
    compiled = [
        [size, name, figure(row["median"]), figure(row["median"] / entry["read_once_ms"]), f"{row['made_in_s']:.0f}"]
        for size, entry in sizes
        for name, row in entry.get("compiled", {}).items()
        if name != "cut"
    ]
    calls = [_call(*item) for item in result["generation"].items()]
    heads = ("model", "pass", "eager ms", *(f"{name} ms" for name in GRAPHS), "eager : best", "best : read once")
    of_calls = ("embedded pair", "eager ms a token", "graph ms a token", "same ids", "graphs", "made in s")
    made = [
        Table("", heads, passes),
        Table("", ("model", "prefill", "ms"), prefill),
        Table("", ("model", "pass", "compiled ms", "compiled : weights read once", "made in s"), compiled),
        Table("", of_calls, calls),
    ]
    return "\n\n".join([head, *(table.markdown() for table in made if table.rows)])


def _pass(size: str, name: str, row: dict[str, Any], read_once: float) -> list[str]:
    eager, found = row["off"]["median"], [row.get(kind, {}).get("median") for kind in GRAPHS]
    best = min((ms for ms in found if ms is not None), default=None)
    ratios = (None, None) if best is None else (eager / best, best / read_once)
    return [size, name, *map(figure, (eager, *found, *ratios))]


def _call(name: str, entry: dict[str, Any]) -> list[str]:
    graph = entry["graph"]
    first = graph["first_call"].values()
    same = "yes" if entry["graph_equals_eager"] else "no"
    captured, seconds = (sum(report[key] for report in first) for key in ("captured", "seconds"))
    times = (entry["eager"]["ms_a_token"], graph["ms_a_token"])
    return [name, *map(figure, times), same, str(captured), figure(seconds, 1)]
