"""Figures that are wanted, looked up in a result: met, missed, or not to be said, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from specdec.errors import SpecdecError
from specdec.research.bench import figures
from specdec.research.bench.config import SEPARATOR, Target
from specdec.research.bootstrap import Interval


def judge(result: Mapping[str, Any], targets: Mapping[str, Target]) -> dict[str, dict[str, Any]]:
    """name -> the target with its figure, interval, and `met`: True, False, or None with a `reason`."""
    return {name: {**asdict(target), **_judged(result, target)} for name, target in targets.items()}


def _judged(result: Mapping[str, Any], target: Target) -> dict[str, Any]:
    try:
        found, over = _figure(result, target)
    except SpecdecError as error:
        return {"figure": None, "met": None, "reason": str(error)}
    assert found.value is not None
    met = found.value >= target.at_least if target.at_least is not None else found.value <= (target.at_most or 0.0)
    made = {"figure": found.value, "low": found.low, "high": found.high, "met": met}
    return {**made, **_conditions(result, target.value), **({} if over is None else {"over": over})}


def _conditions(result: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The cost ratio and the acceptance under which a drafting contender's figure was measured: no figure without."""
    part, *rest = path.split(SEPARATOR)
    entry = result["scenarios"][rest[0]]["contenders"][rest[1]] if part == "scenarios" else {}
    if not entry.get("draft_length") or "theory" not in entry:
        return {}
    return {"c": entry["theory"]["c"], "acceptance": entry["acceptance"]["tested"]}


def _figure(result: Mapping[str, Any], target: Target) -> tuple[Interval, str | None]:
    """The figure, with a value, and which divisor it came from. Raises SpecdecError."""
    value = look_up(result, target.value)
    if not target.divisors:
        return value, None
    known: dict[str, float] = {}
    faults = []
    for path in target.divisors:
        try:
            known[path] = look_up(result, path).value or 0.0
        except SpecdecError as error:
            faults.append(error)
    if not known:
        raise faults[0]
    over = (max if target.best == "max" else min)(known, key=known.__getitem__)
    if (paired := _paired(result, target.value, over)) is not None:
        return paired, over
    if known[over] == 0:
        raise SpecdecError(f"{over} is 0")
    return Interval((value.value or 0.0) / known[over]), over


def _paired(result: Mapping[str, Any], path: str, over: str) -> Interval | None:
    """A quotient of two speeds of one scenario with its interval, from the calls that both made."""
    mine, theirs = path.split(SEPARATOR), over.split(SEPARATOR)
    kind, same = mine[-1], mine[:2] == theirs[:2] and mine[3:] == theirs[3:]
    if mine[0] != "scenarios" or not same or kind not in figures.SECONDS:
        return None
    runs = result["scenarios"][mine[1]]["runs"]
    a, b = ([r for r in runs if r["contender"] == name] for name in (mine[2], theirs[2]))
    found = figures.speed_ratio(a, b, figures.SECONDS[kind])
    return None if found.value is None else found


def look_up(result: Mapping[str, Any], path: str) -> Interval:
    """A figure by its path, with its interval where it has one. Raises SpecdecError where there is none."""
    part, *rest = path.split(SEPARATOR)
    found: Any = result.get(part)
    if part == "scenarios" and rest and isinstance(found, Mapping):
        found, rest = found.get(rest[0], {}).get("contenders", {}), rest[1:]
    for name in rest:
        if not isinstance(found, Mapping) or name not in found:
            why = isinstance(found, Mapping) and (found.get("skipped") or found.get("error"))
            raise SpecdecError(f"{path}: {why or f'there is no {name!r}'}")
        found = found[name]
    if isinstance(found, Mapping) and "value" in found:
        found = Interval(found["value"], found.get("low"), found.get("high"))
    elif isinstance(found, (int, float)) and not isinstance(found, bool):
        found = Interval(float(found))
    if not isinstance(found, Interval) or found.value is None:
        raise SpecdecError(f"{path}: not measured")
    return found
