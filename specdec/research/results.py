"""Results as data: an ablation's folder, a table or a trace as data frames, CSV and LaTeX.

    results = specdec.Results.load("runs/smoke")
    results.by("strategy", "k", "position").to_pandas()
    results.where(temperature=0.0).by("strategy", "category").to_latex()

What can be grouped by: `strategy` (who drafted), `position` in the draft from 1, `length` of the draft,
`accepted_length` (their rounds are the acceptance histogram), and every
column that is a setting or says where a row is from (`setting`, `k`, `temperature`, `category`, `prompt`, ...).
Intervals are over prompts with all their seeds (research/bootstrap.py). Failed rows are left out; plain decoding's rows
are in groups by `setting`, `strategy` or `strategies` alone, because elsewhere they would be pooled with drafting ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.research.ablation.summary import (
    ASKED,
    FIGURES,
    OF_ROWS,
    by_setting,
    clustered,
    compare_settings,
    conversation,
    counterpart,
    find_setting,
    setting_figures,
)
from specdec.research.ablation.table import AS_THEY_ARE, REFERENCE, TIMES, Row, as_rows, figures, with_plain
from specdec.research.bench_results import BenchResults
from specdec.research.bootstrap import Interval, ratio
from specdec.research.loops import is_looped, without_loops
from specdec.research.results_table import ResultTable, Tabular, check_name, intervals_over, named, nothing_left
from specdec.research.traces.records import trace_rows
from specdec.stats import RoundRecord

PLAIN, NOBODY = "plain", "(no draft)"
ROUNDS = ("strategy", "position", "length", "accepted_length")  # dimensions of rounds; all others are columns
NAMED = ("setting", "strategy", "strategies")  # by which plain decoding has a group of its own
ALIASES = {"chain": "strategies", "rule": "acceptance"}
COUNTED = (
    "rounds", "drafted_rounds", "draft_tokens", "tested_tokens", "accepted_tokens", "generated_tokens",
)  # fmt: skip
MEASURED = {
    *figures({}), *(f"plain_{name}" for name in REFERENCE), *TIMES, *AS_THEY_ARE,
    "cell", "plain", "call", "comparable", "status", "error", "conversation",
}  # fmt: skip
OF_POSITIONS = {  # figure -> what its accepted tokens are divided by
    "conditional_acceptance_rate": "tested", "draft_acceptance_rate": "drafted", "acceptance_rate": "rounds",
}  # fmt: skip
SPEEDS = ("speedup", "decode_speedup")
SETTINGS = ("pair", "strategies", "k", "temperature", "acceptance", "length_policy", "seed")
Counts = Mapping[str, float]
Key = tuple[Any, ...]
Grouped = tuple[list[dict[str, Any]], list[list[Row]]]  # the entries of a table, and the rows of each group


@dataclass(frozen=True)
class Results(Tabular):
    """Rows of an ablation, a comparison or a trace: one per prompt and setting, as docs/ablation.md describes them.

    rows: as plain data.
    source: where they are from, for messages.
    """

    rows: list[Row]
    source: str = "rows"

    @staticmethod
    def load(path: Any) -> Results | BenchResults:
        """Read the folder of an ablation or a comparison, a table.parquet, rows, a trace (its file, or its name without
        a suffix), or the JSON document of a benchmark. Raises SpecdecError for anything else."""
        traced = trace_rows(path) if isinstance(path, (str, Path)) else None
        if traced is None and (bench := BenchResults.load(path)) is not None:
            return bench
        rows = as_rows(path) if traced is None else traced
        if not rows:
            raise SpecdecError("the results have no rows")
        return Results(rows, str(path) if isinstance(path, (str, Path)) else "rows")

    @property
    def dimensions(self) -> list[str]:
        """What `by` and `where` take."""
        plain = (str, int, float, bool, type(None))
        names = dict.fromkeys(n for r in self.rows for n in r if n not in (*MEASURED, *ROUNDS))
        return [*ROUNDS, *(n for n in names if all(isinstance(r.get(n), plain) for r in self.rows))]

    def where(self, keep: Callable[[Row], bool] | Mapping[str, Any] | None = None, **values: Any) -> Results:
        """Some of the rows: those for which `keep` is true and whose columns have these values (or one of a list), also
        as a mapping. Plain decoding's rows stay where speed-ups need them. Raises SpecdecError where nothing drafts any
        more."""
        if isinstance(keep, Mapping):
            values = {**keep, **values}
            keep = None
        if keep is not None and not callable(keep):
            raise SpecdecError(f"where: expected a function of a row, or column=value, got {keep!r}")
        named_values = {ALIASES.get(name, name): value for name, value in values.items()}
        for name in (n for n in ROUNDS[1:] if n in named_values):
            raise SpecdecError(
                f"where: {name} is of rounds, and rows have rounds of several: group by it (--by {name})"
            )
        wanted = self._wanted(named_values, [n for n in self.dimensions if n not in ROUNDS[1:]])

        def fits(row: Row) -> bool:
            found = {n: chain_of(row) if n == "strategy" else [row.get(n)] for n in wanted}
            return all(any(v in wanted[n] for v in found[n]) for n in wanted) and (keep is None or keep(row))

        kept = [r for r in self.rows if r["drafts"] and fits(r)]
        if not kept:
            drafting = [r for r in self.rows if r["drafts"]]
            values = {
                n: [v for r in drafting for v in (chain_of(r) if n == "strategy" else [r.get(n)])] for n in wanted
            }
            raise nothing_left(f"{self.source}: no row that drafts", wanted, values)
        return Results(with_plain(kept, self.rows), self.source)

    def without_loops(self) -> Results:
        """The rows whose texts do not repeat one piece to their end (docs/metrics.md). Raises SpecdecError where
        nothing drafts any more."""
        return Results(without_loops(self.rows), self.source)

    def by(self, *names: str) -> ResultTable:
        """Figures with intervals by any combination of `dimensions`, as arguments or a list; without one, by
        `setting`."""
        names = tuple(ALIASES.get(n, n) for n in named("by", names)) or ("setting",)
        self._check("by", names, self.dimensions)
        if len(set(names)) < len(names):
            raise SpecdecError(f"by: a dimension is named twice in {', '.join(names)}")
        sound = [r for r in self.rows if r["status"] == "ok"]
        several = any(len(chain_of(r)) > 1 for r in sound)
        if "position" in names:
            found, pooled = _by_position(sound, names)
        elif {"length", "accepted_length"} & set(names) or ("strategy" in names and several):
            found, pooled = _by_rounds(sound, names)
        else:
            found, pooled = _by_rows(sound, names)
        if not found:
            raise SpecdecError(f"{self.source}: no row with a draft to group by {', '.join(names)}")
        intervals = intervals_over([r["prompts"] for r in found])
        return ResultTable(names, _ordered(found, names), "; ".join([intervals, *_warnings(sound, names, pooled)]))

    def against(self, baseline: str) -> ResultTable:
        """Paired differences of every setting that drafts and one of them, on the prompts and seeds that both have: of
        the baseline with the setting's own temperature and other sampling (`summary.counterpart`)."""
        groups = by_setting(self.rows)
        baseline = find_setting(check_name("against", baseline), groups)
        made = []
        for name, group in groups.items():
            other = counterpart(group[0], baseline, groups) if group[0]["drafts"] else None
            if other not in (None, name):
                made.append(_difference_row(compare_settings(name, group, other, groups[other])))
        return ResultTable(("setting", "against"), made, intervals_over([r["prompts"] for r in made]))

    def to_pandas(self) -> Any:
        """A data frame with a row per prompt and setting, which the plots take, also filtered. Raises SpecdecError
        without pandas."""
        return ResultTable((), self.rows).to_pandas()

    def to_csv(self, path: str | Path | None = None) -> str:
        """The rows as CSV, without their texts' ids and rounds; returned, and written where `path` is given."""
        left_out = {n for r in self.rows for n, v in r.items() if isinstance(v, (list, dict))}
        return ResultTable((), [{n: v for n, v in r.items() if n not in left_out} for r in self.rows]).to_csv(path)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __repr__(self) -> str:
        settings = len({r["setting"] for r in self.rows})
        return f"Results({len(self.rows)} rows, {settings} settings, from {self.source})"


def chain_of(row: Mapping[str, Any]) -> list[str]:
    """The strategies of a row's chain, as far as its rounds and times name them."""
    timed = [name for name, _ in row.get("strategy_seconds") or ()]
    return timed or list(dict.fromkeys(r[0] for r in row.get("records") or () if r[0] is not None))


def _warnings(rows: Sequence[Row], names: Sequence[str], groups: Sequence[Sequence[Row]]) -> list[str]:
    """Say which settings a table pools within its groups of rows, and how many of its rows end in a loop."""
    drafting = [r for r in rows if r["drafts"]]
    asked = dict.fromkeys([*SETTINGS, *(n for r in drafting for n in r if n in ASKED or "." in n)])
    said = []
    for axis in [] if "setting" in names else asked:  # seeds are of one setting
        pooled: set[str] = set()
        for group in groups:
            values = {_in_words(r.get(axis)) for r in group}
            pooled |= values if len(values) > 1 else set()
        if pooled:
            shown = [value for value in dict.fromkeys(_in_words(r.get(axis)) for r in rows) if value in pooled]
            said.append(f"pooled over {axis} ({', '.join(shown)})")
    looped = sum(map(is_looped, drafting))
    return said + ([f"{looped} of {len(drafting)} rows end in a loop"] if looped else [])


def _in_words(value: Any) -> str:
    return "none" if value is None else str(value)


def _strategy(row: Row) -> str:
    return (chain_of(row) or [NOBODY])[0] if row["drafts"] else PLAIN


def _cluster(row: Row) -> Any:
    return row["call"] if row["batch_size"] > 1 else conversation(row)


def _by_rows(rows: Sequence[Row], names: Sequence[str]) -> Grouped:
    """Groups of whole rows, with speeds."""
    groups: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        if row["drafts"] or any(name in NAMED for name in names):
            groups[tuple(_strategy(row) if n == "strategy" else row.get(n) for n in names)].append(row)
    made = []
    for key, group in groups.items():
        found = setting_figures(group, rows)
        entry: dict[str, Any] = dict(zip(names, key, strict=True))
        entry |= {"rows": len(group), "prompts": found["prompts"]}
        entry |= {name: sum(r[name] for r in group) for name in COUNTED}
        entry |= {name: Interval(**(found[name] or {"value": None})) for name in FIGURES}
        if not group[0]["drafts"]:
            entry |= dict.fromkeys(("draft_acceptance_rate", "conditional_acceptance_rate"), Interval(None))
        entry["acceptance_length"] = _acceptance_length(clustered(group))
        made.append(entry | {name: Interval(**(found.get(name) or {"value": None})) for name in SPEEDS})
    return made, list(groups.values())


def _by_rounds(rows: Sequence[Row], names: Sequence[str]) -> Grouped:
    """Groups of rounds: by who drafted in chains of several strategies, or by the draft's length. No speeds: seconds
    belong to whole rows."""
    groups = _Groups()
    for row, record, head in _rounds(rows, names):
        tested = sum(record.tested(i) for i in range(record.depth))
        counts = (1, record.drafted > 0, record.drafted, tested, record.accepted, record.tokens)
        groups.add(head, row, dict(zip(COUNTED, counts, strict=True)))
    made = []
    for entry, clusters in groups.entries(names):
        rates = {n: _ratio(clusters, *FIGURES[n]) for n in FIGURES if n not in OF_ROWS}
        length = _acceptance_length(clusters)
        made.append({**entry, **_counts(clusters, COUNTED), **rates, "acceptance_length": length})
    return made, groups.members()


def _by_position(rows: Sequence[Row], names: Sequence[str]) -> Grouped:
    """Groups of drafted tokens by their position, from 1; of a tree, of levels."""
    groups, rounds = _Groups(), _Groups()  # rounds: those with a draft, by all but the position
    at = names.index("position")
    for row, record, head in _rounds(rows, names):
        rounds.add((*head[:at], *head[at + 1 :]), row, {"rounds": record.depth > 0})
        for i in range(record.depth):
            counts = {"drafted": 1, "tested": record.tested(i), "accepted": record.accepted > i}
            groups.add((*head[:at], i + 1, *head[at + 1 :]), row, counts)
    for key, clusters in groups.counts.items():
        for cluster, found in rounds.counts[(*key[:at], *key[at + 1 :])].items():
            clusters[cluster].update(found)
    made = []
    for entry, drawn in groups.entries(names):
        entry |= _counts(drawn, ("drafted", "tested", "accepted"))
        made.append(entry | {n: _ratio(drawn, "accepted", below) for n, below in OF_POSITIONS.items()})
    return made, groups.members()


class _Groups:
    """Counts of groups by cluster, and the prompts and rows of each group."""

    def __init__(self) -> None:
        self.counts: dict[Key, dict[Any, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
        self.prompts: dict[Key, set[str]] = defaultdict(set)
        self.rows: dict[Key, dict[int, Row]] = defaultdict(dict)

    def add(self, key: Key, row: Row, counts: Mapping[str, int]) -> None:
        """Count a round, or a token, of a row."""
        self.prompts[key].add(conversation(row))
        self.rows[key][id(row)] = row
        self.counts[key][_cluster(row)].update(counts)

    def members(self) -> list[list[Row]]:
        """The rows of each group."""
        return [list(rows.values()) for rows in self.rows.values()]

    def entries(self, names: Sequence[str]) -> Iterator[tuple[dict[str, Any], Mapping[Any, Counter[str]]]]:
        """Each group's dimensions and prompts, and the clusters that are drawn: the calls of one prompt are one."""
        for key, clusters in self.counts.items():
            prompts = len(self.prompts[key])
            drawn = clusters if prompts > 1 else {None: sum(clusters.values(), Counter[str]())}
            yield {**dict(zip(names, key, strict=True)), "prompts": prompts}, drawn


def _counts(clusters: Mapping[Any, Counts], names: Sequence[str]) -> dict[str, int]:
    return {name: int(sum(c[name] for c in clusters.values())) for name in names}


def _rounds(rows: Sequence[Row], names: Sequence[str]) -> Iterator[tuple[Row, RoundRecord, Key]]:
    """Every round of the rows that draft, with its values of `names`; None as its position."""
    drafts_only = any(name in ROUNDS[1:] for name in names)
    for row in rows:
        if not row["drafts"]:
            continue
        chain, whole = chain_of(row), {n: row.get(n) for n in names if n not in ROUNDS}
        for record in (RoundRecord(*r) for r in row["records"]):
            if record.drafted or not drafts_only:
                who = record.strategy or (chain[0] if len(chain) == 1 else NOBODY)
                own = {"strategy": who, "length": record.depth, "accepted_length": record.accepted, "position": None}
                yield row, record, tuple(own[n] if n in own else whole[n] for n in names)


def _ratio(clusters: Mapping[Any, Counts], top: str, bottom: str) -> Interval:
    found = list(clusters.values())
    return ratio([c[top] for c in found], [c[bottom] for c in found])


def _acceptance_length(clusters: Mapping[Any, Counts]) -> Interval:
    """1 + accepted tokens per drafted round; 1 without one, as in `Stats`."""
    found = _ratio(clusters, "accepted_tokens", "drafted_rounds")
    return Interval(1 + (found.value or 0.0), *(None if x is None else 1 + x for x in (found.low, found.high)))


def _difference_row(entry: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"setting": entry["setting"], "against": entry["against"], "prompts": entry["clusters"]}
    for name, found in entry.items():
        if isinstance(found, Mapping) and name != "acceptance":
            made[f"{name}_difference"] = Interval(*(found[x] for x in ("value", "low", "high")))
            made[f"{name}_p"] = found["p"]
            # A figure without a value for some prompts has a higher floor of its own.
            if found.get("least_p") not in (None, entry["least_p"]):
                made[f"{name}_least_p"] = found["least_p"]
    return {**made, "least_p": entry["least_p"]}


def _ordered(rows: list[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Numbers in their order, nothing before them, and names in the order of the table."""
    place: dict[str, dict[Any, Any]] = {}
    for name in names:
        values = list(dict.fromkeys(r[name] for r in rows))
        numbers = all(isinstance(v, (int, float, type(None))) for v in values)
        place[name] = {v: (v is not None, v or 0) if numbers else i for i, v in enumerate(values)}
    return sorted(rows, key=lambda row: [place[n][row[n]] for n in names])
