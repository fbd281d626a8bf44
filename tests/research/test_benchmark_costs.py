"""`costs` of a benchmark: one table, measured before the scenarios, from which contenders choose automatic lengths."""

from __future__ import annotations

from typing import Any

import pytest

import specdec
from specdec.config import from_dict
from specdec.errors import SpecdecError
from specdec.research.bench.config import BenchConfig
from specdec.research.bench.run import run_bench, steps_of

MEASURED: dict[str, Any] = {
    "contenders": {
        "plain": {"kind": "specdec"},
        "automatic": {"kind": "specdec", "strategies": ["draft-model"], "generate": {"draft_length": "auto"}},
    },
    "data": {"dataset": "humaneval", "longest": 24},
    "scenarios": {"one": {"prompts": 1, "max_new_tokens": 4, "repeats": 1, "ignore_eos": True}},
    "costs": {"contenders": ["automatic"], "contexts": [32], "widths": [1, 3], "repeats": 1},
}  # fmt: skip


@pytest.mark.full
def test_lengths_are_chosen_from_the_table_that_the_result_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    generate = specdec.SpeculativeDecoder.generate

    def watched(self: Any, *arguments: Any, **options: Any) -> Any:
        if options.get("strategies"):
            given.append(options.get("costs"))
        return generate(self, *arguments, **options)

    monkeypatch.setattr(specdec.SpeculativeDecoder, "generate", watched)
    config, told = from_dict(BenchConfig, MEASURED, "bench.yaml"), list[str]()
    result = run_bench(config, "bench", told.append)
    assert len(told) == steps_of(config)
    assert result["costs"]["source"] == "measured"
    assert result["costs"]["widths"] == [1, 3]
    assert given[-1] == result["costs"]
    assert result["scenarios"]["one"]["contenders"]["automatic"]["equality"]["equal"] == 1


@pytest.mark.full
def test_where_costs_cannot_be_measured_their_contenders_say_so_and_the_rest_runs() -> None:
    config = {**MEASURED, "costs": {**MEASURED["costs"], "contexts": [1], "widths": [1, 100_000]}}
    result = run_bench(from_dict(BenchConfig, config, "bench.yaml"), "bench")
    assert "fit" in result["costs"]["error"]
    assert "costs" in result["scenarios"]["one"]["contenders"]["automatic"]["skipped"]
    assert result["scenarios"]["one"]["contenders"]["plain"]["tokens_per_second"]["value"] > 0


@pytest.mark.parametrize(
    ("change", "named"),
    [({"exact": True}, "exact"), ({"generate": {"costs": {"target": [[[1.0, 2.0]]]}}}, "a table of its own")],
)
def test_costs_are_for_contenders_of_equal_passes_without_a_table(change: dict[str, Any], named: str) -> None:
    other = {"kind": "specdec", "strategies": ["suffix"], **change}
    config = {**MEASURED, "contenders": {**MEASURED["contenders"], "other": other}}
    config["costs"] = {**MEASURED["costs"], "contenders": ["automatic", "other"]}
    with pytest.raises(SpecdecError, match=named):
        run_bench(from_dict(BenchConfig, config, "bench.yaml"), "bench")
