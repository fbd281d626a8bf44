"""The target's law over the first three tokens, enumerated; and how well samples fit it.

Laws do not use specdec: they come from plain forward passes over every possible text, and the cuts (top-k, top-p,
min-p) and the repetition penalty are written from their definitions, in float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from scipy.stats import gamma

from specdec import SpeculativeDecoder
from specdec.decoding.result import Generation

Adjust = Callable[[np.ndarray, np.ndarray, int], np.ndarray]

SIMULATIONS = 10_000
LEVEL = 0.001  # how often an exact sampler may be rejected, over all tests of one family
THIN = 8.0  # cells that expect fewer samples are pooled


def samples(full: int, fast: int) -> int:
    """How many samples a case draws in either tier: at least SPECDEC_SAMPLES, which scripts/measure_laws.py sets."""
    chosen = full if os.environ.get("SPECDEC_TIER") == "full" else fast
    return max(chosen, int(os.environ.get("SPECDEC_SAMPLES", "0")))


def small_model(seed: int, vocab: int, spread: float = 0.25, **overrides: Any) -> Any:
    """A Llama of one layer whose next-token laws are neither flat nor one-hot; a pass costs about a millisecond."""
    from tests.helpers.tiny import tiny_model

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, **overrides}
    return tiny_model("llama", seed, vocab, initializer_range=spread, **sizes)


def next_laws(
    logits: np.ndarray,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> np.ndarray:
    """Logits [n, V] -> laws [n, V]: temperature, then the top_k largest, then the smallest set of largest tokens whose
    mass reaches top_p, then tokens of at least min_p times the largest, then the smallest set of mass typical_p whose
    surprise is nearest to the entropy; each cut renormalises."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    order = np.argsort(-p, axis=-1, kind="stable")
    rank = np.argsort(order, axis=-1)
    if top_k:
        p = np.where(rank < top_k, p, 0.0)
        p /= p.sum(axis=-1, keepdims=True)
    if top_p < 1:
        falling = np.take_along_axis(p, order, axis=-1)
        before = np.cumsum(falling, axis=-1) - falling  # the mass of everything larger
        p = np.where(np.take_along_axis(before, rank, axis=-1) < top_p, p, 0.0)
        p /= p.sum(axis=-1, keepdims=True)
    if min_p > 0:
        p = np.where(p >= min_p * p.max(axis=-1, keepdims=True), p, 0.0)
        p /= p.sum(axis=-1, keepdims=True)
    if typical_p < 1:
        surprise = -np.log(np.maximum(p, 1e-300))
        entropy = (p * surprise).sum(axis=-1, keepdims=True)
        order = np.argsort(np.where(p > 0, np.abs(surprise - entropy), np.inf), axis=-1, kind="stable")
        sorted_p = np.take_along_axis(p, order, axis=-1)
        before = np.cumsum(sorted_p, axis=-1) - sorted_p
        p = np.where(np.take_along_axis(before, np.argsort(order, axis=-1), axis=-1) < typical_p, p, 0.0)
        p /= p.sum(axis=-1, keepdims=True)
    return p


def _penalised(logits: np.ndarray, texts: np.ndarray, penalty: float) -> np.ndarray:
    """Logits of tokens that the text holds, divided by the penalty if positive and multiplied if negative."""
    out = logits.copy()
    for row, text in zip(out, texts, strict=True):
        seen = sorted(set(text.tolist()))
        row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    return out


@torch.no_grad()
def three_token_law(
    model: Any,
    prompt: Sequence[int],
    temperature: float,
    repetition_penalty: float = 1.0,
    adjust: Adjust | None = None,
    **cuts: float,
) -> np.ndarray:
    """P(x1, x2, x3 | prompt) as float64 [V**3], from full forward passes over all V**2 texts.

    adjust(logits [n, V], texts [n, t], length of the prompt): any other change of the logits that depends on the text.
    """
    vocab = model.get_input_embeddings().weight.shape[0]
    pairs = np.stack(np.meshgrid(np.arange(vocab), np.arange(vocab), indexing="ij"), axis=-1).reshape(-1, 2)
    texts = np.concatenate([np.tile(np.asarray(prompt), (len(pairs), 1)), pairs], axis=1)
    logits = model(input_ids=torch.from_numpy(texts), use_cache=False).logits.double().numpy()
    laws = []
    for i in range(3):
        at = len(prompt) - 1 + i
        seen = _penalised(logits[:, at], texts[:, : at + 1], repetition_penalty)
        if adjust is not None:
            seen = adjust(seen, texts[:, : at + 1], len(prompt))
        laws.append(next_laws(seen, temperature, **cuts))  # type: ignore[arg-type]
    first, second, third = laws  # [V**2, V] each, indexed by (x1, x2)
    rows = np.arange(len(pairs))
    pair = first[rows, pairs[:, 0]] * second[rows, pairs[:, 1]]
    return (pair[:, None] * third).reshape(-1)


def three_tokens(decoder: SpeculativeDecoder, prompt: list[int], n: int, **options: Any) -> Generation:
    """n texts of three tokens. The prompt is computed once and kept, and rounds have so many rows that a text takes the
    least time."""
    options = {"temperature": 0.8, "keep_state": True, "max_new_tokens": 3, **options}
    decoder.generate(prompt, **{**options, "max_new_tokens": 1})
    return decoder.generate(prompt, num_return_sequences=n, batch_size=500, **options)


def cell(tokens: Sequence[Sequence[int]], vocab: int) -> np.ndarray:
    """The index of each row's first three tokens in `three_token_law`."""
    ids = np.asarray([row[:3] for row in tokens])
    return (ids[:, 0] * vocab + ids[:, 1]) * vocab + ids[:, 2]


def chi_square(observed: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Observed [..., bins], expected [bins] -> [...]."""
    return np.asarray(((observed - expected) ** 2 / expected).sum(axis=-1))


@cache
def _critical(expected: tuple[float, ...], n: int, tests: int) -> float:
    rng = np.random.default_rng(20240229)
    means = np.asarray(expected)
    p = means / means.sum()
    exact = np.concatenate([chi_square(rng.multinomial(n, p, size=1000), means) for _ in range(SIMULATIONS // 1000)])
    if tests == 1:
        return float(np.quantile(exact, 1 - LEVEL))
    # Further out than the simulations reach: a gamma law of their mean and variance (a scaled chi-square).
    scale = exact.var() / exact.mean()
    return float(gamma.ppf(1 - LEVEL / tests, exact.mean() / scale, scale=scale))


@dataclass(frozen=True)
class Fit:
    """Counts [C] against a law [C]: Pearson's chi-square with thin cells pooled, and where it becomes too large.

    tests: how many comparisons the test makes in all (Bonferroni). A sample where the law is zero never fits.
    """

    counts: np.ndarray
    law: np.ndarray
    tests: int = 1

    @property
    def n(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def bins(self) -> np.ndarray:
        """Cell -> bin [C]. Neighbouring thin cells (texts that begin alike) share a bin of at least THIN."""
        expected = self.law * self.n
        thin = expected < THIN
        bins = np.zeros(len(self.law), dtype=np.int64)
        pooled = np.floor(np.cumsum(expected[thin]) / (2 * THIN)).astype(np.int64)
        total = expected[thin].sum()
        bins[thin] = np.minimum(pooled, max(int(total / (2 * THIN)) - 1, 0))  # the last, incomplete bin joins another
        start = bins[thin].max() + 1 if thin.any() else 0
        bins[~thin] = start + np.arange(int((~thin).sum()))
        if total < THIN and not thin.all():  # too little for a bin of its own: it joins the smallest cell
            bins[thin] = bins[np.where(thin, np.inf, expected).argmin()]
            bins -= bins.min()
        return bins

    @cached_property
    def expected(self) -> np.ndarray:
        """Samples expected per bin."""
        return np.bincount(self.bins, weights=self.law) * self.n

    @cached_property
    def statistic(self) -> float:
        if self.counts[self.law == 0].any():
            return float("inf")
        return float(chi_square(np.bincount(self.bins, weights=self.counts), self.expected))

    @cached_property
    def distance(self) -> float:
        """Total variation between the samples' frequencies and the law, over all cells."""
        return float(np.abs(self.counts / self.n - self.law).sum() / 2)

    @cached_property
    def critical(self) -> float:
        """The 99.9 % quantile of the statistic over exact samples of the same size, corrected for `tests`."""
        return _critical(tuple(self.expected), self.n, self.tests)

    @property
    def holds(self) -> bool:
        return self.statistic < self.critical

    def __str__(self) -> str:
        return (
            f"chi-square {self.statistic:.0f}, critical {self.critical:.0f} ({len(self.expected)} bins, "
            f"n = {self.n}), total variation {self.distance:.3f}"
        )


def fit(samples: np.ndarray, law: np.ndarray, tests: int = 1) -> Fit:
    """Samples as cell indices [n] against a law [C]."""
    return Fit(np.bincount(samples, minlength=len(law)), law, tests)


def check_fit(result: Fit, record_property: Any, holds: bool = True) -> None:
    """Keep the result for scripts/measure_laws.py, and fail unless it is as it must be."""
    record_property("fit", str(result))
    assert result.holds == holds, str(result)
