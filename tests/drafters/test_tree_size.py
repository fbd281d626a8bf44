"""Automatic tree size: near the best fixed size by the cost table, plain decoding's text, and nested trees."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from specdec import CostTable, SpecdecError, SpeculativeDecoder
from specdec.drafters import Eagle3
from specdec.drafters.best_tree import TreeSize, grow
from specdec.drafters.eagle3.auto_tree import AutoTrees
from specdec.drafters.tree_size import Size, TreeSizes
from specdec.models.runner import Runner
from tests.drafters.test_eagle3_strategy import PROMPTS, head_for, trained_head
from tests.drafters.test_eagle3_tree import tables
from tests.helpers.recording import Rerun, replayed
from tests.helpers.tiny import tiny_model

SIZES, LEVELS = (1, 3, 7, 15, 31, 63), (1, 2, 3, 4, 6, 8)
Seconds = Callable[[int, int, int], float]


def gpu(context: int, nodes: int, levels: int) -> float:
    return 10 + 0.01 * nodes + 0.4 * levels


def cpu(context: int, nodes: int, levels: int) -> float:
    return 44 + 5.5 * nodes + 4 * levels


def dear_steps(context: int, nodes: int, levels: int) -> float:
    return 10 + 0.05 * nodes + 2.5 * levels


def world(rng: random.Random, right: float, missed: float) -> list[list[float]]:
    """One round's probabilities of paths to each level within the best n nodes; rounds differ in how easy they are."""
    easy = min(0.98, max(0.05, right + 0.15 * (rng.random() - 0.5)))
    return [
        [(1 - (1 - easy) * missed ** (n.bit_length() - 1)) ** d * (d <= n) for n in SIZES]
        for d in range(1, LEVELS[-1] + 1)
    ]


@cache
def rounds(right: float, missed: float) -> list[tuple[list[list[float]], float]]:
    """Worlds of 300 rounds, each with the chance that its path has."""
    rng = random.Random(0)
    return [(world(rng, right, missed), rng.random()) for _ in range(300)]


def fixed(size: Size, seconds: Seconds, right: float, missed: float) -> float:
    """Tokens per second of one size."""
    if not size[0]:
        return 1 / seconds(0, 0, 0)
    made, place = rounds(right, missed), SIZES.index(size[0])
    tokens = sum(1 + sum(chance < row[place] for row in curve[: size[1]]) for curve, chance in made)
    return tokens / len(made) / seconds(0, *size)


def chosen(seconds: Seconds, right: float, missed: float, bias: float) -> float:
    """Tokens per second of sizes that are chosen. bias: exponent by which the head's probabilities are off."""
    sizes, spent, tokens = TreeSizes(SIZES, LEVELS, seconds), 0.0, 0
    for curve, chance in rounds(right, missed):
        nodes, levels = size = sizes.choose(0)
        accepted = sum(chance < row[SIZES.index(nodes)] for row in curve[:levels]) if nodes else 0
        if nodes:
            said = [[p**bias for p in row] for row in curve[:levels]]
            sizes.see(said)
            sizes.learn(accepted, size, said)
        spent, tokens = spent + seconds(0, *size), tokens + 1 + accepted
    return tokens / spent


@pytest.mark.parametrize("seconds", [gpu, cpu, dear_steps])
@pytest.mark.parametrize("bias", [0.8, 1.0, 1.25])
@pytest.mark.parametrize("missed", [0.6, 0.85])
def test_it_is_within_5_percent_of_the_best_fixed_size(seconds: Seconds, bias: float, missed: float) -> None:
    every: list[Size] = [(0, 0), *((n, d) for n in SIZES for d in LEVELS if d <= n)]
    for right in (0.5, 0.7, 0.9):
        best = max(fixed(size, seconds, right, missed) for size in every)
        assert chosen(seconds, right, missed, bias) > 0.95 * best


def test_passes_that_are_flat_get_large_trees_and_dear_ones_small() -> None:
    taken = {}
    for seconds in (gpu, cpu):
        sizes, rng = TreeSizes(SIZES, LEVELS, seconds), random.Random(1)
        for _ in range(60):
            size, curve = sizes.choose(0), world(rng, 0.6, 0.7)
            sizes.see(curve[: size[1]])
            sizes.learn(2, size, curve)
        taken[seconds] = sizes.choose(0)[0]
    assert taken[gpu] >= 31
    assert 1 <= taken[cpu] <= 7


def test_a_head_that_is_never_right_is_left_alone_but_for_few_rounds() -> None:
    sizes = TreeSizes(SIZES, LEVELS, cpu)
    plain = spent = 0.0
    for _ in range(300):
        size = sizes.choose(0)
        if size[0]:
            curve = [[0.5**level] * len(SIZES) for level in range(1, size[1] + 1)]  # it says so with confidence
            sizes.see(curve)
            sizes.learn(0, size, curve)
        spent, plain = spent + cpu(0, *size), plain + cpu(0, 0, 0)
    assert spent < 1.1 * plain


@pytest.mark.parametrize("step", [0.0, 0.5])
def test_ranked_trees_begin_with_every_smaller_one_and_sum_their_paths(step: float) -> None:
    size = TreeSize(4, 3, 24)
    given = tables(0, 3, size, 12, step)
    sizes = (1, 5, 24)
    tree = grow(given[0][:, 0], size, lambda level, frontier: given[level], sizes)
    assert tree.curve is not None
    assert tree.curve.shape == (3, 4, 3)
    for place, nodes in enumerate(sizes):
        small = grow(given[0][:, 0], TreeSize(4, 3, nodes), lambda level, frontier: given[level])
        for row in range(3):
            mine = paths(tree.tokens[row, :nodes], tree.parents[row, :nodes])
            assert sorted(mine) == sorted(paths(small.tokens[row], small.parents[row]))
            sums = [0.0] * 4
            for path, score in zip(mine, tree.scores[row].tolist(), strict=False):
                sums[len(path) - 1] += float(torch.tensor(score).exp())
            assert tree.curve[row, :, place].tolist() == pytest.approx(sums, abs=1e-5)


def paths(tokens: torch.Tensor, parents: torch.Tensor) -> list[tuple[int, ...]]:
    """The tokens from the first level to each node; parents come before children."""
    made: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        made.append((*(made[parent] if parent >= 0 else ()), token))
    return made


# -- in calls ----------------------------------------------------------------------------------------------------------


def table(slope: float) -> CostTable:
    """Passes that take one second, and more for each token after the first."""
    return CostTable((((1.0, 1.0 + slope),),), None, (1,), (0,), (1, 2))


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_model("llama", num_hidden_layers=3), strategies=[])


@pytest.mark.parametrize("call", [{}, {"temperature": 1.0, "acceptance": "match"}, {"temperature": 1.0}], ids=str)
def test_texts_are_plain_decodings_in_batches(decoder: SpeculativeDecoder, call: dict[str, Any]) -> None:
    prompts = [[t % decoder.target.vocab_size for t in p] for p in PROMPTS]
    head = head_for(decoder.target.model)
    plain = decoder.generate(prompts, 16, [], seed=3, **call).token_ids
    for batch in (1, 4):
        strategy = Eagle3(head=head, nodes="auto", top_k=4, depth=3)
        out = decoder.generate(prompts, 16, [strategy], seed=3, batch_size=batch, costs=table(0.001), **call)
        assert out.token_ids == plain
        assert out.stats.to_dict()["draft_tokens"] > 0


def test_flat_and_dear_tables_change_the_trees_of_a_call(decoder: SpeculativeDecoder) -> None:
    prompt = [1, 2, 3, 4, 5]
    text = [*prompt, *decoder.generate([prompt], 40, []).token_ids[0]]
    head = trained_head(decoder.target.model, [text])
    drafted = {}
    for slope in (0.001, 0.5):
        strategy = Eagle3(head=head, nodes="auto", top_k=4, depth=4)
        out = decoder.generate([prompt], 40, [strategy], costs=table(slope), ignore_eos=True)
        assert out.token_ids[0] == text[5:]
        total = out.stats.to_dict()
        drafted[slope] = total["draft_tokens"] / max(1, total["drafted_rounds"])
        assert out.provenance["costs"]["widths"] == [1, 2]
    assert drafted[0.001] > 2 * drafted[0.5] > 0


def test_rows_choose_alone_where_the_text_depends_on_drafts(decoder: SpeculativeDecoder) -> None:
    prompts = [[1, 2, 3, 4, 5], [9, 8], [7]]
    strategy = Eagle3(head=head_for(decoder.target.model), nodes="auto", top_k=4, depth=3)
    call: dict[str, Any] = {"temperature": 1.0, "acceptance": "eagle", "costs": table(0.05)}
    together = decoder.generate(prompts, 16, [strategy], seed=[1, 2, 3], batch_size=3, **call).token_ids
    alone = [decoder.generate([p], 16, [strategy], seed=[s], **call).token_ids[0] for s, p in enumerate(prompts, 1)]
    assert together == alone


def test_nodes_are_a_number_or_auto() -> None:
    with pytest.raises(SpecdecError, match="nodes"):
        Eagle3(head=head_for(tiny_model("llama", num_hidden_layers=3)), nodes="many")


def test_a_curve_is_read_a_round_later(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    keep = AutoTrees.keep
    monkeypatch.setattr(AutoTrees, "keep", lambda self, curve: (kept.append(curve), keep(self, curve))[1])
    strategy = Eagle3(head=head_for(decoder.target.model), nodes="auto", top_k=4, depth=3)
    out = decoder.generate([[1, 2, 3]], 12, [strategy], costs=table(0.001), ignore_eos=True)
    assert kept
    assert out.stats.host_reads == out.stats.verify_passes


def test_recorded_trees_are_the_eager_ones() -> None:
    model = tiny_model("llama")
    eager, recorded = (SpeculativeDecoder(model, strategies=[], check=False) for _ in range(2))
    recorded.target = Runner(model, recorder=Rerun())
    prompts = PROMPTS[:2]
    texts = eager.generate(prompts, 24, [], ignore_eos=True).token_ids
    head = trained_head(model, [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)])
    strategy, call = Eagle3(head=head, nodes="auto", top_k=4, depth=3), {"costs": table(0.01), "ignore_eos": True}
    outs = [d.generate(prompts, 24, [strategy], **call) for d in (eager, recorded)]
    assert outs[0].token_ids == outs[1].token_ids
    assert outs[0].stats.accepted_tokens == outs[1].stats.accepted_tokens > 10
    with replayed() as counts:
        recorded.generate(prompts, 24, [strategy], **call)
    assert counts["Tree"] > 3
    assert recorded.target.failures == {}
