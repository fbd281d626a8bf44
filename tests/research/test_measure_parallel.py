"""`scripts/measure_parallel.py` on a CPU: every layout runs, and texts are one process's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.scripts import load_script


@pytest.mark.full
def test_every_layout_gives_the_texts_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "parallel.json"
    load_script("measure_parallel").main(["--tiny", "--out", str(out)])
    found = json.loads(out.read_text())
    assert not [name for name, layout in found["measured"].items() if "failure" in layout]
    assert {layout for layout, *_ in found["rows"]} == {
        "tensor parallel", "prompts shared", "draft's own GPU", "layers on both", "one GPU",
    }  # fmt: skip
    for layout, name, ratio, texts in found["rows"]:
        same, count = texts.removesuffix(" texts equal").split(" of ")
        assert same == count, (layout, name)
        assert ratio > 0
    assert all(found["within"].values())
    assert found["within"].keys() == {"one GPU", "layers on both", "tensor parallel", "ranks"}
