"""What `specdec bench CONFIG` prints, and its config from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from specdec.cli import output
from specdec.config import load_yaml
from specdec.errors import SpecdecError
from specdec.research.bench.config import BenchConfig
from specdec.research.bench.report import conditions, interval


def bench_config(
    file: Path, options: Mapping[str, Any], contenders: Sequence[str], minutes: float | None
) -> BenchConfig:
    """The file's config with what was given on the command line; contenders: only these, beside the reference.

    Another target without a draft of its own is drafted for by its coarsened self. Raises SpecdecError.
    """
    config = load_yaml(file, BenchConfig)
    config.check_targets()
    if "target" in options:
        options = {"draft": None, **options}
    if options.get("draft") is not None:
        options = {"coarsen": None, **options}
    config = replace(config, models=replace(config.models, **options))
    if minutes is not None:
        config = replace(config, minutes=minutes)
    return config if not contenders else only(config, {*contenders, config.reference})


def only(config: BenchConfig, names: set[str]) -> BenchConfig:
    """A config without the other contenders; what is of nobody then goes. Raises SpecdecError."""
    unknown = sorted(names - set(config.contenders))
    if unknown:
        raise SpecdecError(f"no contender {unknown[0]!r}; there are {', '.join(config.contenders)}")
    kept = {n: c for n, c in config.contenders.items() if n in names}
    scenarios = {}
    for name, scenario in config.scenarios.items():
        taking = tuple(n for n in scenario.contenders or kept if n in names)
        if taking:
            scenarios[name] = replace(scenario, contenders=taking)
    parts: dict[str, Any] = {}
    for part in ("passes", "profile", "costs"):
        choice = getattr(config, part)
        mine = tuple(n for n in choice.contenders if n in names) if choice is not None else ()
        parts[part] = replace(choice, contenders=mine) if mine else None
    return replace(config, contenders=kept, scenarios=scenarios, **parts)


def print_bench(console: Console, result: Mapping[str, Any]) -> None:
    """Tables: scenarios, theory, passes, profiles, targets; then what did not run."""
    copy = result["copy"]["bytes_per_second"]
    console.print(f"{result['device']}: a copy moves {copy / 1e9:.1f} GB/s, reads and writes counted")
    for name, scenario in result["scenarios"].items():
        console.print(_speeds(name, scenario["contenders"], result["config"]["reference"]))
        console.print(_rounds(name, scenario["contenders"]))
        console.print(_theory(name, scenario["contenders"]))
    if result["passes"]:
        console.print(_passes(result["passes"]))
    for name, profile in result["profile"].items():
        if "parts" in profile:
            console.print(_profile(name, profile))
    if result.get("targets"):
        console.print(_targets(result["targets"]))
    for where, entries in _places(result):
        for name, entry in entries.items():
            reason = entry.get("skipped") or entry.get("error")
            if reason:
                console.print(f"{where}: {name}: {reason}", style="yellow", soft_wrap=True, markup=False)


def _places(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    scenarios = [(name, s["contenders"]) for name, s in result["scenarios"].items()]
    return [*scenarios, ("passes", result["passes"]), ("profile", result["profile"])]


def _ran(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in entries.items() if "tokens_per_second" in entry}


def _speeds(title: str, entries: Mapping[str, Any], reference: str) -> Any:
    made = output.table(
        "contender", "tok/s", f": {reference}", "tok/round", "accept", "same rows", "warm-up s", "GiB",
        title=f"{title}: whole calls, with 95 % intervals", whole_names=True,
    )  # fmt: skip
    for name, entry in _ran(entries).items():
        equality, memory = entry.get("equality"), entry.get("memory")
        made.add_row(
            name, interval(entry["tokens_per_second"], 1), interval(entry.get(f"over_{reference}"), 2),
            output.number(entry.get("tokens_per_round")), output.number(entry.get("acceptance", {}).get("tested")),
            f"{equality['equal']} of {equality['rows']}" if equality else "-", f"{entry['warm_up_s']:.1f}",
            f"{memory['total'] / 2**30:.2f}" if memory else "-",
        )  # fmt: skip
    return made


def _rounds(title: str, entries: Mapping[str, Any]) -> Any:
    made = output.table(
        "contender", "draft", "verify", "other", "all", "draft pass", "verify pass", "plain pass",
        title=f"{title}: milliseconds of a round by phase, and of its passes alone and in a row", whole_names=True,
    )  # fmt: skip
    for name, entry in _ran(entries).items():
        if "theory" in entry:
            parts, theory = entry["ms_per_round"], entry["theory"]
            figures = [parts["draft"], parts["verify"], parts["other"], entry["ms_per_round_total"]]
            figures += [theory[key] for key in ("draft_ms", "verify_ms", "plain_ms")]
            made.add_row(name, *(output.number(x) for x in figures))
    return made


def _theory(title: str, entries: Mapping[str, Any]) -> Any:
    made = output.table(
        "contender", "c", "v", "k", "predicted", "measured", "measured : predicted", "outside",
        title=f"{title}: speed-up by theory from these passes; outside: of decoding, in neither model's passes",
        whole_names=True,
    )  # fmt: skip
    for name, entry in _ran(entries).items():
        if "theory" in entry:
            t = entry["theory"]
            made.add_row(
                name, output.number(t["c"], 3), output.number(t["v"], 3), output.number(t["k"]),
                output.number(t["predicted"]), interval(t["measured"], 2), output.number(t["measured_to_predicted"]),
                f"{t['outside']:.1%}",
            )  # fmt: skip
    return made


def _passes(passes: Mapping[str, Any]) -> Any:
    made = output.table(
        "contender", "pass", "ms", "range", "GB/s", ": weights read once", title="single passes, in a row"
    )
    for name, table in passes.items():
        for which, row in table.items() if "error" not in table else ():
            made.add_row(
                name, which, f"{row['ms']:.2f}", f"{row['min']:.2f}-{row['max']:.2f}",
                f"{row['bytes_per_second'] / 1e9:.1f}", f"{row['times_read_once']:.2f}",
            )  # fmt: skip
    return made


def _profile(name: str, profile: Mapping[str, Any]) -> Any:
    unit = "kernels" if profile["device"] == "cuda" else "calls"
    made = output.table("part", "ms", "share", unit, title=f"a round of {name}, {profile['device']} time, profiled")
    for part, row in profile["parts"].items():
        made.add_row(part, f"{row['ms']:.3f}", f"{row['share']:.1%}", f"{row['count']:.0f}")
    if "idle_ms" in profile:
        made.add_row("idle", f"{profile['idle_ms']:.3f}", f"{profile['idle_share']:.1%}", "-")
    made.add_row("all", f"{profile['span_ms']:.3f}", "100.0%", "-")
    if (share := profile.get("outside_graphs_share")) is not None:
        made.add_row("of it outside graphs", f"{share * profile['span_ms']:.3f}", f"{share:.1%}", "-")
    return made


def _targets(targets: Mapping[str, Any]) -> Any:
    made = output.table("target", "wanted", "measured", "at", "met", title="targets", whole_names=True)
    for name, t in targets.items():
        wanted = f">= {t['at_least']:g}" if t["at_least"] is not None else f"<= {t['at_most']:g}"
        said = interval({"value": t["figure"], "low": t.get("low"), "high": t.get("high")}, 3)
        met = "yes" if t["met"] else "no" if t["met"] is False else "not known"
        colour = "" if t["met"] else "bold red" if t["met"] is False else "yellow"
        made.add_row(name, wanted, said, conditions(t), met, style=colour)
    return made
