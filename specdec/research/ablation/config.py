"""An ablation as a file: which pairs, chains, prompts and settings are crossed. Unknown keys are errors.

The grid is the product of named axes; `cells` adds single settings. An axis is one of

    pair, strategies            names from `pairs` and `strategies`; not given = all of them
    k, p_min                    n_max / p_min of every strategy of the chain that has it
    <strategy>.<parameter>      one parameter of one strategy, `draft-model.n_min`
    dtype, draft_dtype, ...     a loading option of the pair (PairConfig), for every pair
    temperature, seed, ...      a generation option

An axis that does not concern a chain (`k` without any drafter) makes no second cell of it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from specdec.config import (
    PROCESSOR_FIELDS,
    UNSET,
    GenerationSettings,
    PairConfig,
    check_whole,
    from_dict,
    load_yaml,
    unknown_name,
)
from specdec.drafters import STRATEGIES, make_drafters, parse_strategy
from specdec.errors import SpecdecError
from specdec.research.demo import comparable

PLAIN = "plain"  # the name of the reference chain, which drafts nothing
SHORTHANDS = {"k": "n_max", "p_min": "p_min"}
LOADING = tuple(f.name for f in fields(PairConfig) if f.name not in ("target", "draft"))
_GENERATION = tuple(f.name for f in fields(GenerationSettings) if f.name != "processors") + PROCESSOR_FIELDS
# Options that only Python can give, or that would make other things of the rows.
_UNFIT = (
    "num_return_sequences", "keep_state", "output_logprobs", "logits_processor", "stopping_criteria",
    "prefix_allowed_tokens_fn",
)  # fmt: skip


@dataclass(frozen=True)
class DataConfig:
    """Prompts of a set, as `load_prompts` takes them.

    chat: whether a prompt goes through the target's chat template; "auto" = where there is one. longest: tokens of a
    prompt's text, or of a chat's last message, the rest is cut; None = whole.
    """

    dataset: str = "spec-bench"
    categories: Any = None
    limit: int | None = 8
    seed: int = 0
    chat: Any = "auto"
    longest: int | None = None


@dataclass(frozen=True)
class Cell:
    """One setting of the grid. settings: the axes' values for tables, None where an axis does not concern the cell."""

    pair: str
    chain: str
    models: PairConfig
    strategies: tuple[Mapping[str, Any], ...]
    generation: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def key(self) -> str:
        """A short hash of everything that the cell's rows depend on beside the prompt and the models' weights."""
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "settings"}
        return content_hash({**parts, "models": asdict(self.models)})

    @property
    def seed(self) -> int:
        """The seed that the prompts' seeds are made of."""
        return int(self.generation.get("seed", 0))

    @property
    def batch_size(self) -> int:
        """Prompts of a call, all of them in one pass."""
        return int(self.generation.get("batch_size", 1))

    @property
    def comparable(self) -> bool:
        """Whether the texts must be plain decoding's: greedy, or a rule that emits the target's own draws."""
        return comparable(dict(self.generation))

    def plain(self) -> Cell:
        """The reference: the same pair, sampling, seed and shapes without drafting. The acceptance rule is dropped,
        because nothing is accepted."""
        kept = {k: v for k, v in self.generation.items() if k not in ("acceptance", "order")}
        own = {"pair", *LOADING, *kept}
        settings = {k: v if k in own else None for k, v in self.settings.items()}
        return replace(
            self, chain=PLAIN, strategies=(), generation={**kept, "acceptance": "match"},
            settings={**settings, "strategies": PLAIN},
        )  # fmt: skip


@dataclass(frozen=True)
class AblationConfig:
    """pairs: name -> PairConfig or its mapping; strategies: name -> list of strategies, names or mappings; generation:
    options of every cell; axes: name -> values; cells: mappings of single values; prompts: own texts in the place of
    `data`; plain: whether plain decoding runs too, which the equality gate and every speed-up need; warm_up_tokens:
    of an untimed run a loaded pair. Raises SpecdecError for a name that does not exist."""

    pairs: Mapping[str, Any]
    strategies: Mapping[str, Any] = field(default_factory=dict)
    data: Any = field(default_factory=DataConfig)
    prompts: tuple[str, ...] = ()
    generation: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, Any] = field(default_factory=dict)
    cells: tuple[Mapping[str, Any], ...] = ()
    plain: bool = True
    warm_up_tokens: int = 8

    def __post_init__(self) -> None:
        for name in ("pairs", "strategies", "generation", "axes"):
            if not isinstance(getattr(self, name), Mapping):
                raise SpecdecError(f"ablation: {name} must be a mapping, got {getattr(self, name)!r}")
        pairs = {str(n): _nested(PairConfig, p, f"pairs.{n}") for n, p in self.pairs.items()}
        object.__setattr__(self, "pairs", pairs)
        object.__setattr__(self, "data", _nested(DataConfig, self.data, "data"))
        object.__setattr__(self, "strategies", {str(n): _chain(str(n), c) for n, c in self.strategies.items()})
        object.__setattr__(self, "cells", tuple(self.cells))
        object.__setattr__(self, "prompts", tuple(self.prompts))
        self._check()

    def _check(self) -> None:
        if not self.pairs:
            raise SpecdecError("ablation: pairs is empty: name at least one")
        if not self.strategies and not self.plain:
            raise SpecdecError("ablation: nothing to run: strategies is empty and plain is false")
        if not all(isinstance(p, str) and p for p in self.prompts):
            raise SpecdecError("ablation: prompts must be texts and not empty")
        if self.data.chat not in ("auto", True, False):
            raise SpecdecError(f"data: chat must be true, false or auto, got {self.data.chat!r}")
        if self.data.longest is not None:
            check_whole("data: longest", self.data.longest, 1)
        check_whole("ablation: warm_up_tokens", self.warm_up_tokens, 0)
        _check_generation(self.generation)
        for name, values in self.axes.items():
            if not isinstance(values, (list, tuple)) or not values:
                raise SpecdecError(f"axes.{name}: expected a list of values, got {values!r}")
            for value in values:
                self._check_axis(str(name), value)
        for cell in self.cells:
            if not isinstance(cell, Mapping) or "strategies" not in cell:
                raise SpecdecError(f"cells: expected mappings with `strategies`, got {cell!r}")
            for name, value in cell.items():
                self._check_axis(str(name), value)

    def _check_axis(self, name: str, value: Any) -> None:
        """Names must exist; values that a strategy or a model refuses become cells that fail."""
        named = {"pair": self.pairs, "strategies": {PLAIN: (), **self.strategies}}
        if name in named:
            if value not in named[name]:
                raise unknown_name(name, str(value), named[name])
        elif "." in name:
            strategy, _, parameter = name.partition(".")
            if strategy not in STRATEGIES:
                raise unknown_name("strategy", strategy, STRATEGIES)
            if parameter not in _parameters(strategy):
                raise unknown_name(f"option of strategy {strategy!r}", parameter, _parameters(strategy))
        elif name in _GENERATION:
            _check_generation({name: value})
        elif name not in SHORTHANDS and name not in LOADING:
            raise unknown_name("axis", name, ("pair", "strategies", *SHORTHANDS, *LOADING, *_GENERATION))

    def expand(self) -> list[Cell]:
        """Every cell once, in the order of the axes as they stand, pairs first, references before what they are for."""
        axes = {"pair": tuple(self.pairs), "strategies": tuple(self.strategies) or (PLAIN,), **self.axes}
        points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
        points += [{"pair": next(iter(self.pairs)), **cell} for cell in self.cells]
        names = list(dict.fromkeys(name for point in points for name in ("pair", *point)))
        found: dict[str, Cell] = {}
        for point in points:
            for cell in self._with_plain(point, names):
                found.setdefault(cell.key, cell)
        return sorted(found.values(), key=lambda cell: tuple(self.pairs).index(cell.pair))

    def _with_plain(self, point: Mapping[str, Any], names: Sequence[str]) -> Iterator[Cell]:
        cell = self._cell(point, names)
        if self.plain:
            yield cell.plain()
        if cell.chain != PLAIN:
            yield cell

    def _cell(self, point: Mapping[str, Any], names: Sequence[str]) -> Cell:
        pair, chain = point["pair"], point["strategies"]
        strategies = [dict(s) for s in self.strategies.get(chain, ())]
        loading, generation = {}, {"acceptance": "leviathan", **self.generation}
        settings = dict.fromkeys(names)
        for name, value in point.items():
            if name in LOADING:
                loading[name] = value
            elif name in _GENERATION:
                generation[name] = value
            elif name not in ("pair", "strategies") and not _apply(strategies, name, value):
                continue
            settings[name] = value
        models = replace(self.pairs[pair], **loading)
        made = Cell(pair, chain, models, tuple(strategies), generation, settings)
        return made.plain() if chain == PLAIN or not strategies else made

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as a YAML file would hold it."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return plain


def load_ablation(path: str | Path) -> AblationConfig:
    """The ablation of a YAML file. Raises SpecdecError for a missing file or an unknown key."""
    return load_yaml(path, AblationConfig)


def content_hash(data: Any) -> str:
    """A short hash of plain data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _nested(kind: Any, data: Any, where: str) -> Any:
    return data if isinstance(data, kind) else from_dict(kind, data, where)


def _chain(name: str, entries: Any) -> tuple[dict[str, Any], ...]:
    """Strategies as mappings. Raises SpecdecError for what is no chain, also for values that no axis could mend."""
    if not isinstance(entries, (list, tuple)) or not all(isinstance(e, (str, Mapping)) for e in entries):
        raise SpecdecError(f"strategies.{name}: expected a list of names or mappings, got {entries!r}")
    if name == PLAIN and entries:
        raise SpecdecError(f"strategies: the name {PLAIN!r} is taken: it drafts nothing")
    make_drafters(list(entries), has_draft=True)
    parsed = [parse_strategy(entry) for entry in entries]
    return tuple({"name": strategy, **options} for strategy, options in parsed)


def _check_generation(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in _UNFIT:
            raise SpecdecError(f"ablation: {name} is no option of an ablation")
    seed = options.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise SpecdecError(f"ablation: seed must be a whole number, got {seed!r}; several are an axis")
    if options.get("batch_size", 1) is None:
        raise SpecdecError("ablation: batch_size must be a whole number >= 1, got None")
    values = {k: v for k, v in options.items() if v is not UNSET}
    GenerationSettings.parse(values)


def _parameters(strategy: str) -> list[str]:
    return [name for name, f in STRATEGIES[strategy].__dataclass_fields__.items() if f.init]


def _apply(strategies: list[dict[str, Any]], axis: str, value: Any) -> bool:
    """Set a parameter where the chain has it; whether it does."""
    strategy, _, parameter = axis.rpartition(".")
    parameter = SHORTHANDS.get(axis, parameter)
    hit = False
    for entry in strategies:
        if strategy in ("", entry["name"]) and parameter in _parameters(entry["name"]):
            entry[parameter] = value
            hit = True
    return hit
