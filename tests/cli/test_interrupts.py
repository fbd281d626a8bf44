"""Ctrl-C and SIGTERM in the middle of a command: what is there is kept, a line says so, and the exit status is 130 or
143."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.cli import output, terminating
from specdec.decoding.row import Row
from specdec.research.traces.trace import Trace
from specdec.training import loop as loop_module
from tests.cli.test_cli import run
from tests.helpers.grid import grid, save_pair
from tests.helpers.training import HEAD, log_of, save_target, settings

SIGNALS = [
    pytest.param(signal.SIGTERM, 143, id="SIGTERM"),
    pytest.param(signal.SIGINT, 130, id="Ctrl-C", marks=pytest.mark.full),
]


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Python's own handler for Ctrl-C: a shell's background jobs are started with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options that name two random models."""
    made = save_pair(tmp_path_factory.mktemp("pair"))
    return ("--target", made["target"], "--draft", made["draft"], "--max-new-tokens", "12")


def raising(number: int, at: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, after whose call number `at` the signal comes."""
    calls = []

    def wrapped(*given: Any, **options: Any) -> Any:
        made = function(*given, **options)
        calls.append(1)
        if len(calls) == at:
            signal.raise_signal(number)
        return made

    return wrapped


@pytest.fixture
def stop(number: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sends the signal after so many rounds of the engine."""
    return lambda rounds: monkeypatch.setattr(Row, "close_round", raising(number, rounds, Row.close_round))


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_generate_writes_the_texts_so_far(tmp_path: Path, pair: Any, stop: Any, status: int) -> None:
    out = tmp_path / "out.jsonl"
    stop(2)
    prompts = ("--prompt", "import os\n", "--prompt", "def add", "--batch-size", "1")
    done = run("generate", *pair, *prompts, "--out", str(out))
    assert (done.exit_code, done.stderr.count("\n")) == (status, 1)
    assert f"of 2 texts are cut; what was generated is in {out}" in done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows[0]["token_ids"]) > 0
    assert rows[1]["finish_reason"] == "interrupted"


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_trace_record_writes_the_rounds_so_far(tmp_path: Path, pair: Any, stop: Any, status: int) -> None:
    stop(2)
    done = run("trace", "record", *pair, "--prompt", "def add", "--out", str(tmp_path / "t"))
    assert done.exit_code == status
    assert done.stderr.splitlines()[-1].startswith("interrupted: 1 of 1 rows are cut")
    assert Trace.load(tmp_path / "t").rows[0].finish_reason == "interrupted"


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_ablate_and_compare_keep_their_rows(tmp_path: Path, pair: Any, stop: Any, number: int, status: int) -> None:
    models = {"target": pair[1], "draft": pair[3]}
    (tmp_path / "a.yaml").write_text(json.dumps(grid(models, axes={}, prompts=("one", "two", "three")).to_dict()))
    stop(20)
    done = run("ablate", str(tmp_path / "a.yaml"), "--out", str(tmp_path / "ablation"))
    assert done.exit_code == status
    assert done.stderr.startswith("interrupted: ")
    kept = int(done.stderr.split()[1])
    assert 0 < kept < 9
    stop(20)
    texts = ("--prompt", "one", "--prompt", "two", "--prompt", "three")
    command = ("compare", *pair, *texts, "--out", str(tmp_path / "c"))
    done = run(*command)
    assert (done.exit_code, done.stderr.count("\n")) == (status, 1)
    assert f"rows are kept in {tmp_path / 'c'}; the same command goes on" in done.stderr
    if number == signal.SIGINT:  # of the full tier, since it takes long
        assert run(*command).exit_code == 0


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_train_keeps_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int) -> None:
    changes = {"steps": 4, "checkpoint_every": 1, "eval_tokens": 0}
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(settings(save_target(tmp_path / "target"), tmp_path / "run", **HEAD, **changes)))
    step = loop_module.Loop._step
    monkeypatch.setattr(loop_module.Loop, "_step", raising(number, 1, step))
    done = run("train", "eagle3", str(file))
    assert done.stderr.splitlines()[-1].startswith(f"interrupted: the answers so far are kept in {tmp_path / 'run'}")
    monkeypatch.setattr(loop_module.Loop, "_step", raising(number, 3, step))
    done = run("train", "eagle3", str(file))
    assert done.exit_code == status
    assert done.stderr.splitlines()[-1].startswith(f"interrupted: the last checkpoint is in {tmp_path / 'run'}")
    monkeypatch.setattr(loop_module.Loop, "_step", raising(0, 99, step))
    assert run("train", "eagle3", str(file)).exit_code == 0
    assert [entry["step"] for entry in log_of(tmp_path / "run")][-1] == 4


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_a_benchmark_says_that_nothing_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    monkeypatch.setattr("specdec.research.bench.smoke.run_smoke", raising(number, 1, lambda *given: {}))
    done = run("bench", "--smoke", "--out", str(tmp_path / "b.json"))
    assert (done.exit_code, done.stderr) == (status, "interrupted: nothing was measured yet\n")


def test_a_second_sigterm_does_not_interrupt_the_keeping() -> None:
    came: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    with terminating(came):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert came == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_ignored_sigterm_stays_ignored_and_threads_are_left_alone() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with terminating([]):
            signal.raise_signal(signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    found: list[Any] = []

    def elsewhere() -> None:
        with terminating([]):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [before]


# -- how long it takes -------------------------------------------------------------------------------------------------


def test_a_share_is_counted_in_per_cent(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = output.LogLines("generating", 100, " %")
    monkeypatch.setattr(output, "LogLines", lambda *given: lines)
    with output.share_done("generating") as tell:
        tell(0.004)
        assert lines.line(1.0) == "generating: 0 of 100 %, 0:01 min so far"
        tell(0.25)
        tell(0.25)
        assert lines.line(60.0) == "generating: 25 of 100 %, 1:00 min so far, about 3:00 min left"


def test_generate_and_record_tell_their_share_until_the_end(
    tmp_path: Path, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[output.LogLines] = []

    def noted(*given: Any) -> output.LogLines:
        made.append(log_lines(*given))
        return made[-1]

    log_lines = output.LogLines
    monkeypatch.setattr(output, "LogLines", noted)
    assert run("generate", *pair, "--prompt", "def add", "--prompt", "a").exit_code == 0
    assert run("trace", "record", *pair, "--prompt", "def add", "--out", str(tmp_path / "t")).exit_code == 0
    counted = {lines.what: (lines.done, lines.steps) for lines in made}
    assert counted["generating"] == counted["recording"] == (100, 100)
