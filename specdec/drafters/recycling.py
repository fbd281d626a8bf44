"""recycling: a tree from a table of each token's likeliest successors, as the target last computed them.

Source: Token Recycling (Luo et al. 2024). Every verify pass computes distributions at all fed tokens, also at rejected
ones, and their best tokens are usually thrown away. Here they are kept: row t of the table holds the `width` best
tokens after the newest t. A draft looks the newest token up, then its successors, and so on, along a fixed tree.

The tree has the `nodes` nodes that are likeliest if the k-th successor is right with probability `RIGHT[k]`,
independently; it never changes, and only the table is read, so a draft costs no pass and no host read. A prompt fills
the table with its own successors, the newest first. Each row has its own table, unless `shared` is on: then rows draft
from what other rows have seen, and with `keep_state` from earlier calls.

A table takes vocabulary x width x 4 bytes (1.6 MB for 50,000 tokens and 8 successors).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from specdec.device.transfer import array_on, to_device
from specdec.drafters.base import MOST_NODES, Draft, DraftContext, DraftRequest, TableDrafter, Tokens, as_array
from specdec.drafters.options import state, switch, whole
from specdec.drafters.tree_plan import likeliest_paths
from specdec.models.runner import PassOutput
from specdec.models.trees import MISSING, depths_of, tree_of

# About how often the k-th successor is right, which shapes the tree; later ones half as often each.
RIGHT = (0.45, 0.14, 0.08, 0.05, 0.035, 0.025, 0.02, 0.015)
EMPTY = -1  # in the table: no successor


@lru_cache(maxsize=16)
def template(nodes: int, width: int, depth: int) -> tuple[list[int], list[int]]:
    """Return (ranks, parents) of the fixed tree: which successor of its parent each node is, and the parent."""
    right = [*RIGHT[:width], *(RIGHT[-1] * 0.5**k for k in range(1, width - len(RIGHT) + 1))]
    return tree_of(likeliest_paths(right, nodes, depth))


@dataclass
class TokenRecycling(TableDrafter):
    """A fixed tree from a table of successors.

    nodes: of the tree
    width: successors kept of each token
    depth: most levels
    shared: one table for all rows
    Raises SpecdecError for parameters out of range.
    """

    nodes: int = whole(80, most=MOST_NODES)
    width: int = whole(8, most=64)
    depth: int = whole(6, most=64)
    shared: bool = switch(False)
    name: str = field(init=False, default="recycling")
    _table: Tensor = state()  # [rows, V + 1, width]; padding writes into the entry of token V, which does not exist

    def fresh(self, context: DraftContext) -> TokenRecycling:
        made: TokenRecycling = super().fresh(context)
        before = self.inherited(context) if self.shared else None
        if before is not None and before._table.device == made._device:
            made._table = before._table
        else:
            shape = (1 if self.shared else context.batch, context.vocab_size + 1, self.width)
            made._table = torch.full(shape, EMPTY, dtype=torch.int32, device=made._device)
        return made

    def _of(self, rows: Tensor) -> Tensor:
        """Return the index of each row's table."""
        return torch.zeros_like(rows) if self.shared else rows

    def begin(self, row: int, prompt: Tokens) -> None:
        if not self.shared:
            self._table[row] = EMPTY
        tokens, successors = successors_of(as_array(prompt), self.width)
        if len(tokens):
            rows, device = self._of(to_device([row], self._device)), self._device
            self._table[rows, array_on(tokens, device)] = array_on(successors, device).to(torch.int32)

    def _learn(self, output: PassOutput) -> None:
        """Keep the best tokens after every fed one."""
        fed, vocab = output.tokens, self._context.vocab_size
        best = self._scores(output.logits).topk(min(self.width, vocab)).indices
        real = torch.arange(fed.shape[1], device=fed.device) < to_device(list(output.counts), fed.device)[:, None]
        token = torch.where(real & (fed < vocab), fed, vocab)
        rows = self._of(torch.arange(len(fed), device=fed.device) + output.first_row)[:, None].expand_as(fed)
        flat = (rows * (vocab + 1) + token).flatten()
        # A token that was fed twice keeps its last successors; writes to one place have no order on a GPU.
        again = (flat[:, None] == flat).triu(1).any(dim=1)
        flat = torch.where(again, rows.flatten() * (vocab + 1) + vocab, flat)
        self._table.view(-1, self.width)[flat, : best.shape[-1]] = best.flatten(0, 1).to(torch.int32)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        ranks, parents = template(self.nodes, self.width, self.depth)
        rows, newest = to_device([[r.row, int(r.last)] for r in requests], self._device).unbind(1)
        tokens = look_up(self._table, self._of(rows), newest, ranks, parents)
        return [Draft(row, parents, drafter=self.name) for row in tokens]


def look_up(tables: Tensor, rows: Tensor, newest: Tensor, ranks: Sequence[int], parents: Sequence[int]) -> Tensor:
    """Look up the tree's tokens after each row's newest one: tables [T, V + 1, W], rows and newest [n] -> [n, nodes].

    `MISSING` where the table has no successor.
    """
    depths, most = depths_of(parents), tables.shape[1] - 1  # that row of a table is never looked up
    of_parents, of_ranks = to_device([list(parents), list(ranks)], tables.device)
    found = newest[:, None]  # [n, 1 + nodes so far]
    for level in range(1, max(depths) + 1):
        nodes = slice(depths.index(level), len(depths) - depths[::-1].index(level))
        above = found.gather(1, (of_parents[nodes] + 1).expand(len(rows), -1))
        token = tables[rows[:, None], above.clamp(min=0, max=most), of_ranks[nodes]].long()
        found = torch.cat([found, torch.where((above < 0) | (token < 0), MISSING, token)], dim=1)
    return found[:, 1:]


def successors_of(ids: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens [n], successors [n, width]): what followed every token of a text, the newest first, padded with
    `EMPTY`."""
    known: dict[int, list[int]] = {}
    for token, following in zip(ids[-2::-1].tolist(), ids[:0:-1].tolist(), strict=True):
        found = known.setdefault(token, [])
        if len(found) < width and following not in found:
            found.append(following)
    table = np.full((len(known), width), EMPTY, dtype=np.int64)
    for i, found in enumerate(known.values()):
        table[i, : len(found)] = found
    return np.array(list(known), dtype=np.int64), table
