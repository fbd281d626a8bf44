"""Strategies whose guesses are right where a script says so, for texts that count up: no model, no chance."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec.drafters.base import Draft, Drafter, DraftRequest, RowDrafter
from specdec.drafters.chain import Chain
from specdec.drafters.costs import CostTable
from specdec.drafters.length import LengthController
from specdec.models.kv_cache import common_prefix
from specdec.models.runner import Shapes
from specdec.research.offline.replay import replay
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


class ScriptedModel(Drafter):
    """A strategy that costs passes, and keeps its own account of them."""

    name = "draft-model"
    uses_draft_model = True

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


def controlled(
    drafters: Sequence[Any], costs: CostTable, chosen: Sequence[bool] | None = None, batch: int = 1
) -> Chain:  # fmt: skip
    """A chain whose lengths are automatic."""
    chain = Chain(drafters)
    chosen = [True] * len(drafters) if chosen is None else chosen
    chain.lengths = LengthController(drafters, chosen, costs, SHAPES, batch, free=True)
    return chain


def run(drafter: Any, costs: CostTable, n: int) -> tuple[list[RoundRecord], float]:
    """Rounds of a text of n tokens, and the seconds of their passes and calls."""
    chain = controlled([drafter], costs)
    records = replay(chain, *text(n))
    seconds = sum(costs.seconds("target", 1, 0, 1 + r.drafted) + costs.round for r in records)
    if isinstance(drafter, ScriptedModel):
        return records, seconds + drafter.seconds
    return records, seconds + chain.counters[drafter.name].n_call_draft * costs.call(drafter.name)


class ScriptedRows(Scripted):
    """A script for every prompt; `of`: slot -> the prompt in it."""

    def __init__(self, scripts: Sequence[Sequence[bool]]):
        super().__init__()
        self.scripts = scripts
        self.of: dict[int, int] = {}

    def _propose(self, request: DraftRequest) -> list[int]:
        return guesses(self.scripts[self.of[request.row]], request)


def run_batch(scripts: Sequence[Sequence[bool]], costs: CostTable, batch: int, n: int) -> float:
    """Seconds of texts of n tokens, one a script, in `batch` slots that are filled again when they fall free."""
    drafter = ScriptedRows(scripts)
    chain = controlled([drafter], costs, batch=batch)
    prompt, output = text(n)
    ids, seconds = np.concatenate([prompt, output]), 0.0
    queue, sizes = deque(range(len(scripts))), dict[int, int]()
    while queue or sizes:
        for slot in range(batch):
            if slot not in sizes and queue:
                drafter.of[slot], sizes[slot] = queue.popleft(), len(prompt) + 1
                chain.begin(slot, prompt)
        rooms = {slot: len(ids) - size - 1 for slot, size in sizes.items()}
        asked = [
            DraftRequest(slot, ids[: sizes[slot] - 1], int(ids[sizes[slot] - 1]), room, sizes[slot] - 1)
            for slot, room in rooms.items() if room > 0
        ]  # fmt: skip
        calls = chain.counters[drafter.name].n_call_draft
        drafts = chain.draft(asked, len(queue)) if asked else []
        made = {r.row: [int(t) for t in draft.tokens] for r, draft in zip(asked, drafts, strict=True)}
        seconds += (chain.counters[drafter.name].n_call_draft - calls) * len(asked) * costs.call(drafter.name)
        seconds += costs.seconds("target", batch, 0, 1 + max(map(len, made.values()), default=0)) + costs.round
        for slot, size in list(sizes.items()):
            accepted = common_prefix(ids[size:], np.array(made.get(slot, []), dtype=np.int64))
            if slot in made:
                chain.settle(slot, len(made[slot]))
                chain.accept(slot, accepted)
            sizes[slot] = size + accepted + 1
            if sizes[slot] >= len(ids):
                del sizes[slot]
    return seconds
