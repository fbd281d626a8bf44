"""Run the tests of losslessness with many samples, and keep how well each case fitted.

    python scripts/measure_laws.py --samples 20000 --workers 16 --out results/laws.json
    python scripts/write_results.py    # the tables of docs/losslessness.md

The tests are those of the suite that are marked `law`: samples against enumerated distributions, and broken rules,
strategies and policies that they must reject. Needs pytest and pytest-xdist. Exit status 1 if a test failed.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from specdec.files.compact_json import write_json
from specdec.research.bench import origin

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("test", "samples", "chi-square", "99.9 % quantile", "bins", "total variation")
FIT = re.compile(r"chi-square (\S+), critical (\S+) \((\d+) bins, n = (\d+)\), total variation (\S+)")


def main() -> int:
    """Run pytest, collect what the tests recorded, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        report = Path(work) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "law", "-n", str(arguments.workers), str(ROOT / "tests")]
        environment = {**os.environ, "SPECDEC_SAMPLES": str(arguments.samples)}
        status = subprocess.run([*command, f"--junitxml={report}"], env=environment, check=False)
        cases = sorted(_cases(ET.parse(report).getroot()))
    result = {"benchmark": "laws", **origin(), "columns": COLUMNS, "cases": cases}
    write_json(arguments.out, result)
    print(f"{len(cases)} cases")
    return status.returncode


def _cases(root: ET.Element) -> list[list[Any]]:
    """The `COLUMNS` of every test, also of those that failed."""
    cases = []
    for test in root.iter("testcase"):
        for entry in test.iter("property"):
            found = FIT.fullmatch(entry.get("value", ""))
            if found is not None:
                statistic, critical, bins, n, distance = found.groups()
                case = [(test.get("name") or "").removeprefix("test_"), int(n), _finite(statistic), float(critical)]
                cases.append([*case, int(bins), float(distance)])
    return cases


def _finite(text: str) -> float | None:
    """None for infinity: a sample where the law is zero. JSON has no such number."""
    value = float(text)
    return None if math.isinf(value) else value


if __name__ == "__main__":
    raise SystemExit(main())
