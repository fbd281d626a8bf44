"""The chain of strategies: llama.cpp's order, fall-through, truncation and counters, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import Draft, DraftModel, DraftRequest, NgramSimple, PromptLookup, SpeculativeDecoder
from specdec.drafters.chain import Chain, upstream_order
from tests.helpers.playing import Scripted, check_counts, quoting_ids, random_ids, weaker
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_greedy


class Table:
    """Drafts what a table says for each row; an absent row gets an empty draft."""

    def __init__(self, name: str, table: dict[int, list[int]]):
        self.name, self.table = name, table
        self.asked: list[list[int]] = []
        self.accepted: list[tuple[int, int, bool]] = []
        self.begun: list[int] = []

    def begin(self, row: int, prompt: Any) -> None:
        self.begun.append(row)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.asked.append([r.row for r in requests])
        return [Draft(self.table.get(r.row, [])) for r in requests]

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        self.accepted.append((row, n_accepted, is_other))


def requests(*rows: int, n_max: int = 0) -> list[DraftRequest]:
    return [DraftRequest(row=r, tokens=[1, 2, 3], last=4, n_max=n_max, position=3) for r in rows]


def counts(chain: Chain, label: str) -> dict[str, Any]:
    return {k: v for k, v in vars(chain.counters[label]).items() if not k.startswith("t_")}


def test_the_first_draft_that_is_not_empty_wins_row_by_row() -> None:
    a, b, c = Table("a", {0: [1, 2]}), Table("b", {0: [9], 1: [3]}), Table("c", {2: [4, 5, 6], 1: [9]})
    chain = Chain([a, b, c])
    drafts = chain.draft(requests(0, 1, 2, 3))
    assert [list(d.tokens) for d in drafts] == [[1, 2], [3], [4, 5, 6], []]
    assert [d.drafter for d in drafts] == ["a", "b", "c", ""]
    assert (a.asked, b.asked, c.asked) == ([[0, 1, 2, 3]], [[1, 2, 3]], [[2, 3]])


def test_a_strategy_is_not_asked_when_nobody_waits() -> None:
    a, b = Table("a", {0: [1], 1: [2]}), Table("b", {0: [9]})
    chain = Chain([a, b])
    chain.draft(requests(0, 1))
    assert b.asked == []
    chain.draft([])
    assert counts(chain, "a")["n_call_draft"] == 1  # a call for no row moves no counter
    assert counts(chain, "b")["n_call_draft"] == 0


@pytest.mark.parametrize(("n_max", "length"), [(-1, 5), (0, 5), (1, 1), (3, 3), (5, 5), (9, 5)])
def test_drafts_are_cut_to_the_requests_limit_and_counted_cut(n_max: int, length: int) -> None:
    chain = Chain([Table("a", {0: [1, 2, 3, 4, 5]})])
    [draft] = chain.draft(requests(0, n_max=n_max))
    assert list(draft.tokens) == [1, 2, 3, 4, 5][:length]
    assert counts(chain, "a")["n_gen_tokens"] == length


def test_a_cut_draft_keeps_its_q_beside_its_tokens() -> None:
    q = torch.softmax(torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), dim=-1)

    class Claiming(Table):
        def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            return [Draft([1, 2, 3], q=q) for _ in requests]

    [draft] = Chain([Claiming("a", {})]).draft(requests(0, n_max=2))
    assert list(draft.tokens) == [1, 2]
    assert torch.equal(draft.q, q[:2])


def test_the_winner_is_told_its_part_and_the_others_that_it_was_not_theirs() -> None:
    a, b = Table("a", {0: [1, 2]}), Table("b", {1: [3, 4]})
    chain = Chain([a, b])
    chain.begin(0, [1])
    chain.begin(1, [2])
    assert a.begun == b.begun == [0, 1]
    chain.draft(requests(0, 1))
    chain.accept(0, 2)
    chain.accept(1, 0)
    assert a.accepted == [(0, 2, False), (1, 0, True)]
    assert b.accepted == [(0, 2, True), (1, 0, False)]
    assert counts(chain, "a") == {
        "n_call_begin": 2, "n_call_draft": 1, "n_call_accept": 1, "n_gen_drafts": 1, "n_acc_drafts": 1,
        "n_gen_tokens": 2, "n_acc_tokens": 2, "n_acc_tokens_per_pos": [1, 1], "n_skipped": 0, "n_asked_per_length": [],
    }  # fmt: skip
    assert counts(chain, "b") == {
        "n_call_begin": 2, "n_call_draft": 1, "n_call_accept": 1, "n_gen_drafts": 1, "n_acc_drafts": 0,
        "n_gen_tokens": 2, "n_acc_tokens": 0, "n_acc_tokens_per_pos": [], "n_skipped": 0, "n_asked_per_length": [],
    }  # fmt: skip


def test_a_round_without_a_draft_reaches_the_last_winner() -> None:
    """As upstream: the winner of a row is remembered until another strategy wins there."""
    a, b = Table("a", {0: [1]}), Table("b", {})
    chain = Chain([a, b])
    chain.accept(0, 0)  # nobody has drafted for the row yet
    assert a.accepted == b.accepted == []
    chain.draft(requests(0))
    chain.accept(0, 1)
    a.table.clear()
    chain.draft(requests(0))
    chain.accept(0, 0)
    assert a.accepted == [(0, 1, False), (0, 0, False)]
    assert counts(chain, "a")["n_call_accept"] == 2
    assert counts(chain, "a")["n_gen_drafts"] == 1
    b.table[0] = [5]
    chain.draft(requests(0))
    chain.accept(0, 0)
    assert b.accepted[-1] == (0, 0, False)
    assert a.accepted[-1] == (0, 0, True)


def test_accepted_positions_are_counted_one_by_one() -> None:
    chain = Chain([Table("a", {0: [1, 2, 3, 4]})])
    for n in (2, 0, 4, 1):
        chain.draft(requests(0))
        chain.accept(0, n)
    assert counts(chain, "a")["n_acc_tokens_per_pos"] == [3, 2, 1, 1]
    assert counts(chain, "a")["n_acc_drafts"] == 3


@given(st.lists(st.tuples(st.integers(0, 2), st.dictionaries(st.integers(0, 2), st.integers(1, 4))), max_size=12))
def test_counters_follow_a_literal_reading_of_upstream(rounds: list[tuple[int, dict[int, int]]]) -> None:
    """rounds: which strategies draft how much in one row, and how much of it stands."""
    tables = [Table(name, {}) for name in "abc"]
    chain = Chain(tables)
    wanted = {name: dict.fromkeys(("draft", "gen", "tokens", "accept", "acc"), 0) for name in "abc"}
    last: str | None = None
    for stands, lengths in rounds:
        for i, table in enumerate(tables):
            table.table = {0: list(range(lengths[i]))} if i in lengths else {}
        chain.draft(requests(0, n_max=3))
        drafted = 0
        for i, name in enumerate("abc"):
            wanted[name]["draft"] += 1
            if i in lengths:
                last, drafted = name, min(3, lengths[i])
                wanted[name]["gen"] += 1
                wanted[name]["tokens"] += drafted
                break
        chain.accept(0, min(stands, drafted))
        if last is not None:
            wanted[last]["accept"] += 1
            wanted[last]["acc"] += min(stands, drafted)
    for name, values in wanted.items():
        c = counts(chain, name)
        got = [c[k] for k in ("n_call_draft", "n_gen_drafts", "n_gen_tokens", "n_call_accept", "n_acc_tokens")]
        assert got == list(values.values())


def test_lengths_that_only_the_device_knows_fall_through_when_they_are_zero() -> None:
    class OnDevice(Table):
        def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            return [Draft(torch.tensor([1, 2, 3]), length=torch.tensor(self.table[r.row][0])) for r in requests]

    chain = Chain([OnDevice("a", {0: [0], 1: [2]}), Table("b", {0: [7]})])
    drafts = chain.draft(requests(0, 1))
    assert [[int(t) for t in d.tokens] for d in drafts] == [[7], [1, 2]]
    assert chain.reader.count == 1
    last = Chain([OnDevice("a", {0: [0], 1: [2]})])
    last.draft(requests(0, 1))
    assert last.reader.count == 0  # at the end of the chain nobody needs to know yet
    assert counts(last, "a")["n_gen_tokens"] == 0
    for row, n in ((0, 0), (1, 2)):
        last.settle(row, n)
        last.settle(row, n)
    assert counts(last, "a")["n_gen_drafts"] == 1
    assert counts(last, "a")["n_gen_tokens"] == 2


def test_upstreams_order_is_fixed_and_unknown_strategies_come_last() -> None:
    given = [Table("mine", {}), DraftModel(), Table("also-mine", {}), NgramSimple(), PromptLookup()]
    names = [d.name for d in upstream_order(given)]
    assert names == ["ngram-simple", "draft-model", "mine", "also-mine", "prompt-lookup"]


def test_order_upstream_decides_who_is_asked_first() -> None:
    model = tiny_model("llama")
    pair = SpeculativeDecoder(model, model)
    prompt = quoting_ids(30, 1)
    chain: list[Any] = [DraftModel(n_max=2), NgramSimple(size_n=1, size_m=3)]
    given = pair.generate(prompt, 8, strategies=chain)
    upstream = pair.generate(prompt, 8, strategies=chain, order="upstream")
    assert list(given.stats.counters) == ["draft-model", "ngram-simple"]
    assert list(upstream.stats.counters) == ["ngram-simple", "draft-model"]
    assert given.stats.counters["ngram-simple"].n_gen_drafts == 0
    assert upstream.stats.counters["ngram-simple"].n_gen_drafts > 0
    assert given.token_ids == upstream.token_ids


def test_two_strategies_of_one_name_are_told_apart() -> None:
    chain = Chain([Table("a", {}), Table("b", {}), Table("a", {0: [1]})])
    assert chain.labels == ["a", "b", "a#2"]
    [draft] = chain.draft(requests(0))
    assert draft.drafter == "a#2"


def test_one_verify_pass_carries_drafts_of_several_strategies() -> None:
    model = tiny_model("llama")
    prompts = [random_ids(4, 1), random_ids(6, 2), random_ids(5, 3)]
    texts = [oracle_greedy(model, p, 20) for p in prompts]
    mine = Scripted(lambda ids: [7, 7] if ids[:4] == prompts[0] else [], name="mine")
    out = SpeculativeDecoder(model, weaker(model, 0.05)).generate(prompts, 20, strategies=[mine, DraftModel(n_max=3)])
    assert out.token_ids == texts
    names = [{r.strategy for r in row if r.drafted} for row in out.stats.rows]
    assert names == [{"mine"}, {"draft-model"}, {"draft-model"}]
    assert out.stats.verify_passes == max(len(row) for row in out.stats.rows)
    accepts = [e for e in mine.events if e[0] == "accept"]
    assert {e[3] for e in accepts if e[1] == 0} == {False}
    assert {e[3] for e in accepts if e[1] != 0} == {True}
    check_counts(out)


def test_the_engine_tells_drafters_the_prompt_without_its_newest_token() -> None:
    model = tiny_model("llama")
    prompts = [random_ids(4, 1), random_ids(6, 2), random_ids(5, 3)]
    mine = Scripted(lambda ids: [])
    SpeculativeDecoder(model).generate(prompts, 3, strategies=[mine], batch_size=2)
    begun = [e[1:] for e in mine.events if e[0] == "begin"]
    assert sorted(p for _, p in begun) == sorted(p[:-1] for p in prompts)
    assert {row for row, _ in begun} == {0, 1}
