"""Automatic draft length: the choice is the best by theory, it never loses more than it may, and it can be repeated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import CostTable, DraftModel, NgramSimple, PromptLookup, SpecdecError, SpeculativeDecoder, Suffix, theory
from specdec.drafters import length
from specdec.drafters.base import DraftRequest
from specdec.drafters.chain import Chain
from specdec.drafters.length import Known, LengthController, automatic, unlimited
from specdec.research.offline.replay import model_free_chain, replay
from tests.helpers.laws import small_model
from tests.helpers.scripted import SHAPES, Scripted, ScriptedModel, controlled, run, text

# SmolLM2-135M in float32 on two cores, and a draft of a tenth of its size.
CPU = CostTable(
    (((0.044, 0.065, 0.088, 0.134),),), (((0.004, 0.006, 0.008, 0.012),),), widths=(1, 5, 9, 17), round=1e-3
)
N = 192


def requests(*rooms: int) -> list[DraftRequest]:
    return [DraftRequest(i, np.arange(40), 40, room, 40) for i, room in enumerate(rooms)]


def choice(costs: CostTable, drafter: Any, rates: list[float], rooms: list[int]) -> int:
    """The length that a round of rows gets whose acceptance is known to be `rates`, and whose budget is endless."""
    controller = LengthController([drafter], [True], costs, SHAPES, len(rates), free=True)
    asked = requests(*rooms)
    for request, rate in zip(asked, rates, strict=True):
        known = controller._of(0, request)
        known.right, known.wrong, known.read = [1e9 * rate] * 2, [1e9 * (1 - rate)] * 2, request.position
        controller.budget[request.row] = 1e9
    controller.open(asked)
    return controller._choose(0, asked)


# -- the choice ------------------------------------------------------------------------------------------------------


@given(st.floats(0.02, 0.98), st.floats(0.0, 0.6), st.floats(0.0, 0.3), st.integers(1, 16))
@settings(max_examples=40)
def test_with_a_known_acceptance_the_choice_is_theorys_best_k(a: float, draft: float, wide: float, room: int) -> None:
    plain = 0.01
    costs = CostTable(
        (((plain, plain * (1 + 16 * wide)),),), (((draft * plain + 1e-12, draft * plain + 2e-12),),), widths=(1, 17)
    )
    best = theory.best_k(a, draft + 1e-10, [k * wide for k in range(room + 1)], room)
    chosen = choice(costs, ScriptedModel([], costs), [a], [room])
    speeds = [theory.speedup(a, k, draft + 1e-10, k * wide) if k else 1.0 for k in (best, chosen)]
    assert speeds[1] == pytest.approx(speeds[0], rel=1e-6)  # the same k, or one that is as good


@pytest.mark.parametrize(("right", "wrong"), [(0, 0), (7, 2), (1, 30)])
def test_expected_tokens_are_those_of_a_beta_estimate(right: int, wrong: int) -> None:
    """E[a + a^2 + ... + a^k] over the Beta distribution of a, by numerical integration."""
    known = Known((3.0, 2.0), [right, right], [wrong, wrong])
    a = (np.arange(200_000) + 0.5) / 200_000
    weight = a ** (2 + right) * (1 - a) ** (1 + wrong)
    for k, tokens in enumerate(known.tokens(6)):
        powers = sum(a**i for i in range(1, k + 1)) if k else 0 * a
        assert tokens == pytest.approx(float((weight * powers).sum() / weight.sum()), rel=1e-6)


def test_a_run_of_right_guesses_is_told_from_single_ones() -> None:
    """Right after right, wrong after wrong: from one wrong guess on little is expected, after a right one much."""
    known = Known((0.5, 1.5))
    for _ in range(8):
        known.learn(0, wrong=True)
        known.learn(6, wrong=True)
    assert known.tokens(4)[4] < 1.7
    known.learn(1, wrong=False)
    assert known.tokens(4)[4] > 2.0


def test_rows_of_a_batch_share_the_length_with_the_most_tokens_a_second() -> None:
    rates, rooms = [0.9, 0.3, 0.6], [12, 9, 3]
    costs = replace(CPU, calls={"scripted": 0.0})
    k = choice(costs, Scripted(), rates, rooms)

    def speed(k: int) -> float:
        lengths = [min(k, room) for room in rooms]
        tokens = sum(theory.tokens_per_round(r, n) for r, n in zip(rates, lengths, strict=True))
        return float(tokens / (costs.seconds("target", 3, 40, k + 1) + costs.round))

    assert k == max(range(13), key=speed)
    assert 0 < k < choice(costs, Scripted(), rates[:1], rooms[:1])  # the good row alone would take more


class InSteps(ScriptedModel):
    """Draft steps are recorded for 1, 5 and 16 tokens only."""

    def steps(self, k: int) -> int:
        return next(n for n in (1, 5, 16) if n >= k)


def test_lengths_follow_the_passes_that_are_really_run() -> None:
    """Where a pass of 2 costs what a pass of 8 costs, nothing between is worth asking for; nor where drafting 2 tokens
    takes the 5 passes that are recorded."""
    controller = LengthController([Scripted()], [True], CPU, replace(SHAPES, widths=(1, 8, 17)), 1, free=True)
    [request] = requests(16)
    controller.open([request])
    controller.budget[0] = 1e9
    controller._of(0, request).right = [6.0, 6.0]
    assert controller._choose(0, [request]) == 7
    flat = replace(CPU, target=(((0.04, 0.04, 0.04, 0.05),),))
    assert choice(flat, ScriptedModel([], flat), [0.6], [16]) in (2, 3)
    assert choice(flat, InSteps([], flat), [0.6], [16]) == 5


# -- a GPU -----------------------------------------------------------------------------------------------------------


def gpu(draft: float) -> CostTable:
    """Passes that cost the same up to 16 tokens; draft: a step, in plain passes."""
    return CostTable(
        (((1.0, 1.0, 1.05, 2.0),),), (((draft, draft, 1.05 * draft, 2 * draft),),), widths=(1, 16, 17, 64), round=0.02
    )


class Ahead(ScriptedModel):
    """Its next draft starts before the verdict on the last one."""

    can_pipeline = True


@pytest.mark.parametrize("a", [0.6, 0.8, 0.9])
@pytest.mark.parametrize("draft", [0.08, 0.1, 0.14])
@pytest.mark.parametrize("kind", [ScriptedModel, Ahead])
def test_on_a_gpu_the_length_is_nearly_as_good_as_the_best_fixed_one(
    kind: type[ScriptedModel], draft: float, a: float
) -> None:
    costs, n, best = gpu(draft), 128, dict.fromkeys(range(9), 0.0)
    for seed in range(8):
        script = [bool(x) for x in np.random.default_rng(seed).random(n) < a]
        best[0] += run(kind(script, costs), costs, n)[1]
        for k in range(1, 9):
            model = ScriptedModel(script, costs)
            records = replay(Chain([model]), *text(n), n_max=k)
            best[k] += model.seconds + sum(costs.seconds("target", 1, 0, 1 + r.drafted) + costs.round for r in records)
    assert best[0] <= min(best[k] for k in range(1, 9)) / 0.95, best


# -- what is learnt --------------------------------------------------------------------------------------------------


def test_a_model_strategy_teaches_how_many_were_accepted_and_whether_one_was_rejected() -> None:
    def taught(n_accepted: int, drafted: int) -> tuple[list[float], list[float]]:
        controller = LengthController([ScriptedModel([], CPU)], [True], CPU, SHAPES, 1, free=False)
        [request] = requests(16)
        controller.open([request])
        known = controller._of(0, request)
        controller.accept(0, 0, n_accepted, drafted)
        return known.right, known.wrong

    assert taught(2, 4) == taught(2, 9) == ([1.0, pytest.approx(0.98)], [0.0, 1.0])  # not how long the draft was
    assert taught(2, 2) == ([1.0, 1.0], [0.0, 0.0])
    assert taught(0, 0) == ([0.0, 0.0], [0.0, 0.0])


def test_a_strategy_without_a_model_is_scored_while_it_is_idle() -> None:
    """Half the text is guessed wrong, then all is right: drafts come back within a few rounds, at no cost before."""
    script = [False] * 100 + [True] * 100
    records, _ = run(Scripted(script), CPU, 200)
    size = 0
    for record in records:
        if 60 <= size < 100:
            assert record.drafted == 0
        if size > 118:
            assert record.drafted >= min(6, 199 - size)
        size += record.accepted + 1


def test_an_idle_strategy_with_a_model_drafts_a_token_every_16_rounds() -> None:
    model = ScriptedModel([], CPU)
    records, _ = run(model, CPU, 1600)
    tries = np.flatnonzero([r.drafted for r in records])
    assert set(np.diff(tries[tries > 120])) == {17}
    assert {records[i].drafted for i in tries[tries > 120]} == {1}
    good = ScriptedModel([False] * 100 + [True] * 1500, CPU)
    records, _ = run(good, CPU, 1600)
    assert max(r.drafted for r in records[-5:]) > 4


def test_a_draft_as_slow_as_its_target_is_never_asked() -> None:
    slow = replace(CPU, draft=CPU.target)
    model = ScriptedModel([True] * N, slow)
    assert sum(r.drafted for r in run(model, slow, N)[0]) == 0


def test_a_prompt_that_costs_a_draft_model_more_to_read_than_the_row_can_gain_is_not_read() -> None:
    def asked(room: int) -> int:
        request = DraftRequest(0, np.arange(3000), 3000, room, 3000)
        controller = LengthController([ScriptedModel([], CPU)], [True], CPU, SHAPES, 1, free=True)
        controller.open([request])
        controller.budget[0] = 1e9
        return controller._choose(0, [request])

    assert asked(8) == 0
    assert asked(800) > 0


# -- never slower ----------------------------------------------------------------------------------------------------

SEQUENCES = {
    "never": [False] * N,
    "always": [True] * N,
    "every other": [i % 2 == 0 for i in range(N)],
    "first right, then not": [i < 40 for i in range(N)],
    "blocks": [i // 6 % 2 == 0 for i in range(N)],
    "just below what pays": [bool(x) for x in np.random.default_rng(0).random(N) < 0.12],
}


def bound(costs: CostTable, n: int) -> float:
    return n * (costs.seconds("target", 1, 0, 1) + costs.round) * 1.03


@pytest.mark.parametrize("model", [False, True], ids=["without a model", "with a model"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_no_sequence_of_acceptance_takes_longer_than_plain_decoding_may(name: str, model: bool) -> None:
    script = SEQUENCES[name]
    _, seconds = run(ScriptedModel(script, CPU) if model else Scripted(script), CPU, N)
    assert seconds <= bound(CPU, N)
    if name == "always":
        assert seconds < 0.5 * bound(CPU, N)


@given(st.lists(st.booleans(), min_size=40, max_size=120), st.booleans(), st.floats(0.01, 1.5), st.floats(0.01, 1.0))
@settings(max_examples=50)
def test_whatever_is_accepted_and_whatever_passes_cost(
    script: list[bool], model: bool, wide: float, draft: float
) -> None:
    costs = CostTable((((1.0, 1.0 + 16 * wide),),), (((draft, draft * 2),),), widths=(1, 17), calls={"scripted": 0.02})
    drafter = ScriptedModel(script, costs) if model else Scripted(script)
    assert run(drafter, costs, len(script))[1] <= bound(costs, len(script)) * (1 + 1e-9)


def test_the_budget_is_what_holds_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above: a choice that never learns breaks it without the budget, and not with it."""
    monkeypatch.setattr(length, "_FREE", (1e6, 1e5))
    assert run(Scripted([False] * N), CPU, N)[1] <= bound(CPU, N)
    monkeypatch.setattr(length, "_MAY_LOSE", 1e9)
    assert run(Scripted([False] * N), CPU, N)[1] > bound(CPU, N)


# -- the chain -------------------------------------------------------------------------------------------------------


def test_a_strategy_that_does_not_pay_falls_through_to_the_next() -> None:
    bad, good = Scripted([False] * N), ScriptedModel([True] * N, CPU)
    chain = controlled([bad, good], CPU)
    records = replay(chain, *text(N))
    assert sum(r.accepted for r in records if r.strategy == "draft-model") > N / 2
    counters = chain.counters["scripted"]
    assert counters.n_skipped > 0
    assert counters.n_skipped + sum(counters.n_asked_per_length) == sum(
        r.drafted > 0 or r.accepted == 0 for r in records
    )


def test_a_strategy_leaves_a_round_to_a_later_one_that_gains_more() -> None:
    """Guesses that are right every other time pay, but not beside a draft model that is always right."""
    half = Scripted([i % 2 == 0 for i in range(N)])
    assert sum(r.drafted for r in replay(controlled([half], CPU), *text(N))) > N / 4
    records = replay(controlled([half, ScriptedModel([True] * N, CPU)], CPU), *text(N))
    assert sum(r.strategy == "scripted" for r in records) < 3


def test_a_strategy_with_a_length_of_its_own_keeps_it_beside_automatic_ones() -> None:
    fixed = ScriptedModel([True] * N, CPU)
    chain = controlled([Scripted([False] * N), fixed], CPU, [True, False])
    replay(chain, *text(N))
    assert max(fixed.lengths) > 16  # the room of the text, as without automatic length
    assert chain.counters["draft-model"].n_asked_per_length == []


def test_a_length_that_a_user_allows_is_the_most() -> None:
    """Neither asked for more, nor charged for more: half of the requests would be longer."""
    decoder = SpeculativeDecoder(small_model(3, 13), small_model(3, 13), check=False)
    costs = CostTable((((1.0, 1.01, 1.02),),), (((0.01, 0.01, 0.01),),), widths=(1, 2, 17))
    longest = {}
    for n_max in (2, 16):
        chain = [f"draft-model:n_max={n_max}"]
        out = decoder.generate([1, 2, 3], 60, strategies=chain, draft_length="auto", costs=costs, ignore_eos=True)
        counts = out.stats.counters["draft-model"]
        assert sum(k * n for k, n in enumerate(counts.n_asked_per_length)) == out.stats.draft_tokens
        longest[n_max] = len(counts.n_asked_per_length) - 1
    assert longest[2] == 2
    assert longest[16] > 2


def test_who_is_automatic() -> None:
    tree, model, fixed, lookup = DraftModel(tree="2x2"), DraftModel(), DraftModel(n_max=4), PromptLookup()
    chain = [tree, model, fixed, lookup]
    assert automatic(chain, None, False) == [False, True, False, False]
    assert automatic(chain, "given", False) == [False] * 4
    assert automatic(chain, "auto", False) == [False, True, True, True]
    assert automatic([lookup], None, True) == [True]
    assert not any(automatic([DraftModel(preset="llama-2026"), DraftModel(n_min=1)], None, False))
    assert [unlimited(d, 16).n_max for d in (model, fixed, lookup, PromptLookup(n_max=2), Suffix())] == [
        16,
        4,
        16,
        2,
        16,
    ]
    assert (model.n_max, lookup.n_max) == (5, 4)  # the caller's are as they were
    simple = NgramSimple()
    assert unlimited(simple, 16) is simple
    assert unlimited(tree, 16) is tree


# -- calls -----------------------------------------------------------------------------------------------------------

V = 13
PROMPTS = [[5, 7, 5, 7, 5], [1], [2, 3, 4, 2, 3], [9, 9, 9], [0, 12, 6, 3, 8, 1, 0, 12], [4, 4]]
CHAIN = [PromptLookup(ngram_min=2), DraftModel()]
CHEAP = CostTable((((1.0, 1.2),),), (((0.02, 0.04),),), widths=(1, 17))


def decoder(costs: Any = CHEAP) -> SpeculativeDecoder:
    return SpeculativeDecoder(small_model(3, V), small_model(1, V), strategies=CHAIN, check=False, costs=costs)


def rounds(out: Any) -> list[Any]:
    return [[tuple(r) for r in row] for row in out.stats.rows]


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "options", [{}, {"acceptance": "match", "temperature": 0.8}, {"acceptance": "coupled", "temperature": 0.8}]
)
def test_text_is_plain_decodings_whatever_the_lengths(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length, "_MAY_LOSE", 10.0)  # 40 tokens are worth hardly any budget
    pair = decoder()
    plain = pair.generate(PROMPTS, 40, strategies=[], **options)
    for batch in (1, 6):
        out = pair.generate(PROMPTS, 40, draft_length="auto", batch_size=batch, **options)
        assert out.token_ids == plain.token_ids
        assert out.stats.accepted_tokens > 0
        assert len({r.drafted for row in out.stats.rows for r in row}) > 2


def test_sampled_leviathan_rows_do_not_depend_on_batch_or_neighbours() -> None:
    pair, seeds = decoder(), [3, 3, -1, 2**70, 0, 5]
    options = {"temperature": 0.8, "max_new_tokens": 40, "draft_length": "auto"}
    whole = pair.generate(PROMPTS, seed=seeds, batch_size=6, **options)
    again = pair.generate(PROMPTS[::-1], seed=seeds[::-1], batch_size=2, **options)
    assert again.token_ids[::-1] == whole.token_ids
    assert rounds(again)[::-1] == rounds(whole)
    assert whole.stats.accepted_tokens > 0


@pytest.mark.fast(1)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_seed_and_one_table_give_the_same_rounds(temperature: float) -> None:
    options = {"temperature": temperature, "seed": 4, "max_new_tokens": 40, "draft_length": "auto"}
    first = decoder().generate(PROMPTS, **options)
    kept = first.provenance["costs"]
    assert CostTable.from_dict(kept) == CHEAP
    assert first.provenance["draft_length"] == ["auto", "auto"]
    again = decoder(costs=None).generate(PROMPTS, costs=kept, **options)
    assert again.token_ids == first.token_ids
    assert rounds(again) == rounds(first)
    other = decoder().generate(PROMPTS, costs=replace(CHEAP, draft=(((0.4, 0.8),),)), **options)
    assert rounds(other) != rounds(first)


def test_the_nominal_table_is_the_same_in_every_decoder() -> None:
    tables = [decoder(None).generate([1], 2).provenance["costs"] for _ in range(2)]
    assert tables[0] == tables[1]
    assert tables[0]["source"] == "nominal"


def test_switched_off_the_rounds_are_those_of_fixed_lengths() -> None:
    pair = decoder()
    off = pair.generate(PROMPTS, 40, draft_length="given")
    fixed = pair.generate(PROMPTS, 40, strategies=[PromptLookup(ngram_min=2), DraftModel(n_max=5)])
    assert rounds(off) == rounds(fixed)
    assert off.provenance["costs"] is None
    assert fixed.provenance["draft_length"] == ["given", "given"]
    assert all(c.n_skipped == 0 and not c.n_asked_per_length for c in off.stats.counters.values())


def test_the_default_chain_is_automatic_and_counts_what_it_asked() -> None:
    pair = SpeculativeDecoder(small_model(3, V), check=False, costs=CHEAP)
    out = pair.generate(PROMPTS[0], 60)
    assert out.provenance["draft_length"] == ["auto"]
    counts = out.stats.to_dict()["strategies"]["prompt-lookup"]
    assert sum(counts["n_asked_per_length"]) + counts["n_skipped"] in (
        len(out.stats.rows[0]),
        len(out.stats.rows[0]) - 1,
    )
    assert pair.generate(PROMPTS[0], 4, strategies=["prompt-lookup"]).provenance["draft_length"] == ["given"]
    assert pair.generate(PROMPTS[0], 4, strategies=None).provenance["draft_length"] == ["auto"]


def test_trees_keep_their_shape_beside_automatic_length() -> None:
    pair = decoder()
    out = pair.generate(PROMPTS[0], 20, strategies=[DraftModel(tree="2x2")], draft_length="auto")
    assert out.provenance["draft_length"] == ["given"]
    assert rounds(out) == rounds(pair.generate(PROMPTS[0], 20, strategies=[DraftModel(tree="2x2")]))


def test_replay_with_automatic_length_gives_the_rounds_of_the_run() -> None:
    pair = SpeculativeDecoder(small_model(3, V), check=False, costs=CHEAP)
    out = pair.generate(PROMPTS[0], 60, ignore_eos=True)
    chain = model_free_chain(["prompt-lookup"], 100, CHEAP)
    replayed = replay(chain, np.array(PROMPTS[0]), np.array(out.token_ids[0]))
    assert [tuple(r) for r in replayed] == rounds(out)[0]


def test_bad_options_are_named() -> None:
    pair = decoder()
    for option, part in (
        ({"draft_length": "long"}, "draft_length"),
        ({"costs": 3}, "costs"),
        ({"costs": "none"}, "none"),
    ):
        with pytest.raises(SpecdecError, match=part):
            pair.generate([1], 2, **option)
    with pytest.raises(SpecdecError, match="no draft model"):
        pair.generate([1], 2, costs=replace(CHEAP, draft=None))
