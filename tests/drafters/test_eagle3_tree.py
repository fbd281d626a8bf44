"""The dynamic tree against a slow oracle in plain loops, and the passes that grow it against one sequence a node."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from specdec.drafters.best_tree import Frontier
from specdec.drafters.eagle3 import EagleHead, Tree, TreePasses, TreeSize, grow
from specdec.errors import SpecdecError
from specdec.models.attention import RAGGED, MaskBuilder
from tests.helpers.eagle3 import Rows, from_scratch, random_head


@dataclass
class Node:
    token: int
    parent: int  # among all candidates, -1 = the newest token
    score: Tensor  # float32, so that sums round as they do in tensors


def slow_tree(tables: list[Tensor], size: TreeSize) -> tuple[list[int], list[int]]:
    """Tokens and parents of one row. `tables[l]` [K, V]: log-probabilities after the nodes of frontier l (0 = the
    newest token alone)."""

    def best(scores: list[Tensor]) -> list[int]:
        return torch.stack(scores).topk(size.top_k).indices.tolist()

    found = [Node(t, -1, tables[0][0, t]) for t in best(list(tables[0][0]))]
    frontier = list(range(size.top_k))
    for level in range(1, size.depth + 1):
        first = len(found)
        for place, node in enumerate(frontier):
            row = tables[level][place]
            found += [Node(t, node, found[node].score + row[t]) for t in best(list(row))]
        frontier = [first + i for i in best([node.score for node in found[first:]])]
    order = sorted(range(len(found)), key=lambda i: (-float(found[i].score), i))
    chosen = sorted(order[: size.nodes])
    number = {-1: -1} | {candidate: i for i, candidate in enumerate(chosen)}
    return [found[i].token for i in chosen], [number[found[i].parent] for i in chosen]


def grown(tables: list[Tensor], size: TreeSize) -> Tree:
    """The same of tables [B, K, V]."""
    return grow(tables[0][:, 0], size, lambda level, frontier: tables[level])


def tables(seed: int, batch: int, size: TreeSize, vocab: int, step: float = 0.0) -> list[Tensor]:
    """Random log-probabilities; step > 0: rounded to its multiples, so that many are equal."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(size.depth + 1):
        logits = 2 * torch.randn((batch, size.top_k, vocab), generator=rng)
        log_probs = logits.log_softmax(-1)
        made.append((log_probs / step).round() * step if step else log_probs)
    return made


@pytest.mark.parametrize(
    "size", [TreeSize(4, 3, 11), TreeSize(1, 5, 6), TreeSize(3, 0, 2), TreeSize(), TreeSize(6, 2, 70)]
)
@pytest.mark.parametrize("step", [0.0, 0.5, 100.0])
def test_trees_equal_the_slow_oracle(size: TreeSize, step: float) -> None:
    for seed in range(5):
        given = tables(seed, 3, size, 12, step)
        tree = grown(given, size)
        assert tree.tokens.shape == tree.parents.shape == (3, size.nodes)
        for row in range(3):
            tokens, parents = slow_tree([t[row] for t in given], size)
            assert tree.tokens[row].tolist() == tokens
            assert tree.parents[row].tolist() == parents


@pytest.mark.parametrize("broken", ["certain", "impossible", "nan"])
def test_trees_are_connected_whatever_the_head_says(broken: str) -> None:
    """Log-probabilities of 0 give a child its parent's score: it must not be kept in its parent's place."""
    size = TreeSize(4, 6, 20)
    for seed in range(20):
        given = tables(seed, 2, size, 9)
        for level in given:
            level[..., 3] = 0.0 if broken == "certain" else level[..., 3]
            level[torch.rand(level.shape) < 0.7] = {"certain": -50.0, "impossible": -torch.inf, "nan": torch.nan}[
                broken
            ]
        tree = grown(given, size)
        places = torch.arange(size.nodes)
        assert ((tree.parents >= -1) & (tree.parents < places)).all()
        above = tree.scores.gather(1, tree.parents.clamp(min=0)).where(tree.parents >= 0, torch.tensor(0.0))
        assert (tree.scores <= above).all()


def test_siblings_come_best_first() -> None:
    given = tables(0, 4, TreeSize(5, 3, 30), 20)
    tree = grown(given, TreeSize(5, 3, 30))
    for row in range(4):
        for parent in set(tree.parents[row].tolist()):
            scores = tree.scores[row][tree.parents[row] == parent]
            assert (scores.diff() <= 0).all()


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (TreeSize(4, 1, 21), "have 20 candidates, fewer than the 21 nodes"),
        (TreeSize(13, 1, 5), "top_k=13 is more than the 12 tokens"),
        (TreeSize(0, 1, 5), "needs top_k >= 1"),
        (TreeSize(4, 99, 512), "more than 511 nodes"),
    ],
)
def test_sizes_that_cannot_be_grown_are_refused(size: TreeSize, words: str) -> None:
    with pytest.raises(SpecdecError, match=words):
        size.check(12)


def text(head: EagleHead, seed: int, entries: int) -> tuple[Tensor, Tensor]:
    """Embeddings and features of a row's entries, [1, S, H] both."""
    rng = torch.Generator().manual_seed(seed)
    shape = (1, entries, head.config.hidden_size)
    return torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)


class Recorded:
    """The passes, and the frontiers that they were given."""

    def __init__(self, passes: TreePasses):
        self.passes, self.frontiers, self.found = passes, [], []

    frontiers: list[Frontier]
    found: list[Tensor]

    def __call__(self, level: int, frontier: Frontier) -> Tensor:
        self.frontiers.append(frontier)
        self.found.append(self.passes(level, frontier))
        return self.found[-1]


@pytest.mark.parametrize("changes", [{}, {"norm_output": True, "num_hidden_layers": 2}, {"num_key_value_heads": 4}])
def test_each_node_sees_its_own_path(changes: dict[str, object]) -> None:
    """Ragged rows, one of which takes no part: log-probabilities at every evaluated node equal those of its path alone,
    fed as a chain."""
    head = random_head(5, **changes).double()  # a head that is fed its own outputs enlarges float32's rounding
    size, entries = TreeSize(3, 3, 20), [7, 0, 4]
    rows = Rows(head, 3, max(entries) + size.slots)
    width = max(entries)
    texts = [tuple(part.double() for part in text(head, row, width)) for row in range(3)]
    fed = [torch.cat([t[i] for t in texts]) for i in (0, 1)]
    logits, features = rows.feed(fed[0], fed[1], [0, 0, 0], entries)
    last = [max(n - 1, 0) for n in entries]
    passes = TreePasses(
        head, MaskBuilder(head.config, RAGGED, torch.float64), rows.cache, size.widths, rows.cache.capacity
    )
    passes.start(features[range(3), last], torch.tensor(entries))
    recorded = Recorded(passes)
    grow(logits[range(3), last].log_softmax(-1), size, recorded)
    for row in (0, 2):
        paths: list[list[int]] = [[]]
        for level, frontier in enumerate(recorded.frontiers):
            origin, tokens = frontier.origin[row].tolist(), frontier.tokens[row].tolist()
            paths = [[*paths[o], t] for o, t in zip(origin, tokens, strict=True)]
            for place, path in enumerate(paths):
                expected = along(head, texts[row], entries[row], path)
                assert torch.allclose(recorded.found[level][row, place], expected.float(), atol=1e-5)


def along(head: EagleHead, given: tuple[Tensor, Tensor], entries: int, path: list[int]) -> Tensor:
    """Log-probabilities after a row's entries and a path of draft ids, computed anew for each token of the path."""
    embeddings, features = (part[:, :entries] for part in given)
    logits, out = from_scratch(head, embeddings, features)
    for token in path:
        # What was fed before stays as it was: the head's own outputs are appended, one a step.
        embeddings = torch.cat([embeddings, head.embed(head.to_target(torch.tensor([[token]])))], dim=1)
        features = torch.cat([features, out[:, -1:]], dim=1)
        logits, out = from_scratch(head, embeddings, features)
    return logits[0, -1].log_softmax(-1)
