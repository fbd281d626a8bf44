"""Research tools: prompt sets, a small real model and what it can be made into, benchmarks, traces and their analysis,
estimates without a draft, and why two runs differ."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.research.exactness.equality import PassShape, Report, why_not_equal
    from specdec.research.models.synthetic import synthetic

__all__ = ["PassShape", "Report", "synthetic", "why_not_equal"]


def __getattr__(name: str) -> Any:
    """A name, imported when it is first used: tables and colours, which are here too, need no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "models.synthetic" if name == "synthetic" else "exactness.equality"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
