"""Prompt sets: what ships, how a sample is drawn, and what a bad file says."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from specdec.decoding.prompts import encode_prompts
from specdec.demo_models import target_path
from specdec.errors import SpecdecError
from specdec.research.prompts.datasets import DATASETS, Prompt, as_given, load_prompts


def write(folder: Path, *lines: str) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "size", "categories"), [("spec-bench", 480, 13), ("humaneval", 164, 1), ("gsm8k", 1319, 1)]
)
def test_shipped_sets_are_complete(name: str, size: int, categories: int) -> None:
    prompts = load_prompts(name)
    assert len(prompts) == len({p.id for p in prompts}) == size
    assert len({p.category for p in prompts}) == categories
    assert all(p.turns == (p.text,) for p in prompts)


def test_shipped_sets_carry_their_licences() -> None:
    folder = DATASETS["spec-bench"].parent
    assert "Apache License" in (folder / "LICENSE").read_text()
    assert "Permission is hereby granted" in (folder.parent / "prompts" / "README.md").read_text()


def test_all_turns_are_kept_on_request() -> None:
    first = {p.id: p for p in load_prompts("spec-bench")}
    both = load_prompts("spec-bench", turns="all")
    assert Counter(len(p.turns) for p in both) == {1: 400, 2: 80}
    assert all(p.turns[0] == p.text == first[p.id].text for p in both)
    assert first["spec-bench/81"].text.startswith("Compose an engaging travel blog post")


def test_categories_select_and_keep_the_order_of_the_file() -> None:
    chosen = load_prompts("spec-bench", categories=["rag", "coding"])
    assert [p for p in load_prompts("spec-bench") if p.category in ("coding", "rag")] == chosen
    assert load_prompts("spec-bench", categories="rag") == [p for p in chosen if p.category == "rag"]


@pytest.mark.parametrize("limit", [1, 13, 20, 39, 100, 479, 480, 9999])
def test_a_limit_is_spread_evenly_over_the_categories(limit: int) -> None:
    prompts = load_prompts("spec-bench", limit=limit)
    assert len(prompts) == min(limit, 480)
    sizes, counts = Counter(p.category for p in load_prompts("spec-bench")), Counter(p.category for p in prompts)
    most = max(counts.values())
    assert all(counts[c] >= min(most - 1, size) for c, size in sizes.items())


def test_a_sample_is_deterministic_nested_and_in_the_order_of_the_file() -> None:
    everything = load_prompts("spec-bench")
    small, large = load_prompts("spec-bench", limit=20, seed=3), load_prompts("spec-bench", limit=50, seed=3)
    assert small == load_prompts("spec-bench", limit=20, seed=3)
    assert set(small) < set(large)
    assert large == [p for p in everything if p in set(large)]
    assert set(small) != set(load_prompts("spec-bench", limit=20, seed=4))
    # A literal, so that a published sample stays what it was on every machine and version.
    assert [p.id for p in load_prompts("gsm8k", limit=3)] == ["gsm8k/12", "gsm8k/590", "gsm8k/766"]


def test_any_json_lines_file_with_turns_or_prompt_is_a_set(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"prompt": "one\\u2028line", "category": "x", "id": "a"}',
        "",
        json.dumps({"turns": ["two", "three"], "question_id": 7}),
        '{"prompt": "four"}',
    )
    prompts = load_prompts(path, turns="all")
    assert [(p.id, p.category, p.text) for p in prompts] == [
        ("mine/a", "x", "one\u2028line"),
        ("mine/7", "mine", "two"),
        ("mine/3", "mine", "four"),
    ]
    assert prompts[1].turns == ("two", "three")
    assert load_prompts(str(path))[1].turns == ("two",)


def test_records_of_published_sets_are_read_as_their_users_have_them(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        json.dumps({"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": ["r"]}),  # MT-Bench
        json.dumps(
            {"problem": "1 + 1?", "solution": "$2$", "answer": "2", "subject": "Algebra", "unique_id": "t/1.json"}
        ),
        json.dumps({"task_id": 11, "text": "Add.", "code": "def f(): ...", "test_list": ["assert f()", "assert 1"]}),
        json.dumps({"task_id": 12, "prompt": "Add.", "code": "def f(): ...", "test_list": ["assert f()"]}),  # sanitized
        json.dumps(
            {"question_id": "q1", "category": "rag", "sub_category": "s", "turns": ["three"], "multiturn": False}
        ),
    )
    asked = "You are an expert Python programmer, and here is your task: Add. Your code should pass these tests:\n\n"
    assert [(p.id, p.category, p.text) for p in load_prompts(path)] == [
        ("mine/81", "writing", "one"),
        ("mine/t/1.json", "Algebra", "1 + 1?"),
        ("mine/11", "mine", f"{asked}assert f()\nassert 1\n[BEGIN]\n"),
        ("mine/12", "mine", f"{asked}assert f()\n[BEGIN]\n"),
        ("mine/q1", "rag", "three"),
    ]
    (tmp_path / "math.jsonl").write_text('{"problem": "1 + 1?", "solution": "2"}')
    assert [p.text for p in load_prompts(f"{tmp_path / 'math.jsonl'}:field=solution")] == ["2"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"prompt": "a"}', "{prompt}"], "mine.jsonl, line 2: not JSON"),
        (['["a"]'], "line 1: expected an object"),
        (['{"text": "a"}'], "line 1: expected an object"),
        (['{"turns": []}'], "line 1: `turns` must be text"),
        (['{"turns": ["a", 1]}'], "line 1: `turns` must be text"),
        (['{"prompt": "  "}'], "line 1: `prompt` must be text"),
        (['{"messages": [{"role": "user"}]}'], "line 1: `messages`, message 0: expected texts `role` and `content`"),
        (['{"messages": [{"role": "assistant", "content": "a"}]}'], "line 1: `messages`: the chat has no text"),
        (['{"conversations": [{"from": "gpt", "value": "a"}, 3]}'], "line 1: `conversations` must be text"),
        (['{"prompt": "a", "id": 1}', '{"prompt": "b", "id": 1}'], "line 2: the id 'mine/1' occurs twice"),
        ([""], "mine.jsonl: holds no prompts"),
        (
            ['{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}'],
            "line 1: `messages`, message 0: a part of its content is of the type 'image_url'",
        ),
        (
            ['{"prompt": [{"role": "user", "content": [{"type": "input_audio"}]}]}'],
            "line 1: `prompt`, message 0: a part of its content is of the type 'input_audio'",
        ),
        (
            ['{"messages": [{"role": "user", "content": ["a"]}]}'],
            "message 0: a part of its content is of the type 'str'",
        ),
        (['{"messages": [{"role": "user", "content": [{"type": "text"}]}]}'], "is of the type 'text': only parts with"),
        (['{"messages": [{"role": "user", "content": []}]}'], "line 1: `messages`: the chat has no text"),
        (['{"messages": [{"role": "user", "content": null}]}'], "message 0: expected texts `role` and `content`"),
        (['{"messages": [{"role": "assistant", "content": null}]}'], "only an assistant's that calls tools"),
    ],
)
def test_a_bad_file_is_one_line_with_file_and_line_number(tmp_path: Path, lines: list[str], said: str) -> None:
    with pytest.raises(SpecdecError) as caught:
        load_prompts(write(tmp_path, *lines))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(SpecdecError, match="cannot be read as UTF-8"):
        load_prompts(path)


# -- chats ------------------------------------------------------------------------------------------------------------

TALK = [("system", "Be brief."), ("user", "One?"), ("assistant", "1"), ("user", "Two?")]
NAMES = {"system": "system", "user": "human", "assistant": "gpt"}


def talk(answered: bool, roles: str = "role", texts: str = "content") -> list[dict[str, str]]:
    messages = [*TALK, ("assistant", "2")] if answered else TALK
    return [{roles: NAMES[r] if roles == "from" else r, texts: text} for r, text in messages]


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize(
    "record", [lambda a: {"messages": talk(a)}, lambda a: {"conversations": talk(a, "from", "value")}]
)
def test_a_chat_is_a_prompt_without_the_answer_at_its_end(tmp_path: Path, answered: bool, record: Any) -> None:
    path = write(tmp_path, json.dumps({**record(answered), "category": "c"}), '{"prompt": "alone"}')
    chat, alone = load_prompts(path, turns="all")
    assert chat.chat() == talk(False)
    assert chat.turns == ("One?", "Two?")
    assert chat.text == "Be brief.\n\nOne?\n\n1\n\nTwo?"
    assert (chat.id, chat.category) == ("mine/0", "c")
    assert alone.chat() == [{"role": "user", "content": "alone"}]
    assert alone.messages == ()


def parts(*texts: str, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": t} for t in texts]


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_parts_of_a_message_are_one_text(tmp_path: Path) -> None:
    talk = [
        {"role": "system", "content": parts("Be ", "brief.")},
        {"role": "user", "content": parts("One?", "\nTwo?", kind="input_text")},
        {"role": "assistant", "content": parts("1", kind="output_text")},
        {"role": "user", "content": "Three?"},
    ]
    [prompt] = load_prompts(write(tmp_path, json.dumps({"messages": talk})), turns="all")
    assert [m["content"] for m in prompt.chat()] == ["Be brief.", "One?\nTwo?", "1", "Three?"]
    assert prompt.turns == ("One?\nTwo?", "Three?")
    assert prompt.text == "Be brief.\n\nOne?\nTwo?\n\n1\n\nThree?"


@pytest.mark.parametrize("missing", [{"content": None}, {}])
def test_a_turn_that_calls_tools_may_have_no_content(tmp_path: Path, missing: dict[str, None]) -> None:
    talk = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", **missing, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "c", "name": "add", "weight": 1},
    ]
    [prompt] = load_prompts(write(tmp_path, json.dumps({"messages": talk})))
    called = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}
    assert prompt.chat() == [
        talk[0],
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "content": "2", "tool_call_id": "c", "name": "add"},
    ]
    assert prompt.text == "1 + 1?\n\n2"
    assert len({prompt}) == 1, "prompts can be put into sets"


def test_a_template_that_copes_reads_tool_calls_and_another_one_refuses_the_chat(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    [prompt] = load_prompts(write(tmp_path, json.dumps({"messages": [*talk, {"role": "user", "content": "b"}]})))
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    each = "{% for m in messages %}<{{ m.role }}>"
    tokenizer.chat_template = each + "{% if m.content %}{{ m.content }}{% endif %}{% if m.tool_calls %}"
    tokenizer.chat_template += "{{ m.tool_calls[0].function.arguments.a }}{% endif %}{% endfor %}"
    [ids] = encode_prompts(as_given(prompt, tokenizer), tokenizer, 1 << 20, 1 << 20)
    assert ids == tokenizer("<user>a<assistant>1<user>b", add_special_tokens=False)["input_ids"]
    tokenizer.chat_template = each + "{{ 'x' + m.content }}{% endfor %}"
    with pytest.raises(SpecdecError, match="chat template refuses the chat"):
        encode_prompts(as_given(prompt, tokenizer), tokenizer, 1 << 20, 1 << 20)


def test_parts_given_to_generate_are_what_a_template_of_lists_makes_of_them() -> None:
    """A template that prints a content would print the list as Python writes it."""
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    chat = [{"role": "user", "content": parts("a = ", "1")}]
    made = []
    for template in ("{{ messages[0].content }}", "{% for p in messages[0].content %}{{ p.text }}{% endfor %}"):
        tokenizer.chat_template = template
        joined = "content }}" in template
        made.append(
            encode_prompts([chat], tokenizer, 1 << 20, 1 << 20)[0] if joined
            else tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
        )  # fmt: skip
    assert made[0] == made[1]
    with pytest.raises(SpecdecError, match=r"prompt 0, message 0: .*'image'"):
        encode_prompts([[{"role": "user", "content": [{"type": "image"}]}]], tokenizer, 1 << 20, 1 << 20)


def test_a_json_array_is_read_record_by_record(tmp_path: Path) -> None:
    path = tmp_path / "shared.json"
    path.write_text(json.dumps([{"prompt": "a"}, {"conversations": talk(True, "from", "value"), "id": "x"}]))
    assert [p.id for p in load_prompts(path)] == ["shared/0", "shared/x"]
    path.write_text('[{"prompt": "a"}, 7]')
    with pytest.raises(SpecdecError, match=r"shared\.json, record 1: expected an object"):
        load_prompts(path)


def test_a_chat_goes_through_the_template_and_its_last_message_is_cut() -> None:
    class Words:
        chat_template = "x"

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[str]]:
            return {"input_ids": text.split()}

        def decode(self, ids: list[str]) -> str:
            return " ".join(ids)

    chat = Prompt("a", "b", "one two\n\nthree four", ("one two",), (("user", "one two"), ("user", "three four")))
    text = Prompt("a", "b", "one two three", ("one two three",))
    assert as_given(chat, Words(), "auto", 1)[1] == {"role": "user", "content": "three"}
    assert as_given(chat, Words(), "auto", 1)[0] == {"role": "user", "content": "one two"}
    assert as_given(text, Words(), "auto", 2) == [{"role": "user", "content": "one two"}]
    assert as_given(text, Words(), False, 2) == "one two"
    assert as_given(chat, Words(), False) == chat.text
    Words.chat_template = ""
    assert as_given(chat, Words(), "auto") == chat.text


# -- text files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ("", ["\n# a\n  b\n\n \t\n\nc\n"]),
        (":by=file", ["\n# a\n  b\n\n \t\n\nc\n"]),
        (":by=paragraph", ["# a\n  b", "c"]),
        (":by=line", ["# a", "  b", "c"]),
    ],
)
def test_a_text_file_is_one_prompt_or_one_of_each_part(tmp_path: Path, options: str, texts: list[str]) -> None:
    path = tmp_path / "some notes.py"
    path.write_bytes(b"\r\n# a\r\n  b\r\n\r\n \t\r\n\r\nc\r\n")
    prompts = load_prompts(f"{path}{options}")
    assert [p.text for p in prompts] == texts
    assert [p.id for p in prompts] == [f"some notes/{i}" for i in range(len(texts))]


def test_a_file_whose_name_looks_like_options_is_taken_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "odd:by=line"
    path.write_text("a\nb")
    assert [p.text for p in load_prompts(path)] == ["a\nb"]


# -- data sets of a hub -----------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for the package `datasets`; what it was asked for."""
    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, split: str, revision: str | None) -> list[dict[str, Any]]:
        asked.append((name, config, split, revision))
        if split == "none":
            raise ValueError("Unknown split 'none'.\nShould be one of ['train']")
        return [{"question": f"{split} {i}", "prompt": [{"role": "user", "content": str(i)}]} for i in range(3)]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_a_data_set_of_a_hub_is_loaded_with_its_options(hub: list[Any]) -> None:
    prompts = load_prompts("hf:owner/name:config=main:split=test[:2]:field=question:revision=abc", limit=2)
    assert hub == [("owner/name", "main", "test[:2]", "abc")]
    assert len(prompts) == 2
    assert {p.text for p in prompts} < {f"test[:2] {i}" for i in range(3)}
    assert prompts[0].id.startswith("owner/name/")
    assert load_prompts("hf:owner/name")[1].chat() == [{"role": "user", "content": "1"}]
    assert hub[1] == ("owner/name", None, "train", None)


def test_what_a_data_set_of_a_hub_gets_wrong_is_one_line(hub: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for named, said in (
        ("hf:owner/name:split=none", "hf:owner/name: cannot be loaded: Unknown split 'none'."),
        ("hf:owner/name:field=answer", "hf:owner/name, record 0: expected an object with `answer`"),
        ("hf:owner/name:by=line", "unknown option of the prompt set 'hf:owner/name' 'by'"),
    ):
        with pytest.raises(SpecdecError, match=re.escape(said)) as caught:
            load_prompts(named)
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SpecdecError, match=r"needs the package datasets: install specdec\[hub\]"):
        load_prompts("hf:owner/name")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name_or_path": "spec_bench"}, "spec_bench: neither a prompt set (spec-bench, humaneval, gsm8k), nor a file"),
        ({"name_or_path": "/no/such.jsonl"}, "/no/such.jsonl: neither"),
        ({"name_or_path": f"{__file__}:by=word"}, f"{__file__}: by: expected one of file, paragraph, line"),
        ({"name_or_path": f"{__file__}:field=x"}, f"unknown option of the prompt set {__file__!r} 'field'"),
        (
            {"name_or_path": "spec-bench", "categories": ["poetry"]},
            "categories: no category 'poetry'; spec-bench has writing",
        ),
        ({"name_or_path": "spec-bench", "categories": []}, "categories: an empty list"),
        ({"name_or_path": "spec-bench", "limit": 0}, "limit: must be"),
        ({"name_or_path": "spec-bench", "limit": 2.5}, "limit: must be"),
        ({"name_or_path": "spec-bench", "turns": "second"}, "turns: expected one of first, all"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, said: str) -> None:
    with pytest.raises(SpecdecError) as caught:
        load_prompts(**arguments)
    assert str(caught.value).startswith(said)
