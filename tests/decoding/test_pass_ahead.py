"""Passes launched before the host has read the last one: the same texts, and none where the host has a say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from specdec import CostTable
from specdec.decoding import verify_result
from specdec.decoding.acceptance import MATCH, AcceptanceRule
from specdec.decoding.engine import Engine
from specdec.decoding.verification import Verifier
from specdec.models.runner import Runner
from specdec.research.traces.trace import record
from tests.device.test_graphs import decoder
from tests.helpers.playing import weaker
from tests.helpers.recording import OnlyPasses, Rerun
from tests.models import test_rope

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [9, 9, 8], [5] * 20, [1, 2]]
SAMPLED = {"temperature": 0.9, "seed": 3}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "warped": {**SAMPLED, "top_k": 5, "top_p": 0.8},
    "exact": {"exact": True},
    "ends": {"eos_token_id": list(range(0, 128, 9)), "ignore_eos": False},
    "logprobs": {"output_logprobs": 3},
    "penalties": {**SAMPLED, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "sequences": {**SAMPLED, "num_return_sequences": 2},
}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the loop does in order: "launch", "ahead" or "read"."""
    done: list[str] = []
    launch, read = Verifier.launch, verify_result.PendingResult.read

    def noted(self: Verifier, active: Any, after: Any = None) -> Any:
        done.append("launch" if after is None else "ahead")
        return launch(self, active, after)

    def noted_read(self: Any) -> Any:
        done.append("read")
        return read(self)

    monkeypatch.setattr(Verifier, "launch", noted)
    monkeypatch.setattr(verify_result.PendingResult, "read", noted_read)
    return done


@pytest.mark.fast(2)
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("call", CALLS)
def test_a_pass_ahead_changes_nothing(call: str, batch: int, steps: list[str]) -> None:
    eager, ahead = decoder(), decoder(Rerun)
    options = {"strategies": [], "ignore_eos": True, "batch_size": batch, **CALLS[call]}
    expected = eager.generate(PROMPTS, 12, **options)
    assert "ahead" not in steps
    out = ahead.generate(PROMPTS, 12, **options)
    assert steps.count("ahead") > 10
    assert out.token_ids == expected.token_ids
    assert out.finish_reasons == expected.finish_reasons
    assert out.logprobs == expected.logprobs
    assert out.top_logprobs == expected.top_logprobs
    assert [row.stats for row in out] == [row.stats for row in expected]


def test_the_device_has_the_next_pass_before_the_host_reads(steps: list[str]) -> None:
    out = decoder(Rerun).generate(PROMPTS[0], 5, strategies=[], ignore_eos=True)
    assert steps == ["launch", *["ahead", "read"] * 4, "read"]
    assert out.stats.verify_passes == out.stats.host_reads == 5


def test_one_pass_is_wasted_where_a_stop_ends_the_last_row(steps: list[str]) -> None:
    text = decoder().generate(PROMPTS[0], 12, strategies=[], ignore_eos=True).token_ids[0]
    steps.clear()
    place = next(n for n in range(3, 10) if text[n] not in text[:n])
    out = decoder(Rerun).generate(PROMPTS[0], 12, strategies=[], eos_token_id=text[place])
    assert out.token_ids[0] == text[: place + 1]
    assert steps == ["launch", *["ahead", "read"] * (place + 1)]
    assert out.stats.verify_passes == out.stats.host_reads + 1


def test_a_row_that_waits_is_not_kept_waiting_where_a_length_frees_the_slot(steps: list[str]) -> None:
    decoder(Rerun).generate(PROMPTS[:2], 3, strategies=[], ignore_eos=True, batch_size=1)
    row = ["launch", "ahead", "read", "ahead", "read"]
    assert steps == [*row, "read", *row, "read"]


RULE = AcceptanceRule("own", "argmax", MATCH.accepts, MATCH.next_token)


@pytest.mark.parametrize(
    "options",
    [
        {"acceptance": RULE},
        {"logits_processor": lambda ids, scores: scores},
        {"exponential_decay_length_penalty": (3, 1e30), "eos_token_id": 127, "ignore_eos": False},
        {"strategies": ["prompt-lookup"]},
        {"strategies": ["draft-model:n_max=2"]},
    ],
    ids=["a rule of one's own", "a processor on the host", "a limited processor", "lookup", "draft"],
)
def test_no_pass_goes_ahead_where_the_host_has_a_say(options: Any, steps: list[str]) -> None:
    """Only before the last tokens of all rows, which need no draft."""
    decoder(Rerun).generate(PROMPTS, 4, **{"strategies": [], "ignore_eos": True, "temperature": 0.5, **options})
    assert len(steps) > 5
    assert "ahead" not in steps[:-3]


def test_nor_where_a_rotation_depends_on_the_length(steps: list[str]) -> None:
    made = test_rope.decoder("phi3")
    made.target = Runner(test_rope.model("phi3"), recorder=Rerun())
    assert made.target.rope is not None
    made.generate([1, 2, 3], 4, strategies=[], ignore_eos=True)
    assert "ahead" not in steps


def test_single_passes_that_are_recorded_go_ahead_too(steps: list[str]) -> None:
    out = decoder(OnlyPasses).generate(PROMPTS, 8, strategies=[], ignore_eos=True)
    assert out.token_ids == decoder().generate(PROMPTS, 8, strategies=[], ignore_eos=True).token_ids
    assert "ahead" in steps


def test_traces_are_those_of_one_pass_after_another() -> None:
    found = [record(d, PROMPTS, 8, strategies=[], ignore_eos=True, **SAMPLED) for d in (decoder(), decoder(Rerun))]
    rounds = [[(r.row, r.position, r.tokens, r.finish_reason) for r in trace.rounds] for trace in found]
    assert rounds[0] == rounds[1]


def test_rows_that_join_or_leave_between_passes_have_their_own_texts(steps: list[str]) -> None:
    ahead = decoder(Rerun)
    options: dict[str, Any] = {"strategies": [], "ignore_eos": True}
    want = [decoder().generate(p, 6 + 2 * i, **options).token_ids[0] for i, p in enumerate(PROMPTS)]
    with ahead.live(3, 64, **options) as call:
        rows = []
        for i, prompt in enumerate(PROMPTS):
            rows.append(call.add(prompt, seed=0, max_new_tokens=6 + 2 * i))
            call.step()
        call.cancel(rows[3])
        while call.rows:
            call.step()
    assert steps.count("ahead") > 5
    assert [row.output for row in rows[:3]] == want[:3]
    assert rows[3].output == want[3][: len(rows[3].output)]
    assert rows[4].output == want[4]


def test_a_call_that_is_given_up_leaves_nothing_behind() -> None:
    ahead = decoder(Rerun)
    want = decoder().generate(PROMPTS, 8, strategies=[], ignore_eos=True).token_ids
    rounds = ahead.rounds(PROMPTS[3], 20, strategies=[], ignore_eos=True)
    assert next(rounds).tokens == want[3][:1]
    rounds.close()
    assert ahead.generate(PROMPTS, 8, strategies=[], ignore_eos=True).token_ids == want


def test_a_row_without_a_distribution_ends_alone() -> None:
    """Its next pass is fed a token that exists, whatever the scores have made of it."""
    ahead, prompts = decoder(Rerun), [PROMPTS[0], PROMPTS[2]]
    want = decoder().generate(prompts, 8, strategies=[], ignore_eos=True).token_ids
    bad = want[1][0]
    assert bad not in prompts[0] + want[0]
    with torch.no_grad():
        ahead.target.model.get_input_embeddings().weight[bad] = float("nan")
    out = ahead.generate(prompts, 8, strategies=[], ignore_eos=True)
    assert out.finish_reasons == ["length", "error"]
    assert out.token_ids == [want[0], [bad]]


COSTS = CostTable((((1.0, 1.1),),), (((0.1, 0.12),),), widths=(1, 17))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", [{}, {**SAMPLED, "acceptance": "match"}], ids=["greedy", "match"])
def test_where_an_automatic_length_rests_passes_go_ahead(
    options: Any, batch: int, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the lengths are those that would have been chosen: drafts are tried again as often."""
    calls: dict[str, Any] = {"strategies": ["draft-model"], "draft_length": "auto", "costs": COSTS, "ignore_eos": True}
    calls |= {"batch_size": batch, **options}
    pair = decoder(Rerun)
    pair.draft = Runner(weaker(pair.target.model, 0.3), recorder=Rerun())
    out = pair.generate(PROMPTS[:3], 60, **calls)
    assert steps.count("ahead") > steps.count("launch") > 3
    steps.clear()
    monkeypatch.setattr(Engine, "start_next_pass", lambda self, active, pending: None)
    expected = pair.generate(PROMPTS[:3], 60, **calls)
    assert "ahead" not in steps
    assert out.token_ids == expected.token_ids
    counters = [made.stats.counters["draft-model"] for made in (out, expected)]
    assert counters[0].n_gen_tokens == counters[1].n_gen_tokens > 0
    assert counters[0].n_asked_per_length == counters[1].n_asked_per_length
    assert counters[0].n_skipped == counters[1].n_skipped


def test_a_round_that_never_comes_is_not_counted(steps: list[str]) -> None:
    """A stop ends the row while the pass of its next round, without a draft as well, runs already."""
    pair, counted = decoder(Rerun), []
    pair.draft = Runner(weaker(pair.target.model, 0.3), recorder=Rerun())
    calls: dict[str, Any] = {"strategies": ["draft-model"], "draft_length": "auto", "costs": COSTS}
    text = pair.generate(PROMPTS[0], 30, ignore_eos=True, **calls).token_ids[0]
    eos = next(token for n, token in enumerate(text) if n > 15 and token not in text[:n])
    for begin in (Engine.start_next_pass, lambda self, active, pending: None):
        steps.clear()
        with mock.patch.object(Engine, "start_next_pass", begin):
            out = pair.generate(PROMPTS[0], 30, eos_token_id=eos, **calls)
        counted.append((steps.count("ahead") > 0, out.finish_reasons, out.stats.counters["draft-model"].n_skipped))
    assert counted[0][1:] == counted[1][1:]
    assert [ahead for ahead, *_ in counted] == [True, False]
