"""Trees end to end: the same text as plain decoding, caches as a fresh prefill leaves them, sampled laws, refusals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specdec import Draft, DraftModel, DraftRequest, PromptLookup, SpecdecError, SpeculativeDecoder
from specdec.drafters.tree_plan import parse_plan, plan_parents
from specdec.models.runner import Runner, Shapes
from specdec.models.trees import Paths, Tree, TreePass, depths_of, path_to
from specdec.research.traces.trace import record
from specdec.stats import RoundRecord, Tally
from tests.helpers.laws import small_model
from tests.helpers.playing import check_counts, counting_passes, rest_of, weaker
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_greedy, oracle_logits

PROMPTS = [[1, 2, 3, 4, 5], [9], [7, 7, 3], [4, 5, 6, 1, 2, 3, 4]]
TREES = {
    "fixed": [DraftModel(tree=[2, 2, 1])],
    "uneven": [DraftModel(tree=[3, [2, 1, 0], 1])],
    "branching": [DraftModel(branches=3, p_split=0.05, n_max=3)],
    "lookup, then trees": [PromptLookup(ngram_min=2), DraftModel(tree="3x1")],
}


class RandomTrees:
    """Random trees, sometimes chains, in which some nodes go on as the row really does."""

    name, makes_trees = "random-trees", True

    def __init__(self, texts: Sequence[Sequence[int]], most: int = 20, on_device: bool = False, nodes: int = 0):
        self.texts, self.most, self.random = texts, most, random.Random(0)
        self.on_device, self.tree_nodes = on_device, nodes
        self.paths: list[list[int]] = []

    def begin(self, row: int, prompt: Any) -> None:
        return None

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None:
        return None

    def accept_path(self, row: int, nodes: Sequence[int]) -> None:
        self.paths.append(list(nodes))

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._tree(rest_of(self.texts, [*map(int, r.tokens), int(r.last)])) for r in requests]

    def _tree(self, rest: list[int]) -> Draft:
        if self.random.random() < 0.3:
            return Draft(rest[:4])
        parents: list[int] = []
        for i in range(self.random.randint(1, self.most)):
            parents.append(self.random.randint(-1, i - 1) if self.random.random() < 0.6 else i - 1)
        depths = depths_of(parents)
        right = [d <= len(rest) and self.random.random() < 0.6 for d in depths]
        tokens = [rest[d - 1] if ok else self.random.randrange(128) for d, ok in zip(depths, right, strict=True)]
        if not self.on_device:
            return Draft(tokens, parents)
        # The bounds may be wider than the tree.
        return Draft(torch.tensor(tokens), torch.tensor(parents), levels=max(depths) + 1, siblings=len(parents))


@pytest.mark.fast(2, full=4)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral", "mixtral"])
def test_greedy_text_with_trees_is_plain_decodings(kind: str, batch: int) -> None:
    """Grouped queries, sliding windows (alone and mixed with full layers) and experts; rows with chains among them."""
    model = tiny_model(kind)
    expected = [oracle_greedy(model, p, 24) for p in PROMPTS]
    trees = RandomTrees([p + e for p, e in zip(PROMPTS, expected, strict=True)])
    decoder = SpeculativeDecoder(model)
    out = decoder.generate(PROMPTS, max_new_tokens=24, strategies=[trees], batch_size=batch, output_logprobs=True)
    assert out.token_ids == expected
    check_counts(out)
    plain = decoder.generate(PROMPTS, max_new_tokens=24, strategies=[], output_logprobs=True)
    for got, wanted in zip(out.logprobs or [], plain.logprobs or [], strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert any(path != list(range(len(path))) for path in trees.paths)  # some path had to be moved
    assert out.stats.tokens_per_round > 1.5


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}], ids=["tokens", "processors"])
def test_trees_whose_shape_only_the_device_knows_are_verified_as_lists_are(options: dict[str, Any]) -> None:
    """Rows with chains among them, trees of 50 nodes, and rounds near the end of the text, where levels are cut."""
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model)
    expected = decoder.generate(PROMPTS, max_new_tokens=24, strategies=[], **options).token_ids
    texts = [p + e for p, e in zip(PROMPTS, expected, strict=True)]
    found = []
    for on_device in (False, True):
        trees = RandomTrees(texts, most=50, on_device=on_device, nodes=50)
        out = decoder.generate(PROMPTS, max_new_tokens=24, strategies=[trees], batch_size=3, **options)
        assert out.token_ids == expected
        check_counts(out)
        found.append((out.stats.rows[0][0].levels, trees.paths))
    assert found[0] == found[1]


@pytest.mark.fast(2)
@pytest.mark.parametrize("width", [None, 24, 64])
def test_the_width_of_verify_passes_is_a_setting(width: int | None) -> None:
    """Chains of 40 tokens that are right: as many passes as their chunks."""
    model = tiny_model("llama", vocab=24)
    decoder = SpeculativeDecoder(model, check=False)
    options: dict[str, Any] = {"max_new_tokens": 82, "strategies": [DraftModel(n_max=40)]}
    own = SpeculativeDecoder(model, model, check=False).generate(PROMPTS[0], verify_width=width, **options)
    assert own.token_ids == decoder.generate(PROMPTS[0], 82, strategies=[]).token_ids
    assert own.stats.verify_passes == {None: 6, 24: 4, 64: 2}[width]
    for wrong in (1, 513, 2.5):
        with pytest.raises(SpecdecError, match="verify_width"):
            decoder.generate(PROMPTS[0], verify_width=wrong)


def test_rounds_of_trees_on_the_device_name_their_parents_and_paths() -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model)
    text = [*PROMPTS[0], *oracle_greedy(model, PROMPTS[0], 16)]
    listed, tensors = (
        [
            (r.draft, r.parents, r.path, r.tokens, r.bonus)
            for r in decoder.rounds(PROMPTS[0], max_new_tokens=30, strategies=[RandomTrees([text], 9, on_device)])
        ]
        for on_device in (False, True)
    )
    assert listed[:4] == tensors[:4]
    assert any(parents is not None for _, parents, *_ in tensors)


@pytest.mark.parametrize("parents", [[0, -1], [-1, 1], [-2, 0]])
def test_parents_on_the_device_that_are_no_tree_are_refused_by_name(parents: list[int]) -> None:
    class Wrong(RandomTrees):
        def _tree(self, rest: list[int]) -> Draft:
            return Draft([1, 2], torch.tensor(parents), levels=2)

    with pytest.raises(SpecdecError, match="'random-trees' proposed parents that are no tree"):
        SpeculativeDecoder(tiny_model("llama")).generate([1, 2, 3], 8, strategies=[Wrong([])])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_attention_implementations_see_the_same_trees(implementation: str) -> None:
    model = tiny_model("gemma3")
    expected = [oracle_greedy(model, p, 16) for p in PROMPTS]
    trees = RandomTrees([p + e for p, e in zip(PROMPTS, expected, strict=True)])
    decoder = SpeculativeDecoder(model, attn_implementation=implementation)
    assert decoder.generate(PROMPTS, max_new_tokens=16, strategies=[trees]).token_ids == expected


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", TREES)
def test_trees_of_the_draft_model_give_plain_decodings_text(name: str) -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, weaker(model, 0.15))
    for options in (
        {"repetition_penalty": 1.3},
        {"temperature": 0.9, "acceptance": "match"},
        {"temperature": 0.9, "acceptance": "coupled", "repetition_penalty": 1.2},
    ):
        plain = decoder.generate(PROMPTS, max_new_tokens=16, strategies=[], **options)
        out = decoder.generate(PROMPTS, max_new_tokens=16, strategies=TREES[name], batch_size=3, **options)
        assert out.token_ids == plain.token_ids, options
        check_counts(out)


def test_a_draft_that_is_the_target_accepts_every_level_and_its_cache_follows_the_path() -> None:
    """If the draft's own cache kept a wrong node's keys, its later argmaxes would not be the target's."""
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, model)
    for options in ({}, {"temperature": 1.0, "acceptance": "coupled"}, {"temperature": 1.0, "acceptance": "leviathan"}):
        out = decoder.generate(PROMPTS, max_new_tokens=25, strategies=[DraftModel(tree=[2, 2, 1])], **options)
        assert out.stats.acceptance_rate_per_position[0] == 1
        assert out.stats.tokens_per_round > 3.5


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_logits_after_an_accepted_path_equal_those_of_a_fresh_prefill(kind: str) -> None:
    model = tiny_model(kind)
    runner = Runner(model)
    shapes = Shapes.choose(torch.device("cpu"), False, 64)
    cache = runner.pool.lease(2, 64)
    text, parents = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], (-1, -1, 1, 1, 0, 3)
    tokens = [11, 12, 13, 14, 15, 16]
    runner.prefill(cache, shapes, {0: text[:-1]}, {0: 0})
    runner.prefill(cache, shapes, {1: text[:-3]}, {1: 0})
    starts, counts = [9, 7], [7, 3]
    tree = Tree.of_rows([parents, (-1, 0)], 7, runner.device)
    where = TreePass.of(tree, torch.tensor(starts), torch.tensor(counts))
    fed = torch.tensor([[text[-1], *tokens], [*text[-3:], 0, 0, 0, 0]])
    logits = runner.step(cache, shapes, fed, starts, counts, tree=where).logits
    for column in range(7):
        path = [tokens[node] for node in path_to(parents, column - 1)]
        torch.testing.assert_close(logits[0, column], oracle_logits(model, [*text, *path])[-1], atol=1e-4, rtol=1e-4)
    for column in range(3):
        expected = oracle_logits(model, text[: 8 + column])[-1]
        torch.testing.assert_close(logits[1, column], expected, atol=1e-4, rtol=1e-4)
    paths = Paths(torch.tensor(starts), torch.tensor([[1, 3, 5], [0, 1, 0]]), torch.tensor([3, 2]))
    cache.compact(*paths.moves(cache.capacity))
    after = runner.step(cache, shapes, torch.tensor([[17], [0]]), [13, 0], [1, 0]).logits[0, 0]
    fresh = oracle_logits(model, [*text, 12, 14, 16, 17])[-1]
    torch.testing.assert_close(after, fresh, atol=1e-4, rtol=1e-4)


@pytest.mark.fast(2)
@pytest.mark.parametrize("acceptance", ["leviathan", "coupled"])
def test_a_row_with_a_tree_does_not_depend_on_neighbours_or_batch_size(acceptance: str) -> None:
    decoder = SpeculativeDecoder(small_model(3, 13), small_model(1, 13), check=False)
    prompts = [[5, 7, 5, 7, 5], [1], [2, 3, 4, 2, 3]]
    options = {"temperature": 0.8, "acceptance": acceptance, "seed": [3, 4, 5], "max_new_tokens": 20}
    chain = [PromptLookup(n_max=2), DraftModel(tree=[2, 2])]
    together = decoder.generate(prompts, strategies=chain, **options).token_ids
    for i, prompt in enumerate(prompts):
        alone = decoder.generate(prompt, strategies=chain, **{**options, "seed": [3 + i]}).token_ids[0]
        assert alone == together[i]


def test_a_plan_costs_one_host_read_a_round_and_one_draft_pass_a_level() -> None:
    model, draft = tiny_model("llama"), tiny_model("llama", seed=1)
    decoder = SpeculativeDecoder(model, draft)
    with counting_passes(draft) as passes:
        out = decoder.generate(PROMPTS, max_new_tokens=12, strategies=[DraftModel(tree=[2, 2, 1])])
    assert out.stats.host_reads == out.stats.verify_passes
    assert len(passes) <= 3 * out.stats.verify_passes + len(PROMPTS)


def test_a_tree_larger_than_a_pass_is_cut_by_place() -> None:
    model = tiny_model("llama")
    expected = oracle_greedy(model, PROMPTS[0], 12)
    trees = RandomTrees([PROMPTS[0] + expected], most=60)
    rounds = list(SpeculativeDecoder(model).rounds(PROMPTS[0], max_new_tokens=12, strategies=[trees]))
    assert [t for r in rounds for t in r.tokens] == expected
    assert max(len(r.draft) for r in rounds if r.parents) == 16
    for r in rounds:
        if r.parents is not None:
            assert len(r.parents) == len(r.draft) == len(r.p)
            assert r.path is not None
            assert r.accepted == len(r.path)
            above = [-1, *r.path]
            assert [r.parents[n] for n in r.path] == above[:-1]
            assert [r.draft[n] for n in r.path] == r.tokens[: r.accepted]


def test_records_of_a_tree_hold_the_probability_of_each_node_given_its_own_path() -> None:
    model = small_model(3, 13)
    decoder = SpeculativeDecoder(model, small_model(1, 13), check=False)
    rounds = decoder.rounds([5, 7, 5], max_new_tokens=6, strategies=[DraftModel(tree=[2, 2])], temperature=1.0)
    text = [5, 7, 5]
    for r in rounds:
        for node in range(len(r.draft)):
            path = [r.draft[n] for n in path_to(r.parents or (), node)]
            law = torch.softmax(oracle_logits(model, [*text, *path[:-1]])[-1], dim=-1)
            assert abs(float(law[path[-1]]) - r.p[node]) < 1e-4
        text += r.tokens


def test_drafts_are_shortened_by_depth_where_the_row_or_the_context_ends() -> None:
    model = tiny_model("llama", max_position_embeddings=12)
    decoder = SpeculativeDecoder(model, model)
    out = decoder.generate([PROMPTS[0], PROMPTS[1]], max_new_tokens=30, strategies=[DraftModel(tree=[2, 2, 1, 1])])
    plain = decoder.generate([PROMPTS[0], PROMPTS[1]], max_new_tokens=30, strategies=[])
    assert out.token_ids == plain.token_ids
    assert out.finish_reasons == ["context", "context"]
    long = Draft([1, 2, 3, 4, 5], (-1, -1, 0, 2, 1))
    assert long.truncated(2).parents == (-1, -1, 0)
    assert long.truncated(3) is long


def test_a_kept_cache_holds_the_accepted_path() -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, weaker(model, 0.1))
    first = decoder.generate(PROMPTS[0], max_new_tokens=12, strategies=TREES["fixed"], keep_state=True)
    longer = [*PROMPTS[0], *first.token_ids[0], 8]
    again = decoder.generate(longer, max_new_tokens=12, strategies=TREES["fixed"], keep_state=True)
    assert again.token_ids[0] == oracle_greedy(model, longer, 12)


def test_statistics_count_nodes_paths_and_levels() -> None:
    """Two trees of 5 nodes and 3 levels; the second path ends at a leaf of level 1, so that level 2 was not tested."""
    tally = Tally.of([RoundRecord("t", 5, 2, 3, False), RoundRecord("t", 5, 1, 3, True), RoundRecord("c", 2, 0)])
    assert tally.draft_tokens == 12
    assert tally.accepted_tokens == 3
    assert tally.acceptance_rate_per_position == [2 / 3, 1 / 3, 0]
    assert tally.conditional_acceptance_rate_per_position == [2 / 3, 1, 0]
    assert tally.acceptance_histogram == [1, 1, 1, 0]


def test_exact_mode_refuses_trees_by_name_and_auto_turns_off() -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, model)
    with pytest.raises(SpecdecError, match="trees, which strategy 'draft-model'"):
        decoder.generate(PROMPTS[0], max_new_tokens=2, strategies=TREES["fixed"], exact=True)
    assert decoder.resolve_exact(True, [DraftModel()])
    assert not decoder.resolve_exact("auto", TREES["fixed"])


@pytest.mark.parametrize(
    ("parents", "message"), [([0, -1], "node 0 has parent 0"), ([-1], "2 tokens with 1 parents"), ([-1, -2], "node 1")]
)
def test_a_malformed_tree_is_refused_by_name(parents: list[int], message: str) -> None:
    class Bad(RandomTrees):
        def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            return [Draft([1, 2], parents) for _ in requests]

    with pytest.raises(SpecdecError, match=f"'random-trees'.*{message}"):
        SpeculativeDecoder(tiny_model("llama"), check=False).generate([1, 2], max_new_tokens=4, strategies=[Bad([])])


def cycle(n: int) -> Any:
    """prefix_allowed_tokens_fn: `n` tokens may follow, which ones depends on the newest and on the row."""
    return lambda row, ids: [(int(ids[-1]) * 7 + 3 * row + i) % 13 for i in range(n)]


# name -> (options, most tokens that they leave possible)
NARROW: dict[str, tuple[dict[str, Any], int]] = {
    "temperature 0.03": ({"temperature": 0.03}, 13),
    "temperature 0.01": ({"temperature": 0.01}, 13),
    "temperature 0.001": ({"temperature": 1e-3}, 13),
    "temperature 1e-4": ({"temperature": 1e-4}, 2),
    "top_k 1": ({"top_k": 1}, 1),
    "top_k 2": ({"top_k": 2}, 2),
    "top_p": ({"top_p": 1e-6}, 1),
    "min_p": ({"min_p": 0.99}, 2),
    "grammar, 1": ({"prefix_allowed_tokens_fn": cycle(1)}, 1),
    "grammar, 2": ({"prefix_allowed_tokens_fn": cycle(2)}, 2),
    "suppressed": ({"suppress_tokens": list(range(11))}, 2),
    "vocabulary": ({}, 13),
}
WIDE = [DraftModel(tree=[3, 2, 2]), DraftModel(tree=[15]), DraftModel(branches=4, p_split=0.0, n_max=3)]


@pytest.mark.fast(4, full=14)
@pytest.mark.parametrize("acceptance", ["leviathan", "match", "coupled"])
@pytest.mark.parametrize("cause", NARROW)
def test_where_few_tokens_are_possible_a_level_has_fewer_children(cause: str, acceptance: str) -> None:
    """Rows differ in a batch; what is not there is in no record and in no count."""
    given, most = NARROW[cause]
    if acceptance == "match" and "temperature" in given:
        most = 13  # the draft's best tokens are proposed, however unlikely
    model = small_model(3, 13)
    decoder = SpeculativeDecoder(model, weaker(model, 0.3), check=False)
    options: dict[str, Any] = {"temperature": 1.0, "acceptance": acceptance, "max_new_tokens": 6, "seed": 5, **given}
    plain = decoder.generate(PROMPTS, strategies=[], **options)
    for drafter in WIDE:
        trace = record(decoder, PROMPTS, strategies=[drafter], **options)
        assert trace.result is not None
        if acceptance != "leviathan":
            assert trace.result.token_ids == plain.token_ids
        check_counts(trace.result)
        for r in trace.rounds:
            assert all(q > 0 for q in r.q or [])
            assert r.parents is None or [r.parents[n] for n in r.path or []] == [-1, *(r.path or [])][:-1]
            for parent in range(-1, len(r.draft)):
                children = [r.draft[n] for n, above in enumerate(r.parents or []) if above == parent]
                assert len(children) == len(set(children)) <= most
        stats, drafted = trace.result.stats, sum(len(r.draft) for r in trace.rounds)
        assert drafted == stats.draft_tokens == stats.counters["draft-model"].n_gen_tokens


@pytest.mark.fast(1)
@pytest.mark.parametrize("acceptance", ["leviathan", "match", "coupled"])
def test_a_tree_of_one_possible_token_is_the_chain(acceptance: str) -> None:
    model = small_model(3, 13)
    decoder = SpeculativeDecoder(model, weaker(model, 0.3), check=False)
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 1, "acceptance": acceptance, "max_new_tokens": 12}
    tree, chain = (
        decoder.generate(PROMPTS, strategies=[drafter], draft_length="given", **options)
        for drafter in (DraftModel(tree=[3, 2, 2]), DraftModel(n_max=3))
    )
    assert tree.token_ids == chain.token_ids
    assert tree.stats.draft_tokens == chain.stats.draft_tokens
    assert tree.stats.acceptance_rate_per_position == chain.stats.acceptance_rate_per_position


def test_details_of_a_tree_with_missing_children_are_those_of_the_others() -> None:
    model = small_model(3, 13)
    decoder = SpeculativeDecoder(model, weaker(model, 0.3), check=False)
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 2, "max_new_tokens": 8, "seed": 1}
    trace = record(decoder, PROMPTS[:1], strategies=[DraftModel(tree=[3, 2])], top=3, **options)
    assert any(r.parents for r in trace.rounds)
    for r in trace.rounds:
        assert r.details is not None
        assert len(r.details.rank) == len(r.details.tv or r.draft) == len(r.draft) <= 6
        assert len(r.details.entropy) == len(r.draft) + 1
        above = [0, *(n + 1 for n in r.path or range(r.accepted))]
        assert r.details.emitted_column == above[: len(r.tokens)]


def test_plans_are_read_in_every_form_and_bad_ones_are_named() -> None:
    assert plan_parents(parse_plan([2, 2])) == plan_parents(parse_plan("2x2")) == (-1, -1, 0, 0, 1, 1)
    assert plan_parents(parse_plan([3, [2, 0, 1], 1])) == (-1, -1, -1, 0, 0, 2, 3, 4, 5)
    assert parse_plan(3) == (3,)
    for bad in ([], [0], [2, [1]], "2y2", [2, [0, 0]], [True], 0, {}, ["a"]):
        with pytest.raises(SpecdecError, match="tree"):
            DraftModel(tree=bad)
    for options in ({"branches": 2}, {"p_min": 0.5}, {"n_min": 1}, {"translate": True}):
        with pytest.raises(SpecdecError, match="tree"):
            DraftModel(tree=[2], **options)


def test_branching_reads_once_a_level() -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, model)
    out = decoder.generate(PROMPTS[0], max_new_tokens=9, strategies=[DraftModel(branches=2, n_max=3, p_split=0.01)])
    assert out.stats.host_reads <= 4 * out.stats.verify_passes
    assert out.stats.draft_tokens > 3 * (out.stats.drafted_rounds - 1)  # it really branched


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branches": 512}, "branches=512 is above the limit of 511"),
        ({"tree": [512]}, "more than 511 nodes"),
        ({"tree": "9999999x9999999"}, "more than 511 nodes"),
        ({"tree": [2, [10**9, 1]]}, "more than 511 nodes"),
    ],
)
def test_trees_that_no_pass_verifies_are_refused_before_they_are_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecdecError, match=message):
        DraftModel(**options)


def test_a_rule_for_chains_refuses_trees_before_any_work() -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, model, check=False)
    with (
        counting_passes(model) as passes,
        pytest.raises(SpecdecError, match=r"'block' judges chains only.*'draft-model'"),
    ):
        decoder.generate(PROMPTS[0], 4, strategies=["prompt-lookup", DraftModel(branches=2)], acceptance="block")
    assert not passes


@pytest.mark.parametrize("acceptance", ["eagle", "typical"])
def test_the_best_nodes_of_a_row_do_not_depend_on_how_deep_its_neighbours_trees_may_be(acceptance: str) -> None:
    model = tiny_model("llama", vocab=40, initializer_range=0.15)
    decoder = SpeculativeDecoder(model, weaker(model, 0.3), check=False)
    options: dict[str, Any] = {
        "max_new_tokens": 6, "strategies": "draft-model:tree=opt-16:n_max=5", "acceptance": acceptance,
        "temperature": 0.9,
    }  # fmt: skip
    for i in range(20, 60, 8):
        prompts = [[i % 40, 3, 7, i % 11], [5, i % 40]]
        together = decoder.generate(prompts, seed=[i, i + 1], **options)
        for row, prompt in enumerate(prompts):
            alone = decoder.generate([prompt], seed=[i + row], **options)
            assert alone.token_ids[0] == together.token_ids[row]
            assert alone.stats.rows[0] == together.stats.rows[row]
