"""lookahead: n-grams that the target itself makes by Jacobi iteration, in the pass that verifies them.

Source: Lookahead decoding (Fu et al. 2024). A window of guesses, `window` columns and `ngram` - 1 levels, takes part in
every verify pass. Level 0 is a chain of what may come after the newest token; a token of level 1 follows the one of
level 0 a column before it, which for column 0 is the newest token; one of a further level follows the level before in
its column. The target's best tokens after the last level are the next level, and the oldest falls out. What a column
then reads, from the token before it in level 0 to the target's new one, is an n-gram for the pool. The `guesses` newest
n-grams that begin with the newest token are verified as a tree.

Both branches are one tree of the engine: in the window too a token attends to the text and to its own path alone. So
window tokens are verified with the rest, and one that is right is accepted. Unlike the paper's, the pool begins with
the prompt's n-grams and forgets the oldest, and a row near its end drafts without a window.

Cost: (guesses + window) * (ngram - 1) - 1 nodes a pass, a copy of the pool, and no host read. Memory: 8 * ngram bytes
an n-gram.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specdec.config import check_whole
from specdec.device.transfer import array_on, to_device
from specdec.drafters.base import MOST_NODES, Draft, DraftContext, DraftRequest, TableDrafter, Tokens, as_array
from specdec.drafters.ngram_pool import NgramPool
from specdec.drafters.options import state, whole
from specdec.models.runner import PassOutput
from specdec.models.trees import merged_chains


@dataclass
class Lookahead(TableDrafter):
    """Verifies n-grams and runs a Jacobi window in the same pass. Raises SpecdecError for parameters out of range.

    window: columns, W
    ngram: tokens of an n-gram, N
    guesses: n-grams verified at once, G
    pool: n-grams kept of a row
    """

    window: int = whole(15, least=2)
    ngram: int = whole(5, least=3)
    guesses: int = whole(15)
    pool: int = whole(4096)
    name: str = field(init=False, default="lookahead")
    _pool: NgramPool = state()
    _window: Tensor = state()  # [B, N - 1, W]; level 0 has no last column
    _open: set[int] = state()  # rows whose drafts hold their window
    _made: list[int] = state()  # levels of each row's window that the target has made

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("lookahead: nodes a pass, (guesses + window) * (ngram - 1) - 1", self.tree_nodes, 1, MOST_NODES)
        check_whole("lookahead: pool", self.pool, self.window)  # it takes the n-grams of all columns at once

    @property
    def tree_nodes(self) -> int:
        return (self.guesses + self.window) * (self.ngram - 1) - 1

    @property
    def depth(self) -> int:
        """Levels of the tree with its window."""
        return self.window + self.ngram - 3

    def fresh(self, context: DraftContext) -> Lookahead:
        made: Lookahead = super().fresh(context)
        made._pool = NgramPool(context.batch, self.pool, self.ngram, made._device)
        made._window = made._pool.table.new_zeros((context.batch, self.ngram - 1, self.window))
        made._open, made._made = set(), [0] * context.batch
        return made

    def begin(self, row: int, prompt: Tokens) -> None:
        """Fill the pool with the prompt's n-grams and the window with its tokens."""
        ids, window = as_array(prompt), self._window[row]
        self._pool.begin(row, ids)
        self._made[row] = 0
        last = np.resize(ids[::-1] if len(ids) else [0], window.numel())
        window.copy_(array_on(last, self._device).view_as(window))

    def _learn(self, output: PassOutput) -> None:
        """Take the window's next level from the pass that verified it, and its n-grams into the pool."""
        opened, self._open, nodes = self._open, set(), self.tree_nodes
        counts = {output.first_row + b: n for b, n in enumerate(output.counts)}
        rows = [row for row in opened if counts.get(row) == nodes + 1]
        if not rows:
            return
        at = to_device(rows, self._device)
        here = at - output.first_row
        # The last level's columns are the last of the pass that are real.
        logits = output.logits[here, 1 + nodes - self.window : 1 + nodes]
        made, old = self._scores(logits).argmax(dim=-1), self._window[at]  # [n, W], [n, N - 1, W]
        first = torch.cat([output.tokens[here, :1], old[:, 0, :-1]], dim=1)
        grams = torch.stack([first, *old[:, 1:].unbind(1), made], dim=-1)  # [n, W, N]
        self._window[at] = torch.cat([old[:, 1:2].roll(-1, -1), old[:, 2:], made[:, None]], dim=1)
        # A column holds an n-gram of the target's own only once the target has made every level.
        full = to_device([i for i, row in enumerate(rows) if self._made[row] >= self.ngram - 2], self._device)
        self._pool.put(at[full], grams[full])
        for row in rows:
            self._made[row] += 1

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        at, newest = to_device([[r.row, int(r.last)] for r in requests], self._device).unbind(1)
        tokens, parents = merged_chains(self._pool.after(at, newest, self.guesses))
        window, above = self._window[at], self._above(tokens.shape[1])
        tokens = torch.cat([tokens, window[:, 0, :-1], window[:, 1:].flatten(1)], dim=1)
        parents = torch.cat([parents, above.expand(len(requests), -1)], dim=1)
        rooms = {r.row: r.limit(self.depth) for r in requests}
        self._open = {row for row, room in rooms.items() if room == self.depth}
        drafts = []
        for i, (row, room) in enumerate(rooms.items()):
            nodes = self.tree_nodes if row in self._open else self.guesses * min(room, self.ngram - 1)
            drafts.append(Draft(tokens[i, :nodes], parents[i, :nodes], None, self.name, None, room, self.guesses + 2))
        return drafts

    def _above(self, first: int) -> Tensor:
        """Return the parents of the window's nodes, which are numbered from `first` on."""
        # Level 0 is a chain; level 1 follows it, one column behind; the others follow the level before.
        ends = self.window - 2, self.window * (self.ngram - 2) - 1
        above = torch.cat([torch.arange(-1, end, device=self._device) for end in ends])  # -1 = the newest token
        return torch.where(above < 0, above, above + first)
