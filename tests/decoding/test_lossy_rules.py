"""Lossy rules: what they accept, position by position and in trees, and that results made with them say so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdec import AcceptanceRule, DraftModel, SpecdecError, SpeculativeDecoder
from specdec.decoding.acceptance import LEVIATHAN, MATCH, find_rule, judge
from specdec.models.trees import Tree
from tests.decoding.test_acceptance import make_block
from tests.decoding.test_block_verification import one_distribution
from tests.helpers.laws import fit
from tests.helpers.playing import check_counts, quoting_ids, weaker
from tests.helpers.tiny import tiny_model

PROMPTS = [quoting_ids(12, 1), [4, 2], [7]]
SETTINGS = {
    "typical:eps=0.3:delta=0.4": lambda p, x: p[x] > min(0.3, 0.4 * np.exp((p[p > 0] * np.log(p[p > 0])).sum())),
    "top:k=2": lambda p, x: (p > p[x]).sum() < 2,
    "near:delta=0.2": lambda p, x: p[x] >= p.max() - 0.2,
}


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_chains_are_judged_as_the_rule_reads(name: str, greedy: bool) -> None:
    rule, likely, compared = find_rule(name), SETTINGS[name], 0
    for seed in range(30):
        block = make_block(seed, (5, 5, 6), "none", greedy, score_kinds=("free", "cut"))
        verdict = judge(block, rule)
        assert rule.distance is not None
        distances = rule.distance(block, verdict)
        p = block.p.double().numpy()
        for row in range(5):
            expected, apart = 0, []
            for column in range(int(block.lengths[row])):
                x = int(block.draft[row, column])
                if not (likely(p[row, column], x) or int(block.own[row, column]) == x):
                    break
                expected += 1
                certain = float(x != int(block.own[row, column])) if greedy else 1 - p[row, column, x]
                apart.append(certain if likely(p[row, column], x) else 0.0)
            assert int(verdict.accepted[row]) == expected
            apart = [*apart, 0.0][: distances.shape[1]]  # the token after them is the target's own, if there is room
            assert distances[row, : expected + 1].tolist() == pytest.approx(apart, abs=1e-5)
            if expected < int(block.lengths[row]):
                assert int(verdict.token[row]) == int(block.own[row, expected])
                compared += 1
    assert compared > 20


def test_in_a_tree_the_likeliest_child_that_is_likely_enough_is_taken() -> None:
    rng = np.random.default_rng(0)
    parents = [[-1, -1, 0, 0, 1, 1]]
    for seed in range(40):
        block = make_block(seed, (1, 7, 6), "none", score_kinds=("free",))
        block.lengths[:], block.totals[:], block.final[:] = 6, 6, True
        block.draft[0, :6] = torch.tensor(rng.permutation(6))
        block.tree = Tree.of_rows(parents, 7, torch.device("cpu"))
        verdict = judge(block, find_rule("near:delta=0.3"))
        p, column, path = block.p[0].double().numpy(), 0, []
        while True:
            nodes = [node for node, parent in enumerate(parents[0]) if parent + 1 == column]
            tokens = {node: int(block.draft[0, node]) for node in nodes}
            own = int(block.own[0, column])
            good = [n for n in nodes if p[column, tokens[n]] >= p[column].max() - 0.3 or tokens[n] == own]
            if not good:
                break
            path.append(max(good, key=lambda n: p[column, tokens[n]]))
            column = path[-1] + 1
        assert verdict.path is not None
        assert verdict.path[0, : int(verdict.accepted[0])].tolist() == path
        assert int(verdict.token[0]) == int(block.own[0, column])


@pytest.mark.parametrize("name", ["top:k=1", "near:delta=0"])
def test_the_strictest_setting_is_greedy_decoding(name: str) -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, weaker(model), check=False)
    plain = decoder.generate(PROMPTS, 16, strategies=[])
    out = decoder.generate(PROMPTS, 16, strategies=[DraftModel(n_max=3)], acceptance=name)
    assert out.token_ids == plain.token_ids


@pytest.mark.parametrize("options", [{"n_max": 3}, {"tree": [2, 2]}], ids=["chain", "tree"])
def test_a_lenient_setting_accepts_more_and_the_result_is_marked(options: dict[str, Any]) -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, weaker(model, 0.2), check=False)
    found = {}
    for name in ("match", "top:k=1", "top:k=5", "top:k=128"):
        out = decoder.generate(PROMPTS, 24, strategies=[DraftModel(**options)], acceptance=name)
        check_counts(out)
        assert out.lossy == (name != "match")
        assert (out.distances is None) == (name == "match")
        if out.distances is not None:
            assert [len(row) for row in out.distances] == [len(ids) for ids in out.token_ids]
            assert (max(map(max, out.distances)) > 0) == (name != "top:k=1")
        assert out.provenance["settings"]["acceptance"] == name
        found[name] = out.stats.tokens_per_round
    assert found["match"] == found["top:k=1"] < found["top:k=5"] <= found["top:k=128"]


@pytest.mark.parametrize(
    "name", ["cascade:alpha=2", "typical:eps=2", "typical:delta=x", "top:k=0", "top:k=1.5", "near:delta=-1", "near:d=1"]
)
def test_parameters_out_of_range_are_refused_by_name(name: str) -> None:
    with pytest.raises(SpecdecError, match=name.split(":")[0]):
        find_rule(name)


# -- speculative cascade -----------------------------------------------------------------------------------------------

P = [0.4, 0.3, 0.2, 0.1]
CERTAIN, FLAT = [0.5, 0.1, 0.2, 0.2], [0.26, 0.26, 0.26, 0.22]  # drafts' distributions


@pytest.mark.parametrize(("q", "trusted"), [(CERTAIN, True), (FLAT, False)])
def test_a_cascade_emits_q_where_it_trusts_the_draft_and_p_elsewhere(q: list[float], trusted: bool) -> None:
    drafts = torch.multinomial(torch.tensor(q), 8_000, replacement=True, generator=torch.manual_seed(0))[:, None]
    block, rule = one_distribution(P, q, drafts), find_rule("cascade:alpha=0.5")
    verdict = judge(block, rule)
    tokens = verdict.emitted(block.draft)[0].numpy()
    law, other = (np.array(q), np.array(P)) if trusted else (np.array(P), np.array(q))
    assert fit(tokens[:, 0], law).holds
    assert not fit(tokens[:, 0], other).holds
    bonus = tokens[verdict.accepted.numpy() == 1, 1]
    assert fit(bonus, np.array(P)).holds
    assert rule.distance is not None
    apart = sum(max(0.0, x - y) for x, y in zip(P, q, strict=True)) if trusted else 0.0
    wanted = torch.tensor([apart, 0.0]).expand(len(tokens), 2)
    torch.testing.assert_close(rule.distance(block, verdict)[verdict.accepted == 1], wanted[verdict.accepted == 1])
    broken = judge(block, AcceptanceRule("broken", "sample", LEVIATHAN.accepts, MATCH.next_token, lossy=True))
    assert not fit(broken.emitted(block.draft)[0].numpy()[:, 0], law).holds


def test_a_cascade_in_a_call_accepts_more_and_greedy_text_stays_the_targets() -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, weaker(model, 0.2), check=False)
    options: dict[str, Any] = {"strategies": [DraftModel(n_max=3)], "seed": 1}
    strict, loose = (
        decoder.generate(PROMPTS, 24, temperature=0.8, acceptance=rule, **options)
        for rule in ("leviathan", "cascade:alpha=1")
    )
    check_counts(loose)
    assert loose.lossy
    assert loose.stats.tokens_per_round > strict.stats.tokens_per_round
    assert decoder.generate(PROMPTS, 16, acceptance="cascade", **options).token_ids == (
        decoder.generate(PROMPTS, 16, strategies=[]).token_ids
    )


def test_a_rule_that_does_not_know_its_distance_has_a_bound() -> None:
    """Of a drafted token that is always accepted, the bound is 1 - p on average, its total variation."""
    rule = AcceptanceRule("all", "argmax", lambda block: block.tested, MATCH.next_token, lossy=True)
    block = one_distribution(P, P, torch.zeros((4_000, 1), dtype=torch.int64))
    assert rule.distance is not None
    found = rule.distance(block, judge(block, rule)).double().mean(dim=0)
    assert float(found[0]) == pytest.approx(1 - P[0], abs=0.03)
    assert float(found[1]) == 0
