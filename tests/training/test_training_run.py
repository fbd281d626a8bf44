"""Whole runs on a small target: they resume to the same curve, and say what they measure."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from typer.testing import CliRunner

from specdec import SpecdecError, SpeculativeDecoder
from specdec.cli import app
from specdec.decoding.shard import Shard
from specdec.drafters import Eagle3
from specdec.drafters.eagle3 import load_head
from specdec.models.loading import LoadedPair
from specdec.training import answers as answers_module
from specdec.training import loop as loop_module
from specdec.training.answers import Plan, read_answers, write_answers
from specdec.training.config import TrainingConfig
from specdec.training.features import Kept, Live, Stored, order, store
from specdec.training.run import make_task, run_training
from specdec.training.schedule import factor
from tests.helpers.tiny import tiny_model
from tests.helpers.training import DRAFT, HEAD, config_of, log_of, save_target, settings


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def decoder(target: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(target, strategies=[], device="cpu")


def quiet(words: str) -> None:
    """Progress that nobody sees."""


def small(tmp_path: Path, target: Path, name: str = "run", **changes: Any) -> TrainingConfig:
    return config_of(tmp_path / f"{name}.yaml", "eagle3", settings(target, tmp_path / name, **HEAD, **changes))


# -- answers -----------------------------------------------------------------------------------------------------------


def rows(file: Path) -> dict[int, Any]:
    return {row["index"]: row for row in map(json.loads, file.read_text().splitlines()[1:])}


def test_answers_are_the_same_after_a_kill_and_from_shards(
    tmp_path: Path, target: Path, decoder: SpeculativeDecoder
) -> None:
    config, again, parts = (small(tmp_path, target, name) for name in ("one", "two", "three"))
    plan = Plan.make(config, decoder.target.model, decoder.tokenizer)

    def write(config: TrainingConfig, part: Shard) -> Path:
        return write_answers(plan, decoder, config, part, quiet)

    whole = write(config, Shard())
    assert len(rows(whole)) == len(plan.prompts) == 5
    text = whole.read_text()
    again.folder.mkdir()
    (again.folder / whole.name).write_text(
        text[: text.rindex('"output"')]
    )  # as a kill in the middle of a line leaves it
    assert rows(write(again, Shard())) == rows(whole)
    first = write(parts, Shard(0, 2))
    assert read_answers(plan, parts) is None
    assert rows(first) | rows(write(parts, Shard(1, 2))) == rows(whole)
    assert read_answers(plan, parts) == read_answers(plan, config)


def test_answers_are_plain_decodings_and_what_is_held_out_is_not_trained_on(
    tmp_path: Path, target: Path, decoder: SpeculativeDecoder
) -> None:
    config = small(tmp_path, target)
    plan = Plan.make(config, decoder.target.model, decoder.tokenizer)
    write_answers(plan, decoder, config, Shard(), quiet)
    found = read_answers(plan, config)
    assert found is not None
    train, held = found
    assert (len(train), len(held)) == (3, 2)
    assert not {a.ids for a in train} & {a.ids for a in held}
    greedy = small(tmp_path, target, "greedy", data=settings(target, tmp_path)["data"] | {"temperature": 0.0})
    plan = Plan.make(greedy, decoder.target.model, decoder.tokenizer)
    write_answers(plan, decoder, greedy, Shard(), quiet)
    outputs = [row["output"] for _, row in sorted(rows(greedy.folder / "answers-0-of-1.jsonl").items())]
    assert outputs == decoder.generate(plan.prompts, 10).token_ids


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"max_new_tokens": 11}, {"texts": ["a b c", "d", "e"]}])
def test_answers_to_other_settings_are_refused(
    tmp_path: Path, target: Path, decoder: SpeculativeDecoder, change: dict[str, Any]
) -> None:
    config = small(tmp_path, target)
    plan = Plan.make(config, decoder.target.model, decoder.tokenizer)
    write_answers(plan, decoder, config, Shard(), quiet)
    other = small(tmp_path, target, data=settings(target, tmp_path)["data"] | change)
    with pytest.raises(SpecdecError, match="answers of another target, other prompts or other settings"):
        write_answers(Plan.make(other, decoder.target.model, decoder.tokenizer), decoder, other, Shard(), quiet)


def test_answers_of_another_target_are_refused(tmp_path: Path, target: Path, decoder: SpeculativeDecoder) -> None:
    config = small(tmp_path, target)
    plan = Plan.make(config, decoder.target.model, decoder.tokenizer)
    write_answers(plan, decoder, config, Shard(), quiet)
    weight = decoder.target.model.lm_head.weight
    with torch.no_grad():
        weight.mul_(1.5)
    try:
        other = Plan.make(config, decoder.target.model, decoder.tokenizer)
        with pytest.raises(SpecdecError, match="answers of another target"):
            read_answers(other, config)
    finally:
        with torch.no_grad():
            weight.div_(1.5)


def test_a_batch_of_answers_is_one_batch(
    tmp_path: Path, target: Path, decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"def f{i}():" for i in range(12)]
    config = small(tmp_path, target, data=settings(target, tmp_path)["data"] | {"texts": texts, "batch_size": 10})
    batches, generate = [], decoder.generate

    def watched(*given: Any, **options: Any) -> Any:
        out = generate(*given, **options)
        batches.append(out.provenance["batch"])
        return out

    monkeypatch.setattr(decoder, "generate", watched)
    write_answers(Plan.make(config, decoder.target.model, decoder.tokenizer), decoder, config, Shard(), quiet)
    assert batches == [10, 2]


def test_answers_end_by_the_clock_and_go_on(tmp_path: Path, target: Path, decoder: SpeculativeDecoder) -> None:
    texts = [f"def f{i}():" for i in range(6)]
    data = settings(target, tmp_path)["data"] | {"texts": texts, "batch_size": 4, "held_out": 3}
    config, whole = small(tmp_path, target, data=data | {"minutes": 0}), small(tmp_path, target, data=data)
    plan = Plan.make(config, decoder.target.model, decoder.tokenizer)
    for written in (4, 6):
        said: list[str] = []
        write_answers(plan, decoder, config, Shard(), said.append)
        assert len(said) == 1
        assert "answers" in said[0]
        found = read_answers(plan, config)
        assert found is not None
        assert sum(map(len, found)) == written
        assert (read_answers(plan, whole) is None) == (written < 6)


def test_held_out_prompts_are_answered_first(tmp_path: Path, target: Path, decoder: SpeculativeDecoder) -> None:
    """Figures need them, however little time there is; without any answer to train on, the message says why."""
    texts = [f"def f{i}():" for i in range(9)]
    data = settings(target, tmp_path)["data"] | {"texts": texts, "batch_size": 2, "held_out": 2, "minutes": 0}
    config = small(tmp_path, target, data=data)
    plan = Plan.make(config, decoder.target.model, decoder.tokenizer)
    write_answers(plan, decoder, config, Shard(), quiet)
    with pytest.raises(SpecdecError, match=r"`minutes` \(0\) are too few"):
        read_answers(plan, config)
    write_answers(plan, decoder, config, Shard(), quiet)
    found = read_answers(plan, config)
    assert found is not None
    assert list(map(len, found)) == [2, 2]


def test_a_part_is_i_of_n() -> None:
    assert Shard.parse("2/4", "part") == Shard(2, 4)
    for text in ("4/4", "1", "a/b", "-1/2", "", "²/³"):
        with pytest.raises(SpecdecError, match=r"part: expected index/count .*, such as 0/4"):
            Shard.parse(text, "part")


# -- features and order ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stored", "kept"])
def test_features_made_before_are_the_live_ones(kind: str, tmp_path: Path) -> None:
    model = tiny_model("llama", seed=1, num_hidden_layers=8, initializer_range=0.1)
    texts = [answers_module.Answer(tuple(range(3, 3 + n)), 2) for n in (9, 5, 12)]
    live = Live(model, (2, 4, 5), texts)
    folder = store(live, tmp_path, "weights", 2, lambda: None)
    source = Kept(live, 2, lambda: None) if kind == "kept" else Stored(folder, model, texts)
    for chosen in ([0], [2, 1], [1, 0, 2]):
        a, b = live(chosen), source(chosen)
        for name in ("ids", "starts", "lengths"):
            assert torch.equal(getattr(a, name), getattr(b, name))
        real = torch.arange(a.ids.shape[1]) < a.lengths[:, None]
        torch.testing.assert_close(a.states[real], b.states[real], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(a.logits[real], b.logits[real], atol=1e-4, rtol=1e-5)
    assert store(live, tmp_path, "other weights", 2, lambda: None) != folder


def test_every_epoch_is_another_permutation_that_depends_on_the_seed() -> None:
    texts = order(6, 3)
    epochs = [[next(texts) for _ in range(6)] for _ in range(3)]
    assert all(sorted(e) == list(range(6)) for e in epochs)
    assert epochs[0] != epochs[1]
    again = order(6, 3)
    assert [next(again) for _ in range(6)] == epochs[0]


def test_the_learning_rate_warms_up_and_falls_to_its_end(tmp_path: Path, target: Path) -> None:
    config = small(tmp_path, target, optimiser={"warm_up": 4, "final": 0.1})
    rates = [factor(config.optimiser, 20, step) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert factor(config.optimiser, 1_000, 10, spent=1.0) == pytest.approx(0.1)
    assert factor(config.optimiser, 20, 10, spent=0.1) == factor(config.optimiser, 20, 10)


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_that_was_stopped_goes_on_to_the_same_curve(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = (small(tmp_path, target, n, optimiser={"muon": 0.01}) for n in ("whole", "broken"))
    run_training(whole, "eagle3", quiet)
    step = loop_module.Loop._step

    def stop(self: Any, chosen: Any) -> Any:
        if self.schedule.parts[0].last_epoch == 5:
            raise KeyboardInterrupt
        return step(self, chosen)

    monkeypatch.setattr(loop_module.Loop, "_step", stop)
    with pytest.raises(KeyboardInterrupt):
        run_training(broken, "eagle3", quiet)
    monkeypatch.undo()
    run_training(broken, "eagle3", quiet)
    assert log_of(broken.folder) == log_of(whole.folder)
    assert [e["step"] for e in log_of(whole.folder)] == [0, 3, 6]
    a, b = (load_head(c.folder / "head").head.state_dict() for c in (whole, broken))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_ends_by_the_clock_with_its_learning_rate_at_the_end(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 2))  # every look at it is two seconds later
    monkeypatch.setattr(loop_module.time, "perf_counter", lambda: next(clock))
    config = small(tmp_path, target, steps=1_000, minutes=2, eval_tokens=0, optimiser={"warm_up": 1})
    log = run_training(config, "eagle3", quiet)
    last = log[-1]
    assert 4 <= last["step"] <= 40
    assert last["seconds"] >= 110
    assert last["lr"] < 0.1 * max(entry["lr"] for entry in log)
    assert (config.folder / "head").is_dir()
    assert run_training(config, "eagle3", quiet)[-1] == last  # finished: no step more


def test_prompts_are_trained_on_where_asked(tmp_path: Path, target: Path, decoder: SpeculativeDecoder) -> None:
    data = settings(target, tmp_path)["data"]
    config = small(tmp_path, target, data=data | {"whole": True})
    plan = Plan.make(config, decoder.target.model, decoder.tokenizer)
    write_answers(plan, decoder, config, Shard(), quiet)
    found = read_answers(plan, config)
    assert found is not None
    assert all(a.start == 0 for part in found for a in part)


def test_a_finished_head_drafts_for_its_target(tmp_path: Path, target: Path, decoder: SpeculativeDecoder) -> None:
    config = small(tmp_path, target, features="stored", accumulate=2, steps=2, loss="acceptance", dtype="bfloat16")
    log = run_training(config, "eagle3", quiet)
    entry = log[-1]
    assert len(entry["teacher_forced"]) == 3
    assert all(0 <= rate <= 1 for rate in entry["teacher_forced"])
    assert entry["acceptance_length"] >= 1
    out = decoder.generate("def one", 8, strategies=[Eagle3(head=config.folder / "head")])
    assert out.token_ids == decoder.generate("def one", 8, strategies=[]).token_ids
    assert out.stats.to_dict()["draft_tokens"] > 0


def test_a_checkpoint_of_another_config_is_refused(tmp_path: Path, target: Path) -> None:
    config = small(tmp_path, target, steps=2, eval_tokens=0)
    run_training(config, "eagle3", quiet)
    with pytest.raises(SpecdecError, match="another config, target or answers"):
        run_training(small(tmp_path, target, steps=2, eval_tokens=0, ttt_steps=2), "eagle3", quiet)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 8}, r"answers: steps was 2 and is 8 \(the learning rate of every step depends on it\); set back"),
        (
            {"optimiser": {"lr": 0.5}, "loss": "tv"},
            "loss was 'forward-kl' and is 'tv', optimiser.lr was 0.001 and is 0.5;",
        ),
    ],
)
def test_a_refused_checkpoint_names_what_changed(
    tmp_path: Path, target: Path, change: dict[str, Any], words: str
) -> None:
    run_training(small(tmp_path, target, steps=2, eval_tokens=0), "eagle3", quiet)
    with pytest.raises(SpecdecError, match=words):
        run_training(small(tmp_path, target, **{"steps": 2, "eval_tokens": 0} | change), "eagle3", quiet)


def test_a_run_goes_on_with_other_figures_to_the_same_weights(tmp_path: Path, target: Path) -> None:
    config = small(tmp_path, target, eval_every=6)
    run_training(config, "eagle3", quiet)
    whole = load_head(config.folder / "head").head.state_dict()
    checkpoint = config.folder / "checkpoint.pt"
    data = settings(target, tmp_path)["data"] | {"batch_size": 1}
    other = small(tmp_path, target, eval_every=2, eval_tokens=0, save_dtype="float32", data=data)
    assert run_training(other, "eagle3", quiet)[-1]["step"] == 6  # nothing is left to do, and nothing is refused
    checkpoint.unlink()
    log = run_training(other, "eagle3", quiet)
    assert [e["step"] for e in log] == [0, 2, 4, 6]
    again = load_head(config.folder / "head").head.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("what", ["the loss is", "the gradient is", "weights are"])
def test_a_training_that_diverges_stops_with_its_last_checkpoint(
    what: str, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path, target, eval_tokens=0)
    figures, step = loop_module.Loop.figures, loop_module.Loop._step

    def poisoned(self: Any, module: Any, chosen: list[int]) -> Any:
        made = figures(self, module, chosen)
        if self.schedule.parts[0].last_epoch == 3:  # in step 4
            spoilt = sum(p.sum() for p in self.parameters) * 0
            made = replace(made, loss=made.loss + (float("nan") if what == "the loss is" else spoilt.sqrt()))
        return made

    def overflown(self: Any, chosen: Any) -> Any:
        loss = step(self, chosen)
        if self.schedule.parts[0].last_epoch == 4:
            self.parameters[0].data.fill_(float("inf"))
        return loss

    if what == "weights are":
        monkeypatch.setattr(loop_module.Loop, "_step", overflown)
    else:
        monkeypatch.setattr(loop_module.Loop, "figures", poisoned)
    done = CliRunner().invoke(app, ["train", "eagle3", str(tmp_path / "run.yaml")])
    assert done.exit_code == 1
    assert f"step 4: {what} not finite: the training diverged; lower optimiser.lr (0.001)" in done.output
    assert "the checkpoint of step 2 is kept" in done.output
    assert "written" not in done.output
    assert torch.load(config.folder / "checkpoint.pt")["step"] == 2
    assert not (config.folder / "head").exists()
    assert log_of(config.folder)[-1] == {"step": 4, "loss": None}
    assert "NaN" not in (config.folder / "log.jsonl").read_text()
    monkeypatch.undo()
    assert run_training(config, "eagle3", quiet)[-1]["step"] == 6


def test_a_damaged_checkpoint_is_refused(tmp_path: Path, target: Path) -> None:
    config = small(tmp_path, target, steps=2, eval_tokens=0)
    run_training(config, "eagle3", quiet)
    file = config.folder / "checkpoint.pt"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(SpecdecError, match=r"checkpoint.pt cannot be read"):
        run_training(config, "eagle3", quiet)


@pytest.mark.full
def test_a_killed_process_resumes_to_the_same_curve(tmp_path: Path, target: Path) -> None:
    """The killed ones are commands; what comes of them is finished here."""
    steps = {"steps": 40, "eval_every": 10, "checkpoint_every": 5}
    whole, again = (small(tmp_path, target, name, **steps) for name in ("whole", "killed"))
    run_training(whole, "eagle3", quiet)
    command = [sys.executable, "-m", "specdec", "train", "eagle3", str(tmp_path / "killed.yaml"), "--json"]
    environment, log = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}, again.folder / "log.jsonl"
    for entries in (1, 2):  # killed twice: after the first figures, and after some more
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and (not log.exists() or log.read_text().count("\n") <= entries):
            assert process.poll() is None, "the run ended before it was killed"
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
    run_training(again, "eagle3", quiet)
    assert log_of(tmp_path / "killed") == log_of(tmp_path / "whole")


@pytest.mark.full
def test_training_takes_at_most_15_percent_longer_than_a_plain_loop(tmp_path: Path) -> None:
    """CPU time of steps, one of each in turn, with the same batches and optimiser."""
    values = settings(Path("demo-target"), tmp_path, head={}, batch=4, sequence_length=96, steps=100)
    config = config_of(tmp_path / "c.yaml", "eagle3", values | {"target": "demo-target"})
    pair = LoadedPair.load("demo-target", device="cpu")
    texts = [answers_module.Answer(tuple(range(3 + i, 99 + i)), 8) for i in range(8)]
    tasks = [make_task("eagle3", config, pair.target.requires_grad_(False), None, texts) for _ in range(2)]
    source = Live(pair.target, tasks[0].layers, texts)
    loop = loop_module.Loop(config, Accelerator(cpu=True), tasks[0], source, 8, dict, {})
    module = tasks[1].module.train()
    trained = [p for p in module.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=config.optimiser.lr, betas=config.optimiser.betas)
    chosen = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def plain(step: int) -> None:
        module(source(chosen[step % 2])).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, config.optimiser.clip)
        optimiser.step()
        optimiser.zero_grad()

    steps = {"loop": lambda step: loop._step(iter([chosen[step % 2]])), "plain": plain}
    spent: dict[str, list[float]] = {"loop": [], "plain": []}
    for step in range(12):
        for name, run in steps.items():
            started = time.process_time()
            run(step)
            spent[name].append(time.process_time() - started)
    ours, theirs = (statistics.median(spent[name][2:]) for name in ("loop", "plain"))
    print(f"training step: {ours:.3f} s, plain loop: {theirs:.3f} s, ratio {ours / theirs:.3f}")
    assert ours < 1.15 * theirs


# -- drafts ------------------------------------------------------------------------------------------------------------


def test_a_draft_of_the_targets_layers_is_trained_and_used(
    tmp_path: Path, target: Path, decoder: SpeculativeDecoder
) -> None:
    config = config_of(tmp_path / "d.yaml", "draft", settings(target, tmp_path / "d", **DRAFT, steps=3))
    log = run_training(config, "draft", quiet)
    assert len(log[-1]["teacher_forced"]) == 1
    pair = SpeculativeDecoder.from_pretrained(target, config.folder / "draft", device="cpu", check=False)
    out = pair.generate("def one", 8)
    assert out.token_ids == decoder.generate("def one", 8, strategies=[]).token_ids
    assert out.stats.to_dict()["draft_tokens"] > 0
