"""`specdec generate`: text from any pair, with every figure of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from specdec.cli import output
from specdec.cli.inputs import as_prompts, base_run, given, make_run, named_prompts
from specdec.cli.options import CHAT, AllGeneration, AsJson, Models, Run, SetPrompts, with_groups
from specdec.errors import SpecdecError
from specdec.files.texts import check_writable, write_file

if TYPE_CHECKING:
    from specdec.config import RunConfig
    from specdec.decoding.result import Generation
    from specdec.research.prompts.datasets import Prompt

# Of the provenance:
SHARED = ("models", "weights", "strategies", "own_code", "seed", "settings", "devices", "dtypes", "versions")


@with_groups
def generate(
    models: Models,
    prompts: SetPrompts,
    run: Run,
    generation: AllGeneration,
    chat: Annotated[bool | None, typer.Option("--chat/--no-chat", help=CHAT)] = None,
    translate: Annotated[bool, typer.Option("--translate", help="Draft through text: another vocabulary.")] = False,
    attn_implementation: Annotated[str | None, typer.Option(help="sdpa or eager in place of specdec's own.")] = None,
    shard: Annotated[str | None, typer.Option(help="Part of the prompts of this process, such as 0/4.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a JSON line for each text to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Generate from one prompt or many with a target, and perhaps a draft and a chain of strategies."""
    if out is not None:
        check_writable(out, "--out")
    base = base_run(run.config, {**models.given(), **given(attn_implementation=attn_implementation)})
    options = {**generation.settings(), **given(shard=shard)}
    chosen = prompts.read()
    made = make_run(base, options, run.strategies, [p.text for p in chosen], translate)
    from specdec.decoding.shard import Shard

    made = replace(made, pair=Shard.parse(made.generation.get("shard")).place(made.pair))
    _generate(made, chosen or named_prompts(made.prompts), (chat, prompts.longest), out, as_json)


def _generate(
    run: RunConfig, prompts: Sequence[Prompt], form: tuple[bool | None, int | None], out: Path | None, as_json: bool
) -> None:
    """form: --chat and --longest."""
    from specdec.research.demo import load_decoder

    with output.progress("loading"):
        decoder = load_decoder(run)
    with output.share_done("generating") as progress:
        asked = as_prompts(prompts, decoder.tokenizer, *form)
        made = decoder.generate(asked, progress=progress, **run.generation)
    if not decoder.ranks.is_first:  # of the processes that share the target, one speaks
        return
    failed = None
    if out is not None:
        lines = (json.dumps(output.finite(record), ensure_ascii=False) + "\n" for record in _records(prompts, made))
        try:
            write_file(out, "".join(lines), "--out")
        except SpecdecError as error:  # the texts are shown, so that the work is not lost
            failed, out = error, None
    if as_json:
        output.print_json({"prompts": [_named(p) for p in prompts], **made.to_dict()})
    else:
        _print(output.stdout(), decoder.tokenizer, made, out)
    if failed is not None:
        raise failed
    if cut := made.finish_reasons.count("interrupted"):
        kept = "is printed" if out is None else f"is in {out}"
        raise KeyboardInterrupt(f"{cut} of {len(made)} texts are cut; what was generated {kept}")


def _named(prompt: Prompt) -> dict[str, Any]:
    return {"id": prompt.id, "category": prompt.category, "prompt": prompt.chat() if prompt.messages else prompt.text}


def _records(prompts: Sequence[Prompt], out: Generation) -> Iterator[dict[str, Any]]:
    """One record a text; of several texts of a prompt, `sample` counts them from 0."""
    samples = out.provenance["settings"]["num_return_sequences"]
    shared = {name: out.provenance[name] for name in SHARED}
    for i, row in enumerate(out):
        yield {
            **_named(prompts[row.index // samples]),
            "sample": row.index % samples,
            "prompt_hash": out.provenance["prompts"][i],
            "chat_template": out.provenance["chat_templates"][i],
            "text": row.text,
            "token_ids": row.token_ids,
            "finish_reason": row.finish_reason,
            "error": row.error,
            "logprobs": row.logprobs,
            "top_logprobs": row.top_logprobs,
            "stats": row.stats.to_dict(),
            "lossy": out.lossy,
            **shared,
        }


def _print(console: Console, tokenizer: Any, out: Generation, file: Path | None) -> None:
    stats = out.stats.to_dict()
    palette = output.colours(list(stats["strategies"]))
    if file is None:
        _print_texts(console, tokenizer, out, palette)
    for row in out:
        if row.error is not None:
            console.print(f"row {row.index} failed: {row.error}", style="red")
    shown = {
        "finish reasons": ", ".join(sorted(set(out.finish_reasons))),
        "tokens": stats["emitted_tokens"],
        "tokens/s": output.number(out.stats.tokens_per_second, 1),
        "tokens per round": output.number(stats["tokens_per_round"]),
        "acceptance length": output.number(stats["acceptance_length"]),
        "time": output.time_text(stats["time"]),
    }
    if out.lossy:
        shown["lossy"] = "yes: the acceptance rule changes the distribution of the text"
    console.print(output.facts(shown))
    output.print_loops(console, out.token_ids)
    output.print_context(console, out.finish_reasons.count("context"), len(out))
    for text in out.provenance["warnings"]:
        console.print(text, style="yellow", soft_wrap=True)
    if palette:
        for one in (output.strategy_table(stats), output.position_table(stats), output.counter_table(stats)):
            console.print(one)
    if file is not None:
        console.print(f"written: {file}, {len(out)} texts", soft_wrap=True, markup=False)


def _print_texts(console: Console, tokenizer: Any, out: Generation, palette: dict[str, str]) -> None:
    for row in out:
        if len(out) > 1:
            console.rule(f"row {row.index}: {row.finish_reason}", style="dim")
        # A stop string is in the ids and not in the text.
        text = output.coloured(tokenizer, row.token_ids, row.origins, palette)[: len(row.text or "")]
        console.print(text, soft_wrap=True)
    console.rule(style="dim")
    if palette:
        console.print(output.legend(palette))
