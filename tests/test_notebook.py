"""The notebooks run from beginning to end, offline, and print what is stored in them.

Text must be equal, but for the last digit of decimals; images and pages must be there. Float32 sums differ between
processors by about 1e-6, which turns a sampled or greedy token over where two candidates are that close: about one
token in a hundred thousand. The notebooks therefore generate little, print counts and rates of few digits, and have
whole texts only from greedy runs. A failure here on a new kind of machine, with a single token changed, is such a tie;
any other says that a notebook's text describes what the library no longer does: run scripts/write_notebooks.py and
read again what stands between the cells. Cells tagged `volatile` hold seconds, and are not compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.helpers.scripts import load_script

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LARGEST_IMAGE, LARGEST_FOLDER = 40_000, 600_000  # bytes


script = load_script("write_notebooks")
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_the_notebooks_that_the_readme_names_are_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {path.stem for path in NOTEBOOKS} == {p.stem for p in NOTEBOOKS if f"notebooks/{p.name}" in text}
    assert "quickstart" in {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=() if p.stem == "quickstart" else pytest.mark.full, id=p.stem) for p in NOTEBOOKS]
)
def test_it_prints_what_is_stored(path: Path) -> None:
    fresh = script.run(path)
    assert script.differences(nbformat.read(path, as_version=4), fresh) == []


@each
def test_it_is_stored_as_the_script_writes_it(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(nbformat.writes(script.normalised(notebook)))


@each
def test_its_images_are_small(path: Path) -> None:
    outputs = [o for cell in nbformat.read(path, as_version=4).cells for o in cell.get("outputs", ())]
    assert all(len(o.data["image/png"]) < LARGEST_IMAGE for o in outputs if "image/png" in o.get("data", {}))


def test_all_together_are_small() -> None:
    assert sum(path.stat().st_size for path in NOTEBOOKS) < LARGEST_FOLDER


@pytest.mark.parametrize(
    ("stored", "fresh", "same"),
    [
        ("accepted 12 of 0.345", "accepted 12 of 0.346", True),
        ("accepted 12 of 0.345", "accepted 12 of 0.347", False),
        ("accepted 12 of 0.345", "accepted 13 of 0.345", False),
        ("rate 0.5", "rate 0.50", False),
        ("z -0.01", "z 0.00", True),
        ("x 1.00", "y 1.00", False),
        ("version 5.24.0", "version 5.25.0", False),
    ],
)
def test_only_the_last_digit_of_a_decimal_may_differ(stored: str, fresh: str, same: bool) -> None:
    assert script.same_text(stored, fresh) is same


def _notebook(*outputs: Any, tags: tuple[str, ...] = ()) -> Any:
    cell = nbformat.v4.new_code_cell("run()", outputs=list(outputs), metadata={"tags": list(tags)})
    return nbformat.v4.new_notebook(cells=[cell])


def _printed(text: str, name: str = "stdout") -> Any:
    return nbformat.v4.new_output("stream", name=name, text=text)


def _picture() -> Any:
    return nbformat.v4.new_output("display_data", data={"image/png": "AAAA", "text/plain": "<Figure>"})


def test_a_changed_output_is_found_unless_its_cell_is_volatile() -> None:
    assert script.differences(_notebook(_printed("1")), _notebook(_printed("2"))) != []
    assert script.differences(_notebook(_printed("1")), _notebook()) != []
    assert script.differences(_notebook(_picture()), _notebook()) != []
    assert script.differences(_notebook(), _notebook(_printed("1"))) != []
    assert script.differences(_notebook(_picture()), _notebook(_picture())) == []
    volatile = [_notebook(_printed(text), tags=("volatile",)) for text in "12"]
    assert script.differences(*volatile) == []


def test_what_is_stored_has_no_trace_of_the_run() -> None:
    pieces = [_printed("a"), _printed("a warning", "stderr"), _printed("b")]
    notebook = _notebook(*pieces)
    notebook.metadata = nbformat.from_dict({"language_info": {"name": "python", "version": "3.99"}})
    notebook.cells[0].metadata["execution"] = {"iopub.execute_input": "2026-01-01"}
    [cell] = script.normalised(notebook).cells
    assert [output.text for output in cell.outputs] == ["ab"]
    assert cell.metadata == {}
    assert "version" not in notebook.metadata["language_info"]
