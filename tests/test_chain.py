"""The chain's semantics, which are llama.cpp's: who is asked, who wins, what is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specdec.drafters import make_drafters
from specdec.drafters.base import Draft, DraftRequest
from specdec.drafters.chain import Chain, upstream_order


@dataclass
class Scripted:
    """Proposes what it is told for each row; remembers what it was told."""

    name: str
    proposals: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)  # proposals whose length only the device knows
    asked: list[list[int]] = field(default_factory=list)
    told: list[tuple[int, int, bool]] = field(default_factory=list)

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        return None

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.asked.append([r.row for r in requests])
        return [self._one(r.row) for r in requests]

    def _one(self, row: int) -> Draft:
        length = torch.tensor(self.lengths[row]) if row in self.lengths else None
        return Draft(self.proposals.get(row, []), length=length, drafter=self.name)

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        self.told.append((row, n_accepted, is_other))


def requests(*rows: int, n_max: int = 0) -> list[DraftRequest]:
    return [DraftRequest(row, [1, 2], 3, n_max) for row in rows]


def test_the_first_draft_that_is_not_empty_wins_row_by_row() -> None:
    first, second, third = Scripted("a", {0: [7, 8]}), Scripted("b", {0: [1], 1: [9]}), Scripted("c", {0: [2]})
    chain = Chain([first, second, third])
    drafts = chain.draft(requests(0, 1))
    assert [list(d.tokens) for d in drafts] == [[7, 8], [9]]
    assert [d.drafter for d in drafts] == ["a", "b"]
    assert (first.asked, second.asked, third.asked) == ([[0, 1]], [[1]], [])  # nobody waits: the third is not asked


def test_counters_count_calls_drafts_and_truncated_tokens() -> None:
    chain = Chain([Scripted("a", {0: [7, 8, 9], 1: [4]}), Scripted("b")])
    chain.begin(0, [1, 2])
    chain.begin(1, [1, 2])
    assert [len(d) for d in chain.draft(requests(0, 1, n_max=2))] == [2, 1]
    chain.accept(0, 2)
    chain.accept(1, 0)
    a, b = chain.counters["a"], chain.counters["b"]
    assert (a.n_call_begin, a.n_call_draft, a.n_call_accept) == (2, 1, 2)
    assert (a.n_gen_drafts, a.n_gen_tokens, a.n_acc_drafts, a.n_acc_tokens) == (2, 3, 1, 2)
    assert a.n_acc_tokens_per_pos == [1, 1]
    assert (b.n_call_begin, b.n_call_draft, b.n_call_accept) == (2, 0, 0)


def test_a_limit_of_zero_or_less_is_no_limit() -> None:
    for limit in (0, -1):
        assert len(Chain([Scripted("a", {0: [1, 2, 3]})]).draft(requests(0, n_max=limit))[0]) == 3


def test_the_winner_and_the_others_are_told_apart() -> None:
    first, second = Scripted("a"), Scripted("b", {0: [5]})
    chain = Chain([first, second])
    chain.draft(requests(0))
    chain.accept(0, 1)
    assert first.told == [(0, 1, True)]
    assert second.told == [(0, 1, False)]


def test_a_round_without_a_draft_still_reaches_the_last_winner() -> None:
    only = Scripted("a", {0: [5]})
    chain = Chain([only])
    chain.accept(0, 0)  # nobody has won yet: nothing happens
    assert only.told == []
    chain.draft(requests(0))
    chain.accept(0, 1)
    only.proposals = {}
    chain.draft(requests(0))
    chain.accept(0, 0)
    assert only.told == [(0, 1, False), (0, 0, False)]
    assert chain.counters["a"].n_call_accept == 2


def test_an_empty_draft_of_device_length_falls_through_at_the_price_of_a_read() -> None:
    first, second = Scripted("a", {0: [5, 6], 1: [7, 8]}, {0: 0, 1: 1}), Scripted("b", {0: [9]})
    chain = Chain([first, second])
    assert [list(d.tokens) for d in chain.draft(requests(0, 1))] == [[9], [7]]
    assert chain.reader.count == 1
    last = Chain([Scripted("a", {0: [5, 6]}, {0: 0})])
    assert len(last.draft(requests(0))[0]) == 2  # at the end of the chain the length stays on the device
    assert last.reader.count == 0
    assert last.counters["a"].n_gen_tokens == 0
    last.settle(0, 1)
    assert last.counters["a"].n_gen_tokens == 1


def test_two_strategies_of_one_name_are_counted_apart() -> None:
    assert Chain([Scripted("a"), Scripted("b"), Scripted("a")]).labels == ["a", "b", "a#2"]


def test_upstream_order_puts_strategies_without_a_model_first() -> None:
    drafters = make_drafters(["draft-model", "prompt-lookup", "ngram-simple"], True)
    assert [d.name for d in upstream_order(drafters)] == ["ngram-simple", "draft-model", "prompt-lookup"]
