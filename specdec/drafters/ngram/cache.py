"""ngram-cache: llama.cpp's lookup decoding from three caches of n-gram counts.

Source: llama.cpp `ngram-cache`, draft for draft (a development of prompt lookup decoding). A row's *context* cache
counts the n-grams of 1..4 ids of its text; *dynamic* and *static* caches come from files (`specdec lookup`, llama.cpp's
own lookup tools). For every drafted token the longest known n-gram that is clear enough decides: in the context cache
with lax limits, else in the dynamic one with strict limits, else in the static 2-grams alone; static counts also weigh
the other two.

Oddities of upstream are kept, each with a switch that mends it (`parity=False` switches on all that are not set):

- `fix_boundaries`: text is counted in the pieces that each round brings, and n-grams that straddle two pieces are lost.
- `fix_begin`: counts outlive the text; a new text in the same slot is drafted from the old one's counts, and is
  itself not counted until it is longer than the old one. In a decoder's call only with `shared` (see
  drafters/ngram/parity.py): there a row starts afresh.

Cost of a round: at most 12 dict look-ups per drafted token, for any length of text. A tie that static counts leave
between ids that are clear enough takes a walk over that part, as every step does upstream.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specdec.drafters.base import DraftContext, DraftRequest, Tokens, as_array
from specdec.drafters.ngram.lookup_cache import ID_BITS, LONGEST, LookupCache, Part
from specdec.drafters.ngram.parity import MOST, ParityDrafter
from specdec.drafters.options import switch, whole
from specdec.errors import SpecdecError


@dataclass(frozen=True)
class Limits:
    """When an n-gram of 1..4 ids is clear enough: `least` occurrences, `percent` of them with the proposed successor.

    No percentage is below 50: `_favourite` relies on that.
    """

    least: tuple[int, int, int, int]
    percent: tuple[int, int, int, int]


LAX = Limits((2, 2, 1, 1), (66, 50, 50, 50))
STRICT = Limits((4, 3, 2, 2), (75, 66, 66, 66))
STATIC_LEAST, STATIC_PERCENT = 2, 50
_NO_EVIDENCE: Mapping[int, int] = {}


def propose(
    ids: Sequence[int], n_draft: int, context: LookupCache, dynamic: LookupCache | None, static: LookupCache | None
) -> list[int]:
    """Propose at most `n_draft` ids after `ids`, a text with its newest token; only its last 4 matter."""
    text = list(ids[-LONGEST:])
    start = len(text)
    while start >= 2 and len(text) < start + n_draft:
        window = tuple(text[-LONGEST:])
        known = static.get(window[-2:]) if static is not None else None
        evidence = _counts(known)
        token = _choose(context, window, evidence, LAX)
        if token is None and dynamic is not None:
            token = _choose(dynamic, window, evidence, STRICT)
        if token is None and known is not None:
            token = _judge(known, _NO_EVIDENCE, STATIC_LEAST, STATIC_PERCENT)
        if token is None:
            break
        text.append(token)
    return text[start:]


def _counts(part: int | Part | None) -> Mapping[int, int]:
    if part is None:
        return _NO_EVIDENCE
    return part.counts if isinstance(part, Part) else {part & ID_BITS: part >> 32}


def _choose(cache: LookupCache, window: tuple[int, ...], evidence: Mapping[int, int], limits: Limits) -> int | None:
    """Return the successor that the longest clear n-gram at the end of `window` proposes."""
    for size in range(len(window), 0, -1):
        part = cache.get(window[-size:])
        if part is not None:
            token = _judge(part, evidence, limits.least[size - 1], limits.percent[size - 1])
            if token is not None:
                return token
    return None


def _judge(part: int | Part, evidence: Mapping[int, int], least: int, percent: int) -> int | None:
    """Return the part's favourite, if the part and the favourite's share of it are large enough."""
    if isinstance(part, int):
        return part & ID_BITS if part >> 32 >= least else None
    if part.total < least:
        return None
    token = _favourite(part, evidence, percent)
    return token if 100 * part.counts[token] >= percent * part.total else None


def _favourite(part: Part, evidence: Mapping[int, int], percent: int) -> int:
    """Return the id whose count, times 100 static counts where there are any, is the highest.

    Among equals the first in the order of the original's hash table, unless none has the share that `_judge` asks for.
    """
    shared = part.counts.keys() & evidence.keys()
    if not shared:
        # Only two equals can have half of the total each, and of two the one inserted later comes first.
        tied = len(part.counts) == 2 and 2 * part.most == part.total
        return next(reversed(part.counts)) if tied else part.best
    worth = {token: 100 * evidence[token] * part.counts[token] for token in shared}
    value = max(worth.values())
    if part.most > value:  # then the evidence lacks the most frequent ids, and no two of them have half each
        return part.best
    equals: Collection[int] = [token for token in shared if worth[token] == value]
    if part.most == value:
        equals = [t for t, count in part.counts.items() if worth.get(t, count) == value]
    clear = [token for token in equals if 100 * part.counts[token] >= percent * part.total]
    if len(equals) == 1 or not clear:
        return next(iter(equals))
    return next(token for token, _ in part.ordered() if token in equals)


@dataclass
class _RowState:
    """A row's context cache.

    size: ids that it has counted
    text: these ids, kept for `fix_begin` only
    """

    cache: LookupCache = field(default_factory=LookupCache)
    size: int = 0
    text: list[int] = field(default_factory=list)


@dataclass
class NgramCache(ParityDrafter):
    """State: a context cache per row.

    static, dynamic: a path or a `LookupCache`
    n_draft: most tokens to propose; upstream cannot change its 8
    parity, fix_...: llama.cpp's oddities
    shared: a row continues from its slot's earlier rows, as upstream
    Raises SpecdecError for parameters out of range, and for files that are no lookup caches or hold ids that the target
    lacks.
    """

    static: str | Path | LookupCache | None = None
    dynamic: str | Path | LookupCache | None = None
    n_draft: int = whole(8, most=MOST)
    parity: bool = switch(True)
    fix_boundaries: bool | None = switch(None)
    fix_begin: bool | None = switch(None)
    shared: bool = switch(False)
    name: str = field(init=False, default="ngram-cache")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._static = _loaded("static", self.static)
        self._dynamic = _loaded("dynamic", self.dynamic)

    def fresh(self, context: DraftContext) -> NgramCache:
        for name, cache in (("static", self._static), ("dynamic", self._dynamic)):
            if cache is not None and (largest := cache.max_id()) >= context.vocab_size:
                raise SpecdecError(
                    f"ngram-cache: the {name} cache {cache.source or ''} holds id {largest}, the target has "
                    f"{context.vocab_size} ids: it was made with another tokenizer"
                )
        made: NgramCache = super().fresh(context)
        return made

    def parameters(self) -> dict[str, Any]:
        shown = super().parameters()
        for name in ("static", "dynamic"):
            cache = getattr(self, f"_{name}")
            shown[name] = None if cache is None else cache.source or f"{len(cache)} n-grams in memory"
        return shown

    def begin(self, row: int, prompt: Tokens) -> None:
        if self._separate:
            self._rows.pop(row, None)
        elif self.fix_begin and row in self._rows:
            state = self._rows[row]
            if not np.array_equal(as_array(prompt[: state.size]), as_array(state.text)):
                del self._rows[row]

    def _propose(self, request: DraftRequest) -> list[int]:
        state = self._rows.setdefault(request.row, _RowState())
        tokens, last = request.tokens, int(request.last)
        if state.size < len(tokens) + 1:
            self._feed(state, tokens, last)
        text = [*as_array(tokens[max(0, len(tokens) - LONGEST + 1) :]).tolist(), last]
        return propose(text, request.limit(self.n_draft), state.cache, self._dynamic, self._static)

    def _feed(self, state: _RowState, tokens: Tokens, last: int) -> None:
        new = len(tokens) + 1 - state.size
        known = min(LONGEST, state.size) if self.fix_boundaries else 0
        piece = [*as_array(tokens[state.size - known :]).tolist(), last]
        state.cache.update(piece, new)
        if self.fix_begin:
            state.text += piece[known:]
        state.size += new


def _loaded(name: str, cache: Any) -> LookupCache | None:
    if cache is None or isinstance(cache, LookupCache):
        return cache
    if not isinstance(cache, (str, Path)):
        raise SpecdecError(f"ngram-cache: {name} must be a file or a LookupCache, got {type(cache).__name__}")
    return LookupCache.load(cache)
