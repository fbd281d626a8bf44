"""Strategies by name, and the parsing of what users write for a chain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from specdec.drafters.base import PROTOCOL, Draft, Drafter, DraftRequest, as_drafter, is_drafter
from specdec.drafters.dflash.strategy import DFlash
from specdec.drafters.draft_model.strategy import DraftModel
from specdec.drafters.eagle3.strategy import Eagle3
from specdec.drafters.lookahead import Lookahead
from specdec.drafters.mtp import Mtp
from specdec.drafters.ngram.cache import NgramCache
from specdec.drafters.ngram.lookup_cache import LookupCache
from specdec.drafters.ngram.map import NgramMapK, NgramMapK4V
from specdec.drafters.ngram.mod import NgramMod
from specdec.drafters.ngram.simple import NgramSimple
from specdec.drafters.options import make_strategy
from specdec.drafters.prompt_lookup import PromptLookup
from specdec.drafters.recycling import TokenRecycling
from specdec.drafters.rest import Rest
from specdec.drafters.self_speculation.strategy import EarlyExit
from specdec.drafters.suffix import Suffix
from specdec.drafters.suffix_index import SuffixStore
from specdec.errors import SpecdecError
from specdec.files.own_code import find_object, parse_name, split_list

STRATEGIES: dict[str, type[Any]] = {
    "draft-model": DraftModel,
    "prompt-lookup": PromptLookup,
    "recycling": TokenRecycling,
    "suffix": Suffix,
    "rest": Rest,
    "lookahead": Lookahead,
    "ngram-simple": NgramSimple,
    "ngram-map-k": NgramMapK,
    "ngram-map-k4v": NgramMapK4V,
    "ngram-mod": NgramMod,
    "ngram-cache": NgramCache,
    "eagle3": Eagle3,
    "dflash": DFlash,
    "mtp": Mtp,
    "early-exit": EarlyExit,
}


def make_drafters(strategies: Any, has_draft: bool) -> list[Any]:
    """Make the drafters of a chain, in the order given.

    strategies: None = `draft-model` with a draft model, else `prompt-lookup`; a list (or a comma-separated string) of
    names, `name:key=value:key=value` texts, mappings with `name`, or objects with the drafter protocol. A name is one
    of `STRATEGIES`, or `my_module:MyDrafter` for a class or function of your own. Raises SpecdecError for an unknown
    strategy or option.
    """
    if strategies is None:
        strategies = ["draft-model" if has_draft else "prompt-lookup"]
    if isinstance(strategies, str):
        strategies = [part for part in split_list(strategies) if part != "none"]
    if not isinstance(strategies, Sequence):
        strategies = [strategies]
    return [_make(entry) for entry in strategies]


def tree_makers(drafters: Sequence[Any]) -> list[str]:
    """List the names of strategies whose drafts can be trees."""
    return [d.name for d in drafters if d.makes_trees]


def _make(entry: Any) -> Any:
    if isinstance(entry, (str, Mapping)):
        name, options = parse_strategy(entry)
        made = make_strategy(find_strategy(name), name, options, typed=isinstance(entry, str))
        if not is_drafter(made):
            raise SpecdecError(f"strategy {name!r} is not a drafter: {_missing(made)}")
        return as_drafter(made)
    if isinstance(entry, type) or not is_drafter(entry):
        raise SpecdecError(f"{entry!r} is not a strategy: give a name, or an object with name, begin, draft and accept")
    return as_drafter(entry)


def parse_strategy(entry: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split a strategy as users write it into its name and options. Raises SpecdecError for another form."""
    if isinstance(entry, str):
        return parse_name(entry, STRATEGIES, "strategy")
    values = dict(entry)
    if "name" not in values:
        raise SpecdecError(f"a strategy written as a mapping needs a 'name': {dict(entry)}")
    return str(values.pop("name")), values


def find_strategy(name: str) -> Callable[..., Any]:
    """Find the class of a strategy, or the class or function that `my_module:MyDrafter` names. Raises SpecdecError."""
    made = STRATEGIES[name] if name in STRATEGIES else find_object(name, STRATEGIES, "strategy")
    if not callable(made):
        raise SpecdecError(f"strategy {name!r} is not a drafter: expected a class or a function, got {made!r}")
    return cast(Callable[..., Any], made)


def _missing(made: Any) -> str:
    lacking = [name for name in PROTOCOL if not hasattr(made, name)]
    return f"{type(made).__name__} has no {', '.join(lacking)}"


__all__ = [
    "STRATEGIES", "DFlash", "Draft", "DraftModel", "DraftRequest", "Drafter", "Eagle3", "EarlyExit", "Lookahead",
    "LookupCache", "Mtp", "NgramCache", "NgramMapK", "NgramMapK4V", "NgramMod", "NgramSimple", "PromptLookup", "Rest",
    "Suffix", "SuffixStore", "TokenRecycling", "find_strategy", "make_drafters", "parse_strategy",
]  # fmt: skip
