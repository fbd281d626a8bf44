"""Acceptance rules and drafters that are wrong on purpose, in the ways that real ones have been wrong.

Tests that claim losslessness must reject every one of them. `SampledDrafter` without a fault is right: it shows that
the controls are rejected for their fault and not for the way they are built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.decoding.acceptance import COUPLED, LEVIATHAN, MATCH, AcceptanceRule, Block, children_of, own_token
from specdec.decoding.block_verification import BLOCK, prefix_weights
from specdec.decoding.multi_draft import EAGLE, GUMBEL_LIST
from specdec.drafters.base import Draft, DraftRequest
from specdec.sampling.sampling import Purpose, fold, race, streams, uniform


def _at(values: Tensor, accepted: Tensor) -> Tensor:
    return values[torch.arange(len(values)), accepted]


def _rejected(block: Block, accepted: Tensor) -> Tensor:
    return (accepted < block.lengths)[:, None]


def _draw(block: Block, accepted: Tensor, weights: Tensor) -> Tensor:
    """The weights where a draft was rejected, the target's law elsewhere."""
    p = _at(block.p, accepted)
    use = _rejected(block, accepted) & (weights.sum(dim=-1, keepdim=True) > 0)
    stream = torch.where(
        _rejected(block, accepted)[:, 0],
        _at(block.streams(Purpose.RESIDUAL), accepted),
        _at(block.streams(Purpose.SAMPLE), accepted),
    )
    return race(torch.where(use, weights, p), stream)


def _all_stand(block: Block) -> Tensor:
    return torch.ones_like(block.draft, dtype=torch.bool)


def _follow_target(block: Block, accepted: Tensor) -> Tensor:
    return _draw(block, accepted, _at(block.p, accepted))


def _follow_ranked(block: Block, accepted: Tensor) -> Tensor:
    """p minus q, both sorted by probability: what subtracting two candidate arrays index by index does."""
    if block.q is None:
        return LEVIATHAN.next_token(block, accepted)
    p, q = _at(block.p, accepted), _at(block.q, accepted)
    ranked, ids = p.sort(dim=-1, descending=True)
    residual = (ranked - q.sort(dim=-1, descending=True).values).clamp(min=0)
    return _draw(block, accepted, torch.zeros_like(p).scatter(-1, ids, residual))


def _descend_by_plain_law(block: Block, column: Tensor) -> Tensor:
    """Every sibling is held against p itself: no residual in between."""
    if block.q is None:
        return MATCH.pick_child(block, column)  # type: ignore[misc]
    assert block.tree is not None
    position = block.positions + _at(block.tree.depths, column)
    law, found = _at(block.p, column), torch.zeros_like(column)
    for i, (child, node, exists) in enumerate(children_of(block, column)):
        coin = uniform(fold(streams(block.keys, position, Purpose.ACCEPT), i))
        token, q = _at(block.draft, node)[:, None], _at(block.q, node)
        stands = exists & (found == 0) & (coin * q.gather(1, token)[:, 0] < law.gather(1, token)[:, 0])
        found = torch.where(stands, child, found)
    return found


def _follow_target_in_tree(block: Block, column: Tensor) -> Tensor:
    assert block.tree is not None
    position = block.positions + _at(block.tree.depths, column)
    return race(_at(block.p, column), streams(block.keys, position, Purpose.RESIDUAL))


BROKEN_TREE_RULES = {
    rule.name: rule
    for rule in (
        AcceptanceRule(
            "no-residual-between-siblings",
            "sample",
            LEVIATHAN.accepts,
            LEVIATHAN.next_token,
            True,
            _descend_by_plain_law,
        ),
        AcceptanceRule(
            "no-residual-after-siblings",
            "sample",
            LEVIATHAN.accepts,
            _follow_target_in_tree,
            True,
            LEVIATHAN.pick_child,
        ),
    )
}

BROKEN_RULES = {
    rule.name: rule
    for rule in (
        AcceptanceRule("accept-all", "sample", _all_stand, LEVIATHAN.next_token, lossy=True),
        AcceptanceRule("no-residual", "sample", LEVIATHAN.accepts, _follow_target, lossy=True),
        AcceptanceRule("residual-by-rank", "sample", LEVIATHAN.accepts, _follow_ranked, lossy=True),
    )
}


def _by_weight(block: Block) -> Tensor:
    """Accepts the longest prefix by its joint ratio alone, which is right for the last token only."""
    if block.q is None:
        return MATCH.accepts(block)
    coins = uniform(block.streams(Purpose.ACCEPT, fresh=True))
    allowed = block.tested & (coins < prefix_weights(block)[:, 1:])
    return block.columns < ((block.columns + 1) * allowed).amax(dim=-1, keepdim=True)


# Rule -> fault -> the rule with it. Every lossless rule of the package has one at least.
TWINS: dict[str, dict[str, AcceptanceRule]] = {
    "match": {"accepts all": AcceptanceRule("all", "argmax", _all_stand, own_token)},
    "coupled": {"accepts all": AcceptanceRule("all", "coupled", _all_stand, own_token)},
    "leviathan": {**BROKEN_RULES, "no residual between": BROKEN_TREE_RULES["no-residual-between-siblings"]},
    "block": {"accepts by weight": replace(BLOCK, accepts=_by_weight)},
    "specinfer": {"no residual": replace(BROKEN_TREE_RULES["no-residual-between-siblings"], proposal="independent")},
    "gumbel-list": {"token of the first list": replace(GUMBEL_LIST, next_token=COUPLED.next_token)},
    "eagle": {"no residual": replace(EAGLE, next_token=own_token)},
}

FAULTS = (
    "argmax-judged-as-sampled",  # proposes the argmax and claims q, so that it is accepted with p / q
    "stale-q",  # claims the law of the position before
    "drops-low-q",  # a sampled token is taken back because its q is low
    "n-min-discards",  # a sampled draft is thrown away because it became too short
    "reuses-noise",  # numbers keyed by position alone, and a controller that has seen what they gave the last time
)


# Draws from a larger vocabulary, ends the draft at a token outside, and claims the rest of that law, which is none.
CUTS_OUTSIDE = "cuts-outside-vocabulary"


class SampledDrafter:
    """Samples from a model with full forward passes, from a torch generator of its own; claims q. A `fault` breaks it.

    `vocab`: the target's. `keyed`: counter-based numbers and a controller of lengths. `p_min` ends a draft before a
    position where the top probability is lower, as it may.
    """

    name = "sampled"

    def __init__(
        self, model: Any, vocab: int, fault: str | None = None, n_max: int = 2, temperature: float = 0.8,
        keyed: bool = False,
    ):  # fmt: skip
        self.keyed = keyed or fault == "reuses-noise"  # counter-based numbers, and a controller
        self.model, self.vocab, self.fault, self.n_max, self.temperature = model, vocab, fault, n_max, temperature
        self.p_min = 0.28 if fault == "n-min-discards" else 0.0
        self.generator = torch.Generator().manual_seed(7)
        self.seen: dict[int, dict[int, int]] = {}  # row -> position -> what was last drafted there

    def begin(self, row: int, prompt: Any) -> None:
        self.seen.pop(row, None)

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        return None

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        texts = [[*map(int, r.tokens), int(r.last)] for r in requests]
        laws, tokens = [], []
        for _ in range(self.n_max):
            law = self._law(texts)
            if self.fault == "argmax-judged-as-sampled":
                token = law.argmax(dim=-1)
            elif self.fault in ("reuses-noise", None) and self.keyed:
                token = race(law, self._streams(requests, texts))
            else:
                token = self._sample(law)
            for text, x in zip(texts, token.tolist(), strict=True):
                text.append(x)
            laws.append(law)
            tokens.append(token)
        claims = [laws[0], *laws[:-1]] if self.fault == "stale-q" else laws
        q, drawn = torch.stack(claims, dim=1), torch.stack(tokens, dim=1)
        limits = [min(self.n_max, r.n_max) if self._wanted(r) else 0 for r in requests]
        for r, row in zip(requests, drawn.tolist(), strict=True):
            self.seen[r.row] = {len(r.tokens) + 1 + i: token for i, token in enumerate(row)}
        return [self._draft(q[i], drawn[i], limits[i]) for i in range(len(requests))]

    def _streams(self, requests: Sequence[DraftRequest], texts: list[list[int]]) -> Tensor:
        fresh = self.fault is None
        keys = [r.noise.round_key if fresh else r.noise.key for r in requests if r.noise is not None]
        return streams(torch.tensor(keys), torch.tensor([len(text) for text in texts]), Purpose.DRAFT)

    def _wanted(self, request: DraftRequest) -> bool:
        """The controller: not after a low id at this position, which lay behind the last round's rejection."""
        last = self.seen.get(request.row, {}).get(len(request.tokens) + 1)
        return not self.keyed or last is None or last >= self.vocab // 2

    @torch.no_grad()
    def _law(self, texts: list[list[int]]) -> Tensor:
        width = max(map(len, texts))
        ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        last = torch.tensor([len(text) - 1 for text in texts])
        logits = self.model(input_ids=ids, use_cache=False).logits[torch.arange(len(texts)), last]
        if self.fault != "cuts-outside-vocabulary":
            logits = logits[:, : self.vocab]
        return torch.softmax(logits / self.temperature, dim=-1)

    def _sample(self, law: Tensor) -> Tensor:
        return torch.multinomial(law, 1, generator=self.generator)[:, 0]

    def _draft(self, q: Tensor, tokens: Tensor, limit: int) -> Draft:
        length = 0
        while length < limit and self._goes_on(q[length], int(tokens[length])):
            length += 1
        if self.fault == "n-min-discards" and length < limit:
            length = 0
        return Draft(tokens[:length].tolist(), None, q[:length, : self.vocab], self.name)

    def _goes_on(self, law: Tensor, token: int) -> bool:
        if self.fault == "drops-low-q" and float(law[token]) < 0.2:
            return False
        return token < self.vocab and float(law.max()) >= self.p_min
