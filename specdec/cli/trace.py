"""`specdec trace record | show`: keep every round of a run, and look at it on the terminal or as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from specdec.cli import output
from specdec.cli.inputs import as_prompts, base_run, make_run, named_prompts
from specdec.cli.options import CHAT, AsJson, Generation, Models, Run, SetPrompts, with_groups
from specdec.files.texts import check_readable, check_writable, is_file
from specdec.stats import PER_DRAFTED, PER_TESTED

if TYPE_CHECKING:
    from specdec.config import RunConfig
    from specdec.decoding.result import Round
    from specdec.research.prompts.datasets import Prompt
    from specdec.research.traces.rounds import Piece
    from specdec.research.traces.trace import Trace

app = typer.Typer(
    help="Record every round of a run, and show it.", context_settings={"help_option_names": ["-h", "--help"]}
)
GAP = " ... "
Html = Annotated[Path | None, typer.Option("--html", help="Also write the token page to this file.")]


@app.command("record")
@with_groups
def record_run(
    out: Annotated[Path, typer.Option(help="Files to write: OUT.safetensors and OUT.json.")],
    models: Models,
    prompts: SetPrompts,
    run: Run,
    generation: Generation,
    chat: Annotated[bool | None, typer.Option("--chat/--no-chat", help=CHAT)] = None,
    top: Annotated[int, typer.Option(min=1, help="Record this many of the most likely tokens per position.")] = 5,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Generate, and record every round. Warns on standard error while drafts are hardly accepted."""
    base, options = base_run(run.config, models.given()), generation.settings()
    chosen = prompts.read()
    from specdec.research.traces.trace_files import paths_of

    for path in (*paths_of(out), *([] if html is None else [html])):
        check_writable(path, "--out" if path != html else "--html")
    made = make_run(base, options, run.strategies, [p.text for p in chosen])
    trace = _record(made, chosen or named_prompts(made.prompts), (chat, prompts.longest), top)
    trace.save(out)
    _write_page(trace, html)
    facts = {"file": str(out), "rows": len(trace.rows), "rounds": len(trace.rounds)}
    if as_json:
        output.print_json(facts)
    else:
        output.stdout().print(output.facts(facts))
    if interrupted := sum(row.finish_reason == "interrupted" for row in trace.rows):
        raise KeyboardInterrupt(f"{interrupted} of {len(trace.rows)} rows are cut; what was recorded is in {out}")


def _record(run: RunConfig, prompts: Sequence[Prompt], form: tuple[bool | None, int | None], top: int) -> Trace:
    """form: --chat and --longest."""
    from specdec.decoding.prompts import chat_rows
    from specdec.research.demo import load_decoder
    from specdec.research.traces.monitor import Monitor
    from specdec.research.traces.trace import record

    with output.progress("loading"):
        decoder = load_decoder(run)
        given = as_prompts(prompts, decoder.tokenizer, *form)
    with output.share_done("recording") as progress:
        monitor = Monitor(decoder, chat=all(chat_rows([p.content for p in given])), warn=output.warn)
        ids, categories = [p.id for p in prompts], [p.category for p in prompts]
        named: dict[str, Any] = {"top": top, "ids": ids, "categories": categories}
        return record(decoder, given, **named, watch=monitor, progress=progress, **run.generation)


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="A trace, by either of its files or without a suffix.")],
    row: Annotated[list[int] | None, typer.Option(help="Only this row; repeat for more.")] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="Only rounds that this strategy drafted; repeat for more.")
    ] = None,
    rounds: Annotated[bool, typer.Option("--rounds", help="Print a line for each round in place of the text.")] = False,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Print the text with every token's origin, rejected drafts in [-brackets-]; with --json the rounds as recorded."""
    if html is not None:
        check_writable(html, "--html")
    if not any(is_file(f"{path}{suffix}") for suffix in ("", ".json", ".safetensors")):
        check_readable(f"{path}.json", what="trace file")
    from specdec.research.traces.trace import Trace

    trace = Trace.load(path)
    chosen = trace.select(row, strategy)
    _write_page(trace, html)
    if as_json:
        data = {"rows": [asdict(r) for r in trace.rows], "rounds": [asdict(r) for r in chosen], "stats": trace.stats}
        output.print_json({**data, "provenance": trace.provenance})
        return
    console = output.stdout()
    palette = output.colours(trace.strategies)
    for index in row or range(len(trace.rows)):
        of_row = [r for r in chosen if r.row == index]
        console.rule(Text(f"row {index} {trace.rows[index].id} {trace.rows[index].finish_reason}"), style="dim")
        if rounds:
            console.print(_round_table(trace, of_row))
        else:
            console.print(_text(trace, index, of_row, palette), soft_wrap=True)
    console.rule(style="dim")
    if palette:
        console.print(output.legend(palette))
        console.print(_analysis_table(trace, row, strategy))


def _write_page(trace: Trace, html: Path | None) -> None:
    if html is not None:
        trace.to_html(html)


def _text(trace: Trace, index: int, rounds: Sequence[Round], palette: dict[str, str]) -> Text:
    """The row's text, with `...` in place of the rounds that were filtered out."""
    from specdec.research.traces.rounds import pieces_of

    row, shown = trace.rows[index], {id(r) for r in rounds}
    text = Text(row.prompt_text or " ".join(map(trace.text_of, row.prompt)), style="dim")

    def kind(p: Piece) -> tuple[bool, bool]:
        return id(p.round) in shown, p.place < 0

    for (is_shown, is_rejected), group in groupby(pieces_of(trace, index), key=kind):
        pieces = list(group)
        colours = [palette.get(p.round.strategy or "", "") for p in pieces]
        if not is_shown:
            text.append("" if text.plain.endswith(GAP) else GAP, style="dim")
        elif is_rejected:
            rejected = "".join(p.text for p in pieces).replace("\n", "⏎")
            text.append(f"[-{rejected}-]", style=f"{colours[0]} dim strike")
        else:
            for p, colour in zip(pieces, colours, strict=True):
                text.append(p.text if row.pieces else f"{p.text} ", style="" if p.node is None else colour)
    return text


def _round_table(trace: Trace, rounds: Sequence[Round]) -> Any:
    made = output.table("strategy", "position", "drafted", "accepted", "p", "TV", "draft ms", "verify ms", "text")
    for r in rounds:
        counts = (str(r.position), str(len(r.draft)), str(r.accepted))
        distances = r.details.tv if r.details is not None and r.details.tv is not None else []
        numbers = (" ".join(f"{x:.2f}" for x in values) for values in (r.p, distances))
        times = (f"{r.times[phase] * 1e3:.1f}" for phase in ("draft", "verify"))
        made.add_row(Text(r.strategy or "-"), *counts, *numbers, *times, Text(repr(r.text or r.tokens)))
    return made


def _analysis_table(trace: Trace, rows: list[int] | None, strategies: list[str] | None) -> Any:
    from specdec.research.traces.analysis import analyse

    # Of trees each node counts here, which p and q are of; `results` counts a level once.
    of_nodes = any(r.parents is not None for r in trace.select(rows, strategies))
    names = ("tested", PER_TESTED, "expected", PER_DRAFTED)
    heads = ("strategy", "position", *(f"{name}, of nodes" if of_nodes else name for name in names))
    made = output.table(*heads, title="Acceptance")
    for entry in analyse(trace, ("strategy", "position"), rows, strategies):
        rates = (entry.conditional_acceptance_rate, entry.expected, entry.draft_acceptance_rate)
        made.add_row(*map(str, (*entry.key, entry.tested)), *(output.number(rate, 3) for rate in rates))
    return made
