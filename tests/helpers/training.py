"""A small training run: a random target in a folder, its config, and what a run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from specdec.demo_models import target_path
from specdec.training.config import TrainingConfig, load_training
from tests.helpers.tiny import tiny_model

TEXTS = ["def one(x):", "class Two:", "import three", "for i in four:", "return five"]


def save_target(folder: Path) -> Path:
    """A random target with the embedded tokenizer."""
    tiny_model("llama", seed=1, vocab=2048, num_hidden_layers=8, eos_token_id=0).save_pretrained(folder)
    for file in target_path().glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def settings(target: Path, out: Path, **changes: Any) -> dict[str, Any]:
    made = {
        "target": str(target),
        "out": str(out),
        "device": "cpu",
        "steps": 6,
        "batch": 2,
        "sequence_length": 24,
        "ttt_steps": 3,
        "eval_every": 3,
        "eval_tokens": 8,
        "checkpoint_every": 2,
        "data": {"texts": TEXTS, "held_out": 2, "max_new_tokens": 10, "batch_size": 2, "temperature": 1.0},
    }
    return made | changes


HEAD = {"head": {"draft_vocab_size": 64, "options": {"intermediate_size": 32}}}
DRAFT = {"draft": {"layers": [0, 7]}}
EXIT = {"exit": {"layers": 2, "rank": 16}}


def config_of(file: Path, kind: str, values: dict[str, Any]) -> TrainingConfig:
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return load_training(file, kind)


def log_of(out: Path) -> list[dict[str, Any]]:
    """The log without what a clock says."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in lines]
