"""Every acceptance figure, on records written by hand."""

from __future__ import annotations

import pytest

from specdec.drafters.chain import Counters
from specdec.stats import RoundRecord, Stats, Tally, Times

R = RoundRecord
RECORDS = [R("a", 3, 3), R("a", 3, 0), R(None, 0, 0), R("a", 2, 1), R("b", 4, 2)]


def test_every_figure_has_one_definition() -> None:
    tally = Tally.of(RECORDS)
    assert (tally.rounds, tally.drafted_rounds) == (5, 4)
    assert (tally.draft_tokens, tally.accepted_tokens) == (12, 6)
    assert tally.generated_tokens == 6 + 5
    assert tally.acceptance_length == 1 + 6 / 4
    assert tally.tokens_per_round == 11 / 5
    assert tally.draft_acceptance_rate == 6 / 12
    # At least 1, 2, 3, 4 drafts accepted, of 4 drafted rounds.
    assert tally.acceptance_rate_per_position == [3 / 4, 2 / 4, 1 / 4, 0]
    # Draft i is tested where all before it stood and a draft i exists: 4 rounds, 3, 2 and none.
    assert tally.conditional_acceptance_rate_per_position == [3 / 4, 2 / 3, 1 / 2]
    assert tally.acceptance_histogram == [1, 1, 1, 1, 0]
    assert sum(n * count for n, count in enumerate(tally.acceptance_histogram)) == tally.accepted_tokens


def test_nothing_drafted_has_no_ratios() -> None:
    tally = Tally.of([R(None, 0, 0)] * 3)
    assert tally.acceptance_length == 1.0
    assert tally.tokens_per_round == 1.0
    assert tally.draft_acceptance_rate is None
    assert tally.acceptance_rate_per_position == tally.acceptance_histogram == []
    assert Tally.of([]).tokens_per_round is None


def test_totals_rows_and_strategies_come_from_the_same_rounds() -> None:
    times = Times(prefill=1.0, draft=2.0, verify=3.0, total=7.0)
    stats = Stats([RECORDS[:2], RECORDS[2:]], [5, 4], {"a": Counters(), "b": Counters()}, 3, 3, times)
    data = stats.to_dict()
    assert data["accepted_tokens"] == stats.accepted_tokens == 6
    assert data["emitted_tokens"] == 9
    for name in ("rounds", "draft_tokens", "accepted_tokens", "generated_tokens"):
        assert sum(row[name] for row in data["rows"]) == data[name]
    for name in ("drafted_rounds", "draft_tokens"):
        assert sum(part[name] for part in data["strategies"].values()) == data[name]
    assert data["strategies"]["a"]["acceptance_histogram"] == [1, 1, 0, 1]
    assert "n_gen_tokens" in data["strategies"]["a"]
    assert data["mean_per_request"]["tokens_per_round"] == pytest.approx((5 / 2 + 6 / 3) / 2)
    assert data["time"] == {"prefill": 1.0, "draft": 2.0, "verify": 3.0, "total": 7.0, "other": 1.0}
    with pytest.raises(AttributeError):
        _ = stats.no_such_figure


def test_counters_are_llama_cpps() -> None:
    counters = Counters()
    for drafted, accepted in ((3, 2), (0, 0), (2, 0)):
        counters.count_drafted(drafted)
        counters.count_accepted(accepted)
    assert (counters.n_gen_drafts, counters.n_gen_tokens) == (2, 5)
    assert (counters.n_acc_drafts, counters.n_acc_tokens) == (1, 2)
    assert counters.n_acc_tokens_per_pos == [1, 1]
