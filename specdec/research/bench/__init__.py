"""Benchmarks: the smoke suites, and whole runs from a file against other implementations."""

from specdec.research.bench.document import commit, machine, origin

__all__ = ["commit", "machine", "origin"]
