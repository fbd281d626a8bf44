"""An ablation as a file: which pairs, chains, prompts and settings are crossed. Unknown keys are errors.

The grid is the product of named axes; `cells` adds single settings. An axis is one of

    pair, strategies            names from `pairs` and `strategies`; not given = all of them
    k, p_min                    n_max / p_min of every strategy of the chain that has it
    <strategy>.<parameter>      one parameter of one strategy, `draft-model.n_min`
    dtype, draft_dtype, ...     a loading option of the pair (PairConfig), for every pair
    temperature, seed, ...      a generation option

An axis that does not concern a chain (`k` without any drafter) makes no second cell of it. What is wrong whatever the
models are is refused when the config is read, also two keys of which one would hide the other.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from specdec.config import PairConfig, check_whole, from_dict, load_yaml, unknown_name
from specdec.decoding.validation import check_chain, check_generation, check_loading
from specdec.drafters import make_drafters, parse_strategy
from specdec.errors import SpecdecError
from specdec.files.texts import is_unicode
from specdec.research.ablation.axes import (
    GENERATION,
    LOADING,
    SHORTHANDS,
    check_shadows,
    check_twice,
    hits,
    is_idle,
    parameters,
)
from specdec.research.demo import comparable
from specdec.research.prompts.choice import DataConfig, as_written
from specdec.research.prompts.datasets import own_prompts

DATASET = "spec-bench"
PLAIN = "plain"  # the name of the reference chain, which drafts nothing
# Options that only Python can give, or that would make other things of the rows.
_PYTHON_ONLY = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
_UNFIT = ("num_return_sequences", "keep_state", "output_logprobs", "shard", *_PYTHON_ONLY)


@dataclass(frozen=True)
class Cell:
    """One setting of the grid.

    settings: the axes' values for tables, None if an axis does not concern the cell.
    """

    pair: str
    chain: str
    models: PairConfig
    strategies: tuple[Mapping[str, Any], ...]
    generation: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def key(self) -> str:
        """A short hash of everything that the cell's rows depend on, the prompt and the models' weights apart."""
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "settings"}
        return content_hash({**parts, "models": vars(self.models)})

    @property
    def seed(self) -> int:
        """The seed that the prompts' seeds are made of."""
        return int(self.generation.get("seed", 0))

    @property
    def batch_size(self) -> int:
        """Prompts of a call, all of them in one pass."""
        return int(self.generation.get("batch_size", 1))

    @property
    def words(self) -> str:
        """The cell's place in the grid, for messages."""
        own = {k: v for k, v in self.settings.items() if v is not None and k not in ("pair", "strategies")}
        return f"pairs.{self.pair} with strategies.{self.chain}" + "".join(f", {k}={v!r}" for k, v in own.items())

    @property
    def comparable(self) -> bool:
        """Whether the texts must be plain decoding's: greedy, or a rule that emits the target's own samples."""
        return comparable(dict(self.generation))

    def plain(self) -> Cell:
        """The reference: the same pair, sampling, seed and shapes without drafting. The acceptance rule is dropped,
        because nothing is accepted."""
        kept = {k: v for k, v in self.generation.items() if k not in ("acceptance", "order", "length_policy")}
        own = {"pair", *LOADING, *kept}
        settings = {k: v if k in own else None for k, v in self.settings.items()} | {"strategies": PLAIN}
        generation = {**kept, "acceptance": "match"}
        return replace(self, chain=PLAIN, strategies=(), generation=generation, settings=settings)


@dataclass(frozen=True)
class AblationConfig:
    """An ablation.

    pairs: name -> PairConfig or its mapping.
    strategies: name -> list of strategies, names or mappings.
    data, prompts: a set, or texts of one's own; records with `prompt`, `id` and `category` in the place of texts.
    generation: options of every cell.
    axes, cells: name -> values that are crossed; mappings of single values.
    plain: whether plain decoding runs too, which the equality gate and every speed-up need.
    warm_up_tokens: of an untimed run of each loaded pair.
    traces: whether every round of cells that draft is recorded, in files of `traces/`; recording takes time.

    Raises SpecdecError for a name or value that cannot be, and for keys that contradict each other.
    """

    pairs: Mapping[str, Any]
    strategies: Mapping[str, Any] = field(default_factory=dict)
    data: Any = field(default_factory=DataConfig)
    prompts: tuple[Any, ...] | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, Any] = field(default_factory=dict)
    cells: tuple[Mapping[str, Any], ...] = ()
    plain: bool = True
    warm_up_tokens: int = 8
    traces: bool = False

    def __post_init__(self) -> None:
        for name in ("pairs", "strategies", "generation", "axes"):
            if not isinstance(getattr(self, name), Mapping):
                raise SpecdecError(f"ablation: {name} must be a mapping, got {getattr(self, name)!r}")
        pairs = {str(n): _nested(PairConfig, p, f"pairs.{n}") for n, p in self.pairs.items()}
        object.__setattr__(self, "pairs", pairs)
        object.__setattr__(self, "data", _nested(DataConfig, self.data, "data"))
        object.__setattr__(self, "strategies", {str(n): _chain(str(n), c) for n, c in self.strategies.items()})
        for name in ("cells", "prompts"):
            value = getattr(self, name)
            if isinstance(value, (list, tuple)):
                object.__setattr__(self, name, tuple(value))
            elif value is not None or name == "cells":
                raise SpecdecError(f"ablation: {name} must be a list, got {value!r}")
        self._check_parts()
        self._check_values()
        check_twice(self)
        check_shadows(self)
        self._check_cells()

    def _check_parts(self) -> None:
        if not self.pairs:
            raise SpecdecError("ablation: pairs is empty: name at least one")
        for name in ("plain", "traces"):
            if not isinstance(getattr(self, name), bool):
                raise SpecdecError(f"ablation: {name} must be true or false, got {getattr(self, name)!r}")
        if not self.strategies and not self.plain:
            raise SpecdecError("ablation: nothing to run: strategies is empty and plain is false")
        self._check_prompts()
        if self.prompts is None and self.data.dataset is None:
            object.__setattr__(self, "data", replace(self.data, dataset=DATASET))
        check_whole("ablation: warm_up_tokens", self.warm_up_tokens, 0)
        for name, values in self.axes.items():
            if not isinstance(values, (list, tuple)) or not values:
                raise SpecdecError(f"axes.{name}: expected a list of values, got {values!r}")
        for cell in self.cells:
            if not isinstance(cell, Mapping) or "strategies" not in cell:
                raise SpecdecError(f"cells: expected mappings with `strategies`, got {cell!r}")

    def _check_prompts(self) -> None:
        if self.prompts is None:
            return
        if not self.prompts or not all(isinstance(p, Mapping) or (isinstance(p, str) and p) for p in self.prompts):
            shown = as_written(self.prompts)
            raise SpecdecError(
                f"ablation: prompts must be texts or records, at least one and none empty, got {shown!r}"
            )
        with _naming("ablation"):
            for index, prompt in enumerate(own_prompts(self.prompts)):
                if not is_unicode(prompt.text):
                    raise SpecdecError(f"prompts[{index}] is no Unicode text: it holds half of a surrogate pair")

    def _check_values(self) -> None:
        """Check each value by itself."""
        for name, models in self.pairs.items():
            with _naming(f"pairs.{name}"):
                _check_models(models)
        with _naming("generation"):
            _check_generation(self.generation)
        places = [(f"axes.{name}", name, value) for name, values in self.axes.items() for value in values]
        places += [(f"cells.{i}.{n}", n, value) for i, cell in enumerate(self.cells) for n, value in cell.items()]
        for where, name, value in places:
            with _naming(where):
                self._check_axis(str(name), value)

    def _check_axis(self, name: str, value: Any) -> None:
        named = {"pair": self.pairs, "strategies": {PLAIN: (), **self.strategies}}
        if name in named:
            if not isinstance(value, str) or value not in named[name]:
                raise unknown_name(name, str(value), named[name])
        elif "." in name:
            strategy, _, parameter = name.rpartition(".")
            if parameter not in parameters(strategy):
                raise unknown_name(f"option of strategy {strategy!r}", parameter, parameters(strategy))
        elif name in GENERATION:
            _check_generation({name: value})
        elif name not in SHORTHANDS and name not in LOADING:
            raise unknown_name("axis", name, ("pair", "strategies", *SHORTHANDS, *LOADING, *GENERATION))

    def _check_cells(self) -> None:
        """Check the values of several keys together, each combination once."""
        seen: set[str] = set()
        for cell in self.expand():
            parts = {"strategies": cell.strategies, "generation": {**cell.generation, "seed": 0}}
            key = content_hash({**parts, "models": asdict(cell.models)})
            if key not in seen:
                seen.add(key)
                with _naming(cell.words):
                    _check_models(cell.models)
                    check_chain(cell.strategies, cell.models.draft is not None, check_generation(cell.generation))

    def expand(self) -> list[Cell]:
        """Every cell once, in the order of the axes, pairs first, each reference before its cells."""
        return list(self._expanded)

    @cached_property
    def _expanded(self) -> list[Cell]:
        axes = {"pair": tuple(self.pairs), "strategies": tuple(self.strategies) or (PLAIN,), **self.axes}
        points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
        points += [{"pair": next(iter(self.pairs)), **cell} for cell in self.cells]
        names = list(dict.fromkeys(name for point in points for name in ("pair", *point)))
        found: dict[str, Cell] = {}
        for point in points:
            cell = self._cell(point, names)
            for made in [cell.plain()] * self.plain + [cell] * (cell.chain != PLAIN):
                found.setdefault(made.key, made)
        return sorted(found.values(), key=lambda cell: tuple(self.pairs).index(cell.pair))

    def _cell(self, point: Mapping[str, Any], names: Sequence[str]) -> Cell:
        pair, chain = point["pair"], point["strategies"]
        strategies = [dict(s) for s in self.strategies.get(chain, ())]
        loading, generation = {}, {"acceptance": "leviathan", **self.generation}
        settings, chosen = dict.fromkeys(names), dict[str, list[tuple[int, str]]]()
        for name, value in point.items():
            if name in LOADING:
                if name.startswith("draft_") and self.pairs[pair].draft is None:
                    continue
                loading[name] = value
            elif name in GENERATION:
                generation[name] = value
            elif name not in ("pair", "strategies"):
                chosen[name] = hits(strategies, name)
                for place, parameter in chosen[name]:
                    strategies[place][parameter] = value
                continue
            settings[name] = value
        # Whether a parameter has an effect is known when all of them are set.
        idle = {(p, n) for places in chosen.values() for p, n in places if is_idle(strategies[p], n)}
        for place, parameter in idle:
            del strategies[place][parameter]
        settings |= {name: point[name] for name, places in chosen.items() if set(places) - idle}
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
    """Strategies as mappings. Raises SpecdecError for another form and for values that no axis can override."""
    if not isinstance(entries, (list, tuple)) or not all(isinstance(e, (str, Mapping)) for e in entries):
        raise SpecdecError(f"strategies.{name}: expected a list of names or mappings, got {entries!r}")
    if name == PLAIN and entries:
        raise SpecdecError(f"strategies: the name {PLAIN!r} is taken: it drafts nothing")
    with _naming(f"strategies.{name}"):
        make_drafters(list(entries), has_draft=True)
    parsed = [parse_strategy(entry) for entry in entries]
    return tuple({"name": strategy, **options} for strategy, options in parsed)


def _check_models(models: PairConfig) -> None:
    check_loading(models)
    if models.tp_plan is not None:
        raise SpecdecError(
            "tp_plan is no option of an ablation: its processes share prompts, and each has whole models"
        )


def _check_generation(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in _UNFIT:
            raise SpecdecError(f"{name} is no option of an ablation")
    seed = options.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise SpecdecError(f"seed must be a whole number, got {seed!r}; several are an axis")
    if not -(2**63) <= seed < 2**63:  # a column of the table
        raise SpecdecError(f"seed must fit into 64 bits, got {seed}")
    if options.get("batch_size", 1) is None:
        raise SpecdecError("batch_size must be a whole number >= 1, got None")
    check_generation(options)


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Put the place in the config before what is wrong there."""
    try:
        yield
    except SpecdecError as error:
        raise SpecdecError(f"{where}: {error}") from error
