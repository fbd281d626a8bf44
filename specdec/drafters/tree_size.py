"""Automatic tree size: how many nodes and levels a tree of best nodes has in this round; 0 = no tree.

Were q the target's distribution, the probabilities of a tree's paths would add up to the tokens that are accepted. So
the tree of the largest size says what every smaller one is worth: its *curve* holds the probability of the paths that
come to a level within the best n nodes. Curves of earlier rounds are averaged, each level is scaled by how often paths
really came there, and the size with the most expected tokens per second is taken, by automatic length's cost table.

A curve goes to the host after its round was launched, and is read in the next one: nobody waits for it. It follows from
the text, since best nodes are no samples; so a round's size is fixed by the text before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Size = tuple[int, int]  # nodes and levels
Curve = Sequence[Sequence[float]]  # [levels][sizes]

_RIGHT = 0.6  # prior: probability of the first node
_MISSED = 0.8  # prior: part of what a tree misses that one of twice as many nodes misses too
_MEMORY = 0.95  # weight of a curve after each further one
_PATHS = 0.98  # weight of a path after each further one
_WEIGHT = 8.0  # of the prior that paths come as far as their probabilities say, in paths
_PROBES = 0.02  # share of the time in which all levels are grown, to see what they are worth


@dataclass
class TreeSizes:
    """Chooses the size of trees, round by round.

    sizes: numbers of nodes, ascending
    levels: numbers of levels, ascending
    seconds: (context, nodes, levels) -> seconds of a round; 0 nodes = without a tree
    """

    sizes: Sequence[int]
    levels: Sequence[int]
    seconds: Callable[[int, int, int], float]
    curve: list[list[float]] = field(init=False)
    hits: list[float] = field(init=False)  # paths that came to each level
    expected: list[float] = field(init=False)  # and their probabilities, unscaled
    seen: list[int] = field(init=False)  # curves with each level
    saved: float = math.inf  # seconds that growing all levels may take; the first round does

    def __post_init__(self) -> None:
        misses = [(1 - _RIGHT) * _MISSED ** math.log2(size) for size in self.sizes]
        depths = range(1, self.levels[-1] + 1)
        self.curve = [[(1 - miss) ** d * (d <= n) for n, miss in zip(self.sizes, misses, strict=True)] for d in depths]
        self.hits, self.expected = [0.0] * len(depths), [0.0] * len(depths)
        self.seen = [0] * len(depths)

    def see(self, curve: Curve) -> None:
        """Average a round's curve with those before it; levels that were not grown are left as they were."""
        for level, new in enumerate(curve):
            self.seen[level] += 1
            share = max(1 - _MEMORY, 1 / (1 + self.seen[level]))  # the prior counts as one round
            self.curve[level] = [old + share * (value - old) for old, value in zip(self.curve[level], new, strict=True)]

    def learn(self, accepted: int, size: Size, curve: Curve) -> None:
        """Compare how far a path came in a tree with its curve."""
        place = self.sizes.index(size[0])
        for level in range(size[1]):
            self.hits[level] = _PATHS * self.hits[level] + (accepted > level)
            self.expected[level] = _PATHS * self.expected[level] + curve[level][place]

    def tokens(self) -> list[list[float]]:
        """Expected accepted tokens, [sizes][levels + 1]."""
        made = [[0.0] for _ in self.sizes]
        scale, before = 1.0, [1.0] * len(self.sizes)
        for row, hits, expected in zip(self.curve, self.hits, self.expected, strict=True):
            scale = (_WEIGHT * scale + hits) / (_WEIGHT + expected)
            before = [min(old, scale * value) for old, value in zip(before, row, strict=True)]
            for sums, value in zip(made, before, strict=True):
                sums.append(sums[-1] + value)
        return made

    def choose(self, context: int) -> Size:
        """The size with the most expected tokens per second."""
        best, rate = (0, 0), 1 / self.seconds(context, 0, 0)
        for size, tokens in zip(self.sizes, self.tokens(), strict=True):
            for levels in self.levels:
                if levels <= size and (1 + tokens[levels]) / self.seconds(context, size, levels) > rate:
                    best, rate = (size, levels), (1 + tokens[levels]) / self.seconds(context, size, levels)
        seconds, whole = self.seconds(context, *best), (max(best[0], self.sizes[0]), self.levels[-1])
        self.saved += _PROBES * seconds
        extra = self.seconds(context, *whole) - seconds
        if self.saved < extra:
            return best
        self.saved = 0.0
        return whole
