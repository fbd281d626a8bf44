"""Texts that end in a loop: which share of a text repeats itself, and rows without such texts.

Small models, and any model that is decoded greedily for long, fall into repeating one piece for ever. Such a text is
easily drafted, so that its acceptance and speed-up say nothing about the texts that a reader has in mind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.errors import SpecdecError

LEAST_PERIODS, LEAST_TOKENS = 3, 8  # of a loop
LOOPED = 0.25  # loop share from which a row counts as looped


def loop_tokens(tokens: Sequence[int]) -> int:
    """Tokens of the longest tail that repeats one period, at least three times and over eight tokens; 0 = none. An end
    token after the loop is passed over."""
    return max(_tail(tokens), _tail(tokens[:-1]))


def _tail(tokens: Sequence[int]) -> int:
    longest = 0
    for period in range(1, len(tokens) // LEAST_PERIODS + 1):
        start = len(tokens) - period  # of the tail: every later token is the one a period before it
        while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
            start -= 1
        if len(tokens) - start >= max(LEAST_PERIODS * period, LEAST_TOKENS):
            longest = max(longest, len(tokens) - start)
    return longest


def loop_share(texts: Sequence[Sequence[int]]) -> float:
    """Share of the tokens of some texts that is in loops, from 0 to 1."""
    return sum(map(loop_tokens, texts)) / max(1, sum(map(len, texts)))


def is_looped(row: Mapping[str, Any]) -> bool:
    """Whether a row's text is a loop for at least a quarter."""
    return (row.get("loop_share") or 0.0) >= LOOPED


def without_loops(rows: Sequence[Any]) -> list[Any]:
    """The rows whose texts are not looped. Raises SpecdecError where nothing that drafts is left."""
    kept = [row for row in rows if not is_looped(row)]
    if not any(row["drafts"] for row in kept):
        raise SpecdecError("drop loops: every text that was drafted for is a loop; try other prompts or a temperature")
    return kept
