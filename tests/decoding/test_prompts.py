"""Prompts of every form, and text that is streamed, stopped and cut where it should be."""

from __future__ import annotations

import hashlib
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import StoppingCriteriaList

from specdec import DraftModel, SpecdecError, SpeculativeDecoder
from specdec.decoding.prompts import TextStream, encode_prompts
from specdec.decoding.provenance import hash_ids
from tests.helpers.playing import Scripted, check_counts, rest_of
from tests.helpers.tiny import tiny_model
from tests.helpers.tokens import byte_level, word_level

TEXTS = [
    "plain ascii, then more of it",
    "emoji 🎉🚀 and a family 👨‍👩‍👧‍👦 in one",
    "中文字符和日本語のテキスト、한국어",
    "combining: e\u0301 a\u0308 n\u0303 and \u0939\u093f\u0928\u094d\u0926\u0940",
    "flags 🇫🇷🇯🇵 \ufffd a real replacement character, tab\tand\nnewline",
    "  leading blanks , and spaces before . punctuation ? don 't",
]
DRAFTS = {"none": 0, "two": 2, "eight": 8, "all": 100}


@cache
def tokenizer() -> Any:
    return byte_level()


@cache
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_model("llama", vocab=len(tokenizer())), tokenizer=tokenizer())


def say(text: str) -> Any:
    """(prompt, options) of a call whose output is exactly `text`: a processor allows one next id only."""
    prompt = tokenizer()("the fox")["input_ids"]
    script = prompt + tokenizer()(text)["input_ids"]

    def only(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(scores, float("-inf"))
        out[0, script[min(ids.shape[1], len(script) - 1)]] = 0.0
        return out

    return prompt, script, {"logits_processor": [only], "max_new_tokens": len(script) - len(prompt)}


# -- forms of prompts ----------------------------------------------------------------------------------------------


def test_every_form_of_prompt_gives_the_same_rows() -> None:
    text, other = "the quick fox", "over the dog"
    ids, more = tokenizer()(text)["input_ids"], tokenizer()(other)["input_ids"]

    def encode(prompts: Any) -> list[list[int]]:
        return encode_prompts(prompts, tokenizer(), len(tokenizer()), 512)

    assert encode(text) == encode([text]) == encode(ids) == encode([ids]) == encode(tuple(ids)) == [ids]
    assert encode([text, other]) == encode([ids, more]) == encode([text, more]) == [ids, more]
    assert encode(torch.tensor(ids)) == encode(torch.tensor([ids])) == encode(np.array([ids])) == [ids]
    assert encode([torch.tensor(ids), np.array(more)]) == [ids, more]
    assert encode([]) == []


def test_text_is_tokenised_as_it_stands_and_a_chat_through_the_template() -> None:
    chatty = byte_level()
    chatty.chat_template = (
        "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant:{% endif %}"
    )
    chat = [{"role": "user", "content": "the fox"}]
    [ids] = encode_prompts(chat, chatty, len(chatty), 512)
    assert chatty.decode(ids) == "<s>user: the fox<s>assistant:"
    assert encode_prompts([chat, "the fox"], chatty, len(chatty), 512) == [ids, chatty("the fox")["input_ids"]]
    with pytest.raises(SpecdecError, match="chat template"):
        encode_prompts(chat, tokenizer(), 500, 512)


def test_provenance_says_which_rows_went_through_which_template() -> None:
    chatty = byte_level()
    chatty.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    decoder = SpeculativeDecoder(tiny_model("llama", vocab=len(chatty)), tokenizer=chatty, check=False)
    chat, ids = [{"role": "user", "content": "the fox"}], [5, 6]
    name = hashlib.sha256(chatty.chat_template.encode()).hexdigest()[:16]
    options: dict[str, Any] = {"max_new_tokens": 1, "temperature": 1.0}
    for prompts, expected in (
        ([chat, "the fox", ids], [name, name, None, None, None, None]),
        (chat, [name, name]), ("the fox", [None, None]), (np.array(ids), [None, None]),
        (torch.tensor([ids, ids]), [None] * 4), ([], []),
    ):  # fmt: skip
        made = decoder.generate(prompts, num_return_sequences=2, **options).provenance
        assert made["chat_templates"] == expected
        assert len(made["prompts"]) == len(expected)
    assert decoder.generate([chat, "the fox"], **options).provenance["prompts"] == [
        hash_ids(chatty("the fox")["input_ids"])
    ] * 2  # fmt: skip


def test_a_template_that_refuses_a_chat_is_one_line() -> None:
    chatty = byte_level()
    chatty.chat_template = "{{ raise_exception('Only user roles\nare supported!') }}"
    with pytest.raises(SpecdecError, match=r"^prompt 1: the chat template refuses the chat: Only user roles$"):
        encode_prompts(["the", [{"role": "x", "content": "y"}]], chatty, len(chatty), 512)


def test_a_tokenizers_own_bos_is_kept() -> None:
    with_bos = byte_level(bos=True)
    [ids] = encode_prompts("the fox", with_bos, len(with_bos), 512)
    assert ids[0] == with_bos.bos_token_id


# -- row 21: streaming ---------------------------------------------------------------------------------------------


@pytest.mark.fast(4, full=8)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("text", TEXTS)
def test_row_21_a_stream_is_the_text(text: str, draft: str) -> None:
    """Symptom: streaming splits characters, repeats or drops text, above all at the borders of blocks."""
    prompt, script, options = say(text)
    strategies = [Scripted(lambda ids: rest_of([script], ids)[: DRAFTS[draft]])] if DRAFTS[draft] else []
    out = decoder().generate(prompt, strategies=strategies, **options)
    assert out.texts == [text]
    pieces = list(decoder().stream(prompt, strategies=strategies, **options))
    assert "".join(pieces) == text
    assert "" not in pieces
    whole = text.replace("\ufffd", "")
    assert all(set(piece) <= set(whole) or "\ufffd" in text for piece in pieces)
    if draft in ("none", "two"):
        assert len(pieces) > 4  # it really streams


@pytest.mark.fast(12, full=8)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("stop", ["fox", "x jum", "jumps over", "over the lazy dog", "🚀", "🎉🚀", "dog", "the"])
def test_row_21_a_stop_string_is_never_shown(stop: str, draft: str) -> None:
    """Symptom: half a stop string has been streamed before the other half tells that it is one."""
    text = "a quick fox jumps 🎉🚀 jumps over the lazy dog"
    prompt, script, options = say(text)
    strategies = [Scripted(lambda ids: rest_of([script], ids)[: DRAFTS[draft]])] if DRAFTS[draft] else []
    options |= {"strategies": strategies, "stop_strings": [stop, "never"]}
    out = decoder().generate(prompt, **options)
    wanted = text[: text.index(stop)]
    assert out.texts == [wanted]
    assert out.finish_reasons == ["stop_string"]
    assert "".join(decoder().stream(prompt, **options)) == wanted
    raw = decoder().tokenizer.decode(out.token_ids[0])
    assert stop in raw
    assert stop not in decoder().tokenizer.decode(out.token_ids[0][:-1])  # no token after the one that completes it
    check_counts(out)


def test_row_21_the_beginning_of_a_stop_string_is_shown_when_it_does_not_come() -> None:
    prompt, _, options = say("jumps over a dog, jumps ov")
    pieces = list(decoder().stream(prompt, stop_strings="jumps over the", **options))
    assert "".join(pieces) == "jumps over a dog, jumps ov"


def test_row_21_an_unfinished_character_at_the_end_is_not_lost() -> None:
    prompt, _, options = say("dog 🚀")
    options["max_new_tokens"] -= 2
    out = decoder().generate(prompt, **options)
    assert out.texts[0].startswith("dog ")
    assert "".join(decoder().stream(prompt, **options)) == out.texts[0]


def test_row_21_a_tokenizer_that_tidies_spaces_does_not_break_the_stream() -> None:
    """Symptom: `clean_up_tokenization_spaces` rewrites text that has been shown; nothing comes after that."""
    tidy = byte_level()
    tidy.clean_up_tokenization_spaces = True
    pair = SpeculativeDecoder(tiny_model("llama", vocab=len(tidy)), tokenizer=tidy)
    for text in (TEXTS[5], "we do n't , ca n't . I 'm a dog"):
        prompt, _, options = say(text)
        out = pair.generate(prompt, **options)
        assert "".join(pair.stream(prompt, **options)) == out.texts[0]
        assert out.texts[0].endswith(text[-4:].strip()[-2:])


@pytest.mark.fast(1)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 3}])
def test_row_21_a_stream_of_a_random_model_equals_its_text(options: dict[str, Any]) -> None:
    model = tiny_model("llama", vocab=len(tokenizer()))
    pair = SpeculativeDecoder(model, tiny_model("llama", vocab=len(tokenizer())), tokenizer=tokenizer())
    for i in range(6):
        prompt = [random.Random(i).randrange(3, 300) for _ in range(4)]
        out = pair.generate(prompt, 40, strategies=[DraftModel(n_max=4)], **options)
        assert "".join(pair.stream(prompt, 40, strategies=[DraftModel(n_max=4)], **options)) == out.texts[0]


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=4), max_size=2), st.integers(1, 5))
def test_the_text_stream_never_takes_anything_back(text: str, stops: list[str], step: int) -> None:
    """Whatever the text and the stop strings: the pieces add up to the final text and hold no stop string."""
    ends = [text.find(s) + len(s) for s in stops if s in text]
    shown = text[: min(ends)] if ends else text  # generation ends with the first completed stop string
    final = shown[: min(shown.find(s) for s in stops if s in shown)] if ends else shown
    stream = TextStream(stops)
    out = [stream.piece(shown[:i]) for i in range(0, len(shown), step)]
    assert final.startswith("".join(out))
    out.append(stream.rest(final))
    assert "".join(out) == final


# -- stops ---------------------------------------------------------------------------------------------------------


def test_special_tokens_are_in_the_ids_and_not_in_the_text() -> None:
    prompt, _, options = say("dog</s>")
    out = decoder().generate(prompt, eos_token_id=tokenizer().eos_token_id, **options)
    assert out.texts == ["dog"]
    assert out.token_ids[0][-1] == tokenizer().eos_token_id
    assert out.finish_reasons == ["eos"]


def test_a_stop_string_in_the_prompt_does_not_stop_the_row() -> None:
    prompt, _, options = say("a dog")
    out = decoder().generate(prompt, stop_strings=["fox", "xa"], **options)
    assert out.finish_reasons == ["length"]
    assert out.texts == ["a dog"]


def test_stopping_criteria_see_each_prefix_once() -> None:
    """Also inside an accepted block, where the criterion must not see tokens after the one it stops at."""
    prompt, script, options = say(TEXTS[0])
    lengths: list[int] = []

    def criterion(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        lengths.append(ids.shape[1])
        assert ids[0].tolist() == script[: ids.shape[1]]
        return torch.tensor([ids.shape[1] == len(prompt) + 5])

    drafter = Scripted(lambda ids: rest_of([script], ids)[:9])
    out = decoder().generate(
        prompt, strategies=[drafter], stopping_criteria=StoppingCriteriaList([criterion]), **options
    )
    assert lengths == [len(prompt) + i for i in range(1, 6)]
    assert out.finish_reasons == ["stopping_criteria"]
    assert out.token_ids[0] == script[len(prompt) : len(prompt) + 5]
    check_counts(out)


def test_without_a_tokenizer_there_are_ids_and_no_texts() -> None:
    plain = SpeculativeDecoder(tiny_model("llama"))
    out = plain.generate([[1, 2, 3]], 4)
    assert out.texts is None
    with pytest.raises(SpecdecError, match="stream needs a tokenizer"):
        plain.stream([1, 2, 3])


def test_a_tokenizer_that_trims_blanks_still_streams_its_text() -> None:
    words = word_level([f"w{i}" for i in range(128)])
    pair = SpeculativeDecoder(tiny_model("llama"), tokenizer=words)
    out = pair.generate("w1 w2 w3", 12)
    assert "".join(pair.stream("w1 w2 w3", 12)) == out.texts[0]


def test_half_of_a_surrogate_pair_is_refused_before_a_tokenizer_fails_on_it() -> None:
    with pytest.raises(SpecdecError, match="prompt 1 is no Unicode text"):
        encode_prompts(["fine \U0001f680", "lone \ud800"], byte_level(), 300, 64)
