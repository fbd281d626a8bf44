"""Token recycling: the table against a slow oracle, the tree's shape, and plain decoding's text."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from specdec import DraftModel, SpecdecError, SpeculativeDecoder, TokenRecycling
from specdec.drafters.base import DraftContext, DraftRequest
from specdec.drafters.recycling import EMPTY, RIGHT, successors_of, template
from specdec.models.runner import PassOutput, Runner
from specdec.models.trees import MISSING, depths_of, path_to
from specdec.research.traces.records import records_of
from specdec.stats import Positions
from tests.helpers.playing import check_counts, quoting_ids, weaker
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_greedy

PROMPTS = [quoting_ids(20, 1), [9, 8], [7], quoting_ids(33, 2)]


# -- the tree ----------------------------------------------------------------------------------------------------------


def test_the_template_is_the_likeliest_tree_of_its_size() -> None:
    ranks, parents = template(12, 3, 3)
    chance = {path: float(np.prod([RIGHT[k] for k in path])) for n in (1, 2, 3) for path in product(range(3), repeat=n)}
    likeliest = sorted(chance.values(), reverse=True)[:12]
    found = [chance[tuple(ranks[n] for n in path_to(parents, node))] for node in range(12)]
    assert sorted(found, reverse=True) == pytest.approx(likeliest)
    assert depths_of(parents) == sorted(depths_of(parents))


@pytest.mark.parametrize(("nodes", "width", "depth"), [(80, 8, 6), (1, 1, 1), (200, 12, 4), (511, 64, 64)])
def test_siblings_of_a_template_are_different_successors_in_order(nodes: int, width: int, depth: int) -> None:
    ranks, parents = template(nodes, width, depth)
    assert len(parents) <= nodes
    assert max(depths_of(parents)) <= depth
    for parent in {-1, *range(len(parents))}:
        own = [rank for p, rank in zip(parents, ranks, strict=True) if p == parent]
        assert own == list(range(len(own)))


# -- the table ---------------------------------------------------------------------------------------------------------


def made(shared: bool = False, batch: int = 2, vocab: int = 12, **options: Any) -> TokenRecycling:
    target = Runner(tiny_model("llama", vocab=vocab))
    return TokenRecycling(shared=shared, **options).fresh(DraftContext(batch, 64, vocab, target=target))


def test_a_prompt_names_its_successors_the_newest_first() -> None:
    tokens, table = successors_of(np.array([1, 2, 1, 3, 1, 2, 1, 4]), 2)
    assert dict(zip(tokens.tolist(), table.tolist(), strict=True)) == {1: [4, 2], 2: [1, EMPTY], 3: [1, EMPTY]}
    assert (
        successors_of(np.array([5]), 2)[0].tolist() == successors_of(np.array([], dtype=np.int64), 2)[0].tolist() == []
    )


@pytest.mark.parametrize("shared", [False, True])
def test_tables_and_drafts_are_those_of_a_slow_oracle(shared: bool) -> None:
    """Random passes with padding, rows that sit out and tokens that come twice; then every node of every tree."""
    drafter, rng, vocab, width = made(shared, width=3, nodes=20, depth=4), np.random.default_rng(0), 12, 3
    known: list[dict[int, list[int]]] = [{}] if shared else [{}, {}]
    for row, prompt in enumerate(([1, 2, 1, 3], [4, 5, 4])):
        drafter.begin(row, prompt)
        for token, successors in zip(*map(np.ndarray.tolist, successors_of(np.array(prompt), width)), strict=True):
            known[0 if shared else row][token] = successors
    for _ in range(30):
        logits = torch.tensor(rng.normal(size=(2, 5, vocab)), dtype=torch.float32)
        fed, counts = torch.tensor(rng.integers(0, vocab, (2, 5))), rng.integers(0, 6, 2).tolist()
        drafter.observe(PassOutput(logits, fed, [0, 0], counts))
        for row, count in enumerate(counts):
            for column in range(count):
                known[0 if shared else row][int(fed[row, column])] = logits[row, column].topk(width).indices.tolist()
        newest = rng.integers(0, vocab, 2).tolist()
        drafts = drafter.draft([DraftRequest(row, [], last) for row, last in enumerate(newest)])
        for row, draft in enumerate(drafts):
            ranks, _ = template(20, width, 4)
            for node in range(len(draft)):
                token = newest[row]
                for step in path_to(draft.parents, node):  # type: ignore[arg-type]
                    successors = known[0 if shared else row].get(token, [])
                    token = successors[ranks[step]] if ranks[step] < len(successors) else EMPTY
                    if token == EMPTY:
                        token = MISSING
                        break
                assert int(draft.tokens[node]) == token


def test_passes_over_prompts_teach_nothing() -> None:
    drafter = made()
    drafter.begin(0, [])
    before = drafter._table.clone()
    drafter.observe(PassOutput(torch.randn(1, 1, 12), torch.tensor([[1, 2, 3]]), [0], [3]))
    assert torch.equal(drafter._table, before)


def test_broken_logits_and_padding_ids_leave_the_table_whole() -> None:
    drafter = made()
    drafter.begin(0, [1, 2])
    logits = torch.full((2, 2, 12), float("nan"))
    drafter.observe(PassOutput(logits, torch.tensor([[1, 11], [13, 1]]), [0, 0], [2, 1]))
    table = drafter._table
    assert int(table[:, :12].min()) >= EMPTY
    assert int(table[:, :12].max()) < 12


# -- decoding ----------------------------------------------------------------------------------------------------------


@pytest.mark.fast(2)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mixtral"])
def test_greedy_text_is_plain_decodings(kind: str, batch: int) -> None:
    model = tiny_model(kind)
    expected = [oracle_greedy(model, p, 20) for p in PROMPTS]
    decoder = SpeculativeDecoder(model, weaker(model), check=False)
    for chain in ([TokenRecycling()], [TokenRecycling(nodes=5, shared=True), DraftModel(n_max=2)]):
        out = decoder.generate(PROMPTS, 20, strategies=chain, batch_size=batch)
        assert out.token_ids == expected
        check_counts(out)
        assert out.stats.accepted_tokens > 0


@pytest.mark.fast(2)
@pytest.mark.parametrize("rule", ["match", "coupled", "leviathan"])
def test_sampled_text_is_plain_decodings_because_there_is_no_q(rule: str) -> None:
    decoder = SpeculativeDecoder(tiny_model("llama"), check=False)
    options: dict[str, Any] = {"temperature": 0.7, "acceptance": rule, "seed": 5, "repetition_penalty": 1.1}
    plain = decoder.generate(PROMPTS, 16, strategies=[], **options)
    assert decoder.generate(PROMPTS, 16, strategies=["recycling"], batch_size=2, **options).token_ids == plain.token_ids


def test_shared_tables_outlive_a_call() -> None:
    decoder = SpeculativeDecoder(tiny_model("llama", vocab=24), check=False)
    options: dict[str, Any] = {"max_new_tokens": 40, "keep_state": True}
    first = decoder.generate([[3, 1]], strategies=[TokenRecycling(shared=True)], **options)
    again = decoder.generate([[3, 1]], strategies=[TokenRecycling(shared=True)], **options)
    assert first.token_ids == again.token_ids
    assert again.stats.rounds < first.stats.rounds


def test_what_an_observer_learnt_of_a_target_ends_with_it() -> None:
    model = tiny_model("llama", vocab=24)
    decoder = SpeculativeDecoder(model, check=False)
    options: dict[str, Any] = {"max_new_tokens": 8, "keep_state": True, "strategies": [TokenRecycling(shared=True)]}
    tables = []
    for change in (False, False, True):
        if change:
            with torch.no_grad():
                model.lm_head.weight.mul_(-1)
        decoder.generate([[3, 1]], **options)
        assert decoder._kept_chain is not None
        tables.append(decoder._kept_chain.drafters[0]._table)
    assert tables[0] is tables[1]
    assert tables[2] is not tables[1]


@pytest.mark.parametrize("options", [{"nodes": 0}, {"nodes": 512}, {"width": 0}, {"depth": 65}, {"shared": 2}])
def test_parameters_out_of_range_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(SpecdecError, match=f"recycling: {next(iter(options))}"):
        TokenRecycling(**options)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nodes_that_no_token_was_known_for_are_in_no_figure(temperature: float) -> None:
    """The statistics are those of the rounds as a user reads them, where such nodes do not exist."""
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, strategies=[TokenRecycling(nodes=12, width=3, depth=4)])
    options: dict[str, Any] = {"temperature": temperature, "acceptance": "match", "seed": 2}
    rounds = list(decoder.rounds(PROMPTS[0], 32, **options))
    _, tested, accepted = Positions.of(records_of(rounds))
    assert any(0 < len(r.draft) < 12 for r in rounds)
    stats = decoder.generate(PROMPTS[0], 32, **options).stats
    assert stats.tested_tokens == sum(tested)
    assert stats.accepted_tokens == sum(accepted)
    assert list(stats.conditional_acceptance_rate_per_position) == pytest.approx(
        [a / t for a, t in zip(accepted, tested, strict=True) if t]
    )
