"""Kill an ablation at random moments, resume it, and compare its table with an uninterrupted run's, row for row.

    python scripts/check_resume.py [CONFIG] [--kills 10] [--seed 0] [--longest SECONDS]

Every run is a process of the command line. It is killed (SIGKILL) at a time drawn evenly from its start to `--longest`
seconds after it, by default what the uninterrupted run took: while it imports, loads, decodes, writes a row or merges.
A folder that is finished before enough kills is compared, and another one begun. Compared is everything but what a
clock says. Exit status 1: a table differs.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from specdec.research.ablation import as_rows
from specdec.research.ablation.journal import read_journals
from specdec.research.ablation.table import TIMES

ROOT = Path(__file__).resolve().parents[1]


def start(config: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "specdec", "ablate", str(config), "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def rows_in(out: Path) -> int:
    """Rows that the journal holds; every one must be there once."""
    found = [(e["cell"], e["prompt"]) for e in read_journals(out) if e["kind"] == "row"] if out.is_dir() else []
    if len(set(found)) != len(found):
        sys.exit(f"a row was run twice: {out}")
    return len(found)


def timeless(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in as_rows(out)]


def killed(config: Path, out: Path, wait: float) -> bool:
    """Run for this many seconds at most; whether it was still running."""
    process = start(config, out)
    try:
        process.wait(wait)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True
    if process.returncode:
        sys.exit(f"a resumed run ended with status {process.returncode}")
    return False


def main() -> None:
    """Print a line for each kill, and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=ROOT / "configs" / "smoke.yaml")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float)
    arguments = parser.parse_args()
    chance, kills, folders, same = random.Random(arguments.seed), 0, 1, True
    with tempfile.TemporaryDirectory() as folder:
        whole, out = Path(folder) / "whole", Path(folder) / "killed-1"
        begun = time.perf_counter()
        if start(arguments.config, whole).wait():
            sys.exit("the uninterrupted run failed")
        longest = arguments.longest or time.perf_counter() - begun
        while kills < arguments.kills:
            wait = chance.uniform(0, longest)
            if killed(arguments.config, out, wait):
                kills += 1
                print(f"kill {kills} after {wait:.1f} s: {rows_in(out)} rows", flush=True)
                continue
            same = same and timeless(out) == timeless(whole)
            folders += 1
            out = Path(folder) / f"killed-{folders}"
        killed(arguments.config, out, 100 * longest)
        same = same and timeless(out) == timeless(whole)
        verdict = "is the uninterrupted one" if same else "IS NOT the uninterrupted one"
        print(f"{kills} kills; {rows_in(out)} rows, each once; the table of {folders} folders {verdict}")
        sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
