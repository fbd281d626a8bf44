"""Stand-ins for CUDA graphs, so that what surrounds them is tested without a GPU."""

from __future__ import annotations

from collections.abc import Callable

from specdec.graphs import PassResult


class Rerun:
    """Records by remembering the function and replays by calling it, into the tensors that recording gave out.

    As with a CUDA graph, recording itself computes nothing: the result is rubbish until the first replay. `replays`
    counts.
    """

    def __init__(self) -> None:
        self.warm_ups = self.replays = 0

    def warm_up(self, run: Callable[[], PassResult]) -> None:
        self.warm_ups += 1
        run()

    def record(self, run: Callable[[], PassResult]) -> tuple[Callable[[], None], PassResult]:
        made = run().copies()
        made.logits.fill_(float("nan"))

        def replay() -> None:
            self.replays += 1
            new = run()
            made.logits.copy_(new.logits)
            for old, fresh in zip(made.hidden or (), new.hidden or (), strict=True):
                old.copy_(fresh)

        return replay, made


class Frozen(Rerun):
    """A broken recorder: a replay repeats what was recorded, whatever the input buffers hold by then."""

    def record(self, run: Callable[[], PassResult]) -> tuple[Callable[[], None], PassResult]:
        made = run().copies()

        def replay() -> None:
            self.replays += 1

        return replay, made


class Refusing(Rerun):
    """A recorder to which every pass is beyond what can be recorded."""

    def record(self, run: Callable[[], PassResult]) -> tuple[Callable[[], None], PassResult]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")
