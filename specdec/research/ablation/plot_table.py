"""What a plot needs of its results table, said in one line where it is not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from specdec.errors import SpecdecError, unknown_name
from specdec.research.ablation.look import Look, finish, make_axes, panels
from specdec.research.ablation.summary import SUMMED
from specdec.research.ablation.table import Row, as_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMMON = ("setting", "status", "drafts", "prompt")
ROUNDS = ("drafted_rounds",)  # by which a plot knows the rows that drafted
NEEDED = tuple(name for name in SUMMED if name != "distance")  # older tables have none
PAIRED = ("cell", "plain", "pair", "seed", "batch_size", "call", "equals_plain", *NEEDED)  # for speed-ups over plain


def of_table(*columns: str) -> Callable[[Callable[..., None]], Callable[..., Figure]]:
    """A plot of rows into axes -> a figure of a results table in any form, which has rows, these columns, and a row
    that did not fail; else SpecdecError, which names the plot."""

    def decorate(plot: Callable[..., None]) -> Callable[..., Figure]:
        needed = tuple(dict.fromkeys((*COMMON, *columns)))

        @wraps(plot)
        def checked(
            results: Any, *arguments: Any, ax: Any = None, where: Any = None, panel: str | None = None, **options: Any
        ) -> Figure:
            try:
                rows = as_rows(results)
                _check(rows, needed)
                rows = filtered(rows, where)
                parts, look = panels(rows, panel), Look(rows)
                figure, axes = make_axes(len(parts), ax)
                for place, (title, own) in zip(axes, parts.items(), strict=True):
                    plot(own, place, look, *arguments, **options)
                    place.set_title(title, fontsize=10)
                finish(axes, figure, look.loops)
                return axes[0].figure
            except SpecdecError as error:
                raise SpecdecError(f"{plot.__name__}: {error}") from error

        return checked

    return decorate


def filtered(rows: list[Row], where: Any) -> list[Row]:
    """The rows that a filter keeps, with plain decoding's. Raises SpecdecError where nothing drafts any more."""
    if where is None:
        return rows
    if isinstance(where, Mapping):
        wanted = {n: v if isinstance(v, (list, tuple, set)) else [v] for n, v in where.items()}
        known = dict.fromkeys(n for r in rows for n in r)
        unknown = [n for n in wanted if n not in known]
        if unknown:
            raise unknown_name("column", unknown[0], known)
        kept = [r for r in rows if not r["drafts"] or all(r.get(n) in v for n, v in wanted.items())]
    elif callable(where):
        kept = [r for r in rows if not r["drafts"] or where(r)]
    else:
        raise SpecdecError(f"where: expected a mapping of columns, or a function of a row, got {where!r}")
    if not any(r["drafts"] for r in kept):
        raise SpecdecError(f"where: no row that drafts is left by {where!r}")
    return kept


def _check(rows: Sequence[Row], needed: Sequence[str]) -> None:
    if not rows:
        raise SpecdecError("the results table has no rows")
    missing = [name for name in needed if any(name not in row for row in rows)]
    if missing:
        raise SpecdecError(f"the results table lacks the columns {', '.join(missing)}")
    if all(row["status"] != "ok" for row in rows):
        raise SpecdecError(f"every row of the results table failed, the first with: {rows[0].get('error')}")
