"""The comparison of estimates and runs: its budget, going on after a stop, and its figures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specdec
from tests.helpers.laws import small_model
from tests.helpers.playing import random_ids, weaker
from tests.helpers.scripts import load_script

VOCAB = 24


@pytest.fixture
def script() -> Any:
    return load_script("measure_what_if")


class Clock:
    """Time that passes only where work is pretended."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Pretended:
    """A Part without models: a piece takes 10 seconds, and writes two texts of each prompt."""

    def __init__(self, script: Any, clock: Clock):
        self.clock, self.tokens, self.asked = clock, 8, []  # type: ignore[var-annotated]
        plans = [("greedy", "x", 2, 1), ("leviathan", "x", 2, 0), ("leviathan", "x", 4, 0)]
        self.cases = [script.Case(rule, draft, None, k, 0.0, (0, 1), piece, 2) for rule, draft, k, piece in plans]

    def run(self, case: Any, part: tuple[int, ...], seed: int) -> tuple[list[list[float]], bool]:
        self.asked.append((case.rule, case.k, part, seed))
        self.clock.now += 10.0
        # The two texts of a prompt are a round above and below what was expected.
        rounds = [(5.0, 5.0)] if case.rule == "greedy" else [(5.0, 4.0), (5.0, 6.0)]
        return [[i, 8, *counts] for i in part for counts in rounds], case.rule == "greedy"

    def plain(self, cases: Any, seed: int) -> list[list[list[float]]]:
        self.asked.append(("plain", 0, cases[0].part(0), seed))
        self.clock.now += 10.0
        return [[[i, 8, rounds] for i in (0, 1) for rounds in (3.0, 7.0)] for _ in cases]


def arguments(out: Path, error: float = 0.05, plain_error: float = 0.1) -> argparse.Namespace:
    return argparse.Namespace(part="smollm2", out=out, error=error, plain_error=plain_error)


@pytest.fixture
def pretended(script: Any, monkeypatch: pytest.MonkeyPatch) -> Pretended:
    clock = Clock()
    monkeypatch.setattr(script, "time", clock)
    return Pretended(script, clock)


def test_every_plan_has_a_first_piece_before_any_has_a_second(script: Any, pretended: Any, tmp_path: Path) -> None:
    script.work(script.Record(pretended, arguments(tmp_path / "r.json")), 1e9)
    first = [asked[:2] for asked in pretended.asked[:4]]
    assert first == [("greedy", 2), ("leviathan", 2), ("leviathan", 4), ("plain", 0)]
    seeds = {kind: {a[3] for a in pretended.asked if a[0] == kind} for kind in ("leviathan", "plain")}
    assert not seeds["leviathan"] & seeds["plain"], "texts of runs and plain ones are not independent"


def test_nothing_is_begun_that_would_end_too_late(script: Any, pretended: Any, tmp_path: Path) -> None:
    script.work(script.Record(pretended, arguments(tmp_path / "r.json")), 45.0)
    assert pretended.clock.now == 40.0  # a second piece would have taken until 50


def test_a_run_that_was_stopped_goes_on_where_it_was(script: Any, pretended: Any, tmp_path: Path) -> None:
    whole, parts = arguments(tmp_path / "whole.json"), arguments(tmp_path / "parts.json")
    script.work(script.Record(pretended, whole), 1e9)
    asked, pretended.asked = pretended.asked, []
    for _ in range(100):
        pretended.clock.now = 0.0
        script.work(script.Record(pretended, parts), 15.0)
    assert pretended.asked == asked
    assert parts.out.read_text() == whole.out.read_text()


def test_a_result_of_other_settings_is_not_gone_on_with(script: Any, pretended: Any, tmp_path: Path) -> None:
    script.work(script.Record(pretended, arguments(tmp_path / "r.json")), 15.0)
    pretended.tokens = 9
    with pytest.raises(SystemExit, match="other settings"):
        script.Record(pretended, arguments(tmp_path / "r.json"))


def test_work_ends_when_both_errors_are_small_enough(script: Any, pretended: Any, tmp_path: Path) -> None:
    """n pieces of two texts of two prompts, rounds 1 beside 5: variances of 2n / (2n - 1), and an error of
    sqrt(8 / (2n - 1)) / 20 of the mean; plain texts, 2 beside 5, have twice that."""
    script.work(script.Record(pretended, arguments(tmp_path / "r.json", 0.05, 0.25)), 1e9)
    kinds = [a[:2] for a in pretended.asked]
    assert (kinds.count(("leviathan", 2)), kinds.count(("leviathan", 4)), kinds.count(("plain", 0))) == (5, 5, 2)
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert rows[0]["same_texts"] is True
    assert rows[0]["standard_error"] == rows[0]["difference"] == 0.0
    own, plain = (8 / 9) ** 0.5 / 20, 2 * (8 / 3) ** 0.5 / 20
    for row in rows[1:]:
        assert row["standard_error"] == pytest.approx(own)
        assert row["high"] - row["low"] == pytest.approx(2 * 1.96 * own, rel=1e-3)
        assert row["from_plain_texts"]["standard_error"] == pytest.approx((own**2 + plain**2) ** 0.5)


def test_runs_of_a_real_pair_are_compared_on_the_texts_that_they_wrote(script: Any, tmp_path: Path) -> None:
    target = small_model(1, VOCAB, 0.4)
    pair = specdec.SpeculativeDecoder(target, weaker(target, 0.4), check=False)
    alone = specdec.SpeculativeDecoder(target, check=False)
    cases = [script.Case("greedy", None, "prompt-lookup", 0, 0.0, (0, 1), 1, 1)]
    cases += [script.Case(rule, "weaker", None, 3, 0.0, (0, 1), 2, 1) for rule in ("greedy", "match", "coupled")]
    cases.append(script.Case("leviathan", "weaker", None, 3, 0.0, (0, 1), 0, 8))
    part = script.Part({None: alone, "weaker": pair}, [random_ids(9, i, VOCAB) for i in (1, 2)], cases, 12)
    record = script.Record(part, arguments(tmp_path / "r.json", 1.0, 1.0))
    script.work(record, float("inf"))
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["rule"] for row in rows] == ["greedy", "greedy", "match", "coupled", "leviathan"]
    for row in rows[:-1]:
        assert row["same_texts"]
        assert row["difference"] == 0.0
    assert not rows[-1]["same_texts"]
    assert abs(rows[-1]["difference"]) < 4 * rows[-1]["standard_error"]


def test_the_document_says_what_the_result_says() -> None:
    sure = {
        "rule": "greedy", "draft": None, "strategies": "suffix", "same_texts": True, "texts": 3, "tokens": 1234,
        "measured": 2.0, "estimate": 2.0, "difference": 0.0, "standard_error": 0.0, "low": 0.0, "high": 0.0,
    }  # fmt: skip
    plain = {"difference": -0.03, "standard_error": 0.02, "low": -0.07, "high": 0.01, "estimate": 2.0, "texts": 9}
    chance = {
        **sure, "rule": "leviathan", "draft": "x", "same_texts": False, "difference": 0.01, "standard_error": 0.005,
        "low": -0.002, "high": 0.022, "from_plain_texts": plain,
    }  # fmt: skip
    off = {**sure, "same_texts": False, "difference": 0.01, "standard_error": None, "low": None, "high": None}
    result = {
        "made_by": "m", "versions": {"specdec": "s", "torch": "t"}, "device": "d", "new_tokens": 8,
        "rows": [sure, off, chance],
    }  # fmt: skip
    made = load_script("write_results").what_if_block([result])
    assert "1 of 2 greedy, `match` and `coupled` plans wrote plain decoding's texts, and 1 took" in made
    assert "The 95 % intervals of the 1 `leviathan` plans lie within 2.2% of no difference." in made
    assert "4.0 to 4.0 times as large" in made
    assert "| greedy | - | `suffix` | 3 | 1,234 | 2.000 | 2.000 | +0.00% | - |" in made
    assert "+1.00% (error unknown)" in made
    assert "| +1.00% (-0.20% to +2.20%) | -3.00% (-7.00% to +1.00%) |" in made


def test_the_error_of_a_ratio_is_what_drawing_again_gives(script: Any) -> None:
    """Two prompts that differ much, drawn many times over: only the spread within each counts."""
    rng = np.random.default_rng(1)
    groups = [0] * 40 + [1] * 40
    values, errors = [], []
    for _ in range(400):
        rounds = np.concatenate([rng.integers(5, 15, 40), rng.integers(40, 60, 40)]).astype(float)
        tokens = rounds * np.repeat([4.0, 1.5], 40) + rng.normal(0, 6, 80)
        values.append(tokens.sum() / rounds.sum())
        errors.append(script.ratio_error(tokens, rounds, groups))
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.1)
    assert script.ratio_error(tokens, rounds, [0] * 80) > 1.5 * np.mean(errors)  # the control: prompts taken for one
    assert script.ratio_error([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [0, 0, 1]) is None
