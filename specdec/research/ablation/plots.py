"""Plots of a results table: rows, `Results`, a pandas or pyarrow table, a Parquet file or an ablation's folder -> a
matplotlib Figure.

All take `where` (a mapping of column -> value or list of values, or a function of a row), `panel` (a column: one panel
a value) and `ax` (axes of the caller's). Settings have shades of their strategy's colour. Without `panel` and `ax`,
plots of more than `MANY_SETTINGS` settings have a panel for each chain, in which lines and bars do not hide each other.

Figures are made without pyplot: nothing is shown, no backend is chosen and no global state is kept. Curves with
intervals have them over prompts (research/bootstrap.py). A table without rows, without the columns that a plot needs,
or whose rows all failed is a SpecdecError that says so.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.config import check_whole
from specdec.errors import SpecdecError
from specdec.research.ablation.look import (
    LEAST_TESTED,
    PAIRED,
    ROUNDS,
    TOO_FEW,
    Look,
    curve,
    error_bars,
    of_table,
    shift,
)
from specdec.research.ablation.summary import (
    by_setting,
    conversation,
    measured_costs,
    paired,
    references,
    setting_figures,
    theoretical_speedup,
)
from specdec.research.ablation.table import Row, at
from specdec.research.bootstrap import Interval, ratio
from specdec.research.colours import TARGET, colour_of
from specdec.research.results_table import IN_WORDS
from specdec.stats import PER_TESTED, RoundRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_COLOURS = 8  # settings of a scatter plot that colours tell apart
AXES, CENTRED = (310, 210), {"ha": "center", "va": "center"}
TIME_BINS, CONTEXT_BINS = 12, 8
THEORY_POINTS = 256  # at most, of a theory's line


@of_table(*ROUNDS, "reached", "tested", by_chain=True)
def acceptance_by_position(rows: list[Row], axes: Any, look: Look) -> str | None:
    """Acceptance of a tested token by position in the draft, one line per setting, 95 % intervals."""
    _label(axes, "position in the draft", PER_TESTED)
    note, groups = None, _drafting(rows)
    for index, (name, group) in enumerate(groups.items()):
        points = []
        for i in range(max(len(r["tested"]) for r in group)):
            counts = _by_prompt([(conversation(r), at(r["reached"], i), at(r["tested"], i)) for r in group])
            if sum(counts[1]) >= LEAST_TESTED:
                points.append((i + 1, ratio(*counts)))
            elif sum(counts[1]):
                note = TOO_FEW
        _line(axes, look, name, points, shift(index, len(groups)))
    axes.set_ylim(0, 1.02)
    _whole_ticks(axes)
    return note


@of_table(*ROUNDS, "acceptance_histogram", by_chain=True)
def accepted_length_histogram(rows: list[Row], axes: Any, look: Look) -> None:
    """Share of the drafted rounds by the number of accepted tokens."""
    _label(axes, "accepted drafts of a round", "share of drafted rounds")
    groups = _drafting(rows)
    width = 0.8 / max(1, len(groups))
    for index, (name, group) in enumerate(groups.items()):
        longest = max(len(r["acceptance_histogram"]) for r in group)
        counts = np.array([[at(r["acceptance_histogram"], i) for i in range(longest)] for r in group]).sum(axis=0)
        places = np.arange(longest) + (index - (len(groups) - 1) / 2) * width
        axes.bar(places, counts / max(1, counts.sum()), width, label=name, color=look.colour(name))
    _whole_ticks(axes)


@of_table(*PAIRED)
def speedup_against_k(rows: list[Row], axes: Any, look: Look) -> None:
    """Measured speed-up over plain decoding, prefill left out, against the axis `k`, with intervals; as a dotted
    line, what theory gives for the acceptance, costs and share of drafted rounds measured at the middle k."""
    groups = by_setting(rows)
    curves: dict[str, list[tuple[int, Any]]] = defaultdict(list)
    drawn: dict[str, str] = {}  # a curve -> one of its settings
    for setting, group in groups.items():
        if group[0]["drafts"] and group[0].get("k") is not None:
            check_whole("the column k", group[0]["k"], 1)
            found = setting_figures(group, rows)
            name = curve(setting)
            if found.get("decode_speedup") is not None:
                curves[name].append((group[0]["k"], found))
                drawn[name] = setting
    if not curves:
        raise SpecdecError("the results table has no drafting setting with an axis k and plain rows")
    _label(axes, "draft length k", IN_WORDS["decode_speedup"])
    colours = Look([{**groups[setting][0], "setting": name} for name, setting in drawn.items()])
    for index, (name, points) in enumerate(curves.items()):
        points.sort(key=lambda point: point[0])
        measured = [(k, found["decode_speedup"]) for k, found in points]
        line = _line(axes, colours, name, measured, shift(index, len(curves)))
        costs = points[len(points) // 2][1]["costs"]
        if costs is not None:
            ks = _lengths(points[-1][0])
            axes.plot(ks, [theoretical_speedup(costs, k) for k in ks], ":", color=line.get_color())
    axes.plot([], [], ":", color=TARGET, label="theory")
    axes.axhline(1.0, color=TARGET, linewidth=0.8)
    _whole_ticks(axes)


@of_table(*ROUNDS, *PAIRED)
def cost_acceptance_pareto(rows: list[Row], axes: Any, look: Look) -> None:
    """Tokens a round against the cost of a round in plain passes. A line from the origin is one speed-up; settings that
    no other one beats in both are diamonds. Numbers tell many settings apart."""
    points = []
    for name, group in _drafting(rows).items():
        mine, plain = paired(group, references(group, rows))
        costs = measured_costs(mine, plain) if mine else None
        if costs is not None:
            cost = 1 + costs["length"] * costs["draft_cost"] + costs["width_cost"]
            points.append((name, cost, costs["tokens_per_round"]))
    if not points:
        raise SpecdecError("the results table has no drafting setting with plain rows")
    _label(axes, "cost of a round in plain passes", IN_WORDS["tokens_per_round"])
    left, right = min(0.9, *(c for _, c, _ in points)) * 0.95, max(c for _, c, _ in points) * 1.08
    top = max(g for _, _, g in points) * 1.1
    axes.set_xlim(left, right)
    axes.set_ylim(0.9, top)
    for gain in (g for g in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0) if g * right > 1.0 and g * left < top):
        axes.plot([0, right], [0, gain * right], color=TARGET, linewidth=0.6, zorder=0)
        end = min(right, top / gain)  # where the line leaves the axes
        text, place = ((-3, -4), {"ha": "right", "va": "top"}) if end == right else ((0, 2), {"ha": "center"})
        axes.annotate(f"{gain:g}x", (end, gain * end), text, textcoords="offset points", fontsize=8, **place)
    texts = _beside([((c - left) / (right - left), (g - 0.9) / (top - 0.9)) for _, c, g in points])
    for i, (name, cost, gain) in enumerate(points, 1):
        beaten = any(c <= cost and g >= gain and (c, g) != (cost, gain) for _, c, g in points)
        label, shape = name, "o" if beaten else "D"
        if len(points) > MOST_COLOURS:
            label = f"{i}  {name}"
            axes.annotate(str(i), (cost, gain), texts[i - 1], textcoords="offset points", fontsize=8, **CENTRED)
        axes.scatter([cost], [gain], s=45, label=label, marker=shape, color=look.colour(name))


def _beside(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Where the number of each point goes, in typographic points from it, so that no number lies on another or on a
    point. places: shares of the axes, which are about AXES points large."""
    taken = [(x * AXES[0], y * AXES[1]) for x, y in places]
    ways = [(r * math.cos(a), r * math.sin(a)) for r in (10, 16, 23, 31) for a in np.arange(0.8, 7, math.pi / 6)]
    found = []
    for x, y in list(taken):
        u, v = min(ways, key=lambda w: sum(abs(x + w[0] - a) < 11 and abs(y + w[1] - b) < 8 for a, b in taken))
        taken.append((x + u, y + v))
        found.append((u, v))
    return found


@of_table(*ROUNDS, "prompt_tokens", "records", by_chain=True)
def context_curve(rows: list[Row], axes: Any, look: Look) -> str | None:
    """Acceptance of a tested token against the length of the text before its round, in bins of equal counts."""
    _label(axes, "tokens before the round", PER_TESTED)
    note = None
    for name, group in _drafting(rows).items():
        rounds = [entry for row in group for entry in round_contexts(row)]
        edges = np.unique(np.quantile([at for at, _, _ in rounds], np.linspace(0, 1, CONTEXT_BINS + 1)))
        points = []
        for low, high in zip(edges, [*edges[1:-1], np.inf], strict=False):
            counts = _by_prompt([(conversation(r), *_sums(round_contexts(r), low, high)) for r in group])
            if sum(counts[1]) >= LEAST_TESTED:
                middle = float(np.mean([at for at, _, _ in rounds if low <= at < high]))
                points.append((middle, ratio(*counts)))
            elif sum(counts[1]):
                note = TOO_FEW
        _line(axes, look, name, points)
    axes.set_ylim(0, 1.02)
    _whole_ticks(axes)
    return note


@of_table(*ROUNDS, "generated_tokens", "records")
def strategy_share_over_time(rows: list[Row], axes: Any, look: Look, setting: str | None = None) -> None:
    """Where the tokens of a text come from: share of the generated tokens by strategy, along the text. setting: None =
    the first one with more than one strategy, else the first that drafts."""
    groups = _drafting(rows)
    if setting is not None and setting not in list(groups):
        raise SpecdecError(f"no drafting setting {setting!r}; known: {', '.join(groups)}")
    several = (name for name, rows in groups.items() if len({s for r in rows for s, *_ in r["records"] if s}) > 1)
    chosen = setting or next(several, next(iter(groups)))
    longest = max(r["generated_tokens"] for r in groups[chosen])
    bins = min(TIME_BINS, max(1, longest))
    counts: dict[str, np.ndarray] = {}
    for row in groups[chosen]:
        at = 0
        for record in (RoundRecord(*r) for r in row["records"]):
            for offset in range(record.tokens):
                name = (record.strategy or "target") if offset < record.accepted else "target"
                counts.setdefault(name, np.zeros(bins))[min(bins - 1, (at + offset) * bins // longest)] += 1
            at += record.tokens
    total = np.sum(list(counts.values()), axis=0)
    _label(axes, "generated token", f"share of the tokens: {chosen}")
    middles = (np.arange(bins) + 0.5) * longest / bins
    names = sorted(counts, key=lambda n: n == "target")
    shares = [counts[n] / np.maximum(1, total) for n in names]
    axes.stackplot(middles, *shares, labels=names, colors=[colour_of(n) for n in names])
    axes.set_ylim(0, 1)
    _whole_ticks(axes)


PLOTS: dict[str, Callable[..., Figure]] = {
    "Acceptance by position": acceptance_by_position,
    "Accepted length": accepted_length_histogram,
    "Speed-up against k": speedup_against_k,
    "Cost and gain of a round": cost_acceptance_pareto,
    "Acceptance against context length": context_curve,
    "Strategies along the text": strategy_share_over_time,
}


def round_contexts(row: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """The drafted rounds of a row: (tokens before the round, accepted, tested)."""
    found, at = [], int(row["prompt_tokens"])
    for record in (RoundRecord(*r) for r in row["records"]):
        if record.drafted:
            found.append((at, record.accepted, sum(record.tested(i) for i in range(record.depth))))
        at += record.tokens
    return found


def _lengths(longest: int) -> list[int]:
    """Draft lengths from 1 on, at most `THEORY_POINTS` of them, the longest included."""
    if longest <= THEORY_POINTS:
        return list(range(1, longest + 1))
    return [1 + (longest - 1) * i // (THEORY_POINTS - 1) for i in range(THEORY_POINTS)]


def _sums(rounds: Sequence[tuple[int, int, int]], low: float, high: float) -> tuple[int, int]:
    inside = [(accepted, tested) for at, accepted, tested in rounds if low <= at < high]
    return sum(a for a, _ in inside), sum(t for _, t in inside)


def _drafting(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The settings that drafted anything, failed rows left out. Raises SpecdecError where there is none."""
    sound = [r for r in rows if r["status"] == "ok" and r["drafts"]]
    groups = {name: rows for name, rows in by_setting(sound).items() if any(r["drafted_rounds"] for r in rows)}
    if not groups:
        raise SpecdecError("the results table has no row with a draft")
    return groups


def _by_prompt(counts: Sequence[tuple[str, float, float]]) -> tuple[list[float], list[float]]:
    """Two counts of each row, summed over the rows of each prompt."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for prompt, top, bottom in counts:
        sums[prompt][0] += top
        sums[prompt][1] += bottom
    return [a for a, _ in sums.values()], [b for _, b in sums.values()]


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)


def _whole_ticks(axes: Any) -> None:
    """Label whole numbers alone; axes of the caller's may have had ticks of their own."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # one place may be all there is


def _line(axes: Any, look: Look, name: str, points: Sequence[tuple[float, Any]], beside: float = 0.0) -> Any:
    """A line with error bars; points are (x, Interval or its dict)."""
    found = [(x + beside, Interval(**i) if isinstance(i, Mapping) else i) for x, i in points]
    return error_bars(axes, found, name, **look.style(name))
