"""Tree drafts as tables: who descends from whom, in the forms that a pass, its mask and acceptance need.

A draft's `parents` name the node that each node follows, -1 = the newest token. A pass feeds [newest, node 0, node 1,
...]: *column* 0 is the newest token and column i + 1 is node i. Parents come before their children, so the first n
nodes of a tree are a tree, and siblings stand in the order in which they were proposed.

Node i of a tree lies in cache slot `start + 1 + i` and at position `start + depth`: a slot's index is no longer its
position there, so masks are made from `TreePass` and not from ages alone. A chain is the tree in which every node
follows the one before it; rows with chains and rows with trees share a pass.

Tables are made on the host, once a shape (they are cached), and travel to the device with the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from specdec.device.buffers import Buffers
from specdec.device.transfer import array_on
from specdec.errors import SpecdecError

Parents = tuple[int, ...]
# In place of a token: a node that its parent's law had no token for; what is below it is missing as well.
MISSING = -(1 << 40)
Columns = range | tuple[int, ...]


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
    """The chain as a tree."""
    return tuple(range(-1, nodes - 1))


@dataclass(frozen=True)
class Shape:
    """One tree of n nodes over its n + 1 columns; all arrays are read-only.

    depths [n + 1] (the newest token: 0); ancestors [n + 1, n + 1]: whether column j is column i or above it;
    children [n + 1, C]: the columns of a column's children in order of proposal, 0 = none; tested_at [n]: the column
    whose law tests node i, which is its parent's.
    """

    depths: np.ndarray
    ancestors: np.ndarray
    children: np.ndarray
    tested_at: np.ndarray

    @property
    def levels(self) -> int:
        return int(self.depths.max())

    def path(self, column: int) -> list[int]:
        """The columns from the newest token to `column`, both included."""
        return np.flatnonzero(self.ancestors[column]).tolist()

    def is_leaf(self, column: int) -> bool:
        return not self.children[column].any()

    def nodes(self, levels: int) -> list[int]:
        """The nodes of the first `levels` levels, in order."""
        return np.flatnonzero(self.depths[1:] <= levels).tolist()


@lru_cache(maxsize=1024)
def shape_of(parents: Parents) -> Shape:
    """The tables of one tree."""
    columns = len(parents) + 1
    depths = np.zeros(columns, dtype=np.int64)
    ancestors = np.eye(columns, dtype=bool)
    below: list[list[int]] = [[] for _ in range(columns)]
    for node, parent in enumerate(parents):
        column = node + 1
        depths[column] = depths[parent + 1] + 1
        ancestors[column] |= ancestors[parent + 1]
        below[parent + 1].append(column)
    children = np.zeros((columns, max(1, *map(len, below))), dtype=np.int64)
    for column, found in enumerate(below):
        children[column, : len(found)] = found
    return Shape(depths, ancestors, children, np.asarray(parents, dtype=np.int64) + 1)


@dataclass(frozen=True)
class TreePass(Buffers):
    """Where the tokens of one pass stand in their rows' trees, on the device.

    starts [B]: slot and position of each row's newest token, where its *region* of R slots begins; offsets [B, S]:
    slot of each fed token, counted from there; depths [B, R]: depth of the token that each slot of the region holds;
    sees [B, S, R]: which slots of the region a fed token attends to, none for padding.
    """

    starts: Tensor
    offsets: Tensor
    depths: Tensor
    sees: Tensor

    @property
    def region(self) -> int:
        return self.depths.shape[1]

    def widened(self, region: int) -> TreePass:
        """The same pass with regions of `region` >= R slots; the further ones hold nothing that is seen."""
        more = region - self.region
        if more == 0:
            return self
        pad = torch.nn.functional.pad
        return TreePass(self.starts, self.offsets, pad(self.depths, (0, more)), pad(self.sees, (0, more)))

    def look(self, positions: Tensor, kv_len: int, groups: int) -> tuple[Tensor, Tensor]:
        """(age, seen), each [B, G * S, kv_len]: how many positions a query is ahead of a slot, and whether it may
        attend to it. positions [B, S]. Padding sees slot 0, because a softmax over nothing is NaN."""
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


def tree_pass(
    shapes: Sequence[Shape], fed: Sequence[Columns], width: int, starts: Sequence[int], device: torch.device
) -> TreePass:
    """The pass that feeds the ascending columns `fed[b]` of row b's tree, padded to `width` tokens."""
    region = max((columns[-1] + 1 for columns in fed if len(columns)), default=1)
    kinds = {key: i for i, key in enumerate(dict.fromkeys(zip(map(id, shapes), fed, strict=True)))}
    of_row = [kinds[key] for key in zip(map(id, shapes), fed, strict=True)]
    offsets = np.zeros((len(kinds), width), dtype=np.int64)
    depths = np.zeros((len(kinds), region), dtype=np.int64)
    sees = np.zeros((len(kinds), width, region), dtype=bool)
    for kind, shape, columns in zip(of_row, shapes, fed, strict=True):
        held = min(len(shape.depths), region)
        offsets[kind, : len(columns)] = columns
        depths[kind, :held] = shape.depths[:held]
        sees[kind, : len(columns), :held] = shape.ancestors[list(columns), :held]
    return TreePass(
        array_on(np.asarray(starts, dtype=np.int64), device),
        array_on(offsets[of_row], device),
        array_on(depths[of_row], device),
        array_on(sees[of_row], device),
    )


def siblings(shapes: Sequence[Shape]) -> int:
    """Most children that a column of any tree has."""
    return max(shape.children.shape[1] for shape in shapes)


@dataclass(frozen=True)
class TreeLayout(Buffers):
    """What acceptance knows of the rows' trees, on the device: S columns a row, as fed.

    depths [B, S]; children [B, S, C]: columns of a column's children in order of proposal, 0 = none (column S, one past
    the end, is the last token of a chain that fills its pass: tested, not fed); tested_at [B, S]: the column whose law
    tests node s; levels: the greatest depth of any row.
    """

    depths: Tensor
    children: Tensor
    tested_at: Tensor
    levels: int

    @staticmethod
    def of(shapes: Sequence[Shape], width: int, device: torch.device, most: int = 0) -> TreeLayout:
        """The layout of a pass of `width` columns with room for `most` children of a column, or as many as there are; a
        row without a draft has the tree of no nodes."""
        kinds = {key: i for i, key in enumerate(dict.fromkeys(map(id, shapes)))}
        of_row = [kinds[id(shape)] for shape in shapes]
        most = max(most, siblings(shapes))
        depths = np.zeros((len(kinds), width), dtype=np.int64)
        children = np.zeros((len(kinds), width, most), dtype=np.int64)
        tested_at = np.zeros((len(kinds), width), dtype=np.int64)
        for kind, shape in zip(of_row, shapes, strict=True):
            fed, nodes = min(len(shape.depths), width), min(len(shape.tested_at), width)
            depths[kind, :fed] = shape.depths[:fed]
            children[kind, :fed, : shape.children.shape[1]] = shape.children[:fed]
            tested_at[kind, :nodes] = shape.tested_at[:nodes]
        levels = max(shape.levels for shape in shapes)
        return TreeLayout(
            array_on(depths[of_row], device),
            array_on(children[of_row], device),
            array_on(tested_at[of_row], device),
            levels,
        )


def moves(row: int, columns: Sequence[int], start: int) -> list[tuple[int, int, int]]:
    """(row, from slot, to slot) for each column of an accepted path that is not where a chain would have it. `start`:
    slot of column 0; columns: without column 0."""
    return [(row, start + column, start + 1 + i) for i, column in enumerate(columns) if column != i + 1]
