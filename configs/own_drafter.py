"""A drafter and an acceptance rule of one's own: own_drafter:Repeat and own_drafter:near_best in own_drafter.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec import AcceptanceRule, Draft, Drafter, DraftRequest
from specdec.decoding.acceptance import MATCH, Block


@dataclass
class Repeat(Drafter):
    """Drafts what followed the newest token the last time that it occurred in the row."""

    n_max: int = 4  # a parameter: own_drafter:Repeat:n_max=8
    name = "repeat"  # in statistics
    runs_a_model = False

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(self._continuation(r), drafter=self.name) for r in requests]

    def _continuation(self, request: DraftRequest) -> list[int]:
        tokens = list(request.tokens)
        for i in reversed(range(len(tokens))):
            if tokens[i] == request.last:
                return tokens[i + 1 :][: request.limit(self.n_max)]
        return []


def near_best(share: float = 0.5) -> AcceptanceRule:
    """Accept a drafted token that has at least this share of the best token's probability: faster, and lossy."""

    def accepts(block: Block) -> Tensor:
        p = block.p.gather(-1, block.draft[..., None])[..., 0]  # [B, S]
        return p >= share * block.p.amax(dim=-1)

    return AcceptanceRule("near-best", "argmax", accepts, MATCH.next_token, lossy=True)
