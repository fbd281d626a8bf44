"""One scenario: warm up every contender, then run them in turns, call by call, in an order that rotates."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from specdec.decoding.provenance import hash_ids
from specdec.files.texts import failure
from specdec.research.bench import figures
from specdec.research.bench.config import Scenario
from specdec.research.bench.contenders import Contender, Output, Own
from specdec.research.bench.pair import Item, Pair
from specdec.research.bench.passes import pass_costs, synchronise
from specdec.research.exactness.equality import first_difference

WARM_UPS = 2  # the first compiles and records; what graph pools still settle is settled after the second
AGAIN = 4  # times that a run is made anew in which something was recorded: prompts' chunks are when they come again
Progress = Callable[[str], None]


@dataclass
class ScenarioRun:
    """The run of a scenario.

    order: contenders, the reference first; those that fail leave it.
    until: time of `time.perf_counter` at which it should be over: no repeat starts that would end later, but the first.
    entries: what the result says of each contender.
    runs: one entry a call.
    firsts: every contender's first run, by its name and the number of the call.
    stopped: whether somebody interrupted it; its entry is then of the whole repeats, or of the calls of the first.
    """

    name: str
    scenario: Scenario
    pair: Pair
    calls: list[Item]
    order: list[Contender]
    until: float | None
    progress: Progress
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    firsts: dict[tuple[str, int], Output] = field(default_factory=dict)
    stopped: bool = False

    def run(self) -> dict[str, Any]:
        """The scenario's entry in the result. Raises KeyboardInterrupt where it is interrupted before the first call is
        done."""
        started = time.perf_counter()
        for contender in list(self.order):
            self._warm_up(contender)
        warm = time.perf_counter()
        self._repeats()
        done = time.perf_counter()
        self._summarise()
        rows = [prompt for call in self.calls for prompt in call.prompts]
        return {
            "settings": asdict(self.scenario),
            "prompts": [name for call in self.calls for name in call.ids],
            "prompt_tokens": [len(ids) for ids in rows],
            "prompt_hashes": [hash_ids(ids) for ids in rows],
            "chat_template": self.calls[0].template,
            "seconds": {"warm_up": warm - started, "runs": done - warm},
            **({"interrupted": True} if self.stopped else {}),
            "contenders": self.entries,
            "runs": self.runs,
        }

    def _repeats(self) -> None:
        took = 0.0
        for repeat in range(self.scenario.repeats):
            begun = time.perf_counter()
            if repeat and self.until is not None and begun + took > self.until:
                break
            try:
                for i in range(len(self.calls)):
                    self._turn(repeat, i)
            except KeyboardInterrupt:
                self.runs = [r for r in self.runs if r["repeat"] < repeat] or self.runs
                if not self.runs:
                    raise
                self.stopped = True
                break
            took = time.perf_counter() - begun

    def _warm_up(self, contender: Contender) -> None:
        if (reason := contender.refuses(self.scenario.batch)) is not None:
            self._drop(contender, {"skipped": reason})
            return
        self.progress(f"{self.name}: warming up {contender.name}")
        begun, memory = time.perf_counter(), Memory.before(self.pair, contender)
        output = None
        for _ in range(WARM_UPS):
            memory.reset()
            output = self._guarded(contender, self.calls[0])
        if output is not None:
            needed = self.calls[0].longest + self.scenario.max_new_tokens
            entry = {"warm_up_s": time.perf_counter() - begun, "version": contender.version()}
            self.entries[contender.name] = {**entry, "memory": memory.after(self.scenario.batch, needed)}

    def _turn(self, repeat: int, i: int) -> None:
        """Every contender on one call."""
        turn = (repeat + i) % max(1, len(self.order))
        done: list[tuple[Contender, Output, dict[str, Any]]] = []
        for contender in self.order[turn:] + self.order[:turn]:
            self.progress(f"{self.name}: {contender.name}, call {i + 1} of {len(self.calls)}, repeat {repeat + 1}")
            output, seconds = self._timed(contender, self.calls[i])
            for _ in range(AGAIN):
                # Passes that were recorded or compiled during the run: it was not warm.
                passes = {} if output is None else output.figures.get("compile", {})
                if not any(report["captured"] for report in passes.values()):
                    break
                output, seconds = self._timed(contender, self.calls[i])  # a shape that the warm-up did not meet
            if output is not None:
                place = {"contender": contender.name, "repeat": repeat, "call": i, "seconds": seconds}
                counted = {name: value for name, value in output.figures.items() if name != "compile"}
                done.append((contender, output, {**place, "tokens": sum(map(len, output.token_ids)), **counted}))
                self.firsts.setdefault((contender.name, i), output)
        for contender, output, run in done:
            if "compile" in output.figures:
                self.entries[contender.name]["compile"] = output.figures["compile"]
            self.runs.append({**run, "equal": self._compare(contender, i, output.token_ids)})

    def _timed(self, contender: Contender, call: Item) -> tuple[Output | None, float]:
        synchronise(self.pair.device)
        started = time.perf_counter()
        output = self._guarded(contender, call)
        return output, time.perf_counter() - started

    def _guarded(self, contender: Contender, call: Item) -> Output | None:
        """A run that has ended on the device; None: it failed, is written down, and the contender leaves."""
        if contender not in self.order:
            return None
        try:
            output = contender.run(call.prompts, self.scenario.max_new_tokens, self.scenario.ignore_eos)
            synchronise(self.pair.device)
            return output
        except Exception as error:  # whatever another implementation trips over must not end the others
            self.runs = [r for r in self.runs if r["contender"] != contender.name]
            self._drop(contender, {"error": failure(error)})
            if self.pair.device.type == "cuda":
                torch.cuda.empty_cache()
            return None

    def _drop(self, contender: Contender, entry: dict[str, Any]) -> None:
        self.order.remove(contender)
        self.entries[contender.name] = entry

    def _compare(self, contender: Contender, i: int, rows: Sequence[Sequence[int]]) -> bool | None:
        """Whether the rows of a call are plain decoding's; None where there is nothing to compare with."""
        plain, must = self._plain_for(contender)
        theirs = self.firsts.get((plain, i)) if plain is not None else None
        if theirs is None:
            return None
        places = [first_difference(a, b) for a, b in zip(rows, theirs.token_ids, strict=True)]
        blank = {"compared_with": plain, "must": must, "rows": 0, "equal": 0, "first_difference": None}
        entry = self.entries[contender.name].setdefault("equality", blank)
        entry["rows"], entry["equal"] = entry["rows"] + len(places), entry["equal"] + places.count(None)
        differing = [row for row, at in enumerate(places) if at is not None]
        if differing and entry["first_difference"] is None:
            row = differing[0]
            entry["first_difference"] = {"prompt": self.calls[i].ids[row], "token": places[row]}
        return not differing

    def _plain_for(self, contender: Contender) -> tuple[str | None, bool]:
        """The contender to compare with, and whether ids must be equal: of the same passes, and of one shape (exact)
        or in float32 with caches in it."""
        own = [c for c in self.order if isinstance(c, Own) and c.plain]
        if isinstance(contender, Own):
            twin = next((c for c in own if contender.comparable_with(c)), None)
            if twin is not None:
                exact = contender.decoder.resolve_exact(contender.generation.exact, contender.strategies)
                return twin.name, exact or self.pair.ties_are_narrow
        return (own[0].name if own else None), False

    def _summarise(self) -> None:
        groups = {c.name: [r for r in self.runs if r["contender"] == c.name] for c in self.order}
        for contender in self.order:
            runs, entry = groups[contender.name], self.entries[contender.name]
            entry |= figures.summary(runs)
            if lines := contender.warnings([o for (name, _), o in self.firsts.items() if name == contender.name]):
                entry["warnings"] = lines
            first = self.order[0].name
            if contender.name != first:
                entry[f"over_{first}"] = figures.speed_ratio(runs, groups[first]).to_dict()
            plain = self._plain_for(contender)[0]
            if isinstance(contender, Own) and plain is not None and not self.stopped:
                self.progress(f"{self.name}: passes of {contender.name}")
                typical, length = self.calls[len(self.calls) // 2], round(entry["draft_length"])
                own = figures.draft_pass_ms(runs)
                costs = pass_costs(contender, typical, self.scenario.max_new_tokens, length, own)
                entry["theory"] = figures.prediction(runs, groups[plain], costs)


@dataclass
class Memory:
    """What a contender takes on the GPU: the weights, and how much more is allocated at most in its last warm-up than
    before its first. Caches that its decoder had before count as its own. None on a CPU."""

    pair: Pair
    contender: Contender
    allocated: int

    @staticmethod
    def before(pair: Pair, contender: Contender) -> Memory:
        held = 0
        if pair.device.type == "cuda":
            held = torch.cuda.memory_allocated(pair.device)
            if isinstance(contender, Own):
                caches = [runner.pool.idle for runner in contender.decoder._runners().values()]
                held -= sum(cache.nbytes for cache in caches if cache is not None)
        return Memory(pair, contender, held)

    def reset(self) -> None:
        """Start looking for the highest anew."""
        if self.pair.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.pair.device)

    def after(self, batch: int, tokens: int) -> dict[str, Any] | None:
        """Bytes, and for specdec's what the pair report says of so many rows and tokens."""
        if self.pair.device.type != "cuda":
            return None
        weights = self.pair.weights
        beyond = torch.cuda.max_memory_allocated(self.pair.device) - self.allocated
        found: dict[str, Any] = {"weights": weights, "beyond_weights": beyond, "total": weights + beyond}
        if isinstance(self.contender, Own):
            said = self.contender.decoder.report.memory(batch, tokens)["total"]
            found |= {"pair_report": said, "to_pair_report": found["total"] / said}
        return found
