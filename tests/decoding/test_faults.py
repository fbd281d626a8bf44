"""How speculative decoders break in the wild: one test, or a few, for each kind of fault. Each names its symptom."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

from specdec import DraftModel, NgramSimple, PromptLookup, SpeculativeDecoder
from tests.helpers.playing import Scripted, check_counts, quoting_ids, random_ids, right_until, weaker
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_greedy, oracle_logits

PROMPTS = [random_ids(5, 1), quoting_ids(19, 2), random_ids(2, 3), random_ids(9, 4)]
STRATEGIES: dict[str, list[Any]] = {
    "plain": [],
    "draft-model": [DraftModel(n_max=8)],
    "p_min": [DraftModel(n_max=8, p_min=0.12)],
    "prompt-lookup": [PromptLookup(n_max=8)],
    "ngram-simple": [NgramSimple(size_n=1, size_m=8)],
    "chain": [NgramSimple(size_n=2, size_m=4), "prompt-lookup", DraftModel(n_max=3)],
}
N = 16


@cache
def model() -> Any:
    return tiny_model("llama")


@cache
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(model(), weaker(model(), 0.05))


@cache
def texts() -> list[list[int]]:
    return [oracle_greedy(model(), p, 60) for p in PROMPTS]


def cut(text: list[int], eos: set[int]) -> list[int]:
    """The text up to its first EOS, which is kept."""
    ends = [i for i, t in enumerate(text) if t in eos]
    return text[: ends[0] + 1] if ends else text


# -- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.fast(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_row_1_rows_disturb_each_other(strategy: str) -> None:
    """Symptom: batch > 1 changes a row, because prompts are padded or accepted lengths are shared."""
    options: dict[str, Any] = {"strategies": STRATEGIES[strategy], "temperature": 0.8, "acceptance": "leviathan"}
    batch = decoder().generate(PROMPTS, N, seed=[7, 8, 9, 10], **options)
    other = decoder().generate(PROMPTS[::-1], N, seed=[10, 9, 8, 7], **options)
    single = [decoder().generate(p, N, seed=[s], **options) for p, s in zip(PROMPTS, [7, 8, 9, 10], strict=True)]
    assert batch.token_ids == [s.token_ids[0] for s in single] == other.token_ids[::-1]


@pytest.mark.fast(2, full=5)
@pytest.mark.parametrize("difference", [-128, -5, 4, 64])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "acceptance": "match"}])
def test_row_4_padded_vocabularies(difference: int, options: dict[str, Any]) -> None:
    """Symptom: vocabularies of 151936 and 152064 rows are refused, crash, or ids beyond the target's are proposed."""
    target = tiny_model("llama", vocab=256)
    draft = tiny_model("llama", seed=3, vocab=256 + difference)
    pair = SpeculativeDecoder(target, draft)
    prompts = [random_ids(6, 1, 256), [255, 254, 130]]
    plain = pair.generate(prompts, N, strategies=[], **options)
    out = pair.generate(prompts, N, strategies=["draft-model:n_max=5"], **options)
    if options.get("acceptance") == "match" or not options:
        assert out.token_ids == plain.token_ids
    for r in pair.rounds(prompts[0], N, **options):
        assert all(0 <= t < 256 for t in r.draft)
        assert all(t < 256 + difference for t in r.draft)
        assert all(q > 0 for q in r.q or [])
    check_counts(out)


# -- stops ---------------------------------------------------------------------------------------------------------


@pytest.mark.fast(4, full=8)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("at", [0, 4, 8, 15])
def test_row_5_tokens_after_eos_inside_a_block(strategy: str, at: int) -> None:
    """Symptom: an accepted block runs past an EOS in its middle."""
    eos = {texts()[0][at], texts()[1][at]}
    out = decoder().generate(PROMPTS, N, strategies=STRATEGIES[strategy], eos_token_id=sorted(eos))
    assert out.token_ids == [cut(t[:N], eos) for t in texts()]
    for ids, reason in zip(out.token_ids, out.finish_reasons, strict=True):
        assert reason == ("eos" if ids[-1] in eos else "length")
    ignored = decoder().generate(PROMPTS, N, strategies=STRATEGIES[strategy], eos_token_id=sorted(eos), ignore_eos=True)
    assert ignored.token_ids == [t[:N] for t in texts()]
    check_counts(out)


@pytest.mark.fast(5, full=8)
@pytest.mark.parametrize("length", [8, 40])
@pytest.mark.parametrize("at", [0, 5, 7, 8, 15, 16, 17, 18, 34, 39])
def test_row_5_eos_anywhere_in_a_right_draft(length: int, at: int) -> None:
    """Symptom: EOS as the last drafted token is followed by the bonus token; EOS in one chunk, the next still runs."""
    full = [p + t for p, t in zip(PROMPTS, texts(), strict=True)]
    eos = texts()[0][at]
    wanted = [cut(t[:44], {eos}) for t in texts()]
    out = decoder().generate(PROMPTS, 44, strategies=[Scripted(right_until(full, length))], eos_token_id=eos)
    assert out.token_ids == wanted
    exactly = Scripted(right_until([p + w for p, w in zip(PROMPTS, wanted, strict=True)], 100))  # EOS is drafted last
    out = decoder().generate(PROMPTS, 44, strategies=[exactly], eos_token_id=eos)
    assert out.token_ids == wanted
    check_counts(out)


def test_row_5_the_models_own_eos_ids_are_used() -> None:
    """Symptom: only the first of several EOS ids of the generation config stops the text."""
    text = texts()[0]
    target = copy.deepcopy(model())
    target.generation_config.eos_token_id = [text[9], text[4]]
    out = SpeculativeDecoder(target, weaker(model(), 0.05)).generate(PROMPTS[0], N)
    assert out.token_ids == [cut(text[:N], {text[9], text[4]})]
    assert SpeculativeDecoder(target).generate(PROMPTS[0], N, eos_token_id=None).token_ids == [text[:N]]


@pytest.mark.fast(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_row_6_max_new_tokens_overshoots(strategy: str) -> None:
    """Symptom: the last block brings more tokens than were asked for."""
    for n in range(10):
        out = decoder().generate(PROMPTS, n, strategies=STRATEGIES[strategy])
        assert out.token_ids == [t[:n] for t in texts()]
        assert out.finish_reasons == ["length"] * len(PROMPTS)
        check_counts(out)
    greedy = Scripted(lambda ids: [1] * 50)
    assert [len(t) for t in decoder().generate(PROMPTS, 3, strategies=[greedy]).token_ids] == [3] * 4
    assert max(e[2] for e in greedy.events if e[0] == "draft") == 2  # more is never asked for than can be emitted


@pytest.mark.parametrize("present", ["bos_token_id", "eos_token_id", "pad_token_id", None])
def test_row_7_special_ids_that_a_model_does_not_have(present: str | None) -> None:
    """Symptom: a crash, or a stop at id 0, where the model has no EOS, BOS or pad id."""
    special = {present: 1} if present else {}
    target = tiny_model("llama", **special)
    out = SpeculativeDecoder(target, tiny_model("llama", seed=1)).generate(PROMPTS, N)
    eos = {1} if present == "eos_token_id" else set()
    assert out.token_ids == [cut(oracle_greedy(target, p, N), eos) for p in PROMPTS]


# -- sampling ------------------------------------------------------------------------------------------------------


@pytest.mark.fast(1)
@pytest.mark.parametrize("rule", ["match", "leviathan"])
@pytest.mark.parametrize("strategy", ["draft-model", "chain"])
def test_row_10_temperatures_towards_zero(strategy: str, rule: str) -> None:
    """Symptom: T -> 0 accepts tokens that are not the argmax, overflows, or yields NaN."""
    for temperature in (1e-4, 1e-8, 1e-37, 1e-300):
        out = decoder().generate(
            PROMPTS, N, strategies=STRATEGIES[strategy], acceptance=rule, temperature=temperature, output_logprobs=True
        )
        assert out.token_ids == [t[:N] for t in texts()]
        assert all(p <= 0 for row in out.logprobs for p in row)
    out = decoder().generate(PROMPTS, N, strategies=STRATEGIES[strategy], acceptance=rule, temperature=1e-2)
    for prompt, ids in zip(PROMPTS, out.token_ids, strict=True):
        for i, token in enumerate(ids):
            top = oracle_logits(model(), prompt + ids[:i])[-1].topk(2)
            assert token == int(top.indices[0]) or float(top.values[0] - top.values[1]) < 0.2


def test_row_11_the_draft_is_the_target() -> None:
    """Symptom: where p equals q the residual is 0 / 0 and the text is NaN; here every draft must stand."""
    pair = SpeculativeDecoder(model(), model())
    out = pair.generate([PROMPTS[0]] * 8, 60, temperature=0.7, strategies=[DraftModel(n_max=5)], output_logprobs=True)
    assert out.finish_reasons == ["length"] * 8
    assert out.stats.draft_acceptance_rate > 0.99  # passes of other widths differ by rounding
    assert all(torch.isfinite(torch.tensor(row)).all() for row in out.logprobs)
    greedy = pair.generate(PROMPTS, 30)
    assert greedy.stats.draft_acceptance_rate == 1.0


@pytest.mark.parametrize("rule", ["match", "leviathan"])
def test_row_15_seeds(rule: str) -> None:
    """Symptom: seeds of requests are ignored, or the batch shares one generator."""
    options: dict[str, Any] = {"temperature": 1.0, "acceptance": rule}
    first = decoder().generate([PROMPTS[0]] * 4, N, seed=3, **options)
    assert first.token_ids == decoder().generate([PROMPTS[0]] * 4, N, seed=3, **options).token_ids
    assert len({tuple(t) for t in first.token_ids}) == 4
    assert first.token_ids != decoder().generate([PROMPTS[0]] * 4, N, seed=4, **options).token_ids
    torch.manual_seed(0)
    assert first.token_ids == decoder().generate([PROMPTS[0]] * 4, N, seed=3, batch_size=3, **options).token_ids
    fresh = [decoder().generate(PROMPTS[0], N, seed=None, **options) for _ in range(2)]
    assert fresh[0].token_ids != fresh[1].token_ids
    again = decoder().generate(PROMPTS[0], N, seed=fresh[0].provenance["seed"], **options)
    assert again.token_ids == fresh[0].token_ids
    assert decoder().generate(PROMPTS, N, seed=11).token_ids == decoder().generate(PROMPTS, N, seed=12).token_ids
    before = torch.random.get_rng_state()
    decoder().generate(PROMPTS, N, seed=None, **options)
    assert torch.equal(before, torch.random.get_rng_state())


# -- state ---------------------------------------------------------------------------------------------------------


def snapshot(*models: Any) -> list[Any]:
    """Everything of the caller's that a call must leave alone."""
    seen: list[Any] = []
    for m in models:
        seen.append(copy.deepcopy(m.config.to_dict()))
        seen.append(m.config._attn_implementation)
        seen.append(m.generation_config.to_dict())
        seen.append([(name, part.training, len(part._forward_hooks)) for name, part in m.named_modules()])
        seen.append([p.detach().clone() for p in m.parameters()])
        seen.append([(p.requires_grad, p.grad is None, p.dtype) for p in m.parameters()])
    return seen


def same(a: list[Any], b: list[Any]) -> bool:
    def equal(x: Any, y: Any) -> bool:
        if isinstance(x, list) and x and isinstance(x[0], torch.Tensor):
            return all(torch.equal(i, j) for i, j in zip(x, y, strict=True))
        return bool(x == y)

    return all(equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.fast(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_row_14_two_equal_calls_give_equal_traces(strategy: str) -> None:
    """Symptom: an adapted draft length, a cache or a counter leaks into the next call."""
    options: dict[str, Any] = {"strategies": STRATEGIES[strategy], "temperature": 0.9, "batch_size": 3}
    first = decoder().generate(PROMPTS, N, **options)
    decoder().generate(PROMPTS[::-1], 7, strategies=["draft-model:n_max=5"])
    second = decoder().generate(PROMPTS, N, **options)
    assert first.token_ids == second.token_ids
    assert first.stats.rows == second.stats.rows
    assert first.stats.verify_passes == second.stats.verify_passes
    timeless = [
        {name: {k: v for k, v in vars(c).items() if not k.startswith("t_")} for name, c in out.stats.counters.items()}
        for out in (first, second)
    ]
    assert timeless[0] == timeless[1]
    if strategy == "draft-model":
        assert {r.drafted for row in first.stats.rows for r in row} >= {8}  # the caller's k is the k


@pytest.mark.fast(2)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("attention", [None, "sdpa", "eager"])
def test_row_14_the_callers_models_are_as_before(attention: str | None, training: bool) -> None:
    """Symptom: after a call, or in the middle of one, the caller's config says something else."""
    target, draft = tiny_model("gemma3"), tiny_model("gemma3", seed=1)
    target.train(training)
    before = snapshot(target, draft)
    pair = SpeculativeDecoder(target, draft, attn_implementation=attention)
    assert same(before, snapshot(target, draft))
    settled = pair.generate(PROMPTS, 9, temperature=0.5, repetition_penalty=1.2)
    assert same(before, snapshot(target, draft))
    suspended = pair.rounds(PROMPTS[0], 9)
    next(suspended)
    assert same(before, snapshot(target, draft))
    list(suspended)
    assert pair.generate(PROMPTS, 9, temperature=0.5, repetition_penalty=1.2).token_ids == settled.token_ids
    assert same(before, snapshot(target, draft))


@pytest.mark.parametrize("side", ["target", "draft"])
def test_row_14_an_exception_in_the_middle_of_a_pass_changes_nothing(side: str) -> None:
    """Symptom: a failed call leaves the attention choice or the training flags of the call behind."""
    target, draft = tiny_model("qwen2"), tiny_model("qwen2", seed=1)
    pair = SpeculativeDecoder(target, draft, strategies=["draft-model:n_max=5"])
    wanted = pair.generate(PROMPTS, 9).token_ids
    before = snapshot(target, draft)
    layer = {"target": target, "draft": draft}[side].model.layers[1]
    calls: list[int] = []

    def explode(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 7:
            raise RuntimeError("out of memory")

    handle = layer.register_forward_pre_hook(explode)
    with pytest.raises(RuntimeError, match="out of memory"):
        pair.generate(PROMPTS, 9)
    handle.remove()
    assert same(before, snapshot(target, draft))
    assert pair.generate(PROMPTS, 9).token_ids == wanted


# -- statistics ----------------------------------------------------------------------------------------------------


@pytest.mark.fast(6, full=12)
@pytest.mark.parametrize(
    ("strategy", "temperature"), [*((s, 0.0) for s in STRATEGIES), ("draft-model", 1.0), ("chain", 1.0)]
)
@pytest.mark.parametrize("stop", ["length", "eos", "criterion", "error"])
def test_row_16_generated_is_accepted_and_rounds(strategy: str, temperature: float, stop: str) -> None:
    """Symptom: acceptance rate has four meanings, and none of them adds up when a row stops inside a block."""
    options: dict[str, Any] = {"strategies": STRATEGIES[strategy], "temperature": temperature, "batch_size": 3}
    if stop == "eos":
        options["eos_token_id"] = [row[6] for row in texts()] + [row[11] for row in texts()]
    if stop == "criterion":
        options["stopping_criteria"] = [lambda ids, _: ids.shape[1] % 7 == 0]
    if stop == "error":
        options["logits_processor"] = [lambda ids, s: s if ids.shape[1] != 14 else torch.full_like(s, float("nan"))]
    out = decoder().generate([*PROMPTS, *PROMPTS[:2]], N, **options)
    check_counts(out)
    assert {"error": "error", "eos": "eos", "criterion": "stopping_criteria"}.get(stop, "length") in out.finish_reasons
    stats = out.stats
    if stop == "length":
        assert stats.generated_tokens == stats.emitted_tokens == 6 * N
    drafted = [r for row in stats.rows for r in row if r.drafted]
    if drafted:
        assert stats.acceptance_length == pytest.approx(1 + sum(r.accepted for r in drafted) / len(drafted))
        assert stats.tokens_per_round == pytest.approx(stats.generated_tokens / stats.rounds)
        assert stats.draft_acceptance_rate == pytest.approx(stats.accepted_tokens / stats.draft_tokens)
        assert sum(stats.acceptance_rate_per_position) == pytest.approx(stats.acceptance_length - 1)


# -- contexts ------------------------------------------------------------------------------------------------------


@pytest.mark.fast(5, full=8)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("room", [0, 1, 2, 9])
def test_row_23_generation_runs_into_the_end_of_the_context(strategy: str, room: int) -> None:
    """Symptom: a crash or rubbish at the context's end; here the row stops there with reason `context`."""
    target = tiny_model("llama", max_position_embeddings=19 + 9)
    pair = SpeculativeDecoder(target, weaker(target, 0.05))
    prompts = [quoting_ids(19 + 9 - room, 2), random_ids(3, 1)]
    out = pair.generate(prompts, N, strategies=STRATEGIES[strategy])
    assert out.token_ids == [oracle_greedy(model(), p, n) for p, n in zip(prompts, (room, N), strict=True)]
    assert out.finish_reasons == ["context", "length"]
    check_counts(out)


@pytest.mark.fast(4, full=4)
@pytest.mark.parametrize("context", [4, 8, 20, 24])
@pytest.mark.parametrize("strategy", ["draft-model", "p_min", "chain"])
def test_row_24_the_drafts_context_is_shorter(strategy: str, context: int) -> None:
    """Symptom: the draft model is run beyond its positions; here drafting stops there and generation goes on."""
    draft = tiny_model("llama", max_position_embeddings=context)
    pair = SpeculativeDecoder(model(), draft)
    positions: list[int] = []
    draft.register_forward_pre_hook(
        lambda m, a, kwargs: positions.append(int(kwargs["position_ids"].max())), with_kwargs=True
    )
    out = pair.generate(PROMPTS, 30, strategies=STRATEGIES[strategy], batch_size=2)
    assert out.token_ids == [t[:30] for t in texts()]
    assert max(positions) == context - 1
    if strategy == "draft-model" and context == 24:
        assert out.stats.accepted_tokens > 0  # the same weights: it is right as long as it drafts
    assert any("shorter" in warning for warning in pair.report.warnings)
    check_counts(out)


# -- devices -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda")])
def test_row_22_target_and_draft_on_two_devices(devices: tuple[str, str]) -> None:
    """Symptom: tensors of two devices meet. Text, p and q are those of one device."""
    target, draft = tiny_model("llama").to(devices[0]), weaker(tiny_model("llama"), 0.05).to(devices[1])
    pair = SpeculativeDecoder(target, draft)
    for strategy in STRATEGIES.values():
        assert pair.generate(PROMPTS, N, strategies=strategy, exact=False).token_ids == [t[:N] for t in texts()]
        options: dict[str, Any] = {"temperature": 0.8, "acceptance": "match", "exact": False}
        plain = pair.generate(PROMPTS, N, strategies=[], **options)
        assert pair.generate(PROMPTS, N, strategies=strategy, **options).token_ids == plain.token_ids
        pair.generate(PROMPTS, N, strategies=strategy, temperature=0.8)
