"""Wrong calls of the command line, sixty and more: exit status 2, one line that names the fault, no traceback."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import refused

P = "--target demo-target --prompt a"
PAIR = "--target demo-target --draft demo-draft --prompt a"
# A call -> a word of its line. BAD, ABLATION, TABLE and FOLDER stand for files that `files` makes.
CALLS = {
    "nonsense": "nonsense",
    "generat": "did you mean 'generate'?",
    "--no-such": "--no-such",
    "generate": "no target",
    "generate --target demo-target": "no prompt",
    "generate --target": "--target",
    f"generate {P} extra": "extra",
    f"generate {P} --max-new-tokens x": "--max-new-tokens",
    f"generate {P} --max-new-tokens -1": "max_new_tokens",
    f"generate {P} --max-new-tokens 3.5": "integer",
    f"generate {P} --temperature -1": "temperature",
    f"generate {P} --temperature nan": "temperature",
    f"generate {P} --top-p 2": "top_p",
    f"generate {P} --top-k -1": "top_k",
    f"generate {P} --min-p 2": "min_p",
    f"generate {P} --repetition-penalty 0": "repetition_penalty",
    f"generate {P} --seed 1.5": "--seed",
    f"generate {P} --batch-size 0": "batch_size",
    f"generate {P} --num-return-sequences 0": "num_return_sequences",
    f"generate {P} --acceptance leviathen": "leviathan",
    f"generate {P} --strategies prompt-lokup": "prompt-lookup",
    f"generate {P} --strategies prompt-lookup:n_mx=3": "n_mx",
    f"generate {P} --strategies prompt-lookup:n_max=x": "n_max",
    f"generate {P} --strategies prompt-lookup:n_max": "n_max",
    f"generate {P} --strategies draft-model": "draft",
    f"generate {P} --strategies no_such_module:Mine": "no_such_module",
    f"generate {P} --strategies eagle3": "head",
    f"generate {P} --option do_sample=true": "do_sample",
    f"generate {P} --option num_beams=4": "beam search",
    f"generate {P} --option num_assistant_tokens=5": "num_assistant_tokens",
    f"generate {P} --option prompt_lookup_num_tokens=3": "prompt-lookup",
    f"generate {P} --option temprature=1": "temperature",
    f"generate {P} --num-assistant-tokens 5": "write --strategies draft-model:n_max=5:p_min=0.4",
    f"generate {P} --prompt-lookup-num-tokens=5": "write --strategies prompt-lookup:n_max=5:ngram_max=2:match=earliest",
    f"generate {P} --do-sample": "--temperature 0 is greedy",
    f"generate {P} --num-beams 4": "beam search",
    f"generate {P} --assistant-model x": "--draft",
    "generate --model x": "--target",
    f"generate {P} --strategies prompt-lookup:num_assistant_tokens=3": "write 'n_max'",
    f"generate {P} --temprature 1": "--temperature",
    f"generate {P} --option =1": "name=value",
    f"generate {P} --temperature 0 --option temperature=1": "--temperature says it already",
    f"generate {P} --translate": "--draft",
    f"generate {P} --dtype float99": "float99",
    f"generate {P} --device mps": "mps",
    f"generate {P} --device tpu": "tpu",
    f"generate {P} --category math": "--dataset",
    f"generate {P} --limit 3": "--dataset",
    "generate --target demo-target --dataset no_such_set": "no_such_set",
    "generate --target demo-target --dataset humaneval --category x": "humaneval",
    "generate --target demo-target --dataset humaneval --limit 0": "--limit",
    "generate --target demo-target --prompt-file nowhere.txt": "nowhere.txt",
    "generate --target demo-target --prompt-file BAD": "prompts.jsonl",
    "generate --target ./nowhere --prompt a": "./nowhere",
    "generate --config nowhere.yaml": "nowhere.yaml",
    "generate --config BAD": "prompts.jsonl",
    f"generate {P} --out FOLDER": "is a folder",
    "demo --repeats 0": "--repeats",
    "demo --strategies x": "'x'",
    "check": "--target",
    "check --target demo-target --translate": "--draft",
    "bench": "--smoke",
    "bench --smoke --suite smollm3": "smollm3",
    "bench --smoke --exactness": "one",
    "bench nowhere.yaml": "nowhere.yaml",
    "bench --smoke --target x": "--target",
    "compare --target demo-target": "nothing to compare",
    "compare --target demo-target --draft demo-draft --draft demo-draft": "twice",
    "compare --target demo-target --strategy draft-model": "draft",
    f"compare {P} --strategy none": "drafts nothing",
    f"compare {P} --strategy suffix@no": "no",
    f"compare {PAIR} --dataset humaneval": "--dataset",
    f"compare {PAIR} --baseline nothing": "nothing",
    "ablate nowhere.yaml --out FOLDER": "nowhere.yaml",
    "ablate ABLATION": "--out",
    "ablate ABLATION --out FOLDER --shard 4/4": "shard",
    "ablate ABLATION --out FOLDER --baseline nobody": "nobody",
    "ablate ABLATION --out FOLDER --dry-run --shard x": "shard",
    "ablate BAD --out FOLDER": "prompts.jsonl",
    "ablate merge FOLDER": "not the folder of an ablation",
    "results nowhere": "nowhere",
    "results TABLE": "TABLE",
    "results FOLDER --csv --latex": "one of --csv",
    "results FOLDER --out x.csv": "--csv or --latex",
    "results FOLDER --baseline a --by k": "--baseline",
    "results FOLDER --where k": "name=value",
    "lookup show nowhere": "nowhere",
    "lookup no-such": "no-such",
    "trace record --target demo-target --prompt a": "--out",
    "trace show nowhere": "nowhere",
    f"trace record {P} --out FOLDER/t --top 0": "--top",
    "train eagle3 nowhere.yaml": "nowhere.yaml",
    "train nothing": "nothing",
    "export": "no target",
    "export --target t --strategies draft-model": "--draft",
    "export --target t --strategies eagle3": "head",
    "export --target t --strategies eagle3:head=h:n_mx=3": "did you mean 'n_max'",
    "export --target t --strategies prompt-lokup": "prompt-lookup",
    "export --target t --acceptance leviathen": "leviathan",
    "export --target t --engine vlm": "vllm",
    "export --config BAD": "prompts.jsonl",
    "export-head nowhere --out FOLDER": "nowhere",
}


# Each option that reads a file, with the ending that it looks at, or that names a folder -> each foreign file. A call
# after # is of a file that other bytes than a few may be.
READS = """
generate --config {}.yaml, demo --config {}.yaml, trace record --out t --config {}.yaml, export --config {}.yaml
serve --config {}.yaml, bench {}.yaml, bench --exactness --config {}.yaml, ablate {}.yaml --out o
train eagle3 {}.yaml, train draft {}.yaml, train exit {}.yaml, generate --target {} --prompt a
generate --target demo-target --draft {} --prompt a, check --target {}, check --target demo-target --draft {}
generate --target demo-target --prompt-file {}.jsonl, generate --target demo-target --dataset {}.json
compare --target demo-target --strategy suffix --dataset {}.jsonl, lookup create --out x --ids {}, ablate merge {}
generate --target demo-target --prompt a --strategies eagle3:head={}, results {}.parquet, results {}.json, results {}
lookup stats --ids {}, trace show {}, export-head {} --out o#
lookup show {}, lookup merge {} x, generate --target demo-target --prompt a --strategies ngram-cache:static={}
"""
FOREIGN: dict[str, bytes] = {
    "empty": b"", "bytes": bytes(range(256)) * 9, "list": b"- 1", "null": b"null",
}  # fmt: skip


@pytest.mark.full
def test_a_foreign_file_is_one_line_wherever_one_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for ending in ("", ".yaml", ".json", ".jsonl", ".parquet"):
        for name, content in FOREIGN.items():
            (tmp_path / f"{name}{ending}").write_bytes(content)
        (tmp_path / f"folder{ending}").mkdir()
        (tmp_path / f"link{ending}").symlink_to(f"link{ending}")
    made = 0
    for full, calls in zip((True, False), READS.split("#"), strict=True):
        for call in calls.replace("\n", ",").split(","):
            for name in (*(FOREIGN if full else ["bytes"]), "folder", "link") if call.strip() else ():
                refused(*shlex.split(call.format(name)))
                made += 1
    assert made > 150
    assert not (tmp_path / "o").exists()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("calls")
    (folder / "prompts.jsonl").write_text('{"prompt": ')
    ablation: Any = {"pairs": {"p": {"target": "demo-target"}}, "strategies": {"s": ["suffix"]}, "prompts": ["a"]}
    (folder / "ablation.yaml").write_text(json.dumps(ablation))
    (folder / "TABLE.parquet").write_text("no table")
    places = {"BAD": "prompts.jsonl", "ABLATION": "ablation.yaml", "TABLE": "TABLE.parquet", "FOLDER": "."}
    return {name: str(folder / place) for name, place in places.items()}


def test_there_are_sixty() -> None:
    assert len(CALLS) >= 60


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_call_is_one_line(call: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def loading(*arguments: Any, **options: Any) -> None:
        raise AssertionError("it loads weights before it knows")

    monkeypatch.setattr("specdec.models.loading.AutoModelForCausalLM.from_pretrained", loading)
    monkeypatch.chdir(files["FOLDER"])
    words = []
    for word in shlex.split(call):
        head, slash, rest = word.partition("/")
        words.append(files.get(head, head) + slash + rest)
    message = refused(*words)
    assert CALLS[call] in message
    assert "Traceback" not in message
    assert {p.name for p in Path(files["FOLDER"]).iterdir()} <= {"prompts.jsonl", "ablation.yaml", "TABLE.parquet"}
