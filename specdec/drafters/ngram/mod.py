"""ngram-mod: one big hash table from n-grams to the token that followed.

Source: llama.cpp `ngram-mod`, draft for draft. A draft is made token by token: look up the last n tokens, append what
the table says, look up again. Slots hold no key, so two n-grams with one slot overwrite each other, and a wrong token
may be proposed: the target rejects it.

Upstream has one table for all rows. Here each row of a call has its own, unless `shared` is on: then rows draft from
what the others wrote, and under `leviathan` a row's text depends on them (see drafters/ngram/parity.py).

Upstream's oddities are kept, and each has a switch (see drafters/ngram/parity.py):
- `fix_wipe`: after five rounds in a row with less than a quarter of a draft accepted, upstream empties the table, for
  all rows. Fixed: only what this row wrote goes, unless it was overwritten.
- `fix_occupancy`: when a new prompt fills more than a quarter of the table, upstream empties it, the new prompt
  included. Fixed: the prompt is entered again.

Cost: a table is 16 MiB at most (int32; only what is written takes memory); a row is entered with a lag of up to 32
tokens, and a draft is one table look-up per token.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import numpy as np

from specdec.drafters.base import DraftContext, DraftRequest, Tokens, as_array
from specdec.drafters.ngram import hashing
from specdec.drafters.ngram.parity import MOST, ParityDrafter
from specdec.drafters.options import switch, whole
from specdec.errors import SettingWarning

LAG = 32  # tokens of new text before it is entered
FULLEST = 0.25
LOW_ACCEPTANCE, MOST_LOW_ROUNDS = 0.25, 5
_MASK = (1 << 64) - 1


class Pool:
    """The table. Slots hold token + 1, so that memory that was never touched means empty and costs nothing."""

    def __init__(self, size: int):
        self.size = size
        self.clear()

    def clear(self) -> None:
        self.table = np.zeros(self.size, dtype=np.int32)
        self.used = 0

    def enter(self, hashes: np.ndarray, following: np.ndarray) -> np.ndarray:
        """Write what followed each n-gram, the latest winning; returns the slots."""
        slots = (hashes % np.uint64(self.size)).astype(np.int64)
        self.used += len(np.unique(slots[self.table[slots] == 0]))
        self.table[slots] = following + 1
        return slots

    def forget(self, slots: np.ndarray, following: np.ndarray) -> None:
        """Empty the slots that still hold what was written."""
        mine = np.unique(slots[self.table[slots] == following + 1])
        self.table[mine] = 0
        self.used -= len(mine)


@dataclass
class RowState:
    """What is known of a row.

    pool: its own, or the one of all rows
    entered: the first position whose n-gram is not in the pool
    drafted: tokens of the last draft
    low: consecutive rounds with little accepted
    written: (slots, tokens) entered by this row, kept for `fix_wipe` only
    """

    pool: Pool
    entered: int = 0
    drafted: int = 0
    low: int = 0
    written: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)


@dataclass
class NgramMod(ParityDrafter):
    """One table per row, or with `shared` for all rows.

    n_match: tokens to match
    n_min, n_max: fewest and most tokens to propose
    table_size: slots
    parity, fix_...: llama.cpp's oddities
    Raises SpecdecError for parameters out of range; warns of an n_match below 16, as upstream, and of an n_max below
    n_min, as an axis k makes it.
    """

    n_match: int = whole(24, most=MOST)
    n_min: int = whole(48, 0, MOST)
    n_max: int = whole(64, 0, MOST)
    table_size: int = whole(4_194_304)
    parity: bool = switch(True)
    fix_wipe: bool | None = switch(None)
    fix_occupancy: bool | None = switch(None)
    shared: bool = switch(False)
    name: str = field(init=False, default="ngram-mod")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_match < 16:
            warnings.warn(f"ngram-mod: n_match={self.n_match} is below 16: many false hits", stacklevel=3)
        if 0 < self.n_max < self.n_min:
            message = (
                f"ngram-mod: n_max={self.n_max} is below n_min={self.n_min}: only drafts of exactly {self.n_max} "
                f"tokens are proposed; set n_min to {self.n_max} or less"
            )
            warnings.warn(message, SettingWarning, stacklevel=3)
        self._weights = hashing.powers(hashing.MOD_MULTIPLIER, self.n_match)
        self._pool = Pool(self.table_size)

    def fresh(self, context: DraftContext) -> NgramMod:
        made: NgramMod = super().fresh(context)
        before = self.inherited(context)
        made._pool = before._pool if before is not None and not made._separate else Pool(self.table_size)
        return made

    @property
    def _pools(self) -> list[Pool]:
        return [state.pool for state in self._rows.values()] if self._separate else [self._pool]

    @property
    def used(self) -> int:
        """Slots of all pools that hold something."""
        return sum(pool.used for pool in self._pools)

    @property
    def nbytes(self) -> int:
        """Most bytes of all pools: only slots that were written take memory."""
        return sum(pool.table.nbytes for pool in self._pools)

    def begin(self, row: int, prompt: Tokens) -> None:
        if self._separate:
            self._rows.pop(row, None)
        state, tokens = self._row(row), as_array(prompt)
        state.entered = state.drafted = 0
        if len(tokens) < self.n_match:
            return
        self._enter(state, tokens)
        if state.pool.used / self.table_size > FULLEST:
            state.pool.clear()
            if self.fix_occupancy:
                for other in self._rows.values():
                    if other.pool is state.pool:
                        other.written.clear()
                state.entered = 0
                self._enter(state, tokens)

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        state = self._rows.get(row)
        if is_other or state is None or state.drafted == 0:
            return
        if n_accepted / state.drafted >= LOW_ACCEPTANCE:
            state.low = 0
            return
        state.low += 1
        if state.low < MOST_LOW_ROUNDS:
            return
        state.low = state.entered = 0
        if not self.fix_wipe:
            state.pool.clear()
            return
        for slots, following in state.written:
            state.pool.forget(slots, following)
        state.written.clear()

    def _row(self, row: int) -> RowState:
        if row not in self._rows:
            self._rows[row] = RowState(Pool(self.table_size) if self._separate else self._pool)
        return self._rows[row]

    def _enter(self, state: RowState, tokens: np.ndarray) -> None:
        """Enter every n-gram of the row that a token follows and that is not entered yet."""
        n = self.n_match
        following = tokens[state.entered + n :]
        slots = state.pool.enter(hashing.hash_windows(tokens[state.entered : -1], self._weights), following)
        if self.fix_wipe:
            state.written.append((slots.astype(np.int32), following.astype(np.int32)))
        state.entered = len(tokens) - n

    def _propose(self, request: DraftRequest) -> list[int]:
        tokens, n = as_array(request.tokens), self.n_match
        state = self._row(request.row)
        state.drafted = 0
        if len(tokens) < n:
            return []
        if state.entered + LAG < len(tokens):
            self._enter(state, tokens)
        drafted = self._follow(state.pool, hashing.newest_ngram(request, tokens, n))
        state.drafted = len(drafted)
        return drafted

    def _follow(self, pool: Pool, ngram: np.ndarray) -> list[int]:
        """Look up what comes after the n-gram, token by token."""
        table, size, oldest = pool.table, self.table_size, int(self._weights[0])
        window = ngram.tolist()
        h = int(ngram.astype(np.uint64) @ self._weights)
        for k in range(self.n_max):
            token = int(table[h % size]) - 1
            if token < 0:
                return [] if k < self.n_min else window[self.n_match :]
            h = ((h - window[k] * oldest) * hashing.MOD_MULTIPLIER + token) & _MASK
            window.append(token)
        return window[self.n_match :]
