"""A big target with a small model's text: `inflate` grows a Llama-type model without changing its function.

What a target costs and what it says are then two choices: a 135M model inflated to the shapes of a 1B model costs what
a 1B model costs, and its text, and what a draft makes of it, are the 135M model's: real acceptance at a real cost
ratio.

How it works. Coordinates of the residual stream that are added hold zero: every matrix that writes into the stream has
zero rows there. RMSNorm then divides by a mean over d' instead of d coordinates, which its weight, times sqrt(d / d'),
and its epsilon, times d / d', undo exactly. Added heads and MLP neurons are real ones whose way into the stream
(`o_proj`, `down_proj`) is zero, and an added layer has no way into it at all. Whatever a zero is multiplied with stays
as the model class initialises it: no kernel sees an easy case. Old coordinates are spread evenly between new ones, so
that sums are taken over the whole width as in a real model.

`scripts/inflate_head.py` makes an EAGLE head for the small model one for the large.

`coarsen` goes the other way: a worse model of the same shapes, which makes a draft of any quality out of a target.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.config import check_number, check_whole
from specdec.errors import SpecdecError

# Architectures whose layers are norm, attention, norm, gated MLP, with the parameter names of transformers' Llama. Not
# Qwen3: its norms of single heads have the same epsilon as the others, but not their width.
SUPPORTED = ("llama", "mistral", "qwen2")
# Modules by the end of their names: which of the four widths each axis of the weight has (None = vocabulary); a bias
# has the first.
_AXES: dict[str, tuple[str | None, ...]] = {
    "embed_tokens": (None, "hidden"),
    "lm_head": (None, "hidden"),
    "q_proj": ("queries", "hidden"),
    "k_proj": ("keys", "hidden"),
    "v_proj": ("keys", "hidden"),
    "o_proj": ("hidden", "queries"),
    "gate_proj": ("neurons", "hidden"),
    "up_proj": ("neurons", "hidden"),
    "down_proj": ("hidden", "neurons"),
    "layernorm": ("hidden",),
    "model.norm": ("hidden",),
}
_WRITERS = ("embed_tokens", "o_proj", "down_proj")  # into the residual stream: zero where the small model has no number
_NORMS = ("layernorm", "model.norm")
COARSENED = 0.2  # strength by default; about 0.79 of SmolLM2-135M's greedy tokens stay


@dataclass(frozen=True)
class Inflation:
    """Shapes to grow to; None = as they are, kv_heads: with the hidden size. Query heads keep the GQA ratio."""

    hidden_size: int | None = None
    layers: int | None = None
    intermediate_size: int | None = None
    kv_heads: int | None = None

    @staticmethod
    def parse(text: str) -> Inflation:
        """A preset's name, or `hidden_size=2304:layers=32`. Raises SpecdecError for anything else."""
        if text in PRESETS:
            return PRESETS[text]
        sizes: dict[str, int] = {}
        for part in text.split(":"):
            name, _, value = part.partition("=")
            if name not in Inflation.__dataclass_fields__ or not value.isdecimal():
                names = ", ".join(Inflation.__dataclass_fields__)
                raise SpecdecError(f"inflation {text!r}: expected {', '.join(PRESETS)} or name=number of {names}")
            sizes[name] = int(value)
        return Inflation(**sizes)


# For SmolLM2-135M (576 wide, 30 layers, 9 query and 3 K/V heads). 2304 = 4 * 576: the norms' factor is 1/2, which
# bfloat16 multiplies by exactly; with 3/8 for 4096 they are rounded once more.
PRESETS = {
    "1b": Inflation(hidden_size=2304, layers=30, intermediate_size=4096, kv_heads=8),  # 1.25 billion parameters
    "3b": Inflation(hidden_size=2304, layers=40, intermediate_size=9216, kv_heads=12),  # 3.23 billion
    "6b": Inflation(hidden_size=4096, layers=32, intermediate_size=12288, kv_heads=21),  # 6.44 billion
}


@torch.no_grad()
def inflate(
    model: Any,
    hidden_size: int | None = None,
    layers: int | None = None,
    intermediate_size: int | None = None,
    *,
    kv_heads: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> Any:
    """A new, larger model with the function of `model`, which is left as it is.

    hidden_size, layers, intermediate_size, kv_heads: as in `Inflation`; dtype, device: of the new model, None = the
    old one's. The new model is made on `device` at once; the host never holds a copy of it. seed: of the numbers that
    have no effect.

    Raises SpecdecError for an architecture that it does not know, a size below the model's own, a dtype that holds no
    fractions, and a seed that is no whole number.
    """
    check_whole("inflate: seed", seed, 0)
    if dtype is not None and not dtype.is_floating_point:
        raise SpecdecError(f"inflate: dtype must be of floating point, got {dtype}")
    device = torch.device(device) if device is not None else model.device
    config = grown_config(model.config, Inflation(hidden_size, layers, intermediate_size, kv_heads))
    _check_parameters(model)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), device:
        torch.manual_seed(seed)
        big = type(model)._from_config(config, dtype=dtype or model.dtype)
    index = _placement(model.config, config)
    small = dict(model.named_parameters())
    d, wide = model.config.hidden_size, config.hidden_size
    for name, parameter in big.named_parameters():
        if _module(name).endswith(_WRITERS):
            parameter.zero_()
        if name in small:
            norm = _module(name).endswith(_NORMS)
            _place(parameter, small[name].double() * math.sqrt(d / wide) if norm else small[name], name, index)
    big.generation_config = copy.deepcopy(model.generation_config)
    return big.eval().requires_grad_(False)


def grown_config(config: Any, sizes: Inflation) -> Any:
    """The config of the larger model. Raises SpecdecError."""
    if config.model_type not in SUPPORTED:
        raise SpecdecError(f"cannot inflate {config.model_type!r}: {', '.join(SUPPORTED)} are supported")
    for name, value in asdict(sizes).items():
        if value is not None:
            check_whole(f"inflate: {name}", value, 1)
    d, kv = config.hidden_size, config.num_key_value_heads
    width = sizes.hidden_size or d
    grown = {
        "hidden_size": width,
        "num_hidden_layers": sizes.layers or config.num_hidden_layers,
        "intermediate_size": sizes.intermediate_size or config.intermediate_size,
        "num_key_value_heads": sizes.kv_heads or max(kv, kv * width // d),
    }
    for name, value in grown.items():
        if value < getattr(config, name):
            raise SpecdecError(f"inflate: {name} {value} is below the model's own {getattr(config, name)}")
    made = copy.deepcopy(config)
    for name, value in grown.items():
        setattr(made, name, value)
    made.head_dim = getattr(config, "head_dim", None) or d // config.num_attention_heads
    made.num_attention_heads = config.num_attention_heads // kv * grown["num_key_value_heads"]
    made.rms_norm_eps = config.rms_norm_eps * d / width
    types = getattr(config, "layer_types", None)
    if types is not None:
        made.layer_types = [*types, *[types[-1]] * (made.num_hidden_layers - len(types))]
    return made


def _check_parameters(model: nn.Module) -> None:
    for name, _ in model.named_parameters():
        if not _module(name).endswith(tuple(_AXES)):
            raise SpecdecError(f"cannot inflate {type(model).__name__}: the parameter {name} is unknown")


def _module(parameter: str) -> str:
    """The name of the module that a parameter belongs to."""
    return parameter.rpartition(".")[0]


def _placement(old: Any, new: Any) -> dict[str, Tensor]:
    """Where the old coordinates of each width lie among the new ones, int64 [old size]."""
    head = torch.arange(new.head_dim)
    groups = old.num_attention_heads // old.num_key_value_heads
    keys = spread(old.num_key_value_heads, new.num_key_value_heads)
    queries = (keys[:, None] * groups + torch.arange(groups)).flatten()
    return {
        "hidden": spread(old.hidden_size, new.hidden_size),
        "neurons": spread(old.intermediate_size, new.intermediate_size),
        "keys": (keys[:, None] * new.head_dim + head).flatten(),
        "queries": (queries[:, None] * new.head_dim + head).flatten(),
    }


def spread(n: int, among: int) -> Tensor:
    """n places among `among`, evenly spaced."""
    return torch.arange(n) * among // n


def _place(parameter: Tensor, values: Tensor, name: str, index: dict[str, Tensor]) -> None:
    """Write a parameter of the small model into the large one."""
    axes = next(axes for end, axes in _AXES.items() if _module(name).endswith(end))[: values.dim()]
    home = parameter.device
    whole = [torch.arange(size, device=home) for size in values.shape]
    where = [w if axis is None else index[axis].to(home) for axis, w in zip(axes, whole, strict=True)]
    grid = (where[0][:, None], where[1]) if len(where) == 2 else (where[0],)
    parameter[grid] = values.to(home, parameter.dtype)


def check_coarsening(draft: str | None, strength: float | None, where: str = "") -> float | None:
    """How far a target that is its own draft is coarsened, by default `COARSENED`; None with a draft. Raises
    SpecdecError for a strength beside a draft, which would have no effect."""
    if draft is not None:
        if strength is not None:
            raise SpecdecError(f"{where}coarsen={strength!r} has no effect beside draft={draft!r}: it makes a draft")
        return None
    strength = COARSENED if strength is None else strength
    check_number(f"{where}coarsen", strength, 0.0, 1.0)
    return strength


@torch.no_grad()
def coarsen(model: Any, strength: float, bits: int = 3) -> Any:
    """A worse copy of a model: the matrices of its layers moved towards their own rounding to `bits` bits.

    strength in [0, 1]: 0 = the model itself, 1 = the rounding (symmetric, one scale an output row). The model is left
    as it is. Raises SpecdecError for a model without such matrices, and for values out of range.
    """
    check_number("coarsen: strength", strength, 0.0, 1.0)
    check_whole("coarsen: bits", bits, 2)
    made = copy.deepcopy(model)
    matrices = [p for name, p in made.named_parameters() if name.endswith("_proj.weight")]
    if not matrices:
        raise SpecdecError(f"cannot coarsen {type(model).__name__}: it has no projection matrices of known names")
    levels = 2 ** (bits - 1) - 1
    for weight in matrices:
        values = weight.to(torch.float32)
        scale = values.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / levels
        rounded = (values / scale).round() * scale
        weight.copy_(values + strength * (rounded - values))
    return made
