"""Tables of figures, as Markdown here and for a terminal in cli/output.py, and how a figure is written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

NOISY = "costs measured with noise: a pass of more tokens was faster than plain"


class Table(NamedTuple):
    """A table of texts; `title` is for a terminal."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def without(self, *heads: str) -> Table:
        """The table without some columns."""
        kept = [i for i, head in enumerate(self.heads) if head not in heads]
        return Table(self.title, [self.heads[i] for i in kept], [[row[i] for i in kept] for row in self.rows])

    def markdown(self) -> str:
        """As Markdown, without the title; empty where there are no rows."""
        return markdown(self.heads, self.rows) if self.rows else ""

    def html(self, bad: Collection[int] = (), text: Callable[[str], str] = escape) -> str:
        """As HTML, without the title; bad: rows that are marked; text: what makes HTML of a cell."""
        head = "".join(f"<th>{text(name)}</th>" for name in self.heads)
        body = ""
        for i, row in enumerate(self.rows):
            body += f"<tr class='{'bad' * (i in bad)}'>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>"
        return f"<table><tr>{head}</tr>{body}</table>"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown."""
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)])


def figure(value: float | None, digits: int = 2) -> str:
    """A number that may not be known."""
    return "-" if value is None else f"{value:.{digits}f}"


def interval(entry: Mapping[str, Any] | None, digits: int = 2) -> str:
    """A figure and its interval, as far as they are known."""
    if entry is None or entry["value"] is None:
        return "-"
    text = figure(entry["value"], digits)
    if entry.get("low") is None:
        return text
    low, high = (figure(entry[end], digits) for end in ("low", "high"))
    return f"{text} ({low}{' to ' if low[0] == '-' else '-'}{high})"  # of a negative one the dash would be a sign


def spread(entry: Mapping[str, float], digits: int = 2) -> str:
    """A median and its range; of one repeat the value alone."""
    if entry["min"] == entry["max"]:
        return figure(entry["median"], digits)
    return f"{entry['median']:.{digits}f} ({entry['min']:.{digits}f}-{entry['max']:.{digits}f})"
