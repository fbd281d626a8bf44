"""`specdec bench FILE | --smoke | --exactness`: this machine's figures, and whether output equals plain decoding's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Argument, Exit, Option

from specdec.cli import output
from specdec.cli.inputs import given
from specdec.cli.options import AsJson, Group, Pair, with_groups
from specdec.errors import SpecdecError
from specdec.files.compact_json import write_json
from specdec.files.texts import check_readable, check_writable
from specdec.research.bench.document import warned, without_rows
from specdec.stats import PER_TESTED

if TYPE_CHECKING:
    from specdec.research.bench.config import BenchConfig

FAILED = 1
Save = Callable[[dict[str, Any]], None]
Done = tuple[dict[str, Any], Callable[[Console, dict[str, Any]], None], bool]  # a result, its printer, if it passed
Names = list[str] | None


@dataclass(frozen=True)
class Subject(Pair):
    """The models that a file or --exactness measures; without a draft the target, coarsened, drafts."""

    inflate: Annotated[str | None, Option(help="Grow the target: 1b, 3b, 6b, hidden_size=...:...")] = None


@dataclass(frozen=True)
class OfFile(Group):
    """Options of a benchmark file."""

    contender: Annotated[Names, Option(help="file: only this contender; repeat for more.")] = None
    minutes: Annotated[float | None, Option(help="file: time limit, which takes repeats away.")] = None
    strict: Annotated[bool | None, Option("--strict", help="file: exit status 1 if a target is not met.")] = None


@dataclass(frozen=True)
class OfSmoke(Group):
    """Options of --smoke."""

    quick: Annotated[bool | None, Option("--quick", help="smoke: fewer prompts and repeats.")] = None
    suite: Annotated[Names, Option(help="smoke: only this suite; repeat for more.")] = None


@dataclass(frozen=True)
class OfExactness(Group):
    """Options of --exactness."""

    config: Annotated[Path | None, Option(help="exactness: settings as a YAML file.")] = None
    prompts: Annotated[int | None, Option(min=1, help="exactness: number of prompts.")] = None
    max_new_tokens: Annotated[int | None, Option(min=1, help="exactness: tokens of a row.")] = None
    part: Annotated[Names, Option(help="exactness: only this part; repeat for more.")] = None
    time_limit: Annotated[float | None, Option(help="exactness: seconds after which no run starts.")] = None


@with_groups
def bench(
    subject: Subject,
    of_file: OfFile,
    of_smoke: OfSmoke,
    of_exactness: OfExactness,
    file: Annotated[Path | None, Argument(help="A benchmark as a YAML file: configs/bench_*.yaml.")] = None,
    smoke: Annotated[bool, Option("--smoke", help="Speeds, in a few minutes.")] = False,
    exactness: Annotated[bool, Option("--exactness", help="Equality with plain decoding, and its cost.")] = False,
    out: Annotated[Path | None, Option(help="Also write a JSON document of the figures to this file.")] = None,
    raw: Annotated[Path | None, Option(help="Also write one with a row of every call, and every report.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure transformers, plain and speculative decoding in turns, and compare their token ids; or the contenders of
    a file; or compare plain and speculative decoding row by row, with exact mode and without.

    Exit status 1: token ids differ from plain decoding's (without exact mode they may, and do not count), or with
    --strict a target of the file is not met.
    """
    allowed = {"a benchmark file": (subject, of_file), "--smoke": (of_smoke,), "--exactness": (subject, of_exactness)}
    ways = [way for way, chosen in zip(allowed, (file is not None, smoke, exactness), strict=True) if chosen]
    if len(ways) != 1:
        raise SpecdecError("bench needs --smoke, --exactness or a benchmark file, one of them")
    for group in (subject, of_file, of_smoke, of_exactness):
        if group not in allowed[ways[0]] and (foreign := next(iter(group.given()), None)):
            raise SpecdecError(f"--{foreign.replace('_', '-')} is no option of {ways[0]}")
    for name, path in (("--out", out), ("--raw", raw)):
        if path is not None:
            check_writable(path, name)
    for config in (file, of_exactness.config):
        if config is not None:
            check_readable(config, what="config file")
    saved: list[Path] = []
    save = partial(_save, out, raw, saved)
    with output.on_interrupt(lambda: _kept(saved, out or raw)):
        if file is not None:
            result, show, passed = _file(file, subject, of_file, save)
        elif smoke:
            result, show, passed = _smoke(of_smoke, save)
        else:
            result, show, passed = _exactness(subject, of_exactness, save)
    save(result)
    for line in warned(result):
        output.warn(line)
    if as_json:
        output.print_json(result)
    else:
        show(output.stdout(), result)
    if not passed:
        raise Exit(FAILED)


def _smoke(options: OfSmoke, save: Save) -> Done:
    from specdec.research.bench.smoke import SUITES, equal, run_smoke

    with output.progress("benchmark") as advance:
        result = run_smoke(bool(options.quick), options.suite or tuple(SUITES), advance, save)
    return result, _print_smoke, equal(result)


def _exactness(subject: Subject, options: OfExactness, save: Save) -> Done:
    from specdec.config import load_yaml
    from specdec.research.exactness.run import PARTS, ExactnessConfig, run_exactness
    from specdec.research.exactness.summary import exact_holds

    base = ExactnessConfig() if options.config is None else load_yaml(options.config, ExactnessConfig)
    own = given(prompts=options.prompts, max_new_tokens=options.max_new_tokens)
    settings = base.changed(**subject.given(), **own)
    with output.progress("exactness") as advance:
        result = run_exactness(settings, options.part or PARTS, options.time_limit, advance, save)
    return result, _print_exactness, exact_holds(result)


def bench_config(
    file: Path, models: Mapping[str, Any], contenders: Sequence[str] = (), minutes: float | None = None
) -> BenchConfig:
    """The file's config with what was given on the command line; contenders: only these, beside the reference."""
    from specdec.config import load_yaml
    from specdec.research.bench.config import BenchConfig

    config = load_yaml(file, BenchConfig)
    config.check_targets()
    config = replace(config, models=config.models.changed(**models))
    if minutes is not None:
        config = replace(config, minutes=minutes)
    return config.only(contenders) if contenders else config


def _file(file: Path, subject: Subject, options: OfFile, save: Save) -> Done:
    from specdec.research.bench.run import faults, missed, run_bench, steps_of

    settings = bench_config(file, subject.given(), options.contender or (), options.minutes)
    with output.progress("benchmark", steps_of(settings)) as advance:
        result = run_bench(settings, file.stem, advance, save)
    wrong = faults(result)
    for line in wrong:
        output.warn(f"not plain decoding's ids: {line}")
    return result, _print_bench, not wrong and not (options.strict and missed(result))


def _save(out: Path | None, raw: Path | None, saved: list[Path], result: dict[str, Any]) -> None:
    for path, document in ((out, without_rows(result)), (raw, result)):
        if path is not None:
            write_json(path, document)
            saved.append(path)


def _kept(saved: Sequence[Path], asked: Path | None) -> str:
    if saved:
        return f"what was measured so far is in {', '.join(map(str, dict.fromkeys(saved)))}"
    return "nothing was measured yet" if asked else "results are kept only with --out FILE"


def _print_bench(console: Console, result: Mapping[str, Any]) -> None:
    """Tables: scenarios, passes, profiles, targets; then what did not run."""
    from specdec.research.bench import report

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
    places = {name: scenario["contenders"] for name, scenario in result["scenarios"].items()}
    for where, entries in [*places.items(), ("passes", result["passes"]), ("profile", result["profile"])]:
        for name, entry in entries.items():
            if reason := entry.get("skipped") or entry.get("error"):
                console.print(f"{where}: {name}: {reason}", style="yellow", soft_wrap=True, markup=False)


def _print_exactness(console: Console, result: dict[str, Any]) -> None:
    """Reports of rows that differ, then one table."""
    from specdec.research.exactness import summary
    from specdec.research.exactness.equality import Report

    for group in result["groups"]:
        for name, run in group.get("runs", {}).items():
            for entry in run.get("reports", ()):
                title = f"{group['part']}, exact={group['exact']}, {name}, row {entry['row']}"
                console.rule(title, style="dim", align="left")
                console.print(Report.from_dict(entry).renderable(), soft_wrap=True)
    for dtype, found in result["content"].items():
        console.print(
            f"{dtype}: other content changed a token's logits in {found['differing']} of {found['compared']} passes "
            f"of one shape (largest difference {found['largest']:.3g})"
        )
    styles = ["bold red" if failed else "" for _, failed in summary.rows(result)]
    console.print(output.rendered(summary.table([result]), styles))


def _print_smoke(console: Console, result: dict[str, Any]) -> None:
    from specdec.research.bench.smoke import tables

    for table in tables(result):
        if table.rows:
            console.print(output.rendered(table, whole_names=False))
    for name, suite in result["suites"].items():
        if "skipped" in suite:  # a reason does not fit into a column
            console.print(f"{name}: skipped: {suite['skipped']}", style="yellow", soft_wrap=True)
