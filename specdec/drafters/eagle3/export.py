"""Write a head as other tools read it: vLLM and SGLang take "specforge" and "speculators"."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.config import unknown_name
from specdec.drafters.eagle3.config import HeadConfig
from specdec.drafters.eagle3.formats import IDS, LAYOUTS, MARK
from specdec.drafters.eagle3.head import EagleHead
from specdec.errors import SpecdecError
from specdec.files.texts import check_writable, unfinished, write_file
from specdec.models.checkpoint import CONFIG

# What a layout has no field for, so that a head with it would be read as another one.
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
CANNOT: dict[str, tuple[str, ...]] = {
    "safeailab": (*NORMS, "layer_ids"),
    "angelslim": (*NORMS, "layer_ids"),
    "specforge": ("norm_before_residual", "norm_before_fc", "qk_norm"),
    "speculators": (),
}


def export(
    head: EagleHead, folder: Any, layout: str = "specforge", verifier: str | None = None, drafted: int = 5
) -> tuple[str, ...]:
    """Write config.json and model.safetensors; returns what a person should know before serving them.

    verifier: the target's name or folder, which speculators' configs name
    drafted: tokens that vLLM drafts a round by default (speculators)

    Raises SpecdecError where the layout cannot say what the head is.
    """
    if layout not in LAYOUTS:
        raise unknown_name("layout of eagle3 heads", layout, LAYOUTS)
    _check_layout(head.config, layout)
    path = check_writable(folder, "the head's folder", folder=True)
    write: dict[str, Callable[[], dict[str, Any]]] = {
        "speculators": lambda: _speculators(head, verifier, drafted),
        "specforge": lambda: _specforge(head),
        "angelslim": lambda: _flat(head) | {"architectures": ["Eagle3LlamaForCausalLM"]},
        "safeailab": lambda: _flat(head) | {"architectures": ["LlamaForCausalLM"]},
    }
    config = write[layout]() | {MARK: {"layer_ids": "before block i"}}
    write_file(path / CONFIG, json.dumps(config, indent=2) + "\n", "file")
    with unfinished(path / "model.safetensors", "file") as file:
        save_file(_tensors(head, layout), file, metadata={"format": "pt"})
    return _notes(head.config, layout, verifier)


def _check_layout(config: HeadConfig, layout: str) -> None:
    lost = [name for name in CANNOT[layout] if getattr(config, name)]
    if config.num_hidden_layers > 1 and layout != "speculators":
        lost.append("num_hidden_layers")
    if config.observed != 3 and config.version == 3 and layout in ("safeailab", "angelslim"):
        lost.append("observed")
    if not config.final_norm and config.version == 3:
        raise SpecdecError(
            "eagle3: no layout says that there is no norm before lm_head; train the head with one to serve it elsewhere"
        )
    if config.version != 3 and layout != "safeailab":
        raise SpecdecError(f"eagle3: heads of EAGLE-1 and EAGLE-2 have no layout {layout!r}; use 'safeailab'")
    if lost:
        raise SpecdecError(f"eagle3: the layout {layout!r} cannot say {', '.join(lost)}; use 'speculators'")


def _llama(config: HeadConfig) -> dict[str, Any]:
    """The fields of a llama or qwen3 configuration."""
    scaling = {k: v for k, v in config.rope.items() if k != "rope_theta"}
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        "attention_bias": "q_proj" in config.biases,
        "mlp_bias": "gate_proj" in config.biases,
        "tie_word_embeddings": config.tied,
    }


def _flat(head: EagleHead) -> dict[str, Any]:
    """The fields of SafeAILab, to which others add."""
    dtype = str(head.fc.weight.dtype).removeprefix("torch.")
    made = _llama(head.config) | {"torch_dtype": dtype, "bias": "fc" in head.config.biases}
    if head.config.version != 3:
        return made
    made["draft_vocab_size"] = head.config.draft_vocab_size
    made["target_hidden_size"] = head.config.target_hidden_size
    return made


def _specforge(head: EagleHead) -> dict[str, Any]:
    config = head.config
    made = _flat(head) | {"architectures": ["LlamaForCausalLMEagle3"]}
    made |= {"fc_norm": config.fc_norm, "norm_output": config.norm_output}
    if config.layer_ids is not None:
        ids = list(config.layer_ids)  # vLLM reads them at the top, SGLang below eagle_config
        made |= {IDS: ids, "eagle_config": {IDS: ids, "use_aux_hidden_state": True}}
    return made


def _speculators(head: EagleHead, verifier: str | None, drafted: int) -> dict[str, Any]:
    config = head.config
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafted,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "transformer_layer_config": _llama(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        IDS: None if config.layer_ids is None else list(config.layer_ids),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "tie_word_embeddings": config.tied,
        "torch_dtype": str(head.fc.weight.dtype).removeprefix("torch."),
    }


def _tensors(head: EagleHead, layout: str) -> dict[str, Tensor]:
    """The head's tensors under the layout's names."""
    config = head.config
    first = "layers.0." if layout == "speculators" or config.version != 3 else "midlayer."
    made = {
        name.replace("layers.0.", first, 1) if name.startswith("layers.0.") else name: tensor.detach()
        .cpu()
        .contiguous()
        for name, tensor in head.state_dict().items()
    }
    if head.d2t is not None:
        d2t = head.d2t.cpu()
        ids = d2t + torch.arange(len(d2t))
        made["d2t"] = d2t
        made["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return made


def _notes(config: HeadConfig, layout: str, verifier: str | None) -> tuple[str, ...]:
    notes = []
    if config.layer_ids and config.layer_ids[0] == 1 and layout in ("specforge", "speculators"):
        notes.append(
            f"SGLang takes layer ids that begin with 1 for outputs of blocks and would observe "
            f"{[i + 1 for i in config.layer_ids]} in place of {list(config.layer_ids)}; vLLM reads them as they are"
        )
    if layout == "speculators" and verifier is None:
        notes.append("the config names no verifier: vLLM needs the target's name to serve it by itself")
    return tuple(notes)
