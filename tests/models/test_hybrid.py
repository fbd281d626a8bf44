"""Recurrent layers: rows that are cut back go on from the states of what they kept, whatever stands beside them."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import DraftModel, SpeculativeDecoder
from specdec.decoding.timing import measure_costs
from specdec.device.graphs import Choice
from specdec.device.transfer import to_device
from specdec.errors import SpecdecError
from specdec.models.kv_cache import KeptRows, RaggedCache
from specdec.models.recurrent_state import ModuleStates, RowStates, StateCache
from specdec.models.runner import Runner, Shapes
from specdec.research.exactness.equality import content_dependence
from specdec.research.offline.what_if import estimate
from tests.helpers.playing import Scripted, random_ids, weaker
from tests.helpers.recording import Rerun
from tests.helpers.scripts import load_script
from tests.oracle import oracle_greedy, oracle_logits

SWEEP = load_script("sweep_models")
LENGTH, ROWS = 40, 3


@cache
def model(kind: str) -> Any:
    return SWEEP.tiny_model(SWEEP.tiny_config(kind))


def feed(runner: Runner, cache: RaggedCache, texts: list[list[int]], starts: list[int], counts: list[int]) -> Tensor:
    """One pass of every row; logits [B, S, V]."""
    shapes = Shapes.choose(runner.device, False, LENGTH)
    width = shapes.width(max(counts))
    fed = [text[start : start + count] for text, start, count in zip(texts, starts, counts, strict=True)]
    tokens = to_device([ids + [0] * (width - len(ids)) for ids in fed], runner.device)
    return runner.step(cache, shapes, tokens, starts, counts).logits


def wander(kind: str, seed: int) -> None:
    """Feed rows by random widths, some as drafts that are cut back; compare with plain forwards."""
    rng, runner = random.Random(seed), Runner(model(kind))
    cache, length = runner.lease(ROWS, LENGTH), [0] * ROWS
    texts = [random_ids(LENGTH, 10 * seed + row, SWEEP.VOCAB) for row in range(ROWS)]
    wanted = [oracle_logits(runner.model, text) for text in texts]
    while min(length) < LENGTH:
        counts = [rng.randint(0, min(6, LENGTH - n)) for n in length]
        if not any(counts):
            continue
        drafting = [row for row in range(ROWS) if rng.random() < 0.7]
        cache.begin_draft(drafting)
        logits = feed(runner, cache, texts, length, counts)
        for row, (start, count) in enumerate(zip(length, counts, strict=True)):
            torch.testing.assert_close(logits[row, :count], wanted[row][start : start + count], rtol=1e-3, atol=1e-3)
            kept = rng.randint(0, count) if row in drafting else count
            length[row] += kept if start else max(kept, min(1, count))
        cache.rewind(dict(enumerate(length)))


@pytest.mark.parametrize("kind", ["qwen3_next", "jamba"])  # reads on from a state, or token by token
def test_rows_go_on_from_what_they_kept(kind: str) -> None:
    wander(kind, 0)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["mamba", "mamba2", "lfm2", "falcon_h1", "qwen3_next", "jamba", "olmo_hybrid"])
def test_rows_go_on_from_what_they_kept_whatever_it_is(kind: str) -> None:
    for seed in range(1, 4):
        wander(kind, seed)


@pytest.mark.parametrize("broken", ["copy", "note"])
def test_the_walk_finds_states_that_are_not_restored(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests here could not fail."""
    monkeypatch.setattr(ModuleStates, broken, lambda *_: None)
    with pytest.raises((AssertionError, KeyError)):
        wander("qwen3_next", 0)


def test_a_draft_of_several_passes_is_taken_back_at_once() -> None:
    """As a draft model's steps are: its states are saved when the draft begins, not in every step."""
    runner = Runner(model("qwen3_next"))
    cache, text = runner.lease(1, LENGTH), random_ids(LENGTH, 3, SWEEP.VOCAB)
    wanted = oracle_logits(runner.model, text)
    feed(runner, cache, [text], [0], [9])
    cache.begin_draft([0])
    for n in range(9, 14):
        feed(runner, cache, [text], [n], [1])
    cache.rewind({0: 11})
    logits = feed(runner, cache, [text], [11], [4])
    torch.testing.assert_close(logits[0, :4], wanted[11:15], rtol=1e-3, atol=1e-3)


def test_a_row_cannot_be_cut_back_further_than_its_draft() -> None:
    states = RowStates(1)
    states.plan([0], [9], 0)
    states.begin_draft([0])
    states.plan([9], [4], 0)
    states.rewind([0])
    assert states.plan([11], [2], 0).again == {(2, False): [0]}
    with pytest.raises(SpecdecError, match="where the last draft began"):
        states.plan([8], [1], 0)


def test_kept_texts_are_of_no_use_to_other_texts() -> None:
    cache = RaggedCache(2, 1, 8, recurrent=True)
    assert KeptRows(cache, [torch.arange(6).numpy()]).longest(torch.arange(6).numpy()) == (0, 0)


@pytest.mark.fast(3)
def test_long_right_drafts_are_verified_in_chunks() -> None:
    target = model("qwen3_next")
    prompt = random_ids(6, 1, SWEEP.VOCAB)
    text = prompt + oracle_greedy(target, prompt, 40)
    spoiled = [*text[:-4], (text[-4] + 1) % SWEEP.VOCAB, *text[-3:]]
    decoder = SpeculativeDecoder(target, check=False)
    out = decoder.generate([prompt, prompt[:1]], 40, strategies=[Scripted(lambda ids: spoiled[len(ids) :])])
    assert out.token_ids == [text[6:], oracle_greedy(target, prompt[:1], 40)]


def test_a_recurrent_draft_proposes_what_it_says_alone_beside_an_attention_target() -> None:
    draft, target = model("jamba"), model("llama")
    watched = SWEEP.Watched(4)
    prompts = [random_ids(n, n, SWEEP.VOCAB) for n in (7, 12, 1)]
    out = SpeculativeDecoder(target, draft, check=False).generate(prompts, 10, strategies=[watched], batch_size=2)
    wanted = [oracle_greedy(target, prompt, 10) for prompt in prompts]
    assert out.token_ids == wanted
    assert watched.is_right(draft)
    ahead = DraftModel(n_max=4, overlap=True)  # would draft on before the verdict, which a state cannot take back
    out = SpeculativeDecoder(target, draft, check=False).generate(prompts[0], 10, strategies=[ahead])
    assert out.token_ids == wanted[:1]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"strategies": [DraftModel(tree=[2, 1])]}, "recurrent layers, which read one path only.*chains work"),
        ({"strategies": ["early-exit:layers=1"]}, "cannot draft without some of its layers"),
        ({"exact": True}, "does not cover recurrent layers"),
    ],
)
def test_what_recurrent_layers_cannot_do_is_refused_by_name(call: dict[str, Any], words: str) -> None:
    target = model("qwen3_next")
    with pytest.raises(SpecdecError, match=words):
        SpeculativeDecoder(target, weaker(target), check=False).generate([1, 2, 3], 4, **call)


def test_passes_with_recurrent_layers_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Runner(model("qwen3_next"), recorder=Rerun()).graphs is None
    monkeypatch.setattr("specdec.models.runner.choose_mode", lambda *_: Choice("max"))  # as on a GPU
    runner = Runner(model("qwen3_next"))
    assert (runner.mode, runner.graphs, runner.compiled) == ("off", None, None)
    assert "recurrent layers" in str(runner.compile_report((0, 0.0))["reason"])


def test_passes_that_are_timed_or_read_apart_from_a_call_work_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cost tables, offline estimates of texts that share a prompt, and the comparison of passes."""
    monkeypatch.setattr("specdec.decoding.timing.LIMIT", 0)
    target = model("qwen3_next")
    pair = SpeculativeDecoder(target, weaker(target, 0.05), check=False)
    assert measure_costs(pair, contexts=(16,), widths=(1, 3), repeats=1).to_dict()
    options = {"max_new_tokens": 5, "num_return_sequences": 2, "temperature": 0.8, "acceptance": "match"}
    prompt = random_ids(6, 1, SWEEP.VOCAB)
    (plan,) = estimate(pair, [prompt], [2], [0.0], [], **options).plans
    out = pair.generate([prompt], strategies=[DraftModel(n_max=2)], **options)
    assert plan.tokens_per_round == pytest.approx(out.stats.emitted_tokens / out.stats.rounds)
    assert content_dependence(pair.target, contents=2)["compared"] == 1


def test_every_pass_of_recurrent_layers_counts_its_host_read() -> None:
    """Prefill and verify passes of the target, and the draft's: the host must know where the rows are."""
    target = model("qwen3_next")
    out = SpeculativeDecoder(target, check=False).generate([random_ids(6, 1, SWEEP.VOCAB)], 5, strategies=[])
    assert out.stats.host_reads == 2 * out.stats.verify_passes + 1
    fast = SpeculativeDecoder(target, model("jamba"), check=False).generate(
        [1, 2, 3], 5, strategies=[DraftModel(n_max=2)]
    )
    assert fast.stats.host_reads >= 2 * fast.stats.verify_passes + fast.stats.draft_passes


@pytest.mark.parametrize("number", [0, 1])
def test_states_are_where_models_of_older_transformers_look(number: int) -> None:
    cache = StateCache({number: torch.ones(1)}, {})
    layer = cache.layers[7]
    assert (layer.conv_states[number], layer.recurrent_states[0], layer.record_past) == (torch.ones(1), None, False)


def test_a_live_call_needs_a_capacity_where_the_context_is_not_stated() -> None:
    decoder = SpeculativeDecoder(model("mamba"), check=False)
    with pytest.raises(SpecdecError, match="does not say how long a text may be"):
        decoder.live(slots=2)
