"""`specdec check`: whether a target and a draft work together, from configs and tokenizers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from specdec.cli import output
from specdec.cli.options import AsJson, Models, with_groups
from specdec.errors import SpecdecError

if TYPE_CHECKING:
    from specdec.models.pair_report import PairReport


@with_groups
def check(
    models: Models,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in one pass, for the memory.")] = 1,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a row; default: the target's context.")] = None,
    translate: Annotated[bool, typer.Option("--translate", help="Accept a draft with another vocabulary.")] = False,
    as_json: AsJson = False,
) -> None:
    """Report vocabulary, context, size ratio and memory of a pair; no weights are loaded.

    Exit status 2: the pair cannot work; the line on standard error says why.
    """
    if models.target is None:
        raise SpecdecError("no target: give --target")
    if translate and models.draft is None:
        raise SpecdecError("--translate is about a draft: give --draft")
    from specdec.models.loading import inspect_pair

    with output.progress("reading configs and tokenizers"):
        report = inspect_pair(**models.given(), translate=translate)
    if as_json:
        memory = {"batch_size": batch_size, "tokens": report.row_tokens(tokens)}
        output.print_json({**report.to_dict(batch_size, tokens), "memory_for": memory})
    else:
        _print(output.stdout(), report, batch_size, tokens)


def _print(console: Console, report: PairReport, batch_size: int, tokens: int | None) -> None:
    made = output.table("model", *(m.role for m in report.models))
    made.add_row("name", *(m.name for m in report.models))
    made.add_row("type", *(m.model_type for m in report.models))
    made.add_row("parameters", *(f"{m.parameters:,}" for m in report.models))
    made.add_row("vocabulary", *(f"{m.vocab_size:,}" for m in report.models))
    made.add_row("context", *(f"{m.context:,} tokens" if m.states_context else "not stated" for m in report.models))
    made.add_row("dtype, device", *(f"{m.dtype}, {m.device}" for m in report.models))
    console.print(made)
    if report.vocabulary is not None:
        console.print(f"vocabularies: {report.vocabulary}; draft : target = {report.size_ratio:.3f}")
    rows = "1 row" if batch_size == 1 else f"{batch_size} rows"
    sizes = output.table("memory", "MiB", title=f"Memory for {rows} of {report.row_tokens(tokens):,} tokens")
    for name, size in report.memory(batch_size, tokens).items():
        sizes.add_row(name.replace("_", " "), f"{size / 2**20:,.1f}")
    console.print(sizes)
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
