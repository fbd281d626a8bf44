"""Constraints: the output never leaves them, whatever drafts; states follow the text and cost one step a position."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from transformers.generation import logits_process as hf

from specdec import DraftModel, PromptLookup, SpecdecError, SpeculativeDecoder
from specdec.sampling.constraints import Grammar, PrefixStates
from specdec.sampling.processors import apply_processors
from specdec.sampling.texts import KnownTexts
from tests.helpers.dfa import DFA, RollbackDFA, Table, accepts
from tests.helpers.laws import small_model
from tests.helpers.playing import Scripted, check_counts
from tests.helpers.prefixes import random_pass
from tests.helpers.tiny import tiny_model
from tests.helpers.tokens import byte_level

V = 13
TABLE: Table = {s: {t: t % 3 for t in range(V) if t % 3 != s} for s in range(3)}
N = 12
PROMPTS = [[5, 7, 5, 7, 5], [1], [9, 9, 9, 2]]
STRATEGIES: dict[str, list[Any]] = {
    "plain": [],
    "model": [DraftModel(n_max=4)],
    "lookup": [PromptLookup(n_max=4)],
    "both": [PromptLookup(ngram_min=2), DraftModel(n_max=3)],
    "junk": [Scripted(lambda ids: [ids[-1], 4, 4, 0])],  # much of it forbidden
}


@cache
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(small_model(0, V), small_model(1, V), check=False)


def _run(strategy: str, constraint: Any, **options: Any) -> Any:
    return decoder().generate(
        PROMPTS, N, strategies=STRATEGIES[strategy], logits_processor=[constraint], batch_size=2, **options
    )


@pytest.mark.fast(5, full=6)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9}, {"temperature": 0.9, "acceptance": "match"}], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_text_stays_inside_the_constraint(strategy: str, options: dict[str, Any]) -> None:
    out = _run(strategy, DFA(TABLE), **options)
    assert all(len(row) == N and accepts(TABLE, row) for row in out.token_ids)
    if options.get("acceptance") == "match" or not options:
        assert out.token_ids == _run("plain", DFA(TABLE), **options).token_ids
    if strategy == "model":
        assert out.stats.accepted_tokens > 0
    free = decoder().generate(PROMPTS, N, strategies=[], **options)
    assert not any(accepts(TABLE, row) for row in free.token_ids)  # the constraint does something
    check_counts(out)


def test_greedy_text_is_that_of_transformers_with_the_same_rule() -> None:
    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        state = 0
        for token in ids[len(PROMPTS[0]) :].tolist():
            state = TABLE[state][token]
        return list(TABLE[state])

    ids = torch.tensor([PROMPTS[0]])
    theirs = small_model(0, V).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=N, pad_token_id=0,
        prefix_allowed_tokens_fn=allowed,
    )[0, len(PROMPTS[0]) :].tolist()  # fmt: skip
    for strategy in STRATEGIES:
        assert _run(strategy, DFA(TABLE)).token_ids[0] == theirs
        out = decoder().generate(PROMPTS[0], N, strategies=STRATEGIES[strategy], prefix_allowed_tokens_fn=allowed)
        assert out.token_ids[0] == theirs  # and `allowed` was never shown a text that it forbids


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_position_costs_one_step_also_where_draft_and_target_both_ask(strategy: str) -> None:
    constraint = DFA(TABLE)
    out = _run(strategy, constraint, temperature=0.9)
    unused = 4 * len(PROMPTS)  # drafted in the last round of a row, where less was asked for
    assert 0 < constraint.advances <= out.stats.draft_tokens + out.stats.rounds + unused
    states = PrefixStates(constraint, [5])
    before = constraint.advances
    for text in ([4], [4, 6], [4, 6, 1], [4], [4, 6, 1], [4, 8]):
        states.at(text)
    assert constraint.advances == before + 4  # one for each different text
    states.commit([4, 6])
    assert states.at([1]) is not None
    assert constraint.advances == before + 4


@pytest.mark.fast(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_matcher_with_rollback_gives_the_text_of_pure_states(strategy: str) -> None:
    for options in ({}, {"temperature": 0.9}):
        assert (
            _run(strategy, RollbackDFA(TABLE), **options).token_ids == _run(strategy, DFA(TABLE), **options).token_ids
        )


@pytest.mark.parametrize("kind", [DFA, RollbackDFA])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_masks_follow_every_path_of_a_pass(tree: bool, kind: Any) -> None:
    masked = dead = 0
    for seed in range(10):
        states: list[PrefixStates] = []

        def make(row: int, prompt: Sequence[int], states: list[PrefixStates] = states) -> list[PrefixStates]:
            states.append(PrefixStates(kind(TABLE), prompt))
            return [states[-1]]

        history = random_pass(make, V, seed, tree)
        scores = torch.randn(*history.fed.shape, V, generator=torch.Generator().manual_seed(seed))
        out = apply_processors(scores.clone(), KnownTexts.of(history, scores))
        for b, state in enumerate(states):
            for s in range(history.counts[b]):
                text = history.prefix(b, s)[state.size :].tolist()
                expected = scores[b, s]
                if accepts(TABLE, text):
                    allowed = torch.tensor([accepts(TABLE, [*text, t]) for t in range(V)])
                    expected = expected.masked_fill(~allowed, float("-inf"))
                masked, dead = masked + accepts(TABLE, text), dead + (not accepts(TABLE, text))
                assert torch.equal(out[b, s], expected)
    assert masked > 20
    assert dead > 20  # tokens behind a forbidden one are never emitted, and left alone


def test_a_constraint_without_a_way_on_ends_its_row() -> None:
    dead_end: Table = {0: {3: 1, 4: 1}, 1: {5: 2}, 2: {}}
    with pytest.raises(SpecdecError, match="-inf"):
        decoder().generate(PROMPTS, 9, logits_processor=DFA(dead_end))
    with pytest.raises(SpecdecError, match="position 3"):
        decoder().generate([1], 9, strategies=[], logits_processor=[DFA(dead_end)])


# -- scores that depend on a state ---------------------------------------------------------------------------------


class _Cooling:
    """A processor with a state and no mask: the more often 7 has been said, the flatter the law."""

    def start(self, prompt: Sequence[int]) -> int:
        return list(prompt).count(7)

    def advance(self, state: int, token: int) -> int:
        return state + (token == 7)

    def process(self, state: int, scores: torch.Tensor) -> torch.Tensor:
        return scores / (1 + state)


class _CoolingByText(hf.LogitsProcessor):
    """The same as a function of the whole text."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores / (1 + (input_ids == 7).sum(dim=-1, keepdim=True))


@pytest.mark.fast(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_processor_with_a_state_equals_the_one_that_reads_the_whole_text(strategy: str) -> None:
    for acceptance in ("match", "leviathan"):
        out = _run(strategy, _Cooling(), temperature=0.9, acceptance=acceptance)
        assert out.token_ids == _run(strategy, _CoolingByText(), temperature=0.9, acceptance=acceptance).token_ids


def test_a_state_starts_from_the_prompt_of_its_own_row() -> None:
    seen: list[list[int]] = []

    class Witness(DFA):
        def start(self, prompt: Sequence[int]) -> int:
            seen.append(list(prompt))
            return 0

    _run("model", Witness(TABLE))
    assert sorted(seen) == sorted([*PROMPTS, PROMPTS[0]])  # the first row's once more, as a check of the call


# -- grammars ------------------------------------------------------------------------------------------------------


@cache
def tokenizer() -> Any:
    return byte_level()


@cache
def speller(padded: int = 0) -> SpeculativeDecoder:
    """A pair over the byte-level vocabulary; a model may have more rows than its tokenizer has ids."""
    vocab = len(tokenizer()) + padded
    target, draft = tiny_model("llama", 0, vocab), tiny_model("llama", 1, vocab)
    return SpeculativeDecoder(target, draft, tokenizer(), check=False)


PHRASE = r"(the|a) (quick|lazy) (fox|dog)( jumps){0,3}"
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["kind", "n"],
    "properties": {"kind": {"enum": ["fox", "dog"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
}  # fmt: skip


@pytest.mark.fast(6, full=6)
@pytest.mark.parametrize("padded", [0, 40])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.2}, {"temperature": 1.2, "acceptance": "match"}], ids=str)
@pytest.mark.parametrize("strategies", [[], [PromptLookup()], [DraftModel(n_max=4)]], ids=["plain", "lookup", "model"])
def test_a_regular_expression_matches_the_whole_text(strategies: Any, options: dict[str, Any], padded: int) -> None:
    pytest.importorskip("llguidance", reason="the extra specdec[grammar] is not installed")
    grammar = Grammar.regex(PHRASE, tokenizer())
    out = speller(padded).generate(
        ["the fox the fox", "a"], 40, strategies=strategies, logits_processor=grammar, eos_token_id=2, **options
    )
    assert out.finish_reasons == ["eos", "eos"]
    assert all(re.fullmatch(PHRASE, text) for text in out.texts)
    if options.get("acceptance") == "match" or not options:
        plain = speller(padded).generate(
            ["the fox the fox", "a"], 40, strategies=[], logits_processor=grammar, eos_token_id=2, **options
        )
        assert out.token_ids == plain.token_ids


def test_a_json_schema_is_kept_and_gives_parsable_text() -> None:
    pytest.importorskip("llguidance", reason="the extra specdec[grammar] is not installed")
    grammar = Grammar.json_schema(SCHEMA, tokenizer())
    out = speller().generate(
        ["the quick"] * 4, 60, logits_processor=[grammar], eos_token_id=2, temperature=0.9, no_repeat_ngram_size=0,
        repetition_penalty=1.02, strategies=[PromptLookup(), DraftModel(n_max=5)],
    )  # fmt: skip
    for text, reason in zip(out.texts, out.finish_reasons, strict=True):
        if reason == "eos":
            value = json.loads(text)
            assert value["kind"] in ("fox", "dog")
            assert 0 <= value["n"] <= 99
    assert "eos" in out.finish_reasons
    assert out.stats.accepted_tokens > 0


def test_a_lark_grammar_is_kept() -> None:
    pytest.importorskip("llguidance", reason="the extra specdec[grammar] is not installed")
    grammar = Grammar.lark('start: ("ab" | "c")* "."', tokenizer())
    out = speller().generate("a", 40, logits_processor=grammar, eos_token_id=2, temperature=1.0, seed=3)
    assert re.fullmatch(r"(ab|c)*\.?", out.texts[0])
    assert out.texts[0].endswith(".") == (out.finish_reasons == ["eos"])


def test_bad_grammars_are_refused_in_one_line() -> None:
    pytest.importorskip("llguidance", reason="the extra specdec[grammar] is not installed")
    for make in (
        lambda: Grammar.regex("a(b", tokenizer()),
        lambda: Grammar.lark("%%", tokenizer()),
        lambda: Grammar.json_schema({"type": "nonsense"}, tokenizer()),
        lambda: Grammar.json_schema("{", tokenizer()),
        lambda: Grammar.regex("ab", object()),
    ):
        with pytest.raises(SpecdecError) as caught:
            make()
        assert "\n" not in str(caught.value)


def test_without_the_extra_a_grammar_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SpecdecError, match=r"specdec\[grammar\]"):
        Grammar.regex("ab", tokenizer())


def test_allowed_tokens_that_have_no_score_left_are_forced_as_in_transformers() -> None:
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        pytest.skip("older versions of transformers emit a forbidden token there")
    options: dict[str, Any] = {"bad_words_ids": [[4]], "prefix_allowed_tokens_fn": lambda *_: [4]}
    ids = torch.tensor([PROMPTS[0]])
    theirs = small_model(0, V).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4, pad_token_id=0, **options
    )[0, len(PROMPTS[0]) :].tolist()  # fmt: skip
    assert decoder().generate(PROMPTS[0], 4, **options).token_ids == [theirs] == [[4] * 4]
