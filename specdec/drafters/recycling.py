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

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.config import check_switch, check_whole
from specdec.device.transfer import array_on, to_device
from specdec.drafters.base import MOST_NODES, Draft, DraftContext, Drafter, DraftRequest, Tokens, as_array
from specdec.errors import SpecdecError
from specdec.models.runner import PassOutput
from specdec.models.trees import MISSING, depths_of

# About how often the k-th successor is right, which shapes the tree; later ones half as often each.
RIGHT = (0.45, 0.14, 0.08, 0.05, 0.035, 0.025, 0.02, 0.015)
EMPTY = -1  # in the table: no successor


class Template(NamedTuple):
    """A fixed tree: the parent of each node, level by level, and which successor of its parent it is."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]


@lru_cache(maxsize=16)
def template(nodes: int, width: int, depth: int) -> Template:
    """Find the `nodes` likeliest places of a tree of at most `depth` levels and `width` children per node."""
    right = [RIGHT[k] if k < len(RIGHT) else RIGHT[-1] * 0.5 ** (k - len(RIGHT) + 1) for k in range(width)]
    chosen: list[tuple[int, ...]] = []  # paths of ranks
    waiting: list[tuple[float, tuple[int, ...]]] = [(-right[0], (0,))]
    while waiting and len(chosen) < nodes:
        negative, path = heapq.heappop(waiting)
        chosen.append(path)
        if path[-1] + 1 < width:
            heapq.heappush(waiting, (negative / right[path[-1]] * right[path[-1] + 1], (*path[:-1], path[-1] + 1)))
        if len(path) < depth:
            heapq.heappush(waiting, (negative * right[0], (*path, 0)))
    chosen.sort(key=lambda path: (len(path), path))
    place = {path: node for node, path in enumerate(chosen)}
    return Template(tuple(place.get(path[:-1], -1) for path in chosen), tuple(path[-1] for path in chosen))


@dataclass
class TokenRecycling(Drafter):
    """A fixed tree from a table of successors.

    nodes: of the tree
    width: successors kept of each token
    depth: most levels
    shared: one table for all rows
    Raises SpecdecError for parameters out of range.
    """

    nodes: int = 80
    width: int = 8
    depth: int = 6
    shared: bool = False
    name: str = field(init=False, default="recycling")
    runs_a_model = False
    makes_trees = True
    observed_layers = ()  # logits alone

    _context: DraftContext = field(init=False, repr=False, compare=False)
    _table: Tensor | None = field(init=False, repr=False, compare=False, default=None)  # [rows, V + 1, width]

    def __post_init__(self) -> None:
        for parameter, most in (("nodes", MOST_NODES), ("width", 64), ("depth", 64)):
            value = getattr(self, parameter)
            check_whole(f"recycling: {parameter}", value, 1)
            if value > most:
                raise SpecdecError(f"recycling: {parameter}={value} is above the limit of {most}")
        check_switch("recycling: shared", self.shared)

    @property
    def shares_state(self) -> bool:
        return self.shared

    @property
    def tree_nodes(self) -> int:
        return self.nodes

    def fresh(self, context: DraftContext) -> TokenRecycling:
        made: TokenRecycling = super().fresh(context)
        made._context, before = context, self.inherited(context) if self.shared else None
        made._table = before._table if before is not None else None
        return made

    def _tables(self, device: torch.device) -> Tensor:
        """Return the table of each row; padding writes into the entry of token V, which does not exist."""
        if self._table is None or self._table.device != device:
            rows = 1 if self.shared else self._context.batch
            shape = (rows, self._context.vocab_size + 1, self.width)
            self._table = torch.full(shape, EMPTY, dtype=torch.int32, device=device)
        return self._table

    def _of(self, rows: Tensor) -> Tensor:
        """Return the index of each row's table."""
        return torch.zeros_like(rows) if self.shared else rows

    def begin(self, row: int, prompt: Tokens) -> None:
        ids = as_array(prompt)
        if self._context.target is None:
            raise SpecdecError("recycling reads what a decoder's target computes: use it in a SpeculativeDecoder")
        tables = self._tables(self._context.target.device)
        if not self.shared:
            tables[row] = EMPTY
        tokens, successors = successors_of(ids, self.width)
        if len(tokens):
            rows = self._of(to_device([row], tables.device))
            tables[rows, array_on(tokens, tables.device)] = array_on(successors, tables.device).to(torch.int32)

    def observe(self, output: PassOutput) -> None:
        """Keep the best tokens after every fed one; passes over prompts compute none but the last's."""
        logits, fed = output.logits, output.tokens
        if logits.shape[1] != fed.shape[1]:
            return
        tables, vocab = self._tables(fed.device), self._context.vocab_size
        best = logits[..., :vocab].float().nan_to_num(nan=float("-inf")).topk(min(self.width, vocab)).indices
        real = torch.arange(fed.shape[1], device=fed.device) < to_device(list(output.counts), fed.device)[:, None]
        token = torch.where(real & (fed < vocab), fed, vocab)
        rows = self._of(torch.arange(len(fed), device=fed.device) + output.first_row)[:, None].expand_as(fed)
        flat = (rows * (vocab + 1) + token).flatten()
        # A token that was fed twice keeps its last successors; writes to one place have no order on a GPU.
        again = (flat[:, None] == flat).triu(1).any(dim=1)
        flat = torch.where(again, rows.flatten() * (vocab + 1) + vocab, flat)
        tables.view(-1, self.width)[flat, : best.shape[-1]] = best.flatten(0, 1).to(torch.int32)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        tables = self._tables(self._context.target.device) if self._context.target is not None else None
        assert tables is not None
        shape = template(self.nodes, self.width, self.depth)
        rows = self._of(to_device([r.row for r in requests], tables.device))
        newest = to_device([int(r.last) for r in requests], tables.device)
        tokens = look_up(tables, rows, newest, shape)
        return [Draft(tokens[i], shape.parents, drafter=self.name) for i in range(len(requests))]


def look_up(tables: Tensor, rows: Tensor, newest: Tensor, shape: Template) -> Tensor:
    """Look up the tree's tokens after each row's newest one: tables [T, V + 1, W], rows and newest [n] -> [n, nodes].

    `MISSING` where the table has no successor.
    """
    depths, missing = depths_of(shape.parents), tables.shape[1] - 1  # that row of a table is never looked up
    parents = to_device(list(shape.parents), tables.device)
    ranks = to_device(list(shape.ranks), tables.device)
    found = newest[:, None]  # [n, 1 + nodes so far]
    for level in range(1, max(depths) + 1):
        first, end = depths.index(level), len(depths) - depths[::-1].index(level)
        above = found.gather(1, (parents[first:end] + 1).expand(len(rows), -1))
        token = tables[rows[:, None], above.clamp(min=0, max=missing), ranks[first:end]].long()
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
