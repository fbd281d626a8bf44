"""Ragged passes against plain forwards, fixed shapes, and the counted host read."""

from __future__ import annotations

import pytest
import torch

from specdec.device.host_read import HostReader
from specdec.models.kv_cache import RaggedCache
from specdec.models.runner import CPU_WIDTHS, CUDA_WIDTHS, EXACT_WIDTH, Runner, Shapes
from tests.helpers.tiny import TINY_KINDS, tiny_model

SHAPES = Shapes((1, 4, 8), 8, 4)


def plain(model, ids: list[int]) -> torch.Tensor:  # type: ignore[no-untyped-def]
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("kind", TINY_KINDS)
@pytest.mark.parametrize("implementation", [None, "sdpa", "eager"])
def test_a_ragged_pass_equals_a_plain_forward_of_each_row(kind: str, implementation: str | None) -> None:
    model = tiny_model(kind)
    if implementation == "sdpa" and (kind == "gemma2" or not model._supports_sdpa):
        pytest.skip(f"{kind} has no SDPA path that keeps its soft cap")
    runner = Runner(model, implementation)
    texts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], [2, 7, 1, 8, 2], [9]]
    cache = RaggedCache(runner.config.num_hidden_layers, 3, 16)
    fed = [4, 2, 1]
    starts = [len(t) - n for t, n in zip(texts, fed, strict=True)]
    for row, ids in enumerate(texts):
        runner.prefill(cache, SHAPES, {row: ids[: starts[row]]}, {row: 0})
    # A wrong draft first: its slots must be overwritten and hidden.
    runner.step(cache, SHAPES, torch.full((3, 4), 11), starts, fed)
    tokens = torch.tensor([t[s:] + [0] * (4 - n) for t, s, n in zip(texts, starts, fed, strict=True)])
    logits = runner.step(cache, SHAPES, tokens, starts, fed).logits
    for row, ids in enumerate(texts):
        expected = plain(model, ids)[starts[row] :]
        torch.testing.assert_close(logits[row, : fed[row]], expected, atol=2e-5, rtol=2e-5)


def test_prefill_in_chunks_equals_prefill_at_once() -> None:
    model = tiny_model("llama")
    runner = Runner(model)
    ids = list(range(1, 22))
    caches = []
    for widths in ((1, 4, 8), (1, 32)):
        cache = RaggedCache(runner.config.num_hidden_layers, 2, 32)
        runner.prefill(cache, Shapes(widths, 4, 4), {1: ids}, {1: 0})
        assert not cache.layers[0].keys[0, :, :32].any()  # the other row is untouched
        caches.append(cache.layers[-1].keys[1, :, : len(ids)])
    torch.testing.assert_close(caches[0], caches[1], atol=1e-5, rtol=1e-5)


def test_a_row_that_takes_no_part_keeps_its_cache() -> None:
    runner = Runner(tiny_model("llama"))
    cache = RaggedCache(runner.config.num_hidden_layers, 2, 16)
    runner.prefill(cache, SHAPES, {1: [1, 2, 3]}, {1: 0})
    before = [layer.keys[1, :, :16].clone() for layer in cache.layers]
    runner.step(cache, SHAPES, torch.tensor([[5], [7]]), [0, 0], [1, 0])
    assert all(torch.equal(layer.keys[1, :, :16], b) for layer, b in zip(cache.layers, before, strict=True))


def test_widths_and_lengths_come_from_short_lists() -> None:
    cpu = Shapes.choose(torch.device("cpu"), False, 1000)
    assert [cpu.width(n) for n in (1, 6, 17, 18, 300)] == [1, 6, 17, 24, 512]
    assert {cpu.kv_len(n, 1000) for n in range(1, 1001)} == {*range(32, 1000, 32), 1000}
    gpu = Shapes.choose(torch.device("cuda"), False, 4096)
    assert gpu.widths == CUDA_WIDTHS
    assert gpu.width(6) == 8
    assert max(CPU_WIDTHS) == max(CUDA_WIDTHS)


def test_exact_mode_has_one_width_and_one_length() -> None:
    shapes = Shapes.choose(torch.device("cuda"), True, 700)
    assert shapes.verify_width == EXACT_WIDTH
    assert {shapes.width(n) for n in range(1, EXACT_WIDTH + 1)} == {EXACT_WIDTH}
    assert {shapes.kv_len(n, 700) for n in (1, 300, 700)} == {700}


def test_the_reader_counts_transfers_and_keeps_values_exact() -> None:
    reader = HostReader()
    ids, logprobs = torch.tensor([[2**40 + 1, -3]]), torch.tensor([0.1, float("-inf")])
    a, b, c = reader.read(ids, logprobs, torch.tensor([True, False]))
    assert a == [[2**40 + 1, -3]]
    assert b == [torch.tensor(0.1).item(), float("-inf")]
    assert c == [1, 0]
    assert reader.count == 1
