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
from specdec.files.texts import failure
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
Save = Callable[[dict[str, Any]], None]


def run_bench(
    config: BenchConfig, name: str, progress: Progress = lambda what: None, save: Save = lambda result: None
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
    result = {"benchmark": "bench", "name": name, **origin(), "device": device_name(pair.device)}
    result |= {"config": config.to_dict(), "models": pair.facts(), "scenarios": {}, "passes": {}, "profile": {}}
    result["contenders"] = {n: {"kind": c.kind, "version": c.version(), **c.settings()} for n, c in contenders.items()}
    result["seconds"] = {"models": time.perf_counter() - started}
    progress("measuring a copy")
    result["copy"] = {"bytes_per_second": bandwidth(pair.device), "counted": "bytes read and bytes written"}
    _Run(config, pair, contenders, result, started, progress, save).all()
    return result


def steps_of(config: BenchConfig) -> int:
    """How often `run_bench` calls `progress` at most: no contender fails, and every repeat fits into the time."""
    count = 2 + (config.costs is not None and bool(config.costs.contenders))
    count += sum(len(part.contenders) for part in (config.passes, config.profile) if part is not None)
    for scenario in config.scenarios.values():
        calls = scenario.prompts // scenario.batch * scenario.repeats
        names = config.taking_part(scenario)
        count += len(names) * (1 + calls) + sum(config.contenders[name]["kind"] == Own.kind for name in names)
    return count


def _check(config: BenchConfig, contenders: Mapping[str, Contender]) -> None:
    reference = contenders[config.reference]
    if not isinstance(reference, Own) or not reference.plain:
        raise SpecdecError(f"reference: {config.reference!r} must be plain decoding: kind specdec without strategies")
    for part, choice in config.parts().items():
        _own(part, choice, contenders)
    measured = _own("costs", config.costs, contenders)
    if len({c.passes for c in measured}) > 1:
        raise SpecdecError("costs: contenders differ in compile or exact: one table is not theirs")
    for contender in measured:
        if "costs" in contender.options.generate:
            raise SpecdecError(f"costs: contender {contender.name!r} names a table of its own")
    if not config.data.dataset.startswith(HUB):
        load_prompts(config.data.dataset, config.data.categories)  # before models are built for nothing


def _own(part: str, choice: Any, contenders: Mapping[str, Contender]) -> list[Own]:
    """The contenders of a part, which must be specdec's. Raises SpecdecError."""
    found = []
    for name in choice.contenders if choice is not None else ():
        contender = contenders[name]
        if not isinstance(contender, Own):
            raise SpecdecError(f"{part}: contender {name!r} must be of kind specdec")
        found.append(contender)
    return found


@dataclass
class _Run:
    config: BenchConfig
    pair: Pair
    contenders: Mapping[str, Contender]
    result: dict[str, Any]
    started: float
    progress: Progress
    save: Save

    def all(self) -> None:
        """Costs and passes, then the scenarios in the config's order, each with its profile."""
        self._costs()
        for contender in _own("passes", self.config.passes, self.contenders):
            self.progress(f"single passes of {contender.name}")
            copy = self.result["copy"]["bytes_per_second"]
            self.result["passes"][contender.name] = _tried(pass_table, contender, self.config.passes, copy)
        self._finish()
        profiled = self.config.profile and (self.config.profile.scenario or next(iter(self.config.scenarios)))
        for name in self.config.scenarios:
            self._scenario(name)
            if name == profiled:
                self._profiles(name)
            self._finish()

    def _finish(self) -> None:
        self.result["targets"] = judge(self.result, self.config.targets)
        self.result["seconds"]["total"] = time.perf_counter() - self.started
        self.save(self.result)

    def _costs(self) -> None:
        """Measure the table that contenders choose lengths from, once, and keep it."""
        choice, own = self.config.costs, _own("costs", self.config.costs, self.contenders)
        if choice is not None and own:
            self.progress("measuring what passes cost")
            how = (choice.batches, choice.contexts, choice.widths, choice.repeats)
            self.result["costs"] = _tried(lambda: measure_costs(own[0].decoder, *how).to_dict())
            for contender in own:
                contender.measured = self.result["costs"]

    def _scenario(self, name: str) -> None:
        scenario = self.config.scenarios[name]
        taking = [self.contenders[n] for n in self.config.taking_part(scenario)]
        calls = items(self.pair, self.config.data, scenario)
        self._tidy()
        run = ScenarioRun(name, scenario, self.pair, calls, taking, self._until(name), self.progress)
        self.result["scenarios"][name] = run.run()
        if run.stopped:
            self._finish()
            raise KeyboardInterrupt

    def _until(self, name: str) -> float | None:
        """When a scenario should be over: its share of the time that is left to it and to those after it."""
        if self.config.minutes is None:
            return None
        names = list(self.config.scenarios)
        shares = [self.config.scenarios[n].share for n in names[names.index(name) :]]
        now = time.perf_counter()
        return now + (self.started + 60 * self.config.minutes - now) * shares[0] / max(sum(shares), 1e-9)

    def _profiles(self, name: str) -> None:
        choice, scenario = self.config.profile, self.config.scenarios[name]
        assert choice is not None
        prompt = items(self.pair, self.config.data, replace(scenario, batch=1))[0].prompts[0]
        for own in _own("profile", choice, self.contenders):
            self.progress(f"profile of {own.name}")
            how = (scenario.max_new_tokens, choice.rounds, choice.skip)
            self.result["profile"][own.name] = _tried(profile_rounds, own, prompt, *how)

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
        return {"error": failure(error)}


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
