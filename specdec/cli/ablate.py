"""`specdec ablate CONFIG --out DIR`: a grid of settings, one row per prompt and setting; `specdec ablate merge DIR`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from specdec.cli import output
from specdec.cli.options import AsJson, DropLoops
from specdec.errors import SpecdecError
from specdec.files.texts import check_readable, check_writable

if TYPE_CHECKING:
    from specdec.research.ablation.work import Work

Baseline = Annotated[str | None, typer.Option(help="Compare the others with this setting, by prompt.")]
FAILED = 1
SHOWN = 10


class RunByDefault(TyperGroup):
    """A group whose verb `run` need not be written: `specdec ablate CONFIG` is `specdec ablate run CONFIG`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "-h", "--help"}:
            args = ["run", *args]
        rest: list[str] = super().parse_args(ctx, args)
        return rest


app = typer.Typer(
    cls=RunByDefault,
    help="Run a grid of settings from a YAML file: specdec ablate CONFIG --out DIR. Resumes where it stopped.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)


@app.command("run")
def run(
    config: Annotated[Path, typer.Argument(help="The YAML file.")],
    out: Annotated[Path, typer.Option(help="The ablation's folder; resumes if it exists.")],
    extend: Annotated[bool, typer.Option("--extend", help="Resume although the config or a version changed.")] = False,
    shard: Annotated[str | None, typer.Option(help="Part of the work of this process, such as 0/4.")] = None,
    engine: Annotated[str | None, typer.Option(help="ray = on a Ray cluster, a part for each GPU.")] = None,
    workers: Annotated[int | None, typer.Option(help="With --engine ray: how many parts.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count what would be done, and do nothing.")] = False,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Run rows again that failed.")] = False,
    baseline: Baseline = None,
    drop_loops: DropLoops = False,
    as_json: AsJson = False,
) -> None:
    """Run what is missing, then write table.parquet, summary.json and report.html.

    Exit status 1: a text differs from plain decoding's where it must not, or a row failed. Of several processes, each
    with its own --shard, the last one that ends writes the table.
    """
    check_readable(config, what="config file")
    _check_engine(engine, workers, shard)
    from specdec.decoding.shard import Shard
    from specdec.research.ablation.cluster import run_on_cluster
    from specdec.research.ablation.config import load_ablation
    from specdec.research.ablation.merge import check_packages, merge
    from specdec.research.ablation.runner import run_ablation
    from specdec.research.ablation.store import Plan, Store, cell_to_dict
    from specdec.research.ablation.summary import find_setting
    from specdec.research.ablation.table import labels
    from specdec.research.ablation.work import work_left

    settings, part = load_ablation(config), Shard.parse(shard)
    if not dry_run:
        check_packages()
        check_writable(out, "--out", folder=True)
    plan = Plan.make(settings)
    if baseline is not None:
        names = labels([cell_to_dict(cell) for cell in plan.cells])
        heads = [{"pair": c.pair, "strategies": c.chain, "drafts": bool(c.strategies)} for c in plan.cells]
        find_setting(baseline, {names[c.key]: [head] for c, head in zip(plan.cells, heads, strict=True)})
    work = work_left(plan, out, part, retry_errors)
    if dry_run:
        Store(out).resume(plan, extend)
        _print_work(work, out, as_json)
        return

    def kept() -> str:
        done = work_left(plan, out, part, retry_errors)
        return (
            f"{done.rows_done} of {done.rows} rows are kept in {out}; the same command goes on with the others, and "
            f"`specdec ablate merge {out} --partial` makes the table of those that are there"
        )

    total = work.calls_left if engine is None else workers
    with output.on_interrupt(kept), output.progress("ablation", total) as advance:
        if engine is not None:
            run_on_cluster(config, out, workers, extend, retry_errors, advance)
        else:
            run_ablation(settings, out, part, extend, retry_errors, advance)
    _finish(merge(out, baseline=baseline, drop_loops=drop_loops), out, as_json)


def _check_engine(engine: str | None, workers: int | None, shard: str | None) -> None:
    if engine not in (None, "ray"):
        raise SpecdecError(f"--engine must be ray, got {engine!r}")
    if engine is None and workers is not None:
        raise SpecdecError("--workers has no effect without --engine ray")
    if engine is not None and shard is not None:
        raise SpecdecError("--shard has no effect beside --engine ray, which makes the parts")


def _print_work(work: Work, out: Path, as_json: bool) -> None:
    if as_json:
        output.print_json(asdict(work))
        return
    left = "unknown before the first rows, since nothing is loaded and timed; the run says it after two calls"
    if work.seconds_left is not None:
        left = f"{output.duration(work.seconds_left)}, at the pace of the rows that are there"
    shown = {
        "cells": f"{work.cells}, of which {work.drafting_cells} draft",
        "prompts": work.prompts,
        "rows": work.rows,
        "rows that are there": f"{work.rows_done:,} in {out}",
        "calls to make": work.calls_left,
        "passes of the target": f"{work.least_passes:,} (all accepted) to {work.most_passes:,} (nothing accepted)",
        "pairs to load": work.loads,
        "time": left,
    }
    output.stdout().print(output.facts(shown))


@app.command("merge")
def merge_(
    folder: Annotated[Path, typer.Argument(help="The ablation's folder.")],
    partial: Annotated[bool, typer.Option("--partial", help="Also while rows are missing.")] = False,
    baseline: Baseline = None,
    drop_loops: DropLoops = False,
    as_json: AsJson = False,
) -> None:
    """Make table.parquet, summary.json and report.html of what the processes of a launch have written."""
    from specdec.research.ablation.merge import check_packages, merge
    from specdec.research.ablation.store import read_manifest

    check_packages()
    read_manifest(folder)  # a folder that is no ablation's is not made
    check_writable(folder, "the folder", folder=True)
    _finish(merge(folder, partial, baseline, drop_loops), folder, as_json)


def _finish(summary: Mapping[str, Any] | None, folder: Path, as_json: bool) -> None:
    from specdec.research.ablation.merge import REPORT

    if summary is None:
        message = "rows are missing: other processes still run, or --partial makes the table of those that are there"
        if as_json:
            output.print_json({"complete": False})
        else:
            output.stdout().print(message, soft_wrap=True)
        return
    for setting, found in summary["warnings"].items():
        for line in found:
            output.warn(f"{setting}: {line}")
    if as_json:
        output.print_json({"complete": not summary["missing"], **summary})
    else:
        print_summary(output.stdout(), summary)
        output.stdout().print(f"report: {folder / REPORT}", soft_wrap=True, markup=False)
    if summary["gate"]["differing"] or summary["errors"]:
        raise typer.Exit(FAILED)


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """Print the summary of an ablation for people."""
    from specdec.research.ablation.report import EVERY_ROW_FAILED
    from specdec.research.ablation.tables import comparison_table, loop_warning, settings_table
    from specdec.research.results_table import IN_WORDS

    styles = ["bold red" if entry["differing"] else "" for entry in summary["settings"].values()]
    shown = settings_table(summary).without(IN_WORDS["decode_speedup"], "p", "rows", "errors")
    console.print(output.rendered(shown, styles, whole_names=False))
    if summary.get("baseline") is not None and summary["comparisons"]:
        console.print(output.rendered(comparison_table(summary), whole_names=False))
    print_gate(console, summary["gate"])
    if missing := summary.get("missing"):
        all_rows = missing + summary["rows"]
        line = f"{missing} of {all_rows} rows are missing: settings may differ in the prompts that their figures are of"
        console.print(line, style="yellow", soft_wrap=True)
    if loops := loop_warning(summary):
        console.print(loops, style="yellow", soft_wrap=True)
    output.print_context(console, summary.get("context_rows", 0), summary["rows"])
    if sum(entry["rows"] for entry in summary["errors"]) == summary["rows"]:
        console.print(EVERY_ROW_FAILED, style="bold red")
    for entry in summary["errors"][:SHOWN]:
        line = f"{entry['rows']} rows of {entry['setting']} failed: {entry['error']}"
        console.print(escape(line), style="red", soft_wrap=True)
    overhead = summary["runner"]["overhead"]
    if overhead is not None:
        console.print(f"the runner took {overhead:.1%} of the decoding time")


def print_gate(console: Console, gate: Mapping[str, Any]) -> None:
    """Print what the equality gate found."""
    differing = gate["differing"]
    if differing:
        head = f"EQUALITY GATE FAILED: {len(differing)} of {gate['compared']} rows differ from plain decoding"
        console.print(head, style="bold white on red")
        for entry in differing[:SHOWN]:
            where = f"{entry['setting']}, {entry['prompt']}, seed {entry['seed']}: at token {entry['first_difference']}"
            console.print(escape(where), style="red", soft_wrap=True)
    elif gate["compared"]:
        console.print(f"equality gate: all {gate['compared']} comparable rows are plain decoding's", style="green")
    if gate["lossy"]:
        console.print(escape(f"lossy acceptance rule: {', '.join(gate['lossy'])}"), style="bold red", soft_wrap=True)
