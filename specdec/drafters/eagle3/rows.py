"""The target's states as they are observed, row by row, and the head's cache that is kept up with them.

The target's states of a token become a *feature* (the head's `fc`) as soon as a pass shows them, and wait at the
token's position. Entry j of a row's cache goes with the token at position `base + j`: its feature, and the embedding
of the token after it. `base` is 0, unless the beginning of the text was never seen, because an earlier call had kept
its keys and values: then the head sees the text from there on.

Trimming is free, as for any `RaggedCache`: entries of drafted tokens are computed from the head's own output, are not
counted, and are overwritten by those of accepted tokens, from the target's states. Of a tree that was verified, the
features of accepted nodes move to where a chain would have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.device.buffers import Buffers
from specdec.device.clock import Clock
from specdec.device.transfer import array_on, to_device
from specdec.drafters.base import DraftRequest, Tokens, as_array
from specdec.drafters.draft_model.steps import stream_of
from specdec.drafters.eagle3.head import EagleHead
from specdec.models.attention import RAGGED, MaskBuilder
from specdec.models.kv_cache import RaggedCache, common_prefix
from specdec.models.runner import PassOutput, Shapes
from specdec.models.trees import moves
from specdec.sampling.texts import Known

CATCH_UP = 16  # a longer gap is fed by itself; a shorter one in the pass whose logits are wanted


@dataclass(frozen=True)
class HeadInputs(Buffers):
    """What a round's recorded function of the head reads.

    tokens [B, W]: of the entries that the rows have grown by
    features [B, W, H]: of the same entries, from the target's states
    starts, counts [B]: the first of these entries, and how many are real; 0 = the row takes no part
    keys [B]: of the rows' random numbers
    positions [B]: sequence position of the first drafted token
    known: the rows' texts, for processors that read them
    """

    tokens: Tensor
    features: Tensor
    starts: Tensor
    counts: Tensor
    keys: Tensor
    positions: Tensor
    known: Known | None = None


class HeadRows:
    """One call's rows. Made when the first pass is seen: only then is the device known for good."""

    def __init__(self, head: EagleHead, cache: RaggedCache, capacity: int, spare: int, device: torch.device):
        """capacity: most tokens of a row; spare: slots that a verified tree takes after them."""
        self.head, self.cache, self.batch, self.device = head, cache, cache.batch, device
        batch = self.batch
        self.shapes = Shapes.choose(device, False, cache.capacity)
        self.dtype = head.fc.weight.dtype
        self.masks = MaskBuilder(head.config, RAGGED, self.dtype)
        shape = (batch, capacity + spare + 1, head.config.hidden_size)
        self.features = torch.zeros(shape, dtype=self.dtype, device=device)
        self.texts: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * batch
        self.base = [0] * batch  # position of the row's first entry
        self.end = [0] * batch  # features are known of the positions from `base` up to this one
        self.fed = [0] * batch  # entries in the cache that are the target's
        self.seen: list[list[tuple[int, int]]] = [[] for _ in range(batch)]  # positions observed since the last draft
        self.newest = [0] * batch  # position of the newest token in the row's last verify pass
        self.moves: list[tuple[int, int, int]] = []
        self.passes = 0  # of the head so far, without prefill
        self.clock = Clock(device)

    def cost(self) -> tuple[int, float]:
        """(passes, seconds of prefill) so far; on a GPU after a host read that follows them."""
        self.clock.end_pass()
        self.clock.settle()
        return self.passes, self.clock.totals["prefill"]

    # -- what the target shows -------------------------------------------------------------------------------------

    def observe(self, output: PassOutput, states: Tensor) -> None:
        """Take over the states [B', S, 3 * H_t] of a pass."""
        self.settle()
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
        self.newest[row], self.end[row] = start, end

    def accept_path(self, row: int, nodes: Sequence[int]) -> None:
        """The accepted nodes of the row's tree, whoever drafted it."""
        self.moves += moves(row, [node + 1 for node in nodes], self.newest[row])

    def settle(self) -> None:
        """Move the features of accepted paths, all rows at once."""
        if self.moves:
            row, source, target = to_device(np.array(self.moves).T.copy(), self.device)
            self.features[row, target] = self.features[row, source]
            self.moves = []

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

    def plan(self, requests: Sequence[DraftRequest]) -> HeadInputs:
        """What the rows' texts have grown by. Longer gaps are fed here; the rest counts as fed from now on."""
        self.settle()
        totals = {r.row: self.entries(r) for r in requests}
        ids: dict[int, np.ndarray] = {}
        for r in requests:
            self.seen[r.row] = []
            self.texts[r.row] = np.append(as_array(r.tokens), r.last)
            ids[r.row] = self.texts[r.row][self.base[r.row] + 1 :]  # entry j has token j + 1
        for row, total in totals.items():
            self.fed[row] = min(self.fed[row], total - 1)  # the newest entry is always wanted, and its logits with it
            if total - self.fed[row] > CATCH_UP:
                with self.clock.phase("prefill"):
                    self._prefill(row, ids[row], total - 1)
        width = self.shapes.width(max(total - self.fed[row] for row, total in totals.items()))
        tokens = np.zeros((self.batch, width), dtype=np.int64)
        table = np.zeros((4, self.batch), dtype=np.int64)
        for r in requests:
            new = ids[r.row][self.fed[r.row] : totals[r.row]]
            tokens[r.row, : len(new)] = new
            table[:, r.row] = self.fed[r.row], len(new), stream_of(r), len(r.tokens) + 1
            self.fed[r.row] = totals[r.row]
        starts, counts, keys, positions = array_on(table, self.device)
        features = self._features(slice(0, self.batch), starts, width)
        return HeadInputs(array_on(tokens, self.device), features, starts, counts, keys, positions)

    def _features(self, rows: slice, starts: Tensor, width: int) -> Tensor:
        """Features [B', W, H] of the entries from `starts` on."""
        base = to_device(self.base[rows], self.device)
        places = (base + starts)[:, None] + torch.arange(width, device=self.device)
        numbers = torch.arange(rows.start, rows.stop, device=self.device)[:, None]
        return self.features[numbers, places.clamp(max=self.features.shape[1] - 1)]

    def kv_len(self, requests: Sequence[DraftRequest], drafted: int) -> int:
        """Slots that the passes of a round read, in which each row has up to `drafted` entries of its own."""
        return self.shapes.kv_len(max(self.fed[r.row] for r in requests) + drafted, self.cache.capacity)

    def _prefill(self, row: int, ids: np.ndarray, total: int) -> None:
        """Feed a row alone up to `total` entries, in wide passes."""
        widest = self.shapes.widths[-1]
        while self.fed[row] < total:
            new = ids[self.fed[row] : min(self.fed[row] + widest, total)]
            width = self.shapes.width(len(new))
            padded = np.zeros((1, width), dtype=np.int64)
            padded[0, : len(new)] = new
            starts, counts = to_device([[self.fed[row]], [len(new)]], self.device)
            rows = slice(row, row + 1)
            features = self._features(rows, starts, width)
            kv_len = self.shapes.kv_len(self.fed[row] + len(new), self.cache.capacity)
            self._entries(rows, array_on(padded, self.device), features, starts, counts, kv_len)
            self.fed[row] += len(new)

    def passes_of(self, steps: int) -> int:
        """Return the passes that a chain of `steps` tokens takes."""
        return steps

    # -- passes, from tensors alone --------------------------------------------------------------------------------

    def first(self, inputs: HeadInputs, kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
        """Feed what the rows have grown by. Returns the logits [B, V_d] and features [B, H] after the newest tokens,
        and how many entries each row has now, int64 [B], 0 = no part in this."""
        starts, counts = inputs.starts, inputs.counts
        logits, out = self._entries(slice(0, self.batch), inputs.tokens, inputs.features, starts, counts, kv_len)
        rows, newest = torch.arange(self.batch, device=self.device), (counts - 1).clamp(min=0)
        return logits[rows, newest], out[rows, newest], starts + counts

    def step(self, tokens: Tensor, features: Tensor, slots: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        """Feed a drafted token [B] of every row into `slots` [B] (the cache's capacity: no part in this), with the
        head's own output [B, H] before it; returns the logits [B, V_d] and features [B, H] after it."""
        logits, out = self._pass(slice(0, self.batch), tokens[:, None], features[:, None], slots[:, None], kv_len)
        return logits[:, 0], out[:, 0]

    def _entries(
        self, rows: slice, ids: Tensor, features: Tensor, starts: Tensor, counts: Tensor, kv_len: int
    ) -> tuple[Tensor, Tensor]:
        columns = torch.arange(ids.shape[1], device=self.device)
        slots = torch.where(columns < counts[:, None], starts[:, None] + columns, self.cache.capacity)
        return self._pass(rows, ids, features, slots, kv_len)

    def _pass(self, rows: slice, ids: Tensor, features: Tensor, slots: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        positions = torch.where(slots < self.cache.capacity, slots, 0)
        self.cache.aim(slots, rows, kv_len)
        mask = self.masks(positions, kv_len)
        assert isinstance(mask, Tensor)
        logits, out = self.head(self.head.embed(ids), features, positions, mask, self.cache, observed=False)
        return logits, out
