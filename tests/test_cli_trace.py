"""`specdec trace`: recorded, shown, filtered; errors in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.research.trace import Trace
from tests.test_cli import refused, run, run_json

PAIR = ("--target", "demo-target", "--draft", "demo-draft")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trace") / "run"
    facts = run_json(
        "trace", "record", *PAIR, "--out", str(out), "--prompt", "def [bold]f(n):\n", "--dataset", "humaneval",
        "--limit", "1", "--strategies", "prompt-lookup,draft-model:n_max=5", "--max-new-tokens", "12",
        "--html", str(out.with_suffix(".html")),
    )  # fmt: skip
    assert facts["rows"] == 2
    return out


def test_record_writes_a_trace_and_a_page(recorded: Path) -> None:
    trace = Trace.load(recorded)
    assert [row.id.split("/")[0] for row in trace.rows] == ["prompt 0", "humaneval"]
    assert [len(row.output) for row in trace.rows] == [12, 12]
    assert trace.provenance["settings"]["max_new_tokens"] == 12
    assert recorded.with_suffix(".html").read_text().startswith("<!doctype html>")


def test_show_prints_text_with_rejected_drafts_in_it(recorded: Path) -> None:
    trace = Trace.load(recorded)
    done = run("trace", "show", str(recorded))
    assert done.exit_code == 0, done.output
    assert "def [bold]f(n):" in done.output
    rejected = [r for r in trace.rounds if r.accepted < len(r.draft)]
    assert done.output.count("[-") == len(rejected) > 0
    first = trace.text_of(rejected[0].draft[rejected[0].accepted]).replace("\n", "⏎")
    assert f"[-{first}" in done.output
    assert "accepted / tested" in done.output


def test_show_filters_by_row_and_strategy(recorded: Path) -> None:
    trace = Trace.load(recorded)
    data = run_json("trace", "show", str(recorded), "--row", "0", "--strategy", "draft-model")
    assert [r["position"] for r in data["rounds"]] == [r.position for r in trace.select([0], ["draft-model"])]
    assert {r["row"] for r in data["rounds"]} == {0}
    lines = run("trace", "show", str(recorded), "--rounds", "--row", "0").output
    assert lines.count("draft-model") >= len(trace.select([0], ["draft-model"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nowhere"], "trace file not found: nowhere.json"),
        (["show", "RUN", "--row", "9"], "no row 9"),
        (["show", "RUN", "--strategy", "suffix"], "drafted by 'suffix'"),
        (["show", "RUN", "--html", "no/such/folder.html"], "cannot be written"),
        (["record", "--out", "x", *PAIR], "no prompt"),
        (["record", "--out", "x", "--prompt", "a"], "no target"),
    ],
)
def test_bad_input_is_one_line(recorded: Path, arguments: list[str], message: str) -> None:
    assert message in refused("trace", *(str(recorded) if a == "RUN" else a for a in arguments))
