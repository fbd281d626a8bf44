"""Strategies whose guesses are right where a script says so, for texts that count up: no model, no chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec.costs import CostTable
from specdec.drafters.base import Draft, DraftRequest, RowDrafter
from specdec.drafters.chain import Chain
from specdec.drafters.length import LengthController
from specdec.research.replay import replay
from specdec.runner import Shapes
from specdec.stats import RoundRecord

PROMPT = 3
WRONG = 1_000_000
SHAPES = Shapes(tuple(range(1, 18)), 17, 32)


def text(n: int) -> tuple[np.ndarray, np.ndarray]:
    """A prompt and n tokens after it: every id is its own place."""
    return np.arange(PROMPT), np.arange(PROMPT, PROMPT + n)


def guesses(script: Sequence[bool], request: DraftRequest, longest: int = 16) -> list[int]:
    """What the script says of the places behind the request's text; beyond it nothing is right."""
    first = request.position + 1
    places = range(first, first + request.limit(longest))
    return [p if p - PROMPT < len(script) and script[p - PROMPT] else WRONG for p in places]


@dataclass
class Scripted(RowDrafter):
    """A strategy without a model."""

    script: Sequence[bool] = ()
    name: str = field(init=False, default="scripted")

    def _propose(self, request: DraftRequest) -> list[int]:
        return guesses(self.script, request)


class ScriptedModel:
    """A strategy that costs passes, and keeps its own account of them."""

    name = "draft-model"

    def __init__(self, script: Sequence[bool], costs: CostTable):
        self.script, self.costs = script, costs
        self.seconds, self.read, self.last = 0.0, 0, 0
        self.lengths: list[int] = []

    def begin(self, row: int, prompt: Any) -> None:
        return None

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        [request] = requests
        size, k = request.position + 1, request.n_max
        # The prompt is read in the first pass, which is not held against the lengths.
        behind = size - self.read if self.read else 1
        for width in (behind, *[1] * (k - 1)):
            self.seconds += self.costs.seconds("draft", 1, request.position, width)
        self.read, self.last = size, k
        self.lengths.append(k)
        return [Draft(guesses(self.script, request), drafter=self.name)]

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        if not is_other and self.last:
            self.read += min(n_accepted, self.last - 1)
            self.last = 0


def controlled(drafters: Sequence[Any], costs: CostTable, chosen: Sequence[bool] | None = None) -> Chain:
    """A chain whose lengths are automatic."""
    chain = Chain(drafters)
    chosen = [True] * len(drafters) if chosen is None else chosen
    chain.lengths = LengthController(drafters, chosen, costs, SHAPES, 1, free=True)
    return chain


def run(drafter: Any, costs: CostTable, n: int) -> tuple[list[RoundRecord], float]:
    """Rounds of a text of n tokens, and the seconds of their passes and calls."""
    chain = controlled([drafter], costs)
    records = replay(chain, *text(n))
    seconds = sum(costs.seconds("target", 1, 0, 1 + r.drafted) + costs.round for r in records)
    if isinstance(drafter, ScriptedModel):
        return records, seconds + drafter.seconds
    return records, seconds + chain.counters[drafter.name].n_call_draft * costs.call(drafter.name)
