"""Traces: what is recorded is what happened, costs no read of its own, and comes back from disk as it was."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import specdec
from specdec import SpecdecError
from specdec.research.traces import trace_files
from specdec.research.traces.trace import Trace, pieces, record
from tests.helpers.playing import Scripted, looping, quoting_ids, random_ids, right_until, weaker
from tests.helpers.tiny import tiny_model
from tests.helpers.tokens import byte_level

PROMPTS = [random_ids(9, 1), quoting_ids(20, 2), random_ids(3, 3)]
RUNS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "leviathan": {"temperature": 0.7},
    "match": {"temperature": 0.7, "acceptance": "match"},
    "coupled": {"temperature": 0.7, "acceptance": "coupled"},
    "chain": {"temperature": 0.7, "strategies": ["prompt-lookup:ngram_min=1", "draft-model:n_max=5"]},
    "tree": {"temperature": 0.7, "strategies": [specdec.DraftModel(tree="2x2x1")]},
}


@pytest.fixture(scope="module")
def decoder() -> specdec.SpeculativeDecoder:
    target = looping(tiny_model("llama", 5))
    return specdec.SpeculativeDecoder(target, weaker(target, 0.3), check=False)


@pytest.fixture(scope="module")
def traces(decoder: specdec.SpeculativeDecoder) -> dict[str, Trace]:
    return {name: record(decoder, PROMPTS, **{"max_new_tokens": 14, **run}) for name, run in RUNS.items()}


@pytest.mark.parametrize("name", RUNS)
def test_recording_changes_neither_text_nor_reads(
    decoder: specdec.SpeculativeDecoder, traces: dict[str, Trace], name: str
) -> None:
    out = decoder.generate(PROMPTS, **{"max_new_tokens": 14, **RUNS[name]})
    trace = traces[name]
    assert trace.result is not None
    assert [row.output for row in trace.rows] == out.token_ids
    assert trace.result.stats.rows == out.stats.rows
    assert trace.result.stats.host_reads == out.stats.host_reads
    for row in range(len(PROMPTS)):
        assert [t for r in trace.of_row(row) for t in r.tokens] == out.token_ids[row]


@pytest.mark.parametrize("name", RUNS)
def test_a_trace_comes_back_from_disk_as_it_was(traces: dict[str, Trace], name: str, tmp_path: Path) -> None:
    made = traces[name].save(tmp_path / "deep" / "run.json")
    for path in (made, made.with_suffix(".safetensors"), made.with_suffix("")):
        assert Trace.load(path) == traces[name]


def test_a_trace_prints_as_one_line(traces: dict[str, Trace]) -> None:
    rounds = len(traces["chain"].rounds)
    strategies = ", ".join(traces["chain"].strategies)
    assert repr(traces["chain"]) == f"Trace(3 rows, {rounds} rounds, drafted by {strategies})"


def law(model: Any, ids: list[int], temperature: float) -> torch.Tensor:
    """The next token's law from a plain forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double()
    return torch.softmax(logits / (temperature or 1.0), dim=-1)


@pytest.mark.parametrize("name", ["greedy", "leviathan", "match", "coupled", "tree"])
def test_details_are_those_of_plain_forward_passes(
    decoder: specdec.SpeculativeDecoder, traces: dict[str, Trace], name: str
) -> None:
    """The slow oracle: p and q of every drafted token of a row, its prefix fed anew."""
    assert decoder.draft is not None
    temperature = RUNS[name].get("temperature", 0.0)
    row = traces[name].rows[0]
    for r in traces[name].of_row(0)[:4]:
        known, d = [*row.prompt, *row.output][: r.position + 1], r.details
        assert d is not None
        paths: list[list[int]] = []
        for node, token in enumerate(r.draft):
            parent = node - 1 if r.parents is None else r.parents[node]
            before = [] if parent < 0 else paths[parent]
            paths.append([*before, token])
            p = law(decoder.target.model, known + before, temperature)
            q = law(decoder.draft.model, known + before, temperature)
            column = parent + 1
            assert d.rank[node] == 1 + int((p > p[token]).sum())
            assert d.top_ids[column] == p.topk(5).indices.tolist()
            assert d.top[column] == pytest.approx(p.topk(5).values.tolist(), rel=1e-3)
            if column < len(d.entropy):
                assert d.entropy[column] == pytest.approx(float(torch.special.entr(p).sum()), rel=1e-3)
            first = r.parents is None or parent not in r.parents[:node]
            if first and d.tv is not None:
                tv = float((p - q).abs().sum() / 2)
                assert d.tv[node] == pytest.approx(tv, abs=1e-4)
                wanted = {"coupled": coupled_acceptance(p, q)}.get(name, 1 - tv)
                assert d.expected[node] == pytest.approx(wanted, abs=1e-3)
            elif first:
                wanted = float(p.argmax() == token) if name == "greedy" else float(p[token])
                assert d.expected[node] == pytest.approx(wanted, rel=1e-3)
        for token, p_token, rank, at in zip(r.tokens, d.emitted_p, d.emitted_rank, d.emitted_column, strict=True):
            p = law(decoder.target.model, known + (paths[at - 1] if at else []), temperature)
            assert p_token == pytest.approx(float(p[token]), rel=1e-3)
            assert rank == 1 + int((p > p[token]).sum())


def coupled_acceptance(p: torch.Tensor, q: torch.Tensor) -> float:
    """sum_x 1 / sum_y max(p_y / p_x, q_y / q_x), term by term."""
    ratios = torch.maximum(p[None] / p[:, None], q[None] / q[:, None])
    return float((1 / ratios.sum(-1)).sum())


def test_expected_acceptance_of_later_siblings_is_that_of_what_is_left(
    decoder: specdec.SpeculativeDecoder, traces: dict[str, Trace]
) -> None:
    """Under leviathan a second sibling is tested against the residual of the first; against p it would not fit."""
    assert decoder.draft is not None
    row, checked, apart = traces["tree"].rows[0], 0, 0.0
    for r in traces["tree"].of_row(0):
        assert r.parents is not None or not r.draft
        if len(r.draft) < 2 or r.parents is None or r.details is None:
            continue
        known = [*row.prompt, *row.output][: r.position + 1]
        p, q = law(decoder.target.model, known, 0.7), law(decoder.draft.model, known, 0.7)
        residual = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
        second = q.clone()
        second[r.draft[0]] = 0
        second /= second.sum()
        found = r.details.expected[1]
        assert found == pytest.approx(float(torch.minimum(residual, second).sum()), abs=1e-3)
        apart = max(apart, abs(float(torch.minimum(p, second).sum()) - float(found)))
        checked += 1
    assert checked > 2
    assert apart > 0.05


def test_a_long_draft_that_takes_several_passes_is_one_draft(
    decoder: specdec.SpeculativeDecoder, tmp_path: Path
) -> None:
    plain = decoder.generate(PROMPTS, max_new_tokens=60, strategies=[]).token_ids
    texts = [[*prompt, *output] for prompt, output in zip(PROMPTS, plain, strict=True)]
    trace = record(decoder, PROMPTS, 60, strategies=[Scripted(right_until(texts, 40, 37))])
    begun = trace.drafted_before()
    assert max(begun) == 34
    assert Trace.load(trace.save(tmp_path / "long")) == trace
    assert trace.result is not None
    new_rounds = [sum(r.row == i and b == 0 for r, b in zip(trace.rounds, begun, strict=True)) for i in range(3)]
    assert new_rounds == [len(rows) for rows in trace.result.stats.rows]


def test_select_keeps_rows_and_strategies_and_names_unknown_ones(traces: dict[str, Trace]) -> None:
    trace = traces["chain"]
    assert {r.row for r in trace.select(rows=[1])} == {1}
    assert {r.strategy for r in trace.select(strategies=["prompt-lookup"])} == {"prompt-lookup"}
    with pytest.raises(SpecdecError, match=r"no row 7: it has rows 0\.\.2"):
        trace.select(rows=[7])
    with pytest.raises(SpecdecError, match="drafted by 'suffix'"):
        trace.select(strategies=["suffix"])


def test_pieces_join_to_the_text_and_wait_for_whole_characters() -> None:
    tokenizer = byte_level()
    prompt, output = (tokenizer(text)["input_ids"] for text in ("the quick", " naïve 漢字 fox"))
    found = pieces(tokenizer, prompt, output)
    assert "".join(found) == tokenizer.decode(output)
    assert "" in found
    assert not any("\ufffd" in piece for piece in found)


def test_categories_and_ids_go_to_every_row_of_their_prompt(decoder: specdec.SpeculativeDecoder) -> None:
    trace = record(
        decoder, PROMPTS[:2], 4, temperature=1.0, num_return_sequences=2, ids=["a", "b"], categories=["x", "y"]
    )
    assert [(row.id, row.category) for row in trace.rows] == [("a", "x"), ("a", "x"), ("b", "y"), ("b", "y")]
    with pytest.raises(SpecdecError, match="ids: got 3 for 2 rows"):
        record(decoder, PROMPTS[:2], 4, ids=["a", "b", "c"])


def test_the_watcher_sees_every_round_as_it_comes(decoder: specdec.SpeculativeDecoder) -> None:
    seen: list[Any] = []
    assert record(decoder, PROMPTS, 12, watch=seen.append).rounds == seen


def test_rounds_without_details_are_not_charged_for_them(decoder: specdec.SpeculativeDecoder) -> None:
    assert all(r.details is None for r in decoder.rounds(PROMPTS[0], max_new_tokens=6))


def test_a_failed_row_is_recorded_up_to_its_failure(tmp_path: Path) -> None:
    target = tiny_model("llama", 5)

    def spoil(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * math.nan if ids.shape[1] > 12 and int(ids[0, 0]) == PROMPTS[0][0] else scores

    decoder = specdec.SpeculativeDecoder(target, weaker(target), check=False)
    trace = record(decoder, PROMPTS[:2], 8, temperature=0.9, logits_processor=[spoil])
    assert [row.finish_reason for row in trace.rows] == ["error", "length"]
    loaded = Trace.load(trace.save(tmp_path / "failed"))
    assert repr(loaded.rounds) == repr(trace.rounds)  # NaN is not equal to itself


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda j, s: j.unlink(), "trace file not found"),
        (lambda j, s: s.unlink(), "trace file not found"),
        (lambda j, s: j.write_text("{"), "is not a trace"),
        (lambda j, s: j.write_text("[]"), "does not say format"),
        (lambda j, s: edit(j, version=99), "version 99"),
        (lambda j, s: edit(j, rounds=3), "not as they were written"),
        (lambda j, s: edit(j, texts=[]), "not as they were written"),
        (lambda j, s: s.write_bytes(s.read_bytes()[:-8]), "not as they were written"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(
    traces: dict[str, Trace], tmp_path: Path, spoil: Any, message: str
) -> None:
    path = traces["leviathan"].save(tmp_path / "run")
    spoil(path, path.with_suffix(".safetensors"))
    with pytest.raises(SpecdecError, match=message) as error:
        Trace.load(path)
    assert "\n" not in str(error.value)


def test_ranks_of_older_files_count_from_one_too(traces: dict[str, Trace], tmp_path: Path) -> None:
    trace = traces["leviathan"]
    path = trace.save(tmp_path / "run")
    document = {n: v for n, v in json.loads(path.read_text()).items() if n != "sha256"} | {"version": 2}
    sha = trace_files._hash(document, path.with_suffix(".safetensors").read_bytes())
    path.write_text(json.dumps({**document, "sha256": sha}))
    for new, old in zip(trace.rounds, Trace.load(path).rounds, strict=True):
        assert new.details is not None
        assert old.details is not None
        assert old.details.rank == [rank + 1 for rank in new.details.rank]
        assert old.details.emitted_rank == [rank + 1 for rank in new.details.emitted_rank]


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_arrays_are_small_and_typed(traces: dict[str, Trace], tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    path = traces["leviathan"].save(tmp_path / "run")
    arrays = load_file(path.with_suffix(".safetensors"))
    drafted = sum(len(r.draft) for r in traces["leviathan"].rounds)
    assert arrays["p"].shape == (drafted,)
    assert arrays["draft_top_ids"].shape == (drafted, 5)
    assert arrays["p"].dtype == np.float32
