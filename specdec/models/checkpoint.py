"""Finds what is wrong with a checkpoint that a library could not load: which file, and what it holds.

The libraries' own errors rarely name a file. After a failed load the files' heads and sizes are looked at, no weight is
read; a checkpoint that loads only has its small files checked.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from specdec.errors import SpecdecError
from specdec.files.forms import TEXT, MapOf, check
from specdec.files.texts import first_line, parse_json, read_json, reading

CONFIG, GENERATION, ADAPTER = "config.json", "generation_config.json", "adapter_config.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
SINGLE = ("model.safetensors", "pytorch_model.bin")
LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
MOST_LAYERS = 10_000
LARGEST = 1 << 40
# Sizes that configs of all kinds of models state: those that every model has, and those that may be null.
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


def check_folder(folder: Path) -> None:
    """Raise SpecdecError for what a library would accept silently, or take forever to refuse."""
    if (folder / ADAPTER).is_file() and not (folder / CONFIG).is_file():
        raise SpecdecError(
            f"{folder} holds an adapter and no model ({ADAPTER} without {CONFIG}): load the base model, put the "
            "adapter on it, and give the model to SpeculativeDecoder"
        )
    if (folder / CONFIG).exists():
        _config(folder / CONFIG)
    if (folder / GENERATION).exists():
        _generation(folder / GENERATION)


def fault_of_config(folder: Path, error: BaseException) -> str:
    """Say what a library had against a config whose form is right."""
    if not (folder / CONFIG).exists():
        return f"{folder} has no {CONFIG}"
    return f"{folder / CONFIG}: {said(error)}"


def fault_of_tokenizer(folder: Path, error: BaseException) -> str:
    """Name the tokenizer file that is to blame, and what is wrong with it."""
    files = [folder / name for name in TOKENIZER if (folder / name).exists()]
    if not files and not list(folder.glob("*.model")):
        return f"{folder} has no tokenizer: neither {TOKENIZER[0]} nor another of its files"
    found = _first_fault((file, _mapping) for file in files)
    if found is None and folder / TOKENIZER[0] in files:
        found = _first_fault([(folder / TOKENIZER[0], _tokenizer)])
    blamed = folder / TOKENIZER[1] if folder / TOKENIZER[1] in files else folder
    return found or f"{blamed}: {said(error)}"


def fault_of_weights(folder: Path) -> str | None:
    """Name the file of weights that is to blame, and what is wrong with it: an index, a shard, or a single file."""
    found = _first_fault((file, _index) for file in sorted(folder.glob("*.index.json")))
    if found is not None:
        return found
    files = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("pytorch_model*.bin"))]
    if not files:
        return f"{folder} has no weights: neither {SINGLE[0]} nor {SINGLE[1]}"
    return _first_fault((file, _safetensors if file.suffix == ".safetensors" else _pytorch) for file in files)


def fault_of_shapes(folder: Path, model: Any) -> str | None:
    """Name the first weight whose shape differs from that of `model`, which may be on the meta device."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for file in sorted(folder.glob("*.safetensors")):
        with suppress(SpecdecError):
            for name, entry in _header(file).items():
                shape = tuple(entry["shape"])
                if name in wanted and shape != wanted[name]:
                    return f"{file}: {name} has the shape {list(shape)}, and {CONFIG} asks for {list(wanted[name])}"
    return None


def fault_of_gguf(file: Path) -> str | None:
    """Say what is wrong with a GGUF file."""
    return _first_fault([(file, _gguf)])


def _first_fault(checks: Iterable[tuple[Path, Callable[[Path], Any]]]) -> str | None:
    for file, look in checks:
        try:
            look(file)
        except SpecdecError as error:
            return str(error)
    return None


def said(error: BaseException) -> str:
    """Return the first line of a library's error, and the second if the first ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    if isinstance(error, KeyError):
        return f"{lines[0]} is unknown or missing"
    return f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


# -- one file each ----------------------------------------------------------------------------------------------------


def _mapping(file: Path) -> dict[str, Any]:
    made = read_json(file, "file")
    if not isinstance(made, dict):
        raise SpecdecError(f"{file}: expected a JSON object, got {type(made).__name__}")
    return made


def _config(file: Path) -> None:
    """Check what every config must have; its other fields are the library's business."""
    config = _mapping(file)
    kind = config.get("model_type", "")
    if not isinstance(kind, str):
        raise SpecdecError(f"{file}: model_type must name a kind of model, got {kind!r}")
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping):
            _check_sizes(file, part)
            _check_dtypes(file, part)


def _check_sizes(file: Path, config: Mapping[str, Any]) -> None:
    for name in (*SIZES, *OPTIONAL_SIZES):
        value = config.get(name, 1)
        if isinstance(value, list) or (value is None and name in OPTIONAL_SIZES):  # some kinds: one for each layer
            continue
        most = MOST_LAYERS if name == "num_hidden_layers" else LARGEST
        if type(value) is not int or not 1 <= value <= most:
            raise SpecdecError(f"{file}: {name} must be a whole number from 1 to {most}, got {value!r}")
    if type(config.get("max_position_embeddings", 1)) is not int:
        got = config["max_position_embeddings"]
        raise SpecdecError(f"{file}: max_position_embeddings must be a whole number, got {got!r}")


def _check_dtypes(file: Path, config: Mapping[str, Any]) -> None:
    for name in ("dtype", "torch_dtype"):
        value = config.get(name)
        known = isinstance(value, str) and isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype)
        if not (known or value in (None, "auto") or isinstance(value, Mapping)):
            raise SpecdecError(f"{file}: {name}: {value!r} is no dtype of torch")


def _generation(file: Path) -> None:
    """Check the end tokens: a library that cannot read this file goes on without it, and texts never end."""
    config = _mapping(file)
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        ids = config.get(name)
        for token in ids if isinstance(ids, list) else [ids]:
            if token is not None and (type(token) is not int or not -1 <= token < 1 << 31):
                raise SpecdecError(f"{file}: {name} must be a token id or a list of them, got {ids!r}")


def _tokenizer(file: Path) -> None:
    try:
        Tokenizer.from_file(str(file))
    except BaseException as error:  # one that panics raises no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise SpecdecError(f"{file}: {said(error)}") from None


def _index(file: Path) -> None:
    weights = _mapping(file).get("weight_map")
    check({"weight_map": weights}, {"weight_map": MapOf(TEXT)}, str(file))
    assert isinstance(weights, dict)
    if not weights:
        raise SpecdecError(f"{file}: weight_map is empty")
    for name in sorted(set(weights.values())):
        if not (file.parent / name).is_file():
            raise SpecdecError(f"{file}: the file {name} that it names is missing")


def _header(file: Path) -> dict[str, Any]:
    """Read a safetensors file's tensors by name: dtype, shape, data_offsets."""
    with reading(file, "file") as path, path.open("rb") as opened:
        size = path.stat().st_size
        if size < 8:
            raise SpecdecError(f"{file}: {size} bytes are no safetensors file: it is empty or cut")
        length = int.from_bytes(opened.read(8), "little")
        if length > min(LONGEST_HEADER, size - 8):
            raise SpecdecError(f"{file}: no safetensors file, or one that is cut: a header of {length} bytes in {size}")
        head = opened.read(length)
    try:
        header = parse_json(head.decode("utf-8"), f"{file}: the header")
    except UnicodeDecodeError:
        raise SpecdecError(f"{file}: no safetensors file: its header is not text") from None
    if not isinstance(header, dict):
        raise SpecdecError(f"{file}: no safetensors file: its header is no JSON object")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    _check_offsets(file, tensors, size - 8 - length)
    return tensors


def _check_offsets(file: Path, tensors: Mapping[str, Any], left: int) -> None:
    """Raise SpecdecError unless the header's tensors fill the rest of the file, `left` bytes."""
    end = 0
    for name, entry in tensors.items():
        entry = entry if isinstance(entry, dict) else {}
        shape, places = (part if isinstance(part := entry.get(k), list) else [-1] for k in ("shape", "data_offsets"))
        if not all(type(n) is int and n >= 0 for n in (*shape, *places)) or len(places) != 2:
            raise SpecdecError(f"{file}: the header's entry of {name} has no shape or no place")
        if entry.get("dtype") not in BITS:
            raise SpecdecError(f"{file}: {name} has the unknown dtype {entry.get('dtype')!r}")
        if math.prod(shape) * BITS[entry["dtype"]] != 8 * (places[1] - places[0]):
            raise SpecdecError(f"{file}: {name} of shape {shape} and {entry['dtype']} does not fill its place {places}")
        end = max(end, places[1])
    if end != left:
        raise SpecdecError(f"{file}: cut or too long: its tensors take {end} bytes, and {left} are there")


def _safetensors(file: Path) -> None:
    if not _header(file):
        raise SpecdecError(f"{file}: holds no tensors")


def _pytorch(file: Path) -> None:
    head = _first_bytes(file, 4)
    if len(head) < 4:
        raise SpecdecError(f"{file}: {len(head)} bytes are no pytorch file: it is empty or cut")
    if not zipfile.is_zipfile(file) and head[:2] != b"\x80\x02":
        raise SpecdecError(f"{file}: no pytorch file, or one that is cut")
    try:
        state = torch.load(file, map_location="meta", weights_only=True)
    except pickle.UnpicklingError:
        raise SpecdecError(f"{file}: no weights that can be loaded safely, or damaged") from None
    except Exception as error:  # whatever a damaged archive makes of it
        raise SpecdecError(f"{file}: cannot be read to its end: {first_line(error)}") from None
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise SpecdecError(f"{file}: holds {type(state).__name__}, expected tensors by name")


def _first_bytes(file: Path, count: int) -> bytes:
    with reading(file, "file") as path, path.open("rb") as opened:
        return opened.read(count)


def _gguf(file: Path) -> None:
    head = _first_bytes(file, 24)
    if head[:4] != b"GGUF":
        raise SpecdecError(f"{file}: no GGUF file: it does not begin with GGUF")
    if len(head) < 24:
        raise SpecdecError(f"{file}: {file.stat().st_size} bytes are no GGUF file: it is cut")
    with suppress(ImportError):
        from gguf import GGUFReader

        try:
            reader = GGUFReader(file)
        except Exception as error:  # whatever a damaged file makes of it
            said = "it ends too early" if isinstance(error, IndexError) else first_line(error)
            raise SpecdecError(f"{file}: cannot be read to its end: {said}") from None
        if not reader.tensors:
            raise SpecdecError(f"{file}: holds no tensors")
