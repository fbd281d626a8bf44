"""What a result says of the models that made it."""

from __future__ import annotations

import json
from pathlib import Path

from specdec import SpeculativeDecoder, load_pair
from specdec.demo_models import target_path
from specdec.research.ablation.config import AblationConfig
from specdec.research.ablation.runner import run_ablation
from specdec.research.ablation.store import read_checked
from specdec.research.traces.trace import Trace, record
from tests.helpers.tiny import tiny_model

NO_HUB = {"revision": None, "commit": None, "class": "LlamaForCausalLM"}


def test_a_loaded_pair_is_named_as_it_was_asked_for(tmp_path: Path) -> None:
    link = tmp_path / "mine"
    link.symlink_to(target_path())
    decoder = SpeculativeDecoder.from_pretrained(link, "demo-draft", check=False, revision="main")
    named = {"target": {**NO_HUB, "name": str(link), "revision": "main"}, "draft": {**NO_HUB, "name": "demo-draft"}}
    made = record(decoder, "a = 1", 2)
    assert made.provenance["models"] == named
    made.save(tmp_path / "trace")
    assert Trace.load(tmp_path / "trace").provenance["models"] == named


def test_modules_of_a_loaded_pair_keep_their_names() -> None:
    pair = load_pair("demo-target")
    decoder = SpeculativeDecoder(pair.target, tokenizer=pair.tokenizer, check=False)
    assert decoder.generate("a", 1).provenance["models"] == {"target": {**NO_HUB, "name": "demo-target"}}


def test_a_module_in_hand_is_named_by_what_it_says_of_itself() -> None:
    model, nameless = tiny_model("llama"), tiny_model("qwen2")
    model.config._name_or_path, model.config._commit_hash = "owner/name", "c0ffee"
    model.name_or_path = "owner/name"
    made = SpeculativeDecoder(model, nameless, check=False).generate([1, 2], 1).provenance["models"]
    assert made["target"] == {**NO_HUB, "name": "owner/name", "commit": "c0ffee"}
    assert made["draft"] == {**NO_HUB, "name": None, "class": "Qwen2ForCausalLM"}


def test_an_ablation_names_each_pair_once_in_its_description(tmp_path: Path) -> None:
    config = AblationConfig(
        pairs={"demo": {"target": "demo-target", "draft": "demo-draft"}}, strategies={"draft": ["draft-model:n_max=2"]},
        prompts=("a = 1\n",), generation={"max_new_tokens": 2}, plain=False, warm_up_tokens=0,
    )  # fmt: skip
    for _ in range(2):
        run_ablation(config, tmp_path, retry_errors=True)
    [named] = read_checked(tmp_path)["models"]["demo"]
    [line] = [json.loads(line) for line in (tmp_path / "journal-00000.jsonl").open() if '"row"' in line]
    assert named["target"] == {**NO_HUB, "name": "demo-target", "weights": line["weights"]["target"]}
    assert named["draft"] == {**NO_HUB, "name": "demo-draft", "weights": line["weights"]["draft"]}
