"""Recurrent layers (Mamba, linear attention, short convolutions) in rows that are cut back.

Keys and values are cut by moving a length back. A recurrent state cannot unread what it has read. So a row's states
are saved before a draft, and what each recurrent module is fed from then on is noted. A row that was cut takes the
saved states in its next pass, and each module reads the inputs of the tokens that were kept once more. Attention, MLPs
and experts compute nothing twice.

Invariants (tests/models/test_hybrid.py):
- before a module reads the tokens of a pass, a row's states are those after exactly the tokens before its first one:
  the position where the pass starts says how many of the noted tokens were kept;
- padding stays in no state: a row that was fed less than the width of a pass is read again, without the padding;
- a row that takes no part in a pass keeps its states.

Modules are found by what they ask of transformers' cache, and run unchanged over a cache with the states of a few rows.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from specdec.errors import SpecdecError
from specdec.models.replaced import replaced

PADDED = -1  # in `RowStates.read`: padding has run over the row's states


class StateCache:
    """What a recurrent module is given in place of the model's cache: states [R, ...] of the R rows that it reads.

    conv, recurrent: by number of the state, since a layer may have several
    conv_states ... layers: where models of transformers before 5.24 look for them
    """

    record_past = False

    def __init__(self, conv: dict[int, Tensor] | None = None, recurrent: dict[int, Tensor] | None = None):
        self.conv, self.recurrent = conv or {}, recurrent or {}

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        return defaultdict(lambda: None, self.conv)

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        return defaultdict(lambda: None, self.recurrent)

    @property
    def layers(self) -> dict[int, StateCache]:
        return defaultdict(lambda: self)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent.get(state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.conv or self.recurrent)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last columns; returns the kept ones before, then `states` [R, C, n]."""
        before = self.conv.get(state_idx)
        size = (conv_kernel_size or states.shape[-1]) if before is None else before.shape[-1]
        full = states if before is None else torch.cat([before, states], dim=-1)
        full = F.pad(full, (max(0, size - full.shape[-1]), 0))
        self.conv[state_idx] = full[..., -size:].clone()
        return full

    def update_recurrent_state(self, states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.recurrent[state_idx] = states
        return states


@dataclass
class ModuleStates:
    """States of one module for all rows of a cache, by kind and number, [B, ...]; allocated by the first pass.

    inputs: row -> what the module was fed after the saved states, [n, H]
    """

    batch: int
    now: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    saved: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)

    def of(self, rows: list[int], is_new: bool) -> StateCache:
        """Return copies of the rows' states; is_new: the rows begin, so there are none."""
        made: dict[str, dict[int, Tensor]] = {"conv": {}, "recurrent": {}}
        for (kind, number), states in {} if is_new else self.now.items():
            made[kind][number] = states[rows]
        return StateCache(**made)

    def keep(self, rows: list[int], cache: StateCache) -> None:
        for kind, found in (("conv", cache.conv), ("recurrent", cache.recurrent)):
            for number, states in found.items():
                key = kind, number
                if key not in self.now:
                    self.now[key] = states.new_zeros((self.batch, *states.shape[1:]))
                    self.saved[key] = torch.zeros_like(self.now[key])
                self.now[key][rows] = states

    def note(self, plan: Reading, fed: Tensor) -> None:
        """Note what the pass feeds, [B', S, H], to the rows that may be cut back to one of its tokens."""
        for row in plan.live:
            before = None if row in plan.save else self.inputs.pop(row, None)
            if row in plan.note:
                new = fed[row - plan.first, : plan.note[row]]
                self.inputs[row] = new if before is None else torch.cat([before, new])

    def copy(self, rows: list[int], source: dict[Any, Tensor], target: dict[Any, Tensor]) -> None:
        for key, states in source.items():
            target[key][rows] = states[rows]


@dataclass
class Reading:
    """What the recurrent modules do in one pass; rows are rows of the cache.

    first: the row that the first line of the pass belongs to
    begun: rows at position 0, whose states are zero
    again: (n, are new) -> rows that take their saved states and read n noted inputs; new: saved at position 0
    save: rows whose states are saved
    note: row -> tokens that are noted
    live: rows that are fed
    width: most tokens that a row is fed
    """

    first: int
    begun: list[int] = field(default_factory=list)
    again: dict[tuple[int, bool], list[int]] = field(default_factory=dict)
    save: list[int] = field(default_factory=list)
    note: dict[int, int] = field(default_factory=dict)
    live: list[int] = field(default_factory=list)
    width: int = 0


class RowStates:
    """The recurrent states of a cache's rows.

    read: tokens that a row's states have read, or PADDED
    saved_at: tokens that its saved states have read
    noted: tokens noted after these; less than 0: nothing is saved
    drafting: rows between `begin_draft` and `rewind`; True once their states are saved
    """

    def __init__(self, batch: int):
        self.batch = batch
        self.read, self.saved_at, self.noted = [0] * batch, [0] * batch, [-1] * batch
        self.drafting: dict[int, bool] = {}
        self.modules: dict[nn.Module, ModuleStates] = {}

    def begin_draft(self, rows: Iterable[int]) -> None:
        """Have the next pass save the rows' states; later ones note what they feed until `rewind`."""
        self.drafting.update(dict.fromkeys(rows, False))

    def rewind(self, rows: Iterable[int]) -> None:
        """Let the next pass say where the rows go on."""
        for row in rows:
            self.drafting.pop(row, None)

    def pretend(self, lengths: Mapping[int, int]) -> None:
        """Take what rows hold for the states of texts of these lengths: for passes that are only timed."""
        for row, length in lengths.items():
            self.read[row], self.noted[row] = length, -1

    def plan(self, starts: Sequence[int], counts: Sequence[int], first: int) -> Reading:
        """Plan a pass that feeds `counts[i]` tokens to row `first + i` from position `starts[i]` on."""
        made = Reading(first, width=max(counts))
        for row, (start, count) in enumerate(zip(starts, counts, strict=True), first):
            if count:
                made.live.append(row)
                self._restore(made, row, start)
                self._note(made, row, start, count)
        return made

    def _restore(self, made: Reading, row: int, start: int) -> None:
        """Plan how a row comes to its states at `start`."""
        if start == 0:
            made.begun.append(row)
        elif self.read[row] != start:
            n = start - self.saved_at[row]
            if not 0 <= n <= self.noted[row]:
                raise SpecdecError(
                    f"row {row} cannot go on at position {start}: recurrent layers can be cut back to where the last "
                    "draft began, and no further"
                )
            made.again.setdefault((n, self.saved_at[row] == 0), []).append(row)

    def _note(self, made: Reading, row: int, start: int, count: int) -> None:
        """Plan what is saved and noted so that the row can be cut back to any token of this pass."""
        is_padded, is_drafting = count < made.width, row in self.drafting
        if start == 0 or not self.drafting.get(row):
            self.saved_at[row], self.noted[row] = start, 0 if is_padded or is_drafting else -1
            made.save += [row] * (self.noted[row] == 0)
        if is_drafting:
            self.drafting[row] = True
        if self.noted[row] >= 0:
            made.note[row] = count
            self.noted[row] += count
        self.read[row] = PADDED if is_padded else start + count

    def of(self, module: nn.Module) -> ModuleStates:
        """Return the states of a module, empty before its first pass."""
        return self.modules.setdefault(module, ModuleStates(self.batch))


class Recurrence:
    """The recurrent modules of a model.

    reads_on: by class: True if a module that is fed several tokens goes on from its state. Mamba's scan in transformers
        begins anew, so its classes are fed one token after another
    """

    def __init__(self, modules: Sequence[nn.Module]):
        self.modules = modules
        self.reads_on: dict[type, bool] = {}

    @staticmethod
    def of(model: nn.Module) -> Recurrence | None:
        """Return the recurrent modules of a model; None if it has none."""
        found = [module for module in model.modules() if _keeps_states(module)]
        return Recurrence(found) if found else None

    def on(
        self, states: RowStates, starts: Sequence[int], counts: Sequence[int], first: int
    ) -> AbstractContextManager[None]:
        """Run the modules over the states of rows in one pass, as `RowStates.plan` plans it."""
        plan = states.plan(starts, counts, first)
        return replaced((m, "forward", partial(self._pass, m, m.forward, states.of(m), plan)) for m in self.modules)

    def _pass(
        self,
        module: nn.Module,
        forward: Callable[..., Tensor],
        mine: ModuleStates,
        plan: Reading,
        hidden_states: Tensor,
        *more: Any,
        **given: Any,
    ) -> Tensor:
        """Run a module's `forward` over hidden states [B', S, H] of a pass; returns its output, [B', S, H]."""
        if more:
            raise SpecdecError(f"{type(module).__name__} is given more than hidden states and a cache")
        # No mask: every token that is fed is real, or comes after all that are.
        plain = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
        caches = [name for name, value in plain.items() if isinstance(value, Cache)]

        def call(fed: Tensor, cache: StateCache) -> Tensor:
            return forward(fed, **{**plain, **dict.fromkeys(caches, cache)})

        def run(rows: list[int], fed: Tensor, is_new: bool) -> Tensor:
            cache = mine.of(rows, is_new)
            out = self._run(module, call, fed, cache)
            mine.keep(rows, cache)
            return out

        for states in mine.now.values():
            states[plan.begun] = 0
        for (n, is_new), rows in plan.again.items():
            mine.copy(rows, mine.saved, mine.now)
            if n:
                run(rows, torch.stack([mine.inputs[row][:n] for row in rows]), is_new)
        mine.copy(plan.save, mine.now, mine.saved)
        mine.note(plan, hidden_states)
        lines = [row - plan.first for row in plan.live]
        out = run(plan.live, hidden_states[lines, : plan.width], len(plan.begun) == len(plan.live))
        if out.shape[:2] == hidden_states.shape[:2]:
            return out
        full = out.new_zeros((*hidden_states.shape[:2], *out.shape[2:]))
        full[lines, : plan.width] = out
        return full

    def _run(
        self, module: nn.Module, call: Callable[[Tensor, StateCache], Tensor], fed: Tensor, cache: StateCache
    ) -> Tensor:
        """Feed [R, n, H] to a module from the states in `cache`, which it updates; returns [R, n, H]."""
        kind, chunk = type(module), getattr(module, "chunk_size", None) or 0
        if fed.shape[1] > 1 and cache.has_previous_state():
            if kind not in self.reads_on:
                self.reads_on[kind] = _reads_on(call, fed, cache)
            # Mamba-2's scan in torch computes whole chunks. On a CPU (8 layers, H = 768, chunks of 256) a pass of 5
            # tokens took 530 ms with it, and one of 1 token without it 27 ms.
            is_dear = fed.device.type == "cpu" and fed.shape[1] <= chunk // 16
            if is_dear or not self.reads_on[kind]:
                return torch.cat([call(part, cache) for part in fed.split(1, dim=1)], dim=1)
        return call(fed, cache)


def _keeps_states(module: nn.Module) -> bool:
    """True if a module's own code hands states to transformers' cache."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and not {"update_conv_state", "update_recurrent_state"}.isdisjoint(code.co_names)


def _reads_on(call: Callable[[Tensor, StateCache], Tensor], fed: Tensor, cache: StateCache) -> bool:
    """True if what a module makes of several tokens depends on its recurrent state, or if it has none."""

    def outcome(more: float) -> Tensor:
        conv = {number: states.clone() for number, states in cache.conv.items()}
        return call(fed, StateCache(conv, {number: states + more for number, states in cache.recurrent.items()}))

    return not cache.recurrent or not torch.equal(outcome(0.0), outcome(1.0))
