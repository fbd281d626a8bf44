"""Sizes of a call's dynamic trees under `nodes="auto"`: asked before trees are grown, told how they fared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from specdec.device.transfer import fetched
from specdec.drafters.base import DraftContext, DraftRequest
from specdec.drafters.best_tree import TreeSize
from specdec.drafters.tree_size import Size, TreeSizes

MOST = 63  # nodes: they fill a pass of 64 tokens
LEVELS = (1, 2, 3, 4, 6)  # and all: each is a recorded function
_CONTEXT_STEP = 128  # tokens: costs are looked up at its multiples


class AutoTrees:
    """The sizes of one call: one choice for all rows, which share a pass. Where the text depends on drafts, one for
    each row as if it were alone, and then always all levels."""

    def __init__(self, size: TreeSize, context: DraftContext, share: float):
        """size: the largest; share: part of a plain pass that a pass of the head takes."""
        assert context.costs is not None and context.shapes is not None
        self.size, self.costs, self.shapes, self.share = size, context.costs, context.shapes, share
        self.together = context.keeps_text
        self.batch = context.batch if self.together else 1
        most = min(size.nodes, context.nodes)
        self.sizes = [w - 1 for w in self.shapes.widths if 1 < w <= most + 1]
        whole = size.depth + 1
        self.levels = [*(n for n in LEVELS if n < whole), whole] if self.together else [whole]
        self.seconds = lru_cache(4096)(self._seconds)
        self.choosers: dict[int, TreeSizes] = {}
        self.chosen: dict[int, Size] = {}  # of the newest trees, by row
        self.accepted: dict[int, int] = {}
        self.curves: Any = None  # of the newest trees, on their way to the host

    def begin(self, row: int) -> None:
        """Forget a row: another text takes its slot."""
        self.chosen.pop(row, None)
        if not self.together:
            self.choosers.pop(row, None)

    def choose(self, requests: Sequence[DraftRequest]) -> dict[int, Size]:
        """(nodes, levels) of each row's tree; (0, 0) = none."""
        self._learn()
        groups = [list(requests)] if self.together else [[r] for r in requests]
        self.chosen = {}
        for group in groups:
            nodes, levels = self._of(group[0].row).choose(max(r.position for r in group) // _CONTEXT_STEP)
            self.chosen |= {r.row: (nodes, r.limit(levels)) for r in group}
        return self.chosen

    def grown(self, levels: int) -> TreeSize:
        """The tree that is grown, of which rows take the first nodes."""
        made = TreeSize(self.size.top_k, levels - 1, self.size.nodes)
        return TreeSize(made.top_k, made.depth, min(made.nodes, made.candidates))

    def keep(self, curve: Tensor) -> None:
        """Take the curves [B, levels, sizes] of the trees that were grown; they are read in the next round."""
        self.curves = fetched(curve)

    def accept(self, row: int, accepted: int) -> None:
        """Take how many nodes of the row's tree were accepted."""
        self.accepted[row] = accepted

    def _learn(self) -> None:
        if self.curves is not None:
            values, event = self.curves
            if event is not None:
                event.synchronize()  # it was there before the verdict of its round
            for row, size in self.chosen.items():
                if size[0]:
                    curve, chooser = values[row].tolist(), self._of(row)
                    chooser.see(curve)
                    if row in self.accepted:
                        chooser.learn(self.accepted[row], size, curve)
        self.curves, self.accepted = None, {}

    def _of(self, row: int) -> TreeSizes:
        place = 0 if self.together else row
        return self.choosers.setdefault(place, TreeSizes(self.sizes, self.levels, self.seconds))

    def _seconds(self, step: int, nodes: int, levels: int) -> float:
        """Seconds of a round at the context `step`: growing the tree, and the pass that verifies it."""

        def target(width: int) -> float:
            wide = self.shapes.width(width)
            return self.costs.seconds("target", self.batch, step * _CONTEXT_STEP, wide)

        if not nodes:
            return target(1) + self.costs.round
        head = target(1) + (levels - 1) * target(self.size.top_k)
        return target(1 + min(nodes, self.grown(levels).nodes)) + self.share * head + self.costs.round
