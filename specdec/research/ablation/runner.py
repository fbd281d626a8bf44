"""Run the cells of an ablation that are not done yet: each model is loaded once, each row is written when it is done.

Order of work: pairs with the same target come one after the other; within a pair, prompt by prompt (in calls of
`batch_size` prompts), and for each prompt every cell in turn, so that a machine that gets slower slows all settings
alike. The first cell rotates with the prompt. A shard takes every `count`-th call, so that all cells of a prompt run on
one machine.

A prompt's seed is a hash of the cell's seed and the prompt's id, so that it depends neither on the other prompts nor on
the batch. The row records it, and `generate(prompt, seed=[row_seed])` repeats the row.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdec.config import PairConfig
from specdec.decoder import SpeculativeDecoder
from specdec.decoding.prompts import encode_prompts
from specdec.decoding.provenance import hash_ids, hash_template, versions, weight_hash
from specdec.decoding.result import Generation
from specdec.decoding.shard import Shard
from specdec.decoding.validation import check_places
from specdec.errors import SpecdecError
from specdec.models.names import model_name
from specdec.research.ablation.config import AblationConfig, Cell
from specdec.research.ablation.journal import Journal
from specdec.research.ablation.store import Plan, Store
from specdec.research.ablation.work import by_models, draft_of, missing_calls, target_of
from specdec.research.prompts.datasets import TURN, Prompt, as_given, with_template
from specdec.research.traces.trace import Trace, record

TRACES = "traces"  # folder of recorded rounds
Progress = Callable[[str], None]
# Facts about a loaded pair, looked up once: (decoder, its cells, its prompts' ids, its rows) -> plain data.
Examine = Callable[[SpeculativeDecoder, Sequence[Cell], Mapping[str, "Ids"], Mapping[tuple[str, str], Any]], Any]
Ids = list[int] | SpecdecError  # a prompt's ids, or why it has none


@dataclass
class Session:
    """What one process did; times in seconds."""

    rows: int = 0
    errors: int = 0
    wall: float = 0.0  # all of it
    load: float = 0.0  # models with their self-tests and warm-up
    decode: float = 0.0  # calls of `generate`
    loaded: list[str] = field(default_factory=list)


def run_ablation(
    config: AblationConfig,
    out: Path,
    shard: Shard | str | None = None,
    extend: bool = False,
    retry_errors: bool = False,
    progress: Progress = lambda what: None,
    examine: Examine | None = None,
) -> Session:
    """Run what is missing in the folder `out`.

    config: the ablation.
    out: its folder; resumes if it exists.
    shard: "0/4" = the first of four processes that share the work; None = all of it, whatever RANK says.
    extend: resume although the config or a version changed.
    retry_errors: run failed rows again.
    progress: called before every call of `generate`.
    examine: called for every pair when its rows are done; its results are kept in the journal.
    Raises SpecdecError for bad input, a file or device that this machine lacks, and the folder of another ablation. A
    cell that fails is recorded and does not stop the others. A KeyboardInterrupt leaves what is done.
    """
    started = time.perf_counter()
    shard = shard if isinstance(shard, Shard) else Shard.parse(shard)
    plan = Plan.make(config)
    store = Store.open(out, plan, extend)
    with Journal(out, shard.index) as journal:
        store.read()
        run = _Run(plan, store, journal, shard, retry_errors, progress, examine)
        try:
            run.all()
        finally:
            run.session.wall = time.perf_counter() - started
            if run.session.rows:
                journal.append([{"kind": "session", **asdict(run.session)}])
    return run.session


@dataclass
class Shelf:
    """Loaded models, so that none is loaded twice; those that no later pair needs are let go."""

    models: dict[str, Any] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)  # the same by what the config says of them

    def decoder(self, models: PairConfig, cells: Sequence[Cell]) -> SpeculativeDecoder:
        """The decoder of a pair. A chain that drafts through text decides whether vocabularies may differ."""
        options = {name: value for name, value in vars(models).items() if name not in ("target", "draft")}
        through_text = [list(c.strategies) for c in cells if any(s.get("translate") for s in c.strategies)]
        made: SpeculativeDecoder = SpeculativeDecoder.from_pretrained(
            models.target, models.draft, through_text[0] if through_text else [], shelf=self.models, **options
        )
        self.held[target_of(models)] = made.target.model
        if made.draft is not None:
            self.held[draft_of(models)] = made.draft.model
        return made

    def keep(self, later: Iterable[PairConfig]) -> None:
        """Let go of every model that none of these pairs needs."""
        needed = {name for models in later for name in (target_of(models), draft_of(models))}
        self.held = {name: model for name, model in self.held.items() if name in needed}
        kept = {id(model) for model in self.held.values()}
        gone = [key for key, model in self.models.items() if id(model) not in kept]
        for key in gone:
            del self.models[key]
        if gone:
            gc.collect()


@dataclass(frozen=True)
class _Loaded:
    """A pair in memory, with the ids of every prompt by its id."""

    decoder: SpeculativeDecoder
    weights: dict[str, str]  # hashes by role
    encoded: dict[str, Ids]
    template: str | None  # hash of the chat template that the prompts went through

    def names(self) -> dict[str, dict[str, str | None]]:
        """What the models are, by role."""
        runners = self.decoder._runners()
        return {role: {**model_name(r.model), "weights": self.weights[role]} for role, r in runners.items()}


@dataclass
class _Run:
    plan: Plan
    store: Store
    journal: Journal
    shard: Shard
    retry_errors: bool
    progress: Progress
    examine: Examine | None = None
    session: Session = field(default_factory=Session)

    def all(self) -> None:
        """Every pair that has something missing."""
        groups = [group for group in by_models(self.plan.cells) if self._wanted(group[1])]
        places = [self.shard.place(models) for models, _ in groups]
        for models, (_, cells) in zip(places, groups, strict=True):
            try:
                check_places(models)
            except SpecdecError as error:
                raise SpecdecError(f"pairs.{cells[0].pair}: {error}") from error
        shelf = Shelf()
        for i, (_, cells) in enumerate(groups):
            shelf.keep(places[i:])
            self.pair(places[i], cells, shelf)

    def _wanted(self, cells: Sequence[Cell]) -> bool:
        unknown = self.examine is not None and cells[0].key not in self.store.facts
        return unknown or any(True for _ in self.calls(cells))

    def calls(self, cells: Sequence[Cell]) -> Iterator[tuple[int, Cell, list[Prompt]]]:
        """The calls of this process that have a row missing."""
        return missing_calls(self.plan, self.store, self.shard, self.retry_errors, cells)

    def pair(self, models: PairConfig, cells: Sequence[Cell], shelf: Shelf) -> None:
        """Run every missing call of the cells of one pair. If the pair cannot be loaded, all of them fail."""
        started = time.perf_counter()
        self.progress(f"loading {cells[0].pair}")
        try:
            loaded = self._load(models, cells, shelf)
        except Exception as error:  # whatever a checkpoint trips over
            failure = _as_error(error)
            self.session.load += time.perf_counter() - started
            for number, cell, prompts in self.calls(cells):
                self.write([_failed(cell, p, self.plan, number, failure) for p in prompts])
            return
        self.store.check_weights(cells, loaded.weights)
        self.store.name_models(cells[0].pair, loaded.names())
        self._warm_up(loaded, cells)
        self.session.load += time.perf_counter() - started
        self.session.loaded.append(cells[0].pair)
        for number, cell, prompts in self.calls(cells):
            self.progress(f"{cell.pair}: {cell.chain}, {prompts[0].id}")
            self.write(self.call(loaded, cell, prompts, number))
        if self.examine is not None:
            self.store.read()
            found = self.examine(loaded.decoder, cells, loaded.encoded, self.store.rows)
            self.journal.append([{"kind": "facts", "cell": cells[0].key, "facts": found}])

    def _load(self, models: PairConfig, cells: Sequence[Cell], shelf: Shelf) -> _Loaded:
        decoder = shelf.decoder(models, cells)
        weights = {role: weight_hash(r.model) for role, r in decoder._runners().items()}
        encoded = {p.id: encode(p, decoder, self.plan.config) for p in self.plan.prompts if p.turn == 1}
        templated = with_template(decoder.tokenizer, self.plan.config.data.chat)
        return _Loaded(decoder, weights, encoded, hash_template(decoder.tokenizer) if templated else None)

    def _warm_up(self, loaded: _Loaded, cells: Sequence[Cell]) -> None:
        rows = [ids for ids in loaded.encoded.values() if not isinstance(ids, SpecdecError)]
        if rows and self.plan.config.warm_up_tokens:
            for cell in {cell.chain: cell for cell in (cells[0], cells[-1])}.values():
                try:
                    loaded.decoder.generate(rows[:1], self.plan.config.warm_up_tokens, strategies=list(cell.strategies))
                except Exception:  # the cell itself will fail, and say so in its rows
                    continue

    def call(self, loaded: _Loaded, cell: Cell, prompts: Sequence[Prompt], number: int) -> list[dict[str, Any]]:
        """Make one call of `generate`; its rows are in the order of its prompts."""
        encoded = {p.id: self._ids(loaded, cell, p) for p in prompts}
        ids = {name: found for name, found in encoded.items() if not isinstance(found, SpecdecError)}
        failures = {name: found for name, found in encoded.items() if isinstance(found, SpecdecError)}
        made: dict[str, dict[str, Any]] = {}
        if ids:
            started = time.perf_counter()
            try:
                traced = {p.id: p.category for p in prompts} if self.plan.config.traces and cell.strategies else None
                out, trace = _generate(loaded.decoder, cell, ids, traced)
                made = dict(zip(ids, rows_of(out, time.perf_counter() - started), strict=True))
                if trace is not None:
                    trace.save(self.store.folder / TRACES / f"{cell.key}-{number}")
            except Exception as error:  # a cell that fails, out of memory included, must not stop the rest
                failures |= dict.fromkeys(ids, _as_error(error))
            self.session.decode += time.perf_counter() - started
        rows = []
        for p in prompts:
            if p.id in failures:
                rows.append(_failed(cell, p, self.plan, number, failures[p.id]))
                continue
            own = {
                "row_seed": row_seed(cell.seed, p.id),
                "prompt_tokens": len(ids[p.id]),
                "prompt_hash": hash_ids(ids[p.id]),
                "chat_template": loaded.template,
                "weights": dict(loaded.weights),
            }
            rows.append({**_head(cell, p, self.plan, number), **own, **made[p.id]})
        return rows

    def _ids(self, loaded: _Loaded, cell: Cell, prompt: Prompt) -> Ids:
        """The prompt's ids; a later turn's have the cell's own answers to the turns before it."""
        answers = []
        for n in range(1, prompt.turn):
            name = prompt.conversation if n == 1 else f"{prompt.conversation}{TURN}{n}"
            row = self.store.rows.get((cell.key, name), {})
            if row.get("text") is None:
                return SpecdecError(
                    f"{prompt.id}: there is no answer to turn {n}: {row.get('error') or 'no tokenizer'}"
                )
            answers.append(row["text"])
        return encode(prompt.after(answers), loaded.decoder, self.plan.config) if answers else loaded.encoded[prompt.id]

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Put the rows of a call into the journal."""
        self.journal.append(rows)
        self.store.rows |= {(row["cell"], row["prompt"]): row for row in rows}
        self.session.rows += len(rows)
        self.session.errors += sum(row["status"] == "error" for row in rows)


def encode(prompt: Prompt, decoder: SpeculativeDecoder, config: AblationConfig) -> Ids:
    """The prompt's ids as the config wants them, or the reason why there are none."""
    tokenizer, data = decoder.tokenizer, config.data
    try:
        wanted = as_given(prompt, tokenizer, data.chat, data.longest)
        return encode_prompts(wanted, tokenizer, decoder.target.vocab_size, decoder.target.context, [prompt.id])[0]
    except SpecdecError as error:
        return error


def row_seed(seed: int, prompt: str) -> int:
    """The seed of a prompt's row."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt}".encode()).digest()[:8], "big") >> 1


def _generate(
    decoder: SpeculativeDecoder, cell: Cell, ids: Mapping[str, list[int]], traced: Mapping[str, str] | None
) -> tuple[Generation, Trace | None]:
    """Generate, and record a trace where categories of the prompts are given."""
    options = {k: v for k, v in cell.generation.items() if k not in ("seed", "batch_size")}
    options |= {"seed": [row_seed(cell.seed, name) for name in ids], "batch_size": cell.batch_size}
    rows, options["strategies"] = list(ids.values()), [dict(s) for s in cell.strategies]
    trace = None
    if traced is None:
        out = decoder.generate(rows, **options)
    else:
        trace = record(decoder, rows, ids=list(ids), categories=[traced[name] for name in ids], **options)
        assert trace.result is not None
        out = trace.result
    if "interrupted" in out.finish_reasons:
        raise KeyboardInterrupt
    return out, trace


def rows_of(out: Generation, seconds: float) -> list[dict[str, Any]]:
    """What the rows of a call leave in the journal. Times are the call's, shared equally by its rows."""
    count, times = len(out), out.stats.times
    parts = {"prefill": times.prefill, "draft": times.draft, "verify": times.verify}
    parts["other"] = max(0.0, seconds - sum(parts.values()))
    shared = {
        "lossy": out.lossy,
        "exact": out.provenance["exact"],
        "seconds": seconds / count,
        **{f"{name}_seconds": value / count for name, value in parts.items()},
        "strategy_seconds": {name: c.t_draft / count for name, c in out.stats.counters.items()},
        "skipped": {name: c.n_skipped / count for name, c in out.stats.counters.items()},
    }
    return [
        {
            "status": "ok" if error is None else "error",
            "error": error,
            "tokens": out.token_ids[i],
            "text": out.texts[i] if out.texts is not None else None,
            "finish_reason": out.finish_reasons[i],
            "distance": sum(out.distances[i]) if out.distances is not None else None,
            "records": [list(record) for record in out.stats.rows[i]],
            **shared,
        }
        for i, error in enumerate(out.errors)
    ]


def _head(cell: Cell, prompt: Prompt, plan: Plan, number: int) -> dict[str, Any]:
    made_with = versions()
    return {
        "kind": "row",
        "cell": cell.key,
        "prompt": prompt.id,
        "fingerprint": plan.fingerprint(prompt),
        "call": number,
        "versions": ", ".join(f"{name} {made_with[name]}" for name in ("specdec", "torch", "transformers")),
    }


def _failed(cell: Cell, prompt: Prompt, plan: Plan, number: int, error: SpecdecError) -> dict[str, Any]:
    return {**_head(cell, prompt, plan, number), "status": "error", "error": str(error)}


def _as_error(error: Exception) -> SpecdecError:
    if isinstance(error, SpecdecError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
    return SpecdecError(f"{type(error).__name__}: {error}")
