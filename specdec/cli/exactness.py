"""What `specdec bench --exactness` prints, and its config from the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from specdec.cli import output
from specdec.config import load_yaml
from specdec.research.exactness.equality import Report
from specdec.research.exactness.run import ExactnessConfig
from specdec.research.exactness.summary import rows, table


def exactness_config(
    file: Path | None, target: str | None, draft: str | None, options: dict[str, Any]
) -> ExactnessConfig:
    """The file's config, or the built-in one, with what was given on the command line; another target without a draft
    of its own is drafted for by its coarsened self."""
    config = ExactnessConfig() if file is None else load_yaml(file, ExactnessConfig)
    if target is not None or draft is not None:
        config = replace(config, target=target or config.target, draft=draft, coarsen=None if draft else config.coarsen)
    return replace(config, **options)


def print_exactness(console: Console, result: dict[str, Any]) -> None:
    """Reports of rows that differ, then one table."""
    for group in result["groups"]:
        for name, run in group.get("runs", {}).items():
            for entry in run.get("reports", ()):
                title = f"{group['part']}, exact={group['exact']}, {name}, row {entry['row']}"
                console.rule(title, style="dim", align="left")
                console.print(Report.from_dict(entry).renderable(), soft_wrap=True)
    for dtype, found in result["content"].items():
        console.print(
            f"{dtype}: other content changed a token's logits in {found['differing']} of {found['compared']} passes "
            f"of one shape (largest difference {found['largest']:.3g})"
        )
    runs = list(rows(result))
    failed = [row.exact and row.skipped is None and row.identical != row.prompts for row in runs]
    console.print(output.rendered(table([result]), ["bold red" if it else "" for it in failed]))
