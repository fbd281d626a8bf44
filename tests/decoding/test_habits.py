"""What users of transformers write by habit is refused with what to write here, and prompts of sets are taken."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from specdec import Results, SpecdecError, SpeculativeDecoder, load_pair
from specdec.config import GenerationSettings, PairConfig, RunConfig, load_yaml
from specdec.decoding.prompts import check_padding
from specdec.drafters import make_drafters
from specdec.drafters.base import DraftRequest
from specdec.files.habits import HINTS, typed
from specdec.research.ablation import plots
from specdec.research.ablation.config import AblationConfig
from specdec.research.prompts.datasets import Prompt, load_prompts
from specdec.research.traces.trace import record
from tests.cli.test_cli import refused
from tests.helpers.tiny import tiny_model
from tests.research.test_plots import K1, PLAIN
from tests.research.test_plots import row as table_row

CALLS: list[Callable[..., Any]] = [
    SpeculativeDecoder.generate, SpeculativeDecoder.stream, SpeculativeDecoder.rounds, record,
]  # fmt: skip


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained("demo-target", strategies=["prompt-lookup"], check=False)


def message(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(SpecdecError) as caught:
        call(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize("name", HINTS)
def test_each_habit_says_what_to_write(name: str, decoder: SpeculativeDecoder) -> None:
    for call in CALLS:
        found = message(call, decoder, "a", **{name: 2})
        assert f"there is no generation option {name!r} here: " in found
        assert HINTS[name] in found
    assert name not in {*GenerationSettings.__dataclass_fields__, *PairConfig.__dataclass_fields__}


def test_tables_axes_and_strategies_say_what_is_there(decoder: SpeculativeDecoder) -> None:
    rows = [table_row("plain", "a", PLAIN), table_row("d", "a", K1, k=1, temperature=0.0)]
    for name, here in {
        "num_assistant_tokens": "k",
        "prompt_lookup_num_tokens": "k",
        "do_sample": "temperature",
    }.items():
        ending = f"{name!r} here: write {here!r}"
        assert message(plots.acceptance_by_position, rows, where={name: 1}).endswith(ending)
        for ask in (Results(rows).by, lambda n: Results(rows).where({n: 1})):
            assert message(ask, name).endswith(ending)
        assert f"write {here!r}" in message(AblationConfig, {"p": {"target": "t"}}, axes={name: [1]})
    assert "write 'ngram_max'" in message(make_drafters, ["prompt-lookup:max_matching_ngram_size=2"], False)
    assert "strategies=" not in message(plots.acceptance_by_position, rows, where={"max_matching_ngram_size": 2})


def test_every_habit_has_a_form_for_the_command_line() -> None:
    for name in HINTS:
        hint = typed(f"--{name.replace('_', '-')}")
        assert hint is not None
        assert not {"strategies=", "temperature="} & set(re.findall(r"\w+=", hint))
    assert typed("--past-key-values").startswith("--option keep_state=True")
    assert typed("--num-assistant-tokens", ["--num-assistant-tokens", "7"]).startswith(
        "write --strategies draft-model:n_max=7:"
    )
    assert typed("--temperature") is typed("") is None


def test_what_a_hint_writes_is_taken() -> None:
    written = [text for hint in HINTS.values() for text in re.findall(r'strategies=\["([^"]+)"\]', hint)]
    assert len(written) >= 5
    for text in written:
        assert len(make_drafters([text.replace("=N", "=1")], True)) == 1
    for name, options in {"do_sample": {"temperature": 0.5}, "max_length": {"max_new_tokens": 3}}.items():
        assert next(iter(options)) in HINTS[name]
        GenerationSettings.parse(options)
    options = {"draft_length": "auto", "keep_state": True, "output_logprobs": True}
    assert all(any(name in hint for hint in HINTS.values()) for name in options)
    GenerationSettings.parse(options)


@pytest.mark.parametrize("n", [1, 3, 7])
def test_the_hint_for_prompt_lookup_drafts_what_transformers_does(n: int) -> None:
    text = re.findall(r'strategies=\["([^"]+)"\]', HINTS["prompt_lookup_num_tokens"])[0]
    [drafter] = make_drafters([text.replace("=N", f"={n}")], False)
    theirs = PromptLookupCandidateGenerator(None, num_output_tokens=n, max_length=10_000)
    drawn, found = np.random.default_rng(n), 0
    for length in range(2, 60):
        ids = drawn.integers(0, 5, length).tolist()
        expected = theirs.get_candidates(torch.tensor([ids]))[0][0, length:].tolist()
        assert drafter._propose(DraftRequest(0, np.array(ids[:-1]), ids[-1])) == expected
        found += bool(expected)
    assert found > 30


def test_the_nearest_name_is_still_named_for_the_rest(decoder: SpeculativeDecoder) -> None:
    assert "did you mean 'temperature'" in message(decoder.generate, "a", temprature=1)


@pytest.mark.parametrize("padded", [False, True])
def test_what_a_tokenizer_returned_is_no_prompt(padded: bool, decoder: SpeculativeDecoder) -> None:
    tokenizer = decoder.tokenizer
    ids = tokenizer(["import os", "a"])["input_ids"]
    if padded:
        width = max(map(len, ids))
        made: dict[str, Any] = {
            "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in ids]),
            "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids]),
        }
    else:
        made = tokenizer(["import os", "a"])
    for found in (message(decoder.generate, **made), message(decoder.generate, made)):
        assert 'tokenizer(texts)["input_ids"] without padding' in found
    mask = message(decoder.generate, made["input_ids"], attention_mask=made["attention_mask"])
    assert "rows are not padded" in mask
    assert "no prompts" in message(decoder.generate)
    assert decoder.generate(ids, 2).token_ids == decoder.generate(["import os", "a"], 2).token_ids


@pytest.mark.parametrize("as_array", [torch.tensor, np.array])
def test_padded_rows_of_a_tensor_are_refused(as_array: Callable[..., Any], decoder: SpeculativeDecoder) -> None:
    """Without a mask, so that nothing but the ids can say it; a list of ids is taken as it stands."""
    model, tokenizer = decoder.target.model, load_pair("demo-target").tokenizer
    tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token = tokenizer.convert_ids_to_tokens([7, 8, 9])
    padding = SpeculativeDecoder(model, tokenizer=tokenizer, strategies=[], check=False)
    for row in ([7, 5, 6], [5, 6, 7]):
        assert "prompt 1 is padded (token id 7)" in message(padding.generate, as_array([[1, 2, 3], row]))
        assert len(padding.generate([[1, 2, 3], row], 1)) == 2
    assert len(padding.generate(as_array([[8, 7, 9]]), 1)) == 1
    tokenizer.bos_token = tokenizer.eos_token = tokenizer.pad_token  # one token for all three
    assert len(padding.generate(as_array([[7, 5, 7]]), 1)) == 1


def test_configs_the_command_line_and_loading_give_the_same_hints(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("pair: {target: demo-target}\ngeneration: {num_assistant_tokens: 3}\nprompts: [a]\n")
    found = [
        message(load_yaml, file, RunConfig),
        message(AblationConfig, {"p": {"target": "t", "draft": "d"}}, generation={"num_assistant_tokens": 3}),
        refused("generate", "--target", "demo-target", "--prompt", "a", "--option", "num_assistant_tokens=3"),
    ]
    assert all("draft-model:n_max=N" in text for text in found)
    assert HINTS["assistant_model"] in message(load_pair, "demo-target", assistant_model="x")
    assert HINTS["torch_dtype"] in message(SpeculativeDecoder.from_pretrained, "demo-target", torch_dtype="float32")


def test_prompts_of_a_set_are_prompts(decoder: SpeculativeDecoder) -> None:
    prompts = load_prompts("gsm8k", limit=2)
    texts = [p.text for p in prompts]
    expected = decoder.generate(texts, 4)
    assert decoder.generate(prompts, 4).token_ids == expected.token_ids
    assert decoder.generate(tuple(prompts), 4).token_ids == expected.token_ids
    assert decoder.generate([prompts[0], texts[1]], 4).token_ids == expected.token_ids
    assert decoder.generate(prompts[0], 4).token_ids == expected.token_ids[:1]
    assert "".join(decoder.stream(prompts[0], 4)) == expected.texts[0]  # type: ignore[index]
    assert [t for r in decoder.rounds(prompts[0], 4) for t in r.tokens] == expected.token_ids[0]
    trace = record(decoder, prompts, 4)
    assert [(r.id, r.category, r.output) for r in trace.rows] == [
        (p.id, p.category, ids) for p, ids in zip(prompts, expected.token_ids, strict=True)
    ]
    assert [r.id for r in record(decoder, prompts[0], 1).rows] == [prompts[0].id]
    assert [r.id for r in record(decoder, prompts, 1, ids=["x", "y"]).rows] == ["x", "y"]
    assert record(decoder, [], 1).rows == []


def test_a_chat_of_a_set_goes_through_the_template_if_there_is_one(decoder: SpeculativeDecoder) -> None:
    chat = Prompt("s/0", "s", "a\n\nb", ("a",), (("user", "a"), ("user", "b")))
    assert decoder.generate(chat, 2).token_ids == decoder.generate(chat.text, 2).token_ids
    tokenizer = load_pair("demo-target").tokenizer
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    templated = SpeculativeDecoder(decoder.target.model, tokenizer=tokenizer, check=False)
    made = templated.generate([chat, Prompt("s/1", "s", "a", ("a",))], 2)
    assert made.token_ids == decoder.generate(["<a><b>", "a"], 2).token_ids
    assert [bool(template) for template in made.provenance["chat_templates"]] == [True, False]


def test_a_chat_of_a_set_needs_a_tokenizer() -> None:
    bare = SpeculativeDecoder(tiny_model("llama"), check=False)
    assert "has no tokenizer" in message(bare.generate, load_prompts("gsm8k", limit=1))


def test_padding_by_a_token_that_begins_and_ends_texts_is_refused_where_it_stands_twice() -> None:
    tokenizer = SimpleNamespace(pad_token_id=1, bos_token_id=1, eos_token_id=1)
    check_padding([[1, 5, 6], [1, 7, 8]], tokenizer)  # begins of texts
    check_padding([[1, 1, 6]], tokenizer)  # alone in its tensor: nothing to be filled up to
    for row in ([1, 1, 6], [6, 1, 1]):
        with pytest.raises(SpecdecError, match="prompt 1 is padded"):
            check_padding([[5, 6, 7], row], tokenizer)
