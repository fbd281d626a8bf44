"""Runs the cells of an ablation that are not done yet, each model loaded once, each row written as it is finished.

Order of work: pairs that share a target lie beside each other; within a pair, prompt by prompt (in calls of
`batch_size` prompts), and for each prompt every cell in turn, so that a machine that gets slower slows all settings
alike. The first cell rotates with the prompt. A process of a launch takes every world_size-th call, so that all cells
of a prompt run on one machine.

A prompt's seed is a hash of the cell's seed and the prompt's id, so that it depends neither on the other prompts nor on
the batch; a row says which, and `generate(prompt, seed=[row_seed])` repeats it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specdec.config import PairConfig
from specdec.decoder import SpeculativeDecoder
from specdec.decoding.prompts import encode_prompts
from specdec.decoding.provenance import hash_ids, hash_template, versions
from specdec.decoding.result import Generation
from specdec.decoding.validation import check_places
from specdec.errors import SpecdecError
from specdec.research.ablation.config import AblationConfig, Cell
from specdec.research.ablation.journal import Journal
from specdec.research.ablation.models import Shelf, by_models
from specdec.research.ablation.store import Plan, Store
from specdec.research.prompts.datasets import Prompt, as_given, with_template

# How launchers number their processes: rank, world size, rank on the node. accelerate's for CPUs is mpirun.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
Progress = Callable[[str], None]
# What is to be found out about a loaded pair, once: (decoder, its cells, its prompts' ids, its rows) -> plain data.
Examine = Callable[[SpeculativeDecoder, Sequence[Cell], Mapping[str, "Ids"], Mapping[tuple[str, str], Any]], Any]
Ids = list[int] | SpecdecError  # a prompt's ids, or why it has none


@dataclass(frozen=True)
class Share:
    """The part of a launch that this process is."""

    rank: int = 0
    world: int = 1
    local_rank: int | None = None

    @staticmethod
    def from_environment() -> Share:
        """What `accelerate launch`, torchrun, mpirun and their like say. Raises SpecdecError for a rank outside the
        world."""
        names = next((n for n in LAUNCHERS if n[1] in os.environ), LAUNCHERS[0])
        try:
            rank, world = int(os.environ.get(names[0], 0)), int(os.environ.get(names[1], 1))
            local = os.environ.get(names[2])
            share = Share(rank, world, None if local is None else int(local))
        except ValueError as error:
            raise SpecdecError(f"{', '.join(names)} must be whole numbers: {error}") from None
        if not 0 <= rank < world:
            raise SpecdecError(f"{names[0]} {rank} is outside the world of {names[1]} {world}")
        return share

    def place(self, models: PairConfig) -> PairConfig:
        """The pair on this process's GPU, where the config leaves the device open."""
        if self.local_rank is None or models.device is not None or not torch.cuda.is_available():
            return models
        return replace(models, device=f"cuda:{self.local_rank % torch.cuda.device_count()}")


@dataclass
class Session:
    """What one process did. Seconds: wall = all of it, load = models with their self-tests and warm-up, decode =
    around the calls of `generate`."""

    rows: int = 0
    errors: int = 0
    wall: float = 0.0
    load: float = 0.0
    decode: float = 0.0
    loaded: list[str] = field(default_factory=list)

    @property
    def overhead(self) -> float | None:
        """Time of the runner beside decoding, relative to decoding."""
        return (self.wall - self.load - self.decode) / self.decode if self.decode else None


def run_ablation(
    config: AblationConfig, out: Path, share: Share | None = None, extend: bool = False, retry_errors: bool = False,
    progress: Progress = lambda what: None, examine: Examine | None = None,
) -> Session:  # fmt: skip
    """Run what is missing in the folder `out`. `progress` is told of every call that is about to run; `examine` is
    asked about every pair when its rows are done, and its answers are kept in the journal.

    Raises SpecdecError for bad input, for files and devices that this machine lacks, and for a folder of another
    ablation; a cell that fails is recorded and does not stop the others. A KeyboardInterrupt leaves what is done.
    """
    started = time.perf_counter()
    share = share or Share()
    plan = Plan.make(config)
    store = Store.open(out, plan, extend)
    with Journal(out, share.rank) as journal:
        store.read()
        run = _Run(plan, store, journal, share, retry_errors, progress, examine)
        try:
            run.all()
        finally:
            run.session.wall = time.perf_counter() - started
            if run.session.rows:
                journal.append([{"kind": "session", **asdict(run.session)}])
    return run.session


@dataclass
class _Run:
    plan: Plan
    store: Store
    journal: Journal
    share: Share
    retry_errors: bool
    progress: Progress
    examine: Examine | None = None
    session: Session = field(default_factory=Session)

    def all(self) -> None:
        """Every pair that has something missing."""
        groups = [group for group in by_models(self.plan.cells) if self._wanted(group[1])]
        places = [self.share.place(models) for models, _ in groups]
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
        """The calls of this process that have a row missing: (number of the call, cell, prompts)."""
        for size in dict.fromkeys(cell.batch_size for cell in cells):
            same = [cell for cell in cells if cell.batch_size == size]
            for number, first in enumerate(range(0, len(self.plan.prompts), size)):
                if number % self.share.world != self.share.rank:
                    continue
                prompts = self.plan.prompts[first : first + size]
                turn = number % len(same)
                for cell in same[turn:] + same[:turn]:
                    if not all(self._done(cell, p) for p in prompts):
                        yield number, cell, prompts

    def _done(self, cell: Cell, prompt: Prompt) -> bool:
        return self.store.done(cell, prompt, self.plan.fingerprint(prompt), self.retry_errors)

    def pair(self, models: PairConfig, cells: Sequence[Cell], shelf: Shelf) -> None:
        """Every missing call of the cells of one pair. A pair that cannot be loaded fails them all."""
        started = time.perf_counter()
        self.progress(f"loading {cells[0].pair}")
        failure: SpecdecError | None = None
        try:
            decoder = shelf.decoder(models, cells)
            weights = {role: h.get() for role, h in decoder._hashes.items()}
        except Exception as error:  # whatever a checkpoint trips over
            failure = _as_error(error)
        if failure is not None:
            self.session.load += time.perf_counter() - started
            for number, cell, prompts in self.calls(cells):
                self.write([_failed(cell, p, self.plan, number, failure) for p in prompts])
            return
        self.store.check_weights(cells, weights)
        encoded = {p.id: encode(p, decoder, self.plan.config) for p in self.plan.prompts}
        self._warm_up(decoder, cells, encoded)
        self.session.load += time.perf_counter() - started
        self.session.loaded.append(cells[0].pair)
        for number, cell, prompts in self.calls(cells):
            self.progress(f"{cell.pair}: {cell.chain}, {prompts[0].id}")
            self.write(self.call(decoder, cell, prompts, encoded, number, weights))
        if self.examine is not None:
            self.store.read()
            found = self.examine(decoder, cells, encoded, self.store.rows)
            self.journal.append([{"kind": "facts", "cell": cells[0].key, "facts": found}])

    def _warm_up(self, decoder: SpeculativeDecoder, cells: Sequence[Cell], encoded: Mapping[str, Ids]) -> None:
        rows = [ids for ids in encoded.values() if not isinstance(ids, SpecdecError)]
        if rows and self.plan.config.warm_up_tokens:
            for cell in {cell.chain: cell for cell in (cells[0], cells[-1])}.values():
                try:
                    decoder.generate(rows[:1], self.plan.config.warm_up_tokens, strategies=list(cell.strategies))
                except Exception:  # the cell itself will fail, and say so in its rows
                    continue

    def call(
        self, decoder: SpeculativeDecoder, cell: Cell, prompts: Sequence[Prompt], encoded: Mapping[str, Ids],
        number: int, weights: Mapping[str, str],
    ) -> list[dict[str, Any]]:  # fmt: skip
        """One call of `generate`, as rows in the order of its prompts."""
        known = {p.id: ids for p in prompts if not isinstance(ids := encoded[p.id], SpecdecError)}
        rows = {
            p.id: _failed(cell, p, self.plan, number, error)
            for p in prompts if isinstance(error := encoded[p.id], SpecdecError)
        }  # fmt: skip
        seeds = [row_seed(cell.seed, name) for name in known]
        options = {k: v for k, v in cell.generation.items() if k not in ("seed", "batch_size")}
        started = time.perf_counter()
        try:
            out = None
            if known:
                out = decoder.generate(
                    list(known.values()), strategies=[dict(s) for s in cell.strategies], seed=seeds,
                    batch_size=cell.batch_size, **options,
                )  # fmt: skip
        except Exception as error:  # a cell that fails, out of memory included, must not stop the rest
            failure = _as_error(error)
            rows |= {p.id: _failed(cell, p, self.plan, number, failure) for p in prompts if p.id in known}
        seconds = time.perf_counter() - started
        self.session.decode += seconds if known else 0.0
        if out is not None:
            if "interrupted" in out.finish_reasons:
                raise KeyboardInterrupt
            made = [row_of(out, i, seconds) for i in range(len(known))]
            templated = with_template(decoder.tokenizer, self.plan.config.data.chat)
            template = hash_template(decoder.tokenizer) if templated else None
            for (name, ids), seed, row in zip(known.items(), seeds, made, strict=True):
                prompt = next(p for p in prompts if p.id == name)
                head = _head(cell, prompt, self.plan, number)
                rows[name] = {
                    **head, "row_seed": seed, "prompt_tokens": len(ids), "prompt_hash": hash_ids(ids),
                    "chat_template": template, "weights": dict(weights), **row,
                }  # fmt: skip
        return [rows[p.id] for p in prompts]

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Put the rows of a call into the journal."""
        self.journal.append(rows)
        self.session.rows += len(rows)
        self.session.errors += sum(row["status"] == "error" for row in rows)


def encode(prompt: Prompt, decoder: SpeculativeDecoder, config: AblationConfig) -> Ids:
    """The prompt's ids as the config wants them, or the reason why there are none."""
    tokenizer, data = decoder.tokenizer, config.data
    try:
        wanted = as_given(prompt, tokenizer, data.chat, data.longest)
        return encode_prompts(wanted, tokenizer, decoder.target.vocab_size, decoder.target.context)[0]
    except SpecdecError as error:
        return SpecdecError(str(error).replace("prompt 0", prompt.id))


def row_seed(seed: int, prompt: str) -> int:
    """The seed of a prompt's row."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt}".encode()).digest()[:8], "big") >> 1


def row_of(out: Generation, index: int, seconds: float) -> dict[str, Any]:
    """What one row of a call leaves in the journal. Times are the call's, shared equally by its rows."""
    count, times = len(out), out.stats.times
    parts = {"prefill": times.prefill, "draft": times.draft, "verify": times.verify}
    parts["other"] = max(0.0, seconds - sum(parts.values()))
    error = out.errors[index]
    return {
        "status": "ok" if error is None else "error",
        "error": error,
        "tokens": out.token_ids[index],
        "text": out.texts[index] if out.texts is not None else None,
        "finish_reason": out.finish_reasons[index],
        "records": [list(record) for record in out.stats.rows[index]],
        "lossy": out.lossy,
        "exact": out.provenance["exact"],
        "seconds": seconds / count,
        **{f"{name}_seconds": value / count for name, value in parts.items()},
        "strategy_seconds": {name: c.t_draft / count for name, c in out.stats.counters.items()},
    }


def _head(cell: Cell, prompt: Prompt, plan: Plan, number: int) -> dict[str, Any]:
    made_with = versions()
    return {
        "kind": "row", "cell": cell.key, "prompt": prompt.id, "fingerprint": plan.fingerprint(prompt), "call": number,
        "versions": ", ".join(f"{name} {made_with[name]}" for name in ("specdec", "torch", "transformers")),
    }  # fmt: skip


def _failed(cell: Cell, prompt: Prompt, plan: Plan, number: int, error: SpecdecError) -> dict[str, Any]:
    return {**_head(cell, prompt, plan, number), "status": "error", "error": str(error)}


def _as_error(error: Exception) -> SpecdecError:
    if isinstance(error, SpecdecError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
    return SpecdecError(f"{type(error).__name__}: {error}")
