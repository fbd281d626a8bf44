"""Lossy rules: what they accept, position by position and in trees, and that results made with them say so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdec import DraftModel, SpecdecError, SpeculativeDecoder
from specdec.decoding.acceptance import find_rule, judge
from specdec.models.trees import Tree
from tests.decoding.test_acceptance import make_block
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
        p = block.p.double().numpy()
        for row in range(5):
            expected = 0
            for column in range(int(block.lengths[row])):
                x = int(block.draft[row, column])
                if not (likely(p[row, column], x) or int(block.own[row, column]) == x):
                    break
                expected += 1
            assert int(verdict.accepted[row]) == expected
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


@pytest.mark.parametrize("options", [{}, {"tree": [2, 2]}], ids=["chain", "tree"])
def test_a_lenient_setting_accepts_more_and_the_result_is_marked(options: dict[str, Any]) -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, weaker(model, 0.2), check=False)
    found = {}
    for name in ("match", "top:k=1", "top:k=5", "top:k=128"):
        out = decoder.generate(PROMPTS, 24, strategies=[DraftModel(n_max=3, **options)], acceptance=name)
        check_counts(out)
        assert out.lossy == (name != "match")
        assert out.provenance["settings"]["acceptance"] == name
        found[name] = out.stats.tokens_per_round
    assert found["match"] == found["top:k=1"] < found["top:k=5"] <= found["top:k=128"]


@pytest.mark.parametrize(
    "name", ["typical:eps=2", "typical:delta=x", "top:k=0", "top:k=1.5", "near:delta=-1", "near:d=1"]
)
def test_parameters_out_of_range_are_refused_by_name(name: str) -> None:
    with pytest.raises(SpecdecError, match=name.split(":")[0]):
        find_rule(name)
