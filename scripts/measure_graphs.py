"""Measure passes eager, as graphs (with either attention, the one that is chosen, and fused projections) and compiled,
prefill by chunks, and generations eager against graphs, on a GPU.

    python scripts/measure_graphs.py --out results/graphs_h100.json        # stops after --seconds
    python scripts/measure_graphs.py --modes --out FILE                    # inductor against max alone, 3 minutes
    python scripts/measure_graphs.py --start-up --out FILE                 # first calls and compilations by size
    python scripts/measure_graphs.py --tiny --out FILE                     # the same steps with toys, also on a CPU

Models have Llama shapes and random weights: only time is measured on them. What is equal is checked on the embedded
pair. The time to read the weights once is their size over the bandwidth of a measured copy, reads and writes counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import specdec
from specdec.decoding.provenance import device_name
from specdec.files.compact_json import write_json
from specdec.models.attention import MATMUL, RAGGED
from specdec.models.runner import Runner, Shapes
from specdec.research.bench import origin
from specdec.research.bench.passes import bandwidth, pass_ms, timed
from specdec.research.models.choice import bytes_read


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model. kv_heads 0 = a quarter of the heads."""

    hidden: int
    layers: int
    mlp: int
    head: int
    kv_heads: int = 0
    vocab: int = 128_256

    def build(self, device: torch.device) -> Any:
        heads = self.hidden // self.head
        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            intermediate_size=self.mlp,
            head_dim=self.head,
            num_attention_heads=heads,
            num_key_value_heads=self.kv_heads or max(1, heads // 4),
            tie_word_embeddings=False,
            max_position_embeddings=8192,
        )
        config.dtype = torch.bfloat16
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


DRAFT = Shape(576, 30, 1536, 64, 3, 49_152)
LLAMA = {"135M": DRAFT, "1B": Shape(2048, 16, 8192, 64), "8B": Shape(4096, 32, 14336, 128)}
TINY = {"1B": Shape(64, 2, 128, 16, vocab=256)}
# By --modes: shapes of a draft, of the target that docs/speed.md has as 6.4B, and of what lies between.
SIZES = {"135M": DRAFT, "1B": replace(LLAMA["1B"], vocab=49_152), "6.4B": Shape(4032, 32, 12288, 64, 21, 49_152)}
DRAFTS = ("135M",)  # looked at compiled only
WIDTHS, LENGTHS, BATCHES = (1, 8, 16), (512, 4096), (1, 8)
CHUNKS = (256, 512, 1024, 2048)
REPEATS = 3
# Compiled with fused projections: (mode, width, K/V length, batch), and how often layers are compiled is once a shape.
COMPILED = {
    "135M": (("inductor", 1, 512, 1), ("max", 1, 512, 1), ("max", 2, 512, 1)),
    "1B": (("inductor", 1, 512, 1), ("inductor", 8, 512, 1), ("max", 1, 512, 1)),
    "8B": (("inductor", 8, 512, 1), ("inductor", 8, 4096, 1), ("inductor", 8, 512, 8)),
}
MODES = ("inductor", "max")
PROMPTS = ["def read(self, path):\n    with open(path) as f:\n", "for i in range(10):\n    print(i)\n" * 12]
CALLS: dict[str, dict[str, Any]] = {
    "plain": {"strategies": []},
    "draft-model": {"strategies": ["draft-model"]},
    "draft-model, sampled under match": {"strategies": ["draft-model"], "temperature": 0.8, "acceptance": "match"},
}
# Of --start-up; None: the draft with automatic length, which random weights soon leave out.
STRATEGIES: dict[str, Any] = {"draft": None, "draft of 5": ["draft-model:n_max=5"], "plain": []}
START = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=270.0, help="no new part is begun after this time")
    parser.add_argument("--no-compiled", action="store_true")
    parser.add_argument("--modes", action="store_true", help="nothing but inductor against max, widths 1 to 8")
    parser.add_argument("--start-up", action="store_true", help="nothing but first calls with a cold and a warm cache")
    parser.add_argument("--size", choices=[*SIZES], help="--start-up in this process, of one size")
    parser.add_argument("--calls", type=int, default=200, help="--start-up: calls of varied lengths after the first")
    args = parser.parse_args()
    if args.start_up:
        return start_ups(args) if args.size is None else write_json(args.out, start_up(args))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens, copy = 4 if args.tiny else 32, bandwidth(device, 1 << (20 if args.tiny else 30))
    settings = {"dtype": "bfloat16", "tiny": args.tiny, "repeats": REPEATS, "new_tokens": tokens}
    result = {**origin(), "device": device_name(device), "settings": settings, "copy_bandwidth": copy}
    result |= {"generation": {}, "passes": {}}

    def left() -> float:
        return args.seconds - (time.perf_counter() - START)

    for size, shape in (TINY if args.tiny else SIZES if args.modes else LLAMA).items():
        model = shape.build(device)
        if args.modes:
            entry = modes(model, left)
        else:
            read = bytes_read(model)
            entry = {"bytes_read": read, "read_once_ms": read / copy * 1e3, "table": {}}
            if size not in DRAFTS:
                entry |= passes(model, device, left)
            if not args.no_compiled:
                entry["compiled"] = compiled(model, COMPILED[size], left)
        result["passes"][size] = entry
        print(size, f"{time.perf_counter() - START:.0f} s", entry, flush=True)
        write_json(args.out, result)
        del model
    if not args.modes:
        result["generation"] = generations(device, tokens)
    write_json(args.out, {**result, "seconds": time.perf_counter() - START})


def passes(model: Any, device: torch.device, left: Any) -> dict[str, Any]:
    """Every width, length and batch: eager, as graphs with either attention and with that of the rule, and fused."""
    table: dict[str, Any] = {}
    graphs = "graph" if device.type == "cuda" else "off"
    runners = {
        "off": Runner(model, None, "off"),
        "graph": Runner(model, None, graphs),
        "kernel": Runner(model, RAGGED, graphs),
        "products": Runner(model, MATMUL, graphs),
        "fused": Runner(model, None, graphs, fuse=True),
    }
    shapes = Shapes.choose(device, False, LENGTHS[-1])
    for (batch, length, width), mode in itertools.product(itertools.product(BATCHES, LENGTHS, WIDTHS), runners):
        if left() > 0:
            entry = table.setdefault(f"width {width}, {length} slots, batch {batch}", {})
            entry[mode] = pass_ms(runners[mode], shapes, batch, width, length, LENGTHS[-1])
    made, fusion = runners["graph"].recorded, runners["fused"].fusion
    found = {"table": table, "cut": left() < 0, "capture": {"graphs": made[0], "seconds": made[1]}}
    return {**found, "fused": len(fusion or ()), "prefill": prefills(Runner(model, None, graphs), left)}


def prefills(runner: Runner, left: Any) -> dict[str, Any]:
    """A prompt of 2048 tokens in chunks of several widths."""
    table: dict[str, Any] = {}
    total, cache = min(2048, LENGTHS[-1]), runner.lease(1, LENGTHS[-1])
    ids = [i % runner.vocab_size for i in range(total)]
    for width in CHUNKS:
        if left() < 0:
            break
        shapes = replace(Shapes.choose(runner.device, False, LENGTHS[-1]), widths=(width,))
        table[f"{total} tokens in chunks of {width}"] = timed(
            lambda shapes=shapes: runner.prefill(cache, shapes, {0: ids}, {0: 0}), runner.device
        )
    return table


def compiled(model: Any, wanted: Iterable[tuple[str, int, int, int]], left: Any) -> dict[str, Any]:
    """The shapes that time is left for, through torch.compile inside the graph, with fused projections."""
    table: dict[str, Any] = {}
    for mode, width, length, batch in wanted:
        if left() < 20:
            table["cut"] = True
            break
        runner = Runner(model, None, mode if torch.cuda.is_available() else "off", fuse=True)
        shapes = Shapes.choose(runner.device, False, LENGTHS[-1])
        entry = pass_ms(runner, shapes, batch, width, length, LENGTHS[-1])
        name = f"{mode}, width {width}, {length} slots, batch {batch}"
        table[name] = {**entry, "made_in_s": runner.recorded[1], "failures": runner.failures}
    return table


def modes(model: Any, left: Any) -> dict[str, Any]:
    """Passes of one token and of eight under either mode: milliseconds, and max over inductor."""
    table: dict[str, Any] = {}
    for width in (1, 2, 4, 8):
        found = compiled(model, [(mode, width, 512, 1) for mode in MODES], left)
        table |= found
        if "cut" not in found:
            inductor, most = (entry["median"] for entry in found.values())
            table[f"max : inductor, width {width}"] = most / inductor
    return table


def start_ups(args: argparse.Namespace) -> None:
    """Every size in processes of its own: with an empty compile cache, and with what the first one left there."""
    result: dict[str, Any] = {**origin(), "device": "", "calls": args.calls, "tiny": args.tiny, "start_up": {}}
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            entry = result["start_up"][size] = {}
            for cache, calls in (("cold", args.calls), ("warm", 0)):
                out = Path(folder) / f"{cache}.json"
                command = [sys.executable, __file__, "--start-up", "--size", size, "--calls", str(calls)]
                command += ["--out", str(out), *["--tiny"] * args.tiny]
                kept = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
                subprocess.run(command, env={**os.environ, **kept}, check=True)
                entry[cache] = json.loads(out.read_text(encoding="utf-8"))
                result["device"] = entry[cache].pop("device")
                print(size, cache, entry[cache], flush=True)
                write_json(args.out, result)


def start_up(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds until a first call is done, plainly and with a draft, and what later calls of other lengths compile."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = replace(TINY["1B"], vocab=256)
    target, draft = ((small if args.tiny else shape).build(device) for shape in (SIZES[args.size], DRAFT))
    found: dict[str, Any] = {"device": device_name(device)}
    begun = time.perf_counter()
    dec = specdec.SpeculativeDecoder(target, draft)
    found["decoder_s"] = time.perf_counter() - begun
    longest = 24 if args.tiny else 1500
    lengths = [8 + (i * 7919) % (longest - 8) for i in range(args.calls)]  # in no order
    calls = [("plain", 100), ("draft", 100), *zip(itertools.cycle(STRATEGIES), lengths)]
    later: list[dict[str, Any]] = []
    for i, (name, length) in enumerate(calls):
        before, begun = compilations(), time.perf_counter()
        out = dec.generate(
            [[(i * 31 + j * 17) % 256 for j in range(min(length, longest))]],
            8 if args.tiny else 24 + i % 9,
            strategies=STRATEGIES[name],
            ignore_eos=True,
        )
        made = {"seconds": time.perf_counter() - begun, "compiled": compilations() - before, "tokens": length}
        if i < 2:
            found[name] = {**made, "compile": out.provenance["compile"], "phases": phases()}
        elif made["compiled"]:
            later.append({"call": i - 1, "kind": name, **made})
    compiled = sum(entry["compiled"] for entry in later)
    return {**found, "later_calls": len(lengths), "compiled_later": compiled, "which_compiled": later}


def phases() -> dict[str, float]:
    """Seconds of the compiler's phases so far, from a tenth on; phases contain one another."""
    spent = {name: sum(times) for name, times in torch._dynamo.utils.compilation_time_metrics.items()}
    return {name: round(seconds, 2) for name, seconds in spent.items() if seconds >= 0.1}


def compilations() -> int:
    """Graphs that dynamo has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def generations(device: torch.device, tokens: int) -> dict[str, Any]:
    """The embedded pair, eager and by graphs: are the ids the same, and what does a call take."""
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        loading = {"device": str(device), "dtype": dtype, "draft_dtype": dtype}
        decoders = {
            name: specdec.SpeculativeDecoder.from_pretrained("demo-target", "demo-draft", compile=mode, **loading)
            for name, mode in (("eager", "off"), ("graph", "graph" if device.type == "cuda" else "off"))
        }
        plain: list[list[int]] = []
        for name, call in CALLS.items():
            options = {"max_new_tokens": tokens, "ignore_eos": True, "batch_size": 1, "seed": 5, **call}
            outs = {
                mode: [dec.generate(PROMPTS, **options) for _ in range(1 + REPEATS)] for mode, dec in decoders.items()
            }
            entry: dict[str, Any] = {mode: _calls(runs, tokens) for mode, runs in outs.items()}
            ids = outs["graph"][0].token_ids
            plain = plain or ids
            entry["graph_equals_eager"] = outs["eager"][0].token_ids == ids
            if name == "draft-model":
                entry["equals_plain"] = ids == plain
            found[f"{dtype}, {name}"] = entry
            print(dtype, name, entry, flush=True)
    return found


def _calls(outs: list[Any], tokens: int) -> dict[str, Any]:
    """What equal calls took, the first of which records."""
    first, *others = outs
    median = statistics.median(out.stats.times.total for out in others)
    return {
        "ms_a_token": median / (tokens * len(PROMPTS)) * 1e3,
        "ms_a_round": median / first.stats.verify_passes * 1e3,
        "first_call": first.provenance["compile"],
        "captured_again": sum(out.provenance["compile"]["target"]["captured"] for out in others),
        "stable": all(out.token_ids == first.token_ids for out in others),
        "exact": first.provenance["exact"],
    }


if __name__ == "__main__":
    main()
