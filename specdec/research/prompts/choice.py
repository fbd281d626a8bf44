"""Which prompts an experiment takes: a set, a part of it, and how they are given to the target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.config import check_whole
from specdec.errors import SpecdecError
from specdec.research.prompts.datasets import TURNS, Prompt, load_prompts, own_prompts


@dataclass(frozen=True)
class DataChoice:
    """Prompts of a set, as `load_prompts` takes them.

    longest: cut a prompt's text, or a chat's last message, to this many tokens; None = whole.
    """

    dataset: Any = "spec-bench"
    categories: Any = None
    seed: int = 0
    longest: int | None = 512

    def __post_init__(self) -> None:
        if self.dataset is not None and (not isinstance(self.dataset, (str, Path)) or not str(self.dataset)):
            raise SpecdecError(f"data: dataset must be the name of a set or a file, got {self.dataset!r}")
        names = self.categories
        if names is not None and not isinstance(names, str) and not is_texts(names):
            raise SpecdecError(f"data: categories must be a list of names, got {as_written(names)!r}")
        if self.longest is not None:
            check_whole("data: longest", self.longest, 1)
        check_whole("data: seed", self.seed, 0)


@dataclass(frozen=True)
class DataConfig(DataChoice):
    """Prompts of a set, and how many, whole or as first turns, through a chat template or not.

    dataset: None = spec-bench, or no set if there are prompts of one's own.
    chat: whether a prompt goes through the target's chat template; "auto" = if there is one.
    turns: `first`, or `all`: of an ablation, a row for each turn, with the answers to the earlier ones in its context.
    """

    dataset: Any = None
    longest: int | None = None
    limit: int | None = 8
    chat: Any = "auto"
    turns: str = "first"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limit is not None:
            check_whole("data: limit", self.limit, 1)
        if self.chat not in ("auto", True, False) or not isinstance(self.chat, (str, bool)):
            raise SpecdecError(f"data: chat must be true, false or auto, got {self.chat!r}")
        if self.turns not in TURNS:
            raise SpecdecError(f"data: turns must be one of {', '.join(TURNS)}, got {self.turns!r}")
        if self.turns == "all" and self.longest is not None:
            raise SpecdecError("data: longest cuts single prompts: give it without turns: all")

    @property
    def chosen(self) -> list[str]:
        """The options of a set that are given, which have no effect on prompts of one's own."""
        names = ("dataset", "categories", "limit", "seed", "turns")
        return [name for name in names if getattr(self, name) != getattr(DataConfig, name)]

    def load(self, entries: Iterable[Any] | None) -> list[Prompt]:
        """The prompts of one's own (`own_prompts`), and those of the set. Raises SpecdecError for a set that cannot be
        read."""
        own = own_prompts(entries or ())
        if self.dataset is None:
            return own
        categories = list(self.categories) if isinstance(self.categories, tuple) else self.categories
        return load_prompts(self.dataset, categories, self.limit, self.seed, self.turns)


def is_texts(values: Any) -> bool:
    """Whether this is a list of texts, at least one and none empty."""
    return isinstance(values, (list, tuple)) and bool(values) and all(isinstance(v, str) and v for v in values)


def as_written(value: Any) -> Any:
    """A value as a config file has it: lists arrive as tuples."""
    return list(value) if isinstance(value, tuple) else value
