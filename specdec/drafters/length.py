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
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from specdec.costs import CostTable
from specdec.drafters.base import Draft, Drafter, DraftRequest, RowDrafter
from specdec.runner import Shapes

# Chosen on continuations of HumanEval and GSM8K prompts and on made-up sequences, which no published figure uses.
_STREAKS = (0, 1, 2, 3, 3, 4, 4, 4, 4, 5)  # the place in a table for a streak of 0, 1, ..., 9 or more
_PRIOR_FREE = (0.25, 0.5, 0.65, 0.75, 0.8, 0.9)
_PRIOR_MODEL = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85)
_PRIOR_WEIGHT = 10.0  # guesses
_MEMORY = 0.98  # of a guess, after each further one
_ADVANCE = 0.02  # of the plain time to the row's limit, that may be spent before anything was gained
_SHARE = 0.01  # of every token's plain time, that may be spent
_FIRST_RETRY = 8  # rounds
_CHEAP = 0.01  # of a plain round: what asking a silent strategy may cost on average


@dataclass
class Acceptance:
    """How often a strategy guesses right in one row, by its streak: Beta estimates that forget."""

    prior: Sequence[float]
    streak: int = 0
    right: list[float] = field(init=False)  # what the guesses add to the prior, by streak
    tested: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.right = [0.0] * len(self.prior)
        self.tested = [0.0] * len(self.prior)

    def learn(self, right: int, wrong: bool) -> None:
        """`right` tested tokens stood; `wrong`: then one was tested that did not."""
        for is_right in [True] * right + [False] * wrong:
            place = _place(self.streak)
            self.right = [_MEMORY * n for n in self.right]
            self.tested = [_MEMORY * n for n in self.tested]
            self.right[place] += is_right
            self.tested[place] += 1.0
            self.streak = self.streak + 1 if is_right else 0

    def rate(self, streak: int) -> float:
        """Probability that the next token is right after `streak` right ones."""
        place = _place(streak)
        known = self.prior[place] * _PRIOR_WEIGHT + self.right[place]
        return known / (_PRIOR_WEIGHT + self.tested[place])

    def expected(self, longest: int) -> list[float]:
        """Expected tokens of a round with 0..longest drafted tokens, the one that follows included."""
        survival, tokens = 1.0, [1.0]
        for i in range(longest):
            survival *= self.rate(self.streak + i)
            tokens.append(tokens[-1] + survival)
        return tokens


def _place(streak: int) -> int:
    return _STREAKS[min(streak, len(_STREAKS) - 1)]


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
        self.asked: dict[int, int] = {}  # row -> tokens to verify, in the open round
        self.rounds: dict[int, _Round] = {}  # row -> its open round
        self.seconds = lru_cache(maxsize=1024)(self._seconds)

    # -- what the chain calls ------------------------------------------------------------------------------------

    def begin(self, row: int) -> None:
        """Forget a row: another text takes its slot."""
        self.credit.pop(row, None)
        self.rounds.pop(row, None)
        for index in range(len(self.names)):
            self.known.pop((index, row), None)

    def open(self, requests: Sequence[DraftRequest]) -> None:
        """A round begins: score the guesses that the text has answered since the last one."""
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
            now.tokens += known.acceptance.expected(n)[n] - 1.0
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
        plain = self.seconds(now.context, 1)
        credit = sum(self.credit[row] for row in now.rows) / len(now.rows)
        others = len(now.rows) - len(rows) + now.tokens
        known = [self._row(index, r.row) for r in rows]
        limits = [min(r.n_max, self.longest) for r in rows]
        expected = [known_row.acceptance.expected(n) for known_row, n in zip(known, limits, strict=True)]
        best, hope = 0, False
        rate = bar = (others + len(rows)) / self._spent(index, rows, 0)
        for k in range(1, max(limits) + 1):
            seconds = self._spent(index, rows, k)
            if seconds / plain - 1.0 > credit:
                break
            tokens = others + sum(e[min(k, n)] for e, n in zip(expected, limits, strict=True))
            reading = self._reading(index, rows) * tokens / len(now.rows)
            if tokens / (seconds + reading) > rate:
                best, rate = k, tokens / (seconds + reading)
            hope = hope or (others + len(rows) * (k + 1)) / (seconds + reading) > bar
        if self.free[index] or best:
            return best
        return 1 if hope and self._due(known) else 0

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
        self.rounds[rows[0].row].drafting += self._drafting(index, rows, k)
        for r in rows:
            known = self._row(index, r.row)
            known.silent, known.read = 0, r.position + 1

    def _spent(self, index: int, rows: Sequence[DraftRequest], k: int) -> float:
        """Seconds of the round if strategy `index` drafts k tokens for `rows`."""
        now = self.rounds[rows[0].row]
        drafting = self._drafting(index, rows, k) if k else 0.0
        return self.seconds(now.context, 1 + max(now.longest, k)) + now.drafting + drafting

    def _drafting(self, index: int, rows: Sequence[DraftRequest], k: int) -> float:
        if self.free[index]:
            return self.costs.call(self.names[index]) * len(rows)
        if self.costs.draft is None or self.names[index] != "draft-model":
            return 0.0
        # Of a text that the draft model has never seen, see _reading.
        behind = [r.position + 1 - self._row(index, r.row).read if self._row(index, r.row).read else 1 for r in rows]
        context = self.rounds[rows[0].row].context
        return self._draft_pass(context, max(behind)) + (k - 1) * self._draft_pass(context, 1)

    def _reading(self, index: int, rows: Sequence[DraftRequest]) -> float:
        """Seconds that a draft model takes for prompts it has not read, spread over the tokens these rows may emit."""
        if self.free[index] or self.costs.draft is None or self.names[index] != "draft-model":
            return 0.0
        unread = [r for r in rows if self._row(index, r.row).read == 0]
        return sum(self._draft_pass(r.position, r.position + 1) / (r.n_max + 1) for r in unread) / self.batch

    def _draft_pass(self, context: int, width: int) -> float:
        return self.costs.seconds("draft", self.batch, context, width)

    def _seconds(self, context: int, width: int) -> float:
        """A round without its drafting, whose pass feeds `width` tokens to each row."""
        return self.costs.seconds("target", self.batch, context, self.shapes.width(width)) + self.costs.round

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
