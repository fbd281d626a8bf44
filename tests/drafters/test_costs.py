"""The cost table: interpolation, files, bad ones, the nominal table and the measured one."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import CostTable, SpecdecError, SpeculativeDecoder, measure_costs
from specdec.drafters import STRATEGIES
from specdec.drafters.base import RowDrafter
from specdec.drafters.costs import nominal_costs
from specdec.models.runner import Runner, Shapes
from tests.helpers.laws import small_model
from tests.helpers.playing import weaker
from tests.helpers.recording import Rerun
from tests.helpers.tiny import tiny_model

TABLE = CostTable(
    target=(((1.0, 1.5, 2.5), (2.0, 2.5, 3.5)), ((4.0, 5.0, 9.0), (5.0, 6.0, 10.0))),
    batches=(1, 4), contexts=(100, 300), widths=(1, 2, 4), round=0.1, calls={"suffix": 1e-5}, source="measured",
)  # fmt: skip


def test_seconds_are_linear_between_entries_and_beyond_the_widest() -> None:
    assert TABLE.seconds("target", 1, 100, 1) == 1.0
    assert TABLE.seconds("target", 1, 100, 3) == 2.0
    assert TABLE.seconds("target", 1, 200, 1) == 1.5
    assert TABLE.seconds("target", 1, 0, 1) == 1.0  # contexts outside take the nearest
    assert TABLE.seconds("target", 1, 900, 1) == 2.0
    assert TABLE.seconds("target", 1, 100, 6) == 3.5
    assert TABLE.seconds("target", 4, 300, 2) == 6.0
    assert TABLE.seconds("target", 2, 100, 2) == 2.5  # as 4 tokens of one row
    assert TABLE.seconds("target", 8, 100, 1) == 5.0  # as 2 tokens of each of 4 rows
    assert TABLE.call("suffix") == 1e-5
    assert TABLE.call("somebody's") > 0
    with pytest.raises(SpecdecError, match="no draft model"):
        TABLE.seconds("draft", 1, 100, 1)
    for role, batch in (("foo", 1), ("target", 0)):
        with pytest.raises(SpecdecError, match="expected target or draft and one row or more"):
            TABLE.seconds(role, batch, 100, 1)


def test_a_table_is_frozen_and_survives_files(tmp_path: Path) -> None:
    with pytest.raises(FrozenInstanceError):
        TABLE.round = 3.0  # type: ignore[misc]
    for name in ("costs.json", "costs.yaml"):
        TABLE.save(tmp_path / name)
        assert CostTable.load(tmp_path / name) == TABLE


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"widths": (1, 2)}, "target must hold"),
        ({"widths": (2, 3, 4)}, "widths must be 2 or more numbers that ascend from 1"),
        ({"batches": (4, 1)}, "batches"),
        ({"contexts": ()}, "contexts"),
        ({"target": "soon"}, "target must hold"),
        ({"target": (((1.0, -1.0, 1.0),) * 2,) * 2}, "positive"),
        ({"draft": (((1.0,),),)}, "draft must hold"),
        ({"round": "x"}, "round"),
        ({"calls": {"suffix": -1.0}}, "suffix"),
        ({"calls": []}, "calls must map"),
        ({"calls": None}, "calls must map"),
        ({"calls": {1: 1.0}}, "calls must map"),
        ({"target": None}, "target must hold"),
        ({"target": ((("1", "2", "3"),) * 2,) * 2}, "target must hold"),
        ({"target": (((True, True, True),) * 2,) * 2}, "target must hold"),
        ({"target": (((1.0, 1.5, 10**400),) * 2,) * 2}, "target must hold"),
        ({"batches": None}, "batches must be a sequence"),
        ({"round": 10**400}, "round"),
        ({"source": "foo"}, "source must be"),
        ({"device": None}, "device a text"),
    ],
)
def test_a_table_of_another_form_is_refused(change: dict[str, Any], part: str) -> None:
    with pytest.raises(SpecdecError, match=part):
        replace(TABLE, **change)


def test_a_table_that_cannot_be_written_names_the_file_that_was_given(tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "a.json", tmp_path):
        with pytest.raises(OSError, match=re.escape(f"'{path}'")):
            TABLE.save(path)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"widths": [1, 2]}', encoding="utf-8")
    for name, part in (("a.json", "not a cost table"), ("missing.json", "cannot be read")):
        with pytest.raises(SpecdecError, match=part):
            CostTable.load(tmp_path / name)


def test_nominal_costs_grow_with_the_model_and_the_width() -> None:
    small, large = Runner(small_model(1, 13)), Runner(tiny_model("llama", hidden_size=256, intermediate_size=1024))
    table = nominal_costs(large, small)
    passes = [table.seconds("target", 1, 0, w) for w in (1, 2, 9, 17)]
    assert passes == sorted(set(passes))
    assert table.seconds("draft", 1, 0, 1) < passes[0]
    assert table == nominal_costs(large, small)


def shaped(mode: str, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, onednn: int = 0, **sizes: Any) -> Any:
    """A Llama of weights that exist nowhere, as a runner of this device would have it."""
    config = LlamaConfig(**{"num_key_value_heads": 8, **sizes})
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    view = SimpleNamespace(seen=SimpleNamespace(modules=list(model.modules())))
    read = Runner.read_in_a_pass.fget(SimpleNamespace(model=model, view=view))  # type: ignore[attr-defined]
    given = {"model": model, "config": config, "mode": mode, "onednn": onednn, "read_in_a_pass": read}
    return SimpleNamespace(device=torch.device(device), **given)


def test_nominal_costs_of_a_gpu_are_those_that_were_measured_there() -> None:
    """8B on an H100, by recorded kernels and compiled, and draft steps of 135M on an H200, in ms.

    There a pass of 8 rows of 8 tokens took 1.07 of one row's.
    """
    large = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    small = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    for mode, known in (("off", {1: 23.5}), ("graph", {1: 9.1, 8: 9.9, 16: 10.3}), ("max", {1: 7.4, 8: 7.6})):
        table = nominal_costs(shaped(mode, **large), shaped("max", **small, num_attention_heads=16))
        for width, ms in known.items():
            assert 1e3 * table.seconds("target", 1, 0, width) == pytest.approx(ms, rel=0.15)
        assert 1e3 * table.seconds("draft", 1, 0, 1) == pytest.approx(0.8, rel=0.25)
        assert 1e3 * table.seconds("draft", 8, 0, 1) == pytest.approx(1.1, rel=0.15)
        if mode == "max":
            assert table.seconds("target", 8, 0, 8) / table.seconds("target", 1, 0, 8) == pytest.approx(1.07, rel=0.05)
        assert table.round == (1.5e-3 if mode == "off" else 3e-4)


def test_nominal_costs_of_a_real_model_are_those_of_two_cores() -> None:
    """Of SmolLM2-135M."""
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    for onednn, known in enumerate(({1: 0.044, 5: 0.065, 9: 0.088}, {1: 0.044, 5: 0.052, 9: 0.060, 17: 0.074})):
        table = nominal_costs(shaped("off", "cpu", torch.float32, onednn, **sizes, **heads))
        for width, seconds in known.items():
            assert table.seconds("target", 1, 0, width) == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize(
    "axes",
    [
        {"widths": ()}, {"widths": (1, 1)}, {"batches": (2, 1)}, {"batches": (0,)}, {"batches": 1}, {"contexts": 16},
        {"contexts": ()}, {"contexts": (0,)}, {"repeats": 0}, {"repeats": 1.5}, {"widths": "12"},
    ],
)  # fmt: skip
def test_nothing_is_measured_for_a_table_that_cannot_be(axes: dict[str, Any]) -> None:
    decoder = SpeculativeDecoder(small_model(1, 13), check=False)
    told: list[str] = []
    with pytest.raises(SpecdecError, match="costs: "):
        measure_costs(decoder, **axes, progress=told.append)
    assert told == []


def test_measured_costs_cover_what_was_asked_for() -> None:
    decoder = SpeculativeDecoder(small_model(3, 13), small_model(1, 13), check=False)
    told: list[str] = []
    table = measure_costs(decoder, (1, 2), (8, 64), (1, 2, 4), repeats=1, progress=told.append)
    assert (table.batches, table.contexts, table.widths, table.source) == ((1, 2), (8, 64), (1, 2, 4), "measured")
    assert table.draft is not None
    assert set(table.calls) == {name for name, kind in STRATEGIES.items() if issubclass(kind, RowDrafter)}
    assert CostTable.from_dict(table.to_dict()) == table
    assert len(told) == 2
    assert decoder.generate([1, 2, 1, 2], 8, costs=table).provenance["costs"] == table.to_dict()
    assert table.round > 0


def programs(decoder: SpeculativeDecoder) -> dict[str, set[Any]]:
    """What is recorded for calls to come: the keys by role, prefill aside."""
    runners = {"target": decoder.target, "draft": decoder.draft}
    return {
        role: {place for place, program in runner.pool.idle.graphs.items() if program and not program.is_prefill}
        for role, runner in runners.items()
    }


@pytest.mark.parametrize("exact", [False, True])
def test_what_is_timed_are_the_programs_of_calls(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the widths of a GPU, and a recorder in place of its graphs: calls after the measurement run everything that
    was recorded for it. Drafts of one token that catch up with more than two are made in chains of strategies only."""
    choose = Shapes.choose
    on_gpu = staticmethod(lambda device, *shape, **more: choose(torch.device("cuda"), *shape, **more))
    monkeypatch.setattr(Shapes, "choose", on_gpu)
    target = small_model(3, 13)
    decoder = SpeculativeDecoder(target, weaker(target, 0.05), check=False, exact=exact)
    decoder.target, decoder.draft = Runner(target, recorder=Rerun()), Runner(decoder.draft.model, recorder=Rerun())
    table = measure_costs(decoder, (1,), (40,), (1, 2, 3, 7), repeats=1)
    timed = programs(decoder)
    assert {type(key).__name__ for found in timed.values() for (_, key) in found} == {"VerifyKey", "StepsKey"}
    widths = {key.given.width for _, key in timed["target"]}
    assert widths == ({8} if exact else {1, 2, 4, 8})
    assert (len(set(table.target[0][0])) == 1) == exact
    assert table.round > 0
    for runner in (decoder.target, decoder.draft):
        runner.pool.idle.graphs.clear()
    for n_max in (0, 1, 3, 5):  # behind another strategy nothing is drafted ahead
        chain = ["ngram-mod", f"draft-model:n_max={n_max}"] if n_max else []
        decoder.generate([[1, 2] * 20], 16, strategies=chain)
    called = programs(decoder)
    assert timed["target"] <= called["target"]
    drafts = {place for place in timed["draft"] if place[1].first.width <= 2}
    assert len(drafts) >= 2
    assert drafts <= called["draft"]


def test_a_batch_is_measured_beside_the_others_without_recording_anew() -> None:
    """Turns alternate between batches and contexts; what one has recorded must be there in the next turn."""
    target = small_model(3, 13)
    decoder = SpeculativeDecoder(target, weaker(target, 0.2), check=False)
    decoder.target, decoder.draft = Runner(target, recorder=Rerun()), Runner(decoder.draft.model, recorder=Rerun())
    for repeats in (1, 4):
        before = decoder.target.recorded[0] + decoder.draft.recorded[0]
        measure_costs(decoder, (1, 2), (8, 64), (1, 2), repeats=repeats)
        recorded = decoder.target.recorded[0] + decoder.draft.recorded[0] - before
        assert recorded <= 2 * 2 * (2 + 2) + 2


def test_passes_of_trees_are_timed_as_wide_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wider than a verify pass usually is: they were timed as one of the usual width."""
    choose = Shapes.choose
    on_gpu = staticmethod(lambda device, *shape, **more: choose(torch.device("cuda"), *shape, **more))
    monkeypatch.setattr(Shapes, "choose", on_gpu)
    decoder = SpeculativeDecoder(small_model(3, 13), strategies=[], check=False, exact=False)
    decoder.target = Runner(decoder.target.model, recorder=Rerun())
    measure_costs(decoder, (1,), (8,), (1, 16, 64), repeats=1)
    found = decoder.target.pool.idle.graphs.items()
    assert {1, 16, 64} <= {key.given.width for (_, key), program in found if program and hasattr(key, "given")}
