"""Measure what text processors cost: one at a time on every prefix, and on the whole pass at once.

    python scripts/measure_processors.py --out results/processors_cpu.json

Times `apply_processors` on a pass of 8 rows x 8 columns against the loop that calls the same objects of transformers
once a position with batch 1. Milliseconds, median over the repeats, on random scores and texts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.decoding.provenance import device_name
from specdec.files.compact_json import write_json
from specdec.research.bench import origin
from specdec.sampling.prefixes import History
from specdec.sampling.processors import Texts, apply_processors
from specdec.sampling.sampling import build_sampling
from specdec.sampling.texts import KnownTexts

ROWS, COLUMNS, VOCAB = 8, 8, 49_152
CASES: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence + frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    "no_repeat_ngram_size=3": {"no_repeat_ngram_size": 3},
    "bad_words_ids (1 to 3 ids)": {"bad_words_ids": [[5], [6, 7], [8, 9, 10]]},
    "sequence_bias (1 and 2 ids)": {"sequence_bias": [[[5], -1.0], [[6, 7], 2.0]]},
    "suppress_tokens": {"suppress_tokens": [1, 2, 3]},
    "min_new_tokens": {"min_new_tokens": 1_000_000},
    "exponential_decay": {"exponential_decay_length_penalty": (1, 1.001)},
}


def one_by_one(scores: torch.Tensor, history: History) -> torch.Tensor:
    """Every processor at every position, with batch 1."""
    out = scores.clone()
    for b, processors in enumerate(history.processors):
        for s in range(scores.shape[1]):
            prefix, row = history.prefix(b, s)[None], scores[b, s][None].clone()
            for processor in processors or ():
                row = processor(prefix, row)
            out[b, s] = row[0]
    return out


def random_pass(model: Any, fields: dict[str, Any], known: int, device: torch.device) -> History:
    """8 rows of `known` ids, half of them the prompt, and a chain of 8 fed tokens each."""
    sampling = build_sampling(model, fields, 0.0, [0], [], None, device)
    assert sampling.row_processors is not None
    generator = torch.Generator().manual_seed(known)
    ids = torch.randint(0, VOCAB, (ROWS, known + COLUMNS), generator=generator)
    rows = [sampling.row_processors(b, ids[b, : known // 2].tolist(), 1 << 20) for b in range(ROWS)]
    ids = ids.to(device)
    return History([row[:known] for row in ids], ids[:, known:], rows, [COLUMNS] * ROWS)


def milliseconds(function: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median time of a call, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def measure(device: torch.device, known: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """One entry a case and length of text."""
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **small))
    scores = torch.randn(ROWS, COLUMNS, VOCAB, generator=torch.Generator().manual_seed(0)).to(device)
    entries = []
    for n in known:
        for name, fields in CASES.items():
            history = random_pass(model, fields, n, device)
            before = milliseconds(lambda h=history: one_by_one(scores, h), repeats, device)
            texts = KnownTexts.of(history, scores)

            def at_once(texts: Texts = texts) -> torch.Tensor:
                return apply_processors(scores.clone(), replace(texts, prefixes=replace(texts.prefixes)))

            after = milliseconds(at_once, repeats, device)
            same = torch.equal(one_by_one(scores, history), at_once())
            entries.append({"processor": name, "known": n, "per_prefix_ms": before, "pass_ms": after, "equal": same})
            print(f"{name:30} {n:6} {before:9.2f} {after:9.2f}  {'equal' if same else 'DIFFERENT'}")
    return entries


def main() -> None:
    """Print the table and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--known", type=int, nargs="+", default=[128, 4096])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    with torch.no_grad():
        entries = measure(device, options.known, options.repeats)
    shape = {"rows": ROWS, "columns": COLUMNS, "vocabulary": VOCAB}
    about = {"device": device_name(device), "threads": options.threads, "repeats": options.repeats}
    result = {"benchmark": "processors", **origin(), "shape": shape, **about, "entries": entries}
    if options.out is not None:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
