"""How plots look: colours, markers and places of settings, panels, and what every figure begins and ends with."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec.errors import SpecdecError
from specdec.research.ablation.table import Row, with_plain
from specdec.research.bootstrap import Interval
from specdec.research.colours import colour_of, marker_of, with_luminance
from specdec.research.results_table import check_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEW = 3  # entries of a legend inside the axes
LEAST_TESTED = 5  # tokens of a point that is plotted
MARKED = 0.01  # loop share from which a legend says it
BESIDE, DODGE = 0.12, 0.5  # of the distance between two places: from line to line, and at most for all together
COLUMNS = 3  # panels in a row
LIGHTEST, DARKEST = 0.3, 0.07  # luminances of the settings of one strategy: 3 : 1 and more to white


class Look:
    """The colour, marker and place of every setting of a table: a strategy's settings are shades of its colour."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.strategy = {r["setting"]: strategy_of(r) for r in rows if r["drafts"]}
        self.loops = shares([(label, r) for r in rows if r["drafts"] for label in (r["setting"], curve(r["setting"]))])

    def colour(self, setting: str) -> str:
        who = self.strategy[setting]
        same = [name for name, other in self.strategy.items() if other == who]
        if len(same) == 1:
            return colour_of(who)
        share = same.index(setting) / (len(same) - 1)
        return with_luminance(colour_of(who), LIGHTEST * (DARKEST / LIGHTEST) ** share)

    def marker(self, setting: str) -> str:
        return marker_of(self.strategy[setting])


def shift(index: int, count: int, step: float = 1.0) -> float:
    """How far beside its place the points of one of `count` lines are, so that intervals do not hide each other. step:
    the distance between two places."""
    return step * (index - (count - 1) / 2) * min(BESIDE, DODGE / max(1, count - 1))


def curve(setting: str) -> str:
    """The setting without its k: all lengths are one curve."""
    return " ".join(part for part in setting.split() if not part.startswith("k="))


def shares(labelled: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, float]:
    """Loop share by label, where it is large enough to be marked."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for label, row in labelled:
        sums[label][0] += row.get("loop_tokens") or 0
        sums[label][1] += row.get("emitted_tokens") or 0
    return {label: looped / all_ for label, (looped, all_) in sums.items() if all_ and looped / all_ >= MARKED}


def strategy_of(row: Mapping[str, Any]) -> str | None:
    """The strategy by which a row is coloured: the first of its chain that drafted."""
    timed = [name for name, _ in row.get("strategy_seconds") or ()]
    drafted = [r[0] for r in row.get("records") or () if r[0] is not None]
    found = drafted or timed
    return found[0] if found else row.get("strategies")


def panels(rows: Sequence[Row], name: str | None) -> dict[str, list[Row]]:
    """Rows by panel, each with the plain rows of its own; one panel without a name."""
    if name is None:
        return {"": list(rows)}
    if not any(check_name("panel", name) in r for r in rows):
        known = [n for n in rows[0] if not isinstance(rows[0][n], (list, dict))]
        raise SpecdecError(f"panel: no column {name!r} in the results table; known: {', '.join(known)}")
    found: dict[str, list[Row]] = {}
    for value in dict.fromkeys(r.get(name) for r in rows if r["drafts"]):
        own = [r for r in rows if r["drafts"] and r.get(name) == value]
        found[f"{name} = {value}"] = with_plain(own, rows)
    return found or {"": list(rows)}


def make_axes(count: int, given: Any = None) -> tuple[Figure | None, list[Any]]:
    """A figure with so many panels, or None and the caller's axes. Raises SpecdecError without matplotlib, and for what
    are no axes of one panel."""
    if given is not None:
        if not hasattr(given, "errorbar") or not hasattr(given, "figure"):
            raise SpecdecError(f"ax: expected axes of matplotlib, got {type(given).__name__}")
        if count > 1:
            raise SpecdecError("ax and panel: give axes for one panel, and `where` for its rows")
        return None, [given]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SpecdecError("plots need the package matplotlib: install specdec[research]") from None
    columns = min(count, COLUMNS)
    lines = math.ceil(count / columns)
    size = (5.0, 3.6) if count == 1 else (4.2 * columns, 3.4 * lines)
    figure = Figure(figsize=size, layout="constrained")
    made = figure.subplots(lines, columns, squeeze=False).flat
    for spare in list(made)[count:]:
        spare.remove()
    return figure, figure.axes


def error_bars(
    axes: Any, points: Iterable[tuple[float, Interval]], label: str, colour: str, marker: str, **style: Any
) -> Any:
    """Draw points with their intervals; returns the line. Points without a value are left out, and an end that is not
    known is the value."""
    known = [(x, f, f.value) for x, f in points if f.value is not None]
    low = [max(0.0, v - (v if f.low is None else f.low)) for _, f, v in known]
    high = [max(0.0, (v if f.high is None else f.high) - v) for _, f, v in known]
    style |= {"color": colour, "marker": marker, "label": label}
    return axes.errorbar([x for x, _, _ in known], [v for _, _, v in known], yerr=[low, high], **style)[0]


def finish(axes: Any, figure: Figure | None, loops: Mapping[str, float]) -> None:
    """A legend of all panels; of many entries below them. figure: None = the axes are the caller's; loops: loop shares
    of labels, which the legend says."""
    # A name that begins with an underscore would be left out of the legend, and `$` would be read as mathematics.
    found = {label: handle for a in axes for handle, label in zip(*a.get_legend_handles_labels(), strict=True)}
    names = {label: label.rpartition("  ")[2] for label in found}  # without the number that a point has
    marked = (f"{label} ({loops[n]:.0%} in loops)" if n in loops else label for label, n in names.items())
    shown = [label.replace("$", r"\$") for label in marked]
    if figure is None or (len(found) <= FEW and len(axes) == 1):
        if found:
            axes[0].legend(list(found.values()), shown, fontsize=9)
        return
    columns = max(1, int(figure.get_figwidth() / (0.7 + 0.07 * max(map(len, shown)))))
    figure.set_figheight(figure.get_figheight() + 0.18 * math.ceil(len(found) / columns))
    figure.legend(list(found.values()), shown, fontsize=9, loc="outside lower center", ncols=columns)
