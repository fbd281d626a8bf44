"""why-not-equal: ties are ties, faults are faults, and equal runs are equal."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rich.console import Console

import specdec
from specdec.decoding.acceptance import RULES, register_rule
from specdec.errors import SpecdecError
from specdec.research import PassShape, Report, why_not_equal
from specdec.research.exactness.equality import float32_reference, replay
from tests.helpers.broken import BROKEN_RULES
from tests.helpers.playing import random_ids, weaker
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_greedy, oracle_logits

PROMPTS = [random_ids(5 + i, i) for i in range(4)]
N = 20


def with_twin(model: Any, token: int, twin: int, difference: float) -> Any:
    """`model`, changed: the logit of `twin` is always 1 + `difference` times that of `token`."""
    with torch.no_grad():
        row = model.lm_head.weight[token]
        model.lm_head.weight[twin] = row * (1 + difference)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def decoder(model: Any) -> specdec.SpeculativeDecoder:
    return specdec.SpeculativeDecoder(model, weaker(model))


@pytest.fixture
def accept_all() -> Iterator[str]:
    """The lossy rule that takes every draft, under its name."""
    register_rule(BROKEN_RULES["accept-all"])
    yield "accept-all"
    del RULES["accept-all"]


def shown(report: Report) -> str:
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(report.renderable())
    return console.export_text()


@pytest.mark.parametrize("at", [0, 1, 9])
def test_a_planted_tie_is_a_tie(at: int) -> None:
    """Two tokens whose logits differ by about 1e-7."""
    model = tiny_model("llama", seed=3)
    text = oracle_greedy(model, PROMPTS[0], N)
    twin = next(t for t in range(127, 0, -1) if t not in text)
    with_twin(model, text[at], twin, 0.0)
    best = oracle_logits(model, PROMPTS[0] + text[:at])[-1].topk(2).values
    assert float(best[0] - best[1]) < 2e-7
    other = [*text[:at], twin, *text[at + 1 :]]
    report = why_not_equal(specdec.SpeculativeDecoder(model), PROMPTS[0], text, other)
    assert (report.verdict, report.position, report.tokens) == ("tie", at, (text[at], twin))
    assert report.gap is not None
    assert report.gap <= 2 * max(report.noise, report.resolution) < 1e-4
    assert {*report.views[0].tokens} == {text[at], twin}


def test_the_same_two_tokens_a_little_apart_are_a_fault() -> None:
    """The control of the test above: a difference of 1e-3 is a thousand times what float32 passes differ by."""
    model = tiny_model("llama", seed=3)
    text = oracle_greedy(model, PROMPTS[0], N)
    twin = next(t for t in range(127, 0, -1) if t not in text)
    with_twin(model, text[9], twin, -1e-3)
    other = [*text[:9], twin, *text[10:]]
    report = why_not_equal(specdec.SpeculativeDecoder(model), PROMPTS[0], text, other)
    assert (report.verdict, report.position) == ("fault", 9)
    assert report.gap is not None
    assert report.gap < 0.05


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_lossy_rule_is_a_fault(decoder: specdec.SpeculativeDecoder, accept_all: str, temperature: float) -> None:
    options: dict[str, Any] = {"temperature": temperature, "seed": 5}
    plain = decoder.generate(PROMPTS, N, strategies=[], **options).token_ids
    # Of a given length: chosen ones can be so short here that a row has no wrong token.
    wrong = decoder.generate(PROMPTS, N, acceptance=accept_all, draft_length="given", **options).token_ids
    right = decoder.generate(PROMPTS, N, acceptance="match", **options).token_ids
    for row, (prompt, a, b, c) in enumerate(zip(PROMPTS, plain, wrong, right, strict=True)):
        assert why_not_equal(decoder, prompt, a, b, row=row, **options).verdict == "fault"
        assert why_not_equal(decoder, prompt, a, c, row=row, **options).verdict == "equal"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "seed": 11, "top_k": 30},
        {"temperature": 1.0, "seed": [4], "repetition_penalty": 1.4},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ],
    ids=str,
)
def test_the_best_token_of_every_pass_is_the_one_that_plain_decoding_took(
    decoder: specdec.SpeculativeDecoder, options: dict[str, Any]
) -> None:
    """The scores of a report are those of the run: with its temperature, noise, warpers and processors."""
    text = decoder.generate(PROMPTS[1], N, strategies=[], **options).token_ids[0]
    for at in (0, 6, N - 1):
        other = [*text[:at], (text[at] + 1) % 128, *text[at + 1 :]]
        report = why_not_equal(decoder, PROMPTS[1], text, other, **options)
        assert report.verdict == "fault"
        assert {view.tokens[0] for view in report.views} == {text[at]}
        assert len(report.views) == 3


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_a_replay_gives_the_logits_of_a_full_forward(model: Any, tokens: int, exact: bool) -> None:
    decoder = specdec.SpeculativeDecoder(model)
    ids = random_ids(23, 8)
    expected = oracle_logits(model, ids)[-1]
    for prompt_length in (1, 9, 23):
        mine = replay(decoder.target, ids, prompt_length, PassShape(tokens, batch=2, exact=exact))
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def test_equal_runs_and_beginnings_of_one_another(decoder: specdec.SpeculativeDecoder) -> None:
    assert why_not_equal(decoder, [1, 2], [3, 4], [3, 4]).verdict == "equal"
    report = why_not_equal(decoder, [1, 2], [3, 4], [3], names=("plain", "fast"))
    assert (report.verdict, report.position, report.tokens) == ("prefix", 1, (4, None))
    assert "no token differs" in shown(report)
    assert "plain and fast are equal" in shown(why_not_equal(decoder, [1], [3], [3], names=("plain", "fast")))


def test_a_report_is_plain_data_and_one_screen(decoder: specdec.SpeculativeDecoder) -> None:
    report = why_not_equal(decoder, [1, 2, 3], [5, 6], [5, 7], shape_b=PassShape(4, batch=2), reference=None)
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert Report.from_dict(data) == report
    assert data["verdict"] == "fault"
    assert data["reference_note"] == "not asked for"
    assert [v["name"] for v in data["views"]] == ["a: width 1, batch 1", "b: width 4, batch 2"]
    text = shown(report)
    assert "FAULT" in text
    assert len(text.splitlines()) < 20


def test_half_precision_is_compared_with_a_float32_reference() -> None:
    """And exact runs say that they were promised to be equal."""
    model = tiny_model("llama").to(torch.bfloat16)
    decoder = specdec.SpeculativeDecoder(model)
    text = decoder.generate([1, 2, 3], 6).token_ids[0]
    twin = next(t for t in range(127, 0, -1) if t not in text)
    with_twin(model, text[4], twin, 0.0)
    shape = PassShape(1, exact=True, capacity=9)
    report = why_not_equal(decoder, [1, 2, 3], text, [*text[:4], twin], shape_a=shape, shape_b=shape)
    assert report.views[2].name == "float32 reference"
    expected = oracle_logits(float32_reference(decoder.target)[0], [1, 2, 3, *text[:4]])[-1]
    assert report.views[2].of_a == pytest.approx(float(expected[text[4]]), abs=1e-4)
    assert (report.verdict, report.promised) == ("tie", True)
    assert "promises identical passes" in shown(report)
    assert model.dtype == torch.bfloat16


def test_leviathan_samples_are_not_compared(decoder: specdec.SpeculativeDecoder) -> None:
    with pytest.raises(SpecdecError, match="distribution and not the sample"):
        why_not_equal(decoder, [1, 2], [3], [4], temperature=0.8, acceptance="leviathan")


@pytest.mark.full
def test_every_difference_of_half_precision_runs_without_exact_mode_is_a_tie() -> None:
    """Row 9 of the faults in the wild: passes of other shapes flip near-ties in bfloat16."""
    decoder = specdec.SpeculativeDecoder(tiny_model("llama", hidden_size=64, vocab=512).to(torch.bfloat16))
    prompts = [random_ids(5 + i, i, 512) for i in range(5)]
    plain = decoder.generate(prompts, 24, strategies=[], exact=False, batch_size=1).token_ids
    text = [list(row) for row in plain]

    class Right:
        name = "right"

        def begin(self, row: int, prompt: Any) -> None: ...
        def accept(self, row: int, n_accepted: int, is_other: bool) -> None: ...

        def draft(self, requests: Any) -> list[specdec.Draft]:
            ids = [[*map(int, r.tokens), int(r.last)] for r in requests]
            rest = [next((p + t for p, t in zip(prompts, text, strict=True) if i[: len(p)] == p), []) for i in ids]
            return [specdec.Draft(t[len(i) : len(i) + 7]) for i, t in zip(ids, rest, strict=True)]

    for exact in (False, True):
        plain = decoder.generate(prompts, 24, strategies=[], exact=exact, batch_size=1).token_ids
        fast = decoder.generate(prompts, 24, strategies=[Right()], exact=exact, batch_size=1)
        assert fast.stats.accepted_tokens > 60
        verdicts = {
            why_not_equal(decoder, p, a, b, reference=None).verdict
            for p, a, b in zip(prompts, plain, fast.token_ids, strict=True)
        }
        assert verdicts <= ({"equal"} if exact else {"equal", "tie"})
