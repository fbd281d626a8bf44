"""early-exit: the target drafts for itself, without some of its layers, over its own keys and values.

Source: LayerSkip (Elhoushi et al. 2024) for the first layers of a model, Draft & Verify (Zhang et al. 2023) for any set
of layers. The final norm and the head are the target's.

The draft has no cache of its own. The layers that run read what the whole model has written for the text so far, and
write the drafted tokens' keys and values where the verify pass does. So a draft costs no memory and no catching up with
the text: only its share of the weights, one pass per token.

Drafting runs the layers before the first one that is left out just as verifying would. With `resume` the last drafted
token is fed to them as well, and the verify pass goes on from their states (`Draft.states`): it runs the other layers
alone. That is one narrow pass of the first layers in place of one of all drafted tokens: as many weights are read, and
less is computed. Where a row has no such draft, the pass runs all layers for all.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from specdec.config import check_whole
from specdec.drafters.base import Draft, DraftContext, DraftRequest, Tokens, empty_like
from specdec.drafters.draft_model.core import CoreDrafter, DraftCore
from specdec.drafters.draft_model.steps import COUNTS, STARTS, Proposal, StepInputs, StepsKey, Stops, check_steps
from specdec.drafters.options import number, state, switch, whole
from specdec.drafters.self_speculation.adapter import ExitAdapter, load_adapter
from specdec.errors import SpecdecError
from specdec.models.passes import PassInputs, PassKey


@dataclass
class EarlyExit(CoreDrafter):
    """The target's first layers, or all but some, as a strategy.

    layers: how many first layers draft; None = a third of them
    skip: in its place, the layers that are left out, as a list or "8-15+20"
    adapter: a folder that `specdec train exit` wrote, or an `ExitAdapter`, after the first layers that it says
    n_max: most tokens to propose
    n_min, p_min, top_n: as in draft-model
    resume: verify passes go on from the layers that have drafted
    Raises SpecdecError for parameters out of range, and in a call for layers that the target does not have.
    """

    layers: int | None = whole(None)
    skip: Any = None
    adapter: Any = None
    n_max: int = whole(4)
    n_min: int = whole(0, least=0)
    p_min: float = number(0.0, 0.0, 1.0)
    top_n: int | None = whole(None)
    resume: bool = switch(True)
    name: str = field(init=False, default="early-exit")
    likely_causes = (
        "A model that was not trained for early exit says little after its first layers: train an adapter (specdec "
        "train exit), search for layers that it can do without (--search), or let more layers draft."
    )

    _adapter: ExitAdapter | None = state()
    _core: SharedCore = state()
    _rule: Any = state()
    _vocab_size: int = state(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None and self.skip is not None:
            raise SpecdecError("early-exit: give layers (the first ones draft) or skip (those left out), not both")
        if self.skip is not None:
            self.skip = parse_layers(self.skip)
        if self.adapter is not None:
            self._adapter = self.adapter if isinstance(self.adapter, ExitAdapter) else load_adapter(self.adapter)
            if self.skip is not None or self.layers not in (None, self._adapter.layers):
                raise SpecdecError(
                    f"early-exit: the adapter is for layers={self._adapter.layers}; leave out layers and skip"
                )
            self.layers = self._adapter.layers
        check_steps(self)

    def parameters(self) -> dict[str, Any]:
        named = type(self.adapter).__name__ if isinstance(self.adapter, ExitAdapter) else self.adapter
        return super().parameters() | {"adapter": None if named is None else str(named)}

    def left_out(self, count: int) -> tuple[int, ...]:
        """Return the layers that do not draft, of a target's `count`. Raises SpecdecError if it does not have them."""
        first = max(1, count // 3) if self.layers is None else self.layers
        skip = tuple(range(first, count)) if self.skip is None else self.skip
        if not skip or max(skip) >= count or len(skip) == count:
            asked = f"layers={self.layers}" if self.skip is None else f"skip={list(skip)}"
            raise SpecdecError(
                f"early-exit: {asked} does not fit a target of {count} layers (0 to {count - 1}): some must draft and "
                "some must be left out"
            )
        return skip

    def fresh(self, context: DraftContext) -> EarlyExit:
        if context.target is None or context.cache is None:
            raise SpecdecError("early-exit drafts over the cache of a decoder's call: use it in a SpeculativeDecoder")
        made = copy.copy(self)
        skip, width = self.left_out(context.target.layer_count), context.target.config.hidden_size
        if self._adapter is not None:
            if self._adapter.hidden_size != width:
                raise SpecdecError(
                    f"early-exit: the adapter is for hidden states of {self._adapter.hidden_size}, the target's have "
                    f"{width}; train one for this target"
                )
            self._adapter.to(context.target.device)
        runner = context.target.without_layers(skip, self._adapter)
        made._core = SharedCore(runner, context.batch, context.capacity, cache=context.cache)
        made._core.layers = runner.skip[0] if self.resume else 0
        made._core.feeds_last = made._core.layers > 0
        made._vocab_size = context.vocab_size
        return made

    def stop_by(self, rule: Any, levels: Mapping[int, float]) -> None:
        self._rule, self._core.levels = rule, levels

    @property
    def step_share(self) -> float:
        layers = self._core.runner.layer_count
        return (layers - len(self._core.runner.skip)) / layers

    def steps(self, k: int) -> int:
        return self._core.recorded_steps(k, self.n_max)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        limits = {r.row: self._core.room(r, self.n_max) for r in requests}
        work = [r for r in requests if limits[r.row] > 0]
        if not work:
            return empty_like(requests)
        steps = self._core.recorded_steps(max(limits.values()), self.n_max)
        stops = Stops(self.p_min, self.n_min, self.top_n, self._rule)
        proposal = self._core.propose(work, steps, stops, self._vocab_size)
        drafts = self.drafts(requests, limits, proposal)
        if proposal.states is not None:
            self._core.passes += 1
            layers, states = self._core.layers, proposal.states
            rows = zip(requests, drafts, strict=True)
            drafts = [replace(d, states=states[r.row], layers=layers) if len(d) else d for r, d in rows]
        return drafts


class SharedCore(DraftCore):
    """Draft steps over the target's own cache, which holds every row's text without its newest token.

    layers: first layers whose states go with the drafts; 0 = none
    """

    layers = 0

    def begin(self, row: int, prompt: Tokens) -> None:
        self.outstanding.pop(row, None)

    def write(self, request: DraftRequest) -> int:
        self.length[request.row] = len(request.tokens)
        return super().write(request)

    def forward(self, key: PassKey, inputs: PassInputs) -> Tensor:
        logits = super().forward(key, inputs)
        self.states.append(self.runner.gaps[0].seen[:, :1])
        return logits

    def steps(self, key: StepsKey, sampling: Any, inputs: StepInputs, requests: Any) -> Proposal:
        self.states: list[Tensor] = []
        made = super().steps(key, sampling, inputs, requests)
        if not key.feeds_last:
            return made
        length, k = inputs.numbers[STARTS] + inputs.numbers[COUNTS], made.tokens.shape[1]
        self._feed_token(key, made.tokens[:, -1], length + k - 1, inputs.numbers[COUNTS])
        return replace(made, states=torch.cat(self.states, dim=1))

    def close(self) -> None:
        """Do nothing: the cache is the engine's."""


def parse_layers(value: Any) -> tuple[int, ...]:
    """Parse layer numbers, from a list or from text such as "8-15+20". Raises SpecdecError for anything else."""
    if isinstance(value, str):
        parts = [part.split("-") for part in value.split("+")]
        if not all(1 <= len(part) <= 2 and all(end.isdecimal() for end in part) for part in parts):
            raise SpecdecError(f"early-exit: skip must list layers, such as [8, 9] or '8-15+20', got {value!r}")
        value = [n for part in parts for n in range(int(part[0]), int(part[-1]) + 1)]
    if isinstance(value, int):
        value = [value]
    if not isinstance(value, Sequence) or not value:
        raise SpecdecError(f"early-exit: skip must list layers, such as [8, 9] or '8-15+20', got {value!r}")
    for layer in value:
        check_whole("early-exit: skip", layer, 0)
    return tuple(sorted(set(value)))
