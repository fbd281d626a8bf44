"""Single passes of a model, timed in a row, and the copy that says how fast memory is.

A copy's bandwidth counts the bytes read and the bytes written. A pass that reads the weights once cannot take less than
their size over it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from specdec.models.runner import Runner, Shapes
from specdec.research.bench.config import PassChoice
from specdec.research.bench.contenders.own import Own
from specdec.research.bench.pair import Item
from specdec.research.models.choice import bytes_read
from specdec.theory import Costs

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
PASSES, REPEATS = 20, 3
SECONDS = 1.5  # of timed passes of one shape; slow passes are run fewer times


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Milliseconds of a pass: median, least and most of REPEATS, each over up to PASSES in a row; after two that are
    not timed, as recording and compiling take the first."""

    def seconds(passes: int) -> float:
        started = time.perf_counter()
        for _ in range(passes):
            run()
        synchronise(device)
        return (time.perf_counter() - started) / passes

    seconds(1)
    passes = max(1, min(PASSES, int(SECONDS / REPEATS / max(seconds(1), 1e-9))))
    found = sorted(1e3 * seconds(passes) for _ in range(REPEATS))
    return {"median": found[len(found) // 2], "min": found[0], "max": found[-1]}


def bandwidth(device: torch.device, size: int | None = None) -> float:
    """Bytes a second that a copy of `size` bytes moves, reads and writes counted."""
    size = COPY_BYTES[device.type] if size is None else size
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (timed(lambda: target.copy_(source), device)["median"] / 1e3)


def pass_ms(runner: Runner, shapes: Shapes, batch: int, width: int, length: int, capacity: int) -> dict[str, float]:
    """Milliseconds of a pass of `width` tokens a row that ends at `length` slots, in the runner's own mode."""
    cache = runner.lease(batch, capacity)
    tokens = torch.randint(0, runner.vocab_size, (batch, width), device=runner.device)
    starts, counts = [length - width] * batch, [width] * batch

    def run() -> None:
        cache.pretend(dict(enumerate(starts)))
        runner.step(cache, shapes, tokens, starts, counts)

    try:
        return timed(run, runner.device)
    finally:
        runner.pool.give_back(cache)


def pass_table(contender: Own, choice: PassChoice, copy: float) -> dict[str, Any]:
    """Every batch, length and width of the config, in the contender's mode but with the widths asked for.

    Returns name -> times, bytes a second, and the time over that of reading the weights once, at `copy` bytes a second.
    """
    runner = contender.decoder.target
    read, capacity = bytes_read(runner.model), runner.pool.room(max(choice.lengths))
    shapes, table = Shapes.choose(runner.device, False, capacity), {}
    for batch, length, width in [(b, n, w) for b in choice.batches for n in choice.lengths for w in choice.widths]:
        entry = pass_ms(runner, shapes, batch, shapes.width(width), length, capacity)
        speed = {"bytes_per_second": read / entry["median"] * 1e3}
        speed["times_read_once"] = entry["median"] / 1e3 / (read / copy)
        table[f"batch {batch}, width {width}, {length} slots"] = {"ms": entry["median"], **entry, **speed}
    return table


@dataclass(frozen=True)
class PassCosts:
    """Milliseconds of the passes of a contender's rounds, alone and in a row: of the target as plain decoding runs them
    and with a draft, and of the draft."""

    plain: float
    verify: float
    draft: float

    @property
    def c(self) -> float:
        """A draft pass, in plain passes."""
        return self.draft / self.plain

    @property
    def v(self) -> float:
        """What a pass with a draft costs more than a plain one, in plain passes."""
        return self.verify / self.plain - 1

    @property
    def relative(self) -> Costs:
        """The same for theory, for drafts of the length that was measured."""
        return Costs(self.c, lambda drafted: self.v)


def pass_costs(contender: Own, item: Item, max_new_tokens: int, drafted: int, own: float) -> PassCosts:
    """The passes of a call of `item`, half way through its output, with the shapes that the engine chooses.

    drafted: tokens of a typical draft
    own: milliseconds of a draft pass as it was in calls, for strategies that bring their own model, such as a head
    """
    decoder, batch = contender.decoder, len(item.prompts)
    target, draft = decoder.target, decoder.draft
    exact = decoder.resolve_exact(contender.generation.exact, contender.strategies)
    needed, length = item.longest + max_new_tokens, item.longest + max_new_tokens // 2

    makes_trees = any(d.makes_trees for d in contender.strategies)  # which are verified whole, chains in chunks

    def ms(runner: Runner, fixed: bool, tokens: int) -> float:
        capacity = runner.pool.room(needed)
        shapes = Shapes.choose(runner.device, fixed, capacity, tokens if makes_trees else 0)
        width = shapes.width(min(tokens, shapes.verify_width))
        return pass_ms(runner, shapes, batch, width, max(length, width), capacity)["median"]

    plain, verify = (ms(target, exact, tokens) for tokens in (1, 1 + drafted))
    is_asked = any(d.uses_draft_model for d in contender.strategies)
    return PassCosts(plain, verify, own if draft is None or not is_asked else ms(draft, False, 1))
