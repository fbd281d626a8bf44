"""Measure automatic draft length on SmolLM2-135M in float32: every strategy against plain decoding, by category.

    python scripts/measure_auto_length.py run --budget 1500 --out results/auto_length_cpu.json  # the model, two cores
    python scripts/measure_auto_length.py simulate --out results/auto_length_simulated.json     # kept texts, one core
    python scripts/write_results.py

`run` measures the cost table once and decodes every prompt plainly and with every strategy, in turns whose order
rotates; seconds are wall-clock time of whole calls, prefill included. Prompts go round the categories, so that a run
that is stopped (--budget seconds, or Ctrl-C) is as balanced as a whole one. The cost table and a line for each prompt
are kept in --raw; started again with the same file, the run goes on. With --workers several processes share the
prompts, on cores of their own (--threads each). `simulate` replays the strategies on the kept greedy texts of
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
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import specdec
from specdec.drafters.chain import Chain
from specdec.drafters.costs import CostTable, nominal_costs
from specdec.files.compact_json import write_json
from specdec.research.bench import origin
from specdec.research.bootstrap import ratio_of_ratios
from specdec.research.models.smollm2 import fetch_folder
from specdec.research.offline.replay import load_texts, model_free_chain, replay
from specdec.research.prompts.datasets import encode_texts, load_prompts
from specdec.stats import RoundRecord

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ROOT / "results" / "texts_smollm2.npz"
MODEL_FREE = ("prompt-lookup", "suffix", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
PLAIN = "plain"
NEW_TOKENS = 128
Row = dict[str, Any]  # id, category, methods: {name: {seconds, tokens, ...}}


def decoder_of(costs: CostTable | None = None) -> specdec.SpeculativeDecoder:
    return specdec.SpeculativeDecoder.from_pretrained(str(fetch_folder()), dtype="float32", strategies=[], costs=costs)


# -- run -------------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace, strategies: Sequence[str]) -> Iterator[Row]:
    """Measure with several processes. Yields the result after every prompt."""
    workers, threads = arguments.workers, arguments.threads
    torch.set_num_threads(threads)
    head, rows = begun(arguments.raw, strategies, workers)
    order, done = {prompt.id: i for i, prompt in enumerate(in_turns(10**6))}, {row["id"] for row in rows}
    prompts = [prompt for prompt in in_turns(arguments.prompts or 3) if prompt.id not in done]
    if arguments.category:
        prompts = [prompt for prompt in prompts if prompt.category == arguments.category]
    spawn = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []  # not on every system
    groups = spawn.SimpleQueue()
    for worker in range(workers):
        groups.put(set(cores[worker * threads : (worker + 1) * threads]) or set(cores))
    deadline = time.time() + arguments.budget
    turns = [(prompt, (PLAIN, *strategies), i + len(done), deadline) for i, prompt in enumerate(prompts)]
    with (
        spawn.Pool(workers, begin_worker, (groups, threads, head["costs"])) as pool,
        arguments.raw.open("a", encoding="utf-8") as file,
    ):
        for row in filter(None, pool.imap_unordered(measured, turns)):
            rows = sorted([*rows, row], key=lambda row: order[row["id"]])
            file.write(json.dumps(row) + "\n")
            file.flush()
            yield {**head, "summary": summary(rows, strategies)}


def begun(raw: Path, strategies: Sequence[str], workers: int) -> tuple[Row, list[Row]]:
    """What the result says beside its figures, and the rows that are measured: from the raw file where there is one."""
    head: Row = {**about("run"), "workers": workers, "strategies": list(strategies)}
    if raw.is_file():
        found, *rows = map(json.loads, raw.read_text(encoding="utf-8").splitlines())
        for what in ("strategies", "machine"):
            if found[what] != head[what]:
                raise SystemExit(f"{raw} is of the {what} {found[what]}: give another --raw, or remove it")
        return found, rows
    head["costs"] = specdec.measure_costs(decoder_of(), progress=lambda what: print(f"costs: {what}")).to_dict()
    raw.write_text(json.dumps(head) + "\n", encoding="utf-8")
    return head, []


def in_turns(per_category: int) -> list[Any]:
    """The first prompts of each category, one of each category after the other."""
    prompts, seen = load_prompts("spec-bench"), Counter[str]()
    place = []
    for prompt in prompts:
        place.append(seen[prompt.category])
        seen[prompt.category] += 1
    order = sorted(range(len(prompts)), key=place.__getitem__)  # keeps the file's order among equals
    return [prompts[i] for i in order if place[i] < per_category]


_worker: list[specdec.SpeculativeDecoder] = []  # a worker's decoder, loaded once


def begin_worker(groups: Any, threads: int, costs: dict[str, Any]) -> None:
    """Stay on cores of one's own, so that workers share the memory but no core."""
    if mine := groups.get():
        os.sched_setaffinity(0, mine)
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", message="ngram-mod")
    decoder = decoder_of(CostTable.from_dict(costs))
    decoder.generate([1] * 64, 8, strategies=[], ignore_eos=True)  # warm up
    _worker.append(decoder)


def measured(given: tuple[Any, Sequence[str], int, float]) -> Row | None:
    """One prompt by every method; None after the deadline."""
    prompt, methods, turn, deadline = given
    if time.time() > deadline:
        return None
    decoder, shift = _worker[0], turn % len(methods)
    [ids] = encode_texts([prompt], decoder.tokenizer, decoder.target.model, decoder.target.context // 2)
    figures: dict[str, Any] = {}
    outputs = {}
    for name in (*methods[shift:], *methods[:shift]):
        started = time.perf_counter()
        out = decoder.generate(ids, NEW_TOKENS, strategies=[] if name == PLAIN else [name], draft_length="auto")
        seconds, stats = time.perf_counter() - started, out.stats
        outputs[name] = out.token_ids
        skipped = sum(c.n_skipped for c in stats.counters.values())
        counts = {"rounds": stats.rounds, "draft_tokens": stats.draft_tokens, "skipped": skipped}
        figures[name] = {"seconds": seconds, "tokens": stats.emitted_tokens, **counts}
    for name in methods:
        figures[name]["same"] = outputs[name] == outputs[PLAIN]
    print(prompt.category, {name: round(m["seconds"], 2) for name, m in figures.items()}, flush=True)
    return {"id": prompt.id, "category": prompt.category, "prompt_tokens": len(ids), "methods": figures}


# -- simulate --------------------------------------------------------------------------------------------------------


def simulate(strategies: Sequence[str], costs: CostTable, limit: int) -> Row:
    """Replay on the kept texts; `limit` > 0: at most so many texts a category."""
    rows: list[Row] = []
    seen = Counter[str]()
    for text in load_texts(TEXTS):
        seen[text.category] += 1
        if len(text.output) == 0 or (limit and seen[text.category] > limit):
            continue
        starts = range(len(text.prompt) - 1, len(text.prompt) + len(text.output) - 1)
        plain = sum(costs.seconds("target", 1, at, 1) + costs.round for at in starts)
        figures: dict[str, Any] = {PLAIN: {"seconds": plain, "tokens": len(text.output)}}
        for name in strategies:
            chain = model_free_chain([name], len(text.prompt) + len(text.output), costs)
            records = replay(chain, text.prompt, text.output)
            seconds = replayed_seconds(chain, text.prompt, records, costs)
            figures[name] = {"seconds": seconds, "tokens": len(text.output)}
        rows.append({"id": text.id, "category": text.category, "methods": figures})
    found = {"strategies": list(strategies), "costs": costs.to_dict(), "summary": summary(rows, strategies)}
    return {**about("simulated"), **found}


def replayed_seconds(chain: Chain, prompt: Any, records: Sequence[RoundRecord], costs: CostTable) -> float:
    """What the rounds of a replay would take at batch 1, prefill left out; `chain`: fresh before it, for its calls."""
    seconds, size = 0.0, len(prompt)
    for record in records:
        seconds += costs.seconds("target", 1, size - 1, 1 + record.drafted) + costs.round
        size += record.tokens
    calls = zip(chain.labels, chain.drafters, strict=True)
    return seconds + sum(chain.counters[label].n_call_draft * costs.call(d.name) for label, d in calls)


def about(kind: str) -> Row:
    return {"benchmark": "automatic draft length", "kind": kind, **origin(), "new_tokens": NEW_TOKENS}


def summary(rows: Sequence[Row], strategies: Sequence[str]) -> dict[str, Any]:
    """By category and over all: prompts, and every strategy's speed over plain's with its 95 % interval, from a paired
    bootstrap over the prompts."""
    groups = {c: [r for r in rows if r["category"] == c] for c in dict.fromkeys(r["category"] for r in rows)}
    made = {}
    for category, group in {**groups, "all": list(rows)}.items():
        plain = column(group, PLAIN)
        speeds = {name: ratio_of_ratios(column(group, name), plain).to_dict() for name in strategies}
        made[category] = {"prompts": len(group), "speedups": speeds}
    return made


def column(rows: Sequence[Row], method: str) -> tuple[list[float], list[float]]:
    figures = [r["methods"][method] for r in rows]
    return [f["tokens"] for f in figures], [f["seconds"] for f in figures]


def costs_of(path: Path | None) -> CostTable:
    if path is None:
        return nominal_costs(decoder_of().target)
    data = json.loads(path.read_text(encoding="utf-8"))
    return CostTable.from_dict(data.get("costs", data), str(path))


def main() -> None:
    """Measure or simulate, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "simulate"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--raw", type=Path, help="run: the file of single prompts; default: OUT.raw.jsonl")
    parser.add_argument("--strategies", default=",".join(MODEL_FREE), help="comma-separated; default: %(default)s")
    parser.add_argument("--prompts", type=int, help="a category; default: 3 to run, all to simulate")
    parser.add_argument("--category", help="run: only this one")
    parser.add_argument("--budget", type=float, default=1e9, help="run: seconds after which no new prompt is begun")
    parser.add_argument("--workers", type=int, default=1, help="run: processes that share the prompts")
    parser.add_argument("--threads", type=int, default=2, help="run: cores a process keeps to")
    parser.add_argument("--costs", type=Path, help="simulate: a measured table")
    arguments = parser.parse_args()
    arguments.raw = arguments.raw or arguments.out.with_suffix(".raw.jsonl")
    warnings.filterwarnings("ignore", message="ngram-mod")
    strategies = arguments.strategies.split(",")
    if arguments.what == "run":
        for result in run(arguments, strategies):
            write_json(arguments.out, result)
    else:
        write_json(arguments.out, simulate(strategies, costs_of(arguments.costs), arguments.prompts or 0))


if __name__ == "__main__":
    main()
