"""Measure passes eager, as graphs (with either attention, the one that is chosen, and fused projections) and compiled,
prefill by chunks, and generations eager against graphs, on a GPU.

    python scripts/measure_graphs.py --out results/graphs_h100.json        # stops after --seconds
    python scripts/measure_graphs.py --modes --out FILE                    # inductor against max alone, 2 minutes
    python scripts/measure_graphs.py --tiny --out FILE                     # the same steps with toys, also on a CPU

Models have Llama shapes and random weights: only time is measured on them. What is equal is checked on the embedded
pair. The time to read the weights once is their size over the bandwidth of a measured copy, reads and writes counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import replace
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

LLAMA = {
    "135M": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "head_dim": 64,
        "num_key_value_heads": 3,
    },
    "1B": {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "head_dim": 64},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "head_dim": 128},
}
TINY = {"1B": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "head_dim": 16}}
VOCAB = {"135M": 49152, "1B": 128256, "8B": 128256}
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
# By --modes: shapes of a draft, of the target that docs/speed.md has as 6.4B, and of what lies between.
SIZES = {
    "135M": LLAMA["135M"],
    "1B": LLAMA["1B"],
    "6.4B": {
        "hidden_size": 4032, "num_hidden_layers": 32, "intermediate_size": 12288, "head_dim": 64,
        "num_attention_heads": 63, "num_key_value_heads": 21,
    },
}  # fmt: skip
MODES = ("inductor", "max")
PROMPTS = [
    "def read(self, path):\n    with open(path) as f:\n",
    "for i in range(10):\n    print(i)\n" * 12,
]
CALLS: dict[str, dict[str, Any]] = {
    "plain": {"strategies": []},
    "draft-model": {"strategies": ["draft-model"]},
    "draft-model, sampled under match": {"strategies": ["draft-model"], "temperature": 0.8, "acceptance": "match"},
}
START = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=270.0, help="no new part is begun after this time")
    parser.add_argument("--no-compiled", action="store_true")
    parser.add_argument("--modes", action="store_true", help="nothing but inductor against max, widths 1 and 8")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {
        **origin(),
        "device": device_name(device),
        "settings": {"dtype": "bfloat16", "tiny": args.tiny, "repeats": REPEATS, "new_tokens": 4 if args.tiny else 32},
        "copy_bandwidth": bandwidth(device, 1 << (20 if args.tiny else 30)),
        "generation": {}, "passes": {},
    }  # fmt: skip
    shapes = TINY if args.tiny else SIZES if args.modes else LLAMA

    def left() -> float:
        return args.seconds - (time.perf_counter() - START)

    def save() -> None:
        write_json(args.out, result)

    for size, shape in shapes.items():
        if args.modes:
            result["passes"][size] = modes(shape, device, left)
            save()
            continue
        model = build(shape, VOCAB[size] if not args.tiny else 256, device)
        size_read = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
        entry = {"bytes_read": size_read, "read_once_ms": size_read / result["copy_bandwidth"] * 1e3}
        result["passes"][size] = {**entry, **({"table": {}} if size in DRAFTS else passes(model, device, left))}
        save()
        print(size, f"{time.perf_counter() - START:.0f} s", flush=True)
        if not args.no_compiled:
            result["passes"][size]["compiled"] = compiled(model, COMPILED[size], left)
            save()
        del model
    result["seconds"] = time.perf_counter() - START
    if args.modes:
        save()
        return
    result["generation"] = generations(device, result["settings"]["new_tokens"])
    result["seconds"] = time.perf_counter() - START
    save()
    summary(result)


def build(shape: dict[str, int], vocab: int, device: torch.device) -> Any:
    heads = shape["hidden_size"] // shape["head_dim"]
    kv = {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4)}
    config = LlamaConfig(vocab_size=vocab, **{**kv, **shape}, tie_word_embeddings=False, max_position_embeddings=8192)
    config.dtype = torch.bfloat16
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def passes(model: Any, device: torch.device, left: Any) -> dict[str, Any]:
    """Every width, length and batch: eager, as graphs with either attention and with that of the rule, and fused."""
    table: dict[str, Any] = {}
    graphs = "graph" if device.type == "cuda" else "off"
    runners = {
        "off": Runner(model, None, "off"), "graph": Runner(model, None, graphs),
        "kernel": Runner(model, RAGGED, graphs), "products": Runner(model, MATMUL, graphs),
        "fused": Runner(model, None, graphs, fuse=True),
    }  # fmt: skip
    whole = _fill(table, runners, device, left)
    made, fusion = runners["graph"].recorded, runners["fused"].fusion
    return {
        "table": table, "cut": not whole, "capture": {"graphs": made[0], "seconds": made[1]},
        "fused": len(fusion or ()), "prefill": prefills(Runner(model, None, graphs), left),
    }  # fmt: skip


def _fill(table: dict[str, Any], runners: dict[str, Runner], device: torch.device, left: Any) -> bool:
    """Time every shape with every runner; whether the time was enough."""
    shapes = Shapes.choose(device, False, LENGTHS[-1])
    for batch in BATCHES:
        for length in LENGTHS:
            for width in WIDTHS:
                entry = table.setdefault(f"width {width}, {length} slots, batch {batch}", {})
                for mode, runner in runners.items():
                    if left() < 0:
                        return False
                    entry[mode] = pass_ms(runner, shapes, batch, width, length, LENGTHS[-1])
    return True


def prefills(runner: Runner, left: Any) -> dict[str, Any]:
    """A prompt of 2048 tokens in chunks of several widths."""
    table: dict[str, Any] = {}
    total = min(2048, LENGTHS[-1])
    cache = runner.lease(1, LENGTHS[-1])
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
        print(name, table[name], flush=True)
    return table


def modes(shape: dict[str, int], device: torch.device, left: Any) -> dict[str, Any]:
    """Passes of one token and of eight under either mode: milliseconds, and max over inductor."""
    model = build(shape, VOCAB["135M"], device)
    table: dict[str, Any] = {}
    for width in (1, 8):
        found = compiled(model, [(mode, width, 512, 1) for mode in MODES], left)
        table |= found
        if "cut" not in found:
            inductor, most = (entry["median"] for entry in found.values())
            table[f"max : inductor, width {width}"] = most / inductor
            print(f"width {width}, max : inductor = {most / inductor:.3f}", flush=True)
    return table


def generations(device: torch.device, tokens: int) -> dict[str, Any]:
    """The embedded pair, eager and by graphs: are the ids the same, and what does a call take."""
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        decoders = {
            mode: specdec.SpeculativeDecoder.from_pretrained(
                "demo-target", "demo-draft", device=str(device), dtype=dtype, draft_dtype=dtype, compile=mode
            )
            for mode in ("off", "auto")
        }
        texts: dict[str, list[list[int]]] = {}
        for name, call in CALLS.items():
            entry: dict[str, Any] = {}
            ids = {}
            for mode, dec in decoders.items():
                options = {"max_new_tokens": tokens, "ignore_eos": True, "batch_size": 1, "seed": 5, **call}
                first = dec.generate(PROMPTS, **options)
                outs = [dec.generate(PROMPTS, **options) for _ in range(REPEATS)]
                median = sorted(out.stats.times.total for out in outs)[REPEATS // 2]
                ids[mode] = first.token_ids
                again = [out.provenance["compile"]["target"]["captured"] for out in outs]
                rounds = first.stats.verify_passes
                entry["eager" if mode == "off" else "graph"] = {
                    "ms_a_token": median / (tokens * len(PROMPTS)) * 1e3, "ms_a_round": median / rounds * 1e3,
                    "first_call": first.provenance["compile"], "captured_again": sum(again),
                    "stable": all(out.token_ids == first.token_ids for out in outs),
                    "exact": first.provenance["exact"],
                }  # fmt: skip
            entry["graph_equals_eager"] = ids["off"] == ids["auto"]
            texts.setdefault("sampled" if "temperature" in call else "greedy", ids["auto"])
            if name == "draft-model":
                entry["equals_plain"] = ids["auto"] == texts["greedy"]
            found[f"{dtype}, {name}"] = entry
    return found


def summary(result: dict[str, Any]) -> None:
    for name, entry in result["generation"].items():
        print(name, {m: round(entry[m]["ms_a_token"], 3) for m in ("eager", "graph")}, entry["graph_equals_eager"],
              entry.get("equals_plain"), entry["graph"]["stable"], entry["graph"]["captured_again"],
              entry["graph"]["first_call"]["target"])  # fmt: skip
    print(f"copy {result['copy_bandwidth'] / 1e12:.3f} TB/s")
    for size, entry in result["passes"].items():
        print(size, f"read once {entry['read_once_ms']:.2f} ms", entry.get("capture"), entry.get("cut"))
        for name, row in entry.get("table", {}).items():
            print("  ", name, {m: round(t["median"], 3) for m, t in row.items()})
        print("   prefill", {name: round(t["median"], 1) for name, t in entry.get("prefill", {}).items()})
        for name, row in entry.get("compiled", {}).items():
            print("  ", name, row)


if __name__ == "__main__":
    main()
