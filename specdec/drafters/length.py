"""Automatic draft length: how many tokens of a strategy's draft are worth verifying in this round (0: none).

Why and how: docs/automatic_length.md. The chain opens a round (`open`), asks before each strategy (`ask`), cuts its
draft (`cut`) and tells how the round ended (`accept`). Learnt is the emitted text, how many drafted tokens were
accepted and if the next one was rejected; so under leviathan the distribution is still the target's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from specdec.drafters.base import Draft, Drafter, DraftRequest
from specdec.drafters.costs import CostTable
from specdec.models.runner import Shapes

# Accepted and rejected tokens of the prior: a guess from the text is right one time in four, a model's three in five.
_FREE, _MODEL = (0.5, 1.5), (3.0, 2.0)
_MEMORY = 0.98  # weight of a tested token after each further one
_PROBE = 16  # rounds without a draft, after which a model drafts one token
_MAY_LOSE = 0.025  # share of a row's plain time
_AT_ONCE = 0.25  # share of it that is left, which a draft of several tokens may cost: a bad start is not the end
_CALLS = 0.005  # share of a plain round that calls of idle strategies may take
_CONTEXT_STEP = 128  # tokens: costs are looked up at its multiples


@dataclass
class Known:
    """One strategy in one row: Beta estimates of "a tested token is accepted", which forget.

    There are two, since right guesses come in runs: [0] after a rejected token, [1] after an accepted one.

    prior: accepted and rejected tokens
    right, wrong: accepted and rejected tokens so far
    last: 1 if the newest tested token was accepted
    guess, size: its last draft, and the text's length then
    read: ids that a draft model has read
    idle: rounds in which it was not asked
    """

    prior: tuple[float, float]
    right: list[float] = field(default_factory=lambda: [0.0, 0.0])
    wrong: list[float] = field(default_factory=lambda: [0.0, 0.0])
    last: int = 0
    guess: Sequence[int] = ()
    size: int = 0
    read: int = 0
    idle: int = 0

    def learn(self, right: int, wrong: bool) -> None:
        """Learn from `right` accepted tokens; wrong: the token after them was rejected."""
        for accepted in [1] * right + [0] * wrong:
            self.right[self.last] = _MEMORY * self.right[self.last] + accepted
            self.wrong[self.last] = _MEMORY * self.wrong[self.last] + 1 - accepted
            self.last = accepted

    def tokens(self, k: int) -> list[float]:
        """Return the expected accepted tokens of 0..k drafted ones; each one accepted raises the estimate."""
        total, chance, made, state, run = 0.0, 1.0, [0.0], self.last, self.last
        for _ in range(k):
            right = self.prior[0] + run + self.right[state]
            chance *= right / (right + self.prior[1] + self.wrong[state])
            total += chance
            made.append(total)
            state, run = 1, run + 1
        return made


@dataclass
class _Round:
    """What is decided about a round.

    rows: the rows that share it
    context: tokens of the longest text
    seconds: of the round by the width of its pass, without drafting
    tokens: accepted tokens that are expected of the drafts so far
    drafting: seconds
    longest: tokens of the longest draft
    """

    rows: list[int]
    context: int
    seconds: list[float]
    tokens: float = 0.0
    drafting: float = 0.0
    longest: int = 0


class LengthController:
    """Draft lengths of one call.

    chosen: the strategies whose length is chosen
    batch: slots
    free: the text does not depend on drafts; then the rows of a round share one length, since a pass is as wide as its
        longest draft. Otherwise each row chooses as if it were alone.
    `budget[row]`, in plain rounds, is what may be lost against plain decoding.
    `planned[row]`: the length of its next draft, where that starts before the verdict on this one (`plan`).
    """

    can_plan = True

    def __init__(
        self, drafters: Sequence[Drafter], chosen: Sequence[bool], costs: CostTable, shapes: Shapes, batch: int,
        free: bool,
    ):  # fmt: skip
        self.drafters, self.automatic, self.costs, self.shapes = drafters, list(chosen), costs, shapes
        self.free = [not d.runs_a_model for d in drafters]  # cost no pass, have no q
        self.together = free or all(self.free)
        self.batch = batch if self.together else 1
        self.longest = shapes.verify_width - 1
        most = [getattr(d, "n_max", None) for d in drafters]  # never more than a user allows
        self.most = [min(n, self.longest) if isinstance(n, int) else self.longest for n in most]
        self.known: list[dict[int, Known]] = [{} for _ in drafters]
        self.budget: dict[int, float] = {}
        self.waiting = 0  # prompts without a slot
        self.asked: dict[int, int] = {}  # row -> tokens to verify, in the open round
        self.planned: dict[int, int] = {}
        self.rounds: dict[int, _Round] = {}  # row -> its open round
        self.calls = _CALLS / max(1, sum(a and f for a, f in zip(self.automatic, self.free, strict=True)))
        self.passes = lru_cache(64)(self._passes)
        self.draft_pass = lru_cache(4096)(lambda b, step, w: costs.seconds("draft", b, step * _CONTEXT_STEP, w))

    # -- what the chain calls ------------------------------------------------------------------------------------

    def begin(self, row: int) -> None:
        """Forget a row: another text takes its slot."""
        for of_row in (self.budget, self.rounds, self.planned):
            of_row.pop(row, None)
        for known in self.known:
            known.pop(row, None)

    def open(self, requests: Sequence[DraftRequest], waiting: int = 0) -> None:
        """Begin a round: score the guesses that the text has answered since the last one. waiting: queued prompts."""
        self.waiting = waiting
        for r in requests:
            for index, free in enumerate(self.free):
                if free and self.automatic[index]:
                    _score(self._of(index, r), r)
            self.budget.setdefault(r.row, _MAY_LOSE * (r.n_max + 1))
        for group in [list(requests)] if self.together else [[r] for r in requests]:
            context = max(r.position for r in group)
            now = _Round([r.row for r in group], context, self.passes(context // _CONTEXT_STEP))
            self.rounds.update(dict.fromkeys(now.rows, now))

    def ask(self, index: int, requests: dict[int, DraftRequest]) -> dict[int, DraftRequest]:
        """Return the requests that strategy `index` gets, with its n_max; keys are the caller's."""
        if not self.automatic[index]:
            return requests
        asked: dict[int, DraftRequest] = {}
        for group in [list(requests)] if self.together else [[i] for i in requests]:
            rows = [requests[i] for i in group]
            k = self._take_plan(rows) or self._choose(index, rows)
            probed = self._begin_draft(index, rows, k)
            for i, request in zip(group, rows, strict=True):
                n = self.asked[request.row] = min(k, request.n_max)
                n += self.free[index] and probed  # one more than is verified: the text will show if it was right
                if n:
                    asked[i] = request.up_to(n)
        return asked

    def cut(self, index: int, request: DraftRequest, draft: Draft) -> Draft:
        """Cut a draft to what is verified. One with q already has the length that was asked for, and keeps it."""
        now = self.rounds[request.row]
        if not self.automatic[index]:
            now.longest = max(now.longest, min(len(draft), self.longest))
            return draft
        known = self._of(index, request)
        if self.free[index]:
            known.guess, known.size = [int(t) for t in draft.tokens], request.position + 1
            draft = draft.first(self.asked[request.row])
        if len(draft) > 0:
            n = len(draft) if self.free[index] else self.asked[request.row]
            now.tokens += known.tokens(n)[n]
            now.longest = max(now.longest, n)
        return draft

    def accept(self, row: int, winner: int | None, n_accepted: int, drafted: int) -> None:
        """End a round of `row`: count what it cost, learn what was tested. drafted: tokens proposed."""
        now = self.rounds.pop(row, None)
        if now is None or (winner is not None and not self.automatic[winner]):
            return  # a length that the user asked for costs the others nothing
        self.budget[row] += 1 + n_accepted - (now.seconds[1 + now.longest] + now.drafting) / now.seconds[1]
        if winner is not None and not self.free[winner]:
            known = self.known[winner][row]
            known.learn(n_accepted, wrong=drafted > n_accepted)
            known.read += min(n_accepted, max(0, drafted - 1))

    def plan(self, index: int, requests: Sequence[DraftRequest]) -> None:
        """Choose lengths of the next drafts of rows whose drafts are being verified, by what was known before them.

        Not where no draft pays, or where it would depend on the verdict if the budget allows it: there the next round
        chooses.
        """
        self.planned = {}
        drafted = [r for r in requests if r.row in self.rounds]
        for group in [drafted] if self.together and drafted else [[r] for r in drafted]:
            now = self.rounds[group[0].row]
            owed = (now.seconds[1 + now.longest] + now.drafting) / now.seconds[1] - 1.0
            nothing_yet = _Round(now.rows, now.context, now.seconds)
            k, at_worst = (self._best(index, group, nothing_yet, spent)[1] for spent in (0.0, owed))
            self.planned.update({r.row: k for r in group if k == at_worst > 0})

    def rests(self, requests: Sequence[DraftRequest]) -> bool:
        """True if no strategy drafts in the next round of rows which have no drafts in this one: nothing is learnt from
        a round without drafts, so that can be told before it has ended.

        requests: what would be asked then
        """
        if any(self.free) or not all(self.automatic):
            return False  # they look at the text, or do not ask
        for group in [list(requests)] if self.together else [[r] for r in requests]:
            context = max(r.position for r in group)
            now = _Round([r.row for r in group], context, self.passes(context // _CONTEXT_STEP))
            if any(self._choose(index, group, now) for index in range(len(self.drafters))):
                return False
        return True

    def rest(self, rows: Sequence[int]) -> None:
        """Count a round of rows of which `rests` was true."""
        for known in self.known:
            for row in rows:
                known[row].idle += 1

    # -- choosing ------------------------------------------------------------------------------------------------

    def _take_plan(self, rows: Sequence[DraftRequest]) -> int:
        """Return the length that was planned for all of these rows; 0 if none was for some."""
        planned = [self.planned.pop(r.row, 0) for r in rows]
        return max(planned) if all(planned) else 0

    def _choose(self, index: int, rows: Sequence[DraftRequest], now: _Round | None = None) -> int:
        """Choose the k with the most expected tokens per second, 0 included; rarely 1 in its place, to learn."""
        rate, k, probe = self._best(index, rows, now)
        later = [j for j in range(index + 1, len(self.free)) if self.automatic[j] and not self.free[j]]
        if k and any(self._best(j, rows, now)[0] > rate for j in later):
            return 0
        idle = min(self._of(index, r).idle for r in rows)
        return 1 if probe and k == 0 and not self.free[index] and idle >= _PROBE else k

    def _best(
        self, index: int, rows: Sequence[DraftRequest], now: _Round | None = None, owed: float = 0.0
    ) -> tuple[float, int, bool]:
        """Return (tokens per second, the k that gives them, True if one token is worth a try) for a strategy.

        now: the round; None = the open one
        owed: what the rows' budgets lose before it, in plain rounds
        """
        now, limits = now or self.rounds[rows[0].row], [min(r.n_max, self.most[index]) for r in rows]
        budgets = [self.budget[row] - owed for row in now.rows]
        # The call lasts as long as its slowest row, unless slots of fast rows are used again.
        budget = sum(budgets) / len(budgets) if self.waiting >= self.batch else min(budgets)
        first, step, reading = self._drafting(index, rows, now)
        made = [self._of(index, r).tokens(limit) for r, limit in zip(rows, limits, strict=True)]
        steps = self.drafters[index].steps
        best, best_k, probe = 0.0, 0, False
        for k in range(max(limits) + 1):
            seconds = now.seconds[1 + max(k, now.longest)] + now.drafting
            if k:
                seconds += first + step * (steps(k) - 1)
                if seconds > (1.0 + budget * (_AT_ONCE if k > 1 else 1.0)) * now.seconds[1]:
                    continue
            tokens = len(now.rows) + now.tokens + sum(row[min(k, len(row) - 1)] for row in made)
            rate = tokens / (seconds + (k > 0) * reading * tokens)
            if rate > best:
                best, best_k = rate, k
            if k == 1:
                probe = reading == 0 and (len(now.rows) + now.tokens + len(rows)) / seconds > best
        return best, best_k, probe

    def _begin_draft(self, index: int, rows: Sequence[DraftRequest], k: int) -> bool:
        """Count the seconds of drafting k tokens. Returns True if the strategy is called: also, now and then, if k = 0
        and it has no model."""
        now, known = self.rounds[rows[0].row], [self._of(index, r) for r in rows]
        first, step, _ = self._drafting(index, rows, now)
        called = k > 0
        if k == 0 and self.free[index]:
            every = math.ceil(first / (self.calls * now.seconds[1]))
            called = any(row.idle + 1 >= every for row in known)
        for row, r in zip(known, rows, strict=True):
            row.idle = 0 if called else row.idle + 1
            if k:
                row.read = r.position + 1
        if called:
            now.drafting += first + step * (self.drafters[index].steps(max(k, 1)) - 1)
        return called

    # -- costs ---------------------------------------------------------------------------------------------------

    def _drafting(self, index: int, rows: Sequence[DraftRequest], now: _Round) -> tuple[float, float, float]:
        """Return seconds of the first drafted token, of each further pass, and of reading new texts per token."""
        drafter = self.drafters[index]
        if self.free[index]:
            return self.costs.call(drafter.name) * len(rows), 0.0, 0.0
        if self.costs.draft is None or not drafter.uses_draft_model:
            step = drafter.step_share * (now.seconds[1] - self.costs.round)
            return step, step, 0.0
        place = now.context // _CONTEXT_STEP
        read = [(r, self._of(index, r).read) for r in rows]
        unread = max(r.position + 1 - known if known else 1 for r, known in read)
        fed = self.batch if self.shapes.together else 1  # rows to a pass of prefill
        new = [self.draft_pass(fed, place, r.position + 1) / (r.n_max + 1) for r, known in read if not known]
        step = self.draft_pass(self.batch, place, 1)
        return self.draft_pass(self.batch, place, unread), step, sum(new) / fed / len(now.rows)

    def _passes(self, step: int) -> list[float]:
        """Return the seconds of a round by the width of its pass, 0 included."""
        widths = [self.shapes.width(w) for w in range(self.longest + 2)]
        return [self.costs.seconds("target", self.batch, step * _CONTEXT_STEP, w) + self.costs.round for w in widths]

    def _of(self, index: int, request: DraftRequest) -> Known:
        return self.known[index].setdefault(request.row, Known(_FREE if self.free[index] else _MODEL))


def _score(known: Known, request: DraftRequest) -> None:
    """Compare a strategy's last guess with what was emitted."""
    emitted = [*(int(t) for t in request.tokens[known.size :]), int(request.last)] if known.guess else []
    answered = list(zip(known.guess, emitted, strict=False))
    right = next((i for i, (guess, token) in enumerate(answered) if guess != token), len(answered))
    known.learn(right, wrong=right < len(answered))
    known.guess = ()


def automatic(drafters: Sequence[Any], draft_length: str | None, default_chain: bool) -> list[bool]:
    """Say for each strategy if its length is chosen, given a call's option; trees keep their shape."""
    if draft_length is None:
        return [default_chain or d.automatic for d in drafters]
    return [draft_length == "auto" and not d.makes_trees for d in drafters]


def unlimited(drafter: Any, longest: int) -> Any:
    """Return a strategy with n_max = `longest` if its n_max is the default, so that no user asked for it."""
    known = getattr(type(drafter), "__dataclass_fields__", {}).get("n_max")
    if known is None or drafter.makes_trees:
        return drafter
    if not (drafter.automatic if drafter.runs_a_model else drafter.n_max == known.default):
        return drafter
    made = copy.copy(drafter)
    made.n_max = longest
    return made
