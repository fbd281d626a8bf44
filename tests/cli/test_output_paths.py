"""Where a verb cannot write is said before it works, for every option that names something to write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import VERBS, load_verb
from specdec.errors import SpecdecError
from specdec.files.texts import check_writable
from tests.cli.test_cli import PAIR, ROOT, refused

BAD = "/dev/null/x"  # below what is no folder: nobody, root included, can write there
GOOD = "GOOD"
CASES: dict[str, tuple[str, ...]] = {
    "generate --out": (*PAIR, "--prompt", "a", "--out", BAD),
    "trace record --out": (*PAIR, "--prompt", "a", "--out", BAD),
    "trace record --html": (*PAIR, "--prompt", "a", "--out", GOOD, "--html", BAD),
    "trace show --html": ("nowhere", "--html", BAD),
    "lookup create --out": ("--prompt", "a", "--tokenizer", "demo", "--out", BAD),
    "lookup merge": ("nowhere", BAD),
    "compare --out": (*PAIR, "--prompt", "a", "--out", BAD),
    "results --out": ("nowhere", "--csv", "--out", BAD),
    "bench --out": ("--smoke", "--out", BAD),
    "bench --raw": ("--smoke", "--raw", BAD),
    "ablate run --out": (str(ROOT / "configs" / "figures.yaml"), "--out", BAD),
    "train eagle3 --out": (str(ROOT / "configs" / "train_eagle3_demo.yaml"), "--out", BAD),
    "train draft --out": (str(ROOT / "configs" / "train_draft_demo.yaml"), "--out", BAD),
    "train exit --out": (str(ROOT / "configs" / "train_exit_demo.yaml"), "--out", BAD),
    "export-head --out": ("nowhere", "--out", BAD),
}  # fmt: skip


def written() -> Iterator[str]:
    """Every option of every verb whose help or name says that it is written to."""
    for verb in VERBS:
        command = load_verb(verb)
        parts = getattr(command, "commands", None) or {"": command}
        for name, part in parts.items():
            for parameter in part.params:
                option = parameter.opts[0]
                if option in ("--out", "--raw", "--html"):
                    yield f"{verb} {name} {option}".replace("  ", " ")


def test_every_option_that_is_written_to_is_tried() -> None:
    assert set(written()) <= set(CASES)


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def working(*arguments: Any, **options: Any) -> None:
        raise AssertionError("worked before it knew where to write")

    for name in (
        "specdec.models.loading.LoadedPair.load", "specdec.models.loading._tokenizer_of",
        "specdec.research.bench.smoke.run_smoke", "specdec.research.ablation.store.Plan.make",
        "specdec.research.traces.trace.Trace.load",
        "specdec.drafters.ngram.lookup_cache.LookupCache.load", "specdec.drafters.eagle3.load_head",
    ):  # fmt: skip
        monkeypatch.setattr(name, working)


@pytest.mark.parametrize("case", CASES)
def test_where_it_cannot_write_is_said_before_work(case: str, no_work: None, tmp_path: Path) -> None:
    verb = [word for word in case.split() if not word.startswith("--")]
    arguments = [str(tmp_path / "good") if a == GOOD else a for a in CASES[case]]
    message = refused(*verb, *arguments)
    assert "cannot write" in message
    assert BAD in message
    assert list(tmp_path.iterdir()) == []


def test_checking_makes_folders_and_leaves_no_file(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b.json"
    assert check_writable(file, "--out") == file
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]
    file.write_text("kept")
    check_writable(file, "--out")
    check_writable("/dev/null", "--out")
    assert file.read_text() == "kept"
    check_writable(tmp_path / "c" / "d", "--out", folder=True)
    assert list((tmp_path / "c").rglob("*")) == [tmp_path / "c" / "d"]
    for wrong, folder in ((tmp_path, False), (file, True), (tmp_path / ("x" * 300), False), ("", False)):
        with pytest.raises(SpecdecError):
            check_writable(wrong, "--out", folder)
