"""Long runs say how far they are, what they would do, and what is left when they are interrupted."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import output
from specdec.errors import SpecdecError
from specdec.research.bench import smoke
from specdec.research.bench.config import Scenario
from specdec.research.bench.scenario import ScenarioRun
from tests.cli.test_cli import refused, run, run_json
from tests.helpers.grid import grid, save_pair

GRID = {
    "pairs": {"p": {"target": "demo-target", "draft": "demo-draft"}},
    "strategies": {"lookup": ["prompt-lookup"], "draft": ["draft-model"]},
    "prompts": ["import os\n", "a = 1\n", "b = 2\n"],
    "generation": {"max_new_tokens": 12}, "axes": {"k": [2, 5]},
}  # fmt: skip


def test_off_a_terminal_lines_say_how_far_it_is_and_how_long_it_will_take() -> None:
    lines = output.LogLines("ablation", 40)
    lines.advance("loading")
    assert lines.line(30.0) == "ablation: 0 of 40, loading, 0:30 min so far"
    for _ in range(10):
        lines.advance("p: draft, prompt/3")
    assert lines.line(100.0) == "ablation: 10 of 40, p: draft, prompt/3, 1:40 min so far, about 5:00 min left"
    assert output.LogLines("loading", None).line(3725.0) == "loading, 1 h 02 min so far"


def test_a_long_step_is_heard_of_and_a_short_run_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with output.progress("short", 2) as advance:
        advance()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(output, "LOG_EVERY", 0.01)
    with output.progress("long", 2) as advance:
        advance("one step")
        said, end = "", time.monotonic() + 50
        while said.count("\n") < 2 and time.monotonic() < end:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert said.count("\n") > 1
    assert all(line.startswith("long: 1 of 2, one step, 0:") for line in said.splitlines())


@pytest.mark.full
def test_progress_counts_what_is_done_and_never_more_than_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[tuple[str, int, int | None]] = []
    leave = output.LogLines.__exit__

    def noted(self: output.LogLines, *error: Any) -> None:
        ended.append((self.what, self.done, self.steps))
        leave(self, *error)

    monkeypatch.setattr(output.LogLines, "__exit__", noted)
    pair = save_pair(tmp_path)
    made = {**GRID, "pairs": {"a": pair, "b": {**pair, "dtype": "bfloat16"}}, "prompts": ["a = 1"]}
    (tmp_path / "a.yaml").write_text(json.dumps(made | {"generation": {"max_new_tokens": 2}}))
    run("ablate", str(tmp_path / "a.yaml"), "--out", str(tmp_path / "out"))
    assert ended == [("ablation", 10, 10)]  # two loads are no steps
    with monkeypatch.context() as terminal:
        terminal.setenv("FORCE_COLOR", "1")
        with output.progress("two", 2) as advance:
            for description in ("loading", *"abc"):
                advance(description)
    assert "3/2" not in capsys.readouterr().err


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    def working(*arguments: Any, **options: Any) -> None:
        raise AssertionError("worked")

    monkeypatch.setattr("specdec.models.loading.LoadedPair.load", working)
    (tmp_path / "a.yaml").write_text(json.dumps(GRID))
    return str(tmp_path / "a.yaml")


def test_a_dry_run_counts_and_does_nothing(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    found = run_json("ablate", config, "--out", str(out), "--dry-run")
    assert (found["cells"], found["drafting_cells"], found["prompts"], found["rows"]) == (5, 4, 3, 15)
    assert (found["rows_done"], found["calls_left"], found["loads"], found["seconds_left"]) == (0, 15, 1, None)
    assert found["most_passes"] == 15 * 12
    assert found["least_passes"] == 3 * (12 + 2 * 12 // 3 + 2 * 12 // 6)
    assert run_json("ablate", config, "--out", str(out), "--dry-run", "--shard", "0/2")["calls_left"] == 10
    shown = run("ablate", config, "--out", "no_such_folder", "--dry-run").stdout
    assert "0 in no_such_folder" in shown
    assert "unknown before the first rows" in shown
    assert "72 (all accepted) to 180 (nothing accepted)" in run("ablate", config, "--out", str(out), "--dry-run").stdout
    assert not out.exists()
    with monkeypatch.context() as without:  # counting needs no package that the table or the report needs
        for package in ("matplotlib", "pyarrow"):
            without.setitem(sys.modules, package, None)
        assert run_json("ablate", config, "--out", str(out), "--dry-run")["rows"] == 15
        assert "specdec[research]" in refused("ablate", config, "--out", str(out))
    (tmp_path / "b.yaml").write_text(json.dumps({**GRID, "pairs": {"p": {"target": "./nowhere/m", "draft": "d"}}}))
    assert "pairs.p: " in refused("ablate", str(tmp_path / "b.yaml"), "--out", str(out), "--dry-run")


def test_an_interrupted_ablation_keeps_its_rows_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = grid(save_pair(tmp_path), axes={}, prompts=("one", "two", "three")).to_dict()
    (tmp_path / "a.yaml").write_text(json.dumps(made))
    from specdec.research.ablation import runner

    generate, calls = runner._generate, []

    def interrupting(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return generate(*arguments)

    monkeypatch.setattr(runner, "_generate", interrupting)
    arguments = ("ablate", str(tmp_path / "a.yaml"), "--out", str(tmp_path / "out"))
    done = run(*arguments)
    assert done.exit_code == 130
    rows = made["prompts"] and 3 * len({*made["strategies"], "plain"})
    assert done.stderr.startswith(f"interrupted: 3 of {rows} rows are kept in {tmp_path / 'out'}; the same command")
    left = run_json(*arguments, "--dry-run")
    assert (left["rows_done"], left["calls_left"]) == (3, rows - 3)
    assert left["seconds_left"] > 0
    assert run(*arguments).exit_code == 0
    assert len(calls) == rows + 1


# -- benchmarks -------------------------------------------------------------------------------------------------------


def _scenario(ends_at: int, monkeypatch: pytest.MonkeyPatch) -> ScenarioRun:
    made = ScenarioRun("s", Scenario(None, 1, 2, 8, 3), None, [None, None], [], None, lambda what: None)  # type: ignore[arg-type, list-item]

    def turn(repeat: int, i: int) -> None:
        if len(made.runs) == ends_at:
            raise KeyboardInterrupt
        made.runs.append({"repeat": repeat, "call": i})

    monkeypatch.setattr(made, "_turn", turn)
    return made


def test_an_interrupted_scenario_keeps_whole_repeats_or_the_calls_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for ends_at, kept in ((5, 4), (4, 4), (3, 2), (1, 1)):
        made = _scenario(ends_at, monkeypatch)
        made._repeats()
        assert (len(made.runs), made.stopped) == (kept, True)
    whole = _scenario(99, monkeypatch)
    whole._repeats()
    assert (len(whole.runs), whole.stopped) == (6, False)
    with pytest.raises(KeyboardInterrupt):
        _scenario(0, monkeypatch)._repeats()


def test_a_smoke_benchmark_that_is_stopped_leaves_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = iter([{"summary": {"total": 1}}, {"summary": {"total": 2}, "interrupted": True}])
    monkeypatch.setattr(smoke, "SUITES", dict.fromkeys(("embedded-pair", "smollm2-135m", "never"), lambda quick: None))
    monkeypatch.setattr(smoke, "measure", lambda suite, progress: next(found))
    out = tmp_path / "out.json"
    done = run("bench", "--smoke", "--out", str(out))
    assert (done.exit_code, done.stderr) == (130, f"interrupted: what was measured so far is in {out}\n")
    kept = json.loads(out.read_text())["suites"]
    assert {name: entry["summary"]["total"] for name, entry in kept.items()} == {"embedded-pair": 1, "smollm2-135m": 2}


def test_a_smollm2_that_is_not_there_is_refused_and_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_SMOLLM2", "/nowhere/smollm2")
    message = refused("bench", "--smoke", "--suite", "smollm2-135m")
    assert "SPECDEC_SMOLLM2: /nowhere/smollm2" in message
    with pytest.raises(SpecdecError, match="SPECDEC_SMOLLM2"):
        smoke.run_smoke()
