"""Acceptance analysis: the two definitions, expectation against measurement, and what breaks them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import specdec
from specdec import SpecdecError
from specdec.research.bootstrap import ratio
from specdec.research.traces.analysis import (
    DIMENSIONS,
    analyse,
    by_position,
    context_curve,
    drafted_tokens,
    token_class,
)
from specdec.research.traces.trace import Trace, record
from tests.helpers.broken import BROKEN_RULES
from tests.helpers.laws import small_model
from tests.helpers.playing import random_ids, weaker

VOCAB = 24
PROMPTS = [random_ids(4, i, VOCAB) for i in range(64)]
RUNS: dict[str, dict[str, Any]] = {
    "leviathan": {},
    "match": {"acceptance": "match"},
    "coupled": {"acceptance": "coupled"},
    "tree": {"strategies": [specdec.DraftModel(tree="2x2")]},
    "tree-match": {"strategies": [specdec.DraftModel(tree="2x2")], "acceptance": "match"},
}


@pytest.fixture(scope="module")
def decoder() -> specdec.SpeculativeDecoder:
    target = small_model(1, VOCAB)
    draft = specdec.DraftModel(n_max=4)
    return specdec.SpeculativeDecoder(target, weaker(target, 0.5), strategies=[draft], check=False)


def traced(decoder: specdec.SpeculativeDecoder, **options: Any) -> Trace:
    categories = ["short" if i % 2 else "long" for i in range(len(PROMPTS))]
    settings = {"max_new_tokens": 24, "temperature": 1.0, "batch_size": 64, **options}
    return record(decoder, PROMPTS, categories=categories, **settings)


@pytest.fixture(scope="module")
def traces(decoder: specdec.SpeculativeDecoder) -> dict[str, Trace]:
    return {name: traced(decoder, **run) for name, run in RUNS.items()}


@pytest.mark.parametrize("name", RUNS)
def test_acceptance_is_what_the_laws_say(traces: dict[str, Trace], name: str) -> None:
    [whole] = analyse(traces[name])
    assert whole.tested > 400
    assert whole.z is not None
    assert abs(whole.z) < 4


@pytest.mark.parametrize("fault", ["accept-all", "lenient"])
def test_a_rule_that_accepts_too_much_does_not_fit_the_laws(decoder: specdec.SpeculativeDecoder, fault: str) -> None:
    """The control: what `leviathan` accepts and a third of the rest, or everything, is far out."""
    honest = BROKEN_RULES["accept-all"]
    if fault == "lenient":
        from specdec.decoding.acceptance import LEVIATHAN
        from specdec.sampling.sampling import Purpose, uniform

        honest = replace(
            honest,
            accepts=lambda block: LEVIATHAN.accepts(block) | (uniform(block.streams(Purpose.RESIDUAL)) < 0.3),
        )
    [whole] = analyse(traced(decoder, acceptance=honest))
    assert whole.z is not None
    assert whole.z > 4


def test_expectation_is_one_minus_total_variation_under_leviathan(traces: dict[str, Trace]) -> None:
    tokens = drafted_tokens(traces["leviathan"])
    assert all(t.tv is not None and t.expected == pytest.approx(1 - t.tv, abs=1e-5) for t in tokens)
    assert all(t.tv is None for t in drafted_tokens(traces["match"]))


@pytest.mark.parametrize("name", RUNS)
def test_positions_agree_with_the_statistics(traces: dict[str, Trace], name: str) -> None:
    stats = traces[name].stats
    found = by_position(traces[name])
    reached = stats["acceptance_rate_per_position"]
    assert [p.unconditional for p in found] == pytest.approx(reached[: len(found)])
    assert not any(reached[len(found) :])  # no round tested these
    assert [p.conditional for p in found] == pytest.approx(stats["conditional_acceptance_rate_per_position"])
    [whole] = analyse(traces[name])
    assert (whole.drafted, whole.accepted) == (stats["draft_tokens"], stats["accepted_tokens"])
    assert whole.unconditional == pytest.approx(stats["draft_acceptance_rate"])


@pytest.mark.parametrize("by", [*((name,) for name in DIMENSIONS), ("strategy", "position"), ("category", "class")])
def test_groups_part_the_tokens(traces: dict[str, Trace], by: tuple[str, ...]) -> None:
    [whole] = analyse(traces["leviathan"])
    groups = analyse(traces["leviathan"], by)
    assert len({g.key for g in groups}) == len(groups)
    for figure in ("drafted", "tested", "accepted"):
        assert sum(getattr(g, figure) for g in groups) == getattr(whole, figure)


def test_a_tested_token_is_one_whose_predecessors_stood(traces: dict[str, Trace]) -> None:
    trace = traces["leviathan"]
    tested = sum(min(len(r.draft), r.accepted + 1) for r in trace.rounds)
    assert sum(t.tested for t in drafted_tokens(trace)) == tested
    assert all(t.tested for t in drafted_tokens(trace) if t.accepted)


def test_analysis_of_some_rows_and_strategies_is_that_of_their_tokens(traces: dict[str, Trace]) -> None:
    trace = traces["leviathan"]
    [some] = analyse(trace, rows=[0, 3])
    assert some.drafted == sum(len(r.draft) for r in trace.rounds if r.row in (0, 3))
    assert analyse(drafted_tokens(trace, rows=[0, 3])) == [some]
    with pytest.raises(SpecdecError, match="unknown dimension 'colour'"):
        analyse(trace, ("colour",))


def test_entropy_bins_stand_in_order_of_entropy(traces: dict[str, Trace]) -> None:
    keys = [g.key[0] for g in analyse(traces["leviathan"], ("entropy",))]
    order = ["< 0.1", "0.1 - 0.5", "0.5 - 1", "1 - 2", "2 - 4", ">= 4"]
    assert keys == [k for k in order if k in keys]
    assert len(keys) > 1


def test_the_interval_is_the_bootstraps_over_rows(traces: dict[str, Trace]) -> None:
    """Drawing tokens instead of rows, which resemble each other, would give intervals that are far too narrow."""
    tokens = [t for t in drafted_tokens(traces["leviathan"]) if t.tested]
    rows = sorted({t.row for t in tokens})
    counts = [[sum(t.accepted for t in tokens if t.row == r), sum(t.row == r for t in tokens)] for r in rows]
    expected = ratio(*zip(*counts, strict=True), seed=3)
    [group] = analyse(traces["leviathan"], seed=3)
    assert expected.low is not None
    assert (group.low, group.conditional, group.high) == (expected.low, expected.value, expected.high)
    [alone] = analyse(traces["leviathan"], rows=[0])
    assert (alone.low, alone.high) == (None, None)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" fox", "word"), ("ing", "part"), ("42", "number"), (" 7", "number"), ("\n\n  ", "blank"),
        ("):", "punctuation"), (" —", "punctuation"), ("</s>", "special"), ("\ufffd", "bytes"), ("x1", "mixed"),
        (" über", "word"), ("漢字", "part"), ("don't", "part"), ("", "blank"),
    ],
)  # fmt: skip
def test_token_classes(text: str, kind: str) -> None:
    assert token_class(text) == kind


def test_the_context_curve_continues_the_same_places_from_more_and_more_text(
    decoder: specdec.SpeculativeDecoder,
) -> None:
    text = random_ids(300, 9, VOCAB)
    points = context_curve(decoder, text, lengths=[32, 8, 128], anchors=3, new_tokens=6, temperature=1.0)
    assert [p.context for p in points] == [8, 32, 128]
    assert all(p.overall.tested > 0 and p.tokens_per_round > 1 for p in points)
    with pytest.raises(SpecdecError, match="lengths up to 400 do not fit"):
        context_curve(decoder, text, lengths=[400])
    with pytest.raises(SpecdecError, match="a length of 512 does not fit"):
        context_curve(decoder, text)
