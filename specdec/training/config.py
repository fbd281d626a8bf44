"""One training run as a YAML file. Unknown names and values that cannot be are refused before a model is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from specdec.config import from_dict, load_yaml
from specdec.errors import SpecdecError, unknown_name
from specdec.files.forms import BOOL, INTEGER, TEXT, Maybe, OneOf, check_declared, checked, number, whole
from specdec.files.texts import expanded
from specdec.research.prompts.choice import DataConfig
from specdec.training.losses import LOSSES

FEATURES = ("live", "kept", "stored")
DTYPES = ("float32", "bfloat16", "float16")
# What may change between a run and its continuation: none of it changes the curve.
FREE = (
    "out", "device", "checkpoint_every", "eval_every", "eval_tokens", "save_dtype", "trust_remote_code",
    "data.batch_size", "data.minutes",  # of writing answers, which are compared themselves
)  # fmt: skip


@dataclass(frozen=True)
class TrainingData(DataConfig):
    """Prompts, and how the target answers them. The fields of `DataConfig`, and

    texts: prompts of one's own
    answers: a JSONL file of answers, `{"prompt": [ids], "output": [ids]}` a line, in place of prompts
    held_out: prompts that are kept from training, for figures
    samples: answers to each prompt
    max_new_tokens: longest answer; 0 = train on the prompts' own text, nothing is generated
    whole: train on the prompts' text as well as on the answers
    temperature: of the answers, and of the drafts that the head is for; 0 = greedy
    batch_size: answers that are written in one batch
    minutes: of writing answers: no batch is begun after them, and training uses what is there; None = all are written
    """

    limit: int | None = None
    longest: int | None = 512
    texts: tuple[str, ...] = checked([TEXT], ())
    answers: str | None = checked(Maybe(TEXT), None)
    held_out: int = checked(whole(1), 8)
    samples: int = checked(whole(1), 1)
    max_new_tokens: int = checked(whole(), 256)
    temperature: float = checked(number(0.0), 1.0)
    batch_size: int = checked(whole(1), 16)
    minutes: float | None = checked(Maybe(number(0.0)), None)
    whole: bool = checked(BOOL, False)  # the last one: it hides the form of this name

    def __post_init__(self) -> None:
        super().__post_init__()
        check_declared(self, "data")
        if self.turns != "first":
            raise SpecdecError("data: turns: all is for ablations; a chat file has its own answers")
        sources = [name for name in ("dataset", "texts", "answers") if getattr(self, name)]
        if len(sources) != 1:
            raise SpecdecError("data: give prompts by one of dataset, texts and answers")


@dataclass(frozen=True)
class HeadStart:
    """Where an EAGLE head starts from.

    checkpoint: a folder of a head, or None = a new one
    draft_vocab_size: the most frequent tokens of the answers that it can propose; None = all tokens
    options: fields of `HeadConfig` (intermediate_size, norm_output, layer_ids, ...)
    """

    checkpoint: str | None = checked(Maybe(TEXT), None)
    draft_vocab_size: int | None = checked(Maybe(whole(1)), None)
    options: Mapping[str, Any] = field(default_factory=dict, metadata={"form": {}})

    def __post_init__(self) -> None:
        check_declared(self, "head")
        if self.checkpoint is not None and self.draft_vocab_size is not None:
            raise SpecdecError("head: draft_vocab_size is the checkpoint's; leave it out")


@dataclass(frozen=True)
class DraftStart:
    """Where a draft model starts from: one of the three.

    checkpoint: a model, as `--draft` takes it
    layers: decoder layers of the target that are kept, in order; its embeddings, last norm and head come along
    options: fields of a new model's config that differ from the target's (num_hidden_layers, hidden_size, ...)
    """

    checkpoint: str | None = checked(Maybe(TEXT), None)
    layers: tuple[int, ...] | None = checked(Maybe([whole()]), None)
    options: Mapping[str, Any] = field(default_factory=dict, metadata={"form": {}})

    def __post_init__(self) -> None:
        check_declared(self, "draft")
        if sum([self.checkpoint is not None, self.layers is not None, bool(self.options)]) != 1:
            raise SpecdecError("draft: say where it starts from by one of checkpoint, layers and options")


@dataclass(frozen=True)
class ExitStart:
    """Where an adapter for early exit starts from: one of layers and checkpoint.

    layers: first layers of the target, after which it stands
    rank: its inner width; None = the target's hidden size
    checkpoint: a folder of an adapter
    """

    layers: int | None = checked(Maybe(whole(1)), None)
    rank: int | None = checked(Maybe(whole(1)), None)
    checkpoint: str | None = checked(Maybe(TEXT), None)

    def __post_init__(self) -> None:
        check_declared(self, "exit")
        if (self.layers is None) == (self.checkpoint is None) or (self.checkpoint and self.rank):
            raise SpecdecError("exit: give layers (and rank), or a checkpoint, which has both")


@dataclass(frozen=True)
class Optimiser:
    """AdamW with a linear warm-up and a cosine to `final` times the learning rate.

    muon: learning rate of Muon, for matrices that are neither embeddings nor the head; 0 = AdamW for all
    weight_decay: of matrices
    warm_up: steps
    clip: largest norm of the gradient
    """

    lr: float = checked(number(0.0), 1e-3)
    muon: float = checked(number(0.0), 0.0)
    betas: tuple[float, float] = checked([number(0.0, 1.0)], (0.9, 0.95))
    weight_decay: float = checked(number(0.0), 0.0)
    warm_up: int = checked(whole(), 20)
    final: float = checked(number(0.0, 1.0), 0.0)
    clip: float = checked(number(0.0), 1.0)

    def __post_init__(self) -> None:
        check_declared(self, "optimiser")
        if len(self.betas) != 2:
            raise SpecdecError(f"optimiser: betas must be two numbers, got {list(self.betas)}")


@dataclass(frozen=True)
class TrainingConfig:
    """A run.

    target: a hub id, folder, GGUF file, `demo-target` or `smollm2-135m`
    out: folder of answers, log, checkpoint and result; a run that stopped goes on from it
    steps, batch, accumulate: optimiser steps; texts of a pass, on each device; passes of a step
    minutes: of the loop, figures included; None = no limit. The learning rate falls by the clock where that is further
        than the steps, and the run ends as after its last step. Such a curve is not the same twice.
    sequence_length: tokens of a text, the prompt included; what is longer is cut
    ttt_steps: depth of the training-time test, of heads
    loss, loss_decay: see losses.py; the weight of step k is loss_decay ** k
    features: "live" = the target runs along; "kept" = its states are made first and stay in the device's memory;
        "stored" = they are written first, and read
    dtype: of the target and of the passes; trained weights are float32
    save_dtype: of the result
    eval_every, checkpoint_every: steps
    eval_tokens: tokens a held-out prompt that are decoded with the drafter; 0 = no decoding while training
    """

    target: str = field(metadata={"form": TEXT})
    out: str = field(metadata={"form": TEXT})
    data: TrainingData
    head: HeadStart | None = None
    draft: DraftStart | None = None
    exit: ExitStart | None = None
    optimiser: Optimiser = field(default_factory=Optimiser)
    steps: int = checked(whole(1), 1000)
    batch: int = checked(whole(1), 8)
    accumulate: int = checked(whole(1), 1)
    minutes: float | None = checked(Maybe(number(0.0)), None)
    sequence_length: int = checked(whole(8), 1024)
    ttt_steps: int = checked(whole(1, 16), 7)
    loss: str = "forward-kl"
    loss_decay: float = checked(number(0.0, 1.0), 0.8)
    features: str = checked(OneOf(FEATURES), "live")
    dtype: str = checked(OneOf(DTYPES[:2]), "float32")
    save_dtype: str = checked(OneOf(DTYPES), "float32")
    device: str | None = checked(Maybe(TEXT), None)
    trust_remote_code: bool = checked(BOOL, False)
    seed: int = checked(INTEGER, 0)
    eval_every: int = checked(whole(1), 100)
    eval_tokens: int = checked(whole(), 64)
    checkpoint_every: int = checked(whole(1), 100)

    def __post_init__(self) -> None:
        for name, cls in PARTS.items():
            if isinstance(value := getattr(self, name), Mapping):
                object.__setattr__(self, name, from_dict(cls, value, name))
        if not isinstance(self.data, TrainingData):
            raise SpecdecError(f"data: expected a mapping of options, got {self.data!r}")
        if self.loss not in LOSSES:
            raise unknown_name("loss", self.loss, LOSSES)
        check_declared(self, "the config")

    @property
    def folder(self) -> Path:
        return expanded(self.out)

    def plain(self) -> dict[str, Any]:
        """Everything that the curve depends on, as JSON has it; options of sections by names such as optimiser.lr."""
        made: dict[str, Any] = {}
        for name, value in json.loads(json.dumps(asdict(self))).items():
            made |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
        return {name: value for name, value in made.items() if name not in FREE}


PARTS: dict[str, type[Any]] = {
    "data": TrainingData, "head": HeadStart, "draft": DraftStart, "exit": ExitStart, "optimiser": Optimiser,
}  # fmt: skip
SECTIONS = {"eagle3": "head", "draft": "draft", "exit": "exit"}  # what is trained, and its section


def load_training(path: str | Path, kind: str, **changes: Any) -> TrainingConfig:
    """Read a run. kind: a key of `SECTIONS`; changes: fields to set over the file's. Raises SpecdecError."""
    config, mine, name = load_yaml(path, TrainingConfig, **changes), SECTIONS[kind], Path(path).name
    for other in SECTIONS.values():
        if other != mine and getattr(config, other) is not None:
            raise SpecdecError(f"{name}: the section {other!r} has no effect on `train {kind}`; leave it out")
    if getattr(config, mine) is None and kind != "eagle3":
        raise SpecdecError(f"{name}: the section {mine!r} is missing; it says what `train {kind}` starts from")
    return config if kind != "eagle3" or config.head is not None else replace(config, head=HeadStart())


def content_hash(value: Any) -> str:
    """A short hash of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
