"""The stopwatch of a call: phases as context managers, and marks that never make the host wait."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class Span(NamedTuple):
    """A phase and the marks around it: CUDA events on a GPU, the host's clock elsewhere."""

    phase: str
    start: Any
    end: Any


class Clock:
    """Measures the phases of each pass.

    `totals` (seconds by phase) grow in `settle`, while the host is idle. A phase that starts `early` belongs to the
    next pass.
    """

    def __init__(self, device: torch.device):
        self.device, self.cuda = device, device.type == "cuda"
        self.totals: dict[str, float] = defaultdict(float)
        self.now: list[Span] = []  # this pass
        self.next: list[Span] = []  # started early
        self.past: list[Span] = []  # not added to `totals` yet
        self.entered = ""  # the phase that began last
        self.spare: list[torch.cuda.Event] = []  # making an event takes longer than recording one

    @contextmanager
    def phase(self, name: str, early: bool = False) -> Iterator[None]:
        """Measure the block."""
        self.entered, start = name, self._mark()
        yield
        (self.next if early else self.now).append(Span(name, start, self._mark()))

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = self.spare.pop() if self.spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))  # the process's current device may be another
        return event

    def end_pass(self) -> list[Span]:
        """End the pass, after the host has read its result; returns its spans."""
        spans, self.now, self.next = self.now, self.next, []
        self.past += spans
        return spans

    def seconds(self, spans: list[Span], *phases: str) -> dict[str, float]:
        """Return seconds of some phases of a pass."""
        took = dict.fromkeys(phases, 0.0)
        for span in spans:
            if span.phase in took:
                took[span.phase] += self._length(span)
        return took

    def settle(self, wait: bool = False) -> None:
        """Add the passes before this one to `totals`; without `wait`, what the device has not ended is left for later.

        A drafter's `observe` may still run when the host has read the pass's result.
        """
        past, self.past = self.past, []
        for span in past:
            if self.cuda and not wait and not span.end.query():
                self.past.append(span)
                continue
            self.totals[span.phase] += self._length(span)
            if self.cuda:
                self.spare += [span.start, span.end]

    def _length(self, span: Span) -> float:
        if not self.cuda:
            return float(span.end - span.start)
        span.end.synchronize()
        return float(span.start.elapsed_time(span.end)) / 1000
