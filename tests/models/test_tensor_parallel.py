"""A target spread over processes: every process has the same tokens, and they are those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdec import SpecdecError, SpeculativeDecoder, load_pair
from specdec.device.host_read import HostReader
from specdec.device.ranks import Ranks
from tests.helpers import on_ranks
from tests.helpers.tiny import tiny_model
from tests.helpers.tokens import word_level

ROOT = Path(on_ranks.__file__).parents[2]


def checkpoint(folder: Path, noise: float = 0.0) -> Path:
    """A tiny Llama on disk; noise: on its weights, which makes a draft."""
    model, generator = tiny_model("llama"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(noise * torch.randn(p.shape, generator=generator))
    model.save_pretrained(folder)
    word_level([f"w{i}" for i in range(128)]).save_pretrained(folder)
    return folder


def test_outside_torchrun_it_says_how_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SpecdecError, match="torchrun --nproc-per-node"):
        load_pair(path, tp_plan="auto")


@pytest.mark.parametrize(
    ("options", "size", "said"),
    [
        ({"tp_plan": "auto"}, 3, "has 4 attention heads, which 3 processes cannot share evenly"),
        ({"tp_plan": "auto"}, 4, "has 2 key-value heads, which 4 processes"),
        ({"tp_plan": "all"}, 2, "tp_plan must be 'auto' or a mapping"),
        ({"tp_plan": "auto", "device_map": "auto"}, 2, "device_map does not go with tp_plan"),
        ({"tp_plan": "auto", "device": "cpu"}, 2, "device does not go with tp_plan"),
    ],
)
def test_what_cannot_be_spread_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict, size: int, said: str
) -> None:
    path = checkpoint(tmp_path)
    (path / "model.safetensors").unlink()
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(size))
    with pytest.raises(SpecdecError, match=said):
        load_pair(path, **options)


def test_one_process_agrees_with_itself() -> None:
    ranks = Ranks.of(tiny_model("llama"))
    assert (ranks.size, ranks.is_first, ranks.agreed(3), ranks.all("x")) == (1, True, 3, ["x"])
    values = torch.ones(2)
    assert ranks.first(values) is values
    assert HostReader(ranks).read(values) == [[1.0, 1.0]]


def test_more_than_two_parts_have_no_exact_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SpeculativeDecoder(tiny_model("llama"), check=False)
    assert decoder.resolve_exact(True)
    monkeypatch.setattr(Ranks, "size", 3)
    with pytest.raises(SpecdecError, match="tensor parallel over 3 processes"):
        decoder.resolve_exact(True)


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, TWO_GPUS])])
def spread(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], dict]:
    """What two processes found, and what one does."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = checkpoint(folder / "target"), checkpoint(folder / "draft", noise=0.02)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if request.param == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command += [on_ranks.__file__, *map(str, paths), str(folder)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    alone = SpeculativeDecoder.from_pretrained(*paths, device=request.param, dtype="float32")
    wanted = {**on_ranks.outcomes(alone), "compilations": on_ranks.compilations(alone)}
    return found, json.loads(json.dumps(wanted))


@pytest.mark.full
def test_every_rank_has_the_same_tokens_and_they_are_those_of_one_process(spread: tuple[list[dict], dict]) -> None:
    found, alone = spread
    assert found[0] == found[1]
    assert found[0]["heads"] == 1  # of two
    for name in on_ranks.CALLS:
        if name != "fresh seed":
            assert found[0][name] == alone[name], name
    assert alone["chain"][1] > 0


@pytest.mark.full
def test_spread_layers_are_compiled_once_and_fused_as_those_of_one_process_are(spread: tuple[list[dict], dict]) -> None:
    found, alone = spread
    assert alone["compilations"][1] == 6  # two groups in each of three layers
    assert [made["compilations"] for made in found] == [alone["compilations"]] * 2


@pytest.mark.full
def test_ranks_that_were_given_other_prompts_are_refused_and_go_on(spread: tuple[list[dict], dict]) -> None:
    found, _ = spread
    assert "prompts, seeds or options differ among the 2 processes" in found[0]["refusal"]
    assert found[0]["other draft"] == found[0]["chain"][0]  # after it; the drafts of other ranks have no say
