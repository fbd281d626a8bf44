"""What a result says of itself: when, where and by what it was made; and what of it is kept."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """The machine in words, without its name."""
    import torch

    from specdec.device.processor import processor_fields

    model = processor_fields().get("model name", platform.processor() or platform.machine())
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    system = {"system": platform.system(), "architecture": platform.machine(), "processor": model}
    return {**system, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu}


def origin() -> dict[str, Any]:
    """When, by what and where a result is made: `date` (UTC), `commit`, `versions`, `machine`."""
    from specdec.decoding.provenance import versions

    date = time.strftime("%Y-%m-%d", time.gmtime())
    return {"date": date, "commit": commit(), "versions": versions(), "machine": machine()}


def commit() -> str | None:
    """The commit of the checkout that runs, with `+` where files differ from it; SPECDEC_COMMIT overrides it, for
    copies of a checkout; None where neither is there."""
    given = os.environ.get("SPECDEC_COMMIT")
    if given:
        return given[:12] if re.fullmatch("[0-9a-f]{40}", given) else given
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True)
        state = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, text=True)
    except OSError:
        return None
    return found.stdout.strip() + ("+" if state.stdout.strip() else "") if found.returncode == 0 else None


def warned(result: Mapping[str, Any]) -> list[str]:
    """The warnings in a result, each with its place: a file's scenarios, --smoke's suites and --exactness' groups."""
    places = {name: scenario["contenders"] for name, scenario in result.get("scenarios", {}).items()}
    found = [(place, name, entry.get("warnings", ())) for place, e in places.items() for name, entry in e.items()]
    for place, suite in result.get("suites", {}).items():
        found += [(place, name, lines) for name, lines in suite.get("warnings", {}).items()]
    for group in result.get("groups", ()):
        words = [group["part"], group["dtype"], f"batch {group['batch']}", "exact" if group["exact"] else "not exact"]
        place = ", ".join([*words, *([group["rule"]] if group["rule"] else [])])
        found += [(place, name, run.get("warnings", ())) for name, run in group.get("runs", {}).items()]
    return [f"{place}: {name}: {line}" for place, name, lines in found for line in lines]


def without_rows(result: Any) -> Any:
    """The summary of a result: without the rows of single calls (`runs`), and of each report on a row its verdict."""
    if not isinstance(result, Mapping):
        return [without_rows(part) for part in result] if isinstance(result, list) else result
    kept = {name: part for name, part in result.items() if not (name == "runs" and isinstance(part, list))}
    for name, part in kept.items():
        is_reports = name == "reports" and isinstance(part, list)
        kept[name] = [{n: r[n] for n in ("row", "verdict")} for r in part] if is_reports else without_rows(part)
    return kept
