"""`specdec bench FILE | --smoke | --exactness`: this machine's figures, and whether output equals plain decoding's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, Exit, Option

from specdec.cli import output
from specdec.cli.benchmark import bench_config, print_bench
from specdec.cli.exactness import exactness_config, print_exactness
from specdec.cli.inputs import given
from specdec.cli.options import AsJson, Group, with_groups
from specdec.errors import SpecdecError
from specdec.files.compact_json import write_json
from specdec.files.texts import check_writable
from specdec.research.bench.document import without_rows
from specdec.research.bench.run import faults, missed, run_bench
from specdec.research.bench.smoke import SUITES, equal, run_smoke, tables
from specdec.research.exactness.run import PARTS, run_exactness
from specdec.research.exactness.summary import exact_holds

FAILED = 1
Save = Callable[[dict[str, Any]], None]
Names = list[str] | None


@dataclass(frozen=True)
class Subject(Group):
    """The models that a file or --exactness measures."""

    target: Annotated[str | None, Option(help="Hub id, folder, GGUF file or demo-target.")] = None
    draft: Annotated[str | None, Option(help="The draft; default: the target, coarsened.")] = None
    inflate: Annotated[str | None, Option(help="Grow the target: 1b, 3b, 6b, hidden_size=...:...")] = None
    device: Annotated[str | None, Option(help="cpu or cuda[:n].")] = None
    dtype: Annotated[str | None, Option(help="float32, bfloat16 or float16.")] = None


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


SHARED = "exactness: other work runs on the device: leave times out."


@dataclass(frozen=True)
class OfExactness(Group):
    """Options of --exactness."""

    config: Annotated[Path | None, Option(help="exactness: settings as a YAML file.")] = None
    prompts: Annotated[int | None, Option(min=1, help="exactness: number of prompts.")] = None
    max_new_tokens: Annotated[int | None, Option(min=1, help="exactness: tokens of a row.")] = None
    part: Annotated[Names, Option(help="exactness: only this part; repeat for more.")] = None
    time_limit: Annotated[float | None, Option(help="exactness: seconds after which no run starts.")] = None
    shared_device: Annotated[bool | None, Option("--shared-device", help=SHARED)] = None


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
    saved: list[Path] = []
    save = partial(_save, out, raw, saved)
    with output.on_interrupt(lambda: _kept(saved, out or raw)):
        if file is not None:
            done = _file(file, subject, of_file, save)
        elif smoke:
            done = _smoke(bool(of_smoke.quick), of_smoke.suite or tuple(SUITES), save)
        else:
            done = _exactness(subject, of_exactness, save)
    _report(done, save, as_json)


@dataclass(frozen=True)
class Done:
    """A result, how to print it, and whether it passed."""

    result: dict[str, Any]
    show: Callable[[Console, dict[str, Any]], None]
    passed: bool


def _report(done: Done, save: Save, as_json: bool) -> None:
    save(done.result)
    if as_json:
        output.print_json(done.result)
    else:
        done.show(output.stdout(), done.result)
    if not done.passed:
        raise Exit(FAILED)


def _smoke(quick: bool, suites: Sequence[str], save: Save) -> Done:
    with output.progress("benchmark") as advance:
        result = run_smoke(quick, suites, advance, save)
    return Done(result, _print, equal(result))


def _exactness(subject: Subject, options: OfExactness, save: Save) -> Done:
    own = {name: getattr(options, name) for name in ("prompts", "max_new_tokens", "shared_device")}
    models = {name: getattr(subject, name) for name in ("inflate", "device", "dtype")}
    settings = exactness_config(options.config, subject.target, subject.draft, given(**models, **own))
    with output.progress("exactness") as advance:
        result = run_exactness(settings, options.part or PARTS, options.time_limit, advance, save)
    return Done(result, print_exactness, exact_holds(result))


def _file(file: Path, subject: Subject, options: OfFile, save: Save) -> Done:
    settings = bench_config(file, subject.given(), options.contender or (), options.minutes)
    with output.progress("benchmark") as advance:
        result = run_bench(settings, file.stem, advance, save)
    wrong = faults(result)
    for line in wrong:
        output.warn(f"not plain decoding's ids: {line}")
    return Done(result, print_bench, not wrong and not (options.strict and missed(result)))


def _save(out: Path | None, raw: Path | None, saved: list[Path], result: dict[str, Any]) -> None:
    for path, document in ((out, without_rows(result)), (raw, result)):
        if path is not None:
            write_json(path, document)
            saved.append(path)


def _kept(saved: Sequence[Path], asked: Path | None) -> str:
    if saved:
        return f"what was measured so far is in {', '.join(map(str, dict.fromkeys(saved)))}"
    return "nothing was measured yet" if asked else "results are kept only with --out FILE"


def _print(console: Console, result: dict[str, Any]) -> None:
    for table in tables(result):
        if table.rows:
            console.print(output.rendered(table, whole_names=False))
    for name, suite in result["suites"].items():
        if "skipped" in suite:  # a reason does not fit into a column
            console.print(f"{name}: skipped: {suite['skipped']}", style="yellow", soft_wrap=True)
