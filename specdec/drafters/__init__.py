"""Strategies by name, and the parsing of what users write for a chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.config import unknown_name
from specdec.drafters.base import Draft, Drafter, DraftRequest
from specdec.drafters.draft_model.strategy import DraftModel
from specdec.drafters.ngram.cache import NgramCache
from specdec.drafters.ngram.lookup_cache import LookupCache
from specdec.drafters.ngram.map import NgramMapK, NgramMapK4V
from specdec.drafters.ngram.mod import NgramMod
from specdec.drafters.ngram.simple import NgramSimple
from specdec.drafters.prompt_lookup import PromptLookup
from specdec.drafters.suffix import Suffix
from specdec.drafters.suffix_index import SuffixStore
from specdec.errors import SpecdecError
from specdec.files.texts import parse_yaml

STRATEGIES: dict[str, type[Any]] = {
    "draft-model": DraftModel,
    "prompt-lookup": PromptLookup,
    "suffix": Suffix,
    "ngram-simple": NgramSimple,
    "ngram-map-k": NgramMapK,
    "ngram-map-k4v": NgramMapK4V,
    "ngram-mod": NgramMod,
    "ngram-cache": NgramCache,
}


def make_drafters(strategies: Any, has_draft: bool) -> list[Any]:
    """A chain as users write it -> configured drafters, in the order given.

    strategies: None = `draft-model` with a draft model, else `prompt-lookup`; a list (or a comma-separated string) of
    names, `name:key=value:key=value` texts, mappings with `name`, or objects with the drafter protocol. Raises
    SpecdecError for an unknown strategy or option.
    """
    if strategies is None:
        strategies = ["draft-model" if has_draft else "prompt-lookup"]
    if isinstance(strategies, str):
        strategies = [part.strip() for part in strategies.split(",") if part.strip() not in ("", "none")]
    if not isinstance(strategies, Sequence):
        strategies = [strategies]
    return [_make(entry) for entry in strategies]


def tree_makers(drafters: Sequence[Any]) -> list[str]:
    """Names of the strategies whose drafts can be trees."""
    return [d.name for d in drafters if getattr(d, "makes_trees", False)]


def _make(entry: Any) -> Any:
    if isinstance(entry, (str, Mapping)):
        return _named(*parse_strategy(entry))
    if isinstance(entry, type) or not isinstance(entry, Drafter):
        raise SpecdecError(f"{entry!r} is not a strategy: give a name, or an object with begin, draft and accept")
    return entry


def parse_strategy(entry: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and the options of a strategy as users write it. Raises SpecdecError for a text without that form."""
    if isinstance(entry, str):
        name, *options = entry.split(":")
        return name, dict(_option(name, text) for text in options)
    values = dict(entry)
    if "name" not in values:
        raise SpecdecError(f"a strategy written as a mapping needs a 'name': {dict(entry)}")
    return str(values.pop("name")), values


def _option(strategy: str, text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise SpecdecError(f"strategy {strategy!r}: expected key=value, got {text!r}")
    return key, parse_yaml(value, f"strategy {strategy!r}: the value of {key}")


def _named(name: str, options: Mapping[str, Any]) -> Any:
    if name not in STRATEGIES:
        raise unknown_name("strategy", name, STRATEGIES)
    kind = STRATEGIES[name]
    known = [key for key, f in kind.__dataclass_fields__.items() if f.init]
    for key in options:
        if key not in known:
            raise unknown_name(f"option of strategy {name!r}", key, known)
    try:
        return kind(**options)
    except TypeError as error:
        raise SpecdecError(f"strategy {name!r}: {error}") from None


__all__ = [
    "STRATEGIES", "Draft", "DraftModel", "DraftRequest", "Drafter", "LookupCache", "NgramCache", "NgramMapK",
    "NgramMapK4V", "NgramMod", "NgramSimple", "PromptLookup", "Suffix", "SuffixStore", "make_drafters",
    "parse_strategy",
]  # fmt: skip
