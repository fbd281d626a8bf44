"""The command line: what it prints where, its exit statuses, its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import specdec
from specdec import SpeculativeDecoder
from specdec.cli import VERBS, app, load_verb, output
from specdec.cli.inputs import chain, with_extra
from specdec.cli.options import Models, Prompts, with_groups
from specdec.drafters import STRATEGIES
from specdec.errors import SpecdecError
from specdec.files.fields import STRATEGY_NAMES
from specdec.research import demo as demo_module
from tests.helpers.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "def add(self, item):\n    self."
PAIR = ("--target", "demo-target", "--draft", "demo-draft")


def run(*arguments: str, **options: Any) -> Any:
    return CliRunner().invoke(app, list(arguments), **options)


def run_json(*arguments: str) -> Any:
    """Standard output must be one JSON document and nothing else."""
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refused(*arguments: str) -> str:
    """The one line on standard error of a call that is refused."""
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    # A slow load is announced.
    lines = [line for line in done.stderr.splitlines(keepends=True) if " so far" not in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: "), done.stderr
    return str(lines[0])


# -- demo -------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_python_m_specdec_demo_json() -> None:
    """As a user runs it, outside the repository: the installed package needs no file of the checkout."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "specdec", "demo", "--json", "--max-new-tokens", "16", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert result["identical_to_plain"] is True
    assert result["tokens_per_round"] > 1
    assert result["acceptance_length"] > 1
    assert result["plain_tokens_per_second"] > 0
    assert result["speculative_tokens_per_second"] > 0
    assert set(result["strategies"]) == {"prompt-lookup", "draft-model"}
    assert [len(ids) for ids in result["token_ids"]] == [16, 16]


def test_demo_for_people() -> None:
    done = run("demo", "--max-new-tokens", "16", "--repeats", "1", "--prompt", PROMPT)
    assert done.exit_code == 0, done.output
    for part in (PROMPT, "tokens per round", "prompt-lookup", "draft-model", "prefill", "accepted per drafted round"):
        assert part in done.stdout
    assert [line for line in done.stdout.splitlines() if "identical to plain" in line and "yes" in line]


def test_the_demo_names_a_draft_that_contributes_nothing(tmp_path: Path) -> None:
    from tests.helpers.grid import save_model

    pair = {"target": "demo-target", "draft": save_model(tmp_path / "draft")}
    settings = {"pair": pair, "strategies": ["draft-model:n_max=1"], "generation": {"max_new_tokens": 110}}
    (tmp_path / "demo.yaml").write_text(json.dumps({**settings, "prompts": [PROMPT]}))
    done = run("demo", "--config", str(tmp_path / "demo.yaml"), "--repeats", "1")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("strategy 'draft-model' contributes nothing: ") == 1


def test_demo_matches_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """`identical` is computed: a decoder whose drafts change the text is found out, with exit status 1."""
    generate = SpeculativeDecoder.generate

    def tampered(self: Any, prompts: Any, strategies: Any = specdec.UNSET, **options: Any) -> Any:
        out = generate(self, prompts, strategies=strategies, **options)
        if strategies:
            out.token_ids[0][-1] ^= 1
        return out

    monkeypatch.setattr(SpeculativeDecoder, "generate", tampered)
    short = ("demo", "--max-new-tokens", "4", "--repeats", "1", "--prompt", PROMPT)
    done = run(*short, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["identical_to_plain"] is False
    assert "NO" in run(*short).stdout


@pytest.mark.fast(1)
@pytest.mark.parametrize(("acceptance", "identical"), [("match", True), ("leviathan", None)])
def test_sampled_demo(acceptance: str, identical: bool | None) -> None:
    sampled = ("--temperature", "0.8", "--seed", "5", "--acceptance", acceptance)
    result = run_json("demo", "--max-new-tokens", "12", "--repeats", "1", "--prompt", PROMPT, *sampled)
    assert result["identical_to_plain"] is identical
    assert result["provenance"]["settings"]["acceptance"] == acceptance
    assert result["provenance"]["seed"] == 5


def test_demo_from_a_file_with_options_over_it() -> None:
    short = ("--max-new-tokens", "6", "--repeats", "1", "--strategies", "ngram-simple:size_n=2,draft-model:n_max=2")
    result = run_json("demo", "--config", str(ROOT / "configs" / "demo.yaml"), *short)
    assert list(result["strategies"]) == ["ngram-simple", "draft-model"]
    assert result["provenance"]["strategies"][1]["n_max"] == 2


def test_an_interrupted_demo_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_module, "load_decoder", interrupted)
    done = run("demo", "--json")
    assert done.exit_code == 130
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


# -- generate ---------------------------------------------------------------------------------------------------------


def test_generate_prints_the_result_of_generate() -> None:
    result = run_json("generate", *PAIR, "--prompt", PROMPT, "--max-new-tokens", "12")
    decoder = SpeculativeDecoder.from_pretrained("demo-target", "demo-draft")
    expected = decoder.generate([PROMPT], max_new_tokens=12)
    assert result["token_ids"] == expected.token_ids
    assert result["texts"] == expected.texts
    assert set(result) == {"prompts", *expected.to_dict()}
    assert result["stats"]["strategies"]["draft-model"]["n_call_draft"] > 0


def test_generate_options_reach_the_call(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("import os\n", encoding="utf-8")
    result = run_json(
        "generate", "--target", "demo-target", "--prompt", PROMPT, "--prompt-file", str(file),
        "--strategies", "prompt-lookup:n_max=3,ngram-simple", "--max-new-tokens", "5", "--temperature", "0.7",
        "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.1", "--seed", "4",
        "--acceptance", "match", "--stop", "zzz", "--batch-size", "2", "--num-return-sequences", "2", "--ignore-eos",
        "--option", "no_repeat_ngram_size=3", "--dtype", "float32", "--device", "cpu",
    )  # fmt: skip
    settings = result["provenance"]["settings"]
    assert len(result["token_ids"]) == 4
    expected = {
        "max_new_tokens": 5, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1,
        "seed": 4, "acceptance": "match", "stop_strings": ["zzz"], "batch_size": 2, "num_return_sequences": 2,
        "ignore_eos": True, "processors": {"no_repeat_ngram_size": 3},
    }  # fmt: skip
    assert {name: settings[name] for name in expected} == expected
    assert result["provenance"]["strategies"][0]["n_max"] == 3


def test_generate_for_people() -> None:
    done = run("generate", *PAIR, "--prompt", PROMPT, "--prompt", "import os\n", "--max-new-tokens", "6")
    assert done.exit_code == 0, done.output
    for part in ("row 1", "tokens per round", "draft-model", "llama.cpp's counters"):
        assert part in done.stdout


def test_plain_generation_is_a_strategy_list_of_none() -> None:
    result = run_json("generate", *PAIR, "--prompt", PROMPT, "--max-new-tokens", "4", "--strategies", "none")
    assert result["stats"]["strategies"] == {}
    assert result["stats"]["rounds"] == 4


@pytest.mark.fast(8)
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "no target"),
        (("--target", "demo-target"), "no prompt"),
        (("--target", "demo-target", "--prompt", ""), "prompt 0 is empty"),
        (("--target", "demo-target", "--prompt", "a", "--strategies", "ngram-simpel"), "did you mean 'ngram-simple'"),
        (("--target", "demo-target", "--prompt", "a", "--strategies", "prompt-lookup:n_maxx=3"), "n_maxx"),
        (("--target", "demo-target", "--prompt", "a", "--strategies", "draft-model"), "needs a draft model"),
        (("--target", "demo-target", "--prompt", "a", "--translate"), "--draft"),
        (("--target", "demo-target", "--prompt", "a", "--temperature", "-1"), "temperature"),
        (("--target", "demo-target", "--prompt", "a", "--top-p", "0"), "top_p"),
        (("--target", "demo-target", "--prompt", "a", "--top-p", "x"), "--top-p"),
        (("--target", "demo-target", "--prompt", "a", "--acceptance", "maybe"), "maybe"),
        (("--target", "demo-target", "--prompt", "a", "--option", "num_beams=4"), "beam search"),
        (("--target", "demo-target", "--prompt", "a", "--option", "no_such=4"), "no_such"),
        (("--target", "demo-target", "--prompt", "a", "--option", "novalue"), "name=value"),
        (("--target", "demo-target", "--prompt", "a", "--dtype", "float99"), "float99"),
        (("--target", "demo-target", "--prompt", "a", "--device", "mps"), "mps"),
        (("--target", "demo-target", "--prompt", "a", "--chat"), "chat template"),
        (("--target", "demo-target", "--prompt", "a b c " * 2000), "context"),
        (("--target", "./nowhere", "--prompt", "a"), "./nowhere"),
        (("--target", "x.gguf", "--prompt", "a"), "x.gguf"),
        (("--target", "demo-target", "--prompt-file", "nowhere.txt"), "nowhere.txt"),
        (("--config", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_bad_input_to_generate_is_one_line(arguments: tuple[str, ...], named: str) -> None:
    assert named in refused("generate", *arguments, "--json")


@pytest.mark.parametrize("arguments", [(), ("generat",), ("generate", "--promt", "a"), ("check",), ("bench",)])
def test_usage_errors_are_one_line(arguments: tuple[str, ...]) -> None:
    refused(*arguments)


def test_an_interrupted_generation_prints_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    original = specdec.decoding.row.Row.close_round
    calls = []

    def interrupting(self: Any, **arguments: Any) -> None:
        original(self, **arguments)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(specdec.decoding.row.Row, "close_round", interrupting)
    done = run("generate", *PAIR, "--prompt", PROMPT, "--max-new-tokens", "64", "--json")
    assert done.exit_code == 130
    result = json.loads(done.stdout)
    assert result["finish_reasons"] == ["interrupted"]
    assert 0 < len(result["token_ids"][0]) < 64


# -- check ------------------------------------------------------------------------------------------------------------


def test_check_reports_the_pair_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads_weights(*arguments: Any, **options: Any) -> None:
        raise AssertionError("check must not load weights")

    monkeypatch.setattr("specdec.models.loading.AutoModelForCausalLM.from_pretrained", loads_weights)
    small = run_json("check", *PAIR, "--batch-size", "1", "--tokens", "512")
    large = run_json("check", *PAIR, "--batch-size", "4", "--tokens", "512")
    assert small["vocabulary"] == "identical"
    assert small["warnings"] == []
    assert small["size_ratio"] < 1 / 3
    assert large["memory_for"] == {"batch_size": 4, "tokens": 512}
    assert large["memory"]["weights"] == small["memory"]["weights"]
    assert large["memory"]["kv_cache"] > 3.9 * small["memory"]["kv_cache"]


def test_check_for_people_prints_warnings() -> None:
    done = run("check", "--target", "demo-draft", "--draft", "demo-target")
    assert done.exit_code == 0
    assert "warning: the draft has" in done.stdout
    assert "kv cache" in done.stdout


def test_check_refuses_what_cannot_work(tmp_path: Path) -> None:
    demo = specdec.demo_models.draft_path()
    other = tmp_path / "other"
    tiny_model("llama").save_pretrained(other)
    tokenizer = json.loads((demo / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    a, b = [token for token, index in vocabulary.items() if index in (300, 301)]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (other / "tokenizer_config.json").write_bytes((demo / "tokenizer_config.json").read_bytes())
    pair = ("check", "--target", "demo-target", "--draft", str(other))
    assert "tokenizer mismatch" in refused(*pair)
    assert run_json(*pair, "--translate")["vocabulary"] == "translated"
    assert "--draft" in refused("check", "--target", "demo-target", "--translate")


# -- bench ------------------------------------------------------------------------------------------------------------


def test_bench_writes_the_file_before_it_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unequal token ids are a failed check: exit status 1, with the results kept."""
    result = {"suites": {"s": {"skipped": "no network"}}}
    monkeypatch.setattr("specdec.research.bench.smoke.run_smoke", lambda *arguments: result)
    file = tmp_path / "new" / "out.json"
    assert run_json("bench", "--smoke", "--out", str(file)) == result
    assert json.loads(file.read_text(encoding="utf-8")) == result
    monkeypatch.setattr("specdec.research.bench.smoke.equal", lambda result: False)
    assert run("bench", "--smoke", "--json").exit_code == 1
    assert "no network" in run("bench", "--smoke").stdout


def test_an_interrupted_bench_leaves_files_as_they_were(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec.research.bench.smoke.run_smoke", interrupted)
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("{}", encoding="utf-8")
    for file in (old, new):
        assert run("bench", "--smoke", "--out", str(file)).exit_code == 130
    assert old.read_text(encoding="utf-8") == "{}"
    assert not new.exists()


def test_bench_refuses_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "cannot write" in refused("bench", "--smoke", "--out", str(tmp_path / "file" / "out.json"))
    assert "smollm3" in refused("bench", "--smoke", "--suite", "smollm3")


# -- parts ------------------------------------------------------------------------------------------------------------


class Bytes:
    """A tokenizer whose tokens are single bytes."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_colours_follow_the_origins() -> None:
    ids = list("aé日z".encode())  # 1 + 2 + 3 + 1 bytes
    text = output.coloured(Bytes(), ids, [None, "x", "x", "x", "y", "y", None], {"x": "green", "y": "cyan"})
    assert text.plain == "aé日z"
    assert {text.plain[s.start : s.end]: s.style for s in text.spans if s.style} == {"é": "green", "日": "cyan"}


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": "é"})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": "é"}


def test_chains_as_typed() -> None:
    assert chain(None) is None
    assert chain("none") == ()
    made = chain("prompt-lookup, draft-model:n_max=2", translate=True)
    assert made is not None
    assert [d.name for d in made] == ["prompt-lookup", "draft-model"]
    assert made[1].translate
    with pytest.raises(SpecdecError, match="--translate"):
        chain("prompt-lookup", translate=True)


def test_translate_keeps_the_chain_of_the_config() -> None:
    known = ("prompt-lookup", "draft-model:n_max=2")
    made = chain(None, translate=True, known=known)
    assert made is not None
    assert [d.name for d in made] == ["prompt-lookup", "draft-model"]
    assert (made[1].n_max, made[1].translate) == (2, True)
    assert chain(None, known=known) == known
    assert chain("suffix", known=known)[0].name == "suffix"  # type: ignore[index]
    assert chain(None) is None


def test_extra_options_are_read_as_yaml() -> None:
    made = with_extra({"seed": 1}, ["top_k=5", "eos_token_id=[2, 3]", " stop_strings =x=y"])
    assert made == {"seed": 1, "top_k": 5, "eos_token_id": [2, 3], "stop_strings": "x=y"}
    wrongs = (("seed=2", "seed: --seed says it already"), ("strategies=x", "strategies"), ("a", "name=value"))
    for wrong, said in wrongs:
        with pytest.raises(SpecdecError, match=said):
            with_extra({"seed": 1}, [wrong])
    with pytest.raises(SpecdecError, match="not valid YAML"):
        with_extra({}, ["a=["])


def test_tables_show_every_strategy() -> None:
    decoder = SpeculativeDecoder.from_pretrained("demo-target", "demo-draft", ["ngram-simple", "draft-model"])
    stats = decoder.generate([PROMPT], max_new_tokens=6).stats.to_dict()
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    for made in (output.strategy_table(stats), output.position_table(stats), output.counter_table(stats)):
        console.print(made)
    assert console.export_text().count("ngram-simple") == 3


def test_groups_of_options_become_options_of_a_verb() -> None:
    seen: dict[str, Any] = {}

    @with_groups
    def verb(models: Models, prompts: Prompts, extra: int = 3) -> None:
        seen.update(models=models.given(), prompts=prompts.texts(), extra=extra)

    own = typer.Typer()
    own.command()(verb)
    typed = ["--target", "t", "--trust-remote-code", "--prompt", "a", "--prompt", "b", "--extra", "5"]
    assert CliRunner().invoke(own, typed).exit_code == 0
    assert seen == {"models": {"target": "t", "trust_remote_code": True}, "prompts": ["a", "b"], "extra": 5}


MODEL_VERBS = ["demo", "generate", "check", "compare", "serve", "bench", "trace record"]


def flags(verb: str) -> list[str]:
    first, *rest = verb.split()
    command = load_verb(first)
    for name in rest:
        command = command.commands[name]
    return [flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)]


@pytest.mark.parametrize("verb", MODEL_VERBS)
def test_every_verb_that_loads_models_says_what_keys_and_values_are_kept_in(verb: str) -> None:
    assert "--kv-cache-dtype" in flags(verb)


@pytest.mark.parametrize(
    "call",
    [
        ("demo",),
        ("generate", *PAIR, "--prompt", "a"),
        ("check", *PAIR),
        ("compare", *PAIR, "--prompt", "a"),
        ("serve", *PAIR, "--port", "0"),
        ("bench", str(ROOT / "configs" / "bench_tiny.yaml")),
        ("bench", "--exactness"),
        ("trace", "record", *PAIR, "--prompt", "a", "--out", "nowhere"),
    ],
    ids=lambda call: " ".join(call[:2]).partition(str(ROOT))[0],
)
def test_keys_and_values_in_what_does_not_exist_are_refused_in_a_line(call: tuple[str, ...]) -> None:
    assert "kv_cache_dtype must be auto" in refused(*call, "--kv-cache-dtype", "int4")


def test_demo_keeps_keys_and_values_as_typed_and_does_not_promise_equal_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 8 bits near-ties are wide: without exact mode the text need not be plain decoding's."""
    monkeypatch.setattr(SpeculativeDecoder, "_self_test", lambda self: None)
    short = ("demo", "--max-new-tokens", "3", "--repeats", "1", "--prompt", PROMPT, "--strategies", "prompt-lookup")
    result = run_json(*short, "--kv-cache-dtype", "fp8")
    assert (result["provenance"]["kv_cache_dtype"], result["identical_to_plain"]) == ("fp8", None)


@pytest.mark.parametrize("verb", MODEL_VERBS)
def test_no_verb_has_an_option_twice(verb: str) -> None:
    names = flags(verb)
    assert len(set(names)) == len(names)


def test_version_and_help() -> None:
    assert run("--version").stdout.strip() == specdec.__version__
    shown = run("--help")
    assert shown.exit_code == 0
    for verb in ("demo", "generate", "check", "bench"):
        assert verb in shown.stdout
        assert run(verb, "--help").exit_code == 0


def test_help_version_and_a_typo_import_neither_torch_nor_transformers() -> None:
    for arguments, status in ((["--help"], 0), (["--version"], 0), (["generat"], 2)):
        command = [sys.executable, "-X", "importtime", "-m", "specdec", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == status
        imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
        assert "specdec.cli" in imported
        assert {"torch", "transformers", "numpy"}.isdisjoint(imported)


# Wrong calls that are answered before a library is loaded: files that are not there, values that cannot be, and what
# does not go together.
WRONG_AT_ONCE = (
    "generate", "generate --target demo-target", "generate --config nowhere.yaml",
    "generate --target demo-target --prompt-file nowhere.txt", "generate --target demo-target --prompt a --top-p 2",
    "generate --target demo-target --prompt a --option temprature=1", "demo --prompt-file nowhere.txt",
    "check --target demo-target --translate", "bench", "bench nowhere.yaml", "bench --exactness --config nowhere.yaml",
    "compare --target demo-target --draft demo-draft --prompt-file nowhere.jsonl", "ablate nowhere.yaml --out out",
    "results nowhere", "results . --csv --latex", "results . --where k", "lookup show nowhere",
    "trace record --out out --target demo-target --prompt-file nowhere.txt", "trace show nowhere",
    "generate --target ./nowhere --prompt a", "check --target demo-target --draft nowhere.gguf", "demo --strategies x",
    "generate --target demo-target --prompt a --strategies prompt-lokup", "train eagle3 nowhere.yaml", "export",
    "export --config nowhere.yaml", "compare --target ./nowhere --strategy suffix",
    "compare --target demo-target --strategy prompt-lokup@match",
)  # fmt: skip


def test_the_names_that_are_checked_at_once_are_those_of_the_strategies() -> None:
    assert tuple(STRATEGIES) == STRATEGY_NAMES


def test_help_and_typos_of_every_verb_and_theory_need_neither_torch_nor_a_second() -> None:
    script = """
import itertools, shlex, sys, time
import specdec.theory
assert specdec.theory.best_k(0.8, 0.1) == 6 and specdec.theory.speedup([0.8], 5, 0.1).shape == (1,)
from typer.testing import CliRunner
from specdec.cli import VERBS, app, load_verb
calls = [[v, *sub] for v in VERBS for sub in ([], *([s] for s in getattr(load_verb(v), "commands", ())))]
seconds = []
for call, (word, status) in itertools.product(calls, {"--help": 0, "--no-such": 2}.items()):
    started = time.process_time()
    assert CliRunner().invoke(app, [*call, word]).exit_code == status, call
    seconds.append(time.process_time() - started)
for call in sys.argv[1:]:
    started = time.process_time()
    assert CliRunner().invoke(app, shlex.split(call)).exit_code == 2, call
    seconds.append(time.process_time() - started)
started = time.process_time()
sum(number for number in range(10_000_000))  # a quarter of a second where nothing else runs
print(len(calls), max(seconds), time.process_time() - started, *{"torch", "transformers"} & set(sys.modules))
"""
    command = [sys.executable, "-c", script, *WRONG_AT_ONCE]
    for _ in range(2):  # the first process may have to compile the modules that it imports, the second has not
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr
    calls, slowest, counted, *imported = done.stdout.split()
    assert int(calls) > len(VERBS)  # verbs of verbs too
    assert imported == []
    assert float(slowest) < 4 * float(counted)  # a second, by the speed that this process had


def test_every_verb_has_its_module_and_says_what_it_does() -> None:
    for verb, line in VERBS.items():
        done = CliRunner().invoke(app, [verb, "--help"])
        assert done.exit_code == 0, verb
        assert line.endswith(".")
