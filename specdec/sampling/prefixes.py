"""The prefix of every distribution in a pass: what processors that read the text need to see.

A pass has B rows and S columns. The prefix of (row, column) is the row's known ids and those of the F fed tokens that
are on the path to that column: in a chain all columns up to it, in a tree its ancestors and itself. `Prefixes` computes
from tensors alone, so that it can be part of a recorded function. `History` names the same on the host, for processors
that are called there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.device.transfer import to_device

_PAST_THE_START = -1  # in place of an id before the start of a prefix
_PAST_THE_END = -2  # in place of what follows a known text; never equal to the other


@dataclass
class History:
    """What processors that are called on the host see.

    known: per row int64 [n] on the device, ending before the first fed token; None for an idle row
    fed [B, F]: ids that the pass feeds
    processors: per row its processors; None for an idle row
    counts: per row the columns that are text; the rest is padding, which processors never see
    paths: with trees, per row and column the fed columns from the root to it, itself included; None, for all or for
        one row: a chain
    """

    known: Sequence[Tensor | None]
    fed: Tensor
    processors: Sequence[Sequence[Any] | None]
    counts: Sequence[int]
    paths: Sequence[Sequence[Sequence[int]] | None] | None = None

    def path(self, row: int, column: int) -> Sequence[int]:
        """Return the fed columns that follow the known ids in the prefix of `column`."""
        paths = self.paths[row] if self.paths is not None else None
        return range(min(column + 1, self.fed.shape[1])) if paths is None else paths[column]

    def prefix(self, row: int, column: int) -> Tensor:
        """Return the prefix of `column`, int64 [n]."""
        known, path = self.known[row], self.path(row, column)
        assert known is not None
        fed = self.fed[row, path.start : path.stop] if isinstance(path, range) else self.fed[row, list(path)]
        return torch.cat([known, fed.to(known.device)])

    def on_path(self, columns: int) -> Tensor:
        """Tell which fed columns are in the prefix of each column, bool [B, S, F]."""
        width, rows = self.fed.shape[1], len(self.counts)
        if self.paths is None:
            return chain_paths(rows, columns, width, self.fed.device)
        member = torch.zeros(rows, columns, width, dtype=torch.bool).numpy()
        for b, count in enumerate(self.counts):
            for s in range(count):
                member[b, s, list(self.path(b, s))] = True
        return to_device(member, self.fed.device, torch.bool)


def chain_paths(rows: int, columns: int, width: int, device: torch.device) -> Tensor:
    """Return `Prefixes.on_path` of rows without trees."""
    return torch.ones(columns, width, dtype=torch.bool, device=device).tril().expand(rows, -1, -1)


@dataclass
class Prefixes:
    """The prefixes of a pass. Columns and rows that are padding hold arbitrary values; they are never read.

    ids [B, N]: the rows' known ids; what lies after a row's length is not looked at
    lengths [B]: how many of them are known
    fed [B, F]: ids that the pass feeds
    on_path [B, S, F]: True where a fed token belongs to the prefix of a column
    """

    ids: Tensor
    lengths: Tensor
    fed: Tensor
    on_path: Tensor

    @cached_property
    def known(self) -> Tensor:
        """The known ids [B, N], -2 after the end of a row's."""
        inside = torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]
        return torch.where(inside, self.ids, _PAST_THE_END)

    @cached_property
    def sizes(self) -> Tensor:
        """Tokens of every prefix, [B, S]."""
        return self.lengths[:, None] + self.on_path.sum(dim=-1)

    @cached_property
    def _places(self) -> Tensor:
        """The place of each fed token among those on the path to a column, [B, S, F]."""
        return self.on_path.cumsum(dim=-1) - 1

    def tail(self, size: int) -> Tensor:
        """Gather the newest `size` ids of every prefix [B, S, size], oldest first, -1 before its start."""
        at = self.sizes[..., None] + torch.arange(-size, 0, device=self.ids.device)  # [B, S, size]
        old = self.ids.gather(1, at.clamp(0, self.ids.shape[1] - 1).flatten(1)).view_as(at)
        width = self.fed.shape[1]
        if width:  # the fed ids in the order of each path, then a place for those that are not on it
            places = torch.where(self.on_path, self._places, width)
            path = F.pad(torch.zeros_like(places), (0, 1)).scatter(-1, places, self.fed[:, None].expand_as(places))
            past = at - self.lengths[:, None, None]
            old = torch.where(past < 0, old, path.gather(-1, past.clamp(0, width)))
        return torch.where(at < 0, _PAST_THE_START, old)

    def occurrences(self, vocab: int, start: Tensor) -> tuple[Tensor, Tensor]:
        """Count ids in every prefix from position `start` [B, 1] on.

        Returns (ids [B, J], counts [B, S, J] float32): J covers every id that can occur, some more than once.
        """
        known, since = self.known, torch.arange(self.ids.shape[1], device=self.ids.device) >= start
        weight = (since & (known >= 0) & (known < vocab)).to(torch.float32)
        ids = torch.cat([known, self.fed], dim=1).clamp(0, vocab - 1)
        table = torch.zeros(len(ids), vocab, dtype=torch.float32, device=ids.device)
        table.scatter_add_(1, ids[:, : known.shape[1]], weight)
        # The first fed token of a row can be the prompt's last: it has a position to compare as well.
        counted = self.on_path & (self.lengths[:, None, None] + self._places >= start[..., None])
        equal = (self.fed[:, :, None] == ids[:, None]).to(torch.float32)
        return ids, table.gather(1, ids)[:, None] + counted.to(torch.float32) @ equal
