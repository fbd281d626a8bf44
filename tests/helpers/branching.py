"""A toy language for trees: next-token laws as tables, so that tens of thousands of rows are one acceptance call.

Tokens depend on the two before them. Trees are drawn from a draft's tables with specdec's own draw of siblings, judged
by specdec's own rules, and rows that came out too short are completed by exact draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.decoding.acceptance import AcceptanceRule, Block, Verdict, judge
from specdec.drafters.base import COUPLED
from specdec.drafters.siblings import sample_siblings
from specdec.models.trees import Tree, depths_of
from specdec.sampling.sampling import Purpose, Sampling, fold, race, streams

FIRST = 7  # position of the first token that is drafted
FAULTS = ("second-sibling-judged-by-plain-q", "stale-q", "prunes-low-q")


@dataclass(frozen=True)
class Language:
    """laws[d] [V**d, V]: the law of token d given the d tokens before it, as one index."""

    laws: tuple[Tensor, ...]

    @staticmethod
    def random(seed: int, vocab: int, depth: int = 4, cut: int = 0, faint: float = 0.0) -> Language:
        """Dirichlet laws; `cut`: so many tokens of each law have no probability, as a top-k leaves them, or `faint`, as
        a low temperature does."""
        rng = np.random.default_rng(seed)
        laws = []
        for d in range(depth):
            law = rng.dirichlet(np.full(vocab, 0.7), size=vocab**d)
            for row in law:
                row[np.argsort(row)[:cut]] = faint
            laws.append(torch.tensor(law / law.sum(axis=-1, keepdims=True), dtype=torch.float32))
        return Language(tuple(laws))

    @property
    def vocab(self) -> int:
        return self.laws[0].shape[1]

    def three_tokens(self) -> np.ndarray:
        """P(x1, x2, x3) as float64 [V**3]."""
        first, second, third = (law.double() for law in self.laws[:3])
        pair = (first[0][:, None] * second).reshape(-1)
        return (pair[:, None] * third).reshape(-1).numpy()


@dataclass
class Drafted:
    """n rows of one tree: tokens [n, N], q [n, N, V], and the context of each column [n, N + 1] as an index."""

    tokens: Tensor
    q: Tensor
    contexts: Tensor


def draft(language: Language, parents: tuple[int, ...], keys: Tensor, proposal: str, fault: str = "") -> Drafted:
    """Draw every node: a proposal of rules; argmax = the best tokens."""
    n, V, depths = len(keys), language.vocab, [0, *depths_of(parents)]
    tokens = torch.zeros((n, len(parents)), dtype=torch.int64)
    q, contexts = torch.zeros((n, len(parents), V)), torch.zeros((n, len(parents) + 1), dtype=torch.int64)
    for column in range(len(parents) + 1):
        nodes = [node for node, parent in enumerate(parents) if parent + 1 == column]
        depth = depths[column]
        if not nodes:
            continue
        law = language.laws[depth][contexts[:, column]]
        shared, independent = proposal in COUPLED, "independent" in proposal
        stream = streams(keys, torch.tensor(FIRST + depth), Purpose.SAMPLE if shared else Purpose.DRAFT)
        drawn, laws = sample_siblings(law, stream if shared else fold(stream, column), len(nodes), independent)
        if proposal == "argmax":
            drawn = law.topk(len(nodes)).indices
        if fault == "second-sibling-judged-by-plain-q":
            laws = law[:, None].expand_as(laws)
        if fault == "stale-q" and depth > 0:
            laws = sample_siblings(language.laws[0].expand(n, -1), stream, len(nodes))[1]
        if fault == "fills-up":  # with tokens that nothing was left to draw from
            laws = torch.where(laws.amax(dim=2, keepdim=True) > 0, laws, 1 / V)
        if fault == "prunes-low-q":  # a node of no law never stands: it might as well not have been proposed
            likely = laws.gather(2, drawn[..., None])
            laws = torch.where(likely < 0.3, 0.0, laws)
        for j, node in enumerate(nodes):
            tokens[:, node], q[:, node] = drawn[:, j], laws[:, j]
            contexts[:, node + 1] = contexts[:, column] * V + drawn[:, j]
    return Drafted(tokens, q, contexts)


def block_of(target: Language, parents: tuple[int, ...], made: Drafted, keys: Tensor, claims: bool) -> Block:
    """The pass that verifies the trees."""
    n, width = len(keys), len(parents) + 1
    laws = [target.laws[d][made.contexts[:, c]] for c, d in enumerate([0, *depths_of(parents)])]
    pad = torch.nn.functional.pad
    lengths = torch.full((n,), len(parents))
    return Block(
        scores=torch.stack(laws, dim=1).log(), draft=pad(made.tokens, (0, 1)), lengths=lengths,
        final=torch.ones(n, dtype=torch.bool), totals=lengths, keys=keys, positions=torch.full((n,), FIRST),
        sampling=Sampling(1.0), q=pad(made.q, (0, 0, 0, 1)) if claims else None,
        has_q=torch.ones(n, dtype=torch.bool) if claims else None, all_have_q=claims,
        tree=Tree.of_rows([parents] * n, width, torch.device("cpu")),
    )  # fmt: skip


def sample(
    target: Language, source: Language, parents: tuple[int, ...], rule: AcceptanceRule, n: int, fault: str = "",
    proposal: str | None = None, claims: bool | None = None, seed: int = 0,
) -> tuple[np.ndarray, Verdict]:  # fmt: skip
    """n samples of three tokens, as cells of `three_tokens`, and the verdict on the trees."""
    keys = fold(torch.full((n,), seed), torch.arange(n))
    proposal = proposal or rule.proposal
    made = draft(source, parents, keys, proposal, fault)
    block = block_of(target, parents, made, keys, proposal in ("sample", "independent") if claims is None else claims)
    if rule.pick_child is None:  # it judges chains only, which these must then be
        block.tree = None
    verdict = judge(block, rule)
    out, _ = verdict.emitted(block.draft)
    out = torch.nn.functional.pad(out, (0, 3))[:, :3]
    context = torch.zeros(n, dtype=torch.int64)
    for d in range(3):
        plain = race(target.laws[d][context], streams(fold(keys, 99), torch.tensor(d), Purpose.SAMPLE))
        out[:, d] = torch.where(verdict.accepted + 1 > d, out[:, d], plain)
        context = context * target.vocab + out[:, d]
    return context.numpy(), verdict
