"""A small constraint without any library: a deterministic automaton over token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specdec.sampling.constraints import Constraint, MatcherConstraint

Table = Mapping[int, Mapping[int, int]]  # state -> token -> next state


class DFA(Constraint):
    """Allows what the table has; counts its calls."""

    def __init__(self, table: Table):
        self.table, self.advances = table, 0

    def start(self, prompt: Sequence[int]) -> int:
        return 0

    def advance(self, state: int, token: int) -> int | None:
        self.advances += 1
        return self.table[state].get(token)

    def allowed(self, state: int) -> list[int]:
        return list(self.table[state])


class RollbackMatcher:
    """The same automaton as a library would offer it: it moves along one text and can be rolled back."""

    def __init__(self, table: Table):
        self.table, self.states = table, [0]

    def accept(self, token: int) -> bool:
        following = self.table[self.states[-1]].get(token)
        if following is not None:
            self.states.append(following)
        return following is not None

    def rollback(self, n: int) -> None:
        assert 0 < n < len(self.states)
        del self.states[-n:]

    def mask(self) -> list[int]:
        return list(self.table[self.states[-1]])


class RollbackDFA(MatcherConstraint):
    def __init__(self, table: Table):
        self.table = table

    def matcher(self, prompt: Sequence[int]) -> RollbackMatcher:
        return RollbackMatcher(self.table)


def accepts(table: Table, tokens: Sequence[int]) -> bool:
    """Whether the automaton can read `tokens`."""
    state: int | None = 0
    for token in tokens:
        state = None if state is None else table[state].get(token)
    return state is not None
