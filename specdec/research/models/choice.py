"""Which models an experiment runs, as a config says it, and how they are made."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from specdec.errors import SpecdecError
from specdec.models.kv_cache import kv_dtype
from specdec.models.loading import LoadedPair, pick_device
from specdec.research.models.inflate import Inflation, check_coarsening, coarsen, inflate
from specdec.research.models.smollm2 import fetch_folder

SMOLLM2 = "smollm2-135m"
DTYPES = ("float32", "bfloat16", "float16")
SHAPE = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class ModelChoice:
    """The models of an experiment.

    target, draft: a hub id, a folder, a GGUF file, `demo-target` / `demo-draft`, or `smollm2-135m` (fetched, or from
        what the variable SPECDEC_SMOLLM2 names); draft None = the target as loaded, coarsened.
    inflate: a preset or sizes that the target grows to, as `Inflation.parse` takes them; None = as it is.
    coarsen: strength of the rounding that makes the draft of the target, in [0, 1]; None = 0.2.
    device: None = a GPU if there is one, else the CPU.
    dtype: None = bfloat16 on a GPU, float32 on a CPU.
    kv_cache_dtype: what specdec keeps keys and values in, as `PairConfig` has it.
    """

    target: str = "demo-target"
    draft: str | None = "demo-draft"
    inflate: str | None = None
    coarsen: float | None = None
    device: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "coarsen", check_coarsening(self.draft, self.coarsen, "models: "))
        if self.dtype is not None and self.dtype not in DTYPES:
            raise SpecdecError(f"models: dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        kv_dtype(self.kv_cache_dtype)

    def names(self) -> dict[str, str | None]:
        """Target and draft without this machine's paths."""
        return {role: name and Path(name).name for role, name in (("target", self.target), ("draft", self.draft))}

    def changed(self, **options: Any) -> Self:
        """With options from a command line. Another target without a draft is drafted for by its coarsened self."""
        if "target" in options:
            options = {"draft": None, **options}
        if options.get("draft") is not None:
            options = {"coarsen": None, **options}
        return replace(self, **options)

    def place(self) -> tuple[torch.device, str]:
        """Device and dtype, with the defaults filled in. Raises SpecdecError for a device that is not there."""
        device = pick_device(self.device)
        return device, self.dtype or ("bfloat16" if device.type == "cuda" else "float32")

    def load(self) -> Models:
        """The models in float32, as they are before the target is inflated. Raises SpecdecError where that fails.

        An inflated target is built on the device at once, so that the small one may stay in host memory.
        """
        device, dtype = self.place()
        home = device if self.inflate is None and self.draft is not None else torch.device("cpu")
        sizes = Inflation.parse(self.inflate) if self.inflate is not None else None
        target, draft = (name and locate(name) for name in (self.target, self.draft))
        pair = LoadedPair.load(str(target), draft, device=home, dtype="float32", draft_dtype="float32")
        small = pair.draft if self.coarsen is None else coarsen(pair.target, self.coarsen)
        return Models(pair.target, small, pair.tokenizer, sizes, device, dtype)


@dataclass(frozen=True)
class Models:
    """Target and draft in float32, and what becomes of them.

    sizes: what the target grows to. device, dtype: where and in what they run.
    """

    target: Any
    draft: Any
    tokenizer: Any
    sizes: Inflation | None
    device: torch.device
    dtype: str

    def built(self, dtype: str | None = None, keep: bool = False) -> tuple[Any, Any]:
        """Target and draft as they run. dtype: another one; keep: leave these as they are, for other dtypes."""
        kind = getattr(torch, dtype or self.dtype)
        if self.sizes is not None:
            target = inflate(self.target, **asdict(self.sizes), dtype=kind, device=self.device)
        else:
            target = copy.deepcopy(self.target) if keep else self.target
        draft = copy.deepcopy(self.draft) if keep else self.draft
        return placed(target, self.device, kind).eval(), placed(draft, self.device, kind).eval()


def locate(name: str) -> str:
    """A model's name as the loader takes it. Raises SpecdecError where SmolLM2 cannot be had."""
    if name != SMOLLM2:
        return name
    try:
        return str(fetch_folder())
    except ImportError as error:
        raise SpecdecError(f"{SMOLLM2} cannot be read: {error} (extra `gguf` of specdec)") from error


def placed(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The model on `device`, its parameters in `dtype`. Buffers keep theirs, as in `from_pretrained`: frequencies of
    rotations rounded to bfloat16 are other positions."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, dtype)
    return model.to(device)


def facts(model: Any) -> dict[str, Any]:
    """Parameters, bytes of them, bytes that a pass reads, and the shape of a model."""
    size = sum(p.numel() for p in model.parameters())
    shape = {name: getattr(model.config, name, None) for name in SHAPE}
    return {"parameters": size, "bytes": parameter_bytes(model), "read": bytes_read(model), **shape}


def parameter_bytes(model: Any) -> int:
    """Bytes of a model's parameters."""
    return sum(p.nbytes for p in model.parameters())


def bytes_read(model: Any) -> int:
    """Bytes of weights that a pass reads: all but an embedding of its own, of which it reads some rows."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head is not None and head.weight.data_ptr() == embedding.data_ptr()
    return parameter_bytes(model) - (0 if tied else embedding.nbytes)
