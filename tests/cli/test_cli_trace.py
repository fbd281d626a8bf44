"""`specdec trace`: recorded, shown, filtered; errors in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec.research.traces.trace import Trace
from tests.cli.test_cli import refused, run, run_json

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
    assert "accepted per tested" in done.output


def test_show_filters_by_row_and_strategy(recorded: Path) -> None:
    trace = Trace.load(recorded)
    data = run_json("trace", "show", str(recorded), "--row", "0", "--strategy", "draft-model")
    assert [r["position"] for r in data["rounds"]] == [r.position for r in trace.select([0], ["draft-model"])]
    assert {r["row"] for r in data["rounds"]} == {0}
    lines = run("trace", "show", str(recorded), "--rounds", "--row", "0").output
    assert lines.count("draft-model") >= len(trace.select([0], ["draft-model"]))


def test_prompts_come_from_a_text_file_and_from_chats_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("import os\n\ndef f(x):\n")
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a = 1"}]}')
    texts = []
    for dataset in (f"{tmp_path}/notes.txt:by=paragraph", f"{tmp_path}/chats.jsonl"):
        out = tmp_path / "run"
        run_json(
            "trace", "record", *PAIR, "--out", str(out), "--prompt", "x = ", "--dataset", dataset,
            "--max-new-tokens", "2",
        )  # fmt: skip
        trace = Trace.load(out)
        texts.append([(row.id, row.prompt_text) for row in trace.rows])
        assert trace.provenance["chat_templates"] == [None] * len(trace.rows)  # the embedded pair has none
    assert texts[0] == [("prompt 0", "x = "), ("notes/0", "import os"), ("notes/1", "def f(x):")]
    assert texts[1] == [("prompt 0", "x = "), ("chats/0", "a = 1")]
    assert "no chat template" in refused("trace", "record", *PAIR, "--out", str(out), "--dataset", dataset, "--chat")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nowhere"], "trace file not found: nowhere.json"),
        (["show", "RUN", "--row", "9"], "no row 9"),
        (["show", "RUN", "--strategy", "suffix"], "drafted by 'suffix'"),
        (["show", "RUN", "--html", "/dev/null/page.html"], "cannot write"),
        (["record", "--out", "x", *PAIR], "no prompt"),
        (["record", "--out", "x", "--prompt", "a"], "no target"),
    ],
)
def test_bad_input_is_one_line(recorded: Path, arguments: list[str], message: str) -> None:
    assert message in refused("trace", *(str(recorded) if a == "RUN" else a for a in arguments))


def test_an_interrupted_recording_keeps_its_rounds_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupting(entry: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec.research.traces.monitor.Monitor", lambda *given, **options: interrupting)
    arguments = ("--prompt", "def add", "--max-new-tokens", "8", "--out", str(tmp_path / "t"))
    done = run("trace", "record", "--target", "demo-target", "--draft", "demo-draft", *arguments)
    assert done.exit_code == 130
    assert "interrupted: 1 of 1 rows are cut" in done.stderr
    assert Trace.load(tmp_path / "t").rows[0].finish_reason == "interrupted"
