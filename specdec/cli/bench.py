"""`specdec bench FILE | --smoke | --exactness`: this machine's figures, and whether output equals plain decoding's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specdec.cli import output
from specdec.cli.benchmark import bench_config, print_bench
from specdec.cli.exactness import exactness_config, print_exactness
from specdec.cli.inputs import given
from specdec.errors import SpecdecError
from specdec.files.compact_json import write_json
from specdec.files.texts import as_path
from specdec.research.bench.config import BenchConfig
from specdec.research.bench.document import without_rows
from specdec.research.bench.run import faults, missed, run_bench
from specdec.research.bench.smoke import SUITES, equal, run_smoke, tables
from specdec.research.exactness.run import PARTS, ExactnessConfig, run_exactness
from specdec.research.exactness.summary import exact_holds

FAILED = 1
Save = Callable[[dict[str, Any]], None]
# Which options belong to which of the three ways of calling.
OPTIONS = {
    "--smoke": ("quick", "suite"),
    "--exactness": (
        "config", "target", "draft", "inflate", "prompts", "max_new_tokens", "device", "dtype", "part", "time_limit",
        "shared_device",
    ),
    "a benchmark file": ("target", "draft", "inflate", "device", "dtype", "contender", "minutes", "strict"),
}  # fmt: skip


def bench(
    file: Annotated[Path | None, typer.Argument(help="A benchmark as a YAML file: configs/bench_*.yaml.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Speeds, in a few minutes.")] = False,
    exactness: Annotated[bool, typer.Option("--exactness", help="Equality with plain decoding, and its cost.")] = False,
    contender: Annotated[list[str] | None, typer.Option(help="file: only this contender; several times.")] = None,
    minutes: Annotated[float | None, typer.Option(help="file: time limit; takes repeats away.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="file: exit status 1 if a target is not met.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="smoke: fewer prompts and repeats.")] = False,
    suite: Annotated[list[str] | None, typer.Option(help="smoke: only this suite; several times.")] = None,
    config: Annotated[Path | None, typer.Option(help="exactness: settings as a YAML file.")] = None,
    target: Annotated[str | None, typer.Option(help="Hub id, folder, GGUF file or demo-target.")] = None,
    draft: Annotated[str | None, typer.Option(help="The draft; default: the target, coarsened.")] = None,
    inflate: Annotated[str | None, typer.Option(help="Grow the target: 1b, 3b, 6b, hidden_size=...:...")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="exactness: number of prompts.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="exactness: tokens of a row.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda[:n].")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    part: Annotated[list[str] | None, typer.Option(help="exactness: only this part; several times.")] = None,
    time_limit: Annotated[float | None, typer.Option(help="exactness: seconds after which no run starts.")] = None,
    shared_device: Annotated[
        bool, typer.Option("--shared-device", help="exactness: other work runs there too: leave times out.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Also write a JSON document of the figures to this file.")] = None,
    raw: Annotated[Path | None, typer.Option(help="Also write one with a row of every call, and every report.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure transformers, plain and speculative decoding in turns, and compare their token ids; or the contenders of
    a file; or compare plain and speculative decoding row by row, with exact mode and without.

    Exit status 1: token ids differ from plain decoding's (without exact mode they may, and do not count), or with
    --strict a target of the file is not met.
    """
    models = given(target=target, draft=draft, inflate=inflate, device=device, dtype=dtype)
    alone = given(prompts=prompts, max_new_tokens=max_new_tokens, shared_device=shared_device or None)
    others = given(
        config=config, part=part, time_limit=time_limit, quick=quick or None, suite=suite, contender=contender,
        minutes=minutes, strict=strict or None,
    )  # fmt: skip
    _check_way((smoke, exactness, file is not None), (*models, *alone, *others))
    for path in (out, raw):
        if path is not None:
            _check_writable(path)
    save = partial(_save, out, raw)
    if file is not None:
        done = _file(bench_config(file, models, contender or (), minutes), file.stem, save, strict)
    elif smoke:
        done = _smoke(quick, suite or tuple(SUITES))
    else:
        settings = {name: value for name, value in {**models, **alone}.items() if name not in ("target", "draft")}
        done = _exactness(exactness_config(config, target, draft, settings), part or PARTS, time_limit, save)
    _report(done, save, as_json)


def _check_way(chosen: Sequence[bool], options: Sequence[str]) -> None:
    """One way of calling, and none but its options. Raises SpecdecError."""
    ways = [way for way, is_chosen in zip(OPTIONS, chosen, strict=True) if is_chosen]
    if len(ways) != 1:
        raise SpecdecError("bench needs --smoke, --exactness or a benchmark file, one of them")
    foreign = [name for name in options if name not in OPTIONS[ways[0]]]
    if foreign:
        raise SpecdecError(f"--{foreign[0].replace('_', '-')} is no option of {ways[0]}")


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
        raise typer.Exit(FAILED)


def _smoke(quick: bool, suites: Sequence[str]) -> Done:
    with output.progress("benchmark") as advance:
        result = run_smoke(quick, suites, advance)
    return Done(result, _print, equal(result))


def _exactness(settings: ExactnessConfig, parts: Sequence[str], time_limit: float | None, save: Save) -> Done:
    with output.progress("exactness") as advance:
        result = run_exactness(settings, parts, time_limit, advance, save)
    return Done(result, print_exactness, exact_holds(result))


def _file(settings: BenchConfig, name: str, save: Save, strict: bool) -> Done:
    with output.progress("benchmark") as advance:
        result = run_bench(settings, name, advance, save)
    wrong = faults(result)
    for line in wrong:
        output.warn(f"not plain decoding's ids: {line}")
    return Done(result, print_bench, not wrong and not (strict and missed(result)))


def _save(out: Path | None, raw: Path | None, result: dict[str, Any]) -> None:
    if out is not None:
        write_json(out, without_rows(result))
    if raw is not None:
        write_json(raw, result)


def _check_writable(path: Path) -> None:
    """Fail before minutes of work, not after. Raises SpecdecError."""
    as_path(str(path), "--out")
    try:
        existed = path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            pass
        if not existed:
            path.unlink()  # an interrupted run leaves nothing behind
    except OSError as error:
        raise SpecdecError(f"cannot write {path}: {error.strerror}") from error


def _print(console: Console, result: dict[str, Any]) -> None:
    for table in tables(result):
        if table.rows:
            console.print(output.rendered(table))
