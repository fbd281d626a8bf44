"""The table feature x mode of docs/speed.md: what of a round is recorded, by counts of a short call.

    python -m tests.device.test_recorded_features    # writes the table

A recorder that runs a function again stands for CUDA graphs, so the counts need no GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec
from specdec.decoding.acceptance import MATCH, AcceptanceRule
from specdec.models.compile_layers import compiled_forward
from specdec.models.runner import Runner, Shapes
from specdec.research.traces.trace import record
from tests.helpers.dfa import DFA
from tests.helpers.eagle3 import random_head
from tests.helpers.playing import looping, quoting_ids, weaker
from tests.helpers.recording import Rerun, replayed
from tests.helpers.tiny import tiny_model
from tests.helpers.tokens import byte_level

DOCUMENT = Path(__file__).parents[2] / "docs" / "speed.md"
START, END = "<!-- features:start -->", "<!-- features:end -->"
VOCAB = 300
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPTS = [quoting_ids(14, 1, 3, VOCAB), [5, 6]]
CHAIN = ["draft-model:n_max=3"]
RULE = AcceptanceRule("own", "argmax", MATCH.accepts, MATCH.next_token)
HEAD = {
    "vocab_size": VOCAB,
    "draft_vocab_size": VOCAB,
    "target_hidden_size": 16,
    "hidden_size": 16,
    "layer_ids": (0, 1),
    "observed": 2,
}

# feature -> its options; without strategies: the draft model with n_max=3
FEATURES: dict[str, dict[str, Any]] = {
    "plain decoding": {"strategies": []},
    "draft-model, `n_max` given": {},
    "draft-model, automatic length": {"strategies": ["draft-model"], "draft_length": "auto"},
    "`p_min`": {"strategies": ["draft-model:n_max=4:p_min=0.3"]},
    "`branches`": {"strategies": [specdec.DraftModel(n_max=5, branches=4)]},
    "`tree`, a plan": {"strategies": ["draft-model:tree=2x2"]},
    "`translate`": {"strategies": ["draft-model:n_max=3:translate=true"]},
    "lookup: prompt-lookup, ngram-*, suffix, rest": {"strategies": ["prompt-lookup"]},
    "recycling": {"strategies": ["recycling:nodes=8"]},
    "lookahead": {"strategies": ["lookahead"]},
    "early-exit": {"strategies": ["early-exit:layers=1:n_max=2"]},
    "eagle3, chains": {"strategies": [specdec.Eagle3(random_head(**HEAD), n_max=3)]},
    "eagle3, `nodes`": {"strategies": [specdec.Eagle3(random_head(**HEAD), nodes=6, top_k=2, depth=2)]},
    "eagle3, `tree`": {"strategies": [specdec.Eagle3(random_head(**HEAD), tree="2x2")]},
    "a chain of strategies": {"strategies": ["prompt-lookup", *CHAIN]},
    "leviathan": {"temperature": 0.8},
    "block": {"temperature": 0.8, "acceptance": "block"},
    "match": {"temperature": 0.8, "acceptance": "match"},
    "coupled": {"temperature": 0.8, "acceptance": "coupled"},
    "typical, top, near": {"temperature": 0.8, "acceptance": "typical"},
    "a rule of one's own, not `recordable`": {"acceptance": RULE},
    "`top_k`, `top_p`, `min_p`, `typical_p`": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "typical_p": 0.9},
    "`eta_cutoff`": {"temperature": 0.8, "eta_cutoff": 0.01},
    "`repetition_penalty`": {"repetition_penalty": 1.2},
    "`presence_penalty`, `frequency_penalty`": {"presence_penalty": 0.2, "frequency_penalty": 0.1},
    "`no_repeat_ngram_size`": {"no_repeat_ngram_size": 3},
    "`bad_words_ids`, `sequence_bias` (logit bias)": {"bad_words_ids": [[3]], "sequence_bias": [[[4, 5], 1.0]]},
    "`min_length`, `min_new_tokens`": {"min_length": 4, "min_new_tokens": 2},
    "`suppress_tokens`, `begin_suppress_tokens`": {"suppress_tokens": [3], "begin_suppress_tokens": [4]},
    "`forced_bos_token_id`, `forced_eos_token_id`": {"forced_bos_token_id": 3, "forced_eos_token_id": 4},
    "`exponential_decay_length_penalty`": {"exponential_decay_length_penalty": (1, 1.1)},
    "a penalty with trees": {"strategies": ["draft-model:tree=2x2"], "repetition_penalty": 1.2},
    "a penalty with eagle3, `tree`": {
        "strategies": [specdec.Eagle3(random_head(**HEAD), tree="2x2")], "repetition_penalty": 1.2, "temperature": 0.8,
    },
    "`logits_processor`: a function of one's own": {"logits_processor": [lambda ids, scores: scores + 0.0]},
    "constraints, `prefix_allowed_tokens_fn`": {"logits_processor": [DFA({0: dict.fromkeys(range(VOCAB), 0)})]},
    "`output_logprobs`": {"output_logprobs": True},
    "traces": {"trace": True},
    "a batch": {"batch_size": 2, "prompts": 2},
    "`exact`": {"exact": True},
}  # fmt: skip


def decoder(mode: str) -> specdec.SpeculativeDecoder:
    """A pair in a mode; compiled by a backend that only traces."""
    target = looping(tiny_model("llama", vocab=VOCAB, num_hidden_layers=2, **SIZES))
    pair = target, weaker(target, 0.1)
    made = specdec.SpeculativeDecoder(*pair, byte_level(VOCAB), check=False)
    made.target, made.draft = (Runner(m, recorder=None if mode == "off" else Rerun(), fuse=mode == "max") for m in pair)
    for runner in (made.target, made.draft) if mode in ("inductor", "max") else ():
        runner.mode, runner.compiled = mode, compiled_forward(runner.view.model, runner.config, mode, "eager")
    return made


def outcome(dec: specdec.SpeculativeDecoder, feature: str) -> tuple[str, Any]:
    """What of the passes and of the drafts is recorded, and the text."""
    options = {"max_new_tokens": 5, "eos_token_id": 299, "batch_size": 1, "seed": 3, "strategies": CHAIN}
    options |= {"draft_length": "given"} | FEATURES[feature]
    prompts, traced = PROMPTS[: options.pop("prompts", 1)], options.pop("trace", False)
    runners = [r for r in (dec.target, dec.draft) if r.graphs is not None]
    before = [r.graphs.recorder.replays for r in runners]
    with replayed() as counts:
        out: Any = record(dec, prompts, **options) if traced else dec.generate(prompts, **options)
    stats = out.stats if traced else out.stats.to_dict()
    text = [r.tokens for r in out.rounds] if traced else out.token_ids
    after = [r.graphs.recorder.replays for r in runners]
    passes, drafts = (b - a for a, b in zip(before, after, strict=True)) if runners else (0, 0)
    verify = "recorded" if counts["Verified"] == stats["verify_passes"] else "passes alone" if passes else "eager"
    if not stats["draft_passes"]:
        return verify, text
    whole = sum(counts[name] for name in ("Proposal", "Tree", "PlannedTrees", "BranchedTrees"))
    calls = sum(c["n_call_draft"] for name, c in stats["strategies"].items() if name != "prompt-lookup")
    alone = drafts or passes > counts["Verified"] + whole
    draft = "recorded" if whole >= calls and whole else "passes alone" if alone else "eager"
    return verify if draft == verify else f"verify {verify}, draft {draft}", text


def row(feature: str, cells: list[str]) -> str:
    return f"| {feature} | {' | '.join(cells)} |"


def documented() -> dict[str, str]:
    """The rows of the document by feature."""
    block = re.search(f"{START}\n(.*){END}", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    return {line.split(" | ")[0][2:]: line for line in block[1].splitlines() if line.startswith("| ")}


@pytest.fixture(scope="module", autouse=True)
def shapes_of_a_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        of_a_gpu(patch)
        yield


def of_a_gpu(patch: pytest.MonkeyPatch) -> None:
    choose = Shapes.choose
    patch.setattr(Shapes, "choose", staticmethod(lambda device, *shape: choose(torch.device("cuda"), *shape)))


@pytest.fixture(scope="module")
def recorded(shapes_of_a_gpu: None) -> specdec.SpeculativeDecoder:
    return decoder("graph")


@pytest.fixture(scope="module")
def eager(shapes_of_a_gpu: None) -> specdec.SpeculativeDecoder:
    return decoder("off")


@pytest.mark.fast(10)
@pytest.mark.parametrize("feature", FEATURES)
def test_the_document_says_what_is_recorded_and_the_text_is_eager(
    feature: str, recorded: specdec.SpeculativeDecoder, eager: specdec.SpeculativeDecoder
) -> None:
    (found, text), (without, expected) = outcome(recorded, feature), outcome(eager, feature)
    assert documented()[feature] == row(feature, ["eager", *[found] * 3])
    assert (without, text) == ("eager", expected)


def test_the_document_names_every_feature_and_no_other() -> None:
    assert list(documented())[1:] == list(FEATURES)
    need_folders = {"dflash", "mtp"}
    names = " ".join(FEATURES).replace("ngram-*", "ngram-simple ngram-map-k ngram-map-k4v ngram-mod ngram-cache")
    assert {name for name in specdec.STRATEGIES if name not in names} == need_folders


COMPILED = (
    "draft-model, `n_max` given", "`branches`", "`tree`, a plan", "early-exit", "eagle3, chains", "leviathan",
    "`repetition_penalty`", "a penalty with trees", "`output_logprobs`",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("mode", ["inductor", "max"])
def test_compiled_modes_record_the_same_and_give_the_same_text(mode: str, recorded: specdec.SpeculativeDecoder) -> None:
    dec = decoder(mode)
    for feature in COMPILED if mode == "max" else COMPILED[:3]:  # inductor is max without fused projections
        assert outcome(dec, feature) == outcome(recorded, feature), feature


def main() -> None:
    """Write the table."""
    with pytest.MonkeyPatch.context() as patch:
        of_a_gpu(patch)
        dec = decoder("graph")
        rows = [row(feature, ["eager", *[outcome(dec, feature)[0]] * 3]) for feature in FEATURES]
    table = "\n".join(["| feature | off | graph | inductor | max |", "|---|---|---|---|---|", *rows])
    text = DOCUMENT.read_text(encoding="utf-8")
    new = re.sub(f"{START}\n.*{END}", lambda _: f"{START}\n{table}\n{END}", text, flags=re.DOTALL)
    DOCUMENT.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
