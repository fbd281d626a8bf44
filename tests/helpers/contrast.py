"""How well one colour can be read on another."""

from __future__ import annotations

from specdec.research.colours import luminance


def contrast(a: str, b: str) -> float:
    """Contrast of two colours as WCAG defines it, from 1 to 21."""
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)
