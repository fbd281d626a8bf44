"""Drafting by the target itself, without some of its layers, over its own cache."""

from specdec.drafters.self_speculation.strategy import EarlyExit

__all__ = ["EarlyExit"]
