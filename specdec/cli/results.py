"""`specdec results DIR --by strategy,k,position`: figures of an ablation, a comparison or a trace by any grouping."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from specdec.cli import output
from specdec.cli.options import AsJson, DropLoops
from specdec.errors import SpecdecError
from specdec.files.texts import check_writable, is_file, is_folder, parse_yaml


def results(
    source: Annotated[str, Argument(metavar="DIR", help="An ablation's folder, a table, a trace, or a bench's JSON.")],
    by: Annotated[str | None, Option(help="What to group by, as strategy,k,position.", show_default="setting")] = None,
    where: Annotated[list[str] | None, Option(help="Only rows with k=4 or k=[2,4]; repeat for more.")] = None,
    figures: Annotated[str | None, Option(help="Columns of the table, as tokens_per_round,speedup.")] = None,
    baseline: Annotated[str | None, Option(help="Compare every setting with this one, paired by prompt.")] = None,
    drop_loops: DropLoops = False,
    as_csv: Annotated[bool, Option("--csv", help="Print CSV.")] = False,
    as_latex: Annotated[bool, Option("--latex", help="Print a LaTeX table (booktabs).")] = False,
    as_json: AsJson = False,
    out: Annotated[Path | None, Option(help="With --csv or --latex: write to this file instead.")] = None,
) -> None:
    """Print figures by any grouping, with 95 % intervals over prompts.

    Groups: strategy, position, length (of the draft), and every axis or column of the table, such as setting, k,
    temperature, category, prompt.
    """
    if as_csv + as_latex + as_json > 1:
        raise SpecdecError("give one of --csv, --latex and --json")
    if baseline is not None and by is not None:
        raise SpecdecError("--baseline compares settings: give it without --by")
    if figures is not None and (as_csv or as_json):
        raise SpecdecError("--figures chooses columns of a table or of --latex; --csv and --json have them all")
    if out is not None and not (as_csv or as_latex):
        raise SpecdecError("--out writes a file of --csv or --latex: give one of them")
    if out is not None:
        check_writable(out, "--out")
    wanted: dict[str, list[Any]] = {}
    for name, value in map(_pair, where or ()):
        wanted[name] = [*wanted.get(name, ()), *(value if isinstance(value, list) else [value])]
    there = (Path(f"{source}{suffix}") for suffix in ("", ".json", ".safetensors"))
    if not any(is_file(path) or is_folder(path) for path in there):
        raise SpecdecError(f"no results table at {source}")
    from specdec.research.results import Results

    found = Results.load(source)
    if drop_loops:
        found = found.without_loops()
    if wanted:
        found = found.where(wanted)
    table = found.by(*_listed(by)) if baseline is None else found.against(baseline)
    if as_json:
        output.print_json(table.flat())
    elif as_csv or as_latex:
        text = table.to_csv(out) if as_csv else table.to_latex(out, _listed(figures) or None)
        if out is None:
            print(text, end="")
    else:
        output.stdout().print(output.rendered(table.text_table(_listed(figures) or None), whole_names=False))


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SpecdecError(f"--where takes name=value, such as k=4, got {text!r}")
    try:
        return name.strip(), parse_yaml(value, "--where")
    except SpecdecError:
        return name.strip(), value
