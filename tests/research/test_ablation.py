"""The ablation runner: nothing lost, nothing repeated, every model loaded once, failures and differences recorded."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

import specdec
from specdec import SpeculativeDecoder
from specdec.cli import app
from specdec.config import PairConfig, dump_yaml
from specdec.decoding.provenance import hash_ids
from specdec.errors import SpecdecError
from specdec.research.ablation import Shard, as_rows, build_table, merge, run_ablation
from specdec.research.ablation.journal import Journal, read_journals
from specdec.research.ablation.runner import row_seed
from specdec.research.ablation.table import TABLE, TIMES, models_of
from specdec.research.ablation.work import call_passes
from specdec.research.traces.trace import Trace
from tests.helpers.grid import PROMPTS, grid, save_model, save_pair

ROOT = Path(__file__).resolve().parents[2]
KILLS = 5
ROWS = 6 * len(PROMPTS)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def finished(pair: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of `grid`."""
    out = tmp_path_factory.mktemp("ablation") / "out"
    session = run_ablation(grid(pair), out)
    assert session.rows == ROWS
    assert merge(out) is not None
    return out


def test_the_models_are_in_the_table_the_summary_and_the_report(finished: Path, pair: dict[str, str]) -> None:
    rows = as_rows(finished)
    assert {(r["target"], r["draft"], r["target_revision"]) for r in rows} == {(pair["target"], pair["draft"], None)}
    summary = json.loads((finished / "summary.json").read_text())
    [loaded] = summary["models"]["tiny"]
    assert {role: model["name"] for role, model in loaded.items()} == pair
    assert all(f"{role} {name}, weights " in (finished / "report.html").read_text() for role, name in pair.items())
    asked = {"target": "a/b", "draft": "c", "revision": "main", "draft_revision": "v1"}
    known = {"target": {"name": "a/b", "revision": "main", "commit": "0123"}}
    assert models_of({"models": asked, "pair": "p"}, {"models": {"p": [known]}}) == {
        "target": "a/b", "target_revision": "0123", "draft": "c", "draft_revision": "v1",
    }  # fmt: skip


def test_every_column_of_the_table_is_documented(finished: Path) -> None:
    page = (ROOT / "docs" / "ablation.md").read_text(encoding="utf-8")
    section = page.split("### Columns of the table")[1].split("\n#")[0]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = re.findall(r"`(\w+)`", " ".join(first_cells))
    assert len(documented) == len(set(documented))
    assert set(documented) - {"k"} == set(pyarrow.parquet.read_table(finished / TABLE).column_names)


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what a clock says."""
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def row_lines(folder: Path) -> list[dict[str, Any]]:
    return [entry for entry in read_journals(folder) if entry["kind"] == "row"]


def test_traces_are_kept_where_asked_and_change_nothing(finished: Path, pair: dict[str, str], tmp_path: Path) -> None:
    run_ablation(grid(pair, axes={"temperature": [1.0]}, traces=True), tmp_path)
    untraced = {(r["cell"], r["prompt"]): r["tokens"] for r in row_lines(finished)}
    rows, seen = row_lines(tmp_path), 0
    assert all(r["tokens"] == untraced[r["cell"], r["prompt"]] for r in rows)
    for path in sorted((tmp_path / "traces").glob("*.json")):
        trace = Trace.load(path)
        cell, call = path.stem.rsplit("-", 1)
        of_call = {r["prompt"]: r["tokens"] for r in rows if r["cell"] == cell and r["call"] == int(call)}
        assert {row.id: row.output for row in trace.rows} == of_call
        seen += len(of_call)
    assert seen == 2 * len(PROMPTS)  # two chains that draft; plain decoding has no rounds to look at
    with pytest.raises(SpecdecError, match="traces must be true or false"):
        grid(pair, traces="yes")


@pytest.mark.parametrize(
    ("strategy", "least"),
    [
        ("draft-model:n_max=3", 4),
        ("draft-model:tree=1x1x1x1x1x1x1x1x1x1x1x1x1x1x1", 1),  # accepts 15 a pass
        ("draft-model:tree=2x2", 3),  # six nodes
        ("draft-model", 1),  # of automatic length
        ("recycling:nodes=7", 2),
    ],
)
def test_no_run_takes_fewer_passes_than_planned(strategy: str, least: int) -> None:
    config = grid({"target": "demo-target", "draft": "demo-draft"}, strategies={"s": [strategy]}, plain=False)
    cells = [replace(c, generation={**c.generation, "max_new_tokens": 16}) for c in config.expand() if c.strategies]
    assert {call_passes(cell) for cell in cells} == {(least, 16)}


# -- what a run gives -------------------------------------------------------------------------------------------------


def test_every_prompt_and_setting_has_one_row(finished: Path) -> None:
    rows = as_rows(finished)
    assert len({(r["cell"], r["prompt"]) for r in rows}) == len(rows) == ROWS
    assert {r["setting"] for r in rows} == {
        f"{chain} T={t}" for chain in ("plain", "draft", "lookup") for t in ("0", "1")
    }
    for row in rows:
        assert row["status"] == "ok"
        assert row["generated_tokens"] == len(row["tokens"]) == row["emitted_tokens"] == 8
        assert row["generated_tokens"] <= row["accepted_tokens"] + row["rounds"]
        parts = ("prefill_seconds", "draft_seconds", "verify_seconds", "other_seconds")
        assert sum(row[p] for p in parts) == pytest.approx(row["seconds"], rel=1e-6)
    assert any(r["accepted_tokens"] for r in rows)


def test_a_row_is_what_generate_gives_for_its_seed(finished: Path, pair: dict[str, str]) -> None:
    decoder = SpeculativeDecoder.from_pretrained(pair["target"], pair["draft"])
    for row in as_rows(finished):
        if row["strategies"] == "draft":
            index = int(row["prompt"].rpartition("/")[2])
            assert row["row_seed"] == row_seed(0, row["prompt"])
            out = decoder.generate(
                [PROMPTS[index]], 8, ["draft-model:n_max=3"], acceptance="coupled", seed=[row["row_seed"]],
                temperature=row["temperature"],
            )  # fmt: skip
            assert row["tokens"] == out.token_ids[0]
            assert row["records"] == [list(r) for r in out.stats.rows[0]]


def test_texts_and_rounds_do_not_depend_on_the_batch(finished: Path, pair: dict[str, str], tmp_path: Path) -> None:
    config = grid(pair, generation={"max_new_tokens": 8, "acceptance": "coupled", "batch_size": 2})
    run_ablation(config, tmp_path)
    rows, missing = build_table(tmp_path)
    assert missing == 0
    alone = {(r["setting"], r["prompt"]): r["tokens"] for r in as_rows(finished)}
    assert {(r["setting"], r["prompt"]): r["tokens"] for r in rows} == alone


def test_the_parquet_table_is_the_rows(finished: Path) -> None:
    rows, _ = build_table(finished)
    assert as_rows(finished) == json.loads(json.dumps(rows))


def test_rows_say_which_chat_template_they_went_through(pair: dict[str, str], tmp_path: Path) -> None:
    """A chat file with a target that has a template, refused by the template in one row, and without one."""
    talk = [{"role": r, "content": c} for r, c in (("user", "a = 1"), ("assistant", "b"), ("user", "x"))]
    odd = [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": m}) for m in (talk, odd)))
    template = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no\ntools') }}{% endif %}"
    template += "<{{ m.role }}>{{ m.content }}{% endfor %}"
    chatty = save_model(tmp_path / "chatty", num_hidden_layers=1)
    tokenizer = AutoTokenizer.from_pretrained(chatty)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(chatty)
    pairs = {"chatty": {"target": chatty}, "bare": {"target": pair["target"]}}
    data = {"dataset": str(tmp_path / "chats.jsonl")}
    config = grid(pair, pairs=pairs, prompts=None, data=data, strategies={"lookup": ["prompt-lookup"]}, axes={})
    run_ablation(config, tmp_path / "out")
    found = {(r["pair"], r["prompt"]): r for r in build_table(tmp_path / "out")[0] if r["drafts"]}
    through, refused = found["chatty", "chats/0"], found["chatty", "chats/1"]
    assert through["chat_template"] == hashlib.sha256(template.encode()).hexdigest()[:16]
    ids = tokenizer("<user>a = 1<assistant>b<user>x")["input_ids"]
    assert through["prompt_hash"] == hash_ids(ids)
    assert refused["error"] == "chats/1: the chat template refuses the chat: no"
    only = grid(
        pair, pairs={"bare": {"target": pair["target"]}}, prompts=None, data={**data, "chat": True}, axes={},
        strategies={"lookup": ["prompt-lookup"]},
    )  # fmt: skip
    nothing = run_ablation(only, tmp_path / "nothing")
    assert (nothing.errors, nothing.decode) == (nothing.rows, 0.0)
    bare = found["bare", "chats/0"]
    assert bare["chat_template"] is None
    assert bare["prompt_hash"] == hash_ids(tokenizer("a = 1\n\nb\n\nx")["input_ids"])


# -- resuming ---------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_not_repeated_and_loads_nothing(
    finished: Path, pair: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(SpeculativeDecoder, "from_pretrained", forbidden)
    before = (finished / "journal-00000.jsonl").read_bytes()
    assert run_ablation(grid(pair), finished).rows == 0
    assert (finished / "journal-00000.jsonl").read_bytes() == before


@pytest.fixture(scope="module")
def forked(pair: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`killed`: killed KILLS times at random moments and not finished; `shared`: run by two processes at once."""
    folder = tmp_path_factory.mktemp("forked")
    (folder / "config.yaml").write_text(dump_yaml(grid(pair)))
    command = [sys.executable, "-m", "tests.helpers.forks", str(folder / "config.yaml"), str(folder), str(KILLS)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.full
def test_kill_9_at_some_moments_and_resume_gives_the_uninterrupted_table(
    finished: Path, pair: dict[str, str], forked: Path
) -> None:
    out = forked / "killed"
    assert KILLS <= len(row_lines(out)) < ROWS
    run_ablation(grid(pair), out)
    lines = row_lines(out)
    assert len({(e["cell"], e["prompt"]) for e in lines}) == len(lines), "a row was run twice"
    rows, missing = build_table(out)
    assert missing == 0
    assert timeless(rows) == timeless(build_table(finished)[0])


@pytest.mark.fast(1)
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.999])
def test_a_torn_line_is_cut_off_and_its_row_run_again(
    finished: Path, pair: dict[str, str], tmp_path: Path, keep: float
) -> None:
    lines = (finished / "journal-00000.jsonl").read_bytes().splitlines(keepends=True)[:5]
    torn = lines[4][: int(keep * len(lines[4]))]
    (tmp_path / "run.json").write_bytes((finished / "run.json").read_bytes())
    (tmp_path / "journal-00000.jsonl").write_bytes(b"".join(lines[:4]) + torn)
    assert len(list(read_journals(tmp_path))) == 4
    assert run_ablation(grid(pair), tmp_path).rows == ROWS - 4
    assert timeless(build_table(tmp_path)[0]) == timeless(build_table(finished)[0])


def test_a_line_without_its_newline_counts_as_torn(tmp_path: Path) -> None:
    """Were it kept, the next entry would be written behind it, on the same line."""
    with Journal(tmp_path) as journal:
        journal.append([{"a": 1}, {"a": 2}])
    path = tmp_path / "journal-00000.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    with Journal(tmp_path) as journal:
        assert journal.cut == len('{"a":2}')
        journal.append([{"a": "\ud800 \u2028"}])
    assert list(read_journals(tmp_path)) == [{"a": 1}, {"a": "\ud800 \u2028"}]


def test_two_processes_may_not_write_one_journal(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(SpecdecError, match="in use"):
        Journal(tmp_path)


def test_a_changed_config_is_noticed_and_extended_only_on_demand(
    finished: Path, pair: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("run.json", "journal-00000.jsonl"):
        (out / name).write_bytes((finished / name).read_bytes())
    wider = grid(pair, axes={"temperature": [0.0, 0.5]})
    with pytest.raises(SpecdecError, match="axes changed"):
        run_ablation(wider, out)
    assert run_ablation(wider, out, extend=True).rows == ROWS // 2
    rows, missing = build_table(out)
    assert (len(rows), missing) == (ROWS, 0)
    assert {r["temperature"] for r in rows} == {0.0, 0.5}


def test_rows_of_other_weights_are_not_mixed(tmp_path: Path) -> None:
    models = tmp_path / "m"
    save_model(models / "target")
    config = grid({"target": str(models / "target")}, strategies={"lookup": ["prompt-lookup"]})
    run_ablation(config, tmp_path / "out")
    lines = (tmp_path / "out" / "journal-00000.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out" / "journal-00000.jsonl").write_bytes(b"".join(lines[:3]))
    save_model(models / "target", seed=1)
    with pytest.raises(SpecdecError, match="other weights"):
        run_ablation(config, tmp_path / "out")


# -- models, shards ---------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_each_model_is_loaded_once(pair: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pairs and a target alone, interleaved with settings that need another dtype."""
    from specdec.models import loading

    loaded: list[str] = []
    original = loading.AutoModelForCausalLM.from_pretrained

    def counted(path: str, *arguments: Any, **options: Any) -> Any:
        loaded.append(f"{Path(path).name} {options['dtype']}")
        return original(path, *arguments, **options)

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", counted)
    other = save_model(tmp_path / "other", seed=3, num_hidden_layers=1)
    pairs = {"a": pair, "b": {"target": pair["target"], "draft": other}, "alone": {"target": pair["target"]}}
    alone = [{"pair": "alone", "strategies": "lookup", "dtype": dtype} for dtype in ("float32", "bfloat16")]
    axes = {"pair": ["a", "b"], "dtype": ["float32", "bfloat16"]}
    run_ablation(grid(pair, pairs=pairs, axes=axes, cells=alone, prompts=PROMPTS[:1]), tmp_path / "out")
    assert sorted(loaded) == sorted(
        ["target torch.float32", "target torch.bfloat16", "draft torch.float32", "other torch.float32"]
    )
    assert build_table(tmp_path / "out")[1] == 0


@pytest.mark.full
def test_two_processes_share_the_work_and_the_last_one_merges(finished: Path, forked: Path) -> None:
    """Each with a journal of its own."""
    out = forked / "shared"
    prompts = [{e["prompt"] for e in row_lines_of(out, rank)} for rank in (0, 1)]
    assert prompts[0]
    assert prompts[1]
    assert not prompts[0] & prompts[1]
    assert timeless(as_rows(out)) == timeless(as_rows(finished))


def row_lines_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    lines = (folder / f"journal-{rank:05d}.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["kind"] == "row"]


@pytest.mark.full
def test_a_merge_waits_for_the_other_shards(pair: dict[str, str], tmp_path: Path) -> None:
    run_ablation(grid(pair), tmp_path, "1/2")
    assert merge(tmp_path) is None
    assert not (tmp_path / "table.parquet").exists()
    partial = merge(tmp_path, partial=True)
    assert partial is not None
    assert partial["missing"] == 18
    said = CliRunner().invoke(app, ["ablate", "merge", str(tmp_path), "--partial"]).output
    assert f"18 of {ROWS} rows are missing" in said
    assert run_ablation(grid(pair), tmp_path, "0/1").rows == 18
    assert build_table(tmp_path)[1] == 0


@pytest.mark.full
def test_calls_of_the_command_line_share_the_work_by_the_option(
    finished: Path, pair: dict[str, str], tmp_path: Path
) -> None:
    """One after the other here; `shared` above are two at once."""
    (tmp_path / "config.yaml").write_text(dump_yaml(grid(pair)))
    command = ["ablate", str(tmp_path / "config.yaml"), "--out", str(tmp_path / "out"), "--shard"]
    for i in range(2):
        done = CliRunner().invoke(app, [*command, f"{i}/2"])
        assert done.exit_code == 0, done.output
    assert all(row_lines_of(tmp_path / "out", i) for i in (0, 1))
    assert timeless(as_rows(tmp_path / "out")) == timeless(as_rows(finished))


def test_a_launchers_environment_shards_nothing(
    pair: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    small = grid(pair, strategies={}, axes={}, generation={"max_new_tokens": 1})
    assert run_ablation(small, tmp_path).rows == len(PROMPTS)


@pytest.mark.parametrize("text", ["2/2", "1", "-1/2", "0/0", "a/b", "1/2/3", ""])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(SpecdecError, match="0/4"):
        Shard.parse(text)


def test_shards_take_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    models = PairConfig("demo-target")
    assert [Shard.parse(f"{i}/4").place(models).device for i in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert Shard().place(models).device is None
    assert Shard(1, 2).place(replace(models, device="cpu")).device == "cpu"


# -- failures and the gate --------------------------------------------------------------------------------------------


def test_a_failing_cell_is_recorded_and_the_rest_runs(pair: dict[str, str], tmp_path: Path) -> None:
    """An id that the target does not have, a prompt longer than the context, a folder without a model."""
    short = save_model(tmp_path / "short", max_position_embeddings=16)
    (tmp_path / "empty").mkdir()
    config = grid(
        pair, pairs={"short": {"target": short, "draft": pair["draft"]}, "empty": {"target": str(tmp_path / "empty")}},
        strategies={"lookup": ["prompt-lookup"]}, axes={"suppress_tokens": [[1], [9999]]},
        prompts=("a = 1", "x = 2\n" * 20),
    )  # fmt: skip
    session = run_ablation(config, tmp_path / "out")
    rows, missing = build_table(tmp_path / "out")
    assert missing == 0
    found = {(r["setting"], r["prompt"]): (r["status"], r["error"] or "") for r in rows}
    fine, wrong = (f"suppress_tokens=[{i}]" for i in (1, 9999))
    assert found[f"short lookup {fine}", "prompt/0"] == ("ok", "")
    assert "token id 9999 is outside" in found[f"short lookup {wrong}", "prompt/0"][1]
    assert "prompt/1 has" in found[f"short plain {fine}", "prompt/1"][1]
    assert "cannot load" in found[f"empty plain {fine}", "prompt/0"][1]
    assert session.errors == sum(status == "error" for status, _ in found.values())
    summary = merge(tmp_path / "out")
    assert summary is not None
    assert {e["setting"] for e in summary["errors"]} >= {f"short lookup {wrong}", f"empty plain {fine}"}
    assert run_ablation(config, tmp_path / "out").rows == 0
    assert run_ablation(config, tmp_path / "out", retry_errors=True).rows == session.errors


def test_the_equality_gate_passes_and_says_what_it_compared(finished: Path) -> None:
    rows = as_rows(finished)
    assert all(r["equals_plain"] is True for r in rows if r["drafts"])
    assert all(r["equals_plain"] is None for r in rows if not r["drafts"])


def test_the_equality_gate_catches_a_text_that_differs(
    pair: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder whose drafts change the fourth token of one prompt."""
    generate = SpeculativeDecoder.generate

    def tampered(self: Any, prompts: Any, *arguments: Any, strategies: Any = specdec.UNSET, **options: Any) -> Any:
        out = generate(self, prompts, *arguments, strategies=strategies, **options)
        if strategies and strategies[0]["name"] == "draft-model" and len(out.token_ids[0]) > 3 and len(prompts[0]) < 6:
            out.token_ids[0][3] ^= 1
        return out

    monkeypatch.setattr(SpeculativeDecoder, "generate", tampered)
    run_ablation(grid(pair, prompts=("a = 1", PROMPTS[0] * 2), warm_up_tokens=0), tmp_path)
    summary = merge(tmp_path)
    assert summary is not None
    differing = {(d["setting"], d["prompt"], d["first_difference"]) for d in summary["gate"]["differing"]}
    assert differing == {("draft T=0", "prompt/0", 3), ("draft T=1", "prompt/0", 3)}
    assert not summary["gate"]["passed"]
    assert "EQUALITY GATE" in (tmp_path / "report.html").read_text()


def test_sampled_leviathan_is_not_compared_and_greedy_is(pair: dict[str, str], tmp_path: Path) -> None:
    run_ablation(grid(pair, generation={"max_new_tokens": 4}, prompts=PROMPTS[:1]), tmp_path)
    rows, _ = build_table(tmp_path)
    verdicts = {r["setting"]: r["equals_plain"] for r in rows if r["drafts"]}
    assert verdicts["draft T=0"] is True
    assert verdicts["draft T=1"] is None


def test_without_plain_there_is_no_gate(pair: dict[str, str], tmp_path: Path) -> None:
    run_ablation(grid(pair, plain=False, prompts=PROMPTS[:1]), tmp_path)
    summary = merge(tmp_path)
    assert summary is not None
    assert summary["gate"]["compared"] == 0
    assert all(s["speedup"] is None for s in summary["settings"].values())


def test_a_prompt_that_cannot_be_encoded_is_an_error_of_its_rows(pair: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": "lone \\ud800"}\n', encoding="utf-8")
    data = {"dataset": str(path), "chat": False}
    session = run_ablation(grid(pair, prompts=None, data=data, axes={}), tmp_path / "out")
    rows = row_lines(tmp_path / "out")
    assert (session.rows, session.errors) == (6, 3)
    assert all("no Unicode text" in row["error"] for row in rows if row["status"] == "error")
