"""Whether speculative text equals plain text, and why not."""

from specdec.research.exactness.run import PARTS, ExactnessConfig, run_exactness

__all__ = ["PARTS", "ExactnessConfig", "run_exactness"]
