"""What each process of a tensor-parallel run does: `torchrun ... on_ranks.py TARGET DRAFT OUT`, to OUT/rank.json."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from specdec import SpecdecError, SpeculativeDecoder
from specdec.models.compile_layers import compiled_forward
from specdec.models.runner import Runner, Shapes

CALLS = {
    "plain": {"strategies": []},
    "chain": {"strategies": ["draft-model:n_max=3"]},
    "stops": {"strategies": ["draft-model:p_min=0.3", "prompt-lookup"], "temperature": 0.8},
    "tree": {"strategies": ["draft-model:tree=2x2"]},
    "match": {"strategies": ["draft-model"], "temperature": 0.9, "acceptance": "match", "seed": 4},
    "fresh seed": {"strategies": ["draft-model"], "temperature": 0.9, "seed": None},
    "kept": {"strategies": ["draft-model"], "keep_state": True},
    "kept again": {"strategies": ["draft-model"], "keep_state": True},
}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 7]]


def outcomes(decoder: SpeculativeDecoder) -> dict[str, list]:
    """Tokens, and accepted tokens, of every call."""
    made = {name: decoder.generate(PROMPTS, 16, **options) for name, options in CALLS.items()}
    return {name: [out.token_ids, out.stats.accepted_tokens] for name, out in made.items()}


def compilations(decoder: SpeculativeDecoder) -> tuple[int, int, list[int]]:
    """Compilations of a pass that is traced whole, its fused projections, and the likeliest token after each of its
    tokens."""
    runner, counter = Runner(decoder.target.model, fuse=True), CompileCounterWithBackend("aot_eager")
    runner.compiled = compiled_forward(runner.view.model, runner.config, "inductor", counter, parts=False)
    fed, shapes = torch.tensor(PROMPTS[:1], device=runner.device), Shapes.choose(runner.device, False, 16)
    out = runner.step(runner.pool.make(1, 16), shapes, fed, [0], [fed.shape[1]])
    assert runner.fusion is not None
    return counter.frame_count, len(runner.fusion), out.logits[0].argmax(dim=-1).tolist()


def main(target: str, draft: str, folder: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    decoder = SpeculativeDecoder.from_pretrained(target, draft, tp_plan="auto", dtype="float32")
    found: dict = outcomes(decoder)
    found["heads"] = decoder.target.pool.idle.layers[0].keys.shape[1]
    found["compilations"] = compilations(decoder)
    found["weights"] = decoder.generate(PROMPTS[0], 1).provenance["weights"]["target"]
    try:
        decoder.generate(PROMPTS[rank % 2], 4)
    except SpecdecError as error:
        found["refusal"] = str(error)
    if rank:  # a draft of its own is a fault that must not show: the first process's counts
        with torch.no_grad():
            decoder.draft.model.lm_head.weight.mul_(-1)
    found["other draft"] = decoder.generate(PROMPTS, 16, **CALLS["chain"]).token_ids
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
