"""Files that no config, prompt set or table can be, and names that no file can have: one line each, at once."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from specdec import CostTable, LookupCache, SpecdecError
from specdec.cli import app
from specdec.cli.inputs import read_prompts, with_extra
from specdec.config import load_yaml
from specdec.files.texts import dump_yaml_text, parse_json, parse_yaml, read_json, read_text, read_yaml, write_file
from specdec.models.loading import Source, load_pair
from specdec.research.ablation.config import load_ablation
from specdec.research.prompts.datasets import load_prompts
from specdec.research.traces.trace import Trace

LAUGHS = "\n".join(
    ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    + [f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
)

BAD_YAML = {
    "a list in itself": "&a [*a]",
    "a mapping in itself": "pair: &a {target: *a}",
    "a mapping as its own key": "&a {? *a : 1}",
    "two that hold each other": "a: &a [&b [*a]]",
    "anchors of anchors": LAUGHS,
    "lists 10,000 deep": "[" * 10_000,
    "closed lists 10,000 deep": "[" * 10_000 + "]" * 10_000,
    "mappings 10,000 deep": "{a: " * 10_000,
    "blocks 10,000 deep": "- " * 10_000,
    "keys 5,000 deep": "? " * 5_000,
    "100 deep": "[" * 100 + "]" * 100,
    "5,000 digits": "x: " + "9" * 5_000,
    "5,000 hexadecimal digits": "x: 0x" + "f" * 5_000,
    "5,000 bits": "x: 0b" + "1" * 5_000,
    "sexagesimal": "x: " + ":".join(["1"] * 3_000),
    "an empty whole number": "x: !!int ''",
    "no truth value": "x: !!bool maybe",
    "no time": "x: !!timestamp never",
    "no day": "x: 2024-99-99",
    "code": "!!python/object/apply:os.system [ls]",
    "a NUL": "a: \0",
    "a value without a constructor": "x: =",
    "an unhashable key": "? [a]\n: 1",
}


@pytest.mark.parametrize("text", BAD_YAML.values(), ids=BAD_YAML)
def test_yaml_without_end_is_refused_at_once(text: str, tmp_path: Path) -> None:
    started = time.process_time()
    with pytest.raises(SpecdecError, match=r"run\.yaml.*YAML|anchors|nests") as error:
        parse_yaml(text, "run.yaml")
    assert time.process_time() - started < 5
    assert len(str(error.value)) < 300
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    for load in (load_yaml, load_ablation):
        with pytest.raises(SpecdecError, match=r"run\.yaml"):
            load(tmp_path / "run.yaml")


BAD_JSON = {
    "lists 10,000 deep": "[" * 10_000,
    "closed lists 10,000 deep": "[" * 10_000 + "]" * 10_000,
    "mappings 10,000 deep": '{"a":' * 10_000,
    "100 deep": "[" * 100 + "]" * 100,
    "5,000 digits": '{"prompt": ' + "9" * 5_000 + "}",
    "400 digits": "-" + "1" * 400,
    "nothing": "",
    "a NUL": "\0",
}


@pytest.mark.parametrize("text", BAD_JSON.values(), ids=BAD_JSON)
@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_json_without_end_is_refused(text: str, suffix: str, tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match=r"here: not JSON|here: it nests"):
        parse_json(text, "here")
    file = tmp_path / f"set.{suffix}"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SpecdecError, match=rf"set\.{suffix}"):
        load_prompts(file)


def test_what_is_deep_and_large_within_reason_is_read() -> None:
    assert parse_json("[" * 60 + "]" * 60, "x") == parse_yaml("[" * 60 + "]" * 60, "x")
    assert parse_yaml("a: &a [1, 2]\nb: [*a, *a]\nc: &c {x: 1}\nd: {<<: *c, y: 0x10}", "x")["d"] == {"x": 1, "y": 16}
    assert parse_json("1" * 300, "x") == parse_yaml("1" * 300, "x")


@pytest.mark.parametrize("text", ["1e-3", "1E5", "-2e-4", "+1.e+3", ".5e1", "1.5e-3"])
def test_numbers_with_an_exponent_are_numbers(text: str) -> None:
    assert parse_yaml(f"x: [{text}]", "here") == {"x": [float(text)]}
    quoted = {"text": text, "number": float(text)}
    assert parse_yaml(dump_yaml_text(quoted), "here") == quoted


@pytest.mark.parametrize("text", ["e3", "1e", "1e-3b", "v1e-3", "1e3.5", "0x1e"])
def test_texts_that_look_like_such_numbers_stay_what_they_were(text: str) -> None:
    assert parse_yaml(text, "here") == yaml.safe_load(text)


# -- names ------------------------------------------------------------------------------------------------------------

NAMES: dict[str, tuple[Any, str]] = {
    "empty": ("", "empty|expected|neither"),
    "with a NUL": ("a\0b", "NUL|neither"),
    "too long": ("a" * 300, "too long|not found|neither|no such"),
    "of many folders": ("b/" * 3_000, "too long|not found|neither|no such"),
    "of nobody": ("~nosuchuser/x", "not found|no such|neither"),
    "inside a file": ("FILE/x", "not found|no such|neither|Not a directory"),
    "a folder": ("FOLDER", "folder|no such|neither|cannot|not found"),
    "a device": ("/dev/zero", "device|no such|neither|not a GGUF|not found"),
    "a number": (3, "expected|neither|no such"),
    "none": (None, "expected|neither"),
    "bytes": (b"x", "expected|neither|no such"),
}

READERS: dict[str, Callable[[Any], Any]] = {
    "config": load_yaml,
    "ablation": load_ablation,
    "costs": CostTable.load,
    "lookup cache": LookupCache.load,
    "trace": Trace.load,
    "text": lambda name: read_text(name, "file"),
    "json": lambda name: read_json(name, "file"),
    "yaml": lambda name: read_yaml(name, "file"),
    "prompt set": load_prompts,
    "model": Source.parse,
    "prompt": lambda name: read_prompts([], [name]),
}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("reader", READERS)
def test_names_that_no_file_can_have(reader: str, kind: str, tmp_path: Path) -> None:
    name, message = NAMES[kind]
    (tmp_path / "FILE").write_text("x")
    (tmp_path / "FOLDER").mkdir()
    if isinstance(name, str):
        name = name.replace("FILE", str(tmp_path / "FILE")).replace("FOLDER", str(tmp_path / "FOLDER"))
    if reader == "model" and kind == "a folder":
        assert Source.parse(name).path == name
        return
    with pytest.raises(SpecdecError, match=message) as error:
        READERS[reader](name)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) <= 1_010


WRITERS: dict[str, Callable[[Any], Any]] = {
    "lookup cache": lambda name: LookupCache().save(name),
    "page": lambda name: Trace([], [], {}, {}, STATS).to_html(name),
    "trace": lambda name: Trace([], [], {}, {}, STATS).save(name),
    "file": lambda name: write_file(name, "x", "file"),
}
STATS = {"emitted_tokens": 0, "rounds": 0, "tokens_per_round": None}


@pytest.mark.parametrize("kind", [k for k in NAMES if k not in ("a device", "of nobody")])
@pytest.mark.parametrize("writer", WRITERS)
def test_names_that_cannot_be_written(writer: str, kind: str, tmp_path: Path) -> None:
    name = NAMES[kind][0]
    (tmp_path / "FILE").write_text("x")
    (tmp_path / "FOLDER").mkdir()
    if isinstance(name, str):
        name = name.replace("FILE", str(tmp_path / "FILE")).replace("FOLDER", str(tmp_path / "FOLDER"))
    if (writer, kind) in (("trace", "a folder"), ("trace", "of many folders"), ("page", "none")):
        return  # two files beside the folder; folders are made; no page is wanted
    with pytest.raises(SpecdecError) as error:
        WRITERS[writer](name)
    assert "\n" not in str(error.value)


def test_a_name_as_long_as_the_file_system_takes_is_written(tmp_path: Path) -> None:
    name = tmp_path / ("n" * 250)
    write_file(name, "text", "file")
    assert name.read_text() == "text"
    assert [path.name for path in tmp_path.iterdir()] == [name.name]


def test_a_pipe_is_written_to_and_not_replaced() -> None:
    write_file("/dev/null", "text", "file")
    assert Path("/dev/null").is_char_device()


# -- encodings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"\xff\xfea\0", b"a: \xff", b"\x80", "pair: é".encode("latin-1")])
def test_what_is_not_utf8_is_named(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_bytes(data)
    for read in (load_yaml, load_ablation, lambda name: read_prompts([], [name])):
        with pytest.raises(SpecdecError, match=r"file\.yaml cannot be read as UTF-8 text: .* at byte \d"):
            read(file)  # type: ignore[operator]


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("\ufeffa prompt".encode())
    assert read_prompts([], [file]) == ["a prompt"]
    assert load_prompts(file)[0].text == "a prompt"
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufefftyped"))
    assert read_prompts([], [Path("-")]) == ["typed"]
    file.with_suffix(".yaml").write_bytes("\ufeffpair: {target: demo-target}".encode())
    assert load_yaml(file.with_suffix(".yaml")).pair.target == "demo-target"


@pytest.mark.parametrize("keys", ["{1: 2}", "{null: 3}", "{2024-01-01: 3}", "{true: 1}", "{1.5: 1}"])
def test_keys_that_are_no_texts_are_unknown_options(keys: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for text in (keys, f"pair: {keys}", f"pair: {{target: t}}\ngeneration: {keys}"):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(SpecdecError):
            load_yaml(file)


# -- the command line -------------------------------------------------------------------------------------------------

VERBS: dict[str, Callable[[str], list[str]]] = {
    "generate --config": lambda name: ["generate", "--config", name],
    "generate --prompt-file": lambda name: ["generate", "--target", "/none", "--prompt-file", name],
    "generate --target": lambda name: ["generate", "--target", name, "--prompt", "a"],
    "generate costs": lambda name: ["generate", "--target", "/none", "--prompt", "a", "--option", f"costs={name}"],
    "demo": lambda name: ["demo", "--config", name],
    "check": lambda name: ["check", "--target", name],
    "ablate": lambda name: ["ablate", name, "--out", "/nonexistent/out"],
    "ablate merge": lambda name: ["ablate", "merge", name],
    "bench": lambda name: ["bench", name],
    "bench --exactness": lambda name: ["bench", "--exactness", "--config", name],
    "lookup create": lambda name: ["lookup", "create", "--ids", name, "--out", "/nonexistent/out"],
    "lookup show": lambda name: ["lookup", "show", name],
    "lookup --tokenizer": lambda name: ["lookup", "create", "/dev/null", "--tokenizer", name, "--out", "/none/out"],
    "train eagle3": lambda name: ["train", "eagle3", name],
    "export --config": lambda name: ["export", "--config", name],
    "export-head": lambda name: ["export-head", name, "--out", "/nonexistent/out"],
    "trace show": lambda name: ["trace", "show", name],
    "trace record": lambda name: ["trace", "record", "--target", "/none", "--out", "/none/t", "--dataset", name],
}


@pytest.mark.fast(45)
@pytest.mark.parametrize("name", ["", "a\0b", "x" * 300, "b/" * 3_000, "/dev/zero", "~nosuchuser/x", "/\udcff"])
@pytest.mark.parametrize("verb", VERBS)
def test_every_path_option_refuses_what_is_no_file(verb: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = CliRunner().invoke(app, VERBS[verb](name))
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_options_as_yaml_refer_to_nothing_but_themselves() -> None:
    for value in ("&a [*a]", "[" * 10_000, "9" * 5_000):
        with pytest.raises(SpecdecError, match="--option"):
            with_extra({}, [f"stop_strings={value}"])


def test_long_messages_are_cut_in_the_middle() -> None:
    with pytest.raises(SpecdecError) as error:
        load_pair("/" + "x" * 5_000)
    assert len(str(error.value)) <= 1_010
