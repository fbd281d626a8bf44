"""Acceptance of trees: against a slow walk in numpy, and against enumerated laws, with broken rules as controls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import theory
from specdec.decoding.acceptance import COUPLED, LEVIATHAN, MATCH, AcceptanceRule, Block, judge
from specdec.decoding.block_verification import BLOCK
from specdec.decoding.multi_draft import EAGLE, GUMBEL_LIST, SPECINFER
from specdec.drafters.siblings import LEAST, sample_siblings
from specdec.drafters.tree_plan import plan_parents
from specdec.errors import SpecdecError
from specdec.models.trees import Parents, Tree, chain_parents
from specdec.sampling.sampling import Purpose, Sampling, exponential, fold, race, streams, uniform
from tests.decoding.test_acceptance import check, make_block
from tests.helpers.branching import FAULTS, FIRST, Language, block_of, draft, sample
from tests.helpers.broken import BROKEN_RULES, BROKEN_TREE_RULES
from tests.helpers.laws import check_fit, fit, samples

V = 6
TARGET, SOURCE = Language.random(1, V), Language.random(2, V)
SAMPLES, CONTROL_SAMPLES = samples(20_000, 20_000), 20_000


# -- the walk, against an oracle -------------------------------------------------------------------------------------


def tree_block(seed: int, rows: int, width: int, vocab: int, claim: str, greedy: bool) -> tuple[Block, list[Parents]]:
    """Rows with random trees, beside rows with chains that may fill their pass and go on."""
    block = make_block(seed, (rows, width, vocab), claim, greedy)
    rng = np.random.default_rng(seed)
    parents: list[Parents] = []
    for b in range(rows):
        if rng.random() < 0.3:  # a chain, as long as make_block made it
            parents.append(chain_parents(int(block.lengths[b])))
            continue
        nodes = int(rng.integers(0, width))
        reach = int(rng.integers(1, 4))  # 1: bushy near the root; more: deeper
        parents.append(tuple(int(rng.integers(max(-1, i - reach), i)) for i in range(nodes)))
        block.lengths[b], block.totals[b], block.final[b] = nodes, nodes, True
        for node, parent in enumerate(parents[b]):
            if rng.random() < 0.5:  # so that walks get past the first level
                block.draft[b, node] = (
                    block.own[b, 0] if parent < 0 else block.scores[b, parent + 1].nan_to_num().argmax()
                )
            if block.q is not None and rng.random() < 0.2:  # p = q
                block.q[b, node] = block.p[b, parent + 1].nan_to_num(1 / vocab)
            if block.q is not None and rng.random() < 0.1:  # a node that was drawn from nothing
                block.q[b, node] = 0
    layout = Tree.of_rows(parents, width, torch.device("cpu"))
    fresh = {name: getattr(block, name) for name in ("scores", "draft", "lengths", "final", "totals", "q", "has_q")}
    return replace(block, **fresh, tree=layout), parents


@dataclass
class Noise:
    """Numbers by row and depth: unit exponentials [B, D, V] of the two kinds of draws, and coins [B, D, siblings]."""

    own: np.ndarray
    residual: np.ndarray
    coins: np.ndarray

    @staticmethod
    def of(block: Block) -> Noise:
        width, vocab = block.scores.shape[1:]
        where = block.positions[:, None] + torch.arange(width + 1)
        own, residual, accept = (
            streams(block.keys[:, None], where, u) for u in (Purpose.SAMPLE, Purpose.RESIDUAL, Purpose.ACCEPT)
        )
        coins = [accept, *(fold(accept, i) for i in range(1, width + 1))]
        return Noise(
            exponential(own, vocab).numpy(),
            exponential(residual, vocab).numpy(),
            torch.stack([uniform(c) for c in coins], dim=-1).numpy(),
        )


def oracle_walk(
    block: Block, parents: Parents, row: int, by_ratio: bool, noise: Noise
) -> tuple[list[int], int | None, bool]:
    """(nodes that stand, token or None where none is due, failed) of one row, in plain Python."""
    scores, p = block.scores[row].numpy(), block.p[row].numpy()
    claims = by_ratio and not block.sampling.greedy and block.has_q is not None and bool(block.has_q[row])
    path: list[int] = []
    while True:
        column = path[-1] + 1 if path else 0
        if column == len(scores):  # a chain that fills its pass
            return path, None, False
        depth = len(path)
        children = [i for i, parent in enumerate(parents) if parent + 1 == column]
        ends = not children and not bool(block.final[row]) and len(path) == int(block.lengths[row])
        if ends:
            return path, None, False
        if np.isnan(scores[column]).any() or not np.isfinite(scores[column].max()):
            return path, None, True
        law, rejected, chosen = p[column], False, None
        own = int(scores[column].argmax()) if block.sampling.greedy else _race(law, noise.own[row, depth])
        for i, node in enumerate(children):
            token = int(block.draft[row, node])
            if not claims:
                stands = token == own
            else:
                q = block.q[row, node].numpy()  # type: ignore[index]
                coin = noise.coins[row, depth, i]
                stands = bool(q.max() > 0) and coin * q[token] < law[token]
                if not stands:
                    rejected = True
                    rest = np.maximum(law - q, 0)
                    law = rest / rest.sum() if rest.sum() > 0 else law
            if stands:
                chosen = node
                break
        if chosen is None:
            return path, _race(law, noise.residual[row, depth]) if rejected else own, False
        path.append(chosen)


def _race(weights: np.ndarray, times: np.ndarray) -> int:
    finish = [float(times[x]) / float(weights[x]) if weights[x] > 0 else np.inf for x in range(len(weights))]
    return int(np.argmin(finish))


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 7), st.integers(2, 6), st.sampled_from(["none", "some", "all-known"]))
def test_walks_decide_as_a_slow_reading_of_the_rules(seed: int, width: int, vocab: int, claim: str) -> None:
    """40 examples of 2 kinds, 3 rules and 24 rows: 5,760 walks."""
    for greedy in (False, True):
        block, parents = tree_block(seed, 24, width, vocab, claim, greedy)
        if block.tree is None or block.tree.levels == 0:
            continue
        noise = Noise.of(block)
        for rule in (MATCH, LEVIATHAN, COUPLED):
            verdict = judge(block, rule)
            assert verdict.path is not None
            for row in range(24):
                path, token, failed = oracle_walk(block, parents[row], row, rule is LEVIATHAN, noise)
                n = int(verdict.accepted[row])
                assert verdict.path[row, :n].tolist() == path, (rule.name, row)
                assert bool(verdict.failed[row]) == failed, (rule.name, row)
                if token is not None:
                    assert int(verdict.token[row]) == token, (rule.name, row)


@settings(max_examples=40)
@given(
    st.integers(0, 2**32), st.integers(1, 6), st.integers(2, 6), st.sampled_from(["some", "all-known"]), st.booleans()
)
def test_a_chain_is_judged_the_same_beside_trees_and_alone(
    seed: int, width: int, vocab: int, claim: str, greedy: bool
) -> None:
    """Also 40 x 40 x 3 = 4,800 chains against the slow reading of the rules in test_acceptance."""
    block = make_block(seed, (40, width, vocab), claim, greedy)
    chains = [chain_parents(int(n)) for n in block.lengths]
    bush = tuple(-1 for _ in range(width - 1))
    for rule in (MATCH, LEVIATHAN, COUPLED):
        alone = check(block, rule)
        for row in (0, 39):  # one row is a tree: the others are walked, not scanned
            if width == 1:
                continue
            lengths, final = block.lengths.clone(), block.final.clone()
            lengths[row], final[row] = width - 1, True
            rows = [bush if b == row else chain for b, chain in enumerate(chains)]
            layout = Tree.of_rows(rows, width, torch.device("cpu"))
            mixed = judge(replace(block, lengths=lengths, final=final, tree=layout), rule)
            others = torch.arange(40) != row
            assert torch.equal(mixed.accepted[others], alone.accepted[others])
            assert torch.equal(mixed.failed[others], alone.failed[others])
            due = others & ~alone.failed & ~((alone.accepted == block.lengths) & ~block.final)
            assert torch.equal(mixed.token[due], alone.token[due])


def test_a_rule_that_judges_chains_only_refuses_a_tree_by_name() -> None:
    keys = torch.arange(4)
    made = draft(SOURCE, (-1, -1), keys, "sample")
    with pytest.raises(SpecdecError, match="'accept-all' judges chains only"):
        judge(block_of(TARGET, (-1, -1), made, keys, True), BROKEN_RULES["accept-all"])


# -- the law of what comes out ---------------------------------------------------------------------------------------

PLANS: dict[str, Any] = {
    "2 branches, depth 2": (2, 2),
    "4 branches, depth 2": (4, 2),
    "2 branches, depth 3": (2, 2, 1),
    "uneven, depth 3": (3, (2, 1, 0), 1),
    "all tokens": (6, 1),
}


@pytest.mark.law
@pytest.mark.fast(3)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("rule", [LEVIATHAN, MATCH, COUPLED], ids=lambda r: r.name)
def test_three_tokens_after_a_tree_follow_the_targets_law(
    rule: AcceptanceRule, plan: str, record_property: Any
) -> None:
    cells, verdict = sample(TARGET, SOURCE, plan_parents(PLANS[plan]), rule, SAMPLES)
    result = fit(cells, TARGET.three_tokens())
    check_fit(result, record_property)
    assert 0.3 < float(verdict.accepted.float().mean()) < 2.9


FAINT = [((0, 4), 1e-37), ((0, 4), 1e-41), ((4, 5), 1e-30), ((0, 5), 1e-38)]
CUTS = [*((cuts, 0.0) for cuts in ((3, 0), (0, 4), (3, 4), (4, 3), (0, 5), (4, 0), (4, 4), (4, 5))), *FAINT]


@pytest.mark.fast(6)
@pytest.mark.parametrize(("cuts", "faint"), CUTS)
@pytest.mark.parametrize(
    "rule", [MATCH, LEVIATHAN, COUPLED, SPECINFER, GUMBEL_LIST, EAGLE, BLOCK], ids=lambda r: r.name
)
def test_laws_that_were_cut_follow_the_targets_law_also_where_the_draft_has_too_few_tokens(
    rule: AcceptanceRule, cuts: Any, faint: float
) -> None:
    """Tokens without probability in p, in q (4 of 6: two tokens for three siblings; 5: one), or in both, and tokens
    whose probability is so small that float32 hardly holds it, or less."""
    target, source = (Language.random(i + 1, V, cut=cut, faint=faint) for i, cut in enumerate(cuts))
    cells, verdict = sample(target, source, plan_parents((3, 2)) if rule.pick_child else (-1, 0), rule, SAMPLES // 6)
    result = fit(cells, target.three_tokens(), tests=len(CUTS))
    assert result.holds, str(result)
    assert verdict.unsound is not None
    assert not verdict.unsound.any()


@pytest.mark.fast(2)
@pytest.mark.parametrize("cut", [2, 4, 5])
def test_siblings_that_fill_up_where_nothing_is_left_to_draw_are_rejected(cut: int) -> None:
    """The twin that claims a law for them: it is seen wherever the law has fewer tokens than the plan has siblings."""
    cells, _ = sample(
        TARGET, Language.random(2, V, cut=cut), plan_parents((5, 1)), LEVIATHAN, CONTROL_SAMPLES, "fills-up"
    )  # fmt: skip
    assert not fit(cells, TARGET.three_tokens()).holds


@pytest.mark.parametrize(
    "q", [[0.6, 0.3, 0.1, 0, 0], [1.0, 1e-38, 1e-41, 0, 0], [0, 0, 1.0, 0, 0], [0.5, 0.5, 1e-30, 2e-35, 1e-42]], ids=str
)
def test_siblings_are_drawn_without_replacement_until_nothing_is_left(q: list[float]) -> None:
    law, n = torch.tensor(q), 20_000
    tokens, laws = sample_siblings(law.expand(n, -1), fold(torch.full((n,), 5), torch.arange(n)), 7)
    assert tokens.shape == (n, 7)
    exists = laws.amax(dim=-1) > 0
    assert (exists.sum(dim=1) == sum(x >= LEAST for x in q)).all()
    assert (laws.sum(dim=-1) - exists.float()).abs().max() < 1e-5
    assert (laws.gather(2, tokens[..., None])[..., 0] > 0)[exists].all()
    likely = law.double().clamp(min=0) / law.double().sum()
    pair = likely[:, None] * likely[None] / (1 - likely[:, None]).clamp(min=1e-300)
    pair = pair.fill_diagonal_(0.0)
    if exists[:, :2].all() and sum(x > 1e-20 for x in q) > 1:
        cells = tokens[:, 0] * 5 + tokens[:, 1]
        assert fit(cells.numpy(), (pair / pair.sum()).reshape(-1).numpy()).holds


def test_a_tree_drawn_from_the_targets_own_law_always_stands_and_follows_it() -> None:
    cells, verdict = sample(TARGET, TARGET, plan_parents((2, 2)), LEVIATHAN, SAMPLES)
    assert fit(cells, TARGET.three_tokens()).holds
    assert (verdict.accepted == 2).all()
    assert (verdict.path[:, 0] == 0).all()  # type: ignore[index]


def test_a_deterministic_tree_follows_the_targets_law_under_leviathan() -> None:
    parents = plan_parents((3, 2))
    cells, _ = sample(TARGET, SOURCE, parents, LEVIATHAN, SAMPLES, proposal="argmax", claims=False)
    assert fit(cells, TARGET.three_tokens()).holds


@pytest.mark.law
@pytest.mark.parametrize("name", BROKEN_TREE_RULES)
def test_a_broken_tree_rule_is_rejected(name: str, record_property: Any) -> None:
    cells, _ = sample(TARGET, SOURCE, plan_parents((2, 2)), BROKEN_TREE_RULES[name], CONTROL_SAMPLES)
    result = fit(cells, TARGET.three_tokens())
    check_fit(result, record_property, holds=False)


@pytest.mark.law
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_tree_drafter_is_rejected(fault: str, record_property: Any) -> None:
    cells, _ = sample(TARGET, SOURCE, plan_parents((3, 2)), LEVIATHAN, CONTROL_SAMPLES, fault)
    result = fit(cells, TARGET.three_tokens())
    check_fit(result, record_property, holds=False)


def test_a_tree_whose_siblings_claim_q_without_being_drawn_from_it_is_rejected() -> None:
    cells, _ = sample(TARGET, SOURCE, plan_parents((2, 2)), LEVIATHAN, CONTROL_SAMPLES, proposal="argmax", claims=True)
    assert not fit(cells, TARGET.three_tokens()).holds


@pytest.mark.parametrize("rule", [MATCH, COUPLED], ids=lambda r: r.name)
def test_the_first_token_is_plain_samplings_under_match_and_coupled(rule: AcceptanceRule) -> None:
    cells, _ = sample(TARGET, SOURCE, plan_parents((4, 2)), rule, 2_000)
    keys = fold(torch.full((2_000,), 0), torch.arange(2_000))
    plain = race(TARGET.laws[0].expand(2_000, -1), streams(keys, torch.tensor(FIRST), Purpose.SAMPLE))
    assert (cells // V**2 == plain.numpy()).all()


@pytest.mark.full
def test_siblings_raise_the_acceptance_of_the_first_level_above_a_chains() -> None:
    p, q = TARGET.laws[0][0].double().numpy(), SOURCE.laws[0][0].double().numpy()
    for rule in (LEVIATHAN, COUPLED):
        chain, bush = (
            float((sample(TARGET, SOURCE, parents, rule, SAMPLES)[1].accepted > 0).float().mean())
            for parents in ((-1,), (-1, -1, -1))
        )
        expected = float(theory.expected_acceptance(p, q, rule.name))
        assert abs(chain - expected) < 4 * np.sqrt(expected * (1 - expected) / SAMPLES)
        assert bush > chain + 0.05


def test_greedy_ignores_q_in_a_tree() -> None:
    keys = torch.arange(50)
    made = draft(SOURCE, (-1, -1, 0), keys, "sample")
    block = replace(block_of(TARGET, (-1, -1, 0), made, keys, True), sampling=Sampling(0.0))
    verdict = judge(block, LEVIATHAN)
    best = int(TARGET.laws[0].argmax())
    assert ((verdict.accepted > 0) == (made.tokens[:, :2] == best).any(dim=1)).all()
