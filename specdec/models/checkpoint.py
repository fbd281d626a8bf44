"""Finds what is wrong with a checkpoint that a library could not load: which file, and what it holds.

The libraries' own errors rarely name a file. After a failed load each file is opened alone, by its own library: the
first that fails is to blame. A checkpoint that loads only has its small files checked.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from specdec.errors import SpecdecError
from specdec.files.forms import TEXT, MapOf, check
from specdec.files.texts import read_json, reading

CONFIG, GENERATION, ADAPTER = "config.json", "generation_config.json", "adapter_config.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
SINGLE = ("model.safetensors", "pytorch_model.bin")
MOST_LAYERS = 10_000
LARGEST = 1 << 40
# Sizes that configs of all kinds of models state: those that every model has, and those that may be null.
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")


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
    if (folder / ADAPTER).exists():
        _mapping(folder / ADAPTER)


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
    return _first_fault((file, _shapes if file.suffix == ".safetensors" else _pytorch) for file in files)


def fault_of_shapes(folder: Path, model: Any) -> str | None:
    """Name the first weight whose shape differs from that of `model`, which may be on the meta device."""
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for file in sorted(folder.glob("*.safetensors")):
        for name, shape in _shapes(file).items():
            if name in wanted and shape != wanted[name]:
                return f"{file}: {name} has the shape {shape}, and {CONFIG} asks for {wanted[name]}"
    return None


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]], where: str) -> None:
    """Raise SpecdecError for the first weight that holds NaN or infinities: what it gives would never be accepted, and
    nothing else would say why."""
    found = first_not_finite(tensors)
    if found is not None:
        name, odd, count = found
        raise SpecdecError(
            f"{where}: {name} holds NaN or infinities, {odd} of {count} values; it is damaged, or its training "
            "diverged: take an earlier checkpoint"
        )


def first_not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, int, int] | None:
    """Return (name, values that are NaN or infinite, values in all) of the first weight with any, or None."""
    for name, tensor in tensors:
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        odd = int((~(tensor.float() if tensor.itemsize == 1 else tensor).isfinite()).sum())
        if odd:
            return name, odd, tensor.numel()
    return None


def fault_of_gguf(file: Path) -> str | None:
    """Say what is wrong with a GGUF file."""
    return _first_fault([(file, _gguf)])


def _first_fault(checks: Iterable[tuple[Path, Callable[[Path], Any]]]) -> str | None:
    """The first file that its own library cannot read, and what that says."""
    for file, look in checks:
        try:
            with reading(file, "file"):
                pass  # it is there, and a file
            look(file)
        except SpecdecError as error:
            return str(error)
        except BaseException as error:  # a tokenizer that panics raises no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            return f"{file}: it is damaged, cut or of another kind: {said(error)}"
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
    Tokenizer.from_file(str(file))


def _index(file: Path) -> None:
    weights = _mapping(file).get("weight_map")
    check({"weight_map": weights}, {"weight_map": MapOf(TEXT)}, str(file))
    assert isinstance(weights, dict)
    if not weights:
        raise SpecdecError(f"{file}: weight_map is empty")
    for name in sorted(set(weights.values())):
        if not (file.parent / name).is_file():
            raise SpecdecError(f"{file}: the file {name} that it names is missing")


def _shapes(file: Path) -> dict[str, list[int]]:
    """Read the shapes of a safetensors file's tensors."""
    with safe_open(file, "pt") as opened:
        found = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118, it is no mapping
    if not found:
        raise SpecdecError(f"{file}: holds no tensors")
    return found


def _pytorch(file: Path) -> None:
    try:
        state = torch.load(file, map_location="meta", weights_only=True)
    except pickle.UnpicklingError:  # its text is several lines about how to run the file's code
        raise SpecdecError(f"{file}: no weights that can be loaded safely, or damaged") from None
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise SpecdecError(f"{file}: holds {type(state).__name__}, expected tensors by name")


def _gguf(file: Path) -> None:
    with suppress(ImportError):
        from gguf import GGUFReader

        if not GGUFReader(file).tensors:
            raise SpecdecError(f"{file}: holds no tensors")
