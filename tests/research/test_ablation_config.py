"""Configs of ablations: what they expand to, and what is refused when they are read, before any model is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from specdec import SpeculativeDecoder
from specdec.cli import app
from specdec.cli.inputs import chain
from specdec.cli.options import Prompts
from specdec.config import dump_yaml
from specdec.drafters import find_strategy, make_drafters, parse_strategy
from specdec.errors import SettingWarning, SpecdecError
from specdec.files.texts import write_atomically
from specdec.research.ablation import AblationConfig, load_ablation, run_ablation
from specdec.research.ablation.compare import compare_config
from specdec.research.ablation.store import read_manifest
from specdec.research.prompts.datasets import own_prompts


def cells(**values: Any) -> list[dict[str, Any]]:
    base: dict[str, Any] = {"pairs": {"p": {"target": "t", "draft": "d"}}, "strategies": {"draft": ["draft-model"]}}
    config = AblationConfig(**{**base, **values})
    return [{"chain": c.chain, **c.settings} for c in config.expand()]


def test_the_grid_is_the_product_of_the_axes_and_single_cells() -> None:
    found = cells(axes={"k": [1, 2], "temperature": [0.0, 0.5]}, cells=[{"strategies": "draft", "k": 9}])
    drafting = [(c["k"], c["temperature"]) for c in found if c["chain"] == "draft"]
    assert drafting == [(1, 0.0), (1, 0.5), (2, 0.0), (2, 0.5), (9, None)]
    assert [c["temperature"] for c in found if c["chain"] == "plain"] == [0.0, 0.5, None]


def test_an_axis_that_does_not_concern_a_chain_makes_no_second_cell() -> None:
    chains = {"draft": ["draft-model"], "lookup": ["prompt-lookup"]}
    found = cells(strategies=chains, axes={"draft-model.n_max": [1, 2, 3], "acceptance": ["match", "coupled"]})
    assert [c["chain"] for c in found].count("draft") == 6
    assert [c["chain"] for c in found].count("lookup") == 2
    assert [c["chain"] for c in found].count("plain") == 1


def test_k_is_no_setting_of_a_tree_whose_options_fix_it() -> None:
    """Results said k=2 of trees that emitted four tokens a round."""
    chains = {
        "chain": ["draft-model"], "tree": ["draft-model:tree=2x2"], "best": ["draft-model:tree=opt-8"],
        "head": [{"name": "eagle3", "head": "demo-head"}],
        "head tree": [{"name": "eagle3", "head": "demo-head", "nodes": 16}],
        "both": ["draft-model:tree=2x2", "prompt-lookup"],
    }  # fmt: skip
    found = cells(strategies=chains, axes={"k": [2, 4]})
    ks = {name: [c["k"] for c in found if c["chain"] == name] for name in chains}
    two, one = [2, 4], [None]
    assert ks == {"chain": two, "tree": one, "best": two, "head": two, "head tree": one, "both": two}
    config = AblationConfig(pairs={"p": {"target": "t", "draft": "d"}}, strategies=chains, axes={"k": [2, 4]})
    assert [s for c in config.expand() if c.chain == "head tree" for s in c.strategies] == chains["head tree"]
    assert ["n_max" in s for c in config.expand() if c.chain == "both" for s in c.strategies] == [False, True] * 2
    for order in (("k", "eagle3.nodes"), ("eagle3.nodes", "k")):  # an axis may make the tree
        axes = {name: {"k": [2, 4], "eagle3.nodes": [0, 16]}[name] for name in order}
        found = cells(strategies={"head": chains["head"]}, axes=axes)
        drafting = sorted((c["eagle3.nodes"], c["k"] or 0) for c in found if c["chain"] == "head")
        assert drafting == [(0, 2), (0, 4), (16, 0)], order
    with pytest.raises(SpecdecError, match=r"axes\.k has no effect on tree"):
        cells(strategies={"tree": chains["tree"]}, axes={"k": [2, 4]})


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("eagle3:head=demo-head:nodes=24:n_max=5", ("n_max=5 has no effect", "depth")),
        ("eagle3:head=demo-head:tree=2x2:n_max=3", ("n_max=3 has no effect", "tree=2x2")),
        ("eagle3:head=demo-head:tree=2x2:depth=3", ("depth=3 has no effect", "tree=2x2")),
        ("eagle3:head=demo-head:depth=3", ("depth=3 has no effect", "nodes")),
        ("eagle3:head=demo-head:top_k=3", ("top_k=3 has no effect", "nodes")),
        ("draft-model:tree=2x2:n_max=3", ("n_max=3 has no effect", "tree=2x2")),
        ("draft-model:p_split=0.3", ("p_split=0.3 has no effect", "branches")),
        ("draft-model:branches=1:p_split=0.3", ("p_split=0.3 has no effect", "branches")),
        ("draft-model:tree=2x2:p_split=0.3", ("p_split=0.3 has no effect", "tree=2x2")),
        ("draft-model:tree=opt-8:top_n=4", ("top_n=4 has no effect", "tree=opt-8")),
        ("draft-model:tree=2x2:preset=llama-2026", ("preset='llama-2026' has no effect", "tree=2x2")),
        ("draft-model:translate=true:p_min=0.3", ("p_min=0.3 has no effect", "translate=True")),
        ("suffix:min_token_prob=0.1:gap_cost=3", ("gap_cost=3 has no effect", "min_token_prob=0.1")),
        ("suffix:min_token_prob=0.1:p_min=0.3", ("p_min=0.3 has no effect", "min_token_prob=0.1")),
        ("suffix:novelty=3", ("novelty=3 has no effect", "p_min")),
    ],
)
@pytest.mark.parametrize("form", ["text", "mapping", "object"])
def test_an_option_without_effect_is_refused(strategy: str, words: tuple[str, ...], form: str) -> None:
    """In the same words for a text and for an entry of a YAML file; an object in Python is made, with a warning."""
    name, options = parse_strategy(strategy)
    entry = strategy if form == "text" else {"name": name, **options}
    if form != "text" and options.get("n_max") == 5:
        options["n_max"] = 6  # here a default says nothing
        entry, words = {"name": name, **options}, (words[0].replace("5", "6"), *words[1:])
    if form == "object":
        with pytest.warns(SettingWarning) as seen:
            find_strategy(name)(**options)
        said = str(seen[0].message)
    else:
        with pytest.raises(SpecdecError) as error:
            make_drafters([entry], has_draft=True)
        said = str(error.value)
    assert all(word in said for word in words)
    assert said.endswith("; leave it out")
    assert "\n" not in said


def test_all_parameters_of_a_strategy_make_it_again() -> None:
    """As a mapping, which a result's provenance has, and as a copy with another parameter."""
    trees = ("draft-model:tree=2x2", "draft-model:tree=opt-8:n_max=3", "draft-model:branches=3", "eagle3:nodes=8")
    chains = ("draft-model:n_max=3", "draft-model:translate=true", "draft-model:preset=llama-classic", "suffix:n_max=3")
    for text in (*trees, *chains, "suffix:min_token_prob=0.1", "suffix:p_min=0.1:novelty=3", "early-exit:layers=2"):
        [made] = make_drafters([text + ":head=demo-head" * text.startswith("eagle3")], has_draft=True)
        options = {k: v for k, v in made.parameters().items() if k != "notes"}
        [again] = make_drafters([{"name": made.name, **options}], has_draft=True)
        assert again.parameters() == made.parameters()
        assert replace(made).parameters() == made.parameters()


def test_mtp_has_no_options_of_trees() -> None:
    with pytest.raises(SpecdecError, match="unknown option of strategy 'mtp' 'top_k'"):
        make_drafters(["mtp:top_k=3"], has_draft=True)


def test_translate_on_the_command_line_leaves_no_option_without_effect() -> None:
    assert chain("draft-model:n_max=3", translate=True)
    with pytest.raises(SpecdecError, match=r"draft-model: p_min=0.3 has no effect: translate=True"):
        chain("draft-model:p_min=0.3", translate=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": {}}, "write strategies="),
        ({"pairs": {"p": {"target": "t", "drafft": "d"}}}, "drafft"),
        ({"axes": {"temprature": [1.0]}}, "temprature"),
        ({"axes": {"draft-model.nmax": [1]}}, "nmax"),
        ({"axes": {"drft-model.n_max": [1]}}, "drft-model"),
        ({"axes": {"temperature": 1.0}}, "list of values"),
        ({"axes": {"temperature": [-1.0]}}, "temperature"),
        ({"axes": {"strategies": ["dratf"]}}, "dratf"),
        ({"cells": [{"k": 2}]}, "cells"),
        ({"strategies": {"plain": ["draft-model"]}}, "plain"),
        ({"strategies": {"x": ["draft-modle"]}}, "draft-modle"),
        ({"generation": {"seed": None}}, "seed"),
        ({"generation": {"keep_state": True}}, "keep_state"),
        ({"axes": {"shard": ["0/2"]}}, "shard is no option of an ablation"),
        ({"pairs": {"p": {"target": "t", "tp_plan": "auto"}}}, "tp_plan is no option of an ablation"),
        ({"data": {"datset": "gsm8k"}}, "datset"),
        ({"pairs": {}}, "pairs is empty"),
        ({"prompts": [""]}, "prompts"),
        ({"axes": {"seed": [1 << 63]}}, "seed must fit into 64 bits"),
        ({"generation": {"seed": -(1 << 64)}}, "seed must fit into 64 bits"),
    ],
)
def test_what_a_config_gets_wrong_is_named(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in refused(values, tmp_path)


def refused(values: dict[str, Any], folder: Path) -> str:
    """The one line that a config file with these keys is refused with, when it is read."""
    base = {"pairs": {"p": {"target": "t"}}, "strategies": {"x": ["prompt-lookup"]}}
    (folder / "c.yaml").write_text(json.dumps({**base, **values}))
    with pytest.raises(SpecdecError) as caught:
        load_ablation(folder / "c.yaml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_half_of_a_surrogate_pair_in_a_prompt_is_refused() -> None:
    with pytest.raises(SpecdecError, match=r"prompts\[1\] is no Unicode text"):
        AblationConfig(pairs={"p": {"target": "t"}}, prompts=("a", "x \ud83d"))


def test_a_folder_whose_prompts_hold_half_of_a_surrogate_pair_can_be_read(tmp_path: Path) -> None:
    described = {"config": {}, "cells": [], "prompts": [["data/1", "x \ud83d"]]}
    write_atomically(tmp_path / "run.json", json.dumps(described, ensure_ascii=False))
    assert read_manifest(tmp_path) == described


TREE = "draft-model:branches=2"
WITH_DRAFT = {"pairs": {"p": {"target": "t", "draft": "d"}}, "strategies": {"x": ["draft-model"]}}


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"axes": {"acceptance": ["match", "unknown"]}}, ("axes.acceptance", "'unknown'", "leviathan")),
        ({"generation": {"acceptance": 3}}, ("generation", "acceptance", "3")),
        ({"cells": [{"strategies": "x", "acceptance": "no"}]}, ("cells.0.acceptance", "'no'")),
        ({"axes": {"dtype": ["float32", "float23"]}}, ("dtype", "'float23'")),
        ({"axes": {"dtype": ["sum"]}}, ("dtype", "'sum'")),
        ({"axes": {"dtype": ["int8"]}}, ("dtype", "'int8'")),
        ({"pairs": {"p": {"target": "t", "draft": "d", "draft_dtype": 16}}}, ("pairs.p", "draft_dtype", "16")),
        ({"pairs": {"p": {"target": "t", "draft_dtype": "float32"}}}, ("pairs.p", "draft_dtype", "without a draft")),
        ({"pairs": {"p": {"target": 7}}}, ("pairs.p", "target", "7")),
        ({"pairs": {"p": {"target": "t", "draft": ""}}}, ("pairs.p", "draft", "''")),
        ({"pairs": {"p": {"target": "t", "device": "tpu"}}}, ("pairs.p", "device", "'tpu'")),
        ({"pairs": {"p": {"target": "t", "revision": 1}}}, ("pairs.p", "revision", "1")),
        ({"pairs": {"p": {"target": "t", "trust_remote_code": "yes"}}}, ("pairs.p", "trust_remote_code", "'yes'")),
        ({"axes": {"attn_implementation": ["flash_attention_2"]}}, ("attn_implementation", "'flash_attention_2'")),
        ({"axes": {"k": [2, 0]}}, ("k=0", "prompt-lookup")),
        ({"axes": {"prompt-lookup.match": ["newest"]}}, ("prompt-lookup.match", "'newest'")),
        ({**WITH_DRAFT, "strategies": {"x": ["draft-model:n_min=3"]}, "axes": {"k": [3, 2]}}, ("k=2", "n_min=3")),
        ({**WITH_DRAFT, "axes": {"p_min": [0.5, 2.0]}}, ("p_min", "2.0")),
        ({"strategies": {"x": ["draft-model"]}}, ("pairs.p", "strategies.x", "needs a draft model")),
        ({"strategies": {"x": ["prompt-lookup:n_max=0"]}}, ("strategies.x", "n_max", "0")),
        ({**WITH_DRAFT, "strategies": {"x": [TREE]}, "generation": {"exact": True}}, ("exact", "tree")),
        ({"axes": {"batch_size": [0]}}, ("axes.batch_size", "0")),
        ({"axes": {"batch_size": [None]}}, ("axes.batch_size", "None")),
        ({"axes": {"seed": [0, "a"]}}, ("axes.seed", "'a'")),
        ({"axes": {"draft_length": ["long"]}}, ("axes.draft_length", "'long'")),
        ({"axes": {"temperature": [0.5, "hot"]}}, ("axes.temperature", "'hot'")),
        ({"axes": {"bad_words_ids": [[3]]}}, ("axes.bad_words_ids", "bad_words_ids=[3]")),
        ({"axes": {"exponential_decay_length_penalty": [[4]]}}, ("exponential_decay_length_penalty=[4]",)),
        ({"axes": {"typical_p": [0.0]}}, ("axes.typical_p", "typical_p=0.0")),
        ({"axes": {"suppress_tokens": [[-1]]}}, ("axes.suppress_tokens", "-1")),
        ({"generation": {"renormalize_logits": "x"}}, ("renormalize_logits", "'x'")),
        ({"generation": {"costs": "none.json"}}, ("generation", "costs", "none.json")),
        (
            {**WITH_DRAFT, "generation": {"costs": {"target": [[[1.0, 2.0]]]}, "draft_length": "auto"}},
            ("costs", "no draft model"),
        ),
        ({"data": {"dataset": 5}}, ("data: dataset", "5")),
        ({"data": {"limit": 0}}, ("data: limit", "0")),
        ({"data": {"seed": "x"}}, ("data: seed", "'x'")),
        ({"data": {"categories": []}}, ("data: categories", "[]")),
        ({"data": {"chat": "maybe"}}, ("data: chat", "'maybe'")),
        ({"plain": "no"}, ("plain", "'no'")),
        ({"cells": 5}, ("cells", "5")),
        ({"prompts": "a text"}, ("prompts", "'a text'")),
    ],
)  # fmt: skip
def test_what_needs_no_model_to_be_wrong_is_refused_when_the_config_is_read(
    values: dict[str, Any], parts: tuple[str, ...], tmp_path: Path
) -> None:
    said = refused(values, tmp_path)
    assert all(part in said for part in parts), said


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"prompts": ["a"], "data": {"dataset": "gsm8k"}}, ("prompts", "data.dataset='gsm8k'")),
        ({"prompts": ["a"], "data": {"dataset": "spec-bench"}}, ("prompts", "data.dataset='spec-bench'")),
        ({"prompts": ["a"], "data": {"limit": 3}}, ("prompts", "data.limit=3")),
        ({"prompts": []}, ("prompts", "[]")),
        ({"generation": {"temperature": 0.5}, "axes": {"temperature": [0.0]}}, ("axes.temperature", "generation")),
        ({"pairs": {"p": {"target": "t", "dtype": "auto"}}, "axes": {"dtype": ["float16"]}}, ("axes.dtype", "pairs.p")),
        ({"strategies": {"x": ["prompt-lookup:n_max=7"]}, "axes": {"k": [1]}}, ("axes.k", "strategies.x", "n_max=7")),
        ({"axes": {"temperature": [0, 0.5, 0.0]}}, ("axes.temperature", "0 and 0.0", "same")),
        ({"axes": {"k": [1], "prompt-lookup.n_max": [2]}}, ("axes", "k", "prompt-lookup.n_max")),
        ({"cells": [{"strategies": "x", "k": 1, "prompt-lookup.n_max": 2}]}, ("cells.0", "k", "prompt-lookup.n_max")),
        ({"axes": {"suffix.n_max": [1]}}, ("axes.suffix.n_max", "no effect")),
        ({"cells": [{"strategies": "plain", "k": 1}]}, ("cells.0.k", "no effect")),
    ],
)  # fmt: skip
def test_a_key_that_would_hide_another_one_is_refused(
    values: dict[str, Any], parts: tuple[str, ...], tmp_path: Path
) -> None:
    said = refused(values, tmp_path)
    assert all(part in said for part in parts), said


def test_what_single_cells_still_use_is_no_contradiction() -> None:
    found = cells(
        generation={"temperature": 0.5}, axes={"temperature": [0.0]}, cells=[{"strategies": "draft"}],
        prompts=["a"], data={"chat": False, "longest": 3},
    )  # fmt: skip
    assert [c["temperature"] for c in found if c["chain"] == "draft"] == [0.0, None]


def test_a_config_is_read_back_from_what_it_is_written_as() -> None:
    for values in ({"prompts": ["a"]}, {"data": {"dataset": "gsm8k", "limit": 3}}, {}):
        config = AblationConfig(pairs={"p": {"target": "t"}}, **values)
        assert AblationConfig(**yaml.safe_load(dump_yaml(config))).expand() == config.expand()
        assert AblationConfig(**yaml.safe_load(dump_yaml(config))).data == config.data


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("compare", "--draft", "demo-draft", "--prompt", "a", "--dataset", "gsm8k"), ("--dataset", "--prompt")),
        (("compare", "--draft", "demo-draft", "--prompt", "a", "--limit", "8"), ("--limit", "--prompt")),
        (("compare", "--draft", "demo-draft", "--prompt", "a", "--category", "rag"), ("--category", "--prompt")),
        (("compare", "--strategy", "suffix", "--prompt", "a", "--k", "5"), ("--k", "strategies alone")),
        (("compare", "--strategy", "suffix", "--prompt", "a", "--draft-dtype", "float32"), ("--draft-dtype",)),
        (("compare", "--draft", "demo-draft", "--prompt", "a", "--acceptance", "no"), ("acceptance", "'no'")),
        (("generate", "--prompt", "a", "--draft-dtype", "float32"), ("draft_dtype", "without a draft")),
        (("generate", "--prompt", "a", "--dtype", "float23"), ("dtype", "'float23'")),
        (("generate", "--prompt", "a", "--ignore-eos", "--option", "eos_token_id=3"), ("eos_token_id=3", "ignore_eos")),
        (("generate", "--prompt", "a", "--option", "typical_p=0.0"), ("typical_p=0.0",)),
        (("trace", "record", "--out", "x", "--prompt", "a", "--limit", "3"), ("--limit", "--dataset")),
    ],
)  # fmt: skip
def test_an_option_without_effect_is_refused_before_any_model_is_loaded(
    arguments: tuple[str, ...], parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpeculativeDecoder, "from_pretrained", lambda *a, **o: pytest.fail("a model was loaded"))
    done = CliRunner().invoke(app, [*arguments, "--target", "demo-target"])
    assert done.exit_code == 2, done.output
    assert done.stderr.count("\n") == 1
    assert all(part in done.stderr for part in parts), done.stderr


@pytest.mark.parametrize("change", [{"target": "/no/such/model"}, {"draft": "/no/such.gguf"}, {"device": "cuda:99"}])
def test_a_file_or_device_that_is_not_there_is_refused_before_any_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    if "device" in change and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(SpeculativeDecoder, "from_pretrained", lambda *a, **o: pytest.fail("a model was loaded"))
    right = {"target": "demo-target"}
    config = AblationConfig(pairs={"right": right, "wrong": {**right, **change}}, prompts=("a",))
    with pytest.raises(SpecdecError, match=r"pairs\.wrong: .*(no/such|cuda:99)"):
        run_ablation(config, tmp_path)
    # The folder is not taken by a run that never began.
    with pytest.raises(SpecdecError, match=r"pairs\.other: .*(no/such|cuda:99)"):
        run_ablation(AblationConfig(pairs={"other": {**right, **change}}, prompts=("b",)), tmp_path)


def test_a_set_is_found_beside_the_config_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "mine-of-config.jsonl").write_text('{"prompt": "a", "id": "x"}\n')
    (tmp_path / "a.yaml").write_text(
        json.dumps({"pairs": {"p": {"target": "t"}}, "data": {"dataset": "mine-of-config.jsonl"}})
    )
    monkeypatch.chdir(tmp_path / "there")
    config = load_ablation(tmp_path / "a.yaml")
    assert [p.id for p in config.data.load(None)] == ["mine-of-config/x"]
    (tmp_path / "there" / "mine-of-config.jsonl").write_text('{"prompt": "b", "id": "here"}\n')
    assert [p.id for p in config.data.load(None)] == ["mine-of-config/here"], "the current folder comes first"


def test_prompts_may_be_records_with_ids_and_categories(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "category": "chat", "id": "c"}
    record = {"prompt": "b", "id": "mine/b", "category": "code"}
    made = AblationConfig({"p": {"target": "t"}}, prompts=("a", record, chat))
    found = made.data.load(made.prompts)
    assert [(p.id, p.category, p.text) for p in found] == [
        ("prompt/0", "prompts", "a"), ("mine/b", "code", "b"), ("c", "chat", "hi"),
    ]  # fmt: skip
    assert [own_prompts([p.record()]) for p in found] == [[p] for p in found]
    for wrong, words in (({"text": "a"}, r"prompts\[0\]: expected an object"), ({"prompt": ""}, "not empty")):
        with pytest.raises(SpecdecError, match=words):
            AblationConfig({"p": {"target": "t"}}, prompts=(wrong,))
    with pytest.raises(SpecdecError, match="occurs twice"):
        AblationConfig({"p": {"target": "t"}}, prompts=(chat, chat))


def test_compare_keeps_keys_and_values_as_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every candidate, those without a draft too."""
    seen: list[Any] = []

    def stop(config: Any, *rest: Any) -> Any:
        seen.append(config)
        raise SpecdecError("seen")

    monkeypatch.setattr("specdec.research.ablation.store.Plan.make", stop)
    typed = ("--draft", "demo-draft", "--strategy", "suffix", "--prompt", "a", "--kv-cache-dtype", "fp8")
    assert CliRunner().invoke(app, ["compare", "--target", "demo-target", *typed]).exit_code == 2
    assert len(seen[0].pairs) == 2
    assert {pair.kv_cache_dtype for pair in seen[0].pairs.values()} == {"fp8"}


def test_compare_keeps_the_ids_and_categories_of_a_prompt_file(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a", "id": "x", "category": "code"}\n{"prompt": "b"}\n')
    given = Prompts(prompt=["typed"], prompt_file=[tmp_path / "mine.jsonl"]).entries()
    config = compare_config("t", ["d"], prompts=given)
    found = [(p.id, p.category) for p in config.data.load(config.prompts)]
    assert found == [("prompt/0", "prompts"), ("mine/x", "code"), ("mine/1", "mine")]
