"""What an ablation has to do, counted before a model is loaded: pairs in their order, and their missing calls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from specdec.config import GenerationSettings, PairConfig
from specdec.decoding.shard import Shard
from specdec.decoding.validation import check_places
from specdec.drafters import make_drafters
from specdec.errors import SpecdecError
from specdec.research.ablation.config import Cell
from specdec.research.ablation.store import MANIFEST, Plan, Store
from specdec.research.prompts.datasets import Prompt


def by_models(cells: Sequence[Cell]) -> list[tuple[PairConfig, list[Cell]]]:
    """Cells by the models that they load, those with one target one after the other, in the order of first mention."""
    targets = list(dict.fromkeys(target_of(cell.models) for cell in cells))
    loads = list(dict.fromkeys(repr(cell.models) for cell in cells))
    order = sorted(cells, key=lambda c: (targets.index(target_of(c.models)), loads.index(repr(c.models))))
    groups = [list(group) for _, group in groupby(order, key=lambda c: repr(c.models))]
    return [(group[0].models, group) for group in groups]


def target_of(models: PairConfig) -> str:
    """What the target is loaded from, and how."""
    return repr([(name, value) for name, value in vars(models).items() if not name.startswith("draft")])


def draft_of(models: PairConfig) -> str:
    """The same of the draft."""
    shared = ("device", "trust_remote_code")
    return repr([(name, v) for name, v in vars(models).items() if name.startswith("draft") or name in shared])


def missing_calls(
    plan: Plan, store: Store, shard: Shard, retry_errors: bool, cells: Sequence[Cell]
) -> Iterator[tuple[int, Cell, list[Prompt]]]:
    """The calls of a shard that have a row missing: (number of the call, cell, prompts)."""

    def done(cell: Cell, prompt: Prompt) -> bool:
        return store.done(cell, prompt, plan.fingerprint(prompt), retry_errors)

    turns = {(p.conversation, p.turn): p for p in plan.prompts}
    first, last = [p for p in plan.prompts if p.turn == 1], max((p.turn for p in plan.prompts), default=0)
    for size in dict.fromkeys(cell.batch_size for cell in cells):
        same = [cell for cell in cells if cell.batch_size == size]
        for number, start in enumerate(range(0, len(first), size)):
            if number % shard.count != shard.index:
                continue
            begins = number % len(same)
            for turn in range(1, last + 1):  # a turn needs the answers to those before it
                prompts = [turns[p.id, turn] for p in first[start : start + size] if (p.id, turn) in turns]
                for cell in same[begins:] + same[:begins]:
                    if prompts and not all(done(cell, p) for p in prompts):
                        yield number, cell, prompts


@dataclass(frozen=True)
class Work:
    """What is asked for and what is left.

    rows_done: of all processes; calls_left, loads: of this shard.
    least_passes, most_passes: of the target in the calls that are left: every draft accepted, or none.
    seconds_left: at the pace of the rows that are there; None without one.
    """

    cells: int
    drafting_cells: int
    prompts: int
    rows: int
    rows_done: int
    calls_left: int
    loads: int
    least_passes: int
    most_passes: int
    seconds_left: float | None


def work_left(plan: Plan, out: Path, shard: Shard, retry_errors: bool = False) -> Work:
    """Count what is left to do in a folder, which need not exist. Raises SpecdecError for a model file or a device that
    this machine lacks."""
    store = Store(out)
    if (out / MANIFEST).is_file():
        store.read()
    calls, loads = [], 0
    for models, cells in by_models(plan.cells):
        found = list(missing_calls(plan, store, shard, retry_errors, cells))
        if found:
            try:
                check_places(shard.place(models))
            except SpecdecError as error:
                raise SpecdecError(f"pairs.{cells[0].pair}: {error}") from error
        loads += bool(found)
        calls += found
    asked = [(cell, prompt) for cell in plan.cells for prompt in plan.prompts]
    there = [store.rows[cell.key, p.id] for cell, p in asked if store.done(cell, p, plan.fingerprint(p), retry_errors)]
    timed = [row["seconds"] for row in there if row.get("seconds")]
    passes = [call_passes(cell) for _, cell, _ in calls]
    rows_left = sum(len(prompts) for _, _, prompts in calls)
    return Work(
        cells=len(plan.cells),
        drafting_cells=sum(bool(cell.strategies) for cell in plan.cells),
        prompts=len(plan.prompts),
        rows=len(asked),
        rows_done=len(there),
        calls_left=len(calls),
        loads=loads,
        least_passes=sum(least for least, _ in passes),
        most_passes=sum(most for _, most in passes),
        seconds_left=sum(timed) / len(timed) * rows_left if timed else None,
    )


def call_passes(cell: Cell) -> tuple[int, int]:
    """Fewest and most passes of a call whose rows are of full length."""
    tokens = int(cell.generation.get("max_new_tokens", GenerationSettings.max_new_tokens))
    if not cell.strategies:
        return tokens, tokens
    drafters = make_drafters([dict(s) for s in cell.strategies], has_draft=True)
    longest = [0 if d.automatic else max(getattr(d, "n_max", None) or 0, d.tree_nodes) for d in drafters]
    # A tree is at most as deep as it has nodes. 0: as long as a pass can verify, or unknown.
    return (math.ceil(tokens / (max(longest) + 1)) if all(longest) else 1), tokens
