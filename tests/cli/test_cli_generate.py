"""`specdec generate` with sets of prompts and a file of results."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from specdec import SpeculativeDecoder
from specdec.cli import output
from specdec.cli.options import Prompts, SetPrompts
from specdec.drafters import NgramMod
from specdec.errors import SettingWarning, SpecdecError
from specdec.research.bench.tables import Table
from specdec.research.prompts.datasets import load_prompts
from specdec.research.traces.trace import Trace
from tests.cli.test_cli import PAIR, refused, run, run_json
from tests.helpers.grid import save_model

SHORT = (*PAIR, "--max-new-tokens", "4")
LINES = [{"prompt": "a = 1\n", "id": "x", "category": "code"}, {"prompt": "import os\n", "id": "y"}]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    return file


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_a_json_lines_file_is_a_set_and_a_text_file_one_prompt(lines: Path, tmp_path: Path) -> None:
    text = tmp_path / "one.txt"
    text.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    found = Prompts(prompt=["typed"], prompt_file=[lines, text]).read()
    assert [(p.id, p.category, p.text) for p in found] == [
        ("prompt 0", "", "typed"), ("prompt 1", "", text.read_text()),
        ("mine/x", "code", "a = 1\n"), ("mine/y", "mine", "import os\n"),
    ]  # fmt: skip
    fields = tmp_path / "q.jsonl"
    fields.write_text('{"question": "a"}\n')
    assert [p.text for p in Prompts(prompt_file=[Path(f"{fields}:field=question")]).read()] == ["a"]
    with pytest.raises(SpecdecError, match="expected an object with"):
        Prompts(prompt_file=[fields]).read()


def test_a_set_is_the_one_of_other_verbs() -> None:
    found = SetPrompts(dataset="spec-bench", category=["qa", "math"], limit=4)
    assert found.read() == load_prompts("spec-bench", ["qa", "math"], 4)
    with pytest.raises(SpecdecError, match="--limit has no effect"):
        SetPrompts(prompt=["a"], limit=2).read()


def test_processes_share_a_set_and_each_names_its_own_prompts(lines: Path, tmp_path: Path) -> None:
    command = ("generate", *SHORT, "--prompt-file", str(lines), "--temperature", "1", "--acceptance", "match")
    run(*command, "--out", str(tmp_path / "whole"))
    for i in range(2):
        run(*command, "--shard", f"{i}/2", "--out", str(tmp_path / str(i)))
    parts = [record for i in range(2) for record in records(tmp_path / str(i))]
    key = ("id", "prompt", "prompt_hash", "token_ids", "sample")
    assert [[r[k] for k in key] for r in parts] == [[r[k] for k in key] for r in records(tmp_path / "whole")]
    assert "expected index/count" in refused(*command, "--shard", "2/2")


def test_chats_are_for_verbs_that_take_them(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}))
    assert [p.text for p in Prompts(prompt_file=[file]).read()] == ["a"]
    with pytest.raises(SpecdecError, match="chats/0 is a chat"):
        Prompts(prompt_file=[file]).texts()


def test_out_holds_a_record_a_prompt(lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.jsonl"
    result = run_json(
        "generate", *SHORT, "--prompt-file", str(lines), "--dataset", "humaneval", "--limit", "1", "--out", str(out)
    )
    made = records(out)
    [human] = load_prompts("humaneval", limit=1)
    assert [(r["id"], r["category"], r["prompt"]) for r in made] == [
        ("mine/x", "code", "a = 1\n"), ("mine/y", "mine", "import os\n"), (human.id, "humaneval", human.text),
    ]  # fmt: skip
    assert result["prompts"] == [{k: r[k] for k in ("id", "category", "prompt")} for r in made]
    expected = SpeculativeDecoder.from_pretrained(*PAIR[1::2]).generate([r["prompt"] for r in made], 4)
    for row, record in zip(expected, made, strict=True):
        assert (record["text"], record["token_ids"], record["finish_reason"]) == (row.text, row.token_ids, "length")
        assert record["stats"] == row.stats.to_dict()
        assert record["prompt_hash"] == expected.provenance["prompts"][row.index]
        assert record["models"]["target"]["name"] == "demo-target"
        assert record["weights"] == expected.provenance["weights"]
        assert record["settings"]["max_new_tokens"] == 4
    assert result["provenance"]["models"]["draft"]["name"] == "demo-draft"


def test_a_prompt_that_is_too_long_is_named_by_its_id_and_longest_cuts_it(tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "a = 1\n" * 2000, "id": "much"}) + "\n")
    message = refused("generate", *SHORT, "--prompt-file", str(file))
    assert "long/much has" in message
    assert "--longest" in message
    with pytest.raises(SpecdecError, match=r"^long/much has \d+ tokens, more than the target's context"):
        SpeculativeDecoder.from_pretrained("demo-target").generate(load_prompts(file))
    for verb in (("generate",), ("trace", "record", "--out", str(tmp_path / "t"))):
        run_json(*verb, *SHORT, "--prompt-file", str(file), "--longest", "12")
    assert 12 <= len(Trace.load(tmp_path / "t").rows[0].prompt) <= 13  # and a token that begins the text


def test_of_several_texts_of_a_prompt_each_is_a_record(lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options = ("--num-return-sequences", "2", "--temperature", "1", "--prompt-file", str(lines), "--out", str(out))
    done = run("generate", *SHORT, *options, "--option", "output_logprobs=true")
    assert done.exit_code == 0, done.output
    assert "4 texts" in done.stdout
    assert "row 0" not in done.stdout
    assert [(r["id"], r["sample"]) for r in records(out)] == [
        ("mine/x", 0),
        ("mine/x", 1),
        ("mine/y", 0),
        ("mine/y", 1),
    ]
    assert all(len(r["logprobs"]) == 4 for r in records(out))


def test_a_config_s_prompts_are_named_too(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("pair: {target: demo-target}\nprompts: ['a = ']\ngeneration: {max_new_tokens: 1}\n")
    assert run_json("generate", "--config", str(config))["prompts"] == [
        {"id": "prompt 0", "category": "", "prompt": "a = "}
    ]


def test_help_says_what_a_prompt_file_is() -> None:
    shown = " ".join(run("generate", "--help", env={"COLUMNS": "200"}).stdout.split())
    assert ".jsonl" in shown
    assert "no effect beside" in refused("generate", *SHORT, "--prompt", "a", "--category", "qa")


def test_a_length_below_ngram_mods_least_is_said_and_done() -> None:
    with pytest.warns(SettingWarning, match="n_max=4 is below n_min=48: only drafts of exactly 4 tokens"):
        NgramMod(n_max=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SettingWarning)
        assert (NgramMod(n_max=4, n_min=4).n_max, NgramMod().n_min) == (4, 48)
    short = ("--prompt", "a", "--max-new-tokens", "1")
    done = run("generate", "--target", "demo-target", *short, "--strategies", "ngram-mod:n_max=4", "--json")
    assert done.exit_code == 0
    assert "warning: ngram-mod: n_max=4 is below n_min=48" in " ".join(done.stderr.split())


def test_a_text_that_the_context_ends_is_a_sentence_and_own_code_has_a_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_model(tmp_path / "short", max_position_embeddings=16)
    (tmp_path / "of_mine.py").write_text(
        "from specdec import Draft\nclass Zero:\n    name = 'zero'\n    def begin(self, row, prompt): pass\n"
        "    def draft(self, requests): return [Draft([0]) for _ in requests]\n"
        "    def accept(self, row, n_accepted, is_other): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    call = ("generate", "--target", target, "--prompt", "a b c", "--prompt", "a", "--max-new-tokens", "14")
    shown = run(*call, "--strategies", "of_mine:Zero")
    assert "1 of 2 texts ended at the context's limit" in shown.stdout, shown.output
    made = json.loads(run(*call, "--strategies", "of_mine:Zero", "--json").stdout)["provenance"]
    digest = hashlib.sha256((tmp_path / "of_mine.py").read_bytes()).hexdigest()[:16]
    assert made["own_code"] == {"of_mine": digest}
    assert json.loads(run(*call, "--json").stdout)["provenance"]["own_code"] == {}


def test_a_table_that_goes_to_a_file_is_as_wide_as_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    made = Table("title", [f"column {i}" for i in range(20)], [[f"0.{i:02} (0.062-0.071)" for i in range(20)]])
    output.stdout().print(output.rendered(made, whole_names=False))
    lines = sys.stdout.getvalue().splitlines()  # type: ignore[attr-defined]
    [shown] = [line for line in lines if "0.062" in line]
    assert shown.count("(0.062-0.071)") == 20
    assert shown[0] == shown[-1] == "│"
    output.stdout().rule("row 0: length", style="dim")
    assert len(sys.stdout.getvalue().splitlines()[-1]) == output.RULE  # type: ignore[attr-defined]


def test_compare_names_the_option_that_another_has_no_effect_beside(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "import os"}\n')
    for typed in (("--prompt", "a"), ("--prompt-file", str(file))):
        said = refused("compare", "--target", "demo-target", "--strategy", "prompt-lookup", "--limit", "2", *typed)
        assert f"--limit has no effect beside {typed[0]}\n" in f"{said}\n"
