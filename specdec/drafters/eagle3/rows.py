"""The target's states as they are observed, row by row, and the head's cache that is kept up with them.

The target's states of a token become a *feature* (the head's `fc`) as soon as a pass shows them, and wait at the
token's position. Entry j of a row's cache goes with the token at position `base + j`: its feature, and the embedding
of the token after it. `base` is 0, unless the beginning of the text was never seen, because an earlier call had kept
its keys and values: then the head sees the text from there on.

Trimming is free, as for any `RaggedCache`: entries of drafted tokens are computed from the head's own output, are not
counted, and are overwritten by those of accepted tokens, from the target's states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.device.transfer import array_on, to_device
from specdec.drafters.base import DraftRequest, Tokens, as_array
from specdec.drafters.eagle3.head import EagleHead
from specdec.models.attention import RAGGED, MaskBuilder
from specdec.models.kv_cache import RaggedCache, common_prefix
from specdec.models.runner import PassOutput, Shapes

CATCH_UP = 16  # a longer gap is fed by itself; a shorter one in the pass whose logits are wanted


class HeadRows:
    """One call's rows. Made when the first pass is seen: only then are device and batch known for good."""

    def __init__(self, head: EagleHead, batch: int, capacity: int, drafted: int, device: torch.device):
        """drafted: most tokens that a round drafts."""
        self.head, self.batch, self.device = head, batch, device
        self.cache = RaggedCache(head.config.num_hidden_layers, batch, capacity + drafted)
        self.shapes = Shapes.choose(device, False, self.cache.capacity)
        self.dtype = head.fc.weight.dtype
        self.masks = MaskBuilder(head.config, RAGGED, self.dtype)
        self.features = torch.zeros((batch, capacity + 1, head.config.hidden_size), dtype=self.dtype, device=device)
        self.texts: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * batch
        self.base = [0] * batch  # position of the row's first entry
        self.end = [0] * batch  # features are known of the positions from `base` up to this one
        self.fed = [0] * batch  # entries in the cache that are the target's
        self.seen: list[list[tuple[int, int]]] = [[] for _ in range(batch)]  # positions observed since the last draft

    # -- what the target shows -------------------------------------------------------------------------------------

    def observe(self, output: PassOutput, states: Tensor) -> None:
        """Take over the states [B', S, 3 * H_t] of a pass."""
        last = self.features.shape[1] - 1  # padding is written there, and never read
        features = self.head.project(states)
        columns = torch.arange(features.shape[1], device=self.device)
        starts, counts = to_device([list(output.starts), list(output.counts)], self.device)
        where = torch.where(columns < counts[:, None], starts[:, None] + columns, last).clamp(max=last)
        rows = torch.arange(len(where), device=self.device)[:, None] + output.first_row
        self.features[rows, where] = features.to(self.dtype)
        for i, (start, count) in enumerate(zip(output.starts, output.counts, strict=True)):
            if count:
                self._note(output.first_row + i, start, start + count)

    def _note(self, row: int, start: int, end: int) -> None:
        self.seen[row].append((start, end))
        if not self.base[row] <= start <= self.end[row]:  # there is a gap before it, or another text begins
            self.base[row] = start
        self.fed[row] = min(self.fed[row], start - self.base[row])
        self.end[row] = end

    def begin(self, row: int, prompt: Tokens, before: HeadRows | None) -> None:
        """A row starts from a prompt whose states were just observed, but for a beginning that the target had kept:
        that is taken from the rows of the call before."""
        self.cache.wipe(row, 0)
        length, start = len(prompt), len(prompt)
        for first, end in reversed(self.seen[row]):
            if end != start:
                break
            start = first
        self.seen[row] = []
        self.base[row], self.end[row], self.fed[row] = start, length, 0
        if start and before is not None and before.holds(best := before.longest(prompt), prompt, start):
            self.features[row, :start] = before.features[best, :start]
            self.base[row] = 0

    def longest(self, prompt: Tokens) -> int:
        """The row whose text has most in common with a prompt."""
        shared = [common_prefix(text, as_array(prompt)) for text in self.texts]
        return max(range(len(shared)), key=shared.__getitem__)

    def holds(self, row: int, prompt: Tokens, length: int) -> bool:
        """Whether a row has the features of the first `length` tokens of a prompt, which the target has kept: what
        followed the row's last draft is known by the target alone."""
        text = self.texts[row]
        shared = common_prefix(text, as_array(prompt))
        known = self.end[row] if shared == len(text) else shared
        return self.base[row] == 0 and known >= length

    def entries(self, request: DraftRequest) -> int:
        """How many entries the row has: one for each token but the newest, as far as states are known. 0: none, or
        the states of its newest tokens are missing."""
        row, length = request.row, len(request.tokens)
        return length - self.base[row] if self.end[row] >= length > self.base[row] else 0

    # -- what is fed to the head -----------------------------------------------------------------------------------

    def catch_up(self, requests: Sequence[DraftRequest]) -> tuple[Tensor, Tensor, Tensor]:
        """Feed what the rows' texts have grown by. Returns the logits [B, V_d] and features [B, H] after the newest
        tokens, and how many entries each row has now, int64 [B], 0 = no part in this."""
        totals = {r.row: self.entries(r) for r in requests}
        ids: dict[int, np.ndarray] = {}
        for r in requests:
            self.seen[r.row] = []
            self.texts[r.row] = np.append(as_array(r.tokens), r.last)
            ids[r.row] = self.texts[r.row][self.base[r.row] + 1 :]  # entry j has token j + 1
        for row, total in totals.items():
            self.fed[row] = min(self.fed[row], total - 1)  # the newest entry is always wanted, and its logits with it
            if total - self.fed[row] > CATCH_UP:
                self._prefill(row, ids[row], total - 1)
        width = self.shapes.width(max(total - self.fed[row] for row, total in totals.items()))
        tokens = np.zeros((self.batch, width), dtype=np.int64)
        starts, counts = [0] * self.batch, [0] * self.batch
        for row, total in totals.items():
            new = ids[row][self.fed[row] : total]
            tokens[row, : len(new)] = new
            starts[row], counts[row] = self.fed[row], len(new)
            self.fed[row] = total
        logits, features = self._feed(slice(0, self.batch), array_on(tokens, self.device), starts, counts)
        rows = torch.arange(self.batch, device=self.device)
        newest = to_device([max(c - 1, 0) for c in counts], self.device)
        held = to_device([s + c for s, c in zip(starts, counts, strict=True)], self.device)
        return logits[rows, newest], features[rows, newest], held

    def _prefill(self, row: int, ids: np.ndarray, total: int) -> None:
        """Feed a row alone up to `total` entries, in wide passes."""
        widest = self.shapes.widths[-1]
        while self.fed[row] < total:
            new = ids[self.fed[row] : min(self.fed[row] + widest, total)]
            width = self.shapes.width(len(new))
            padded = np.zeros((1, width), dtype=np.int64)
            padded[0, : len(new)] = new
            self._feed(slice(row, row + 1), array_on(padded, self.device), [self.fed[row]], [len(new)])
            self.fed[row] += len(new)

    def _feed(
        self, rows: slice, ids: Tensor, starts: Sequence[int], counts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Entries from the target's states: ids [B', W] of their tokens, the slots from `starts` on."""
        first, counted = to_device([list(starts), list(counts)], self.device)
        base = to_device(self.base[rows], self.device)
        columns = torch.arange(ids.shape[1], device=self.device)
        real = columns < counted[:, None]
        slots = torch.where(real, first[:, None] + columns, self.cache.capacity)
        places = (base[:, None] + torch.where(real, slots, 0)).clamp(max=self.features.shape[1] - 1)
        numbers = torch.arange(rows.start, rows.stop, device=self.device)[:, None]
        reach = max(s + c for s, c in zip(starts, counts, strict=True))
        return self._pass(rows, ids, self.features[numbers, places], slots, real, reach)

    def step(self, tokens: Tensor, features: Tensor, held: Tensor, step: int, longest: int) -> tuple[Tensor, Tensor]:
        """Feed the `step`-th drafted token [B] of every row, with the head's own output [B, H] before it; returns the
        logits [B, V_d] and features [B, H] after it. longest: entries of the longest row."""
        real = (held > 0)[:, None]
        slots = torch.where(real, held[:, None] + step, self.cache.capacity)
        logits, out = self._pass(
            slice(0, self.batch), tokens[:, None], features[:, None], slots, real, longest + step + 1
        )
        return logits[:, 0], out[:, 0]

    def _pass(
        self, rows: slice, ids: Tensor, features: Tensor, slots: Tensor, real: Tensor, reach: int
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        kv_len = self.shapes.kv_len(reach, self.cache.capacity)
        positions = torch.where(real, slots, 0)
        self.cache.aim(slots, rows, kv_len)
        mask = self.masks(positions, kv_len)
        assert isinstance(mask, Tensor)
        logits, out = self.head(self.head.embed(ids), features, positions, mask, self.cache, observed=False)
        return logits, out
