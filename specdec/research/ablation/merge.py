"""From a folder's journals to its table, summary and report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.files.texts import write_file
from specdec.research.ablation.journal import read_journals
from specdec.research.ablation.report import need_matplotlib, render
from specdec.research.ablation.store import read_checked
from specdec.research.ablation.summary import summarise
from specdec.research.ablation.table import TABLE, build_table, need_pyarrow, write_table

SUMMARY, REPORT = "summary.json", "report.html"


def check_packages() -> None:
    """Raise SpecdecError now, and not after hours, where a package for the table or the report is missing."""
    need_pyarrow()
    need_matplotlib()


def merge(folder: Path, partial: bool = False) -> dict[str, Any] | None:
    """Write table.parquet, summary.json and report.html; the summary. partial: also while rows are missing; without
    it, None then, and nothing is written. Raises SpecdecError for a folder without any row."""
    rows, missing = build_table(folder)
    if missing and not partial:
        return None
    if not rows:
        raise SpecdecError(f"{folder} has no rows yet")
    manifest = read_checked(folder)
    made = {
        **{name: manifest[name] for name in ("date", "commit", "versions", "machine")},
        "missing": missing, "runner": _runner(folder), **summarise(rows),
    }  # fmt: skip
    write_table(rows, folder / TABLE)
    write_file(folder / SUMMARY, json.dumps(made, indent=1) + "\n", "summary")
    write_file(folder / REPORT, render(manifest, rows, made), "report")
    return made


def _runner(folder: Path) -> Mapping[str, float | int | None]:
    """What the runner cost beside decoding, over all sessions that ended by themselves."""
    sessions = [entry for entry in read_journals(folder) if entry.get("kind") == "session"]
    total = {name: sum(s[name] for s in sessions) for name in ("rows", "wall", "load", "decode")}
    beside = total["wall"] - total["load"] - total["decode"]
    return {**total, "sessions": len(sessions), "overhead": beside / total["decode"] if total["decode"] else None}
