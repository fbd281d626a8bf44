"""Passes with random texts, as chains and as trees, and the slow way to apply processors to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specdec.sampling.prefixes import History

MakeProcessors = Callable[[int, Sequence[int]], Sequence[Any]]


def random_pass(make: MakeProcessors, vocab: int, seed: int, tree: bool = False, width: int = 6) -> History:
    """Rows of up to 23 known ids, one idle row, and paddings of several widths. A prompt ends somewhere in the known
    ids, or in the first round with the first fed id."""
    rng = random.Random(seed)
    lengths = [rng.choice((0, 1, 2, 9, 23)) for _ in range(4)]
    fed = torch.tensor([[rng.randrange(vocab) for _ in range(width)] for _ in range(5)])
    known, processors, counts, paths = [], [], [], []
    for row, n in enumerate(lengths):
        ids = [rng.randrange(vocab) for _ in range(n)]
        known.append(torch.tensor(ids, dtype=torch.int64))
        prompt = [*ids, int(fed[row, 0])]
        processors.append(make(row, prompt[: rng.choice((1, n, n + 1)) or 1]))
        counts.append(rng.randint(1, width))
        parents = [-1, *(rng.randrange(s) if tree else s - 1 for s in range(1, width))]
        ancestors: list[list[int]] = []
        for column, parent in enumerate(parents):
            ancestors.append([*(ancestors[parent] if parent >= 0 else []), column])
        paths.append(ancestors)
    return History([*known, None], fed, [*processors, None], [*counts, 0], [*paths, None] if tree else None)


def one_by_one(scores: torch.Tensor, history: History) -> torch.Tensor:
    """The oracle: every processor at every position, on that position's prefix alone."""
    out = scores.clone()
    for b, processors in enumerate(history.processors):
        for s in range(history.counts[b] if processors is not None else 0):
            prefix, row = history.prefix(b, s)[None], scores[b, s][None].clone()
            for processor in processors or ():
                row = processor(prefix, row)
            out[b, s] = row[0]
    return out


def differences(a: torch.Tensor, b: torch.Tensor, history: History) -> int:
    """How many scores of real positions are not the same number."""
    count = 0
    for row, n in enumerate(history.counts):
        x, y = a[row, :n], b[row, :n]
        count += int(((x != y) & ~(x.isnan() & y.isnan())).sum())
    return count
