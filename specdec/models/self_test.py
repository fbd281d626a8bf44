"""The self-test of a loaded model: every kind of pass that the loop makes, against a plain forward over the texts.

Two texts with a shared prefix take the way of rows in a call. The first is prefilled; it is fed a tree with wrong
branches, while its neighbour is at positions far away; the accepted path is compacted; the shared prefix is copied;
then both rows get chunks of different lengths, and last one token each. All logits must be those of a plain forward.

A model is refused if its attention or positions do not go through the cache's interface (some ask the cache for its
length inside attention), or if rows depend on one another. If only trees are wrong, only trees are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.device.ambient import pinned
from specdec.device.memory import is_out_of_memory
from specdec.device.transfer import to_device
from specdec.errors import SpecdecError
from specdec.files.texts import first_line
from specdec.models.checkpoint import first_not_finite
from specdec.models.kv_cache import RaggedCache, alike
from specdec.models.quantised import is_quantised
from specdec.models.runner import UNBOUNDED, Runner, Shapes
from specdec.models.self_test_causes import cause, plain_cause
from specdec.models.trees import Parents, Paths, Tree, TreePass, chain_parents
from specdec.models.view import ModelView

LENGTH = 14  # tokens of a text
TAIL = 6  # those of them that are not prefilled
TREE = (-1, -1, 0, 1)  # a wrong branch before the right one: slots are not positions
PATH = (2, 4)  # the columns of the right branch
FAR = 1 << 17  # position of the row's neighbour, if the context is as long


@pinned()
def self_test(runner: Runner, role: str) -> None:
    """Raise SpecdecError for a model that is not supported; set `runner.tree_fault` if only trees are not."""
    kind = f"{role} ({runner.config.model_type})"
    test = _SelfTest(runner)
    try:
        expected = test.plain()
    except Exception as error:  # anything that a model trips over in its own code
        if is_out_of_memory(error):
            raise
        raise SpecdecError(f"{kind} is not supported: {plain_cause(runner)} ({_said(error)})") from error
    if bool(expected.isnan().any()):
        raise SpecdecError(f"{kind} is not supported: its logits are NaN{_not_finite(runner)}")
    if test.looks_ahead(expected):
        raise SpecdecError(f"{kind} is not supported: {cause(runner, test.first, expected[0], looks_ahead=True)}")
    if runner.recurrence is None:
        fault = test.fault(expected, tree=True, far=True)
        if fault is None:
            if role == "target":  # only its rounds move slots
                runner.pool.known = alike(test.layers)
            return
        if test.fault(expected, tree=True, far=False) is None:
            raise SpecdecError(
                f"{kind} is not supported: a row's logits depend on how long the rows beside it are ({fault})"
            )
    chains = test.fault(expected, tree=False, far=False)
    if chains is not None:
        raise SpecdecError(
            f"{kind} is not supported: {cause(runner, test.first, expected[0], looks_ahead=False)}; {chains}"
        )
    if runner.recurrence is None:
        runner.tree_fault = (
            f"{kind} cannot verify trees, since it takes positions from the order of its cache ({fault})"
        )


def _not_finite(runner: Runner) -> str:
    """Name the first parameter that holds NaN or infinity."""
    found = first_not_finite(runner.model.named_parameters())
    return "" if found is None else f": the checkpoint has NaN or infinity in {found[0]}; load it again, or another one"


class _SelfTest:
    """The texts, and the passes over them."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self.layers: list[Any] = []  # of the cache of the last passes
        self.precise = runner.dtype == torch.float32 and not is_quantised(runner.model)
        window = runner.masks.window
        self.length = min(window + TAIL if window is not None and window <= 64 else LENGTH, runner.context)
        self.length = max(self.length, min(LENGTH, runner.context))
        self.start = max(self.length - TAIL, 0)  # position of the first token that is not prefilled
        self.shared = max(self.start - 2, 0)
        ids = torch.randint(0, runner.vocab_size, (3, self.length), generator=torch.Generator().manual_seed(0))
        ids[1, : self.shared] = ids[0, : self.shared]
        self.first, self.second, self.wrong = ids.tolist()
        # A context that is not stated may still be the size of a table of positions.
        context = 2 * self.length if runner.context == UNBOUNDED else min(runner.context, FAR)
        self.far = max(0, context - len(TREE) - 1)

    def plain(self, n: int = 0) -> Tensor:
        """Compute the logits [2, N, V] of both texts by a plain forward; n > 0: [1, n, V] of one's first n tokens."""
        runner = self.runner
        # Eager is the only stock path that honours everything a model asks for (soft caps, sinks).
        view = ModelView(runner.model, "eager")
        with view.attending():
            ids = to_device([self.first[:n]] if n else [self.first, self.second], runner.device)
            return view.model(input_ids=ids, use_cache=False).logits.float()

    def looks_ahead(self, expected: Tensor) -> bool:
        """True if what follows the shared prefix changes its logits."""
        first, second = expected[:, : self.shared]
        return not _relative(first, second) < (1e-4 if self.precise else 0.02)

    def limit(self, expected: Tensor) -> float:
        """Return by how much passes may differ from a plain forward, relative to it.

        Kernels of quantised weights may compute in half precision, and in another way for one token than for several:
        such a model is held against itself. Faults give 0.29 and more (tests/models/test_faults_quantised.py).
        """
        if self.precise or self.runner.dtype != torch.float32:
            return 1e-3 if self.precise else 0.1
        noise = [_relative(self.plain(n)[0], expected[0, :n]) for n in (1, self.length - 1)]
        return max(0.01, min(0.1, 4 * max(noise)))

    def fault(self, expected: Tensor, tree: bool, far: bool) -> str | None:
        """Say what is wrong with the passes; None if nothing is.

        tree: feed a tree, else a wrong chain in its place
        far: with a neighbour at positions far away
        """
        try:
            found = self._passes(tree, far)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return f"a pass over a cache with a length for each row fails ({_said(error)})"
        limit = self.limit(expected)
        for row, position, logits in found:
            if not len(logits):
                continue
            wanted = expected[row, position : position + len(logits)]
            off = _relative(logits, wanted)
            if not off < limit:
                return (
                    "a pass over a cache with a length for each row differs from a plain forward (relative difference "
                    f"{off:.2g})"
                )
        return None

    def _passes(self, tree: bool, far: bool) -> list[tuple[int, int, Tensor]]:
        """Run the passes; returns (row, position, logits [n, V] from there on) of each."""
        runner, n, start = self.runner, self.length, self.start
        # In the model's own dtype also where calls keep keys and values in 8 bits: rounding would hide faults.
        cache = RaggedCache(runner.pool.n_layers, 2, n + len(TREE), runner.pool.recurrent)
        long = runner.rope is not None and n > runner.rope.switch
        for row in (0, 1):
            cache.set_long(row, long)
        runner.prefill(cache, self._shapes(n), {0: self.first[:start]}, {0: 0})
        branch = self._tree(cache, tree, far)
        cache.set_long(1, long)
        if runner.recurrence is not None:
            runner.prefill(cache, self._shapes(n), {1: self.second[: self.shared]}, {1: 0})
        elif self.shared:
            cache.copy_row_from(cache, 0, 1, self.shared)
        fed = [self.first[start + len(branch) : n - 1], self.second[self.shared : n - 1]]
        starts = [start + len(branch), self.shared]
        chunk = self._feed(cache, fed, starts) if any(fed) else torch.empty((2, 0, self.runner.vocab_size))
        last = self._feed(cache, [self.first[n - 1 :], self.second[n - 1 :]], [n - 1] * 2)
        self.layers = cache.layers
        chunks = [(row, starts[row], chunk[row, : len(ids)]) for row, ids in enumerate(fed)]
        return [(0, start, branch), *chunks, *((row, n - 1, last[row, :1]) for row in (0, 1))]

    def _tree(self, cache: RaggedCache, tree: bool, far: bool) -> Tensor:
        """Feed a tree, or a chain, whose first tokens are right; returns their logits [n, V]."""
        start, first, wrong = self.start, self.first, self.wrong
        if self.length < LENGTH:  # a context of a few tokens
            return torch.empty((0, self.runner.vocab_size))
        parents = TREE if tree else chain_parents(len(TREE))
        path = PATH if tree else (1, 2)
        ids = [first[start], *wrong[: len(TREE)]]
        for depth, column in enumerate(path):
            ids[column] = first[start + 1 + depth]
        if far:
            cache.set_long(1, self.runner.rope is not None and self.far >= self.runner.rope.switch)
        cache.begin_draft([0])
        out = self._feed(cache, [ids, wrong[: len(ids)] if far else []], [start, 0], parents, self.far if far else 0)
        nodes = [[column - 1 for column in path], [0] * len(path)]
        paths = Paths(*(to_device(numbers, self.runner.device) for numbers in ([start, 0], nodes, [len(path), 0])))
        cache.compact(*paths.moves(cache.capacity))
        cache.rewind({0: start + len(path)})
        return out[0, [0, *path]]

    def _feed(
        self,
        cache: RaggedCache,
        fed: Sequence[list[int]],
        starts: Sequence[int],
        parents: Parents | None = None,
        far: int = 0,
    ) -> Tensor:
        """Run one pass of both rows; returns logits [2, S, V].

        parents: both rows hold such a tree
        far: positions of the second row's tree, less its slots
        """
        runner, shapes = self.runner, self._shapes(cache.capacity)
        counts = [len(ids) for ids in fed]
        width = shapes.width(max(counts))
        tokens = to_device([ids + [0] * (width - len(ids)) for ids in fed], runner.device)
        where = None
        if parents is not None:
            tree = Tree.of_rows([parents, parents], width, runner.device)
            tree.depths[1] += far
            where = TreePass.of(tree, to_device(list(starts), runner.device), to_device(counts, runner.device))
        # As prefill, which is not compiled: these passes never come again.
        return runner.step(cache, shapes, tokens, starts, counts, keep=width, tree=where).logits

    def _shapes(self, capacity: int) -> Shapes:
        return Shapes.choose(self.runner.device, False, capacity)


def _said(error: Exception) -> str:
    """Return what a model has tripped over, without the sizes of tensors, which mean nothing to a user."""
    line = first_line(error)
    return type(error).__name__ if any(word in line.lower() for word in ("size", "shape", "dimension")) else line


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float().to(wanted.device) - wanted).norm() / wanted.norm().clamp(min=1e-6))
