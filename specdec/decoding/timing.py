"""Times the passes of a call, run as a call runs them: by the same recorded functions over a leased cache.

A *verify pass* lasts from the drafts to the host's read; a *draft* catches up with the text and chooses some tokens.
Nothing is prefilled: a pass takes as long over what an earlier call left in the cache, or over zeros, as over any text.
Used for measured cost tables (`measure_costs`) and for estimates (research/offline/what_if.py).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specdec.config import check_whole
from specdec.decoding.acceptance import LEVIATHAN
from specdec.decoding.provenance import device_name
from specdec.decoding.row import Row, StopRules
from specdec.decoding.verification import Verifier
from specdec.device.host_read import HostReader
from specdec.drafters import STRATEGIES
from specdec.drafters.base import Draft, DraftContext, DraftRequest, RowDrafter, RowSampling
from specdec.drafters.costs import AROUND, CONTEXTS, WIDTHS, CostTable, check_axes, check_sequence
from specdec.drafters.draft_model.core import DraftCore
from specdec.drafters.draft_model.steps import Stops
from specdec.errors import SpecdecError
from specdec.models.runner import Runner, Shapes
from specdec.sampling.sampling import Sampling

if TYPE_CHECKING:
    from specdec.decoder import SpeculativeDecoder

Cell = tuple[str, int, int, int]  # role, batch, context, width
STEPS = 5  # tokens of the draft whose steps are timed
TOKEN = 0  # every token of the text
LIMIT = 2.5  # seconds of `measure_costs` after which no turn is begun


class Passes:
    """The passes of greedy calls; holds leased caches until it is closed.

    batch: rows of the calls
    contexts: tokens of their texts before the newest
    longest: most tokens of their drafts
    columns: tokens of a row that a pass should have room for, if more than usual, as for trees
    Raises SpecdecError if the target does not support the decoder's exact mode.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, batch: int, contexts: Sequence[int], longest: int, columns: int = 0
    ):
        self.target, self.batch = decoder.target, batch
        exact = decoder.resolve_exact(decoder.exact)
        cache = self.target.lease(batch, max(contexts) + longest + 1)
        self.verifiers: dict[int, Verifier] = {}
        for context in contexts:
            room = self.target.pool.room(context + longest + 1)
            shapes = Shapes.choose(self.target.device, exact, room, columns)
            self.verifiers[context] = Verifier(
                self.target, cache, shapes, LEVIATHAN, Sampling(0.0), batch, self.target.vocab_size, HostReader()
            )
        self.core = None if decoder.draft is None else DraftCore(decoder.draft, batch, max(contexts) + longest + 1)

    def close(self) -> None:
        """Give back the caches and what was recorded for them."""
        self.target.pool.give_back(next(iter(self.verifiers.values())).cache)
        if self.core is not None:
            self.core.close()

    def turn(self, context: int, widths: Sequence[int]) -> dict[Cell, float]:
        """Time every pass once, in seconds, by the cells of `measure_passes`."""
        shapes, made = self.verifiers[context].shapes, {}
        cells: dict[Cell, float] = {}
        for width in widths:
            fed = shapes.width(min(width, shapes.verify_width))
            if fed not in made:
                made[fed] = self.verify(context, width)
            cells["target", self.batch, context, width] = made[fed]
        if self.core is not None:
            step = self.draft(context, 1, STEPS) / STEPS
            two = max(step, self.draft(context, 2, STEPS) - (STEPS - 1) * step)
            plain = cells["target", self.batch, context, 1]
            for width in widths:  # wider ones are rare: they are to a step what the target's are to its own
                wider = cells["target", self.batch, context, width] / plain
                cells["draft", self.batch, context, width] = step if width == 1 else max(two, step * wider)
        return cells

    def verify(self, context: int, width: int) -> float:
        """Time a verify pass with drafts of `width` - 1 tokens, or as many as one pass takes; seconds."""
        verifier = self.verifiers[context]
        stops = StopRules(max_new_tokens=width + 1, context=self.target.context)
        rows = [(b, Row(b, [TOKEN] * (context + 1), b, stops)) for b in range(self.batch)]
        for _, row in rows:
            row.open_round(Draft([TOKEN] * (min(width, verifier.shapes.verify_width) - 1)))
        verifier.cache.pretend(dict.fromkeys(range(self.batch), context))
        return _seconds(self.target, lambda: verifier.launch(rows).read())

    def draft(self, context: int, unseen: int, steps: int) -> float:
        """Time a draft of `steps` tokens by a model that has not seen the newest `unseen` of the text; seconds."""
        core = self.core
        assert core is not None
        sampling, text = RowSampling(Sampling(0.0), LEVIATHAN.proposal), [TOKEN] * context
        requests = [DraftRequest(b, text, TOKEN, steps, context, sampling) for b in range(self.batch)]
        for b in range(self.batch):
            core.length[b] = max(0, context + 1 - unseen)
        core.cache.pretend(dict(enumerate(core.length)))
        return _seconds(core.runner, lambda: core.propose(requests, steps, Stops(0.0, 0, None), self.target.vocab_size))


def _seconds(runner: Runner, run: Callable[[], Any]) -> float:
    _wait(runner.device)
    started = time.perf_counter()
    run()
    _wait(runner.device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def room_for(decoder: SpeculativeDecoder, widths: Sequence[int]) -> int:
    """Return the longest context at which both models have room for passes of these widths, in tokens."""
    return min(r.context for r in decoder._runners().values()) - _longest(widths) - 1


def _longest(widths: Sequence[int]) -> int:
    return max([*widths, STEPS])


def measure_passes(
    decoder: SpeculativeDecoder,
    batches: Sequence[int],
    contexts: Sequence[int],
    widths: Sequence[int],
    repeats: int,
    progress: Callable[[str], None] = lambda what: None,
    limit: float = math.inf,
    columns: int = 0,
) -> dict[Cell, float]:
    """Time every cell over `repeats` turns; returns median seconds.

    Each turn times every pass once, so that what slows the machine down for a while slows all alike.
    "target": verify passes; widths that a call feeds through the same pass (in exact mode all) are timed once.
    "draft": width 1, a step: its share of a draft of STEPS tokens; width 2, its first step if it catches up with two
    tokens; others in proportion to the target's passes.
    limit: seconds after which no turn is begun, if one was measured.
    columns: tokens of a row that a pass should have room for, if more than usual.
    """
    times: dict[Cell, list[float]] = {}
    with decoder.working(), ExitStack() as stack:
        decoder.refresh()
        begun, recorded = time.perf_counter(), any(r.graphs is not None for r in decoder._runners().values())
        passes = [Passes(decoder, batch, contexts, _longest(widths), columns) for batch in batches]
        for of_batch in passes:  # closed in reverse, the smallest batch last: its cache is the one that stays
            stack.callback(of_batch.close)
        for turn in range(repeats + 1):
            if turn > 1 and time.perf_counter() - begun > limit:
                break
            progress(f"turn {turn} of {repeats}")
            # The first turn warms up: passes are recorded and compiled, or else one allocates the caches.
            whole = turn > 0 or recorded
            for context, of_batch in product(contexts if whole else contexts[:1], passes):
                for cell, seconds in of_batch.turn(context, widths if whole else widths[:1]).items():
                    if turn:
                        times.setdefault(cell, []).append(seconds)
    return {cell: statistics.median(seconds) for cell, seconds in times.items()}


def round_seconds(decoder: SpeculativeDecoder, tokens: int = 12) -> float:
    """Median seconds of a round without a draft, and without its verify pass, where a strategy has been asked."""
    tokens = min(tokens, decoder.target.context - 1)
    call = decoder._call([TOKEN], [], max_new_tokens=tokens, ignore_eos=True)
    inside, outside = [0.0], []
    with call:
        call.engine.start_next_pass = lambda active, pending: None  # type: ignore[method-assign]
        verifier: Any = call.engine.verifier
        launch = _adding(verifier.launch, inside)

        def launched(rows: Any) -> Any:
            pending = launch(rows)
            pending.read = _adding(pending.read, inside)
            return pending

        verifier.launch = launched
        started = time.perf_counter()
        for _ in call.engine.run():
            now = time.perf_counter()
            outside.append(now - started - inside[0])
            started, inside[0] = now, 0.0
    return statistics.median(outside)


def _adding(function: Callable[..., Any], total: list[float]) -> Callable[..., Any]:
    """Wrap a function so that its seconds are added to `total`."""

    def timed(*given: Any) -> Any:
        started = time.perf_counter()
        made = function(*given)
        total[0] += time.perf_counter() - started
        return made

    return timed


def measure_costs(
    decoder: SpeculativeDecoder,
    batches: Sequence[int] = (1,),
    contexts: Sequence[int] | None = None,
    widths: Sequence[int] = WIDTHS,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda what: None,
) -> CostTable:
    """Time this machine for `generate(..., costs=...)`: passes of greedy calls, medians over `repeats` turns.

    Takes about LIMIT seconds, or a turn if that takes longer; where passes are recorded or compiled, that too.

    batches: rows, ascending from 1
    contexts: tokens of the text; longer than the models allow counts as the longest that leaves room for a pass. None =
        CONTEXTS, or the shortest of them alone where passes are compiled: each takes a compilation and the same time
    widths: tokens per row and pass, ascending from 1; for trees as wide as the widest of them
    Raises SpecdecError for other axes, and if no context is left.
    """
    check_axes(batches, (1,), widths)
    if contexts is None:
        contexts = CONTEXTS[: 1 if decoder.target.compiled is not None else None]
    check_sequence("contexts", contexts)
    for context in contexts:
        check_whole("costs: contexts", context, 1)
    check_whole("costs: repeats", repeats, 1)
    room = room_for(decoder, widths)
    contexts = tuple(sorted({min(c, room) for c in contexts}))
    if not contexts or contexts[0] < 1:
        raise SpecdecError(f"costs: contexts must be at least 1 and fit into the models, got {list(contexts)}")
    columns = widths[-1] if widths[-1] > WIDTHS[-1] else 0
    seconds = measure_passes(decoder, batches, contexts, widths, repeats, progress, LIMIT, columns)
    tables = {
        role: tuple(tuple(tuple(seconds[role, b, c, w] for w in widths) for c in contexts) for b in batches)
        for role in decoder._runners()
    }
    return CostTable(
        target=tables["target"],
        draft=tables.get("draft"),
        batches=tuple(batches),
        contexts=contexts,
        widths=tuple(widths),
        round=round_seconds(decoder),
        calls=_call_seconds(STRATEGIES.values()),
        device=device_name(decoder.target.device),
        source="measured",
    )


def _call_seconds(strategies: Iterable[type[Any]], tokens: int = 1000, rounds: int = 30) -> dict[str, float]:
    """Time a call of every strategy without a model, and around it, on a text that repeats and varies; seconds."""
    ids = np.random.default_rng(0).integers(0, 200, tokens + rounds + 1)
    ids[tokens // 2 :: 7] = 5
    calls = {}
    for kind in strategies:
        if not issubclass(kind, RowDrafter):
            continue
        drafter = kind().fresh(DraftContext(1, len(ids), 1 << 31))
        drafter.begin(0, ids[: tokens - 1])
        times = []
        for size in range(tokens, tokens + rounds):
            started = time.perf_counter()
            drafter.draft([DraftRequest(0, ids[: size - 1], int(ids[size - 1]), 5, size - 1)])
            drafter.accept(0, 0, True)
            times.append(time.perf_counter() - started)
        calls[drafter.name] = statistics.median(times) + AROUND
    return calls
