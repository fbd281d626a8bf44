"""What a call promises beside its text: log-probabilities, kept state, interruption, suspended rounds, cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from specdec import DraftModel, SpecdecError, SpeculativeDecoder
from specdec.device.host_read import HostReader
from tests.helpers.playing import Scripted, check_counts, counting_passes, quoting_ids, random_ids, weaker
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_greedy, oracle_logits

PROMPTS = [random_ids(5, 1), quoting_ids(19, 2), random_ids(2, 3), random_ids(9, 4)]
DRAFT = [DraftModel(n_max=5)]


@cache
def model() -> Any:
    return tiny_model("llama")


@cache
def draft() -> Any:
    return weaker(model(), 0.05)


@pytest.fixture
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(model(), draft())


@cache
def texts(new: int) -> list[list[int]]:
    return [oracle_greedy(model(), p, new) for p in PROMPTS]


# -- log-probabilities ---------------------------------------------------------------------------------------------


def own_logprobs(prompt: list[int], out: list[int], law: Any) -> list[float]:
    """log p of each emitted id from one plain forward; law(scores [V], ids before) -> processed scores [V]."""
    logits = oracle_logits(model(), prompt + out)
    values = []
    for i, token in enumerate(out):
        n = len(prompt) + i
        values.append(float(torch.log_softmax(law(logits[n - 1], (prompt + out)[:n]), dim=-1)[token]))
    return values


@pytest.mark.parametrize("strategies", [[], DRAFT, ["prompt-lookup"], [Scripted(lambda ids: [1, 2, 3] * 12)]])
def test_greedy_logprobs_are_those_of_a_plain_forward(decoder: SpeculativeDecoder, strategies: Any) -> None:
    out = decoder.generate(PROMPTS, 14, strategies=strategies, output_logprobs=True)
    assert out.token_ids == texts(14)
    for prompt, ids, logprobs in zip(PROMPTS, out.token_ids, out.logprobs, strict=True):
        assert logprobs == pytest.approx(own_logprobs(prompt, ids, lambda s, _: s), abs=1e-4)
    check_counts(out)


def test_greedy_logprobs_are_of_the_processed_law(decoder: SpeculativeDecoder) -> None:
    out = decoder.generate(PROMPTS, 14, strategies=DRAFT, output_logprobs=True, repetition_penalty=1.3)
    penalty = RepetitionPenaltyLogitsProcessor(1.3)
    for prompt, ids, logprobs in zip(PROMPTS, out.token_ids, out.logprobs, strict=True):
        wanted = own_logprobs(prompt, ids, lambda s, seen: penalty(torch.tensor([seen]), s[None].clone())[0])
        assert logprobs == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("rule", ["match", "leviathan"])
def test_sampled_logprobs_are_of_the_tempered_and_cut_law(decoder: SpeculativeDecoder, rule: str) -> None:
    def law(scores: torch.Tensor, _: list[int]) -> torch.Tensor:
        scores = scores / 0.8
        return scores.masked_fill(scores < scores.topk(6).values[-1], float("-inf"))

    options: dict[str, Any] = {"temperature": 0.8, "top_k": 6, "acceptance": rule, "output_logprobs": True}
    out = decoder.generate(PROMPTS, 14, strategies=DRAFT, **options)
    for prompt, ids, logprobs in zip(PROMPTS, out.token_ids, out.logprobs, strict=True):
        assert logprobs == pytest.approx(own_logprobs(prompt, ids, law), abs=1e-4)


@pytest.mark.parametrize("strategies", [[], DRAFT, [DraftModel(tree=[2, 1])]], ids=["plain", "chain", "tree"])
def test_the_most_likely_tokens_are_those_of_a_plain_forward(decoder: SpeculativeDecoder, strategies: Any) -> None:
    reads = decoder.generate(PROMPTS, 14, strategies=strategies).stats.host_reads
    out = decoder.generate(PROMPTS, 14, strategies=strategies, output_logprobs=5)
    assert out.stats.host_reads == reads
    assert out.top_logprobs is not None
    for row in out:
        assert row.top_logprobs is not None
        assert row.logprobs == pytest.approx([place[0][1] for place in row.top_logprobs], abs=1e-6)  # greedy
        text = [*PROMPTS[row.index], *row.token_ids]
        wanted = torch.log_softmax(oracle_logits(model(), text), dim=-1)[len(PROMPTS[row.index]) - 1 : -1].topk(5)
        assert [[i for i, _ in place] for place in row.top_logprobs] == wanted.indices.tolist()
        for place, values in zip(row.top_logprobs, wanted.values.tolist(), strict=True):
            assert [p for _, p in place] == pytest.approx(values, abs=1e-4)


def test_impossible_tokens_are_not_among_the_most_likely(decoder: SpeculativeDecoder) -> None:
    eos = texts(14)[0][5]
    options: dict[str, Any] = {"temperature": 0.8, "top_k": 3, "acceptance": "match", "eos_token_id": eos}
    out = decoder.generate(PROMPTS, 14, strategies=DRAFT, output_logprobs=5, **options)
    for row in out:
        assert row.top_logprobs is not None
        assert [len(place) for place in row.top_logprobs] == [3] * len(row.token_ids)
        for place, token, own in zip(row.top_logprobs, row.token_ids, row.logprobs or [], strict=True):
            assert dict(place)[token] == own
    assert decoder.generate(PROMPTS, 2, output_logprobs=True).top_logprobs is None


def test_logprobs_end_where_the_row_ends(decoder: SpeculativeDecoder) -> None:
    eos = texts(14)[0][5]
    out = decoder.generate(PROMPTS, 14, strategies=DRAFT, output_logprobs=True, eos_token_id=eos)
    check_counts(out)
    assert len(out.logprobs[0]) <= 6
    assert decoder.generate(PROMPTS, 2).logprobs is None


# -- keep_state ----------------------------------------------------------------------------------------------------


@contextmanager
def counting_prefills(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of each prefill of the target."""
    counts: list[int] = []
    real = decoder.target.prefill

    def prefill(cache: Any, shapes: Any, tokens: Any, *rest: Any) -> Any:
        counts.extend(len(ids) for ids in tokens.values())
        return real(cache, shapes, tokens, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(decoder.target, "prefill", prefill)
        yield counts


def test_a_prompt_that_extends_an_earlier_row_prefills_only_what_is_new(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = decoder.generate(PROMPTS, 10, strategies=DRAFT, keep_state=True)
    longer = [p + ids + random_ids(4, 9) for p, ids in zip(PROMPTS, first.token_ids, strict=True)]
    fresh = SpeculativeDecoder(model(), draft()).generate(longer, 12, strategies=DRAFT)
    with counting_prefills(decoder, monkeypatch) as prefilled:
        second = decoder.generate(longer, 12, strategies=DRAFT, keep_state=True)
    assert second.token_ids == fresh.token_ids == [oracle_greedy(model(), p, 12) for p in longer]
    assert prefilled == [4] * 4  # what the prompt adds, and the row's newest token, less this prompt's newest
    third = [p + ids for p, ids in zip(longer, second.token_ids, strict=True)]
    out = decoder.generate(third[::-1], 6, strategies=["prompt-lookup"], keep_state=True)  # in another order
    assert out.token_ids == [oracle_greedy(model(), p, 6) for p in third[::-1]]


@pytest.mark.fast(3)
@pytest.mark.parametrize("keep", [4, 12, 19])
def test_a_prompt_that_leaves_an_earlier_row_midway_reuses_the_common_part(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    decoder.generate(PROMPTS[1], 10, strategies=DRAFT, keep_state=True)
    other = PROMPTS[1][:keep] + random_ids(8, 33)
    with counting_prefills(decoder, monkeypatch) as prefilled:
        out = decoder.generate(other, 10, strategies=DRAFT, keep_state=True)
    assert out.token_ids == [oracle_greedy(model(), other, 10)]
    assert sum(prefilled) <= 8


def test_the_draft_model_keeps_its_cache_too(decoder: SpeculativeDecoder) -> None:
    prompt = random_ids(60, 2)
    first = decoder.generate(prompt, 8, strategies=DRAFT, keep_state=True)
    longer = prompt + first.token_ids[0] + random_ids(3, 1)
    with counting_passes(draft()) as passes:
        decoder.generate(longer, 1 + 1, strategies=[DraftModel(n_max=1)], keep_state=True)
    assert sum(passes) <= 16


def test_without_keep_state_nothing_is_reused(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    first = decoder.generate(PROMPTS[1], 10)
    longer = PROMPTS[1] + first.token_ids[0]
    with counting_prefills(decoder, monkeypatch) as prefilled:
        decoder.generate(longer, 4)
    assert prefilled == [len(longer) - 1]


def test_kept_state_survives_other_calls_and_failed_calls(decoder: SpeculativeDecoder) -> None:
    first = decoder.generate(PROMPTS, 10, strategies=DRAFT, keep_state=True)
    decoder.generate([random_ids(30, 8)] * 4, 10, strategies=DRAFT)
    with pytest.raises(ZeroDivisionError):
        decoder.generate(PROMPTS, 10, strategies=[Scripted(lambda ids: [1 // 0])], keep_state=True)
    longer = [p + ids + [7] for p, ids in zip(PROMPTS, first.token_ids, strict=True)]
    out = decoder.generate(longer, 12, strategies=DRAFT, keep_state=True)
    assert out.token_ids == [oracle_greedy(model(), p, 12) for p in longer]


def test_state_kept_by_an_interrupted_call_is_sound(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt falls into a prefill: the slot's cache is neither the old row's nor the new one's."""
    real, calls = decoder.target.prefill, []

    def prefill(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(decoder.target, "prefill", prefill)
        out = decoder.generate(PROMPTS[:2], 10, strategies=[], batch_size=1, keep_state=True)
    assert out.finish_reasons == ["length", "interrupted"]
    longer = PROMPTS[0] + out.token_ids[0] + [7]
    again = decoder.generate(longer, 8, strategies=[], keep_state=True)
    assert again.token_ids == [oracle_greedy(model(), longer, 8)]


# -- suspended rounds, interruption ---------------------------------------------------------------------------------


def test_a_suspended_generator_and_another_call_do_not_disturb_each_other(decoder: SpeculativeDecoder) -> None:
    suspended = decoder.rounds(PROMPTS[0], 14, strategies=DRAFT)
    tokens = [t for _ in range(2) for t in next(suspended).tokens]
    assert decoder.generate(PROMPTS, 14, strategies=DRAFT).token_ids == texts(14)
    other = decoder.rounds(PROMPTS[1], 14, strategies=["prompt-lookup", *DRAFT])
    others: list[int] = []
    for mine, theirs in zip(suspended, other, strict=False):  # in turns
        tokens += mine.tokens
        others += theirs.tokens
    tokens += [t for r in suspended for t in r.tokens]
    others += [t for r in other for t in r.tokens]
    assert tokens == texts(14)[0]
    assert others == texts(14)[1][: len(others)]
    assert decoder.generate(PROMPTS, 14, strategies=DRAFT).token_ids == texts(14)


def test_an_abandoned_generator_leaves_the_decoder_usable(decoder: SpeculativeDecoder) -> None:
    suspended = decoder.rounds(PROMPTS[0], 14, strategies=DRAFT)
    next(suspended)
    suspended.close()
    assert decoder.generate(PROMPTS, 14, strategies=DRAFT).token_ids == texts(14)


def test_rounds_tell_what_happened(decoder: SpeculativeDecoder) -> None:
    """p and q are those of plain forwards, and the rounds add up to the text."""
    out = decoder.generate(PROMPTS[1], 14, strategies=DRAFT, temperature=0.9, seed=[4])
    ids = list(PROMPTS[1])
    for r in decoder.rounds(PROMPTS[1], 14, strategies=DRAFT, temperature=0.9, seed=[4]):
        assert r.position == len(ids) - 1
        for i, token in enumerate(r.draft[: r.accepted + 1]):
            before = ids + r.draft[:i]
            for side, values in ((model(), r.p), (draft(), r.q)):
                law = torch.softmax(oracle_logits(side, before)[-1] / 0.9, dim=-1)
                assert values[i] == pytest.approx(float(law[token]), abs=1e-4)
        assert r.tokens == [*r.draft[: r.accepted], r.bonus]
        ids += r.tokens
    assert ids[len(PROMPTS[1]) :] == out.token_ids[0]
    assert r.finish_reason == "length"


@pytest.mark.fast(4)
@pytest.mark.parametrize("where", ["criterion", "drafter", "accept"])
@pytest.mark.parametrize("after", [0, 3, 8])
def test_an_interrupt_returns_what_is_there(decoder: SpeculativeDecoder, where: str, after: int) -> None:
    calls: list[int] = []

    def tick(*_: Any) -> Any:
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return False

    options: dict[str, Any] = {"strategies": DRAFT}
    if where == "criterion":
        options["stopping_criteria"] = [tick]
    elif where == "drafter":
        options["strategies"] = [Scripted(lambda ids: tick() or []), *DRAFT]
    else:
        watcher = Scripted(lambda ids: [])
        watcher.accept = tick  # type: ignore[method-assign]
        options["strategies"] = [*DRAFT, watcher]
    out = decoder.generate(PROMPTS, 14, batch_size=2, output_logprobs=True, **options)
    assert "interrupted" in out.finish_reasons
    assert set(out.finish_reasons) <= {"interrupted", "length"}
    for ids, whole, reason in zip(out.token_ids, texts(14), out.finish_reasons, strict=True):
        assert ids == whole[: len(ids)]
        assert (len(ids) == 14) or reason == "interrupted"
    check_counts(out)
    assert decoder.generate(PROMPTS, 14, strategies=DRAFT).token_ids == texts(14)


# -- cost ------------------------------------------------------------------------------------------------------------


@contextmanager
def watching_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of tensor reads that happen outside HostReader."""
    outside: list[str] = []
    inside = [False]
    real_fetch = HostReader.fetch

    def fetch(self: HostReader, packed: Any) -> Any:
        inside[0] = True
        try:
            return real_fetch(self, packed)
        finally:
            inside[0] = False

    def watched(name: str) -> Any:
        real = getattr(torch.Tensor, name)

        def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not inside[0]:
                outside.append(name)
            return real(self, *args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(HostReader, "fetch", fetch)
        for name in ("item", "cpu", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, name, watched(name))
        yield outside


@pytest.mark.fast(3)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}, {"temperature": 0.8, "acceptance": "match"}])
def test_a_draft_model_round_reads_once(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    before = decoder.host_reads
    out = decoder.generate(PROMPTS, 14, strategies=DRAFT, **options)
    assert out.stats.host_reads == out.stats.verify_passes == decoder.host_reads - before
    suspended = decoder.rounds(PROMPTS[1], 14, strategies=DRAFT, **options)
    first = next(suspended)
    with watching_reads(monkeypatch) as outside:
        rest = list(suspended)
    assert rest
    assert len(first.draft) == 5
    assert outside == []


def test_the_watch_on_reads_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    with watching_reads(monkeypatch) as outside:
        x = torch.tensor([1, 2])
        _ = [x.tolist(), x[0].item(), int(x[1]), [10, 20, 30][x[0]]]
        if x[0]:
            x.cpu().numpy()
        HostReader().read(x)
    assert {"tolist", "item", "__int__", "__bool__", "cpu", "numpy"} <= set(outside)
    assert outside.count("cpu") == 1


def test_a_chain_that_ends_with_the_draft_model_reads_once_too(decoder: SpeculativeDecoder) -> None:
    out = decoder.generate(PROMPTS, 14, strategies=["prompt-lookup", DraftModel(n_max=4, p_min=0.12)])
    assert out.stats.host_reads == out.stats.verify_passes


def test_an_error_of_a_users_drafter_names_it(decoder: SpeculativeDecoder) -> None:
    with pytest.raises(SpecdecError, match=r"'mine'.*vocabulary"):
        decoder.generate(PROMPTS, 14, strategies=[Scripted(lambda ids: [128], name="mine")])
    assert decoder.generate(PROMPTS, 14).token_ids == texts(14)
