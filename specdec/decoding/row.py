"""One row of a call: its ids, and the stops that can end it inside an accepted block.

A row takes the tokens of a block one by one, so nothing follows an EOS, a stop string, the length limit or the end of
the context, and nothing after them is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.drafters.base import Draft, RowSampling
from specdec.models.trees import MISSING, depths_of
from specdec.sampling.sampling import fold_int
from specdec.stats import RoundRecord


@dataclass(frozen=True)
class StopRules:
    """When rows end.

    max_new_tokens: most tokens of the output
    context: most tokens of prompt and output together
    eos: ids that end a row
    stop_strings: texts that end a row
    criteria: transformers' StoppingCriteria, or callables (input_ids [1, n], scores=None) -> bool or bool tensor
    """

    max_new_tokens: int
    context: int
    eos: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    criteria: tuple[Any, ...] = ()
    tokenizer: Any = None

    @property
    def window(self) -> int:
        """Most tokens of the longest stop string, with some room: a character takes at most 4 byte tokens."""
        return 4 * max((len(s) for s in self.stop_strings), default=0) + 8

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, special tokens skipped. Spaces are not tidied: that would rewrite text already streamed."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class RowVerdict(NamedTuple):
    """What a pass has decided about one row's draft.

    path: the accepted tokens by their place in the draft, from the newest token on
    tokens: ids to emit: the accepted ones and, unless the draft continues or the row fails, the token after them
    status: "closed": the round ends; "continues": all of this chunk was accepted and more of the draft is left;
        "failed": the target's scores after the accepted tokens are no distribution
    total: tokens of the whole draft
    tested: those of them that this pass tested
    """

    path: list[int]
    tokens: list[int]
    status: Literal["closed", "continues", "failed"]
    total: int
    tested: int

    @property
    def bonus(self) -> int | None:
        """The token after the accepted ones: sampled from the residual, or the bonus token."""
        return self.tokens[-1] if len(self.tokens) > len(self.path) else None


@dataclass
class Row:
    """A prompt on its way to a result. `ids` holds prompt and output; the first `size` are real."""

    index: int
    prompt: list[int]
    key: int
    stops: StopRules
    ids: np.ndarray = field(init=False)
    size: int = field(init=False)
    finish_reason: str | None = None
    error: str | None = None
    records: list[RoundRecord] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    origins: list[str | None] = field(default_factory=list)
    processors: Any = None
    sampling: RowSampling | None = None  # how its tokens are sampled, as drafters are told
    alone: bool = True  # the prompt was computed in passes of its own
    # The open round: what is left of its draft, the row's size when it began, tokens drafted and accepted so far; with
    # trees also parents, accepted nodes, and nodes that do not exist.
    pending: Draft | None = None
    begun: int = 0
    strategy: str | None = None
    drafted: int = 0
    accepted: int = 0
    path: Sequence[int] = ()
    parents: list[int] | None = None
    missing: set[int] = field(default_factory=set)
    rounds: int = 0  # rounds opened, the counter that makes draft noise fresh
    round_key: int = 0  # of the open round

    def __post_init__(self) -> None:
        self.longest = min(self.stops.context, len(self.prompt) + self.stops.max_new_tokens)
        self.ids = np.zeros(max(self.longest, len(self.prompt)) + 1, dtype=np.int64)
        self.ids[: len(self.prompt)] = self.prompt
        self.size = len(self.prompt)
        if self.room == 0:
            self.finish_reason = self._limit()

    @property
    def tokens(self) -> np.ndarray:
        """Ids without the newest, [size - 1]; a view."""
        return self.ids[: self.size - 1]

    @property
    def last(self) -> int:
        return int(self.ids[self.size - 1])

    @property
    def output(self) -> list[int]:
        return self.ids[len(self.prompt) : self.size].tolist()

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return max(0, self.longest - self.size)

    def _limit(self) -> str:
        done = self.size - len(self.prompt)
        return "length" if done >= self.stops.max_new_tokens else "context"

    def take(self, tokens: Sequence[int], origins: Sequence[str | None]) -> int:
        """Append tokens until a stop, which sets `finish_reason`. Returns how many were taken."""
        for n, token in enumerate(tokens):
            self.ids[self.size] = token
            self.size += 1
            self.origins.append(origins[n])
            self.finish_reason = self._stop(int(token))
            if self.finish_reason is not None:
                return n + 1
        return len(tokens)

    def _stop(self, token: int) -> str | None:
        if token in self.stops.eos:
            return "eos"
        if self.stops.stop_strings and self._stop_string():
            return "stop_string"
        if self.stops.criteria and self._criterion():
            return "stopping_criteria"
        return self._limit() if self.size >= self.longest else None

    def _stop_string(self) -> bool:
        start = max(len(self.prompt), self.size - self.stops.window)
        tail = self.stops.decode(self.ids[start : self.size].tolist())
        return any(s in tail for s in self.stops.stop_strings)

    def _criterion(self) -> bool:
        ids = torch.from_numpy(self.ids[: self.size].copy())[None]
        for criterion in self.stops.criteria:
            answer = criterion(ids, None)
            if bool(answer.all()) if isinstance(answer, Tensor) else bool(answer):
                return True
        return False

    def fail(self, reason: str, message: str | None = None) -> None:
        """End the row without a result of its own making: an error, an interrupt."""
        self.finish_reason, self.error = reason, message

    @property
    def next_round_key(self) -> int:
        """`round_key` of the round that is opened next."""
        return fold_int(self.key, self.rounds)

    def open_round(self, draft: Draft) -> None:
        """Begin a round with this draft."""
        self.pending = draft
        self.strategy = draft.drafter or None
        self.begun, self.drafted, self.accepted, self.path, self.parents = self.size, 0, 0, (), None
        self.round_key = self.next_round_key
        self.rounds += 1

    def note(self, verdict: RowVerdict, parents: list[int] | None, ids: Sequence[int]) -> bool:
        """Note what a pass has decided about the open round. Returns True if the draft's length is news to the host.

        parents, ids: of the drafted tokens; parents is None for a chain
        """
        self.parents = parents
        self.missing = {n for n in range(verdict.tested) if ids[n] == MISSING} if parents is not None else set()
        drafted = verdict.total - len(self.missing)
        first = self.drafted == 0 and drafted > 0
        if first:
            self.drafted = drafted
        self.accepted += len(verdict.path)
        self.path = verdict.path
        return first

    def close_round(self) -> None:
        """Record what the open round has emitted up to a stop or failure; a round that emitted nothing is not recorded.

        What was drafted after the end of the text does not count (stats.py).
        """
        emitted = self.size - self.begun
        own = emitted > self.accepted
        self.accepted = min(self.accepted, emitted)
        levels, exhausted = None, False
        if self.parents is not None:
            depths, end = depths_of(self.parents), self.path[-1] if self.path else -1
            real = [n for n in range(len(depths)) if n not in self.missing]
            levels = max((depths[n] for n in real), default=0) if own else self.accepted
            exhausted = own and all(self.parents[n] != end for n in real)
            if not own:
                self.drafted = sum(depths[n] <= levels for n in real)
        elif not own:
            self.drafted = self.accepted
        if emitted > 0:
            strategy = self.strategy if self.drafted else None
            self.records.append(RoundRecord(strategy, self.drafted, self.accepted, levels, exhausted, own))
        self.pending = None

    def abandon_round(self) -> None:
        """Record what an interrupted round has emitted."""
        recorded = len(self.prompt) + sum(r.tokens for r in self.records)
        if self.pending is not None and self.size > recorded:
            self.begun = recorded
            self.close_round()
        elif self.pending is not None:
            self.drafted = self.accepted = 0

    def text(self) -> str:
        """Return the output's text: special tokens skipped, cut before the earliest stop string."""
        text = self.stops.decode(self.output)
        if self.finish_reason == "stop_string":
            found = [text.find(s) for s in self.stops.stop_strings if s in text]
            text = text[: min(found)] if found else text
        return text
