"""What a drafter is asked for and what it returns: `DraftRequest` and `Draft`, which are data.

A draft with q (the distribution its tokens were sampled from) is lossless under one condition: the choice to propose
position i may depend on the tokens before it and on q_i, never on the sampled token x_i or anything later. A draft with
`q=None` is always lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specdec.models.trees import depths_of
from specdec.sampling.sampling import Purpose, Sampling
from specdec.sampling.texts import Drafted, Known, KnownTexts

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

Tokens = Sequence[int] | np.ndarray
COUPLED = ("coupled", "coupled-independent")  # proposals that are sampled with the target's own random numbers


@dataclass(frozen=True)
class RowNoise:
    """Keys of a row's random numbers.

    key: the row's, for noise shared with the target
    round_key: changes every round, so that a redrafted position gets fresh noise under leviathan
    """

    key: int
    round_key: int


@dataclass(frozen=True)
class RowSampling:
    """How the target is sampled in a row, so that a drafter's q is comparable with p.

    sampling: the call's pipeline from logits to scores
    proposal: what the acceptance rule wants of model drafters (`AcceptanceRule.proposal`)
    processors: the row's text-reading processors, or None
    texts: the known texts of all rows, for these processors, or None
    """

    sampling: Sampling
    proposal: str
    processors: LogitsProcessorList | None = None
    texts: KnownTexts | None = None

    @property
    def signature(self) -> Any:
        """Equal if the same is computed from equal inputs; None if that cannot be told, so that nothing is recorded."""
        return self.sampling.signature_with(self.texts)

    def known(self, columns: int, device: torch.device) -> Known | None:
        """Return the first ids of all rows, for recorded functions; None: no processor reads texts."""
        return None if self.texts is None else self.texts.known(columns, device)

    def drafted(self, known: Known | None, lengths: Tensor, requests: Sequence[DraftRequest]) -> Drafted | None:
        """Return the texts of rows whose chains begin; None: no processor reads them.

        lengths [B]: known ids of each row
        requests: of these rows; looked at only where processors are called on the host
        """
        if self.texts is None or known is None:
            return None
        return Drafted(self.texts, known, lengths, {r.row: r.known for r in requests})

    @property
    def sampled(self) -> bool:
        """True if proposals are sampled from q; else they are its argmax."""
        return self.proposal != "argmax" and not self.sampling.greedy

    @property
    def drawn(self) -> bool:
        """`sampled`, by its name until version 0.1."""
        return self.sampled

    @property
    def independent(self) -> bool:
        """True if siblings are independent samples of q; else they are sampled without replacement."""
        return self.proposal in ("independent", "coupled-independent")

    @property
    def purpose(self) -> Purpose:
        """Purpose of the proposals' random numbers: the target's own under coupled proposals."""
        return Purpose.SAMPLE if self.proposal in COUPLED else Purpose.DRAFT

    def streams(self, noise: RowNoise) -> tuple[int, Purpose]:
        """Return key and purpose of the proposals' random numbers: the target's if coupled, else new every round."""
        return noise.key if self.proposal in COUPLED else noise.round_key, self.purpose


@dataclass(frozen=True)
class DraftRequest:
    """One row that needs a draft.

    row: slot number
    tokens: the row's ids without the newest
    last: the newest id
    n_max: most tokens to propose; <= 0: no limit
    position: sequence index of `last` (= len(tokens))
    sampling, noise: for drafters that sample
    """

    row: int
    tokens: Tokens
    last: int
    n_max: int = 0
    position: int = -1
    sampling: RowSampling | None = None
    noise: RowNoise | None = None

    @property
    def known(self) -> int:
        """How many of the target's ids are known, the newest included."""
        return 1 + (len(self.tokens) if self.position < 0 else self.position)

    def limit(self, own: int) -> int:
        """Return the most tokens to propose for a strategy whose own limit is `own`."""
        return own if self.n_max <= 0 else min(own, self.n_max)

    def up_to(self, n: int) -> DraftRequest:
        """Return the same request with another n_max."""
        # Spelt out: dataclasses.replace is slow enough to show in rounds of many rows.
        return DraftRequest(self.row, self.tokens, self.last, n, self.position, self.sampling, self.noise)


@dataclass(frozen=True)
class Draft:
    """Proposed tokens: a chain, or a tree of nodes.

    tokens [k]: ids, a list or an int64 tensor on any device; in a tensor a node of a tree can be `trees.MISSING`: its
        parent's distribution had no token for it, and it does not count
    parents [k]: for a tree the node that each node follows, -1 = the row's newest token, parents before children and
        siblings in order of proposal; a list, or an int64 tensor with `levels` and `siblings`; None: a chain
    q [k, V]: float32 over the target's vocabulary, the distribution that each token was really sampled from; for
        siblings sampled without replacement it lacks the earlier ones, renormalised; a row of zeros = the node was not
        sampled and only fills its place; None: no token was sampled
    drafter: the strategy's name
    length: a 0-d int64 tensor if only the device knows how many of `tokens` a chain proposes
    levels, siblings: bounds of levels and of children per node, if the parents are on the device
    states [k + 1, H], layers: what the target's first `layers` layers made of the newest token and of each of `tokens`,
        whose keys and values of these layers are in its cache: the verify pass may go on from there; None: unknown
    """

    tokens: Sequence[int] | Tensor = ()
    parents: Sequence[int] | Tensor | None = None
    q: Tensor | None = None
    drafter: str = ""
    length: Tensor | None = None
    levels: int = 0
    siblings: int = 0
    states: Tensor | None = None
    layers: int = 0

    def __len__(self) -> int:
        # A tensor's own len() is slow enough to show in rounds of many rows.
        return self.tokens.shape[0] if isinstance(self.tokens, Tensor) else len(self.tokens)

    def truncated(self, n_max: int) -> Draft:
        """Return the first `n_max` tokens of a chain; for a tree the nodes before the first that is deeper.

        Levels of a tree on the device are limited instead: none deeper than `n_max` is accepted.
        """
        if isinstance(self.parents, Tensor):
            return replace(self, levels=min(self.levels, n_max))
        if self.parents is not None:
            deeper = [node for node, depth in enumerate(depths_of(self.parents)) if depth > n_max]
            return self.first(deeper[0]) if deeper else self
        return self.first(n_max)

    def first(self, n: int) -> Draft:
        """Return the first `n` tokens or nodes. The cut depends on places, never on sampled tokens."""
        if len(self) <= n:
            return self
        length = None if self.length is None else self.length.clamp(max=n)
        q = None if self.q is None else self.q[:n]
        parents = None if self.parents is None else self.parents[:n]
        return replace(self, tokens=self.tokens[:n], parents=parents, q=q, length=length)

    def rest(self, start: int, actual: int) -> Draft:
        """Return what is left of a chain after `start` of `actual` proposed tokens were accepted."""
        q = None if self.q is None else self.q[start:actual]
        return Draft(self.tokens[start:actual], None, q, self.drafter)


def as_array(tokens: Tokens) -> np.ndarray:
    """Return token ids as int64 [n], without a copy if they already are."""
    return np.asarray(tokens, dtype=np.int64)


NO_DRAFT = Draft()


def empty_like(requests: Sequence[DraftRequest]) -> list[Draft]:
    """Make an empty draft per request."""
    return [Draft() for _ in requests]


def pad_vocabulary(logits: Tensor, vocab_size: int, excluded: Tensor | None = None) -> Tensor:
    """Map draft logits [..., V_draft] to the target's vocabulary [..., vocab_size].

    Ids that the target lacks, and `excluded` [n] that mean another text to it, are removed *before* anything is
    sampled, and ids that the draft lacks get probability 0: cutting a draft at a sampled token would change the
    distribution of the output.
    """
    if excluded is not None:
        logits = logits.index_fill(-1, excluded, float("-inf"))
    width = logits.shape[-1]
    if width >= vocab_size:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - width), value=float("-inf"))


def proposal_distribution(scores: Tensor) -> Tensor:
    """Compute q [..., V] from scores [..., V].

    If the draft is broken (NaN, +inf or nothing but -inf), q is all on id 0: a true q, which costs acceptance only.
    """
    sound = scores.amax(dim=-1, keepdim=True).isfinite()
    first = torch.arange(scores.shape[-1], device=scores.device) == 0
    return torch.softmax(torch.where(sound, scores, torch.where(first, 0.0, float("-inf"))), dim=-1)
