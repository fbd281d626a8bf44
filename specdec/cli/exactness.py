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
from specdec.research.exactness.summary import RunRow, rows


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
    made = output.table(
        "dtype x slots", "chain", "identical", "tok/s", "x plain", "tok/round", "accept", "cost",
        title="Rows identical to plain decoding. x plain: speed over the fastest plain; cost: of an exact plain pass",
    )  # fmt: skip
    runs = list(rows(result))
    for row in runs:
        if row.skipped is None:
            failed = row.exact and row.identical != row.prompts
            made.add_row(*_cells(row), style="bold red" if failed else "")
    console.print(made)
    for row in runs:
        if row.skipped is not None:
            console.print(f"{row.part}: {row.setting}, {row.chain}: skipped: {row.skipped}", style="yellow")


def _cells(row: RunRow) -> tuple[str, ...]:
    others = f" ({row.verdicts})" if row.verdicts else ""
    return (
        row.setting, row.chain, f"{row.identical} of {row.prompts}{others}",
        output.number(row.tokens_per_second, 1), output.number(row.speedup), output.number(row.tokens_per_round),
        output.number(row.acceptance), "-" if row.cost is None else f"{row.cost:+.0%}",
    )  # fmt: skip
