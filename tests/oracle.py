"""A slow decoder without any cache: one full forward pass over the whole sequence for each token.

Everything in this repository that decodes is compared with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch


@torch.inference_mode()
def oracle_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits of a plain forward pass over `ids`, float32 `[len(ids), V]`."""
    device = next(model.parameters()).device
    out = model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False)
    return out.logits[0].float()


def oracle_greedy(model: Any, prompt_ids: Sequence[int], max_new_tokens: int, eos: Collection[int] = ()) -> list[int]:
    """Greedy continuation of `prompt_ids`: generated ids only, the EOS that ended it included."""
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        ids.append(int(oracle_logits(model, ids)[-1].argmax()))
        if ids[-1] in eos:
            break
    return ids[len(prompt_ids) :]
