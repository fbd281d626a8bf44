"""Run the notebooks, and store what they print now.

    python scripts/write_notebooks.py                  # all of notebooks/
    python scripts/write_notebooks.py trees quickstart # some
    python scripts/write_notebooks.py --check          # write nothing; say what differs, exit status 1 if anything does

A notebook runs offline, in its own folder, on one thread, in a fresh kernel. What is stored is free of what only this
run knows: times of execution, kernel versions, standard error. Outputs of cells tagged `volatile` (seconds, and what
follows from seconds) are stored but not compared.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
VOLATILE = "volatile"
LONGEST_CELL = 900  # seconds
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
RICH = ("image/png", "text/html")
DECIMAL = re.compile(r"(?<![\w.])-?\d+\.\d+(?![\w.])")


def run(path: Path) -> Any:
    """The notebook with fresh outputs, in the form that is stored. Raises nbclient's CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)
    # One thread, so that sums are taken in one order wherever the notebook runs.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    client = NotebookClient(notebook, timeout=LONGEST_CELL, resources={"metadata": {"path": str(path.parent)}})
    client.execute(env=environment)
    return normalised(notebook)


def normalised(notebook: Any) -> Any:
    """The notebook without what differs from run to run and from kernel to kernel."""
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({"tags": tags} if (tags := cell.metadata.get("tags")) else {})
        if cell.cell_type == "code":
            cell.outputs = list(_outputs(cell.outputs))
    return notebook


def _outputs(outputs: Sequence[Any]) -> Iterator[Any]:
    """Standard output in one piece at its first place, then everything displayed; no standard error."""
    printed = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")
    if printed:
        yield nbformat.v4.new_output("stream", name="stdout", text=printed)
    for output in outputs:
        if output.output_type != "stream":
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
            yield output


def differences(stored: Any, fresh: Any) -> list[str]:
    """What the stored outputs say that a fresh run does not, one line a cell; volatile cells are left out."""
    found = []
    for number, (old, new) in enumerate(zip(stored.cells, fresh.cells, strict=True)):
        if new.cell_type != "code" or VOLATILE in new.metadata.get("tags", ()):
            continue
        pairs = zip_longest(map(_shown, old.outputs), map(_shown, new.outputs), fillvalue=("", "nothing"))
        for (old_kind, old_text), (new_kind, new_text) in pairs:
            if old_kind != new_kind or not same_text(old_text, new_text):
                found.append(f"cell {number}: stored {old_kind} {old_text!r}, now {new_kind} {new_text!r}")
    return found


def _shown(output: Any) -> tuple[str, str]:
    """An output's kind, and what of it is compared: text, and of images and pages only that they are there."""
    if output.output_type == "stream":
        return "text", output.text
    rich = [kind for kind in RICH if kind in output.get("data", {})]
    return (" and ".join(rich), "") if rich else ("text", output.get("data", {}).get("text/plain", ""))


def same_text(stored: str, fresh: str) -> bool:
    """Whether two texts are equal, where decimals may differ by one in their last printed digit: sums in another order
    differ by 1e-6, and so can fall on the other side of a rounding."""
    if DECIMAL.split(stored) != DECIMAL.split(fresh):
        return False
    pairs = zip(DECIMAL.findall(stored), DECIMAL.findall(fresh), strict=True)
    return all(_digits(a) == _digits(b) and abs(float(a) - float(b)) < 1.5 * 10.0 ** -_digits(a) for a, b in pairs)


def _digits(number: str) -> int:
    return len(number.partition(".")[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="notebooks without .ipynb; default: all")
    parser.add_argument("--check", action="store_true", help="compare with what is stored, write nothing")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - {path.stem for path in NOTEBOOKS}:
        parser.error(f"no notebook {sorted(unknown)[0]!r}; known: {', '.join(p.stem for p in NOTEBOOKS)}")
    wrong = 0
    for path in NOTEBOOKS:
        if arguments.names and path.stem not in arguments.names:
            continue
        fresh = run(path)
        found = differences(nbformat.read(path, as_version=4), fresh)
        wrong += bool(found)
        print(f"{path.name}: {len(found)} outputs differ" if found else f"{path.name}: as stored", flush=True)
        print("".join(f"  {line}\n" for line in found), end="")
        if not arguments.check:
            nbformat.write(fresh, path)
    return 1 if arguments.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
