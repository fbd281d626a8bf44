"""What distillation does to the acceptance of a draft that does not fit its target, on held-out prompts.

    python scripts/measure_distillation.py --out results/distillation.json     # about six minutes of one CPU core

The draft is the embedded target's own first and last layer, which were never meant to follow one another. It is
distilled as by `specdec train draft`, on the target's answers to HumanEval's prompts, once a seed. Before and after,
held-out prompts are decoded at temperature 1; acceptance is that of a tested token, and intervals are over prompts.
"""

import argparse
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from specdec import DraftModel, SpeculativeDecoder
from specdec.files.compact_json import write_json
from specdec.models.loading import LoadedPair
from specdec.research.bench import origin
from specdec.research.bootstrap import difference, ratio
from specdec.stats import Tally
from specdec.training.answers import Plan, read_answers
from specdec.training.config import DraftStart, Optimiser, TrainingConfig, TrainingData
from specdec.training.draft import pruned
from specdec.training.run import run_training

Counts = tuple[list[float], list[float]]  # of each prompt: accepted, and tested tokens


def config_of(folder: Path, seed: int, steps: int) -> TrainingConfig:
    """One run. The answers are those of one data seed, so that they are written once."""
    data = TrainingData(dataset="humaneval", longest=64, max_new_tokens=96, batch_size=64, held_out=24)
    return TrainingConfig(
        target="demo-target",
        out=str(folder / str(seed)),
        data=data,
        draft=DraftStart(layers=(0, 23)),
        optimiser=Optimiser(lr=0.002, muon=0.02, warm_up=10),
        steps=steps,
        sequence_length=160,
        loss="acceptance",
        eval_every=steps,
        eval_tokens=0,
        seed=seed,
    )


def decoded(pair: LoadedPair, draft: Any, prompts: list[list[int]], seed: int) -> Counts:
    """Accepted and tested tokens of each prompt."""
    decoder = SpeculativeDecoder(pair.target, draft, pair.tokenizer, check=False)
    out = decoder.generate(
        prompts, 48, strategies=[DraftModel(n_max=4)], temperature=1.0, seed=seed, batch_size=len(prompts)
    )
    rows = [Tally.of(records) for records in out.stats.rows]
    return [float(row.accepted_tokens) for row in rows], [float(row.tested_tokens) for row in rows]


def measured(folder: Path, seed: int, steps: int) -> tuple[Counts, Counts, dict[str, Any]]:
    """(before, after, the run's entry) of one seed."""
    config, answers = config_of(folder, seed, steps), "answers-0-of-1.jsonl"
    first = config_of(folder, 0, steps).folder / answers
    if first.exists() and not (config.folder / answers).exists():
        config.folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(first, config.folder / answers)
    log = run_training(config, "draft", lambda words: None)
    pair = LoadedPair.load(config.target, str(config.folder / "draft"), device="cpu", dtype="float32")
    found = read_answers(Plan.make(config, pair.target, pair.tokenizer), config)
    assert found is not None
    prompts = [list(a.ids[: a.start]) for a in found[1]]
    before = decoded(pair, pruned(pair.target, (0, 23)), prompts, seed)
    after = decoded(pair, pair.draft, prompts, seed)
    forced = {"before": log[0]["teacher_forced"][0], "after": log[-1]["teacher_forced"][0]}
    entry = {
        "seed": seed, "before": ratio(*before).to_dict(), "after": ratio(*after).to_dict(),
        "difference": difference(after, before).to_dict(), "teacher_forced": forced,
    }  # fmt: skip
    print(entry, flush=True)
    return before, after, entry


def pooled(parts: list[Counts]) -> Counts:
    """All seeds of each prompt together: the prompt is what intervals are over."""
    accepted, tested = zip(*parts, strict=True)
    return [sum(row) for row in zip(*accepted, strict=True)], [sum(row) for row in zip(*tested, strict=True)]


def main() -> None:
    """Train and decode, once a seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/distillation.json"))
    parser.add_argument("--folder", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = [measured(args.folder, seed, args.steps) for seed in range(args.seeds)]
    before, after = (pooled([run[i] for run in runs]) for i in (0, 1))
    config = asdict(replace(config_of(args.folder, 0, args.steps), out=""))
    write_json(
        args.out,
        {
            "what": "acceptance of a tested token, before and after distillation",
            **origin(),
            "config": config,
            "seeds": [entry for _, _, entry in runs],
            "before": ratio(*before).to_dict(),
            "after": ratio(*after).to_dict(),
            "difference": difference(after, before).to_dict(),
        },
    )


if __name__ == "__main__":
    main()
