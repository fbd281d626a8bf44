"""Lookahead: the pool and the window against a slow oracle with lists, and plain decoding's text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdec import DraftModel, SpecdecError, SpeculativeDecoder
from specdec.drafters import lookahead
from specdec.drafters.base import DraftContext, DraftRequest
from specdec.drafters.lookahead import Lookahead
from specdec.drafters.ngram_pool import NgramPool
from specdec.models.runner import PassOutput, Runner
from specdec.models.trees import MISSING, check_parents, depths_of, merged_chains, path_to
from tests.helpers.playing import check_counts, looping, quoting_ids, weaker
from tests.helpers.tiny import tiny_model
from tests.oracle import oracle_greedy

PROMPTS = [quoting_ids(20, 1), [9, 8], [7], quoting_ids(33, 2)]
VOCAB, W, N, G, POOL = 7, 4, 4, 3, 12


class Slow:
    """One row by the paper's rules: a list of n-grams, the newest last, and a window of lists."""

    def __init__(self, prompt: list[int]):
        grams = [tuple(prompt[i : i + N]) for i in range(len(prompt) - N + 1)]
        self.pool = [g for i, g in enumerate(grams) if g not in grams[i + 1 :]][-POOL:]
        tail = (prompt[::-1] * (W * N))[: W * (N - 1)] if prompt else [0] * (W * (N - 1))
        self.levels = [tail[r * W : (r + 1) * W] for r in range(N - 1)]
        self.levels[0] = self.levels[0][:-1]
        self.made = 0

    def put(self, grams: list[tuple[int, ...]]) -> None:
        for gram in grams:
            self.pool = [() if g == gram else g for g in self.pool] + [gram]  # a known one leaves its place empty
        self.pool = self.pool[-POOL:]

    def paths(self, newest: int, window: bool) -> set[tuple[int, ...]]:
        """What the tree proposes: every node as the tokens down to it."""
        found = [g[1:] for g in self.pool[::-1] if g[:1] == (newest,)][:G]
        paths = {g[:k] for g in found for k in range(1, N)}
        if window:
            paths |= {tuple(self.levels[0][:k]) for k in range(1, W)}
            for column in range(W):
                up = [level[column] for level in self.levels[1:]]
                paths |= {(*self.levels[0][:column], *up[:k]) for k in range(1, N - 1)}
        return paths

    def advance(self, newest: int, best: Any) -> None:
        """best(path): the target's best token after the newest one and a path."""
        made, grams = [], []
        for column in range(W):
            up = [level[column] for level in self.levels[1:]]
            made.append(best((*self.levels[0][:column], *up)))
            grams.append(((newest, *self.levels[0])[column], *up, made[-1]))
        self.levels = [self.levels[1][1:], *self.levels[2:], made]
        self.made += 1
        if self.made > N - 2:
            self.put(grams)


def rounds(seed: int, n: int = 25) -> int:
    """How many of n rounds of two rows propose something else than the oracle; the target's best token is a hash of the
    path. Row 1 sits out every third round."""
    rng = np.random.default_rng(seed)
    context = DraftContext(2, 64, VOCAB, target=Runner(tiny_model("llama", vocab=VOCAB)))
    drafter = Lookahead(W, N, G, POOL).fresh(context)
    prompts = [rng.integers(0, VOCAB, 14).tolist(), [3]]
    slow = [Slow(p) for p in prompts]
    for row, prompt in enumerate(prompts):
        drafter.begin(row, prompt)
    wrong = 0
    for i in range(n):
        rows = [0] if i % 3 == 2 else [0, 1]
        newest = rng.integers(0, VOCAB, 2).tolist()
        room = 3 if i % 5 == 4 else 0
        drafts = drafter.draft([DraftRequest(row, [], newest[row], room) for row in rows])
        width = 1 + max(map(len, drafts))
        logits, fed, counts = torch.full((2, width, VOCAB), -1.0), torch.zeros((2, width), dtype=torch.int64), [1, 1]
        salt = int(rng.integers(0, 1000))
        for row, draft in zip(rows, drafts, strict=True):
            tokens, parents = draft.tokens.tolist(), draft.parents.tolist()  # type: ignore[union-attr]
            check_parents(parents, len(tokens), "lookahead")
            assert max(depths_of(parents)) <= (3 if room else draft.levels)
            paths = [tuple(tokens[k] for k in path_to(parents, node)) for node in range(len(tokens))]
            wrong += {p for p in paths if MISSING not in p} != slow[row].paths(newest[row], not room)
            fed[row, 0], counts[row] = newest[row], 1 + len(tokens)
            fed[row, 1 : 1 + len(tokens)] = draft.tokens.clamp(min=0)  # type: ignore[union-attr]
            for column, path in enumerate([(), *paths]):
                logits[row, column, hash((salt, *path)) % VOCAB] = 1.0
            if not room:
                slow[row].advance(newest[row], lambda path, salt=salt: hash((salt, *path)) % VOCAB)
        drafter.observe(PassOutput(logits, fed, [0, 0], counts))
    return wrong


def test_trees_windows_and_pools_are_those_of_the_slow_oracle() -> None:
    assert [rounds(seed) for seed in range(4)] == [0] * 4


@pytest.mark.parametrize("fault", ["order", "merge", "window"])
def test_a_wrong_pool_tree_or_window_is_found_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "order":
        put = NgramPool.put
        monkeypatch.setattr(NgramPool, "put", lambda self, rows, grams: put(self, rows, grams.flip(1)))
    elif fault == "merge":
        monkeypatch.setattr(
            lookahead, "merged_chains", lambda chains: (merged_chains(chains)[0], merged_chains(chains)[1].clamp(max=0))
        )
    else:
        above = Lookahead._above
        monkeypatch.setattr(Lookahead, "_above", lambda self, first: above(self, first).clamp(max=first))
    assert rounds(0) > 0


def test_passes_that_hold_no_window_teach_nothing() -> None:
    drafter = Lookahead(W, N, G, POOL).fresh(
        DraftContext(1, 64, VOCAB, target=Runner(tiny_model("llama", vocab=VOCAB)))
    )
    drafter.begin(0, [1, 2, 3])
    [draft] = drafter.draft([DraftRequest(0, [], 1)])
    before = drafter._window.clone()
    drafter.observe(PassOutput(torch.randn(1, 1, VOCAB), torch.tensor([[1, 2, 3]]), [0], [3]))  # prefill
    drafter.observe(PassOutput(torch.randn(1, 3, VOCAB), torch.tensor([[1, 2, 3]]), [0], [3]))  # another's draft
    assert torch.equal(drafter._window, before)
    drafter.draft([DraftRequest(0, [], 1)])
    logits = torch.full((1, 1 + len(draft), VOCAB), float("nan"))
    drafter.observe(PassOutput(logits, torch.zeros((1, 1 + len(draft)), dtype=torch.int64), [0], [1 + len(draft)]))
    assert 0 <= int(drafter._window.min()) <= int(drafter._window.max()) < VOCAB


@pytest.mark.fast(2)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mixtral"])
def test_greedy_text_is_plain_decodings(kind: str, batch: int) -> None:
    model = tiny_model(kind)
    expected = [oracle_greedy(model, p, 12) for p in PROMPTS]
    decoder = SpeculativeDecoder(model, weaker(model), check=False)
    for chain in ([Lookahead(4, 3, 4)], ["suffix", Lookahead(2, 4, 1), DraftModel(n_max=2)]):
        out = decoder.generate(PROMPTS, 12, strategies=chain, batch_size=batch)
        assert out.token_ids == expected
        check_counts(out)
        assert out.stats.accepted_tokens > 0


@pytest.mark.parametrize("rule", ["coupled", "leviathan"])
def test_sampled_text_is_plain_decodings_because_there_is_no_q(rule: str) -> None:
    decoder = SpeculativeDecoder(tiny_model("llama"), check=False)
    options: dict[str, Any] = {"temperature": 0.7, "acceptance": rule, "seed": 5, "repetition_penalty": 1.1}
    plain = decoder.generate(PROMPTS, 12, strategies=[], **options)
    out = decoder.generate(PROMPTS, 12, strategies=["lookahead:window=3:ngram=3:guesses=2"], batch_size=2, **options)
    assert out.token_ids == plain.token_ids


def test_the_windows_n_grams_are_worth_more_than_the_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that hardly looks back: what it made in the window is what it writes."""
    decoder = SpeculativeDecoder(looping(tiny_model("llama")), check=False)
    chain = [Lookahead(5, 3, 5)]
    out = decoder.generate([[5, 6]], 60, strategies=chain)
    monkeypatch.setattr(NgramPool, "put", lambda self, rows, grams: None)
    assert out.stats.tokens_per_round > 1.2 * decoder.generate([[5, 6]], 60, strategies=chain).stats.tokens_per_round


@pytest.mark.parametrize(
    ("options", "message"),
    [({"window": 1}, "window"), ({"ngram": 2}, "ngram"), ({"guesses": 0}, "guesses"), ({"guesses": 200}, "nodes .*859"),
     ({"pool": 3}, "pool")],
)  # fmt: skip
def test_parameters_out_of_range_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecdecError, match=f"lookahead: .*{message}"):
        Lookahead(**options)
