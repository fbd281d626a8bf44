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
from specdec.research.bench.pair import Item, bytes_read

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
PASSES, REPEATS = 20, 3
SECONDS = 1.5  # of timed passes of one shape; slow passes are run fewer times


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Milliseconds a pass: median, least and most of REPEATS, each over up to PASSES in a row; after two that are not
    timed, as recording and compiling take the first."""
    run()
    synchronise(device)
    started = time.perf_counter()
    run()
    synchronise(device)
    once = time.perf_counter() - started
    passes = max(1, min(PASSES, int(SECONDS / REPEATS / max(once, 1e-9))))
    found = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(passes):
            run()
        synchronise(device)
        found.append((time.perf_counter() - started) / passes * 1e3)
    found.sort()
    return {"median": found[len(found) // 2], "min": found[0], "max": found[-1]}


def bandwidth(device: torch.device, size: int | None = None) -> float:
    """Bytes a second that a copy of `size` bytes moves, reads and writes counted."""
    size = COPY_BYTES[device.type] if size is None else size
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (timed(lambda: target.copy_(source), device)["median"] / 1e3)


def pass_ms(
    runner: Runner, shapes: Shapes, batch: int, width: int, length: int, capacity: int
) -> dict[str, float]:  # fmt: skip
    """Milliseconds of a pass of `width` tokens a row that ends at `length` slots, in the runner's own mode."""
    cache = runner.lease(batch, capacity)
    tokens = torch.randint(0, runner.vocab_size, (batch, width), device=runner.device)
    starts, counts = [length - width] * batch, [width] * batch
    try:
        return timed(lambda: runner.step(cache, shapes, tokens, starts, counts), runner.device)
    finally:
        runner.pool.give_back(cache)


def pass_table(contender: Own, choice: PassChoice, copy: float) -> dict[str, Any]:
    """Every batch, width and length of the config, in the contender's mode but with the widths asked for: name ->
    times, bytes a second, and the time over that of reading the weights once."""
    runner = contender.decoder.target
    read = bytes_read(runner.model)
    table: dict[str, Any] = {}
    for batch in choice.batches:
        for length in choice.lengths:
            for width in choice.widths:
                capacity = runner.pool.room(max(choice.lengths))
                shapes = Shapes.choose(runner.device, False, capacity)
                entry = pass_ms(runner, shapes, batch, shapes.width(width), length, capacity)
                table[f"batch {batch}, width {width}, {length} slots"] = {
                    "ms": entry["median"], **entry, "bytes_per_second": read / entry["median"] * 1e3,
                    "times_read_once": entry["median"] / 1e3 / (read / copy),
                }  # fmt: skip
    return table


@dataclass(frozen=True)
class PassCosts:
    """Milliseconds of the passes that a contender's rounds are made of, alone and in a row: of the target, as plain
    decoding runs them and with a draft, and of the draft."""

    plain: float
    verify: float
    draft: float

    @property
    def c(self) -> float:
        """A draft pass in units of a plain pass."""
        return self.draft / self.plain

    @property
    def v(self) -> float:
        """What a pass with a draft costs more than a plain one, in its units."""
        return self.verify / self.plain - 1


def pass_costs(contender: Own, item: Item, max_new_tokens: int, drafted: int) -> PassCosts:
    """The passes of a call of `item`, half way through its output, with the shapes that the engine chooses; `drafted`:
    tokens of a typical draft."""
    decoder, batch = contender.decoder, len(item.prompts)
    target, draft = decoder.target, decoder.draft
    exact = decoder.resolve_exact(contender.generation.exact, contender.strategies)
    needed = item.longest + max_new_tokens
    length = item.longest + max_new_tokens // 2
    capacity = target.pool.room(needed)
    shapes = Shapes.choose(target.device, exact, capacity)
    widths = [shapes.width(min(n, shapes.verify_width)) for n in (1, 1 + drafted)]
    plain, verify = (pass_ms(target, shapes, batch, max(w, 1), max(length, w), capacity)["median"] for w in widths)
    if draft is None:
        return PassCosts(plain, verify, 0.0)
    room = draft.pool.room(needed)
    own = Shapes.choose(draft.device, False, room)
    return PassCosts(plain, verify, pass_ms(draft, own, batch, own.width(1), length, room)["median"])
