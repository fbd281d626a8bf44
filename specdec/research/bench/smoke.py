"""`specdec bench --smoke`: plain and speculative decoding against transformers' `generate`, in minutes.

Two suites: SmolLM2-135M in float32 with prompt-lookup on prompts that quote their input (Spec-Bench's summarisation
and RAG), and the embedded pair with the demo's chain on held-out text. All three methods run greedily, warm, in one
process and in turns, prompt by prompt; the order of the methods rotates. Seconds are wall-clock time around the whole
call, prefill included. A ratio is taken within each repeat over all its prompts; reported are the median and the range
over the repeats. Token ids are compared, never assumed equal.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specdec import theory
from specdec.config import PairConfig, RunConfig
from specdec.decoding.prompts import encode_prompts
from specdec.decoding.provenance import hash_ids, hash_template
from specdec.demo_models import target_path
from specdec.errors import SpecdecError
from specdec.research.bench.document import origin
from specdec.research.bench.pair import SMOLLM2, locate
from specdec.research.demo import DEMO, load_decoder
from specdec.research.prompts.datasets import Prompt, load_prompts

METHODS = ("transformers", "plain", "speculative")
RATIOS = {
    "speculative_to_plain": ("speculative", "plain"),
    "plain_to_transformers": ("plain", "transformers"),
    "speculative_to_transformers": ("speculative", "transformers"),
}
WARM_UP_TOKENS = 8
HELD_OUT_TOKENS = 64  # of a held-out excerpt; the rest is for the model to write
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Suite:
    """One model or pair on a set of prompts. `chat`: prompts go through the chat template."""

    name: str
    pair: PairConfig
    strategies: tuple[Any, ...]
    prompts: tuple[Prompt, ...]
    max_new_tokens: int
    repeats: int
    chat: bool = False

    @property
    def steps(self) -> int:
        return len(METHODS) * len(self.prompts) * self.repeats

    def settings(self) -> dict[str, Any]:
        """What the suite ran, without the prompts' texts and without this machine's paths."""
        pair = {**asdict(self.pair), "target": Path(self.pair.target).name}
        prompts = [p.id for p in self.prompts]
        return {**asdict(replace(self, prompts=())), "pair": pair, "prompts": prompts}


def smollm2_suite(quick: bool = False) -> Suite:
    """SmolLM2-135M with prompt-lookup. Raises SpecdecError where the model cannot be had."""
    folder = locate(SMOLLM2)
    prompts: list[Prompt] = []
    for category, count in (("summarization", 4), ("rag", 2)):
        # The shortest ones: on a CPU the prefill of a long document would hide what is measured.
        shortest = sorted(load_prompts("spec-bench", categories=category), key=lambda p: len(p.text))
        prompts += shortest[: 1 if quick else count]
    return Suite(
        "smollm2-135m", PairConfig(folder, dtype="float32"), ("prompt-lookup:ngram_min=2",), tuple(prompts),
        max_new_tokens=32 if quick else 64, repeats=1 if quick else 3, chat=True,
    )  # fmt: skip


def embedded_suite(quick: bool = False) -> Suite:
    """The embedded pair with the demo's chain, on text that it was not trained on."""
    prompts = held_out_prompts()
    return Suite(
        "embedded-pair", replace(DEMO.pair, dtype="float32", draft_dtype="float32"), tuple(DEMO.strategies or ()),
        tuple(prompts[: 2 if quick else 4]), max_new_tokens=24 if quick else 80, repeats=2 if quick else 3,
    )  # fmt: skip


def held_out_prompts() -> list[Prompt]:
    """The beginnings of the excerpts on which the models' own card reports agreement."""
    from transformers import AutoTokenizer

    metrics = json.loads((target_path().parent / "metrics.json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    prompts = []
    for entry in metrics["check"]:
        ids = tokenizer(entry["text"], add_special_tokens=False)["input_ids"]
        if len(ids) >= HELD_OUT_TOKENS:
            text = tokenizer.decode(ids[:HELD_OUT_TOKENS])
            prompts.append(Prompt(f"held-out/{entry['path']}", "held-out code", text, (text,)))
    return prompts


SUITES: dict[str, Callable[[bool], Suite]] = {"smollm2-135m": smollm2_suite, "embedded-pair": embedded_suite}


def run_smoke(
    quick: bool = False, suites: Iterable[str] = tuple(SUITES), progress: Progress = lambda what: None
) -> dict[str, Any]:
    """Run the suites; a suite whose model cannot be had is skipped, with the reason in its place.

    `progress` is told what is about to run. Raises SpecdecError for an unknown suite.
    """
    names = list(suites)
    for name in names:
        if name not in SUITES:
            raise SpecdecError(f"unknown suite {name!r}; known: {', '.join(SUITES)}")
    results: dict[str, Any] = {}
    for name in names:
        progress(f"loading {name}")
        try:
            suite = SUITES[name](quick)
        except SpecdecError as error:
            results[name] = {"skipped": str(error)}
            continue
        results[name] = measure(suite, progress)
    return {
        "benchmark": "smoke",
        "quick": quick,
        **origin(),
        "suites": results,
    }


def measure(suite: Suite, progress: Progress = lambda what: None) -> dict[str, Any]:
    """Run every prompt with every method, in turns."""
    decoder = load_decoder(RunConfig(suite.pair, suite.strategies))
    target = decoder.target
    texts: list[Any] = [[{"role": "user", "content": p.text}] if suite.chat else p.text for p in suite.prompts]
    rows = encode_prompts(texts, decoder.tokenizer, target.vocab_size, target.context)
    for method in METHODS:
        _timed(decoder, method, rows[0], WARM_UP_TOKENS)
    runs: list[dict[str, Any]] = []
    for repeat in range(suite.repeats):
        for i, (prompt, ids) in enumerate(zip(suite.prompts, rows, strict=True)):
            turn = (repeat + i) % len(METHODS)
            outputs = {}
            for method in METHODS[turn:] + METHODS[:turn]:
                progress(f"{suite.name}: {prompt.id}, {method}, repeat {repeat + 1} of {suite.repeats}")
                outputs[method], figures = _timed(decoder, method, ids, suite.max_new_tokens)
                place = {"repeat": repeat, "prompt": prompt.id, "category": prompt.category, "method": method}
                runs.append({**place, "prompt_tokens": len(ids), **figures})
            for run in runs[-len(METHODS) :]:
                run["equals_plain"] = outputs[run["method"]] == outputs["plain"]
    asked = {
        "prompt_hashes": [hash_ids(ids) for ids in rows],
        "chat_template": hash_template(decoder.tokenizer) if suite.chat else None,
    }
    return {"settings": suite.settings(), **asked, "summary": summarise(runs), "runs": runs}


def _timed(decoder: Any, method: str, ids: Sequence[int], n: int) -> tuple[list[int], dict[str, Any]]:
    """Token ids and figures of one run."""
    started = time.perf_counter()
    if method == "transformers":
        tokens, figures = _transformers(decoder.target.model, ids, n), {}
        seconds = time.perf_counter() - started
    else:
        strategies = [] if method == "plain" else decoder.strategies
        out = decoder.generate([list(ids)], max_new_tokens=n, strategies=strategies)
        seconds = time.perf_counter() - started
        if "interrupted" in out.finish_reasons:
            raise KeyboardInterrupt
        tokens, figures = out.token_ids[0], _figures(out.stats)
    return tokens, {"tokens": len(tokens), "seconds": seconds, **figures}


def _transformers(model: Any, ids: Sequence[int], n: int) -> list[int]:
    prompt = torch.tensor([list(ids)], device=model.device)
    with torch.no_grad():
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=n)
    return list(out[0, len(ids) :].tolist())


def _figures(stats: Any) -> dict[str, Any]:
    """Counts and seconds that can be summed over runs."""
    total, records = stats.total, [r for row in stats.rows for r in row]
    counts = ("rounds", "drafted_rounds", "draft_tokens", "accepted_tokens", "generated_tokens")
    return {
        **{name: getattr(total, name) for name in counts},
        "tested_tokens": sum(min(r.accepted + 1, r.drafted) for r in records),
        "time": stats.times.to_dict(),
    }


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures by category and in total."""
    categories = list(dict.fromkeys(run["category"] for run in runs))
    groups = {c: [run for run in runs if run["category"] == c] for c in categories}
    return {name: _summary(group) for name, group in (*groups.items(), ("total", list(runs)))}


def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    speeds = {method: _speeds([r for r in runs if r["method"] == method]) for method in METHODS}
    ratios = {name: [a / b for a, b in zip(speeds[x], speeds[y], strict=True)] for name, (x, y) in RATIOS.items()}
    plain, drafted = _pooled(runs, "plain"), _pooled(runs, "speculative")
    return {
        "tokens_per_second": {method: spread(values) for method, values in speeds.items()},
        "ratios": {name: spread(values) for name, values in ratios.items()},
        "equal_token_ids": {
            method: all(r["equals_plain"] for r in runs if r["method"] == method) for method in METHODS
        },
        "tokens_per_round": drafted["generated_tokens"] / drafted["rounds"],
        "acceptance_length": 1 + drafted["accepted_tokens"] / max(1, drafted["drafted_rounds"]),
        "ms_per_round": {"plain": _milliseconds(plain), "speculative": _milliseconds(drafted)},
        "advice": advice(plain, drafted),
    }


def _speeds(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Tokens per second of all prompts together, one figure a repeat."""
    repeats = sorted({r["repeat"] for r in runs})
    groups = [[r for r in runs if r["repeat"] == repeat] for repeat in repeats]
    return [sum(r["tokens"] for r in group) / sum(r["seconds"] for r in group) for group in groups]


def _pooled(runs: Sequence[dict[str, Any]], method: str) -> dict[str, float]:
    mine = [r for r in runs if r["method"] == method]
    counts = [name for name, value in mine[0].items() if name.endswith(("rounds", "_tokens")) and value is not None]
    pooled = {name: float(sum(r[name] for r in mine)) for name in counts}
    return pooled | {f"t_{name}": sum(r["time"][name] for r in mine) for name in mine[0]["time"]}


def _milliseconds(pooled: dict[str, float]) -> dict[str, float]:
    """Mean milliseconds of a round by part; the prefill is no part of a round."""
    return {name: 1e3 * pooled[f"t_{name}"] / pooled["rounds"] for name in ("draft", "verify", "other")}


def advice(plain: dict[str, float], drafted: dict[str, float], k_max: int = 16) -> dict[str, float | int]:
    """What theory makes of the measurement: acceptance a, costs c and v, and the best draft length; 0 = do not draft.

    The cost of a wide pass is taken to grow with the draft's length, from the mean length that was measured. Chains
    are treated as one drafter.
    """
    per_pass = plain["t_verify"] / plain["rounds"]
    tested, length = drafted["tested_tokens"], drafted["draft_tokens"] / max(1.0, drafted["rounds"])
    a = drafted["accepted_tokens"] / tested if tested else 0.0
    c = drafted["t_draft"] / max(1.0, drafted["draft_tokens"]) / per_pass
    v = max(0.0, drafted["t_verify"] / drafted["rounds"] / per_pass - 1)
    best = theory.best_k(a, c, lambda k: v * k / max(length, 1e-9), k_max) if length else 0
    return {"acceptance": a, "draft_cost": c, "width_cost": v, "mean_draft_length": length, "best_draft_length": best}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def equal(result: dict[str, Any]) -> bool:
    """Whether every method gave plain decoding's token ids in every suite that ran."""
    suites = [s for s in result["suites"].values() if "skipped" not in s]
    return all(same for s in suites for same in s["summary"]["total"]["equal_token_ids"].values())
