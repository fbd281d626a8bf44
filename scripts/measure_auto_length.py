"""Measure automatic draft length on SmolLM2-135M in float32: every strategy against plain decoding, by category.

    python scripts/measure_auto_length.py run --budget 1500 --out results/auto_length_cpu.json  # the model, two cores
    python scripts/measure_auto_length.py simulate --out results/auto_length_simulated.json     # kept texts, one core
    python scripts/write_results.py

`run` measures the cost table once, keeps it in the result, and decodes every prompt plainly and with every strategy,
in turns whose order rotates; seconds are wall-clock time of whole calls, prefill included. Prompts go round the
categories, so that a run that is stopped (--budget seconds, or Ctrl-C) is as balanced as a whole one; started again
with the same --out it goes on. With --workers several processes share the prompts, on cores of their own (--threads
each); the cost table is measured before they start. `simulate` replays the strategies on the kept greedy texts of
Spec-Bench prompts and adds up the table's seconds, prefill left out; --costs takes the file of a measured table or of
a result of `run`, the default is the nominal table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import specdec
from specdec.drafters.costs import CostTable, nominal_costs
from specdec.files.texts import write_atomically
from specdec.research.bench import origin
from specdec.research.bootstrap import ratio_of_ratios
from specdec.research.models.smollm2 import fetch_folder
from specdec.research.offline.replay import load_texts, model_free_chain, replay, replayed_seconds
from specdec.research.prompts.datasets import load_prompts

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ROOT / "results" / "texts_smollm2.npz"
MODEL_FREE = ("prompt-lookup", "suffix", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
PLAIN = "plain"
NEW_TOKENS = 128
Row = dict[str, Any]  # id, category, methods: {name: {seconds, tokens, drafted, skipped, same}}


def decoder_of(costs: CostTable | None = None) -> specdec.SpeculativeDecoder:
    return specdec.SpeculativeDecoder.from_pretrained(str(fetch_folder()), dtype="float32", strategies=[], costs=costs)


# -- run -------------------------------------------------------------------------------------------------------------


def run(out: Path, strategies: Sequence[str], per_category: int, budget: float, workers: int, threads: int) -> None:
    """Measure with `workers` processes of `threads` cores each, and write the result after every prompt."""
    torch.set_num_threads(threads)
    result = _begun(out, strategies, workers)
    order = {prompt.id: i for i, prompt in enumerate(_in_turns(10**6))}
    done = {row["id"] for row in result["rows"]}
    prompts = [prompt for prompt in _in_turns(per_category) if prompt.id not in done]
    spawn = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []  # not on every system
    groups = spawn.SimpleQueue()
    for worker in range(workers):
        groups.put(set(cores[worker * threads : (worker + 1) * threads]) or set(cores))
    deadline = time.time() + budget
    turns = [(prompt, (PLAIN, *strategies), i + len(done), deadline) for i, prompt in enumerate(prompts)]
    with spawn.Pool(workers, _begin_worker, (groups, threads, result["costs"])) as pool:
        for row in pool.imap_unordered(_turn, turns):
            if row is None:
                continue
            result["rows"] = sorted([*result["rows"], row], key=lambda row: order[row["id"]])
            result["summary"] = summary(result["rows"], strategies)
            write_atomically(out, json.dumps(result, indent=1) + "\n")
            seconds = {name: round(m["seconds"], 2) for name, m in row["methods"].items()}
            print(f"{len(result['rows'])} {row['category']} {seconds}", flush=True)


_worker: list[specdec.SpeculativeDecoder] = []  # a worker's decoder, loaded once


def _begin_worker(groups: Any, threads: int, costs: dict[str, Any]) -> None:
    """Stay on cores of one's own, so that workers share the memory but no core."""
    if mine := groups.get():
        os.sched_setaffinity(0, mine)
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", message="ngram-mod")
    decoder = decoder_of(CostTable.from_dict(costs))
    decoder.generate([1] * 64, 8, strategies=[], ignore_eos=True)  # warm up
    _worker.append(decoder)


def _turn(given: tuple[Any, Sequence[str], int, float]) -> Row | None:
    prompt, methods, turn, deadline = given
    return None if time.time() > deadline else _measured(_worker[0], prompt, methods, turn)


def _begun(out: Path, strategies: Sequence[str], workers: int) -> dict[str, Any]:
    """The result to go on with: that of the file, if it is of the same strategies and machine, else a new one with a
    cost table."""
    began = origin()
    if out.is_file():
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        for what, mine in (("strategies", list(strategies)), ("machine", began["machine"])):
            if found[what] != mine:
                raise SystemExit(f"{out} is of the {what} {found[what]}: give another --out, or remove it")
        return found
    costs = specdec.measure_costs(decoder_of(), progress=lambda what: print(f"costs: {what}", flush=True))
    return {
        "benchmark": "automatic draft length", "kind": "run", **began, "new_tokens": NEW_TOKENS, "workers": workers,
        "strategies": list(strategies), "costs": costs.to_dict(), "rows": [],
    }  # fmt: skip


def _in_turns(per_category: int) -> list[Any]:
    """The first prompts of each category, one of each category after the other."""
    by_category: dict[str, list[Any]] = {}
    for prompt in load_prompts("spec-bench"):
        by_category.setdefault(prompt.category, []).append(prompt)
    return [rows[i] for i in range(per_category) for rows in by_category.values() if i < len(rows)]


def _measured(decoder: specdec.SpeculativeDecoder, prompt: Any, methods: Sequence[str], turn: int) -> Row:
    room = decoder.target.context - NEW_TOKENS
    tokenizer: Any = decoder.tokenizer
    chat = [{"role": "user", "content": prompt.text}]
    ids = [int(t) for t in tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)][:room]
    figures: dict[str, Any] = {}
    outputs = {}
    shift = turn % len(methods)
    for name in (*methods[shift:], *methods[:shift]):
        started = time.perf_counter()
        strategies = [] if name == PLAIN else [name]
        out = decoder.generate(ids, NEW_TOKENS, strategies=strategies, draft_length="auto")
        seconds = time.perf_counter() - started
        outputs[name] = out.token_ids
        skipped = sum(c.n_skipped for c in out.stats.counters.values())
        figures[name] = {
            "seconds": seconds, "tokens": out.stats.emitted_tokens, "rounds": out.stats.rounds,
            "draft_tokens": out.stats.draft_tokens, "skipped": skipped,
        }  # fmt: skip
    for name in methods:
        figures[name]["same"] = outputs[name] == outputs[PLAIN]
    return {"id": prompt.id, "category": prompt.category, "prompt_tokens": len(ids), "methods": figures}


# -- simulate --------------------------------------------------------------------------------------------------------


def simulate(out: Path, strategies: Sequence[str], costs: CostTable, limit: int) -> None:
    """Replay on the kept texts; `limit` > 0: at most so many texts a category."""
    rows: list[Row] = []
    seen: dict[str, int] = {}
    for text in load_texts(TEXTS):
        seen[text.category] = seen.get(text.category, 0) + 1
        if len(text.output) == 0 or (limit and seen[text.category] > limit):
            continue
        starts = range(len(text.prompt) - 1, len(text.prompt) + len(text.output) - 1)
        plain = sum(costs.seconds("target", 1, at, 1) + costs.round for at in starts)
        figures: dict[str, Any] = {PLAIN: {"seconds": plain, "tokens": len(text.output)}}
        for name in strategies:
            chain = model_free_chain([name], len(text.prompt) + len(text.output), costs)
            records = replay(chain, text.prompt, text.output)
            seconds = replayed_seconds(chain, text.prompt, records, costs)
            figures[name] = {"seconds": seconds, "tokens": len(text.output), "rounds": len(records)}
        rows.append({"id": text.id, "category": text.category, "methods": figures})
        if len(rows) % 40 == 0:
            print(len(rows), flush=True)
    result = {
        "benchmark": "automatic draft length", "kind": "simulated", **origin(), "new_tokens": NEW_TOKENS,
        "strategies": list(strategies), "costs": costs.to_dict(), "summary": summary(rows, strategies),
    }  # fmt: skip
    write_atomically(out, json.dumps(result, indent=1) + "\n")


def summary(rows: Sequence[Row], strategies: Sequence[str]) -> dict[str, Any]:
    """By category and over all: prompts, and every strategy's speed over plain's with its 95 % interval, from a paired
    bootstrap over the prompts."""
    groups = {c: [r for r in rows if r["category"] == c] for c in dict.fromkeys(r["category"] for r in rows)}
    made = {}
    for category, group in {**groups, "all": list(rows)}.items():
        plain = _column(group, PLAIN)
        speeds = {name: ratio_of_ratios(_column(group, name), plain).to_dict() for name in strategies}
        made[category] = {"prompts": len(group), "speedups": speeds}
    return made


def _column(rows: Sequence[Row], method: str) -> tuple[list[float], list[float]]:
    figures = [r["methods"][method] for r in rows]
    return [f["tokens"] for f in figures], [f["seconds"] for f in figures]


def _costs_of(path: Path | None) -> CostTable:
    if path is None:
        return nominal_costs(decoder_of().target)
    data = json.loads(path.read_text(encoding="utf-8"))
    return CostTable.from_dict(data.get("costs", data), str(path))


def main() -> None:
    """Measure or simulate, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "simulate"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategies", help=f"comma-separated; default: all of {', '.join(MODEL_FREE)}")
    parser.add_argument("--prompts", type=int, default=None, help="a category; default: 3 to run, all to simulate")
    parser.add_argument("--budget", type=float, default=1e9, help="run: seconds after which no new prompt is begun")
    parser.add_argument("--workers", type=int, default=1, help="run: processes that share the prompts")
    parser.add_argument("--threads", type=int, default=2, help="run: cores a process keeps to")
    parser.add_argument("--costs", type=Path, help="simulate: a measured table")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="ngram-mod")
    strategies = tuple((arguments.strategies or ",".join(MODEL_FREE)).split(","))
    if arguments.what == "run":
        per_category = 3 if arguments.prompts is None else arguments.prompts
        run(arguments.out, strategies, per_category, arguments.budget, arguments.workers, arguments.threads)
    else:
        simulate(arguments.out, strategies, _costs_of(arguments.costs), arguments.prompts or 0)


if __name__ == "__main__":
    main()
