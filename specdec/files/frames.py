"""Rows as a data frame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specdec.errors import need


def data_frame(rows: Sequence[Mapping[str, Any]], numbers: Iterable[str] = ()) -> Any:
    """A data frame of pandas. numbers: columns in which None is NaN, also where no row has a number.

    Raises SpecdecError without pandas.
    """
    made = need("pandas", "data frames need", "research").DataFrame(list(rows))
    return made.astype({name: float for name in numbers if name in made})
