"""Stand-ins for CUDA graphs, so that what surrounds them is tested without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from specdec.device.buffers import Buffers
from specdec.device.graphs import R, Recorded
from specdec.models.passes import PassResult


@contextmanager
def replayed() -> Iterator[Counter[str]]:
    """Count replays by what they return: PassResult (prefill among them), Proposal or Verified."""
    found = Counter[str]()
    real = Recorded.__call__

    def counted(program: Recorded[Any, Any], inputs: Any) -> Any:
        found[type(program.result).__name__] += 1
        return real(program, inputs)

    with mock.patch.object(Recorded, "__call__", counted):
        yield found


class Rerun:
    """Records by remembering the function and replays by calling it, into the tensors that recording gave out.

    As with a CUDA graph, recording itself computes nothing: the result is rubbish until the first replay. `replays`
    counts.
    """

    def __init__(self) -> None:
        self.warm_ups = self.replays = 0

    def warm_up(self, run: Callable[[], Buffers]) -> None:
        self.warm_ups += 1
        run()

    def record(self, run: Callable[[], R]) -> tuple[Callable[[], None], R]:
        made = run().copies()
        for tensor in made.tensors():
            tensor.fill_(float("nan") if tensor.is_floating_point() else -7)

        def replay() -> None:
            self.replays += 1
            made.refill(run())

        return replay, made


class Frozen(Rerun):
    """A broken recorder: a replay repeats what was recorded, whatever the input buffers hold by then."""

    def record(self, run: Callable[[], R]) -> tuple[Callable[[], None], R]:
        made = run().copies()

        def replay() -> None:
            self.replays += 1

        return replay, made


class Refusing(Rerun):
    """A recorder to which every pass is beyond what can be recorded."""

    def record(self, run: Callable[[], R]) -> tuple[Callable[[], None], R]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


class OnlyPasses(Rerun):
    """A recorder that takes single passes of a model, and nothing larger."""

    def record(self, run: Callable[[], R]) -> tuple[Callable[[], None], R]:
        if not isinstance(run(), PassResult):
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().record(run)
