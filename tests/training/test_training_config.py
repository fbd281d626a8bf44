"""The configs of training: every fault is named, with the nearest name, before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specdec import SpecdecError
from specdec.cli import app
from specdec.drafters.eagle3 import load_head
from specdec.drafters.eagle3.export import export
from specdec.research.prompts.datasets import DATASETS
from specdec.training.config import load_training
from specdec.training.run import run_training
from tests.helpers.eagle3 import random_head
from tests.helpers.training import DRAFT, HEAD, config_of, settings

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("train_*.yaml"))
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"stepz": 3}, "did you mean 'steps'"),
    ({"loss": "forward_kl"}, "did you mean 'forward-kl'"),
    ({"steps": 0}, "steps: expected a whole number >= 1"),
    ({"dtype": "bf16"}, "dtype: expected 'float32' or 'bfloat16'"),
    ({"features": "cached"}, "features: expected 'live' or 'kept' or 'stored'"),
    ({"optimiser": {"learning_rate": 1}}, "optimiser"),
    ({"optimiser": {"lr": "fast"}}, "lr: expected a finite number"),
    ({"optimiser": {"betas": [0.9]}}, "betas must be two numbers"),
    ({"data": {"texts": ["a"], "held_outs": 1}}, "did you mean 'held_out'"),
    ({"data": {"max_new_tokens": 3}}, "give prompts by one of dataset, texts and answers"),
    ({"data": {"texts": ["a"], "dataset": "gsm8k"}}, "give prompts by one of"),
    ({"head": {"checkpoint": "x", "draft_vocab_size": 3}}, "draft_vocab_size is the checkpoint's"),
    ({"draft": {"layers": [0]}}, "the section 'draft' has no effect on `train eagle3`"),
    ({"exit": {"layers": 2}}, "the section 'exit' has no effect on `train eagle3`"),
    ({"exit": {"rank": 2}}, "exit: give layers (and rank), or a checkpoint"),
    ({"data": 3}, "data: expected a mapping of options"),
    ({"ttt_steps": True}, "ttt_steps: expected a whole number"),
]


@pytest.mark.parametrize(("change", "message"), FAULTS, ids=lambda x: str(x)[:40])
def test_what_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecdecError) as error:
        config_of(tmp_path / "c.yaml", "eagle3", settings(Path("t"), tmp_path) | change)
    assert message in str(error.value)


@pytest.mark.parametrize("draft", [{}, {"layers": [0], "checkpoint": "x"}, None])
def test_a_draft_says_where_it_starts_from(tmp_path: Path, draft: Any) -> None:
    with pytest.raises(SpecdecError, match="draft"):
        config_of(tmp_path / "c.yaml", "draft", settings(Path("t"), tmp_path) | {"draft": draft})


def test_a_learning_rate_with_an_exponent_is_a_number(tmp_path: Path) -> None:
    config_of(tmp_path / "c.yaml", "eagle3", settings(Path("t"), tmp_path))
    with (tmp_path / "c.yaml").open("a") as file:
        file.write("optimiser: {lr: 3e-4}\n")
    assert load_training(tmp_path / "c.yaml", "eagle3").optimiser.lr == 3e-4


def test_sections_are_read(tmp_path: Path) -> None:
    config = config_of(tmp_path / "c.yaml", "eagle3", settings(Path("t"), tmp_path, **HEAD))
    assert config.head is not None
    assert config.head.draft_vocab_size == 64
    assert config.data.held_out == 2
    draft = config_of(tmp_path / "d.yaml", "draft", settings(Path("t"), tmp_path, **DRAFT))
    assert draft.draft is not None
    assert draft.draft.layers == (0, 7)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_the_configs_that_ship_can_be_read(path: Path) -> None:
    config = load_training(path, path.stem.split("_")[1])
    if config.data.dataset in DATASETS:  # others are written first
        assert config.data.load(config.data.texts)


def test_the_command_names_a_fault_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("target: demo-target\nout: x\nstep: 3\ndata: {dataset: gsm8k}\n")
    done = CliRunner().invoke(app, ["train", "eagle3", str(tmp_path / "c.yaml")])
    assert done.exit_code == 2


@pytest.mark.parametrize("kind", ["eagle3", "draft"])
def test_out_on_the_command_line_stands_in_for_a_file_without_one(tmp_path: Path, kind: str) -> None:
    values = settings(Path("t"), tmp_path, **(DRAFT if kind == "draft" else HEAD))
    del values["out"]
    with pytest.raises(SpecdecError, match="out is missing"):
        config_of(tmp_path / "c.yaml", kind, values)
    assert load_training(tmp_path / "c.yaml", kind, out="here").out == "here"


@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
def test_export_head_writes_another_layout(tmp_path: Path, layout: str) -> None:
    head = random_head(1)
    export(head, tmp_path / "a", "specforge")
    done = CliRunner().invoke(
        app, ["export-head", str(tmp_path / "a"), "--layout", layout, "--out", str(tmp_path / "b")]
    )
    assert done.exit_code == 0, done.output
    loaded = load_head(tmp_path / "b")
    assert loaded.layout == layout
    assert all((loaded.head.state_dict()[n] == t).all() for n, t in head.state_dict().items())


def test_folders_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecdecError, match=r"cannot write .*file/a"):
        export(random_head(1), tmp_path / "file" / "a", "specforge")
    with pytest.raises(SpecdecError, match=r"cannot write .*file/a"):
        run_training(
            config_of(tmp_path / "c.yaml", "eagle3", settings(Path("t"), tmp_path / "file" / "a")), "eagle3", print
        )
