"""Prompt sets: three that ship with the package, files of your own, and data sets of a hub.

| name         | prompts | categories | source, licence                           |
|--------------|---------|------------|-------------------------------------------|
| `spec-bench` | 480     | 13         | Spec-Bench (Xia et al. 2024), Apache-2.0  |
| `humaneval`  | 164     | 1          | OpenAI HumanEval, MIT                     |
| `gsm8k`      | 1,319   | 1          | OpenAI GSM8K, test split, MIT             |

| anything else                      | is                                                                          |
|------------------------------------|-----------------------------------------------------------------------------|
| `mine.jsonl`, `.ndjson`, `.json`   | records, texts or chats, a line each or in an array: see sources.py      |
| `notes.txt`, `main.py`, any suffix | a text: one prompt; with `:by=paragraph` or `:by=line` behind it one of each |
| `hf:owner/name`                    | records of a data set, through the package `datasets` (specdec[hub])        |

Options follow the name. Records: `mine.jsonl:field=question`. Data sets: also `config`, `split` (default: train)
and `revision`: `hf:openai/gsm8k:config=main:split=test:field=question`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.decoding.prompts import SetPrompt, encode_prompts
from specdec.errors import SpecdecError
from specdec.files.own_code import beside_config
from specdec.files.texts import expanded, is_file
from specdec.research.prompts.sources import HUB, Entry, Messages, Source, read, records

DATA = Path(__file__).parents[1] / "data"
DATASETS = {
    "spec-bench": DATA / "spec_bench" / "question.jsonl",
    "humaneval": DATA / "prompts" / "humaneval.jsonl",
    "gsm8k": DATA / "prompts" / "gsm8k.jsonl",
}
TURNS = ("first", "all")
TURN = "/turn-"  # in the ids of later turns


@dataclass(frozen=True)
class Prompt(SetPrompt):
    """One prompt of a set, without any chat template."""

    id: str  # unique in its set: "<set>/<question id, or the number of the line from 0>"
    category: str  # the file's category; without one, the name of the set
    text: str  # the first turn; of a chat, the texts of all its messages, parted by blank lines
    turns: tuple[str, ...]  # the user's turns in order; only the first unless turns="all"
    messages: Messages = ()  # of a chat, in order, without the answer at its end: prompt_sources.Message

    @property
    def conversation(self) -> str:
        """The id of the first turn."""
        return self.id.rpartition(TURN)[0] if self.turn > 1 else self.id

    @property
    def turn(self) -> int:
        """Which turn it is, from 1, of a set that `by_turn` has split."""
        return 1 if self.messages else len(self.turns)

    def after(self, answers: Sequence[str]) -> Prompt:
        """The same turn with the earlier ones and their answers in front of it."""
        said = zip(self.turns[:-1], answers, strict=True)
        messages = (*(m for turn, answer in said for m in (("user", turn), ("assistant", answer))), ("user", self.text))
        return replace(self, messages=messages, text="\n\n".join(content for _, content in messages))

    def record(self) -> dict[str, Any]:
        """What `own_prompts` makes this prompt of."""
        content = {"messages": self.chat()} if self.messages else {"prompt": self.text}
        return {"id": self.id, "category": self.category, **content}

    def given(self, tokenizer: Any) -> Any:
        """What `generate` makes of it: a chat goes through the template if there is one, a text goes through none.
        `as_given` chooses."""
        return as_given(self, tokenizer, "auto" if self.messages else False)

    def chat(self) -> list[dict[str, Any]]:
        """What a chat template takes: the messages, or the text as one turn of the user's. A message without content
        has no such key, which a template that copes takes for nothing and any other one refuses."""
        found: list[dict[str, Any]] = []
        for role, content, *more in self.messages or (("user", self.text),):
            own = {} if content is None else {"content": content}
            found.append({"role": role, **own, **(json.loads(more[0]) if more and more[0] is not None else {})})
        return found


@dataclass(frozen=True)
class Given(SetPrompt):
    """A prompt of a set in the form that was chosen for it."""

    id: str
    content: Any

    def given(self, tokenizer: Any) -> Any:
        """The chosen form."""
        return self.content


def load_prompts(
    name_or_path: str | Path,
    categories: Iterable[str] | str | None = None,
    limit: int | None = None,
    seed: int = 0,
    turns: str = "first",
) -> list[Prompt]:
    """Load the prompts of a set, all or a stratified sample, in the order of the file.

    name_or_path: a name in `DATASETS`, a file's path or `hf:` and a data set's name, each with options behind it.
    categories: keep these only; a name that the set does not have is an error.
    limit: keep at most this many in all, spread over the categories as evenly as they allow. The sample depends
        on `seed` and the set alone, and a larger limit contains every smaller one.
    seed: chooses the sample; without a limit it has no effect.
    turns: `first` keeps the first turn of each prompt, `all` every turn.
    Raises SpecdecError for an unknown name, file, category or option, or a line that is not a prompt.
    """
    if turns not in TURNS:
        raise SpecdecError(f"turns: expected one of {', '.join(TURNS)}, got {turns!r}")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise SpecdecError(f"limit: must be a whole number >= 1 or None, got {limit!r}")
    name, entries = _find(name_or_path)
    prompts = list(_prompts(name, entries, turns))
    if not prompts:
        raise SpecdecError(f"{name_or_path}: holds no prompts")
    if categories is not None:
        prompts = _select(name, prompts, [categories] if isinstance(categories, str) else list(categories))
    return prompts if limit is None else _sample(prompts, limit, seed)


def by_turn(prompts: Iterable[Prompt]) -> list[Prompt]:
    """A prompt for each turn of the user's; chats, which have their answers, stay as they are."""
    found = []
    for p in prompts:
        turns = 1 if p.messages else len(p.turns)
        ids = [p.id, *(f"{p.id}{TURN}{n}" for n in range(2, turns + 1))]
        texts = (p.text, *p.turns[1:turns])
        found += [replace(p, id=ids[n], text=texts[n], turns=p.turns[: n + 1]) for n in range(turns)]
    return found


def own_prompts(entries: Iterable[Any]) -> list[Prompt]:
    """Prompts of a list: texts, and records as a JSON-lines file has them, with ids and categories of their own.

    Raises SpecdecError for a record that is no prompt and for an id that occurs twice.
    """
    found = []
    for i, entry in enumerate(entries):
        where = f"prompts[{i}]"
        made = [Entry(where, i, (entry,))] if isinstance(entry, str) else records([(where, i, entry)])
        found += [replace(e, id=e.id or f"prompt/{i}", category=e.category or "prompts") for e in made]
    return list(_prompts("", found, "first"))


def with_template(tokenizer: Any, chat: Any) -> bool:
    """Whether prompts go through the tokenizer's chat template; chat: true, false, or "auto" = where there is one."""
    return chat is True or (chat == "auto" and bool(getattr(tokenizer, "chat_template", None)))


def as_given(prompt: Prompt, tokenizer: Any, chat: Any = "auto", longest: int | None = None) -> Any:
    """A prompt as `generate` takes it, a text or a chat. longest: tokens of the text, or of a chat's last message; what
    is longer is cut."""
    messages = prompt.chat() if with_template(tokenizer, chat) else [{"content": prompt.text}]
    if longest is not None:
        ids = tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"]
        if len(ids) > longest:
            messages[-1]["content"] = tokenizer.decode(ids[:longest])
    return messages if with_template(tokenizer, chat) else messages[0]["content"]


def encode_texts(prompts: Sequence[Prompt], tokenizer: Any, model: Any, longest: int | None) -> list[list[int]]:
    """Ids of the prompts, through the chat template if there is one; texts of more than `longest` tokens are cut."""
    given = [as_given(prompt, tokenizer, "auto", longest) for prompt in prompts]
    return encode_prompts(given, tokenizer, model.config.vocab_size, model.config.max_position_embeddings)


def _find(name_or_path: str | Path) -> tuple[str, Iterator[Entry]]:
    """The set's name, used in ids, and its entries."""
    named = str(name_or_path)
    if named in DATASETS:
        return named, read(Source(str(DATASETS[named]), {}))[1]
    source = Source.parse(named)
    if not source.place.startswith(HUB):
        source = replace(source, place=str(beside_config(expanded(source.place))))
    if not source.place.startswith(HUB) and not is_file(source.place):
        raise SpecdecError(f"{named}: neither a prompt set ({', '.join(DATASETS)}), nor a file, nor hf:owner/name")
    return read(source)


def _prompts(name: str, entries: Iterable[Entry], turns: str) -> Iterator[Prompt]:
    seen: set[str] = set()
    for entry in entries:
        identity = f"{name}/{entry.number if entry.id is None else entry.id}" if name else str(entry.id)
        if identity in seen:
            raise SpecdecError(f"{entry.where}: the id {identity!r} occurs twice")
        seen.add(identity)
        yield Prompt(
            id=identity,
            category=name if entry.category is None else entry.category,
            text="\n\n".join(content for _, content, *_ in entry.messages if content) or entry.turns[0],
            turns=entry.turns if turns == "all" else entry.turns[:1],
            messages=entry.messages,
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
