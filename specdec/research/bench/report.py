"""The tables of README.md and docs/benchmarks.md, from the documents of `specdec bench CONFIG`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NOT_MEASURED = "Not measured yet."
LISTED = 5  # kernels of a part of a round


def headline(results: Sequence[Mapping[str, Any]]) -> str:
    """The README's tables: the first scenario of every benchmark."""
    parts = []
    for result in results:
        name, scenario = next(iter(result["scenarios"].items()))
        parts.append(f"{made_with(result)}\n\n{_speeds(name, scenario, result['config']['reference'])}")
    return "\n\n".join(parts)


def blocks(results: Sequence[Mapping[str, Any]]) -> str:
    """The whole document: every benchmark with all its tables."""
    return "\n\n".join(_block(result) for result in results) or NOT_MEASURED


def made_with(result: Mapping[str, Any]) -> str:
    """By what, where, when and with which models."""
    machine, versions, models = result["machine"], result["versions"], result["models"]
    others = {c["kind"]: c["version"] for c in result["contenders"].values() if c["version"]}
    used = ", ".join(f"{kind} {version}" for kind, version in others.items())
    choice, size = result["config"]["models"], {r: models[r]["parameters"] / 1e9 for r in ("target", "draft")}
    grown = f" inflated to {choice['inflate']}" if choice["inflate"] else ""
    draft = choice["draft"] or f"its small self, coarsened by {choice['coarsen']:g}"
    return (
        f"Measured by `specdec bench configs/{result['name']}.yaml` on {result['date']}: "
        f"{machine['gpu'] or machine['processor']}, {machine['threads']} threads, torch {versions['torch']}, {used}, "
        f"at commit {result['commit']}. Target {choice['target']}{grown} ({size['target']:.2f} billion parameters, "
        f"{models['dtype']}), draft {draft} ({size['draft']:.2f} billion). A copy moves "
        f"{result['copy']['bytes_per_second'] / 1e9:.1f} GB/s, reads and writes counted. Tokens per second of whole "
        f"calls, prefill included, medians over the repeats; ratios are paired; 95 % intervals.{_modes(result)}"
    )


def _modes(result: Mapping[str, Any]) -> str:
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


def _block(result: Mapping[str, Any]) -> str:
    reference = result["config"]["reference"]
    parts = [f"### {result.get('file', result['name'])}", made_with(result)]
    for name, scenario in result["scenarios"].items():
        parts += [_speeds(name, scenario, reference), _theory(name, scenario)]
    parts += [_passes(result["passes"]), *map(_profile, result["profile"].items()), _targets(result.get("targets", {}))]
    return "\n\n".join(part for part in parts if part)


def _speeds(name: str, scenario: Mapping[str, Any], reference: str) -> str:
    heads = (name, "tokens/s", f": {reference}", "tokens per round", "acceptance", "ms a round", "same rows", "GiB")
    rows = []
    for contender, entry in scenario["contenders"].items():
        reason = entry.get("skipped") or entry.get("error")
        if reason:
            kind = "skipped" if "skipped" in entry else "failed"
            rows.append([contender, f"{kind}: {reason}", *[""] * (len(heads) - 2)])
            continue
        equality, memory = entry.get("equality"), entry.get("memory")
        rows.append([
            contender, interval(entry["tokens_per_second"], 1), interval(entry.get(f"over_{reference}"), 2),
            figure(entry.get("tokens_per_round")), figure(entry.get("acceptance", {}).get("tested")),
            figure(entry.get("ms_per_round_total")), f"{equality['equal']} of {equality['rows']}" if equality else "-",
            figure(memory["total"] / 2**30) if memory else "-",
        ])  # fmt: skip
    return markdown(heads, rows)


def _theory(name: str, scenario: Mapping[str, Any]) -> str:
    heads = [f"{name}: theory", "plain pass ms", "verify ms", "draft ms", "c", "v", "k", "acceptance"]
    heads += ["predicted", "measured", "measured : predicted", "outside both models"]
    rows = []
    for contender, entry in scenario["contenders"].items():
        if "theory" in entry:
            t = entry["theory"]
            rows.append([
                contender, *(figure(t[key]) for key in ("plain_ms", "verify_ms", "draft_ms")), figure(t["c"], 3),
                figure(t["v"], 3), figure(t["k"]), figure(entry["acceptance"]["tested"]), figure(t["predicted"]),
                interval(t["measured"], 2), figure(t["measured_to_predicted"]), f"{t['outside']:.1%}",
            ])  # fmt: skip
    return markdown(heads, rows) if rows else ""


def _passes(passes: Mapping[str, Any]) -> str:
    heads = ("single passes", "pass", "ms", "GB/s", ": weights read once")
    rows = [
        [name, which, f"{row['ms']:.2f} ({row['min']:.2f}-{row['max']:.2f})", f"{row['bytes_per_second'] / 1e9:.1f}",
         figure(row["times_read_once"])]
        for name, table in passes.items() if "error" not in table
        for which, row in table.items()
    ]  # fmt: skip
    return markdown(heads, rows) if rows else ""


def _profile(item: tuple[str, Mapping[str, Any]]) -> str:
    name, profile = item
    if "parts" not in profile:
        return ""
    on_gpu = profile["device"] == "cuda"
    heads = (f"a round of {name}", "ms" if on_gpu else "host ms", "share", "kernels" if on_gpu else "calls")
    rows = [[p, figure(r["ms"], 3), f"{r['share']:.1%}", f"{r['count']:.0f}"] for p, r in profile["parts"].items()]
    if on_gpu:
        rows.append(["idle", figure(profile["idle_ms"], 3), f"{profile['idle_share']:.1%}", "-"])
    rows.append(["all", figure(profile["span_ms"], 3), "100.0%", "-"])
    if (share := profile.get("outside_graphs_share")) is not None:
        rows.append(["of it outside graphs", figure(share * profile["span_ms"], 3), f"{share:.1%}", "-"])
    made = markdown(heads, rows)
    listed = [
        [part, f"`{row['kernel'][:60]}`", f"{row['count']:.0f}", figure(row["us"], 1)]
        for part, kernels in profile.get("by_kernel", {}).items()
        for row in kernels[:LISTED]
    ]
    return "\n\n".join([made, markdown(("part", "kernel", "a round", "us each"), listed)] if listed else [made])


def _targets(targets: Mapping[str, Any]) -> str:
    rows = []
    for name, t in targets.items():
        wanted = f"at least {t['at_least']:g}" if t["at_least"] is not None else f"at most {t['at_most']:g}"
        said = interval({"value": t["figure"], "low": t.get("low"), "high": t.get("high")}, 2)
        met = "yes" if t["met"] else "no" if t["met"] is False else f"not known: {t['reason']}"
        rows.append([name, wanted, said, conditions(t), met])
    return markdown(("target", "wanted", "measured", "at", "met"), rows) if rows else ""


def conditions(target: Mapping[str, Any]) -> str:
    """The cost ratio and acceptance of a target's figure."""
    if "c" not in target:
        return "-"
    return f"c {target['c']:.3f}, acceptance {figure(target['acceptance'])}"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)])


def figure(value: float | None, digits: int = 2) -> str:
    """A number that may not be known."""
    return "-" if value is None else f"{value:.{digits}f}"


def interval(entry: Mapping[str, Any] | None, digits: int = 2) -> str:
    """A figure and its interval, as far as they are known."""
    if entry is None or entry["value"] is None:
        return "-"
    text = figure(entry["value"], digits)
    return text if entry.get("low") is None else f"{text} ({entry['low']:.{digits}f}-{entry['high']:.{digits}f})"
