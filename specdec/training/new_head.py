"""A new EAGLE-3 head for a target, or one from a checkpoint, ready to be trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from specdec.config import unknown_name
from specdec.drafters.eagle3 import EagleHead, HeadConfig, load_head
from specdec.drafters.eagle3.config import ROPE
from specdec.drafters.eagle3.formats import check_fit
from specdec.errors import SpecdecError
from specdec.files.forms import Maybe, OneOf, check, number, whole
from specdec.training.config import HeadStart

SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "num_hidden_layers", "observed", "max_position_embeddings", "target_hidden_size",
)  # fmt: skip


def make_head(start: HeadStart, target: Any, counts: Tensor, seed: int) -> EagleHead:
    """counts: of the tokens in the answers, int64 [V]. Raises SpecdecError for options that make no head."""
    if start.checkpoint is not None:
        head = load_head(start.checkpoint, start.options, target.config).head
        if head.config.version != 3:
            raise SpecdecError("head: the checkpoint is a head of EAGLE-1 or EAGLE-2; only EAGLE-3 heads are trained")
    else:
        head = _new_head(start, target, counts, seed)
    # What is the head's own is trained, but for an embedding: few tokens teach it less than it knows.
    head.borrow(target.get_input_embeddings(), target.get_output_embeddings()).float().requires_grad_(True)
    if head.embed_tokens is not None:
        head.embed_tokens.requires_grad_(False)
    return head


def _new_head(start: HeadStart, target: Any, counts: Tensor, seed: int) -> EagleHead:
    size = start.draft_vocab_size or len(counts)
    config = head_config(target.config, size, start.options)
    check_fit(config, target.config)
    ids = draft_vocabulary(counts, size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = EagleHead(config, None if size == len(counts) else ids - torch.arange(size))
    rows = target.get_output_embeddings().weight[ids]
    if head.lm_head is not None and head.lm_head.weight.shape == rows.shape:
        with torch.no_grad():
            head.lm_head.weight.copy_(rows)
    return head


def head_config(target: Any, draft_vocab_size: int, options: Mapping[str, Any]) -> HeadConfig:
    """The configuration of a new head: one layer as the target's are, its options over that."""
    text = target.get_text_config()
    known = [f.name for f in fields(HeadConfig)]
    for name in options:
        if name not in known:
            raise unknown_name("field of an eagle3 head", name, known)
    forms: dict[str, Any] = {name: whole(1) for name in SIZES} | {
        "layer_ids": Maybe([whole()]),
        "rms_norm_eps": number(0.0),
        "hidden_act": OneOf(tuple(ACT2FN)),
    }
    check(dict(options), {name: form for name, form in forms.items() if name in options}, "head: options")
    rope = getattr(text, "rope_parameters", None) or {}
    made: dict[str, Any] = {
        "version": 3,
        "num_hidden_layers": 1,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        "hidden_act": HeadConfig.hidden_act,
        "draft_vocab_size": draft_vocab_size,
        "rope": {**ROPE, "rope_theta": float(rope.get("rope_theta", ROPE["rope_theta"]))},
        "own_lm_head": True,
    }
    ids = options.get("layer_ids")
    changes = {**options, **({"layer_ids": tuple(ids), "observed": len(ids)} if ids else {})}
    config = HeadConfig.of(text, **made | changes)
    if config.version != 3:
        raise SpecdecError("head: new heads are EAGLE-3 heads; leave out `version`")
    return config


def draft_vocabulary(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent tokens, ascending; of equally frequent ones those with smaller ids. int64 [size]"""
    if size > len(counts):
        raise SpecdecError(f"head: draft_vocab_size {size} is more than the target's {len(counts)} tokens")
    best = torch.argsort(counts, descending=True, stable=True)
    return best[:size].sort().values
