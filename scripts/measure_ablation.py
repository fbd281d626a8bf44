"""What the ablation runner costs beside decoding: the grid of configs/thousand_cells.yaml on the embedded pair.

    python scripts/measure_ablation.py --out results/ablation_overhead.json [--folder DIR] [--seconds S]

It goes on with what is in DIR, and stops after S seconds: the figures are those of the rows that were run. The rows are
short, eight tokens of one prompt a cell, which is the worst case: the runner's cost is per row. `overhead` is all time
of the process from the config to the last row on the disk, without loading and decoding, over decoding.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from specdec.research.ablation import load_ablation, merge, run_ablation
from specdec.research.bench import origin

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Run the grid and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "thousand_cells.yaml")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seconds", type=int, default=0, help="0 = no limit")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    grid = load_ablation(arguments.config)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(arguments.seconds)
        with suppress(KeyboardInterrupt):
            run_ablation(grid, folder)
        signal.alarm(0)
        started = time.perf_counter()
        summary = merge(folder, partial=True)
        seconds = time.perf_counter() - started
    assert summary is not None
    result = {
        "what": "ablation runner beside decoding", "cells": len(grid.expand()),
        "tokens_per_row": grid.generation["max_new_tokens"], **origin(),
        "rows": summary["rows"], "runner": summary["runner"], "overhead": summary["runner"]["overhead"],
        "merge_seconds": seconds,
        "rows_compared": summary["gate"]["compared"], "rows_differing": len(summary["gate"]["differing"]),
        "failed_rows": sum(e["rows"] for e in summary["errors"]),
    }  # fmt: skip
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
