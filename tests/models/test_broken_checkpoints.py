"""Checkpoints that are cut, empty, or edited: one line that names the file, never a library's traceback."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from specdec import SpecdecError, load_pair
from specdec.cli import app
from specdec.models.loading import load_tokenizer
from tests.helpers.tiny import tiny_model
from tests.helpers.tokens import byte_level

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
GENERATION, PYTORCH = "generation_config.json", "pytorch_model.bin"
INDEX = "model.safetensors.index.json"
DAMAGED = "it is damaged, cut or of another kind"
RANDOM = random.Random(0).randbytes(3000)
Spoil = Callable[[Path], Any]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model three times: one file, shards, a pytorch file."""
    folder = tmp_path_factory.mktemp("sound")
    tokenizer = byte_level()
    model = tiny_model("llama", vocab=len(tokenizer), hidden_size=16, num_hidden_layers=2, eos_token_id=2)
    for name, size in (("one", "1GB"), ("shards", "6KB")):
        model.save_pretrained(folder / name, max_shard_size=size)
        tokenizer.save_pretrained(folder / name)
    shutil.copytree(folder / "one", folder / "bin")
    (folder / "bin" / WEIGHTS).unlink()
    torch.save(model.state_dict(), folder / "bin" / "pytorch_model.bin")
    return folder


def put(name: str, data: bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(data)


def cut(name: str, share: float) -> Spoil:
    def spoil(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(share * len(data))])

    return spoil


def gone(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def as_folder(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return spoil


def edit(name: str, **values: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **values}))

    return spoil


def header(**values: Any) -> Spoil:
    """Edits the header's entry of one tensor."""

    def spoil(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        head = json.loads(data[8 : 8 + size])
        head["lm_head.weight"].update(values)
        made = json.dumps(head).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(made)) + made + data[8 + size :])

    return spoil


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Spoil:
    def spoil(folder: Path) -> None:
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})

    return spoil


def cut_weight(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v[:5].contiguous() if k.endswith("0.mlp.up_proj.weight") else v for k, v in found.items()}


def without_layer(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in found.items() if "layers.1." not in k}


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00009.safetensors"


def index(value: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        document = json.loads((folder / INDEX).read_text())
        document["weight_map"]["lm_head.weight"] = value
        (folder / INDEX).write_text(json.dumps(document))

    return spoil


def adapter(folder: Path) -> None:
    (folder / CONFIG).rename(folder / "adapter_config.json")
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")


BROKEN: list[tuple[str, str, Spoil, str]] = [
    ("one", "weights empty", put(WEIGHTS, b""), rf"{WEIGHTS}: {DAMAGED}"),
    ("one", "weights of 7 bytes", put(WEIGHTS, b"1234567"), rf"{WEIGHTS}: {DAMAGED}"),
    ("one", "weights cut in the header", put(WEIGHTS, struct.pack("<Q", 500) + b"{"), rf"{WEIGHTS}: {DAMAGED}"),
    ("one", "weights cut", cut(WEIGHTS, 0.6), rf"{WEIGHTS}: {DAMAGED}"),
    ("one", "weights random", put(WEIGHTS, RANDOM), rf"{WEIGHTS}: {DAMAGED}"),
    ("one", "weights zero", put(WEIGHTS, bytes(3000)), rf"{WEIGHTS}: {DAMAGED}"),
    ("one", "weights a folder", as_folder(WEIGHTS), rf"{WEIGHTS} is a folder"),
    ("one", "weights missing", gone(WEIGHTS), "has no weights"),
    ("one", "unknown dtype of a tensor", header(dtype="F99"), rf"{WEIGHTS}: {DAMAGED}.*F99"),
    ("one", "negative shape", header(shape=[-3, 3]), rf"{WEIGHTS}: {DAMAGED}"),
    ("one", "shape of another size", header(shape=[3, 3]), rf"{WEIGHTS}: {DAMAGED}"),
    ("one", "size mismatch", tensors(cut_weight), rf"{WEIGHTS}: .*up_proj.weight has the shape \[5, 16\].*\[64, 16\]"),
    ("one", "a layer is missing", tensors(without_layer), "lacks weights .*9 of them, model.layers.1"),
    ("one", "config empty", put(CONFIG, b""), rf"{CONFIG}: not JSON"),
    ("one", "config cut", cut(CONFIG, 0.5), rf"{CONFIG}: not JSON"),
    ("one", "config random", put(CONFIG, RANDOM), rf"{CONFIG} cannot be read as UTF-8"),
    ("one", "config a list", put(CONFIG, b"[]"), rf"{CONFIG}: expected a JSON object, got list"),
    ("one", "config nested", put(CONFIG, b"[" * 10_000), rf"{CONFIG}: .*nests"),
    ("one", "config a folder", as_folder(CONFIG), rf"{CONFIG} is a folder"),
    ("one", "config missing", gone(CONFIG), rf"has no {CONFIG}"),
    ("one", "text for a number", edit(CONFIG, hidden_size="abc"), rf"{CONFIG}: hidden_size .*'abc'"),
    ("one", "text for another number", edit(CONFIG, rms_norm_eps="x"), rf"{CONFIG}: .*rms_norm_eps"),
    ("one", "null for a number", edit(CONFIG, vocab_size=None), rf"{CONFIG}: vocab_size .*None"),
    ("one", "no heads", edit(CONFIG, num_attention_heads=0), rf"{CONFIG}: num_attention_heads .*got 0"),
    ("one", "layers without end", edit(CONFIG, num_hidden_layers=10**9), rf"{CONFIG}: num_hidden_layers"),
    ("one", "more layers than weights", edit(CONFIG, num_hidden_layers=3), "lacks weights"),
    ("one", "unknown kind", edit(CONFIG, model_type="nosuch"), rf"{CONFIG}: .*nosuch"),
    ("one", "kind a number", edit(CONFIG, model_type=3), rf"{CONFIG}: model_type"),
    ("one", "unknown dtype", edit(CONFIG, dtype="float99"), rf"{CONFIG}: dtype: 'float99'"),
    ("one", "unknown activation", edit(CONFIG, hidden_act="nosuch"), rf"{CONFIG} makes no model: 'nosuch'"),
    ("one", "rope of no kind", edit(CONFIG, rope_parameters="x"), rf"{CONFIG}: .*rope_parameters"),
    ("one", "generation config cut", cut(GENERATION, 0.5), rf"{GENERATION}: not JSON"),
    (
        "one",
        "end token a text",
        edit(GENERATION, eos_token_id="x"),
        rf"{GENERATION}: eos_token_id",
    ),
    ("one", "adapter config cut", put("adapter_config.json", b"{"), "adapter_config.json: not JSON"),
    ("one", "tokenizer empty", put(TOKENIZER, b""), rf"{TOKENIZER}: not JSON"),
    ("one", "tokenizer cut", cut(TOKENIZER, 0.7), rf"{TOKENIZER}: not JSON"),
    ("one", "tokenizer random", put(TOKENIZER, RANDOM), rf"{TOKENIZER} cannot be read as UTF-8"),
    ("one", "tokenizer of no kind", edit(TOKENIZER, model={}), rf"{TOKENIZER}: "),
    ("one", "tokens that are none", edit(TOKENIZER, added_tokens=3), rf"{TOKENIZER}: "),
    ("one", "tokenizer config cut", cut("tokenizer_config.json", 0.5), "tokenizer_config.json: not JSON"),
    ("one", "special token a number", edit("tokenizer_config.json", eos_token=3), "tokenizer_config.json: "),
    ("one", "longest a text", edit("tokenizer_config.json", model_max_length="x"), "tokenizer_config.json: "),
    ("one", "an adapter", adapter, "holds an adapter and no model"),
    ("shards", "shard missing", gone(shard(2)), rf"{INDEX}: the file {shard(2)} .*missing"),
    ("shards", "shard empty", put(shard(3), b""), rf"{shard(3)}: {DAMAGED}"),
    ("shards", "shard random", put(shard(4), RANDOM), rf"{shard(4)}: {DAMAGED}"),
    ("shards", "shard cut", cut(shard(1), 0.5), rf"{shard(1)}: {DAMAGED}"),
    ("shards", "index names no file", index("other.safetensors"), rf"{INDEX}: the file other.safetensors"),
    ("shards", "index names a number", index(3), rf"{INDEX}: weight_map.lm_head.weight: expected a text, got 3"),
    ("shards", "index empty", put(INDEX, b""), rf"{INDEX}: not JSON"),
    ("shards", "index without a map", put(INDEX, b"{}"), rf"{INDEX}: weight_map"),
    ("bin", "pytorch file random", put(PYTORCH, RANDOM), rf"{PYTORCH}: .*damaged"),
    ("bin", "pytorch file empty", put(PYTORCH, b""), rf"{PYTORCH}: {DAMAGED}"),
    (
        "bin",
        "pytorch file cut",
        cut(PYTORCH, 0.5),
        rf"{PYTORCH}: {DAMAGED}",
    ),
    (
        "bin",
        "code in place of weights",
        lambda d: torch.save(os.system, d / PYTORCH),
        rf"{PYTORCH}: ",
    ),
    ("bin", "a list of weights", lambda d: torch.save([1], d / PYTORCH), rf"{PYTORCH}: holds list"),
]


@pytest.mark.fast(40)
@pytest.mark.parametrize(("kind", "name", "spoil", "message"), BROKEN, ids=[b[1] for b in BROKEN])
def test_a_broken_checkpoint_is_refused_by_its_file(
    sound: Path, kind: str, name: str, spoil: Spoil, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(sound / kind, folder)
    spoil(folder)
    with pytest.raises(SpecdecError, match=message) as error:
        load_pair(str(folder), device="cpu")
    assert "\n" not in str(error.value)
    with pytest.raises(SpecdecError, match=message):
        load_pair(str(sound / "one"), str(folder), device="cpu", draft_dtype="float32")


def test_a_draft_with_weights_that_are_not_finite_is_refused(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound / "one", tmp_path / "draft")
    state = load_file(tmp_path / "draft" / WEIGHTS)
    name = "model.layers.1.mlp.up_proj.weight"
    state[name][0, 0] = float("nan")
    save_file(state, tmp_path / "draft" / WEIGHTS, {"format": "pt"})
    with pytest.raises(SpecdecError, match=f"{tmp_path / 'draft'}: {name} holds NaN or infinities, 1 of"):
        load_pair(sound / "one", tmp_path / "draft", device="cpu")


@pytest.mark.parametrize("kind", ["one", "shards", "bin"])
def test_a_sound_checkpoint_loads(sound: Path, kind: str) -> None:
    assert load_pair(str(sound / kind), device="cpu").target.config.num_hidden_layers == 2


GGUF = {
    "four bytes": (b"GGUF", DAMAGED),
    "empty": (b"", DAMAGED),
    "random": (RANDOM, DAMAGED),
    "of a later version": (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "version 99"),
    "of nothing": (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "no tensors"),
    "cut": (b"GGUF" + struct.pack("<IQQ", 3, 5, 5), DAMAGED),
    "with tensors without end": (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), DAMAGED),
}


@pytest.mark.parametrize("name", GGUF)
def test_a_broken_gguf_file_is_refused(name: str, tmp_path: Path) -> None:
    data, message = GGUF[name]
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    for load in (lambda: load_pair(str(file), device="cpu"), lambda: load_tokenizer(file)):
        with pytest.raises(SpecdecError, match=message) as error:
            load()
        assert "model.gguf" in str(error.value)


def test_the_command_line_says_one_line_and_exits_with_two(sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(sound / "one", folder)
    cut(WEIGHTS, 0.3)(folder)
    done = CliRunner().invoke(app, ["generate", "--target", str(folder), "--prompt", "a"])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ")
    put(CONFIG, b"{")(folder)
    assert CliRunner().invoke(app, ["check", "--target", str(folder)]).exit_code == 2
