"""Training-time test of an EAGLE head: what it will draft from is what it is trained on, `ttt_steps` tokens deep.

Entry j of a text is (the target's states of token j, token j + 1), as in drafters/eagle3/head.py. Step 0 runs all
entries on the target's states. Step k runs them again on the head's own output of step k - 1, with the true token
j + 1 + k: this is the k-th draft pass of a decoder whose drafts have all been accepted so far. It attends to the
entries of step 0 up to j, and of the steps 1 to k to its own alone; its position is j + k.

Invariant: step k at entry j has the logits that the head has over its cache after k drafted tokens (tested to 1e-5).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec.drafters import Eagle3
from specdec.drafters.eagle3 import EagleHead, export
from specdec.errors import SpecdecError
from specdec.training.config import TrainingConfig
from specdec.training.features import Batch
from specdec.training.losses import TargetDistribution
from specdec.training.task import Figures, summed


class StepKeys:
    """Keys and values of all steps so far, layer by layer, and the attention over them; it takes a cache's place."""

    def __init__(self) -> None:
        self.layers: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, index: int) -> Tensor:
        """query [B, H, N, D], key and value [B, H_kv, N, D] of this step's entries -> [B, N, H, D]."""
        steps = self.layers.setdefault(index, [])
        steps.append((key, value))
        (first_key, first_value), *own = steps
        entries, kv_heads = query.shape[2], key.shape[1]
        grouped = query.unflatten(1, (kv_heads, -1))  # [B, H_kv, G, N, D]
        future = torch.ones(entries, first_key.shape[2], dtype=torch.bool, device=query.device).triu(1)
        scores = (grouped @ first_key[:, :, None].mT).masked_fill(future, float("-inf"))
        diagonal = [(grouped * k[:, :, None, :entries]).sum(-1, keepdim=True) for k, _ in own]
        weights = torch.cat([scores, *diagonal], dim=-1) * query.shape[-1] ** -0.5
        weights = weights.softmax(-1, dtype=torch.float32).to(value.dtype)
        out = weights[..., : first_key.shape[2]] @ first_value[:, :, None]
        for i, (_, v) in enumerate(own, first_key.shape[2]):
            out = out + weights[..., i : i + 1] * v[:, :, None, :entries]
        return out.flatten(1, 2).transpose(1, 2)


def ttt_logits(head: EagleHead, ids: Tensor, states: Tensor, steps: int) -> Iterator[Tensor]:
    """Draft logits of every step, [B, S - 2 - k, V_d]: entry j of step k predicts token j + 2 + k of ids [B, S]."""
    keys, features = StepKeys(), states
    for k in range(min(steps, ids.shape[1] - 2)):
        entries = ids.shape[1] - 2 - k
        positions = torch.arange(k, k + entries, device=ids.device)[None]
        embeddings = head.embed(ids[:, 1 + k : 1 + k + entries])
        logits, features = head(embeddings, features[:, :entries], positions, None, keys, observed=k == 0)
        yield logits


class HeadTraining(nn.Module):
    """A head with its loss: the module that is trained."""

    def __init__(self, head: EagleHead, steps: int, loss: str, decay: float, temperature: float):
        super().__init__()
        self.head, self.steps, self.loss, self.decay, self.temperature = head, steps, loss, decay, temperature
        self.ids: Tensor | None = None
        if head.d2t is not None:
            self.ids = head.to_target(torch.arange(head.config.draft_vocab_size, device=head.d2t.device))

    def forward(self, batch: Batch) -> Figures:
        """Losses of all steps, and in eval mode the expected acceptance."""
        ids = None if self.ids is None else self.ids.to(batch.ids.device)
        target = TargetDistribution(batch.logits[:, : batch.ids.shape[1] - 1], ids, self.temperature)
        found = [
            summed(target, self.loss, logits, 1 + k, batch.scored(k), not self.training)
            for k, logits in enumerate(ttt_logits(self.head, batch.ids, batch.states, self.steps))
        ]
        return Figures.of(found, self.decay)


class HeadTask:
    """A head in training."""

    def __init__(self, head: EagleHead, blocks: int, config: TrainingConfig):
        self.head, self.config, self.steps = head, config, config.ttt_steps
        self.layers = head.config.observed_layers(blocks)
        if head.config.version == 3 and self.layers[-1] == blocks:
            raise SpecdecError("head: the state after the last block cannot be observed; give earlier layer_ids")
        self.module = HeadTraining(head, config.ttt_steps, config.loss, config.loss_decay, config.data.temperature)

    def decoding(self, length: int) -> tuple[Any, list[Any]]:
        return None, [Eagle3(head=self.head, n_max=length)]

    def save(self, folder: Path) -> None:
        """In speculators' layout, which can say everything that a head may be."""
        saved = copy.deepcopy(self.head).to(getattr(torch, self.config.save_dtype))
        export(saved, folder, "speculators", self.config.target, self.steps)
