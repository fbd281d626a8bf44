"""Runs a model over a ragged cache: prompt prefill, and passes of a few fixed widths.

A pass feeds up to S tokens to each row of the batch. Widths S come from a short list, and so do the K/V lengths that
attention reads, so that a CUDA graph or compiled variant (device/graphs.py) is made once per shape and not once per
call. Shorter rows are padded: padding goes to the cache's trash slot and its logits are ignored.

Passes over a leased cache are replayed from graphs if the mode says so; prefill, which feeds rows in wide chunks, only
when a chunk of the same shape comes to the same rows again. A pass computes from tensors alone, so a graph only needs
its input buffers refilled.

In exact mode there is one width and one K/V length for the whole call; a token's logits are then computed by the same
kernels in the same order, whatever else is in the pass (docs/exactness.md).
"""

from __future__ import annotations

import inspect
import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from specdec.device.ambient import pinned
from specdec.device.graphs import Choice, CudaRecorder, Graphs, I, R, Recorder, choose_mode
from specdec.device.host_read import HostReader
from specdec.device.memory import is_out_of_memory
from specdec.device.transfer import to_device
from specdec.errors import SpecdecError
from specdec.files.fields import WIDEST
from specdec.files.texts import first_line
from specdec.models.adapters import Chosen, base_of
from specdec.models.alibi import Alibi
from specdec.models.attention import Mask, MaskBuilder, check_attention, fastest
from specdec.models.compile_layers import CompiledFunction, CompiledLayers, Forward, compiled_before, compiled_forward
from specdec.models.cpu_products import use_onednn
from specdec.models.fuse_projections import Fusion
from specdec.models.kinds import layer_configs
from specdec.models.kv_cache import CachePool, RaggedCache, compiled_slots, kv_dtype, rounded_up
from specdec.models.layer_subset import PassThrough, layers_of, leave_out
from specdec.models.local_attention import LocalAttention
from specdec.models.passes import ALL_LAYERS, PassInputs, PassKey, PassResult
from specdec.models.quantised import rows_of, weight_of
from specdec.models.recurrent_state import Recurrence
from specdec.models.rope import RowRope, switch_position
from specdec.models.state import recorded_from
from specdec.models.tensor_parallel import share_forwards
from specdec.models.trees import TreePass
from specdec.models.view import ModelView

F = TypeVar("F", bound=Callable[..., Any])
log = logging.getLogger("specdec")

# On a CPU every padded token costs as much arithmetic as another, so all narrow widths are there; on a GPU a pass of 8
# costs what a pass of 1 costs, and few shapes mean few graphs.
CPU_WIDTHS = (*range(1, 18), 24, 32, 48, 64, 128, 256, WIDEST)
CUDA_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, WIDEST)
CPU_VERIFY, CUDA_VERIFY = 17, 16  # most tokens per row in a verify pass, unless a drafter asks for more
EXACT_WIDTH = 8
EXACT_PREFILL = (64, 128, 192, 256, 384, WIDEST)
# From about a thousand tokens on a GPU's time is arithmetic: more tokens per pass would take memory and gain nothing.
TOGETHER = 2048
UNBOUNDED = 1 << 30  # the context of a model that states none
KV_STEP = 256  # caches of about the same size are one size, so that the next call finds its graphs


@dataclass(frozen=True)
class Shapes:
    """The fixed shapes of one call; all in tokens.

    widths: allowed widths of a pass, per row, ascending
    verify_width: most tokens that a verify pass feeds to a row; longer drafts go in chunks
    kv_step: K/V lengths are rounded up to its multiples
    kv_parts: if > 0, that step grows with the length, to so many steps per doubling
    kv_fixed: one K/V length for the whole call, or None
    together: most tokens, padding included, that a pass of prefill feeds to several rows; 0: rows are fed alone
    """

    widths: tuple[int, ...]
    verify_width: int
    kv_step: int
    kv_parts: int = 0
    kv_fixed: int | None = None
    together: int = 0

    @staticmethod
    def choose(device: torch.device, exact: bool, capacity: int, columns: int = 0) -> Shapes:
        """Choose the shapes of a call.

        exact: all passes have one width
        capacity: slots of the cache per row
        columns: tokens per row that a verify pass should have room for, if more than usual: a tree is never chunked
        """
        together = 0 if device.type == "cpu" else TOGETHER
        if exact:
            return Shapes((EXACT_WIDTH, *EXACT_PREFILL), EXACT_WIDTH, 1, kv_fixed=capacity, together=together)
        widths, usual = (CPU_WIDTHS, CPU_VERIFY) if device.type == "cpu" else (CUDA_WIDTHS, CUDA_VERIFY)
        verify = max(usual, next((w for w in widths if w >= columns), widths[-1]))
        if device.type == "cpu":
            return Shapes(widths, verify, 32)
        return Shapes(widths, verify, 256, 4, together=together)

    @property
    def exact(self) -> bool:
        """True if all passes have one shape."""
        return self.kv_fixed is not None

    def width(self, tokens: int) -> int:
        """Return the narrowest allowed width for `tokens` tokens."""
        return self.widths[bisect_left(self.widths, tokens)]

    def kv_len(self, tokens: int, capacity: int) -> int:
        """Return the K/V length of a pass that reads `tokens` slots of `capacity`."""
        if self.kv_fixed is not None:
            return self.kv_fixed
        return min(capacity, rounded_up(tokens, self.kv_step, self.kv_parts))


@dataclass
class PassOutput:
    """What a pass returns, and what drafters that learn from the target see (`observe`).

    logits [B', S', V]: in the model's dtype
    tokens [B', S]: fed ids; row b is slot `first_row + b`
    starts, counts: row b's tokens are at positions `starts[b]`, `starts[b] + 1`, ..., `counts[b]` of them real
    hidden [B', S, H]: states of each observed layer; None: nothing observes
    layers: their indices, 0 = the embedding's output, i = after block i; or `ALL_LAYERS`
    tree: where the tokens really are if rows hold trees
    """

    logits: Tensor
    tokens: Tensor
    starts: Sequence[int]
    counts: Sequence[int]
    first_row: int = 0
    hidden: tuple[Tensor, ...] | None = None
    tree: TreePass | None = None
    layers: tuple[int, ...] = ()

    def states(self, layers: Sequence[int]) -> Tensor:
        """Concatenate the hidden states of these layers, [B', S, H * layers]."""
        assert self.hidden is not None, "nothing observes this pass"
        places = layers if self.layers == ALL_LAYERS else [self.layers.index(i) for i in layers]
        return torch.cat([self.hidden[i] for i in places], dim=-1)


@dataclass
class Runner:
    """A model, specdec's view of it and its mask builder. Holds no state of any call: caches are passed in.

    model: the caller's, which is left alone (models/view.py)
    compile: "off", "graph", "inductor", "max" or "auto" (device/graphs.py); `mode` is what it means for this model on
        this device, and `reason` why it is not what was asked for
    recorder: None = CUDA graphs, if the mode asks for any
    fuse: compute projections of one input as one product (models/fuse_projections.py); None = under "max"
    skip: layers that are left out (models/layer_subset.py)
    adapter: a function of what the last of these hands on
    kv_cache_dtype: what keys and values are kept in (models/kv_cache.py); None = the model's dtype
    """

    model: Any
    attn_implementation: str | None = None
    compile: str = "off"
    recorder: Recorder | None = None
    fuse: bool | None = None
    skip: tuple[int, ...] = ()
    adapter: Any = None
    kv_cache_dtype: str | None = None
    pool: CachePool = field(init=False)

    def __post_init__(self) -> None:
        self.own_attention = self.attn_implementation is None
        self.subsets: dict[Any, Runner] = {}
        self.reader = HostReader()  # counts what recurrent layers read; a decoder's own, if it belongs to one
        self.gaps: list[PassThrough] = []  # in the places of `skip`
        prepare = self._leave_out if self.skip else None
        self.view = ModelView(self.model, check_attention(self.attn_implementation), prepare)
        self.tree_fault: str | None = None  # why trees are refused, once the self-test has tried one
        self.excluded_ids: tuple[int, ...] = ()
        self._adopt()

    def _adopt(self) -> None:
        """Read everything anew from the model."""
        self.config: Any = self.model.config.get_text_config()
        self.facts = self.measure()
        self.device, self.dtype, self.embedded, self.vocab_size, self.context, n_layers = self.facts
        if self.view.private:
            share_forwards(self.view.model)
        self.masks = MaskBuilder(self.config, self.view.implementation, self.dtype)
        self.recurrence = Recurrence.of(self.view.model)
        if self.recurrence is not None:
            self.tree_fault = f"{self.config.model_type} has recurrent layers, which read one path only"
        self.alibi = Alibi.of(self.view.model)
        self.masks.slopes = self.alibi.slopes if self.alibi is not None else None
        self.local = LocalAttention.of(self.view.model)
        if self.local is not None:
            self.local.prepare(self.masks)
        self.mode, self.reason = self._choose_mode(n_layers)
        fuse = self.mode == "max" if self.fuse is None else self.fuse
        self.fusion = Fusion(self.view.model) if fuse else None
        if self.fusion is not None and self.view.private:
            self.fusion.install()
        on_cpu = self.device.type == "cpu"
        self.onednn = use_onednn(self.view.model) if on_cpu and self.view.private else 0
        switch = switch_position(self.config)
        self.rope = RowRope(self.view.model, switch) if switch is not None else None
        self._make_graphs()
        step = KV_STEP if self.device.type == "cuda" or self.graphs is not None else 1
        coarse, recurrent = self.compiled is not None, self.recurrence is not None
        self.pool = CachePool(n_layers, step, coarse, recurrent, kv_dtype(self.kv_cache_dtype))
        taking = (self.view.model, base_of(self.view.model))
        accepted = {name for model in taking for name in inspect.signature(model.forward).parameters}
        # transformers 5.24 renamed the argument; the old name still works there but warns.
        self.cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self.can_trim_logits = "logits_to_keep" in accepted
        self.exclude(self.excluded_ids)

    @property
    def read_in_a_pass(self) -> tuple[int, int]:
        """(weights, bytes) that a pass reads: all but an embedding of its own."""
        head, table = self.model.get_output_embeddings(), weight_of(self.model.get_input_embeddings())
        found = {id(p): p for m in self.view.seen.modules for p in m._parameters.values() if p is not None}
        if head is not None and weight_of(head) is not table:
            found.pop(id(table), None)
        return sum(p.numel() for p in found.values()), sum(p.numel() * p.element_size() for p in found.values())

    @property
    def layer_count(self) -> int:
        """Layers of the model, those that are left out included."""
        return self.facts[-1]

    def without_layers(self, skip: tuple[int, ...], adapter: Any = None) -> Runner:
        """Return a runner of the same model without some layers, for passes over this one's caches.

        It is made once; its passes are recorded if this one's are, and never compiled. Raises SpecdecError for a model
        with recurrent layers.
        """
        if self.recurrence is not None:
            raise SpecdecError(
                f"{self.config.model_type} has recurrent layers, so it cannot draft without some of its layers: their "
                "states would have to be kept twice; use another strategy"
            )
        made = self.subsets.get((skip, adapter))
        if made is None:
            attention = None if self.own_attention else self.attn_implementation
            mode = "off" if self.graphs is None else "graph"
            try:
                made = Runner(self.model, attention, mode, self.recorder, skip=skip, adapter=adapter)
                made._try_over(self.pool.make(1, 4))
            except Exception as error:  # anything that a model trips over in its own code
                if is_out_of_memory(error) or isinstance(error, SpecdecError):
                    raise
                raise SpecdecError(
                    f"{self.config.model_type} cannot draft without its layers {list(skip)}: a pass fails "
                    f"({first_line(error)}); use another strategy"
                ) from error
            self.subsets[skip, adapter] = made
        made.refresh()
        made.choose_adapters(self.view.chosen)
        return made

    def _try_over(self, cache: RaggedCache) -> None:
        """Run a pass of one token over a new cache of the whole model."""
        token = torch.zeros((1, 1), dtype=torch.long, device=self.device)
        key = self.key(cache, Shapes((1,), 4, 4), 1, 1)
        with torch.no_grad():
            self.compute(cache, key, PassInputs(token, token.new_tensor([[0], [1]])))

    def _leave_out(self, model: Any) -> None:
        self.gaps = leave_out(model, self.measure()[-1], self.skip, self.adapter)

    def layer_bytes(self, layers: Iterable[int]) -> int:
        """Return the bytes of the weights of some decoder layers."""
        found = layers_of(self.model, self.layer_count)
        return sum(p.nbytes for i in layers for p in found[i].parameters())

    def exclude(self, ids: Sequence[int]) -> None:
        """As a draft, never propose these ids: they mean another text to the target.

        `excluded` holds those that the model has, int64 [n], where recorded functions find them again; or None.
        """
        self.excluded_ids = tuple(ids)
        known = [i for i in self.excluded_ids if 0 <= i < self.vocab_size]
        self.excluded = to_device(known, self.device) if known else None

    def measure(self) -> tuple[torch.device, torch.dtype, int, int, int, int]:
        """Return device, dtype, ids that can be fed, ids that exist, context and layers of the model now."""
        table, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        embedded = rows_of(table) or int(self.model.config.get_text_config().vocab_size)
        # Padded embeddings and heads can differ in rows; ids that only one of them has do not exist.
        known = embedded if head is None else min(embedded, rows_of(head) or embedded)
        weight = weight_of(table)
        device = self.model.device if weight is None else weight.device
        config = self.model.config.get_text_config()
        return device, self.model.dtype, embedded, known, context_length(config), len(layer_configs(config))

    def refresh(self) -> None:
        """Follow the caller's changes to the model: modules, attributes, vocabulary, dtype, device."""
        changed = self.view.refresh()
        # A compiled pass would go on with the product of the weights that were there.
        if not changed and self.fusion is not None and self.view.private and not self.fusion.is_whole:
            self.view.renew()
            changed = True
        if changed or self.measure() != self.facts:
            self._adopt()

    def choose_adapters(self, chosen: Chosen) -> None:
        """Choose adapters of PEFT for the passes that follow. Recordings of each choice are kept."""
        if self.view.choose(chosen) and self.compiled is not None:
            self._adopt()  # compiled code may have the old ones

    def step(
        self,
        cache: RaggedCache,
        shapes: Shapes,
        tokens: Tensor,
        starts: Sequence[int],
        counts: Sequence[int],
        rows: slice | None = None,
        keep: int = 0,
        observed: tuple[int, ...] | None = None,
        tree: TreePass | None = None,
    ) -> PassOutput:
        """Run one pass.

        tokens [B, S]: ids on the model's device; S is an allowed width
        starts, counts: row b feeds `counts[b]` of them from position `starts[b]` on; 0 = the row takes no part
        rows: the rows of the cache that take part; None = all
        keep: logits of so many last columns are computed; 0 = all
        observed: layers whose hidden states are returned; None: none is observed
        tree: where the tokens are, if rows hold trees
        """
        region = 0 if tree is None else tree.region
        reach = max(s + max(c, region) for s, c in zip(starts, counts, strict=True))
        key = self.key(cache, shapes, tokens.shape[1], reach, region, keep)._replace(observed=observed)
        inputs = PassInputs(tokens, to_device([list(starts), list(counts)], self.device), tree)
        if rows is not None:
            key = key._replace(batch=len(tokens), first_row=rows.start)
        result = self.forward(cache, key, inputs)
        return PassOutput(result.logits, tokens, starts, counts, key.first_row, result.hidden, tree, key.observed or ())

    def key(
        self, cache: RaggedCache, shapes: Shapes, width: int, reach: int, region: int = 0, keep: int = 0
    ) -> PassKey:
        """Make the key of a pass over all rows that reads no slot from `reach` on; region: slots of a row's tree."""
        kv_len, adapter = shapes.kv_len(reach, cache.capacity), 0 if self.adapter is None else id(self.adapter)
        if self.compiled is not None and not keep:  # prefill is not compiled
            kv_len = min(cache.capacity, compiled_slots(kv_len))
        return PassKey(cache.batch, 0, width, kv_len, keep, None, region, self.skip, adapter, self.view.chosen)

    def forward(self, cache: RaggedCache, key: PassKey, inputs: PassInputs) -> PassResult:
        """Run a pass, replayed if possible."""
        return self.run(cache, key, inputs, lambda given: self.compute(cache, key, given), key.is_prefill)

    @pinned()
    def run(
        self,
        cache: RaggedCache,
        key: Hashable,
        inputs: I,
        function: Callable[[I], R],
        is_prefill: bool = False,
        idle: I | None = None,
    ) -> R:
        """Call a function that makes passes over `cache`, or replay its recording (`Graphs.run`)."""
        if self.graphs is None or cache.graphs is None:
            return function(inputs)
        return self.graphs.run(cache.graphs, key, inputs, function, is_prefill, idle)

    def compute(self, cache: RaggedCache, key: PassKey, inputs: PassInputs) -> PassResult:
        """Compute the pass from tensors alone: no value of `inputs` is known here."""
        # Compiling takes longer than one prompt's chunks save.
        forward = None if key.is_prefill or key.rare else self.compiled
        prepare = self.prepare if forward is None else self.part(self.prepare)
        tokens, positions, slots, masks = prepare(inputs, key.width, key.kv_len, cache.capacity)
        rows = slice(key.first_row, key.first_row + key.batch)
        cache.aim(slots, rows, key.kv_len)
        arguments: dict[str, Any] = {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": masks,
            self.cache_argument: cache,
            "use_cache": True,
        }
        if key.keep and self.can_trim_logits:
            arguments["logits_to_keep"] = key.keep
        if key.observed:
            arguments["output_hidden_states"] = True
        attention = None
        if self.own_attention:
            queries = key.batch * key.width * self.masks.groups
            attention = fastest(self.device.type, queries, key.kv_len, forward is not None)
        if self.gaps:
            vars(self.gaps[-1])["given"] = inputs.states
        fused = nullcontext() if self.fusion is None or self.view.private else self.fusion.on()
        rotated = self.rope.on(cache.long_rows(rows, self.device)) if self.rope is not None else nullcontext()
        masked: Any = nullcontext()
        if self.alibi is not None:
            masked = self.alibi.on(cast(Tensor, masks))
        elif self.local is not None and isinstance(masks, dict):
            masked, arguments["attention_mask"] = self.local.on(masks), masks["full_attention"]
        read = nullcontext() if self.recurrence is None else self._reading(self.recurrence, cache, key, inputs)
        with self.view.attending(attention), fused, rotated, masked, read:
            if forward is not None and not cache.nbytes:
                self.view.model(**arguments)  # allocates: compiled code that does so would be compiled once more
            out = (forward or self.view.model)(**arguments)
        if not key.observed:
            return PassResult(out.logits)
        states = out.hidden_states
        return PassResult(out.logits, states if key.observed == ALL_LAYERS else tuple(states[i] for i in key.observed))

    def _reading(
        self, recurrence: Recurrence, cache: RaggedCache, key: PassKey, inputs: PassInputs
    ) -> AbstractContextManager[None]:
        """Have the recurrent modules read the pass from the rows' states. The host must know where the rows are."""
        assert cache.states is not None
        ((starts, counts),) = self.reader.read(inputs.layout)
        return recurrence.on(cache.states, starts, counts, key.first_row)

    def prepare(
        self, inputs: PassInputs, width: int, kv_len: int, capacity: int
    ) -> tuple[Tensor, Tensor, Tensor, Mask]:
        """Return (ids, positions, slots) [B, S] and the masks of a pass."""
        layout, tree = inputs.layout, inputs.tree
        # Ids that the embedding lacks can only be padding ids of a wider partner's vocabulary; feeding another id
        # costs acceptance, never correctness.
        tokens = inputs.tokens.clamp(max=self.embedded - 1)
        column = torch.arange(width, device=self.device)
        real = column < layout[1, :, None]  # [B, S]
        slots = layout[0, :, None] + (column if tree is None else tree.offsets)
        ahead = slots if tree is None else layout[0, :, None] + tree.depths.gather(1, tree.offsets)
        positions = torch.where(real, ahead, 0)
        return tokens, positions, torch.where(real, slots, capacity), self.masks(positions, kv_len, tree)

    def part(self, function: F) -> F:
        """Compile a function of tensors if passes are compiled, once per shape. It must not be made anew per call."""
        if self.compiled is None:
            return function
        if function not in self.parts:
            name = f"{function.__name__} of {type(self.model).__name__}"
            self.parts[function] = CompiledFunction(function, self.compiled.compiler.named(name))
        return cast(F, self.parts[function])

    def check_trees(self, strategy: str) -> None:
        """Raise SpecdecError if the self-test has found that the model cannot verify trees."""
        if self.tree_fault is not None:
            raise SpecdecError(
                f"strategy {strategy!r} drafts trees, but {self.tree_fault}; give it no tree and no branches: chains "
                "work with this model"
            )

    def before_switch(self, position: int) -> int:
        """Return how many tokens after the one at `position` have its rotation factors (models/rope.py)."""
        if self.rope is None or position >= self.rope.switch:
            return self.context
        return self.rope.switch - 1 - position

    def follow(self, cache: RaggedCache, row: int, position: int) -> bool:
        """Set a row's rotation for a text whose newest token is at `position`.

        Returns True if it changed: then what the row holds is useless.
        """
        long = self.rope is not None and position >= self.rope.switch
        if long == cache.is_long[row]:
            return False
        cache.set_long(row, long)
        return True

    def lease(self, batch: int, capacity: int) -> RaggedCache:
        """Lease a cache for a call, to be given back to `pool`; with its recorded passes, unless weights have moved or
        passes are no longer compiled."""
        cache = self.pool.lease(batch, capacity)
        if self.graphs is not None:
            now = (self.mode, *recorded_from(self.view))
            if cache.graphs is None or cache.recorded_from != now:
                cache.graphs, cache.recorded_from = {}, now
        return cache

    @property
    def recorded(self) -> tuple[int, float]:
        """(graphs, seconds): functions recorded so far, and the time that took."""
        return (self.graphs.captures, self.graphs.seconds) if self.graphs is not None else (0, 0.0)

    def compile_report(self, before: tuple[int, float]) -> dict[str, Any]:
        """Report how passes run, for provenance; before: `recorded` when the call began."""
        graphs, seconds = self.recorded
        captured = {"captured": graphs - before[0], "seconds": seconds - before[1]}
        made: dict[str, Any] = {"mode": self.mode, "graphs": graphs, **captured}
        if self.reason is not None:
            made["reason"] = self.reason
        if self.compiled is not None:
            made["cache"] = compiled_before()
        if self.graphs is not None and self.graphs.no_room:
            made["no_room"] = self.graphs.no_room
        failures = list(self.failures.values())
        return {**made, "failure": failures[0]} if failures else made

    @property
    def failures(self) -> dict[str, str]:
        """Kind of function -> why none of its kind is recorded."""
        return {} if self.graphs is None else dict(self.graphs.failures)

    def _choose_mode(self, layers: int) -> Choice:
        if self.recorder is not None and self.recurrence is None:
            return Choice("graph")
        choice = choose_mode(self.compile, self.model, layers, self.device)
        if self.recurrence is not None and choice.mode != "off":
            return Choice("off", "what recurrent layers read in a pass depends on the rows")
        if (self.alibi or self.local) is not None and choice.mode in ("inductor", "max"):
            return Choice(
                "graph", "its own kind of mask is a new object in every pass, for which code is compiled again"
            )
        return choice

    def _make_graphs(self) -> None:
        self.graphs: Graphs | None = None
        self.compiled: Forward | None = None
        self.parts: dict[Any, CompiledFunction] = {}
        if self.mode != "off":
            self.graphs = Graphs(self.recorder or CudaRecorder(self.device), type(self.model).__name__)
        if self.mode in ("inductor", "max"):
            # What dynamo traces in parts may be compiled again in every pass: only where it is asked for.
            how: dict[str, Any] = {"parts": self.compile != "auto", "give_up": self._stop_compiling}
            self.compiled = compiled_forward(self.view.model, self.config, self.mode, **how)
            if self.compile == "auto" and not isinstance(self.compiled, CompiledLayers):
                self._stop_compiling("its layers are not found, and as a whole it takes a minute a shape")

    def _stop_compiling(self, reason: str) -> None:
        """Record passes without compiled code from now on."""
        if self.compiled is None:
            return
        self.mode, self.reason, self.compiled, self.parts = "graph", f"torch.compile: {reason}", None, {}
        log.warning("%s is not compiled, its passes are recorded alone (%s)", type(self.model).__name__, reason)

    def prefill(
        self,
        cache: RaggedCache,
        shapes: Shapes,
        tokens: Mapping[int, Sequence[int]],
        starts: Mapping[int, int],
        seen: Callable[[PassOutput], None] | None = None,
        observed: tuple[int, ...] | None = None,
    ) -> None:
        """Write `tokens[row]` of every row from position `starts[row]` on, in chunks of the widest allowed width.

        Neighbouring slots are fed together as far as `shapes` says, else each alone (batch 1): then a row's cache does
        not depend on its neighbours. One column of logits is computed because models always compute some; it is unused.
        seen: called with every chunk's output, which includes the `observed` hidden states
        """
        widest = shapes.widths[-1]
        for rows in _ranges({row: len(ids) for row, ids in tokens.items()}, shapes):
            for offset in range(0, max(len(tokens[row]) for row in rows), widest):
                chunks = [list(tokens[row][offset : offset + widest]) for row in rows]
                counts = [len(chunk) for chunk in chunks]
                # On a CPU a padded token costs as much as another.
                exactly = self.device.type == "cpu" and self.graphs is None
                width = max(counts) if exactly else shapes.width(max(counts))
                padded = to_device([chunk + [0] * (width - len(chunk)) for chunk in chunks], self.device)
                at = [starts[row] + offset if n else 0 for row, n in zip(rows, counts, strict=True)]
                side = slice(rows.start, rows.stop)
                out = self.step(cache, shapes, padded, at, counts, side, 1, observed)
                if seen is not None:
                    seen(out)


def _ranges(lengths: Mapping[int, int], shapes: Shapes) -> Iterator[range]:
    """Yield rows with anything to feed, in ranges that are fed together; lengths: row -> tokens."""
    run: list[int] = []
    for row in sorted(row for row, length in lengths.items() if length):
        width = shapes.width(min(max(lengths[r] for r in (*run, row)), shapes.widths[-1]))
        if run and (row != run[-1] + 1 or (len(run) + 1) * width > shapes.together):
            yield range(run[0], run[-1] + 1)
            run = []
        run.append(row)
    if run:
        yield range(run[0], run[-1] + 1)


def context_length(config: Any) -> int:
    """Return the positions a model was made for; a large number if the config states none."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return UNBOUNDED
