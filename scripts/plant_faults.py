"""Plant ten faults, one at a time, and show that the fast tier catches each.

Every fault is one replaced piece of code in a copy of the package; the tests that should notice run on the copy. The
script fails if a fault goes unnoticed: then a test is missing. CONTRIBUTING.md lists what catches what.

    python scripts/plant_faults.py              all ten, some seconds to a minute each
    python scripts/plant_faults.py mask trim    those whose names contain one of these
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Fault(NamedTuple):
    """path: a file of the package; right, wrong: the code and what replaces it; tests: who should notice."""

    name: str
    path: str
    right: str
    wrong: str
    tests: tuple[str, ...]


ACCEPTANCE = "decoding/acceptance.py"
ATTENTION = "tests/models/test_attention.py"
REFERENCE = "tests/decoding/test_reference.py"
RESIDUAL = "torch.where(rejected[:, None] & (mass > 0), residual / mass, p)"
FAULTS = (
    Fault(
        "residual without clamp", ACCEPTANCE, "residual = (weight[:, None] * p - q).clamp(min=0)",
        "residual = weight[:, None] * p - q", (REFERENCE,),
    ),
    Fault("bonus token from q", ACCEPTANCE, RESIDUAL, RESIDUAL.replace(", p)", ", q)"), (REFERENCE,)),
    Fault(
        "trim one short", "drafters/draft_model/core.py", "min(n_accepted, drafted - 1)",
        "min(n_accepted + 1, drafted - 1)", (REFERENCE,),
    ),
    Fault("mask off by one", "models/attention.py", "full = age >= 0", "full = age >= 1", (ATTENTION,)),
    Fault(
        "EOS inside a block ignored", "decoding/row.py", "            if self.finish_reason is not None:\n",
        "            if self.finish_reason is not None and n + 1 == len(tokens):\n", (REFERENCE,),
    ),
    Fault(
        "processors not on the accepted prefix", "decoding/verification.py", "pending.emitted)",
        "pending.emitted[:, :1])",
        ("tests/sampling/test_processors.py", "tests/decoding/test_processor_rows.py"),
    ),
    Fault(
        "counters off by one", "stats.py", "self.n_gen_tokens += n", "self.n_gen_tokens += n + 1",
        ("tests/test_stats.py", "tests/decoding/test_engine.py", "tests/drafters/test_chain.py"),
    ),
    Fault(
        "accept not told", "drafters/chain.py", "        winner.accept(row, n_accepted, False)\n", "",
        ("tests/drafters/test_chain.py",),
    ),
    Fault(
        "seed shared by rows", "decoding/call.py", "row_key(settings.seed, i)", "row_key(settings.seed, 0)",
        (REFERENCE,),
    ),
    Fault(
        "n-gram index one late", "drafters/base.py", "    return ends + 1, n\n", "    return ends + 2, n\n",
        ("tests/drafters/test_drafters.py",),
    ),
)  # fmt: skip


def copied(fault: Fault, folder: Path) -> None:
    """Make a copy of the package with the fault, beside links to everything else. Raises SystemExit if the code that
    the fault replaces is no more there once."""
    for entry in ROOT.iterdir():
        if entry.name not in ("specdec", ".git"):
            (folder / entry.name).symlink_to(entry)
    shutil.copytree(ROOT / "specdec", folder / "specdec", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "specdec" / fault.path
    code = path.read_text(encoding="utf-8")
    if code.count(fault.right) != 1:
        raise SystemExit(f"{fault.name}: {fault.path} holds {code.count(fault.right)} times {fault.right!r}")
    path.write_text(code.replace(fault.right, fault.wrong), encoding="utf-8")


def first_failure(fault: Fault) -> str | None:
    """The first test of the fast tier that fails with the fault planted."""
    with tempfile.TemporaryDirectory(prefix="specdec-fault-") as name:
        folder = Path(name)
        copied(fault, folder)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *fault.tests]
        environment = {**os.environ, "PYTHONPATH": name, "SPECDEC_SLOWEST": "60"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
    if done.returncode == 1 and found:
        return found[1]
    if done.returncode != 0:
        raise SystemExit(f"{fault.name}: the tests did not run\n{done.stdout}{done.stderr}")
    return None


def main() -> int:
    """Plant the faults that are asked for; print what catches each."""
    asked = sys.argv[1:]
    missed = 0
    for fault in FAULTS:
        if asked and not any(part in fault.name for part in asked):
            continue
        failure = first_failure(fault)
        missed += failure is None
        print(f"{fault.name}: {failure or 'NOT CAUGHT by ' + ', '.join(fault.tests)}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
