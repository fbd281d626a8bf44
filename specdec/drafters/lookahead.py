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

Cost: (guesses + window) * (ngram - 1) - 1 nodes a pass, and no host read. Memory: 8 * ngram bytes an n-gram.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.config import check_whole
from specdec.device.transfer import array_on, to_device
from specdec.drafters.base import MOST_NODES, Draft, DraftContext, Drafter, DraftRequest, Tokens, as_array
from specdec.errors import SpecdecError
from specdec.models.runner import PassOutput
from specdec.models.trees import MISSING

EMPTY = -1  # in the pool: no n-gram


@dataclass
class Lookahead(Drafter):
    """Verifies n-grams and runs a Jacobi window in the same pass. Raises SpecdecError for parameters out of range.

    window: columns, W
    ngram: tokens of an n-gram, N
    guesses: n-grams verified at once, G
    pool: n-grams kept of a row
    """

    window: int = 15
    ngram: int = 5
    guesses: int = 15
    pool: int = 4096
    name: str = field(init=False, default="lookahead")
    runs_a_model = False
    makes_trees = True
    observed_layers = ()  # logits alone

    _pool: Tensor = field(init=False, repr=False, compare=False)  # [B, pool, N]
    _window: Tensor = field(init=False, repr=False, compare=False)  # [B, N - 1, W]; level 0 has no last column
    _vocab_size: int = field(init=False, repr=False, compare=False)
    _drafted: dict[int, int] = field(init=False, repr=False, compare=False, default_factory=dict)  # row -> open nodes
    _made: dict[int, int] = field(init=False, repr=False, compare=False, default_factory=dict)  # row -> levels so far

    def __post_init__(self) -> None:
        for name, least in (("window", 2), ("ngram", 3), ("guesses", 1), ("pool", 1)):
            check_whole(f"lookahead: {name}", getattr(self, name), least)
        if self.tree_nodes > MOST_NODES:
            nodes = f"{self.tree_nodes} nodes a pass"
            raise SpecdecError(f"lookahead: {nodes} are above the limit of {MOST_NODES}: ask for fewer")
        if self.pool < self.window:
            raise SpecdecError(f"lookahead: pool={self.pool} cannot hold the n-grams of window={self.window} columns")

    @property
    def tree_nodes(self) -> int:
        return (self.guesses + self.window) * (self.ngram - 1) - 1

    @property
    def depth(self) -> int:
        """Levels of the tree with its window."""
        return self.window + self.ngram - 3

    def fresh(self, context: DraftContext) -> Lookahead:
        if context.target is None:
            raise SpecdecError("lookahead reads what a decoder's target computes: use it in a SpeculativeDecoder")
        made: Lookahead = super().fresh(context)
        size, device = (context.batch, self.pool, self.ngram), context.target.device
        made._pool = torch.full(size, EMPTY, dtype=torch.int64, device=device)
        made._window = torch.zeros((context.batch, self.ngram - 1, self.window), dtype=torch.int64, device=device)
        made._vocab_size, made._drafted, made._made = context.vocab_size, {}, {}
        return made

    def begin(self, row: int, prompt: Tokens) -> None:
        """Fill the pool with the prompt's n-grams and the window with its tokens."""
        ids = as_array(prompt)
        self._pool[row], self._window[row], self._made[row] = EMPTY, 0, 0
        grams = [tuple(ids[i : i + self.ngram].tolist()) for i in range(len(ids) - self.ngram, -1, -1)]
        newest = list(dict.fromkeys(grams))[: self.pool]
        if newest:
            self._pool[row, self.pool - len(newest) :] = to_device(newest[::-1], self._pool.device)
        if len(ids):
            last = ids[::-1].repeat(-(-self._window[row].numel() // len(ids)))[: self._window[row].numel()]
            self._window[row] = array_on(last.copy(), self._pool.device).view_as(self._window[row])

    def observe(self, output: PassOutput) -> None:
        """Take the window's next level from the pass that verified it, and its n-grams into the pool."""
        if not self._drafted or output.logits.shape[1] != output.tokens.shape[1]:
            return
        drafted, self._drafted = self._drafted, {}
        counts = {output.first_row + b: n for b, n in enumerate(output.counts)}
        rows = [row for row, nodes in drafted.items() if nodes == self.tree_nodes and counts.get(row) == nodes + 1]
        if not rows:
            return
        at = to_device(rows, output.tokens.device)
        # The last level's columns are the last of the pass that are real.
        logits = output.logits[at - output.first_row, 1 + self.tree_nodes - self.window : 1 + self.tree_nodes]
        made = logits[..., : self._vocab_size].float().nan_to_num(nan=float("-inf")).argmax(dim=-1)  # [n, W]
        newest = output.tokens[at - output.first_row, :1]
        old = self._window[at]
        first = torch.cat([newest, old[:, 0, :-1]], dim=1)
        grams = torch.stack([first, *old[:, 1:].unbind(1), made], dim=-1)  # [n, W, N]
        self._window[at] = torch.cat([old[:, 1:].roll(-1, -1)[:, :1], old[:, 2:], made[:, None]], dim=1)
        for row in rows:
            self._made[row] += 1
        # A column holds an n-gram of the target's own only once the target has made every level.
        full = [i for i, row in enumerate(rows) if self._made[row] > self.ngram - 2]
        self._keep([rows[i] for i in full], grams[full])

    def _oldest(self, row: int) -> int:
        """Return where the row's oldest n-grams are; what follows is newer, to the place before it."""
        return max(0, self._made[row] - (self.ngram - 2)) * self.window % self.pool

    def _keep(self, rows: Sequence[int], grams: Tensor) -> None:
        """Put n-grams [n, W, N] into their rows' pools, in place of the oldest; known ones become newest."""
        if not rows:
            return
        later = (grams[:, :, None] == grams[:, None]).all(dim=-1).triu(1).any(dim=-1)  # the last of equal ones stays
        grams = grams.masked_fill(later[..., None], EMPTY)
        at, pool = to_device(rows, grams.device), self._pool[list(rows)]
        known = (pool[:, :, None] == grams[:, None]).all(dim=-1).any(dim=-1)
        pool = pool.masked_fill(known[..., None], EMPTY)
        places = [[(self._oldest(row) - 1 - i) % self.pool for i in range(self.window)][::-1] for row in rows]
        pool[torch.arange(len(rows), device=at.device)[:, None], to_device(places, at.device)] = grams
        self._pool[at] = pool

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        rows = [r.row for r in requests]
        at = to_device(rows, self._pool.device)
        newest, oldest = to_device([[int(r.last), self._oldest(r.row)] for r in requests], at.device).unbind(1)
        pooled = newest_after(self._pool[at], newest, oldest, self.guesses)
        tokens, parents = as_tree(pooled)
        columns, above = self._branch(tokens.shape[1])
        tokens = torch.cat([tokens, self._window[at].flatten(1)[:, columns]], dim=1)
        parents = torch.cat([parents, above.expand(len(rows), -1)], dim=1)
        drafts = []
        for i, r in enumerate(requests):
            room = r.limit(self.depth)
            nodes = self.tree_nodes if room == self.depth else self.guesses * min(room, self.ngram - 1)
            self._drafted[r.row] = nodes
            made = Draft(tokens[i, :nodes], parents[i, :nodes], None, self.name, None, room, self.guesses + 2)
            drafts.append(made)
        return drafts

    def _branch(self, first: int) -> tuple[Tensor, Tensor]:
        """Return the places of the window's tokens in its flattened table, and their parents from node `first` on."""
        width, places = self.window, [i for i in range(self.window * (self.ngram - 1)) if i != self.window - 1]
        node = {place: first + i for i, place in enumerate(places)}
        parents = []
        for place in places:
            level, column = divmod(place, width)
            # Level 0 is a chain; level 1 follows it, one column behind; the others follow the level before.
            above = place - width if level > 1 else column - 1 if column else None
            parents.append(-1 if above is None else node[above])
        return to_device(places, self._pool.device), to_device(parents, self._pool.device)


def newest_after(pool: Tensor, newest: Tensor, oldest: Tensor, guesses: int) -> Tensor:
    """Find what follows each row's newest token [n] in its newest n-grams: pool [n, P, N] -> [n, guesses, N - 1].

    oldest [n]: where a row's oldest n-gram is. `EMPTY` where there are fewer.
    """
    size = pool.shape[1]
    age = (torch.arange(size, device=pool.device) - oldest[:, None]) % size  # the newest has the highest
    score, found = torch.where(pool[:, :, 0] == newest[:, None], age, -1).topk(min(guesses, size))
    followers = pool[torch.arange(len(pool), device=pool.device)[:, None], found, 1:]
    followers = followers.masked_fill((score < 0)[..., None], EMPTY)
    return torch.nn.functional.pad(followers, (0, 0, 0, guesses - followers.shape[1]), value=EMPTY)


def as_tree(chains: Tensor) -> tuple[Tensor, Tensor]:
    """Merge chains that begin alike: [n, G, K] -> (tokens, parents), [n, K * G] each, level by level.

    A node that an earlier chain has is `MISSING`; what follows it follows the earlier one.
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
