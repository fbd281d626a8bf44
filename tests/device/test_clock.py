"""The clock never asks the device for a time that it has not reached."""

from __future__ import annotations

import itertools

import pytest
import torch

from specdec.device.clock import Clock


class Event:
    """A CUDA event of a device that has come as far as `reached`; waiting for an event lets it come that far."""

    reached = 0
    numbers = itertools.count(1)

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self, stream: str) -> None:
        assert stream == "the stream of cuda:1"
        self.at = next(Event.numbers)

    def query(self) -> bool:
        return self.at <= Event.reached

    def synchronize(self) -> None:
        Event.reached = max(Event.reached, self.at)

    def elapsed_time(self, end: Event) -> float:
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1000.0 * (end.at - self.at)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "reached", 0)
    monkeypatch.setattr(Event, "numbers", itertools.count(1))
    # Not the current device's: another may be current than the model's.
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    return Clock(torch.device("cuda:1"))


def test_settling_does_not_wait_for_work_that_goes_on_after_the_read(clock: Clock) -> None:
    for _ in range(2):
        with clock.phase("draft"):
            pass
        with clock.phase("verify"):
            pass
    clock.end_pass()
    Event.reached = 3  # the first draft, and the start of the first pass
    clock.settle()
    assert dict(clock.totals) == {"draft": 1.0}
    assert Event.reached == 3
    Event.reached = 6
    clock.settle()
    assert dict(clock.totals) == {"draft": 2.0, "verify": 1.0}
    clock.settle(wait=True)
    assert dict(clock.totals) == {"draft": 2.0, "verify": 2.0}
    assert not clock.past
    assert len(clock.spare) == 8


def test_the_times_of_one_pass_are_waited_for(clock: Clock) -> None:
    with clock.phase("verify"):
        pass
    assert clock.seconds(clock.end_pass(), "draft", "verify") == {"draft": 0.0, "verify": 1.0}
