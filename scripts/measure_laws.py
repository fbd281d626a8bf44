"""Run the tests of losslessness with many samples, and keep how well each case fitted.

    python scripts/measure_laws.py --samples 50000 --workers 8 --out results/laws.json

The tests are those of the suite: samples against enumerated laws, and broken rules and drafters that they must reject.
Needs pytest and pytest-xdist. Exit status 1 if a test failed.
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
NAMES = ("lossless", "lossless_processors", "tree_acceptance", "trees")
FIT = re.compile(r"chi-square (\S+), critical (\S+) \((\d+) bins, n = (\d+)\), total variation (\S+)")


def main() -> int:
    """Run pytest, collect what the tests recorded, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        report = Path(work) / "report.xml"
        tests = [str(ROOT / "tests" / "decoding" / f"test_{name}.py") for name in NAMES]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-n", str(arguments.workers)]
        command += [f"--junitxml={report}", *tests]
        environment = {**os.environ, "SPECDEC_SAMPLES": str(arguments.samples)}
        status = subprocess.run([*command, "-k", "law or broken or rejected or mask"], env=environment, check=False)
        cases = _cases(ET.parse(report).getroot())
    result = {"benchmark": "laws", **origin(), "cases": cases}
    write_json(arguments.out, result)
    print(f"{len(cases)} cases, {sum(not c['passed'] for c in cases)} failed")
    return status.returncode


def _cases(root: ET.Element) -> list[dict[str, Any]]:
    cases = []
    for test in root.iter("testcase"):
        for entry in test.iter("property"):
            found = FIT.fullmatch(entry.get("value", ""))
            if found is None:
                continue
            statistic, critical, bins, n, distance = found.groups()
            fit = {"statistic": _finite(statistic), "critical": float(critical), "bins": int(bins)}
            passed = test.find("failure") is None
            case = {"test": test.get("name"), "passed": passed, **fit, "samples": int(n)}
            cases.append({**case, "total_variation": float(distance)})
    return cases


def _finite(text: str) -> float | None:
    """None for infinity: a sample where the law is zero. JSON has no such number."""
    value = float(text)
    return None if math.isinf(value) else value


if __name__ == "__main__":
    raise SystemExit(main())
