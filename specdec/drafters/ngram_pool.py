"""A pool of n-grams for each row of a call, on the device: the newest stay, and what followed a token is looked up.

An update copies the pools of its rows, so that an n-gram's age is its place. Memory: 8 * N bytes an n-gram.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.device.transfer import to_device

EMPTY = -1  # in place of a token: no n-gram


class NgramPool:
    """`size` n-grams of `n` tokens a row: table int64 [B, size, n], the newest last."""

    def __init__(self, batch: int, size: int, n: int, device: torch.device):
        self.n, self.size = n, size
        self.table = torch.full((batch, size, n), EMPTY, dtype=torch.int64, device=device)

    def begin(self, row: int, ids: np.ndarray) -> None:
        """Hold a text's n-grams, and nothing else of the row."""
        grams = [tuple(ids[i : i + self.n].tolist()) for i in range(len(ids) - self.n, -1, -1)]
        newest = list(dict.fromkeys(grams))[: self.size][::-1]
        self.table[row] = EMPTY
        if newest:
            self.table[row, -len(newest) :] = to_device(newest, self.table.device)

    def put(self, rows: Tensor, grams: Tensor) -> None:
        """Add n-grams [b, W, n] to rows [b] as their newest, in place of the oldest W; known ones become newest."""
        later = (grams[:, :, None] == grams[:, None]).all(dim=-1).triu(1).any(dim=-1)  # the last of equal ones stays
        grams, pool = grams.masked_fill(later[..., None], EMPTY), self.table[rows]
        known = (pool[:, :, None] == grams[:, None]).all(dim=-1).any(dim=-1)
        self.table[rows] = torch.cat([pool.masked_fill(known[..., None], EMPTY)[:, grams.shape[1] :], grams], dim=1)

    def after(self, rows: Tensor, newest: Tensor, most: int) -> Tensor:
        """Find what followed the tokens `newest` [b] of rows [b] in the newest n-grams: [b, most, n - 1].

        `EMPTY` where there are fewer.
        """
        pool = self.table[rows]
        place = torch.arange(self.size, device=pool.device)
        score, found = torch.where(pool[:, :, 0] == newest[:, None], place, -1).topk(min(most, self.size))
        followers = pool.gather(1, found[..., None].expand(-1, -1, self.n))[..., 1:]
        followers = followers.masked_fill((score < 0)[..., None], EMPTY)
        return F.pad(followers, (0, 0, 0, most - followers.shape[1]), value=EMPTY)
