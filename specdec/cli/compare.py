"""`specdec compare`: which draft or strategy is best for a target, and why."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from specdec.cli import output
from specdec.cli.ablate import print_gate
from specdec.cli.inputs import check_names, given, refuse_beside
from specdec.cli.options import SETS, AsJson, DropLoops, Generation, KvCacheDtype, Prompts, with_groups
from specdec.files.texts import check_writable, model_path
from specdec.research.bench.tables import Table
from specdec.stats import PER_TESTED

FAILED = 1
POSITIONS = 6
CHAIN = "A chain, a,b:key=value, perhaps with a rule of its own, a@typical:eps=0.3; repeat for more."


@with_groups
def compare(
    target: Annotated[str, typer.Option(help="Hub id, folder, GGUF file, or demo-target.")],
    prompts: Prompts,
    generation: Generation,
    draft: Annotated[list[str] | None, typer.Option(help="A draft model; repeat for more.")] = None,
    strategy: Annotated[list[str] | None, typer.Option(help=CHAIN)] = None,
    k: Annotated[int | None, typer.Option(min=1, help="Tokens that a draft model drafts.", show_default="5")] = None,
    dataset: Annotated[str | None, typer.Option(help=SETS, show_default="spec-bench")] = None,
    category: Annotated[list[str] | None, typer.Option(help="Only this category; repeat for more.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts, spread over categories.", show_default="8")] = None,
    longest: Annotated[int | None, typer.Option(min=1, help="Cut prompts to this many tokens.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda[:n].")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    draft_dtype: Annotated[str | None, typer.Option(help="The drafts' dtype.")] = None,
    kv_cache_dtype: KvCacheDtype = None,
    out: Annotated[Path | None, typer.Option(help="Folder for rows, table and report; resumes if it exists.")] = None,
    baseline: Annotated[str | None, typer.Option(help="Compare the others with this candidate, by prompt.")] = None,
    drop_loops: DropLoops = False,
    as_json: AsJson = False,
) -> None:
    """Rank drafts and strategies for one target on the same prompts, with the reasons that fit.

    Without --max-new-tokens, 64 tokens a row. A candidate that cannot run is listed with the reason, and the others
    run. Exit status 1: a candidate or a row failed, or a text differs from plain decoding's where it must not.
    """
    model_path(target)
    for entry in strategy or ():
        check_names(entry.partition("@")[0])
    texts = prompts.entries()
    options = {"max_new_tokens": 64, **generation.settings()}
    from specdec.decoding.shard import Shard
    from specdec.research.ablation.compare import compare as run_compare
    from specdec.research.ablation.compare import compare_config
    from specdec.research.ablation.merge import check_packages
    from specdec.research.ablation.store import Plan
    from specdec.research.ablation.work import work_left

    if texts:
        typed = "--prompt" if prompts.prompt else "--prompt-file"
        refuse_beside(typed, given(dataset=dataset, category=category, limit=limit))
    if not draft:
        refuse_beside("strategies alone", given(k=k, draft_dtype=draft_dtype))
    data = given(dataset=dataset, categories=category, limit=limit, longest=longest)
    loading = given(device=device, dtype=dtype, draft_dtype=draft_dtype, kv_cache_dtype=kv_cache_dtype)
    if out is not None:
        check_writable(out, "--out", folder=True)
    refused: dict[str, str] = {}
    config = compare_config(target, draft or [], strategy or [], k or 5, texts, data, loading, refused, **options)
    for name, reason in refused.items():
        output.warn(f"{name} cannot run: {reason}")
    check_packages()
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specdec-compare-")))
        kept = f"rows are kept in {out}; the same command goes on" if out else "rows are kept only with --out DIR"
        work = work_left(Plan.make(config), folder, Shard())
        with output.on_interrupt(lambda: kept), output.progress("comparing", work.calls_left) as advance:
            result = run_compare(config, folder, advance, baseline, drop_loops, refused)
    if as_json:
        output.print_json(result)
    else:
        _print(output.stdout(), result)
    if result["gate"]["differing"] or result["errors"] or result["refused"]:
        raise typer.Exit(FAILED)


def _print(console: Console, result: Mapping[str, Any]) -> None:
    from specdec.research.ablation.tables import candidates_table, comparison_table, loop_warning

    console.print(_prompts(result["prompts"]), soft_wrap=True, markup=False)
    shown = candidates_table(result["candidates"])
    rows = [*shown.rows, *([name, "refused", *["-"] * (len(shown.heads) - 2)] for name in result["refused"])]
    console.print(output.rendered(shown._replace(rows=rows), whole_names=False))
    for name, reason in result["refused"].items():
        console.print(f"{name}: refused: {reason}", style="yellow", soft_wrap=True, markup=False)
    _print_acceptance(console, result["candidates"])
    if result.get("comparisons"):
        console.print(output.rendered(comparison_table(result), whole_names=False))
    for entry in result["candidates"]:
        for reason in entry["reasons"]:
            console.print(f"[bold]{escape(entry['name'])}[/]: {escape(reason)}", soft_wrap=True)
    print_gate(console, result["gate"])
    summary = {**result, "settings": {entry["name"]: entry for entry in result["candidates"]}}
    if warning := loop_warning(summary):
        console.print(warning, style="yellow", soft_wrap=True)
    for error in result["errors"]:
        line = f"{error['rows']} rows of {error['setting']} failed: {error['error']}"
        console.print(escape(line), style="red", soft_wrap=True)


def _prompts(asked: Mapping[str, Any]) -> str:
    from specdec.research.ablation.config import DATASET

    named = asked["dataset"] or "your own"
    line = f"{asked['count']} prompt{'s' * (asked['count'] != 1)} of {named}: {', '.join(asked['categories'])}"
    return line + "; --dataset, --prompt or --prompt-file choose others" * (asked["dataset"] == DATASET)


def _print_acceptance(console: Console, candidates: list[Mapping[str, Any]]) -> None:
    depth = min(POSITIONS, max((len(c["conditional_acceptance_rate_per_position"]) for c in candidates), default=0))
    categories = list(dict.fromkeys(name for c in candidates for name in c["conditional_acceptance_rate_per_category"]))
    rows = []
    for c in candidates:
        positions = [*c["conditional_acceptance_rate_per_position"], *([None] * depth)][:depth]
        values = [*positions, *(c["conditional_acceptance_rate_per_category"].get(name) for name in categories)]
        rows.append([c["name"], *(output.number(v) for v in values)])
    heads = ("candidate", *(str(i + 1) for i in range(depth)), *map(escape, categories))
    title = f"{PER_TESTED}, by position and by category"
    console.print(output.rendered(Table(title, heads, rows), whole_names=False))
