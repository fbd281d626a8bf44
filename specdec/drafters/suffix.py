"""suffix: earlier positions vote on the next token, weighted by how long their context agrees.

Source: the idea of SuffixDecoding (Oliaro et al. 2024) and SAM decoding (Hu et al. 2024), with a growing suffix array
in place of their tree and automaton (suffix_index.py). The earlier positions whose contexts agree longest with the
row's end are found, in the row's own text and in a *store* of other texts, if there is one. Each votes for the token
that followed it; a vote weighs `order_weight` to the power of the number of agreeing tokens, and less with age: half at
`half_age` tokens, a third at twice that. Positions that agree except in the newest token vote too, as if they agreed in
`gap_cost` tokens fewer (None: they do not): so a copy continues after one word was changed. The winner is drafted,
those who voted otherwise leave, and so on: the draft follows the most likely branch of the suffix tree. A vote that
reaches the end of the row continues in the draft itself, so that a loop is drafted as long as it may be.

*Adaptive length*: a token with the share s of the votes, whose best voter agrees in n tokens by then, is taken to be
right with probability s * n / (n + `novelty`); the draft ends where the product of these is below `p_min` (0: never).
On texts that no published figure uses the product was within 0.07 of the observed frequency. The defaults were chosen
on those texts too: continuations of HumanEval and GSM8K prompts.

*SuffixDecoding's own choice* (`min_token_prob`): every length of agreement makes a draft of the most frequent
continuations, votes unweighed, which ends where the product of their shares is below `min_token_prob`; the draft with
the largest sum of these products, its expected accepted tokens, is taken. *SAM decoding's fallback* is a chain: with
`min_match` nothing is proposed below that agreement, and the next strategy is asked.

Cost: one binary search per segment and some vector operations over the voters, for any length of row. Memory: see
suffix_index.py; the row's own buffer is at most 16 bytes per token.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec.drafters.base import DraftContext, DraftRequest, RowDrafter, Tokens, as_array
from specdec.drafters.options import number, whole
from specdec.drafters.suffix_index import SuffixIndex, SuffixStore
from specdec.errors import SpecdecError


@dataclass
class Suffix(RowDrafter):
    """State: an index per row. Raises SpecdecError for parameters out of range.

    n_max: most tokens to propose
    p_min, novelty: adaptive length; p_min 0 = off
    depth: most context tokens that are compared
    voters: how many positions vote
    order_weight, half_age, gap_cost: weights of votes, the last two in tokens
    min_match: least agreement, in tokens, that makes a draft
    max_spec_factor: a draft has at most so many tokens for each that agrees; None: no such limit
    min_token_prob: SuffixDecoding's choice of a draft; None: the votes above
    store: a `SuffixStore`; None: the row's own text alone
    remember: rows enter the store when they end
    """

    n_max: int = whole(8)
    p_min: float = number(0.0, 0.0, 1.0)
    depth: int = whole(16)
    voters: int = whole(8)
    order_weight: float = number(4.0, 1.0, 1e6)
    half_age: float = number(100.0, 1.0, 1e12)
    gap_cost: float | None = number(8.0, 0.0, 1e6, optional=True)
    novelty: float = number(2.0, 0.0, 1e30)
    min_match: int = whole(0, least=0)
    max_spec_factor: float | None = number(None, 0.0, 1e6)
    min_token_prob: float | None = number(None, 0.0, 1.0)
    store: SuffixStore | None = None
    remember: bool = False
    name: str = field(init=False, default="suffix")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_match > self.depth:
            raise SpecdecError(
                f"suffix: min_match={self.min_match} is above depth={self.depth}: give at most the depth"
            )
        if self.min_token_prob is not None:
            self.gap_cost = None  # only what agrees in all tokens is counted
        if self.store is not None and not isinstance(self.store, SuffixStore):
            raise SpecdecError(f"suffix: store must be a SuffixStore, got {type(self.store).__name__}")
        if self.remember and self.store is None:
            self.store = SuffixStore(depth=self.depth)
        self._orders, self._loudness = self._tables()
        self._rows: dict[int, SuffixIndex] = {}

    @classmethod
    def without_effect(cls, options: Mapping[str, Any]) -> Mapping[str, str]:
        if (least := options.get("min_token_prob")) is not None:
            return dict.fromkeys(("p_min", "novelty", "gap_cost"), f"min_token_prob={least} chooses without votes")
        return {} if options.get("p_min") else {"novelty": "it is about how certain votes are, which `p_min` asks"}

    def _tables(self) -> tuple[list[float], np.ndarray]:
        """Build two tables by the number of agreeing tokens, [2 * depth + 1] each.

        The first: how many tokens they count as. The second: the weight of the vote before it fades; below zero: no
        vote. Entries from depth + 1 on are for positions that skip the newest token, which is counted.
        """
        agreeing = np.concatenate([np.arange(self.depth + 1), np.arange(self.depth)])
        orders = agreeing - np.repeat([0.0, self.gap_cost or 0.0], [self.depth + 1, self.depth])
        return orders.tolist(), np.where(agreeing > 0, float(self.order_weight) ** np.minimum(orders, _LOUDEST), -1.0)

    def fresh(self, context: DraftContext) -> Suffix:
        made: Suffix = super().fresh(context)
        before = self.inherited(context)
        made._rows = {}
        if before is not None:  # moved, not shared: closing the old drafter must not end these rows
            made._rows, before._rows = before._rows, {}
        return made

    @property
    def shares_state(self) -> bool:
        return self.remember

    def parameters(self) -> dict[str, Any]:
        shown = super().parameters()
        return {**shown, "store": None if self.store is None else f"{self.store.size} tokens"}

    def row_bytes(self, row: int) -> int:
        """Return the bytes of a row's index."""
        return self._rows[row].nbytes if row in self._rows else 0

    def begin(self, row: int, prompt: Tokens) -> None:
        """Start over, or continue if the prompt extends what the row holds."""
        tokens, index = as_array(prompt), self._rows.get(row)
        if index is None or not index.begins(tokens):
            self._retire(row)
            self._rows[row] = index = SuffixIndex(self.depth)
        index.extend(tokens[index.size :])
        index.file()

    def close(self) -> None:
        for row in list(self._rows):
            self._retire(row)

    def _retire(self, row: int) -> None:
        index = self._rows.pop(row, None)
        if index is not None and self.remember and self.store is not None:
            self.store.add(index.tokens())

    def _propose(self, request: DraftRequest) -> list[int]:
        known = self._rows.get(request.row)
        if known is None or known.size > len(request.tokens) + 1:
            self.begin(request.row, request.tokens)
        index = self._rows[request.row]
        if index.size <= len(request.tokens):
            index.extend(request.tokens[index.size :])
            index.extend([request.last])
            index.file()
        limit = request.limit(self.n_max)
        voters = self._voters(index, limit)
        if self.min_token_prob is not None:
            return self._most_frequent(voters, limit)
        match = max((agreed for _, _, agreed in voters if agreed <= self.depth), default=0)
        return self._follow_majority(voters, limit)[: self._allowed(match, limit)] if match >= self.min_match else []

    def _allowed(self, match: int, limit: int) -> int:
        """Return how many tokens an agreement of `match` may draft."""
        return limit if self.max_spec_factor is None else min(limit, int(self.max_spec_factor * match))

    def _most_frequent(self, voters: list[Voter], limit: int) -> list[int]:
        """Draft the most frequent continuation of the length of agreement from which most is expected, the longest
        among equals."""
        chosen: list[int] = []
        expected = 0.0
        for match in sorted({n for _, _, n in voters if max(1, self.min_match) <= n <= self.depth}, reverse=True):
            alike = [following for following, _, agreed in voters if match <= agreed <= self.depth]
            drafted: list[int] = []
            share, total = 1.0, 0.0
            for i in range(self._allowed(match, limit)):
                choices = [drafted[-2 - f[i]] if f[i] < -1 else f[i] for f in alike]
                [(best, count)] = Counter(t for t in choices if t >= 0).most_common(1) or [(-1, 0)]
                share *= count / len(alike)
                if count == 0 or share < (self.min_token_prob or 0.0):
                    break
                drafted.append(best)
                total += share
                alike = [f for f, token in zip(alike, choices, strict=True) if token == best]
            if total > expected:
                chosen, expected = drafted, total
        return chosen

    def _voters(self, index: SuffixIndex, limit: int) -> list[Voter]:
        """Find the positions that vote, in the row and in the store."""
        found = self._found(index, index.newest(), limit, 0)
        if self.store is not None:
            found += self._found(self.store.index, index.newest(), limit, index.size)
        return found

    def _found(self, source: SuffixIndex, query: np.ndarray, limit: int, older: int) -> list[Voter]:
        """Find the voters of most weight in one index; older: tokens to add to their age, 0 for the row's own."""
        queries = [(query, self.voters)]
        if self.gap_cost is not None and len(query) > 1:
            # The row's end agrees with itself except in the newest token: one more is asked, and it drops out.
            queries.append((query[1:], self.voters + 1))
        nearest = source.nearest(queries)
        for others in nearest[1:]:
            others += 1
        positions = np.concatenate(nearest)
        agreed = source.agreement(positions, query, len(positions) - len(nearest[0]))
        agreed[len(nearest[0]) :] += self.depth
        age = source.size - 1 + older - positions
        weights = self._loudness[agreed] / (1 + age / self.half_age)
        loudest = (-weights).argsort(kind="stable")[: 2 * self.voters + 1]
        following = source.successors(positions[loudest], limit).tolist()
        found = []
        columns = following, weights[loudest].tolist(), agreed[loudest].tolist(), age[loudest].tolist()
        for tokens, weight, agreement, known in zip(*columns, strict=True):
            if weight < 0 or known == older:
                continue
            if older == 0 and known < limit:
                tokens[known:] = range(-2, known - limit - 2, -1)
            found.append((tokens, weight, agreement))
        return found[: 2 * self.voters]

    def _follow_majority(self, voters: list[Voter], limit: int) -> list[int]:
        """Draft the majority's choice, token by token; equal weights: the first voter's choice."""
        drafted: list[int] = []
        certainty = 1.0
        differing = 0  # how many voters were left when they last differed
        for i in range(limit):
            if not self.p_min and len(voters) != differing:
                if _agree(voters, i):
                    rest = (drafted[-2 - t] if t < -1 else t for t in voters[0][0][i:])
                    drafted += itertools.takewhile(lambda t: t >= 0, rest)
                    break
                differing = len(voters)
            tally: dict[int, float] = {}
            choices = []
            for following, weight, _ in voters:
                token = following[i]
                token = drafted[-2 - token] if token < -1 else token
                choices.append(token)
                if token >= 0:
                    tally[token] = tally.get(token, 0.0) + weight
            if not tally:
                break
            best = max(tally, key=tally.__getitem__)
            voters = [voter for voter, token in zip(voters, choices, strict=True) if token == best]
            if self.p_min:
                agreement = max(0.5, *(self._orders[agreed] for _, _, agreed in voters)) + i
                certainty *= tally[best] / sum(tally.values()) * agreement / (agreement + self.novelty)
                if certainty < self.p_min:
                    break
            drafted.append(best)
        return drafted


def _agree(voters: list[Voter], start: int) -> bool:
    """True if all voters saw the same from token `start` on."""
    first = voters[0][0][start:] if voters else []
    return bool(voters) and all(following[start:] == first for following, _, _ in voters)


Voter = tuple[list[int], float, int]
"""(tokens it saw next, the weight of its vote, the index of its agreement in the tables). An entry below zero is no
token: -1 = the end of a text, -2 - i = the i-th token of the draft."""

_LOUDEST = 40  # agreement beyond this adds nothing: float64 has its limits
