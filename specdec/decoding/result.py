"""What a call returns: `Generation` for a whole call, `Round` for one round of one row."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from specdec.decoding.probe import RoundDetails
from specdec.stats import Stats


@dataclass(frozen=True)
class Round:
    """One verify pass of one row, as `rounds` yields it.

    row: index of the row in the result; position: sequence index of the newest token when the round began; strategy:
    who drafted (None: nobody); draft: drafted ids, those behind the end of the text left out; p, q: the target's and
    the draft's probability of each drafted id (q is None where the draft made no claim); accepted: how many stood;
    bonus: the token after them, None when the draft continues in the next pass, when the text ended before it, or when
    the row failed; tokens: ids emitted; text: their text (None without a tokenizer); times: seconds of this pass's
    draft and verify; finish_reason: set in the row's last round; parents, path: of a tree, the node that each node
    follows (-1: the newest token) and the nodes that stood (None: a chain); details: of a recorded run
    (specdec.research.trace), more about the laws.
    """

    row: int
    position: int
    strategy: str | None
    draft: list[int]
    p: list[float]
    q: list[float] | None
    accepted: int
    bonus: int | None
    tokens: list[int]
    text: str | None
    times: dict[str, float]
    finish_reason: str | None = None
    parents: list[int] | None = None
    path: list[int] | None = None
    details: RoundDetails | None = None

    @property
    def is_continued(self) -> bool:
        """Whether the draft goes on in the row's next pass: all that was tested was accepted, and more is left."""
        return self.bonus is None and self.finish_reason is None


@dataclass(frozen=True)
class Generation:
    """The result of `generate`.

    token_ids: generated ids per row, an EOS that ended the row included; texts: special tokens skipped, cut before
    the stop string, None without a tokenizer; finish_reasons: eos | length | stop_string | stopping_criteria |
    context | error | interrupted; errors: for rows that ended with `error`, what failed and where; logprobs: natural
    logarithm of the target's processed law at each emitted id (before temperature when greedy), if asked for; origins:
    per emitted id the strategy that proposed it, None for the target's own; lossy: whether the acceptance rule gives
    up the target's law.
    """

    token_ids: list[list[int]]
    texts: list[str] | None
    finish_reasons: list[str]
    stats: Stats
    provenance: dict[str, Any]
    errors: list[str | None] = field(default_factory=list)
    logprobs: list[list[float]] | None = None
    origins: list[list[str | None]] = field(default_factory=list)
    lossy: bool = False

    def __len__(self) -> int:
        return len(self.token_ids)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = {f: getattr(self, f) for f in self.__dataclass_fields__ if f != "stats"}
        return {**plain, "stats": self.stats.to_dict()}


def round_to_dict(entry: Round) -> dict[str, Any]:
    """A round as plain data."""
    return asdict(entry)
