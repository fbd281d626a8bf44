"""What all plots share: their table, colours and places of settings, panels, legends, and SVG for pages."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from specdec.errors import SpecdecError, need
from specdec.research.ablation.summary import SUMMED, conversation
from specdec.research.ablation.table import Row, as_rows, with_plain
from specdec.research.bootstrap import Interval
from specdec.research.colours import DARKEST, LIGHTEST, TEXTS, colour_of, marker_of, with_luminance
from specdec.research.results_table import check_name, spelled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST_TESTED = 5  # tokens of a point that is plotted
TOO_FEW = f"points with fewer than {LEAST_TESTED} tested tokens are left out"
MARKED = 0.01  # loop share from which a figure says it
BESIDE, DODGE = 0.12, 0.5  # of the distance between two places: from line to line, and at most for all together
COLUMNS = 3  # panels in a row
MANY_SETTINGS = 8  # with more in one panel, lines and bars hide each other
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (6, 2, 1, 2)))  # of one strategy's settings; theory is dotted
CHAINS = "strategies"  # the column of a setting's chain
COMMON = ("setting", "status", "drafts", "prompt")
ROUNDS = ("drafted_rounds",)  # by which a plot knows the rows that drafted
NEEDED = tuple(name for name in SUMMED if name != "distance")  # older tables have none
PAIRED = ("cell", "plain", "pair", "seed", "batch_size", "call", "equals_plain", *NEEDED)  # for speed-ups over plain


class Look:
    """The colour, marker and dashes of every setting of a table: a strategy's settings are shades of its colour."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.strategy = {r["setting"]: strategy_of(r) for r in rows if r["drafts"]}

    def style(self, setting: str) -> dict[str, Any]:
        """Options of a line."""
        return {
            "color": self.colour(setting),
            "marker": marker_of(self.strategy[setting]),
            "linestyle": DASHES[self._same(setting).index(setting) % len(DASHES)],
        }

    def colour(self, setting: str) -> str:
        same = self._same(setting)
        if len(same) == 1:
            return colour_of(self.strategy[setting])
        share = same.index(setting) / (len(same) - 1)
        return with_luminance(colour_of(self.strategy[setting]), LIGHTEST * (DARKEST / LIGHTEST) ** share)

    def _same(self, setting: str) -> list[str]:
        return [name for name, other in self.strategy.items() if other == self.strategy[setting]]


def of_table(*columns: str, by_chain: bool = False) -> Callable[[Callable[..., str | None]], Callable[..., Figure]]:
    """A plot of rows into axes, which may return a note -> a figure of a results table in any form, which has rows,
    these columns, and a row that did not fail; else SpecdecError, which names the plot. by_chain: a panel for each
    chain where there are many settings, unless panels or axes are given."""

    def decorate(plot: Callable[..., str | None]) -> Callable[..., Figure]:
        needed = tuple(dict.fromkeys((*COMMON, *columns)))

        @wraps(plot)
        def checked(
            results: Any, *arguments: Any, ax: Any = None, where: Any = None, panel: str | None = None, **options: Any
        ) -> Figure:
            from specdec.research.results import Results

            try:
                rows = as_rows(results)
                _check(rows, needed)
                rows = rows if where is None else Results(rows, "where").where(where).rows
                if by_chain and ax is None and panel is None and _are_many(rows):
                    panel = CHAINS
                parts, look = panels(rows, panel), Look(rows)
                figure, axes = make_axes(len(parts), ax)
                notes: dict[str | None, None] = {}
                for place, (title, own) in zip(axes, parts.items(), strict=True):
                    notes[plot(own, place, look, *arguments, **options)] = None
                    place.set_title(title, fontsize=10)
                names = [(n, r) for r in rows if r["drafts"] for n in {r["setting"], curve(r["setting"])}]
                finish(axes, figure, shares(names) if panel is None else {}, "; ".join(filter(None, notes)))
                return axes[0].figure
            except SpecdecError as error:
                raise SpecdecError(f"{plot.__name__}: {error}") from error

        return checked

    return decorate


def _are_many(rows: Sequence[Row]) -> bool:
    """Whether settings of several chains would hide each other in one panel."""
    drafting = [r for r in rows if r["drafts"]]
    return len({r["setting"] for r in drafting}) > MANY_SETTINGS and len({r.get(CHAINS) for r in drafting}) > 1


def _check(rows: Sequence[Row], needed: Sequence[str]) -> None:
    if not rows:
        raise SpecdecError("the results table has no rows")
    missing = [name for name in needed if any(name not in row for row in rows)]
    if missing:
        raise SpecdecError(f"the results table lacks the columns {', '.join(missing)}")
    if all(row["status"] != "ok" for row in rows):
        raise SpecdecError(f"every row of the results table failed, the first with: {rows[0].get('error')}")


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
    """Rows by panel's title, each with the plain rows of its own; one panel without a name."""
    if name is None:
        return {"": list(rows)}
    if not any(check_name("panel", name) in r for r in rows):
        known = [n for n in rows[0] if not isinstance(rows[0][n], (list, dict))]
        raise SpecdecError(f"panel: no column {name!r} in the results table; known: {', '.join(known)}")
    found: dict[str, list[Row]] = {}
    for value in dict.fromkeys(r.get(name) for r in rows if r["drafts"]):
        own = [r for r in rows if r["drafts"] and r.get(name) == value]
        found[panel_title(name, value, [len({conversation(r) for r in own})], own)] = with_plain(own, rows)
    return found or {"": list(rows)}


def panel_title(name: str, value: Any, prompts: Sequence[int], rows: Sequence[Row]) -> str:
    """A panel's value, and what its intervals rest on: prompts, and the share of these rows' tokens in loops."""
    looped = shares(("", r) for r in rows)
    about = [spelled(prompts)] * bool(prompts) + [f"{looped[n]:.0%} in loops" for n in looped]
    return f"{name} = {value}" + f"\n{', '.join(about)}" * bool(about)


def make_axes(count: int, given: Any = None) -> tuple[Figure | None, list[Any]]:
    """A figure with so many panels, or None and the caller's axes. Raises SpecdecError without matplotlib, and for what
    are no axes of one panel."""
    if given is not None:
        if not hasattr(given, "errorbar") or not hasattr(given, "figure"):
            raise SpecdecError(f"ax: expected axes of matplotlib, got {type(given).__name__}")
        if count > 1:
            raise SpecdecError("ax and panel: give axes for one panel, and `where` for its rows")
        return None, [given]
    need("matplotlib", "plots need", "research")
    from matplotlib.figure import Figure

    columns = min(count, COLUMNS)
    lines = math.ceil(count / columns)
    size = (5.0, 3.6) if count == 1 else (4.2 * columns, 3.4 * lines)
    figure = Figure(figsize=size, layout="constrained")
    for spare in list(figure.subplots(lines, columns, squeeze=False).flat)[count:]:
        spare.remove()
    return figure, figure.axes


def error_bars(axes: Any, points: Iterable[tuple[float, Interval]], label: str, **style: Any) -> Any:
    """Draw points with their intervals; returns the line. Points without a value are left out, and an end that is not
    known is the value."""
    known = [(x, f, f.value) for x, f in points if f.value is not None]
    low = [max(0.0, v - (v if f.low is None else f.low)) for _, f, v in known]
    high = [max(0.0, (v if f.high is None else f.high) - v) for _, f, v in known]
    style = {"elinewidth": 1, "capsize": 2, "markersize": 5, **style, "label": label}
    made = axes.errorbar([x for x, _, _ in known], [v for _, _, v in known], yerr=[low, high], **style)
    return made[0]


def finish(axes: Sequence[Any], figure: Figure | None, loops: Mapping[str, float], note: str = "") -> None:
    """A legend of all panels and a note, below them. figure: None = the axes are the caller's, with a legend inside;
    loops: loop shares of labels, which the legend says."""
    # A name that begins with an underscore would be left out of the legend, and `$` would be read as mathematics.
    found = {label: handle for a in axes for handle, label in zip(*a.get_legend_handles_labels(), strict=True)}
    names = {label: label.rpartition("  ")[2] for label in found}  # without the number that a point has
    said = {label: f"{loops[n]:.0%} in loops" for label, n in names.items() if n in loops}
    alike = len(set(said.values())) == 1 and set(loops) >= {n for n in names.values() if n != "theory"}
    ends = {label: f" ({text})" for label, text in said.items() if not alike}
    shown = [f"{label}{ends.get(label, '')}".replace("$", r"\$") for label in found]
    lines = textwrap.wrap(note, int(figure.get_figwidth() * 15)) if figure is not None else []
    lines += [text for text in dict.fromkeys(said.values()) if alike]
    title = "\n".join(lines).replace("$", r"\$") or None
    style: dict[str, Any] = {"fontsize": 9, "title": title, "title_fontsize": 8}
    if figure is not None:
        columns = max(1, int(figure.get_figwidth() / (0.7 + 0.07 * max(map(len, shown), default=0))))
        figure.set_figheight(figure.get_figheight() + 0.18 * math.ceil(len(found) / columns) + 0.14 * len(lines))
        style |= {"loc": "outside lower center", "ncols": columns, "frameon": False}
    if found:
        (axes[0] if figure is None else figure).legend(list(found.values()), shown, **style)


def svg(figure: Figure) -> str:
    """A figure as SVG without a ground, whose texts and frames are dark on a light page and light on a dark one."""
    from matplotlib import rc_context

    made = io.StringIO()
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "specdec"}):
        figure.savefig(made, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator")))
    light, dark = (f"svg {{ color: {c}; fill: {c}; }}" for c in TEXTS["text"])
    scheme = f"{light} @media (prefers-color-scheme: dark) {{ {dark} }}"
    found = made.getvalue().replace("#000000", "currentColor").replace("</style>", f" {scheme}</style>", 1)
    return re.sub(r"\s+", " ", found)
