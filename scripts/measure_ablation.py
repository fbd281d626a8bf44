"""What the ablation runner costs beside decoding: the grid of configs/thousand_cells.yaml on the embedded pair.

    python scripts/measure_ablation.py --out results/ablation_overhead.json [--folder DIR] [--seconds S]

The rows are short, eight tokens of one prompt a cell, which is the worst case: the runner's cost is per row. `overhead`
is (whole - decoding) / decoding, where the whole is all time from reading the config to the report on the disk, the
models' loading, the time between cells and the merge included; `parts` says which of it is what.

It says how long it will take, stops after S seconds (default: 14 minutes), and goes on with what is in DIR when it is
run again; the figures are those of the rows that are there. A run that was killed has left no times: its rows count
for the merge alone.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from specdec.files.compact_json import write_json
from specdec.research.ablation import AblationConfig, load_ablation, merge, run_ablation
from specdec.research.ablation.store import Plan, Store
from specdec.research.bench import origin

ROOT = Path(__file__).resolve().parents[1]
TOLD_EVERY = 50  # rows


def main() -> None:
    """Run the grid and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "thousand_cells.yaml")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "ablation_overhead")
    parser.add_argument("--seconds", type=int, default=840, help="0 = no limit")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    started = time.perf_counter()
    grid = load_ablation(arguments.config)
    reading = time.perf_counter() - started
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(arguments.seconds)
    with suppress(KeyboardInterrupt):
        run_ablation(grid, arguments.folder, progress=Clock(rows_to_run(grid, arguments.folder)))
    signal.alarm(0)
    started = time.perf_counter()
    summary = merge(arguments.folder, partial=True)
    merging = time.perf_counter() - started
    assert summary is not None
    runner = summary["runner"]
    result = {
        "what": "ablation runner beside decoding",
        "cells": len(grid.expand()),
        "tokens_per_row": grid.generation["max_new_tokens"],
        **origin(),
        "rows": summary["rows"],
        "runner": runner,
        **overheads(runner, reading, merging),
        "reading_seconds": reading,
        "merge_seconds": merging,
        "rows_compared": summary["gate"]["compared"],
        "rows_differing": len(summary["gate"]["differing"]),
        "failed_rows": sum(e["rows"] for e in summary["errors"]),
    }
    write_json(arguments.out, result)
    print(json.dumps(result, indent=1))
    if summary["missing"]:
        needed = summary["missing"] * runner["wall"] / max(1, runner["rows"])
        print(f"{summary['missing']} rows are missing, about {needed:.0f} s: run it again to go on", file=sys.stderr)


def rows_to_run(grid: AblationConfig, folder: Path) -> int:
    """Rows that are not in the folder yet."""
    plan = Plan.make(grid)
    store = Store(folder)
    store.read()
    return sum(not store.done(cell, p, plan.fingerprint(p)) for cell in plan.cells for p in plan.prompts)


def overheads(runner: Mapping[str, Any], reading: float, merging: float) -> dict[str, Any]:
    """Time beside decoding, relative to decoding: all of it, and by part. Seconds of the runner as `merge` has them."""
    decode = runner["decode"]
    seconds = {
        "loading": runner["load"],
        "between_cells": runner["wall"] - runner["load"] - decode,
        "config_and_merge": reading + merging,
    }
    parts = {name: value / decode if decode else None for name, value in seconds.items()}
    return {"overhead": sum(seconds.values()) / decode if decode else None, "parts": parts}


class Clock:
    """Says on standard error every so many rows how many are left, and how long they will take."""

    def __init__(self, rows: int):
        self.rows, self.done, self.started = rows, 0, time.perf_counter()

    def __call__(self, what: str) -> None:
        if what.startswith("loading"):
            return
        if self.done and self.done % TOLD_EVERY == 0:
            left = (self.rows - self.done) * (time.perf_counter() - self.started) / self.done
            print(f"{self.done} of {self.rows} rows; {left:.0f} s to go", file=sys.stderr, flush=True)
        self.done += 1


if __name__ == "__main__":
    main()
