"""Acceptance figures by their names, worked out by hand, and the layout of `to_dict`."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import DraftModel, PromptLookup, SpeculativeDecoder
from specdec.stats import Counters, RoundRecord, Stats, Tally, Times
from tests.helpers.playing import check_counts, quoting_ids, weaker
from tests.helpers.tiny import tiny_model

RECORDS = [
    RoundRecord("a", 4, 4),
    RoundRecord("a", 4, 1),
    RoundRecord("b", 2, 0),
    RoundRecord(None, 0, 0),
    RoundRecord("b", 3, 3),
]


def test_figures_of_hand_written_rounds() -> None:
    t = Tally.of(RECORDS)
    assert (t.rounds, t.drafted_rounds, t.draft_tokens, t.accepted_tokens) == (5, 4, 13, 8)
    assert t.generated_tokens == 8 + 5
    assert t.acceptance_length == 1 + 8 / 4
    assert t.tokens_per_round == 13 / 5
    assert t.draft_acceptance_rate == 8 / 13
    assert t.acceptance_rate_per_position == [3 / 4, 2 / 4, 2 / 4, 1 / 4]
    # Draft 0 was tested in all four rounds; draft 1 in the three that passed 0; draft 2 in two, draft 3 in one.
    assert t.conditional_acceptance_rate_per_position == [3 / 4, 2 / 3, 2 / 2, 1 / 1]
    assert t.acceptance_histogram == [1, 1, 0, 1, 1]
    assert t.acceptance_histogram_per_length == {2: [1, 0, 0], 3: [0, 0, 0, 1], 4: [0, 1, 0, 0, 1]}


def test_of_a_tree_one_token_a_level_is_tested() -> None:
    """Nodes are not tokens that were tested, and below a node without children nothing is."""
    whole = RoundRecord("t", 8, 3, levels=3)
    rejected = RoundRecord("t", 8, 1, levels=3)
    exhausted = RoundRecord("t", 8, 2, levels=3, exhausted=True)
    chain = RoundRecord("t", 3, 0)
    found = [(Tally.of([r]).tested_tokens, Tally.of([r]).accepted_tokens) for r in (whole, rejected, exhausted, chain)]
    assert found == [(3, 3), (2, 1), (2, 2), (1, 0)]
    pooled = Tally.of([whole, rejected, exhausted, chain])
    assert pooled.conditional_acceptance_rate == pooled.acceptance == 6 / 8
    assert Stats(rows=[[whole], [rejected]]).acceptance == 4 / 5


def test_acceptance_of_a_real_tree_counts_what_was_tested() -> None:
    model = tiny_model("llama")
    out = SpeculativeDecoder(model, weaker(model), check=False).generate(
        quoting_ids(9, 1), 24, strategies=[DraftModel(tree=[3, 2, 1])]
    )
    t, records = out.stats.total, out.stats.rows[0]
    levels = [sum(r.tested(i) for i in range(r.depth)) for r in records]
    assert t.tested_tokens == sum(levels) < t.draft_tokens
    assert t.acceptance == t.accepted_tokens / t.tested_tokens
    assert all(r.accepted <= n <= r.accepted + 1 for r, n in zip(records, levels, strict=True))


def test_every_phase_of_a_call_takes_time() -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, weaker(model), check=False)
    out = decoder.generate(quoting_ids(30, 1), 12, strategies=["draft-model"])
    times = out.stats.times
    assert min(times.prefill, times.draft, times.verify) > 0
    plain = decoder.generate(quoting_ids(30, 1), 12, strategies=[]).stats.times
    assert min(plain.prefill, plain.verify) > 0


def test_figures_of_nothing() -> None:
    t = Tally.of([])
    assert (t.rounds, t.acceptance_length, t.tokens_per_round, t.draft_acceptance_rate) == (0, 1.0, None, None)
    assert (t.tested_tokens, t.acceptance) == (0, None)
    assert t.acceptance_rate_per_position == t.acceptance_histogram == []
    plain = Tally.of([RoundRecord(None, 0, 0)] * 3)
    assert (plain.tokens_per_round, plain.acceptance_length, plain.generated_tokens) == (1.0, 1.0, 3)


@given(st.lists(st.integers(0, 6).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), max_size=30))
def test_the_figures_agree_with_each_other(rounds: list[tuple[int, int]]) -> None:
    t = Tally.of(RoundRecord("x" if k else None, k, n) for k, n in rounds)
    assert t.generated_tokens == t.accepted_tokens + t.rounds
    assert sum(t.acceptance_rate_per_position) == pytest.approx(t.acceptance_length - 1)
    assert sum(t.acceptance_histogram) == t.drafted_rounds
    product, tested = 1.0, t.conditional_acceptance_rate_per_position
    assert not any(t.acceptance_rate_per_position[len(tested) :])  # positions that no round reached have no rate
    for whole, conditional in zip(t.acceptance_rate_per_position, tested, strict=False):
        product *= conditional
        # Equal where all drafts have one length; a shorter draft can only lower the unconditional share.
        assert whole <= product + 1e-12
    assert t.acceptance_rate_per_position == sorted(t.acceptance_rate_per_position, reverse=True)


def test_strategies_and_rows_are_parts_of_the_whole() -> None:
    stats = Stats(
        rows=[RECORDS[:3], RECORDS[3:]],
        emitted=[8, 4],
        counters={"a": Counters(n_call_draft=3, t_draft=0.5), "b": Counters(), "never": Counters()},
        verify_passes=3,
        host_reads=3,
        times=Times(prefill=1.0, draft=2.0, verify=3.0, total=7.5),
    )
    out = stats.to_dict()
    assert json.loads(json.dumps(out)) == out
    assert {k: out[k] for k in ("rounds", "accepted_tokens", "emitted_tokens", "verify_passes", "host_reads")} == {
        "rounds": 5, "accepted_tokens": 8, "emitted_tokens": 12, "verify_passes": 3, "host_reads": 3,
    }  # fmt: skip
    assert [(r["rounds"], r["accepted_tokens"], r["emitted_tokens"]) for r in out["rows"]] == [(3, 5, 8), (2, 3, 4)]
    a, b, never = (out["strategies"][name] for name in ("a", "b", "never"))
    assert (a["drafted_rounds"], a["accepted_tokens"], a["draft_acceptance_rate"]) == (2, 5, 5 / 8)
    assert (a["n_call_draft"], a["t_draft"]) == (3, 0.5)
    assert (b["drafted_rounds"], b["accepted_tokens"], b["acceptance_length"]) == (2, 3, 2.5)
    assert (never["drafted_rounds"], never["draft_acceptance_rate"]) == (0, None)
    mean = out["mean_per_request"]
    assert mean["acceptance_length"] == pytest.approx((1 + 5 / 3 + 1 + 3) / 2)
    assert mean["tokens_per_round"] == pytest.approx((8 / 3 + 5 / 2) / 2)
    assert mean["draft_acceptance_rate"] == pytest.approx((5 / 10 + 3 / 3) / 2)
    assert mean["generated_tokens"] == (8 + 5) / 2
    assert out["time"] == {
        "prefill": 1.0,
        "draft": 2.0,
        "verify": 3.0,
        "total": 7.5,
        "draft_prefill": 0.0,
        "other": 1.5,
    }
    assert stats.tokens_per_round == 13 / 5
    assert stats.emitted_tokens == 12
    with pytest.raises(AttributeError):
        _ = stats.accept_rate


def test_a_real_call_has_every_figure_by_its_name() -> None:
    out = SpeculativeDecoder(tiny_model("llama")).generate(
        [quoting_ids(20, 1), quoting_ids(9, 2)], 12, strategies=[PromptLookup(ngram_max=1)]
    )
    figures = {
        "rounds", "drafted_rounds", "draft_tokens", "tested_tokens", "accepted_tokens", "generated_tokens",
        "emitted_tokens", "conditional_acceptance_rate", "acceptance",
        "acceptance_length", "tokens_per_round", "draft_acceptance_rate", "acceptance_rate_per_position",
        "conditional_acceptance_rate_per_position", "acceptance_histogram", "acceptance_histogram_per_length",
    }  # fmt: skip
    stats = out.stats.to_dict()
    assert figures | {
        "verify_passes",
        "host_reads",
        "draft_passes",
        "rows",
        "strategies",
        "mean_per_request",
        "time",
    } == set(stats)
    assert all(set(row) == figures for row in stats["rows"])
    upstream = {"n_call_begin", "n_call_draft", "n_call_accept", "n_gen_drafts", "n_acc_drafts", "n_gen_tokens"}
    assert figures - {"emitted_tokens"} | upstream <= set(stats["strategies"]["prompt-lookup"])
    assert {"draft", "verify", "other"} <= set(stats["time"])
    parts = [stats["time"][name] for name in ("prefill", "draft", "verify", "other")]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(stats["time"]["total"])
    assert json.loads(json.dumps(out.to_dict())) == out.to_dict()
    check_counts(out)


def test_upstreams_counters_and_the_rounds_tell_the_same_story() -> None:
    model = tiny_model("llama")
    for strategies in (
        ["prompt-lookup", "draft-model:n_max=5"],
        ["draft-model:n_max=5:p_min=0.12"],
        ["draft-model:n_max=5", "prompt-lookup"],
    ):
        out = SpeculativeDecoder(model, tiny_model("llama", seed=1)).generate(
            [quoting_ids(20, 1), quoting_ids(9, 2), quoting_ids(5, 3)], 14, strategies=strategies, batch_size=2
        )
        for name, tally in out.stats.by_strategy().items():
            counters = out.stats.counters[name]
            assert counters.n_gen_drafts == tally.drafted_rounds
            assert counters.n_gen_tokens == tally.draft_tokens
            assert counters.n_acc_tokens == tally.accepted_tokens
            assert counters.n_call_begin == 3
