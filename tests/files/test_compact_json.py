"""JSON for people: the same document, in few lines; and results/ is kept that way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import SpecdecError
from specdec.files.compact_json import WIDTH, compact_json, write_json
from specdec.research.bench.document import without_rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "results").glob("*.json"))
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
DOCUMENTS = st.recursive(LEAVES, lambda part: st.lists(part) | st.dictionaries(st.text(), part), max_leaves=30)


@settings(max_examples=40, deadline=None)
@given(DOCUMENTS)
def test_what_is_written_reads_as_what_was_given(document: Any) -> None:
    assert json.loads(compact_json(document)) == document


@settings(max_examples=40, deadline=None)
@given(st.recursive(st.integers(0, 99), lambda part: st.lists(part, max_size=40), max_leaves=100))
def test_no_line_is_longer_than_the_width_where_parts_are_short(document: Any) -> None:
    assert max(map(len, compact_json(document).splitlines())) <= WIDTH


def test_a_row_of_a_table_is_a_line_and_numbers_fill_lines() -> None:
    rows = [{"name": f"row {i}", "value": i} for i in range(9)]
    lines = compact_json({"rows": rows, "numbers": list(range(60))}).splitlines()
    assert lines[2] == '  {"name": "row 0", "value": 0},'
    assert len([line for line in lines if "row " in line]) == 9
    assert len(lines) == 16


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match="nowhere"):
        write_json(tmp_path / "nowhere" / "out.json", {})


def test_a_summary_has_neither_the_rows_of_calls_nor_whole_reports() -> None:
    chains = {"chain": {"identical": 1, "reports": [{"row": 1, "verdict": "tie", "noise": 0.1}]}}
    result = {"scenarios": {"s": {"contenders": {"a": 1}, "runs": [{"seconds": 1}]}}, "groups": [{"runs": chains}]}
    summary = without_rows(result)
    assert summary["scenarios"] == {"s": {"contenders": {"a": 1}}}
    assert summary["groups"][0]["runs"]["chain"] == {"identical": 1, "reports": [{"row": 1, "verdict": "tie"}]}
    assert result["scenarios"]["s"]["runs"]  # what was given is left alone


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_are_summaries_as_the_writer_writes_them(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == compact_json(without_rows(json.loads(text)))


def test_committed_results_are_few_lines() -> None:
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in RESULTS) <= 6_000
