"""The ragged cache: what is written where, what stays untouched, and how much it weighs."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from specdec.models.kv_cache import CachePool, KeptRows, RaggedCache, alike, common_prefix, kv_cache_bytes, kv_widths
from specdec.models.trees import Paths

HEADS, WIDTH, CAPACITY = 2, 4, 6


def states(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, HEADS, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def write(cache: RaggedCache, slots: list[list[int]], rows: slice, kv_len: int, seed: int = 0) -> tuple:
    k, v = states(len(slots), len(slots[0]), seed), states(len(slots), len(slots[0]), seed + 100)
    cache.aim(torch.tensor(slots), rows, kv_len)
    return k, v, *cache.update(k, v, 0)


def test_every_token_lands_in_its_slot_and_padding_in_the_trash() -> None:
    cache = RaggedCache(1, 2, CAPACITY)
    k, v, keys, values = write(cache, [[0, 1, 2], [0, CAPACITY, CAPACITY]], slice(0, 2), CAPACITY)
    assert torch.equal(keys[0, :, :3], k[0])
    assert torch.equal(values[1, :, 0], v[1, :, 0])
    assert not keys[1, :, 1:].any()  # padding is never read
    assert keys.shape == (2, HEADS, CAPACITY, WIDTH)


def test_a_pass_over_one_row_leaves_the_others_as_they_were() -> None:
    cache = RaggedCache(1, 3, CAPACITY)
    write(cache, [[0, 1]] * 3, slice(0, 3), CAPACITY)
    before = cache.layers[0].keys.clone()
    k, _, keys, _ = write(cache, [[2, 3]], slice(1, 2), 4, seed=5)
    after = cache.layers[0].keys
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert torch.equal(after[1, :, :2], before[1, :, :2])
    assert torch.equal(keys[0, :, 2:], k[0])
    assert keys.shape == (1, HEADS, 4, WIDTH)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_trimmed_row_is_overwritten_by_the_next_write(batch: int) -> None:
    cache = RaggedCache(1, batch, CAPACITY)
    write(cache, [[0, 1, 2, 3]] * batch, slice(0, batch), CAPACITY)
    k, _, keys, _ = write(cache, [[1, 2]] * batch, slice(0, batch), 3, seed=9)  # trimmed to length 1
    assert torch.equal(keys[:, :, 1:3], k)


def test_views_follow_the_rows_and_the_length_of_each_pass() -> None:
    cache = RaggedCache(1, 2, CAPACITY)
    for rows, kv_len in ((slice(0, 2), 3), (slice(1, 2), 3), (slice(0, 1), 3), (slice(0, 2), 5), (slice(0, 2), 3)):
        n = rows.stop - rows.start
        k, v, keys, values = write(cache, [[2]] * n, rows, kv_len, seed=rows.start + kv_len)
        assert keys.shape == values.shape == (n, HEADS, kv_len, WIDTH)
        assert torch.equal(keys[:, :, 2], k[:, :, 0])
        assert torch.equal(values[:, :, 2], v[:, :, 0])


def test_the_buffers_start_at_zero_and_a_wiped_row_is_zero_again() -> None:
    cache = RaggedCache(1, 2, CAPACITY)
    k = torch.full((2, HEADS, 2, WIDTH), float("nan"))
    cache.aim(torch.tensor([[0, 1], [0, 1]]), slice(0, 2), CAPACITY)
    cache.update(k, k, 0)
    assert not cache.layers[0].keys[:, :, 2:].any()
    cache.wipe(0, 1)
    assert cache.layers[0].values[0, :, 1:].isfinite().all()
    assert cache.layers[0].values[1, :, :2].isnan().all()


def test_compaction_moves_the_accepted_path_to_the_front() -> None:
    cache = RaggedCache(1, 2, CAPACITY)
    k, v, _, _ = write(cache, [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]], slice(0, 2), CAPACITY)
    paths = Paths(torch.tensor([0, 0]), torch.tensor([[1, 2, 3], [0, 3, 1]]), torch.tensor([3, 2]))
    cache.compact(*paths.moves(CAPACITY))  # slots that are read and overwritten at once
    assert torch.equal(cache.layers[0].keys[0, :, :5], k[0][:, [0, 2, 3, 4, 4]])
    assert torch.equal(cache.layers[0].values[0, :, :5], v[0][:, [0, 2, 3, 4, 4]])
    assert torch.equal(cache.layers[0].keys[1, :, :5], k[1][:, [0, 1, 4, 3, 4]])


def test_the_allocated_bytes_are_the_predicted_ones() -> None:
    config = LlamaConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=HEADS, num_hidden_layers=3)
    assert kv_widths(config) == [(HEADS * WIDTH, HEADS * WIDTH)] * 3
    cache = RaggedCache(3, 2, CAPACITY)
    assert cache.nbytes == 0
    for layer in range(3):
        cache.aim(torch.tensor([[0], [0]]), slice(0, 2), 1)
        cache.update(states(2, 1), states(2, 1), layer)
    assert cache.nbytes == kv_cache_bytes(config, torch.float32, 2, CAPACITY)


def test_latent_attention_is_counted_with_its_own_widths() -> None:
    config = LlamaConfig(hidden_size=16, num_attention_heads=4, num_hidden_layers=2)
    config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim = 8, 6, 2, 5
    assert kv_widths(config) == [(4 * 8, 4 * 5)] * 2


def test_kept_rows_restore_the_longest_shared_prefix() -> None:
    old = RaggedCache(1, 2, CAPACITY)
    k, _, _, _ = write(old, [[0, 1, 2], [0, 1, 2]], slice(0, 2), CAPACITY)
    kept = KeptRows(old, [np.array([5, 6, 7]), np.array([5, 6, 8])])
    new = RaggedCache(1, 1, CAPACITY + 4)
    assert kept.copy_into(new, 0, np.array([5, 6, 8, 9, 9])) == 3
    assert torch.equal(new.layers[0].keys[0, :, :3], k[1])
    assert kept.copy_into(new, 0, np.array([1, 2])) == 0
    assert KeptRows(old, []).copy_into(new, 0, np.array([5])) == 0


def test_rows_that_are_copied_and_wiped_at_once_hold_what_they_hold_one_by_one() -> None:
    caches = [RaggedCache(1, 4, CAPACITY) for _ in range(2)]
    for cache in caches:
        torch.manual_seed(0)
        write(cache, [[0, 1, 2]] * 4, slice(0, 4), CAPACITY)
    copies, starts = [(1, 0, 2), (0, 2, 3)], {0: 2, 2: 3, 3: 1}  # the second reads what the first overwrites
    caches[0].copy_rows_from(caches[0], copies)
    caches[0].wipe_rows(starts)
    for copy in reversed(copies):
        caches[1].copy_row_from(caches[1], *copy)
    for row, start in starts.items():
        caches[1].wipe(row, start)
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


def test_common_prefix_counts_leading_ids() -> None:
    assert common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5])) == 2
    assert common_prefix(np.array([1, 2]), np.array([1, 2, 4])) == 2
    assert common_prefix(np.array([], dtype=int), np.array([1])) == 0


def test_two_open_leases_never_share_a_cache() -> None:
    pool = CachePool(1)
    first, second = pool.lease(1, CAPACITY), pool.lease(1, CAPACITY)
    assert first is not second
    pool.give_back(first)
    assert pool.lease(1, CAPACITY) is first
    pool.give_back(second)
    assert pool.lease(2, CAPACITY) is not second  # another shape is another cache


def test_layers_without_keys_of_their_own_are_left_out() -> None:
    """Gemma 3n's last layers read those of a layer before; they never store anything here."""
    cache, other = RaggedCache(3, 2, CAPACITY), RaggedCache(3, 2, CAPACITY)
    cache.aim(torch.tensor([[0, 1, 2], [0, 1, 2]]), slice(0, 2), 3)
    for layer in (1, 4):  # the cache of a model that runs layers several times grows
        cache.update(states(2, 3), states(2, 3), layer)
    cache.compact(torch.tensor([[2], [0]]), torch.tensor([[1], [0]]))
    assert torch.equal(cache.layers[4].keys[0, :, 1], cache.layers[4].keys[0, :, 2])
    other.copy_row_from(cache, 0, 1, 3)
    for layer in (1, 4):
        assert torch.equal(other.layers[layer].keys[1, :, :3], cache.layers[layer].keys[0, :, :3])
    assert [layer.is_initialized for layer in other.layers] == [False, True, False, False, True]
    cache.wipe(0, 0)
    assert cache.layers[1].keys[0].any() == 0


@pytest.mark.parametrize("kept_in", [None, torch.float8_e4m3fn])
def test_layers_that_are_alike_share_tensors_and_hold_what_layers_alone_hold(kept_in: torch.dtype | None) -> None:
    widths = [16, 16, 32, 16, 8, 8]  # two of eight numbers: their parts of a tensor would lie askew
    pool = CachePool(len(widths), kept_in=kept_in)

    def filled(cache: RaggedCache) -> RaggedCache:
        generator = torch.Generator().manual_seed(1)
        cache.aim(torch.tensor([[0, 1, 2], [3, 4, CAPACITY]]), slice(0, 2), 5)
        for layer, width in enumerate(widths):
            given = [torch.randn(2, 2, 3, width, generator=generator) for _ in range(2)]
            assert all(t.shape == (2, 2, 5, width) for t in cache.update(*given, layer))
        cache.compact(torch.tensor([[2, 1], [4, 3]]), torch.tensor([[1, 2], [0, CAPACITY]]))
        cache.wipe(0, 2)
        cache.copy_row_from(cache, 1, 0, 1)
        cache.wipe_rows({0: 4, 1: 5})
        return cache

    alone = filled(pool.make(2, CAPACITY))
    pool.known = alike(alone.layers)
    together, other = filled(pool.make(2, CAPACITY)), pool.make(3, CAPACITY + 2)
    assert len(alone.shelf.made) == 12
    assert [len(layers) for _, layers in together.shelf.made] == [3, 3, 1, 1, 1, 1, 1, 1]
    assert together.nbytes == alone.nbytes == sum(t.nbytes for t in together.shelf.made.values())
    other.copy_rows_from(together, [(0, 2, 5), (1, 0, 3)])
    third = pool.make(3, CAPACITY + 2)
    third.copy_rows_from(alone, [(0, 2, 5), (1, 0, 3)])  # of another structure
    for a, b, c, d in zip(alone.layers, together.layers, other.layers, third.layers, strict=True):
        for kind in ("keys", "values"):
            assert torch.equal(getattr(a, kind), getattr(b, kind))
            assert torch.equal(getattr(b, kind)[0, :, :5], getattr(c, kind)[2, :, :5])
            assert torch.equal(getattr(c, kind), getattr(d, kind))


def test_a_copy_of_a_layer_is_another_layer_of_the_cache() -> None:
    """Dory appends copies of the layers that it runs several times."""
    cache = RaggedCache(2, 1, CAPACITY)
    cache.aim(torch.tensor([[0, 1, 2]]), slice(0, 1), 3)
    cache.update(states(1, 3), states(1, 3), 1)
    cache.layers += deepcopy(cache.layers)
    assert [layer.is_initialized for layer in cache.layers] == [False, True, False, True]
    before = cache.layers[1].keys.clone()
    assert torch.equal(cache.layers[3].keys, before)
    cache.update(states(1, 3), states(1, 3), 2)
    cache.layers[3].keys[0, :, 0] += 1
    assert torch.equal(cache.layers[1].keys, before)
    cache.compact(torch.tensor([[2]]), torch.tensor([[1]]))
    for layer in (1, 2, 3):
        assert torch.equal(cache.layers[layer].keys[0, :, 1], cache.layers[layer].keys[0, :, 2])
    assert cache.nbytes == sum(t.nbytes for t in cache.shelf.made.values())
