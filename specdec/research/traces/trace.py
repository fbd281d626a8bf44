"""Traces: every round of a run with its distributions, kept to look at and to compute with.

    trace = record(decoder, prompts, max_new_tokens=64)       # the arguments of generate
    trace.save("runs/a"); trace = Trace.load("runs/a")         # a.safetensors + a.json
    trace.to_html("a.html")                                    # the token page (token_page.py)

A trace holds what `dec.rounds` yields, for every row of a call and with details (specdec.details): the target's and the
draft's probability of each drafted token, TV(p, q), entropies, ranks, and the most likely tokens of both. They come
back in the one host read that a pass has anyway. The text of a recorded run is that of an unrecorded one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specdec.config import UNSET, check_whole
from specdec.decoding.result import Generation, Round
from specdec.errors import SpecdecError
from specdec.files.texts import write_file
from specdec.research.prompts.datasets import Prompt
from specdec.research.traces.token_page import frame, page
from specdec.research.traces.trace_files import load, save

CONTEXT = 6  # prompt tokens that are decoded before the first piece, so that it gets its leading space


@dataclass(frozen=True)
class TraceRow:
    """One row of a traced call.

    prompt, output: ids.
    prompt_text, pieces: their texts, one piece per output id ("" inside a character); empty without a tokenizer.
    id, category: of its prompt; "" = unknown.
    """

    prompt: list[int]
    output: list[int]
    finish_reason: str
    prompt_text: str = ""
    pieces: list[str] = field(default_factory=list)
    id: str = ""
    category: str = ""


@dataclass
class Trace:
    """One call.

    rounds: of all rows, in the order of the call's passes.
    tokens: id -> text for every id that occurs; {} without a tokenizer.
    stats: `Stats.to_dict()`.
    result: the call's; None in a loaded trace.
    """

    rows: list[TraceRow]
    rounds: list[Round]
    tokens: dict[int, str]
    provenance: dict[str, Any]
    stats: dict[str, Any]
    result: Generation | None = field(default=None, compare=False)

    @property
    def strategies(self) -> list[str]:
        """Who drafted, in order of first appearance."""
        return list(dict.fromkeys(r.strategy for r in self.rounds if r.strategy is not None))

    def text_of(self, token: int) -> str:
        """A token's text, or its id where there is no tokenizer."""
        return self.tokens.get(token, f"<{token}>")

    def of_row(self, row: int) -> list[Round]:
        """The rounds of one row, in order."""
        return [r for r in self.rounds if r.row == row]

    def select(self, rows: Iterable[int] | None = None, strategies: Iterable[str] | None = None) -> list[Round]:
        """Rounds of these rows that these strategies drafted; None = all. Raises SpecdecError for unknown ones."""
        wanted = None if rows is None else set(rows)
        names = None if strategies is None else set(strategies)
        for row in sorted(wanted or ()):
            if not 0 <= row < len(self.rows):
                raise SpecdecError(f"the trace has no row {row}: it has rows 0..{len(self.rows) - 1}")
        unknown = sorted((names or set()) - set(self.strategies))
        if unknown:
            known = ", ".join(self.strategies) or "none"
            raise SpecdecError(f"no round of the trace was drafted by {unknown[0]!r}; strategies in it: {known}")
        chosen = [r for r in self.rounds if wanted is None or r.row in wanted]
        return [r for r in chosen if names is None or r.strategy in names]

    def drafted_before(self) -> list[int]:
        """For each round how many tokens of its draft earlier passes have accepted: a long draft takes several."""
        begun = dict.fromkeys(range(len(self.rows)), 0)
        found = []
        for r in self.rounds:
            found.append(begun[r.row])
            begun[r.row] = begun[r.row] + r.accepted if r.is_continued else 0
        return found

    def save(self, path: str | Path) -> Path:
        """Write PATH.safetensors and PATH.json; returns the latter's path."""
        return save(self, path)

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read what `save` wrote, by either file's name or without a suffix. Raises SpecdecError for anything else."""
        rows, rounds, tokens, provenance, stats = load(path)
        return Trace([TraceRow(**row) for row in rows], rounds, tokens, provenance, stats)

    def to_html(self, path: str | Path | None = None, title: str = "specdec trace") -> str:
        """The token page: one HTML file that needs nothing else. Returns it, and writes it where `path` is given."""
        html = page(self, title)
        if path is not None:
            write_file(path, html, "token page")
        return html

    def __repr__(self) -> str:
        # A notebook stores the text form with the page, and a whole trace would be megabytes of it.
        drafters = ", ".join(self.strategies) or "nobody"
        return f"Trace({len(self.rows)} rows, {len(self.rounds)} rounds, drafted by {drafters})"

    def _repr_html_(self) -> str:
        return frame(self)


def record(
    decoder: Any,
    prompts: Any = UNSET,
    max_new_tokens: int = 128,
    strategies: Any = UNSET,
    *,
    top: int = 5,
    ids: Sequence[str] | None = None,
    categories: Sequence[str] | None = None,
    watch: Callable[[Round], Any] | None = None,
    progress: Callable[[float], Any] | None = None,
    **options: Any,
) -> Trace:
    """Run `decoder.generate(prompts, max_new_tokens, strategies, **options)` and keep its rounds.

    top: record the `top` most likely tokens per position.
    ids, categories: names of the prompts, for analysis by category; None = those of prompts of a set.
    watch: called with every round as it comes, for instance a `monitor.Monitor`.
    progress: called after every pass with the share of the call that is done.
    Returns the trace; `trace.result` is what `generate` returns. An interrupted call gives the trace so far.
    """
    check_whole("top", top, 1)
    if options.get("shard") is not None:
        raise SpecdecError("shard: a trace is of all prompts of a call; give each process its own")
    call = decoder._call(prompts, strategies, max_new_tokens=max_new_tokens, **options)
    call.record, call.top = True, top
    rounds: list[Round] = []
    with call:
        try:
            for found in call.run():
                rounds += found
                if watch is not None:
                    for entry in found:
                        watch(entry)
                if progress is not None:
                    progress(call.done)
        except KeyboardInterrupt:
            call.interrupt()
    known = [prompts] if isinstance(prompts, Prompt) else prompts
    of_sets = isinstance(known, (list, tuple)) and bool(known) and all(isinstance(p, Prompt) for p in known)
    if ids is None and categories is None and of_sets:
        ids, categories = [p.id for p in known], [p.category for p in known]
    names = [_named(label, v, len(call.rows)) for label, v in (("ids", ids), ("categories", categories))]
    return _trace(decoder.tokenizer, [row.prompt for row in call.rows], rounds, call.result(), *names)


def _trace(
    tokenizer: Any, prompts: list[list[int]], rounds: list[Round], result: Generation, ids: list[str], kinds: list[str]
) -> Trace:
    """The trace of a call that has ended."""
    columns = zip(prompts, result.token_ids, result.finish_reasons, ids, kinds, strict=True)
    rows = [_row(tokenizer, *row) for row in columns]
    tokens = _texts(tokenizer, _ids_in(rounds, prompts))
    # As JSON holds it, so that a loaded trace equals the recorded one.
    provenance, stats = (json.loads(json.dumps(d)) for d in (result.provenance, result.stats.to_dict()))
    return Trace(rows, rounds, tokens, provenance, stats, result)


def _named(label: str, values: Sequence[str] | None, rows: int) -> list[str]:
    """One value a row; rows of one prompt share its value."""
    if values is None:
        return [""] * rows
    if len(values) == 0 or rows % len(values):
        raise SpecdecError(f"{label}: got {len(values)} for {rows} rows")
    return [str(v) for v in values for _ in range(rows // len(values))]


def _row(tokenizer: Any, prompt: list[int], output: list[int], reason: str, name: str, category: str) -> TraceRow:
    row = TraceRow(prompt, output, reason, id=name, category=category)
    if tokenizer is None:
        return row
    return replace(row, prompt_text=_decode(tokenizer, prompt), pieces=pieces(tokenizer, prompt, output))


def pieces(tokenizer: Any, prompt: Sequence[int], output: Sequence[int]) -> list[str]:
    """The text that each output token adds, special tokens included; "" while a character is not finished."""
    known = [*prompt[-CONTEXT:], *output]
    start, read = 0, len(known) - len(output)  # text up to `read` is out; decoding from `start` keeps what joins
    found = []
    for end in range(read + 1, len(known) + 1):
        before, text = _decode(tokenizer, known[start:read]), _decode(tokenizer, known[start:end])
        finished = len(text) >= len(before) and not text.endswith("�")
        if finished or end == len(known):
            found.append(text[len(before) :])
            start, read = read, end
        else:
            found.append("")
    return found


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _ids_in(rounds: Iterable[Round], prompts: Iterable[Sequence[int]]) -> list[int]:
    """Every id that the trace mentions, drafted, emitted or among the best."""
    seen: set[int] = {t for prompt in prompts for t in prompt}
    for r in rounds:
        seen.update(r.draft, r.tokens)
        if r.details is not None:
            for best in (*r.details.top_ids, *(r.details.draft_top_ids or ())):
                seen.update(best)
    return sorted(seen)


def _texts(tokenizer: Any, ids: Sequence[int]) -> dict[int, str]:
    """Each id's own text; where the vocabulary marks a leading blank that decoding a single id drops, it is kept."""
    if tokenizer is None:
        return {}
    texts = {}
    for token, name in zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True):
        text = _decode(tokenizer, [token])
        texts[token] = f" {text}" if str(name).startswith("▁") and not text.startswith(" ") else text
    return texts
