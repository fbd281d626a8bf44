"""Block verification: the paper's example exactly, a slow oracle, the target's distribution, and a broken twin."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from specdec import DraftModel, PromptLookup, SpeculativeDecoder
from specdec.decoding.acceptance import LEVIATHAN, MATCH, Block, judge
from specdec.decoding.block_verification import BLOCK, block_acceptance, prefix_weights
from specdec.sampling.sampling import Purpose, Sampling, fold, streams, uniform
from tests.decoding.test_acceptance import make_block
from tests.helpers.laws import cell, check_fit, fit, small_model, three_token_law, three_tokens
from tests.helpers.playing import check_counts, quoting_ids, weaker
from tests.helpers.tiny import tiny_model

PROMPT, V = [5, 7, 5, 7, 5], 13


def one_distribution(p: list[float], q: list[float], drafts: torch.Tensor, final: bool = True) -> Block:
    """Rows whose tokens all have p and q, and drafts [n, k]."""
    n, k = drafts.shape
    ones = torch.ones(n, dtype=torch.int64)
    keys = fold(ones, torch.arange(n))
    return Block(
        scores=torch.tensor(p).log().expand(n, k + 1, -1).contiguous(),
        draft=torch.nn.functional.pad(drafts, (0, 1)), lengths=ones * k, totals=ones * k,
        final=torch.full((n,), final), keys=keys, round_keys=fold(keys, 3), positions=ones * 7, sampling=Sampling(1.0),
        q=torch.tensor(q).expand(n, k + 1, -1).contiguous(), has_q=torch.ones(n, dtype=torch.bool),
    )  # fmt: skip


def expected_length(p: list[float], q: list[float], k: int) -> float:
    """The mean accepted length over all drafts of k tokens, from the acceptance probabilities."""
    drafts = torch.tensor(list(product(range(len(p)), repeat=k)))
    chance = block_acceptance(one_distribution(p, q, drafts)).double().numpy()[:, :k]
    mean = 0.0
    for draft, h in zip(drafts.tolist(), chance, strict=True):
        longer = np.append(np.cumprod((1 - h)[::-1])[::-1], 1.0)  # P(no prefix from this length on)
        mean += float(np.prod([q[x] for x in draft])) * sum((i + 1) * h[i] * longer[i + 1] for i in range(k))
    return mean


def test_the_papers_example_comes_out_exactly() -> None:
    """Section 2 of the paper: p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 11/9 accepted, 10/9 token by token."""
    p, q = [1 / 3, 2 / 3], [2 / 3, 1 / 3]
    assert expected_length(p, q, 2) == pytest.approx(11 / 9, abs=1e-6)
    alpha = sum(map(min, p, q))
    assert alpha + alpha**2 == pytest.approx(10 / 9)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_no_draft_length_accepts_fewer_than_token_by_token(k: int) -> None:
    rng = np.random.default_rng(k)
    for _ in range(20):
        p, q = (rng.dirichlet([0.6] * 4).tolist() for _ in range(2))
        alpha = sum(map(min, p, q))
        assert expected_length(p, q, k) >= sum(alpha**i for i in range(1, k + 1)) - 1e-6


def oracle(block: Block, row: int) -> int:
    """How many drafted tokens of a row are accepted, in plain Python."""
    p, q = block.p[row].double().numpy(), block.q[row].double().numpy()  # type: ignore[index]
    length, x = int(block.lengths[row]), block.draft[row].tolist()
    keys = block.keys if block.round_keys is None else block.round_keys
    weight, accepted = 1.0, 0
    for i in range(1, length + 1):
        weight = min(1.0, weight * p[i - 1, x[i - 1]] / q[i - 1, x[i - 1]])
        chance = weight
        if i < length:
            rest = np.maximum(weight * p[i] - q[i], 0).sum()
            chance = rest / (rest + 1 - weight) if rest + 1 - weight > 0 else 0.0
        if float(uniform(streams(keys[row], block.positions[row] + i - 1, Purpose.ACCEPT))) < chance:
            accepted = i
    return accepted


@pytest.mark.parametrize("claim", ["all", "some"])
def test_decides_as_the_rule_reads(claim: str) -> None:
    compared = 0
    for seed in range(40):
        block = make_block(seed, (6, 5, 5), claim, score_kinds=("free", "cut", "like q"))
        assert block.q is not None
        assert block.has_q is not None
        block.q[:] = torch.softmax(block.q.clamp(min=1e-3).log() * 0.8, dim=-1)
        verdict = judge(block, BLOCK)
        plain = judge(replace(block, q=None, has_q=None), MATCH)
        for row in range(6):
            if bool(block.has_q[row]):
                assert int(verdict.accepted[row]) == oracle(block, row)
                compared += 1
            else:
                assert int(verdict.accepted[row]) == int(plain.accepted[row])
    assert compared > 80


def test_a_draft_from_the_targets_own_distribution_is_accepted_whole() -> None:
    block = one_distribution([0.2, 0.3, 0.5], [0.2, 0.3, 0.5], torch.tensor([[0, 1, 2]] * 50))
    assert (judge(replace(block, q=block.p), BLOCK).accepted == 3).all()


# -- in the engine -----------------------------------------------------------------------------------------------------


@cache
def pair() -> tuple[Any, Any]:
    return small_model(3, V), small_model(1, V)


def sampled(rule: Any, n: int, **options: Any) -> Any:
    decoder = SpeculativeDecoder(*pair(), check=False)
    return three_tokens(decoder, PROMPT, n, strategies=[DraftModel(n_max=3)], acceptance=rule, seed=1, **options)


def stale_coins(block: Block) -> torch.Tensor:
    """The rule with coins that belong to positions: those after a rejection come again in the next round."""
    if block.q is None:
        return MATCH.accepts(block)
    allowed = block.tested & (uniform(block.streams(Purpose.ACCEPT)) < block_acceptance(block))
    return block.columns < ((block.columns + 1) * allowed).amax(dim=-1, keepdim=True)


@pytest.mark.law
@pytest.mark.full
def test_coins_of_positions_are_rejected(record_property: Any) -> None:
    out = sampled(replace(BLOCK, accepts=stale_coins), 60_000)
    result = fit(cell(out.token_ids, V), three_token_law(pair()[0], PROMPT, 0.8))
    check_fit(result, record_property, holds=False)


def test_more_is_accepted_than_token_by_token() -> None:
    """Texts long enough that their end, where drafts are cut, weighs little."""
    decoder = SpeculativeDecoder(*pair(), check=False)
    found = []
    for rule in (BLOCK, LEVIATHAN):
        out = decoder.generate(
            [PROMPT] * 100, 40, strategies=[DraftModel(n_max=4)], acceptance=rule, temperature=0.8, seed=1,
            batch_size=100,
        )  # fmt: skip
        found.append(out.stats.tokens_per_round)
    assert found[0] > 1.01 * found[1]


def test_greedy_text_chunks_and_drafts_without_q() -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, weaker(model), check=False)
    prompts = [quoting_ids(30, 1), [4, 2]]
    plain = decoder.generate(prompts, 30, strategies=[])
    chain = [PromptLookup(ngram_max=1, n_max=6), DraftModel(n_max=24)]
    out = decoder.generate(prompts, 30, strategies=chain, acceptance="block")
    assert out.token_ids == plain.token_ids
    check_counts(out)
    long = decoder.generate(prompts, 30, strategies=[DraftModel(n_max=24)], acceptance="block", temperature=0.9, seed=3)
    check_counts(long)


def test_weights_are_the_joint_ratios() -> None:
    block = one_distribution([0.5, 0.5], [0.8, 0.2], torch.tensor([[0, 1, 0], [1, 1, 0]]))
    expected = [[1, 0.625, 1, 0.625], [1, 1, 1, 0.625]]
    torch.testing.assert_close(prefix_weights(block)[:, :4], torch.tensor(expected))
