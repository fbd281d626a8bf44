"""The loop that trains any drafter: batches, one optimiser, a log, figures on held-out texts, and checkpoints.

The curve is a function of config, target and answers alone: texts come in an order that depends on seed and epoch,
and a checkpoint holds all that the next step depends on. A run that is killed goes on from its last checkpoint and
writes the same log again, bit for bit on a CPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.files.texts import duration, finite, parse_json, read_text, write_file, writing
from specdec.training.checkpoint import CHECKPOINT, read_checkpoint, write_checkpoint
from specdec.training.config import TrainingConfig
from specdec.training.features import Source, order
from specdec.training.schedule import Together, make_optimisers
from specdec.training.task import Figures, Task

LOG = "log.jsonl"
Evaluate = Callable[[], dict[str, Any]]


class DivergedError(SpecdecError):
    """The loss, its gradient or the weights are NaN or infinite: the run cannot go on."""


@dataclass
class Loop:
    """One run.

    source: texts to train on, `count` of them
    evaluate: figures on held-out texts, for the log
    mark: all that the curve depends on, by name; a checkpoint of another one is refused
    """

    config: TrainingConfig
    accelerator: Accelerator
    task: Task
    source: Source
    count: int
    evaluate: Evaluate
    mark: dict[str, Any]

    def __post_init__(self) -> None:
        if self.config.minutes is not None and self.accelerator.num_processes > 1:
            raise SpecdecError("minutes: clocks of several processes differ; give `steps` alone")
        self.before, self.started = 0.0, time.perf_counter()
        optimisers, self.schedule = make_optimisers(self.task.module, self.config, self._spent)
        self.module, *prepared = self.accelerator.prepare(self.task.module, *optimisers)
        self.optimiser = Together(prepared)
        self.parameters = [p for p in self.task.module.parameters() if p.requires_grad]

    def run(self, advance: Callable[[str], None]) -> list[dict[str, Any]]:
        """Train to the end, or from the last checkpoint on; returns the log.

        Raises DivergedError at the first step that is not finite; the checkpoint before it stays.
        """
        config, folder = self.config, self.config.folder
        done = saved = read_checkpoint(folder, self._state(), self.mark, self.accelerator.device)
        log = _Log(folder / LOG, done, config.steps, self.accelerator.is_main_process)
        chosen = self._chosen(done)
        if not done:
            log.write(self._entry(0, None, 0.0))
        self.started, self.before = time.perf_counter(), log.seconds
        for step in range(done + 1, config.steps + 1):
            if self._spent() >= 1:
                break  # a finished run that is started again
            try:
                loss = self._step(chosen)
                seconds = self._seconds()
                is_last = step == config.steps or self._spent() >= 1
                is_measured, is_saved = (is_last or step % n == 0 for n in (config.eval_every, config.checkpoint_every))
                if (is_measured or is_saved) and not all(p.isfinite().all() for p in self.parameters):
                    raise FloatingPointError("weights are")
            except FloatingPointError as error:
                log.write({"step": step, "loss": None, "seconds": self._seconds()})
                raise self._diverged(f"{error} not finite", step, saved) from None
            if is_measured:
                log.write(self._entry(step, loss, seconds))
            elif step % 10 == 0:
                log.write({"step": step, "loss": loss.item(), "seconds": seconds})
            if is_saved:
                saved = step
                if self.accelerator.is_main_process:
                    write_checkpoint(folder, self._state(), self.mark, step)
            advance(f"{log.words(step)}, about {duration(self._left(step, done))} left")
            if is_last:
                break
        return log.entries

    def _diverged(self, what: str, step: int, saved: int) -> DivergedError:
        chosen = self.config.optimiser
        rates = f"optimiser.lr ({chosen.lr:g})" + (f" and optimiser.muon ({chosen.muon:g})" if chosen.muon else "")
        kept = (
            f" and remove {CHECKPOINT}, or give another `out`; the checkpoint of step {saved} is kept" if saved else ""
        )
        return DivergedError(f"step {step}: {what}: the training diverged; lower {rates}{kept}")

    def _seconds(self) -> float:
        """Of the loop so far, those of an earlier part of the run included."""
        return self.before + time.perf_counter() - self.started

    def _spent(self) -> float:
        """The share of the time limit that is gone; 0 without a limit."""
        return self._seconds() / max(60 * self.config.minutes, 1e-9) if self.config.minutes is not None else 0.0

    def _left(self, step: int, done: int) -> float:
        """Seconds to the end, at the pace so far of the steps after `done`."""
        left = (time.perf_counter() - self.started) / (step - done) * (self.config.steps - step)
        return left if self.config.minutes is None else min(left, max(0.0, 60 * self.config.minutes - self._seconds()))

    def _step(self, chosen: Iterator[list[int]]) -> Tensor:
        """One optimiser step; returns its loss. Raises FloatingPointError, with weights as before, for one that would
        spoil them."""
        self.module.train()
        total = torch.zeros((), device=self.accelerator.device)
        for i in range(self.config.accumulate):
            is_last = i + 1 == self.config.accumulate
            with nullcontext() if is_last else self.accelerator.no_sync(self.module):
                loss = self.figures(self.module, next(chosen)).loss / self.config.accumulate
                self.accelerator.backward(loss)
            total += loss.detach()
        mean: Tensor = self.accelerator.reduce(total, "mean")
        norm = self.accelerator.clip_grad_norm_(self.parameters, self.config.optimiser.clip)
        both = mean if norm is None else mean + torch.as_tensor(norm, device=mean.device)
        if not both.isfinite():  # the one read of a step
            raise FloatingPointError("the gradient is" if mean.isfinite() else "the loss is")
        self.optimiser.step()
        self.schedule.step()
        self.optimiser.zero_grad()
        return mean

    def figures(self, module: Callable[..., Figures], chosen: list[int]) -> Figures:
        """A pass over the texts with these numbers."""
        half = self.config.dtype == "bfloat16"
        batch = self.source(chosen)
        with torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=half):
            return module(batch)

    def _chosen(self, done: int) -> Iterator[list[int]]:
        """The texts of every pass of this process, from those of step `done` on."""
        config, accelerator = self.config, self.accelerator
        texts = order(self.count, config.seed)
        everywhere = config.batch * accelerator.num_processes
        for _ in range(done * config.accumulate):
            list(islice(texts, everywhere))
        while True:
            drawn = list(islice(texts, everywhere))
            yield drawn[accelerator.process_index * config.batch :][: config.batch]

    def _entry(self, step: int, loss: Tensor | None, seconds: float) -> dict[str, Any]:
        found = self.evaluate() if self.accelerator.is_main_process else {}
        self.accelerator.wait_for_everyone()
        lr = self.schedule.parts[0].get_last_lr()[0]
        return {"step": step, "loss": None if loss is None else loss.item(), "lr": lr, **found, "seconds": seconds}

    def _state(self) -> dict[str, Any]:
        """What the next step depends on, by name, each with state_dict and load_state_dict."""
        return {"module": self.task.module, "optimiser": self.optimiser, "schedule": self.schedule}


class _Log:
    """JSON lines, of the steps so far; what an interrupted run wrote after its checkpoint is written again."""

    def __init__(self, file: Path, done: int, steps: int, writes: bool):
        self.file, self.steps, self.writes = file, steps, writes
        self.entries: list[dict[str, Any]] = []
        if done:
            whole = read_text(file, "log").rpartition("\n")[0].split("\n")
            self.entries = [e for e in (parse_json(line, str(file)) for line in whole) if e["step"] <= done]
            if not self.entries:
                raise SpecdecError(f"{file} has no entry up to step {done} of the checkpoint; remove the folder")
        if writes:
            write_file(file, "".join(json.dumps(e) + "\n" for e in self.entries), "log")

    @property
    def seconds(self) -> float:
        """What the run had taken at its last entry."""
        return float(self.entries[-1]["seconds"]) if self.entries else 0.0

    def write(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        if self.writes:
            with writing(self.file, "log"), self.file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(finite(entry), allow_nan=False) + "\n")

    def words(self, step: int) -> str:
        """The state of the run in a few words."""
        loss = next((e["loss"] for e in reversed(self.entries) if e.get("loss") is not None), None)
        measured = [e["teacher_forced"] for e in self.entries if "teacher_forced" in e]
        rates = " ".join(f"{rate:.2f}" for rate in measured[-1]) if measured else "-"
        return f"step {step}/{self.steps}, loss {loss or 0.0:.3f}, accepted {rates}"
