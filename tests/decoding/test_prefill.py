"""Prompts that are prefilled side by side: the same texts, fewer passes, and in exact mode nothing that depends on when
a slot falls free. On a CPU every row is fed alone, so these tests ask for what a GPU gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import specdec
from specdec import DraftModel, SpeculativeDecoder
from specdec.models.kv_cache import RaggedCache, common_prefix, prefix_groups
from specdec.models.runner import TOGETHER, Runner, Shapes
from tests.helpers.playing import random_ids, weaker
from tests.helpers.tiny import TINY_KINDS, tiny_model
from tests.oracle import oracle_greedy

PROMPTS = [random_ids(n, n) for n in (30, 41, 5, 22, 36)]


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = Shapes.choose
    monkeypatch.setattr(
        specdec.models.runner.Shapes, "choose", staticmethod(lambda *given: replace(choose(*given), together=TOGETHER))
    )


@contextmanager
def fed(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, list[int]]]]:
    """(first row, rows, tokens of each) of every pass of prefill."""
    passes: list[tuple[int, int, list[int]]] = []
    step = runner.step

    def counting(cache: Any, shapes: Any, tokens: Any, starts: Any, counts: Any, rows: Any = None, *rest: Any) -> Any:
        if rows is not None:
            passes.append((rows.start, len(tokens), list(counts)))
        return step(cache, shapes, tokens, starts, counts, rows, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "step", counting)
        yield passes


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_rows_fed_together_hold_what_they_hold_alone(kind: str) -> None:
    runner = Runner(tiny_model(kind))
    tokens = {0: random_ids(7, 1), 1: random_ids(19, 2), 3: random_ids(3, 3), 4: []}
    starts = {0: 2, 1: 0, 3: 0, 4: 0}
    caches = []
    for together in (0, 64):
        shapes = Shapes((1, 4, 8), 8, 4, together=together)
        cache = RaggedCache(runner.config.num_hidden_layers, 5, 24)
        runner.prefill(cache, shapes, {0: [5, 6]}, {0: 0})
        runner.prefill(cache, shapes, tokens, starts)
        caches.append(cache)
    for alone, side in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(side.keys[:, :, :24], alone.keys[:, :, :24], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(side.values[:, :, :24], alone.values[:, :, :24], atol=2e-5, rtol=2e-5)
        assert not side.keys[2, :, :24].any()
        assert not side.keys[4, :, :24].any()


def test_a_pass_feeds_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(tiny_model("llama"))
    cache = RaggedCache(runner.config.num_hidden_layers, 6, 48)
    tokens = {row: random_ids(n, n) for row, n in enumerate((8, 20, 7, 3))} | {5: [1, 2]}
    with fed(runner, monkeypatch) as passes:
        runner.prefill(cache, Shapes((1, 4, 8), 8, 4, together=24), tokens, dict.fromkeys(tokens, 0))
    assert passes == [(0, 3, [8, 8, 7]), (0, 3, [0, 8, 0]), (0, 3, [0, 4, 0]), (3, 1, [3]), (5, 1, [2])]


def test_what_rows_share_is_computed_by_a_group_before() -> None:
    header, other = random_ids(40, 1), random_ids(40, 2)
    texts = {
        3: header + random_ids(9, 3), 0: other + random_ids(9, 4), 2: header + random_ids(9, 5),
        1: header + random_ids(9, 6), 7: other + random_ids(9, 7), 8: header + random_ids(9, 6) + [1],
    }  # fmt: skip
    arrays = {row: np.array(text) for row, text in texts.items()}
    assert prefix_groups(arrays) == [[3, 0], [2, 1, 7, 8]]
    assert common_prefix(arrays[1], arrays[8]) == 49  # only 9 tokens more than both have from the header's first row
    longer = arrays | {9: np.array(texts[8] + random_ids(30, 8)), 10: np.array(texts[8] + random_ids(30, 8))}
    assert prefix_groups(longer) == [[3, 0], [2, 1, 7, 8, 9], [10]]
    assert prefix_groups(arrays, step=64) == [list(texts)]
    assert prefix_groups(dict.fromkeys(range(4), arrays[0])) == [[0], [1, 2, 3]]
    assert prefix_groups({}) == []


@pytest.mark.fast(4)
@pytest.mark.parametrize("batch", [2, 3, 5])
@pytest.mark.parametrize("strategies", [[], [DraftModel(n_max=3)], ["prompt-lookup", DraftModel(n_max=2)]])
@pytest.mark.usefixtures("together")
def test_texts_are_those_of_each_prompt_alone(batch: int, strategies: list[Any]) -> None:
    model = tiny_model("llama")
    header = random_ids(40, 1)
    prompts = [*PROMPTS, *(header + random_ids(n, n) for n in (9, 5, 12)), PROMPTS[1]]
    decoder = SpeculativeDecoder(model, weaker(model, 0.05))
    out = decoder.generate(prompts, 10, strategies=strategies, batch_size=batch)
    assert out.token_ids == [oracle_greedy(model, p, 10) for p in prompts]


@pytest.mark.usefixtures("together")
def test_slots_that_are_free_at_the_same_time_are_filled_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, weaker(model, 0.05))
    drafting = DraftModel(n_max=2)
    with fed(decoder.target, monkeypatch) as target, fed(decoder.draft, monkeypatch) as draft:
        decoder.generate(PROMPTS, 3, strategies=[drafting], batch_size=5)
    lengths = [len(p) - 1 for p in PROMPTS]
    assert target == [(0, 5, lengths)]
    assert draft == [(0, 2, lengths[:2]), (3, 2, lengths[3:])]  # the third is so short that its first draft feeds it
    with fed(decoder.target, monkeypatch) as target:
        decoder.generate(PROMPTS[0], 3, strategies=[], num_return_sequences=3, temperature=1.0)
    assert target == [(0, 1, lengths[:1])]


@pytest.mark.usefixtures("together")
def test_in_exact_mode_passes_of_prefill_do_not_depend_on_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompts go together, later ones alone, whenever their slots fall free; and later ones take over only
    what was computed alone."""
    model = tiny_model("llama", max_position_embeddings=1024).to(torch.bfloat16)
    header = [i % 120 for i in range(530)]
    prompts = [*PROMPTS[:2], [*header, 3], [*header, 5], *PROMPTS[2:4]]
    decoder = SpeculativeDecoder(model, weaker(model, 0.05).to(torch.bfloat16))
    monkeypatch.setattr(decoder, "resolve_exact", lambda *given: True)  # as "auto" does on a GPU
    seen = []
    for strategies in ([], [DraftModel(n_max=3)]):
        with fed(decoder.target, monkeypatch) as passes:
            out = decoder.generate(prompts, 8, strategies=strategies, batch_size=2)
        seen.append((out.token_ids, sorted((rows, counts) for _, rows, counts in passes)))
    assert seen[0] == seen[1]
    assert seen[0][1] == sorted([(2, [29, 40]), (1, [512]), (1, [18]), (1, [18]), (1, [4]), (1, [21])])
    with fed(decoder.target, monkeypatch) as passes:
        decoder.generate(prompts[2:], 8, strategies=[], batch_size=4)
    assert [rows for _, rows, _ in passes] == [1] * 5  # a header to share: each alone, as without grouping
    with fed(decoder.target, monkeypatch) as passes:
        decoder.generate([*prompts[1:3], prompts[3]], 8, strategies=[], batch_size=2)
    # The header was computed beside another row: its bits are not those that a row alone has.
    assert [(rows, counts) for _, rows, counts in passes] == [(2, [40, 512]), (2, [0, 18]), (1, [512]), (1, [18])]


@pytest.mark.usefixtures("together")
def test_with_exact_true_a_row_does_not_depend_on_its_companions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other orders and shards give the same bits, because every prompt is fed alone."""
    decoder = SpeculativeDecoder(tiny_model("llama").to(torch.bfloat16), exact=True)
    order = [3, 0, 4, 2, 1, 5]
    prompts = [*PROMPTS, random_ids(33, 9)]

    def rows(which: list[int], **options: Any) -> dict[int, Any]:
        given = [prompts[i] for i in which]
        out = decoder.generate(given, 6, strategies=[], batch_size=3, output_logprobs=True, **options)
        assert out.logprobs is not None
        return dict(zip([which[i] for i in out.indices], zip(out.token_ids, out.logprobs, strict=True), strict=True))

    with fed(decoder.target, monkeypatch) as passes:
        whole = rows(list(range(6)))
    assert [n for _, n, _ in passes] == [1] * 6
    assert rows(order) == whole
    assert rows(order, shard="0/2") | rows(order, shard="1/2") == whole
    with fed(decoder.target, monkeypatch) as passes:
        rows(order, exact="auto", shard="0/2")
    assert len(passes) < 3  # not exact on a CPU: prompts go together
