"""The strategy eagle3: plain decoding's text, the target's distribution, and drafts that equal a slow oracle's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import SpecdecError, SpeculativeDecoder
from specdec.decoding.result import Generation
from specdec.drafters import Draft, DraftModel, DraftRequest, Eagle3, PromptLookup, make_drafters, planned_tree
from specdec.drafters.eagle3 import EagleHead, TreeSize, export
from specdec.drafters.eagle3 import strategy as strategy_module
from specdec.models.runner import Runner, Shapes
from specdec.sampling.sampling import race
from tests.helpers.eagle3 import from_scratch, random_head
from tests.helpers.laws import cell, fit, samples, small_model, three_token_law, three_tokens
from tests.helpers.recording import Rerun, replayed
from tests.helpers.tiny import tiny_model

LAYERS = (0, 1, 2)
PROMPTS = [[1, 2, 3, 4, 5], [9, 8], [7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]]
PROMPT, V = [5, 7, 5, 7, 5], 13


def head_for(model: Any, seed: int = 0, **changes: Any) -> EagleHead:
    """A random head for a target, whose own tables make its drafts depend on all that it sees."""
    config = model.config
    settings = {
        "vocab_size": config.vocab_size, "draft_vocab_size": config.vocab_size - 3, "layer_ids": LAYERS,
        "target_hidden_size": config.hidden_size,
    }  # fmt: skip
    return random_head(seed, **settings | changes)


def trained_head(model: Any, texts: Sequence[Sequence[int]]) -> EagleHead:
    """A head that has learnt a few texts of its target by heart."""
    head = head_for(model, draft_vocab_size=model.config.vocab_size).requires_grad_(True)
    optimizer = torch.optim.Adam(head.parameters(), 0.01)
    for _ in range(40):
        optimizer.zero_grad()
        for ids in texts:
            logits, _ = from_scratch(head, *entries_of(head, model, ids))
            torch.nn.functional.cross_entropy(logits[0, :-1], torch.tensor(ids[2:])).backward()
        optimizer.step()
    return head.requires_grad_(False)


def entries_of(head: EagleHead, model: Any, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Embeddings and features of a text's entries, from one plain forward of the target."""
    with torch.no_grad():
        hidden = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    states = torch.cat([hidden[i] for i in head.config.observed_layers(len(hidden) - 1)], dim=-1)
    return head.embed(torch.tensor([ids[1:]])), head.project(states)


class Watched(Eagle3):
    """Remembers each draft, and the text that it follows."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        made = super().draft(requests)
        for r, draft in zip(requests, made, strict=True):
            ids = [*map(int, r.tokens), r.last]
            self.seen.append((ids, [int(t) for t in draft.tokens]))
            self.made.append((ids, draft))
        return made

    seen: list[tuple[list[int], list[int]]]
    made: list[tuple[list[int], Draft]]


def watched(head: EagleHead, **options: Any) -> Watched:
    made = Watched(head, **(options or {"n_max": 3}))
    made.seen, made.made = [], []  # the copies of all calls share them
    return made


def slow_draft(head: EagleHead, model: Any, ids: Sequence[int], count: int, start: int = 0) -> list[int]:
    """The greedy chain after a text, from one plain forward and the head computed anew for each token. start: the
    first token whose states are known."""
    with torch.no_grad():
        embeddings, features = (part[:, start:] for part in entries_of(head, model, ids))
        found: list[int] = []
        for _ in range(count):
            logits, out = from_scratch(head, embeddings, features)
            token: Tensor = head.to_target(logits[:, -1].argmax(-1))
            found.append(int(token))
            embeddings = torch.cat([embeddings, head.embed(token[None])], dim=1)
            features = torch.cat([features, out[:, -1:]], dim=1)
        return found


HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "3.1": {"fc_norm": True, "norm_output": True},
    "speculators": {"norm_before_residual": True, "norm_before_fc": True, "num_hidden_layers": 2},
    "eagle-1": {"version": 1, "observed": 1, "layer_ids": None, "final_norm": False, "hidden_size": 32},
}


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", HEADS)
def test_texts_equal_plain_decodings(name: str) -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, check=False)
    plain = decoder.generate(PROMPTS, max_new_tokens=12, strategies=[])
    for batch in (1, 3):
        out = decoder.generate(
            PROMPTS, max_new_tokens=12, strategies=[Eagle3(head_for(model, **HEADS[name]))], batch_size=batch
        )
        assert out.token_ids == plain.token_ids
        assert out.stats.draft_tokens > 20


@pytest.mark.fast(4)
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("others", [[], [PromptLookup(ngram_min=2)]], ids=["alone", "behind lookup"])
def test_drafts_equal_the_slow_oracles(name: str, others: list[Any]) -> None:
    """At every round of every row, whatever the rounds before accepted, and whoever drafted in them."""
    model = tiny_model("llama")
    strategy = watched(head_for(model, **HEADS[name]))
    decoder = SpeculativeDecoder(model, check=False)
    decoder.generate(PROMPTS, strategies=[*others, strategy], max_new_tokens=12, batch_size=3)
    check_drafts(strategy, model)


def check_drafts(strategy: Watched, model: Any, least: int = 20) -> None:
    drafted = [(ids, tokens) for ids, tokens in strategy.seen if len(ids) > 1]
    assert len(drafted) > least
    for ids, tokens in drafted:
        assert tokens
        assert tokens == slow_draft(strategy.head, model, ids, len(tokens)), ids


def test_long_prompts_are_fed_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = Shapes((*range(1, 18),), 17, 32)
    monkeypatch.setattr(Shapes, "choose", staticmethod(lambda *_: narrow))
    model = tiny_model("llama")
    strategy = watched(head_for(model))
    prompts = [[(7 * i + n) % 128 for i in range(60 - n)] for n in range(3)]
    SpeculativeDecoder(model, check=False).generate(prompts, strategies=[strategy], max_new_tokens=6)
    check_drafts(strategy, model, 10)


def test_a_head_that_has_learnt_the_text_is_accepted() -> None:
    """Whole drafts are accepted, so that their entries are recomputed from the target's states."""
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, check=False)
    plain = decoder.generate(PROMPTS, max_new_tokens=24, strategies=[])
    texts = [prompt + ids for prompt, ids in zip(PROMPTS, plain.token_ids, strict=True)]
    strategy = watched(trained_head(model, texts), n_max=4)
    out = decoder.generate(PROMPTS, max_new_tokens=24, strategies=[strategy], batch_size=2)
    assert out.token_ids == plain.token_ids
    assert out.stats.acceptance_length > 1.5
    check_drafts(strategy, model)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, check=False)
    options: dict[str, Any] = {
        "strategies": [Eagle3(head_for(model), n_max=3)], "temperature": 1.0, "acceptance": "leviathan",
        "max_new_tokens": 12,
    }  # fmt: skip
    together = decoder.generate(PROMPTS, seed=[1, 2, 3, 4], batch_size=3, **options)
    for i, prompt in enumerate(PROMPTS):
        assert decoder.generate(prompt, seed=[i + 1], **options).token_ids[0] == together.token_ids[i]


@pytest.mark.parametrize("acceptance", ["match", "coupled"])
def test_match_and_coupled_give_plain_decodings_text(acceptance: str) -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, check=False)
    options: dict[str, Any] = {"acceptance": acceptance, "temperature": 0.9, "seed": 5, "max_new_tokens": 20}
    plain = decoder.generate(PROMPTS, strategies=[], **options)
    out = decoder.generate(PROMPTS, strategies=[Eagle3(head_for(model))], **options)
    assert out.token_ids == plain.token_ids


def sampled(n: int, drafts: Any = None, acceptance: str = "leviathan", **cuts: Any) -> tuple[Generation, Any]:
    """n samples of three tokens, and the target. Three draft ids fewer than
    tokens: those have q = 0, and must come from the residual."""
    target = small_model(3, V)
    head = head_for(target, seed=4, layer_ids=(0,), observed=1, draft_vocab_size=10)
    assert head.lm_head is not None
    head.lm_head.weight.mul_(0.3)
    decoder = SpeculativeDecoder(target, check=False)
    strategies = [Eagle3(head, **(drafts or {"n_max": 2}))]
    return three_tokens(decoder, PROMPT, n, strategies=strategies, acceptance=acceptance, **cuts), target


@pytest.mark.fast(2, again=True)
@pytest.mark.parametrize("cuts", [{}, {"top_k": 6}], ids=["plain", "top_k"])
def test_samples_follow_the_targets_distribution(cuts: dict[str, Any]) -> None:
    out, target = sampled(samples(8_000, 3_000), **cuts)
    result = fit(cell(out.token_ids, V), three_token_law(target, PROMPT, 0.8, **cuts))
    assert result.holds, str(result)
    tally = out.stats.to_dict()["strategies"]["eagle3"]
    assert 0.05 < tally["accepted_tokens"] / tally["draft_tokens"] < 0.95
    assert tally["draft_tokens"] > 3_000


@pytest.mark.full
def test_penalties_apply_to_the_accepted_text() -> None:
    out, target = sampled(samples(8_000, 3_000), repetition_penalty=1.8)
    assert fit(cell(out.token_ids, V), three_token_law(target, PROMPT, 0.8, repetition_penalty=1.8)).holds
    assert not fit(cell(out.token_ids, V), three_token_law(target, PROMPT, 0.8)).holds


def test_a_q_that_is_not_what_was_sampled_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: tokens are sampled from a sharper distribution than q."""
    monkeypatch.setattr(strategy_module, "race", lambda p, stream: race(p**3, stream))
    out, target = sampled(3_000)
    assert not fit(cell(out.token_ids, V), three_token_law(target, PROMPT, 0.8)).holds


def test_state_is_kept_between_calls() -> None:
    """A conversation that goes on: the target keeps its keys and values, and shows no states of what it kept; drafts
    are those of a head that saw it all."""
    model = tiny_model("llama")
    strategy = watched(head_for(model))
    decoder = SpeculativeDecoder(model, check=False)
    ids = [1, 2, 3, 4, 5, 6]
    for more in ([], [9, 8, 7], [4]):
        strategy.seen.clear()
        ids = ids + more
        ids += decoder.generate(ids, strategies=[strategy], max_new_tokens=6, keep_state=True).token_ids[0]
        check_drafts(strategy, model, 2)


def test_a_text_whose_beginning_was_never_seen() -> None:
    """The call that computed it had no head: drafts are those of a head that sees the text from there on."""
    model = tiny_model("llama")
    strategy = watched(head_for(model))
    decoder = SpeculativeDecoder(model, check=False)
    ids = [*range(40, 70)]
    ids += decoder.generate(ids, strategies=[], max_new_tokens=4, keep_state=True).token_ids[0]
    known = len(ids) - 1  # the newest token had not been fed
    ids += [5, 6, 7, 8]
    out = decoder.generate(ids, strategies=[strategy], max_new_tokens=6, keep_state=True)
    assert out.token_ids == decoder.generate(ids, strategies=[], max_new_tokens=6).token_ids
    assert len(strategy.seen) > 2
    for text, tokens in strategy.seen:
        assert tokens
        assert tokens == slow_draft(strategy.head, model, text, len(tokens), known)


def test_a_head_is_given_by_its_folder(tmp_path: Path) -> None:
    model = tiny_model("llama")
    head = head_for(model)
    export(head, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    decoder = SpeculativeDecoder(model, check=False)
    out = decoder.generate(PROMPTS, max_new_tokens=8, strategies=f"eagle3:head={tmp_path}:n_max=2")
    [said] = out.provenance["strategies"]
    assert said["name"] == "eagle3"
    assert said["head"] == str(tmp_path)
    assert any("no rope_theta" in note for note in said["notes"])
    assert out.stats.to_dict()["strategies"]["eagle3"]["draft_tokens"] > 0
    assert out.token_ids == decoder.generate(PROMPTS, max_new_tokens=8, strategies=[]).token_ids


def test_wrong_heads_and_options_are_refused() -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, check=False)
    with pytest.raises(SpecdecError, match="no head was given"):
        make_drafters("eagle3", has_draft=False)
    with pytest.raises(SpecdecError, match="n_max"):
        Eagle3(head_for(model), n_max=0)
    with pytest.raises(SpecdecError, match="an EagleHead has its own"):
        Eagle3(head_for(model), config={"norm_output": True})
    with pytest.raises(SpecdecError, match=r"numbers a token|hidden size"):
        decoder.generate([1, 2, 3], max_new_tokens=4, strategies=[Eagle3(head_for(model, target_hidden_size=24))])
    with pytest.raises(SpecdecError, match="cannot be observed in a target of 3 blocks"):
        decoder.generate([1, 2, 3], max_new_tokens=4, strategies=[Eagle3(head_for(model, layer_ids=(1, 2, 7)))])
    last = head_for(model, layer_ids=(0, 1, 3))
    with pytest.raises(SpecdecError, match="output of the last block"):
        decoder.generate([1, 2, 3], max_new_tokens=4, strategies=[Eagle3(last)])


# -- dynamic trees -----------------------------------------------------------------------------------------------------

SIZE = {"nodes": 14, "top_k": 4, "depth": 3}


def slow_log_probs(head: EagleHead, start: tuple[Tensor, Tensor], path: Sequence[int]) -> Tensor:
    """After a text and a path of draft ids [V_d], from the head computed anew for each token."""
    embeddings, features = start
    logits, out = from_scratch(head, embeddings, features)
    for token in path:
        embeddings = torch.cat([embeddings, head.embed(head.to_target(torch.tensor([[token]])))], dim=1)
        features = torch.cat([features, out[:, -1:]], dim=1)
        logits, out = from_scratch(head, embeddings, features)
    return logits[0, -1].log_softmax(-1)


def slow_tree_of(head: EagleHead, model: Any, ids: Sequence[int], size: TreeSize) -> list[tuple[int, ...]]:
    """The paths of the dynamic tree's nodes after a text, in order, as target ids: plain loops, one node at a time."""
    start = entries_of(head, model, ids)
    found: list[tuple[tuple[int, ...], float]] = []
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(size.depth + 1):
        level = []
        for path, score in frontier:
            best = slow_log_probs(head, start, path).topk(size.top_k)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            level += [((*path, token), score + value) for token, value in pairs]
        found += level
        frontier = sorted(level, key=lambda node: -node[1])[: size.top_k]
    kept = sorted(sorted(range(len(found)), key=lambda i: (-found[i][1], i))[: size.nodes])
    return [tuple(int(head.to_target(torch.tensor(t))) for t in found[i][0]) for i in kept]


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.mark.fast(2)
@pytest.mark.parametrize("trained", [False, True], ids=["random", "accepted"])
def test_trees_equal_the_slow_oracles(trained: bool) -> None:
    """Whatever the rounds before accepted: a path's features have moved to where a chain would have them."""
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, check=False)
    plain = decoder.generate(PROMPTS, max_new_tokens=9, strategies=[])
    texts = [prompt + ids for prompt, ids in zip(PROMPTS, plain.token_ids, strict=True)]
    head = trained_head(model, texts) if trained else head_for(model)
    strategy = watched(head, **SIZE)
    out = decoder.generate(PROMPTS, max_new_tokens=9, strategies=[strategy], batch_size=3)
    assert out.token_ids == plain.token_ids
    assert out.stats.accepted_tokens > (8 if trained else -1)
    drafted = [(ids, made) for ids, made in strategy.made if len(ids) > 1]
    assert len(drafted) > 8
    size = TreeSize(SIZE["top_k"], SIZE["depth"], SIZE["nodes"])
    for ids, made in drafted:
        assert isinstance(made.parents, Tensor)
        paths = paths_of(made.tokens.tolist(), made.parents.tolist())
        assert paths == slow_tree_of(head, model, ids, size), ids


@pytest.mark.fast(1)
@pytest.mark.parametrize("acceptance", ["match", "leviathan", "coupled"])
def test_trees_give_plain_decodings_text(acceptance: str) -> None:
    """They have no q, so that every rule samples the target at their nodes with plain decoding's numbers."""
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, check=False)
    options: dict[str, Any] = {"acceptance": acceptance, "temperature": 0.9, "seed": 5, "max_new_tokens": 14}
    plain = decoder.generate(PROMPTS, strategies=[], **options)
    for batch in (1, 3):
        strategies = [Eagle3(head_for(model), **SIZE)]
        assert (
            decoder.generate(PROMPTS, strategies=strategies, batch_size=batch, **options).token_ids == plain.token_ids
        )


@pytest.mark.fast(1)
@pytest.mark.parametrize("others", ["draft-model:tree=3x2", "draft-model:branches=3:p_split=0.01:n_max=3"])
def test_states_below_another_strategys_tree(others: str) -> None:
    """Its accepted nodes were verified side by side; the head's next drafts see the path alone."""
    model = tiny_model("llama")
    strategy = watched(head_for(model))

    class Sometimes(DraftModel):
        """Leaves every second round to the next strategy."""

        def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            made = super().draft(requests)
            return [Draft() if len(r.tokens) % 2 else d for r, d in zip(requests, made, strict=True)]

    [given] = make_drafters(others, has_draft=True)
    other = Sometimes(**{k: v for k, v in given.parameters().items() if v is not None})
    decoder = SpeculativeDecoder(model, tiny_model("llama"), check=False)
    out = decoder.generate(PROMPTS, strategies=[other, strategy], max_new_tokens=24, batch_size=2)
    assert out.token_ids == decoder.generate(PROMPTS, strategies=[], max_new_tokens=24).token_ids
    assert out.stats.to_dict()["strategies"]["draft-model"]["accepted_tokens"] > 10
    check_drafts(strategy, model, 1)


@pytest.mark.fast(1)
@pytest.mark.parametrize("options", [{"n_max": 3}, SIZE], ids=["chain", "tree"])
@pytest.mark.parametrize("call", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_recorded_drafts_are_the_eager_ones(options: dict[str, int], call: dict[str, Any]) -> None:
    model = tiny_model("llama")
    eager, recorded = (SpeculativeDecoder(model, check=False) for _ in range(2))
    recorded.target = Runner(model, recorder=Rerun())
    strategies = [Eagle3(head_for(model), **options)]
    for prompts in (PROMPTS[:3], PROMPTS[:2]):
        expected = eager.generate(prompts, 10, strategies=strategies, **call)
        out = recorded.generate(prompts, 10, strategies=strategies, **call)
        assert out.token_ids == expected.token_ids
        assert out.stats.accepted_tokens == expected.stats.accepted_tokens
    with replayed() as counts:
        out = recorded.generate(PROMPTS[:2], 10, strategies=strategies, **call)
    assert counts["Tree" if "nodes" in options else "Proposal"] > 5
    passes = 1 + SIZE["depth"] if "nodes" in options else 3
    assert out.stats.draft_passes == passes * counts["Tree" if "nodes" in options else "Proposal"]
    assert out.stats.host_reads == out.stats.verify_passes
    assert recorded.target.failures == {}


@pytest.mark.parametrize("options", [{"nodes": 200}, {"nodes": 20, "top_k": 500}, {"nodes": -1}, {"depth": -1}])
def test_trees_that_cannot_be_grown_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(SpecdecError, match="eagle3: "):
        Eagle3(head_for(tiny_model("llama")), **{"top_k": 4, "depth": 2} | options)


# -- trees of a fixed shape --------------------------------------------------------------------------------------------

PLAN: Any = [3, [2, 0, 1], 1]


def slow_q(head: EagleHead, model: Any, ids: Sequence[int], path: Sequence[int], earlier: Sequence[int]) -> Tensor:
    """q of the next sibling after a path of target ids [V], from the head computed anew for each token."""
    embeddings, features = entries_of(head, model, ids)
    for token in path:
        out = from_scratch(head, embeddings, features)[1]
        embeddings = torch.cat([embeddings, head.embed(torch.tensor([[token]]))], dim=1)
        features = torch.cat([features, out[:, -1:]], dim=1)
    logits = from_scratch(head, embeddings, features)[0][0, -1]
    q = (head.over_target(logits, model.config.vocab_size, float("-inf")) / 0.9).softmax(-1)
    q[list(earlier)] = 0
    return q / q.sum()


@pytest.mark.parametrize("acceptance", ["leviathan", "match"])
def test_planned_trees_equal_the_slow_oracles(acceptance: str) -> None:
    """Node by node: the q that it was sampled from, or the best tokens of that q; whatever the rounds before accepted,
    in rows of different lengths."""
    model, seen = tiny_model("llama"), 0
    strategy = watched(head_for(model), tree=PLAN)
    decoder = SpeculativeDecoder(model, check=False)
    options: dict[str, Any] = {"temperature": 0.9, "acceptance": acceptance, "max_new_tokens": 7, "batch_size": 3}
    decoder.generate(PROMPTS, strategies=[strategy], **options)
    for ids, made in [(ids, made) for ids, made in strategy.made if len(ids) > 1][::3]:
        tokens, parents = made.tokens.tolist(), list(made.parents)
        paths = paths_of(tokens, parents)
        for node, parent in enumerate(parents):
            earlier = [tokens[i] for i in range(node) if parents[i] == parent]
            q = slow_q(strategy.head, model, ids, paths[node][:-1], earlier)
            if acceptance == "match":
                assert tokens[node] == int(q.argmax())
            else:
                assert made.q is not None
                torch.testing.assert_close(made.q[node], q, atol=1e-5, rtol=1e-4)
            seen += 1
    assert seen > 40


@pytest.mark.fast(1)
@pytest.mark.parametrize("batch", [1, 3])
def test_planned_trees_give_plain_decodings_text(batch: int) -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, check=False)
    plain = decoder.generate(PROMPTS, max_new_tokens=10, strategies=[])
    texts = [prompt + ids for prompt, ids in zip(PROMPTS, plain.token_ids, strict=True)]
    options: dict[str, Any] = {"strategies": [Eagle3(trained_head(model, texts), tree=PLAN)], "max_new_tokens": 10}
    out = decoder.generate(PROMPTS, batch_size=batch, **options)
    assert out.token_ids == plain.token_ids
    assert out.stats.accepted_tokens > 8
    for call in ({"acceptance": "match", "repetition_penalty": 1.3}, {"acceptance": "coupled", "top_p": 0.9}):
        call |= {"temperature": 0.9, "seed": 5}
        plain = decoder.generate(PROMPTS, max_new_tokens=10, strategies=[], **call)
        assert decoder.generate(PROMPTS, batch_size=batch, **options, **call).token_ids == plain.token_ids


@pytest.mark.fast(2, again=True)
@pytest.mark.parametrize(
    "cuts", [{}, {"top_p": 0.8}, {"repetition_penalty": 1.8}, {"top_k": 3}], ids=lambda c: next(iter(c), "plain")
)
def test_samples_of_planned_trees_follow_the_targets_distribution(cuts: dict[str, Any]) -> None:
    """Siblings are tested by recursive rejection; top_k=3 leaves fewer tokens than the shape has children."""
    n = samples(1_500 if "repetition_penalty" in cuts else 8_000, 1_500)
    out, target = sampled(n, {"tree": "4x2"}, **cuts)
    result = fit(cell(out.token_ids, V), three_token_law(target, PROMPT, 0.8, **cuts))
    assert result.holds, str(result)
    assert 0.05 < out.stats.acceptance_rate_per_position[0] < 0.98


@pytest.mark.parametrize("fault", ["another q than sampled", "keeps the likely ones"])
def test_planned_trees_with_a_fault_are_found_out(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Negative controls: tokens are sampled from a sharper distribution than q; unlikely samples are pruned."""
    right = planned_tree.sampled_children

    def wrong(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        if fault == "keeps the likely ones":
            tokens, found = right(q, *rest)
            return tokens, found * (found.gather(-1, tokens[..., None]) > 0.2)
        tokens, left, found = right(q**3, *rest)[0], q, []
        for i in range(tokens.shape[-1]):
            found.append(left / left.sum(-1, keepdim=True))
            left = left.scatter(-1, tokens[..., i : i + 1], 0.0)
        return tokens, torch.stack(found, dim=-2)

    monkeypatch.setattr(planned_tree, "sampled_children", wrong)
    out, target = sampled(3_000, {"tree": "3x2"})
    assert not fit(cell(out.token_ids, V), three_token_law(target, PROMPT, 0.8)).holds


@pytest.mark.fast(1)
@pytest.mark.parametrize("call", [{"temperature": 0.9, "acceptance": "leviathan", "seed": 3}, {}], ids=["q", "greedy"])
def test_recorded_planned_trees_are_the_eager_ones(call: dict[str, Any]) -> None:
    model = tiny_model("llama")
    eager, recorded = (SpeculativeDecoder(model, check=False) for _ in range(2))
    recorded.target = Runner(model, recorder=Rerun())
    strategies = [Eagle3(head_for(model), tree=PLAN)]
    for prompts in (PROMPTS[:3], PROMPTS[:2]):
        expected = eager.generate(prompts, 10, strategies=strategies, **call)
        out = recorded.generate(prompts, 10, strategies=strategies, **call)
        assert out.token_ids == expected.token_ids
        assert out.stats.accepted_tokens == expected.stats.accepted_tokens
    with replayed() as counts:
        out = recorded.generate(PROMPTS[:2], 10, strategies=strategies, **call)
    assert counts["PlannedTrees"] > 5
    assert out.stats.draft_passes == 3 * counts["PlannedTrees"]
    assert out.stats.host_reads == out.stats.verify_passes
    assert recorded.target.failures == {}


def test_plans_that_are_none_are_refused_and_opt_is_a_dynamic_tree() -> None:
    head = head_for(tiny_model("llama"))
    for options in ({"tree": [0]}, {"tree": "2y2"}, {"tree": [2], "nodes": 4}, {"tree": "opt-8", "nodes": 4}):
        with pytest.raises(SpecdecError, match="eagle3: tree"):
            Eagle3(head, **options)
    assert Eagle3(head, tree="opt-8") == Eagle3(head, nodes=8)


# -- what may be wrong with a head, a target or a text -----------------------------------------------------------------


@pytest.mark.fast(3)
@pytest.mark.parametrize("options", [{}, SIZE, {"tree": "2x2"}], ids=["chain", "tree", "planned"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_a_broken_head_costs_acceptance_and_no_more(value: float, options: dict[str, int]) -> None:
    model = tiny_model("llama")
    decoder = SpeculativeDecoder(model, check=False)
    head = head_for(model)
    assert head.lm_head is not None
    head.lm_head.weight.fill_(value)
    for call in ({}, {"temperature": 0.9, "acceptance": "match", "seed": 1}):
        plain = decoder.generate(PROMPTS, max_new_tokens=6, strategies=[], **call)
        out = decoder.generate(PROMPTS, max_new_tokens=6, strategies=[Eagle3(head, **options)], **call)
        assert out.token_ids == plain.token_ids
    decoder.generate(
        PROMPTS, max_new_tokens=6, strategies=[Eagle3(head, **options)], temperature=0.9, acceptance="leviathan"
    )


@pytest.mark.fast(1)
@pytest.mark.parametrize("options", [{"n_max": 6}, SIZE, {"tree": "2x1x1"}], ids=["chain", "tree", "planned"])
def test_texts_that_reach_the_end_of_the_context(options: dict[str, int]) -> None:
    model = tiny_model("llama", max_position_embeddings=32)
    decoder = SpeculativeDecoder(model, check=False)
    plain = decoder.generate(PROMPTS, max_new_tokens=40, strategies=[])
    assert set(plain.finish_reasons) == {"context"}
    strategies = [Eagle3(head_for(model), **options)]
    assert (
        decoder.generate(PROMPTS, max_new_tokens=40, strategies=strategies, batch_size=3).token_ids == plain.token_ids
    )
    one = decoder.generate(PROMPTS, max_new_tokens=1, strategies=strategies)
    assert one.token_ids == [ids[:1] for ids in plain.token_ids]


@pytest.mark.parametrize("version", [1, 3])
def test_a_head_that_borrows_from_a_target_of_another_dtype(version: int) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    changes = HEADS["eagle-1"] if version == 1 else {"hidden_size": 32}
    changes = changes | {"own_embedding": False, "own_lm_head": False, "draft_vocab_size": 128}
    strategy = watched(head_for(model, **changes))
    decoder = SpeculativeDecoder(model, check=False)
    out = decoder.generate(PROMPTS, max_new_tokens=8, strategies=[strategy], exact=False)
    assert out.stats.draft_tokens > 10
    narrow = head_for(model, own_embedding=False, own_lm_head=False, draft_vocab_size=128)
    with pytest.raises(SpecdecError, match="wide and do not fit"):
        decoder.generate(PROMPTS, max_new_tokens=8, strategies=[Eagle3(narrow)])
