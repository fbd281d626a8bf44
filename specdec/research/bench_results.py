"""The JSON document of `specdec bench` as a table of figures: a row per scenario and contender.

A document has pooled figures and no rows of calls, so that grouping chooses among them and pools nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.files.texts import is_file, read_json
from specdec.research.bootstrap import Interval
from specdec.research.results_table import ResultTable, Tabular, named, nothing_left
from specdec.stats import RATES

OF_FILE = ("scenario", "contender")
OF_SMOKE = ("suite", "category", "contender")
SCENARIO_FIGURES = {  # name in tables -> name in the document
    "tokens_per_round": "tokens_per_round", "draft_acceptance_rate": "draft_acceptance_rate",
    "conditional_acceptance_rate": "conditional_acceptance_rate", "acceptance_length": "acceptance_length",
    "tokens_per_second": "tokens_per_second", "speedup": "over_plain",
}  # fmt: skip
POOLED = "a benchmark's document has pooled figures"
BOOTSTRAP, RANGE = "95 % intervals over calls or repeats", "medians, and the range over the repeats"


@dataclass(frozen=True)
class BenchResults(Tabular):
    """Figures of a benchmark.

    dimensions: what `by` and `where` take.
    rows: by column; figures are an Interval.
    intervals: what the intervals are.
    """

    dimensions: tuple[str, ...]
    rows: list[dict[str, Any]]
    intervals: str
    source: str

    @staticmethod
    def load(path: Any) -> BenchResults | None:
        """Read the document at a path; None where there is no JSON file. Raises SpecdecError for another document."""
        if not isinstance(path, (str, Path)) or Path(path).suffix != ".json" or not is_file(path):
            return None
        data = read_json(path, "results")
        try:
            if "scenarios" in data:
                return BenchResults(OF_FILE, list(_of_file(data)), BOOTSTRAP, str(path))
            if "suites" in data:
                return BenchResults(OF_SMOKE, list(_of_smoke(data)), RANGE, str(path))
        except (AttributeError, KeyError, TypeError):
            raise SpecdecError(f"{path} is no whole document of specdec bench") from None
        raise SpecdecError(f"{path} is neither a trace nor a document of specdec bench")

    def where(self, keep: Mapping[str, Any] | None = None, **values: Any) -> BenchResults:
        """Some of the rows: those with these values, or one of a list. Raises SpecdecError where none is left."""
        wanted = self._wanted({**(keep or {}), **values}, self.dimensions)
        kept = [r for r in self.rows if all(r[n] in v for n, v in wanted.items())]
        if not kept:
            raise nothing_left(f"{self.source}: no row", wanted, {n: [r[n] for r in self.rows] for n in wanted})
        return BenchResults(self.dimensions, kept, self.intervals, self.source)

    def by(self, *names: str) -> ResultTable:
        """The figures with these dimensions first, as arguments or a list; without one, with all. Raises SpecdecError
        where a dimension is left out that tells rows apart: a document has nothing to pool them from."""
        names = named("by", names) or self.dimensions
        self._check("by", names, self.dimensions)
        for name in (n for n in self.dimensions if n not in names):
            found = list(dict.fromkeys(r[name] for r in self.rows))
            if len(found) > 1:
                raise SpecdecError(
                    f"{self.source} has figures by {', '.join(self.dimensions)} and cannot pool them: group by {name} "
                    f"too, or choose one: {', '.join(map(str, found))}"
                )
        rows = [{n: r[n] for n in (*names, *(c for c in r if c not in self.dimensions))} for r in self.rows]
        return ResultTable(names, rows, self.intervals)

    def without_loops(self) -> BenchResults:
        """Raises SpecdecError: a document has no rows to leave out."""
        raise SpecdecError(f"{self.source}: leaving loops out needs rows, and {POOLED}")

    def against(self, baseline: str) -> ResultTable:
        """Raises SpecdecError: a document has no rows to pair."""
        raise SpecdecError(f"{self.source}: a paired comparison needs rows, and {POOLED}")

    def __repr__(self) -> str:
        return f"BenchResults({len(self.rows)} rows by {', '.join(self.dimensions)}, from {self.source})"


def _of_file(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for scenario, found in data["scenarios"].items():
        for contender, entry in found.get("contenders", {}).items():
            if "error" not in entry:
                known = {"conditional_acceptance_rate": (entry.get("acceptance") or {}).get("tested"), **entry}
                figures = {name: _interval(known.get(key)) for name, key in SCENARIO_FIGURES.items()}
                yield {"scenario": scenario, "contender": contender, **figures}


def _of_smoke(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for suite, found in data["suites"].items():
        for category, entry in found.get("summary", {}).items():
            advice = entry["advice"]
            rate = advice.get("conditional_acceptance_rate", advice.get("acceptance"))
            names = ("tokens_per_round", *RATES.values(), "acceptance_length")
            counted: dict[str, dict[str, Any]] = {
                "speculative": {**{name: entry.get(name) for name in names}, "conditional_acceptance_rate": rate},
                "plain": {**dict.fromkeys(names), "tokens_per_round": 1.0, "acceptance_length": 1.0},
            }
            for contender, speed in entry["tokens_per_second"].items():
                gain = entry["ratios"].get(f"{contender}_to_plain")
                figures = {**counted.get(contender, dict.fromkeys(names)), "tokens_per_second": speed, "speedup": gain}
                head = {"suite": suite, "category": category, "contender": contender}
                yield head | {name: _interval(value) for name, value in figures.items()}


def _interval(found: Any) -> Interval:
    """A number, an interval or a median with its range."""
    if isinstance(found, Mapping):
        low, high = (found.get(a, found.get(b)) for a, b in (("low", "min"), ("high", "max")))
        if "min" in found and low == high:  # of one repeat
            low = high = None
        return Interval(found.get("value", found.get("median")), low, high)
    return Interval(found)
