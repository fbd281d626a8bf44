"""What a plot needs of its results table, said in one line where it is not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from specdec.errors import SpecdecError
from specdec.research.ablation.summary import SUMMED
from specdec.research.ablation.table import Row, as_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMMON = ("setting", "status", "drafts", "prompt")
ROUNDS = ("drafted_rounds",)  # by which a plot knows the rows that drafted
PAIRED = ("cell", "plain", "pair", "seed", "batch_size", "call", "equals_plain", *SUMMED)  # for speed-ups over plain


def of_table(*columns: str) -> Callable[[Callable[..., Figure]], Callable[..., Figure]]:
    """A plot of rows -> a plot of a results table in any form, which has rows, these columns, and a row that did not
    fail; else SpecdecError, which names the plot."""

    def decorate(plot: Callable[..., Figure]) -> Callable[..., Figure]:
        needed = tuple(dict.fromkeys((*COMMON, *columns)))

        @wraps(plot)
        def checked(results: Any, *arguments: Any, **options: Any) -> Figure:
            try:
                rows = as_rows(results)
                _check(rows, needed)
                return plot(rows, *arguments, **options)
            except SpecdecError as error:
                raise SpecdecError(f"{plot.__name__}: {error}") from error

        return checked

    return decorate


def _check(rows: Sequence[Row], needed: Sequence[str]) -> None:
    if not rows:
        raise SpecdecError("the results table has no rows")
    missing = [name for name in needed if any(name not in row for row in rows)]
    if missing:
        raise SpecdecError(f"the results table lacks the columns {', '.join(missing)}")
    if all(row["status"] != "ok" for row in rows):
        raise SpecdecError(f"every row of the results table failed, the first with: {rows[0].get('error')}")
