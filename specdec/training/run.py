"""A training run from its config: answers, features, loop, result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from specdec.decoder import SpeculativeDecoder
from specdec.decoding.provenance import weight_hash
from specdec.decoding.shard import Shard
from specdec.errors import SpecdecError
from specdec.files.texts import check_writable, writing
from specdec.models.checkpoint import said
from specdec.models.loading import LoadedPair
from specdec.research.models.choice import locate
from specdec.training.answers import Answer, Plan, read_answers, read_own_answers, token_counts, write_answers
from specdec.training.config import SECTIONS, TrainingConfig, content_hash
from specdec.training.draft import DraftTask, make_draft
from specdec.training.eagle3 import HeadTask
from specdec.training.evaluate import Evaluation
from specdec.training.exit import ExitTask, make_adapter
from specdec.training.features import Kept, Live, Source, Stored, store
from specdec.training.loop import Loop
from specdec.training.new_head import make_head
from specdec.training.skip_search import SkipSet, search_skip_sets
from specdec.training.task import Task

RESULT = {"eagle3": "head", "draft": "draft", "exit": "adapter"}
Advance = Callable[[str], None]
Answers = tuple[list[Answer], list[Answer]]


def run_training(config: TrainingConfig, kind: str, advance: Advance, part: Shard | None = None) -> Any:
    """Train, or go on with what was begun. kind: a key of `RESULT`; part: write only this shard of the answers.

    Returns the log, a list of entries; None where only answers were written. Raises SpecdecError for bad input, and for
    files of another run in `out`.
    """
    accelerator, pair = _loaded(config)
    target = pair.target
    task = try_task(kind, config, target, pair.tokenizer)
    with accelerator.main_process_first():  # the others find them written
        answers = _answers(config, target, pair.tokenizer, advance, part)
    if answers is None:
        return None
    if kind == "eagle3":  # its draft vocabulary depends on the answers
        task = make_task(kind, config, target, pair.tokenizer, answers[0])
    task.module.to(accelerator.device)
    weights = weight_hash(target)
    with accelerator.main_process_first():
        train, held = (_source(config, Live(target, task.layers, part), weights, advance) for part in answers)
    evaluation = Evaluation(config, task, target, pair.tokenizer, answers[1], held)
    texts = content_hash([[a.ids for a in part] for part in answers])
    mark = config.plain() | {"what is trained": kind, "the target's weights": weights, "the answers": texts}
    log = Loop(config, accelerator, task, train, len(answers[0]), evaluation, mark).run(advance)
    if accelerator.is_main_process:
        with writing(config.folder / RESULT[kind], "result"):
            task.save(config.folder / RESULT[kind])
    return log


def run_search(config: TrainingConfig, advance: Advance) -> list[SkipSet]:
    """Search the target's layers for those that it can draft without, judged by its answers to the held-out prompts."""
    _, pair = _loaded(config)
    answers = _answers(config, pair.target, pair.tokenizer, advance, None)
    assert answers is not None
    return search_skip_sets(pair.target, answers[1], config.data.temperature, config.batch, advance)


def _loaded(config: TrainingConfig) -> tuple[Accelerator, LoadedPair]:
    """The devices, and the target, whose weights are not trained."""
    accelerator = Accelerator(cpu=config.device == "cpu" or not torch.cuda.is_available())
    check_writable(config.folder, "out", folder=True)
    pair = LoadedPair.load(
        locate(config.target),
        device=config.device or str(accelerator.device),
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )
    pair.target.requires_grad_(False)
    return accelerator, pair


def make_task(kind: str, config: TrainingConfig, target: Any, tokenizer: Any, answers: Sequence[Answer]) -> Task:
    """The drafter that is trained, as it starts."""
    if kind == "draft":
        assert config.draft is not None
        return DraftTask(make_draft(config.draft, target, config), tokenizer, config)
    if kind == "exit":
        assert config.exit is not None
        return ExitTask(target, make_adapter(config.exit, target, config.seed), config)
    assert config.head is not None
    text = target.config.get_text_config()
    head = make_head(config.head, target, token_counts(answers, text.vocab_size), config.seed)
    return HeadTask(head, text.num_hidden_layers, config)


@torch.no_grad()
def try_task(kind: str, config: TrainingConfig, target: Any, tokenizer: Any) -> Task:
    """Make the drafter, and run it over a few tokens, before there are answers. Raises SpecdecError if it cannot."""
    try:
        task = make_task(kind, config, target, tokenizer, [])
        source = Live(target, task.layers, [Answer(tuple(range(1, 7)), 2)])
        module = task.module.to(source.device).eval()
        with torch.autocast(source.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            batch = source([0])
            if not batch.logits.isfinite().all():
                raise SpecdecError(f"{config.target}: the target's logits are NaN or infinite; load a sound checkpoint")
            module(batch)
    except SpecdecError:
        raise
    except Exception as error:  # options that do not fit show in many ways
        raise SpecdecError(f"{SECTIONS[kind]}: such a drafter cannot run on the target: {said(error)}") from None
    return task


def _answers(
    config: TrainingConfig, target: Any, tokenizer: Any, advance: Advance, part: Shard | None
) -> Answers | None:
    """Read the answers, after writing those that are missing. None: a shard was asked for, and no more."""
    if config.data.answers is not None:
        return read_own_answers(config, target.config.get_text_config().vocab_size)
    plan = Plan.make(config, target, tokenizer)
    found = None if part else read_answers(plan, config)
    if found is not None:
        return found
    # Compiling takes longer than it gains, and exact mode's wider passes cost large batches: nothing is compared.
    how = "graph" if next(target.parameters()).device.type == "cuda" else "off"
    decoder = SpeculativeDecoder(target, None, tokenizer, strategies=[], compile=how, exact=False)
    write_answers(plan, decoder, config, part or Shard(), advance)
    return None if part else read_answers(plan, config)


def _source(config: TrainingConfig, live: Live, weights: str, advance: Advance) -> Source:
    if config.features == "live":
        return live
    if config.features == "kept":
        return Kept(live, config.batch, lambda: advance("making the target's states"))
    folder = store(
        live, config.folder / "features", weights, config.batch, lambda: advance("writing the target's states")
    )
    return Stored(folder, live.target, live.answers)
