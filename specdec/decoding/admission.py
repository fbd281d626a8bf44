"""How prompts get into slots: prefill, shared prefixes, and rows whose rotation changes.

A prefix that a prompt shares with a row of this call, or with one kept from an earlier call, is copied, not computed.
Drafters that observe the target must see every token fed, so with them nothing is copied within a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specdec.decoding.row import Row
from specdec.decoding.verification import Verifier
from specdec.device.clock import Clock
from specdec.drafters.base import RowSampling
from specdec.drafters.chain import Chain
from specdec.models.kv_cache import SHORT, KeptRows, prefix_groups

NO_TEXT = np.zeros(0, dtype=np.int64)  # the text of a slot that holds no row worth keeping


@dataclass
class Admission:
    """Moves rows into the slots of one call.

    slots [B]: the engine's rows by slot
    kept: rows of an earlier call
    """

    verifier: Verifier
    chain: Chain
    clock: Clock
    slots: list[Row | None]
    kept: KeptRows | None = None

    def __post_init__(self) -> None:
        self.runner, self.cache, self.shapes = self.verifier.runner, self.verifier.cache, self.verifier.shapes
        self.observed = self.chain.observed_layers or None  # prompts have no logits

    def start(self, rows: Mapping[int, Row]) -> None:
        """Put rows into their slots, in groups that are prefilled together."""
        for group in self._groups(rows):
            self._start({slot: rows[slot] for slot in group})

    def _groups(self, rows: Mapping[int, Row]) -> list[list[int]]:
        """Choose which slots are prefilled together, and in what order: shared prefixes are computed once."""
        alone = [[slot] for slot in rows]
        # When slots become free depends on the drafts. So in exact mode only the first prompts of a call go together.
        if not self.shapes.together or (self.shapes.exact and self.verifier.passes):
            return alone
        groups = prefix_groups({slot: row.tokens for slot, row in rows.items()}, SHORT, self._shared_step)
        return alone if self.shapes.exact and len(groups) > 1 else groups

    @property
    def _shared_step(self) -> int:
        """Prefixes are shared in multiples of this many tokens. Exact mode shares whole chunks: other chunks have other
        bits."""
        return self.shapes.widths[-1] if self.shapes.exact else 1

    def _start(self, rows: Mapping[int, Row]) -> None:
        with self.clock.phase("prefill"):
            # With thousands of short rows, looking for prefixes would take longer than prefill.
            shares = self.observed is None and any(len(row.tokens) >= SHORT for row in rows.values())
            held = self._held() if shares else None
            known = self._restore(rows, held)
            self._prefill({slot: row.tokens[known[slot] :].tolist() for slot, row in rows.items()}, known)
            for slot, row in rows.items():
                row.alone = len(rows) == 1
                self._set_sampling(slot, row)
                self.slots[slot] = row
        for slot, row in rows.items():
            self.chain.begin(slot, row.tokens)

    def _prefill(self, tokens: Mapping[int, Sequence[int]], starts: Mapping[int, int]) -> None:
        seen = self.chain.observe if self.observed is not None else None
        self.runner.prefill(self.cache, self.shapes, tokens, starts, seen, self.observed)

    def _set_sampling(self, slot: int, row: Row) -> None:
        sampling = self.verifier.sampling
        if sampling.row_processors is not None and self.verifier.texts is not None:
            row.processors = sampling.row_processors(row.index, row.prompt, row.stops.max_new_tokens)
            self.verifier.texts.start(slot, row.prompt, row.processors)
        row.sampling = RowSampling(sampling, self.verifier.rule.proposal, row.processors, self.verifier.texts)

    def rotate_anew(self, active: Sequence[tuple[int, Row]]) -> None:
        """Recompute rows whose rotation factors have changed with their length (models/rope.py)."""
        for slot, row in active if self.runner.rope is not None else ():
            if self.runner.follow(self.cache, slot, row.size - 1):
                with self.clock.phase("prefill"):
                    self._prefill({slot: row.tokens.tolist()}, {slot: 0})
                    row.alone = True

    def _restore(self, rows: Mapping[int, Row], held: KeptRows | None) -> dict[int, int]:
        """Copy the longest known prefix of each row's prompt into its slot and wipe the rest; returns their lengths."""
        known, copies = {}, [(kept, list[tuple[int, int, int]]()) for kept in (held, self.kept) if kept is not None]
        for slot, row in rows.items():
            self.slots[slot] = None  # from here on the slot's cache is not the old row's, also after an interrupt
            self.runner.follow(self.cache, slot, row.size - 1)
            best, known[slot] = None, 0
            for kept, chosen in copies:
                short = kept is held and len(row.tokens) < SHORT
                source, n = kept.longest(row.tokens[: self.cache.capacity], self.cache.is_long[slot])
                if n > known[slot] and not short:
                    best, known[slot] = (chosen, source), n
            if best is not None:
                best[0].append((best[1], slot, known[slot]))
        for kept, chosen in copies:  # those within this cache first: the others overwrite its slots
            self.cache.copy_rows_from(kept.cache, chosen)
        self.cache.wipe_rows(known)
        return known

    def _held(self) -> KeptRows:
        """Return the prompts in the slots: new ones may share a system prompt or a few-shot header with them."""

        def sound(other: Row) -> bool:
            return other.error is None and (other.alone or not self.shapes.exact)

        prompts = [row.ids[: len(row.prompt) - 1] if row and sound(row) else NO_TEXT for row in self.slots]
        return KeptRows(self.cache, prompts, self._shared_step)
