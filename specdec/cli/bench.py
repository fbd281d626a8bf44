"""`specdec bench --smoke | --exactness`: this machine's figures, and whether output equals plain decoding's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specdec.cli import output
from specdec.cli.exactness import exactness_config, print_exactness
from specdec.cli.inputs import given
from specdec.errors import SpecdecError
from specdec.research.bench.smoke import METHODS, SUITES, equal, run_smoke
from specdec.research.exactness import PARTS, run_exactness
from specdec.research.exactness_summary import exact_holds

FAILED = 1


def bench(
    smoke: Annotated[bool, typer.Option("--smoke", help="Speeds, in a few minutes.")] = False,
    exactness: Annotated[bool, typer.Option("--exactness", help="Equality with plain decoding, and its cost.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="smoke: fewer prompts and repeats.")] = False,
    suite: Annotated[list[str] | None, typer.Option(help="smoke: only this suite; several times.")] = None,
    config: Annotated[Path | None, typer.Option(help="exactness: settings as a YAML file.")] = None,
    target: Annotated[str | None, typer.Option(help="exactness: hub id, folder, GGUF file or demo-target.")] = None,
    draft: Annotated[str | None, typer.Option(help="exactness: the draft; default: the target, coarsened.")] = None,
    inflate: Annotated[str | None, typer.Option(help="exactness: grow the target: 1b, 3b, hidden_size=...:...")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="exactness: number of prompts.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="exactness: tokens of a row.")] = None,
    device: Annotated[str | None, typer.Option(help="exactness: cpu or cuda[:n].")] = None,
    dtype: Annotated[str | None, typer.Option(help="exactness: float32, bfloat16 or float16.")] = None,
    part: Annotated[list[str] | None, typer.Option(help="exactness: only this part; several times.")] = None,
    time_limit: Annotated[float | None, typer.Option(help="exactness: seconds after which no run starts.")] = None,
    shared_device: Annotated[
        bool, typer.Option("--shared-device", help="exactness: other work runs there too: leave times out.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure transformers, plain and speculative decoding in turns, and compare their token ids; or compare plain and
    speculative decoding row by row, with exact mode and without.

    Exit status 1: token ids differ from plain decoding's (without exact mode they may, and do not count).
    """
    if smoke == exactness:
        raise SpecdecError("bench needs --smoke or --exactness, one of them")
    options = given(
        inflate=inflate, prompts=prompts, max_new_tokens=max_new_tokens, device=device, dtype=dtype,
        shared_device=shared_device or None,
    )  # fmt: skip
    others = given(config=config, target=target, draft=draft, part=part, time_limit=time_limit, **options)
    foreign = list(others) if smoke else [n for n, v in (("quick", quick), ("suite", suite)) if v]
    if foreign:
        raise SpecdecError(f"--{foreign[0].replace('_', '-')} is no option of {'--smoke' if smoke else '--exactness'}")
    if out is not None:
        _check_writable(out)
    if smoke:
        with output.progress("benchmark") as advance:
            result = run_smoke(quick, suite or tuple(SUITES), advance)
        passed = equal(result)
    else:
        settings = exactness_config(config, target, draft, options)
        with output.progress("exactness") as advance:
            result = run_exactness(settings, part or PARTS, time_limit, advance, lambda so_far: _save(out, so_far))
        passed = exact_holds(result)
    _save(out, result)
    if as_json:
        output.print_json(result)
    elif smoke:
        _print(output.stdout(), result)
    else:
        print_exactness(output.stdout(), result)
    if not passed:
        raise typer.Exit(FAILED)


def _save(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


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
