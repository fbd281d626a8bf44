"""What the README shows works as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec.cli import app
from specdec.research.ablation.table import write_table
from tests.research.test_plots import K2, PLAIN, row

ROOT = Path(__file__).resolve().parents[1]
SHORT = {"demo": ("--max-new-tokens", "8", "--repeats", "1"), "generate": ("--max-new-tokens", "8")}
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_the_python_examples_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With shorter texts, in the README's order and in one namespace; a small table is in the paper's place."""
    scope: dict[str, object] = {}
    monkeypatch.chdir(tmp_path)
    asked = {"k": 8, "temperature": 0.7}
    rows = [row(*made, **asked) for p in ("a", "b") for made in (("plain", p, PLAIN), ("draft", p, K2))]
    (tmp_path / "runs" / "paper").mkdir(parents=True)
    write_table(rows, tmp_path / "runs" / "paper" / "table.parquet")
    for block in blocks("python"):
        code = block.replace("max_new_tokens=128", "max_new_tokens=16")
        code = re.sub(r'("def fibonacci\(n\):", strategies=.*|seed=1)\)', r"\1, max_new_tokens=8)", code)
        exec(compile(code, "README.md", "exec"), scope)
    said = capsys.readouterr().out
    assert "Round(" in said
    assert r"\toprule" in said
    assert (tmp_path / "figure.pdf").stat().st_size > 1000


@pytest.mark.full
def test_the_commands_are_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every `specdec` line runs, with little to do."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("specdec.research.bench.smoke.run_smoke", lambda *arguments: {"suites": {}})
    monkeypatch.setattr("specdec.cli.bench._save", lambda *arguments: None)
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("specdec ")]
    assert {line.split()[1] for line in lines} == {"demo", "generate", "check", "bench", "ablate", "results"}
    for line in lines:
        # The paper's grid takes minutes, and the notebook runs a part of it: here a smaller one, which has no axis k.
        for old, new in (("paper", "own_drafter"), ("strategy,k,", "strategy,"), ("runs/", f"{tmp_path}/")):
            line = line.replace(old, new)
        verb, *arguments = shlex.split(line, comments=True)[1:]
        done = CliRunner().invoke(app, [verb, *arguments, *SHORT.get(verb, ())])
        assert done.exit_code == 0, (line, done.output)


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_tests_that_documents_name_are_there() -> None:
    named = [
        found for file in DOCUMENTS for found in re.findall(r"`([\w/]+\.py)::(test_\w+)`", file.read_text("utf-8"))
    ]
    assert len(named) > 30
    for file, test in named:
        path = ROOT / "tests" / file.removeprefix("tests/")
        assert f"def {test}(" in path.read_text(encoding="utf-8"), (file, test)
