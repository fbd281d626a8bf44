"""From a folder's journals to its table, summary and report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError, need
from specdec.files.texts import write_file
from specdec.research.ablation.report import render
from specdec.research.ablation.store import Store, read_checked
from specdec.research.ablation.summary import summarise
from specdec.research.ablation.table import TABLE, table_of, write_table
from specdec.research.ablation.weak_drafts import weak_drafts
from specdec.research.loops import without_loops

SUMMARY, REPORT = "summary.json", "report.html"


def check_packages() -> None:
    """Raise SpecdecError now, and not after hours, where a package for the table or the report is missing."""
    need("pyarrow.parquet", "tables need", "research")
    need("matplotlib", "reports need", "research")


def merge(
    folder: Path, partial: bool = False, baseline: str | None = None, drop_loops: bool = False
) -> dict[str, Any] | None:
    """Write table.parquet, summary.json and report.html, and return the summary.

    partial: also while rows are missing; without it nothing is written then, and None is returned. drop_loops: figures
    and plots without looped texts, which stay in the table. Raises SpecdecError for a folder without any row, and for a
    baseline (`summarise`) that is no setting of it.
    """
    manifest, store = read_checked(folder), Store(folder).read()
    rows, missing = table_of(manifest, store)
    if missing and not partial:
        return None
    if not rows:
        raise SpecdecError(f"{folder} has no rows yet")
    head = {name: manifest[name] for name in ("date", "commit", "versions", "machine")}
    head["models"] = manifest.get("models", {})
    made = {**head, "missing": missing, "runner": store.overhead(), "warnings": weak_drafts(manifest, store)}
    made |= summarise(rows, baseline, drop_loops)
    write_table(rows, folder / TABLE)
    write_file(folder / SUMMARY, json.dumps(made, indent=1) + "\n", "summary")
    shown = without_loops(rows) if drop_loops else rows
    write_file(folder / REPORT, render(manifest, shown, made), "report")
    return made
