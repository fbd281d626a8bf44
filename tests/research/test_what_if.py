"""Offline estimates against real runs, against the slow definition, and against the tempting wrong estimate."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import specdec
from specdec import SpecdecError, theory
from specdec.demo_models import draft_path, target_path
from specdec.research.offline import forcing, what_if
from specdec.research.offline.replay import Text
from specdec.research.offline.what_if import WhatIf, draft_lengths, estimate, round_starts
from specdec.theory import Costs
from tests.helpers.laws import small_model
from tests.helpers.playing import looping, quoting_ids, random_ids, weaker
from tests.helpers.scripts import load_script
from tests.helpers.tiny import tiny_model

VOCAB = 24
KS, P_MINS = (2, 5), (0.0, 0.3)
CHAINS = ["prompt-lookup:ngram_min=2:n_max=3,draft-model:n_max=3", "draft-model:n_max=2:p_min=0.5,ngram-map-k4v"]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "max_new_tokens": 90, "num_return_sequences": 16, "batch_size": 64}


@pytest.fixture(scope="module")
def decoder() -> specdec.SpeculativeDecoder:
    target = small_model(1, VOCAB, 0.4)
    return specdec.SpeculativeDecoder(target, weaker(target, 0.4), check=False)


def measured(decoder: Any, plan: Any, prompts: Any, **options: Any) -> float:
    """Tokens per round of the real run of a plan."""
    strategies = plan.chain if plan.k is None else [specdec.DraftModel(n_max=plan.k, p_min=plan.p_min)]
    out = decoder.generate(prompts, strategies=strategies, **options)
    return float(out.stats.emitted_tokens / out.stats.rounds)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.8, "acceptance": "match"}, {"temperature": 0.8, "acceptance": "coupled"},
     {"temperature": 0.9, "acceptance": "match", "repetition_penalty": 1.3, "top_p": 0.9}],
)  # fmt: skip
def test_where_the_text_is_the_drafters_own_business_estimates_are_exact(options: dict[str, Any]) -> None:
    """Greedy, match and coupled: every k, p_min and chain order, to the round."""
    target = looping(tiny_model("llama", 5))
    decoder = specdec.SpeculativeDecoder(target, weaker(target, 0.3), check=False)
    prompts = [random_ids(9, 1), quoting_ids(20, 2)]
    call = {"max_new_tokens": 14, **options}
    found = estimate(decoder, prompts, KS, P_MINS, CHAINS, **call)
    assert len(found.plans) == len(KS) * len(P_MINS) + len(CHAINS)
    for plan in found.plans:
        assert plan.tokens_per_round == pytest.approx(measured(decoder, plan, prompts, batch_size=1, **call)), plan


@pytest.mark.full
def test_on_the_embedded_pair_estimates_are_exact_for_greedy_text() -> None:
    decoder = specdec.SpeculativeDecoder.from_pretrained(target_path(), draft_path(), check=False)
    prompts = ["def fibonacci(n):\n", "class Stack:\n"]
    found = estimate(decoder, prompts, ks=(4,), p_mins=(0.0, 0.5), max_new_tokens=24)
    for plan in found.plans:
        assert plan.tokens_per_round == pytest.approx(measured(decoder, plan, prompts, max_new_tokens=24), rel=0.03)


@pytest.mark.full
def test_under_leviathan_estimates_are_those_of_real_runs(decoder: specdec.SpeculativeDecoder) -> None:
    """Independent samples of 11,520 tokens each: 3 % is about three standard errors."""
    prompts = [random_ids(4, i, VOCAB) for i in range(8)]
    found = estimate(decoder, prompts, ks=(3,), p_mins=(0.3,), chains=CHAINS[:1], samples=1, **SAMPLED)
    for plan in found.plans:
        assert plan.tokens_per_round == pytest.approx(measured(decoder, plan, prompts, seed=7, **SAMPLED), rel=0.03)


def test_the_product_of_one_minus_tv_is_biased_where_the_weights_are_not() -> None:
    """The control, enumerated over all texts: two tokens, and a draft that is right after one of them only."""
    p = np.array([0.5, 0.5])
    q_after = {0: np.array([0.5, 0.5]), 1: np.array([1.0, 0.0])}
    q_first = np.array([0.9, 0.1])
    real = tempting = weighted = 0.0
    for x, y in itertools.product((0, 1), repeat=2):
        w = [min(1.0, q_first[x] / p[x]), min(1.0, q_after[x][y] / p[y])]
        weighted += p[x] * p[y] * w[0] * w[1]
        tempting += p[x] * p[y] * np.minimum(p, q_first).sum() * np.minimum(p, q_after[x]).sum()
        real += min(p[x], q_first[x]) * min(p[y], q_after[x][y])
    assert weighted == pytest.approx(real)
    assert abs(tempting - real) / real > 0.1


def _own_texts(decoder: Any, out: Any, prompts: Any) -> tuple[float, float]:
    """Rounds of a `leviathan` run over those estimated for the texts that it wrote, less 1, and its standard error."""
    plan = estimate(decoder, prompts, (4,), outputs=out.token_ids, acceptance="leviathan", **SAMPLED).plans[0]
    rounds, expected = [len(r) for r in out.stats.rows], [c[1] for c in plan.counts]
    error = load_script("measure_what_if").ratio_error(
        rounds, expected, [i // SAMPLED["num_return_sequences"] for i in range(len(rounds))]
    )
    assert error is not None
    return sum(rounds) / sum(expected) - 1, error


@pytest.mark.full
def test_given_its_text_a_leviathan_run_takes_the_estimated_rounds(
    decoder: specdec.SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the run's own texts a comparison has little scatter; the ratio the wrong way round, min(1, p(x) / q(x)) in
    place of min(1, q(x) / p(x)), is far outside it."""
    prompts = [random_ids(4, i, VOCAB) for i in range(4)]
    out = decoder.generate(prompts, strategies="draft-model:n_max=4", acceptance="leviathan", seed=3, **SAMPLED)
    difference, error = _own_texts(decoder, out, prompts)
    assert abs(difference) < 4 * error
    assert abs(difference) + 2 * error < 0.03
    right = forcing._judge
    monkeypatch.setattr(forcing, "_judge", lambda p, q, *rest: right(q, p, *rest))
    wrong, error = _own_texts(decoder, out, prompts)
    assert abs(wrong) > 6 * error


def test_round_starts_are_the_theorys_for_drafts_of_one_length() -> None:
    rng = np.random.default_rng(3)
    for n, k in ((1, 1), (9, 1), (12, 4), (5, 8)):
        weight = rng.random(n)
        starts = round_starts(weight, draft_lengths(np.ones(n), k, 0.0))
        assert starts.sum() == pytest.approx(theory.expected_rounds_from_text(weight, k))


def test_round_starts_are_what_coins_give() -> None:
    """The slow definition: rounds simulated coin by coin, with drafts of different lengths."""
    rng = np.random.default_rng(4)
    weight, confidence = rng.random(10), rng.random(10)
    lengths = draft_lengths(confidence, 4, 0.3)
    counts = np.zeros(10)
    for _ in range(4000):
        t = 0
        while t < 10:
            counts[t] += 1
            accepted = 0
            while accepted < lengths[t] and rng.random() < weight[t + accepted]:
                accepted += 1
            t += accepted + 1
    assert counts / 4000 == pytest.approx(round_starts(weight, lengths), abs=0.03)


def test_draft_lengths_stop_where_confidence_is_low_and_before_the_end() -> None:
    confidence = np.array([0.9, 0.2, 0.8, 0.9, 0.9, 0.1])
    assert draft_lengths(confidence, 3, 0.5).tolist() == [1, 0, 3, 2, 1, 0]
    assert draft_lengths(confidence, 3, 0.0).tolist() == [3, 3, 3, 2, 1, 0]
    assert draft_lengths(confidence, 3, 0.5, n_min=2).tolist() == [3, 3, 3, 2, 1, 0]


def test_an_earlier_plain_run_can_be_read_again(decoder: specdec.SpeculativeDecoder) -> None:
    prompts = [random_ids(4, 1, VOCAB)]
    options: dict[str, Any] = {"temperature": 0.9, "max_new_tokens": 12}
    plain = decoder.generate(prompts, strategies=[], **options).token_ids
    assert estimate(decoder, prompts, outputs=plain, **options).plans == estimate(decoder, prompts, **options).plans


def test_speed_up_weighs_tokens_against_drafts(decoder: specdec.SpeculativeDecoder) -> None:
    prompts = [random_ids(4, 1, VOCAB)]
    free, dear = (
        estimate(decoder, prompts, max_new_tokens=30, cost=Costs(draft, lambda n: 0.0)) for draft in (0.0, 1.0)
    )
    assert free.best().tokens_per_round == max(p.tokens_per_round for p in free.plans)
    for plan in free.plans:
        assert plan.speedup == pytest.approx(plan.tokens_per_round)
    assert dear.best().k == 1
    beside = estimate(decoder, prompts, (2,), chains=CHAINS, max_new_tokens=30, cost=Costs(1.0, lambda n: 0.0))
    assert beside.best().k == 2, "tokens per round of a chain were compared with a speed-up"
    for plan in dear.plans:
        assert plan.speedup == pytest.approx(plan.tokens_per_round / (1 + plan.drafted_per_round))


def test_costs_are_measured_on_both_models(decoder: specdec.SpeculativeDecoder) -> None:
    cost = what_if.measure_cost(decoder, context=16, widest=4, repeats=3)
    assert 0.2 < cost.draft < 5  # two models of one size
    assert cost.wide(0.0) == 0.0


def test_ngrams_are_replayed_without_a_model() -> None:
    decoder = specdec.SpeculativeDecoder(looping(tiny_model("llama", 5)), check=False)
    prompts = [quoting_ids(20, 2), random_ids(9, 1)]
    outputs = decoder.generate(prompts, max_new_tokens=24, strategies=[]).token_ids
    texts = [Text("", "", np.array(p), np.array(o)) for p, o in zip(prompts, outputs, strict=True)]
    for chain in ("prompt-lookup:ngram_min=1", "ngram-simple:size_n=2:size_m=4", "suffix,ngram-cache"):
        plan = what_if.ngrams(texts, chain)
        assert plan.tokens_per_round == pytest.approx(measured(decoder, plan, prompts, max_new_tokens=24, batch_size=1))
        [same] = estimate(decoder, prompts, chains=[chain], max_new_tokens=24).plans
        assert (same.rounds, same.tokens) == (plan.rounds, plan.tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acceptance": "typical"}, "no estimate for the rule 'typical'"),
        ({"p_mins": (2.0,)}, "p_mins must be a number between 0 and 1"),
        ({"ks": (0,)}, "ks must be a whole number >= 1"),
        ({"ks": ()}, "nothing to estimate"),
        ({"chains": ["draft-model:tree=2x2"]}, "no trees"),
        ({"chains": ["draft-model:n_min=2"]}, "n_min"),
        ({"chains": ["eagle9"]}, "unknown strategy"),
        ({"outputs": [[1], [2]]}, "2 outputs for 1 rows"),
        ({"outputs": [[1] * 600]}, "a model has a context of 512"),
    ],
)
def test_what_is_not_covered_is_refused(
    decoder: specdec.SpeculativeDecoder, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecdecError, match=message):
        estimate(decoder, [random_ids(4, 1, VOCAB)], max_new_tokens=4, **options)


def test_draft_lengths_without_a_draft_model_are_refused() -> None:
    decoder = specdec.SpeculativeDecoder(small_model(1, VOCAB), check=False)
    with pytest.raises(SpecdecError, match="draft lengths need a draft model"):
        estimate(decoder, [[1, 2]], ks=(2,))
    found = estimate(decoder, [[1, 2]], chains=["prompt-lookup"], max_new_tokens=6)
    assert isinstance(found, WhatIf)
    assert found.expected_acceptance is None


def test_texts_of_one_prompt_are_read_as_each_would_be_alone(decoder: specdec.SpeculativeDecoder) -> None:
    """The second of them is read over what the first has left in the cache."""
    prompt = random_ids(20, 1, VOCAB)
    options: dict[str, Any] = {"temperature": 0.9, "max_new_tokens": 40}
    long, short = random_ids(40, 2, VOCAB), random_ids(25, 3, VOCAB)
    both = estimate(decoder, [prompt], (2,), outputs=[long, short], num_return_sequences=2, **options).texts
    for text, output in zip(both, (long, short), strict=True):
        [alone] = estimate(decoder, [prompt], (2,), outputs=[output], **options).texts
        assert text.weight == pytest.approx(alone.weight, abs=1e-4)
        assert text.confidence == pytest.approx(alone.confidence, abs=1e-4)
