"""Figures end where the text ends: what is drafted behind a stop counts nowhere, whatever the stop, whoever counts."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from specdec import Draft, DraftModel, SpeculativeDecoder
from specdec.research.ablation.plots import round_contexts
from specdec.research.ablation.table import figures
from specdec.research.bench.contenders.own import _figures
from specdec.research.offline.replay import model_free_chain, replay
from specdec.research.traces.analysis import by_position, drafted_tokens
from specdec.research.traces.token_page import page
from specdec.research.traces.trace import Trace, record
from specdec.stats import RoundRecord, Tally
from tests.helpers.playing import Scripted, check_counts, quoting_ids, random_ids, rest_of
from tests.helpers.tiny import tiny_model

N, LONG = 40, 12
PROMPTS = [random_ids(9, 1), random_ids(6, 2), random_ids(7, 3)]


class Words:
    """As much of a tokenizer as stop strings need: an id is a word."""

    def decode(self, ids: Any, **options: Any) -> str:
        return "".join(f"<{int(t)}>" for t in ids)

    def convert_ids_to_tokens(self, ids: Any) -> list[str]:
        return [f"<{int(t)}>" for t in ids]


@cache
def decoder() -> SpeculativeDecoder:
    model = tiny_model("llama")
    return SpeculativeDecoder(model, model, tokenizer=Words(), check=False)


@cache
def texts() -> list[list[int]]:
    return decoder().generate(PROMPTS, N, strategies=[]).token_ids


def new_from(ids: list[int], least: int) -> int:
    """The first place from `least` on whose id does not occur before."""
    return next(i for i in range(least, N) if ids[i] not in ids[:i])


def right(length: int = LONG) -> Scripted:
    """A drafter that proposes what comes, also behind a stop."""
    whole = [p + t for p, t in zip(PROMPTS, texts(), strict=True)]
    return Scripted(lambda ids: rest_of(whole, ids)[:length])


class RightTree(Scripted):
    """A wrong path of four nodes, and after it the right one of five."""

    makes_trees = True

    def draft(self, requests: Any) -> list[Draft]:
        right = [list(d.tokens)[:5] for d in super().draft(requests)]
        return [Draft([(t + 1) % 128 for t in chain[:4]] + chain, PARENTS[: 4 + len(chain)]) for chain in right]


PARENTS = [-1, 0, 1, 2, -1, 4, 5, 6, 7]


def eos_at(*places: int) -> dict[str, Any]:
    return {"eos_token_id": [texts()[0][new_from(texts()[0], place)] for place in places]}


def stop_at(place: int) -> dict[str, Any]:
    return {"stop_strings": [f"<{texts()[0][new_from(texts()[0], place)]}>"]}


STOPS: dict[str, Any] = {
    "eos at once": lambda: eos_at(0),
    "eos in a draft": lambda: eos_at(3),
    "several eos": lambda: eos_at(17, 5, 9),
    "eos where a draft ends": lambda: eos_at(LONG - 1),
    "eos as the token after a draft": lambda: eos_at(LONG),
    "eos in the second pass of a draft": lambda: eos_at(20),
    "a stop string": lambda: stop_at(4),
    "a stop string of two tokens": lambda: {"stop_strings": ["".join(f"<{t}>" for t in texts()[0][5:7])]},
    "a criterion": lambda: {"stopping_criteria": lambda ids, scores: ids.shape[1] >= len(PROMPTS[0]) + 6},
    "length": lambda: {"max_new_tokens": 7},
}


@pytest.mark.fast(8, full=6)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("stop", STOPS)
def test_figures_are_those_of_the_text(stop: str, batch: int) -> None:
    options = {"max_new_tokens": N, **STOPS[stop]()}
    length = 30 if "second pass" in stop else LONG
    plain = decoder().generate(PROMPTS, strategies=[], **options)
    out = decoder().generate(PROMPTS, strategies=[right(length)], batch_size=batch, **options)
    assert out.token_ids == plain.token_ids
    check_counts(out)
    t, ids = out.stats.total, out.token_ids
    assert t.generated_tokens == sum(map(len, ids)) == out.stats.emitted_tokens
    # Every draft is right, so that everything that counts as drafted was accepted.
    assert t.draft_tokens == t.accepted_tokens
    assert t.draft_acceptance_rate == 1.0
    assert set(t.conditional_acceptance_rate_per_position) == {1.0}
    assert len(t.acceptance_rate_per_position) <= max(map(len, ids))
    assert out.stats.counters["scripted"].n_gen_tokens == t.draft_tokens


@pytest.mark.parametrize(("place", "wanted"), [(4, (5, 5, False)), (LONG - 1, (12, 12, False)), (LONG, (12, 12, True))])
def test_a_round_that_ends_inside_its_draft_has_no_token_of_its_own(place: int, wanted: tuple[int, int, bool]) -> None:
    assert new_from(texts()[0], place) == place
    out = decoder().generate(PROMPTS[0], N, strategies=[right()], **eos_at(place))
    [last] = out.stats.rows[0]
    assert (last.drafted, last.accepted, last.own) == wanted
    assert last.tokens == len(out.token_ids[0]) == out.stats.tokens_per_round == place + 1


@pytest.mark.fast(3)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}, {"temperature": 0.8, "acceptance": "match"}])
@pytest.mark.parametrize("drafts", [DraftModel(n_max=12), DraftModel(tree="2x2x1")])
def test_the_draft_model_is_counted_to_the_stop(options: dict[str, Any], drafts: Any) -> None:
    ends = [t for row in texts() for t in row[4:7]]
    out = decoder().generate(PROMPTS * 2, N, strategies=[drafts], eos_token_id=ends, **options)
    check_counts(out)
    assert set(out.finish_reasons) == {"eos"}
    assert any(not row[-1].own for row in out.stats.rows)


def test_trees_are_cut_along_the_path() -> None:
    tree = RightTree(right().script)
    trace = record(decoder(), [PROMPTS[0]], N, [tree], **eos_at(2))
    [last] = trace.result.stats.rows[0]
    assert last == RoundRecord("scripted", 6, 3, 3, False, False)  # three levels of two nodes
    [entry] = trace.rounds
    assert entry.parents == [-1, 0, 1, -1, 3, 4]
    assert (entry.path, entry.accepted, entry.bonus) == ([3, 4, 5], 3, None)
    assert [entry.draft[n] for n in entry.path] == entry.tokens == texts()[0][:3]
    assert entry.details is not None
    assert entry.details.emitted_column == [0, 4, 5]
    check_counts(trace.result)


def test_traces_analysis_and_page_show_nothing_behind_the_stop(tmp_path: Any) -> None:
    trace = record(decoder(), PROMPTS, N, [right()], **eos_at(3))
    for r in trace.rounds:
        assert r.bonus is not None or r.accepted == len(r.draft) == len(r.tokens) == len(r.p)
        assert r.details is not None
        assert len(r.details.rank) == len(r.draft)
        assert len(r.details.emitted_p) == len(r.tokens)
    total = trace.result.stats.total
    tokens = drafted_tokens(trace)
    assert (len(tokens), sum(t.accepted for t in tokens)) == (total.draft_tokens, total.accepted_tokens)
    assert [p.conditional for p in by_position(trace)] == total.conditional_acceptance_rate_per_position
    assert [p.unconditional for p in by_position(trace)] == total.acceptance_rate_per_position
    assert "<del class" not in page(trace, "t")
    assert Trace.load(trace.save(tmp_path / "t")).rounds == trace.rounds


def test_ablations_benchmarks_and_plots_count_to_the_stop() -> None:
    out = decoder().generate(PROMPTS, N, strategies=[right()], **eos_at(3))
    first = {"records": [list(r) for r in out.stats.rows[0]], "tokens": out.token_ids[0], "prompt_tokens": 9}
    row = figures(first)
    assert (row["generated_tokens"], row["emitted_tokens"], row["tested_tokens"], row["accepted_tokens"]) == (5,) * 4
    assert round_contexts(first) == [(9, 5, 5)]
    counted = _figures(out)
    assert counted["generated_tokens"] == counted["emitted_tokens"] == sum(map(len, out.token_ids))
    assert sum(counted["tested"]) == sum(counted["accepted"]) == sum(counted["drafted"]) == counted["accepted_tokens"]


def test_a_replay_of_a_stopped_text_has_the_runs_rounds_and_tokens() -> None:
    looped = [quoting_ids(40, 3)]
    whole = decoder().generate(looped, N, strategies=[]).token_ids[0]
    end = new_from(whole, 6)
    out = decoder().generate(looped, N, strategies=["prompt-lookup"], eos_token_id=whole[end])
    again = Tally.of(replay(model_free_chain(["prompt-lookup"], 200), np.array(looped[0]), np.array(out.token_ids[0])))
    mine = out.stats.total
    assert (again.rounds, again.generated_tokens) == (mine.rounds, mine.generated_tokens)
    assert again.generated_tokens == len(out.token_ids[0])


def test_an_error_inside_a_draft_ends_the_figures() -> None:
    model = tiny_model("llama")
    pair = SpeculativeDecoder(model, tokenizer=Words(), check=False)
    bad = len(PROMPTS[0]) + 4

    def poison(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if output.logits.shape[1] > 1:  # not a prefill, which asks for no logits but the last
            output.logits[kwargs["position_ids"] >= bad] = float("nan")
        return output

    handle = model.register_forward_hook(poison, with_kwargs=True)
    try:
        out = pair.generate([PROMPTS[0], PROMPTS[1][:2]], 6, strategies=[right()])
    finally:
        handle.remove()
    assert out.finish_reasons == ["error", "length"]
    check_counts(out)
    assert out.stats.rows[0] == [RoundRecord("scripted", 5, 5, None, False, False)]


@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_interrupt_ends_the_figures(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also inside a draft that takes several passes, and where only some rows have taken their tokens."""
    original, calls = SpeculativeDecoder.generate, []

    def interrupting(ids: Any, scores: Any) -> bool:
        calls.append(1)
        if len(calls) == 9 * after:
            raise KeyboardInterrupt
        return False

    out = original(decoder(), PROMPTS, N, strategies=[right(30)], stopping_criteria=interrupting)
    assert "interrupted" in out.finish_reasons
    check_counts(out)
    assert out.stats.generated_tokens == sum(map(len, out.token_ids))
