"""The files of DFlash heads as z-lab publishes them.

`config.json` has Qwen3's fields with `block_size`, `num_target_layers` and `dflash_config` (`target_layer_ids`: outputs
of blocks, counted from 0; `mask_token_id`); tensors are `fc`, `hidden_norm`, `norm` and `layers.N` as in Qwen3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Qwen3Config

from specdec.drafters.dflash.head import BlockConfig, BlockHead
from specdec.drafters.eagle3.formats import filled
from specdec.drafters.eagle3.weights import read_folder
from specdec.errors import SpecdecError
from specdec.files.forms import INTEGER, check, whole


def describe(given: Mapping[str, Any], mask: int | None = None) -> BlockConfig:
    """Read config.json. Raises SpecdecError for what is missing, and for sliding windows."""
    own = given.get("dflash_config") or {}
    check(own, {}, "dflash: config.json: dflash_config")
    check(given, {"block_size": whole(2), "num_target_layers": whole(1)}, "dflash: config.json")
    qwen = Qwen3Config(**{k: v for k, v in given.items() if k not in ("dflash_config", "model_type", "auto_map")})
    if "sliding_attention" in (qwen.layer_types or ()):
        raise SpecdecError("dflash: the head has layers with a sliding window, which are not supported")
    layers = own.get("target_layer_ids") or default_layers(given["num_target_layers"], qwen.num_hidden_layers)
    check({"target_layer_ids": layers}, {"target_layer_ids": [INTEGER]}, "dflash: config.json: dflash_config")
    mask = own.get("mask_token_id") if mask is None else mask
    if not isinstance(mask, int) or not 0 <= mask < qwen.vocab_size:
        raise SpecdecError(
            f"dflash: config.json has the mask_token_id {mask!r}; give the id of the mask token as mask_token_id=ID"
        )
    return BlockConfig.of(
        qwen, version=3, observed=len(layers), layer_ids=tuple(i + 1 for i in layers),
        rope=dict(qwen.rope_parameters), qk_norm=True, block_size=given["block_size"], mask=mask,
        biases=("q_proj", "k_proj", "v_proj", "o_proj") if qwen.attention_bias else (),
    )  # fmt: skip


def default_layers(target: int, draft: int) -> list[int]:
    """The observed blocks where the file names none: spread evenly from block 1 to the third from the end."""
    if draft == 1:
        return [target // 2]
    return [round(1 + i * (target - 4) / (draft - 1)) for i in range(draft)]


def load_block_head(source: Any, mask: int | None = None) -> BlockHead:
    """Read a folder. Raises SpecdecError for a head that is damaged or of another kind."""
    given, state = read_folder(source, "dflash")
    state = {name.removeprefix("model."): tensor for name, tensor in state.items() if "rotary_emb" not in name}
    return filled(BlockHead, describe(given, mask), state)
