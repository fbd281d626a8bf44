"""`specdec lookup`: files made, merged, tried and shown; exit statuses and errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from specdec import LookupCache
from specdec.models.loading import load_tokenizer
from specdec.research.offline.lookup import lookup_stats
from tests.cli.test_cli import refused, run, run_json
from tests.helpers.playing import quoting_ids, random_ids

TEXT = "def add(self, item):\n    self.items.append(item)\n\ndef add(self, item):\n    self.items.remove(item)\n"


def counts(cache: LookupCache) -> dict[tuple[int, ...], dict[int, int]]:
    return {key: dict(pairs) for key, pairs in cache.items()}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Two texts as JSON lines of ids."""
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{quoting_ids(60, 1)}\n\n{random_ids(50, 2, 5)}\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("all_sizes", [False, True])
def test_create_counts_each_text_by_itself(rows: Path, tmp_path: Path, all_sizes: bool) -> None:
    out = tmp_path / "made.bin"
    facts = run_json("lookup", "create", "--ids", str(rows), "--out", str(out), *["--all-sizes"] * all_sizes)
    wanted = LookupCache()
    for row in (quoting_ids(60, 1), random_ids(50, 2, 5)):
        wanted.update(row, None, *((1, 4) if all_sizes else (2, 2)))
    assert counts(LookupCache.load(out)) == counts(wanted)
    assert (facts["texts"], facts["tokens"], facts["ngrams"]) == (2, 110, len(wanted))
    assert set(facts["ngrams_by_size"]) == ({"1", "2", "3", "4"} if all_sizes else {"2"})


def test_create_reads_text_files_prompts_and_standard_input(tmp_path: Path) -> None:
    file, out = tmp_path / "text.txt", tmp_path / "made.bin"
    file.write_text(TEXT, encoding="utf-8")
    tokenizer = load_tokenizer("demo")
    facts = run_json("lookup", "create", str(file), "--prompt", TEXT, "--tokenizer", "demo", "--out", str(out))
    assert facts["tokens"] == 2 * len(tokenizer(TEXT)["input_ids"])
    done = run("lookup", "create", "-", "--target", "demo-target", "--out", str(tmp_path / "b.bin"), input=TEXT)
    assert done.exit_code == 0, done.output
    run_json("lookup", "merge", str(tmp_path / "b.bin"), str(tmp_path / "b.bin"), str(tmp_path / "twice.bin"))
    assert counts(LookupCache.load(tmp_path / "twice.bin")) == counts(LookupCache.load(out))


def test_merge_adds_counts_and_can_write_over_an_input(rows: Path, tmp_path: Path) -> None:
    a, b = str(tmp_path / "a.bin"), str(tmp_path / "b.bin")
    run_json("lookup", "create", "--ids", str(rows), "--out", a)
    before = run_json("lookup", "show", a)
    assert run_json("lookup", "merge", a, b)["merged"] == 1
    after = run_json("lookup", "merge", a, b, a, a)
    assert after["occurrences"] == 3 * before["occurrences"]
    assert after["ngrams"] == before["ngrams"]


def test_stats_are_those_of_the_library(rows: Path, tmp_path: Path) -> None:
    static = tmp_path / "a.bin"
    run_json("lookup", "create", "--ids", str(rows), "--out", str(static))
    options = ("--ids", str(rows), "--static", str(static), "--n-ctx", "30", "--n-draft", "5")
    got = run_json("lookup", "stats", *options)
    wanted = lookup_stats(quoting_ids(60, 1) + random_ids(50, 2, 5), 30, 5, LookupCache.load(static))
    assert {**got, "draft_seconds": 0} == {**wanted, "draft_seconds": 0}
    assert 0 < got["accepted_tokens"] <= got["draft_tokens"]
    done = run("lookup", "stats", *options)
    assert f"{got['draft_acceptance_rate']:.2%}" in done.stdout


def test_show_decodes_the_most_frequent_continuations(tmp_path: Path) -> None:
    out = str(tmp_path / "a.bin")
    tokenizer = load_tokenizer("demo")
    ids = tokenizer("[a] [a] [a] [a]")["input_ids"]
    cache = LookupCache()
    cache.update(ids, None, 2, 2)
    cache.save(out)
    facts = run_json("lookup", "show", out, "--tokenizer", "demo", "--top", "3")
    best = facts["most_frequent"]
    assert [entry["count"] for entry in best] == sorted((e["count"] for e in best), reverse=True)
    assert best[0]["ngram_text"] == tokenizer.decode(best[0]["ngram"])
    assert best[0]["next_text"] == tokenizer.decode([best[0]["next"]])
    done = run("lookup", "show", out, "--tokenizer", "demo", "--top", "3")
    assert repr(best[0]["ngram_text"]) in done.stdout  # brackets are text, not markup
    assert "next" not in run("lookup", "show", out, "--top", "0").stdout


def test_bad_input_is_one_line_and_status_2(rows: Path, tmp_path: Path) -> None:
    bad, out = tmp_path / "bad.jsonl", str(tmp_path / "o.bin")
    bad.write_text("[1, 2]\n[1, true]\n", encoding="utf-8")
    assert "bad.jsonl, line 2: [1]: expected a whole number >= 0, got True" in refused(
        "lookup", "create", "--ids", str(bad), "--out", out
    )
    bad.write_text("[1, 2\n", encoding="utf-8")
    assert "bad.jsonl, line 1: not JSON" in refused("lookup", "create", "--ids", str(bad), "--out", out)
    bad.write_text("[1, 4294967296]\n", encoding="utf-8")
    assert "ids are in" in refused("lookup", "create", "--ids", str(bad), "--out", out)
    assert "need a tokenizer" in refused("lookup", "create", "--prompt", "a", "--out", out)
    assert "no text" in refused("lookup", "create", "--out", out)
    assert "cannot write" in refused("lookup", "create", "--ids", str(rows), "--out", str(rows / "o.bin"))
    assert "claims" in refused("lookup", "show", str(rows))
    assert "not found" in refused("lookup", "merge", str(tmp_path / "absent.bin"), out)
    assert "at least one file to read" in refused("lookup", "merge", out)
    assert "no more than one chunk" in refused("lookup", "stats", "--ids", str(rows))
    assert "Missing command" in refused("lookup")
    assert not Path(out).exists()


def test_a_made_file_drafts_from_the_command_line(tmp_path: Path) -> None:
    out = str(tmp_path / "a.bin")
    run_json("lookup", "create", "--prompt", TEXT, "--prompt", TEXT, "--tokenizer", "demo", "--out", out)
    made = run_json(
        "generate", "--target", "demo-target", "--prompt", "def add(self, item):", "--max-new-tokens", "12",
        "--strategies", f"ngram-cache:static={out}:n_draft=4",
    )  # fmt: skip
    assert json.dumps(made["provenance"]).count(out) == 1
    assert made["stats"]["strategies"]["ngram-cache"]["draft_tokens"] > 0


def test_what_json_cannot_hold_is_one_clear_line(tmp_path: Path) -> None:
    for name, text in (("deep", "[" * 100_000), ("big", "[" + "1" * 5_000 + "]")):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(text, encoding="utf-8")
        assert f"{name}.jsonl, line 1: not JSON" in refused(
            "lookup", "create", "--ids", str(file), "--out", str(tmp_path / "x.bin")
        )


def test_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    ids = tmp_path / "ids.jsonl"
    ids.write_text("[1, 2, 3]\n", encoding="utf-8")
    assert "it is no regular file" in refused("lookup", "create", "--ids", str(ids), "--out", str(pipe))
    assert pipe.is_fifo()
