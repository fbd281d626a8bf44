"""Acceptance analysis: how often the drafted tokens of a trace were accepted, and how often they should have been.

There are two rates (docs/metrics.md). `conditional_acceptance_rate`: accepted / tested, where a token after a rejected
one is not tested; this is the `a` of specdec.theory. `draft_acceptance_rate`: accepted / drafted, which also falls with
the draft's length.

*Expected* is the probability, given everything before, that a token proposed there is accepted: 1 - TV(p, q) under
`leviathan`, the overlap of the coupled samples under `coupled`, p of the token where a draft has no q, and 0 or 1 in
greedy runs. Acceptance minus expectation is a sum of martingale differences along the run, so that

    z = sum (accepted - expected) / sqrt(sum expected (1 - expected))

is about standard normal for any rule that accepts as it claims to: |z| > 4 means a fault, not bad luck.
"""

from __future__ import annotations

import string
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specdec.decoding.result import Round
from specdec.errors import SpecdecError
from specdec.research.bootstrap import Interval, ratio
from specdec.research.traces.records import records_of
from specdec.research.traces.rounds import nodes
from specdec.research.traces.trace import Trace, record
from specdec.stats import Positions

ENTROPY_EDGES = (0.1, 0.5, 1.0, 2.0, 4.0)  # nats
SHORTEST = 512  # where the context-length bins, and the curve, begin


@dataclass(frozen=True)
class DraftedToken:
    """One drafted token.

    position: place in the draft from 1; of a tree, the depth.
    context: tokens before it.
    tested: all before it were accepted and, of a tree, no earlier sibling was.
    tv, expected, entropy (of p, nats), rank: None if unknown.
    """

    row: int
    strategy: str
    position: int
    context: int
    token: int
    text: str
    category: str
    tested: bool
    accepted: bool
    p: float
    q: float | None = None
    tv: float | None = None
    expected: float | None = None
    entropy: float | None = None
    rank: int | None = None


def drafted_tokens(
    trace: Trace, rows: Iterable[int] | None = None, strategies: Iterable[str] | None = None
) -> list[DraftedToken]:
    """Every drafted token of a trace, or of some of its rows and strategies."""
    chosen = {id(r) for r in trace.select(rows, strategies)}
    found: list[DraftedToken] = []
    for r, before in zip(trace.rounds, trace.drafted_before(), strict=True):
        if id(r) in chosen:
            found += _tokens_of(trace, r, before)
    return found


def _tokens_of(trace: Trace, r: Round, before: int) -> Iterator[DraftedToken]:
    d, category = r.details, trace.rows[r.row].category
    for n in nodes(r):
        i, token, column = n.index, r.draft[n.index], n.parent + 1
        known: dict[str, Any] = {} if r.q is None else {"q": r.q[i]}
        if d is not None:
            known |= {"expected": d.expected[i], "rank": d.rank[i], "tv": None if d.tv is None else d.tv[i]}
            known["entropy"] = d.entropy[column] if column < len(d.entropy) else None
        place = (before + n.depth, r.position + n.depth)
        head = (r.row, r.strategy or "", *place, token, trace.text_of(token), category)
        yield DraftedToken(*head, n.tested, n.accepted, r.p[i], **known)


def token_class(text: str) -> str:
    """`special`, `blank`, `number`, `word` (starts one), `part` (continues one), `punctuation`, `bytes` (part of a
    character) or `mixed`."""
    body = text.strip()
    if text.startswith("<") and text.endswith(">") and len(text) > 2 and " " not in text:
        return "special"
    if not body:
        return "blank"
    if "\ufffd" in body:
        return "bytes"
    if body.isdigit():
        return "number"
    if all(c in string.punctuation or not (c.isalnum() or c.isspace()) for c in body):
        return "punctuation"
    if body.replace("'", "").replace("_", "").isalpha():
        return "word" if text[0].isspace() else "part"
    return "mixed"


def _entropy_bin(value: float | None) -> str:
    if value is None:
        return "unknown"
    i = bisect_right(ENTROPY_EDGES, value)
    if i in (0, len(ENTROPY_EDGES)):
        return f"< {ENTROPY_EDGES[0]:g}" if i == 0 else f">= {ENTROPY_EDGES[-1]:g}"
    return f"{ENTROPY_EDGES[i - 1]:g} - {ENTROPY_EDGES[i]:g}"


def _context_bin(context: int) -> str:
    if context < SHORTEST:
        return f"< {SHORTEST}"
    low = SHORTEST << ((context // SHORTEST).bit_length() - 1)
    return f"{low} - {2 * low}"


# What tokens can be grouped by.
DIMENSIONS: dict[str, Callable[[DraftedToken], Any]] = {
    "strategy": lambda t: t.strategy,
    "position": lambda t: t.position,
    "entropy": lambda t: _entropy_bin(t.entropy),
    "class": lambda t: token_class(t.text),
    "context": lambda t: _context_bin(t.context),
    "category": lambda t: t.category or "(none)",
    "row": lambda t: t.row,
}
_ORDER: dict[str, Callable[[DraftedToken], Any]] = {  # of bins, whose names are texts
    "entropy": lambda t: -1.0 if t.entropy is None else t.entropy,
    "context": lambda t: t.context,
}


@dataclass(frozen=True)
class Group:
    """Acceptance of some drafted tokens.

    key: one value per dimension.
    expected: mean over the tested tokens whose expectation is known.
    tv: mean TV(p, q) over all drafted tokens where it is known.
    low, high: 95 % interval of `conditional_acceptance_rate`, from resampled rows (None with one row).
    z: see the module.
    """

    key: tuple[Any, ...]
    drafted: int
    tested: int
    accepted: int
    conditional_acceptance_rate: float | None
    draft_acceptance_rate: float | None
    expected: float | None
    tv: float | None
    low: float | None
    high: float | None
    z: float | None

    @property
    def conditional(self) -> float | None:
        """The old name of `conditional_acceptance_rate`."""
        return self.conditional_acceptance_rate

    @property
    def unconditional(self) -> float | None:
        """The old name of `draft_acceptance_rate`."""
        return self.draft_acceptance_rate

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the rates by their old names as well."""
        return {**asdict(self), "conditional": self.conditional, "unconditional": self.unconditional}


def analyse(
    trace: Trace | Sequence[DraftedToken],
    by: Sequence[str] = (),
    rows: Iterable[int] | None = None,
    strategies: Iterable[str] | None = None,
    seed: int = 0,
) -> list[Group]:
    """Acceptance by any combination of `DIMENSIONS`, in their order; `by=()` gives one group of everything.

    trace: a trace, or tokens of several (`drafted_tokens`).
    rows, strategies: of a trace, only these.
    seed: of the bootstrap.
    Raises SpecdecError for an unknown dimension, row or strategy.
    """
    for name in by:
        if name not in DIMENSIONS:
            raise SpecdecError(f"by: unknown dimension {name!r}; known: {', '.join(DIMENSIONS)}")
    tokens = drafted_tokens(trace, rows, strategies) if isinstance(trace, Trace) else list(trace)
    groups: dict[tuple[Any, ...], list[DraftedToken]] = {}
    for token in tokens:
        groups.setdefault(tuple(DIMENSIONS[name](token) for name in by), []).append(token)

    def rank(key: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(min(map(_ORDER[n], groups[key])) if n in _ORDER else v for n, v in zip(by, key, strict=True))

    return [_group(key, groups[key], seed) for key in sorted(groups, key=rank)]


def _group(key: tuple[Any, ...], tokens: Sequence[DraftedToken], seed: int) -> Group:
    tested = [t for t in tokens if t.tested]
    known = [t for t in tested if t.expected is not None]
    accepted = sum(t.accepted for t in tokens)
    expected = np.array([t.expected for t in known], np.float64)
    spread = float(np.sqrt((expected * (1 - expected)).sum()))
    excess = sum(t.accepted for t in known) - float(expected.sum())
    distances = [t.tv for t in tokens if t.tv is not None]
    found = _interval(tested, seed)
    return Group(
        key,
        len(tokens),
        len(tested),
        accepted,
        conditional_acceptance_rate=accepted / len(tested) if tested else None,
        draft_acceptance_rate=accepted / len(tokens) if tokens else None,
        expected=float(expected.mean()) if known else None,
        tv=float(np.mean(distances)) if distances else None,
        low=found.low,
        high=found.high,
        z=excess / spread if spread > 0 else None,
    )


def _interval(tested: Sequence[DraftedToken], seed: int) -> Interval:
    """The interval of these tokens' acceptance. Tokens of one row depend on each other: whole rows are resampled."""
    rows = sorted({t.row for t in tested})
    accepted, count = (Counter(t.row for t in tested if t.accepted), Counter(t.row for t in tested))
    return ratio([accepted[r] for r in rows], [count[r] for r in rows], seed=seed) if rows else Interval(None)


@dataclass(frozen=True)
class Position:
    """Acceptance at one draft position (from 1), as `Stats` defines it.

    tested, reached: rounds that tested it, and that accepted it.
    conditional_acceptance_rate: reached / tested.
    acceptance_rate: reached / drafted rounds, those included whose draft was shorter.
    """

    position: int
    tested: int
    reached: int
    conditional_acceptance_rate: float
    acceptance_rate: float

    @property
    def conditional(self) -> float:
        """The old name of `conditional_acceptance_rate`."""
        return self.conditional_acceptance_rate

    @property
    def unconditional(self) -> float:
        """The old name of `acceptance_rate`."""
        return self.acceptance_rate


def by_position(trace: Trace, strategies: Iterable[str] | None = None) -> list[Position]:
    """Acceptance by draft position; positions that no round tested have no entry."""
    chosen = [trace.select([i], strategies) for i in range(len(trace.rows))]
    drafted = [r for passes in chosen for r in records_of(passes) if r.drafted]
    _, tested, reached = Positions.of(drafted)
    counts = enumerate(zip(tested, reached, strict=True), 1)
    return [Position(i, t, n, n / t, n / len(drafted)) for i, (t, n) in counts if t]


@dataclass(frozen=True)
class CurvePoint:
    """The context-sensitivity curve at one length.

    context: prompt tokens.
    overall: the group of all drafted tokens.
    """

    context: int
    tokens_per_round: float
    overall: Group


def context_curve(
    decoder: Any,
    ids: Sequence[int],
    lengths: Sequence[int] | None = None,
    anchors: int = 4,
    new_tokens: int = 32,
    **options: Any,
) -> list[CurvePoint]:
    """Acceptance against context length: the same places of one long text, continued from more and more of what is
    before them.

    decoder: a decoder whose strategies draft.
    ids: one text, at least as long as the longest length.
    lengths: tokens of context; None = 512, 1024, ... as far as text and the target's context allow.
    anchors: how many places, spread evenly over those that have the longest length before them.
    new_tokens: tokens generated at each place.
    options: of `record`.
    Raises SpecdecError for a text that is too short for any or for the largest of the lengths.
    """
    room = min(len(ids), decoder.target.context - new_tokens)
    if lengths is None:
        lengths = [n for n in (SHORTEST << i for i in range(32)) if n <= room]
    if not lengths or max(lengths) > room or min(lengths) < 1:
        wanted = f"lengths up to {max(lengths)} do" if lengths else f"a length of {SHORTEST} does"
        raise SpecdecError(f"context_curve: {wanted} not fit: text and context leave room for {room} tokens")
    ends = np.unique(np.linspace(max(lengths), len(ids), anchors).astype(int)).tolist()
    points = []
    for n in sorted(lengths):
        prompts = [list(ids[end - n : end]) for end in ends]
        trace = record(decoder, prompts, new_tokens, **options)
        [overall] = analyse(trace) or [_group((), [], 0)]
        points.append(CurvePoint(n, trace.stats["tokens_per_round"], overall))
    return points
