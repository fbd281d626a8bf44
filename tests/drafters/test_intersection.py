"""draft-model over the intersection of two vocabularies: the map, the target's law, and plain decoding's text."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import specdec
from specdec import DraftModel, SpecdecError, SpeculativeDecoder
from specdec.drafters.draft_model.core import DraftCore
from specdec.drafters.draft_model.intersection import counterparts
from tests.helpers.laws import Fit, cell, fit, small_model, three_token_law, three_tokens
from tests.helpers.playing import check_counts
from tests.helpers.tiny import tiny_model
from tests.helpers.tokens import byte_level, word_level

WORDS = ["?", "a", "b", "c", "d", "e", "f", "g", "h"]
THEIRS = ["?", "h", "x", "c", "b", "y", "a", "e"]  # "?" a b c e h are common, all but two at other ids
TARGET, DRAFT, PROMPT = len(WORDS), len(THEIRS), [1, 4, 2, 8]


def pair(**options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        small_model(3, TARGET), small_model(1, DRAFT), word_level(WORDS), word_level(THEIRS), check=False,
        strategies=[DraftModel(n_max=2, translate="intersection", **options)],
    )  # fmt: skip


# -- the map -----------------------------------------------------------------------------------------------------------


def test_the_map_is_by_text_and_one_to_one() -> None:
    expected = {WORDS.index(w): THEIRS.index(w) for w in WORDS if w in THEIRS}
    assert counterparts(word_level(WORDS), word_level(THEIRS), TARGET, DRAFT) == expected
    assert counterparts(word_level(WORDS), word_level(THEIRS), 3, 5) == {0: 0, 2: 4}  # ids beyond the models' sizes
    spaced = counterparts(word_level(["?", "Ġa", "▁a", "b"]), word_level(["▁a", "?"]), 9, 9)
    assert spaced == {0: 1, 1: 0}
    ends = word_level(["?", "a", "<end>"], eos_token="<end>"), word_level(["a", "</s>"], eos_token="</s>")
    assert counterparts(*ends, 9, 9) == {1: 0, 2: 1}


def test_vocabularies_without_a_common_token_are_refused() -> None:
    dec = SpeculativeDecoder(
        small_model(3, 2), small_model(1, 2), word_level(["a", "b"]), word_level(["c", "d"]), check=False,
        strategies=[DraftModel(translate="intersection")],
    )  # fmt: skip
    with pytest.raises(SpecdecError, match="no token in common"):
        dec.generate([0, 1], 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"translate": "tokens"}, "translate must be"), ({"translate": "intersection", "tree": [2]}, "chains"),
     ({"translate": "intersection", "replacements": {"a": "b"}}, "no effect without translate=True")],
)  # fmt: skip
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecdecError, match=message):
        DraftModel(**options)


# -- the law -----------------------------------------------------------------------------------------------------------


def law_of(n: int, acceptance: str = "leviathan", penalty: float = 1.0, **options: Any) -> tuple[Fit, Any]:
    sampled: dict[str, Any] = {"acceptance": acceptance, "repetition_penalty": penalty, "seed": 2}
    out = three_tokens(pair(**options), PROMPT, n, **sampled)
    law = three_token_law(small_model(3, TARGET), PROMPT, 0.8, penalty)
    return fit(cell(out.token_ids, TARGET), law), out


@pytest.mark.full
def test_processors_read_the_targets_ids_in_the_law() -> None:
    result, _ = law_of(400, penalty=1.3)
    assert result.holds, str(result)


def test_a_token_mapped_wrongly_after_it_was_sampled_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: q is right for what was sampled, and the id that is proposed is its neighbour in the intersection."""
    choose, common = DraftCore._choose, torch.tensor(sorted(counterparts(*map(word_level, (WORDS, THEIRS)), 9, 9)))
    after = torch.zeros(TARGET, dtype=torch.int64)
    after[common] = common.roll(1)

    def wrong(self: DraftCore, *arguments: Any) -> Any:
        token, sound, q = choose(self, *arguments)
        return after[token], sound, q

    monkeypatch.setattr(DraftCore, "_choose", wrong)
    assert not law_of(3_000)[0].holds


def test_q_that_was_not_renormalised_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other twin: the draft's distribution over its whole vocabulary, at the common tokens."""
    choose = DraftCore._choose

    def wrong(self: DraftCore, key: Any, sampling: Any, logits: Any, *more: Any) -> Any:
        token, sound, q = choose(self, key, sampling, logits, *more)
        return token, sound, None if q is None else q * 0.7

    monkeypatch.setattr(DraftCore, "_choose", wrong)
    with pytest.raises(SpecdecError, match="gave a q"):
        law_of(50)


# -- texts -------------------------------------------------------------------------------------------------------------


def test_drafted_ids_are_the_drafts_own_continuation_of_the_same_text() -> None:
    """Literally: every round's text is given to the draft in its ids, and the best common token is fed back."""
    dec, draft = pair(), small_model(1, DRAFT)
    common = {WORDS.index(w): THEIRS.index(w) for w in WORDS if w in THEIRS}
    text = list(PROMPT)
    for r in dec.rounds(PROMPT, 14):
        ids = [THEIRS.index(WORDS[t]) if t in common else 0 for t in text[: r.position + 1]]  # "?" for the others
        for proposed in r.draft:
            logits = draft(input_ids=torch.tensor([ids])).logits[0, -1].detach()
            best = max(common, key=lambda t: float(logits[common[t]]))
            assert proposed == best
            ids.append(common[best])
        text += r.tokens


@pytest.mark.fast(1)
@pytest.mark.parametrize("rule", ["coupled", "match"])
def test_text_is_plain_decodings_in_batches_and_behind_another_strategy(rule: str) -> None:
    model = tiny_model("llama", vocab=320)
    dec = SpeculativeDecoder(
        model, tiny_model("llama", 1, 300), byte_level(320), byte_level(300, ("<s>", "<x>", "</s>")), check=False
    )
    prompts, own = [[60, 61, 60], [70], [80, 81, 82, 80, 81]], DraftModel(n_max=3, translate="intersection")
    for options in ({}, {"temperature": 0.8, "acceptance": rule, "seed": 3, "repetition_penalty": 1.2}):
        plain = dec.generate(prompts, 8, strategies=[], **options)
        for chain in ([own], ["prompt-lookup", own]):
            out = dec.generate(prompts, 8, strategies=chain, batch_size=2, **options)
            assert out.token_ids == plain.token_ids
            check_counts(out)
            assert out.stats.draft_tokens > 0


def test_the_target_as_its_own_draft_is_always_accepted() -> None:
    loaded = specdec.load_pair("demo-target")
    own = DraftModel(n_max=4, translate="intersection")
    dec = SpeculativeDecoder(loaded.target, loaded.target, loaded.tokenizer, loaded.tokenizer, strategies=[own])
    out = dec.generate(["import os\nimport sys\n\n\ndef main():\n    "], 12)
    assert out.stats.draft_acceptance_rate == 1.0
    assert inspect.signature(DraftModel).parameters["translate"].default is False
