"""The random requests of scripts/soak.py: what they find, and that they would find it."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from typing import Any

import pytest

from specdec.decoding import acceptance
from specdec.decoding.row import Row
from specdec.models.kv_cache import RaggedCache
from tests.helpers.scripts import load_script

soak = load_script("soak")


@pytest.fixture(scope="module")
def tiny() -> Any:
    return soak.tiny()


def fuzzed(subject: Any, rows: int, first: int = 0) -> Any:
    """What so many rows of the cases from `first` on gave."""
    return soak.run(subject, iter(range(first, 1 << 40)), lambda tally, seconds: tally.rows < rows)[0]


def test_a_hundred_random_rows_are_those_of_other_ways(tiny: Any) -> None:
    found = fuzzed(tiny, 100, 100)
    assert found.faults == []
    assert {"reference", "plain", "alone"} <= set(found.compared)
    assert found.closed > 0


@pytest.mark.full
def test_two_thousand_random_rows_are_those_of_other_ways(tiny: Any) -> None:
    found = fuzzed(tiny, 2000, 10_000)
    assert found.faults == []
    assert set(found.rules) == set(soak.RULES)
    assert len(found.strategies) == len({name.split(":")[0] for name in soak.CHAINS}) + 1


@pytest.mark.full
def test_a_few_requests_of_the_embedded_pair() -> None:
    found = fuzzed(soak.embedded(), 8)
    assert found.faults == []


def test_trees_whose_accepted_paths_are_not_moved_are_found(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RaggedCache, "compact", lambda *given: None)
    chains = ("guesses", "draft-model:tree=2x2x1")
    subject = replace(tiny, space=replace(tiny.space, chains=chains))
    assert fuzzed(subject, 40).faults


def test_drafts_that_are_all_accepted_are_found(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = soak.find_rule("match")
    broken = replace(rule, accepts=lambda block: rule.accepts(block) | True)
    monkeypatch.setitem(acceptance.RULES, "match", broken)
    monkeypatch.setattr(soak, "RULES", ("match",))
    assert fuzzed(tiny, 30).faults


def test_a_case_follows_from_its_seed(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    case = soak.make_case(4711, tiny.space)
    assert case == soak.make_case(4711, tiny.space) != soak.make_case(4712, tiny.space)
    broken = soak.Tally()
    broken.add(replace(tiny, decoder=None), case)
    said = capsys.readouterr().err
    assert said.startswith("case 4711: AttributeError")
    assert json.loads(said.splitlines()[1])["prompts"] == case.prompts


def test_an_interrupt_in_a_call_ends_the_run(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = Row.close_round, []

    def interrupting(self: Any, **options: Any) -> None:
        original(self, **options)
        calls.append(1)
        if len(calls) == 40:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Row, "close_round", interrupting)
    found = fuzzed(tiny, 10**6, 100)
    assert 0 < found.rows < 100
    assert found.faults == []


def test_memory_that_grows_is_told_from_memory_that_does_not() -> None:
    def growth(per_second: float) -> float:
        noise = (0.0, 3e5, -2e5, 1e5)
        memory = [(t, int(4e8 + per_second * t + noise[t % 4] - 2e8 * (t < 15))) for t in range(100)]
        return float(soak.Tally(memory=memory).growth(100.0)["growth"])

    assert abs(growth(0.0)) < 0.001
    assert growth(1.2e5) > soak.MOST_GROWTH > growth(0.8e5)
