"""Where the time of a round goes: torch's profiler around some rounds of one call.

On a GPU every kernel, copy and fill belongs to the part of the round that launched it: the draft's passes, the target's
verify pass, drafting beside the passes (choosing tokens, building tensors), acceptance with everything else of the
verify phase, and what follows the host read. What is replayed counts as a whole: a draft graph has the choice of tokens
in it, a verify graph the acceptance. The rest is idle. On a CPU the parts are host time. Profiling slows the
host: shares of an eager run are those of a slower one.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from specdec.errors import SpecdecError
from specdec.research.bench.contenders.own import Own
from specdec.research.bench.passes import synchronise

MARK = "specdec: "
SPAN = MARK + "rounds"
# Innermost wins: a pass lies inside its phase.
MODELS = ("draft model", "verify model", "draft graph", "verify graph")
PARTS = (*MODELS, "drafting", "acceptance", "read", "commit", "between")
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
SHOWN = 12  # kernels of a part that are listed by name, those that take most first
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def profile_rounds(
    contender: Own, prompt: Sequence[int], max_new_tokens: int, rounds: int, skip: int
) -> dict[str, Any]:
    """The table of `rounds` rounds of one row, after `skip` that are not looked at; fewer where the row ends."""
    decoder = contender.decoder
    options = {**contender.generate_options, "max_new_tokens": max_new_tokens, "ignore_eos": True, "batch_size": 1}
    call = decoder._call([list(prompt)], contender.strategies, **options)
    device = decoder.target.device
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with call:
        running = call.run()
        seen = sum(1 for _ in zip(range(skip), running, strict=False))
        synchronise(device)
        # Memory, shapes and stacks stay off: they would slow the host further.
        with marked(decoder, call.engine), profile(activities=activities) as found, record_function(SPAN):
            looked = sum(1 for _ in zip(range(rounds), running, strict=False))
            synchronise(device)
    if not looked:
        raise SpecdecError(f"the row ended after {seen} rounds, before those to be profiled")
    return {"rounds": looked, "after": seen, **table(events(found), looked, on_gpu)}


@contextmanager
def marked(decoder: Any, engine: Any) -> Iterator[None]:
    """Name the parts of a round in the profile while entered: phases are the engine's methods, passes the runners'."""
    places: list[tuple[Any, str, str]] = []
    for role, runner in (("draft", decoder.draft), ("verify", decoder.target)):
        if runner is not None:
            places.append((runner, "compute", f"{role} model"))
        if runner is not None and runner.graphs is not None:
            places.append((runner, "run", f"{role} graph"))
    places += [(engine, "draft", "drafting"), (engine.verifier, "launch", "acceptance")]
    places += [(engine.verifier.reader, "fetch_named", "read"), (engine, "commit", "commit")]
    with ExitStack() as stack:
        for owner, method, part in places:
            setattr(owner, method, _named(getattr(owner, method), MARK + part))
            stack.callback(owner.__dict__.pop, method)
        yield


def _named(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    def named(*arguments: Any, **options: Any) -> Any:
        with record_function(name):
            return run(*arguments, **options)

    return named


def events(found: Any) -> list[dict[str, Any]]:
    """The profile's complete events as Kineto writes them: cat, name, ts and dur in microseconds, args."""
    with tempfile.TemporaryDirectory(prefix="specdec-profile-") as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        traced = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [e for e in traced if e.get("ph") == "X"]


@dataclass(frozen=True)
class Mark:
    """A named stretch of host time, in microseconds."""

    part: str
    start: float
    end: float
    name: str = ""
    launch: Any = None  # of a kernel: what it shares with the others that one call has launched


def table(traced: Sequence[dict[str, Any]], rounds: int, on_gpu: bool) -> dict[str, Any]:
    """Milliseconds, share of the span and kernels (host: calls) a round, by part.

    From `events`: on a GPU `parts` are device time and `idle` is what they leave of the span, which reaches from the
    first kernel to the last; `outside_graphs`: in the replay of no graph, each from its first kernel to its last;
    `host_waits` is time in synchronising calls; `by_kernel`: of each part, what takes most.
    On a CPU parts are host time.
    """
    marks = _marks(traced)
    span = next(m for m in marks if m.part == "rounds")
    parts = [m for m in marks if m.part != "rounds"]
    if not on_gpu:
        spent, counts = _host_times(parts, span)
        whole = span.end - span.start
        return {"device": "cpu", "span_ms": whole / 1e3 / rounds, "parts": _rows(spent, counts, whole, rounds)}
    kernels = _kernels(traced, parts, span)
    if not kernels:
        return {"device": "cuda", "error": "the profiler saw no kernels"}
    spent, counts = defaultdict[str, float](float), Counter[str]()
    for kernel in kernels:
        spent[kernel.part] += kernel.end - kernel.start
        counts[kernel.part] += 1
    whole = max(k.end for k in kernels) - min(k.start for k in kernels)
    busy = covered((k.start, k.end) for k in kernels)
    calls = [e for e in traced if e.get("cat") in ("cuda_runtime", "cuda_driver") and _inside(e, span)]
    launches = sum("Launch" in e["name"] for e in calls)
    waits = sum(e["dur"] for e in calls if e["name"] in WAITS)
    models = sum(spent.get(part, 0.0) for part in MODELS)
    replayed = {e["args"]["correlation"] for e in calls if "GraphLaunch" in e["name"]}
    ms = {"span_ms": whole, "idle_ms": whole - busy, "host_ms": span.end - span.start - waits, "host_waits_ms": waits}
    return {
        "device": "cuda",
        "parts": _rows(spent, counts, whole, rounds),
        **{name: us / 1e3 / rounds for name, us in ms.items()},
        "idle_share": 1 - busy / whole,
        "outside_models_share": 1 - models / whole,
        "outside_graphs_share": 1 - covered(_stretches(kernels, replayed)) / whole if replayed else None,
        "kernels": len(kernels) / rounds,
        "launches": launches / rounds,
        "by_kernel": _by_kernel(kernels, rounds),
    }


def _marks(traced: Iterable[dict[str, Any]]) -> list[Mark]:
    named = [e for e in traced if e.get("cat") == "user_annotation" and e["name"].startswith(MARK)]
    return [Mark(e["name"].removeprefix(MARK), e["ts"], e["ts"] + e["dur"]) for e in named]


def _inside(event: dict[str, Any], span: Mark) -> bool:
    return bool(span.start <= event["ts"] <= span.end)


def _innermost(parts: Sequence[Mark], at: float) -> str:
    holding = [m for m in parts if m.start <= at <= m.end]
    return min(holding, key=lambda m: m.end - m.start).part if holding else "between"


def _kernels(traced: Sequence[dict[str, Any]], parts: Sequence[Mark], span: Mark) -> list[Mark]:
    """What ran on the device, with the part that launched it; of a graph, all that it holds."""
    launched: dict[Any, float] = {}
    for event in traced:
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and _inside(event, span):
            launched[event.get("args", {}).get("correlation")] = event["ts"]
    names = {c: _innermost(parts, at) for c, at in launched.items()}
    ran = [e for e in traced if e.get("cat") in KERNELS and e.get("args", {}).get("correlation") in launched]
    return [Mark(names[c := e["args"]["correlation"]], e["ts"], e["ts"] + e["dur"], e["name"], c) for e in ran]


def _stretches(kernels: Iterable[Mark], launches: set[Any]) -> list[tuple[float, float]]:
    """From the first kernel to the last of each launch."""
    found: dict[Any, tuple[float, float]] = {}
    for k in kernels:
        if k.launch in launches:
            start, end = found.get(k.launch, (k.start, k.end))
            found[k.launch] = min(start, k.start), max(end, k.end)
    return list(found.values())


def _by_kernel(kernels: Sequence[Mark], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """List the SHOWN kernels of each part that take most time: name, count a round, microseconds each."""
    spent, counts = defaultdict[tuple[str, str], float](float), Counter[tuple[str, str]]()
    for kernel in kernels:
        spent[kernel.part, kernel.name] += kernel.end - kernel.start
        counts[kernel.part, kernel.name] += 1
    listed: dict[str, list[dict[str, Any]]] = {}
    for part, name in sorted(spent, key=lambda k: -spent[k]):
        rows, count = listed.setdefault(part, []), counts[part, name]
        if len(rows) < SHOWN:
            rows.append({"kernel": name[:120], "count": count / rounds, "us": spent[part, name] / count})
    return listed


def _host_times(parts: Sequence[Mark], span: Mark) -> tuple[dict[str, float], Counter[str]]:
    """Microseconds of each part without the parts inside it, and how often it ran."""
    spent, counts = defaultdict[str, float](float), Counter[str]()
    for mark in parts:
        inner = [m for m in parts if m is not mark and mark.start <= m.start and m.end <= mark.end]
        spent[mark.part] += mark.end - mark.start - covered((m.start, m.end) for m in inner)
        counts[mark.part] += 1
    spent["between"] += span.end - span.start - covered((m.start, m.end) for m in parts)
    return spent, counts


def covered(stretches: Iterable[tuple[float, float]]) -> float:
    """Length of the union of stretches."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(stretches):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _rows(spent: dict[str, float], counts: Counter[str], whole: float, rounds: int) -> dict[str, dict[str, float]]:
    named = [part for part in PARTS if part in spent]
    return {
        part: {"ms": spent[part] / 1e3 / rounds, "share": spent[part] / whole, "count": counts[part] / rounds}
        for part in named
    }
