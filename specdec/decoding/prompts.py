"""Prompts of every form as rows of token ids, checked before any work is done.

str: tokenised unchanged, no chat template
list[dict]: one chat, through the chat template
list[int] or a 1-d tensor: one row of ids
a `SetPrompt`, as `load_prompts` gives them: its chat through the template, if it is one and there is one, else its text
a list of any of these, or a 2-d tensor: many rows; []: no rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from specdec.config import UNSET
from specdec.errors import SpecdecError
from specdec.files.habits import HINTS
from specdec.files.texts import first_line, is_unicode


class SetPrompt:
    """A prompt of a set, which knows more about itself than its text. id: names it in messages."""

    id: str

    def given(self, tokenizer: Any) -> Any:
        """Return the prompt in one of the other forms."""
        raise NotImplementedError


TEXT_PARTS = ("text", "input_text", "output_text")  # types of message parts that have a text


def plain_prompts(prompts: Any, tokenizer: Any) -> Any:
    """Replace `SetPrompt`s by their texts or chats. Raises SpecdecError if there are none, and for the
    output of a tokenizer."""
    if prompts is UNSET:
        raise SpecdecError("no prompts: give texts, chats or token ids as the first argument")
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        raise SpecdecError(f"this is all that a tokenizer returns: {HINTS['input_ids']}")
    if isinstance(prompts, SetPrompt):
        return prompts.given(tokenizer)
    if isinstance(prompts, (torch.Tensor, np.ndarray)) and prompts.ndim == 2:
        check_padding(prompts.tolist(), tokenizer)
    if isinstance(prompts, (list, tuple)):
        return [p.given(tokenizer) if isinstance(p, SetPrompt) else p for p in prompts]
    return prompts


def prompt_names(prompts: Any) -> list[str] | None:
    """What messages call prompts, by their ids where they are a set's; None = by their numbers."""
    rows = [prompts] if isinstance(prompts, SetPrompt) else prompts
    if not isinstance(rows, (list, tuple)) or not any(isinstance(p, SetPrompt) for p in rows):
        return None
    return [p.id if isinstance(p, SetPrompt) else f"prompt {i}" for i, p in enumerate(rows)]


def check_padding(rows: list[list[int]], tokenizer: Any) -> None:
    """Raise SpecdecError if rows of a tensor were filled up: the model would read the padding as part of the prompt."""
    pad = getattr(tokenizer, "pad_token_id", None)
    starts, ends = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos"))
    for i, row in enumerate(rows):
        # A token that pads and also begins or ends texts may be there in its own right, but not twice.
        twice = len(rows) > 1 and [pad, pad] in (row[:2], row[-2:])
        if pad is not None and row and ((row[0] == pad != starts) or (row[-1] == pad != ends) or twice):
            raise SpecdecError(f"prompt {i} is padded (token id {pad}): {HINTS['attention_mask']}")


def encode_prompts(
    prompts: Any, tokenizer: Any, vocab_size: int, context: int | None, names: Sequence[str] | None = None
) -> list[list[int]]:
    """Encode prompts as rows of ids.

    context: most tokens of a row; None = the caller checks the lengths
    names: what messages call the prompts, as `prompt_names` says

    Raises SpecdecError for an empty row, an id outside the vocabulary, a row longer than the context, text without a
    tokenizer, and any other form.
    """
    if isinstance(prompts, (torch.Tensor, np.ndarray)):
        prompts = prompts.tolist()
    if not isinstance(prompts, (str, list, tuple)):
        raise SpecdecError(f"prompts must be text, token ids, a chat, or a list of these, got {type(prompts).__name__}")
    rows = [prompts] if _is_one(prompts) else list(prompts)
    names = names or [f"prompt {i}" for i in range(len(rows))]
    encoded = [_encode(row, name, tokenizer) for row, name in zip(rows, names, strict=True)]
    for name, ids in zip(names, encoded, strict=True):
        _check(ids, name, vocab_size, context)
    return encoded


def _is_one(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    return len(prompts) > 0 and (_is_id(prompts[0]) or isinstance(prompts[0], Mapping))


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _encode(row: Any, name: str, tokenizer: Any) -> list[int]:
    if isinstance(row, (torch.Tensor, np.ndarray)):
        row = row.tolist()
    if isinstance(row, str):
        if not row:
            raise SpecdecError(f"{name} is empty")
        if not is_unicode(row):
            raise SpecdecError(f"{name} is no Unicode text: it holds half of a surrogate pair")
        return [int(t) for t in _tokenizer(tokenizer, name)(row)["input_ids"]]
    if not isinstance(row, Sequence):
        raise SpecdecError(f"{name}: expected text, token ids or a chat, got {type(row).__name__}")
    if row and isinstance(row[0], Mapping):
        chat = _tokenizer(tokenizer, name)
        if not getattr(chat, "chat_template", None):
            raise SpecdecError(f"{name} is a chat, but the tokenizer has no chat template")
        return _through_template(list(row), name, chat)
    wrong = [t for t in row if not _is_id(t)]
    if wrong:
        raise SpecdecError(f"{name}: {wrong[0]!r} is not a token id")
    return [int(t) for t in row]


def join_parts(content: Any, where: str) -> Any:
    """Join the texts of a message's parts (OpenAI's form of content); other content is returned unchanged.

    Nothing is put between the parts, as in templates that take lists; other templates would print the list. Raises
    SpecdecError for a part that is not text.
    """
    if not isinstance(content, (list, tuple)):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) and kind in TEXT_PARTS else None
        if not isinstance(text, str):
            raise SpecdecError(
                f"{where}: a part of its content is of the type {kind!r}: only parts with a text are taken"
            )
        texts.append(text)
    return "".join(texts)


def _through_template(messages: list[Any], name: str, tokenizer: Any) -> list[int]:
    """Encode a chat. Templates raise errors of their own for unknown roles or another order of roles."""
    messages = [
        {**m, "content": join_parts(m["content"], f"{name}, message {i}")}
        if isinstance(m, Mapping) and "content" in m
        else m
        for i, m in enumerate(messages)
    ]
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    except Exception as error:
        raise SpecdecError(f"{name}: the chat template refuses the chat: {first_line(error)}") from error
    return [int(t) for t in ids["input_ids"]]


def chat_rows(prompts: Any) -> list[bool]:
    """Say for each prompt if it goes through the chat template; prompts as in `encode_prompts`."""
    if isinstance(prompts, (torch.Tensor, np.ndarray)):
        prompts = prompts.tolist()
    rows = [prompts] if _is_one(prompts) else prompts
    return [not isinstance(row, str) and len(row) > 0 and isinstance(row[0], Mapping) for row in rows]


def _tokenizer(tokenizer: Any, name: str) -> Any:
    if tokenizer is None:
        raise SpecdecError(f"{name} is text, but the decoder has no tokenizer: pass token ids or tokenizer=...")
    return tokenizer


def _check(ids: list[int], name: str, vocab_size: int, context: int | None) -> None:
    if not ids:
        raise SpecdecError(f"{name} is empty")
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab_size:
            raise SpecdecError(f"{name}: token id {token} is outside the target's vocabulary of {vocab_size}")
    if context is not None and len(ids) > context:
        raise SpecdecError(
            f"{name} has {len(ids)} tokens, more than the target's context of {context}: cut it (`longest`, --longest)"
        )


class TextStream:
    """Turns a growing row into pieces of text that are never taken back.

    Held back at the end: an unfinished character (decoders show it as U+FFFD), and text that could be the start of a
    stop string. Joined pieces equal the row's final text.
    """

    def __init__(self, stop_strings: Sequence[str]):
        self.stop_strings = stop_strings
        self.sent = ""

    def piece(self, text: str) -> str:
        """Return the new text that can be sent, given the row's text so far."""
        stable = text.rstrip("�")
        held = max((_overlap(stable, stop) for stop in self.stop_strings), default=0)
        return self._send(stable[: len(stable) - held])

    def rest(self, text: str) -> str:
        """Return what remains of the final text."""
        return self._send(text)

    def _send(self, text: str) -> str:
        if not text.startswith(self.sent):  # the tokenizer still rewrites its tail: wait
            return ""
        piece = text[len(self.sent) :]
        self.sent = text if piece else self.sent
        return piece


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    for n in range(min(len(text), len(stop)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
