"""The texts of a batch's rows on the device, for processors that read them.

`KnownTexts` is the engine's: a table of ids that a row fills when it starts and that grows with what is emitted, and
what the rows' processors need beside it. `Known` is the part of it that travels as inputs of a recorded function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from specdec.device.buffers import Buffers
from specdec.device.transfer import moved, sync_allowed, to_device
from specdec.errors import SpecdecError
from specdec.sampling.prefixes import History, Prefixes, chain_paths
from specdec.sampling.processors import Room, Stage, Texts, decay_gains


@dataclass(frozen=True)
class Known(Buffers):
    """Known texts as inputs of a recorded function.

    ids [B, N]: ids of the rows, with arbitrary ones after them: lengths are told apart
    numbers [B, P], constants: as in `Texts`
    """

    ids: Tensor
    numbers: Tensor
    constants: tuple[Tensor, ...]

    def grown(self, tokens: Tensor, lengths: Tensor) -> Known:
        """Return the texts with tokens [B, k] put after the first `lengths` [B] ids of each row."""
        at = lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        return replace(self, ids=self.ids.scatter(1, at.clamp(max=self.ids.shape[1] - 1), tokens))


@dataclass(frozen=True)
class Drafted:
    """The texts of rows that draft chains: what is known, then what is drafted so far.

    lengths [B]: ids of each row
    rows: row -> ids that the host knows, for processors that are called there
    drafted: tokens drafted so far
    """

    texts: KnownTexts
    known: Known
    lengths: Tensor
    rows: Mapping[int, int]
    drafted: int = 0

    def read(self) -> Texts:
        """Return what the stages read for the next token."""
        fed = self.known.ids[:, :0]
        prefixes = Prefixes(self.known.ids, self.lengths, fed, chain_paths(len(fed), 1, 0, fed.device))
        if not self.texts.on_host:
            return self.texts.texts(self.known, prefixes)
        lengths = {row: n + self.drafted for row, n in self.rows.items()}
        history = self.texts.history(self.known.ids, lengths, fed, [1] * len(fed))
        return self.texts.texts(self.known, prefixes, history)

    def read_tree(self, nodes: Tensor, paths: Mapping[int, Sequence[Sequence[int]]], on_path: Tensor) -> Texts:
        """Return what the stages read at some nodes of a tree.

        nodes [B, n]: ids of the tree so far
        paths: row -> the nodes on the way to each of these nodes, itself included; looked at only where processors are
            called on the host
        on_path [B, S, n]: the same on the device
        """
        fed, history = nodes.clamp(min=0), None
        if self.texts.on_host:
            listed = [paths.get(b, ()) for b in range(len(nodes))]
            history = self.texts.history(self.known.ids, self.rows, fed, list(map(len, listed)), listed)
        return self.texts.texts(self.known, Prefixes(self.known.ids, self.lengths, fed, on_path), history)

    def after(self, token: Tensor) -> Drafted:
        """Return the texts with one more token [B] each."""
        known = self.known.grown(token[:, None], self.lengths)
        return replace(self, known=known, lengths=self.lengths + 1, drafted=self.drafted + 1)


class KnownTexts:
    """The ids of a batch's rows and the stages of their processors. The first row to start settles the stages."""

    def __init__(self, batch: int, capacity: int, vocab: int, device: torch.device):
        self.room = Room(batch, capacity, vocab, device)
        # A column more than is read: what lies past the end is written there.
        self.ids = torch.zeros(batch, capacity + 1, dtype=torch.int64, device=device)
        self.stages: tuple[Stage, ...] = ()
        self.numbers = self.ids[:, :0]
        self.constants: tuple[Tensor, ...] = ()
        self.processors: list[Sequence[Any] | None] = [None] * batch
        self.limits = [capacity] * batch  # longest prefix for which every processor has a number

    @property
    def on_host(self) -> bool:
        """True if some processor is called on the host."""
        return any(stage.form is None for stage in self.stages)

    @property
    def signature(self) -> tuple[Any, ...] | None:
        """Equal for stages that compute the same from equal inputs; None if that cannot be told."""
        signatures = tuple(stage.signature for stage in self.stages)
        return None if None in signatures else signatures

    def start(self, row: int, ids: Sequence[int], processors: Sequence[Any]) -> None:
        """Start a row with the ids that are known."""
        with sync_allowed(self.room.device):  # processors of transformers hold their ids on the device
            if not self.stages:
                made = [Stage.of(p, self.room) for p in processors]
                self.stages = tuple(stage for stage, _ in made)
                self.constants = tuple(tensor for _, own in made for tensor in own)
                self.numbers = torch.zeros(self.room.rows, len(made), dtype=torch.int64, device=self.room.device)
            numbers = [s.form.number(p) if s.form else 0 for s, p in zip(self.stages, processors, strict=True)]
            self.numbers[row] = to_device(numbers, self.room.device)
        self.processors[row], self.limits[row] = processors, self.room.longest
        if len(ids):
            self.ids[row, : len(ids)] = to_device(ids, self.room.device)
        first = 0
        for stage, processor in zip(self.stages, processors, strict=True):
            if isinstance(processor, hf.ExponentialDecayLengthPenalty) and stage.form:
                gains = decay_gains(processor, self.room.longest)
                self.limits[row] = len(gains) - 1
                self.constants[first + 1][row, : len(gains)] = to_device(gains, self.room.device, torch.float32)
            first += stage.size

    def grow(self, positions: Tensor, tokens: Tensor) -> None:
        """Write tokens [B, n] from positions [B] on; those that are not emitted lie after their row's length."""
        at = positions[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.ids.scatter_(1, at.clamp(max=self.ids.shape[1] - 1), tokens)

    def known(self, columns: int, device: torch.device) -> Known:
        """Return the first ids of each row, and what goes with them."""
        tensors = tuple(moved(t, device) for t in self.constants)
        return Known(moved(self.ids[:, :columns], device), moved(self.numbers, device), tensors)

    @property
    def is_limited(self) -> bool:
        """True if some row has a processor without a number for prefixes that may still come."""
        return min(self.limits) < self.room.longest

    def check(self, lengths: Mapping[int, int]) -> None:
        """Raise SpecdecError if a processor has no number for a row's prefix of so many tokens."""
        for row, length in lengths.items():
            if length > self.limits[row] < self.room.longest:
                past = f"after {length} tokens its factor to the power of the tokens past its start"
                raise SpecdecError(f"exponential_decay_length_penalty: {past} is too large")

    def history(
        self, ids: Tensor, lengths: Mapping[int, int], fed: Tensor, counts: Sequence[int], paths: Any = None
    ) -> History:
        """Return what processors that are called on the host see; lengths: row -> how many of its `ids` are known."""
        rows = range(self.room.rows)
        known = [ids[b, : lengths[b]] if b in lengths else None for b in rows]
        return History(known, fed, [self.processors[b] if b in lengths else None for b in rows], counts, paths)

    def texts(self, known: Known, prefixes: Prefixes, history: History | None = None) -> Texts:
        """Put together what the stages read in a pass."""
        return Texts(self.stages, prefixes, known.numbers, known.constants, history)

    @staticmethod
    def of(history: History, scores: Tensor) -> Texts:
        """Return what the stages read in the pass that `history` describes and that gave scores [B, S, V]."""
        device = scores.device
        lengths = [0 if known is None else len(known) for known in history.known]
        width = history.fed.shape[1]
        texts = KnownTexts(len(lengths), max(1, *lengths) + width, scores.shape[-1], device)
        for row, (known, processors) in enumerate(zip(history.known, history.processors, strict=True)):
            if known is not None and processors is not None:
                texts.start(row, (), processors)
                texts.ids[row, : lengths[row]] = moved(known, device)
        texts.check({row: length + min(history.counts[row], width) for row, length in enumerate(lengths)})
        fed, on_path = moved(history.fed, device), moved(history.on_path(scores.shape[1]), device)
        prefixes = Prefixes(texts.ids, to_device(lengths, device), fed, on_path)
        return texts.texts(texts.known(texts.room.longest, device), prefixes, history)
