"""Where prompts come from: records of a JSON file or of a data set on a hub, and plain text.

A record is an object with one of

    prompt                      a text, or a chat
    turns                       a list of texts, the user's turns
    messages                    a chat: a list of {role, content}
    conversations               a chat: a list of {from, value}, from = human | gpt | system

and optionally `category` and `id` (or `question_id`), as MT-Bench and SPEED-Bench have them; or a record of MATH-500
(`problem`, `subject`, `unique_id`) or MBPP (`text` or `prompt` with `test_list`, `task_id`). The option `field` names
another field for the prompt. Answers at the end of a chat are dropped: the model is to write them. A message's content
is a text, or a list of parts that are texts; an assistant's that calls tools may have none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.config import unknown_name
from specdec.decoding.prompts import join_parts
from specdec.errors import SpecdecError, need
from specdec.files.texts import expanded, first_line, is_file, parse_json, parse_json_lines, read_text

HUB = "hf:"
LINES, ARRAY = (".jsonl", ".ndjson"), ".json"
FIELDS = ("turns", "prompt", "messages", "conversations")
ROLES = {"human": "user", "gpt": "assistant"}  # of `from`; other names stand for themselves
PARTS = ("file", "paragraph", "line")  # what one prompt of a text file is
# Role, content (None: no key) and, as JSON, the other fields of a message that templates read.
Message = tuple[str, str | None] | tuple[str, str | None, str]
Messages = tuple[Message, ...]
CALLS = ("tool_calls", "function_call")
KEPT = (*CALLS, "tool_call_id", "name", "reasoning_content")


@dataclass(frozen=True)
class Source:
    """A set as it is named: `place`, a path or the name on the hub, and the options behind it."""

    place: str
    options: Mapping[str, str]

    @staticmethod
    def parse(named: str) -> Source:
        """`place:key=value:key=value`. A file whose own name looks like that is taken as it stands."""
        if is_file(expanded(named)):
            return Source(named, {})
        place, *options = re.split(r":(?=[a-z_]+=)", named)
        return Source(place, dict(option.split("=", 1) for option in options))

    def check(self, known: tuple[str, ...]) -> None:
        """Raise SpecdecError for an option that this kind of set does not have."""
        for name in self.options:
            if name not in known:
                raise unknown_name(f"option of the prompt set {self.place!r}", name, known)


@dataclass(frozen=True)
class Entry:
    """One prompt of a source. where: names it in errors; number: its line, record or part, from 0; turns: the user's;
    messages: of a chat, () of a text."""

    where: str
    number: int
    turns: tuple[str, ...]
    messages: Messages = ()
    id: str | None = None
    category: str | None = None


def read(source: Source) -> tuple[str, Iterator[Entry]]:
    """The set's name, used in ids, and its prompts.
    Raises SpecdecError for a missing file, an unknown option, and a record that is no prompt.
    """
    if source.place.startswith(HUB):
        source.check(("config", "split", "field", "revision"))
        return source.place.removeprefix(HUB), records(_hub(source), source.options.get("field"))
    path = expanded(source.place)
    if path.suffix.lower() in (*LINES, ARRAY):
        source.check(("field",))
        numbered = _array(path) if path.suffix.lower() == ARRAY else _lines(path)
        return path.stem, records(numbered, source.options.get("field"))
    source.check(("by",))
    part = source.options.get("by", PARTS[0])
    if part not in PARTS:
        raise SpecdecError(f"{source.place}: by: expected one of {', '.join(PARTS)}, got {part!r}")
    return path.stem, _parts(path, part)


def _lines(path: Path) -> Iterator[tuple[str, int, Any]]:
    for number, record in parse_json_lines(read_text(path, "prompt set"), str(path)):
        yield f"{path}, line {number}", number - 1, record


def _array(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Records of a JSON array; a file that is none is read line by line."""
    text = read_text(path, "prompt set")
    if not text.lstrip().startswith("["):
        yield from _lines(path)
        return
    for number, record in enumerate(parse_json(text, str(path))):
        yield f"{path}, record {number}", number, record


def _hub(source: Source) -> Iterator[tuple[str, int, Any]]:
    """Records of a data set on a hub, or below a folder, as the package `datasets` loads it."""
    name, options = source.place.removeprefix(HUB), source.options
    datasets = need("datasets", f"{source.place} needs", "hub")
    split = options.get("split", "train")
    try:
        table = datasets.load_dataset(name, options.get("config"), split=split, revision=options.get("revision"))
    except Exception as error:  # whatever a hub, a network or a loading script trips over
        raise SpecdecError(f"{source.place}: cannot be loaded: {first_line(error)}") from error
    for number, record in enumerate(table):
        yield f"{source.place}, record {number}", number, record


def _parts(path: Path, part: str) -> Iterator[Entry]:
    """A text file: whole, by paragraphs (what blank lines part), or by lines. Parts without a text are passed over."""
    text = read_text(path, "prompt set")
    cut: dict[str, Callable[[str], list[str]]] = {
        "file": lambda text: [text],
        "paragraph": lambda text: [p.strip("\n") for p in re.split(r"\n[^\S\n]*\n", text)],
        "line": lambda text: text.split("\n"),
    }
    kept = [piece for piece in cut[part](text) if piece.strip()]
    for number, piece in enumerate(kept):
        yield Entry(f"{path}, {part} {number + 1}", number, (piece,))


def records(numbered: Iterable[tuple[str, int, Any]], field: str | None = None) -> Iterator[Entry]:
    """The prompts of records. numbered: where each is from, its number and itself; field: what holds the prompt."""
    wanted = FIELDS if field is None else (field,)
    for where, number, record in numbered:
        record = _completed(record) if field is None else record
        name = next((n for n in wanted if isinstance(record, Mapping) and n in record), None)
        if name is None:
            raise SpecdecError(f"{where}: expected an object with {' or '.join(f'`{n}`' for n in wanted)}")
        turns, messages = _content(record[name], f"{where}: `{name}`")
        named = (record.get("id", record.get("question_id")), record.get("category"))
        yield Entry(where, number, turns, messages, *(None if name is None else str(name) for name in named))


def _completed(record: Any) -> Any:
    """Return a record of MATH-500 or MBPP with the fields that all others have."""
    if not isinstance(record, Mapping):
        return record
    if "problem" in record and not any(name in record for name in FIELDS):
        named = {"prompt": record["problem"], "category": record.get("subject"), "id": record.get("unique_id")}
        return named | dict(record)
    tests, task = record.get("test_list"), record.get("text", record.get("prompt"))
    if isinstance(tests, list) and isinstance(task, str) and all(isinstance(test, str) for test in tests):
        # The prompt of MBPP's paper (Austin et al. 2021), without examples.
        asked = f"You are an expert Python programmer, and here is your task: {task}"
        prompt = "\n".join([f"{asked} Your code should pass these tests:", "", *tests, "[BEGIN]", ""])
        return {"id": record.get("task_id")} | dict(record) | {"prompt": prompt}
    return record


def _content(value: Any, where: str) -> tuple[tuple[str, ...], Messages]:
    """The user's turns, and the chat where it is one."""
    values = [value] if isinstance(value, str) else value
    if isinstance(values, list) and values and all(isinstance(v, str) and v.strip() for v in values):
        return tuple(values), ()
    if isinstance(values, list) and values and all(isinstance(v, Mapping) for v in values):
        messages = _chat(values, where)
        return tuple(content for role, content, *_ in messages if role == "user" and content is not None), messages
    raise SpecdecError(f"{where} must be text, a list of texts or a chat, and not empty")


def _chat(values: list[Mapping[str, Any]], where: str) -> Messages:
    """Messages up to the last one that is no answer."""
    messages = [_message(message, f"{where}, message {number}") for number, message in enumerate(values)]
    while messages and messages[-1][0] == "assistant":
        messages.pop()
    if not any(role == "user" and (content or "").strip() for role, content, *_ in messages):
        raise SpecdecError(f"{where}: the chat has no text of the role user")
    return tuple(messages)


def _message(message: Mapping[str, Any], where: str) -> Message:
    role, content = (message.get(a, message.get(b)) for a, b in (("role", "from"), ("content", "value")))
    if not isinstance(role, str):
        raise SpecdecError(f"{where}: expected texts `role` and `content`, or `from` and `value`")
    role, content = ROLES.get(role, role), join_parts(content, where)
    calls = role == "assistant" and any(message.get(name) for name in CALLS)
    if not (isinstance(content, str) or (content is None and calls)):
        raise SpecdecError(
            f"{where}: expected texts `role` and `content`, or `from` and `value`; "
            "only an assistant's that calls tools may have no content"
        )
    more = {name: _arguments(message[name]) for name in KEPT if message.get(name)}
    return (role, content, json.dumps(more, sort_keys=True, ensure_ascii=False)) if more else (role, content)


def _arguments(value: Any) -> Any:
    """Calls as templates read them: arguments are an object, and not its JSON as in OpenAI's API."""
    if isinstance(value, list):
        return [_arguments(v) for v in value]
    if not isinstance(value, Mapping):
        return value
    made = {k: _arguments(v) if k == "function" else v for k, v in value.items()}
    try:
        parsed = parse_json(value["arguments"], "arguments") if isinstance(value.get("arguments"), str) else None
    except SpecdecError:
        parsed = None
    return {**made, "arguments": parsed} if isinstance(parsed, dict) else made
