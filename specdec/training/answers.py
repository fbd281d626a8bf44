"""What the drafter is trained on: prompts, and the target's own answers to them, written once.

A file of answers is JSON lines. The first says what the answers are of (hash of target, prompts and settings), each
further one is a row: its index, prompt ids and output ids. Row i has a seed of its own, so that its answer does not
depend on the rows beside it: a file that was killed and continued, and shards put together, hold the same answers as
one run. A file of another hash is refused, never mixed in.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.decoder import SpeculativeDecoder
from specdec.decoding.prompts import encode_prompts
from specdec.decoding.provenance import weight_hash
from specdec.decoding.shard import Shard
from specdec.errors import SpecdecError
from specdec.files.forms import WHOLE, check
from specdec.files.texts import duration, parse_json, parse_json_lines, read_text, write_file, writing
from specdec.research.prompts.datasets import as_given
from specdec.training.config import TrainingConfig, TrainingData, content_hash

ROW = {"index": WHOLE, "prompt": [WHOLE], "output": [WHOLE]}


@dataclass(frozen=True)
class Answer:
    """ids: prompt and output; start: index of the output's first token; 0 = the whole text is trained on."""

    ids: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Plan:
    """Rows that are to be answered. prompts: ids of each row; held: whether it is kept from training; hash: of all that
    the answers depend on."""

    prompts: list[list[int]]
    held: list[bool]
    hash: str

    @staticmethod
    def make(config: TrainingConfig, target: Any, tokenizer: Any) -> Plan:
        """Raises SpecdecError for prompts that cannot be read or leave nothing to train on."""
        data, model = config.data, target.config
        found = [as_given(p, tokenizer, data.chat, data.longest) for p in data.load(data.texts)]
        ids = encode_prompts(found, tokenizer, model.vocab_size, model.max_position_embeddings)
        held = held_out(len(ids), data)
        rows = [(row, i in held) for i, row in enumerate(ids) for n in range(data.samples) if not (n and i in held)]
        settings = {"max_new_tokens": data.max_new_tokens, "temperature": data.temperature, "seed": data.seed}
        said = {"target": weight_hash(target), "prompts": [row for row, _ in rows], "settings": settings}
        return Plan([row for row, _ in rows], [h for _, h in rows], content_hash(said))


def held_out(count: int, data: TrainingData) -> set[int]:
    """Which of so many prompts are kept from training. Raises SpecdecError where none would be left."""
    if count <= data.held_out:
        raise SpecdecError(f"data: {count} prompts, of which {data.held_out} are held out: none is left to train on")
    return set(random.Random(f"{data.seed}/held-out").sample(range(count), data.held_out))


def write_answers(
    plan: Plan,
    decoder: SpeculativeDecoder,
    config: TrainingConfig,
    part: Shard,
    advance: Callable[[str], None],
) -> Path:
    """Write one shard of the answers, or what is missing of it, until `data.minutes` are over: held-out prompts first.

    Raises SpecdecError for a file of other answers.
    """
    file = config.folder / f"answers-{part.index}-of-{part.count}.jsonl"
    data = config.data
    _begin(file, plan)
    done = _written(plan, config)
    mine = (i for i in range(len(plan.prompts)) if part.has(i) and i not in done)
    missing = sorted(mine, key=lambda i: not plan.held[i])
    tokens, started = 0, time.perf_counter()
    for first in range(0, len(missing), data.batch_size):
        seconds = time.perf_counter() - started
        if data.minutes is not None and first and seconds > 60 * data.minutes:
            break
        rows = missing[first : first + data.batch_size]
        outputs = _outputs(plan, decoder, data, rows)
        pairs = zip(rows, outputs, strict=True)
        made = [json.dumps({"index": i, "prompt": plan.prompts[i], "output": ids}) for i, ids in pairs]
        with writing(file, "answers"), file.open("a", encoding="utf-8") as lines:
            lines.write("".join(f"{line}\n" for line in made))
        tokens, seconds = tokens + sum(map(len, outputs)), time.perf_counter() - started
        written = first + len(rows)
        left = duration(seconds / written * (len(missing) - written))
        advance(f"{written} of {len(missing)} answers, {tokens / seconds:.0f} tokens/s, about {left} left")
    return file


def _outputs(plan: Plan, decoder: SpeculativeDecoder, data: TrainingData, rows: Sequence[int]) -> list[list[int]]:
    prompts = [plan.prompts[i] for i in rows]
    if not data.max_new_tokens:
        return [[] for _ in rows]
    seeds = [(data.seed << 32) + i for i in rows]
    how: dict[str, Any] = {"temperature": data.temperature, "seed": seeds, "batch_size": len(rows)}
    out = decoder.generate(prompts, data.max_new_tokens, strategies=[], **how)
    if "interrupted" in out.finish_reasons:
        raise KeyboardInterrupt
    return out.token_ids


def _begin(file: Path, plan: Plan) -> None:
    """Make the file ready to be continued: with its head, and without half a line at the end."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = read_text(file, "answers") if file.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if not whole:
        write_file(file, json.dumps({"hash": plan.hash, "rows": len(plan.prompts)}) + "\n", "answers")
    elif whole != text:
        write_file(file, whole, "answers")


def _written(plan: Plan, config: TrainingConfig) -> dict[int, dict[str, Any]]:
    """The rows of all shards."""
    files = sorted(config.folder.glob("answers-*-of-*.jsonl"))
    return {row["index"]: row for file in files for row in _rows(file, plan)}


def _rows(file: Path, plan: Plan) -> Iterator[dict[str, Any]]:
    """The rows of a file. Raises SpecdecError for one that is of another target, other prompts or settings."""
    text, _, _ = read_text(file, "answers").rpartition("\n")  # what follows the last line's end is half a row
    head, *lines = text.split("\n")
    if parse_json(head, str(file)).get("hash") != plan.hash:
        raise SpecdecError(
            f"{file} holds answers of another target, other prompts or other settings of `data`; remove it, or give "
            "another `out`"
        )
    for number, line in enumerate(lines, 2):
        row = parse_json(line, f"{file}, line {number}")
        check(row, ROW, f"{file}, line {number}")
        yield row


def read_answers(plan: Plan, config: TrainingConfig) -> tuple[list[Answer], list[Answer]] | None:
    """(to train on, held out), from all shards; None = rows are missing, and not for want of time."""
    found = _written(plan, config)
    if len(found) < (len(plan.prompts) if config.data.minutes is None else 1):
        return None
    start = 0 if config.data.whole or not config.data.max_new_tokens else None
    parts: tuple[list[Answer], list[Answer]] = ([], [])
    for i, row in sorted(found.items()):
        parts[plan.held[i]].append(_answer(row, config, start))
    return _usable(parts, f", or `minutes` ({config.data.minutes}) are too few" * (len(found) < len(plan.prompts)))


def read_own_answers(config: TrainingConfig, vocab_size: int) -> tuple[list[Answer], list[Answer]]:
    """The same of the file `data.answers`. Raises SpecdecError for rows that are none."""
    name = config.data.answers
    rows = []
    for number, row in parse_json_lines(read_text(name, "answers"), str(name)):
        check(row, {key: [WHOLE] for key in ("prompt", "output")}, f"{name}, line {number}")
        if max(row["prompt"] + row["output"], default=0) >= vocab_size:
            raise SpecdecError(f"{name}, line {number}: a token id is outside the target's vocabulary of {vocab_size}")
        rows.append(_answer(row, config, 0 if config.data.whole else None))
    held = held_out(len(rows), config.data)
    return _usable(([r for i, r in enumerate(rows) if i not in held], [r for i, r in enumerate(rows) if i in held]))


def _answer(row: dict[str, Any], config: TrainingConfig, start: int | None) -> Answer:
    ids = (*row["prompt"], *row["output"])[: config.sequence_length]
    return Answer(ids, len(row["prompt"]) if start is None else start)


def _usable(parts: tuple[list[Answer], list[Answer]], why: str = "") -> tuple[list[Answer], list[Answer]]:
    """Without texts in which nothing is left to predict. Raises SpecdecError if those were all."""
    train, held = ([a for a in part if len(a.ids) > max(a.start, 2)] for part in parts)
    if not train or not held:
        raise SpecdecError(f"data: no answer is left: prompts fill sequence_length, or answers are empty{why}")
    return train, held


def token_counts(answers: Sequence[Answer], vocab_size: int) -> torch.Tensor:
    """How often each token occurs in answers, int64 [V]."""
    tokens = torch.tensor([t for a in answers for t in a.ids[a.start :]], dtype=torch.int64)
    return torch.bincount(tokens, minlength=vocab_size)
