"""`specdec generate`: text from any pair, with every figure of the run."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from specdec.cli import output
from specdec.cli.inputs import base_run, given, make_run
from specdec.cli.options import CHAT, AllGeneration, AsJson, Models, Prompts, Run, with_groups
from specdec.config import RunConfig
from specdec.decoding.result import Generation
from specdec.research.demo import load_decoder

INTERRUPTED = 130


@with_groups
def generate(
    models: Models,
    prompts: Prompts,
    run: Run,
    generation: AllGeneration,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help=CHAT)] = False,
    translate: Annotated[bool, typer.Option("--translate", help="Draft through text: another vocabulary.")] = False,
    attn_implementation: Annotated[str | None, typer.Option(help="sdpa or eager in place of specdec's own.")] = None,
    as_json: AsJson = False,
) -> None:
    """Generate from one prompt or many with a target, and perhaps a draft and a chain of strategies."""
    base = base_run(run.config, {**models.given(), **given(attn_implementation=attn_implementation)})
    made = make_run(base, generation.settings(), run.strategies, prompts.read(), translate)
    _generate(made, chat, as_json)


def _generate(run: RunConfig, chat: bool, as_json: bool) -> None:
    prompts: list[Any] = [[{"role": "user", "content": p}] if chat else p for p in run.prompts]
    with output.progress("loading") as advance:
        decoder = load_decoder(run)
        advance("generating")
        out = decoder.generate(prompts, **run.generation)
    if as_json:
        output.print_json(out.to_dict())
    else:
        _print(output.stdout(), decoder.tokenizer, out)
    if "interrupted" in out.finish_reasons:
        raise typer.Exit(INTERRUPTED)


def _print(console: Console, tokenizer: Any, out: Generation) -> None:
    stats = out.stats.to_dict()
    palette = output.colours(list(stats["strategies"]))
    for i, (ids, text) in enumerate(zip(out.token_ids, out.texts or [], strict=True)):
        if len(out) > 1:
            console.rule(f"row {i}: {out.finish_reasons[i]}", style="dim")
        # A stop string is in the ids and not in the text.
        console.print(output.coloured(tokenizer, ids, out.origins[i], palette)[: len(text)], soft_wrap=True)
    console.rule(style="dim")
    if palette:
        console.print(output.legend(palette))
    for i, error in enumerate(out.errors):
        if error is not None:
            console.print(f"row {i} failed: {error}", style="red")
    shown = {
        "finish reasons": ", ".join(sorted(set(out.finish_reasons))),
        "tokens": stats["emitted_tokens"],
        "tokens/s": f"{stats['emitted_tokens'] / max(stats['time']['total'], 1e-9):.1f}",
        "tokens per round": output.number(stats["tokens_per_round"]),
        "acceptance length": output.number(stats["acceptance_length"]),
        "time": output.time_text(stats["time"]),
    }
    if out.lossy:
        shown["lossy"] = "yes: the acceptance rule changes the distribution of the text"
    console.print(output.facts(shown))
    for text in out.provenance["warnings"]:
        console.print(text, style="yellow", soft_wrap=True)
    if palette:
        for one in (output.strategy_table(stats), output.position_table(stats), output.counter_table(stats)):
            console.print(one)
