"""Axes of an ablation: what each sets, and keys of a config of which one would silently hide the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from specdec.config import PROCESSOR_FIELDS, GenerationSettings, PairConfig
from specdec.drafters import find_strategy
from specdec.drafters.options import without_effect
from specdec.errors import SpecdecError
from specdec.files import own_code

if TYPE_CHECKING:
    from specdec.research.ablation.config import AblationConfig

SHORTHANDS = {"k": "n_max", "p_min": "p_min"}
LOADING = tuple(f.name for f in fields(PairConfig) if f.name not in ("target", "draft"))
GENERATION = tuple(f.name for f in fields(GenerationSettings) if f.name != "processors") + PROCESSOR_FIELDS


def parameters(strategy: str) -> list[str]:
    """The names of a strategy's parameters. Raises SpecdecError for an unknown strategy."""
    return list(own_code.parameters(find_strategy(strategy)))


def hits(strategies: Sequence[Mapping[str, Any]], axis: str) -> list[tuple[int, str]]:
    """What a parameter's axis sets in a chain: (place in the chain, parameter). Also where it has no effect there."""
    strategy, _, parameter = axis.rpartition(".")
    parameter = SHORTHANDS.get(axis, parameter)
    chosen = [i for i, entry in enumerate(strategies) if strategy in ("", entry["name"])]
    return [(i, parameter) for i in chosen if parameter in parameters(strategies[i]["name"])]


def is_idle(strategy: Mapping[str, Any], parameter: str) -> bool:
    """Whether a parameter has no effect on a strategy as it is: `n_max` on a tree of a fixed shape."""
    options = {name: value for name, value in strategy.items() if name != "name"}
    return parameter in without_effect(find_strategy(strategy["name"]), options)


def check_twice(config: AblationConfig) -> None:
    """Raise SpecdecError for an axis that has a value twice, as 0 and 0.0: all of its cells would run twice."""
    for axis, values in config.axes.items():
        for i, value in enumerate(values):
            alike = [v for v in values[:i] if v == value and isinstance(v, bool) == isinstance(value, bool)]
            if alike:
                raise SpecdecError(f"axes.{axis} has {alike[0]!r} and {value!r}, which are the same")


def check_shadows(config: AblationConfig) -> None:
    """Raise SpecdecError where one key leaves another without effect."""
    if config.prompts is not None and config.data.chosen:
        name = config.data.chosen[0]
        raise SpecdecError(f"prompts and data.{name}={getattr(config.data, name)!r}: prompts of one's own, or a set's")
    points = [("axes", config.axes), *((f"cells.{i}", cell) for i, cell in enumerate(config.cells))]
    for where, point in points:
        for first, second in _same(config, where, point):
            raise SpecdecError(f"{where}: {first} and {second} set the same: take one of them away")
    for axis in config.axes:
        if any(axis not in cell for cell in config.cells):
            continue  # that cell takes the value from elsewhere
        hidden = _hidden(config, axis)
        if hidden is not None:
            raise SpecdecError(f"axes.{axis} and {hidden} set the same: take one of them away")


def _chains(config: AblationConfig, where: str, point: Mapping[str, Any]) -> dict[str, Any]:
    """The chains that an axis or a single cell is about."""
    named = point.get("strategies", tuple(config.strategies))
    names = named if where == "axes" else (named,)
    return {name: config.strategies.get(name, ()) for name in names}


def _same(config: AblationConfig, where: str, point: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of names that set one parameter of one strategy. Raises SpecdecError for a name that sets none of any
    chain."""
    chains = _chains(config, where, point)
    mine = [name for name in point if name in SHORTHANDS or "." in name]
    for axis in mine:
        if not any(hits(chain, axis) for chain in chains.values()):
            raise SpecdecError(f"{where}.{axis} has no effect: no strategy of {', '.join(chains) or 'none'} has it")
        if not any(_concerns(chain, axis, mine) for chain in chains.values()):
            raise SpecdecError(f"{where}.{axis} has no effect on {', '.join(chains)}: their options leave it none")
    for chain in chains.values():
        setters: dict[tuple[int, str], str] = {}
        for axis in mine:
            for place in hits(chain, axis):
                if setters.setdefault(place, axis) != axis:
                    yield setters[place], axis


def _concerns(chain: Sequence[Mapping[str, Any]], axis: str, axes: Sequence[str]) -> bool:
    """Whether an axis changes a chain, as far as the chain's own options say: other axes may set what decides."""
    places = hits(chain, axis)
    others = {place for other in axes for place, _ in hits(chain, other) if other != axis}
    return any(place in others or not is_idle(chain[place], parameter) for place, parameter in places)


def _hidden(config: AblationConfig, axis: str) -> str | None:
    """The key that no cell would ever use because this axis overrides it."""
    if axis in config.generation:
        return f"generation.{axis}={config.generation[axis]!r}"
    if axis in LOADING:
        for name, models in config.pairs.items():
            if getattr(models, axis) != getattr(PairConfig, axis):
                return f"pairs.{name}.{axis}={getattr(models, axis)!r}"
    if axis in SHORTHANDS or "." in axis:
        for name, chain in _chains(config, "axes", config.axes).items():
            for place, parameter in hits(chain, axis):
                if parameter in chain[place]:
                    return f"strategies.{name}: {chain[place]['name']}: {parameter}={chain[place][parameter]!r}"
    return None
