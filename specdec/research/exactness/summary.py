"""What an exactness document says: whether exact mode held, what it cost (extra time of an exact plain pass), and a
table of its runs, whose speeds are over the fastest plain run of the same prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.research.bench.tables import Table, figure
from specdec.stats import PER_TESTED

Entry = Mapping[str, Any]
_SETTING = ("dtype", "batch", "prompts", "rule")


def exact_holds(result: Entry) -> bool:
    """Whether every exact run gave plain decoding's ids, row for row; not if nothing was run."""
    found = [(g, run) for g in _measured(result["groups"]) if g["exact"] for run in g["runs"].values()]
    runs = [(g, run) for g, run in found if "skipped" not in run]
    return bool(runs) and all(run["identical"] == g["prompts"] and run["failed_rows"] == 0 for g, run in runs)


def rows(result: Entry) -> Iterator[tuple[list[str], bool]]:
    """The runs in their order as cells of `table`, and whether exact mode failed there; skipped groups as one row."""
    groups = result["groups"]
    for group in groups:
        where = setting(group, result["config"]["temperature"])
        for name, run in group.get("runs", {"-": group}).items():
            if "skipped" in run:
                yield [where, name, f"skipped: {run['skipped']}", *[""] * 6], False
                continue
            others = group["prompts"] - run["identical"]
            verdicts = Counter(report["verdict"] for report in run["reports"])
            explained = ", ".join(f"{n} {verdict}" for verdict, n in verdicts.items())
            cells = [where, name, f"{run['identical']} of {group['prompts']}"]
            cells.append(f"{others} (explained: {explained})" if others else "0")
            fastest, cost = fastest_plain(groups, group), cost_of_exact(groups, group)
            speed = run.get("tokens_per_second")  # a document made while the device did other work has no times
            ratio = None if speed is None or fastest is None else speed / fastest
            cells += [figure(speed, 1), *map(figure, (ratio, run["tokens_per_round"], run["acceptance"]))]
            yield [*cells, "-" if cost is None else f"{cost:+.1%}"], bool(group["exact"] and others)


def setting(group: Entry, temperature: float) -> str:
    """A group's setting in words: dtype x slots, sampling, exact mode."""
    kind = f"{group['rule']} at T = {temperature:g}" if group["rule"] else "greedy"
    return f"{group['dtype']} x {group['batch']}, {kind}{', exact' if group['exact'] else ''}"


def fastest_plain(groups: Sequence[Entry], group: Entry) -> float | None:
    """Tokens per second of the fastest plain run of the group's prompts; None unless plain decoding without exact mode
    was measured, because exact mode slows plain decoding too."""
    same = [g for g in _measured(groups) if all(g[k] == group[k] for k in _SETTING)]
    if all(g["exact"] for g in same) or any("tokens_per_second" not in g["plain"] for g in same):
        return None
    return float(max(g["plain"]["tokens_per_second"] for g in same))


def cost_of_exact(groups: Sequence[Entry], group: Entry) -> float | None:
    """Milliseconds of a plain pass at the fixed width over those at the fastest one, minus 1; None: not measured."""
    keys = ("part", *_SETTING)
    twins = [g for g in _measured(groups) if not g["exact"] and all(g[k] == group[k] for k in keys)]
    if not group["exact"] or not twins or "ms_per_pass" not in group["plain"]:
        return None
    return float(group["plain"]["ms_per_pass"] / twins[0]["plain"]["ms_per_pass"] - 1)


def _measured(groups: Sequence[Entry]) -> list[Entry]:
    return [g for g in groups if "skipped" not in g]


def table(results: Sequence[Entry]) -> Table:
    """The runs of some documents."""
    heads = ["dtype x slots", "chain", "identical rows", "differing rows", "tok/s", "speed : fastest plain"]
    heads += ["tokens per round", PER_TESTED, "cost of exact"]
    title = "rows identical to plain decoding; cost of exact: extra time of an exact plain pass"
    return Table(title, heads, [cells for result in results for cells, _ in rows(result)])
