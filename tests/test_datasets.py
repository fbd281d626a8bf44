"""Prompt sets: what ships, how a sample is drawn, and what a bad file says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from specdec.errors import SpecdecError
from specdec.research.datasets import DATASETS, load_prompts


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


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"prompt": "a"}', "{prompt}"], "mine.jsonl, line 2: not JSON"),
        (['["a"]'], "line 1: expected an object"),
        (['{"text": "a"}'], "line 1: expected an object"),
        (['{"turns": []}'], "line 1: `turns` or `prompt`"),
        (['{"turns": ["a", 1]}'], "line 1: `turns` or `prompt`"),
        (['{"prompt": "  "}'], "line 1: `turns` or `prompt`"),
        (['{"prompt": "a", "id": 1}', '{"prompt": "b", "id": 1}'], "line 2: the id 'mine/1' occurs twice"),
        ([""], "mine.jsonl: holds no prompts"),
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name_or_path": "spec_bench"}, "spec_bench: neither a prompt set (spec-bench, humaneval, gsm8k)"),
        ({"name_or_path": "/no/such.jsonl"}, "/no/such.jsonl: neither"),
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
