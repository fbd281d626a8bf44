"""What a benchmark's config may leave out, and what is refused before models are built."""

from __future__ import annotations

from typing import Any

import pytest

from specdec import SpecdecError
from specdec.config import from_dict
from specdec.research.bench import run
from specdec.research.bench.config import BenchConfig, DataChoice
from specdec.research.bench.contenders import make_contender
from specdec.research.bench.pair import Pair
from specdec.research.models.choice import ModelChoice

PLAIN: dict[str, Any] = {"contenders": {"plain": {"kind": "specdec"}}, "scenarios": {"one": {}}}


def test_a_chain_may_be_one_text_and_parts_may_be_null() -> None:
    made: Any = make_contender("c", {"kind": "specdec", "strategies": "suffix,prompt-lookup"})
    assert [d.name for d in made.strategies] == ["suffix", "prompt-lookup"]
    assert made.settings()["strategies"] == ["suffix,prompt-lookup"]
    config = from_dict(BenchConfig, {**PLAIN, "data": None, "models": None}, "bench.yaml")
    assert (config.data, config.models) == (DataChoice(), ModelChoice())
    with pytest.raises(SpecdecError, match="scenarios is missing"):
        from_dict(BenchConfig, {"contenders": PLAIN["contenders"]}, "bench.yaml")


def test_prompts_that_are_not_there_are_refused_before_models_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pair, "build", lambda *arguments: pytest.fail("built"))
    for data in ({"dataset": "nope"}, {"categories": ["nope"]}):
        with pytest.raises(SpecdecError, match="nope"):
            run.run_bench(from_dict(BenchConfig, {**PLAIN, "data": data}, "bench.yaml"), "x")
