"""scripts/measure_ablation.py: what counts as the runner's cost, and that a measurement goes on where it stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from specdec.config import dump_yaml
from tests.helpers.grid import PROMPTS, grid, save_pair
from tests.helpers.scripts import load_script


def test_the_runners_cost_is_all_time_beside_decoding() -> None:
    measure = load_script("measure_ablation")
    found = measure.overheads({"wall": 110.0, "load": 4.0, "decode": 100.0}, reading=1.0, merging=2.0)
    assert found["overhead"] == pytest.approx(0.13)
    assert found["parts"] == {
        "loading": pytest.approx(0.04), "between_cells": pytest.approx(0.06), "config_and_merge": pytest.approx(0.03),
    }  # fmt: skip
    assert measure.overheads({"wall": 1.0, "load": 1.0, "decode": 0.0}, 0.0, 0.0)["overhead"] is None


def test_a_measurement_of_the_runner_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped by its time limit, here after the first row, and run again."""
    measure = load_script("measure_ablation")
    (tmp_path / "c.yaml").write_text(dump_yaml(grid(save_pair(tmp_path / "models"), prompts=PROMPTS[:1])))
    out = tmp_path / "out.json"
    arguments = ["x", "--config", str(tmp_path / "c.yaml"), "--folder", str(tmp_path / "run"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--seconds", "0"])
    monkeypatch.setattr(measure, "TOLD_EVERY", 1)

    class Stopping(measure.Clock):  # type: ignore[name-defined, misc]
        def __call__(self, what: str) -> None:
            super().__call__(what)
            if self.done == 2:
                raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(measure, "Clock", Stopping)
        measure.main()
    assert json.loads(out.read_text())["rows"] == 1
    assert "5 rows are missing, about" in capsys.readouterr().err
    measure.main()
    result = json.loads(out.read_text())
    assert (result["rows"], result["runner"]["rows"], result["runner"]["sessions"]) == (6, 6, 2)
    assert result["overhead"] == pytest.approx(sum(result["parts"].values()))
    assert result["overhead"] > result["runner"]["overhead"]
    assert "1 of 5 rows; " in capsys.readouterr().err
