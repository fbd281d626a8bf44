"""One figure against any axis, with colours and panels by any other: the plot of a paper.

facets("runs/smoke", "conditional_acceptance_rate", x="position", colour="strategy", panel="category")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from specdec.errors import SpecdecError
from specdec.research.ablation.look import (
    LEAST_TESTED,
    TOO_FEW,
    error_bars,
    finish,
    make_axes,
    panel_title,
    shares,
    shift,
)
from specdec.research.bench_results import BenchResults
from specdec.research.bootstrap import Interval
from specdec.research.colours import looks
from specdec.research.results import Results, chain_of
from specdec.research.results_table import in_words, named, no_figure, spelled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def facets(
    results: Any,
    figure: str = "conditional_acceptance_rate",
    x: str = "position",
    colour: str = "strategy",
    panel: str | None = None,
    ax: Any = None,
) -> Figure:
    """Draw a figure with its 95 % intervals, on one scale in all panels. Positions at which fewer than `LEAST_TESTED`
    tokens were tested are left out. Panels and categories say of how many prompts their intervals are, and a note what
    is pooled in every point.

    results: `Results`, or what `Results.load` takes, a benchmark's document too; `.where(...)` filters.
    figure: a figure of `Results.by`.
    x, colour, panel: dimensions; the points of different colours are drawn beside each other.
    ax: axes of the caller's, without `panel`.
    Raises SpecdecError for an unknown figure or dimension; `ax` together with `panel`.
    """
    if ax is not None and panel is not None:
        raise SpecdecError("facets: give axes or panels, not both")
    found = results if isinstance(results, (Results, BenchResults)) else Results.load(results)
    figure, *dimensions = named("facets", [figure, *([] if panel is None else [panel]), colour, x])
    table = found.by(*dict.fromkeys(dimensions))
    rows = [r for r in table.rows if r[x] is not None] or table.rows  # plain decoding has no k
    enough = [r for r in rows if r.get("tested", LEAST_TESTED) >= LEAST_TESTED] or rows
    note, rows = "; ".join([table.intervals, *[TOO_FEW] * (len(enough) < len(rows))]), enough
    if not isinstance(rows[0].get(figure), Interval):
        raise no_figure(figure, [n for n, v in rows[0].items() if isinstance(v, Interval)], table.names)
    titles = list(dict.fromkeys(r[panel] for r in rows)) if panel is not None else [None]
    made, axes = make_axes(len(titles), ax)
    source = found.rows if isinstance(found, Results) else []
    curves = _Curves(rows, figure, x, colour)
    for place, title in zip(axes, titles, strict=True):
        shown = [r for r in rows if panel is None or r[panel] == title]
        curves.draw(place, shown)
        if panel is not None:
            looped = [r for r in source if title in _values(r, panel)]
            place.set_title(panel_title(panel, title, _prompts(shown), looped), fontsize=10)
    if made is not None:
        low, high = zip(*(place.get_ylim() for place in axes), strict=True)
        left, right = zip(*(place.get_xlim() for place in axes), strict=True)
        for place in axes:
            place.set(ylim=(min(low), max(high)), xlim=(min(left), max(right)))
    loops = shares((str(value), r) for r in source for value in _values(r, colour)) if panel is None else {}
    finish(axes, made, loops, note)
    return axes[0].figure  # type: ignore[no-any-return]


class _Curves:
    """What all panels share: the places of x, and a colour and a marker for each value of `colour`."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], figure: str, x: str, colour: str) -> None:
        self.figure, self.x, self.colour = figure, x, colour
        self.values, self.places = (list(dict.fromkeys(r[n] for r in rows)) for n in (colour, x))
        self.numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in self.places)
        self.look = looks([str(v) for v in self.values], strategies=colour == "strategy")
        self.step = min((b - a for a, b in pairwise(self.places) if b > a), default=1) if self.numbers else 1

    def draw(self, axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        """Draw a panel's rows into its axes."""
        for i, value in enumerate(self.values):
            own = [r for r in rows if r[self.colour] == value]
            beside = shift(i, len(self.values), self.step)
            at = [(r[self.x] if self.numbers else self.places.index(r[self.x])) + beside for r in own]
            style = {"color": self.look[i][0], "marker": self.look[i][1], "linestyle": "-" if self.numbers else "none"}
            error_bars(axes, zip(at, (r[self.figure] for r in own), strict=True), str(value), **style)
        axes.set_xlabel(in_words(self.x))
        axes.set_ylabel(in_words(self.figure))
        axes.grid(alpha=0.25)
        ticks = [str(p) if self.numbers else _tick(p, [r for r in rows if r[self.x] == p]) for p in self.places]
        axes.set_xticks(self.places if self.numbers else range(len(self.places)), ticks)


def _prompts(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Of how many prompts the figures of these rows are."""
    return [r["prompts"] for r in rows if "prompts" in r]


def _tick(value: Any, rows: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join([str(value), *([spelled(_prompts(rows))] if _prompts(rows) else [])])


def _values(row: Any, name: str) -> list[Any]:
    """The values of a dimension that a drafting row has; none of those that only its rounds have."""
    if not row["drafts"] or name in ("position", "length", "accepted_length"):
        return []
    return chain_of(row) if name == "strategy" else [row.get(name)]
