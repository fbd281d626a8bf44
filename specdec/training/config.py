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
from specdec.files.forms import BOOL, INTEGER, TEXT, Maybe, OneOf, check_fields, number, whole
from specdec.files.texts import expanded
from specdec.research.prompts.choice import DataConfig
from specdec.training.losses import LOSSES

FEATURES = ("live", "kept", "stored")
DTYPES = ("float32", "bfloat16", "float16")
# What may change between a run and its continuation: none of it changes the curve.
FREE = ("out", "device", "checkpoint_every")


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
    texts: tuple[str, ...] = ()
    answers: str | None = None
    held_out: int = 8
    samples: int = 1
    max_new_tokens: int = 256
    whole: bool = False
    temperature: float = 1.0
    batch_size: int = 16
    minutes: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        form = {
            "texts": [TEXT],
            "answers": Maybe(TEXT),
            "held_out": whole(1),
            "samples": whole(1),
            "max_new_tokens": whole(),
            "whole": BOOL,
            "temperature": number(0.0),
            "batch_size": whole(1),
            "minutes": Maybe(number(0.0)),
        }
        check_fields(self, form, "data")
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

    checkpoint: str | None = None
    draft_vocab_size: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, {"checkpoint": Maybe(TEXT), "draft_vocab_size": Maybe(whole(1)), "options": {}}, "head")
        if self.checkpoint is not None and self.draft_vocab_size is not None:
            raise SpecdecError("head: draft_vocab_size is the checkpoint's; leave it out")


@dataclass(frozen=True)
class DraftStart:
    """Where a draft model starts from: one of the three.

    checkpoint: a model, as `--draft` takes it
    layers: decoder layers of the target that are kept, in order; its embeddings, last norm and head come along
    options: fields of a new model's config that differ from the target's (num_hidden_layers, hidden_size, ...)
    """

    checkpoint: str | None = None
    layers: tuple[int, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, {"checkpoint": Maybe(TEXT), "layers": Maybe([whole()]), "options": {}}, "draft")
        if sum([self.checkpoint is not None, self.layers is not None, bool(self.options)]) != 1:
            raise SpecdecError("draft: say where it starts from by one of checkpoint, layers and options")


@dataclass(frozen=True)
class ExitStart:
    """Where an adapter for early exit starts from: one of layers and checkpoint.

    layers: first layers of the target, after which it stands
    rank: its inner width; None = the target's hidden size
    checkpoint: a folder of an adapter
    """

    layers: int | None = None
    rank: int | None = None
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, {"layers": Maybe(whole(1)), "rank": Maybe(whole(1)), "checkpoint": Maybe(TEXT)}, "exit")
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

    lr: float = 1e-3
    muon: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warm_up: int = 20
    final: float = 0.0
    clip: float = 1.0

    def __post_init__(self) -> None:
        form = {
            "lr": number(0.0),
            "muon": number(0.0),
            "betas": [number(0.0, 1.0)],
            "weight_decay": number(0.0),
            "warm_up": whole(),
            "final": number(0.0, 1.0),
            "clip": number(0.0),
        }
        check_fields(self, form, "optimiser")
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

    target: str
    out: str
    data: TrainingData
    head: HeadStart | None = None
    draft: DraftStart | None = None
    exit: ExitStart | None = None
    optimiser: Optimiser = field(default_factory=Optimiser)
    steps: int = 1000
    batch: int = 8
    accumulate: int = 1
    minutes: float | None = None
    sequence_length: int = 1024
    ttt_steps: int = 7
    loss: str = "forward-kl"
    loss_decay: float = 0.8
    features: str = "live"
    dtype: str = "float32"
    save_dtype: str = "float32"
    device: str | None = None
    trust_remote_code: bool = False
    seed: int = 0
    eval_every: int = 100
    eval_tokens: int = 64
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        for name, cls in PARTS.items():
            if isinstance(value := getattr(self, name), Mapping):
                object.__setattr__(self, name, from_dict(cls, value, name))
        if not isinstance(self.data, TrainingData):
            raise SpecdecError(f"data: expected a mapping of options, got {self.data!r}")
        if self.loss not in LOSSES:
            raise unknown_name("loss", self.loss, LOSSES)
        form = {
            "target": TEXT,
            "out": TEXT,
            "steps": whole(1),
            "batch": whole(1),
            "accumulate": whole(1),
            "minutes": Maybe(number(0.0)),
            "sequence_length": whole(8),
            "ttt_steps": whole(1, 16),
            "loss_decay": number(0.0, 1.0),
            "features": OneOf(FEATURES),
            "dtype": OneOf(DTYPES[:2]),
            "save_dtype": OneOf(DTYPES),
            "device": Maybe(TEXT),
            "trust_remote_code": BOOL,
            "seed": INTEGER,
            "eval_every": whole(1),
            "eval_tokens": whole(),
            "checkpoint_every": whole(1),
        }
        check_fields(self, form, "the config")

    @property
    def folder(self) -> Path:
        return expanded(self.out)

    def plain(self) -> dict[str, Any]:
        """Everything that the curve depends on, as JSON has it."""
        made: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {name: value for name, value in made.items() if name not in FREE}


PARTS: dict[str, type[Any]] = {
    "data": TrainingData, "head": HeadStart, "draft": DraftStart, "exit": ExitStart, "optimiser": Optimiser,
}  # fmt: skip
SECTIONS = {"eagle3": "head", "draft": "draft", "exit": "exit"}  # what is trained, and its section


def load_training(path: str | Path, kind: str, **changes: Any) -> TrainingConfig:
    """Read a run. kind: a key of `SECTIONS`; changes: fields to set over the file's. Raises SpecdecError."""
    config, mine, name = replace(load_yaml(path, TrainingConfig), **changes), SECTIONS[kind], Path(path).name
    for other in SECTIONS.values():
        if other != mine and getattr(config, other) is not None:
            raise SpecdecError(f"{name}: the section {other!r} has no effect on `train {kind}`; leave it out")
    if getattr(config, mine) is None and kind != "eagle3":
        raise SpecdecError(f"{name}: the section {mine!r} is missing; it says what `train {kind}` starts from")
    return config if kind != "eagle3" or config.head is not None else replace(config, head=HeadStart())


def content_hash(value: Any) -> str:
    """A short hash of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
