"""`specdec ablate --engine ray`: the parts run on a cluster, and a worker that is killed loses nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec import SpecdecError
from specdec.research.ablation import load_ablation, run_ablation
from specdec.research.ablation.cluster import run_on_cluster
from specdec.research.ablation.store import Store
from tests.cli.test_cli import refused

ROOT = Path(__file__).resolve().parents[2]
KILLER = '''
import os
from pathlib import Path

from specdec import Draft, Drafter


class Killer(Drafter):
    """Kills its process when it drafts for the sixth time, once."""

    name = "killer"
    drafts = 0

    def draft(self, requests):
        Killer.drafts += 1
        flag = Path(__file__).parent / "killed"
        if Killer.drafts == 6 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), 9)
        return [Draft([request.last]) for request in requests]
'''
CONFIG = {
    "pairs": {"demo": {"target": "demo-target", "device": "cpu"}},
    "strategies": {"killer": ["killer:Killer"]},
    "axes": {"strategies": ["killer"]},
    "prompts": ["def main():", "class A:", "import os", "for i in"],
    "generation": {"max_new_tokens": 12},
}


def test_what_engines_there_are(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps(CONFIG))
    command = ("ablate", str(config), "--out", str(tmp_path / "out"))
    assert "--engine must be ray" in refused(*command, "--engine", "dask")
    assert "--workers has no effect" in refused(*command, "--workers", "2")
    assert "--shard has no effect" in refused(*command, "--engine", "ray", "--shard", "0/2")


def test_without_ray_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SpecdecError, match=r"install specdec\[ray\]"):
        run_on_cluster(tmp_path / "c.yaml", tmp_path)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="ray is not installed (specdec[ray])")
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    environment = {"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False, runtime_env=environment
    )
    yield ray
    ray.shutdown()


@pytest.mark.full
def test_a_worker_that_is_killed_is_started_again_and_no_row_is_lost(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "killer.py").write_text(KILLER)
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps(CONFIG))
    ended: list[str] = []
    run_on_cluster(config, tmp_path / "out", workers=2, progress=ended.append)
    assert (tmp_path / "killed").exists()
    assert len(ended) == 2
    run_ablation(load_ablation(config), tmp_path / "here")
    found, wanted = (
        {key: (row["status"], row["tokens"]) for key, row in Store(tmp_path / name).read().rows.items()}
        for name in ("out", "here")
    )
    assert found == wanted
    assert len(found) == 8
    (tmp_path / "c.yaml").write_text(json.dumps({**CONFIG, "generation": {"max_new_tokens": 13}}))
    with pytest.raises(SpecdecError, match=r"part \d/2: .*"):
        run_on_cluster(config, tmp_path / "out", workers=2)
