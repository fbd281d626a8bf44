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
    met = found.value >= target.at_least if target.at_least is not None else found.value <= target.at_most
    made = {
        "figure": found.value,
        "low": found.low,
        "high": found.high,
        "met": met,
        **_conditions(result, target.value),
    }
    return made if over is None else {**made, "over": over}


def _conditions(result: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The cost ratio and the acceptance under which a drafting contender's figure was measured: no figure without."""
    part, *rest = path.split(SEPARATOR)
    entry = result["scenarios"][rest[0]]["contenders"][rest[1]] if part == "scenarios" else {}
    if not entry.get("draft_length") or "theory" not in entry:
        return {}
    return {"c": entry["theory"]["c"], "acceptance": entry["acceptance"]["tested"]}


def _figure(result: Mapping[str, Any], target: Target) -> tuple[Any, str | None]:
    """The figure as an Interval with a value, and which divisor it came from. Raises SpecdecError."""
    value = look_up(result, target.value)
    if not target.divisors:
        return value, None
    known: dict[str, Any] = {}
    for path in target.divisors:
        try:
            known[path] = look_up(result, path)
        except SpecdecError:
            continue
    if not known:
        look_up(result, target.divisors[0])  # says what is missing
    choose = max if target.best == "max" else min
    over = choose(known, key=lambda path: known[path].value)
    return _quotient(result, target.value, over, value, known[over]), over


def _quotient(result: Mapping[str, Any], path: str, over: str, value: Any, divisor: Any) -> Interval:
    """A quotient of two figures; of two speeds of one scenario, paired and with its interval."""
    mine, theirs = path.split(SEPARATOR), over.split(SEPARATOR)
    if mine[0] == theirs[0] == "scenarios" and mine[1] == theirs[1] and mine[3:] == theirs[3:]:
        kind = mine[-1]
        if kind in figures.SECONDS:
            runs = result["scenarios"][mine[1]]["runs"]
            a, b = ([r for r in runs if r["contender"] == name] for name in (mine[2], theirs[2]))
            paired = figures.speed_ratio(a, b, figures.SECONDS[kind])
            if paired.value is not None:
                return paired
    if divisor.value == 0:
        raise SpecdecError(f"{over} is 0")
    return Interval(value.value / divisor.value)


def look_up(result: Mapping[str, Any], path: str) -> Interval:
    """A figure by its path, with its interval where it has one. Raises SpecdecError where there is none."""
    part, *rest = path.split(SEPARATOR)
    found: Any = result.get(part)
    if part == "scenarios" and rest and isinstance(found, Mapping):
        found, rest = found.get(rest[0], {}).get("contenders", {}), rest[1:]
    for name in rest:
        if not isinstance(found, Mapping):
            raise SpecdecError(f"{path}: there is no {name!r}")
        if name not in found:
            why = found.get("skipped") or found.get("error")
            raise SpecdecError(f"{path}: {why}" if why else f"{path}: there is no {name!r}")
        found = found[name]
    if isinstance(found, Mapping) and "value" in found:
        found = Interval(found["value"], found.get("low"), found.get("high"))
    elif isinstance(found, (int, float)) and not isinstance(found, bool):
        found = Interval(float(found))
    if not isinstance(found, Interval) or found.value is None:
        raise SpecdecError(f"{path}: not measured")
    return found
