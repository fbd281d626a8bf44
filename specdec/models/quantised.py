"""Models with quantised modules, and whether speculation may change their text.

Weights in few bits are harmless: each token's logits are computed from the same numbers. Activations in few bits are
not: they are rounded in each pass, with a scale that all tokens of the pass share (torch.ao), with outliers that any of
them can make (bitsandbytes), or so coarsely that differences of the last bit between two passes become large (the
others). A target's text would then depend on what was drafted, so it is refused; as a draft such a model is as good as
any.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specdec.errors import SpecdecError

# Modules whose results have their own scale; those with float16 weights do not use it.
QUANTISED_ACTIVATIONS = ("torch.ao.nn.quantized", "torch.nn.quantized")
# Modules by package and name that round what they are given before they multiply.
ROUNDING = {
    "bitsandbytes": ("Linear8bitLt",),
    "transformers": ("FP8Linear", "FP8Expert", "FP8Experts", "FbgemmFp8Linear", "BitLinear", "AutoBitLinear"),
}


def weight_of(module: nn.Module) -> Tensor | None:
    """Return a module's weight; a copy for torch.ao's quantised modules, where `weight` is a method."""
    weight = getattr(module, "weight", None)
    if callable(weight) and not isinstance(weight, Tensor):
        weight = weight()
    return weight if isinstance(weight, Tensor) else None


def rows_of(module: Any) -> int | None:
    """Return how many ids an embedding or a head knows. Packed weights have other shapes than the layer."""
    weight = None if callable(getattr(module, "weight", None)) else weight_of(module)
    width = getattr(module, "embedding_dim", None) or getattr(module, "in_features", None)
    if weight is not None and weight.ndim == 2 and width in (None, weight.shape[1]):
        return int(weight.shape[0])
    rows = getattr(module, "num_embeddings", None) or getattr(module, "out_features", None)
    return int(rows) if rows is not None else None


def rounds_activations(model: nn.Module) -> str | None:
    """Name what rounds a model's activations to few bits; None if nothing does."""
    for module in model.modules():
        kind = type(module)
        package = kind.__module__.split(".")[0]
        # optimum-quanto's and compressed-tensors' modules say so themselves.
        scheme = getattr(module, "quantization_scheme", None)
        told = getattr(module, "activation_qtype", None) or getattr(scheme, "input_activations", None)
        if told is not None or kind.__name__ in ROUNDING.get(package, ()):
            return f"{package}'s {kind.__name__}"
        if kind.__module__.startswith(QUANTISED_ACTIVATIONS):
            packed = getattr(module, "_packed_params", None)
            if hasattr(module, "scale") and getattr(packed, "dtype", None) is not torch.float16:
                return f"torch.ao's {kind.__name__}"
        for weight in module._parameters.values():
            by_tensor = getattr(weight, "act_quant_kwargs", None) is not None
            if by_tensor or "ActivationQuantized" in type(weight).__name__:
                return f"torchao's {type(weight).__name__}"
    return None


def is_quantised(model: Any) -> bool:
    """True if a model's config, weights or modules say that its products are not those of plain tensors."""
    if getattr(model.config, "quantization_config", None) is not None:
        return True
    packages = (*QUANTISED_ACTIVATIONS, "bitsandbytes")
    return any(
        type(module).__module__.startswith(packages) or any(map(_wraps_others, module._parameters.values()))
        for module in model.modules()
    )


def _wraps_others(weight: Tensor | None) -> bool:
    return weight is not None and is_traceable_wrapper_subclass(weight) and not isinstance(weight, DTensor)


def check_activations(model: nn.Module, role: str) -> None:
    """Raise SpecdecError for a target whose activations are rounded."""
    found = rounds_activations(model)
    if found is not None and role == "target":
        raise SpecdecError(
            f"target: {found} rounds activations to few bits in each pass, so the text would depend on what is "
            "drafted: quantise the weights only (as a draft it can stay as it is)"
        )
