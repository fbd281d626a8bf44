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
from specdec.research.bench import report
from specdec.research.bench.config import BenchConfig
from specdec.stats import PER_TESTED


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
    """Tables: scenarios, passes, profiles, targets; then what did not run."""
    copy = result["copy"]["bytes_per_second"]
    console.print(f"{result['device']}: a copy moves {copy / 1e9:.1f} GB/s, reads and writes counted")
    shown = []
    for name in result["scenarios"]:
        names = {contender for contender, _ in report.ran(result, name)}
        speeds = report.speeds(result, name)
        shown.append(speeds._replace(rows=[row for row in speeds.rows if row[0] in names]))
        theory = report.theory(result, name).without("plain pass ms", "verify ms", "draft ms", PER_TESTED)
        shown += [report.phases(result, name), theory]
    shown.append(report.passes(result))
    shown += [table for profile in result["profile"].items() for table in report.rounds_of(*profile)]
    for table in shown:
        if table.rows:
            console.print(output.rendered(table))
    if result.get("targets"):
        colours = {True: "", False: "bold red", None: "yellow"}
        styles = [colours[target["met"]] for target in result["targets"].values()]
        console.print(output.rendered(report.targets(result), styles))
    for where, entries in _places(result):
        for name, entry in entries.items():
            reason = entry.get("skipped") or entry.get("error")
            if reason:
                console.print(f"{where}: {name}: {reason}", style="yellow", soft_wrap=True, markup=False)


def _places(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    scenarios = [(name, s["contenders"]) for name, s in result["scenarios"].items()]
    return [*scenarios, ("passes", result["passes"]), ("profile", result["profile"])]
