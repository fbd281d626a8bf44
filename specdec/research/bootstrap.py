"""Confidence intervals and paired tests for figures that are ratios of sums: tokens a round, acceptance, speed.

The unit that is drawn is the *cluster*, a prompt with all its seeds (or a call with all its prompts): rounds of one
prompt resemble each other, so that intervals over rounds would be far too narrow. A figure is pooled, sum over sum, in
every draw, and two settings that are compared are drawn with the same clusters, so that what a prompt does to both
cancels. Intervals are expanded percentile intervals (Hesterberg 2015, "What Teachers Should Know About the Bootstrap",
section 5.3): plain percentile intervals are too narrow with few clusters (10 prompts: 0.90 covered in place of 0.95,
expanded ones 0.94). The test is of the same pooled difference, by swapping the two settings' counts in some of the
clusters: exact for up to 13 clusters, from random swaps beyond. All draws come from a seed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from specdec.errors import SpecdecError

Fraction = tuple[Sequence[float], Sequence[float]]  # numerators and denominators by cluster: a figure is sum over sum
DRAWS, SWAPS = 2000, 10_000
EXACT_UP_TO = 13  # clusters: 8,192 sign patterns
_LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A figure and its interval; None where it is not defined (nothing counted; an interval of one cluster)."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        """Plain data for JSON."""
        return {"value": self.value, "low": self.low, "high": self.high}


def ratio(numerators: Sequence[float], denominators: Sequence[float], level: float = _LEVEL, seed: int = 0) -> Interval:
    """Sum over sum, and its interval. One entry a cluster; `level` in (0, 1)."""
    top, bottom = _columns(numerators, denominators)
    weights = _draws(len(top), seed)
    return _interval(_over(top.sum(), bottom.sum()), _over(weights @ top, weights @ bottom), level, len(top))


def median(values: Sequence[float]) -> Interval:
    """The median of repeats of one measurement, and its interval, which never leaves their range."""
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or len(found) == 0:
        raise SpecdecError(f"expected one value a repeat, got {found.shape}")
    drawn = np.random.default_rng(0).integers(0, len(found), (DRAWS, len(found)))
    return _interval(np.asarray(np.median(found)), np.median(found[drawn], axis=1), _LEVEL, len(found))


def ratio_of_ratios(a: Fraction, b: Fraction) -> Interval:
    """Figure of a over figure of b on the same clusters, as a speed-up."""
    return _compared(a, b, _over)


def difference(a: Fraction, b: Fraction) -> Interval:
    """Figure of a minus figure of b on the same clusters."""
    return _compared(a, b, np.subtract)


def _compared(a: Fraction, b: Fraction, how: Callable[[Any, Any], np.ndarray]) -> Interval:
    (top_a, bottom_a), (top_b, bottom_b) = _columns(*a), _columns(*b)
    weights = _draws(_paired(top_a, top_b), 0)
    value = how(_over(top_a.sum(), bottom_a.sum()), _over(top_b.sum(), bottom_b.sum()))
    drawn = how(_over(weights @ top_a, weights @ bottom_a), _over(weights @ top_b, weights @ bottom_b))
    return _interval(value, drawn, _LEVEL, len(top_a))


def swap_test(a: Fraction, b: Fraction, draws: int = SWAPS) -> float | None:
    """Two-sided p-value of `difference(a, b)`, if the two settings could change places in every cluster.

    None with fewer than two clusters in which anything was counted.
    """
    (top_a, bottom_a), (top_b, bottom_b) = _columns(*a), _columns(*b)
    _paired(top_a, top_b)
    counted = np.flatnonzero(bottom_a + bottom_b)
    if len(counted) < 2:
        return None
    if len(counted) <= EXACT_UP_TO:
        stays = np.array(list(itertools.product((1.0, 0.0), repeat=len(counted))))
    else:
        stays = np.random.default_rng(0).integers(0, 2, (draws + 1, len(counted))).astype(np.float64)
        stays[0] = 1.0  # what was observed
    tops, bottoms = (np.stack(pair)[:, counted] for pair in ((top_a, top_b), (bottom_a, bottom_b)))
    left, right = (
        _over(s @ tops[0] + (1 - s) @ tops[1], s @ bottoms[0] + (1 - s) @ bottoms[1]) for s in (stays, 1 - stays)
    )
    # Where one side has nothing left there is no difference; such a swap counts as extreme.
    found = np.nan_to_num(np.abs(left - right), nan=np.inf)
    if not np.isfinite(found[0]):
        return None
    return float((found >= found[0] * (1 - 1e-12)).mean())  # the same sum in another order may round below itself


def least_p(clusters: int) -> float | None:
    """What `swap_test` cannot fall below with so many clusters; None with fewer than two."""
    if clusters < 2:
        return None
    return 2 / 2**clusters if clusters <= EXACT_UP_TO else 1 / (SWAPS + 1)


def t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution for a probability above a half and whole degrees of freedom.

    By halving, from the distribution's finite sum (Abramowitz & Stegun 1964, 26.7.3 and 26.7.4).
    """

    def between(angle: float) -> float:
        """P(-t < T < t) at t = sqrt(degrees) tan(angle)."""
        odd = degrees % 2
        steps = np.arange(2 + odd, degrees, 2)
        terms = np.cumprod(np.concatenate([[1.0], (steps - 1) / steps * math.cos(angle) ** 2])).sum()
        if not odd:
            return float(math.sin(angle) * terms)
        beside = math.sin(angle) * math.cos(angle) * terms if degrees > 1 else 0.0
        return float(2 / math.pi * (angle + beside))

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if between(middle) < 2 * probability - 1 else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


@lru_cache(maxsize=64)
def _expanded_tail(level: float, n: int) -> float:
    """Return the share of the draws beyond each end: a normal distribution's, beyond the ends of a t distribution.

    The spread of n clusters is corrected for the mean that was estimated from them.
    """
    return math.erfc(math.sqrt(n / (n - 1)) * t_quantile((1 + level) / 2, n - 1) / math.sqrt(2)) / 2


@lru_cache(maxsize=8)  # the settings of an ablation have the same prompts
def _draws(n: int, seed: int) -> np.ndarray:
    """How often each of n clusters is drawn, [DRAWS, n]."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=DRAWS).astype(np.float64)


def _columns(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    top, bottom = (np.asarray(x, dtype=np.float64) for x in (numerators, denominators))
    if top.ndim != 1 or top.shape != bottom.shape or len(top) == 0:
        raise SpecdecError(f"expected one numerator and denominator a cluster, got {top.shape} and {bottom.shape}")
    return top, bottom


def _paired(a: np.ndarray, b: np.ndarray) -> int:
    if len(a) != len(b):
        raise SpecdecError(f"paired figures need the same clusters, got {len(a)} and {len(b)}")
    return len(a)


def _over(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """A quotient; NaN where the denominator is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        made: np.ndarray = np.where(np.asarray(bottom) != 0, np.divide(top, bottom), np.nan)
    return made


def _interval(value: np.ndarray, drawn: np.ndarray, level: float, clusters: int) -> Interval:
    if not 0 < level < 1:
        raise SpecdecError(f"level must be in (0, 1), got {level!r}")
    if not np.isfinite(value):
        return Interval(None)
    known = drawn[np.isfinite(drawn)]
    if clusters < 2 or len(known) == 0:
        return Interval(float(value))
    tail = _expanded_tail(level, clusters)
    low, high = np.quantile(known, (tail, 1 - tail))
    return Interval(float(value), float(low), float(high))
