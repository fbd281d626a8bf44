"""`specdec demo`: the embedded pair, its text coloured by strategy, and whether it equals plain decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from specdec.cli import output
from specdec.cli.inputs import given, make_run
from specdec.cli.options import AsJson, Generation, KvCacheDtype, Prompts, Run, with_groups

if TYPE_CHECKING:
    from specdec.config import RunConfig
    from specdec.research.demo import DemoResult

FAILED = 1
SAME = "identical to plain decoding"


@with_groups
def demo(
    prompts: Prompts,
    run: Run,
    generation: Generation,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each way; medians are shown.")] = 3,
    kv_cache_dtype: KvCacheDtype = None,
    as_json: AsJson = False,
) -> None:
    """Decode with the embedded models, show who proposed each token, and compare with plain decoding.

    Exit status 1: the text is not the text of plain decoding, although it must be.
    """
    from specdec.config import load_yaml

    config, options = None if run.config is None else load_yaml(run.config), generation.settings()
    texts = prompts.texts()
    from specdec.research.demo import DEMO, run_demo, with_demo_head

    base = config or DEMO
    base = replace(base, pair=replace(base.pair, **given(kv_cache_dtype=kv_cache_dtype)))
    typed = run.strategies if base.pair.target != DEMO.pair.target else with_demo_head(run.strategies)
    made = make_run(base, options, typed, texts)
    with output.progress("decoding, plainly and with drafts in turns", 2 + 2 * repeats) as advance:
        result = run_demo(made, repeats, advance)
    if as_json:
        output.print_json(result.to_dict())
    else:
        _print(output.stdout(), result, made)
    if result.identical is False:
        raise typer.Exit(FAILED)


def _print(console: Console, result: DemoResult, run: RunConfig) -> None:
    shown = result.shown
    stats = shown.stats.to_dict()
    palette = output.colours(list(stats["strategies"]))
    for prompt, ids, origins in zip(run.prompts, shown.token_ids, shown.origins, strict=True):
        text = Text(prompt, style="dim") + output.coloured(result.decoder.tokenizer, ids, origins, palette)
        console.print(text, soft_wrap=True)
        console.rule(style="dim")
    console.print(output.legend(palette))
    console.print(_summary(result, stats))
    console.print(output.strategy_table(stats))
    console.print(output.position_table(stats))
    output.print_loops(console, shown.token_ids)
    for line in shown.provenance["warnings"]:
        console.print(line, style="yellow", soft_wrap=True, markup=False)


def _summary(result: DemoResult, stats: dict[str, Any]) -> Any:
    from specdec.research.demo import tokens_per_second

    shown = {
        "tokens per round": output.number(stats["tokens_per_round"]),
        "acceptance length": output.number(stats["acceptance_length"]),
        "time": output.time_text(stats["time"]),
        "plain": f"{tokens_per_second(result.plain):.1f} tokens/s",
        "speculative": f"{tokens_per_second(result.speculative):.1f} tokens/s",
        "speed-up": f"{result.speedup:.2f}x",
        SAME: {True: "yes", False: "NO", None: "not comparable"}[result.identical],
    }
    return output.facts(shown, **{SAME: "bold red" if result.identical is False else "bold"})
