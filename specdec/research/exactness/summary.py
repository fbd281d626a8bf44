"""What an exactness document says: whether exact mode held, what it cost, and its runs as rows of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec.research.bench.tables import Table, figure
from specdec.stats import PER_TESTED

Entry = Mapping[str, Any]
_SETTING = ("dtype", "batch", "prompts", "rule")


@dataclass(frozen=True)
class RunRow:
    """One run beside plain decoding.

    identical: rows of `prompts` that are plain's.
    verdicts: of the others that are explained.
    speedup: tokens per second over the fastest plain run of the same prompts; None = only exact plain was measured.
    cost: relative extra time of a plain pass through exact mode; None = not measured.
    """

    part: str
    setting: str
    exact: bool
    chain: str
    identical: int | None
    prompts: int
    verdicts: str
    tokens_per_second: float | None = None
    speedup: float | None = None
    tokens_per_round: float | None = None
    acceptance: float | None = None
    cost: float | None = None
    skipped: str | None = None


def exact_holds(result: Entry) -> bool:
    """Whether every exact run gave plain decoding's ids, row for row; not if nothing was run."""
    found = [(g, run) for g in _measured(result["groups"]) if g["exact"] for run in g["runs"].values()]
    runs = [(g, run) for g, run in found if "skipped" not in run]
    return bool(runs) and all(run["identical"] == g["prompts"] and run["failed_rows"] == 0 for g, run in runs)


def rows(result: Entry) -> Iterator[RunRow]:
    """The runs, in their order; skipped groups as one row."""
    shared = result["config"].get("shared_device", False)
    for group in result["groups"]:
        head = (group["part"], setting(group, result["config"]["temperature"]), group["exact"])
        if "skipped" in group:
            yield RunRow(*head, "-", None, group["prompts"], "", skipped=group["skipped"])
            continue
        cost, fastest = cost_of_exact(result["groups"], group), fastest_plain(result["groups"], group)
        for name, run in group["runs"].items():
            if "skipped" in run:
                yield RunRow(*head, name, None, group["prompts"], "", skipped=run["skipped"])
                continue
            found = Counter(report["verdict"] for report in run["reports"])
            verdicts, speed = ", ".join(f"{n} {v}" for v, n in found.items()), run["tokens_per_second"]
            row = RunRow(*head, name, run["identical"], group["prompts"], verdicts)
            row = replace(row, tokens_per_round=run["tokens_per_round"], acceptance=run["acceptance"])
            if not shared:
                speedup = None if fastest is None else speed / fastest
                row = replace(row, tokens_per_second=speed, speedup=speedup, cost=cost)
            yield row


def setting(group: Entry, temperature: float) -> str:
    """A group's setting in words: dtype x slots, sampling, exact mode."""
    kind = f"{group['rule']} at T = {temperature:g}" if group["rule"] else "greedy"
    return f"{group['dtype']} x {group['batch']}, {kind}{', exact' if group['exact'] else ''}"


def fastest_plain(groups: Sequence[Entry], group: Entry) -> float | None:
    """Tokens per second of the fastest plain run of the group's prompts; None unless plain decoding without exact mode
    was measured, because exact mode slows plain decoding too."""
    same = [g for g in _measured(groups) if all(g[k] == group[k] for k in _SETTING)]
    if all(g["exact"] for g in same):
        return None
    return float(max(g["plain"]["tokens_per_second"] for g in same))


def cost_of_exact(groups: Sequence[Entry], group: Entry) -> float | None:
    """Milliseconds of a plain pass at the fixed width over those at the fastest one, minus 1; None: not measured."""
    keys = ("part", *_SETTING)
    twins = [g for g in _measured(groups) if not g["exact"] and all(g[k] == group[k] for k in keys)]
    if not group["exact"] or not twins:
        return None
    return float(group["plain"]["ms_per_pass"] / twins[0]["plain"]["ms_per_pass"] - 1)


def _measured(groups: Sequence[Entry]) -> list[Entry]:
    return [g for g in groups if "skipped" not in g]


def table(results: Sequence[Entry]) -> Table:
    """The runs of some documents."""
    heads = ["dtype x slots", "chain", "identical rows", "differing rows", "tok/s", "speed : fastest plain"]
    heads += ["tokens per round", PER_TESTED, "cost of exact"]
    title = "rows identical to plain decoding; cost of exact: extra time of an exact plain pass"
    return Table(title, heads, [_cells(row) for result in results for row in rows(result)])


def _cells(row: RunRow) -> list[str]:
    if row.skipped is not None or row.identical is None:
        return [row.setting, row.chain, f"skipped: {row.skipped}", *[""] * 6]
    others = row.prompts - row.identical
    differing = f"{others} (explained: {row.verdicts})" if others else "0"
    figures = map(figure, (row.speedup, row.tokens_per_round, row.acceptance))
    cost = "-" if row.cost is None else f"{row.cost:+.1%}"
    same = f"{row.identical} of {row.prompts}"
    return [row.setting, row.chain, same, differing, figure(row.tokens_per_second, 1), *figures, cost]
