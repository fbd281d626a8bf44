"""What a result was made with, so that it can be made again."""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specdec.device.ranks import Ranks
from specdec.device.transfer import sync_allowed
from specdec.models.state import parts_of
from specdec.version import __version__

_SAMPLES = 64  # values read per parameter
_KNOWN = ("torch", "transformers")  # what their modules compute follows from class, config and weights
_PLAIN = (bool, int, float, str, type(None))
_BOOKKEEPING = ("training", "_is_hf_initialized")


@torch.no_grad()
def weight_hash(model: nn.Module) -> str:
    """Make a short hash of what a model computes with, 16 hex digits.

    It covers names, shapes, dtypes and evenly spaced values of the parameters, and what is set on modules that are not
    torch's or transformers' own, such as adapters. It tells checkpoints, adapters and training steps apart; it is no
    proof against tampering. Of weights that are spread over processes it covers all parts, and is another hash than
    that of the same weights on one device.
    """
    modules = dict(model.named_modules())
    forms: list[str] = []
    samples: dict[torch.device, list[Tensor]] = {}
    for name, tensor in _weights(modules):
        forms.append(f"{name}{tuple(tensor.shape)}{tensor.dtype}")
        if is_traceable_wrapper_subclass(tensor):
            forms.append(f"{type(tensor).__name__}{getattr(tensor, 'act_quant_kwargs', None)}")
        for part in parts_of(tensor):
            if not part.is_meta:
                samples.setdefault(part.device, []).append(_sampled(part))
    digest = hashlib.sha256("".join(forms).encode())
    for device, found in samples.items():
        # Values of one dtype are converted together: a model has hundreds of tensors, and a call waits for this.
        runs = [torch.cat(list(run)).to(torch.float32) for _, run in groupby(found, lambda t: t.dtype)]
        with sync_allowed(device):
            digest.update(torch.cat(runs).cpu().numpy().tobytes())
    for setting in _settings(modules):
        digest.update(setting.encode())
    parts = Ranks.of(model).all(digest.hexdigest())
    return parts[0][:16] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def _weights(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, each once, and buffers stored with them: quantised weights can be buffers."""
    seen = set()
    for prefix, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{prefix}.{name}" if prefix else name, parameter
    for prefix, module in modules.items():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def _sampled(tensor: Tensor) -> Tensor:
    tensor = tensor.int_repr() if tensor.is_quantized else tensor
    step = max(1, tensor.numel() // _SAMPLES)
    if tensor.is_contiguous():  # one view instead of three: a call waits for hundreds of them
        size = min(_SAMPLES, -(-tensor.numel() // step))
        return tensor.as_strided((size,), (step,))
    return tensor.reshape(-1)[::step][:_SAMPLES]


def _settings(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield plain settings of other packages' modules and of modules with their own `forward`, such as a scale."""
    for name, module in modules.items():
        own = vars(module)
        if type(module).__module__.split(".")[0] in _KNOWN and "forward" not in own:
            continue
        found = {key: value for key, value in own.items() if key not in _BOOKKEEPING and _is_plain(value)}
        yield f"{name}{type(module).__name__}{'forward' in own}{sorted(found.items())}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(v) for key, v in value.items())
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, _PLAIN)


def adapters(model: nn.Module) -> list[dict[str, Any]]:
    """List a model's adapters (peft): active, merged, disabled, scale; one entry per combination, with its modules."""
    found: Counter[str] = Counter()
    for module in model.modules():
        own = vars(module)
        if "_active_adapter" in own and "_disable_adapters" in own:
            active, scale = own["_active_adapter"], own.get("scaling")
            entry = {
                "active": [active] if isinstance(active, str) else list(active),
                "disabled": bool(own["_disable_adapters"]),
                "merged": list(own.get("merged_adapters", ())),
                "scale": {str(k): float(v) for k, v in scale.items()} if isinstance(scale, dict) else None,
            }
            found[json.dumps(entry)] += 1
    return [{**json.loads(entry), "modules": n} for entry, n in found.items()]


def hash_ids(ids: Sequence[int]) -> str:
    """Hash one prompt's token ids, 16 hex digits."""
    return hashlib.sha256(np.asarray(ids, dtype=np.int64).tobytes()).hexdigest()[:16]


def hash_template(tokenizer: Any) -> str | None:
    """Hash a tokenizer's chat template: the first 16 digits of its text's sha256; None without a template."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {
        "specdec": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def device_name(device: torch.device) -> str:
    """Name the device: the GPU's name, or the processor's architecture and thread count."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"
