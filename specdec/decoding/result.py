"""What a call returns: `Generation`, its rows as `GenerationRow`, and `Round` for one round of one row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, overload

from specdec.decoding import show
from specdec.decoding.probe import RoundDetails
from specdec.files.frames import data_frame
from specdec.stats import RATES, Stats, Tally

COUNTS_OF_A_ROW = ("rounds", "drafted_rounds", "draft_tokens", "tested_tokens", "accepted_tokens", "generated_tokens")
RATES_OF_A_ROW = ("tokens_per_round", "acceptance_length", *RATES.values())


@dataclass(frozen=True)
class Round:
    """One verify pass of one row, as `rounds` yields it.

    row: index of the row in the result
    position: sequence index of the newest token when the round began
    strategy: the one that drafted; None: no draft
    draft: drafted ids, without those after the end of the text
    p: the target's probability of each drafted id
    q: the draft's probability of each drafted id; None if the draft has no q
    accepted: how many drafted tokens were accepted
    bonus: the token after them; None if the draft goes on in the next pass, the text ended before it or the row failed
    tokens: emitted ids
    text: their text; None without a tokenizer
    times: seconds of this pass's "draft" and "verify"
    finish_reason: set in the row's last round
    parents: the node that each node of a tree follows, -1 = the newest token; None: a chain
    path: the accepted nodes of a tree; None: a chain
    details: more about p and q in a recorded run (specdec.research.traces.trace)
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
        """True if the draft continues in the row's next pass: all tested tokens were accepted, and more are left."""
        return self.bonus is None and self.finish_reason is None


@dataclass(frozen=True)
class GenerationRow:
    """One row of a result: the entries of `Generation`'s lists that belong to it.

    stats: the row's figures
    error: what failed and where; None unless the row ended with `error`
    """

    index: int
    text: str | None
    token_ids: list[int]
    finish_reason: str
    stats: Tally
    error: str | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    origins: list[str | None] = field(default_factory=list)

    def __repr__(self) -> str:
        return show.row_repr(self)

    def _repr_html_(self) -> str:
        return show.row_html(self)


@dataclass(frozen=True)
class Generation:
    """The result of `generate`; lists hold one entry per row. Iterates over its rows as `GenerationRow`s.

    token_ids: generated ids, an EOS that ended the row included
    texts: special tokens skipped, cut before the stop string; None without a tokenizer
    finish_reasons: eos | length | stop_string | stopping_criteria | context | error | interrupted
    stats: counts and seconds of the call
    provenance: versions, devices, hashes, seed and settings
    errors: what failed and where, for rows that ended with `error`
    logprobs: log-probability (nats) of each emitted id under the target's processed distribution, before temperature
        if greedy; None unless asked for
    top_logprobs: id and log-probability of the most likely tokens in place of each emitted one, the likeliest first;
        None unless asked for (`output_logprobs=5`), fewer where fewer are possible
    origins: the strategy that proposed each emitted id, None for the target's own
    lossy: True if the acceptance rule changes the target's distribution
    distances: under a lossy rule, for each emitted id the total variation between the distribution that it was taken
        from, given the text before it, and the target's (an upper bound on average, where the rule does not know it)
    indices: each row's number in the whole call, of which `shard=` runs a part
    """

    token_ids: list[list[int]]
    texts: list[str] | None
    finish_reasons: list[str]
    stats: Stats
    provenance: dict[str, Any]
    errors: list[str | None] = field(default_factory=list)
    logprobs: list[list[float]] | None = None
    top_logprobs: list[list[list[tuple[int, float]]]] | None = None
    origins: list[list[str | None]] = field(default_factory=list)
    lossy: bool = False
    distances: list[list[float]] | None = None
    indices: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[GenerationRow]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> GenerationRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[GenerationRow]: ...

    def __getitem__(self, index: int | slice) -> GenerationRow | list[GenerationRow]:
        """Return a row, or the rows of a slice."""
        if isinstance(index, slice):
            return [self._row(i) for i in range(len(self))[index]]
        return self._row(range(len(self))[index])

    def _row(self, i: int) -> GenerationRow:
        return GenerationRow(
            index=self.indices[i] if self.indices else i,
            text=None if self.texts is None else self.texts[i],
            token_ids=self.token_ids[i],
            finish_reason=self.finish_reasons[i],
            stats=Tally.of(self.stats.rows[i]),
            error=self.errors[i] if self.errors else None,
            logprobs=None if self.logprobs is None else self.logprobs[i],
            top_logprobs=None if self.top_logprobs is None else self.top_logprobs[i],
            origins=self.origins[i] if self.origins else [],
        )

    def __repr__(self) -> str:
        return show.generation_repr(self)

    def _repr_html_(self) -> str:
        return show.generation_html(self)

    def to_pandas(self) -> Any:
        """Return a data frame of pandas with a line for each row, whose columns are in docs/metrics.md.

        Raises SpecdecError without pandas.
        """
        return data_frame([self._line(i, row) for i, row in enumerate(self)], RATES_OF_A_ROW)

    def _line(self, i: int, row: GenerationRow) -> dict[str, Any]:
        made = {
            "row": row.index,
            "text": row.text,
            "tokens": len(row.token_ids),
            "finish_reason": row.finish_reason,
            "error": row.error,
            **{name: getattr(row.stats, name) for name in (*COUNTS_OF_A_ROW, *RATES_OF_A_ROW)},
        }
        for name, values in (("logprob", self.logprobs), ("distance", self.distances)):
            if values is not None:
                made[name] = sum(values[i])
        prompts = self.provenance.get("prompts")
        return {**made, "prompt_hash": None if prompts is None else prompts[i], "token_ids": row.token_ids}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        plain = {f: getattr(self, f) for f in self.__dataclass_fields__ if f != "stats"}
        return {**plain, "stats": self.stats.to_dict()}
