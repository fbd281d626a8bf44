"""Automatic length under leviathan: samples follow the enumerated law, and with controllers that see too much they
do not.

What survives a round may know positions up to the first rejection and no more: the coins of acceptance are keyed by
position, so a controller that knows how a coin behind the rejection fell picks the drafts that will stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import CostTable, Draft, DraftModel, DraftRequest, PromptLookup, SpeculativeDecoder
from specdec.decoding import call as call_module
from specdec.decoding.acceptance import LEVIATHAN, AcceptanceRule, Block
from specdec.decoding.result import Generation
from specdec.drafters import length
from specdec.drafters.length import LengthController
from specdec.sampling.sampling import Purpose, uniform
from tests.helpers.laws import Fit, cell, check_fit, fit, samples, small_model, three_token_law, three_tokens

V = 13
PROMPT = [5, 7, 5, 7, 5]
SAMPLES, CONTROL_SAMPLES = samples(6_000, 2_000), 3_000
# Two tokens look best at first, and one no longer worth it after a rejection; so lengths change within three tokens.
COSTS = CostTable((((1.0, 1.5, 1.7),),), (((0.05, 0.1, 0.15),),), widths=(1, 2, 3))


@pytest.fixture(autouse=True)
def _bold(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three tokens are worth no budget; and passes of a tiny model are faster on one thread."""
    monkeypatch.setattr(length, "_MAY_LOSE", 10.0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Ahead(DraftModel):
    """Its lengths are chosen before the verdict on the last draft, as where drafts start before it."""

    can_pipeline = True

    def pipeline(self, *arguments: Any, **options: Any) -> bool:
        return False


def sample(strategies: Any, n: int, rule: AcceptanceRule | str = "leviathan", flat: bool = False) -> Generation:
    """n samples of three tokens. flat: a draft that thinks all tokens equally likely."""
    draft = small_model(1, V)
    if flat:
        with torch.no_grad():
            draft.lm_head.weight.zero_()
    decoder = SpeculativeDecoder(small_model(3, V), draft, strategies=[], check=False, costs=COSTS)
    return three_tokens(decoder, PROMPT, n, strategies=strategies, acceptance=rule, draft_length="auto")


def fitted(out: Generation) -> Fit:
    return fit(cell(out.token_ids, V), three_token_law(small_model(3, V), PROMPT, 0.8))


@pytest.mark.law
@pytest.mark.fast(1, again=True)
@pytest.mark.parametrize(
    "strategies",
    [[DraftModel()], [DraftModel(p_min=0.22)], [PromptLookup(), DraftModel()], [Ahead()]],
    ids=["model", "p_min", "chain", "ahead"],
)
def test_the_first_three_tokens_follow_the_targets_law_with_automatic_length(
    strategies: list[Any], record_property: Any
) -> None:
    out = sample(strategies, SAMPLES)
    result = fitted(out)
    check_fit(result, record_property)
    counts = out.stats.counters["draft-model"]
    if not isinstance(strategies[0], Ahead):  # which learns too late for three tokens
        assert counts.n_skipped > SAMPLES / 20  # lengths did change within the three tokens
    assert sum(counts.n_asked_per_length[1:]) > SAMPLES / 10
    assert out.stats.accepted_tokens > SAMPLES / 20


# -- negative controls -----------------------------------------------------------------------------------------------

SEEN: list[Tensor] = []  # the coins of the newest pass, [B, S]: also behind the first rejection


def _stands(block: Block) -> Tensor:
    SEEN[:] = [uniform(block.streams(Purpose.ACCEPT))]
    return LEVIATHAN.accepts(block)


WATCHED = AcceptanceRule("watched", "sample", _stands, LEVIATHAN.next_token, pick_child=LEVIATHAN.pick_child)


class LooksBehindTheRejection(LengthController):
    """Drafts where the coin behind the last rejection lets most drafts stand."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.stands: dict[int, bool] = {}

    def begin(self, row: int) -> None:
        super().begin(row)
        self.stands.pop(row, None)

    def accept(self, row: int, winner: int | None, n_accepted: int, drafted: int) -> None:
        super().accept(row, winner, n_accepted, drafted)
        if n_accepted + 1 < drafted:
            self.stands[row] = bool(SEEN[0][row, n_accepted + 1] < 0.5)

    def _choose(self, index: int, rows: Any) -> int:
        return min(rows[0].n_max, 2) if self.stands.get(rows[0].row, True) else 0


class CutsByWhatWasDrawn(LengthController):
    """Takes back drawn tokens that the draft thought unlikely."""

    def cut(self, index: int, request: DraftRequest, draft: Draft) -> Draft:
        draft = super().cut(index, request, draft)
        if draft.q is None:
            return draft
        chances = draft.q.gather(1, draft.tokens[:, None])[:, 0]  # type: ignore[index]
        unlikely = torch.nonzero(chances < 0.2)
        return draft.first(int(unlikely[0])) if len(unlikely) else draft


class LooksNoFurther(LooksBehindTheRejection):
    """The same controller, fed with what it may know: whether a token was rejected at all."""

    def accept(self, row: int, winner: int | None, n_accepted: int, drafted: int) -> None:
        LengthController.accept(self, row, winner, n_accepted, drafted)
        self.stands[row] = n_accepted == drafted


CONTROLS = {
    "looks behind the rejection": (LooksBehindTheRejection, True, False),
    "the same, looks no further": (LooksNoFurther, True, True),
    "cuts by what was drawn": (CutsByWhatWasDrawn, False, False),
}


@pytest.mark.law
@pytest.mark.full
@pytest.mark.parametrize("name", CONTROLS)
def test_a_controller_that_sees_too_much_is_rejected(
    name: str, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    controller, flat, holds = CONTROLS[name]
    monkeypatch.setattr(call_module, "LengthController", controller)
    result = fitted(sample([DraftModel()], CONTROL_SAMPLES * (5 if flat else 1), WATCHED, flat))
    check_fit(result, record_property, holds)
