"""What a contender is: something that continues prompts, and can say why it cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from specdec.research.bench.config import options_of
from specdec.research.bench.pair import Pair
from specdec.stats import Stats


@dataclass
class Output:
    """What a run gave.

    token_ids: ids that were generated, a list a row, the end token included
    figures: what can be summed over runs, for those who count
    stats: the call's rounds, for those who keep them
    """

    token_ids: list[list[int]]
    figures: dict[str, Any] = field(default_factory=dict)
    stats: Stats | None = None


class Contender:
    """One way of decoding with the pair's models, which it leaves as they are. To add one: a subclass in a file beside
    the config, with `kind`, `options_class`, a frozen dataclass, and the methods that raise here; a config names it
    `my_module:MyContender` (configs/other_libraries.py).

    Raises SpecdecError for options that it does not have.
    """

    kind: ClassVar[str]
    options_class: ClassVar[type[Any]]
    pair: Pair

    def __init__(self, name: str, options: Mapping[str, Any]):
        self.name = name
        self.options: Any = options_of(self.options_class, name, options)

    def enter(self, pair: Pair) -> None:
        """Take the models; called once, before the first run."""
        self.pair = pair

    def settings(self) -> dict[str, Any]:
        """Its options as plain data."""
        return asdict(self.options)

    def version(self) -> str | None:
        """The version of what runs, None where it is not installed."""
        raise NotImplementedError

    def refuses(self, batch: int) -> str | None:
        """Why it cannot run `batch` rows here, or None."""
        raise NotImplementedError

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, ignore_eos: bool) -> Output:
        """Continue the prompts, all in one call. Whatever it raises is recorded as its failure."""
        raise NotImplementedError

    def warnings(self, outputs: Sequence[Output]) -> list[str]:
        """Say what a reader of its figures should know; outputs: of one run of every call of a scenario."""
        return []


def until_end(row: Sequence[int], ends: Sequence[int]) -> list[int]:
    """A row up to its first end token, which stays."""
    stops = [i for i, token in enumerate(row) if token in ends]
    return list(row[: stops[0] + 1] if stops else row)
