"""Threads: decoders on one model, calls of one decoder, and transformers' own generate beside them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import specdec
from specdec.drafters import make_drafters
from tests.helpers.playing import generated_by_transformers, quoting_ids, weaker
from tests.helpers.tiny import tiny_model

PROMPTS = [quoting_ids(n, seed) for seed, n in enumerate((9, 14, 20, 11))]
NEW = 6


def in_threads(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run all at once. Returns what each returns; raises the first error."""
    results: list[Any] = [None] * len(jobs)
    barrier = threading.Barrier(len(jobs))

    def work(index: int) -> None:
        try:
            barrier.wait()
            results[index] = jobs[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def decoder(model: Any, draft: Any = None, **options: Any) -> specdec.SpeculativeDecoder:
    return specdec.SpeculativeDecoder(model, draft, check=False, **options)


def check_beside_transformers(model: Any, decoders: Sequence[specdec.SpeculativeDecoder], calls: int) -> None:
    expected = [generated_by_transformers(model, prompt, NEW) for prompt in PROMPTS]

    def ours(dec: specdec.SpeculativeDecoder) -> Callable[[], bool]:
        return lambda: all(
            dec.generate([PROMPTS[i % 4]], NEW).token_ids[0] == expected[i % 4] for i in range(calls)
        )  # fmt: skip

    def theirs() -> bool:
        return all(generated_by_transformers(model, PROMPTS[i % 4], NEW) == expected[i % 4] for i in range(calls // 4))

    attention = model.config._attn_implementation
    assert all(in_threads([*map(ours, decoders), theirs]))
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("calls", [12, pytest.param(200, marks=pytest.mark.full)])
def test_two_threads_on_one_model_beside_transformers(shared: bool, calls: int) -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    draft = weaker(model, 0.02)
    first = decoder(model, draft)
    check_beside_transformers(model, [first, first if shared else decoder(model, draft)], calls)


@pytest.mark.parametrize("options", [{"fuse": True}, {"attn_implementation": "eager"}, {"attn_implementation": "sdpa"}])
def test_decoders_of_different_options_on_one_model(options: dict[str, Any]) -> None:
    model = tiny_model("gemma3").train()
    model.eval()
    check_beside_transformers(model, [decoder(model, strategies=["prompt-lookup"]), decoder(model, **options)], 8)


def test_a_model_that_is_the_draft_of_another_decoder() -> None:
    a, b = tiny_model("llama", num_hidden_layers=2), tiny_model("llama", seed=1, num_hidden_layers=2)
    expected = [generated_by_transformers(m, PROMPTS[0], 12) for m in (a, b)]
    pairs = [decoder(a, b), decoder(b, a), decoder(a, a)]
    texts = in_threads([lambda d=d: [d.generate([PROMPTS[0]], 12).token_ids[0] for _ in range(6)] for d in pairs])
    assert texts == [[expected[0]] * 6, [expected[1]] * 6, [expected[0]] * 6]


CHAINS: list[list[Any]] = [
    ["suffix"], ["recycling:nodes=8:width=2:depth=4"], ["ngram-mod:n_match=16:n_min=1:n_max=4:shared=true"],
    ["lookahead:window=4:ngram=3:guesses=3"], ["early-exit:layers=1"], ["draft-model:n_max=3"],
]  # fmt: skip


@pytest.mark.parametrize("shared", [True, False], ids=["one pair", "two pairs"])
def test_two_decoders_and_their_strategies_in_two_threads(shared: bool) -> None:
    """Strategies are objects that both decoders hold; with one pair, so are the models."""
    targets = [tiny_model("llama", seed=seed, num_hidden_layers=2) for seed in ((0,) if shared else (0, 1))]
    pairs = [(target, weaker(target, 0.02)) for target in targets]
    chains = [make_drafters(chain, True) for chain in CHAINS]
    sampled: dict[str, Any] = {"temperature": 0.8, "acceptance": "match", "seed": 5}

    def texts(dec: specdec.SpeculativeDecoder, order: int) -> list[Any]:
        return [dec.generate(PROMPTS, 5, chain, **sampled).token_ids for chain in chains[::order]]

    expected = [decoder(*pairs[i]).generate(PROMPTS, 5, [], **sampled).token_ids for i in (0, -1)]
    decoders = [decoder(*pairs[0]), decoder(*pairs[-1])]
    found = in_threads([lambda: texts(decoders[0], 1), lambda: texts(decoders[1], -1)])
    assert found == [[text] * len(CHAINS) for text in expected]


def test_rows_samples_and_kept_state_in_threads() -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    dec = decoder(model, weaker(model, 0.02))
    options: list[dict[str, Any]] = [
        {"keep_state": True}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8, "seed": 3, "acceptance": "coupled"},
        {"repetition_penalty": 1.3, "batch_size": 2},
    ]  # fmt: skip
    alone = [decoder(model, dec.draft.model).generate(PROMPTS, NEW, **given).token_ids for given in options]
    texts = in_threads([lambda g=g: [dec.generate(PROMPTS, NEW, **g).token_ids for _ in range(4)] for g in options])
    assert texts == [[expected] * 4 for expected in alone]


def test_generators_and_calls_of_one_decoder_take_turns() -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    dec = decoder(model, strategies=["prompt-lookup"])
    expected = [generated_by_transformers(model, prompt, 16) for prompt in PROMPTS]

    def by_rounds(i: int) -> list[int]:
        return [t for r in dec.rounds(PROMPTS[i], 16) for t in r.tokens]

    jobs = [lambda i=i: by_rounds(i) for i in range(3)]
    texts = in_threads([*jobs, lambda: dec.generate([PROMPTS[3]], 16).token_ids[0]])
    assert texts == expected


def test_one_generator_in_two_threads_gives_each_round_once() -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    dec = decoder(model, strategies=[])
    shared = dec.rounds(PROMPTS[0], 16)
    taken = in_threads([lambda: [(r.position, r.tokens) for r in shared] for _ in range(2)])
    rounds = sorted(taken[0] + taken[1])
    assert [t for _, tokens in rounds for t in tokens] == generated_by_transformers(model, PROMPTS[0], 16)


def test_an_unfinished_generator_holds_nobody_up() -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    dec = decoder(model, strategies=["prompt-lookup"])
    waiting, dropped = dec.rounds(PROMPTS[0], 16), dec.rounds(PROMPTS[1], 16)
    begun = [t for _ in range(2) for t in next(waiting).tokens]
    next(dropped)
    expected = generated_by_transformers(model, PROMPTS[2], 16)
    assert dec.generate([PROMPTS[2]], 16).token_ids[0] == expected  # in this thread
    assert in_threads([lambda: dec.generate([PROMPTS[2]], 16).token_ids[0]] * 2) == [expected] * 2
    del dropped
    gc.collect()
    assert begun + [t for r in waiting for t in r.tokens] == generated_by_transformers(model, PROMPTS[0], 16)


def test_a_call_inside_a_call_of_the_same_decoder() -> None:
    """A processor, a criterion or a hook that asks the decoder itself: the thread has the lock already."""
    model = tiny_model("llama", num_hidden_layers=2)
    dec = decoder(model, strategies=["prompt-lookup"])
    inner = generated_by_transformers(model, PROMPTS[1], 4)
    found = []

    def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        found.append(dec.generate([PROMPTS[1]], 4).token_ids[0])
        return torch.zeros(len(ids), dtype=torch.bool)

    out = dec.generate([PROMPTS[0]], 8, stopping_criteria=criterion)
    assert out.token_ids[0] == generated_by_transformers(model, PROMPTS[0], 8)
    assert found == [inner] * len(found)
    assert found

    depth = [0]

    def hook(module: Any, given: Any) -> None:
        if depth[0] == 0:
            depth[0] = 1
            assert dec.generate([PROMPTS[1]], 4).token_ids[0] == inner
            depth[0] = 0

    model.model.layers[1].register_forward_pre_hook(hook)
    assert dec.generate([PROMPTS[0]], 8).token_ids[0] == generated_by_transformers(model, PROMPTS[0], 8)


def test_a_call_that_fails_in_one_thread_leaves_the_others_alone() -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    dec = decoder(model, strategies=["prompt-lookup"])
    expected = generated_by_transformers(model, PROMPTS[0], 12)

    def failing() -> str:
        def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] > len(PROMPTS[0]) + 2:
                raise ValueError("a user's mistake")
            return scores

        broken.prefix_only = True  # type: ignore[attr-defined]
        with pytest.raises(specdec.SpecdecError, match="a user's mistake"):
            dec.generate([PROMPTS[0]], 12, logits_processor=broken)
        return "failed"

    good = lambda: [dec.generate([PROMPTS[0]], 12).token_ids[0] for _ in range(4)]  # noqa: E731
    assert in_threads([failing, good, failing, good]) == ["failed", [expected] * 4, "failed", [expected] * 4]


def test_models_that_no_view_can_copy_take_turns() -> None:
    class Odd(torch.nn.Module, dict):  # type: ignore[type-arg]
        __hash__, __eq__ = object.__hash__, object.__eq__  # type: ignore[assignment]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model = tiny_model("qwen2", num_hidden_layers=2)
    odd = Odd()
    odd.inner = model.model.layers[1].mlp
    model.model.layers[1].mlp = odd
    expected = generated_by_transformers(model, PROMPTS[0], 12)
    decoders = [decoder(model, strategies=["prompt-lookup"]) for _ in range(3)]
    texts = in_threads([lambda d=d: [d.generate([PROMPTS[0]], 12).token_ids[0] for _ in range(5)] for d in decoders])
    assert texts == [[expected] * 5] * 3
    assert model.config._attn_implementation == "sdpa"


def test_a_default_dtype_is_restored_by_the_last_thread() -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    decoders = [decoder(model, strategies=["prompt-lookup"]) for _ in range(3)]
    expected = decoders[0].generate(PROMPTS, NEW, temperature=0.9, top_p=0.9, seed=1).token_ids
    torch.set_default_dtype(torch.float64)
    try:
        job = lambda d: [d.generate(PROMPTS, NEW, temperature=0.9, top_p=0.9, seed=1).token_ids for _ in range(4)]  # noqa: E731
        assert in_threads([lambda d=d: job(d) for d in decoders]) == [[expected] * 4] * 3
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
