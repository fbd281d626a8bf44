"""Functions recorded once and replayed: CUDA graphs, and the compiled variants that are recorded inside them.

A pass of a model is hundreds of small kernels; launched one by one from Python they take longer than the GPU takes to
run them. A graph replays them with one launch. Only the contents of its inputs may change: shapes, the K/V length, the
rows and every address are fixed, those of weights and cache included. So a graph is made per key and per signature of
its inputs (`Buffers.signature`), lives with the cache that it writes to (`RaggedCache.graphs`), is dropped when the
model's weights have moved, and reads its inputs from buffers of its own that are refilled before each replay.

A *recorded function* maps `Buffers` to `Buffers`, computes on the device alone, and is fully described by its key and
that signature; so no key names a shape of its inputs, and none can forget one. One pass of a model is such a function
(`PassKey`); so are a pass with acceptance (decoding/verify_pass.py) and all draft steps of a round
(drafters/draft_model/core.py). A function that cannot be recorded is simply called, and its passes are recorded one by
one.

Recording hides in the small `Recorder` protocol, so that all else here runs, and is tested, without a GPU.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch

from specdec.device.buffers import Buffers
from specdec.device.memory import forget, is_out_of_memory
from specdec.device.transfer import sync_allowed
from specdec.errors import SpecdecError

MODES = ("off", "graph", "inductor", "max")
# `auto` compiles models of so many layers and parameters. Layers share one compilation, so it takes some 3 s a shape of
# pass whatever the size, and saves some 75 microseconds a layer and pass (docs/speed.md): a model of 8 layers has to
# make 5,000 passes until it pays, and small models are those of tests and demonstrations, whose calls are short.
LEAST_LAYERS, LEAST_PARAMETERS = 8, 50_000_000
# A graph of a large model takes some megabytes outside its pool, and prompts of many lengths would make many.
PREFILL_LIMIT = 64

NO_ROOM = object()  # in place of a recording for which memory did not suffice

log = logging.getLogger("specdec")
_recording = threading.Lock()


def check_compile(value: Any) -> None:
    """Raise SpecdecError for an unknown value of `compile`."""
    if not isinstance(value, str) or value not in ("auto", *MODES):
        raise SpecdecError(f"compile must be 'auto', {', '.join(map(repr, MODES))}, got {value!r}")


class Choice(NamedTuple):
    """How the passes of a model run, and why not in the mode that was asked for (under `auto`: not in "max")."""

    mode: str
    reason: str | None = None


def choose_mode(value: str, model: Any, layers: int, device: torch.device) -> Choice:
    """Choose the mode of a model of `layers` layers: a rule, not a trial, since another kernel is another text.

    `auto` = "max" on a CUDA device, "graph" for small models there, "off" elsewhere. Warns if `value` cannot be had.
    """
    check_compile(value)
    if value == "off":
        return Choice("off")
    reason = None
    if device.type != "cuda":
        reason = f"needs a CUDA device: the passes on {device.type} run eagerly"
    elif len({p.device for p in model.parameters()}) > 1:
        reason = "does not go with a model on several devices, which runs eagerly"
    if reason is not None:
        if value != "auto":
            warnings.warn(f"compile={value!r} {reason}", stacklevel=3)
        return Choice("off", f"compile={value!r} {reason}")
    if value != "auto":
        return Choice(value)
    reason = _why_not_compiled(model, layers)
    return Choice("max" if reason is None else "graph", reason)


def _why_not_compiled(model: Any, layers: int) -> str | None:
    """Say why `auto` does not compile a model; None if it does."""
    parameters = sum(p.numel() for p in model.parameters())
    if layers < LEAST_LAYERS or parameters < LEAST_PARAMETERS:
        return (
            f"compiling pays from {LEAST_LAYERS} layers and {LEAST_PARAMETERS:,} parameters on; the model has {layers} "
            f"and {parameters:,}"
        )
    if importlib.util.find_spec("triton") is None:
        log.warning("%s is not compiled: torch.compile needs triton", type(model).__name__)
        return "torch.compile needs triton, which is not installed"
    return None


I = TypeVar("I", bound=Buffers)  # noqa: E741
R = TypeVar("R", bound=Buffers)


class Recorder(Protocol):
    """Makes a function repeatable."""

    def warm_up(self, run: Callable[[], Buffers]) -> None:
        """Run once before recording, so that first-use allocation and compilation are over."""

    def record(self, run: Callable[[], R]) -> tuple[Callable[[], None], R]:
        """Return (replay, result): `replay()` does what `run` did, from the same input buffers into `result`."""


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for warm-up, one per device: cuBLAS keeps tens of megabytes for each stream it met."""
    return torch.cuda.Stream(device)


_recorded: WeakSet[torch.cuda.CUDAGraph] = WeakSet()


@atexit.register
def _let_go() -> None:
    """Drop all recordings of a process that ends: a communicator waits for those that hold it before it goes."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for graph in list(_recorded):
            graph.reset()


class CudaRecorder:
    """CUDA graphs of one model, in one pool of memory: they never run at the same time, and what they return is copied
    before the next one runs.

    They are recorded on a stream of their own, so that cuBLAS takes its workspace for that stream from their pool, and
    it lives as long as they do. An older workspace is freed when anybody clears those of the process, as torch.compile
    does before it records graphs of its own; the next replay would then write to memory that is somebody else's.
    (torch hands out 32 streams per device in turns: a process that takes many more can get one that has run.)
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._open()

    def _open(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.device)
        # The workspace outlives the graphs of a cache that is given up. A pool with memory but without graphs takes no
        # new ones, so an empty graph stays as long as the recorder does.
        self.anchor = torch.cuda.CUDAGraph()
        with warnings.catch_warnings(), self._into(self.anchor):
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")

    @contextmanager
    def _into(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Record the block into `graph`."""
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
        ):
            yield

    def warm_up(self, run: Callable[[], Buffers]) -> None:
        current, aside = torch.cuda.current_stream(self.device), side_stream(self.device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            run()
        current.wait_stream(aside)

    def record(self, run: Callable[[], R]) -> tuple[Callable[[], None], R]:
        graph = torch.cuda.CUDAGraph()
        _recorded.add(graph)
        random = torch.cuda.default_generators[self.device.index or 0]
        state = random.clone_state()
        try:
            with self._into(graph):
                result = run()
        except RuntimeError:
            # Pool and generator still take the broken recording for open: the next one would fail with it, and so
            # would everything that uses the device's generator.
            self._open()
            random.graphsafe_set_state(state)
            raise
        return graph.replay, result


@dataclass(frozen=True)
class Recorded(Generic[I, R]):
    """A function that can be replayed: its input buffers, and the result that a replay fills."""

    inputs: I
    replay: Callable[[], None]
    result: R
    is_prefill: bool

    def __call__(self, inputs: I) -> R:
        """Replay; the result is a copy, because other graphs share this one's memory."""
        self.inputs.refill(inputs)
        self.replay()
        return self.result.copies()


class Graphs:
    """The recorded functions of one model. A kind whose recording fails is never recorded again.

    captures: functions recorded so far
    seconds: time that took, warm-up and compilation included
    failures: kind of function -> why it is not recorded
    no_room: recordings for which memory did not suffice
    busy: a recording is going on, so passes inside it just run
    """

    def __init__(self, recorder: Recorder, name: str):
        self.recorder, self.name = recorder, name
        self.captures = 0
        self.seconds = 0.0
        self.failures: dict[str, str] = {}
        self.no_room = 0
        self.busy = False

    def run(
        self,
        known: dict[Hashable, Any],
        key: Hashable,
        inputs: I,
        compute: Callable[[I], R],
        is_prefill: bool = False,
        idle: I | None = None,
    ) -> R:
        """Replay `compute` from `known`, the recordings of a cache; record it first if key or signature are new.

        key: a named tuple of all that `compute` depends on, except its inputs and their signature
        is_prefill: compute it the first time; most prompts never come again
        idle: inputs for which `compute` changes nothing; a function that must not run twice is recorded with them
        """
        kind = type(key).__name__
        if self.busy or kind in self.failures:
            return compute(inputs)
        place = (kind, inputs.signature()), key
        recorded: Any = known.get(place)
        if recorded is None and is_prefill and (place not in known or _recorded_prefills(known) >= PREFILL_LIMIT):
            known[place] = None
            return compute(inputs)
        if recorded is None:
            started = time.perf_counter()
            # What another thread runs on the side stream would become part of the recording.
            with _recording, sync_allowed(next(inputs.tensors()).device):
                recorded = self._record(kind, inputs if idle is None else idle, compute, is_prefill)
            self.seconds += time.perf_counter() - started
            if recorded is None:
                return compute(inputs)
            known[place] = recorded
        return compute(inputs) if recorded is NO_ROOM else recorded(inputs)

    def _record(self, kind: str, inputs: I, compute: Callable[[I], R], is_prefill: bool) -> Any:
        """Record a function: `Recorded`, or NO_ROOM, or None if no function of its kind can be recorded."""
        fixed = inputs.copies()

        def run() -> R:
            self.busy = True
            try:
                return compute(fixed)
            finally:
                self.busy = False

        # A function that fails here fails eagerly as well: that is the caller's error, not one of recording.
        self.recorder.warm_up(run)
        try:
            replay, result = self.recorder.record(run)
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._say_no_room(error)
                return NO_ROOM
            self._give_up(kind, str(error).strip().split("\n")[0])
            return None
        self.captures += 1
        return Recorded(fixed, replay, result, is_prefill)

    def _say_no_room(self, error: RuntimeError) -> None:
        """Memory did not suffice for a recording. With this cache the function runs eagerly; with a smaller one it is
        recorded."""
        self.no_room += 1
        said = " ".join(str(error).split())
        forget(error)
        log.warning(
            '%s: no memory is left to record a function, which runs eagerly (%s); a smaller batch or context leaves '
            'some, and compile="off" records none', self.name, said,
        )  # fmt: skip

    def _give_up(self, kind: str, reason: str) -> None:
        self.failures[kind] = reason
        how = "runs eagerly: its passes" if kind == "PassKey" else "is replayed pass by pass: larger functions"
        log.warning("%s %s cannot be recorded (%s)", self.name, how, reason)


def _recorded_prefills(known: dict[Any, Any]) -> int:
    """Count the recorded passes of prefill."""
    return sum(isinstance(found, Recorded) and found.is_prefill for found in known.values())
