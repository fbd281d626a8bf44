"""The loop: greedy text never depends on who drafts, how long, in which batch, or through which attention."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from specdec import DraftModel, NgramSimple, PromptLookup, SpeculativeDecoder
from specdec.device.transfer import put_rows
from tests.helpers.playing import (
    Scripted,
    check_counts,
    counting_passes,
    generated_by_transformers,
    looping,
    quoting_ids,
    random_ids,
    right_until,
    weaker,
)
from tests.helpers.tiny import SLIDING_WINDOW, TINY_KINDS, tiny_model
from tests.oracle import oracle_greedy

NEW = 24
PROMPTS = [random_ids(5, 1), quoting_ids(19, 2), random_ids(2, 3)]
CHAINS: dict[str, list[Any]] = {
    "draft-model 1": [DraftModel(n_max=1)],
    "draft-model 3": [DraftModel(n_max=3)],
    "draft-model 5": [DraftModel(n_max=5)],
    "draft-model 8": [DraftModel(n_max=8)],
    "p_min": [DraftModel(n_max=6, p_min=0.12)],
    "p_min, n_min": [DraftModel(n_max=6, p_min=0.12, n_min=2)],
    "llama-classic": [DraftModel(preset="llama-classic")],
    "llama-classic, p_min 0.2": [DraftModel(preset="llama-classic", p_min=0.2)],
    "llama-2026": [DraftModel(preset="llama-2026")],
    "prompt-lookup": ["prompt-lookup"],
    "prompt-lookup long": [PromptLookup(n_max=20, ngram_max=2)],
    "ngram-simple": [NgramSimple(size_n=1, size_m=4)],
    "ngram-simple long": [NgramSimple(size_n=2, size_m=12)],
    "lookup, draft": ["prompt-lookup", DraftModel(n_max=4)],
    "draft p_min, lookup": [DraftModel(n_max=4, p_min=0.15), "prompt-lookup"],
    "three": [NgramSimple(size_n=3, size_m=6), PromptLookup(ngram_min=2), DraftModel(n_max=2)],
}


def model_of(kind: str) -> Any:
    return looping(tiny_model("llama", seed=2)) if kind == "looping" else tiny_model(kind)


@cache
def pair(kind: str) -> SpeculativeDecoder:
    model = model_of(kind)
    return SpeculativeDecoder(model, weaker(model, 0.05))


@cache
def expected(kind: str) -> list[list[int]]:
    return [oracle_greedy(model_of(kind), p, NEW) for p in PROMPTS]


@cache
def llama_texts(n_prompts: int, new: int) -> tuple[list[list[int]], list[list[int]]]:
    """(prompts of different lengths, the oracle's continuations) of the tiny Llama."""
    prompts = [quoting_ids(3 + 4 * i, i) if i % 2 else random_ids(2 + 3 * i, i) for i in range(n_prompts)]
    return prompts, [oracle_greedy(tiny_model("llama"), p, new) for p in prompts]


@pytest.mark.fast(4)
@pytest.mark.parametrize("kind", TINY_KINDS)
def test_plain_decoding_equals_the_oracle_and_transformers(kind: str) -> None:
    out = pair(kind).generate(PROMPTS, NEW, strategies=[])
    assert out.token_ids == expected(kind)
    model = tiny_model(kind)
    assert out.token_ids == [generated_by_transformers(model, p, NEW) for p in PROMPTS]
    assert out.stats.draft_tokens == 0
    assert out.stats.rounds == len(PROMPTS) * NEW
    assert len(PROMPTS[0]) + NEW > 2 * SLIDING_WINDOW
    check_counts(out)


FULLY = ("llama", "qwen2", "gemma3", "mixtral", "looping")
BRIEFLY = ("p_min", "lookup, draft")


@pytest.mark.fast(6, full=30)
@pytest.mark.parametrize(
    ("kind", "chain"),
    [(k, c) for k in FULLY for c in CHAINS] + [(k, c) for k in TINY_KINDS if k not in FULLY for c in BRIEFLY],
)
def test_greedy_text_does_not_depend_on_the_strategy(kind: str, chain: str) -> None:
    out = pair(kind).generate(PROMPTS, NEW, strategies=CHAINS[chain])
    assert out.token_ids == expected(kind)
    assert out.finish_reasons == ["length"] * len(PROMPTS)
    check_counts(out)


@pytest.mark.parametrize(
    "chain",
    ["draft-model 5", "p_min", "llama-classic, p_min 0.2", "prompt-lookup long", "ngram-simple", "ngram-simple long"],
)
def test_strategies_really_save_passes(chain: str) -> None:
    """Guards the tests above: a chain that never has a draft accepted would pass them all."""
    out = pair("looping").generate(PROMPTS, NEW, strategies=CHAINS[chain])
    assert out.stats.accepted_tokens > 5
    assert out.stats.accepted_tokens < out.stats.draft_tokens


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("rule", ["match", "leviathan"])
def test_a_long_draft_is_verified_in_chunks(rule: str, exact: bool) -> None:
    prompts, texts = llama_texts(2, 45)
    full = [p + t for p, t in zip(prompts, texts, strict=True)]
    out = pair("llama").generate(
        prompts, 45, strategies=[Scripted(right_until(full, 40))], acceptance=rule, exact=exact
    )
    assert out.token_ids == texts
    assert out.stats.rounds == 2 * 2  # 40 accepted and a bonus, then the last 4
    assert out.stats.draft_tokens == out.stats.accepted_tokens == 2 * (40 + 3)
    assert out.stats.verify_passes == (6 + 1 if exact else 3 + 1)
    check_counts(out)


@pytest.mark.parametrize("length", [16, 17, 18, 33, 34, 35])
def test_a_draft_as_long_as_some_chunks_loses_nothing(length: int) -> None:
    prompts, texts = llama_texts(3, 45)
    full = [p + t for p, t in zip(prompts, texts, strict=True)]
    out = pair("llama").generate(prompts, 45, strategies=[Scripted(right_until(full, length))])
    assert out.token_ids == texts
    assert out.stats.accepted_tokens == out.stats.draft_tokens
    check_counts(out)


@pytest.mark.parametrize(
    ("rows", "wrong_at"), [*((2, i) for i in (0, 1, 7, 15, 16, 17, 18, 33, 34, 39)), (1, 0), (1, 16)]
)
def test_a_wrong_token_anywhere_in_a_draft_changes_nothing(rows: int, wrong_at: int) -> None:
    prompts, texts = llama_texts(3, 45)
    full = [p + t for p, t in zip(prompts, texts, strict=True)]
    drafter = Scripted(right_until(full, 40, wrong_at))
    out = pair("llama").generate(prompts[:rows], 45, strategies=[drafter])
    assert out.token_ids == texts[:rows]
    first = next(e for e in drafter.events if e[0] == "accept")
    assert first[2] == wrong_at
    check_counts(out)


@pytest.mark.fast(4)
@pytest.mark.parametrize("kind", ["gemma3", "mixtral", "qwen2"])
@pytest.mark.parametrize("wrong_at", [0, 2, 5])
def test_rejected_tokens_leave_no_trace_in_the_cache(kind: str, wrong_at: int) -> None:
    full = [p + t for p, t in zip(PROMPTS, expected(kind), strict=True)]
    out = pair(kind).generate(PROMPTS, NEW, strategies=[Scripted(right_until(full, 12, wrong_at))])
    assert out.token_ids == expected(kind)


def test_a_chain_of_wrong_drafts_only_costs_passes() -> None:
    prompts, texts = llama_texts(3, 20)
    full = [p + t for p, t in zip(prompts, texts, strict=True)]
    out = pair("llama").generate(prompts, 20, strategies=[Scripted(right_until(full, 6, 0))])
    assert out.token_ids == texts
    assert out.stats.accepted_tokens == 0
    assert out.stats.verify_passes == 20


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("kind", "chain"),
    [("llama", "p_min"), ("looping", "three"), ("qwen2", "draft-model 5"), ("gemma3", "three"), ("mixtral", "p_min")],
)
def test_rows_of_a_batch_of_8_equal_their_single_runs(kind: str, chain: str) -> None:
    prompts, _ = llama_texts(8, 16)
    batch = pair(kind).generate(prompts, 16, strategies=CHAINS[chain])
    singles = [pair(kind).generate(p, 16, strategies=CHAINS[chain]) for p in prompts]
    assert batch.token_ids == [s.token_ids[0] for s in singles]
    assert batch.stats.rows == [s.stats.rows[0] for s in singles]  # not only the text: draft for draft
    check_counts(batch)


@pytest.mark.fast(1)
@pytest.mark.parametrize("chain", ["draft-model 3", "lookup, draft"])
def test_slots_are_refilled_from_the_queue(chain: str) -> None:
    prompts, texts = llama_texts(20, 12)
    eos = [t for row in texts[:5] for t in row[6:7]]  # rows end at different times
    out = pair("llama").generate(prompts, 12, strategies=CHAINS[chain], batch_size=3, eos_token_id=eos)
    singles = [pair("llama").generate(p, 12, strategies=CHAINS[chain], eos_token_id=eos) for p in prompts]
    assert out.token_ids == [s.token_ids[0] for s in singles]
    assert out.finish_reasons == [s.finish_reasons[0] for s in singles]
    assert out.stats.rows == [s.stats.rows[0] for s in singles]
    assert len({len(row) for row in out.token_ids}) > 2
    assert out.stats.verify_passes < 0.6 * sum(s.stats.verify_passes for s in singles)


def test_a_refilled_slot_forgets_its_last_row() -> None:
    """A long row first, a short one after it in the same slot, and back."""
    prompts = [random_ids(40, 5), random_ids(3, 6), random_ids(30, 7), random_ids(2, 8)]
    texts = [oracle_greedy(tiny_model("llama"), p, 12) for p in prompts]
    out = pair("llama").generate(prompts, 12, strategies=CHAINS["draft-model 5"], batch_size=1)
    assert out.token_ids == texts


@pytest.mark.fast(4)
@pytest.mark.parametrize("attention", ["sdpa", "eager", "specdec_ragged"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mixtral"])
def test_attention_implementations_give_the_same_text(kind: str, attention: str) -> None:
    model = tiny_model(kind)
    decoder = SpeculativeDecoder(model, weaker(model, 0.05), attn_implementation=attention)
    out = decoder.generate(PROMPTS, NEW, strategies=CHAINS["lookup, draft"])
    assert out.token_ids == expected(kind)


def test_num_return_sequences_of_greedy_decoding_are_equal_and_in_order() -> None:
    prompts, texts = llama_texts(3, 10)
    out = pair("llama").generate(prompts, 10, num_return_sequences=2)
    assert out.token_ids == [t for t in texts for _ in range(2)]


def test_num_return_sequences_of_sampling_are_rows_of_their_own() -> None:
    prompts, _ = llama_texts(2, 10)
    options: dict[str, Any] = {"temperature": 1.0, "acceptance": "match"}
    out = pair("llama").generate(prompts, 12, num_return_sequences=3, seed=5, **options)
    assert len({tuple(row) for row in out.token_ids}) == 6
    repeated = pair("llama").generate([p for p in prompts for _ in range(3)], 12, seed=5, **options)
    assert out.token_ids == repeated.token_ids


@pytest.mark.parametrize("chain", ["draft-model 5", "prompt-lookup", "three"])
def test_under_match_the_sampled_text_is_plains_text(chain: str) -> None:
    prompts = llama_texts(8, 16)[0][:6]
    options: dict[str, Any] = {"temperature": 0.7, "acceptance": "match", "seed": 3}
    plain = pair("llama").generate(prompts, 12, strategies=[], **options)
    assert pair("llama").generate(prompts, 12, strategies=CHAINS[chain], **options).token_ids == plain.token_ids
    assert pair("llama").generate(prompts, 12, strategies=CHAINS[chain], batch_size=3, **options).token_ids == (
        plain.token_ids
    )
    assert pair("llama").generate(prompts, 12, strategies=CHAINS[chain], exact=True, **options).token_ids == (
        plain.token_ids
    )


def test_every_token_has_its_origin() -> None:
    out = pair("looping").generate(PROMPTS, NEW, strategies=CHAINS["lookup, draft"])
    origins = [o for row in out.origins for o in row]
    assert set(origins) == {"prompt-lookup", "draft-model", None}
    drafted = out.stats.by_strategy()
    assert origins.count(None) == out.stats.rounds
    for name in ("prompt-lookup", "draft-model"):
        assert origins.count(name) == drafted[name].accepted_tokens


def test_the_models_are_asked_for_nothing_twice() -> None:
    """Passes of a draft-model call: the prefills, n_max draft steps and one verify pass a round."""
    decoder = pair("llama")
    prompt, text = [p[0] for p in llama_texts(1, 16)]
    with counting_passes(decoder.target.model) as target:
        out = decoder.generate(prompt, 16, strategies=[DraftModel(n_max=3)])
    assert out.token_ids == [text]
    assert len(target) == 1 + out.stats.verify_passes
    with counting_passes(decoder.draft.model) as draft:
        out = decoder.generate(prompt, 16, strategies=[DraftModel(n_max=3)])
    assert len(draft) <= 1 + 3 * out.stats.rounds


def test_a_half_precision_pair_gives_the_same_text_with_and_without_drafts_in_exact_mode() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    decoder = SpeculativeDecoder(model, weaker(tiny_model("llama"), 0.05).to(torch.bfloat16))
    prompts, _ = llama_texts(4, 10)
    plain = decoder.generate(prompts, 24, strategies=[], exact=True)
    for chain in ("draft-model 5", "prompt-lookup long", "three"):
        assert decoder.generate(prompts, 24, strategies=CHAINS[chain], exact=True).token_ids == plain.token_ids


@pytest.mark.parametrize("tail", [(), (5,)])
def test_drafts_on_the_device_reach_their_own_rows(tail: tuple[int, ...]) -> None:
    """One write for all rows does what a copy for each would, whatever lengths they have."""
    generator = torch.Generator().manual_seed(0)
    rows = {b: torch.randn((n, *tail), generator=generator) for b, n in ((3, 2), (0, 4), (1, 0))}
    table = torch.full((5, 4, *tail), 7.0)
    expected = table.clone()
    for b, row in rows.items():
        expected[b, : len(row)] = row
    put_rows(table, rows)
    assert torch.equal(table, expected)
    put_rows(table, {1: rows[1]})
    put_rows(table, {})
    assert torch.equal(table, expected)
