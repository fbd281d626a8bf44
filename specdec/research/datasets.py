"""Prompt sets: three that ship with the package, and any JSON-lines file.

| name         | prompts | categories | source, licence                           |
|--------------|---------|------------|-------------------------------------------|
| `spec-bench` | 480     | 13         | Spec-Bench (Xia et al. 2024), Apache-2.0  |
| `humaneval`  | 164     | 1          | OpenAI HumanEval, MIT                     |
| `gsm8k`      | 1,319   | 1          | OpenAI GSM8K, test split, MIT             |

A file of your own holds one JSON object a line with `turns` (a list of strings) or `prompt` (a string), and optionally
`category` and `id` (or `question_id`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.prompts import encode_prompts
from specdec.texts import parse_json

DATA = Path(__file__).parent / "data"
DATASETS = {
    "spec-bench": DATA / "spec_bench" / "question.jsonl",
    "humaneval": DATA / "prompts" / "humaneval.jsonl",
    "gsm8k": DATA / "prompts" / "gsm8k.jsonl",
}
TURNS = ("first", "all")


@dataclass(frozen=True)
class Prompt:
    """One prompt of a set, without any chat template."""

    id: str  # unique in its set: "<set>/<question id, or the number of the line from 0>"
    category: str  # the file's category; without one, the name of the set
    text: str  # the first turn
    turns: tuple[str, ...]  # the user's turns in order; only the first unless turns="all"


def load_prompts(
    name_or_path: str | Path,
    categories: Iterable[str] | str | None = None,
    limit: int | None = None,
    seed: int = 0,
    turns: str = "first",
) -> list[Prompt]:
    """Load the prompts of a set, all or a stratified sample, in the order of the file.

    Args:
        name_or_path: a name in `DATASETS`, or the path of a JSON-lines file.
        categories: keep these only; a name that the set does not have is an error.
        limit: keep at most this many in all, spread over the categories as evenly as they allow. The sample depends
            on `seed` and the set alone, and a larger limit contains every smaller one.
        seed: chooses the sample; without a limit it has no effect.
        turns: `first` keeps the first turn of each prompt, `all` every turn.

    Raises:
        SpecdecError: an unknown name, file, category or option, or a line that is not a prompt.
    """
    if turns not in TURNS:
        raise SpecdecError(f"turns: expected one of {', '.join(TURNS)}, got {turns!r}")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise SpecdecError(f"limit: must be a whole number >= 1 or None, got {limit!r}")
    name, path = _locate(name_or_path)
    prompts = list(_read(name, path, turns))
    if not prompts:
        raise SpecdecError(f"{path}: holds no prompts")
    if categories is not None:
        prompts = _select(name, prompts, [categories] if isinstance(categories, str) else list(categories))
    return prompts if limit is None else _sample(prompts, limit, seed)


def encode_texts(prompts: Sequence[Prompt], tokenizer: Any, model: Any, longest: int) -> list[list[int]]:
    """Ids of the prompts, through the chat template if there is one; texts of more than `longest` tokens are cut."""
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        texts.append(prompt.text if len(ids) <= longest else tokenizer.decode(ids[:longest]))
    chats: list[Any] = texts
    if getattr(tokenizer, "chat_template", None):
        chats = [[{"role": "user", "content": text}] for text in texts]
    return encode_prompts(chats, tokenizer, model.config.vocab_size, model.config.max_position_embeddings)


def _locate(name_or_path: str | Path) -> tuple[str, Path]:
    """The set's name, used in ids, and its file."""
    if str(name_or_path) in DATASETS:
        return str(name_or_path), DATASETS[str(name_or_path)]
    path = Path(name_or_path).expanduser()
    if not path.is_file():
        raise SpecdecError(f"{name_or_path}: neither a prompt set ({', '.join(DATASETS)}) nor a JSON-lines file")
    return path.stem, path


def _read(name: str, path: Path, turns: str) -> Iterator[Prompt]:
    seen: set[str] = set()
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if line.strip():
                    prompt = _parse(line, name, number, turns, where=f"{path}, line {number + 1}")
                    if prompt.id in seen:
                        raise SpecdecError(f"{path}, line {number + 1}: the id {prompt.id!r} occurs twice")
                    seen.add(prompt.id)
                    yield prompt
    except (OSError, UnicodeDecodeError) as error:
        raise SpecdecError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _parse(line: str, name: str, number: int, turns: str, where: str) -> Prompt:
    record = parse_json(line, where)
    if not isinstance(record, dict) or not ("turns" in record or "prompt" in record):
        raise SpecdecError(f"{where}: expected an object with `turns` (a list of strings) or `prompt` (a string)")
    texts = record["turns"] if "turns" in record else [record["prompt"]]
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t.strip() for t in texts):
        raise SpecdecError(f"{where}: `turns` or `prompt` must be text and not empty")
    identity = record.get("id", record.get("question_id", number))
    return Prompt(
        id=f"{name}/{identity}",
        category=str(record.get("category", name)),
        text=texts[0],
        turns=tuple(texts if turns == "all" else texts[:1]),
    )


def _select(name: str, prompts: Sequence[Prompt], categories: Sequence[str]) -> list[Prompt]:
    known = list(dict.fromkeys(p.category for p in prompts))
    unknown = [c for c in categories if c not in known]
    if unknown or not categories:
        wrong = f"no category {unknown[0]!r}" if unknown else "an empty list selects nothing"
        raise SpecdecError(f"categories: {wrong}; {name} has {', '.join(known)}")
    return [p for p in prompts if p.category in categories]


def _sample(prompts: Sequence[Prompt], limit: int, seed: int) -> list[Prompt]:
    """Deal from one shuffled pile a category in turn, so that categories differ by one unless a pile runs out."""
    piles: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        piles.setdefault(prompt.category, []).append(index)
    for category, pile in piles.items():
        random.Random(f"{seed}/{category}").shuffle(pile)  # seeded by text: the same on every machine
    chosen: list[int] = []
    for depth in range(max(map(len, piles.values()))):
        chosen += [pile[depth] for pile in piles.values() if depth < len(pile)]
    return [prompts[i] for i in sorted(chosen[:limit])]
