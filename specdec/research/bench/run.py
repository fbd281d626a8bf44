"""`specdec bench CONFIG`: a benchmark from a file, in one process.

All contenders share the two models, run warm and in turns, call by call (scenario.py). Beside them: a copy's bandwidth,
single passes, a profile of some rounds, and the targets of the config. What fails is written down and does not stop
the rest.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from specdec.decoding.provenance import device_name
from specdec.decoding.timing import measure_costs
from specdec.errors import SpecdecError
from specdec.research.bench.config import BenchConfig
from specdec.research.bench.contenders import Contender, Own, make_contender
from specdec.research.bench.document import origin
from specdec.research.bench.pair import Pair, items
from specdec.research.bench.passes import bandwidth, pass_table
from specdec.research.bench.profile import profile_rounds
from specdec.research.bench.scenario import ScenarioRun
from specdec.research.bench.targets import judge
from specdec.research.prompts.datasets import load_prompts
from specdec.research.prompts.sources import HUB

Progress = Callable[[str], None]


def run_bench(
    config: BenchConfig,
    name: str,
    progress: Progress = lambda what: None,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Run a benchmark; `save` gets the result so far after every part. Raises SpecdecError for a config that cannot
    run and for models that cannot be loaded."""
    contenders = {n: make_contender(n, options) for n, options in config.contenders.items()}
    _check(config, contenders)
    started = time.perf_counter()
    progress("building the models")
    pair = Pair.build(config.models)
    for contender in contenders.values():
        contender.enter(pair)
    result: dict[str, Any] = {
        "benchmark": "bench", "name": name, **origin(), "device": device_name(pair.device), "config": config.to_dict(),
        "models": pair.facts(), "seconds": {"models": time.perf_counter() - started}, "scenarios": {}, "passes": {},
        "profile": {},
        "contenders": {n: {"kind": c.kind, "version": c.version(), **c.settings()} for n, c in contenders.items()},
    }  # fmt: skip
    try:
        progress("measuring a copy")
        result["copy"] = {"bytes_per_second": bandwidth(pair.device), "counted": "bytes read and bytes written"}
        _Run(config, pair, contenders, result, started, progress, save).all()
    finally:
        pair.close()
    return result


def _check(config: BenchConfig, contenders: Mapping[str, Contender]) -> None:
    reference = contenders[config.reference]
    if not isinstance(reference, Own) or not reference.plain:
        raise SpecdecError(f"reference: {config.reference!r} must be plain decoding: kind specdec without strategies")
    for part, choice in (("passes", config.passes), ("profile", config.profile), ("costs", config.costs)):
        for name in choice.contenders if choice is not None else ():
            if not isinstance(contenders[name], Own):
                raise SpecdecError(f"{part}: contender {name!r} must be of kind specdec")
    measured = [c for n, c in contenders.items() if config.costs and n in config.costs.contenders]
    if len({c.passes for c in measured if isinstance(c, Own)}) > 1:
        raise SpecdecError("costs: contenders differ in compile, draft_compile, exact or fuse: one table is not theirs")
    for contender in measured:
        if "costs" in contender.options.generate:
            raise SpecdecError(f"costs: contender {contender.name!r} names a table of its own")
    if not config.data.dataset.startswith(HUB):
        load_prompts(config.data.dataset, config.data.categories)  # before models are built for nothing


@dataclass
class _Run:
    config: BenchConfig
    pair: Pair
    contenders: Mapping[str, Contender]
    result: dict[str, Any]
    started: float
    progress: Progress
    save: Callable[[dict[str, Any]], None]

    def all(self) -> None:
        """Costs and passes, then the scenarios in the config's order, each with its profile."""
        self._costs()
        self._passes()
        self._finish()
        profiled = self.config.profile.scenario if self.config.profile else None
        for name in self.config.scenarios:
            self._scenario(name)
            if self.config.profile and profiled in (None, name):
                self._profiles(name)
                profiled = ""  # one scenario has the profile
            self._finish()

    def _finish(self) -> None:
        self.result["targets"] = judge(self.result, self.config.targets)
        self.result["seconds"]["total"] = time.perf_counter() - self.started
        self.save(self.result)

    def _costs(self) -> None:
        """Measure the table that contenders choose lengths from, once, and keep it."""
        choice = self.config.costs
        if choice is None or not choice.contenders:
            return
        self.progress("measuring what passes cost")
        own = [c for n, c in self.contenders.items() if n in choice.contenders and isinstance(c, Own)]
        how = (choice.batches, choice.contexts, choice.widths, choice.repeats)
        self.result["costs"] = _tried(lambda: measure_costs(own[0].decoder, *how).to_dict())
        for contender in own:
            contender.measured = self.result["costs"]

    def _passes(self) -> None:
        choice = self.config.passes
        for name in choice.contenders if choice is not None else ():
            self.progress(f"single passes of {name}")
            contender = self.contenders[name]
            assert isinstance(contender, Own) and choice is not None
            self.result["passes"][name] = _tried(pass_table, contender, choice, self.result["copy"]["bytes_per_second"])

    def _scenario(self, name: str) -> None:
        scenario = self.config.scenarios[name]
        taking = [self.contenders[n] for n in self.config.taking_part(scenario)]
        calls = items(self.pair, self.config.data, scenario)
        self._tidy()
        run = ScenarioRun(name, scenario, self.pair, calls, taking, self._until(name), self.progress)
        self.result["scenarios"][name] = run.run()

    def _until(self, name: str) -> float | None:
        """When a scenario should be over: its share of the time that is left to it and to those behind it."""
        if self.config.minutes is None:
            return None
        names = list(self.config.scenarios)
        shares = [self.config.scenarios[n].share for n in names[names.index(name) :]]
        now = time.perf_counter()
        left = self.started + 60 * self.config.minutes - now
        return now + left * shares[0] / max(sum(shares), 1e-9)

    def _profiles(self, name: str) -> None:
        choice = self.config.profile
        assert choice is not None
        scenario = self.config.scenarios[name]
        prompt = items(self.pair, self.config.data, replace(scenario, batch=1))[0].prompts[0]
        for which in choice.contenders:
            self.progress(f"profile of {which}")
            own = self.contenders[which]
            assert isinstance(own, Own)
            self.result["profile"][which] = _tried(
                profile_rounds, own, prompt, scenario.max_new_tokens, choice.rounds, choice.skip
            )

    def _tidy(self) -> None:
        """Let go of caches of other shapes, so that scenarios do not share a device's memory."""
        for decoder in self.pair.decoders.values():
            for runner in decoder._runners().values():
                runner.pool.idle = None
        gc.collect()
        if self.pair.device.type == "cuda":
            torch.cuda.empty_cache()


def _tried(measure: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """A part's figures, or its error in one line."""
    try:
        return measure(*arguments)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"}


def faults(result: Mapping[str, Any]) -> list[str]:
    """Contenders whose ids had to be plain decoding's and are not."""
    found = []
    for name, scenario in result["scenarios"].items():
        for contender, entry in scenario["contenders"].items():
            equality = entry.get("equality")
            if equality and equality["must"] and equality["equal"] < equality["rows"]:
                found.append(f"{name}: {contender}: {equality['rows'] - equality['equal']} of {equality['rows']} rows")
    return found


def missed(result: Mapping[str, Any]) -> list[str]:
    """Targets that are not met, or cannot be stated."""
    return [name for name, target in result.get("targets", {}).items() if not target["met"]]
