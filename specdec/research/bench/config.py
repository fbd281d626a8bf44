"""What a benchmark file says: the models, the contenders, the scenarios, what is measured beside them, and targets.

configs/bench_h100.yaml shows every key. Unknown keys are errors, also below `contenders`, whose options depend on
their kind (contenders/).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

from specdec.config import as_list, from_dict
from specdec.drafters.costs import CONTEXTS, WIDTHS, check_axes
from specdec.errors import SpecdecError
from specdec.files.forms import BOOL, Maybe, OneOf, check_fields, number, whole
from specdec.research.models.choice import ModelChoice
from specdec.research.prompts.choice import DataChoice

T = TypeVar("T")
SEPARATOR = "/"  # of the paths by which targets name figures


@dataclass(frozen=True)
class Scenario:
    """One workload for some contenders.

    contenders: names; None = all.
    batch, prompts: rows of a call, and in all.
    repeats: at most, as time allows.
    context: tokens that every prompt is filled up to; None = prompts as they are.
    ignore_eos: go on after an end token.
    share: of the time limit, relative to the other scenarios.
    """

    contenders: tuple[str, ...] | None = None
    batch: int = 1
    prompts: int = 8
    max_new_tokens: int = 64
    repeats: int = 3
    context: int | None = None
    ignore_eos: bool = False
    share: float = 1.0

    def __post_init__(self) -> None:
        counts = dict.fromkeys(("batch", "prompts", "max_new_tokens", "repeats"), whole(1))
        form = {**counts, "context": Maybe(whole(1)), "share": number(0.0, 1e6), "ignore_eos": BOOL}
        check_fields(self, form, "scenario")
        if self.prompts % self.batch:
            raise SpecdecError(f"scenario: {self.prompts} prompts do not fill calls of {self.batch} rows")


@dataclass(frozen=True)
class PassChoice:
    """Single passes of the target, for contenders of kind `specdec`: batches x widths (tokens of a row) x lengths (K/V
    slots)."""

    contenders: tuple[str, ...] = ("plain",)
    batches: tuple[int, ...] = (1,)
    widths: tuple[int, ...] = (1, 8)
    lengths: tuple[int, ...] = (512,)

    def __post_init__(self) -> None:
        check_fields(self, {name: [whole(1)] for name in ("batches", "widths", "lengths")}, "passes")


@dataclass(frozen=True)
class ProfileChoice:
    """A profile of `rounds` rounds after `skip` others, of contenders of kind `specdec` on the first prompt of
    `scenario` (None = of the first)."""

    contenders: tuple[str, ...] = ("draft-model",)
    scenario: str | None = None
    rounds: int = 6
    skip: int = 3

    def __post_init__(self) -> None:
        check_fields(self, {"rounds": whole(1), "skip": whole()}, "profile")


@dataclass(frozen=True)
class CostChoice:
    """A cost table that is measured before the scenarios, as `specdec.measure_costs` takes the rest. `contenders`, of
    kind `specdec` and with equal passes, choose automatic lengths from it."""

    contenders: tuple[str, ...] = ()
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = CONTEXTS
    widths: tuple[int, ...] = WIDTHS
    repeats: int = 5

    def __post_init__(self) -> None:
        check_axes(self.batches, self.contexts, self.widths, 1)
        check_fields(self, {"repeats": whole(1)}, "costs")


@dataclass(frozen=True)
class Target:
    """A figure that is wanted: `value`, divided by `over` if there is one, at least or at most a number.

    Figures are named by their path in the result: `scenarios/NAME/CONTENDER/FIGURE`, `passes/CONTENDER/PASS/FIGURE`,
    `profile/CONTENDER/FIGURE`. If `over` has several paths, the largest figure counts (`best: min` = the smallest).
    """

    value: str
    over: Any = None
    best: Literal["max", "min"] = "max"
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise SpecdecError(f"target {self.value!r}: give at_least or at_most, one of them")
        check_fields(self, {"best": OneOf(("max", "min"))}, f"target {self.value!r}")

    @property
    def divisors(self) -> list[str]:
        """The paths of `over`."""
        return [str(path) for path in as_list(self.over)]


@dataclass(frozen=True)
class BenchConfig:
    """A benchmark.

    contenders: name -> kind and options.
    reference: the contender (plain decoding) whose token ids the others are compared with.
    minutes: the time limit, which takes repeats away, never contenders; None = none.
    """

    contenders: Mapping[str, Mapping[str, Any]]
    scenarios: Mapping[str, Scenario]
    models: ModelChoice = field(default_factory=ModelChoice)
    data: DataChoice = field(default_factory=DataChoice)
    passes: PassChoice | None = None
    profile: ProfileChoice | None = None
    costs: CostChoice | None = None
    targets: Mapping[str, Target] = field(default_factory=dict)
    reference: str = "plain"
    minutes: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.contenders, Mapping) and self.contenders and self.scenarios):
            raise SpecdecError("a benchmark needs contenders and scenarios")
        for name, options in self.contenders.items():
            if not isinstance(options, Mapping) or "kind" not in options or SEPARATOR in name:
                raise SpecdecError(f"contender {name!r}: expected options with a kind, and a name without {SEPARATOR}")
        check_fields(self, {"minutes": Maybe(number(0.0, 1e6))}, "the benchmark")
        self._check_names()

    def _check_names(self) -> None:
        """Raise SpecdecError for a contender or scenario that is named and not there."""
        named: dict[str, tuple[str, ...]] = {"reference": (self.reference,)}
        named |= {f"scenario {name}": s.contenders or () for name, s in self.scenarios.items()}
        named |= {part: choice.contenders for part, choice in self.parts().items()}
        for where, names in named.items():
            unknown = [name for name in names if name not in self.contenders]
            if unknown:
                raise SpecdecError(f"{where}: no contender {unknown[0]!r}; there are {', '.join(self.contenders)}")
        if self.profile and self.profile.scenario not in (None, *self.scenarios):
            raise SpecdecError(f"profile: no scenario {self.profile.scenario!r}")

    def parts(self) -> dict[str, Any]:
        """What is measured beside the scenarios, by name."""
        found = {part: getattr(self, part) for part in ("passes", "profile", "costs")}
        return {part: choice for part, choice in found.items() if choice is not None}

    def check_targets(self) -> None:
        """Raise SpecdecError for a target whose figure nothing in this config gives: minutes before it is missed."""
        for name, target in self.targets.items():
            for path in (target.value, *target.divisors):
                part, *rest = path.split(SEPARATOR)
                known: tuple[str, ...] = ()
                if part == "scenarios" and len(rest) > 2 and rest[0] in self.scenarios:
                    known = tuple(self.taking_part(self.scenarios[rest.pop(0)]))
                elif part in ("passes", "profile") and part in self.parts() and len(rest) > 1:
                    known = self.parts()[part].contenders
                if not rest or rest[0] not in known:
                    raise SpecdecError(f"target {name!r}: {path}: nothing here gives this figure")

    def taking_part(self, scenario: Scenario) -> list[str]:
        """Names of a scenario's contenders, the reference first: the others are compared with it."""
        names = list(scenario.contenders or self.contenders)
        return sorted(names, key=lambda name: name != self.reference)

    def only(self, names: Iterable[str]) -> BenchConfig:
        """Keep these contenders and the reference, and the parts that they have. Raises SpecdecError."""
        chosen = {*names, self.reference}
        unknown = sorted(chosen - set(self.contenders))
        if unknown:
            raise SpecdecError(f"no contender {unknown[0]!r}; there are {', '.join(self.contenders)}")

        def kept(part: Any) -> Any:
            mine = tuple(n for n in part.contenders or self.contenders if n in chosen)
            return replace(part, contenders=mine) if mine else None

        scenarios = {name: made for name, scenario in self.scenarios.items() if (made := kept(scenario))}
        parts: dict[str, Any] = {name: kept(part) for name, part in self.parts().items()}
        contenders = {n: c for n, c in self.contenders.items() if n in chosen}
        return replace(self, contenders=contenders, scenarios=scenarios, **parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data without this machine's paths."""
        return {**asdict(self), "models": {**asdict(self.models), **self.models.names()}}


def options_of(cls: type[T], name: str, options: Mapping[str, Any]) -> T:
    """A contender's options. Raises SpecdecError for an unknown one."""
    mine = {key: value for key, value in options.items() if key != "kind"}
    made = from_dict(cls, mine, f"contender {name}")
    if not isinstance(getattr(made, "generate", {}), Mapping):
        raise SpecdecError(f"contender {name}: generate must be a mapping of options")
    return made
