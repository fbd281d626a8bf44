"""Research tools: prompt sets, a small real model and what it can be made into, benchmarks, and why two runs differ."""

from specdec.research.equality import PassShape, Report, why_not_equal

__all__ = ["PassShape", "Report", "why_not_equal"]
