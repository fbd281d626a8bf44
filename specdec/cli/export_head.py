"""`specdec export-head FOLDER --out DIR`: an EAGLE head in the layout that another engine reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec.cli import output
from specdec.cli.options import AsJson
from specdec.errors import SpecdecError
from specdec.files.texts import check_writable

LAYOUT = "safeailab, specforge, angelslim or speculators; vLLM and SGLang read the second and the last."


def export_head(
    folder: Annotated[str, typer.Argument(help="A head's folder, in any layout, or demo-head.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    layout: Annotated[str, typer.Option(help=LAYOUT)] = "specforge",
    verifier: Annotated[str | None, typer.Option(help="speculators: the target's name, for vLLM.")] = None,
    drafted: Annotated[int, typer.Option(min=1, help="speculators: tokens that vLLM drafts a round.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Write an EAGLE head as other tools read it."""
    from specdec.drafters.eagle3 import export, load_head

    new = not out.exists()
    check_writable(out, "--out", folder=True)
    try:
        loaded = load_head(folder)
    except SpecdecError:
        if new:  # a folder that is no head leaves no empty `out`
            out.rmdir()
        raise
    notes = [*loaded.notes, *export(loaded.head, out, layout, verifier, drafted)]
    if as_json:
        output.print_json({"read": loaded.layout, "written": layout, "folder": str(out), "notes": notes})
        return
    for note in notes:
        output.warn(note)
    output.stdout().print(f"written: {out}, from {loaded.layout} to {layout}", soft_wrap=True, markup=False)
