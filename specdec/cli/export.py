"""`specdec export`: a chain in the options of vLLM, SGLang and llama.cpp, and what has no counterpart there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli import output
from specdec.cli.inputs import base_run, given
from specdec.cli.options import ACCEPTANCE, STRATEGIES, AsJson
from specdec.errors import unknown_name
from specdec.files.engines import ENGINES
from specdec.files.own_code import split_list

if TYPE_CHECKING:
    from specdec.research.export import Exported

FAILED = 1


def export(
    target: Annotated[str | None, typer.Option(help="Hub id, folder or GGUF file; it is not read.")] = None,
    draft: Annotated[str | None, typer.Option(help="The same for the draft.")] = None,
    strategies: Annotated[str | None, typer.Option(help=STRATEGIES)] = None,
    config: Annotated[Path | None, typer.Option(help="A run as a YAML file; other options override it.")] = None,
    acceptance: Annotated[str | None, typer.Option(help=ACCEPTANCE)] = None,
    temperature: Annotated[float | None, typer.Option(help="Of most requests; at 0 lossless rules are alike.")] = None,
    engine: Annotated[list[str] | None, typer.Option(help=f"{', '.join(ENGINES)}; repeat for more.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit status 1 if anything has no counterpart.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a chain as vLLM, SGLang and llama.cpp take it, and say what has no counterpart there."""
    for name in engine or ():
        if name not in ENGINES:
            raise unknown_name("engine", name, ENGINES)
    run = base_run(config, given(target=target, draft=draft))
    from specdec.decoding.validation import check_generation, check_loading
    from specdec.research.export import document, read_chain, translate

    check_loading(run.pair)
    settings = check_generation({**run.generation, **given(acceptance=acceptance, temperature=temperature)})
    if strategies is not None:
        run = replace(run, strategies=tuple(part for part in split_list(strategies) if part != "none"))
    chain = read_chain(run, settings)
    made = {name: translate(name, run.pair, chain, settings) for name in engine or ENGINES}
    if as_json:
        output.print_json({name: document(name, run.pair.target, one) for name, one in made.items()})
    else:
        _print(run.pair.target, made)
    if strict and any(one.lost for one in made.values()):
        raise typer.Exit(FAILED)


def _print(target: Any, made: Mapping[str, Exported]) -> None:
    from specdec.research.export import command

    console = output.stdout()
    for name, one in made.items():
        lines = [f"# {ENGINES[name].version}", shlex.join(command(ENGINES[name], target, one.options))]
        for lost in one.lost:
            option = "" if lost["option"] is None else f"{lost['option']}={lost['value']}"
            lines.append(f"# lost: {' '.join(filter(None, (lost['strategy'], option)))}: {lost['why']}")
        console.print("\n".join(lines), soft_wrap=True, markup=False)
