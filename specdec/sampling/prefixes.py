"""The prefix of every distribution in a pass: what processors that read the text need to see.

A pass has B rows and S columns. The prefix of (row, column) is the row's known ids and the fed tokens on the path to
that column: in a chain all columns up to it, in a tree its ancestors and itself. `History` names them; `Prefixes` gives
them as tensors: lengths are known on the host, the newest ids of all prefixes come from one gather, and counts of ids
from one count per row plus a matrix product over the fed tokens. Nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specdec.device.transfer import moved, to_device

_PAST_THE_START = -1  # in place of an id before the start of a prefix
_PAST_THE_END = -2  # pads known texts of different lengths; never equal to the other


@dataclass
class History:
    """What processors need to see: for each row the ids known before this pass, and the ids the pass feeds.

    known: per row int64 [n] on the device, ending before the first fed token; None for an idle row
    fed [B, S]: ids that the pass feeds
    processors: per row its processors; None for an idle row
    counts: per row the columns of `fed` that are text; the rest is padding, which processors never see
    paths: with trees, per row and column the columns from the root to it, itself included; None, for all or for one
        row: a chain
    """

    known: Sequence[Tensor | None]
    fed: Tensor
    processors: Sequence[Sequence[Any] | None]
    counts: Sequence[int]
    paths: Sequence[Sequence[Sequence[int]] | None] | None = None

    def path(self, row: int, column: int) -> Sequence[int]:
        """Return the columns whose tokens follow the known ids in the prefix of `column`."""
        paths = self.paths[row] if self.paths is not None else None
        return range(min(column + 1, self.fed.shape[1])) if paths is None else paths[column]

    def prefix(self, row: int, column: int) -> Tensor:
        """Return the prefix of `column`, int64 [n]."""
        known = self.known[row]
        assert known is not None
        path = self.path(row, column)
        fed = self.fed[row, path.start : path.stop] if isinstance(path, range) else self.fed[row, list(path)]
        return torch.cat([known, fed.to(known.device)])

    def active(self) -> list[int]:
        """List rows that have processors and text."""
        return [b for b, p in enumerate(self.processors) if p is not None and self.known[b] is not None]


class Prefixes:
    """The prefixes of a pass as tensors on `device`. Padding columns hold arbitrary values; they are never read."""

    def __init__(self, history: History, columns: int, device: torch.device):
        self.history, self.columns, self.device = history, columns, device
        self.fed = moved(history.fed, device)
        self.rows = len(history.processors)
        self._exact: dict[tuple[int, int], Tensor] = {}

    def prefix(self, row: int, column: int) -> Tensor:
        """Return one prefix, int64 [n]."""
        key = (row, column)
        if key not in self._exact:
            self._exact[key] = self.history.prefix(row, column).to(self.device)
        return self._exact[key]

    @cached_property
    def known_lengths(self) -> list[int]:
        return [0 if known is None else len(known) for known in self.history.known]

    @cached_property
    def paths(self) -> list[list[Sequence[int]]]:
        history, counts = self.history, self.history.counts
        return [
            [history.path(b, s) if s < counts[b] else () for s in range(self.columns)] for b in range(self.rows)
        ]  # fmt: skip

    @cached_property
    def lengths(self) -> list[list[int]]:
        """Tokens of every prefix, [B][S], on the host."""
        return [[n + len(path) for path in row] for n, row in zip(self.known_lengths, self.paths, strict=True)]

    @cached_property
    def known(self) -> Tensor:
        """Known ids [B, N], padded at the end."""
        empty = torch.empty(0, dtype=torch.int64, device=self.device)
        rows = [empty if k is None else moved(k, self.device) for k in self.history.known]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=_PAST_THE_END)

    @cached_property
    def on_path(self) -> Tensor:
        """True where the token fed at column f belongs to the prefix, bool [B, S, F]."""
        width = self.fed.shape[1]
        if self.history.paths is None:
            chain = torch.ones(self.columns, width, dtype=torch.bool, device=self.device).tril()
            return chain.expand(self.rows, -1, -1)
        member = [[[c in set(path) for c in range(width)] for path in row] for row in self.paths]
        return to_device(member, self.device, torch.bool)

    def tail(self, size: int) -> Tensor:
        """Gather the newest `size` ids of every prefix [B, S, size], oldest first."""
        text = torch.nn.functional.pad(torch.cat([self.known, self.fed], dim=1), (1, 0), value=_PAST_THE_START)
        first_fed = text.shape[1] - self.fed.shape[1]
        index = []
        for n, paths in zip(self.known_lengths, self.paths, strict=True):
            before = [*[0] * size, *range(1 + max(0, n - size), 1 + n)]
            index.append([[*before, *(first_fed + c for c in path)][-size:] if size else [] for path in paths])
        where = to_device(index, self.device).reshape(self.rows, self.columns * size)
        return text.gather(1, where).reshape(self.rows, self.columns, size)

    def occurrences(self, vocab: int, start: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Count ids in every prefix from position `start[b]` on.

        Returns (ids [B, J], counts [B, S, J] float32): J covers every id that can occur, some more than once.
        """
        earliest = min(start, default=0)
        known = self.known[:, earliest:]
        position = torch.arange(earliest, earliest + known.shape[1], device=self.device)
        since = to_device(list(start), self.device)[:, None]
        weight = ((position >= since) & (known >= 0) & (known < vocab)).to(torch.float32)
        # The first fed token of a row can be the prompt's last: it has a position to compare as well.
        width = self.fed.shape[1]
        counted = [[n - 1 >= first for n in row[:width]] for first, row in zip(start, self.lengths, strict=True)]
        ids = torch.cat([known, self.fed], dim=1).clamp(0, vocab - 1)
        table = torch.zeros(self.rows, vocab, dtype=torch.float32, device=self.device)
        table.scatter_add_(1, ids[:, : known.shape[1]], weight)
        equal = (self.fed[:, :, None] == ids[:, None]) & to_device(counted, self.device, torch.bool)[..., None]
        return ids, table.gather(1, ids)[:, None] + self.on_path.to(torch.float32) @ equal.to(torch.float32)

    def where(self, condition: Callable[[Any, int], bool], rows: Sequence[Any]) -> Tensor | None:
        """Evaluate condition(row's processor, length of the prefix) -> bool [B, S, 1]; None if it holds nowhere."""
        held = [
            [p is not None and condition(p, n) for n in lengths] for p, lengths in zip(rows, self.lengths, strict=True)
        ]
        if not any(map(any, held)):
            return None
        return to_device(held, self.device, torch.bool)[..., None]
