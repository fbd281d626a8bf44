"""Automatic draft length in batches: row 19 of the known faults, speculation that loses where rows share passes."""

from __future__ import annotations

import numpy as np
import pytest

from specdec import CostTable
from tests.helpers.scripted import run_batch

N = 192
BATCHES = (1, 2, 4, 8, 16, 32)


def wider(batch: int, slope: float) -> list[float]:
    """A pass at widths 1, 5, 9, 17: arithmetic that grows with all tokens beside a part that does not."""
    return [1 + 0.1 * (batch - 1) + slope * batch * (width - 1) / 4 for width in (1, 5, 9, 17)]


def batches(slope: float) -> CostTable:
    target = tuple((tuple(wider(b, slope)),) for b in BATCHES)
    return CostTable(target, batches=BATCHES, widths=(1, 5, 9, 17), calls={"scripted": 1e-4}, round=0.01)


@pytest.mark.parametrize("slope", [0.02, 0.06, 0.3], ids=["wide is cheap", "as on a CPU", "wide is dear"])
@pytest.mark.parametrize("batch", BATCHES)
def test_row_19_no_batch_takes_longer_than_plain_decoding_may(batch: int, slope: float) -> None:
    """Also where rows differ: drafts of a fast row make the passes of a slow one wider, and the call waits for it."""
    costs, rng = batches(slope), np.random.default_rng(batch)
    plain = N * (costs.seconds("target", batch, 0, 1) + costs.round)
    rows = {
        "never": [[False] * N] * batch, "always": [[True] * N] * batch,
        "one never": [[bool(i)] * N for i in range(batch)],
        "one always": [[not i] * N for i in range(batch)],
        "mixed": [[bool(x) for x in rng.random(N) < rng.random()] for _ in range(batch)],
    }  # fmt: skip
    gains = {name: plain / run_batch(scripts, costs, batch, N) for name, scripts in rows.items()}
    assert min(gains.values()) >= 0.97, gains
    assert gains["always"] > 1.5


def test_where_prompts_wait_a_fast_row_pays_for_a_slow_one() -> None:
    """Its slot is used again: with eight prompts a slot the whole is faster, although one row in four is slower."""
    costs = batches(0.06)
    scripts = [[i % 4 != 0] * N for i in range(32)]
    plain = 8 * N * (costs.seconds("target", 4, 0, 1) + costs.round)
    assert plain / run_batch(scripts, costs, 4, N) > 1.3
    assert plain / 8 / run_batch(scripts[:4], costs, 4, N) >= 0.97
