"""`specdec export`: every strategy and option is written in an engine's options, or said to have no counterpart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specdec import demo_models
from specdec.config import GenerationSettings, PairConfig, RunConfig
from specdec.drafters import STRATEGIES
from specdec.files.engines import ENGINES
from specdec.files.own_code import parameters
from specdec.research import export as engines
from specdec.research.export import read_chain, translate
from tests.cli.test_cli import ROOT, run, run_json

NEEDED = {"eagle3": ":head=org/head", "dflash": ":head=org/head", "rest": ":corpus=c.txt", "early-exit": ":layers=2"}
# Options off their default, which must show in what is written or in what is lost; with those that they need to act.
GIVEN = {
    "draft-model": (
        *("n_max=7", "n_min=2", "p_min=0.4", "branches=2", "tree=3x2", "tree=opt-16", "preset=llama-classic"),
        *("translate=true", "translate=intersection", "p_min=0.4:top_n=5", "branches=2:p_split=0.3", "overlap=true"),
    ),
    "prompt-lookup": ("n_max=7", "ngram_max=5", "ngram_min=2", "match=earliest"),
    "suffix": (
        *("n_max=7", "p_min=0.4", "depth=9", "voters=3", "order_weight=2", "half_age=9", "gap_cost=null"),
        *("p_min=0.4:novelty=3", "min_match=2", "max_spec_factor=2", "min_token_prob=0.2", "remember=true"),
    ),
    "eagle3": ("n_max=7", "nodes=20", "nodes=20:top_k=5", "nodes=20:depth=3", "nodes=auto", "tree=3x2"),
    "dflash": ("n_max=7", "mask_token_id=3"),
    "mtp": ("n_max=2",),
    "ngram-simple": ("size_n=3", "size_m=9", "min_hits=2"),
    "ngram-map-k": (
        *("size_n=3", "size_m=9", "min_hits=2", "hash_size=1024", "parity=false", "fix_ratchet=true"),
        *("fix_blind_spot=true", "fix_begin=true", "fix_min_hits=true", "shared=true"),
    ),
    "ngram-map-k4v": (
        *("size_n=3", "size_m=9", "min_hits=2", "hash_size=1024", "parity=false", "fix_ratchet=true"),
        *("fix_blind_spot=true", "fix_begin=true", "shared=true"),
    ),
    "ngram-mod": (
        *("n_match=20", "n_min=2", "n_max=60", "table_size=1024", "parity=false", "fix_wipe=true"),
        *("fix_occupancy=true", "shared=true"),
    ),
    "ngram-cache": (
        *("static=a", "dynamic=a", "n_draft=4", "parity=false", "fix_boundaries=true", "fix_begin=true", "shared=true"),
    ),
}  # fmt: skip


def exported(engine: str, strategies: Any, pair: PairConfig | None = None, **options: Any) -> dict[str, Any]:
    pair = pair or PairConfig("t.gguf", "d.gguf")
    settings = GenerationSettings.parse(options)
    entries = tuple(strategies.split(",")) if isinstance(strategies, str) else strategies
    return vars(translate(engine, pair, read_chain(RunConfig(pair, entries), settings), settings))


@pytest.mark.parametrize("engine", ENGINES)
def test_every_strategy_has_a_counterpart_or_is_lost(engine: str) -> None:
    for name in (*STRATEGIES, "tests.cli.test_export:Own"):
        out = exported(engine, name + NEEDED.get(name, ""))
        lost = {"strategy": name, "option": None, "value": None, "why": "no counterpart known"}
        if name in ENGINES[engine].ways:
            assert out["options"][ENGINES[engine].method] == ENGINES[engine].ways[name][0]
            assert lost not in out["lost"]
        else:
            assert (out["options"], out["lost"]) == ({}, [lost])


@pytest.mark.parametrize("engine", ENGINES)
def test_keys_in_8_bits_are_named_as_the_engines_own_option(engine: str) -> None:
    pair = PairConfig("t.gguf", "d.gguf", kv_cache_dtype="fp8")
    [lost] = [e for e in exported(engine, "draft-model", pair)["lost"] if e["option"] == "kv_cache_dtype"]
    assert ("-ctk" if engine == "llama.cpp" else "--kv-cache-dtype") in lost["why"]


def silent(engine: str) -> list[str]:
    """The options that change neither what is written nor what is lost."""
    found = []
    for name in set(GIVEN) & set(ENGINES[engine].ways):
        for options in GIVEN[name]:
            others, _, _ = options.rpartition(":")
            start = name + NEEDED.get(name, "")
            without = f"{start}:{others}" if others else start
            if exported(engine, f"{start}:{options}") == exported(engine, without):
                found.append(f"{name}:{options}")
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_every_option_is_written_or_lost(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert silent(engine) == []

    def forgetful(strategy: Any, values: dict[str, Any]) -> dict[str, str]:
        for option in ("p_min", "mask_token_id"):
            values.pop(option, None)
        return {}

    monkeypatch.setitem(engines.ADAPT, engine, forgetful)  # the control
    assert "dflash:mask_token_id=3" in silent(engine)


def test_the_options_tried_are_all_there_are() -> None:
    known = {name for engine in ENGINES.values() for name in engine.ways}
    assert set(GIVEN) == known
    for name in known:
        tried = {part.partition("=")[0] for options in GIVEN[name] for part in options.split(":")}
        objects = {"head", "store", "config", "replacements"}  # needed, from Python alone, and mappings: below
        assert tried == set(parameters(STRATEGIES[name])) - objects


GOLDEN = {
    "vllm": {
        "draft-model:n_max=5": {"method": "draft_model", "model": "d.gguf", "num_speculative_tokens": 5},
        "prompt-lookup:n_max=6:ngram_max=4:ngram_min=2:match=earliest": {
            "method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
        },
        "suffix:n_max=8:min_token_prob=0.1:max_spec_factor=1.0": {
            "method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_tree_depth": 24,
            "suffix_decoding_max_spec_factor": 1.0, "suffix_decoding_min_token_prob": 0.1,
            "suffix_decoding_max_cached_requests": 0,
        },
        "eagle3:head=org/head:n_max=3": {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3},
        "mtp": {"method": "mtp", "num_speculative_tokens": 1},
    },
    "sglang": {
        "draft-model:n_max=5": {
            "--speculative-algorithm": "STANDALONE", "--speculative-draft-model-path": "d.gguf",
            "--speculative-num-steps": 5, "--speculative-eagle-topk": 1, "--speculative-num-draft-tokens": 6,
        },
        "eagle3:head=org/head:nodes=59": {
            "--speculative-algorithm": "EAGLE3", "--speculative-draft-model-path": "org/head",
            "--speculative-num-steps": 8, "--speculative-eagle-topk": 10, "--speculative-num-draft-tokens": 60,
        },
        "mtp": {
            "--speculative-algorithm": "EAGLE", "--speculative-num-steps": 1, "--speculative-eagle-topk": 1,
            "--speculative-num-draft-tokens": 2,
        },
    },
    "llama.cpp": {
        "ngram-mod,draft-model:n_max=5:n_min=1:p_min=0.4:top_n=10": {
            "--spec-type": "ngram-mod,draft-simple", "--spec-ngram-mod-n-match": 24, "--spec-ngram-mod-n-min": 48,
            "--spec-ngram-mod-n-max": 64, "-md": "d.gguf", "--spec-draft-n-max": 5, "--spec-draft-n-min": 1,
            "--spec-draft-p-min": 0.4,
        },
        "ngram-map-k4v:size_n=8:size_m=9:min_hits=2": {
            "--spec-type": "ngram-map-k4v", "--spec-ngram-map-k4v-size-n": 8, "--spec-ngram-map-k4v-size-m": 9,
            "--spec-ngram-map-k4v-min-hits": 2,
        },
        "ngram-cache:static=s.bin": {"--spec-type": "ngram-cache", "--lookup-cache-static": "s.bin"},
    },
}  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_written_whole(engine: str) -> None:
    for strategies, options in GOLDEN[engine].items():
        assert exported(engine, strategies) == {"options": options, "lost": []}, strategies


def lost(engine: str, strategies: Any, **options: Any) -> set[tuple[str | None, str | None]]:
    return {(one["strategy"], one["option"]) for one in exported(engine, strategies, **options)["lost"]}


def test_what_is_said_of_chains_models_and_calls() -> None:
    two = "prompt-lookup:match=earliest,draft-model:n_max=3"
    assert lost("vllm", two) == {("draft-model", None)}
    assert lost("llama.cpp", "draft-model:n_max=3,ngram-mod") == {(None, "order")}
    assert lost("llama.cpp", "draft-model:n_max=3,ngram-mod", order="upstream") == set()
    assert lost("llama.cpp", "draft-model:n_max=3,eagle3:head=h.gguf") == {("eagle3", None)}
    assert lost("llama.cpp", "draft-model:n_max=3,mtp") == {("mtp", "n_max")}
    assert lost("vllm", None) == {("draft-model", "n_max")}  # automatic
    assert lost("vllm", None, draft_length="given") == set()
    assert lost("vllm", "mtp", draft_length="auto") == {("mtp", "n_max")}
    assert lost("vllm", "mtp", length_policy="heuristic", exact=True) == {(None, "length_policy"), (None, "exact")}
    mapping = {"name": "eagle3", "head": "h", "config": {"rope_theta": 1}}
    assert lost("sglang", (mapping,)) == {("eagle3", "config")}
    mapping = {"name": "draft-model", "n_max": 3, "translate": True, "replacements": {"a": "b"}}
    assert lost("sglang", (mapping,)) == {("draft-model", "translate"), ("draft-model", "replacements")}
    pair = PairConfig("demo-target", "org/d", draft_revision="r", draft_dtype="float16")
    assert lost("vllm", "draft-model:n_max=3", pair=pair) == {(None, "target"), ("draft-model", "draft_dtype")}
    assert exported("vllm", "draft-model:n_max=3", pair)["options"]["revision"] == "r"
    assert lost("llama.cpp", "draft-model:n_max=3", pair=pair) == {
        (None, "target"), *(("draft-model", o) for o in ("draft", "draft_revision", "draft_dtype"))
    }  # fmt: skip


def test_the_acceptance_rule_is_written_where_it_matters() -> None:
    model, hot = "draft-model:n_max=3", {"temperature": 1.0}
    assert exported("vllm", model, **hot)["options"]["draft_sample_method"] == "probabilistic"
    assert exported("vllm", model, acceptance="block", **hot)["options"]["rejection_sample_method"] == "block"
    assert exported("llama.cpp", model, **hot)["options"]["--spec-draft-sampling"] == "probabilistic"
    assert exported("sglang", "mtp", **hot)["options"]["--speculative-use-rejection-sampling"] is True
    refused = {(None, "acceptance")}
    assert lost("sglang", model, **hot) == lost("vllm", model, acceptance="match", **hot) == refused
    assert lost("vllm", f"{model}:translate=intersection", **hot) == refused  # it drafts by argmax there
    assert lost("vllm", "mtp", acceptance="typical") == refused  # lossy: at any temperature
    assert lost("vllm", "prompt-lookup:match=earliest", acceptance="match", **hot) == set()  # no q: all the same


def test_the_command_line_and_its_exit_status(tmp_path: Path) -> None:
    whole = ("export", "--target", "t.gguf", "--strategies", "ngram-mod", "--engine", "llama.cpp", "--strict")
    done = run(*whole)
    command = "--spec-type ngram-mod --spec-ngram-mod-n-match 24 --spec-ngram-mod-n-min 48 --spec-ngram-mod-n-max 64"
    assert (done.exit_code, done.stdout.splitlines()[1:]) == (0, [f"llama-server -m t.gguf {command}"])
    done = run(*whole, "--engine", "vllm")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (1, "# lost: ngram-mod: no counterpart known")
    assert run(*whole[:-1], "--engine", "vllm").exit_code == 0
    out = run_json("export", "--config", str(ROOT / "configs" / "demo.yaml"), "--target", "org/t")
    command = out["vllm"]["command"]
    assert command[:4] == ["vllm", "serve", "org/t", "--speculative-config"]
    assert json.loads(command[4]) == out["vllm"]["options"]
    assert run_json("export", "--target", "t", "--strategies", "none")["sglang"]["options"] == {}


class Own:
    name = "own"

    def begin(self, row: int, prompt: Any) -> None: ...

    def draft(self, requests: Any) -> Any: ...

    def accept(self, row: int, n_accepted: int, is_other: bool) -> None: ...


def test_of_embedded_models_it_says_where_they_are() -> None:
    pair = PairConfig("demo-target", "demo-draft")
    for engine in ENGINES:
        made = exported(engine, "draft-model:n_max=3", pair)["lost"]
        why = {one["value"]: one["why"] for one in made if "embedded" in one["why"]}
        for model, place in (("demo-target", demo_models.target_path()), ("demo-draft", demo_models.draft_path())):
            [folder] = re.findall(r"the folder (\S+)", why[model])
            assert place == ROOT / folder
            assert ("GGUF" in why[model]) is (engine == "llama.cpp")
    head = exported("vllm", "eagle3:head=demo-head", pair)["lost"]
    assert any("specdec export-head demo-head --out DIR" in one["why"] for one in head)
