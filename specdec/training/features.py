"""What a drafter sees of its target in training: the observed states and the logits at every token of a text.

`Live` runs the target along. `Stored` reads what `store` wrote before with the same function: observed states and the
last hidden state, from which the target's own head makes the logits again (they would be 50 times the size). `Kept` has
the same in the device's memory. All give the same batches: texts are padded on the right, where no token sees the
padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from specdec.device.transfer import sent
from specdec.errors import SpecdecError
from specdec.files.texts import unfinished
from specdec.training.answers import Answer
from specdec.training.config import content_hash

SHARD = 64  # texts of a file


@dataclass(frozen=True)
class Batch:
    """Texts and what the target says about them.

    ids: int64 [B, S], padded with 0
    starts: int64 [B], the first token that is the target's own
    lengths: int64 [B]
    states: [B, S, n * H_t], n observed layers side by side; n may be 0
    logits: [B, S, V]
    """

    ids: Tensor
    starts: Tensor
    lengths: Tensor
    states: Tensor
    logits: Tensor

    def scored(self, step: int) -> Tensor:
        """Where a draft could have begun and its token `step` been tested, bool [B, S - 2 - step]: entry j predicts
        token j + 2 + step, the draft's first token is j + 2."""
        predicted = torch.arange(self.ids.shape[1] - 2 - step, device=self.ids.device) + 2
        return (predicted >= self.starts[:, None]) & (predicted + step < self.lengths[:, None])


class Source(Protocol):
    """Texts, by their index, as batches."""

    device: torch.device

    def __call__(self, chosen: Sequence[int]) -> Batch: ...


class Live:
    """Run the target on the texts of a batch."""

    def __init__(self, target: nn.Module, layers: Sequence[int], answers: Sequence[Answer]):
        self.target: Any = target
        self.layers, self.answers = layers, answers
        self.device = next(target.parameters()).device

    def __call__(self, chosen: Sequence[int]) -> Batch:
        answers = [self.answers[i] for i in chosen]
        ids, starts, lengths = _texts(answers, self.device)
        states, logits, _ = self.observe(ids)
        return Batch(ids, starts, lengths, states, logits)

    @torch.no_grad()
    def observe(self, ids: Tensor, last: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """(observed states, logits, and if asked for the last hidden state) of [B, S] ids."""
        out = self.target(input_ids=ids, use_cache=False, output_hidden_states=bool(self.layers) or last)
        hidden = out.hidden_states
        states = [hidden[i] for i in self.layers]
        empty = out.logits.new_zeros((*ids.shape, 0))
        return torch.cat([empty, *states], dim=-1), out.logits, hidden[-1] if last else None


class Kept:
    """Make the features of all texts once, and keep them on the device."""

    def __init__(self, live: Live, batch: int, advance: Callable[[], None]):
        self.target, self.answers, self.device = live.target, live.answers, live.device
        self.texts: list[tuple[Tensor, Tensor]] = []
        for first in range(0, len(live.answers), batch):
            self.texts += _observed(live, range(first, min(first + batch, len(live.answers))))
            advance()

    @torch.no_grad()
    def __call__(self, chosen: Sequence[int]) -> Batch:
        ids, starts, lengths = _texts([self.answers[i] for i in chosen], self.device)
        read = [self._text(i) for i in chosen]
        states, last = (pad_sequence(list(part), batch_first=True).to(self.device) for part in zip(*read, strict=True))
        return Batch(ids, starts, lengths, states, self.target.get_output_embeddings()(last))

    def _text(self, index: int) -> tuple[Tensor, Tensor]:
        """(observed states [S, n * H_t], last hidden state [S, H_t])"""
        return self.texts[index]


class Stored(Kept):
    """Read what `store` wrote."""

    def __init__(self, folder: Path, target: nn.Module, answers: Sequence[Answer]):
        self.files = sorted(folder.glob("features-*.safetensors"))
        self.target: Any = target
        self.answers = answers
        self.device = next(target.parameters()).device

    def _text(self, index: int) -> tuple[Tensor, Tensor]:
        with safe_open(self.files[index // SHARD], framework="pt") as file:
            return file.get_tensor(f"{index}.states"), file.get_tensor(f"{index}.last")


def store(live: Live, parent: Path, target: str, batch: int, advance: Callable[[], None]) -> Path:
    """Write the features of all texts of `live`, or the shards that are missing, into a folder that is named by what
    they are of; returns it. target: hash of its weights.

    Raises SpecdecError where the logits are more than the output head of the last state.
    """
    folder = parent / content_hash([target, list(live.layers), [a.ids for a in live.answers]])
    folder.mkdir(parents=True, exist_ok=True)
    for first in range(0, len(live.answers), SHARD):
        file = folder / f"features-{first // SHARD:05}.safetensors"
        if file.exists():
            continue
        found: dict[str, Tensor] = {}
        for start in range(first, min(first + SHARD, len(live.answers)), batch):
            chosen = range(start, min(start + batch, first + SHARD, len(live.answers)))
            for i, (states, last) in zip(chosen, _observed(live, chosen), strict=True):
                found |= {f"{i}.states": states.cpu(), f"{i}.last": last.cpu()}
        with unfinished(file, "features") as new:
            save_file(found, new)
        advance()
    return folder


def _observed(live: Live, chosen: range) -> list[tuple[Tensor, Tensor]]:
    """(observed states, last hidden state) of texts. Raises SpecdecError where the logits are more than the output head
    of the last state."""
    ids, _, lengths = _texts([live.answers[i] for i in chosen], live.device)
    states, logits, last = live.observe(ids, last=True)
    if not torch.allclose(live.target.get_output_embeddings()(last), logits, atol=1e-3, rtol=1e-3):
        raise SpecdecError("features: this target's logits are not its output head of its last state; use live")
    assert last is not None
    return [(states[row, :n].clone(), last[row, :n].clone()) for row, n in enumerate(lengths.tolist())]


def _texts(answers: Sequence[Answer], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    ids = pad_sequence([torch.tensor(a.ids) for a in answers], batch_first=True)
    starts, lengths = torch.tensor([a.start for a in answers]), torch.tensor([len(a.ids) for a in answers])
    return sent(ids, device), sent(starts, device), sent(lengths, device)


def order(count: int, seed: int) -> Iterator[int]:
    """Texts without end: every epoch is a permutation that depends on the seed and its number alone."""
    epoch = 0
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        yield from torch.randperm(count, generator=generator).tolist()
        epoch += 1
