"""Research tools: prompt sets, a small real model and what it can be made into, benchmarks, traces and their analysis,
estimates without a draft, and why two runs differ."""

from specdec.research.exactness.equality import PassShape, Report, why_not_equal
from specdec.research.models.synthetic import synthetic

__all__ = ["PassShape", "Report", "synthetic", "why_not_equal"]
