"""Fixed shapes of trees, as strategies take them in `tree=`: their notation, their nodes level by level.

A plan lists children: `[3, 2, 1]` gives the newest token three children, each of those two, and each of those one; a
list in place of a number gives one count for each node of the level above, in order (`[2, [3, 1]]`).
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec.config import check_whole
from specdec.drafters.base import MOST_NODES
from specdec.errors import SpecdecError
from specdec.models.trees import Parents, depths_of

Plan = tuple[int | tuple[int, ...], ...]


def parse_plan(value: Any, strategy: str = "draft-model") -> Plan:
    """Parse `[3, 2, 1]`, `[2, [3, 1]]` or "3x2x1" as a plan. Raises SpecdecError for anything else."""
    if isinstance(value, str):
        parts = value.split("x")
        value = [int(part) for part in parts] if all(part.isdecimal() for part in parts) else None
    elif isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, Sequence) or len(value) == 0:
        raise SpecdecError(f"{strategy}: tree must list children a level, such as [3, 2, 1] or '3x2x1'")
    plan: list[int | tuple[int, ...]] = []
    above, nodes = 1, 0
    for level in value:
        nodes += level * above if isinstance(level, int) else sum(c for c in level if isinstance(c, int))
        if nodes > MOST_NODES:
            raise SpecdecError(f"{strategy}: tree: more than {MOST_NODES} nodes, which is what a pass verifies")
        counts: list[Any] = [level] * above if isinstance(level, int) else [None]
        if isinstance(level, Sequence):
            counts = list(level)
        for count in counts:
            check_whole(f"{strategy}: tree: number of children", count, 1 if isinstance(level, int) else 0)
        if len(counts) != above or sum(counts) == 0:
            raise SpecdecError(f"{strategy}: tree: {level!r} does not fit a level of {above} nodes above it")
        plan.append(level if isinstance(level, int) else tuple(counts))
        above = sum(counts)
    return tuple(plan)


def plan_parents(plan: Plan) -> Parents:
    """Return the parents of a plan's nodes, level by level."""
    parents: list[int] = []
    above = [-1]
    for level in plan:
        counts = [level] * len(above) if isinstance(level, int) else list(level)
        new = [node for node, count in zip(above, counts, strict=True) for _ in range(count)]
        above = list(range(len(parents), len(parents) + len(new)))
        parents += new
    return tuple(parents)


def upper_levels(parents: Parents, depth: int) -> Parents:
    """Return the nodes of a plan's first `depth` levels."""
    return parents[: sum(d <= depth for d in depths_of(parents))]


class PlanLevel(NamedTuple):
    """One level of a plan, as it is drafted.

    fed: the nodes that get children here, -1 = the newest token
    origin: for each of these, the place of its parent among the nodes that were fed before
    counts: how many children each gets
    """

    fed: tuple[int, ...]
    origin: tuple[int, ...]
    counts: tuple[int, ...]


def plan_levels(parents: Sequence[int]) -> list[PlanLevel]:
    """Return the levels of a plan's nodes, which are numbered level by level."""
    depths, levels = depths_of(parents), list[PlanLevel]()
    for depth in range(1, max(depths, default=0) + 1):
        children = [parent for parent, d in zip(parents, depths, strict=True) if d == depth]
        fed = tuple(dict.fromkeys(children))
        origin = [levels[-1].fed.index(parents[node]) if node >= 0 else 0 for node in fed]
        levels.append(PlanLevel(fed, tuple(origin), tuple(map(children.count, fed))))
    return levels


def plan_of(parents: Sequence[int]) -> Plan:
    """Return the plan of nodes that are numbered level by level."""
    levels, depths = [], [0, *depths_of(parents)]
    for depth in range(max(depths)):
        above = [node - 1 for node, d in enumerate(depths) if d == depth]
        levels.append(tuple(list(parents).count(node) for node in above))
    return tuple(counts[0] if len(set(counts)) == 1 else counts for counts in levels)


def parse_opt(value: Any) -> int:
    """Return the nodes of "opt:16", "opt-16" or "opt16"; 0 for any other value of `tree`."""
    found = re.fullmatch(r"opt[:-]?(\d+)", value) if isinstance(value, str) else None
    return int(found[1]) if found else 0


# -- the best shape ----------------------------------------------------------------------------------------------------


def likeliest_paths(right: Sequence[float], nodes: int, depth: int) -> list[tuple[int, ...]]:
    """Return the `nodes` likeliest places of a tree whose k-th child is right with probability right[k], anywhere.

    A place is the ranks that lead to it. Level by level, at most `depth`; right: falling, in (0, 1)
    """
    chosen: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]] = [(-right[0], (0,))]
    while waiting and len(chosen) < nodes:
        negative, path = heapq.heappop(waiting)
        chosen.append(path)
        rank = path[-1]
        if rank + 1 < len(right):
            heapq.heappush(waiting, (negative / right[rank] * right[rank + 1], (*path[:-1], rank + 1)))
        if len(path) < depth:
            heapq.heappush(waiting, (negative * right[0], (*path, 0)))
    return sorted(chosen, key=lambda path: (len(path), path))


def best_plan(acceptance: np.ndarray, nodes: int) -> Parents:
    """Return the tree of at most `nodes` nodes with the most expected accepted tokens, numbered level by level.

    Sequoia's dynamic programme (Chen et al. 2024), with acceptance by depth as well as by rank. O(D C nodes^2).
    acceptance [D, C]: the chance that the child of rank j is the accepted one, at a node of depth d that was reached
    """
    depth, ranks = acceptance.shape
    below = np.zeros(nodes + 1)  # the best value of n nodes under a node of the level after
    choices: list[np.ndarray] = []
    for d in reversed(range(depth)):
        value, sizes = np.zeros(nodes + 1), np.zeros((ranks, nodes + 1), dtype=np.int64)
        for j in reversed(range(ranks)):  # value: of children j, j + 1, ...
            gain = acceptance[d, j] * (1.0 + below)  # [m]: of a child with m nodes under it
            longer = np.zeros(nodes + 1)
            for n in range(1, nodes + 1):
                totals = gain[:n] + value[n - 1 - np.arange(n)]
                m = int(totals.argmax())
                longer[n] = totals[m]
                sizes[j, n] = m + 1  # nodes of child j, itself included
            value = longer
        below = value
        choices.append(sizes)
    return _traced(choices[::-1], nodes)


def _traced(choices: Sequence[np.ndarray], nodes: int) -> Parents:
    """Read a tree from the sizes [C, nodes + 1] of children by depth: of child j where n nodes are left."""
    parents: list[int] = []
    level = [(-1, nodes)]
    for sizes in choices:
        following = []
        for node, left in level:
            for j in range(len(sizes)):
                if left == 0:
                    break
                parents.append(node)
                following.append((len(parents) - 1, int(sizes[j, left]) - 1))
                left -= int(sizes[j, left])
        level = following
    return tuple(parents)
