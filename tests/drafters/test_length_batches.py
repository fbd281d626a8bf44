"""Automatic draft length in batches: row 19 of the known faults, speculation that loses where rows share passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specdec import CostTable
from specdec.drafters.base import DraftRequest
from specdec.drafters.length import LengthController
from specdec.research.offline.replay import replay
from tests.helpers.scripted import SHAPES, Scripted, ScriptedModel, controlled, run_batch, text

N = 192
BATCHES = (1, 2, 4, 8, 16, 32)


def wider(batch: int, slope: float) -> list[float]:
    """A pass at widths 1, 5, 9, 17: arithmetic that grows with all tokens beside a part that does not."""
    return [1 + 0.1 * (batch - 1) + slope * batch * (width - 1) / 4 for width in (1, 5, 9, 17)]


def batches(slope: float) -> CostTable:
    target = tuple((tuple(wider(b, slope)),) for b in BATCHES)
    return CostTable(target, batches=BATCHES, widths=(1, 5, 9, 17), calls={"scripted": 1e-4}, round=0.01)


@pytest.mark.fast(3, full=8)
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


@pytest.mark.parametrize("batch", [4, 8])
def test_one_row_that_begins_badly_does_not_end_the_drafting_of_all(batch: int) -> None:
    """The budget of a short row is little more than a plain round: one long draft for all took it, and with it all
    further drafts, although every later token would have been right."""
    costs, n = batches(0.06), 48
    scripts = [[False] * 4 + [True] * (n - 4), *[[True] * n] * (batch - 1)]
    plain = n * (costs.seconds("target", batch, 0, 1) + costs.round)
    assert plain / run_batch(scripts, costs, batch, n) > 3


# -- what drafting costs besides passes --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", BATCHES)
def test_probing_idle_rows_costs_a_small_part_of_the_rounds_of_all(batch: int) -> None:
    """A call for every row and round would take a sixth of a plain round of 32 rows here."""
    costs = replace(batches(0.3), calls={"scripted": 0.02})
    controller = LengthController([Scripted()], [True], costs, SHAPES, batch, free=True)
    rows = range(batch)
    probed: list[int] = []
    for size in range(40, 140):
        requests = [DraftRequest(row, np.arange(size), size, 400 - size, size) for row in rows]
        controller.open(requests)
        for row in rows:
            controller.budget[row] = 0.0  # nothing may be drafted
        probed += controller.ask(0, dict(enumerate(requests)))
        for row in rows:
            controller.accept(row, None, 0, 0)
    plain = costs.seconds("target", batch, 0, 1) + costs.round
    assert 0 < len(probed) * 0.02 <= 0.0055 * 100 * plain
    counts = np.bincount(probed, minlength=batch)  # and every row has its turn
    assert counts.min() == counts.max()


def test_no_draft_model_reads_prompts_that_its_drafts_will_hardly_earn_back() -> None:
    """Prompts are read row by row on a CPU: 16 of them take as long as 16 passes; a short text gives little back."""

    def drafts(batch: int, room: int) -> int:
        table = batches(0.06)
        passes = tuple((tuple(0.2 * t for t in block[0]),) for block in table.target)
        costs = replace(table, draft=passes)
        controller = LengthController([ScriptedModel([], costs)], [True], costs, SHAPES, batch, free=True)
        requests = [DraftRequest(row, np.arange(64), 64, room, 64) for row in range(batch)]
        lengths = 0
        for _ in range(20):  # also not as a trial after some rounds
            controller.open(requests)
            lengths += len(controller.ask(0, dict(enumerate(requests))))
            for row in range(batch):
                controller.accept(row, None, 0, 0)
        return lengths

    assert drafts(1, 47) > 0
    assert drafts(16, 7) == 0
    assert drafts(16, 2000) > 0


def test_idle_strategies_share_what_probing_may_cost() -> None:
    """Seven that never guess right: the bound holds for their chain as for one of them."""
    costs = replace(batches(0.06), calls={"scripted": 0.005})
    for n in (1, 7):
        chain = controlled([Scripted() for _ in range(n)], costs)
        records = replay(chain, *text(1000))
        calls = sum(c.n_call_draft for c in chain.counters.values())
        plain = costs.seconds("target", 1, 0, 1) + costs.round
        seconds = sum(costs.seconds("target", 1, 0, 1 + r.drafted) + costs.round for r in records) + 0.005 * calls
        assert seconds <= 1.03 * 1000 * plain


def test_a_strategy_whose_call_is_dear_is_probed_through_a_streak() -> None:
    """A call costs more than a round may spend on listening; soon after it starts to be right it is drafted."""
    costs = replace(batches(0.06), calls={"scripted": 0.015})
    records = replay(controlled([Scripted([False] * 200 + [True] * 200)], costs), *text(400))
    size, first = 0, None
    for record in records:
        if first is None and size >= 200 and record.drafted:
            first = size
        size += record.accepted + 1
    assert first is not None
    assert first < 260
