"""Conversations: a row for each turn, with the setting's own answers in its context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specdec import Results
from specdec.decoding.provenance import hash_ids
from specdec.errors import SpecdecError
from specdec.research.ablation import as_rows, merge, run_ablation
from specdec.research.ablation.store import Plan
from specdec.research.prompts.choice import DataConfig
from specdec.research.prompts.datasets import by_turn, load_prompts
from tests.helpers.grid import grid, save_pair

TALKS = [
    {"id": "a", "category": "x", "turns": ["import os\n", "now sort them"]},
    {"id": "b", "category": "x", "prompt": "a = b = a ="},
    {"id": "c", "category": "y", "turns": ["for x in y:", "more", "and more"]},
]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    file.write_text("".join(f"{json.dumps(t)}\n" for t in TALKS))
    return str(file)


def config(pair: dict[str, str], talks: str, **more: Any) -> Any:
    data = DataConfig(talks, turns="all")
    strategies = {"draft": ["draft-model:n_max=2"]}
    return grid(pair, prompts=None, data=data, strategies=strategies, axes={}, **more)


def test_every_turn_is_a_prompt_of_its_conversation(talks: str) -> None:
    found = by_turn(load_prompts(talks, turns="all"))
    heads = [p.id.rpartition("/")[2] if p.turn == 1 else p.id for p in found]
    assert [(p.turn, p.text) for p in found] == [
        (1, "import os\n"), (2, "now sort them"), (1, "a = b = a ="), (1, "for x in y:"), (2, "more"), (3, "and more"),
    ]  # fmt: skip
    assert heads[1].endswith("a/turn-2")
    assert [p.conversation for p in found[3:]] == [found[3].id] * 3
    assert by_turn(load_prompts(talks)) == load_prompts(talks)
    assert len(by_turn(load_prompts("spec-bench", turns="all"))) == 560


@pytest.mark.fast(1)
@pytest.mark.parametrize("chat", [False, True])
def test_later_turns_have_the_settings_own_answers_in_their_context(chat: bool, talks: str, tmp_path: Path) -> None:
    pair = save_pair(tmp_path)
    if chat:
        (tmp_path / "target" / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(pair["target"])
    assert bool(tokenizer.chat_template) is chat
    run_ablation(config(pair, talks, generation={"max_new_tokens": 6}), tmp_path / "out")
    summary = merge(tmp_path / "out")
    assert summary is not None
    assert summary["gate"]["passed"]
    assert summary["gate"]["compared"] == 6
    rows = {(r["setting"], r["prompt"].rpartition("talks/")[2]): r for r in as_rows(tmp_path / "out")}
    assert {r["error"] for r in rows.values()} == {None}
    for setting in ("plain", "draft"):
        one, two = rows[setting, "c"], rows[setting, "c/turn-2"]
        said = [TALKS[2]["turns"][0], one["text"], "more", two["text"], "and more"]
        if chat:
            shown = "".join(f"<{'assistant' if i % 2 else 'user'}>{text}" for i, text in enumerate(said))
            text, without = f"{shown}<assistant>", f"<user>{said[0]}<user>more<user>{said[-1]}<assistant>"
        else:
            text, without = "\n\n".join(said), "\n\n".join(said[::2])
        third = rows[setting, "c/turn-3"]
        assert third["prompt_hash"] == hash_ids(tokenizer(text)["input_ids"])
        assert third["prompt_hash"] != hash_ids(tokenizer(without)["input_ids"])
        assert (third["turn"], third["conversation"]) == (3, one["prompt"])
    of_draft = [r for (setting, _), r in rows.items() if setting == "draft"]
    pooled = sum(r["generated_tokens"] for r in of_draft) / sum(r["rounds"] for r in of_draft)
    assert summary["settings"]["draft"]["tokens_per_round"]["value"] == pytest.approx(pooled)
    assert summary["settings"]["draft"]["prompts"] == 3, "turns are no samples of their own"
    assert [r["turn"] for r in Results.load(tmp_path / "out").by("turn").rows] == [1, 2, 3]


@pytest.mark.full
def test_a_batch_and_a_shard_hold_whole_conversations(pair: dict[str, str], talks: str, tmp_path: Path) -> None:
    made = config(pair, talks, generation={"max_new_tokens": 4, "batch_size": 2})
    for shard in ("0/2", "1/2"):
        run_ablation(made, tmp_path / "parts", shard)
    run_ablation(made, tmp_path / "whole")
    assert merge(tmp_path / "parts") is not None
    merge(tmp_path / "whole")
    parts, whole = (
        {(r["setting"], r["prompt"]): (r["status"], r["tokens"], r["call"]) for r in as_rows(tmp_path / name)}
        for name in ("parts", "whole")
    )
    assert parts == whole
    assert len(whole) == 12
    assert run_ablation(made, tmp_path / "whole").rows == 0


def test_what_cannot_be_is_refused(talks: str) -> None:
    for wrong, words in (({"turns": "both"}, "turns"), ({"turns": "all", "longest": 5}, "longest")):
        with pytest.raises(SpecdecError, match=words):
            DataConfig(talks, **wrong)  # type: ignore[arg-type]


def test_first_turns_keep_the_fingerprints_that_they_had(pair: dict[str, str], talks: str) -> None:
    """A folder that was begun before goes on."""
    plans = [Plan.make(grid(pair, prompts=None, data=DataConfig(talks, turns=turns))) for turns in ("first", "all")]
    first = {p.id: plans[0].fingerprint(p) for p in plans[0].prompts}
    every = {p.id: plans[1].fingerprint(p) for p in plans[1].prompts}
    assert first.items() <= every.items()
    assert len(set(every.values())) == 6
