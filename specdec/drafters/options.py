"""Parameters of strategies, declared with their bounds: `Drafter` checks what is declared here when it is made.

    nodes: int = whole(80, most=MOST_NODES)
    -> SpecdecError: recycling: nodes must be a whole number >= 1, got 0

None is allowed where it is the default, or with `optional`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from functools import partial
from typing import Any

from specdec.config import check_number, check_switch, check_whole
from specdec.errors import SettingWarning, SpecdecError
from specdec.files.forms import MOST
from specdec.files.own_code import make_object


def whole(default: int | None, least: int = 1, most: int = MOST) -> Any:
    """Declare a whole number."""
    return _checked(default, partial(check_whole, least=least, most=most))


def number(default: float | None, low: float, high: float, optional: bool = False) -> Any:
    """Declare a finite number in [low, high]."""
    return _checked(default, partial(check_number, low=low, high=high), optional)


def switch(default: bool | None) -> Any:
    """Declare a switch."""
    return _checked(default, check_switch)


def state(default: Any = None) -> Any:
    """Declare what is no parameter: what the copy of a call learns."""
    return field(init=False, repr=False, compare=False, default=default)


def check_options(drafter: Any) -> None:
    """Raise SpecdecError for a declared parameter out of its bounds."""
    for declared in (f for f in fields(drafter) if "check" in f.metadata):
        value = getattr(drafter, declared.name)
        if not (value is None and declared.metadata["optional"]):
            declared.metadata["check"](f"{drafter.name}: {declared.name}", value)


def without_effect(strategy: Any, options: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the options of a strategy's class that have no effect beside those given, with the reasons; a strategy of
    your own need not say."""
    found: Mapping[str, str] = getattr(strategy, "without_effect", lambda options: {})(options)
    return found


def make_strategy(strategy: Any, name: str, options: Mapping[str, Any], typed: bool) -> Any:
    """Make a strategy of its options. Raises SpecdecError for a bad one, and for one without effect.

    typed: False = of a mapping, which may hold all parameters, as a result's provenance does: those that are as they
        would be anyway say nothing
    """
    idle = {option: why for option, why in without_effect(strategy, options).items() if option in options}
    made = make_object(strategy, name, {k: v for k, v in options.items() if k not in idle}, "strategy")
    for said in _idle(name, options, idle, None if typed else made):
        raise SpecdecError(said)
    return made


def check_effects(drafter: Any, strict: bool = True) -> None:
    """Raise SpecdecError for a parameter of an object that has no effect beside its others; or warn, if not strict.

    One that is as it would be anyway says nothing, as in a mapping. Called before any parameter is changed.
    """
    declared = {f.name: f.default for f in fields(drafter) if f.init}
    values = {name: getattr(drafter, name) for name in declared}
    idle = {name: why for name, why in without_effect(type(drafter), values).items() if name in values}
    idle = {name: why for name, why in idle.items() if values[name] is not None and values[name] != declared[name]}
    if not idle:
        return
    try:
        anyway = type(drafter)(**{name: value for name, value in values.items() if name not in idle})
    except TypeError:  # a subclass whose arguments are not its fields
        anyway = None
    for said in _idle(drafter.name, values, idle, anyway):
        if strict:
            raise SpecdecError(said)
        warnings.warn(said, SettingWarning, stacklevel=5)


def _idle(name: str, values: Mapping[str, Any], idle: Mapping[str, str], anyway: Any) -> list[str]:
    """Say what is wrong with each idle parameter, unless a strategy that was made without it has the same value."""
    said = {k: f"{name}: {k}={values[k]!r} has no effect: {why}; leave it out" for k, why in idle.items()}
    return [said[k] for k in idle if anyway is None or values[k] != getattr(anyway, k, None)]


def _checked(default: Any, check: Callable[[str, Any], None], optional: bool = False) -> Any:
    return field(default=default, metadata={"check": check, "optional": optional or default is None})
