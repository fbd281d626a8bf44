"""Configs as files: the demo's, round trips, and what is refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from specdec.config import UNSET, GenerationSettings, PairConfig, RunConfig, dump_yaml, load_yaml
from specdec.errors import SpecdecError
from specdec.files.texts import parse_yaml
from specdec.research.demo import DEMO, run_demo

DEMO_YAML = Path(__file__).resolve().parents[1] / "configs" / "demo.yaml"


def test_the_demo_file_is_the_built_in_demo() -> None:
    assert load_yaml(DEMO_YAML) == DEMO


def test_the_demo_file_names_every_field() -> None:
    text = DEMO_YAML.read_text(encoding="utf-8")
    named = {f.name for cls in (RunConfig, PairConfig, GenerationSettings) for f in fields(cls)}
    assert {name for name in named if name not in text} == set()


def test_defaults_shown_as_comments_are_the_defaults() -> None:
    lines = [line.strip().removeprefix("# ") for line in DEMO_YAML.read_text(encoding="utf-8").splitlines()]
    for cls in (PairConfig, GenerationSettings):
        for f in fields(cls):
            # Those that are UNSET are examples: "not given" cannot be written down. The others are set.
            shown = [line for line in lines if line.startswith(f"{f.name}: ")]
            default = "auto" if f.name == "exact" else f.default
            if len(shown) != 1 or f.name in ("target", "draft", "max_new_tokens", "batch_size") or default is UNSET:
                continue
            assert yaml.safe_load(shown[0])[f.name] == default, f.name


def test_the_demo_file_runs_from_end_to_end() -> None:
    config = load_yaml(DEMO_YAML)
    short = RunConfig(config.pair, config.strategies, {**config.generation, "max_new_tokens": 8}, config.prompts[:1])
    result = run_demo(short, repeats=1)
    assert result.identical is True
    assert [len(ids) for ids in result.shown.token_ids] == [8]


@pytest.mark.parametrize(
    "config",
    [
        DEMO,
        RunConfig(PairConfig("t")),
        RunConfig(PairConfig("t", draft="d", dtype="float32"), strategies=()),
        RunConfig(
            PairConfig("t"),
            strategies=({"name": "prompt-lookup", "n_max": 3},),
            generation={"seed": [1, 2], "eos_token_id": None, "stop_strings": ["\n\n", "é: #"], "top_p": 0.5},
            prompts=("two\nlines", "  indented: yes", "日本"),
        ),
    ],
)
def test_a_config_comes_back_from_its_file(config: RunConfig, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(config), encoding="utf-8")
    assert load_yaml(file) == config


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("pair: {target: t}\nstrategy: [draft-model]", "strategy"),
        ("pair: {target: t, drafft: d}", "drafft"),
        ("pair: {target: t}\ngeneration: {temprature: 1}", "temprature"),
        ("pair: {target: t}\ngeneration: {temperature: -1}", "temperature"),
        ("pair: {target: t}\ngeneration: {num_beams: 4}", "beam"),
        ("pair: {}", "target"),
        ("pair: null", "pair"),
        ("strategies: []", "pair"),
        ("pair: {target: t}\ngeneration: null", "generation"),
        ("pair: {target: t}\ngeneration: [1]", "generation"),
        ("pair: {target: t}\nstrategies: draft-model", "strategies"),
        ("pair: {target: t}\nprompts: just one", "prompts"),
        ("pair: {target: t}\nprompts: [1]", "prompts"),
        ("- a list", "mapping"),
        ("", "mapping"),
        ("pair: [", "YAML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SpecdecError, match=named) as error:
        load_yaml(file)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match=r"no\.yaml"):
        load_yaml(tmp_path / "no.yaml")


def test_a_key_that_stands_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("pair: {target: demo-target}\ngeneration:\n  seed: 1\n  seed: 2\n", encoding="utf-8")
    with pytest.raises(SpecdecError, match="not valid YAML: duplicate key 'seed'"):
        load_yaml(path)
    path.write_text("base: &base {seed: 1}\nother: {<<: *base, seed: 2}\n", encoding="utf-8")
    assert parse_yaml(path.read_text(encoding="utf-8"), "x")["other"] == {"seed": 2}  # merging is no repetition
