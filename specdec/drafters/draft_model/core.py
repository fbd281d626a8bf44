"""A draft model's cache, row by row, and the draft steps of a round as one recorded function.

The K/V cache is the draft's own. It catches up with each row's text at the start of a round and is trimmed by moving a
length. A round is one pass that feeds what the text has grown by, then k steps: logits -> q -> token -> feed. No step
looks at a value, so where the runner replays passes the round is recorded as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.device.clock import Clock
from specdec.device.transfer import array_on
from specdec.drafters.base import (
    Draft,
    Drafter,
    DraftRequest,
    RowSampling,
    Tokens,
    as_array,
    pad_vocabulary,
    proposal_distribution,
)
from specdec.drafters.draft_model import steps as at  # the columns of a table of steps
from specdec.drafters.draft_model.steps import (
    LEVEL_UNIT,
    Proposal,
    StepInputs,
    StepsKey,
    Stops,
    may_propose,
    next_inputs,
    recordable,
    score_of,
    stream_of,
)
from specdec.models.kv_cache import KeptRows, RaggedCache, prefix_groups
from specdec.models.passes import PassInputs, PassKey
from specdec.models.runner import Runner, Shapes
from specdec.sampling.sampling import Purpose, best, race, streams
from specdec.sampling.texts import Drafted

RECORDED_STEPS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
CATCH_UP = 16  # a longer gap is prefilled; a shorter one is fed by the first draft pass
OWN = 2  # most tokens that the cache lacks after a draft of its own; more are missing after others' drafts


class DraftCore:
    """A model with its own ragged cache, which catches up with each row's text on demand.

    Invariant: the first `length[row]` slots of a row hold the K/V of the first `length[row]` ids of its text. Nodes of
    trees lie in the slots after them and are never kept: the next round feeds what was accepted.

    batch: rows
    capacity: most tokens of a row
    kept: rows of an earlier call
    spare: slots for nodes of trees
    cache: in place of its own
    """

    feeds_last = False  # whether the last drafted token of a round is fed as well

    def __init__(
        self,
        runner: Runner,
        batch: int,
        capacity: int,
        kept: KeptRows | None = None,
        spare: int = 0,
        cache: RaggedCache | None = None,
    ):
        self.runner, self.batch = runner, batch
        self.capacity = min(capacity, runner.context)
        self.cache = runner.lease(batch, self.capacity + spare) if cache is None else cache
        self.kept = kept
        self.shapes = Shapes.choose(runner.device, False, self.capacity)
        self.text = np.zeros((batch, self.capacity), dtype=np.int64)
        self.length = [0] * batch
        self.written = [0] * batch  # how much of `text` is known; accepted drafts are in the cache earlier
        self.outstanding: dict[int, int] = {}  # row -> draft tokens of the open round
        self.accepted: dict[int, int] = {}  # row -> accepted tokens of its last draft
        self.source: Tensor | None = None  # [V]: the draft's id of each of the target's, -1 = none; None: the same
        self.excluded = runner.excluded  # ids that are never proposed
        self.passes = 0  # so far, without prefill
        self.levels: Mapping[int, float] = {}  # row -> threshold of a length policy
        self.clock = Clock(runner.device)

    def cost(self) -> tuple[int, float]:
        """Return (passes, seconds of prefill) so far; on a GPU after a host read that follows them."""
        self.clock.end_pass()
        self.clock.settle()
        return self.passes, self.clock.totals["prefill"]

    def close(self) -> None:
        """Give the cache back."""
        self.runner.pool.give_back(self.cache)

    def keep(self) -> KeptRows:
        """Return the rows for a later call."""
        self.settle()
        lengths = [min(a, b) for a, b in zip(self.length, self.written, strict=True)]
        return KeptRows(self.cache, [self.text[row, :n].copy() for row, n in enumerate(lengths)])

    def begin(self, row: int, prompt: Tokens) -> None:
        """Start a row; copy what an earlier call kept of its prompt."""
        self.settle()
        self.outstanding.pop(row, None)
        self.accepted.pop(row, None)
        ids = as_array(prompt)[: self.capacity]
        self.runner.follow(self.cache, row, len(ids))
        self.length[row] = self.kept.copy_into(self.cache, row, ids) if self.kept else 0
        self.written[row] = self.length[row]
        self.text[row, : self.length[row]] = ids[: self.length[row]]
        self.cache.wipe(row, self.length[row])

    def room(self, request: DraftRequest, n_max: int) -> int:
        """Return how many tokens fit: the draft's context may end before the target's. The last one is not fed."""
        until_switch = self.runner.before_switch(len(request.tokens)) + 1
        return min(request.limit(n_max), self.capacity - len(request.tokens), until_switch)

    def accept(self, row: int, n_accepted: int) -> None:
        """Keep accepted tokens. They are in the cache, except the last drafted token: it was never fed."""
        drafted = self.outstanding.pop(row, 0)
        self.accepted[row] = n_accepted
        if drafted:
            self.length[row] = min(self.length[row] + min(n_accepted, drafted - 1), self.capacity)

    def settle(self) -> None:
        """Trim the rows to their lengths."""
        self.cache.rewind(dict(enumerate(self.length)))

    def feed(self, requests: Sequence[DraftRequest]) -> tuple[np.ndarray, list[int], list[int]]:
        """Return what each row's text has grown by: tokens [B, W], where they start, and how many there are.

        Longer gaps are prefilled here; the caller feeds the rest, which counts as fed from now on.
        """
        self.settle()
        for r in requests:
            if self.runner.follow(self.cache, r.row, len(r.tokens)):
                self.length[r.row] = 0
        totals = {r.row: self.write(r) for r in requests}
        gaps = {row: n - 1 for row, n in totals.items() if n - self.length[row] > CATCH_UP}  # row -> prefill up to here
        for group in self._groups(gaps):
            held = {row: self._copy_prefix(row, gaps[row]) for row in group}
            missing = {row: self.text[row, held[row] : gaps[row]].tolist() for row in group}
            with self.clock.phase("prefill"):
                self.runner.prefill(self.cache, self.shapes, missing, held)
            for row in group:
                self.length[row] = gaps[row]
        fed = {row: self.text[row, self.length[row] : n] for row, n in totals.items()}
        width = self.shapes.width(max(len(ids) for ids in fed.values()))
        tokens = np.zeros((self.batch, width), dtype=np.int64)
        starts, counts = [0] * self.batch, [0] * self.batch
        for row, ids in fed.items():
            tokens[row, : len(ids)] = ids
            starts[row], counts[row] = self.length[row], len(ids)
            self.length[row] += len(ids)
        return tokens, starts, counts

    def write(self, request: DraftRequest) -> int:
        """Write a row's text, its newest token included; returns its length."""
        row, total = request.row, len(request.tokens) + 1
        self.text[row, : total - 1] = as_array(request.tokens)
        self.text[row, total - 1] = request.last
        self.written[row] = total
        return total

    def _groups(self, lengths: Mapping[int, int]) -> list[list[int]]:
        """Group rows that are prefilled together, up to these lengths, in order."""
        if not self.shapes.together:
            return [[row] for row in lengths]
        return prefix_groups({row: self.text[row, :n] for row, n in lengths.items()})

    def _copy_prefix(self, row: int, total: int) -> int:
        """Copy what another row holds of the first `total` ids of this one; returns how many are held then."""
        held = [min(a, b) if r != row else 0 for r, (a, b) in enumerate(zip(self.length, self.written, strict=True))]
        texts = [self.text[r, :n] for r, n in enumerate(held)]
        return KeptRows(self.cache, texts).copy_into(self.cache, row, self.text[row, :total], self.length[row])

    def recorded_steps(self, k: int, most: int) -> int:
        """Round up the tokens to draft where passes are recorded, so that few are; what is too long is cut later."""
        if self.runner.graphs is None:
            return k
        return min(most, next((steps for steps in RECORDED_STEPS if steps >= k), k))

    def table(self, requests: Sequence[DraftRequest], levels: Mapping[int, int]) -> tuple[np.ndarray, int]:
        """Return `StepInputs.table` of a round, [B, 5 + W], and the first slot after all rows' texts.

        levels: row -> number of its column LEVELS
        """
        tokens, starts, counts = self.feed(requests)
        host = np.zeros((self.batch, at.TOKENS + tokens.shape[1]), dtype=np.int64)
        host[:, at.STARTS], host[:, at.COUNTS], host[:, at.TOKENS :] = starts, counts, tokens
        for r in requests:
            host[r.row, at.KEYS], host[r.row, at.POSITIONS] = stream_of(r), r.known
            host[r.row, at.LEVELS] = levels.get(r.row, 0)
        return host, max(s + c for s, c in zip(starts, counts, strict=True))

    def propose(self, requests: Sequence[DraftRequest], k: int, stops: Stops, vocab_size: int) -> Proposal:
        """Catch up and draft k tokens for the rows of `requests`; the other rows are padding."""
        sampling = requests[0].sampling
        host, reach = self.table(requests, {row: round(LEVEL_UNIT * level) for row, level in self.levels.items()})
        width, reach = host.shape[1] - at.TOKENS, reach + k - 1 + self.feeds_last
        key = self.key_of(sampling, width, reach, k, stops, vocab_size)._replace(feeds_last=self.feeds_last)
        columns = key.first.kv_len if self.source is None else max(r.known for r in requests) + k
        known = None if sampling is None else sampling.known(columns, self.runner.device)
        inputs = StepInputs(array_on(host, self.runner.device), known)

        def function(given: StepInputs) -> Proposal:
            return self.steps(key, sampling, given, requests)

        recorded = recordable(sampling) and self.source is None
        proposal = self.runner.run(self.cache, key, inputs, function) if recorded else function(inputs)
        self.passes += proposal.tokens.shape[1]
        self.outstanding.update({r.row: proposal.tokens.shape[1] for r in requests})
        return proposal

    def key_of(
        self, sampling: RowSampling | None, width: int, reach: int, k: int, stops: Stops, vocab_size: int
    ) -> StepsKey:
        """Make the key of k draft steps after a pass of `width` columns; reach: first slot that no row needs."""
        first = self.runner.key(self.cache, self.shapes, width, min(reach, self.capacity))
        first = first._replace(rare=width > OWN)
        if sampling is None:
            return StepsKey(first, k, False, Purpose.DRAFT, None, *stops, vocab_size)
        purpose = sampling.purpose if sampling.sampled else Purpose.DRAFT
        return StepsKey(first, k, sampling.sampled, purpose, sampling.signature, *stops, vocab_size)

    def steps(
        self, key: StepsKey, sampling: RowSampling | None, inputs: StepInputs, requests: Sequence[DraftRequest]
    ) -> Proposal:
        """Catch up, then draft `key.steps` tokens: logits -> q -> token -> feed.

        requests: the host's; they are looked at only where nothing is recorded
        """
        runner, layout = self.runner, torch.contiguous_format
        # Views of tables of other widths have other strides, for each of which code would be compiled anew.
        numbers, fed = (given.clone(memory_format=layout) for given in (inputs.numbers, inputs.tokens))
        length, rows = numbers[at.STARTS] + numbers[at.COUNTS], torch.arange(self.batch, device=runner.device)
        first = self.forward(key.first, PassInputs(fed, numbers[: at.KEYS]))
        self.cache.begin_draft([r.row for r in requests])
        logits = first[rows, (numbers[at.COUNTS] - 1).clamp(min=0)]  # [B, V_draft]
        texts = None if sampling is None else sampling.drafted(inputs.known, numbers[at.POSITIONS], requests)
        tokens: list[Tensor] = []
        q: list[Tensor] = []
        keeps: list[Tensor] = []
        likely, ended = torch.ones_like(length, dtype=torch.float32), torch.zeros_like(length, dtype=torch.bool)
        for i in range(key.steps):
            logits = self._in_target(logits, key.vocab_size)
            token, sound, q_i = self._choose(key, sampling, logits, texts, numbers, i)
            tokens.append(token)
            texts = None if texts is None else texts.after(token)
            q += [q_i] if q_i is not None else []
            if key.p_min or key.rule is not None:
                # A broken draft proposes nothing; without a stop it proposes what will be rejected.
                keep = sound & may_propose(key, logits, i)
                if key.rule is not None:
                    score, likely = score_of(key.rule, logits, token, likely)
                    low = score < numbers[at.LEVELS] / LEVEL_UNIT
                    keep = keep & ~(ended if key.rule.after else low & (not key.sampled or i >= key.n_min))
                    ended = ended | low
                keeps.append(keep & keeps[-1] if keeps else keep)
            if i + 1 == key.steps or (keeps and self._all_stopped(keeps[-1], requests)):
                break
            logits = self._feed_token(key, self._own(token), length + i, numbers[at.COUNTS])
        lengths = torch.stack(keeps).sum(dim=0) if keeps else None
        if lengths is not None and not key.sampled and key.n_min:
            lengths = torch.where(lengths < key.n_min, 0, lengths)
        return Proposal(torch.stack(tokens, dim=1), lengths, torch.stack(q, dim=1) if q else None)

    def _in_target(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Map draft logits [B, V_draft] to the target's ids, [B, vocab_size]."""
        if self.source is None:
            return pad_vocabulary(logits, vocab_size, self.excluded)
        return torch.where(self.source < 0, float("-inf"), logits.index_select(-1, self.source.clamp(min=0)))

    def _own(self, token: Tensor) -> Tensor:
        """Return the draft's ids of the target's, [B]."""
        return token if self.source is None else self.source[token].clamp(min=0)

    def _choose(
        self,
        key: StepsKey,
        sampling: RowSampling | None,
        logits: Tensor,
        texts: Drafted | None,
        numbers: Tensor,
        i: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Choose the i-th token from logits [B, V]; returns (token [B], True where logits are sound, q if sampled)."""
        if texts is None and (sampling is None or sampling.sampling.greedy):
            return *self.runner.part(best)(logits), None
        assert sampling is not None
        scores = sampling.sampling.scores(logits[:, None], None if texts is None else texts.read())[:, 0]
        sound = scores.amax(dim=-1).isfinite()
        if not key.sampled:
            return scores.argmax(dim=-1), sound, None
        q = proposal_distribution(scores)
        return race(q, streams(numbers[at.KEYS], numbers[at.POSITIONS] + i, key.purpose)), sound, q

    def _feed_token(self, key: StepsKey, token: Tensor, slots: Tensor, counts: Tensor) -> Tensor:
        """Feed a drafted token [B] at `slots` [B]; returns the logits after it, [B, V_draft]."""
        # Not this call's own capacity: the recording stays with the cache, for calls that need more of it.
        end = min(self.cache.capacity, self.runner.context)
        fed = self.runner.part(next_inputs)(token, slots, counts, end, self.shapes.width(1))
        following = key.first._replace(width=fed[0].shape[1], rare=False)
        return self.forward(following, PassInputs(*fed))[:, 0]

    def forward(self, key: PassKey, inputs: PassInputs) -> Tensor:
        """Run a pass of a recorded function; returns its logits."""
        return self.runner.forward(self.cache, key, inputs).logits

    def _all_stopped(self, keep: Tensor, requests: Sequence[DraftRequest]) -> bool:
        """True if every row has stopped; False where looking would cost a host read or a recording."""
        looks = self.runner.graphs is None and keep.device.type == "cpu"
        return looks and not any(keep[r.row] for r in requests)


class CoreDrafter(Drafter):
    """Base of strategies that draft with a `DraftCore`, in `_core`."""

    _core: Any

    def begin(self, row: int, prompt: Tokens) -> None:
        self._core.begin(row, prompt)

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        if not is_other:
            self._core.accept(row, n_accepted)

    def cost(self) -> tuple[int, float]:
        return self._core.cost()  # type: ignore[no-any-return]

    def close(self) -> None:
        self._core.close()

    def drafts(self, requests: Sequence[DraftRequest], limits: Mapping[int, int], proposal: Proposal) -> list[Draft]:
        """Return the proposal's drafts, each up to its row's limit; empty for rows without one."""
        cut = {row: proposal.draft(row, n, self.name) for row, n in limits.items() if n > 0}
        return [cut.get(r.row, Draft()) for r in requests]
