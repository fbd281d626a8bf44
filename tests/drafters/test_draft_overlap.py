"""Drafts that are made while the target verifies, on a guess at its token: the same drafts, some of them earlier."""

from __future__ import annotations

from typing import Any

import pytest

from specdec import SpecdecError, SpeculativeDecoder
from specdec.drafters import DraftModel
from tests.device.test_graphs import decoder
from tests.drafters.test_draft_ahead import CALLS, PROMPTS
from tests.helpers.recording import Rerun
from tests.helpers.tiny import tiny_model


def overlapping(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "strategies": [f"{name}:overlap=true" for name in options["strategies"]]}


@pytest.mark.fast(3, full=20)
@pytest.mark.parametrize("recorder", [None, Rerun])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("call", CALLS)
def test_drafts_on_a_guess_are_those_that_would_have_been_made(call: str, batch: int, recorder: Any) -> None:
    plain, found = decoder(), decoder(recorder)
    for prompts, length in ((PROMPTS, 16), (PROMPTS[1:3], 24)):
        options = {"ignore_eos": True, "batch_size": batch, **CALLS[call]}
        expected = plain.generate(prompts, length, **options)
        out = found.generate(prompts, length, **overlapping(options))
        assert out.token_ids == expected.token_ids
        assert out.stats.rows == expected.stats.rows  # drafted and accepted tokens of every round
        assert out.stats.verify_passes == expected.stats.verify_passes
    guesses = out.provenance["overlap"]["draft-model"]
    assert (guesses["guesses"] > 0) is (call not in ("p_min", "p_min, sampled", "processors", "more than a pass"))


def test_a_draft_that_is_the_target_guesses_right_and_drafts_nothing_twice() -> None:
    model = tiny_model("llama")
    dec = SpeculativeDecoder(model, model, check=False)
    out = dec.generate(PROMPTS[:1], 41, strategies=["draft-model:n_max=3:overlap=true"], ignore_eos=True)
    assert out.token_ids == dec.generate(PROMPTS[:1], 41, strategies=[], ignore_eos=True).token_ids
    guesses = out.provenance["overlap"]["draft-model"]
    assert guesses["right"] == guesses["guesses"] == out.stats.verify_passes - 2  # the first, and the last's room
    assert out.stats.host_reads == out.stats.verify_passes + guesses["guesses"]


def test_what_overlap_takes() -> None:
    with pytest.raises(SpecdecError, match="overlap must be True or False"):
        DraftModel(overlap=1)  # type: ignore[arg-type]
