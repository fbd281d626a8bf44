"""`specdec generate`: text from any pair, with every figure of the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specdec.cli import output
from specdec.cli.inputs import chain, given, read_prompts, with_extra
from specdec.config import PairConfig, RunConfig, load_yaml
from specdec.decoding.result import Generation
from specdec.decoding.validation import check_chain, check_generation, check_loading
from specdec.errors import SpecdecError
from specdec.research.demo import load_decoder

INTERRUPTED = 130


def generate(
    target: Annotated[str | None, typer.Option(help="Hub id, folder, GGUF file, or demo-target.")] = None,
    draft: Annotated[str | None, typer.Option(help="The same for the draft, or demo-draft.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; may be given several times.")] = None,
    prompt_file: Annotated[list[Path] | None, typer.Option(help="A file with one prompt; - = standard input.")] = None,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Put prompts through the chat template.")] = False,
    strategies: Annotated[str | None, typer.Option(help="a,b:key=value by priority; none = plain decoding.")] = None,
    config: Annotated[Path | None, typer.Option(help="A run as a YAML file; options given here win over it.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate for a prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 = greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 = off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="In (0, 1].")] = None,
    min_p: Annotated[float | None, typer.Option(help="In [0, 1].")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 = off.")] = None,
    seed: Annotated[int | None, typer.Option(help="Row i is keyed (seed, i).")] = None,
    acceptance: Annotated[str | None, typer.Option(help="leviathan, match or coupled.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    ignore_eos: Annotated[bool | None, typer.Option("--ignore-eos", help="Go on after an end token.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows in one pass.")] = None,
    num_return_sequences: Annotated[int | None, typer.Option(help="Texts for each prompt.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Any other generation option, as name=value.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda[:n].")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    draft_device: Annotated[str | None, typer.Option(help="The draft's device.")] = None,
    draft_dtype: Annotated[str | None, typer.Option(help="The draft's dtype.")] = None,
    attn_implementation: Annotated[str | None, typer.Option(help="sdpa or eager in place of specdec's own.")] = None,
    trust_remote_code: Annotated[bool | None, typer.Option("--trust-remote-code", help="Run a model's code.")] = None,
    revision: Annotated[str | None, typer.Option(help="The target's revision on the hub.")] = None,
    draft_revision: Annotated[str | None, typer.Option(help="The draft's revision on the hub.")] = None,
    translate: Annotated[bool, typer.Option("--translate", help="Draft through text: another vocabulary.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as one JSON document.")] = False,
) -> None:
    """Generate from one prompt or many with a target, and perhaps a draft and a chain of strategies."""
    pair = given(
        target=target, draft=draft, device=device, dtype=dtype, draft_device=draft_device, draft_dtype=draft_dtype,
        attn_implementation=attn_implementation, trust_remote_code=trust_remote_code, revision=revision,
        draft_revision=draft_revision,
    )  # fmt: skip
    options = given(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        repetition_penalty=repetition_penalty, acceptance=acceptance, stop_strings=stop, ignore_eos=ignore_eos,
        batch_size=batch_size, num_return_sequences=num_return_sequences,
    )  # fmt: skip
    options = with_extra(options, option or [])
    run = make_run(config, pair, options, strategies, translate, read_prompts(prompt or [], prompt_file or []))
    _generate(run, chat, as_json)


def make_run(
    config: Path | None, pair: dict[str, Any], options: dict[str, Any], strategies: str | None, translate: bool,
    prompts: list[str],
) -> RunConfig:  # fmt: skip
    """The config file, if any, with what was given on the command line over it. Raises SpecdecError before any work."""
    if config is None:
        if "target" not in pair:
            raise SpecdecError("no target: give --target, or --config with a pair")
        run = RunConfig(PairConfig(**pair))
    else:
        run = load_yaml(config)
        run = replace(run, pair=replace(run.pair, **pair))
    check_loading(run.pair)
    settings = check_generation({**run.generation, **options})
    chosen = chain(strategies, translate, run.pair.draft is not None, run.strategies)
    if chosen is not None:
        check_chain(chosen, run.pair.draft is not None, settings)
    run = replace(
        run, generation={**run.generation, **options}, prompts=tuple(prompts) or run.prompts, strategies=chosen
    )  # fmt: skip
    if not run.prompts:
        raise SpecdecError("no prompt: give --prompt or --prompt-file")
    return run


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
    made = output.table("figure", "value")
    made.add_row("finish reasons", ", ".join(sorted(set(out.finish_reasons))))
    made.add_row("tokens", str(stats["emitted_tokens"]))
    made.add_row("tokens/s", f"{stats['emitted_tokens'] / max(stats['time']['total'], 1e-9):.1f}")
    made.add_row("tokens per round", output.number(stats["tokens_per_round"]))
    made.add_row("acceptance length", output.number(stats["acceptance_length"]))
    made.add_row("time", output.time_text(stats["time"]))
    if out.lossy:
        made.add_row("lossy", "yes: the acceptance rule changes the law of the text")
    console.print(made)
    for text in out.provenance["warnings"]:
        console.print(text, style="yellow", soft_wrap=True)
    if palette:
        for one in (output.strategy_table(stats), output.position_table(stats), output.counter_table(stats)):
            console.print(one)
