"""What a document of `specdec bench CONFIG` says, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specdec.research.bench.tables import NOISY, Table, figure, interval
from specdec.stats import PER_TESTED

LISTED = 5  # kernels of a part of a round


def ran(result: Mapping[str, Any], scenario: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The contenders of a scenario that have figures."""
    entries = result["scenarios"][scenario]["contenders"]
    return ((name, entry) for name, entry in entries.items() if "tokens_per_second" in entry)


def speeds(result: Mapping[str, Any], scenario: str) -> Table:
    """Speed, its ratio to the reference's, counts and equality of every contender; or why it has none."""
    reference = result["config"]["reference"]
    heads = [scenario, "tokens/s", f": {reference}", "tokens per round", PER_TESTED, "ms a round", "same rows", "GiB"]
    rows = []
    for contender, entry in result["scenarios"][scenario]["contenders"].items():
        if reason := entry.get("skipped") or entry.get("error"):
            kind = "skipped" if "skipped" in entry else "failed"
            rows.append([contender, f"{kind}: {reason}", *[""] * (len(heads) - 2)])
            continue
        equality, memory = entry.get("equality"), entry.get("memory")
        counts = [entry.get("tokens_per_round"), entry.get("acceptance", {}).get("tested")]
        rows.append(
            [
                contender,
                interval(entry["tokens_per_second"], 1),
                interval(entry.get(f"over_{reference}")),
                *map(figure, [*counts, entry.get("ms_per_round_total")]),
                f"{equality['equal']} of {equality['rows']}" if equality else "-",
                figure(memory["total"] / 2**30) if memory else "-",
            ]
        )
    return Table("whole calls, with 95 % intervals", heads, rows)


def phases(result: Mapping[str, Any], scenario: str) -> Table:
    """Where the milliseconds of a round go, and what its passes take alone and in a row."""
    heads = [scenario, "draft", "verify", "other", "all", "draft pass", "verify pass", "plain pass", "warm-up s"]
    rows = []
    for contender, entry in ran(result, scenario):
        if "theory" in entry:
            parts = [entry["ms_per_round"][part] for part in ("draft", "verify", "other")]
            passes = [entry["theory"][part] for part in ("draft_ms", "verify_ms", "plain_ms")]
            parts += [entry["ms_per_round_total"], *passes]
            rows.append([contender, *map(figure, parts), figure(entry["warm_up_s"], 1)])
    return Table("milliseconds of a round by phase, and of its passes", heads, rows)


def theory(result: Mapping[str, Any], scenario: str) -> Table:
    """What theory predicts from the passes' costs, and what was measured."""
    heads = [f"{scenario}: theory", "plain pass ms", "verify ms", "draft ms", "c", "v", "k", PER_TESTED]
    heads += ["predicted", "measured", "measured : predicted", "outside both models"]
    rows = []
    for contender, entry in ran(result, scenario):
        if t := entry.get("theory"):
            rows.append(
                [
                    contender,
                    *(figure(t[key]) for key in ("plain_ms", "verify_ms", "draft_ms")),
                    *(figure(t[key], 3) for key in ("c", "v")),
                    *map(figure, (t["k"], entry["acceptance"]["tested"], t["predicted"])),
                    interval(t["measured"]),
                    figure(t["measured_to_predicted"]),
                    f"{t['outside']:.1%}",
                ]
            )
    noisy = any((entry.get("theory") or {}).get("v", 0) < 0 for _, entry in ran(result, scenario))
    return Table("; ".join(["speed-up by theory from passes alone and in a row", *[NOISY] * noisy]), heads, rows)


def passes(result: Mapping[str, Any]) -> Table:
    """Single passes of the target."""
    rows = []
    for name, table in result["passes"].items():
        for which, row in table.items() if "error" not in table else ():
            ms = f"{row['ms']:.2f} ({row['min']:.2f}-{row['max']:.2f})"
            rows.append([name, which, ms, f"{row['bytes_per_second'] / 1e9:.1f}", figure(row["times_read_once"])])
    return Table("single passes, in a row", ("single passes", "pass", "ms", "GB/s", ": weights read once"), rows)


def rounds_of(name: str, profile: Mapping[str, Any]) -> list[Table]:
    """Where the time of a profiled round goes, and its kernels that take most."""
    if "parts" not in profile:
        return []
    on_gpu = profile["device"] == "cuda"
    heads = (f"a round of {name}", "ms" if on_gpu else "host ms", "share", "kernels" if on_gpu else "calls")
    rows = [[p, figure(r["ms"], 3), f"{r['share']:.1%}", f"{r['count']:.0f}"] for p, r in profile["parts"].items()]
    if on_gpu:
        rows.append(["idle", figure(profile["idle_ms"], 3), f"{profile['idle_share']:.1%}", "-"])
    rows.append(["all", figure(profile["span_ms"], 3), "100.0%", "-"])
    if (share := profile.get("outside_graphs_share")) is not None:
        rows.append(["of it outside graphs", figure(share * profile["span_ms"], 3), f"{share:.1%}", "-"])
    listed = [
        [part, f"`{row['kernel'][:60]}`", f"{row['count']:.0f}", figure(row["us"], 1)]
        for part, kernels in profile.get("by_kernel", {}).items()
        for row in kernels[:LISTED]
    ]
    parts = Table(f"a round, {profile['device']} time, profiled", heads, rows)
    return [parts, Table("kernels", ("part", "kernel", "a round", "us each"), listed)]


def targets(result: Mapping[str, Any]) -> Table:
    """What was wanted, and whether it was met."""
    rows = []
    for name, t in result.get("targets", {}).items():
        wanted = f"at least {t['at_least']:g}" if t["at_least"] is not None else f"at most {t['at_most']:g}"
        said = interval({"value": t["figure"], "low": t.get("low"), "high": t.get("high")})
        at = f"c {t['c']:.3f}, {PER_TESTED} {figure(t['acceptance'])}" if "c" in t else "-"
        met = "yes" if t["met"] else "no" if t["met"] is False else f"not known: {t['reason']}"
        rows.append([name, wanted, said, at, met])
    return Table("targets", ("target", "wanted", "measured", "at", "met"), rows)
