"""Random EAGLE heads, the reference cases, and the slow way to run a head: from scratch, a row at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.drafters.eagle3 import EagleHead, HeadConfig, load_head
from specdec.models.attention import RAGGED, MaskBuilder
from specdec.models.kv_cache import RaggedCache

CASES = Path(os.environ.get("SPECDEC_EAGLE3") or Path(__file__).parents[1] / "data" / "eagle3")
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
FLAT = SIZES | {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "draft_vocab_size": 20}


def case_files() -> list[Path]:
    return sorted(CASES.glob("*.npz"))


def read_case(file: Path) -> dict[str, Tensor]:
    with np.load(file) as data:
        return {name: torch.from_numpy(np.asarray(data[name])) for name in data.files}


def weights_of(case: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix("weights."): v for k, v in case.items() if k.startswith("weights.")}


def head_of(case: Mapping[str, Tensor], **changes: Any) -> EagleHead:
    return load_head((FLAT, weights_of(case)), changes).head


def random_head(seed: int = 0, **changes: Any) -> EagleHead:
    """A small head with any options, and weights large enough for its drafts to depend on what it sees."""
    settings: dict[str, Any] = {
        "version": 3, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 4, "vocab_size": 30, "draft_vocab_size": 12, "target_hidden_size": 20,
    }  # fmt: skip
    config = HeadConfig(**settings | changes)
    rng = torch.Generator().manual_seed(seed)
    d2t = None
    if config.draft_vocab_size < config.vocab_size:
        ids = torch.randperm(config.vocab_size, generator=rng)[: config.draft_vocab_size].sort().values
        d2t = ids - torch.arange(len(ids))
    head = EagleHead(config, d2t).eval().requires_grad_(False)
    for parameter in head.parameters():
        noise = torch.randn(parameter.shape, generator=rng)
        parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else 0.5 * noise)
    return head


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


def from_scratch(head: EagleHead, embeddings: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and features of one row's entries, which are all given at once: [1, S, H] both."""
    length = embeddings.shape[1]
    return head(embeddings, features, torch.arange(length)[None], causal(length), observed=False)


class Rows:
    """A head over the ragged cache: the same entries, fed a few at a time to rows of different lengths."""

    def __init__(self, head: EagleHead, batch: int, capacity: int):
        self.head = head
        self.cache = RaggedCache(head.config.num_hidden_layers, batch, capacity)
        self.masks = MaskBuilder(head.config, RAGGED, head.fc.weight.dtype)

    def feed(
        self, embeddings: Tensor, features: Tensor, starts: Sequence[int], counts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """embeddings and features [B, S, H], of which `counts[b]` go to the slots from `starts[b]` on."""
        column = torch.arange(embeddings.shape[1])
        real = column < torch.tensor(counts)[:, None]
        slots = torch.where(real, torch.tensor(starts)[:, None] + column, self.cache.capacity)
        positions = torch.where(real, slots, 0)
        kv_len = max(s + c for s, c in zip(starts, counts, strict=True))
        mask = self.masks(positions, kv_len)
        assert isinstance(mask, Tensor)
        self.cache.aim(slots, slice(0, len(starts)), kv_len)
        return self.head(embeddings, features, positions, mask, self.cache, observed=False)
