"""suffix, draft for draft, against a literal reading of its rules that sorts lists; wrong rules as controls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdec import DraftRequest, Suffix, SuffixStore
from specdec.drafters import suffix_index
from specdec.drafters.suffix_index import SEPARATOR

TAIL = 7
OPTIONS: list[dict[str, Any]] = [
    {}, {"p_min": 0.05, "voters": 3}, {"gap_cost": None, "depth": 3}, {"order_weight": 1.0, "half_age": 5.0},
    {"depth": 40, "gap_cost": 1.0, "n_max": 12}, {"voters": 1},
]  # fmt: skip


class Literal:
    """One text: which positions each look-up finds, by definition."""

    def __init__(self, depth: int):
        self.depth, self.text, self.filed = depth, [], 0
        self.segments: list[list[int]] = []

    def context(self, position: int) -> list[int]:
        return [*self.text[: position + 1][::-1], *[SEPARATOR] * self.depth][: self.depth]

    def grow(self, tokens: list[int]) -> None:
        self.text += tokens
        end = len(self.text) - 1
        if end - self.filed <= TAIL:
            return
        fresh, self.filed = list(range(self.filed, end)), end
        while self.segments and len(self.segments[-1]) <= 2 * len(fresh):
            fresh = self.segments.pop() + fresh
        self.segments.append(sorted(fresh, key=self.context))

    def nearest(self, query: list[int], most: int) -> list[int]:
        if not query:
            return []
        found = []
        for segment in self.segments:
            at = sum(self.context(j) < query for j in segment)
            found += segment[max(0, at - most) : at + most]
        return found + [j for j in range(len(self.text) - 2, self.filed - 1, -1) if self.text[j] == query[0]]

    def agreement(self, position: int, query: list[int], gap: bool) -> int:
        n = int(gap)
        while n < len(query) and position - n >= 0 and self.text[position - n] == query[n]:
            n += 1
        return n - gap


def found(drafter: Suffix, source: Literal, query: list[int], older: int) -> list[tuple[float, float, int, Literal]]:
    """(weight, agreement, position, text) of the loudest voters."""
    votes = [(j, False) for j in source.nearest(query, drafter.voters)]
    if drafter.gap_cost is not None:
        votes += [(j + 1, True) for j in source.nearest(query[1:], drafter.voters + 1) if j + 2 < len(source.text)]
    voters = []
    for position, gap in votes:
        agreed = source.agreement(position, query, gap)
        if agreed > 0:
            order = agreed - gap * (drafter.gap_cost or 0.0)
            age = len(source.text) - 1 - position + older
            weight = drafter.order_weight ** min(order, 40) / (1 + age / drafter.half_age)
            voters.append((weight, order, position, source))
    return sorted(voters, key=lambda voter: -voter[0])[: 2 * drafter.voters]


def draft(drafter: Suffix, row: Literal, store: Literal | None) -> list[int]:
    query = row.text[::-1][: row.depth]
    voters = found(drafter, row, query, 0)
    if store is not None:
        voters += found(drafter, store, query[: store.depth], len(row.text))
    drafted: list[int] = []
    certainty = 1.0
    while len(drafted) < drafter.n_max:
        tally: dict[int, float] = {}
        choices = []
        for weight, _, position, source in voters:
            text = source.text + drafted if source is row else source.text
            at = position + 1 + len(drafted)
            choices.append(text[at] if at < len(text) and text[at] != SEPARATOR else None)
            if choices[-1] is not None:
                tally[choices[-1]] = tally.get(choices[-1], 0.0) + weight
        if not tally:
            break
        best = max(tally, key=tally.__getitem__)
        voters = [voter for voter, choice in zip(voters, choices, strict=True) if choice == best]
        agreed = max(0.5, *(order for _, order, _, _ in voters)) + len(drafted)
        certainty *= tally[best] / sum(tally.values()) * agreed / (agreed + drafter.novelty)
        if drafter.p_min and certainty < drafter.p_min:
            break
        drafted.append(best)
    return drafted


def text_of(alphabet: int, seed: int, size: int = 260) -> list[int]:
    """Random ids with copies of earlier passages, one token changed, and a loop at the end."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, alphabet, size // 3).tolist()
    while len(text) < size - 20:
        start = int(rng.integers(0, len(text) - 12))
        text += [*text[start : start + int(rng.integers(1, 12))], int(rng.integers(0, alphabet))]
    return text + text[-3:] * 7


def differences(options: dict[str, Any], alphabet: int, seed: int, stored: int = 0) -> int:
    """In how many rounds of a growing text the drafts differ. stored: depth of the store, 0 for none."""
    text, rng = text_of(alphabet, seed), np.random.default_rng(seed)
    store, theirs = (SuffixStore(depth=stored), Literal(stored)) if stored else (None, None)
    for i in range(3 if stored else 0):
        earlier = text_of(alphabet, 100 * seed + i, 60)
        store.add(earlier)
        theirs.grow([*earlier, SEPARATOR])
        if i == 1:
            store.freeze()
            theirs.filed = len(theirs.text) - 1
            theirs.segments = [sorted(range(theirs.filed), key=theirs.context)]
    drafter = Suffix(**options, store=store)
    size, wrong, literal = 30, 0, Literal(drafter.depth)
    drafter.begin(0, text[:size])
    literal.grow(text[:size])
    while size < len(text):
        size = min(size + int(rng.integers(1, 5)), len(text))
        literal.grow(text[len(literal.text) : size])
        [got] = drafter.draft([DraftRequest(0, np.array(text[: size - 1]), text[size - 1], 0, size - 1)])
        wrong += [int(t) for t in got.tokens] != draft(drafter, literal, theirs)
    return wrong


@pytest.fixture(autouse=True)
def _short_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_index, "TAIL", TAIL)


@pytest.mark.fast(8, full=8)
@pytest.mark.parametrize("alphabet", [2, 5, 60, 40_000])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_drafts_are_those_of_the_literal_rules(options: dict[str, Any], alphabet: int) -> None:
    assert differences(options, alphabet, seed=alphabet) == 0


@pytest.mark.fast(2)
@pytest.mark.parametrize("depth", [3, 16, 32])
def test_drafts_from_a_store_are_too_whatever_its_depth(depth: int) -> None:
    assert [differences({}, alphabet, seed=alphabet, stored=depth) for alphabet in (3, 30)] == [0, 0]


@pytest.mark.parametrize("fault", ["place", "gaps", "tail"])
def test_a_wrong_rule_is_found_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index, places = suffix_index.SuffixIndex, suffix_index._Segment.places
    if fault == "place":
        monkeypatch.setattr(suffix_index._Segment, "places", lambda *a: [at + 1 for at in places(*a)])
    elif fault == "gaps":
        monkeypatch.setattr(index, "agreement", lambda self, p, q, gaps=0, old=index.agreement: old(self, p, q, 0))
    else:
        monkeypatch.setattr(suffix_index, "TAIL", TAIL + 1)
    assert sum(differences({"voters": 1}, alphabet, seed=alphabet) for alphabet in (2, 5, 60)) > 0
