"""Pairs of one family whose special tokens differ: paired, never wrong, and refused where the text itself differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

import specdec
from specdec import SpecdecError, SpeculativeDecoder
from specdec.models.vocabulary import Vocabularies, compare_vocabularies
from tests.helpers.laws import cell, fit, samples, small_model, three_token_law, three_tokens
from tests.helpers.playing import random_ids, weaker
from tests.helpers.tiny import tiny_model

WORDS = [f"w{i}" for i in range(97)]


def tokenizer(
    added: Sequence[str] = (), words: Sequence[str] = WORDS, normalizer: Any = None, bos: str | None = None,
    **special: str,
) -> Any:  # fmt: skip
    """Whole words, then special tokens in the order given."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if normalizer is not None:
        inner.normalizer = normalizer
    made = PreTrainedTokenizerFast(tokenizer_object=inner)
    made.add_tokens([AddedToken(text, special=True) for text in added])
    made.add_special_tokens(special)
    if bos is not None:
        i = made.convert_tokens_to_ids(bos)
        made.bos_token = bos
        made.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, i)])
    return made


class Slow(PreTrainedTokenizer):
    """A tokenizer in Python: no backend."""

    def __init__(self, words: Sequence[str], **options: Any):
        self.words = list(words)
        super().__init__(**options)

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return text.split()

    def _convert_token_to_id(self, token: str) -> int:
        return self.words.index(token) if token in self.words else 0

    def _convert_id_to_token(self, index: int) -> str:
        return self.words[index]


MANY = [f"<|extra_{i}|>" for i in range(200)]
PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any], tuple[int, ...]]] = {
    "renamed": (lambda: tokenizer(eos_token="<end>"), lambda: tokenizer(eos_token="<|im_end|>"), (97,)),
    "exchanged": (lambda: tokenizer(["<a>", "<b>"]), lambda: tokenizer(["<b>", "<a>"]), (97, 98)),
    "200 more in the draft": (lambda: tokenizer(["<a>"]), lambda: tokenizer(["<a>", *MANY]), tuple(range(98, 298))),
    "200 more in the target": (lambda: tokenizer(["<a>", *MANY]), lambda: tokenizer(["<a>"]), tuple(range(98, 298))),
    "no pad": (lambda: tokenizer(["<a>"], pad_token="<pad>"), lambda: tokenizer(["<a>"]), (98,)),
    "another place": (lambda: tokenizer(["<x>", "<end>"]), lambda: tokenizer(["<y>", "<z>", "<end>"]), (97, 98, 99)),
    "other BOS": (lambda: tokenizer(["<s>"], bos="<s>"), lambda: tokenizer(["<|begin|>"], bos="<|begin|>"), (97,)),
    "BOS of one": (lambda: tokenizer(["<s>"], bos="<s>"), lambda: tokenizer(["<t>"]), (97,)),
    "none in the draft": (lambda: tokenizer(["<a>"], eos_token="<end>"), tokenizer, (97, 98)),
    "words where the other has specials": (
        lambda: tokenizer(["<a>", "<b>"]), lambda: tokenizer(["<a>"], words=[*WORDS, "w97"]), (97, 98),
    ),
    "in Python": (lambda: tokenizer(["<a>"]), lambda: Slow(WORDS, eos_token="<b>"), (97,)),
    "the first ids": (lambda: tokenizer(words=["a", "b", *WORDS[2:]]), lambda: tokenizer(words=WORDS), (0, 1)),
}  # fmt: skip
IDENTICAL: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a normaliser": (lambda: tokenizer(normalizer=normalizers.Lowercase()), tokenizer),
    "what is EOS": (
        lambda: tokenizer(["<a>", "<b>"], eos_token="<a>"),
        lambda: tokenizer(["<a>", "<b>"], eos_token="<b>"),
    ),
    "in Python": (tokenizer, lambda: Slow(WORDS)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_ids_that_differ_are_found_and_named(name: str) -> None:
    target, draft, differing = PAIRS[name]
    found = Vocabularies.compare(target(), draft())
    assert (found.kind, found.differing) == ("compatible", differing)
    assert f"token {differing[0]} is" in found.examples
    assert compare_vocabularies(draft(), target()) == "compatible"


@pytest.mark.parametrize("name", IDENTICAL)
def test_what_no_id_shows_is_no_difference(name: str) -> None:
    target, draft = IDENTICAL[name]
    assert compare_vocabularies(target(), draft()) == "identical"


def pair(name: str, sizes: tuple[int, int] = (300, 300), strategies: Any = None) -> SpeculativeDecoder:
    target, draft, _ = PAIRS[name]
    model = tiny_model("llama", 3, vocab=sizes[0])
    other = weaker(model, 0.1) if sizes[0] == sizes[1] else tiny_model("llama", 4, vocab=sizes[1])
    return SpeculativeDecoder(model, other, target(), draft(), strategies=strategies, check=False)


PROMPTS = [random_ids(6, 1, 97), random_ids(4, 2, 97)]
CHAINS: dict[str, Any] = {
    "chain": ["draft-model:n_max=4"],
    "with p_min": [specdec.DraftModel(n_max=4, p_min=0.1)],
    "tree": [specdec.DraftModel(tree="3x2")],
    "branches": [specdec.DraftModel(n_max=3, branches=3)],
}


@pytest.mark.fast(4)
@pytest.mark.parametrize("name", PAIRS)
def test_greedy_text_is_plain_text_and_ids_that_differ_are_never_drafted(name: str) -> None:
    differing = set(PAIRS[name][2])
    dec = pair(name, strategies=CHAINS["chain"])
    assert dec.report.vocabulary == "compatible"
    assert dec.report.to_dict()["differing_ids"] == sorted(differing)
    assert any("never proposes them" in warning for warning in dec.report.warnings)
    plain = dec.generate(PROMPTS, 24, strategies=[])
    assert dec.generate(PROMPTS, 24).token_ids == plain.token_ids
    drafted = {t for prompt in PROMPTS for r in dec.rounds(prompt, 24) for t in r.draft}
    assert drafted
    assert not drafted & differing


@pytest.mark.fast(5)
@pytest.mark.parametrize("acceptance", ["leviathan", "match", "coupled"])
@pytest.mark.parametrize("chain", CHAINS)
def test_sampled_drafts_hold_no_id_that_differs_and_q_says_so(chain: str, acceptance: str) -> None:
    dec = pair("200 more in the draft", strategies=CHAINS[chain])
    options: dict[str, Any] = {"max_new_tokens": 16, "temperature": 3.0, "seed": 1, "acceptance": acceptance}
    rounds = [r for prompt in PROMPTS for r in dec.rounds(prompt, **options)]
    assert sum(len(r.draft) for r in rounds) > 20
    assert not {t for r in rounds for t in r.draft} & set(range(98, 298))
    if acceptance != "leviathan":
        plain = dec.generate(PROMPTS, strategies=[], **options).token_ids
        assert dec.generate(PROMPTS, **options).token_ids == plain
    else:
        assert all(q > 0 for r in rounds for q in r.q or ())


SPECIAL_13 = [f"w{i}" for i in range(10)]
SAMPLES = samples(8_000, 1_500)


@pytest.mark.parametrize(
    "strategy",
    [specdec.DraftModel(n_max=2), pytest.param(specdec.DraftModel(tree="2x1"), marks=pytest.mark.full)],
    ids=["chain", "tree"],
)
def test_text_follows_the_targets_distribution_under_leviathan(strategy: Any) -> None:
    """Three of thirteen ids are not common; the draft would like to propose them in a quarter of the places."""
    tokenizers = [tokenizer(added, SPECIAL_13) for added in (["<a>", "<b>", "<c>"], ["<x>", "<c>", "<b>"])]
    target, draft = small_model(3, 13), small_model(1, 13)
    dec = SpeculativeDecoder(target, draft, *tokenizers, strategies=[strategy], check=False)
    assert dec.report.differing == (10, 11, 12)
    dec.tokenizer = None  # decoding thousands of texts takes longer than sampling them
    prompt = [5, 7, 5, 11, 10]  # ids that differ may stand in the prompt
    out = three_tokens(dec, prompt, SAMPLES, acceptance="leviathan", seed=2)
    result = fit(cell(out.token_ids, 13), three_token_law(target, prompt, 0.8))
    assert result.holds, str(result)
    assert 0.05 < out.stats.accepted_tokens / out.stats.draft_tokens < 0.95
    assert {10, 11, 12} & {t for row in out.token_ids for t in row}


def test_ids_that_one_model_lacks_are_fed_as_others() -> None:
    """The target's text holds ids behind the draft's embedding, and the draft's tokenizer more than its model."""
    dec = pair("200 more in the target", (300, 99), CHAINS["chain"])
    prompt = [3, 250, 98, 4]
    assert dec.generate(prompt, 16).token_ids == dec.generate(prompt, 16, strategies=[]).token_ids
    dec = pair("200 more in the draft", (99, 120), CHAINS["chain"])
    out = dec.generate([3, 98, 4], 16)
    assert out.token_ids == dec.generate([3, 98, 4], 16, strategies=[]).token_ids


def test_a_draft_that_wants_nothing_else_proposes_something_common() -> None:
    """All its mass lies on ids that differ: what is left is renormalised before anything is sampled."""
    dec = pair("renamed", (98, 98), CHAINS["chain"])
    assert dec.draft is not None
    with torch.no_grad():
        dec.draft.model.lm_head.weight.mul_(0.01)
        dec.draft.model.lm_head.weight[97].mul_(1e4)
    for options in ({}, {"temperature": 1.0, "acceptance": "leviathan"}):
        rounds = list(dec.rounds(PROMPTS[0], 12, **options))
        assert {t for r in rounds for t in r.draft}
        assert 97 not in {t for r in rounds for t in r.draft}


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "shifted by one": (tokenizer, lambda: tokenizer(words=["<s>", *WORDS]), "92 of 97 common ids differ: token 5 is"),
    "one word": (tokenizer, lambda: tokenizer(words=[*WORDS[:50], "x", *WORDS[51:]]), "1 of 97 common .*: token 50"),
    "129 words more": (
        lambda: tokenizer(words=[*WORDS, *(f"v{i}" for i in range(129))]), tokenizer, "226 and 97 differ by .* 128",
    ),
    "nothing in common": (
        lambda: tokenizer(words=["a", "b"]), lambda: tokenizer(words=["c", "d"]), "no id has the same text",
    ),
    "kinds too": (tokenizer, lambda: Slow([*WORDS[:-1], "x"]), "tokenizer kinds WordLevel and Slow; 1 of 97"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_another_vocabulary_is_refused_by_ids_and_count(name: str) -> None:
    target, draft, message = REFUSED[name]
    model = tiny_model("llama", 3, vocab=300)
    with pytest.raises(SpecdecError, match=rf"tokenizer mismatch.*{message}.*translate=True") as error:
        SpeculativeDecoder(model, model, target(), draft(), check=False)
    assert "\n" not in str(error.value)


def test_drafting_through_text_works_where_ids_differ_too() -> None:
    dec = pair("renamed", (98, 98), [specdec.DraftModel(n_max=3, translate=True)])
    assert dec.generate(PROMPTS, 12).token_ids == dec.generate(PROMPTS, 12, strategies=[]).token_ids
