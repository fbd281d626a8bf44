"""The ragged static KV cache: one buffer per layer, one length per row, and trimming that costs nothing.

A layer owns keys and values `[B, H_kv, L + 1, D]`. Before each pass the owner says, with `RaggedCache.aim`, into which
slot every token of the pass goes; slot index = position in the sequence, so a row is trimmed by moving its length back:
the next write overwrites, and the mask hides the rest until then. Slot `L` is the *trash slot*: padding tokens are
written there. It is never read, because reads stop at `kv_len <= L`.

A target's buffers of layers that are alike are parts of one tensor (`Shelf`), so that one kernel moves slots of all of
them: the accepted path of a tree took two kernels a buffer, a twentieth of a round of a 32-layer target on a GPU.

Keys and values may be kept in 8 bits (KV_DTYPES), rounded when they are written and widened when a layer reads them.
The buffers then hold bytes, so that copies and trimming stay as they are.

Invariants (tests/models/test_kv_cache.py):
- the buffers start at zero, so that a masked slot can never hold a NaN that poisons a row through `0 * NaN`;
- a pass over some rows changes no other row's slots;
- the bytes allocated are those of `kv_cache_bytes`, which the pair report prints before anything is loaded.

transformers' models see a normal `Cache`; they are not modified. Positions reach the model as `position_ids`, never
through the cache, and `get_seq_length()` is 0 by design: a model that derives positions from it is refused by the
self-test at load (models/loading.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specdec.device.transfer import array_on, moved
from specdec.errors import SpecdecError
from specdec.models.kinds import KEYLESS, attention_heads, layer_configs, layer_kinds
from specdec.models.recurrent_state import RowStates

# What keys and values can be kept in instead of the model's dtype, by the names of vLLM's --kv-cache-dtype.
KV_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SHORT = 16  # tokens: looking for a shared prefix of less costs more than it saves


@dataclass
class Aim:
    """Where the tokens of the next pass go.

    slots [B', S]: slot of every token
    rows: the rows of the batch that take part, B' of them
    kv_len: keys and values are returned up to this slot (exclusive)
    """

    slots: Tensor
    rows: slice
    kv_len: int

    def __post_init__(self) -> None:
        self.only = self.slots[0] if self.slots.shape[0] == 1 else None  # [S] of the one row

    def on(self, device: torch.device) -> Aim:
        """Return the same aim for layers on another device."""
        return self if self.slots.device == device else Aim(self.slots.to(device), self.rows, self.kv_len)


@dataclass
class Views:
    """Views of one layer's buffers for some rows and a K/V length, kept from pass to pass: making them in every layer
    took 5 % of a pass of a small model on a CPU."""

    keys: Tensor  # [B', H_kv, L + 1, D], for writing
    values: Tensor
    read: tuple[Tensor, Tensor]  # [B', H_kv, kv_len, D]
    rows: slice
    kv_len: int


class Form(NamedTuple):
    """What a layer keeps of a token. kind: "keys" or "values"; heads and width: [H_kv, D]; dtype: of the model."""

    kind: str
    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(kind: str, states: Tensor) -> Form:
        """Return the form of states or of a buffer, [B, H_kv, S, D]."""
        return Form(kind, states.shape[1], states.shape[3], states.dtype, states.device)


class Shelf:
    """Makes the buffers of a cache's layers, at zero.

    known: layers by what they keep, as an earlier cache of the model has shown. Those that are alike become parts of
        one tensor; each is a tensor over its part of the memory and no view, so that compiled code sees it alone.
    made: everything stored, by kind and layers: [n, B, H_kv, L + 1, D]
    layers: how many there are, which are numbered in the order in which they are made
    """

    def __init__(self, batch: int, capacity: int, kept_in: torch.dtype | None, known: Mapping[Form, tuple[int, ...]]):
        self.batch, self.slots, self.kept_in, self.known = batch, capacity + 1, kept_in, known
        self.made: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self.layers = 0

    def make(self, layer: int, form: Form) -> Tensor:
        """Return the buffer [B, H_kv, L + 1, D] of a layer, by its number."""
        shape = (self.batch, form.heads, self.slots, form.width)
        group = self.known.get(form, ())
        if layer not in group:
            group = (layer,)
        dtype = torch.uint8 if self.kept_in else form.dtype
        block = self.made.get((form.kind, group))
        if block is None:
            block = torch.zeros((len(group), *shape), dtype=dtype, device=form.device)
            self.made[form.kind, group] = block
        start = group.index(layer) * block.stride(0)
        own = torch.empty(0, dtype=dtype, device=form.device)
        return own.set_(block.untyped_storage(), start, shape, block.stride()[1:])


def alike(layers: Sequence[Any]) -> dict[Form, tuple[int, ...]]:
    """Group layers of a cache by what they keep; those whose parts of a tensor would lie askew are left out."""
    groups: dict[Form, tuple[int, ...]] = {}
    for number, layer in enumerate(layers):
        for form in layer.forms:
            # Kernels read 16 bytes at once where memory allows it, here in 8 bits too.
            if form.width % 16 == 0:
                groups[form] = (*groups.get(form, ()), number)
    return groups


class RaggedLayer(CacheLayerMixin):
    """One layer's buffers, allocated at the first update: only then are the widths known (MLA: K and V differ)."""

    is_compileable = True

    def __init__(self, shelf: Shelf):
        super().__init__()
        self.number, self.shelf = shelf.layers, shelf
        shelf.layers += 1
        self.batch, self.capacity, self.kept_in = shelf.batch, shelf.slots - 1, shelf.kept_in
        self.forms: tuple[Form, ...] = ()  # of keys and of values
        self.aim: Aim | None = None
        self.views: Views | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedLayer:
        """Make another layer of the same cache, as models that run their layers several times do."""
        other = RaggedLayer(self.shelf)
        other.aim = self.aim
        if self.is_initialized:
            other.allocate(self.forms)
            other.keys.copy_(self.keys)
            other.values.copy_(self.values)
        return other

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.allocate((Form.of("keys", key_states), Form.of("values", value_states)))

    def allocate(self, forms: tuple[Form, ...]) -> None:
        """Allocate the buffers. forms: of keys and of values"""
        self.keys, self.values = (self.shelf.make(self.number, form) for form in forms)
        self.forms, self.dtype, self.device = forms, forms[0].dtype, forms[0].device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write `[B', H_kv, S, D]` at the aimed slots; return the rows' buffers up to `kv_len` (views, no copy, unless
        they are kept in 8 bits)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.kept_in is None:
            return self._update(key_states, value_states)
        keys, values = self._update(_rounded(key_states, self.kept_in), _rounded(value_states, self.kept_in))
        return keys.view(self.kept_in).to(key_states.dtype), values.view(self.kept_in).to(value_states.dtype)

    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        assert self.aim is not None
        aim = self.aim.on(self.device)
        if key_states.shape[2] != aim.slots.shape[1]:
            kept, fed = key_states.shape[2], aim.slots.shape[1]
            raise SpecdecError(f"the model keeps {kept} keys and values in a pass of {fed} tokens")
        if torch.compiler.is_compiling():
            return self._traced(key_states, value_states, aim)
        views = self.views
        if views is None or views.kv_len != aim.kv_len or views.rows != aim.rows:
            views = self._look(aim)
        _write(views.keys, key_states, aim)
        _write(views.values, value_states, aim)
        return views.read

    def _look(self, aim: Aim) -> Views:
        assert self.keys is not None and self.values is not None
        keys, values = self.keys[aim.rows], self.values[aim.rows]
        read = (keys[:, :, : aim.kv_len], values[:, :, : aim.kv_len])
        if aim.only is not None:
            keys, values = keys[0], values[0]
        self.views = Views(keys, values, read, aim.rows, aim.kv_len)
        return self.views

    def _traced(self, key_states: Tensor, value_states: Tensor, aim: Aim) -> tuple[Tensor, Tensor]:
        """Do `update` of all rows in the form that the compiler turns into a write in place.

        Through a view it would copy the whole buffer, and it would take kept views for other tensors than the buffer.
        """
        assert self.keys is not None and self.values is not None
        rows = torch.arange(self.batch, device=self.device)[:, None]
        self.keys[rows, :, aim.slots] = key_states.transpose(1, 2)
        self.values[rows, :, aim.slots] = value_states.transpose(1, 2)
        return self.keys[:, :, : aim.kv_len], self.values[:, :, : aim.kv_len]

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        return self.capacity + 1, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length  # the name before transformers 5.24


def _rounded(states: Tensor, kept_in: torch.dtype) -> Tensor:
    """Round to 8 bits, as bytes; what is too large becomes the largest number, as in serving engines."""
    most = torch.finfo(kept_in).max
    return states.clamp(-most, most).to(kept_in).view(torch.uint8)


def _write(buffer: Tensor, states: Tensor, aim: Aim) -> None:
    """Set buffer[b, :, slots[b, s]] = states[b, :, s]; states [B', H, S, D].

    buffer [B', H, L + 1, D], or [H, L + 1, D] for one row, where an indexed copy is the cheapest write
    """
    if aim.only is not None:
        buffer.index_copy_(1, aim.only, states[0])
        return
    index = aim.slots[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    buffer.scatter_(2, index, states)


class RaggedCache(Cache):
    """`batch` rows of up to `capacity` tokens for a model with `n_layers` attention layers.

    It stores keys and values; its owner counts the rows' lengths (decoding/engine.py, drafters/draft_model/core.py).
    recurrent: it also has states of recurrent layers (models/recurrent_state.py)
    kept_in: a dtype of KV_DTYPES; None = the model's
    known: layers by what they keep (`alike` of another cache); those that are alike share tensors
    """

    def __init__(
        self,
        n_layers: int,
        batch: int,
        capacity: int,
        recurrent: bool = False,
        kept_in: torch.dtype | None = None,
        known: Mapping[Form, tuple[int, ...]] | None = None,
    ):
        self.shelf = Shelf(batch, capacity, kept_in, known or {})
        super().__init__(layers=[RaggedLayer(self.shelf) for _ in range(n_layers)])
        self.batch = batch
        self.kept_in = kept_in
        self.capacity = capacity
        self.states = RowStates(batch) if recurrent else None
        self.aimed: Aim | None = None
        # Rows that are rotated with long factors (models/rope.py): on the host and, once a pass asks, on the device.
        self.is_long = [False] * batch
        self.long: Tensor | None = None
        # Recorded passes know the buffers' addresses, so they live and die with them (device/graphs.py).
        self.graphs: dict[Any, Any] | None = None
        self.recorded_from: tuple[Any, ...] = ()
        self.pool: CachePool | None = None  # where it was leased

    def aim(self, slots: Tensor, rows: slice, kv_len: int) -> None:
        """Set where the next pass writes (`slots` [B', S]) and how far it reads."""
        self.aimed = Aim(slots, rows, kv_len)
        for layer in self.layers:
            layer.aim = self.aimed

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Do what `Cache.update` does."""
        return self._layer(layer_idx).update(key_states, value_states)

    def _layer(self, index: int) -> RaggedLayer:
        """Return a layer by its number. A model that runs its layers several times has more of them here."""
        while index >= len(self.layers):
            self.layers.append(RaggedLayer(self.shelf))
            self.layers[-1].aim = self.aimed
        layer: RaggedLayer = self.layers[index]
        return layer

    def set_long(self, row: int, long: bool) -> None:
        """Set the factors that a row is rotated with from now on. What it holds with the other kind is useless."""
        self.is_long[row] = long
        if self.long is not None:
            self.long[row] = long

    def long_rows(self, rows: slice, device: torch.device) -> Tensor:
        """Return `is_long` of some rows on the device: always the same memory, so that recorded passes can read it."""
        if self.long is None:
            self.long = array_on(np.array(self.is_long), device)
        return self.long[rows]

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far: 0 before the first pass."""
        return sum(buffers.nbytes for buffers in self.shelf.made.values())

    def begin_draft(self, rows: Sequence[int]) -> None:
        """Prepare rows for tokens that may be rejected: recurrent states are saved. Keys and values need nothing."""
        if self.states is not None:
            self.states.begin_draft(rows)

    def rewind(self, lengths: Mapping[int, int]) -> None:
        """Trim each row to the tokens that it keeps; lengths: row -> slots.

        Trimming keys and values costs nothing: masks hide them until later tokens overwrite them. Recurrent states go
        back when the row's next pass begins.
        """
        if self.states is not None:
            self.states.rewind(lengths)

    def pretend(self, lengths: Mapping[int, int]) -> None:
        """Take rows for texts of these lengths, whatever they hold, for passes that are only timed; row -> slots."""
        if self.states is not None:
            self.states.pretend(lengths)

    def compact(self, source: Tensor, target: Tensor) -> None:
        """Copy slots of every row, int64 [B, n] each: every source is read before any target is written.

        Targets differ within a row, but for the trash slot.
        """
        index = torch.stack([torch.arange(self.batch, device=source.device)[:, None].expand_as(source), source, target])
        for buffers in self.shelf.made.values():
            row, source, target = index = moved(index, buffers.device)
            buffers[:, row, :, target] = buffers[:, row, :, source]

    def wipe(self, row: int, start: int) -> None:
        """Zero a row from slot `start` on before another text: a NaN left there would poison it through the mask."""
        for buffers in self.shelf.made.values():
            buffers[:, row, :, start:] = 0

    def wipe_rows(self, starts: Mapping[int, int]) -> None:
        """Wipe several rows, row -> first slot, with one kernel for all layers that are alike."""
        if len(starts) == 1:
            self.wipe(*next(iter(starts.items())))
            return
        first = np.full((self.batch, 1), self.capacity + 1)
        first[list(starts), 0] = list(starts.values())
        hidden = torch.from_numpy(np.arange(self.capacity + 1) >= first)[:, None, :, None]
        for buffers in self.shelf.made.values():
            hidden = moved(hidden, buffers.device)
            buffers.masked_fill_(hidden, 0)

    def copy_row_from(self, other: RaggedCache, source: int, target: int, length: int) -> None:
        """Copy `length` slots of another cache's row `source` into this cache's row `target`."""
        self.copy_rows_from(other, [(source, target, length)])

    def copy_rows_from(self, other: RaggedCache, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy rows, (source, target, length) each; every source is read before any target is written.

        Beyond its length a target then holds anything.
        """
        alone, pairs = len(copies) == 1, [copy[:2] for copy in copies]
        index: Any = pairs[0] if alone else torch.tensor(pairs).reshape(-1, 2).T
        length = max((n for *_, n in copies), default=0)
        for mine, theirs in self._beside(other) if copies else ():
            source, target = index = index if alone else moved(index, theirs.device)
            mine[:, target, :, :length] = theirs[:, source, :, :length]

    def _beside(self, other: RaggedCache) -> list[tuple[Tensor, Tensor]]:
        """Return this cache's buffers and those of the same layers of another one, [n, B, H_kv, L + 1, D] each."""
        layers = [(self._layer(i), theirs) for i, theirs in enumerate(other.layers) if theirs.is_initialized]
        for mine, theirs in layers:
            if not mine.is_initialized:
                mine.allocate(theirs.forms)
        made = self.shelf.made
        if made.keys() == other.shelf.made.keys():
            return [(made[key], buffers) for key, buffers in other.shelf.made.items()]
        pairs = [pair for mine, theirs in layers for pair in ((mine.keys, theirs.keys), (mine.values, theirs.values))]
        return [(mine[None], theirs[None]) for mine, theirs in pairs]


@dataclass
class KeptRows:
    """Rows of keys and values, of this call or an earlier one, whose prefixes other rows can copy.

    cache: holds them
    texts: the ids of each row that are in the cache, [n]; empty: the row is of no use
    step: prefixes are cut to a multiple of this many tokens
    A row is of use to rows with the rotation that it had when this was made (`RaggedCache.is_long`).
    """

    cache: RaggedCache
    texts: list[np.ndarray]
    step: int = 1

    def __post_init__(self) -> None:
        self.is_long = list(self.cache.is_long)

    def longest(self, ids: np.ndarray, is_long: bool = False) -> tuple[int, int]:
        """Return (row, n): the row that shares the longest prefix with `ids`, and its tokens; n = 0: none does.

        A recurrent state has read a whole text, so it is of no use to a text with the same beginning.
        """
        if self.cache.states is not None:
            return 0, 0
        alike = zip(self.texts, self.is_long, strict=False)
        row, n = longest_prefix(ids, [text if long == is_long else text[:0] for text, long in alike])
        return row, n // self.step * self.step

    def copy_into(self, cache: RaggedCache, slot: int, ids: np.ndarray, known: int = 0) -> int:
        """Copy the longest prefix of `ids` into a slot of `cache`; returns how many tokens of it the slot has then.

        known: tokens of it that the slot has already; nothing is copied if that would give no more
        """
        row, n = self.longest(ids[: cache.capacity], cache.is_long[slot])
        if n <= known:
            return known
        cache.copy_row_from(self.cache, row, slot, n)
        return n


def prefix_groups(texts: Mapping[int, np.ndarray], least: int = SHORT, step: int = 1) -> list[list[int]]:
    """Group rows so that each shared prefix is computed once, by the first of the groups.

    Within a group no two rows share `least` tokens more than each shares with an earlier group.
    step: shared prefixes are cut to a multiple of this many tokens
    """
    groups: list[list[int]] = []
    for row, text in texts.items():
        known = 0
        for group in groups:
            shared = longest_prefix(text, [texts[other] for other in group])[1] // step * step
            if shared - known < least:
                group.append(row)
                break
            known = max(known, shared)
        else:
            groups.append([row])
    return groups


def longest_prefix(ids: np.ndarray, texts: Sequence[np.ndarray]) -> tuple[int, int]:
    """Return (i, n): the first of the texts that share most leading ids with `ids`, and how many; n = 0: none does."""
    best = n = 0
    for i, text in enumerate(texts):
        if n < len(text) and n < len(ids) and text[n] == ids[n]:  # most texts of many share no more than one before
            shared = common_prefix(text, ids)
            if shared > n:
                best, n = i, shared
    return best, n


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Count the leading ids that two rows share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def rounded_up(tokens: int, step: int, parts: int = 0) -> int:
    """Round `tokens` up to a multiple of `step`; if parts > 0, the step grows to `parts` steps per doubling."""
    if parts:
        step = max(step, (1 << (max(1, tokens).bit_length() - 1)) // parts)
    return -(-tokens // step) * step


ROOMY = 2048


def compiled_slots(tokens: int) -> int:
    """Round up to a number of slots for which passes are compiled: powers of two from 512 to 4096, then quarters of a
    doubling.

    Each takes a compilation, and reading more slots than a text fills costs little: a compiled pass of 8 tokens of an
    8B model took 6.81 ms over 512 slots and 6.89 over 4096 (docs/speed.md).
    """
    return rounded_up(tokens, 1, 4) if tokens > 4096 else max(512, 1 << (tokens - 1).bit_length())


class CachePool:
    """Keeps one idle cache, so that the next call does not allocate again.

    With `step` > 1 capacities are rounded up to its multiples (or to sixteenths of a doubling, if these are larger),
    and an idle cache also serves calls that need less, with what was recorded for it. coarse: to the sizes of compiled
    passes, and ROOMY slots of all rows together at least, since code is compiled anew for another cache.

    A call *leases* a cache and gives it back when it ends. Two generators that are open at the same time never share
    one: the second finds the pool empty and allocates its own.

    known: layers by what they keep; set by the self-test if caches should share tensors
    """

    def __init__(
        self,
        n_layers: int,
        step: int = 1,
        coarse: bool = False,
        recurrent: bool = False,
        kept_in: torch.dtype | None = None,
    ):
        self.n_layers = n_layers
        self.step = step
        self.coarse = coarse
        self.recurrent = recurrent
        self.kept_in = kept_in
        self.known: dict[Form, tuple[int, ...]] = {}
        self.idle: RaggedCache | None = None

    def room(self, capacity: int) -> int:
        """Return the capacity that a cache for `capacity` tokens per row gets."""
        if self.coarse:
            return compiled_slots(capacity)
        return capacity if self.step == 1 else rounded_up(capacity, self.step, 16)

    def lease(self, batch: int, capacity: int) -> RaggedCache:
        """Lease a cache of `room(capacity)` tokens per row, or a larger one."""
        capacity = max(self.room(capacity), ROOMY // batch if self.coarse else 0)
        cache, self.idle = self.idle, None
        enough = False
        if cache is not None and cache.batch == batch:
            enough = cache.capacity >= capacity if self.step > 1 else cache.capacity == capacity
        if cache is None or not enough:
            cache = self.make(batch, capacity)
        cache.pool = self
        return cache

    def make(self, batch: int, capacity: int) -> RaggedCache:
        """Make a cache that is nobody's but the caller's."""
        return RaggedCache(self.n_layers, batch, capacity, self.recurrent, self.kept_in, self.known)

    def give_back(self, cache: RaggedCache) -> None:
        """Take a cache back, once, unless it is another pool's: the model's layers or dtype may have changed since."""
        if cache.pool is self:
            self.idle, cache.pool = cache, None


def kv_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of KV_DTYPES by its name; None and "auto" = the model's. Raises SpecdecError."""
    if name in (None, "auto"):
        return None
    if not isinstance(name, str) or name not in KV_DTYPES:
        raise SpecdecError(f"kv_cache_dtype must be auto, {', '.join(KV_DTYPES)} or None, got {name!r}")
    return KV_DTYPES[name]


def kv_widths(config: Any) -> list[tuple[int, int]]:
    """Return (key numbers, value numbers) that each layer keeps per token, from a transformers text config.

    Multi-head latent attention stores every head with its own key and value widths; other models store `H_kv` heads
    of `head_dim`. Layers that read another layer's keys and values keep none, and neither do recurrent ones.
    """
    layers = layer_configs(config)
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(layers)
    kinds = layer_kinds(config) or [""] * len(layers)
    return [
        (0, 0) if mode == "reuse" or kind in KEYLESS else _layer_widths(layer)
        for mode, kind, layer in zip(modes, kinds, layers, strict=True)
    ]


def _layer_widths(layer: Any) -> tuple[int, int]:
    heads, kv_heads = attention_heads(layer)
    if getattr(layer, "kv_lora_rank", None):
        return heads * (layer.qk_nope_head_dim + layer.qk_rope_head_dim), heads * layer.v_head_dim
    width = kv_heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads)
    return width, width


def kv_cache_bytes(config: Any, dtype: torch.dtype, batch: int, capacity: int) -> int:
    """Count the bytes of a `RaggedCache` for `batch` rows of `capacity` tokens, the trash slot included."""
    numbers = sum(keys + values for keys, values in kv_widths(config))
    return batch * (capacity + 1) * numbers * dtype.itemsize
