"""`specdec bench --smoke`: this machine's figures in a few minutes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specdec.cli import output
from specdec.errors import SpecdecError
from specdec.research.bench import METHODS, SUITES, equal, run_smoke

FAILED = 1


def bench(
    smoke: Annotated[bool, typer.Option("--smoke", help="The small benchmark, so far the only one.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts and repeats: under a minute.")] = False,
    suite: Annotated[list[str] | None, typer.Option(help="Only this suite; may be given several times.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure transformers, plain and speculative decoding in turns, and compare their token ids.

    Exit status 1: a method's token ids differ from plain decoding's.
    """
    if not smoke:
        raise SpecdecError("bench needs --smoke: it is the only benchmark so far")
    if out is not None:
        _check_writable(out)
    with output.progress("benchmark") as advance:
        result = run_smoke(quick, suite or tuple(SUITES), advance)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if as_json:
        output.print_json(result)
    else:
        _print(output.stdout(), result)
    if not equal(result):
        raise typer.Exit(FAILED)


def _check_writable(path: Path) -> None:
    """Fail before minutes of work, not after. Raises SpecdecError."""
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            pass
        if not existed:
            path.unlink()  # an interrupted run leaves nothing behind
    except OSError as error:
        raise SpecdecError(f"cannot write {path}: {error.strerror}") from error


def _print(console: Console, result: dict[str, Any]) -> None:
    for name, suite in result["suites"].items():
        if "skipped" in suite:
            console.print(f"{name}: skipped: {suite['skipped']}", style="yellow", soft_wrap=True)
            continue
        console.print(_speeds(name, suite["summary"]))
        console.print(_rounds(suite["summary"]))


def _speeds(name: str, summary: dict[str, Any]) -> Any:
    made = output.table(
        "prompts", *METHODS, "plain : transformers", "speculative : plain", "same ids",
        title=f"{name}: tokens per second and ratios, median (range)",
    )  # fmt: skip
    for category, entry in summary.items():
        same = "yes" if all(entry["equal_token_ids"].values()) else "NO"
        ratios = [_spread(entry["ratios"][r]) for r in ("plain_to_transformers", "speculative_to_plain")]
        made.add_row(category, *(f"{entry['tokens_per_second'][m]['median']:.1f}" for m in METHODS), *ratios, same)
    return made


def _rounds(summary: dict[str, Any]) -> Any:
    made = output.table(
        "prompts", "tokens/round", "accept length", "plain ms", "draft ms", "verify ms", "other ms", "best length",
        title="milliseconds of a plain and of a speculative round, and the draft length that theory advises",
    )  # fmt: skip
    for category, entry in summary.items():
        plain, drafted = entry["ms_per_round"]["plain"], entry["ms_per_round"]["speculative"]
        best = entry["advice"]["best_draft_length"]
        made.add_row(
            category, f"{entry['tokens_per_round']:.2f}", f"{entry['acceptance_length']:.2f}", f"{plain['verify']:.1f}",
            *(f"{drafted[part]:.1f}" for part in ("draft", "verify", "other")), str(best) if best else "off",
        )  # fmt: skip
    return made


def _spread(entry: dict[str, float]) -> str:
    return f"{entry['median']:.2f} ({entry['min']:.2f}-{entry['max']:.2f})"
