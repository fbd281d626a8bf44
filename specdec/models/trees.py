"""Tree drafts: parents and ancestors in the forms that a pass, its mask and acceptance need.

A draft's `parents` name the node that each node follows, -1 = the newest token. A pass feeds [newest, node 0, node 1,
...]: *column* 0 is the newest token and column i + 1 is node i. Parents come before their children, so the first n
nodes of a tree are a tree, and siblings come in the order in which they were proposed.

Node i of a tree is in cache slot `start + 1 + i` and at position `start + depth`: a slot's index is not its position
there, so masks are made from `TreePass` and not from ages alone. A chain is the tree in which every node follows the
one before it; rows with chains and rows with trees share a pass.

The device needs the parents only: depths and ancestors are computed there, from tensors alone, so a drafter may leave
the shape of its tree on the device, and passes with trees are recorded like others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.device.buffers import Buffers
from specdec.errors import SpecdecError

Parents = tuple[int, ...]
# In place of a token: a node for which its parent's distribution had no token; nodes below it are missing as well.
MISSING = -(1 << 40)


# -- on the host -------------------------------------------------------------------------------------------------------


def check_parents(parents: Sequence[int], nodes: int, strategy: str) -> None:
    """Raise SpecdecError unless `parents` is a tree of `nodes` nodes with parents before children."""
    if not isinstance(parents, Sequence | np.ndarray) or not all(isinstance(p, Integral) for p in parents):
        raise SpecdecError(f"strategy {strategy!r} proposed parents that are no list of node numbers: {parents!r}")
    if len(parents) != nodes:
        raise SpecdecError(f"strategy {strategy!r} proposed {nodes} tokens with {len(parents)} parents")
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise SpecdecError(f"strategy {strategy!r}: node {i} has parent {parent}; parents come before children")


def chain_parents(nodes: int) -> Parents:
    """Return the parents of a chain."""
    return tuple(range(-1, nodes - 1))


def depths_of(parents: Sequence[int]) -> list[int]:
    """Return the level of each node, 1 = a child of the newest token."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def most_children(parents: Sequence[int]) -> int:
    """Return the most children that a node, or the newest token, has."""
    return int(np.bincount(np.asarray(parents, dtype=np.int64) + 1).max()) if len(parents) else 0


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """List the nodes from the first level down to `node`, itself included."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def tree_of(paths: Sequence[tuple[Any, ...]]) -> tuple[list[Any], list[int]]:
    """Return (last, parents) of nodes that are given by what leads to each, its own last; parents come first."""
    place = {path: node for node, path in enumerate(paths)}
    return [path[-1] for path in paths], [place.get(path[:-1], -1) for path in paths]


def moves(row: int, columns: Sequence[int], start: int) -> list[tuple[int, int, int]]:
    """List (row, from slot, to slot) for each column of an accepted path that is not where a chain would have it.

    columns: the path without column 0
    start: slot of column 0
    """
    return [(row, start + column, start + 1 + i) for i, column in enumerate(columns) if column != i + 1]


# -- on the device -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree(Buffers):
    """The drafts of B rows as trees of S columns.

    Node s is tested at its parent's column and fed at column s + 1; the last token of a chain that fills its pass is
    tested and not fed.

    parents [B, S]: the node that each node follows, -1 = the newest token
    tested_at [B, S]: the column whose distribution tests node s
    rank [B, S]: how many siblings of node s were proposed before it
    depths [B, S]: steps from the newest token to each column
    lineage [B, S, S]: True where column j is column i, or an ancestor of it
    levels: no row's tree has more
    siblings: no column has more children
    limits [B]: levels that a row may accept, or None
    """

    parents: Tensor
    tested_at: Tensor
    rank: Tensor
    depths: Tensor
    lineage: Tensor
    levels: int
    siblings: int
    limits: Tensor | None = None

    @staticmethod
    def of(parents: Tensor, levels: int, siblings: int, limits: Tensor | None = None) -> Tree:
        """Build the tables from parents int64 [B, S], -1 in padding. Computes from tensors alone."""
        batch, width = parents.shape
        at = (parents + 1).clamp(0, width - 1)
        columns = torch.arange(width, device=parents.device)
        same = at[:, :, None] == at[:, None, :]
        rank = (same & (columns < columns[:, None])).sum(dim=-1)
        # The lineage is the closure of "is, or is a child of"; each product doubles how far up it reaches.
        link = torch.zeros((batch, width, width), dtype=torch.float32, device=parents.device)
        link[:, 1:] = torch.nn.functional.one_hot(at[:, :-1], width)
        reach = link + torch.eye(width, device=parents.device)
        for _ in range(max(0, min(levels, width) - 1).bit_length()):
            reach = (reach @ reach).clamp(max=1.0)
        lineage = reach > 0
        return Tree(parents, at, rank, lineage.sum(dim=-1) - 1, lineage, levels, siblings, limits)

    @staticmethod
    def of_rows(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> Tree:
        """Build the tables from parents as lists, padded to `width` columns."""
        table = np.full((len(rows), width), -1, dtype=np.int64)
        for b, parents in enumerate(rows):
            table[b, : len(parents)] = parents[:width]
        levels = max((max(depths_of(row), default=0) for row in rows), default=0)
        siblings = max(map(most_children, rows), default=0)
        return Tree.of(torch.from_numpy(table).to(device), levels, max(1, siblings))


def merged_chains(chains: Tensor) -> tuple[Tensor, Tensor]:
    """Merge chains that begin alike: [n, G, K] -> (tokens, parents), [n, K * G] each, level by level.

    A node that an earlier chain has is `MISSING`; what follows it follows the earlier one. Ids below zero are missing.
    """
    width, levels = chains.shape[1:]
    alike = (chains[:, :, None] == chains[:, None]).int().cumprod(dim=-1).bool()  # [n, G, G, K]
    index = torch.arange(width, device=chains.device)
    first = torch.where(alike, index[:, None], width).amin(dim=2).transpose(1, 2)  # [n, K, G]: the first that has it
    tokens = chains.transpose(1, 2)
    tokens = torch.where((first == index) & (tokens >= 0), tokens, MISSING)
    level = torch.arange(levels, device=chains.device)[:, None]
    parents = torch.cat([torch.full_like(first[:, :1], -1), first[:, :-1] + level[:-1] * width], dim=1)
    return tokens.flatten(1), parents.flatten(1)


@dataclass(frozen=True)
class Paths(Buffers):
    """The accepted paths of a pass.

    starts [B]: slot of each row's newest token
    nodes [B, levels]: the nodes of each path, of which the first `accepted` [B] are real
    """

    starts: Tensor
    nodes: Tensor
    accepted: Tensor

    def moves(self, trash: int) -> tuple[Tensor, Tensor]:
        """Return (source, target) slots [B, levels]: a path's tokens go to where a chain would have them."""
        level = torch.arange(self.nodes.shape[1], device=self.nodes.device)
        moves, first = (level < self.accepted[:, None]) & (self.nodes != level), self.starts[:, None] + 1
        source, target = (torch.where(moves, first + at, trash) for at in (self.nodes, level))
        return source, target


@dataclass(frozen=True)
class TreePass(Buffers):
    """Where the tokens of one pass are in their rows' trees.

    starts [B]: slot and position of each row's newest token, where its *region* of R slots begins
    offsets [B, S]: slot of each fed token, counted from there
    depths [B, R]: depth of the token that each slot of the region holds
    sees [B, S, R]: slots of the region that a fed token attends to, none for padding
    """

    starts: Tensor
    offsets: Tensor
    depths: Tensor
    sees: Tensor

    @property
    def region(self) -> int:
        """Slots of a row's tree, R."""
        return self.depths.shape[1]

    @staticmethod
    def of(tree: Tree, starts: Tensor, counts: Tensor) -> TreePass:
        """Describe the pass that feeds the first S columns of each row's tree, `counts` [B] of them real."""
        columns = torch.arange(tree.lineage.shape[1], device=starts.device)
        real = columns < counts[:, None]
        return TreePass(starts, columns.expand(len(starts), -1), tree.depths, tree.lineage & real[..., None])

    def look(self, positions: Tensor, kv_len: int, groups: int) -> tuple[Tensor, Tensor]:
        """Return (age, seen), each [B, G * S, kv_len], of queries at positions [B, S].

        age: how many positions the query is ahead of the slot
        seen: True where it may attend to it; padding sees slot 0, because a softmax over nothing is NaN
        """
        slots = torch.arange(kv_len, device=positions.device)
        relative = slots - self.starts[:, None]
        inside = (relative >= 0) & (relative < self.region)  # [B, kv_len]
        relative = relative.clamp(0, self.region - 1)
        held = torch.where(inside, self.starts[:, None] + self.depths.gather(1, relative), slots)
        sees = self.sees.gather(2, relative[:, None].expand(-1, positions.shape[1], -1))
        seen = torch.where(inside[:, None], sees, (slots < self.starts[:, None])[:, None])
        seen = torch.where(self.sees.any(dim=-1, keepdim=True), seen, slots == 0)
        age = positions[:, :, None] - held[:, None]
        return age.repeat(1, groups, 1), seen.repeat(1, groups, 1)
