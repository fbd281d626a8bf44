"""The seam for drafters that learn from the target: they see every pass, with hidden states and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

import specdec
from specdec.models.runner import PassOutput
from tests.helpers.tiny import tiny_model


@dataclass
class Watching:
    """Proposes fixed tokens and keeps, for each position of row 0, the last hidden state that it was shown."""

    proposal: Sequence[int]
    name: str = "watching"
    seen: dict[int, torch.Tensor] = field(default_factory=dict)

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        return None

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        return None

    def draft(self, requests: Sequence[specdec.DraftRequest]) -> list[specdec.Draft]:
        return [specdec.Draft(list(self.proposal)[: r.n_max], drafter=self.name) for r in requests]

    def observe(self, output: PassOutput) -> None:
        assert output.hidden is not None
        row = 0 - output.first_row
        if 0 <= row < len(output.counts):
            for column in range(output.counts[row]):
                self.seen[output.starts[row] + column] = output.hidden[-1][row, column]


def test_an_observer_sees_the_hidden_state_of_every_position() -> None:
    model = tiny_model("llama")
    watching = Watching([5, 7, 11])
    decoder = specdec.SpeculativeDecoder(model)
    out = decoder.generate([[1, 2, 3, 4, 5], [9, 8]], max_new_tokens=10, strategies=[watching])
    ids = [1, 2, 3, 4, 5, *out.token_ids[0]]
    with torch.no_grad():
        expected = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    for position in range(len(ids) - 1):  # the newest token has not been fed
        torch.testing.assert_close(watching.seen[position], expected[position], atol=1e-4, rtol=1e-4)


def test_a_tree_is_refused_of_a_strategy_that_does_not_announce_it() -> None:
    class Tree(Watching):
        def draft(self, requests: Sequence[specdec.DraftRequest]) -> list[specdec.Draft]:
            return [specdec.Draft([5, 7], parents=[-1, -1], drafter="tree") for _ in requests]

    with pytest.raises(specdec.SpecdecError, match="makes_trees"):
        specdec.SpeculativeDecoder(tiny_model("llama")).generate([1, 2, 3], max_new_tokens=4, strategies=[Tree([])])
