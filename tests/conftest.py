"""Settings of every test, and which tier has it."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # also for what tests start: notebooks, commands

import pytest
import torch
from hypothesis import settings

# More threads than free cores make small operations slower by orders of magnitude; set 1 on a busy machine.
_DEFAULT = "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"
torch.set_num_threads(int(os.environ.get("SPECDEC_THREADS", _DEFAULT)))
settings.register_profile("specdec", deadline=None, derandomize=True)
settings.load_profile("specdec")


SLOWEST = float(os.environ.get("SPECDEC_SLOWEST", "5"))  # seconds of CPU that a test of the fast tier may take


def pytest_configure(config: pytest.Config) -> None:
    """Tell modules, which are imported later, which tier runs: the fast one leaves out what is marked `full`."""
    os.environ["SPECDEC_TIER"] = "fast" if config.option.markexpr == "not full" else "full"


def covering(fast: list[pytest.Item], rest: list[pytest.Item], n: int) -> list[pytest.Item]:
    """n cases of `rest`: one after the other, that whose parameters' values, and pairs of them, were shown least."""

    def features(item: Any) -> set[tuple[str, ...]]:
        values = [f"{name}={value!r}" for name, value in sorted(item.callspec.params.items())]
        return {*combinations(values, 1), *combinations(values, 2)}

    shown, left, chosen = Counter(f for item in fast for f in features(item)), {i: features(i) for i in rest}, []
    while left and len(chosen) < n:
        chosen.append(min(left, key=lambda item: sum(shown[f] for f in left[item])))
        shown.update(left.pop(chosen[-1]))
    return chosen


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what the fast tier leaves out, and skip what needs a CUDA device where there is none."""
    grids = defaultdict(list)
    for item in items:
        if any(name in item.keywords for name in ("gpu", "smollm2")):
            item.add_marker(pytest.mark.full)
        if item.get_closest_marker("fast"):
            grids[item.nodeid.split("[")[0]].append(item)
    for cases in grids.values():
        mark = cases[0].get_closest_marker("fast")
        assert mark is not None
        # Any fixed order would do that is not the grid's own: neighbours in the grid are alike.
        cases.sort(key=lambda item: hashlib.sha256(item.name.encode()).digest())
        fast, rest = cases[: mark.args[0]], cases[mark.args[0] :]
        if "full" in mark.kwargs:
            rest = covering(fast, rest, mark.kwargs["full"])
            items[:] = [item for item in items if item not in cases or item in fast or item in rest]
        again = mark.kwargs.get("again", False) and os.environ["SPECDEC_TIER"] == "full"
        for item in [*fast, *rest] if again else rest:
            item.add_marker(pytest.mark.full)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test of the fast tier that takes long, so that the tier stays fast."""
    started = time.process_time()
    yield
    took = time.process_time() - started
    if os.environ["SPECDEC_TIER"] == "fast" and took > SLOWEST:
        pytest.fail(f"takes {took:.1f} s of CPU: mark it `full`, or keep fewer of its cases by `fast(n)`")
