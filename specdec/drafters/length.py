"""Automatic draft length: how many tokens of a strategy's draft are worth verifying in this round (0: none).

Why and how: docs/automatic_length.md. The chain opens a round (`open`), asks before each strategy (`ask`), cuts what
came (`cut`) and tells how the round ended (`accept`). What is learnt is of the emitted text, and of a draft no more
than how many tokens stood and whether the next one was rejected; so under leviathan the law stays the target's.

Every row decides from its own past. Where the text does not depend on drafts (`together`), the rows of a round share
one length, because a pass is as wide as its longest draft; elsewhere each row chooses as if it were alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from specdec.costs import CostTable
from specdec.drafters.base import Draft, Drafter, DraftRequest, RowDrafter
from specdec.runner import Shapes

# Chosen on continuations of HumanEval and GSM8K prompts and on made-up sequences, which no published figure uses.
_LONGEST_STREAK = 9  # longer ones are taken for this
_PLACES = np.array([0, 1, 2, 3, 3, 4, 4, 4, 4] + [5] * 600)  # in a table by streak
_PRIOR_FREE = np.array([0.25, 0.5, 0.65, 0.75, 0.8, 0.9])
_PRIOR_MODEL = np.array([0.6, 0.65, 0.7, 0.75, 0.8, 0.85])
_PRIOR_WEIGHT = 10.0  # guesses
_MEMORY = 0.98  # of a guess, after each further one
_ADVANCE = 0.02  # of the plain time to the row's limit, that may be spent before anything was gained
_SHARE = 0.01  # of every token's plain time, that may be spent
_FIRST_RETRY = 8  # rounds
_CONTEXT_STEP = 128  # tokens: costs are looked up at its multiples
_CHEAP = 0.01  # of a plain round: what asking a silent strategy may cost on average


@dataclass
class Acceptance:
    """How often a strategy guesses right in one row, by its streak: Beta estimates that forget. prior: float64 [6]."""

    prior: np.ndarray
    streak: int = 0

    def __post_init__(self) -> None:
        self.right = np.zeros(len(self.prior))  # what the guesses add to the prior
        self.tested = np.zeros(len(self.prior))

    def learn(self, right: int, wrong: bool) -> None:
        """`right` tested tokens stood; `wrong`: then one was tested that did not."""
        for is_right in [True] * right + [False] * wrong:
            place = _PLACES[min(self.streak, _LONGEST_STREAK)]
            self.right *= _MEMORY
            self.tested *= _MEMORY
            self.right[place] += is_right
            self.tested[place] += 1.0
            self.streak = self.streak + 1 if is_right else 0

    def expected(self, longest: int) -> np.ndarray:
        """Expected tokens of a round with 0..longest drafted tokens, the one that follows included; float64."""
        rates = (self.prior * _PRIOR_WEIGHT + self.right) / (_PRIOR_WEIGHT + self.tested)
        start = min(self.streak, _LONGEST_STREAK)
        tokens = np.ones(longest + 1)
        np.cumprod(rates[_PLACES[start : start + longest]], out=tokens[1:])
        return np.cumsum(tokens)


@dataclass
class _RowOf:
    """One strategy in one row. guess, size: its last draft, and the text's length then; read: ids that a draft model
    has read; silent, retry: rounds that it was not asked in, and after how many it will be."""

    acceptance: Acceptance
    guess: Sequence[int] = ()
    size: int = 0
    read: int = 0
    silent: int = 0
    retry: int = _FIRST_RETRY


@dataclass
class _Round:
    """What is decided about a round of some rows: who shares it, at which context (tokens), extra tokens expected from
    drafts, seconds spent on drafting, the longest draft."""

    rows: list[int]
    context: int
    tokens: float = 0.0
    drafting: float = 0.0
    longest: int = 0


def automatic(drafters: Sequence[Any], draft_length: str | None, default_chain: bool) -> list[bool]:
    """Whose lengths are chosen, given the option of a call; trees keep their shape."""
    if draft_length is None:
        return [default_chain or bool(getattr(d, "automatic", False)) for d in drafters]
    return [draft_length == "auto" and not getattr(d, "makes_trees", False) for d in drafters]


def unlimited(drafter: Any, longest: int) -> Any:
    """A strategy whose n_max is the default, so that nobody asked for it, with `longest` in its place."""
    known = getattr(type(drafter), "__dataclass_fields__", {}).get("n_max")
    if known is None or getattr(drafter, "makes_trees", False):
        return drafter
    if not getattr(drafter, "automatic", drafter.n_max == known.default):
        return drafter
    made = copy.copy(drafter)
    made.n_max = longest
    return made


class LengthController:
    """Draft lengths of one call. chosen: which of the chain's strategies; batch: slots; free: the text does not
    depend on drafts, so that rows may share a length.

    `credit` is in plain rounds of its row: what may be lost against plain decoding.
    """

    def __init__(
        self, drafters: Sequence[Drafter], chosen: Sequence[bool], costs: CostTable, shapes: Shapes, batch: int,
        free: bool,
    ):  # fmt: skip
        self.automatic = list(chosen)
        self.free = [isinstance(d, RowDrafter) for d in drafters]  # cost no pass, claim no q
        self.names = [d.name for d in drafters]
        self.costs, self.shapes, self.together = costs, shapes, free or all(self.free)
        self.batch = batch if self.together else 1
        self.longest = shapes.verify_width - 1
        self.known: dict[tuple[int, int], _RowOf] = {}
        self.credit: dict[int, float] = {}
        self.waiting = 0  # prompts without a slot
        self.asked: dict[int, int] = {}  # row -> tokens to verify, in the open round
        self.rounds: dict[int, _Round] = {}  # row -> its open round
        self.passes = lru_cache(maxsize=64)(self._passes)

    # -- what the chain calls ------------------------------------------------------------------------------------

    def begin(self, row: int) -> None:
        """Forget a row: another text takes its slot."""
        self.credit.pop(row, None)
        self.rounds.pop(row, None)
        for index in range(len(self.names)):
            self.known.pop((index, row), None)

    def open(self, requests: Sequence[DraftRequest], waiting: int = 0) -> None:
        """A round begins: score the guesses that the text has answered since the last one. waiting: prompts that have
        no slot yet."""
        self.waiting = waiting
        for r in requests:
            for index, free in enumerate(self.free):
                if free and self.automatic[index]:
                    self._score(self._row(index, r.row), r)
            self.credit.setdefault(r.row, _ADVANCE * (r.n_max + 1))
        shared = _Round([r.row for r in requests], max(r.position for r in requests))
        for r in requests:
            self.rounds[r.row] = shared if self.together else _Round([r.row], r.position)

    def ask(self, index: int, requests: dict[int, DraftRequest]) -> dict[int, DraftRequest]:
        """The requests that strategy `index` gets, with its n_max; keys are the caller's."""
        if not self.automatic[index]:
            return requests
        asked: dict[int, DraftRequest] = {}
        for group in [list(requests)] if self.together else [[i] for i in requests]:
            rows = [requests[i] for i in group]
            k = self._choose(index, rows)
            self._spend(index, rows, k)
            for i, request in zip(group, rows, strict=True):
                n = self.asked[request.row] = min(k, request.n_max)
                if self.free[index] and (n or self._listens(index, request.row)):
                    n += 1  # one more than will be verified: the text will show whether it was right
                if n:
                    asked[i] = replace(request, n_max=n)
        return asked

    def cut(self, index: int, request: DraftRequest, draft: Draft) -> Draft:
        """The part of a draft that is verified. One that claims q has the length that was asked for, and keeps it."""
        now = self.rounds[request.row]
        if not self.automatic[index]:
            now.longest = max(now.longest, min(len(draft), self.longest))
            return draft
        known = self._row(index, request.row)
        if self.free[index]:
            known.guess, known.size = [int(t) for t in draft.tokens], request.position + 1
            draft = draft.first(self.asked[request.row])
        n = len(draft) if self.free[index] else self.asked[request.row]
        if len(draft) > 0:
            now.tokens += float(known.acceptance.expected(n)[n]) - 1.0
            now.longest = max(now.longest, n)
        return draft

    def accept(self, row: int, winner: int | None, n_accepted: int, drafted: int) -> None:
        """A round of `row` ended: earn its tokens, pay its time, learn what was tested. drafted: tokens proposed."""
        now = self.rounds.pop(row, None)
        if now is None or (winner is not None and not self.automatic[winner]):
            return  # what was asked for by the user is not held against the others
        plain = self.seconds(now.context, 1)
        paid = (self.seconds(now.context, 1 + now.longest) + now.drafting) / plain
        self.credit[row] += (1.0 + _SHARE) * (1 + n_accepted) - paid
        if winner is None or self.free[winner]:
            return
        known = self._row(winner, row)
        known.acceptance.learn(n_accepted, wrong=drafted > n_accepted)
        known.read += min(n_accepted, max(0, drafted - 1))
        if 0 < drafted == n_accepted:
            known.retry = _FIRST_RETRY

    # -- choosing ------------------------------------------------------------------------------------------------

    def _choose(self, index: int, rows: Sequence[DraftRequest]) -> int:
        """The k in 0..longest with the most expected tokens a second that the rows' credit allows."""
        now = self.rounds[rows[0].row]
        known = [self._row(index, r.row) for r in rows]
        limits = [min(r.n_max, self.longest) for r in rows]
        k = np.arange(max(limits) + 1)
        seconds = self._spent(index, rows, k)
        tokens = np.full(len(k), len(now.rows) - len(rows) + now.tokens)
        for row, limit in zip(known, limits, strict=True):
            tokens += row.acceptance.expected(limit)[np.minimum(k, limit)]
        reading = self._reading(index, rows)
        rates = tokens / (seconds + (k > 0) * reading * tokens / len(now.rows))
        credit = self._credit(now)
        affordable = (k == 0) | (seconds / self.seconds(now.context, 1) - 1.0 <= credit)
        best = int(np.where(affordable, rates, 0.0).argmax())
        if self.free[index] or best or len(k) == 1 or not affordable[1]:
            return best
        if_right = (tokens[0] + len(rows) * k) / (seconds + (k > 0) * reading)
        return 1 if if_right.max() > rates[0] and self._due(known) else 0

    def _credit(self, now: _Round) -> float:
        """What the rows of a round may lose. Where prompts wait, a slot that a fast row leaves is used, and their sum
        counts; where none do, the call lasts as long as its slowest row, whom others' drafts only delay."""
        credits = [self.credit[row] for row in now.rows]
        return sum(credits) / len(credits) if self.waiting >= self.batch else min(credits)

    def _due(self, known: Sequence[_RowOf]) -> bool:
        """Whether a strategy that costs a pass is to be tried again, although it does not look worth it."""
        for row in known:
            row.silent += 1
        if all(row.silent < row.retry for row in known):
            return False
        for row in known:
            row.retry *= 2
        return True

    def _listens(self, index: int, row: int) -> bool:
        """Whether a silent strategy without a model is asked all the same, to be scored: if that is cheap, always."""
        now, known = self.rounds[row], self._row(index, row)
        known.silent += 1
        cost = self.costs.call(self.names[index])
        if known.silent * _CHEAP * self.seconds(now.context, 1) < cost:
            return False
        known.silent = 0
        now.drafting += cost
        return True

    # -- costs ---------------------------------------------------------------------------------------------------

    def _spend(self, index: int, rows: Sequence[DraftRequest], k: int) -> None:
        """Book the drafting of k tokens."""
        if k == 0:
            return
        self.rounds[rows[0].row].drafting += float(self._drafting(index, rows, np.array([k]))[0])
        for r in rows:
            known = self._row(index, r.row)
            known.silent, known.read = 0, r.position + 1

    def _spent(self, index: int, rows: Sequence[DraftRequest], k: np.ndarray) -> np.ndarray:
        """Seconds of the round if strategy `index` drafts k tokens for `rows`, for every k [n]."""
        now = self.rounds[rows[0].row]
        width = 1 + np.maximum(k, now.longest)
        return self._rounds(now.context)[width] + now.drafting + self._drafting(index, rows, k)

    def _drafting(self, index: int, rows: Sequence[DraftRequest], k: np.ndarray) -> np.ndarray:
        """Seconds of drafting k tokens, for every k [n]. Of a text that a draft model has never seen, see _reading."""
        if self.free[index]:
            return (k > 0) * self.costs.call(self.names[index]) * len(rows)
        if self.costs.draft is None or self.names[index] != "draft-model":
            return np.zeros(len(k))
        read = [(r.position + 1, self._row(index, r.row).read) for r in rows]
        behind = max(size - known if known else 1 for size, known in read)
        context = self.rounds[rows[0].row].context
        first, step = (self._draft_pass(context, width) for width in (behind, 1))
        return (k > 0) * (first + (k - 1) * step)

    def _reading(self, index: int, rows: Sequence[DraftRequest]) -> float:
        """Seconds that a draft model takes for prompts it has not read, spread over the tokens these rows may emit."""
        if self.free[index] or self.costs.draft is None or self.names[index] != "draft-model":
            return 0.0
        unread = [r for r in rows if self._row(index, r.row).read == 0]
        return sum(self._draft_pass(r.position, r.position + 1) / (r.n_max + 1) for r in unread) / self.batch

    def _draft_pass(self, context: int, width: int) -> float:
        return self.costs.seconds("draft", self.batch, context, width)

    def seconds(self, context: int, width: int) -> float:
        """A round without its drafting, whose pass feeds `width` tokens to each row."""
        return float(self._rounds(context)[width])

    def _rounds(self, context: int) -> np.ndarray:
        """Such rounds by width, 0 included."""
        return self.passes(context // _CONTEXT_STEP)

    def _passes(self, step: int) -> np.ndarray:
        widths = [self.shapes.width(w) for w in range(self.longest + 2)]
        target = [self.costs.seconds("target", self.batch, step * _CONTEXT_STEP, w) for w in widths]
        return np.array(target) + self.costs.round

    # -- rows ----------------------------------------------------------------------------------------------------

    def _row(self, index: int, row: int) -> _RowOf:
        if (index, row) not in self.known:
            prior = _PRIOR_FREE if self.free[index] else _PRIOR_MODEL
            self.known[index, row] = _RowOf(Acceptance(prior))
        return self.known[index, row]

    def _score(self, known: _RowOf, request: DraftRequest) -> None:
        """Compare the last guess with what was emitted; no guess is no streak."""
        if not known.guess:
            known.acceptance.streak = 0
            return
        emitted = [*(int(t) for t in request.tokens[known.size :]), int(request.last)]
        answered = list(zip(known.guess, emitted, strict=False))
        right = next((i for i, (guess, token) in enumerate(answered) if guess != token), len(answered))
        known.acceptance.learn(right, wrong=right < len(answered))
        known.guess = ()
