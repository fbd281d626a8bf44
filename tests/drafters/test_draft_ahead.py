"""Drafts that start before the host knows the verdict: the same drafts, and none where somebody else has a say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import specdec
from specdec import CostTable
from specdec.drafters import length
from specdec.drafters.draft_model import pipelined, tree
from specdec.drafters.draft_model.pipelined import _caught_up
from specdec.drafters.draft_model.steps import POSITIONS, STARTS, TOKENS
from tests.device.test_graphs import decoder
from tests.helpers.recording import OnlyPasses, Rerun

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [9, 9, 8], [5] * 20, [1, 2]]
FIXED = {"strategies": ["draft-model:n_max=3"]}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": FIXED,
    "one token": {"strategies": ["draft-model:n_max=1"]},
    "more than a pass": {"strategies": ["draft-model:n_max=24"]},
    "sampled": {**FIXED, "temperature": 0.9, "seed": 3},
    "match": {**FIXED, "temperature": 0.9, "seed": 3, "acceptance": "match"},
    "coupled": {**FIXED, "temperature": 0.9, "seed": 3, "acceptance": "coupled"},
    "warped": {**FIXED, "temperature": 0.7, "top_k": 5, "seed": 1},
    "p_min": {"strategies": ["draft-model:n_max=4:p_min=0.3"]},
    "p_min, sampled": {"strategies": ["draft-model:n_max=4:p_min=0.3:n_min=1"], "temperature": 0.9},
    "stops": {**FIXED, "eos_token_id": list(range(0, 128, 9)), "ignore_eos": False},
    "records": {**FIXED, "output_logprobs": True},
    "processors": {**FIXED, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "temperature": 0.9},
}


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How often a draft that was made ahead was what was asked for, and how often it was not."""
    found: Counter[bool] = Counter()
    real = pipelined.take

    def take(*arguments: Any) -> bool:
        taken = real(*arguments)
        found[taken] += 1
        return taken

    monkeypatch.setattr(pipelined, "take", take)
    return found


@pytest.mark.fast(1, full=12)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("call", CALLS)
def test_drafts_made_ahead_are_those_that_would_have_been_made(call: str, batch: int, looks: Counter[bool]) -> None:
    eager, ahead = decoder(), decoder(Rerun)
    for prompts, tokens in ((PROMPTS, 16), (PROMPTS[1:3], 24)):
        options = {"ignore_eos": True, "batch_size": batch, **CALLS[call]}
        expected, out = (d.generate(prompts, tokens, **options) for d in (eager, ahead))
        assert out.token_ids == expected.token_ids
        assert out.stats.rows == expected.stats.rows  # drafted and accepted tokens of every round
        assert out.stats.verify_passes == expected.stats.verify_passes == out.stats.host_reads
        if call == "records":
            for mine, theirs in zip(out.logprobs, expected.logprobs, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-4)
    assert looks[True] > 0 or call == "more than a pass"
    if batch > 1 and call == "stops":
        assert looks[False] > 0  # a slot was taken over by the next prompt


TREES = [{"branches": 3, "n_max": 4, "p_split": 0.01}, {"tree": "3x2x1"}, {"tree": "opt-6", "n_max": 3}]


@pytest.mark.fast(2)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", TREES)
def test_trees_grown_ahead_are_those_that_would_have_been_grown(
    shape: dict[str, Any], batch: int, looks: Counter[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "take", pipelined.take)
    eager, ahead = decoder(), decoder(Rerun)
    sampled = {"temperature": 0.9, "seed": 3}
    for call in ({}, sampled, {**sampled, "repetition_penalty": 1.4}):
        options = {"ignore_eos": True, "batch_size": batch, "strategies": [specdec.DraftModel(**shape)], **call}
        if shape.get("tree") == "opt-6" and call:
            options["acceptance"] = "match"  # such a tree has no q
        expected, out = (d.generate(PROMPTS, 20, **options) for d in (eager, ahead))
        assert out.token_ids == expected.token_ids
        assert out.stats.accepted_tokens == expected.stats.accepted_tokens
        assert out.stats.verify_passes == expected.stats.verify_passes == out.stats.host_reads
    assert looks[True] > 0


FLAT = CostTable((((1.0, 1.02),),), (((0.25, 0.3),),), widths=(1, 17))
AUTOMATIC: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9},
    "coupled": {"temperature": 0.9, "acceptance": "coupled"},
    "p_min": {"strategies": ["draft-model:p_min=0.3"], "temperature": 0.9},
    "processors": {"repetition_penalty": 1.4, "temperature": 0.9},
    "stops": {"eos_token_id": list(range(0, 128, 9)), "ignore_eos": False},
}


@pytest.mark.fast(2, full=5)
@pytest.mark.parametrize("call", AUTOMATIC)
@pytest.mark.parametrize("batch", [3, 1])
def test_automatic_lengths_are_the_same_whether_drafts_are_made_ahead_or_not(
    call: str, batch: int, looks: Counter[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The length is chosen before the verdict in either case; so rows never depend on whether their neighbours allow
    it. Every row of a sampled batch is that of a call of its own."""
    monkeypatch.setattr(length, "_MAY_LOSE", 10.0)  # short texts are worth no budget
    options = {"ignore_eos": True, "strategies": ["draft-model"], "seed": [5, 6, 7, 8, 9], "costs": FLAT}
    options |= AUTOMATIC[call]
    ahead = decoder(Rerun).generate(PROMPTS, 16, batch_size=batch, **options)
    taken = looks[True]
    assert taken > 0
    monkeypatch.setattr(pipelined, "possible", lambda *arguments: False)
    later = decoder(Rerun).generate(PROMPTS, 16, batch_size=batch, **options)
    assert looks[True] == taken
    assert later.token_ids == ahead.token_ids
    assert later.stats.rows == ahead.stats.rows
    if call == "sampled":
        own = [{**options, "seed": [seed]} for seed in options["seed"]]
        single = [decoder(Rerun).generate([p], 16, **alone) for p, alone in zip(PROMPTS, own, strict=True)]
        assert [out.token_ids[0] for out in single] == ahead.token_ids
        assert [out.stats.rows[0] for out in single] == ahead.stats.rows


def test_most_rounds_of_a_row_find_their_draft_made(looks: Counter[bool]) -> None:
    out = decoder(Rerun).generate(PROMPTS[:1], 40, ignore_eos=True, **FIXED)
    rounds = out.stats.verify_passes
    assert looks[False] == 0
    assert rounds - 6 <= looks[True] < rounds  # all but the first, and the last ones, which may be cut


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "options",
    [
        {"strategies": ["prompt-lookup", "draft-model:n_max=3"]},
        {"strategies": ["draft-model"], "length_policy": "heuristic"},
        {**FIXED, "logits_processor": [lambda ids, scores: scores - 0.1 * ids.shape[1]]},
    ],
)
def test_where_somebody_else_has_a_say_nothing_is_made_ahead(options: dict[str, Any], looks: Counter[bool]) -> None:
    eager, recorded = decoder(), decoder(Rerun)
    options = {"ignore_eos": True, **options}
    assert recorded.generate(PROMPTS, 20, **options).token_ids == eager.generate(PROMPTS, 20, **options).token_ids
    assert not looks


def test_without_larger_programs_the_drafts_are_the_same(looks: Counter[bool]) -> None:
    out, expected = (d.generate(PROMPTS, 24, ignore_eos=True, **FIXED) for d in (decoder(OnlyPasses), decoder()))
    assert out.token_ids == expected.token_ids
    assert out.stats.rows == expected.stats.rows


def test_a_call_that_is_given_up_leaves_its_cache_to_the_next(looks: Counter[bool]) -> None:
    eager, ahead = decoder(), decoder(Rerun)
    rounds = ahead.rounds(PROMPTS[0], max_new_tokens=40, ignore_eos=True, **FIXED)
    for _ in range(3):
        next(rounds)
    rounds.close()
    for _ in range(2):
        out, expected = (d.generate(PROMPTS, 24, ignore_eos=True, **FIXED) for d in (ahead, eager))
        assert out.token_ids == expected.token_ids
        assert out.stats.rows == expected.stats.rows


def test_what_is_fed_follows_from_the_verdict() -> None:
    # Rows: nothing stood, some stood, all stood, no draft. Sizes 10, 10, 10, 0.
    table = torch.tensor([[10, 7, 3], [10, 7, 3], [10, 7, 3], [0, 0, 0]])
    draft = torch.tensor([[21, 22, 23]] * 4)
    made = _caught_up(table, draft, torch.tensor([0, 2, 3, 0]), torch.tensor([90, 91, 92, 93]), 2)
    assert made[:3].tolist() == [
        # start, count, key, position of the first drafted token, no level of a policy, tokens
        [10, 1, 7, 11, 0, 90, 0],
        [12, 1, 7, 13, 0, 91, 0],
        [12, 2, 7, 14, 0, 23, 92],
    ]
    assert made[3, STARTS : STARTS + 2].tolist() == [0, 0]
    wide = _caught_up(table, draft, torch.tensor([0, 2, 3, 0]), torch.tensor([90, 91, 92, 93]), 4)
    assert wide[:, : TOKENS + 2].tolist() == made.tolist()
    assert wide[:3, POSITIONS].tolist() == [11, 13, 14]
    assert not wide[:, TOKENS + 2 :].any()
