"""Ablations in processes of their own: one that is killed many times over, and one that two processes share.

`python -m tests.helpers.forks CONFIG FOLDER KILLS` imports everything and computes nothing itself: its forks are runs
that start at once, and have no thread to inherit. FOLDER/killed was killed KILLS times and is not finished;
FOLDER/shared is.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from specdec.research.ablation import load_ablation, merge, run_ablation

LONGEST_WAIT = 0.1  # seconds, about what a row takes: some are killed within a row, some while one is written


def forked(work: Callable[[], None]) -> int:
    """A child that does this and ends; its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def killed(config: Path, out: Path, chance: random.Random) -> bool:
    """Start a run, kill it at a random time between the first and the second row that it writes; whether it was still
    running."""
    journal = out / "journal-00000.jsonl"
    size = journal.stat().st_size if journal.is_file() else 0
    child = forked(lambda: print(run_ablation(load_ablation(config), out)))
    while not journal.is_file() or journal.stat().st_size <= size:
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            return False
        time.sleep(0.0005)
    written, end = journal.stat().st_size, time.perf_counter() + chance.uniform(0, LONGEST_WAIT)
    while journal.stat().st_size <= written and time.perf_counter() < end:
        time.sleep(0.0002)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def share(config: Path, out: Path, shard: str) -> None:
    """What one of several processes does."""
    run_ablation(load_ablation(config), out, shard)
    merge(out)


def main() -> None:
    """Exit status 0: every run was killed before its end, and no process of the launch failed."""
    config, folder, kills = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    chance = random.Random(5)
    for count in range(kills):
        if not killed(config, folder / "killed", chance):
            sys.exit(f"run {count + 1} ended before it was killed")
    children = [forked(partial(share, config, folder / "shared", f"{i}/2")) for i in range(2)]
    ends = [os.waitpid(child, 0)[1] for child in children]
    if any(ends):
        sys.exit("a process of the launch failed")


if __name__ == "__main__":
    main()
