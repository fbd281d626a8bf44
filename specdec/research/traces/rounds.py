"""What became of a round's drafted tokens, and the tokens of a row in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.decoding.result import Round

if TYPE_CHECKING:
    from specdec.research.traces.trace import Trace


@dataclass(frozen=True)
class Node:
    """One drafted token of a round.

    index: its place in the draft.
    parent: the node that it follows; -1 = the row's newest token.
    depth: 1 for the first token of a chain.
    tested: all tokens before it were accepted, and no earlier sibling was.
    """

    index: int
    parent: int
    depth: int
    tested: bool
    accepted: bool


def nodes(r: Round) -> list[Node]:
    """The drafted tokens of a round, in the order of the draft."""
    parents = range(-1, len(r.draft) - 1) if r.parents is None else r.parents
    path = list(range(r.accepted)) if r.path is None else r.path
    found: list[Node] = []
    decided: set[int] = set()  # nodes with an accepted child
    for index, parent in enumerate(parents):
        tested = parent in (-1, *path) and parent not in decided
        depth = 1 if parent < 0 else found[parent].depth + 1
        found.append(Node(index, parent, depth, tested, index in path))
        if index in path:
            decided.add(parent)
    return found


@dataclass(frozen=True)
class Piece:
    """A token of a row as it is shown.

    before: how many tokens of the round's draft earlier passes accepted.
    node: the drafted token; None = the target's own.
    place: its index in the round's tokens; -1 = a rejected one.
    """

    round: Round
    before: int
    text: str
    node: Node | None
    place: int = -1


def pieces_of(trace: Trace, index: int) -> Iterator[Piece]:
    """The row's tokens in order, rejected drafts in front of the token that took their place."""
    row, at = trace.rows[index], 0
    for r, before in zip(trace.rounds, trace.drafted_before(), strict=True):
        if r.row != index:
            continue
        drafted = nodes(r)
        accepted = sorted((n for n in drafted if n.accepted), key=lambda n: n.depth)
        rejected = [Piece(r, before, trace.text_of(r.draft[n.index]), n) for n in drafted if not n.accepted]
        for j, token in enumerate(r.tokens):
            if j == r.accepted:
                yield from rejected
            text = row.pieces[at + j] if at + j < len(row.pieces) else trace.text_of(token)
            yield Piece(r, before, text, accepted[j] if j < r.accepted else None, j)
        if len(r.tokens) <= r.accepted and not r.is_continued:
            yield from rejected
        at += len(r.tokens)
