"""Automatic draft length: how many tokens of a strategy's draft are worth verifying in this round (0: none).

Why and how: docs/automatic_length.md. The chain opens a round (`open`), asks before each strategy (`ask`), cuts its
draft (`cut`) and tells how the round ended (`accept`). Only the emitted text is learnt from, and from a draft how many
tokens were accepted and if the next one was rejected; so under leviathan the distribution is still the target's.

Every row decides from its own past. If the text does not depend on drafts (`together`), the rows of a round share one
length, because a pass is as wide as its longest draft; otherwise each row chooses as if it were alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from specdec.drafters.base import Draft, Drafter, DraftRequest
from specdec.drafters.costs import CostTable
from specdec.models.runner import Shapes

# Chosen on continuations of HumanEval and GSM8K prompts and on made-up sequences, which no published figure uses.
_LONGEST_STREAK = 9  # longer ones count as this
_PLACES = [0, 1, 2, 3, 3, 4, 4, 4, 4] + [5] * 600  # streak -> entry of a table of rates
_PRIOR_FREE = (0.25, 0.5, 0.65, 0.75, 0.8, 0.9)
_PRIOR_MODEL = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85)
_PRIOR_WEIGHT = 10.0  # guesses
_MEMORY = 0.98  # weight of a guess after each further one
_FIRST_BUDGET = 0.02  # share of the plain time to the row's limit that may be spent before anything was gained
_BUDGET_SHARE = 0.01  # share of every token's plain time that may be spent
_ROUND_SHARE = 0.5  # share of its budget that a row may lose in one round by more than one drafted token
_FIRST_RETRY = 8  # rounds
_CONTEXT_STEP = 128  # tokens: costs are looked up at its multiples
_PROBE_SHARE = 0.005  # share of a plain round that probing idle strategies may cost on average, for all rows together
_EARLY_PROBES = 3  # calls beyond the budget for rows that are guessed right: a pause would end their streak


class Acceptance:
    """How often a strategy guesses right in one row, by its streak: Beta estimates that forget. prior [6]: rates."""

    def __init__(self, prior: Sequence[float], streak: int = 0):
        self.prior, self.streak = prior, streak
        self.right = [0.0] * len(prior)  # right guesses, which add to the prior
        self.tested = [0.0] * len(prior)

    def learn(self, right: int, wrong: bool) -> None:
        """Learn from `right` accepted tokens; wrong: the token after them was rejected."""
        for is_right in [True] * right + [False] * wrong:
            place = _PLACES[min(self.streak, _LONGEST_STREAK)]
            self.right = [_MEMORY * x for x in self.right]
            self.tested = [_MEMORY * x for x in self.tested]
            self.right[place] += is_right
            self.tested[place] += 1.0
            self.streak = self.streak + 1 if is_right else 0

    def expected(self, longest: int) -> list[float]:
        """Return the expected tokens of a round with 0..longest drafted tokens, the one that follows included."""
        total, accepted = 1.0, 1.0  # expected tokens; probability that all so far are accepted
        tokens, start = [total], min(self.streak, _LONGEST_STREAK)
        for place in _PLACES[start : start + longest]:
            accepted *= (self.prior[place] * _PRIOR_WEIGHT + self.right[place]) / (_PRIOR_WEIGHT + self.tested[place])
            total += accepted
            tokens.append(total)
        return tokens


@dataclass
class _RowOf:
    """One strategy in one row.

    guess, size: its last draft, and the text's length then
    read: ids that a draft model has read
    idle: rounds in which it was not asked
    retry: idle rounds after which it is asked again
    """

    acceptance: Acceptance
    guess: Sequence[int] = ()
    size: int = 0
    read: int = 0
    idle: int = 0
    retry: int = _FIRST_RETRY


@dataclass
class _Round:
    """What is decided about a round.

    rows: the rows that share it
    context: tokens of the longest text
    tokens: extra tokens expected from drafts
    drafting: seconds spent on drafting
    longest: tokens of the longest draft
    """

    rows: list[int]
    context: int
    tokens: float = 0.0
    drafting: float = 0.0
    longest: int = 0


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


class LengthController:
    """Draft lengths of one call.

    chosen: the strategies whose length is chosen
    batch: slots
    free: the text does not depend on drafts, so rows may share a length
    `budget[row]`, in plain rounds of the row, is what may be lost against plain decoding.
    """

    def __init__(
        self, drafters: Sequence[Drafter], chosen: Sequence[bool], costs: CostTable, shapes: Shapes, batch: int,
        free: bool,
    ):  # fmt: skip
        self.automatic = list(chosen)
        self.free = [not d.runs_a_model for d in drafters]  # cost no pass, have no q
        self.uses_draft = [d.uses_draft_model for d in drafters]
        self.names = [d.name for d in drafters]
        self.costs, self.shapes, self.together = costs, shapes, free or all(self.free)
        self.batch = batch if self.together else 1
        self.longest = shapes.verify_width - 1
        most = [getattr(d, "n_max", None) for d in drafters]  # never more than a user allows
        self.most = [min(n, self.longest) if isinstance(n, int) else self.longest for n in most]
        self.probe_share = _PROBE_SHARE / max(1, sum(a and f for a, f in zip(self.automatic, self.free, strict=True)))
        self.known: list[dict[int, _RowOf]] = [{} for _ in drafters]
        self.budget: dict[int, float] = {}
        self.probe_budgets: dict[tuple[int, int], float] = {}  # (strategy, row or -1: all) -> seconds
        self.waiting = 0  # prompts without a slot
        self.asked: dict[int, int] = {}  # row -> tokens to verify, in the open round
        self.rounds: dict[int, _Round] = {}  # row -> its open round
        self.passes = lru_cache(maxsize=64)(self._passes)
        self.draft_passes = lru_cache(maxsize=4096)(
            lambda batch, step, width: costs.seconds("draft", batch, step * _CONTEXT_STEP, width)
        )

    # -- what the chain calls ------------------------------------------------------------------------------------

    def begin(self, row: int) -> None:
        """Forget a row: another text takes its slot."""
        self.budget.pop(row, None)
        self.rounds.pop(row, None)
        for index in range(len(self.names)):
            self.known[index].pop(row, None)
            self.probe_budgets.pop((index, row), None)

    def open(self, requests: Sequence[DraftRequest], waiting: int = 0) -> None:
        """Begin a round: score the guesses that the text has answered since the last one. waiting: queued prompts."""
        self.waiting = waiting
        for r in requests:
            for index, free in enumerate(self.free):
                if free and self.automatic[index]:
                    self._score(self._row(index, r.row), r)
            self.budget.setdefault(r.row, _FIRST_BUDGET * (r.n_max + 1))
        shared = _Round([r.row for r in requests], max(r.position for r in requests))
        for r in requests:
            self.rounds[r.row] = shared if self.together else _Round([r.row], r.position)

    def ask(self, index: int, requests: dict[int, DraftRequest]) -> dict[int, DraftRequest]:
        """Return the requests that strategy `index` gets, with its n_max; keys are the caller's."""
        if not self.automatic[index]:
            return requests
        asked: dict[int, DraftRequest] = {}
        for group in [list(requests)] if self.together else [[i] for i in requests]:
            rows = [requests[i] for i in group]
            k = self._choose(index, rows)
            self._spend(index, rows, k)
            probed = self._probe(index, rows) if self.free[index] and k == 0 else {r.row for r in rows}
            for i, request in zip(group, rows, strict=True):
                n = self.asked[request.row] = min(k, request.n_max)
                if self.free[index] and request.row in probed:
                    n += 1  # one more than is verified: the text will show if it was right
                if n:
                    asked[i] = request.up_to(n)
        return asked

    def cut(self, index: int, request: DraftRequest, draft: Draft) -> Draft:
        """Cut a draft to what is verified. One with q already has the length that was asked for, and keeps it."""
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
        """End a round of `row`: earn its tokens, pay its time, learn what was tested. drafted: tokens proposed."""
        now = self.rounds.pop(row, None)
        if now is None or (winner is not None and not self.automatic[winner]):
            return  # a length that the user asked for costs the others nothing
        plain = self.seconds(now.context, 1)
        paid = (self.seconds(now.context, 1 + now.longest) + now.drafting) / plain
        self.budget[row] += (1.0 + _BUDGET_SHARE) * (1 + n_accepted) - paid
        if winner is None or self.free[winner]:
            return
        known = self._row(winner, row)
        known.acceptance.learn(n_accepted, wrong=drafted > n_accepted)
        known.read += min(n_accepted, max(0, drafted - 1))
        if 0 < drafted == n_accepted:
            known.retry = _FIRST_RETRY

    # -- choosing ------------------------------------------------------------------------------------------------

    def _choose(self, index: int, rows: Sequence[DraftRequest]) -> int:
        """Choose the k in 0..longest with the most expected tokens per second that the rows' budget allows."""
        now = self.rounds[rows[0].row]
        known = [self._row(index, r.row) for r in rows]
        limits = [min(r.n_max, self.most[index]) for r in rows]
        seconds = self._round_seconds(index, rows, max(limits))
        plain, budget = self.seconds(now.context, 1), self._budget(now)
        one, more = (1.0 + budget) * plain, (1.0 + min(budget, _ROUND_SHARE * budget)) * plain
        affordable = [k for k, s in enumerate(seconds) if k == 0 or s <= (one if s <= seconds[1] else more)]
        if affordable == [0]:
            return 0
        others = len(now.rows) - len(rows) + now.tokens
        tokens = self._expected(known, limits, affordable[-1], others)
        reading = self._reading(index, rows)
        rates = [tokens[k] / (seconds[k] + (k > 0) * reading * tokens[k] / len(now.rows)) for k in affordable]
        best = affordable[rates.index(max(rates))]
        unknown = reading > 0 and not any(row.read for row in known)
        if self.free[index] or best or affordable[1] != 1 or unknown:
            return best
        right = [tokens[0] + len(rows) * k for k in range(len(seconds))]
        if_right = max(n / (s + reading * n / len(now.rows)) for n, s in zip(right[1:], seconds[1:], strict=True))
        return 1 if if_right > rates[0] and self._is_due(known) else 0

    def _expected(self, known: Sequence[_RowOf], limits: Sequence[int], longest: int, others: float) -> list[float]:
        """Return the expected tokens of a round with 0..longest drafted tokens per row, at most a row's limit."""
        total = [others] * (longest + 1)
        for row, limit in zip(known, limits, strict=True):
            tokens = row.acceptance.expected(min(limit, longest))
            tokens += [tokens[-1]] * (longest - limit)
            total = [x + y for x, y in zip(total, tokens, strict=True)]
        return total

    def _budget(self, now: _Round) -> float:
        """The batch may spend no more than its row with the smallest budget: the call lasts as long as that row.

        If enough prompts wait, slots of fast rows are used again, and the mean counts.
        """
        budgets = [self.budget[row] for row in now.rows]
        return sum(budgets) / len(budgets) if self.waiting >= self.batch else min(budgets)

    def _is_due(self, known: Sequence[_RowOf]) -> bool:
        """True if an idle strategy that costs a pass is to be tried again, although it does not look worth it."""
        for row in known:
            row.idle += 1
        if all(row.idle < row.retry for row in known):
            return False
        for row in known:
            row.retry *= 2
        return True

    def _probe(self, index: int, rows: Sequence[DraftRequest]) -> set[int]:
        """Pick idle rows to probe, within the budget: first those that are guessed right, then the longest idle."""
        now, cost = self.rounds[rows[0].row], self.costs.call(self.names[index])
        known = {r.row: self._row(index, r.row) for r in rows}
        for row_of in known.values():
            row_of.idle += 1
        key = (index, -1 if self.together else rows[0].row)
        budget = self.probe_budgets.get(key, 0.0) + self.probe_share * self.seconds(now.context, 1)
        guessed = sum(row.acceptance.streak > 0 for row in known.values())
        paid = budget // cost if cost else len(rows)  # calls; a float, perhaps below 0
        n = int(max(0, min(len(rows), max(paid, min(guessed, paid + _EARLY_PROBES)))))
        self.probe_budgets[key] = min(budget - n * cost, len(rows) * cost)
        now.drafting += n * cost
        if n == 0:
            return set()
        probed = sorted(known, key=lambda row: (known[row].acceptance.streak == 0, -known[row].idle))[:n]
        for row in probed:
            known[row].idle = 0
        return set(probed)

    # -- costs ---------------------------------------------------------------------------------------------------

    def _spend(self, index: int, rows: Sequence[DraftRequest], k: int) -> None:
        """Count the seconds of drafting k tokens."""
        if k == 0:
            return
        first, step = self._drafting(index, rows)
        self.rounds[rows[0].row].drafting += first + (k - 1) * step
        for r in rows:
            known = self._row(index, r.row)
            known.idle, known.read = 0, r.position + 1

    def _round_seconds(self, index: int, rows: Sequence[DraftRequest], longest: int) -> list[float]:
        """Return the seconds of the round if strategy `index` drafts 0..longest tokens for `rows`."""
        now = self.rounds[rows[0].row]
        first, step = self._drafting(index, rows)
        rounds = self._rounds(now.context)
        drafting = [0.0, *(first + k * step for k in range(longest))]
        return [rounds[1 + max(k, now.longest)] + now.drafting + drafting[k] for k in range(longest + 1)]

    def _drafting(self, index: int, rows: Sequence[DraftRequest]) -> tuple[float, float]:
        """Return the seconds of drafting one token, and of each further one; reading new texts is in `_reading`."""
        if self.free[index]:
            return self.costs.call(self.names[index]) * len(rows), 0.0
        if self.costs.draft is None or not self.uses_draft[index]:
            return 0.0, 0.0
        read = [(r.position + 1, self._row(index, r.row).read) for r in rows]
        unread = max(size - known if known else 1 for size, known in read)
        context = self.rounds[rows[0].row].context
        return self._draft_pass(self.batch, context, unread), self._draft_pass(self.batch, context, 1)

    def _reading(self, index: int, rows: Sequence[DraftRequest]) -> float:
        """Return the seconds per token that a draft model takes for prompts it has not read.

        They are spread over the tokens that these rows may emit, and must be regained several times over.
        """
        if self.free[index] or self.costs.draft is None or not self.uses_draft[index]:
            return 0.0
        unread = [r for r in rows if self._row(index, r.row).read == 0]
        fed = self.batch if self.shapes.together else 1  # rows to a pass
        # The more rows share a pass, the sooner the budget of one of them ends, and with it all drafting.
        often = (1 + self.batch) / 2
        return often * sum(self._draft_pass(fed, r.position, r.position + 1) / (r.n_max + 1) for r in unread) / fed

    def _draft_pass(self, batch: int, context: int, width: int) -> float:
        return self.draft_passes(batch, context // _CONTEXT_STEP, width)

    def seconds(self, context: int, width: int) -> float:
        """Return the seconds of a round without drafting, whose pass feeds `width` tokens to each row."""
        return self._rounds(context)[width]

    def _rounds(self, context: int) -> list[float]:
        """Return `seconds` by width, 0 included."""
        return self.passes(context // _CONTEXT_STEP)

    def _passes(self, step: int) -> list[float]:
        widths = [self.shapes.width(w) for w in range(self.longest + 2)]
        return [self.costs.seconds("target", self.batch, step * _CONTEXT_STEP, w) + self.costs.round for w in widths]

    # -- rows ----------------------------------------------------------------------------------------------------

    def _row(self, index: int, row: int) -> _RowOf:
        known = self.known[index].get(row)
        if known is None:
            known = _RowOf(Acceptance(_PRIOR_FREE if self.free[index] else _PRIOR_MODEL))
            self.known[index][row] = known
        return known

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
