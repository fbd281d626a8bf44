"""An ablation on a Ray cluster that is there: one part of it a GPU.

Every worker runs a part (`--shard`) in the same folder. All of them must see this folder, the config file and the
models. A worker that dies is started again, by Ray, and goes on where its journal ends.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdec.config import check_whole
from specdec.errors import SpecdecError, need
from specdec.research.ablation.config import load_ablation
from specdec.research.ablation.runner import run_ablation

RETRIES = 3  # times that a part is started again after its worker has died
LOOK = 1.0  # seconds


def run_on_cluster(
    config: Path,
    out: Path,
    workers: int | None = None,
    extend: bool = False,
    retry_errors: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> None:
    """Run what is missing in the folder `out`, in parts on the cluster of this machine, or that RAY_ADDRESS names.

    workers: how many parts; None = one for each GPU of the cluster, or without GPUs for each CPU
    progress: called when a part ends
    Raises SpecdecError without ray or a cluster, for a part that failed, and for one whose workers died time and again.
    """
    ray = _connected()
    resources = ray.cluster_resources()
    kind = "GPU" if resources.get("GPU") else "CPU"
    count = int(resources[kind]) if workers is None else workers
    check_whole("workers", count, 1)
    part = ray.remote(max_retries=RETRIES, **{f"num_{kind.lower()}s": 1})(_run_part)
    paths = str(config.resolve()), str(out.resolve())
    running = {part.remote(*paths, f"{i}/{count}", extend, retry_errors): i for i in range(count)}
    try:
        while running:
            for done in ray.wait(list(running), timeout=LOOK)[0]:
                index = running.pop(done)
                _raise_if_failed(ray, done, f"part {index}/{count}")
                progress(f"part {index} of {count} has ended")
    finally:  # interrupted, or a part has failed
        for task in running:
            ray.cancel(task, force=True)


def _connected() -> Any:
    ray = need("ray", "--engine ray needs", "ray")
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise SpecdecError(f"no Ray cluster found: start one with `ray start --head` ({error})") from None
    return ray


def _run_part(config: str, out: str, shard: str, extend: bool, retry_errors: bool) -> None:
    """Run one part; in a worker of the cluster."""
    run_ablation(load_ablation(Path(config)), Path(out), shard, extend, retry_errors)


def _raise_if_failed(ray: Any, task: Any, name: str) -> None:
    try:
        ray.get(task)
    except ray.exceptions.RayTaskError as error:
        raise SpecdecError(f"{name}: {error.cause}") from error
    except ray.exceptions.RayError as error:
        raise SpecdecError(f"{name}: its worker died {RETRIES + 1} times ({type(error).__name__})") from error
