"""Record what fixed runs give, and compare a later version with the record: for changes that must change nothing.

    python scripts/record_runs.py --out before.json
    python scripts/record_runs.py --compare before.json

Runs are the strategies that need nothing but the embedded models, some chains, lossless rules, batches of 1 and 3,
greedy and sampled, and some commands. Recorded are token ids, finish reasons and every figure but times and what names
the code. The comparison takes minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import specdec
from specdec.research.prompts.datasets import DATASETS

PROMPTS = ["def fibonacci(n):\n", "import os\nimport sys\nimport os\n", "class Stack:\n    def push(self, item):\n"]
CHAINS: dict[str, list[Any]] = {
    "plain": [],
    **{name: [name] for name in specdec.STRATEGIES if name not in ("rest", "eagle3", "dflash", "mtp")},
    "rest": [f"rest:corpus={DATASETS['humaneval']}:nodes=12"],
    "eagle3": ["eagle3:head=demo-head"],
    "fixed": [specdec.DraftModel(n_max=4)],
    "p_min": [specdec.DraftModel(n_max=6, p_min=0.4, n_min=1)],
    "branches": [specdec.DraftModel(n_max=4, branches=3)],
    "tree": [specdec.DraftModel(tree=[3, 2, 1])],
    "long": [specdec.PromptLookup(n_max=24)],
    "chain": ["ngram-simple", "suffix", specdec.DraftModel(n_max=3)],
}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 5}
PENALTIES = {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3}
COMMANDS = (
    ("demo", "--json", "--max-new-tokens", "24", "--repeats", "1"),
    ("generate", "demo-target", "--prompt", "def f(x):", "--max-new-tokens", "16", "--json"),
    ("check", "demo-target", "--draft", "demo-draft", "--json"),
)
VOLATILE = ("time", "date", "seconds", "speed", "tok", "commit", "versions", "python", "device", "memory", "machine")
KEPT = ("token_ids", "tokens_per_round", "draft_tokens", "accepted_tokens", "generated_tokens", "emitted_tokens")


def steady(value: Any) -> Any:
    """A result without what differs from run to run or names the code."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k in KEPT or not any(word in k for word in VOLATILE)}
        return {k: steady(v) for k, v in kept.items() if not k.startswith("t_")}
    return [steady(v) for v in value] if isinstance(value, list) else value


def library_runs() -> Iterator[tuple[str, Any]]:
    """Name and result of every run through the library."""
    dec = specdec.SpeculativeDecoder.from_pretrained("demo-target", draft="demo-draft")
    settings = [("greedy", "leviathan", {})]
    settings += [("sampled", rule, SAMPLED) for rule in ("leviathan", "match", "coupled")]
    settings += [("penalties", "leviathan", PENALTIES), ("logprobs", "match", {**SAMPLED, "output_logprobs": 2})]
    for name, chain in CHAINS.items():
        for kind, rule, options in settings:
            for batch in (1, 3):
                out = dec.generate(
                    PROMPTS, 20, strategies=chain, acceptance=rule, batch_size=batch, draft_length="given", **options
                )
                result = {"token_ids": out.token_ids, "finish_reasons": out.finish_reasons, **out.stats.to_dict()}
                result["top_logprobs"] = out.top_logprobs
                yield f"{name} / {kind} / {rule} / batch {batch}", steady(result)


def command_runs() -> Iterator[tuple[str, Any]]:
    """Name and result of every run of the command line."""
    for arguments in COMMANDS:
        done = subprocess.run(
            [sys.executable, "-m", "specdec", *arguments], capture_output=True, text=True, check=False
        )
        yield " ".join(arguments), {"status": done.returncode, "result": steady(json.loads(done.stdout or "null"))}


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Where two results differ, one line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            yield from differences(before.get(key), after.get(key), f"{where}.{key}")
    elif before != after:
        yield f"{where}: {str(before)[:80]} -> {str(after)[:80]}"


def main() -> int:
    """Run everything; write the record, or compare with one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path)
    arguments = parser.parse_args()
    runs = json.loads(json.dumps(dict([*library_runs(), *command_runs()])))  # as a record has them: tuples are lists
    if arguments.out:
        arguments.out.write_text(json.dumps(runs) + "\n", encoding="utf-8")
    wrong: list[str] = []
    if arguments.compare:
        before = json.loads(arguments.compare.read_text(encoding="utf-8"))
        wrong = [line for name in before for line in differences(before[name], runs.get(name), name)]
    print(*wrong, f"{len(runs)} runs, {len(wrong)} differences", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
