"""Length policies: texts are plain decoding's, samples follow the target's distribution, and what each one does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import CostTable, DraftModel, DraftRequest, EarlyExit, LengthPolicy, SpecdecError, SpeculativeDecoder
from specdec.drafters.draft_model import core
from specdec.drafters.policies import AdaEDL, Goodput, Heuristic, features, find_policy
from specdec.research.ablation import AblationConfig
from specdec.research.offline.fit_stop import fit_stop
from specdec.research.traces.trace import record
from tests.helpers.laws import small_model
from tests.helpers.playing import weaker
from tests.helpers.scripted import SHAPES, ScriptedModel
from tests.helpers.tiny import tiny_model

V = 13
PROMPT, PROMPTS = [5, 7, 5, 7, 5], [[5, 7, 5, 7, 5], [1], [2, 3, 4, 2, 3]]
CHEAP = CostTable((((1.0, 1.2),),), (((0.02, 0.04),),), widths=(1, 17))
ALL: list[Any] = [
    "auto", "goodput", "heuristic", "confidence:threshold=0.2", "adaedl:threshold=0.2",
    "classifier:weights=[1.0,1.0,1.0]",
]  # fmt: skip


def decoder() -> SpeculativeDecoder:
    target = small_model(3, V)
    return SpeculativeDecoder(target, weaker(target, 0.3), strategies=[DraftModel()], check=False, costs=CHEAP)


@pytest.mark.parametrize("policy", ALL)
def test_text_is_plain_decodings(policy: str) -> None:
    pair = decoder()
    plain = pair.generate(PROMPTS, 24, strategies=[])
    out = pair.generate(PROMPTS, 24, length_policy=policy, batch_size=2)
    assert out.token_ids == plain.token_ids
    assert out.stats.accepted_tokens > 0
    assert len({r.drafted for row in out.stats.rows for r in row}) > 2


def test_fixed_is_the_strategys_own_length() -> None:
    pair = decoder()
    fixed = pair.generate(PROMPTS, 24, length_policy="fixed")
    assert [list(map(tuple, row)) for row in fixed.stats.rows] == [
        list(map(tuple, row)) for row in pair.generate(PROMPTS, 24, draft_length="given").stats.rows
    ]


def test_a_rule_that_stops_before_a_token_is_not_shown_it() -> None:
    seen: list[bool] = []

    class Looks:
        product, after = False, False

        def score(self, q: Tensor, token: Tensor | None) -> Tensor:
            seen.append(token is not None)
            return torch.ones(len(q))

    logits, token = torch.zeros(1, V), torch.zeros(1, dtype=torch.int64)
    core.score_of(Looks(), logits, token, torch.ones(1))
    Looks.after = True
    core.score_of(Looks(), logits, token, torch.ones(1))
    assert seen == [False, True]


# -- what each one does ----------------------------------------------------------------------------------------------


def test_the_heuristic_counts_as_transformers_does() -> None:
    policy = Heuristic(start=3)
    policy.begin(0)
    told = ((3, False, 5), (2, True, 4), (0, True, 3), (0, True, 2), (0, True, 1), (0, True, 1))
    for accepted, rejected, then in told:
        policy.learn(0, accepted, rejected)
        assert policy.length(0, 16) == then


def test_the_entropy_bound_and_its_threshold() -> None:
    policy = AdaEDL()
    policy.begin(0)
    flat, sure = torch.full((1, 4), 0.25), torch.eye(4)[:1]
    entropy = float(torch.log(torch.tensor(4.0)))
    assert policy.rule.score(flat, None).item() == pytest.approx(1 - (0.2 * entropy) ** 0.5)
    assert policy.rule.score(sure, None).item() == 1.0
    assert policy.length(0, 8) == 8
    # It rises below an acceptance of 0.9, falls above, and rests where all of the longest draft was accepted.
    for accepted, then in ((0, 1), (8, 2), (8, 3), (8, 4), (8, 4), (7, 3)):
        policy.learn(0, accepted, accepted == 0)
        assert policy.levels[0] == pytest.approx(then / 1000)


def test_a_trained_classifier_knows_confident_drafts_from_others() -> None:
    trace = record(decoder(), PROMPTS, max_new_tokens=60, top=2, temperature=1.0, strategies=["draft-model:n_max=6"])
    policy = fit_stop(trace)
    sure, unsure = (policy.rule.score(torch.tensor([q]), None).item() for q in ([0.9, 0.1, 0.0], [0.3, 0.3, 0.4]))
    assert 0 < unsure < sure < 1
    assert [float(x) for x in features(torch.tensor([0.5, 0.2]))] == pytest.approx([1.0, -0.6931, 0.3], abs=1e-4)
    with pytest.raises(SpecdecError, match="fit_stop needs"):
        fit_stop(record(decoder(), PROMPTS, max_new_tokens=8))


def test_goodput_pools_the_rows_of_a_batch_and_has_no_budget() -> None:
    for together in (True, False):
        controller = Goodput([ScriptedModel([], CHEAP)], [True], CHEAP, SHAPES, 2, together)
        asked = [DraftRequest(i, np.arange(40), 40, 20, 40) for i in range(2)]
        controller.open(asked)
        before = [controller._of(0, request).tokens(4)[4] for request in asked]
        controller.accept(0, 0, 0, 4)
        assert (controller._of(0, asked[1]).tokens(4)[4] < before[1]) == together
        assert controller.budget[1] == math.inf
    assert find_policy("goodput") is Goodput


def test_early_exit_stops_and_a_lookup_does_not() -> None:
    deep = SpeculativeDecoder(tiny_model("llama", num_hidden_layers=2), check=False)
    chain = [EarlyExit(layers=1, n_max=8)]
    early = deep.generate(PROMPTS, 24, strategies=chain, length_policy="confidence:threshold=0.05")
    assert early.token_ids == deep.generate(PROMPTS, 24, strategies=[]).token_ids
    assert len({r.drafted for row in early.stats.rows for r in row}) > 2
    assert deep.generate(PROMPTS, 24, strategies=["prompt-lookup"], length_policy="heuristic").stats.draft_tokens > 0
    with pytest.raises(SpecdecError, match="'prompt-lookup' has no draft steps"):
        deep.generate(PROMPTS, 24, strategies=["prompt-lookup"], length_policy="adaedl")


def test_a_policy_is_an_axis_of_an_ablation_with_one_reference() -> None:
    pairs = {"p": {"target": "t", "draft": "d"}}
    axes = {"length_policy": ["fixed", "heuristic:start=2", "auto"]}
    config = AblationConfig(pairs=pairs, strategies={"draft": ["draft-model"]}, axes=axes)
    assert sorted(cell.chain for cell in config.expand()) == ["draft"] * 3 + ["plain"]
    with pytest.raises(SpecdecError, match="three weights"):
        AblationConfig(pairs=pairs, strategies={"draft": ["draft-model"]}, axes={"length_policy": ["classifier"]})


class Two(LengthPolicy):
    """A policy of a user's own."""

    def length(self, row: int, longest: int) -> int:
        return 2


def test_ones_own_policy_and_bad_ones() -> None:
    out = decoder().generate(PROMPTS, 24, length_policy=f"{__name__}:Two")
    assert {r.drafted for row in out.stats.rows for r in row[:-3]} <= {1, 2}
    for value, part in (
        ("heuristics", "heuristic"), (3, "give a name"), ("auto:x=1", "no options"), ("heuristic:start=0", "start"),
        ("classifier", "three weights"), (f"{__name__}:decoder", "no specdec.LengthPolicy"),
    ):  # fmt: skip
        with pytest.raises(SpecdecError, match=part):
            find_policy(value)
    with pytest.raises(SpecdecError, match="leave draft_length out"):
        decoder().generate(PROMPT, 4, length_policy="auto", draft_length="auto")
