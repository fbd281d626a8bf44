"""A table of grouped figures with intervals, and the forms it can be written in."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError, unknown_name
from specdec.files.frames import data_frame
from specdec.files.texts import write_file
from specdec.research.bench import tables
from specdec.research.bootstrap import Interval
from specdec.stats import PER_DRAFTED_ROUND, RATES

IN_WORDS = {name: words for words, name in RATES.items()} | {
    "tokens_per_round": "tokens per round", "tokens_per_second": "tokens/s", "speedup": "speed-up",
    "decode_speedup": "speed-up without prefill", "predicted_speedup": "predicted",
    "acceptance_rate": PER_DRAFTED_ROUND,
    "least_p": "p at least", "loop_share": "in loops", "strategies": "chain", "temperature": "T",
    "distance": "distance to p",
}  # fmt: skip
# Where it is not told:
SHOWN = (
    "tokens_per_round", *RATES.values(), "acceptance_length", "acceptance_rate", "speedup", "distance", "loop_share",
)  # fmt: skip
SPECIAL = {c: rf"\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}",
}  # fmt: skip
FIGURES = {*SHOWN, "tokens_per_second", "decode_speedup", "predicted_speedup"}
MISSING, MOST_DIGITS = "-", 15
INTERVALS = "95 % intervals over prompts"
LONG = 40  # rows that no longer fit a page


@dataclass(frozen=True)
class ResultTable:
    """Figures by group.

    names: the dimensions; their values come first in each row.
    rows: by column; figures are an Interval, counts are numbers.
    intervals: what the intervals are, and what to know before comparing groups.
    """

    names: tuple[str, ...]
    rows: list[dict[str, Any]]
    intervals: str = INTERVALS

    def flat(self) -> list[dict[str, Any]]:
        """Plain data: each figure as `NAME`, `NAME_low` and `NAME_high`, the ends of its 95 % interval."""
        made = []
        for row in self.rows:
            found: dict[str, Any] = {}
            for name, value in row.items():
                if isinstance(value, Interval):
                    found |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
                else:
                    found[name] = value
            made.append(found)
        return made

    def to_pandas(self) -> Any:
        """A data frame with the columns of `flat`. Raises SpecdecError without pandas."""
        return data_frame(self.flat())

    def to_csv(self, path: str | Path | None = None) -> str:
        """CSV with the columns of `flat`; returned, and written where `path` is given."""
        rows, made = self.flat(), io.StringIO()
        writer = csv.DictWriter(made, list(dict.fromkeys(n for r in rows for n in r)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return _written(made.getvalue(), path, "CSV file")

    def to_latex(
        self,
        path: str | Path | None = None,
        figures: Sequence[str] | None = None,
        digits: int = 2,
        long: bool | None = None,
    ) -> str:
        """A LaTeX table (package booktabs) of the dimensions and some figures with their intervals; returned, and
        written where `path` is given.

        figures: None = those that say most and are known.
        long: a longtable, which goes on over pages and repeats its head, and is no float; None = above `LONG` rows.
        """
        shown, keys = self._chosen(figures, digits), len(self.names)
        long = len(self.rows) > LONG if long is None else long
        kind, packages = ("longtable", "booktabs,longtable") if long else ("tabular", "booktabs")
        lines = [
            f"% needs \\usepackage{{{packages}}}; {self.intervals}",
            f"\\begin{{{kind}}}{{{'l' * keys}{'r' * len(shown)}}}",
            "\\toprule",
            _latex_row(map(escape_latex, self._heads(shown))),
            "\\midrule",
            *["\\endhead", "\\bottomrule", "\\endfoot"] * long,
            *(_latex_row(_latex_cell(row.get(n), digits) for n in (*self.names, *shown)) for row in self.rows),
            *["\\bottomrule"] * (not long),
            f"\\end{{{kind}}}",
        ]
        return _written("\n".join(lines) + "\n", path, "LaTeX file")

    def text_table(self, figures: Sequence[str] | None = None, digits: int = 2) -> tables.Table:
        """The table as texts. Raises SpecdecError for an unknown figure."""
        shown = self._chosen(figures, digits)
        rows = [[_cell(row.get(n), digits) for n in (*self.names, *shown)] for row in self.rows]
        return tables.Table(self.intervals, self._heads(shown), rows)

    def _heads(self, shown: Sequence[str]) -> list[str]:
        return [in_words(n) for n in (*self.names, *shown)]

    def _chosen(self, figures: Sequence[str] | None, digits: int) -> list[str]:
        if isinstance(digits, bool) or not isinstance(digits, int) or not 0 <= digits <= MOST_DIGITS:
            raise SpecdecError(f"digits must be a whole number from 0 to {MOST_DIGITS}, got {digits!r}")
        figures = None if figures is None else named("figures", [figures])
        known = [n for n in dict.fromkeys(n for r in self.rows for n in r) if n not in self.names]
        for name in figures or ():
            if name not in known:
                raise no_figure(name, known, self.names)
        if figures is not None or not any(n in SHOWN for n in known):  # of a comparison all of it
            return list(figures or known)
        if "accepted_length" in self.names:  # a histogram
            return ["drafted_rounds"]
        telling = [n for n in SHOWN if n in known and any(r[n].value is not None for r in self.rows)]
        absent = [n for n in ("loop_share", "distance") if not any(n in r and r[n].value for r in self.rows)]
        telling = [n for n in telling if n not in absent]
        return [n for n in ("prompts", "drafted", "tested") if n in known] + telling

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows of `flat`."""
        return iter(self.flat())

    def __repr__(self) -> str:
        return f"ResultTable({len(self.rows)} rows by {', '.join(self.names)})"

    def _repr_html_(self) -> str:
        return self.text_table().html()


class Tabular:
    """What results from any source share: they are shown and written as the table of `by()`."""

    rows: list[dict[str, Any]]

    def by(self, *names: str) -> ResultTable:
        """Figures with intervals by dimensions."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """`by().to_pandas()`."""
        return self.by().to_pandas()

    def to_csv(self, path: str | Path | None = None) -> str:
        """`by().to_csv(...)`."""
        return self.by().to_csv(path)

    def to_latex(self, path: str | Path | None = None, **options: Any) -> str:
        """`by().to_latex(...)`."""
        return self.by().to_latex(path, **options)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.by())

    def _repr_html_(self) -> str:
        return self.by()._repr_html_()

    @staticmethod
    def _check(what: str, names: Iterable[str], known: Sequence[str]) -> None:
        for name in names:
            if name not in known:
                raise unknown_name(f"dimension of {what}", name, known)

    def _wanted(self, values: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
        """What `where` keeps, by dimension: a collection of values."""
        self._check("where", values, known)
        return {n: v if isinstance(v, (list, tuple, set)) else [v] for n, v in values.items()}


def spelled(prompts: Sequence[int]) -> str:
    """How many prompts some figures are of: "8 prompts", "2 to 8 prompts"."""
    low, high = min(prompts), max(prompts)
    return f"{low} to {high} prompts" if low < high else f"{high} prompt{'s' * (high != 1)}"


def intervals_over(prompts: Sequence[int]) -> str:
    """What intervals are over, by the prompts of each group: one prompt has none."""
    if not prompts:
        return INTERVALS
    return f"95 % intervals over {spelled(prompts)}" if max(prompts) > 1 else "one prompt: no intervals"


def nothing_left(what: str, wanted: Mapping[str, Iterable[Any]], values: Mapping[str, Sequence[Any]]) -> SpecdecError:
    """The error for values that leave nothing: what was asked for, and the values that a column has instead.

    wanted: by column; values: those that are there, by column
    """
    asked = " and ".join(f"{n}={' or '.join(map(_value, found))}" for n, found in wanted.items())
    if not asked:
        return SpecdecError(f"{what} is kept")
    said = [f"{what} has {asked}"]
    for name, found in wanted.items():
        there = list(dict.fromkeys(map(_value, values[name])))
        if not any(v in values[name] for v in found):
            said.append(f"{name} is one of {', '.join(there[:12])}{', ...' if len(there) > 12 else ''}")
        if any(isinstance(v, str) and "," in v for v in found):
            said.append(f"for several values give a list, {name}=[...], or repeat --where {name}=...")
    return SpecdecError("; ".join(said))


def _value(value: Any) -> str:
    """A value as it is typed after --where."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def no_figure(name: str, known: Sequence[str], dimensions: Sequence[str]) -> SpecdecError:
    """The error for a figure that a table lacks: one that is not defined by its dimensions, or none at all."""
    if name not in FIGURES:
        return unknown_name("figure", name, known)
    return SpecdecError(f"figure {name!r} is not defined by {', '.join(dimensions)}; there are: {', '.join(known)}")


def in_words(name: str) -> str:
    """A column's name in tables; of a figure's difference and its p also."""
    for ending in ("_difference", "_least_p", "_p"):
        figure = name.removesuffix(ending)
        if figure in IN_WORDS and figure != name:
            return f"{IN_WORDS[figure]}: {ending[1:].replace('_', ' ')}"
    return IN_WORDS.get(name, name.replace("_", " "))


def named(what: str, names: Sequence[Any]) -> tuple[str, ...]:
    """Names as they were given, one by one or as one list. Raises SpecdecError for what is no name."""
    found = names[0] if len(names) == 1 and isinstance(names[0], (list, tuple)) else names
    return tuple(check_name(what, name) for name in found)


def check_name(what: str, name: Any) -> str:
    """The name. Raises SpecdecError for what is none."""
    if not isinstance(name, str):
        raise SpecdecError(f"{what}: expected a name, got {name!r}")
    return name


def escape_latex(text: str) -> str:
    """A text that LaTeX prints as it is."""
    return "".join(SPECIAL.get(c, c) for c in text)


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _latex_cell(value: Any, digits: int) -> str:
    if not isinstance(value, Interval) or value.value is None:
        return "--" if value is None or isinstance(value, Interval) else escape_latex(_cell(value, digits))
    number = f"${value.value:.{digits}f}$"
    return number if value.low is None else f"{number} [${value.low:.{digits}f}$, ${value.high:.{digits}f}$]"


def _cell(value: Any, digits: int) -> str:
    if isinstance(value, Interval):
        return tables.interval(value.to_dict(), digits)
    if value is None:
        return MISSING
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _written(text: str, path: str | Path | None, what: str) -> str:
    if path is not None:
        write_file(path, text, what)
    return text
