"""Counts of a run, and every acceptance figure.

All figures come from one list of `RoundRecord`s, so that pooled totals, rows and strategies cannot disagree. Names are
those that serving engines and benchmark clients use. A *round* is one draft / verify / accept cycle of one row: it
emits the drafted tokens that were accepted and one token of the target's own.

Figures end where the text ends. A stop (EOS, a stop string, a criterion, an error, an interrupt) may come at an
accepted drafted token: then that round has no token of the target's own, and what was drafted after the stop counts
neither as drafted nor as tested nor as accepted. So every generated token is emitted, and

    generated = emitted = accepted + rounds with a token of the target's own

which all rounds have, except perhaps the last one of each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

# Drafts are hardly ever accepted if at least 100 rounds asked for one and a drafted round accepts fewer than 0.05
# tokens. Automatic length skips a bad strategy: if only a few rounds drafted, at least 6, the bound is 0.15.
LEAST_ASKED, HARDLY = 100, 0.05
LEAST_DRAFTED, HARDLY_OF_FEW = 6, 0.15


# The two rates that are both called "acceptance" elsewhere, and how tables name them (docs/metrics.md).
PER_DRAFTED, PER_TESTED = "accepted per drafted", "accepted per tested"
PER_DRAFTED_ROUND = "accepted per drafted round"  # by position: `acceptance_rate_per_position`
RATES = {PER_DRAFTED: "draft_acceptance_rate", PER_TESTED: "conditional_acceptance_rate"}
# Names of the release before this one, which still work: `stats.acceptance`, and beside the new keys in JSON.
OLD_NAMES = {"acceptance": "conditional_acceptance_rate"}


class DraftWarning(UserWarning):
    """A strategy's drafts are hardly ever accepted."""


@dataclass
class Counters:
    """Upstream's counters of one strategy; times in seconds.

    `n_gen_...` and `n_acc_...` end where the text ends, as all figures do (upstream counts a whole draft, and an end of
    text as the target's own); calls are counted as upstream does.

    n_skipped: requests in which automatic length or tree size skipped the strategy
    n_asked_per_length[n]: requests of automatic length for n tokens to verify
    """

    n_call_begin: int = 0
    n_call_draft: int = 0
    n_call_accept: int = 0
    n_gen_drafts: int = 0
    n_acc_drafts: int = 0
    n_gen_tokens: int = 0
    n_acc_tokens: int = 0
    n_acc_tokens_per_pos: list[int] = field(default_factory=list)
    t_begin: float = 0.0
    t_draft: float = 0.0
    t_accept: float = 0.0
    n_skipped: int = 0
    n_asked_per_length: list[int] = field(default_factory=list)

    def count_length(self, n: int) -> None:
        """Count a request of automatic length; 0: the strategy was skipped."""
        if n == 0:
            self.n_skipped += 1
            return
        self.n_asked_per_length += [0] * (n + 1 - len(self.n_asked_per_length))
        self.n_asked_per_length[n] += 1

    def count_accepted(self, n: int) -> None:
        """Count the accepted tokens of a draft."""
        self.n_acc_tokens_per_pos += [0] * (n - len(self.n_acc_tokens_per_pos))
        for i in range(n):
            self.n_acc_tokens_per_pos[i] += 1
        if n > 0:
            self.n_acc_drafts += 1
            self.n_acc_tokens += n

    def count_drafted(self, n: int) -> None:
        """Count the tokens of a draft."""
        if n > 0:
            self.n_gen_drafts += 1
            self.n_gen_tokens += n


class RoundRecord(NamedTuple):
    """One closed round of a row.

    strategy: the one that drafted; None = no draft
    drafted, accepted: tokens; in a tree, all nodes and those of the accepted path
    levels: depth of a tree; None = a chain, one level per token
    exhausted: the path of a tree ended at a node without children, so nothing was tested below it
    own: True if the target's own token followed; False = the text ended before it
    """

    strategy: str | None
    drafted: int
    accepted: int
    levels: int | None = None
    exhausted: bool = False
    own: bool = True

    @property
    def tokens(self) -> int:
        """Tokens that the round emitted."""
        return self.accepted + self.own

    @property
    def depth(self) -> int:
        """Levels of the draft."""
        return self.drafted if self.levels is None else self.levels

    def tested(self, level: int) -> bool:
        """True if a token of this level (0 = the first) was tested."""
        return self.depth > level and (self.accepted > level or (self.accepted == level and not self.exhausted))


class Positions(NamedTuple):
    """Rounds by position in the draft (of a tree, level): [i] counts those whose draft had a token i, that tested it,
    and that accepted it. Their sums over calls give every acceptance rate."""

    drafted: list[int]
    tested: list[int]
    reached: list[int]

    @staticmethod
    def of(records: Sequence[RoundRecord]) -> Positions:
        """Count rounds."""
        levels = range(max((r.depth for r in records), default=0))
        return Positions(
            [sum(r.depth > i for r in records) for i in levels],
            [sum(r.tested(i) for r in records) for i in levels],
            [sum(r.accepted > i for r in records) for i in levels],
        )


@dataclass(frozen=True)
class Tally:
    """Acceptance figures of a set of rounds. Ratios of nothing are None, except acceptance_length, which is then 1.

    rounds, drafted_rounds: all of them, and those with a draft
    draft_tokens: tokens of chains and nodes of trees
    tested_tokens: levels of drafts at which a token was tested, at most one more than were accepted
    accepted_tokens: tokens of chains, and of the accepted paths of trees
    generated_tokens: accepted tokens and the target's own
    acceptance_length: 1 + accepted tokens per drafted round
    tokens_per_round: generated tokens per round
    draft_acceptance_rate: accepted / drafted tokens
    conditional_acceptance_rate: accepted / tested tokens, the `a` of `specdec.theory`
    acceptance_rate_per_position[i]: share of drafted rounds that accepted at least i + 1 tokens; in trees by depth
    conditional_acceptance_rate_per_position[i]: the same among rounds in which token i was tested, all before it
        accepted; positions that were never tested have no entry
    acceptance_histogram[n]: drafted rounds that accepted exactly n tokens
    acceptance_histogram_per_length[k][n]: those of them with drafts of k tokens; in trees k levels
    """

    rounds: int
    drafted_rounds: int
    draft_tokens: int
    tested_tokens: int
    accepted_tokens: int
    generated_tokens: int
    acceptance_length: float
    tokens_per_round: float | None
    draft_acceptance_rate: float | None
    conditional_acceptance_rate: float | None
    acceptance_rate_per_position: list[float]
    conditional_acceptance_rate_per_position: list[float]
    acceptance_histogram: list[int]
    acceptance_histogram_per_length: dict[int, list[int]]

    @staticmethod
    def of(records: Iterable[RoundRecord]) -> Tally:
        """Count rounds."""
        records = list(records)
        drafted = [r for r in records if r.drafted > 0]
        accepted, generated = sum(r.accepted for r in records), sum(r.tokens for r in records)
        proposed = sum(r.drafted for r in records)
        at, tested, reached = Positions.of(drafted)
        return Tally(
            rounds=len(records),
            drafted_rounds=len(drafted),
            draft_tokens=proposed,
            tested_tokens=sum(tested),
            accepted_tokens=accepted,
            generated_tokens=generated,
            acceptance_length=1 + accepted / len(drafted) if drafted else 1.0,
            tokens_per_round=generated / len(records) if records else None,
            draft_acceptance_rate=accepted / proposed if proposed else None,
            conditional_acceptance_rate=accepted / sum(tested) if sum(tested) else None,
            acceptance_rate_per_position=[n / len(drafted) for n in reached],
            conditional_acceptance_rate_per_position=[n / t for n, t in zip(reached, tested, strict=True) if t],
            acceptance_histogram=_histogram(drafted, len(at)) if drafted else [],
            acceptance_histogram_per_length={
                k: _histogram([r for r in drafted if r.depth == k], k) for k in sorted({r.depth for r in drafted})
            },
        )

    @property
    def acceptance(self) -> float | None:
        """The old name of `conditional_acceptance_rate`."""
        return self.conditional_acceptance_rate

    def to_dict(self) -> dict[str, Any]:
        by_length = {str(k): counts for k, counts in self.acceptance_histogram_per_length.items()}  # as JSON has keys
        return with_old_names({**asdict(self), "acceptance_histogram_per_length": by_length})


def _histogram(drafted: Sequence[RoundRecord], longest: int) -> list[int]:
    """Count the rounds that accepted exactly 0, 1, ... `longest` tokens."""
    return [sum(r.accepted == n for r in drafted) for n in range(longest + 1)]


def with_old_names(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Figures by name, those that had another name under that one as well."""
    return {**entry, **{old: entry[new] for old, new in OLD_NAMES.items() if new in entry}}


@dataclass
class Times:
    """Seconds of one call.

    prefill: the target's passes over prompts
    draft: drafting
    verify: verify passes with acceptance
    total: the whole call
    draft_prefill: the part of `draft` in which a draft model read prompts and other texts new to it
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    total: float = 0.0
    draft_prefill: float = 0.0

    def to_dict(self) -> dict[str, float]:
        other = max(0.0, self.total - self.prefill - self.draft - self.verify)
        return {**asdict(self), "other": other}


@dataclass
class Stats:
    """The statistics of one call.

    rows[i], emitted[i]: rounds of row i of `token_ids`, and its tokens
    counters: by strategy
    verify_passes: passes of the target after prefill
    host_reads: transfers from the device
    draft_passes: passes of models that draft, without their prefill
    times: seconds
    Figures of `total` are attributes as well: `stats.tokens_per_round`.
    """

    rows: list[list[RoundRecord]] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    counters: dict[str, Counters] = field(default_factory=dict)
    verify_passes: int = 0
    host_reads: int = 0
    draft_passes: int = 0
    times: Times = field(default_factory=Times)

    @staticmethod
    def pooled(calls: Sequence[Stats]) -> Stats:
        """Put the rounds of several calls together, as those of one, with the requests that were skipped."""
        skipped: dict[str, int] = {}
        for name, counters in (entry for call in calls for entry in call.counters.items()):
            skipped[name] = skipped.get(name, 0) + counters.n_skipped
        rows = [row for call in calls for row in call.rows]
        return Stats(rows=rows, counters={name: Counters(n_skipped=count) for name, count in skipped.items()})

    @property
    def total(self) -> Tally:
        """All rounds pooled."""
        return Tally.of(r for row in self.rows for r in row)

    def by_strategy(self) -> dict[str, Tally]:
        """Tally the rounds that each strategy drafted."""
        return {
            name: Tally.of(r for row in self.rows for r in row if r.strategy == name and r.drafted > 0)
            for name in self.counters
        }

    def hardly_accepted(self) -> dict[str, Tally]:
        """Find strategies whose drafts were hardly ever accepted, over enough rounds to say so (see `HARDLY`)."""
        found = {}
        for name, tally in self.by_strategy().items():
            rounds = tally.drafted_rounds
            enough = rounds + self.counters[name].n_skipped >= LEAST_ASKED and rounds >= LEAST_DRAFTED
            bar = HARDLY if rounds >= LEAST_ASKED else HARDLY_OF_FEW
            if enough and tally.accepted_tokens < bar * rounds:
                found[name] = tally
        return found

    def __getattr__(self, name: str) -> Any:
        """Pooled figures as attributes: `out.stats.tokens_per_round`."""
        if name not in Tally.__dataclass_fields__ and name not in OLD_NAMES:
            raise AttributeError(name)
        return getattr(self.total, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *Tally.__dataclass_fields__})  # so that Tab finds what __getattr__ has

    def __repr__(self) -> str:
        from specdec.decoding import show  # which imports torch: figures alone need none

        return show.stats_repr(self)

    def _repr_html_(self) -> str:
        from specdec.decoding import show

        return show.stats_html(self)

    @property
    def emitted_tokens(self) -> int:
        """Tokens in the result: `generated_tokens` by another name, counted from the texts."""
        return sum(self.emitted)

    @property
    def tokens_per_second(self) -> float | None:
        """Emitted tokens over the seconds of the whole call, prefill included; None if no time was taken."""
        return self.emitted_tokens / self.times.total if self.times.total > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: pooled totals at the top level, then `rows`, `strategies` (with upstream's counters),
        `mean_per_request` and `time` in seconds."""
        tallies = [Tally.of(row) for row in self.rows]
        by_strategy = self.by_strategy()
        return {
            **self.total.to_dict(),
            "emitted_tokens": self.emitted_tokens,
            "verify_passes": self.verify_passes,
            "host_reads": self.host_reads,
            "draft_passes": self.draft_passes,
            "rows": [{**tally.to_dict(), "emitted_tokens": n} for tally, n in zip(tallies, self.emitted, strict=True)],
            "strategies": {
                name: {**by_strategy[name].to_dict(), **asdict(counters)} for name, counters in self.counters.items()
            },
            "mean_per_request": {name: _mean([getattr(t, name) for t in tallies]) for name in _MEANS},
            "time": self.times.to_dict(),
        }


def contributes_nothing(name: str, tally: Tally, drafter: Any) -> str:
    """Say that a strategy's drafts are hardly ever accepted, and what to look at (`Stats.hardly_accepted`).

    drafter: the strategy; None = it cannot be made here, so only the figures are said
    """
    hint = ""
    if drafter is not None:
        repeats = ' This text repeats little: leave the strategy out, or let draft_length="auto" pass it over.'
        hint = f" {drafter.likely_causes}" if drafter.runs_a_model else repeats
    return (
        f"strategy {name!r} contributes nothing: {tally.accepted_tokens} of {tally.draft_tokens} drafted tokens were "
        f"accepted in {tally.drafted_rounds} rounds.{hint}"
    )


_MEANS = ("acceptance_length", "tokens_per_round", "draft_acceptance_rate", "generated_tokens", "rounds")


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
